//! A client of the NBD protocol, small and independent of the daemon's own code, written from the
//! protocol's document: fixed newstyle, `NBD_OPT_GO`, simple replies. The two halves of a
//! connection go to different threads, so that neither has to wait for the other.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

const SERVER_MAGIC: u64 = 0x4e42_444d_4147_4943;
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;

/// Fixed newstyle, and no zeroes after the old form of negotiation; client and server alike.
const FLAGS: u16 = 3;
const OPTION_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const INFO_EXPORT: u16 = 0;

/// An option's reply beyond this is not from a server.
const LONGEST_OPTION: usize = 64 << 10;
/// A server that does not answer within this time has lost the request.
const PATIENCE: Duration = Duration::from_secs(120);

/// `NBD_CMD_FLAG_FUA`: durable when answered.
pub const FUA: u16 = 1;
/// `NBD_CMD_FLAG_NO_HOLE`: zeroes that keep their space.
pub const NO_HOLE: u16 = 2;

/// A request to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Read,
    Write,
    Disconnect,
    Flush,
    Trim,
    WriteZeroes,
}

impl Kind {
    fn code(self) -> u16 {
        match self {
            Self::Read => 0,
            Self::Write => 1,
            Self::Disconnect => 2,
            Self::Flush => 3,
            Self::Trim => 4,
            Self::WriteZeroes => 6,
        }
    }
}

/// A request as it goes over the wire.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    pub kind: Kind,
    pub flags: u16,
    pub cookie: u64,
    pub offset: u64,
    pub len: u32,
}

/// An answer; the data of a read follows it.
#[derive(Clone, Copy, Debug)]
pub struct Reply {
    pub cookie: u64,
    /// 0, or an error number of the protocol.
    pub error: u32,
}

