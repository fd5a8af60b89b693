//! A listener with exports in memory, so that negotiation and the client can be tried without
//! pools and rings.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockd_nbd::client::{ServerAddress, Uri};
use blockd_nbd::codec::reply;
use blockd_nbd::codec::request::{Asked, Command, Header, Parsed, check, parse};
use blockd_nbd::codec::{errno, state};
use blockd_nbd::{ExportError, ExportInfo};
use blockd_serve::nbd::handshake::Tls;
use blockd_serve::nbd::listener::{Address, Limits, Listener, ListenerOptions, bind};
use blockd_serve::nbd::{Exports, Opened, Peer, Session, Sessions};
use blockd_testkit::folder::Folder;
use tokio::runtime::Runtime;

/// Bytes of the export.
pub(crate) const SIZE: u64 = 64 << 20;

/// The unit of allocation.
const UNIT: usize = 4096;

/// A client that hangs fails after this time: more than a busy disk takes for the writes before.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// A volume in memory. A unit that was never written is a hole.
#[derive(Debug)]
pub(crate) struct Memory {
    bytes: Mutex<(Vec<u8>, Vec<bool>)>,
}

/// The exports: `default/web`, also called `web` and nothing; `default/frozen`, read-only; and
/// `default/busy`, which is refused.
#[derive(Debug)]
pub(crate) struct Shelf {
    memory: Arc<Memory>,
}

fn info(name: &str) -> ExportInfo {
    ExportInfo {
        name: name.to_owned(),
        description: "64 MiB".to_owned(),
        size: SIZE,
        block_size: 512,
        preferred_size: 4096,
        read_only: name == "default/frozen",
        multi_conn: true,
    }
}

impl Exports for Shelf {
    type Volume = Arc<Memory>;

    async fn list(&self) -> Vec<ExportInfo> {
        ["default/web", "default/frozen"].map(info).to_vec()
    }

    async fn open(&self, name: &str) -> Result<Opened<Arc<Memory>>, ExportError> {
        let own = match name {
            "" | "web" | "default/web" => "default/web",
            "default/frozen" => "default/frozen",
            "default/busy" => return Err(ExportError::Refused("it is being deleted".to_owned())),
            _ => return Err(ExportError::Unknown),
        };
        Ok(Opened { info: info(own), volume: Arc::clone(&self.memory) })
    }
}

/// A thread for each connection.
#[derive(Debug, Default)]
pub(crate) struct Threads {
    pub(crate) ended: Arc<AtomicU64>,
}

impl Sessions<Arc<Memory>> for Threads {
    fn connect(&self, stream: OwnedFd, session: Session<Arc<Memory>>) {
        let ended = Arc::clone(&self.ended);
        std::thread::spawn(move || {
            // It ends when the client does.
            let _ = serve(File::from(stream), &session);
            drop(session);
            ended.fetch_add(1, Ordering::Release);
        });
    }

    async fn displace_idle(&self, _: u64, _: Peer, _: usize, _: Duration) -> bool {
        false
    }
}

fn serve(mut stream: File, session: &Session<Arc<Memory>>) -> std::io::Result<()> {
    let agreed = &session.negotiated;
    let mut header = Vec::new();
    let mut out = [0; 128];
    loop {
        let header = match parse(&header, agreed.extended) {
            Parsed::Need(count) => {
                let start = header.len();
                header.resize(start + count, 0);
                stream.read_exact(&mut header[start..])?;
                continue;
            }
            Parsed::BadMagic(_) => return Ok(()),
            Parsed::Header(parsed, _) => {
                header.clear();
                parsed
            }
        };
        match check(&header, agreed) {
            Ok(Command::Disconnect) => return Ok(()),
            Ok(command) => {
                let sent = carry_out(&mut stream, session, command, header.asked())?;
                stream.write_all(&sent)?;
            }
            Err(refusal) => {
                let length =
                    reply::error(&mut out, agreed, header.asked(), refusal.errno, refusal.message);
                std::io::copy(&mut (&mut stream).take(refusal.skip), &mut std::io::sink())?;
                stream.write_all(&out[..length])?;
                if refusal.hang_up {
                    return Ok(());
                }
            }
        }
    }
}

fn range(offset: u64, len: u64) -> std::ops::Range<usize> {
    let start = usize::try_from(offset).expect("64 bits");
    start..start + usize::try_from(len).expect("64 bits")
}

fn units(bytes: std::ops::Range<usize>) -> std::ops::Range<usize> {
    bytes.start / UNIT..bytes.end.div_ceil(UNIT)
}

