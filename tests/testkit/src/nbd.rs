//! A connection to a daemon's export with simple replies, for tests and the demo.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_nbd::client::{ConnectOptions, RawConnection, RawReply};
use blockd_nbd::codec::request::Header;
use blockd_nbd::codec::{cmd, flag};

/// A server that does not answer within this time has lost the request.
const PATIENCE: Duration = Duration::from_secs(120);

/// `NBD_CMD_FLAG_FUA`: durable when answered.
pub const FUA: u16 = flag::FUA;
/// `NBD_CMD_FLAG_NO_HOLE`: zeroes that keep their space.
pub const NO_HOLE: u16 = flag::NO_HOLE;

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Read,
    Write,
    Flush,
    Trim,
    WriteZeroes,
}

impl Kind {
    fn code(self) -> u16 {
        match self {
            Self::Read => cmd::READ,
            Self::Write => cmd::WRITE,
            Self::Flush => cmd::FLUSH,
            Self::Trim => cmd::TRIM,
            Self::WriteZeroes => cmd::WRITE_ZEROES,
        }
    }
}

/// A request to the server.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    pub kind: Kind,
    pub flags: u16,
    pub cookie: u64,
    pub offset: u64,
    pub len: u32,
}

/// A connection with an export chosen.
#[derive(Debug)]
pub struct Connection {
    raw: RawConnection<UnixStream>,
    /// Bytes of the export.
    pub size: u64,
}

impl Connection {
    /// Connects and chooses an export.
    ///
    /// # Errors
    /// When the server does not listen, there is no such export, or the server violates the
    /// protocol.
    pub fn open(socket: &Path, export: &str) -> Result<Self> {
        let stream = UnixStream::connect(socket)
            .with_context(|| format!("connecting to {}", socket.display()))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let raw = RawConnection::connect(stream, export, &ConnectOptions::simple())
            .with_context(|| format!("choosing export {export:?}"))?;
        let size = raw.facts.size;
        Ok(Self { raw, size })
    }

    /// The same connection, so that one thread may send while another one receives.
    ///
    /// # Errors
    /// When the process has no file descriptor left.
    pub fn try_clone(&self) -> Result<Self> {
        let raw =
            RawConnection { stream: self.raw.stream.try_clone()?, facts: self.raw.facts.clone() };
        Ok(Self { raw, size: self.size })
    }

    /// Sends a request; a write's data with it.
    ///
    /// # Errors
    /// When the connection is broken.
    pub fn send(&mut self, request: &Request, data: &[u8]) -> std::io::Result<()> {
        let Request { kind, flags, cookie, offset, len } = *request;
        let header = Header { flags, kind: kind.code(), cookie, offset, len: len.into() };
        self.raw.send(&header, if kind == Kind::Write { data } else { &[] })
    }

    /// Receives the next reply. After that of a successful read, [`Self::data`] has to follow.
    ///
    /// # Errors
    /// When the connection is broken, or the server violates the protocol.
    pub fn receive(&mut self) -> Result<RawReply> {
        Ok(self.raw.receive()?)
    }

    /// Receives the data of a read.
    ///
    /// # Errors
    /// When the connection is broken.
    pub fn data(&mut self, into: &mut [u8]) -> std::io::Result<()> {
        self.raw.stream.read_exact(into)
    }

    /// One request and its reply.
    ///
    /// # Errors
    /// When the connection breaks, or the server answers with an error.
    pub fn ask(&mut self, kind: Kind, offset: u64, data: &mut [u8], flags: u16) -> Result<()> {
        let len = u32::try_from(data.len())?;
        self.send(&Request { kind, flags, cookie: offset, offset, len }, data)?;
        let reply = self.receive()?;
        ensure!(reply.errno == 0, "{kind:?} at {offset}+{len}: error {}", reply.errno);
        if kind == Kind::Read {
            self.data(data)?;
        }
        Ok(())
    }

    /// Reads.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub fn read(&mut self, offset: u64, len: usize) -> Result<Vec<u8>> {
        let mut data = vec![0; len];
        self.ask(Kind::Read, offset, &mut data, 0)?;
        Ok(data)
    }

    /// Writes.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        self.ask(Kind::Write, offset, &mut data.to_vec(), 0)
    }

    /// Makes all that was answered durable.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub fn flush(&mut self) -> Result<()> {
        self.ask(Kind::Flush, 0, &mut [], 0)
    }
}
