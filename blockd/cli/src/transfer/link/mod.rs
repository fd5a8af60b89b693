//! A stream of `blockd send` over TCP, with TLS that both ends show certificates for.
//!
//! # Form
//!
//! Numbers are little-endian. The sender begins with 658 bytes:
//!
//! | at | bytes | |
//! |---|---|---|
//! | 0 | 8 | `blkdsend` |
//! | 8 | 4 | version: 1. A receiver refuses another one |
//! | 12 | 4 | 1: attach the volume when it has all. 0: do not |
//! | 16 | 2 + 128 | length of the volume's name at the receiver, the name, zeroes |
//! | 146 | 512 | the header of the stream as if it began at 0 |
//!
//! The receiver answers. An answer is:
//!
//! | at | bytes | |
//! |---|---|---|
//! | 0 | 4 | 1: send. 2: the volume has it. 3: refused |
//! | 4 | 8 | of 1, the offset to begin at; of 3, the kind of the error, as the control API has it |
//! | 12 | 4 | length of the text, at most 4096 |
//! | 16 | | the text of the error |
//!
//! After answer 1 the sender sends the stream in chunks: 4 bytes of length, at most 1 MiB, and as
//! many bytes. A length of 0 is the end. Then, or earlier if it refuses, the receiver answers again
//! with 2 or 3, and both close. A sender that does not begin within 10 s is dropped. One that has
//! begun waits for the first answer as long as its connection lasts: the receiver may have others
//! to serve. Later either end gives up when the next message, or 256 KiB of a chunk, take more than
//! 60 s. A receiver that gives up, or is stopped, closes without an answer: the sender may connect
//! again.

mod prompt;
mod socket;
mod tls;

pub(crate) use prompt::Prompt;
pub(crate) use tls::TlsArguments;

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blockd_api::v1;
use blockd_mapper::geometry::MAX_NAME;
use blockd_media::clock::Clock;
use blockd_media::error::{Error, KINDS};
use blockd_media::names::is_hidden;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{setsockopt, sockopt};

use super::increment::{HEADER_BYTES, Header};
use super::{STOP_WAIT, Stop};
use socket::{Socket, Until};

const MAGIC: [u8; 8] = *b"blkdsend";
const VERSION: u32 = 1;
const HELLO_BYTES: usize = 146 + HEADER_BYTES;
const ANSWER_BYTES: usize = 16;
const MAX_CHUNK: usize = 1 << 20;
/// Longest text of an answer: an error is one line.
const MAX_TEXT: usize = 4096;
/// How long a sender may take to begin: until then it has shown no certificate.
const BEGIN: Duration = Duration::from_secs(10);
/// Longest silence.
const SILENCE: Duration = Duration::from_secs(60);
/// The same of a receiver. While its pool is full it reads nothing, for its --reconnect of 60 s and
/// the 30 s that an answer may take, and has to refuse before.
const RECEIVER_SILENCE: Duration = Duration::from_secs(180);
/// Seconds that a connection may be silent before the kernel looks whether the other host is there,
/// seconds until it looks again, and how many times it does: a wait for the first answer has no
/// other end.
const KEEPALIVE: (u32, u32, u32) = (60, 15, 4);
/// How long a receiver that refused waits for the sender to close: one that is in the middle of a
/// chunk reads the answer behind it.
const FAREWELL: Duration = Duration::from_secs(5);

const SEND: u32 = 1;
const DONE: u32 = 2;
const REFUSED: u32 = 3;

/// The begin of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) attach: bool,
    pub(crate) name: String,
    pub(crate) header: Header,
}

