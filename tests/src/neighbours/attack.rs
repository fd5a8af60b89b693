//! The neighbours: loads that are too much for others, and clients that misbehave.

use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Result, ensure};
use blockd_testkit::clock::Clock;
use blockd_testkit::tools;
use clap::ValueEnum;
use serde::Serialize;

use super::client::{
    self, ATTACKER, Address, BLOCK_STATUS, Client, Closer, Manner, READ, Request, TRIM, WRITE,
    WRITE_ZEROES,
};
use super::site::{EXTENT, FULL, NEIGHBOUR, Site, Transport, VOLUME, WRITTEN, export};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const TIB: u64 = 1 << 40;

/// Niceness of the threads of attackers. They run on the processors of the daemon, where the kernel
/// would give each of them as much as a worker of the daemon; what is tested is the daemon's share
/// of its own time.
const NICE: i32 = 19;
/// Threads that have not sent a request after this time are not waited for any longer.
const START: Duration = Duration::from_secs(3);
/// Where the part of a volume begins whose block status is many ranges.
const SCATTERED: u64 = 2 * TIB;
/// A control call of an attacker.
const CALL: Duration = Duration::from_secs(10);
/// Time between two snapshots of a volume that is written.
const SNAPSHOTS: Duration = Duration::from_millis(100);

/// The behaviour of a neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Attack {
    /// 20 connections send 128 writes of 4 KiB each into a pool that is full
    FullPool,
    /// 26 connections send the header of a write of 1 MiB and 100 bytes of it
    HalfWrites,
    /// 200 connections do that
    ManyHalfWrites,
    /// 8 connections ask for 128 reads of 1 MiB each and don't read the replies
    UnreadReplies,
    /// A volume limited to 10 MiB/s is written at depth 64 on 8 connections
    LimitedWrites,
    /// A volume limited to 10 MiB/s is read at depth 64 on 8 connections
    LimitedReads,
    /// 8 connections ask for the block status of 8 TiB, back to back
    BlockStatus,
    /// 1,200 connections choose an export and send nothing
    Idle,
    /// 200 requests to the metrics port that never end
    HalfHttp,
    /// 4 connections write zeroes and trim a TiB at a time at depth 16
    Zeroes,
    /// Reads and writes of 128 KiB at depth 32 on 8 connections, and reads of 4 KiB at depth 128
    Hog,
    /// Writes at depth 64 to extents that a snapshot shares, each of which is copied
    Copies,
}

impl Attack {
    /// Its name on the command line.
    pub(super) fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// Whether it makes the media work, as a neighbour may that does no harm.
    pub(super) const fn uses_media(self) -> bool {
        matches!(self, Self::Zeroes | Self::Hog | Self::Copies)
    }

    /// Whether victims connect once the attack is on. Where connections are what is short, an idle
    /// connection of a victim may give way to others by design.
    pub(super) const fn is_met_by_new_connections(self) -> bool {
        matches!(self, Self::Idle)
    }
}

/// The counters of an attack's threads.
#[derive(Debug, Default)]
struct Counts {
    sent: AtomicU64,
    answered: AtomicU64,
}

/// An attack that is on.
#[derive(Debug)]
pub(super) struct Running {
    attack: Attack,
    /// Connections that send nothing more.
    held: Vec<Client>,
    half_http: Vec<TcpStream>,
    closers: Vec<Closer>,
    threads: Vec<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
    counts: Arc<Counts>,
    refused: u64,
}

/// An attack whose sockets are closed.
#[derive(Debug)]
pub(super) struct Ended {
    attack: Attack,
    pub(super) did: Did,
    threads: Vec<JoinHandle<()>>,
}