fn carry_out(
    stream: &mut File,
    session: &Session<Arc<Memory>>,
    command: Command,
    asked: Asked,
) -> std::io::Result<Vec<u8>> {
    let agreed = &session.negotiated;
    let mut out = vec![0; 4096];
    let length = match command {
        Command::Read { offset, len, df } => {
            return Ok(read(session, asked, range(offset, len.into()), df));
        }
        Command::Write { offset, len, .. } => {
            let mut data = vec![0; usize::try_from(len).expect("64 bits")];
            stream.read_exact(&mut data)?;
            if data.starts_with(b"no space") {
                let length = reply::error(&mut out, agreed, asked, errno::ENOSPC, "as you wish");
                out.truncate(length);
                return Ok(out);
            }
            let mut memory = session.volume.bytes.lock().expect("no holder panics");
            let bytes = range(offset, len.into());
            memory.0[bytes.clone()].copy_from_slice(&data);
            memory.1[units(bytes)].fill(true);
            reply::done(&mut out, agreed, asked)
        }
        Command::Trim { offset, len, .. } | Command::WriteZeroes { offset, len, .. } => {
            let mut memory = session.volume.bytes.lock().expect("no holder panics");
            let bytes = range(offset, len);
            memory.0[bytes.clone()].fill(0);
            let keep = matches!(command, Command::WriteZeroes { no_hole: true, .. });
            memory.1[units(bytes)].fill(keep);
            reply::done(&mut out, agreed, asked)
        }
        Command::BlockStatus { offset, len, req_one } => {
            let memory = session.volume.bytes.lock().expect("no holder panics");
            let mut ranges: Vec<(u64, u32)> = Vec::new();
            for unit in units(range(offset, len)) {
                let flags = if memory.1[unit] { 0 } else { state::HOLE | state::ZERO };
                match ranges.last_mut() {
                    Some(last) if last.1 == flags => last.0 += 4096,
                    _ => ranges.push((4096, flags)),
                }
            }
            ranges.truncate(if req_one { 1 } else { 100 });
            reply::block_status(&mut out, agreed, asked, (1, true), ranges.into_iter())
        }
        _ => reply::done(&mut out, agreed, asked),
    };
    out.truncate(length);
    Ok(out)
}

/// As many parts as are allowed, the last first, so that clients have something to put together.
fn read(
    session: &Session<Arc<Memory>>,
    asked: Asked,
    bytes: std::ops::Range<usize>,
    df: bool,
) -> Vec<u8> {
    let agreed = &session.negotiated;
    let memory = session.volume.bytes.lock().expect("no holder panics");
    let mut sent = Vec::new();
    let mut header = [0; 128];
    let as_u64 = |value: usize| u64::try_from(value).expect("64 bits");
    if bytes.is_empty() {
        let length = reply::done(&mut header, agreed, asked);
        return header[..length].to_vec();
    }
    let middle = bytes.start + bytes.len() / 1024 * 512;
    let split = agreed.structured && !df && middle > bytes.start;
    let parts = if split { vec![middle..bytes.end, bytes.start..middle] } else { vec![bytes] };
    for (index, part) in parts.iter().enumerate() {
        let done = index + 1 == parts.len();
        let place = (as_u64(part.start), u32::try_from(part.len()).expect("not so long"));
        let data = &memory.0[part.clone()];
        if split && data.iter().all(|byte| *byte == 0) {
            let length = reply::read_hole(&mut header, agreed, asked, place, done);
            sent.extend_from_slice(&header[..length]);
        } else {
            let length = reply::read_data(&mut header, agreed, asked, place, done);
            sent.extend_from_slice(&header[..length]);
            sent.extend_from_slice(data);
        }
    }
    sent
}

/// A listener in a runtime of its own.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) listener: Option<Listener>,
    pub(crate) ended: Arc<AtomicU64>,
    pub(crate) runtime: Runtime,
    pub(crate) scratch: Folder,
}

impl Server {
    /// At a Unix socket.
    pub(crate) fn start(limits: Limits, tls: Tls) -> Self {
        Self::start_at(|scratch| unix(&scratch.path().join("nbd.sock")), limits, tls)
    }

