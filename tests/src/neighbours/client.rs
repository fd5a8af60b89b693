//! An NBD client that can misbehave: raw requests over a Unix socket, TCP or TLS, with a time limit
//! or without, from a source address of choice. Requests longer than 4 GiB use extended headers.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddrV4, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::socket::{
    self, AddressFamily, SockFlag, SockType, SockaddrIn, SockaddrLike, UnixAddr, bind, connect,
    setsockopt, sockopt,
};
use nix::sys::time::TimeVal;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};

const SERVER_MAGIC: u64 = 0x4e42_444d_4147_4943;
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Fixed newstyle, without padding.
const HANDSHAKE_FLAGS: u32 = 3;
const OPTION_STARTTLS: u32 = 5;
const OPTION_GO: u32 = 7;
const OPTION_SET_META_CONTEXT: u32 = 10;
const OPTION_EXTENDED_HEADERS: u32 = 11;
const REPLY_ACK: u32 = 1;
/// Set in the type of every option reply that is an error.
const REPLY_IS_ERROR: u32 = 1 << 31;
/// An option reply or reply chunk beyond this is not from a server of ours.
const LONGEST_REPLY: u64 = 1 << 20;

/// Set in the last chunk of a reply.
const CHUNK_DONE: u16 = 1;
/// Set in the type of every chunk that is an error.
const CHUNK_IS_ERROR: u16 = 1 << 15;
/// `NBD_CMD_FLAG_PAYLOAD_LEN`, which extended headers require with every write.
const PAYLOAD_LEN: u16 = 1 << 5;

pub(super) const READ: u16 = 0;
pub(super) const WRITE: u16 = 1;
pub(super) const FLUSH: u16 = 3;
pub(super) const TRIM: u16 = 4;
pub(super) const WRITE_ZEROES: u16 = 6;
pub(super) const BLOCK_STATUS: u16 = 7;

/// The source address of well-behaved clients.
pub(super) const VICTIM: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 1);
/// The source address of attackers, by which limits per peer address recognise them.
pub(super) const ATTACKER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

/// Where a server listens.
#[derive(Clone, Debug)]
pub(super) enum Address {
    Unix(PathBuf),
    Tcp(SocketAddrV4),
    Tls(SocketAddrV4, Arc<ClientConfig>),
}

/// A connected socket, before or after TLS began on it.
#[derive(Debug)]
pub(super) enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
    Tls(Box<StreamOwned<ClientConnection, TcpStream>>),
}

/// Ends a connection from another thread, whatever its owner waits for.
#[derive(Debug)]
pub(super) enum Closer {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Closer {
    /// Shuts both directions down.
    pub(super) fn close(&self) {
        // A peer that has closed the connection already has done the same.
        let _ = match self {
            Self::Unix(stream) => stream.shutdown(Shutdown::Both),
            Self::Tcp(stream) => stream.shutdown(Shutdown::Both),
        };
    }
}

/// Connects with a limit on the time, which the standard library has for TCP without a source
/// address only: a listener whose backlog is full would block the caller for good.
fn connected(
    family: AddressFamily,
    from: Option<&SockaddrIn>,
    to: &dyn SockaddrLike,
    patience: Option<Duration>,
) -> Result<OwnedFd> {
    let fd = socket::socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    if let Some(patience) = patience {
        let limit = TimeVal::new(i64::try_from(patience.as_secs())?, 0);
        setsockopt(&fd, sockopt::SendTimeout, &limit)?;
        setsockopt(&fd, sockopt::ReceiveTimeout, &limit)?;
    }
    if let Some(from) = from {
        bind(fd.as_raw_fd(), from)?;
    }
    connect(fd.as_raw_fd(), to)?;
    Ok(fd)
}

/// Connects to a TCP address from a source address. Without `patience`, reads and writes wait for
/// good.
pub(super) fn tcp(
    to: SocketAddrV4,
    from: Ipv4Addr,
    patience: Option<Duration>,
) -> Result<TcpStream> {
    let from = SockaddrIn::from(SocketAddrV4::new(from, 0));
    let to = SockaddrIn::from(to);
    let stream = TcpStream::from(connected(AddressFamily::Inet, Some(&from), &to, patience)?);
    stream.set_nodelay(true)?;
    // Closed by a reset, as when a host is gone. An orderly end follows what was sent before it,
    // and a server that holds a client back does not see it behind a window that is closed.
    setsockopt(&stream, sockopt::Linger, &nix::libc::linger { l_onoff: 1, l_linger: 0 })?;
    Ok(stream)
}

impl Stream {
    fn open(address: &Address, from: Ipv4Addr, patience: Option<Duration>) -> Result<Self> {
        match address {
            Address::Unix(path) => {
                let to = UnixAddr::new(path)?;
                let fd = connected(AddressFamily::Unix, None, &to, patience)?;
                Ok(Self::Unix(UnixStream::from(fd)))
            }
            Address::Tcp(to) | Address::Tls(to, _) => tcp(*to, from, patience).map(Self::Tcp),
        }
    }

