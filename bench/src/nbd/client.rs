//! An NBD client for workloads that fio cannot run: writes with a flush after an exact number of
//! them, connections by the thousand, and an exact number of requests.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::fio::{Figures, Settings};
use crate::clock::Clock;
use crate::load::{Event, Pattern};

/// The option that names the export and ends negotiation.
const GO: u32 = 7;
/// The reply to it that ends negotiation.
const ACKNOWLEDGED: u32 = 1;
/// The information that holds the export's size.
const EXPORT: [u8; 2] = [0, 0];

/// Bytes of a block, of a request's header, of a reply without data.
const BLOCK: usize = 4096;
const REQUEST: usize = 28;
const REPLY: usize = 16;
/// The offset of the cookie in a request's header.
const COOKIE: std::ops::Range<usize> = 8..16;
/// Requests in flight.
const DEPTH: usize = 32;
/// Writes from one flush to the next.
const WRITES_PER_FLUSH: u64 = 16;

/// Commands.
const READ: u16 = 0;
const WRITE: u16 = 1;
const DISCONNECT: u16 = 2;
const FLUSH: u16 = 3;

/// A negotiated connection.
#[derive(Debug)]
pub(crate) struct Client {
    stream: UnixStream,
    size: u64,
}

impl Client {
    /// Connects and negotiates.
    pub(crate) fn connect(uri: &str) -> Result<Self> {
        let (export, socket) = uri
            .strip_prefix("nbd+unix:///")
            .and_then(|rest| rest.split_once("?socket="))
            .with_context(|| format!("{uri} is not on a Unix socket"))?;
        let mut stream = UnixStream::connect(socket)?;
        let greeting: [u8; 18] = receive(&mut stream)?;
        ensure!(greeting.starts_with(b"NBDMAGICIHAVEOPT"), "no greeting");
        // Fixed newstyle, no padding of zeroes.
        let mut message = 3_u32.to_be_bytes().to_vec();
        message.extend(b"IHAVEOPT");
        message.extend(GO.to_be_bytes());
        let name = u32::try_from(export.len())?;
        message.extend((name + 6).to_be_bytes());
        message.extend(name.to_be_bytes());
        message.extend(export.as_bytes());
        message.extend([0; 2]);
        stream.write_all(&message)?;
        let mut size = 0;
        loop {
            let reply: [u8; 20] = receive(&mut stream)?;
            let number = |from: usize| -> Result<u32> {
                Ok(u32::from_be_bytes(reply[from..from + 4].try_into()?))
            };
            let (kind, len) = (number(12)?, usize::try_from(number(16)?)?);
            ensure!(kind >> 31 == 0 && len < BLOCK, "option refused: {kind:#x}");
            let mut payload = vec![0; len];
            stream.read_exact(&mut payload)?;
            if kind == ACKNOWLEDGED {
                return Ok(Self { stream, size });
            }
            if payload.starts_with(&EXPORT) && len >= 10 {
                size = u64::from_be_bytes(payload[2..10].try_into()?);
            }
        }
    }

    /// Fails when no byte comes for so long.
    pub(crate) fn with_patience(self, patience: Duration) -> Result<Self> {
        self.stream.set_read_timeout(Some(patience))?;
        Ok(self)
    }

    /// Keeps `pattern.depth` requests in flight until `event` says that there were enough, and
    /// waits for those that are left. All requests that become possible at once are sent at once.
    ///
    /// `event` is called before each request and after each reply, with the request's number among
    /// those in flight.
    ///
    /// # Errors
    /// When the server hangs up, or fails a request.
    pub(crate) fn run(
        &mut self,
        pattern: &Pattern,
        mut event: impl FnMut(Event) -> bool,
    ) -> Result<()> {
        let mut offsets = pattern.offsets();
        let kind = if pattern.write { WRITE } else { READ };
        let reply_bytes = if pattern.write { REPLY } else { REPLY + pattern.bytes };
        let mut replies = vec![0; reply_bytes * pattern.depth];
        let mut filled = 0;
        let mut free: Vec<usize> = (0..pattern.depth).rev().collect();
        let mut message = Vec::new();
        let mut going = true;
        loop {
            message.clear();
            while going && let Some(slot) = free.pop() {
                going = event(Event::Start(slot));
                if !going {
                    free.push(slot);
                    break;
                }
                let offset = offsets.next().context("the offsets never end")?;
                let mut header = request(kind, offset, pattern.bytes);
                header[COOKIE].copy_from_slice(&u64::try_from(slot)?.to_be_bytes());
                message.extend(header);
                if pattern.write {
                    message.resize(message.len() + pattern.bytes, 0xb5);
                }
            }
            self.stream.write_all(&message)?;
            if free.len() == pattern.depth {
                return Ok(());
            }
            let more = self.stream.read(&mut replies[filled..])?;
            ensure!(more > 0, "the server hung up");
            filled += more;
            let whole = filled / reply_bytes * reply_bytes;
            for reply in replies[..whole].chunks_exact(reply_bytes) {
                ensure!(reply[4..8] == [0; 4], "a request failed");
                let slot = usize::try_from(u64::from_be_bytes(reply[8..REPLY].try_into()?))?;
                free.push(slot);
                event(Event::End(slot));
            }
            if whole > 0 {
                replies.copy_within(whole..filled, 0);
                filled -= whole;
            }
        }
    }

