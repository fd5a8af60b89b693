//! An NBD client for workloads that fio cannot run: writes with a flush after an exact number of
//! them, connections by the thousand, and an exact number of requests.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use blockd_nbd::client::{ConnectOptions, RawConnection, ServerAddress, Uri};
use blockd_nbd::codec::cmd::{DISC, FLUSH, READ, WRITE};
use blockd_nbd::codec::request::{HEADER_BYTES, Header};
use blockd_testkit::clock::Clock;

use super::fio::Settings;
use crate::fio::Figures;
use crate::load::{Event, Pattern};

/// Bytes of a block, of a reply without data.
const BLOCK: usize = 4096;
const REPLY: usize = 16;
/// Requests in flight.
const DEPTH: usize = 32;
/// Writes from one flush to the next.
const WRITES_PER_FLUSH: u64 = 16;

/// A negotiated connection.
#[derive(Debug)]
pub(crate) struct Client {
    stream: UnixStream,
    size: u64,
}

impl Client {
    /// Connects and negotiates.
    pub(crate) fn connect(uri: &str) -> Result<Self> {
        let Uri { server, export } = uri.parse()?;
        let ServerAddress::Unix(socket) = server else { bail!("{uri} is not on a Unix socket") };
        let stream = UnixStream::connect(socket)?;
        let RawConnection { stream, facts } =
            RawConnection::connect(stream, &export, &ConnectOptions::simple())?;
        Ok(Self { stream, size: facts.size })
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
                request(&mut message, kind, slot as u64, (offset, pattern.bytes));
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
        self.send(DISC, (0, 0))
    }

    /// Sends a request alone; the payload of a write is all the same.
    fn send(&mut self, kind: u16, range: (u64, usize)) -> Result<()> {
        let mut message = Vec::with_capacity(HEADER_BYTES + BLOCK);
        request(&mut message, kind, 0, range);
        Ok(self.stream.write_all(&message)?)
    }

    /// Reads the first block and says goodbye.
    pub(super) fn read_and_leave(mut self) -> Result<()> {
        self.send(READ, (0, BLOCK))?;
        let mut reply = [0; REPLY + BLOCK];
        self.stream.read_exact(&mut reply)?;
        ensure!(reply[4..8] == [0; 4], "the read failed");
        self.leave()
    }

    /// Waits for a reply without data.
    fn answered(&mut self) -> Result<()> {
        let mut reply = [0; REPLY];
        self.stream.read_exact(&mut reply)?;
        ensure!(reply[4..8] == [0; 4], "a write or a flush failed");
        Ok(())
    }

    /// Writes a block and flushes, again and again; returns how often.
    fn commit(mut self, seconds: f64, seed: u64) -> Result<u64> {
        let mut random = fastrand::Rng::with_seed(seed);
        let blocks = self.size / BLOCK as u64;
        ensure!(blocks > 0, "an empty export");
        let (clock, mut commits) = (Clock::start(), 0);
        while clock.seconds() < seconds {
            self.commit_one(random.u64(..blocks) * BLOCK as u64)?;
            commits += 1;
        }
        self.leave().map(|()| commits)
    }

    /// Writes a block and flushes.
    fn commit_one(&mut self, offset: u64) -> Result<()> {
        self.send(WRITE, (offset, BLOCK))?;
        self.answered()?;
        self.send(FLUSH, (0, 0))?;
        self.answered()
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
                    self.send(FLUSH, (0, 0))?;
                } else {
                    let offset = random.u64(..blocks) * BLOCK as u64;
                    self.send(WRITE, (offset, BLOCK))?;
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
        self.send(DISC, (0, 0))?;
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

/// A block written and flushed at a time on each connection. Counted are the blocks.
pub(super) fn commits(settings: Settings<'_>) -> Result<Figures> {
    let Settings { uri, seconds, connections, seed, .. } = settings;
    let clients: Result<Vec<Client>> = (0..connections).map(|_| Client::connect(uri)).collect();
    let clock = Clock::start();
    let commits: Result<Vec<u64>> = std::thread::scope(|scope| {
        let start = |(client, number): (Client, u64)| {
            scope.spawn(move || client.commit(seconds, seed.wrapping_mul(64) + number))
        };
        let threads: Vec<_> = clients?.into_iter().zip(0..).map(start).collect();
        let panicked = |_| Err(anyhow::anyhow!("a client panicked"));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).collect()
    });
    let operations = commits?.iter().sum::<u64>() as f64;
    Ok(Figures { iops: operations / clock.seconds(), operations })
}

/// A block written and flushed at each of these offsets, one after the other.
pub(super) fn commit_each(uri: &str, offsets: &[u64]) -> Result<Figures> {
    let mut client = Client::connect(uri)?;
    let clock = Clock::start();
    offsets.iter().try_for_each(|offset| client.commit_one(*offset))?;
    let (seconds, operations) = (clock.seconds(), offsets.len() as f64);
    client.leave()?;
    Ok(Figures { iops: operations / seconds, operations })
}

/// Appends a request with simple replies, and the payload of a write.
fn request(message: &mut Vec<u8>, kind: u16, cookie: u64, (offset, bytes): (u64, usize)) {
    Header { flags: 0, kind, cookie, offset, len: bytes as u64 }.encode(false, message);
    if kind == WRITE {
        message.resize(message.len() + bytes, 0xb5);
    }
}
