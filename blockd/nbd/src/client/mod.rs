//! A small NBD client, for import, export and tests.
//!
//! [`Client`] blocks. For speed, several requests can be in flight: `send` them until there is no
//! `room`, and `receive` the completions. For convenience, each kind has a function that waits.
//!
//! A server that holds replies back until the client reads them may also stop reading requests. So
//! a client with large reads in flight should not send large writes on the same connection before
//! they are received.
//!
//! [`RawConnection`] shares the negotiation, and leaves requests and replies to its user.

mod error;
mod handshake;
mod raw;
mod reply;
mod uri;

use std::collections::{HashMap, VecDeque};
use std::io::{self, BufReader, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::time::Duration;

pub use error::{ClientError, RequestError};
pub use handshake::{ExportFacts, ListedExport};
pub use raw::{RawConnection, RawReply, greet, start_tls};
pub use uri::{DEFAULT_PORT, ServerAddress, Uri};

use crate::codec::request::Header;
use crate::codec::{changes, cmd, flag, state, transmission};
use handshake::Negotiation;
use reply::Pending;

/// Headers and small payloads gather in a buffer of this size before they are sent.
const SEND_BUFFER_BYTES: usize = 64 << 10;

/// Replies are read through a buffer of this size; larger data bypasses it.
const RECEIVE_BUFFER_BYTES: usize = 64 << 10;

/// The requested features, and the time limit.
#[derive(Clone, Debug)]
pub struct ConnectOptions {
    pub structured: bool,
    pub extended: bool,
    /// Needed for `block_status`.
    pub base_allocation: bool,
    /// Further metadata contexts, for `changes`.
    pub contexts: Vec<String>,
    /// The longest wait for anything to come or go.
    pub timeout: Duration,
    /// The most requests in flight.
    pub depth: usize,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self {
            structured: true,
            extended: true,
            base_allocation: true,
            contexts: Vec::new(),
            timeout: Duration::from_secs(30),
            depth: 16,
        }
    }
}

impl ConnectOptions {
    /// No features, so that all replies are simple.
    #[must_use]
    pub fn simple() -> Self {
        Self { structured: false, extended: false, base_allocation: false, ..Self::default() }
    }
}

/// A request. Lengths are bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    Read { offset: u64, len: u32 },
    Write { offset: u64, data: &'a [u8], fua: bool },
    Flush,
    Trim { offset: u64, len: u64 },
    WriteZeroes { offset: u64, len: u64, no_hole: bool, fast_zero: bool },
    Cache { offset: u64, len: u64 },
    BlockStatus { offset: u64, len: u64 },
}

/// A request that is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The cookie that `send` returned.
    pub cookie: u64,
    /// `codec::cmd`.
    pub command: u16,
    pub offset: u64,
    pub len: u64,
    pub result: Result<(), RequestError>,
    /// The data that was read; give it back with `recycle`.
    pub data: Vec<u8>,
    /// The answer to a block status, for each context.
    pub contexts: Vec<ContextRanges>,
}

/// The answer of a metadata context about a range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContextRanges {
    /// Which context, as it was negotiated.
    pub id: u32,
    /// Lengths and flags. The first begins where the request did, each other where the one before
    /// it ends.
    pub ranges: Vec<(u64, u64)>,
}

/// A range of `blockd:changed-since` or `blockd:allocated`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangedRange {
    pub len: u64,
    /// Whether it has to be copied, or made to read as zeroes.
    pub changed: bool,
    /// Whether it reads as zeroes.
    pub zero: bool,
}

/// A range of `base:allocation`. The first begins where the request did, each other where the one
/// before it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusRange {
    pub len: u64,
    /// Nothing is allocated for it.
    pub hole: bool,
    /// Whether it reads as zeroes.
    pub zero: bool,
}

/// A connection to an export.
pub struct Client {
    stream: Stream,
    facts: ExportFacts,
    depth: usize,
    next_cookie: u64,
    unsent: Vec<u8>,
    pending: HashMap<u64, Pending>,
    /// Done while something else was waited for.
    done: VecDeque<Completion>,
    buffers: Vec<Vec<u8>>,
    broken: bool,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("Client");
        shown.field("facts", &self.facts).field("in_flight", &self.pending.len());
        shown.finish_non_exhaustive()
    }
}

/// Both directions of a socket.
struct Stream {
    reader: BufReader<Box<dyn Read + Send>>,
    writer: Box<dyn Write + Send>,
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.reader.read(buffer)
    }
}

