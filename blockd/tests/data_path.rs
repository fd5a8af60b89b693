//! The data path with misbehaving clients, full pools and volumes that are closed.
#![forbid(unsafe_code)]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blockd_engine::backing::{Ring, RingOptions};
use blockd_engine::block::{BlockError, Completion, Operation, Request};
use blockd_engine::pool::{Control, Mark, Marks, Outcome, PoolHandle, VolumeId, create, open};
use blockd_engine::schedule::{FlowId, Owner};
use blockd_engine::stats::{Stage, VolumeStats};
use blockd_engine::volume::{Executor, VolumeRef};
use blockd_media::clock::Clock;
use blockd_media::pool::PoolSpec;
use blockd_media::{DeviceKind, DeviceSpec};
use blockd_nbd::client::{ConnectOptions, RawConnection};
use blockd_nbd::codec::cmd::{CACHE, FLUSH, READ, TRIM, WRITE, WRITE_ZEROES};
use blockd_nbd::codec::request::Header;
use blockd_nbd::{ExportError, ExportInfo};
use blockd_serve::nbd::handshake::Tls;
use blockd_serve::nbd::listener::{Address, Limits, ListenerOptions, bind};
use blockd_serve::nbd::{Exports, Opened};
use blockd_serve::worker::{Target, WorkerOptions, Workers};

const SIZE: u64 = 256 << 20;
const EXTENT: u64 = 256 << 10;

fn run<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime")
        .block_on(future)
}

/// A pool of 64 MiB, gone with its folder.
struct Small {
    pool: PoolHandle,
    volume: VolumeId,
    folder: PathBuf,
}

impl Small {
    fn new(name: &str, kind: DeviceKind) -> Self {
        Self::with(name, kind, |_| ())
    }