impl Ended {
    /// Waits for its threads, one of which may be in a control call, and undoes what it changed in
    /// the daemon. Called after what the attack left behind was looked at.
    ///
    /// # Errors
    /// When the daemon refuses.
    pub(super) fn clean_up(self, site: &Site) -> Result<()> {
        for thread in self.threads {
            // A thread that panicked has printed why, and its connection is gone as well.
            let _ = thread.join();
        }
        match self.attack {
            Attack::LimitedWrites | Attack::LimitedReads => {
                site.daemon.cli(&["set", "--bandwidth", "0", NEIGHBOUR]).map(|_| ())
            }
            _ => Ok(()),
        }
    }
}

/// The work that an attack has done.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Did {
    pub connections: u64,
    /// Connections that the daemon did not take.
    pub refused: u64,
    pub requests_sent: u64,
    pub requests_answered: u64,
}

/// A source of requests with the payload of all of its writes.
struct Requests {
    depth: u64,
    payload: Vec<u8>,
    /// Bytes of the answer to a read.
    data: u64,
    next: Box<dyn FnMut(u64) -> Request + Send>,
    /// Requests in all.
    limit: u64,
}

impl Running {
    /// Starts an attack and waits until it is on.
    ///
    /// # Errors
    /// When nothing of it reached the daemon: an attack that isn't one shows nothing.
    pub(super) fn start(attack: Attack, site: &Site, transport: Transport) -> Result<Self> {
        let mut running = Self {
            attack,
            held: Vec::new(),
            half_http: Vec::new(),
            closers: Vec::new(),
            threads: Vec::new(),
            stop: Arc::new(AtomicBool::new(false)),
            counts: Arc::new(Counts::default()),
            refused: 0,
        };
        let address = site.address(transport);
        match attack {
            Attack::FullPool => running.full_pool(address)?,
            Attack::HalfWrites => running.half_writes(address, 26),
            Attack::ManyHalfWrites => running.half_writes(address, 200),
            Attack::UnreadReplies => running.unread_replies(address),
            Attack::LimitedWrites | Attack::LimitedReads => running.limited(site, address)?,
            Attack::BlockStatus => {
                site.scatter(NEIGHBOUR, SCATTERED)?;
                running.block_status(address)?;
            }
            Attack::Idle => running.idle(address),
            Attack::HalfHttp => running.half_http(site)?,
            Attack::Zeroes => running.zeroes(address)?,
            Attack::Hog => running.hog(address)?,
            Attack::Copies => running.copies(site, address)?,
        }
        let did = running.did();
        ensure!(did.connections > 0, "the daemon took no connection of {}", attack.name());
        running.wait_until_on();
        Ok(running)
    }