impl Hello {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; HELLO_BYTES];
        let mut put = |at: usize, part: &[u8]| bytes[at..at + part.len()].copy_from_slice(part);
        let name = &self.name.as_bytes()[..self.name.len().min(MAX_NAME)];
        put(0, &MAGIC);
        put(8, &VERSION.to_le_bytes());
        put(12, &u32::from(self.attach).to_le_bytes());
        put(16, &u16::try_from(name.len()).unwrap_or(0).to_le_bytes());
        put(18, name);
        put(146, &self.header.encode());
        bytes
    }

    fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Self, String> {
        if bytes[..8] != MAGIC {
            return Err("is no sender of blockd".to_owned());
        }
        let number =
            |at: usize| bytes[at..].first_chunk().map_or(0, |four| u32::from_le_bytes(*four));
        let version = number(8);
        if version != VERSION {
            return Err(format!("speaks version {version}: this blockd speaks {VERSION}"));
        }
        let len = usize::from(u16::from_le_bytes([bytes[16], bytes[17]]));
        let name = bytes[18..146].get(..len).and_then(|name| std::str::from_utf8(name).ok());
        let header = bytes[146..].first_chunk().map(Header::decode);
        let (Some(name), attach @ (0 | 1), Some(header)) = (name, number(12), header) else {
            return Err("has sent a request that no version of blockd sends".to_owned());
        };
        let header = header.map_err(|problem| format!("has sent a stream that {problem}"))?;
        Ok(Self { attach: attach == 1, name: name.to_owned(), header })
    }
}

/// An answer of a receiver.
#[derive(Debug)]
pub(crate) enum Reply {
    /// Send what comes behind this offset.
    Send(u64),
    Done,
    Refused(Error),
}

trait Duplex: Read + Write + Send {}

impl<T: Read + Write + Send> Duplex for T {}

/// One end of a connection.
pub(crate) struct Link {
    stream: Box<dyn Duplex>,
    /// The same connection, to look for an early answer.
    tcp: TcpStream,
    peer: String,
    stop: Arc<Stop>,
    /// When the socket gives up, below TLS.
    until: Until,
    /// Longest silence.
    silence: Duration,
    /// The stream could not be written or read on: the connection has failed, or the other end has
    /// ended it.
    is_cut: bool,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").field("peer", &self.peer).finish_non_exhaustive()
    }
}

/// A link that a thread of the transfer uses, and its owner before and after.
pub(crate) type Shared = Arc<Mutex<Link>>;