/// A connection with an export chosen.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
    /// Bytes of the export.
    pub size: u64,
    /// `NBD_FLAG_*` of the export.
    pub flags: u16,
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
        let mut connection = Self { stream, size: 0, flags: 0 };
        connection.negotiate(export).with_context(|| format!("choosing export {export:?}"))?;
        Ok(connection)
    }

    fn negotiate(&mut self, export: &str) -> Result<()> {
        ensure!(self.u64()? == SERVER_MAGIC, "no NBD server");
        ensure!(self.u64()? == OPTION_MAGIC, "not the newstyle form");
        ensure!(self.u16()? & FLAGS == FLAGS, "not the fixed newstyle form");
        let name = export.as_bytes();
        let length = u32::try_from(name.len())?;
        let mut out = u32::from(FLAGS).to_be_bytes().to_vec();
        out.extend(OPTION_MAGIC.to_be_bytes());
        out.extend(OPTION_GO.to_be_bytes());
        out.extend((4 + length + 2).to_be_bytes());
        out.extend(length.to_be_bytes());
        out.extend(name);
        // No further information is asked for.
        out.extend(0_u16.to_be_bytes());
        self.stream.write_all(&out)?;
        loop {
            ensure!(self.u64()? == OPTION_REPLY_MAGIC, "no reply to an option");
            ensure!(self.u32()? == OPTION_GO, "a reply to another option");
            let kind = self.u32()?;
            let length = usize::try_from(self.u32()?)?;
            ensure!(length <= LONGEST_OPTION, "a reply of {length} bytes");
            let mut data = vec![0; length];
            self.stream.read_exact(&mut data)?;
            match (kind, data.as_slice()) {
                (REPLY_ACK, _) => break,
                (REPLY_INFO, [0, 0, size @ .., high, low]) if size.len() == 8 => {
                    self.size = u64::from_be_bytes(size.try_into()?);
                    self.flags = u16::from_be_bytes([*high, *low]);
                }
                (REPLY_INFO, _) => {}
                (kind, text) => bail!("refused: {kind:#x} {}", String::from_utf8_lossy(text)),
            }
        }
        ensure!(self.flags & 1 == 1, "no NBD_INFO_EXPORT ({INFO_EXPORT}) came");
        Ok(())
    }

    fn u16(&mut self) -> Result<u16> {
        let mut bytes = [0; 2];
        self.stream.read_exact(&mut bytes)?;
        Ok(u16::from_be_bytes(bytes))
    }

    fn u32(&mut self) -> Result<u32> {
        let mut bytes = [0; 4];
        self.stream.read_exact(&mut bytes)?;
        Ok(u32::from_be_bytes(bytes))
    }

    fn u64(&mut self) -> Result<u64> {
        let mut bytes = [0; 8];
        self.stream.read_exact(&mut bytes)?;
        Ok(u64::from_be_bytes(bytes))
    }

    /// The half that sends requests and the half that reads replies.
    ///
    /// # Errors
    /// When the process has no file descriptor left.
    pub fn split(self) -> Result<(Asking, Listening)> {
        let asking = Asking(self.stream.try_clone()?);
        Ok((asking, Listening(self.stream)))
    }

    /// One request and its answer.
    ///
    /// # Errors
    /// When the connection breaks, or the server answers with an error.
    pub fn ask(&mut self, kind: Kind, offset: u64, data: &mut [u8], flags: u16) -> Result<()> {
        let len = u32::try_from(data.len())?;
        let request = Request { kind, flags, cookie: offset, offset, len };
        send(&mut self.stream, &request, data)?;
        let reply = receive(&mut self.stream)?;
        ensure!(reply.error == 0, "{kind:?} at {offset}+{len}: error {}", reply.error);
        if kind == Kind::Read {
            self.stream.read_exact(data)?;
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

/// The half of a connection that sends requests.
#[derive(Debug)]
pub struct Asking(UnixStream);

impl Asking {
    /// Sends a request; a write's data with it.
    ///
    /// # Errors
    /// When the connection is broken.
    pub fn send(&mut self, request: &Request, data: &[u8]) -> std::io::Result<()> {
        send(&mut self.0, request, data)
    }
}

/// The half of a connection that listens.
#[derive(Debug)]
pub struct Listening(UnixStream);

impl Listening {
    /// The next answer. After that of a read, [`Self::data`] has to follow.
    ///
    /// # Errors
    /// When the connection is broken, or what comes is no answer.
    pub fn receive(&mut self) -> Result<Reply> {
        receive(&mut self.0)
    }

    /// The data of a read.
    ///
    /// # Errors
    /// When the connection is broken.
    pub fn data(&mut self, into: &mut [u8]) -> std::io::Result<()> {
        self.0.read_exact(into)
    }
}

fn send(stream: &mut UnixStream, request: &Request, data: &[u8]) -> std::io::Result<()> {
    let mut header = [0; 28];
    header[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
    header[4..6].copy_from_slice(&request.flags.to_be_bytes());
    header[6..8].copy_from_slice(&request.kind.code().to_be_bytes());
    header[8..16].copy_from_slice(&request.cookie.to_be_bytes());
    header[16..24].copy_from_slice(&request.offset.to_be_bytes());
    header[24..].copy_from_slice(&request.len.to_be_bytes());
    stream.write_all(&header)?;
    if request.kind == Kind::Write {
        stream.write_all(data)?;
    }
    Ok(())
}

fn receive(stream: &mut UnixStream) -> Result<Reply> {
    let mut header = [0; 16];
    stream.read_exact(&mut header)?;
    let (magic, rest) = header.split_at(4);
    let (error, cookie) = rest.split_at(4);
    let magic = u32::from_be_bytes(magic.try_into()?);
    ensure!(magic == REPLY_MAGIC, "no simple reply: {magic:#x}");
    Ok(Reply {
        cookie: u64::from_be_bytes(cookie.try_into()?),
        error: u32::from_be_bytes(error.try_into()?),
    })
}