    /// Waits until every thread has sent something, or cannot.
    fn wait_until_on(&self) {
        let start = Clock::start();
        let threads = self.threads.len() as u64;
        while self.counts.sent.load(Ordering::Relaxed) < threads && start.elapsed() < START {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The work done so far.
    pub(super) fn did(&self) -> Did {
        let connections = self.closers.len() + self.held.len() + self.half_http.len();
        Did {
            connections: connections as u64,
            refused: self.refused,
            requests_sent: self.counts.sent.load(Ordering::Relaxed),
            requests_answered: self.counts.answered.load(Ordering::Relaxed),
        }
    }

    /// Closes all of its sockets at once.
    pub(super) fn end(self) -> Ended {
        let did = self.did();
        self.stop.store(true, Ordering::Relaxed);
        for closer in &self.closers {
            closer.close();
        }
        drop((self.held, self.half_http, self.closers));
        Ended { attack: self.attack, did, threads: self.threads }
    }

    /// Connects, or counts that the daemon would not.
    fn connect(&mut self, address: &Address, volume: &str, extended: bool) -> Option<Client> {
        let manner = Manner { extended, ..Manner::attacker() };
        let client = Client::open(address, volume, manner).ok();
        self.refused += u64::from(client.is_none());
        client
    }

    /// A connection with a thread that keeps requests in flight.
    fn load(&mut self, client: Client, requests: Requests) -> Result<()> {
        self.closers.push(client.closer()?);
        let (stop, counts) = (Arc::clone(&self.stop), Arc::clone(&self.counts));
        self.thread(move || pump(client, requests, &stop, &counts))
    }

    fn thread(&mut self, run: impl FnOnce() + Send + 'static) -> Result<()> {
        let run = move || {
            // Without it the attack is only worse.
            let _ = rustix::process::setpriority_process(None, NICE);
            run();
        };
        self.threads.push(std::thread::Builder::new().name("attacker".into()).spawn(run)?);
        Ok(())
    }

    fn full_pool(&mut self, address: &Address) -> Result<()> {
        for connection in 0..20 {
            let Some(client) = self.connect(address, &export(FULL), false) else { continue };
            let requests = Requests {
                depth: 128,
                payload: vec![0x11; 4096],
                data: 0,
                next: Box::new(move |number| Request {
                    kind: WRITE,
                    offset: TIB + (connection * 128 + number) * EXTENT,
                    len: 4096,
                }),
                limit: 128,
            };
            self.load(client, requests)?;
        }
        Ok(())
    }

    fn half_writes(&mut self, address: &Address, connections: usize) {
        for _ in 0..connections {
            let Some(mut client) = self.connect(address, NEIGHBOUR, false) else { continue };
            let request = Request { kind: WRITE, offset: 0, len: MIB };
            if client.send(request, &[0x22; 100]).is_ok() {
                self.counts.sent.fetch_add(1, Ordering::Relaxed);
            }
            self.held.push(client);
        }
    }

    fn unread_replies(&mut self, address: &Address) {
        for _ in 0..8 {
            let Some(mut client) = self.connect(address, NEIGHBOUR, false) else { continue };
            for number in 0..128 {
                let offset = (number % (WRITTEN / MIB)) * MIB;
                if client.send(Request { kind: READ, offset, len: MIB }, &[]).is_ok() {
                    self.counts.sent.fetch_add(1, Ordering::Relaxed);
                }
            }
            self.held.push(client);
        }
    }

    fn limited(&mut self, site: &Site, address: &Address) -> Result<()> {
        site.daemon.cli(&["set", "--bandwidth", "10M", NEIGHBOUR])?;
        // More than a worker has memory for, on each worker.
        for connection in 0..8 {
            let Some(client) = self.connect(address, NEIGHBOUR, false) else { continue };
            let requests = if self.attack == Attack::LimitedWrites {
                writes(64, 128 * KIB, connection)
            } else {
                reads(64, 128 * KIB, connection)
            };
            self.load(client, requests)?;
        }
        Ok(())
    }

    fn block_status(&mut self, address: &Address) -> Result<()> {
        for _ in 0..8 {
            let Some(client) = self.connect(address, NEIGHBOUR, true) else { continue };
            let len = VOLUME - SCATTERED;
            let next = move |_| Request { kind: BLOCK_STATUS, offset: SCATTERED, len };
            self.load(client, described(2, Box::new(next)))?;
        }
        Ok(())
    }

    fn zeroes(&mut self, address: &Address) -> Result<()> {
        for connection in 0..4 {
            let Some(client) = self.connect(address, NEIGHBOUR, true) else { continue };
            let kind = if connection % 2 == 0 { WRITE_ZEROES } else { TRIM };
            // Beyond what others read, and within what they allocated.
            let next = move |number| Request { kind, offset: TIB * (1 + number % 6), len: TIB };
            self.load(client, described(16, Box::new(next)))?;
        }
        Ok(())
    }

    fn idle(&mut self, address: &Address) {
        for _ in 0..1200 {
            if let Some(client) = self.connect(address, NEIGHBOUR, false) {
                self.held.push(client);
            }
        }
    }

    fn half_http(&mut self, site: &Site) -> Result<()> {
        for _ in 0..200 {
            let stream = client::tcp(site.metrics, ATTACKER, Some(CALL));
            let Ok(mut stream) = stream else {
                self.refused += 1;
                continue;
            };
            if stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Y: ").is_ok() {
                self.half_http.push(stream);
            }
        }
        ensure!(!self.half_http.is_empty(), "the metrics port took no connection");
        Ok(())
    }

    fn hog(&mut self, address: &Address) -> Result<()> {
        for connection in 0..10 {
            let Some(client) = self.connect(address, NEIGHBOUR, false) else { continue };
            let requests = match connection {
                0..4 => reads(32, 128 * KIB, connection),
                4..8 => writes(32, 128 * KIB, connection),
                _ => reads(128, 4 * KIB, connection),
            };
            self.load(client, requests)?;
        }
        Ok(())
    }

    fn copies(&mut self, site: &Site, address: &Address) -> Result<()> {
        for connection in 0..2 {
            let Some(client) = self.connect(address, NEIGHBOUR, false) else { continue };
            let extents = WRITTEN / EXTENT;
            let requests = Requests {
                depth: 64,
                payload: vec![0x33; 4096],
                data: 0,
                next: Box::new(move |number| Request {
                    kind: WRITE,
                    offset: (connection * extents + number % extents) * EXTENT,
                    len: 4096,
                }),
                limit: u64::MAX,
            };
            self.load(client, requests)?;
        }
        let verbs = |name: &str| {
            let volume = format!("{NEIGHBOUR}={name}");
            (site.verb(CALL, &["snapshot", &volume]), site.verb(CALL, &["del", name]))
        };
        let mut verbs = [verbs("before"), verbs("after")];
        let (stop, counts) = (Arc::clone(&self.stop), Arc::clone(&self.counts));
        self.thread(move || {
            let mut number = 0;
            while !stop.load(Ordering::Relaxed) {
                // Of a daemon that doesn't answer in time nothing more is asked than of others.
                let _ = tools::output(&mut verbs[number % 2].0);
                counts.sent.fetch_add(1, Ordering::Relaxed);
                number += 1;
                let _ = tools::output(&mut verbs[number % 2].1);
                std::thread::sleep(SNAPSHOTS);
            }
            for (_, delete) in &mut verbs {
                let _ = tools::output(delete);
            }
        })
    }
}

/// Random reads of the written part.
fn reads(depth: u64, len: u64, seed: u64) -> Requests {
    transfers(READ, depth, len, seed)
}

/// Random overwrites of the written part.
fn writes(depth: u64, len: u64, seed: u64) -> Requests {
    transfers(WRITE, depth, len, seed)
}

fn transfers(kind: u16, depth: u64, len: u64, seed: u64) -> Requests {
    let mut random = fastrand::Rng::with_seed(seed);
    let next = move |_| Request { kind, offset: random.u64(..WRITTEN / len) * len, len };
    let bytes = if kind == WRITE { len } else { 0 };
    Requests {
        depth,
        payload: vec![0x44; usize::try_from(bytes).unwrap_or(0)],
        data: len - bytes,
        next: Box::new(next),
        limit: u64::MAX,
    }
}

/// Requests without data, of a connection with extended headers.
fn described(depth: u64, next: Box<dyn FnMut(u64) -> Request + Send>) -> Requests {
    Requests { depth, payload: Vec::new(), data: 0, next, limit: u64::MAX }
}

/// Keeps requests in flight until the connection is closed.
fn pump(mut client: Client, mut requests: Requests, stop: &AtomicBool, counts: &Counts) {
    let mut data = vec![0; usize::try_from(requests.data).unwrap_or(0)];
    let (mut sent, mut answered) = (0, 0);
    // Ends when the connection does: closed by the test, or by a daemon that has had enough.
    while !stop.load(Ordering::Relaxed) {
        while sent < requests.limit && sent - answered < requests.depth {
            if client.send((requests.next)(sent), &requests.payload).is_err() {
                return;
            }
            sent += 1;
            counts.sent.fetch_add(1, Ordering::Relaxed);
        }
        // An error, as of a pool without space, is an answer like others.
        if client.answer(&mut data).is_err() {
            return;
        }
        answered += 1;
        counts.answered.fetch_add(1, Ordering::Relaxed);
    }
}