/// The link, also after a panic of another thread.
pub(crate) fn lock(link: &Shared) -> MutexGuard<'_, Link> {
    link.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Link {
    /// Connects to a receiver at `HOST:PORT`.
    pub(crate) fn connect(
        address: &str,
        tls: &TlsArguments,
        stop: &Arc<Stop>,
    ) -> Result<Self, Error> {
        let failed = |source| Error::io(format!("connecting to {address}"), source);
        let addresses: Vec<SocketAddr> = address.to_socket_addrs().map_err(failed)?.collect();
        tls.check("TARGET", address, &addresses)?;
        let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
        for one in addresses {
            match TcpStream::connect_timeout(&one, SILENCE) {
                Ok(tcp) => {
                    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
                    let link = Self::new(tcp, address, stop, |tcp| tls.client(tcp, host))?;
                    return Ok(Self { silence: RECEIVER_SILENCE, ..link });
                }
                Err(error) => last = error,
            }
        }
        Err(failed(last))
    }

    fn new(
        tcp: TcpStream,
        peer: &str,
        stop: &Arc<Stop>,
        encrypt: impl FnOnce(Socket) -> Result<Box<dyn Duplex>, Error>,
    ) -> Result<Self, Error> {
        let failed = |source| Error::io(format!("connecting to {peer}"), source);
        tcp.set_nonblocking(false).map_err(failed)?;
        tcp.set_nodelay(true).map_err(failed)?;
        tcp.set_read_timeout(Some(STOP_WAIT)).map_err(failed)?;
        tcp.set_write_timeout(Some(STOP_WAIT)).map_err(failed)?;
        keep_alive(&tcp).map_err(|error| failed(error.into()))?;
        let again = tcp.try_clone().map_err(failed)?;
        let until = Until::new(stop);
        let stream = encrypt(Socket::new(tcp, &until))?;
        Ok(Self {
            stream,
            tcp: again,
            peer: peer.to_owned(),
            stop: Arc::clone(stop),
            until,
            silence: SILENCE,
            is_cut: false,
        })
    }

    /// The address of the other end.
    pub(crate) fn peer(&self) -> &str {
        &self.peer
    }

    /// Ends what waits for the other end, once it is set.
    pub(crate) fn stop(&self) -> &Arc<Stop> {
        &self.stop
    }

    /// Whether the stream could not be written or read on.
    pub(crate) fn is_cut(&self) -> bool {
        self.is_cut
    }

    /// Begins a transfer.
    pub(crate) fn begin(&mut self, hello: &Hello) -> Result<(), Error> {
        let sent = self.put(&hello.encode());
        sent.map_err(|source| self.failed(source))
    }

    /// Waits for the first answer. The receiver takes one stream after the other, each for as long
    /// as that lasts.
    pub(crate) fn first_reply(&mut self) -> Result<Reply, Error> {
        self.read_reply(Duration::MAX).map_err(|source| self.failed(source))
    }

    /// Waits for a sender to begin.
    pub(crate) fn hello(&mut self) -> Result<Hello, Error> {
        let mut bytes = [0; HELLO_BYTES];
        let read = self.fill(&mut bytes, BEGIN);
        read.map_err(|source| self.failed(source))?;
        Hello::decode(&bytes)
            .map_err(|problem| Error::Corrupt { what: format!("sender {}", self.peer), problem })
    }

    /// Waits for an answer.
    pub(crate) fn reply(&mut self) -> Result<Reply, Error> {
        self.read_reply(self.silence).map_err(|source| self.failed(source))
    }

    fn read_reply(&mut self, limit: Duration) -> io::Result<Reply> {
        let mut head = [0; ANSWER_BYTES];
        self.fill(&mut head, limit)?;
        let number =
            |at: usize| head[at..].first_chunk().map_or(0, |four| u32::from_le_bytes(*four));
        let value = head[4..].first_chunk().map_or(0, |eight| u64::from_le_bytes(*eight));
        let len = usize::try_from(number(12)).unwrap_or(usize::MAX);
        let (SEND | DONE | REFUSED, ..=MAX_TEXT) = (number(0), len) else {
            return Err(io::Error::other("is no receiver of blockd, or one of another version"));
        };
        let mut text = vec![0; len];
        self.fill(&mut text, self.silence)?;
        Ok(match number(0) {
            SEND => Reply::Send(value),
            DONE => Reply::Done,
            _ => {
                let row = KINDS.iter().find(|row| u64::try_from(i32::from(row.wire)) == Ok(value));
                let kind = row.map_or(v1::ErrorKind::Unspecified, |row| row.wire).into();
                let text: String = String::from_utf8_lossy(&text).replace(is_hidden, " ");
                let message = format!("refused by {}: {text}", self.peer);
                Reply::Refused(Error::Remote(v1::ErrorDetail {
                    kind,
                    message,
                    ..Default::default()
                }))
            }
        })
    }

    /// Answers a sender. After a refusal the sender may be in the middle of a chunk.
    pub(crate) fn answer(&mut self, reply: &Reply) -> Result<(), Error> {
        let (kind, value, text) = match reply {
            Reply::Send(offset) => (SEND, *offset, String::new()),
            Reply::Done => (DONE, 0, String::new()),
            Reply::Refused(error) => {
                let kind = u64::try_from(error.detail().kind).unwrap_or(0);
                (REFUSED, kind, error.to_string())
            }
        };
        let end = text.floor_char_boundary(MAX_TEXT);
        let text = &text.as_bytes()[..end];
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend(value.to_le_bytes());
        bytes.extend(u32::try_from(text.len()).unwrap_or(0).to_le_bytes());
        bytes.extend(text);
        let sent = self.put(&bytes);
        sent.map_err(|source| self.failed(source))?;
        if kind == REFUSED {
            // Bytes that were not read would make the kernel drop the answer.
            let clock = Clock::start();
            let mut rest = vec![0; 64 << 10];
            while clock.elapsed() < FAREWELL && self.fill(&mut rest, FAREWELL).is_ok() {}
        }
        Ok(())
    }

    /// Sends the end of a stream, and waits until the receiver has it.
    pub(crate) fn finish(&mut self) -> Result<Reply, Error> {
        let sent = self.put(&0_u32.to_le_bytes());
        sent.map_err(|source| self.failed(source))?;
        match self.reply()? {
            Reply::Send(_) => Err(self.failed(io::Error::other("answers out of order"))),
            reply => Ok(reply),
        }
    }

    /// The refusal that a receiver has sent, if there is one.
    pub(crate) fn refusal(&mut self) -> Option<Error> {
        match self.is_readable().then(|| self.reply()) {
            Some(Ok(Reply::Refused(error))) => Some(error),
            _ => None,
        }
    }

    fn is_readable(&self) -> bool {
        self.has(PollFlags::POLLIN)
    }

    /// An error if a sender that waits for its answer has closed the connection.
    pub(crate) fn check_open(&self) -> Result<(), Error> {
        // `nix` has no name for this event. Bytes may be there before it: TLS says that it ends.
        if !self.has(PollFlags::from_bits_retain(libc::POLLRDHUP)) {
            return Ok(());
        }
        Err(self.failed(io::Error::other("closed before the stream began")))
    }

    fn has(&self, wanted: PollFlags) -> bool {
        let mut polled = [PollFd::new(self.tcp.as_fd(), wanted)];
        poll(&mut polled, PollTimeout::ZERO).is_ok_and(|count| count > 0)
    }

    fn failed(&self, source: io::Error) -> Error {
        // A wait that was stopped is no fault of the connection.
        let failed = |()| Error::io(format!("connection with {}", self.peer), source);
        self.stop.check().map_or_else(|stopped| stopped, failed)
    }

    fn put(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let count = self.again(self.silence, |stream| match stream.write(bytes) {
                Ok(0) => Err(io::ErrorKind::WriteZero.into()),
                result => result,
            })?;
            bytes = &bytes[count..];
        }
        self.again(self.silence, |stream| stream.flush())
    }

    /// Reads all of it within a limit, so that a peer that sends byte by byte holds up none either.
    fn fill(&mut self, mut into: &mut [u8], limit: Duration) -> io::Result<()> {
        let clock = Clock::start();
        while !into.is_empty() {
            let rest = limit.saturating_sub(clock.elapsed());
            let count = self.again(rest, |stream| stream.read(into))?;
            if count == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            into = &mut into[count..];
        }
        Ok(())
    }

    /// Repeats a call that waits for the other end, until it succeeds, fails, or takes too long.
    fn again<T>(
        &mut self,
        limit: Duration,
        mut call: impl FnMut(&mut dyn Duplex) -> io::Result<T>,
    ) -> io::Result<T> {
        use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
        let clock = Clock::start();
        self.until.set(limit);
        loop {
            match call(&mut *self.stream) {
                Err(error) if matches!(error.kind(), WouldBlock | TimedOut | Interrupted) => {}
                result => return result,
            }
            self.stop.check().map_err(|error| io::Error::other(error.to_string()))?;
            if clock.elapsed() >= limit {
                return Err(TimedOut.into());
            }
        }
    }
}