    /// A handle that ends the connection.
    pub(super) fn closer(&self) -> io::Result<Closer> {
        match self {
            Self::Unix(stream) => stream.try_clone().map(Closer::Unix),
            Self::Tcp(stream) => stream.try_clone().map(Closer::Tcp),
            Self::Tls(stream) => stream.sock.try_clone().map(Closer::Tcp),
        }
    }

    /// Sets the limit of each read and write; `None` waits for good.
    fn patience(&self, patience: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Unix(stream) => {
                stream.set_read_timeout(patience)?;
                stream.set_write_timeout(patience)
            }
            Self::Tcp(stream) => {
                stream.set_read_timeout(patience)?;
                stream.set_write_timeout(patience)
            }
            Self::Tls(stream) => {
                stream.sock.set_read_timeout(patience)?;
                stream.sock.set_write_timeout(patience)
            }
        }
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.read(buffer),
            Self::Tcp(stream) => stream.read(buffer),
            Self::Tls(stream) => stream.read(buffer),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.write(buffer),
            Self::Tcp(stream) => stream.write(buffer),
            Self::Tls(stream) => stream.write(buffer),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.flush(),
            Self::Tcp(stream) => stream.flush(),
            Self::Tls(stream) => stream.flush(),
        }
    }
}

/// A request without its payload.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) kind: u16,
    pub(super) offset: u64,
    /// Bytes; at most `u32::MAX` without extended headers.
    pub(super) len: u64,
}

/// How a client connects.
#[derive(Clone, Copy, Debug)]
pub(super) struct Manner {
    /// Source address over TCP.
    pub(super) from: Ipv4Addr,
    /// Limit of each read and write; `None` waits for good, until a [`Closer`] ends it.
    pub(super) patience: Option<Duration>,
    /// Extended headers, and `base:allocation` for block status.
    pub(super) extended: bool,
}

/// Timeout of the negotiation of an attacker's connection; a daemon that delays attackers must
/// not hold up the test.
const NEGOTIATION: Duration = Duration::from_secs(3);

impl Manner {
    /// Of a well-behaved client that gives up on each call after `patience`.
    pub(super) const fn victim(patience: Duration) -> Self {
        Self { from: VICTIM, patience: Some(patience), extended: false }
    }

    /// Of an attacker with plain requests.
    pub(super) const fn attacker() -> Self {
        Self { from: ATTACKER, patience: None, extended: false }
    }
}

/// A connection with an export.
#[derive(Debug)]
pub(super) struct Client {
    stream: Stream,
    extended: bool,
}