impl Write for Stream {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.writer.write(buffer)
    }

    fn write_vectored(&mut self, buffers: &[io::IoSlice<'_>]) -> io::Result<usize> {
        self.writer.write_vectored(buffers)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}

/// The exports of a server.
pub fn list(server: &ServerAddress, timeout: Duration) -> Result<Vec<ListedExport>, ClientError> {
    let mut stream = open(server, timeout)?;
    greet(&mut stream)?;
    Negotiation { stream: &mut stream }.list()
}

impl Client {
    /// Connects and negotiates. Features that the server does not grant are not used; `facts` has
    /// the granted ones.
    pub fn connect(uri: &Uri, options: &ConnectOptions) -> Result<Self, ClientError> {
        let stream = open(&uri.server, options.timeout)?;
        let RawConnection { stream, facts } = RawConnection::connect(stream, &uri.export, options)?;
        Ok(Self {
            stream,
            facts,
            depth: options.depth.max(1),
            next_cookie: 1,
            unsent: Vec::with_capacity(SEND_BUFFER_BYTES),
            pending: HashMap::new(),
            done: VecDeque::new(),
            buffers: Vec::new(),
            broken: false,
        })
    }

    /// The facts that the server sent for the export.
    #[must_use]
    pub fn facts(&self) -> &ExportFacts {
        &self.facts
    }

    /// Bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.facts.size
    }

    #[must_use]
    pub fn read_only(&self) -> bool {
        self.facts.flags & transmission::READ_ONLY != 0
    }

    /// Requests that were sent and not received.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.pending.len() + self.done.len()
    }

    /// Whether one more may be in flight.
    #[must_use]
    pub fn room(&self) -> bool {
        self.in_flight() < self.depth
    }

    /// Sends a request and does not wait for its reply. Small ones may stay in a buffer until
    /// the next `receive`.
    pub fn send(&mut self, request: Request<'_>) -> Result<u64, ClientError> {
        if self.broken {
            return Err(ClientError::Broken);
        }
        let parts = Parts::of(request);
        self.check(&parts)?;
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let mut data = Vec::new();
        if parts.command == cmd::READ {
            data = self.buffers.pop().unwrap_or_default();
            data.resize(usize::try_from(parts.len).unwrap_or(0), 0);
        }
        self.put_header(&parts, cookie);
        let Parts { command, offset, len, .. } = parts;
        let completion =
            Completion { cookie, command, offset, len, result: Ok(()), data, contexts: Vec::new() };
        self.pending.insert(cookie, Pending { completion, filled: 0 });
        let sent = self.put_payload(parts.payload);
        self.check_io(sent)?;
        Ok(cookie)
    }

    /// Waits for a request to be done, whichever it is. There has to be one in flight.
    pub fn receive(&mut self) -> Result<Completion, ClientError> {
        if let Some(done) = self.done.pop_front() {
            return Ok(done);
        }
        if self.broken {
            return Err(ClientError::Broken);
        }
        let received = self.receive_one();
        self.check_io(received)
    }

    /// Takes a buffer back, to be used again.
    pub fn recycle(&mut self, data: Vec<u8>) {
        if self.buffers.len() < self.depth {
            self.buffers.push(data);
        }
    }

    /// Reads, and waits for it.
    pub fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), ClientError> {
        let longest = usize::try_from(self.facts.block_max).unwrap_or(usize::MAX);
        let mut at = offset;
        for part in into.chunks_mut(longest) {
            let len = u32::try_from(part.len()).unwrap_or(u32::MAX);
            let done = self.call("read", Request::Read { offset: at, len })?;
            part.copy_from_slice(&done.data);
            at += u64::from(len);
            self.recycle(done.data);
        }
        Ok(())
    }

    /// Writes, and waits for it.
    pub fn write(&mut self, offset: u64, data: &[u8], fua: bool) -> Result<(), ClientError> {
        let longest = usize::try_from(self.facts.block_max).unwrap_or(usize::MAX);
        let mut at = offset;
        for data in data.chunks(longest) {
            self.call("write", Request::Write { offset: at, data, fua })?;
            at += u64::try_from(data.len()).unwrap_or(0);
        }
        Ok(())
    }

    /// Returns when everything that was answered before is durable.
    pub fn flush(&mut self) -> Result<(), ClientError> {
        self.call("flush", Request::Flush).map(drop)
    }

    /// Says that the range is no longer needed.
    pub fn trim(&mut self, offset: u64, len: u64) -> Result<(), ClientError> {
        for (offset, len) in self.pieces(offset, len) {
            self.call("trim", Request::Trim { offset, len })?;
        }
        Ok(())
    }

    /// Makes the range read as zeroes; with `no_hole`, it keeps its space.
    pub fn write_zeroes(
        &mut self,
        offset: u64,
        len: u64,
        no_hole: bool,
    ) -> Result<(), ClientError> {
        for (offset, len) in self.pieces(offset, len) {
            let request = Request::WriteZeroes { offset, len, no_hole, fast_zero: false };
            self.call("write zeroes", request)?;
        }
        Ok(())
    }

    /// The status of the start of the range, at most of all of it.
    pub fn block_status(&mut self, offset: u64, len: u64) -> Result<Vec<StatusRange>, ClientError> {
        let ranges = self.status_of(self.facts.base_allocation, offset, len)?;
        let status = |(len, flags): (u64, u64)| StatusRange {
            len,
            hole: flags & u64::from(state::HOLE) != 0,
            zero: flags & u64::from(state::ZERO) != 0,
        };
        Ok(ranges.into_iter().map(status).collect())
    }

    /// The same of what has changed, by the context that was asked for first of
    /// [`ConnectOptions::contexts`].
    pub fn changes(&mut self, offset: u64, len: u64) -> Result<Vec<ChangedRange>, ClientError> {
        let id = self.facts.contexts.first().and_then(|(_, id)| *id);
        let ranges = self.status_of(id, offset, len)?;
        let status = |(len, flags): (u64, u64)| ChangedRange {
            len,
            changed: flags & u64::from(changes::CHANGED) != 0,
            zero: flags & u64::from(changes::ZERO) != 0,
        };
        Ok(ranges.into_iter().map(status).collect())
    }

    fn status_of(
        &mut self,
        context: Option<u32>,
        offset: u64,
        len: u64,
    ) -> Result<Vec<(u64, u64)>, ClientError> {
        let Some((offset, len)) = self.pieces(offset, len).into_iter().next() else {
            return Ok(Vec::new());
        };
        let what = "block status";
        let Some(id) = context else {
            let why = "the server has no map to show";
            return Err(ClientError::BadRequest { what, offset, len, why });
        };
        let contexts = self.call(what, Request::BlockStatus { offset, len })?.contexts;
        let own = contexts.into_iter().find(|context| context.id == id);
        let mut ranges = own.map(|context| context.ranges).unwrap_or_default();
        let mut left = len;
        ranges.retain_mut(|(range, _)| {
            *range = (*range).min(left);
            left -= *range;
            *range > 0
        });
        Ok(ranges)
    }

    /// Says goodbye. Without it the server sees the connection end, which is as good.
    pub fn disconnect(mut self) -> Result<(), ClientError> {
        let parts = Parts {
            command: cmd::DISC,
            flags: 0,
            offset: 0,
            len: 0,
            payload: &[],
            what: "goodbye",
        };
        self.put_header(&parts, 0);
        self.send_buffered()
    }

    /// Ranges that a request of this connection can name.
    fn pieces(&self, offset: u64, len: u64) -> Vec<(u64, u64)> {
        // Without extended headers a length has 32 bits. A multiple of every block size.
        let longest = if self.facts.extended { u64::MAX } else { 1 << 31 };
        let mut pieces = Vec::new();
        let (mut at, mut left) = (offset, len);
        while left > 0 {
            let piece = left.min(longest);
            pieces.push((at, piece));
            at = at.saturating_add(piece);
            left -= piece;
        }
        pieces
    }

    fn call(
        &mut self,
        what: &'static str,
        request: Request<'_>,
    ) -> Result<Completion, ClientError> {
        let cookie = self.send(request)?;
        loop {
            let received = self.receive_one();
            let done = self.check_io(received)?;
            if done.cookie != cookie {
                self.done.push_back(done);
                continue;
            }
            return match &done.result {
                Ok(()) => Ok(done),
                Err(error) => Err(ClientError::Request { what, error: error.clone() }),
            };
        }
    }

    /// Rejects a request that the server would refuse: its answer to it could be to disconnect.
    fn check(&self, parts: &Parts<'_>) -> Result<(), ClientError> {
        let carries_data = matches!(parts.command, cmd::READ | cmd::WRITE);
        let longest = if carries_data {
            self.facts.block_max.into()
        } else if self.facts.extended {
            u64::MAX
        } else {
            u32::MAX.into()
        };
        let why = if parts.len > longest {
            "too long"
        } else if parts.offset.checked_add(parts.len).is_none_or(|end| end > self.facts.size) {
            "past the end"
        } else if parts.command == cmd::BLOCK_STATUS && !self.facts.has_context() {
            "the server has no map to show"
        } else {
            return Ok(());
        };
        let Parts { what, offset, len, .. } = *parts;
        Err(ClientError::BadRequest { what, offset, len, why })
    }

    fn put_header(&mut self, parts: &Parts<'_>, cookie: u64) {
        let Parts { command: kind, offset, len, .. } = *parts;
        let extended = self.facts.extended;
        let payload = extended && kind == cmd::WRITE;
        let flags = parts.flags | if payload { flag::PAYLOAD_LEN } else { 0 };
        Header { flags, kind, cookie, offset, len }.encode(extended, &mut self.unsent);
    }

    fn put_payload(&mut self, payload: &[u8]) -> Result<(), ClientError> {
        if self.unsent.len() + payload.len() <= SEND_BUFFER_BYTES {
            self.unsent.extend_from_slice(payload);
            return Ok(());
        }
        let sent = reply::write_both(&mut self.stream, &self.unsent, payload);
        self.unsent.clear();
        Ok(sent?)
    }

    fn send_buffered(&mut self) -> Result<(), ClientError> {
        let sent = self.stream.write_all(&self.unsent);
        self.unsent.clear();
        Ok(sent?)
    }

    fn receive_one(&mut self) -> Result<Completion, ClientError> {
        if !self.unsent.is_empty() {
            self.send_buffered()?;
        }
        let ExportFacts { structured, extended, .. } = self.facts;
        loop {
            let head = reply::head(&mut self.stream.reader, structured, extended)?;
            let Some(pending) = self.pending.get_mut(&head.cookie) else {
                return Err(ClientError::Protocol("a reply to what was not asked"));
            };
            reply::body(&mut self.stream.reader, head, structured, pending)?;
            if head.done
                && let Some(pending) = self.pending.remove(&head.cookie)
            {
                return Ok(pending.completion);
            }
        }
    }

    fn check_io<T>(&mut self, result: Result<T, ClientError>) -> Result<T, ClientError> {
        self.broken |= result.is_err();
        result
    }
}