/// Has the kernel end a connection whose other host is gone.
fn keep_alive(tcp: &TcpStream) -> nix::Result<()> {
    let (idle, interval, count) = KEEPALIVE;
    setsockopt(tcp, sockopt::KeepAlive, &true)?;
    setsockopt(tcp, sockopt::TcpKeepIdle, &idle)?;
    setsockopt(tcp, sockopt::TcpKeepInterval, &interval)?;
    setsockopt(tcp, sockopt::TcpKeepCount, &count)
}

/// Sends what is written in chunks. The end is sent by [`Link::finish`].
#[derive(Debug)]
pub(crate) struct Outgoing(pub(crate) Shared);

impl Outgoing {
    fn put(link: &mut Link, data: &[u8]) -> io::Result<()> {
        let len = u32::try_from(data.len()).map_err(io::Error::other)?;
        if link.is_readable() {
            // It is read by the owner of the link.
            let text = "the receiver has ended the transfer";
            return Err(io::Error::new(io::ErrorKind::ConnectionAborted, text));
        }
        if len > 0 {
            link.put(&len.to_le_bytes())?;
            link.put(data)?;
        }
        Ok(())
    }
}

impl Write for Outgoing {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let data = &data[..data.len().min(MAX_CHUNK)];
        let mut link = lock(&self.0);
        let put = Self::put(&mut link, data);
        link.is_cut |= put.is_err();
        put.map(|()| data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads the chunks of a stream to its end.
#[derive(Debug)]
pub(crate) struct Incoming {
    link: Shared,
    /// Bytes of the present chunk.
    rest: usize,
    ended: bool,
}

impl Incoming {
    pub(crate) fn new(link: &Shared) -> Self {
        Self { link: Arc::clone(link), rest: 0, ended: false }
    }

    fn fill(link: &mut Link, into: &mut [u8]) -> io::Result<()> {
        let filled = link.fill(into, link.silence);
        link.is_cut |= filled.is_err();
        filled
    }
}

impl Read for Incoming {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let mut link = lock(&self.link);
        if self.rest == 0 && !self.ended && !into.is_empty() {
            let mut len = [0; 4];
            Self::fill(&mut link, &mut len)?;
            let len = usize::try_from(u32::from_le_bytes(len)).unwrap_or(usize::MAX);
            if len > MAX_CHUNK {
                return Err(io::Error::other("a chunk is longer than any sender's"));
            }
            (self.rest, self.ended) = (len, len == 0);
        }
        let len = into.len().min(self.rest);
        Self::fill(&mut link, &mut into[..len])?;
        self.rest -= len;
        Ok(len)
    }
}

/// Where a receiver waits for senders.
#[derive(Debug)]
pub(crate) struct Listener {
    listener: TcpListener,
    tls: TlsArguments,
}

impl Listener {
    /// Listens at `ADDRESS:PORT`.
    pub(crate) fn bind(address: &str, tls: TlsArguments) -> Result<Self, Error> {
        let parsed = address.parse::<SocketAddr>();
        let parsed = parsed
            .map_err(|_| Error::invalid("listen", address, "ADDRESS:PORT, like [::]:7010"))?;
        tls.check("listen", address, &[parsed])?;
        tls.check_server()?;
        let failed = |source| Error::io(format!("listening at {address}"), source);
        let listener = TcpListener::bind(parsed).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        Ok(Self { listener, tls })
    }