    /// Ends the connection.
    pub(crate) fn leave(mut self) -> Result<()> {
        Ok(self.stream.write_all(&request(DISCONNECT, 0, 0))?)
    }

    /// Reads the first block and says goodbye.
    pub(super) fn read_and_leave(mut self) -> Result<()> {
        self.stream.write_all(&request(READ, 0, BLOCK))?;
        let reply: [u8; REPLY + BLOCK] = receive(&mut self.stream)?;
        ensure!(reply[4..8] == [0; 4], "the read failed");
        Ok(self.stream.write_all(&request(DISCONNECT, 0, 0))?)
    }

    fn write_and_flush(mut self, seconds: f64, seed: u64) -> Result<Figures> {
        let mut random = fastrand::Rng::with_seed(seed);
        let blocks = self.size / BLOCK as u64;
        ensure!(blocks > 0, "an empty export");
        let mut buffer = [0; DEPTH * REPLY];
        let (mut sent, mut in_flight, mut part) = (0_u64, 0, 0);
        let clock = Clock::start();
        let mut going = true;
        let mut flush_is_due = false;
        while going || in_flight > 0 {
            while going && in_flight < DEPTH {
                if std::mem::take(&mut flush_is_due) {
                    self.stream.write_all(&request(FLUSH, 0, 0))?;
                } else {
                    let offset = random.u64(..blocks) * BLOCK as u64;
                    let mut message = request(WRITE, offset, BLOCK);
                    message.resize(REQUEST + BLOCK, 0xb5);
                    self.stream.write_all(&message)?;
                    sent += 1;
                    flush_is_due = sent.is_multiple_of(WRITES_PER_FLUSH);
                }
                in_flight += 1;
            }
            let more = self.stream.read(&mut buffer[part..])?;
            ensure!(more > 0, "the server hung up");
            let bytes = part + more;
            for reply in buffer[..bytes].chunks_exact(REPLY) {
                ensure!(reply[4..8] == [0; 4], "a write or a flush failed");
                in_flight -= 1;
            }
            part = bytes % REPLY;
            buffer.copy_within(bytes - part..bytes, 0);
            going = clock.seconds() < seconds;
        }
        let elapsed = clock.seconds();
        self.stream.write_all(&request(DISCONNECT, 0, 0))?;
        let operations = sent as f64;
        Ok(Figures { iops: operations / elapsed, operations })
    }
}

/// Random writes of 4 KiB, [`DEPTH`] requests in flight, every seventeenth of them a flush. Counted
/// are the writes.
pub(super) fn write_and_flush(settings: Settings<'_>) -> Result<Figures> {
    let client = Client::connect(settings.uri)?;
    client.write_and_flush(settings.seconds, settings.seed)
}

fn request(kind: u16, offset: u64, len: usize) -> Vec<u8> {
    let mut request = Vec::with_capacity(REQUEST + BLOCK);
    request.extend(0x2560_9513_u32.to_be_bytes());
    request.extend([0; 2]);
    request.extend(kind.to_be_bytes());
    request.extend([0; 8]);
    request.extend(offset.to_be_bytes());
    // A few MiB at most.
    request.extend(u32::try_from(len).unwrap_or(0).to_be_bytes());
    request
}

fn receive<const N: usize>(stream: &mut UnixStream) -> Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}