    pub(crate) fn start_at(
        address: impl FnOnce(&Folder) -> Address,
        limits: Limits,
        tls: Tls,
    ) -> Self {
        let scratch = Folder::new("nbd").expect("a folder");
        let runtime = Runtime::new().expect("a runtime");
        let threads = Threads::default();
        let ended = Arc::clone(&threads.ended);
        let units = usize::try_from(SIZE).expect("64 bits");
        let bytes = Mutex::new((vec![0; units], vec![false; units / UNIT]));
        let shelf = Shelf { memory: Arc::new(Memory { bytes }) };
        let entered = runtime.enter();
        let bound = bind(ListenerOptions { address: address(&scratch), limits, tls });
        let listener = bound.expect("a listener").serve(Arc::new(shelf), Arc::new(threads));
        drop(entered);
        Self { listener: Some(listener), ended, runtime, scratch }
    }

    pub(crate) fn listener(&self) -> &Listener {
        self.listener.as_ref().expect("it was not stopped")
    }

    /// The address of an export.
    pub(crate) fn uri(&self, export: &str) -> Uri {
        let server = match self.listener().address() {
            Address::Unix { path, .. } => ServerAddress::Unix(path.clone()),
            Address::Tcp(address) => {
                ServerAddress::Tcp { host: address.ip().to_string(), port: address.port() }
            }
        };
        Uri { server, export: export.to_owned() }
    }

    /// A connection that has said nothing yet.
    pub(crate) fn connect(&self) -> Raw {
        let stream =
            UnixStream::connect(self.scratch.path().join("nbd.sock")).expect("a connection");
        Raw::new(stream)
    }
}

pub(crate) fn unix(path: &std::path::Path) -> Address {
    Address::Unix { path: path.to_owned(), mode: 0o600 }
}

/// A connection that is spoken to in bytes.
#[derive(Debug)]
pub(crate) struct Raw<S = UnixStream>(pub(crate) S);

impl Raw {
    pub(crate) fn new(stream: UnixStream) -> Self {
        stream.set_read_timeout(Some(PATIENCE)).expect("a time limit");
        Self(stream)
    }
}

impl<S: Read + Write> Raw<S> {
    pub(crate) fn say(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).expect("the server listens");
    }

    pub(crate) fn hear(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.0.read_exact(&mut bytes).expect("the server speaks");
        bytes
    }

    /// Greets, and sets all client flags.
    pub(crate) fn greet(&mut self) {
        assert_eq!(self.hear(18)[..16], *b"NBDMAGICIHAVEOPT");
        self.say(&[0, 0, 0, 3]);
    }

    pub(crate) fn option(&mut self, kind: u32, data: &[u8]) {
        self.say(&option(kind, data));
    }

    /// The next reply to an option: which option, which type, which data.
    pub(crate) fn reply(&mut self) -> (u32, u32, Vec<u8>) {
        let header = self.hear(20);
        assert_eq!(header[..8], 0x0003_e889_0455_65a9_u64.to_be_bytes());
        let number = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().expect("4"));
        let data = self.hear(usize::try_from(number(16)).expect("64 bits"));
        (number(8), number(12), data)
    }

    /// Replies up to the last one to an option, of which the type is given back.
    pub(crate) fn outcome(&mut self) -> u32 {
        loop {
            let (_, kind, _) = self.reply();
            if kind == 1 || kind >> 31 == 1 {
                return kind;
            }
        }
    }

    /// Whether the server has closed the connection, when all that it sent is read. Says what came
    /// instead, as that differs between a server that waits and one that answers.
    pub(crate) fn closed(&mut self) -> bool {
        let read = self.0.read(&mut [0]);
        let closed = match &read {
            Ok(count) => *count == 0,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        };
        if !closed {
            eprintln!("not closed: a read gave {read:?}");
        }
        closed
    }
}

pub(crate) fn option(kind: u32, data: &[u8]) -> Vec<u8> {
    announced(kind, u32::try_from(data.len()).expect("not so long"), data)
}

pub(crate) fn announced(kind: u32, len: u32, data: &[u8]) -> Vec<u8> {
    [b"IHAVEOPT".as_slice(), &kind.to_be_bytes(), &len.to_be_bytes(), data].concat()
}

pub(crate) fn go(name: &str) -> Vec<u8> {
    let length = u32::try_from(name.len()).expect("not so long").to_be_bytes();
    [&length, name.as_bytes(), &[0, 0]].concat()
}

/// A compact request.
pub(crate) fn request(kind: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    Header { flags: 0, kind, cookie, offset, len: len.into() }.encode(false, &mut bytes);
    bytes
}

/// Waits until something is so.
pub(crate) fn until(what: &str, so: impl Fn() -> bool) {
    const STEP: Duration = Duration::from_millis(10);
    for _ in 0..PATIENCE.as_millis() / STEP.as_millis() {
        if so() {
            return;
        }
        std::thread::sleep(STEP);
    }
    panic!("it never came to this: {what}");
}