    fn with(name: &str, kind: DeviceKind, change: impl FnOnce(&mut PoolSpec)) -> Self {
        let name = format!("blockd-{name}-{}", std::process::id());
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::create_dir_all(&folder).expect("a folder for the test");
        let path = folder.join("pool");
        let device =
            DeviceSpec { path, kind, size: Some(64 << 20), preallocate: false, direct: true };
        let mut spec = PoolSpec::new("test", device, PathBuf::from("/dev/shm"));
        change(&mut spec);
        if kind == DeviceKind::File {
            create(&spec).expect("a pool");
        }
        let (pool, _) = open(&spec).expect("a pool");
        let control = Control::Create { name: "v".to_owned(), size: SIZE, block_size: 512 };
        let Ok(Outcome::Created(volume)) = run(pool.control(control)) else {
            panic!("no volume");
        };
        Self { pool, volume, folder }
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl Exports for Several {
    type Volume = Target;

    async fn list(&self) -> Vec<ExportInfo> {
        Vec::new()
    }

    async fn open(&self, name: &str) -> Result<Opened<Target>, ExportError> {
        let info = ExportInfo {
            name: name.to_owned(),
            description: String::new(),
            size: SIZE,
            block_size: 512,
            preferred_size: 4096,
            read_only: false,
            multi_conn: true,
        };
        let volume = self.0.iter().find(|target| target.name == name);
        Ok(Opened { info, volume: volume.cloned().ok_or(ExportError::Unknown)? })
    }
}

/// Volumes by their names.
struct Several(Vec<Target>);

/// A small pool behind a socket, served by one worker with little memory.
struct Server {
    small: Small,
    workers: Workers,
    runtime: tokio::runtime::Runtime,
}

impl Server {
    fn new(name: &str, kind: DeviceKind) -> Self {
        Self::with(name, kind, 8 << 20, 1)
    }

    /// Volumes `v`, `v1`, `v2` and so on.
    fn with(name: &str, kind: DeviceKind, buffer_bytes: usize, volumes: usize) -> Self {
        let small = Small::new(name, kind);
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        let runtime = runtime.expect("a runtime");
        let options = WorkerOptions { count: 1, buffer_bytes, ..Default::default() };
        let workers = Workers::start(options).expect("workers");
        runtime.block_on(workers.add_pool(&small.pool)).expect("a served pool");
        let target = |volume, name| Target { pool: small.pool.clone(), volume, name };
        let mut targets = vec![target(small.volume, "v".to_owned())];
        for number in 1..volumes {
            let name = format!("v{number}");
            let control = Control::Create { name: name.clone(), size: SIZE, block_size: 512 };
            let created = runtime.block_on(small.pool.control(control));
            let Ok(Outcome::Created(volume)) = created else { panic!("no volume") };
            targets.push(target(volume, name));
        }
        let address = Address::Unix { path: small.folder.join("nbd"), mode: 0o600 };
        let options = ListenerOptions { address, limits: Limits::default(), tls: Tls::Off };
        let sessions = Arc::new(workers.clone());
        let serve = async { bind(options).map(|b| b.serve(Arc::new(Several(targets)), sessions)) };
        runtime.block_on(serve).expect("a listener");
        Self { small, workers, runtime }
    }

    /// A connection with simple replies, ready for requests.
    fn connect(&self) -> UnixStream {
        self.connect_to("v", false)
    }

    fn connect_to(&self, volume: &str, structured: bool) -> UnixStream {
        let stream = UnixStream::connect(self.small.folder.join("nbd")).expect("a connection");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a time limit");
        let options = ConnectOptions { structured, ..ConnectOptions::simple() };
        RawConnection::connect(stream, volume, &options).expect("an export").stream
    }

    fn stop(self) {
        self.runtime.block_on(self.workers.drain(Duration::from_secs(10)));
        self.runtime.block_on(self.small.pool.close()).expect("an orderly close");
    }
}

fn request(kind: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    Header { flags: 0, kind, cookie, offset, len: len.into() }.encode(false, &mut bytes);
    bytes
}

fn reply(cookie: u64, error: u32) -> Vec<u8> {
    [[0x67, 0x44, 0x66, 0x98].as_slice(), &error.to_be_bytes(), &cookie.to_be_bytes()].concat()
}

fn hear(stream: &mut UnixStream, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    stream.read_exact(&mut bytes).expect("the server speaks");
    bytes
}

#[test]
fn no_answer_comes_to_lie_within_the_data_of_a_long_read() {
    const LEN: u32 = 4 << 20;
    let server = Server::new("exclusive", DeviceKind::File);
    let mut stream = server.connect();
    let mut write = request(WRITE, 0, 0, LEN);
    write.resize(write.len() + LEN as usize, 7);
    stream.write_all(&write).unwrap();
    assert_eq!(hear(&mut stream, 16), reply(0, 0));
    for _ in 0..20 {
        stream.write_all(&request(READ, 1, 0, LEN)).unwrap();
        for _ in 0..40 {
            std::thread::sleep(Duration::from_micros(50));
            stream.write_all(&request(CACHE, 2, 0, 4096)).unwrap();
        }
        for _ in 0..41 {
            let header = hear(&mut stream, 16);
            if header == reply(1, 0) {
                let data = hear(&mut stream, LEN as usize);
                assert!(data.iter().all(|&byte| byte == 7), "something came between");
            } else {
                assert_eq!(header, reply(2, 0));
            }
        }
    }
    server.stop();
}

#[test]
fn memory_that_clients_leave_behind_is_given_back() {
    let server = Server::new("deaths", DeviceKind::Memory);
    let mut random = fastrand::Rng::with_seed(7);
    let free = || server.workers.worker_stats()[0].free_memory.get();
    until("the worker to begin", || free() > 0);
    std::thread::sleep(Duration::from_millis(1100));
    let before = free();
    for _ in 0..150 {
        let mut stream = server.connect();
        let mut bytes = Vec::new();
        for cookie in 0..random.u64(1..30) {
            let offset = random.u64(..64) << 19;
            let longest = if random.bool() { 8 } else { 6000 };
            let len = random.u32(..longest) * 512;
            let kind =
                [READ, READ, WRITE, WRITE, FLUSH, TRIM, CACHE, WRITE_ZEROES, 77][random.usize(..9)];
            let (offset, len) = if kind == FLUSH { (0, 0) } else { (offset, len) };
            bytes.extend(request(kind, cookie, offset, len));
            if kind == WRITE {
                bytes.resize(bytes.len() + usize::try_from(len).unwrap(), 7);
            }
        }
        bytes.truncate(random.usize(..=bytes.len()));
        stream.set_write_timeout(Some(Duration::from_millis(50))).unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        // It may take none of the answers, so that the server stops to listen.
        let _ = stream.write_all(&bytes);
        if random.bool() {
            let _ = stream.read(&mut vec![0; random.usize(1..100_000)]);
        }
    }
    until("all connections to end", || server.workers.connections().is_empty());
    until("all memory to be free", || free() == before);
    server.stop();
}

#[test]
fn writes_that_wait_for_space_keep_no_thread_busy() {
    let server = Server::new("full", DeviceKind::Memory);
    let mut stream = server.connect();
    let mut sent = 0_u64;
    // More extents than there are, and then some that wait.
    for extent in 0..300 {
        let mut bytes = request(WRITE, extent, extent * EXTENT, 4096);
        bytes.resize(bytes.len() + 4096, 1);
        stream.write_all(&bytes).unwrap();
        sent += 1;
    }
    // Until no more come for a while.
    let mut answers = vec![0; 16 * 300];
    let mut read = 0;
    stream.set_read_timeout(Some(Duration::from_secs(3))).unwrap();
    while let Ok(count @ 1..) = stream.read(&mut answers[read..]) {
        read += count;
    }
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let answered = read / 16;
    assert!((100..300).contains(&answered), "{answered} of {sent} answered");
    let enters = || server.workers.worker_stats()[0].enters.get();
    let before = enters();
    let pool_before = server.small.pool.stats().wakeups.load(std::sync::atomic::Ordering::Relaxed);
    std::thread::sleep(Duration::from_secs(2));
    let pool_after = server.small.pool.stats().wakeups.load(std::sync::atomic::Ordering::Relaxed);
    let (worker, pool) = (enters() - before, pool_after - pool_before);
    assert!(worker < 400 && pool < 400, "{worker} turns of the worker, {pool} of the pool");
    // Others are served meanwhile, and the volume can still go away.
    let mut other = server.connect();
    other.write_all(&request(READ, 1, 0, 1 << 20)).unwrap();
    assert_eq!(hear(&mut other, 16), reply(1, 0));
    hear(&mut other, 1 << 20);
    let (id, volume) = (server.small.pool.id(), server.small.volume);
    let closing = server.workers.close_volume(id, volume);
    let closing = async { tokio::time::timeout(Duration::from_secs(20), closing).await };
    assert_eq!(server.runtime.block_on(closing), Ok(2));
    server.stop();
}

/// Reads that have to be answered in one piece, while memory is free in smaller pieces only.
#[test]
fn reads_that_find_memory_in_pieces_only_keep_no_thread_busy_and_go_on_when_some_is_released() {
    const HALF: u32 = 512 << 10;
    const WHOLE: u32 = 1 << 20;
    let server = Server::with("pieces", DeviceKind::Memory, 4 << 20, 3);
    let stats = Arc::clone(&server.workers.worker_stats()[0]);
    // Three times as much as the longest piece: the rest is kept for copies.
    until("the worker to begin", || stats.free_memory.get() == 3 * u64::from(WHOLE));
    // Writes that are not sent whole hold memory, here a piece of each of the three.
    let hold = |volume: &str, len: u32| {
        let before = stats.free_memory.get();
        let mut stream = server.connect_to(volume, false);
        stream.write_all(&[&request(WRITE, 1, 0, len)[..], &[7; 100]].concat()).unwrap();
        until("it to have memory", || stats.free_memory.get() == before - u64::from(len));
        stream
    };
    let _page = hold("v", 4096);
    let first = hold("v", HALF);
    let _second = hold("v", HALF);
    let third = hold("v1", HALF);
    let last = hold("v2", HALF);
    drop((first, third));
    let free = u64::from(2 * WHOLE - 4096);
    until("half of it to be free", || stats.free_memory.get() == free);
    let mut readers = [(); 2].map(|()| server.connect_to("v1", true));
    for reader in &mut readers {
        let mut read = request(READ, 1, 0, WHOLE);
        // In one piece.
        read[5] = 1 << 2;
        reader.write_all(&read).unwrap();
    }
    std::thread::sleep(Duration::from_millis(500));
    let before = stats.enters.get();
    std::thread::sleep(Duration::from_secs(2));
    let turns = stats.enters.get() - before;
    assert!(turns < 100, "{turns} turns of the worker");
    let before = stats.enters.get();
    drop(last);
    // At the same time: either may be the first to have memory, which its client has to read out of
    // the way before the other one has any.
    std::thread::scope(|scope| {
        for reader in &mut readers {
            scope.spawn(move || {
                let answer = hear(reader, 28 + WHOLE as usize);
                assert_eq!(answer[4..8], [0, 1, 0, 1], "all of the data");
            });
        }
    });
    let turns = stats.enters.get() - before;
    assert!(turns < 100, "{turns} turns of the worker");
    server.stop();
}

fn until(what: &str, so: impl Fn() -> bool) {
    for _ in 0..6000 {
        if so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("it never came to this: {what}");
}

/// An executor on a ring, driven by hand.
struct Hand {
    executor: Executor,
    ring: Ring,
    volume: VolumeRef,
    flow: FlowId,
    clock: Clock,
    stats: Arc<VolumeStats>,
}

impl Hand {
    fn new(small: &Small) -> Self {
        Self::of(0, small, small.volume)
    }

    /// The executor of a worker, for one volume.
    fn of(worker: usize, small: &Small, volume: VolumeId) -> Self {
        let options = RingOptions { operations: 1024, arena_bytes: 4 << 20, serves: false };
        let mut ring = Ring::new(options).expect("a ring");
        let clock = Clock::start();
        let mut executor = Executor::new(worker, ring.free_bytes(), clock);
        executor.add_pool(&small.pool, &mut ring).expect("a worker");
        let stats = Arc::<VolumeStats>::default();
        let its_stats = || Arc::clone(&stats);
        let volume = executor.attach(small.pool.id(), volume, its_stats).expect("a volume");
        // The memory of a queue's requests is its own, as it is here.
        let flow = executor.add_flow(volume, Owner::Queue(0)).expect("a flow");
        Self { executor, ring, volume, flow, clock, stats }
    }

    fn begin(&mut self, operation: Operation, offset: u64, len: u64) {
        let buffer = match operation {
            Operation::Read | Operation::Write { .. } => self.ring.allocate(len),
            _ => None,
        };
        let request = Request::new(operation, offset, len, 0, buffer);
        let demand = Executor::demand(operation, len);
        self.executor.admit(self.volume, self.flow, &demand).expect("an admission");
        self.executor.begin(self.volume, self.flow, request, &mut self.ring);
    }

    /// The next answer, if there is one within `ms` milliseconds.
    fn answer(&mut self, ms: u64) -> Option<Completion> {
        let end = self.clock.ns() + ms * 1_000_000;
        loop {
            self.executor.poll(&mut self.ring);
            if let Some(done) = self.executor.take_done() {
                return Some(done);
            }
            if self.clock.ns() > end {
                return None;
            }
            self.executor.pass_on();
            if !self.executor.has_ready() {
                self.ring.enter_for(1, Duration::from_millis(5)).expect("a ring");
            }
            self.executor.set_now(self.clock.ns());
            while let Some(ended) = self.ring.reap() {
                self.executor.ended(ended, &mut self.ring);
            }
        }
    }

    fn free(&mut self, done: Completion) {
        done.buffer.into_iter().for_each(|buffer| self.ring.free(buffer));
    }
}

#[test]
fn a_write_that_would_wait_for_space_later_ends_with_its_volume() {
    let small = Small::new("doomed", DeviceKind::File);
    let mut hand = Hand::new(&small);
    let write = Operation::Write { fua: false };
    let mut full = 0;
    // Until there is no extent left.
    for extent in 0.. {
        hand.begin(write, extent * EXTENT, 4096);
        let Some(done) = hand.answer(1500) else {
            full = extent;
            break;
        };
        done.result.expect("a write");
        hand.free(done);
    }
    hand.executor.cancel_parked(hand.volume);
    let done = hand.answer(1000).expect("an answer");
    assert_eq!(done.result, Err(BlockError::Gone));
    hand.free(done);
    // Its front is being written when the volume begins to go away; its rest has no room.
    hand.begin(write, (full - 1) * EXTENT, 2 * EXTENT);
    hand.executor.cancel_parked(hand.volume);
    let done = hand.answer(3000).expect("an answer, though there is no space");
    assert_eq!(done.result, Err(BlockError::Gone));
    hand.free(done);
    hand.executor.detach(hand.volume);
    hand.executor.drop_pools();
    run(small.pool.close()).expect("an orderly close");
}

/// Changes of the pool have waiting requests tried again, which is one wait all the same.
#[test]
fn a_request_that_is_tried_again_counts_once() {
    let small = Small::new("counted", DeviceKind::File);
    let mut hand = Hand::new(&small);
    let figures = |hand: &Hand| {
        let wait = hand.stats.stage(Stage::Wait);
        (hand.stats.parks.get(), wait.count(), wait.sum_ns())
    };
    let mut before = figures(&hand);
    // Until there is no extent left.
    for extent in 0.. {
        before = figures(&hand);
        hand.begin(Operation::Write { fua: false }, extent * EXTENT, 4096);
        let Some(done) = hand.answer(1500) else { break };
        done.result.expect("a write");
        hand.free(done);
    }
    for limit in 1..=5 {
        // An event.
        small.pool.mapper().set_read_cache(limit << 20);
        assert!(hand.answer(20).is_none());
    }
    assert_eq!((hand.stats.parks.get(), hand.stats.parked.get()), (before.0 + 1, 1));
    hand.executor.cancel_parked(hand.volume);
    let done = hand.answer(1000).expect("an answer");
    assert_eq!(done.result, Err(BlockError::Gone));
    hand.free(done);
    let after = figures(&hand);
    assert_eq!((after.0, after.1, hand.stats.parked.get()), (before.0 + 1, before.1 + 1, 0));
    assert!(after.2 - before.2 >= 1_500_000_000, "{before:?} {after:?}");
    hand.executor.detach(hand.volume);
    hand.executor.drop_pools();
    run(small.pool.close()).expect("an orderly close");
}

/// Two clones' workers, of which the first has a read under way of what the second then reads.
fn joined(small: &Small) -> (Hand, Hand) {
    let mut first = Hand::new(small);
    first.begin(Operation::Write { fua: false }, 0, 4096);
    let done = first.answer(3000).expect("an answer");
    done.result.expect("a write");
    first.free(done);
    let snapshot = Control::Snapshot { source: small.volume, name: "s".to_owned() };
    let Ok(Outcome::Created(snapshot)) = run(small.pool.control(snapshot)) else {
        panic!("no snapshot");
    };
    let mut second = Hand::of(1, small, snapshot);
    first.begin(Operation::Read, 0, 4096);
    assert!(first.executor.take_done().is_none(), "the first read is answered from the cache");
    second.begin(Operation::Read, 0, 4096);
    assert!(second.answer(300).is_none(), "the second read does not wait for the first");
    (first, second)
}

fn end_joined(small: &Small, (mut first, mut second): (Hand, Hand)) {
    let done = first.answer(3000).expect("an answer");
    first.free(done);
    for hand in [&mut first, &mut second] {
        hand.executor.detach(hand.volume);
        hand.executor.drop_pools();
    }
    run(small.pool.close()).expect("an orderly close");
}

fn with_cache(name: &str) -> Small {
    Small::with(name, DeviceKind::File, |spec| spec.read_cache = 16 << 20)
}

/// The media may hang under the other read, and nothing else may happen in the pool.
#[test]
fn a_read_waits_for_another_one_for_a_second_at_most() {
    let small = with_cache("joined");
    let (first, mut second) = joined(&small);
    let done = second.answer(5000).expect("a read that goes on alone");
    done.result.expect("a read");
    second.free(done);
    end_joined(&small, (first, second));
}

#[test]
fn a_read_that_waits_for_another_one_is_answered_when_its_volume_closes() {
    let small = with_cache("joined-and-closed");
    let (first, mut second) = joined(&small);
    second.executor.cancel_parked(second.volume);
    let done = second.answer(500).expect("a read that goes on at once");
    done.result.expect("a read");
    second.free(done);
    end_joined(&small, (first, second));
}

/// A worker without requests sleeps after throttled writes, which it would have retried at a
/// certain time, were cancelled.
#[test]
fn a_client_that_leaves_cancels_its_waiting_writes_and_the_worker_sleeps() {
    let small = Small::with("left", DeviceKind::File, |spec| {
        spec.marks = Some(Marks { low: Mark::Percent(95), very_low: Mark::Percent(90) });
        // Unused grants could be revoked, which would end the slowness.
        spec.quantum = EXTENT;
    });
    let mut hand = Hand::new(&small);
    let mut extents = 0..200_u64;
    let (mut begun, mut answered) = (0, 0);
    // Until a throttled write waits, which goes on by itself after a time.
    while hand.executor.next_deadline().is_none() {
        let extent = extents.next().expect("a pool that throttles its writes");
        hand.begin(Operation::Write { fua: false }, extent * EXTENT, 4096);
        begun += 1;
        while let Some(done) = hand.answer(5) {
            done.result.expect("a write");
            hand.free(done);
            answered += 1;
        }
    }
    assert!(hand.stats.slowed.get() > 0);
    hand.executor.cancel_flow(hand.flow, true);
    let mut cancelled = 0;
    while answered < begun {
        let done = hand.answer(5000).expect("an answer");
        answered += 1;
        cancelled += u32::from(done.result == Err(BlockError::Gone));
        hand.free(done);
    }
    assert!(cancelled > 0);
    assert!(hand.answer(100).is_none());
    assert_eq!(hand.executor.next_deadline(), None);
    assert!(!hand.executor.has_ready());
    hand.executor.detach(hand.volume);
    hand.executor.drop_pools();
    run(small.pool.close()).expect("an orderly close");
}

#[test]
fn memory_for_copies_leaves_long_pieces_whole() {
    let small = Small::new("copies", DeviceKind::File);
    let mut hand = Hand::new(&small);
    let whole: Vec<_> = std::iter::from_fn(|| hand.ring.allocate(1 << 20)).collect();
    assert_eq!(whole.len(), 3);
    whole.into_iter().for_each(|buffer| hand.ring.free(buffer));
    hand.executor.detach(hand.volume);
    hand.executor.drop_pools();
    run(small.pool.close()).expect("an orderly close");
}