    /// Where it listens: the port is the kernel's choice where it was 0.
    pub(crate) fn address(&self) -> Result<SocketAddr, Error> {
        self.listener.local_addr().map_err(|source| Error::io("listening", source))
    }

    /// Waits for the next sender.
    pub(crate) fn accept(&self, stop: &Arc<Stop>) -> Result<Link, Error> {
        loop {
            stop.check()?;
            let mut polled = [PollFd::new(self.listener.as_fd(), PollFlags::POLLIN)];
            let wait = PollTimeout::try_from(STOP_WAIT).unwrap_or(PollTimeout::ZERO);
            let _ = poll(&mut polled, wait);
            match self.listener.accept() {
                Ok((tcp, peer)) => {
                    return Link::new(tcp, &peer.to_string(), stop, |tcp| self.tls.server(tcp));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(source) => {
                    // Without a descriptor for it the connection waits on, and the next try fails
                    // at once.
                    std::thread::sleep(STOP_WAIT);
                    return Err(Error::io("accepting a connection", source));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::increment::Identity;
    use super::*;

    fn hello() -> Hello {
        let snapshot = |id, name: &str| Identity {
            id,
            name: name.to_owned(),
            size_bytes: 64 << 20,
            made_unix_ms: 7,
        };
        let header = Header {
            pool_id: [5; 16],
            block_bytes: 4096,
            snapshot: snapshot(9, "db@tue"),
            base: Some(snapshot(7, "db@mon")),
            from_bytes: 0,
            is_compressed: false,
        };
        Hello { attach: true, name: "copy".to_owned(), header }
    }

    #[test]
    fn the_begin_is_what_the_description_says_byte_for_byte() {
        let bytes = hello().encode();
        assert_eq!(bytes.len(), 658);
        assert_eq!(bytes[..22], *b"blkdsend\x01\0\0\0\x01\0\0\0\x04\0copy");
        assert!(bytes[22..146].iter().all(|byte| *byte == 0));
        assert_eq!(bytes[146..], hello().header.encode());
        let whole: &[u8; HELLO_BYTES] = bytes.first_chunk().unwrap();
        assert_eq!(Hello::decode(whole), Ok(hello()));
        for (at, byte, problem) in [
            (0, b'x', "is no sender of blockd"),
            (8, 2, "speaks version 2: this blockd speaks 1"),
            (12, 2, "has sent a request that no version of blockd sends"),
            (17, 9, "has sent a request that no version of blockd sends"),
            (18, 0xff, "has sent a request that no version of blockd sends"),
            (200, 1, "has sent a stream that has a header that was changed"),
        ] {
            let mut changed = *whole;
            changed[at] = byte;
            let found = Hello::decode(&changed).unwrap_err();
            assert!(found.starts_with(problem), "{at}: {found}");
        }
    }

    /// The receiver may serve others for hours.
    #[test]
    fn a_sender_waits_for_its_turn_longer_than_for_anything_else() {
        let stop = Arc::new(Stop::default());
        let listener = Listener::bind("127.0.0.1:0", TlsArguments::default()).unwrap();
        let address = listener.address().unwrap().to_string();
        let there = std::thread::spawn({
            let stop = Arc::clone(&stop);
            move || {
                let mut link = listener.accept(&stop).unwrap();
                link.hello().unwrap();
                std::thread::sleep(Duration::from_millis(500));
                link.answer(&Reply::Send(12)).unwrap();
            }
        });
        let mut link = Link::connect(&address, &TlsArguments::default(), &stop).unwrap();
        link.silence = Duration::from_millis(200);
        link.begin(&hello()).unwrap();
        assert!(matches!(link.first_reply(), Ok(Reply::Send(12))));
        there.join().unwrap();
    }

    #[test]
    fn answers_and_chunks_cross_a_link() {
        let stop = Arc::new(Stop::default());
        let listener = Listener::bind("127.0.0.1:0", TlsArguments::default()).unwrap();
        let address = listener.address().unwrap().to_string();
        let there = std::thread::spawn({
            let stop = Arc::clone(&stop);
            move || {
                let mut link = listener.accept(&stop).unwrap();
                assert_eq!(link.hello().unwrap(), hello());
                link.answer(&Reply::Send(12)).unwrap();
                let link = Arc::new(Mutex::new(link));
                let mut bytes = Vec::new();
                Incoming::new(&link).read_to_end(&mut bytes).unwrap();
                assert_eq!(bytes, vec![3; MAX_CHUNK + 5]);
                let refused = Error::in_use("volume copy", "is\u{202e}\nin use");
                lock(&link).answer(&Reply::Refused(refused)).unwrap();
            }
        });
        let mut link = Link::connect(&address, &TlsArguments::default(), &stop).unwrap();
        link.begin(&hello()).unwrap();
        assert!(matches!(link.first_reply(), Ok(Reply::Send(12))));
        let link = Arc::new(Mutex::new(link));
        Outgoing(Arc::clone(&link)).write_all(&vec![3; MAX_CHUNK + 5]).unwrap();
        let reply = lock(&link).finish().unwrap();
        drop(link);
        there.join().unwrap();
        let Reply::Refused(error) = reply else { panic!("{reply:?}") };
        assert_eq!(error.kind(), blockd_media::error::ErrorKind::InUse);
        assert_eq!(error.to_string(), format!("refused by {address}: volume copy is  in use"));
    }
}
