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
use blockd_nbd::client::{ConnectOptions, RawConnection, greet, start_tls};
use blockd_nbd::codec::flag;
use blockd_nbd::codec::request::Header;
use nix::sys::socket::{
    self, AddressFamily, SockFlag, SockType, SockaddrIn, SockaddrLike, UnixAddr, bind, connect,
    setsockopt, sockopt,
};
use nix::sys::time::TimeVal;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};

pub(super) use blockd_nbd::codec::cmd::{BLOCK_STATUS, FLUSH, READ, TRIM, WRITE, WRITE_ZEROES};

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
pub(super) struct Client(RawConnection<Stream>);

impl Client {
    /// Connects and negotiates.
    ///
    /// # Errors
    /// When the server does not answer in time or refuses.
    pub(super) fn open(address: &Address, export: &str, manner: Manner) -> Result<Self> {
        let limit = manner.patience.unwrap_or(NEGOTIATION);
        let mut stream = Stream::open(address, manner.from, Some(limit)).context("connecting")?;
        greet(&mut stream).context("waiting for the server's greeting")?;
        if let Address::Tls(_, config) = address {
            start_tls(&mut stream)?;
            stream = encrypted(stream, config)?;
        }
        let Manner { extended, .. } = manner;
        let options =
            ConnectOptions { extended, base_allocation: extended, ..ConnectOptions::simple() };
        let connection = RawConnection::enter(stream, export, &options)?;
        let granted = connection.facts.extended && connection.facts.base_allocation.is_some();
        ensure!(granted == extended, "the server grants no extended headers and block status");
        connection.stream.patience(manner.patience)?;
        Ok(Self(connection))
    }

    /// A handle that ends the connection.
    pub(super) fn closer(&self) -> io::Result<Closer> {
        self.0.stream.closer()
    }

    /// Sends a request, and as much payload as the caller chooses.
    pub(super) fn send(&mut self, request: Request, payload: &[u8]) -> io::Result<()> {
        let Request { kind, offset, len } = request;
        let flags = if self.0.facts.extended && kind == WRITE { flag::PAYLOAD_LEN } else { 0 };
        self.0.send(&Header { flags, kind, cookie: 0, offset, len }, payload)
    }

    /// Waits for the next answer, and returns its error number, 0 for success. `data` takes what
    /// follows the answer to a read; with extended headers it is skipped.
    pub(super) fn answer(&mut self, data: &mut [u8]) -> Result<u32> {
        let reply = self.0.receive()?;
        if reply.errno == 0 && !self.0.facts.extended {
            self.0.stream.read_exact(data)?;
        }
        Ok(reply.errno)
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