/// A request, taken apart.
struct Parts<'a> {
    command: u16,
    flags: u16,
    offset: u64,
    len: u64,
    payload: &'a [u8],
    what: &'static str,
}

impl<'a> Parts<'a> {
    fn of(request: Request<'a>) -> Self {
        let when = |on: bool, bit: u16| if on { bit } else { 0 };
        let plain = |command, offset, len, what| Self {
            command,
            flags: 0,
            offset,
            len,
            payload: &[],
            what,
        };
        match request {
            Request::Read { offset, len } => plain(cmd::READ, offset, len.into(), "read"),
            Request::Write { offset, data, fua } => {
                let len = u64::try_from(data.len()).unwrap_or(u64::MAX);
                let flags = when(fua, flag::FUA);
                Self { flags, payload: data, ..plain(cmd::WRITE, offset, len, "write") }
            }
            Request::Flush => plain(cmd::FLUSH, 0, 0, "flush"),
            Request::Trim { offset, len } => plain(cmd::TRIM, offset, len, "trim"),
            Request::WriteZeroes { offset, len, no_hole, fast_zero } => {
                let flags = when(no_hole, flag::NO_HOLE) | when(fast_zero, flag::FAST_ZERO);
                Self { flags, ..plain(cmd::WRITE_ZEROES, offset, len, "write zeroes") }
            }
            Request::Cache { offset, len } => plain(cmd::CACHE, offset, len, "cache"),
            Request::BlockStatus { offset, len } => {
                plain(cmd::BLOCK_STATUS, offset, len, "block status")
            }
        }
    }
}