impl Client {
    /// Connects and negotiates.
    ///
    /// # Errors
    /// When the server does not answer in time or refuses.
    pub(super) fn open(address: &Address, export: &str, manner: Manner) -> Result<Self> {
        let limit = manner.patience.unwrap_or(NEGOTIATION);
        let mut stream = Stream::open(address, manner.from, Some(limit)).context("connecting")?;
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).context("waiting for the server's greeting")?;
        ensure!(greeting.starts_with(&SERVER_MAGIC.to_be_bytes()), "not an NBD server");
        stream.write_all(&HANDSHAKE_FLAGS.to_be_bytes())?;
        if let Address::Tls(_, config) = address {
            option(&mut stream, OPTION_STARTTLS, &[])?;
            stream = encrypted(stream, config)?;
        }
        if manner.extended {
            option(&mut stream, OPTION_EXTENDED_HEADERS, &[])?;
            let mut data = string(export)?;
            data.extend(1_u32.to_be_bytes());
            data.extend(string("base:allocation")?);
            option(&mut stream, OPTION_SET_META_CONTEXT, &data)?;
        }
        let mut data = string(export)?;
        data.extend([0; 2]);
        option(&mut stream, OPTION_GO, &data)?;
        stream.patience(manner.patience)?;
        Ok(Self { stream, extended: manner.extended })
    }

    /// A handle that ends the connection.
    pub(super) fn closer(&self) -> io::Result<Closer> {
        self.stream.closer()
    }

    /// Sends a request, and as much payload as the caller chooses.
    pub(super) fn send(&mut self, request: Request, payload: &[u8]) -> io::Result<()> {
        let Request { kind, offset, len } = request;
        let mut message = Vec::with_capacity(32 + payload.len());
        let magic = if self.extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        message.extend(magic.to_be_bytes());
        let flags = if self.extended && kind == WRITE { PAYLOAD_LEN } else { 0 };
        message.extend(flags.to_be_bytes());
        message.extend(kind.to_be_bytes());
        message.extend([0; 8]);
        message.extend(offset.to_be_bytes());
        if self.extended {
            message.extend(len.to_be_bytes());
        } else {
            let len = u32::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?;
            message.extend(len.to_be_bytes());
        }
        message.extend(payload);
        self.stream.write_all(&message)?;
        // TLS keeps records back otherwise.
        self.stream.flush()
    }

    /// Waits for the next answer, and returns its error number, 0 for success. `data` takes what
    /// follows the answer to a read; with extended headers it is skipped.
    pub(super) fn answer(&mut self, data: &mut [u8]) -> io::Result<u32> {
        if self.extended {
            return self.chunks();
        }
        let mut header = [0; 16];
        self.stream.read_exact(&mut header)?;
        check(be32(&header, 0) == SIMPLE_REPLY_MAGIC)?;
        let error = be32(&header, 4);
        if error == 0 {
            self.stream.read_exact(data)?;
        }
        Ok(error)
    }

    fn chunks(&mut self) -> io::Result<u32> {
        let mut error = 0;
        loop {
            let mut header = [0; 32];
            self.stream.read_exact(&mut header)?;
            check(be32(&header, 0) == EXTENDED_REPLY_MAGIC)?;
            let (flags, kind) = (be16(&header, 4), be16(&header, 6));
            let len = u64::from(be32(&header, 24)) << 32 | u64::from(be32(&header, 28));
            check(len <= LONGEST_REPLY)?;
            let mut payload = vec![0; usize::try_from(len).unwrap_or(0)];
            self.stream.read_exact(&mut payload)?;
            if kind & CHUNK_IS_ERROR != 0 && payload.len() >= 4 {
                error = be32(&payload, 0);
            }
            if flags & CHUNK_DONE != 0 {
                return Ok(error);
            }
        }
    }

    /// One request and its answer.
    ///
    /// # Errors
    /// When the connection breaks, the server does not answer in time, or answers with an error.
    pub(super) fn ask(&mut self, request: Request, payload: &[u8], data: &mut [u8]) -> Result<()> {
        self.send(request, payload)?;
        let error = self.answer(data)?;
        ensure!(error == 0, "request {} failed with error {error}", request.kind);
        Ok(())
    }
}

fn encrypted(stream: Stream, config: &Arc<ClientConfig>) -> Result<Stream> {
    let Stream::Tcp(stream) = stream else { bail!("TLS is for TCP") };
    let name = ServerName::try_from("localhost")?;
    let connection = ClientConnection::new(Arc::clone(config), name)?;
    Ok(Stream::Tls(Box::new(StreamOwned::new(connection, stream))))
}

/// A string with its length, as options have it.
fn string(text: &str) -> Result<Vec<u8>> {
    let mut data = u32::try_from(text.len())?.to_be_bytes().to_vec();
    data.extend(text.as_bytes());
    Ok(data)
}

/// Sends an option and reads its replies up to the acknowledgement.
fn option(stream: &mut Stream, option: u32, data: &[u8]) -> Result<()> {
    let mut message = OPTION_MAGIC.to_be_bytes().to_vec();
    message.extend(option.to_be_bytes());
    message.extend(u32::try_from(data.len())?.to_be_bytes());
    message.extend(data);
    stream.write_all(&message)?;
    stream.flush()?;
    loop {
        let mut header = [0; 20];
        stream.read_exact(&mut header).context("waiting for the reply to an option")?;
        ensure!(header.starts_with(&OPTION_REPLY_MAGIC.to_be_bytes()), "no reply to an option");
        let (kind, len) = (be32(&header, 12), be32(&header, 16));
        ensure!(u64::from(len) <= LONGEST_REPLY, "an option reply of {len} bytes");
        let mut payload = vec![0; usize::try_from(len)?];
        stream.read_exact(&mut payload)?;
        let text = String::from_utf8_lossy(&payload);
        ensure!(kind & REPLY_IS_ERROR == 0, "option {option} refused: {kind:#x} {text}");
        if kind == REPLY_ACK {
            return Ok(());
        }
    }
}

fn check(holds: bool) -> io::Result<()> {
    if holds { Ok(()) } else { Err(io::Error::other("no reply of the protocol")) }
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].iter().fold(0, |value, byte| value << 8 | u32::from(*byte))
}

fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}