fn open(server: &ServerAddress, timeout: Duration) -> Result<Stream, ClientError> {
    let failed = |source| ClientError::Connect { address: server.to_string(), source };
    match server {
        ServerAddress::Unix(path) => {
            let stream = UnixStream::connect(path).map_err(failed)?;
            stream.set_read_timeout(Some(timeout)).map_err(failed)?;
            stream.set_write_timeout(Some(timeout)).map_err(failed)?;
            let reader = stream.try_clone().map_err(failed)?;
            Ok(Stream { reader: buffered(Box::new(reader)), writer: Box::new(stream) })
        }
        ServerAddress::Tcp { host, port } => {
            let addresses = (host.as_str(), *port).to_socket_addrs().map_err(failed)?;
            let mut last = io::Error::from(io::ErrorKind::NotFound);
            for address in addresses {
                let stream = match TcpStream::connect_timeout(&address, timeout) {
                    Ok(stream) => stream,
                    Err(error) => {
                        last = error;
                        continue;
                    }
                };
                stream.set_nodelay(true).map_err(failed)?;
                stream.set_read_timeout(Some(timeout)).map_err(failed)?;
                stream.set_write_timeout(Some(timeout)).map_err(failed)?;
                let reader = stream.try_clone().map_err(failed)?;
                return Ok(Stream { reader: buffered(Box::new(reader)), writer: Box::new(stream) });
            }
            Err(failed(last))
        }
    }
}

fn buffered(reader: Box<dyn Read + Send>) -> BufReader<Box<dyn Read + Send>> {
    BufReader::with_capacity(RECEIVE_BUFFER_BYTES, reader)
}
