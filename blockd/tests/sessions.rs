//! Real requests over real sockets to real pools: every byte compared with a model.
#![forbid(unsafe_code)]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use blockd_engine::pool::{Control, Outcome, PoolHandle, VolumeId, VolumeSettings, create, open};
use blockd_media::pool::PoolSpec;
use blockd_media::{DeviceKind, DeviceSpec};
use blockd_nbd::client::{Client, ConnectOptions, RawConnection, Request, ServerAddress, Uri};
use blockd_nbd::codec::cmd;
use blockd_nbd::codec::request::Header;
use blockd_nbd::{ExportError, ExportInfo};
use blockd_serve::nbd::handshake::Tls;
use blockd_serve::nbd::listener::{Address, Limits, Listener, ListenerOptions, bind};
use blockd_serve::nbd::{Exports, Opened};
use blockd_serve::worker::{Target, WorkerOptions, Workers};
use blockd_testkit::nbd::{Connection, Kind, Request as RawRequest};

const SIZE: u64 = 96 << 20;
const BLOCK: usize = 4096;

/// One volume in one pool, behind a socket.
struct Server {
    runtime: tokio::runtime::Runtime,
    directory: PathBuf,
    pool: PoolHandle,
    volume: VolumeId,
    workers: Workers,
}

struct One(Target);

impl Exports for One {
    type Volume = Target;

    async fn list(&self) -> Vec<ExportInfo> {
        vec![info()]
    }

    async fn open(&self, _name: &str) -> Result<Opened<Target>, ExportError> {
        Ok(Opened { info: info(), volume: self.0.clone() })
    }
}

fn info() -> ExportInfo {
    ExportInfo {
        name: "v".to_owned(),
        description: String::new(),
        size: SIZE,
        block_size: 512,
        preferred_size: 4096,
        read_only: false,
        multi_conn: true,
    }
}

fn options() -> WorkerOptions {
    // Connections move between the workers, however little these have to do.
    WorkerOptions { buffer_bytes: 4 << 20, saturated: 0, ..WorkerOptions::default() }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Disk,
    Tmpfs,
    Memory,
}

impl Server {
    fn start(name: &str, place: Place) -> Self {
        Self::start_with(name, place, options())
    }

    fn start_with(name: &str, place: Place, options: WorkerOptions) -> Self {
        let base = match place {
            Place::Disk => PathBuf::from(env!("CARGO_TARGET_TMPDIR")),
            _ => PathBuf::from("/dev/shm"),
        };
        let directory = base.join(format!("blockd-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a directory for the test");
        let server = Self::try_start(&directory, place, options);
        server.expect("a server")
    }

    fn try_start(
        directory: &Path,
        place: Place,
        options: WorkerOptions,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        let kind = if place == Place::Memory { DeviceKind::Memory } else { DeviceKind::File };
        let path = directory.join("pool");
        let size = Some(256 << 20);
        let device = DeviceSpec { path, kind, size, preallocate: false, direct: true };
        let spec = PoolSpec::new("test", device, PathBuf::from("/dev/shm"));
        if place != Place::Memory {
            create(&spec)?;
        }
        let (pool, _) = open(&spec)?;
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let control = Control::Create { name: "v".to_owned(), size: SIZE, block_size: 512 };
        let Outcome::Created(volume) = runtime.block_on(pool.control(control))? else {
            return Err("not created".into());
        };
        let workers = Workers::start(options)?;
        runtime.block_on(workers.add_pool(&pool))?;
        let target = Target { pool: pool.clone(), volume, name: "v".to_owned() };
        let socket = directory.join("nbd.sock");
        let address = Address::Unix { path: socket, mode: 0o600 };
        let options = ListenerOptions { address, limits: Limits::default(), tls: Tls::Off };
        let sessions = Arc::new(workers.clone());
        runtime
            .block_on(async { bind(options).map(|b| b.serve(Arc::new(One(target)), sessions)) })?;
        let directory = directory.to_owned();
        Ok(Self { runtime, directory, pool, volume, workers })
    }

    fn connect(&self, options: ConnectOptions) -> Client {
        let server = ServerAddress::Unix(self.directory.join("nbd.sock"));
        Client::connect(&Uri { server, export: String::new() }, &options).expect("a connection")
    }

    /// Limits the requests of the volume in a second.
    fn limit(&self, iops: u64) {
        let settings = VolumeSettings { iops, ..VolumeSettings::default() };
        let control = Control::Configure { volume: self.volume, settings };
        self.runtime.block_on(self.pool.control(control)).expect("a limit");
    }

    fn stop(self) {
        self.runtime.block_on(self.workers.drain(Duration::from_secs(10)));
        self.runtime.block_on(self.pool.close()).expect("an orderly close");
        std::fs::remove_dir_all(&self.directory).expect("the test's directory");
    }
}

fn forms() -> [ConnectOptions; 3] {
    let timeout = Duration::from_secs(60);
    let all = ConnectOptions { timeout, ..ConnectOptions::default() };
    [
        all.clone(),
        ConnectOptions { extended: false, ..all.clone() },
        ConnectOptions { extended: false, structured: false, base_allocation: false, ..all },
    ]
}

/// The expected content of the volume, and its history.
struct Model {
    bytes: Vec<u8>,
    random: fastrand::Rng,
}

impl Model {
    fn range(&mut self) -> (usize, usize) {
        let longest = if self.random.u8(..) < 8 { 3 << 20 } else { 96 << 10 };
        let len = self.random.usize(1..=longest / 512) * 512;
        let offset = self.random.usize(0..=(self.bytes.len() - len) / 512) * 512;
        (offset, len)
    }

    fn step(&mut self, client: &mut Client) {
        let (offset, len) = self.range();
        let at = offset as u64;
        match self.random.u8(..100) {
            0..45 => {
                let mut data = vec![0; len];
                self.random.fill(&mut data);
                client.write(at, &data, self.random.u8(..) < 16).expect("a write");
                self.bytes[offset..offset + len].copy_from_slice(&data);
            }
            45..60 => {
                client.write_zeroes(at, len as u64, self.random.bool()).expect("zeroes");
                self.bytes[offset..offset + len].fill(0);
            }
            60..65 => {
                client.trim(at, len as u64).expect("a discard");
                // Whole sub-blocks read as zeroes; the rest of the range keeps its content.
                let from = offset.next_multiple_of(BLOCK);
                let to = (offset + len) / BLOCK * BLOCK;
                if from < to {
                    self.bytes[from..to].fill(0);
                }
            }
            65..70 => client.flush().expect("a flush"),
            _ => {
                let mut data = vec![0xAA; len];
                client.read(at, &mut data).expect("a read");
                assert!(data == self.bytes[offset..offset + len], "bytes differ at {offset}+{len}");
            }
        }
    }
}

fn compare(name: &str, place: Place, seed: u64, steps: usize) {
    let server = Server::start(name, place);
    let random = fastrand::Rng::with_seed(seed);
    let mut model = Model { bytes: vec![0; usize::try_from(SIZE).unwrap_or(0)], random };
    let mut clients: Vec<Client> = forms().into_iter().map(|form| server.connect(form)).collect();
    for step in 0..steps {
        let client = &mut clients[step % 3];
        model.step(client);
    }
    let mut all = vec![0; model.bytes.len()];
    clients[0].read(0, &mut all).expect("everything");
    assert!(all == model.bytes, "the volume differs");
    check_status(&mut clients[0], &model.bytes);
    for client in clients {
        client.disconnect().expect("a goodbye");
    }
    server.stop();
}

/// Asserts that reported zeroes are zeroes, and that written data is not reported as zeroes.
fn check_status(client: &mut Client, bytes: &[u8]) {
    let (mut at, mut data) = (0, 0);
    while at < bytes.len() {
        let left = (bytes.len() - at) as u64;
        let ranges = client.block_status(at as u64, left).expect("a status");
        let again = client.block_status(at as u64, left).expect("a status");
        assert_eq!(ranges, again, "the same question, another answer");
        for range in ranges {
            let end = at + usize::try_from(range.len).unwrap_or(usize::MAX);
            if range.zero {
                assert!(bytes[at..end].iter().all(|&byte| byte == 0), "{at}..{end} is not zero");
            } else {
                data += end - at;
            }
            at = end;
        }
    }
    assert!(data > 0 && data <= bytes.len());
}

/// Another volume of a server, behind a socket of its own.
struct Other {
    volume: VolumeId,
    socket: PathBuf,
    listener: Listener,
}

impl Other {
    fn new(server: &Server, name: &str) -> Self {
        let control = Control::Create { name: name.to_owned(), size: SIZE, block_size: 512 };
        let created = server.runtime.block_on(server.pool.control(control)).expect("a volume");
        let Outcome::Created(volume) = created else { panic!("no volume") };
        let target = Target { pool: server.pool.clone(), volume, name: name.to_owned() };
        let socket = server.directory.join(name);
        let address = Address::Unix { path: socket.clone(), mode: 0o600 };
        let options = ListenerOptions { address, limits: Limits::default(), tls: Tls::Off };
        let sessions = Arc::new(server.workers.clone());
        let listener = server.runtime.block_on(async {
            bind(options).map(|bound| bound.serve(Arc::new(One(target)), sessions))
        });
        Self { volume, socket, listener: listener.expect("another listener") }
    }

    fn connect(&self) -> Client {
        let server = ServerAddress::Unix(self.socket.clone());
        let uri = Uri { server, export: String::new() };
        Client::connect(&uri, &impatient()).expect("a connection")
    }
}

/// A client that fails when an answer is lost.
fn impatient() -> ConnectOptions {
    ConnectOptions { timeout: Duration::from_secs(10), ..forms()[0].clone() }
}

/// Clients of three volumes on two workers: wherever the connections have moved, one of the workers
/// serves two volumes, and gives away a connection every second.
struct Movers {
    server: Server,
    others: [Other; 2],
    clients: Vec<Client>,
    round: u8,
}

impl Movers {
    fn new(name: &str) -> Self {
        let server = Server::start(name, Place::Tmpfs);
        let others = ["w", "x"].map(|name| Other::new(&server, name));
        let mut clients = vec![server.connect(impatient()), server.connect(impatient())];
        clients.extend(others.iter().flat_map(|other| [other.connect(), other.connect()]));
        Self { server, others, clients, round: 0 }
    }

    fn moved(&self) -> u64 {
        self.server.workers.worker_stats().iter().map(|stats| stats.moved.get()).sum()
    }

    /// Each client writes a part of its volume by `requests` requests at a time, and reads it.
    fn step(&mut self, requests: u64) {
        self.round = self.round.wrapping_add(1);
        for (at, client) in (0_u8..).zip(&mut self.clients) {
            let (offset, fill) = (u64::from(at) << 23, self.round.wrapping_add(at));
            for piece in 0..requests {
                let data = &[fill; BLOCK];
                let offset = offset + piece * BLOCK as u64;
                client.send(Request::Write { offset, data, fua: false }).expect("a request");
            }
            for _ in 0..requests {
                let answer = client
                    .receive()
                    .unwrap_or_else(|error| panic!("client {at}, round {}: {error}", self.round));
                assert_eq!(answer.result, Ok(()));
            }
            let mut data = vec![0; usize::try_from(requests).expect("64 bits") * BLOCK];
            client.read(offset, &mut data).expect("a read");
            assert!(data.iter().all(|&byte| byte == fill), "client {at}, round {}", self.round);
        }
    }

    /// Goes on until connections have moved four times.
    fn move_four(&mut self, requests: u64) {
        let clock = blockd_media::clock::Clock::start();
        while self.moved() < 4 && clock.elapsed() < Duration::from_secs(60) {
            self.step(requests);
            // Rounds that take a second would meet each worker's look for a connection to give
            // away at the same point every time.
            std::thread::sleep(Duration::from_millis(u64::from(self.round) * 37 % 200));
        }
        assert!(self.moved() >= 4, "{} moves", self.moved());
        assert_eq!(self.server.workers.connections().len(), self.clients.len());
    }

    fn stop(self) {
        for client in self.clients {
            client.disconnect().expect("a goodbye");
        }
        for other in self.others {
            self.server.runtime.block_on(other.listener.stop());
        }
        self.server.stop();
    }
}

/// A pool on standby was closed in order, so flushes are answered. From the moment that it is back
/// at one worker its clients write there, so no other worker may answer a flush without a commit.
#[test]
fn a_flush_on_standby_waits_once_the_pool_is_back() {
    let server = Server::start("standby-flush", Place::Tmpfs);
    let (workers, id) = (&server.workers, server.pool.id());
    let mut client = server.connect(ConnectOptions::default());
    client.write(0, &[1; BLOCK], false).expect("a write");
    assert!(server.runtime.block_on(workers.stand_by(id, Duration::from_secs(10))));
    server.runtime.block_on(workers.remove_pool(id));
    server.runtime.block_on(workers.answer_flushes(id));
    client.flush().expect("a flush on standby");
    server.runtime.block_on(workers.add_pool(&server.pool)).expect("the pool again");
    let (send, receive) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            client.flush().expect("a flush");
            send.send(()).expect("a receiver");
            client.disconnect().expect("a goodbye");
        });
        let early = receive.recv_timeout(Duration::from_millis(300));
        assert!(early.is_err(), "answered before the pool is served");
        server.runtime.block_on(workers.serve(id));
        receive.recv_timeout(Duration::from_secs(60)).expect("an answer");
    });
    server.stop();
}

/// The header of a request that limits hold back was received, and was not looked at.
#[test]
fn a_client_that_a_limit_holds_back_stays_while_its_pool_is_on_standby() {
    let options = WorkerOptions { receive_limit: Duration::from_secs(1), ..options() };
    let server = Server::start_with("standby-limit", Place::Tmpfs, options);
    let (workers, id) = (&server.workers, server.pool.id());
    let mut client = server.connect(ConnectOptions { depth: 8, ..impatient() });
    client.write(0, &[7; BLOCK], false).expect("a write");
    server.limit(1);
    for _ in 0..8 {
        client.send(Request::Read { offset: 0, len: 4096 }).expect("a request");
    }
    assert_eq!(client.receive().expect("an answer").result, Ok(()));
    assert!(server.runtime.block_on(workers.stand_by(id, Duration::from_secs(10))));
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(workers.connections().len(), 1, "it was dropped");
    server.limit(0);
    server.runtime.block_on(workers.serve(id));
    for _ in 1..8 {
        let answer = client.receive().expect("an answer");
        assert_eq!((answer.result, answer.data[..] == [7; BLOCK]), (Ok(()), true));
    }
    client.disconnect().expect("a goodbye");
    server.stop();
}

/// Clients of one volume all begin to read, and then read no further.
#[test]
fn long_reads_with_simple_replies_that_no_client_reads_leave_memory_for_other_volumes() {
    let server = Server::start("long-unread", Place::Tmpfs);
    let reader = |_| {
        let mut reader = simple_reader(&server.directory.join("nbd.sock"));
        send_reads(&mut reader, 2, 32 << 20);
        reader.stream.set_nonblocking(true).expect("a socket that does not wait");
        (reader.stream, 0)
    };
    let mut readers: Vec<(UnixStream, usize)> = (0..120).map(reader).collect();
    let clock = blockd_media::clock::Clock::start();
    let mut buffer = vec![0; 1 << 20];
    // A part of each read was answered when its client stops. Until then none keeps its memory.
    while readers.iter().any(|&(_, bytes)| bytes == 0) {
        assert!(clock.elapsed() < Duration::from_secs(30), "not all reads begin");
        for (stream, bytes) in &mut readers {
            *bytes += stream.read(&mut buffer).unwrap_or(0);
        }
    }
    std::thread::sleep(Duration::from_secs(1));
    let other = Other::new(&server, "w");
    let neighbours = [0, 1, 2].map(|_| other.connect());
    let free: Vec<u64> =
        server.workers.worker_stats().iter().map(|stats| stats.free_memory.get()).collect();
    assert!(free.iter().all(|&free| free >= 1 << 20), "free memory of the workers: {free:?}");
    let mut data = vec![1; 512 << 10];
    for mut neighbour in neighbours {
        neighbour.read(0, &mut data).expect("a read");
        neighbour.disconnect().expect("a goodbye");
    }
    drop(readers);
    server.runtime.block_on(other.listener.stop());
    server.stop();
}

/// A connection with simple replies.
fn simple_reader(socket: &Path) -> RawConnection<UnixStream> {
    let socket = UnixStream::connect(socket).expect("a connection");
    socket.set_read_timeout(Some(Duration::from_secs(30))).expect("a time limit");
    RawConnection::connect(socket, "", &ConnectOptions::simple()).expect("an export")
}

/// Requests reads at once, so that all of them have begun when the first part is answered.
fn send_reads(reader: &mut RawConnection<UnixStream>, count: u64, len: u64) {
    let mut requests = Vec::new();
    for cookie in 0..count {
        let header = Header { flags: 0, kind: cmd::READ, cookie, offset: 0, len };
        header.encode(false, &mut requests);
    }
    reader.stream.write_all(&requests).expect("the requests");
}

/// Simple replies carry the data of a read without a break: the parts of seven reads wait for the
/// end of the first one, with their memory, of which that one needs some. Where several connections
/// do that, each has its turn.
#[test]
fn long_reads_with_simple_replies_go_on_beside_clients_that_read_no_replies() {
    for count in [1, 12] {
        let options = WorkerOptions { buffer_bytes: 16 << 20, ..options() };
        let server = Server::start_with("long-simple", Place::Tmpfs, options);
        let reader = |_| {
            let mut reader = simple_reader(&server.directory.join("nbd.sock"));
            send_reads(&mut reader, 8, 4 << 20);
            reader
        };
        let readers: Vec<_> = (0..count).map(reader).collect();
        std::thread::sleep(Duration::from_millis(500));
        // At least one of each worker.
        let other = Other::new(&server, "w");
        let neighbours = [0, 1, 2].map(|_| {
            let mut neighbour = Connection::open(&other.socket, "").expect("a neighbour");
            for cookie in 0..100 {
                let (kind, len) = (Kind::Read, 64 << 10);
                let request = RawRequest { kind, flags: 0, cookie, offset: 0, len };
                neighbour.send(&request, &[]).expect("a request");
            }
            neighbour
        });
        std::thread::sleep(Duration::from_millis(500));
        std::thread::scope(|scope| {
            for mut reader in readers {
                scope.spawn(move || {
                    let mut found = vec![1; 4 << 20];
                    for _ in 0..8 {
                        // Long before the neighbours are dropped.
                        assert_eq!(reader.receive().expect("an answer").errno, 0);
                        reader.stream.read_exact(&mut found).expect("its data");
                    }
                    assert!(found.iter().all(|&byte| byte == 0));
                });
            }
        });
        drop(neighbours);
        server.runtime.block_on(other.listener.stop());
        server.stop();
    }
}

#[test]
fn a_limit_that_is_set_while_the_client_is_idle_holds_back_its_next_requests() {
    let server = Server::start("idle-limit", Place::Tmpfs);
    let mut client = server.connect(impatient());
    client.write(0, &[7; BLOCK], false).expect("a write");
    server.limit(20);
    // Each worker looks at its volumes once a second.
    std::thread::sleep(Duration::from_millis(2500));
    let clock = blockd_media::clock::Clock::start();
    let mut data = [0; BLOCK];
    for _ in 0..100 {
        client.read(0, &mut data).expect("a read");
    }
    let took = clock.elapsed();
    assert!(took >= Duration::from_secs(4), "100 reads at 20 a second took {took:?}");
    client.disconnect().expect("a goodbye");
    server.stop();
}

/// One of the workers has an older connection, whose receive is out.
#[test]
fn a_connection_that_the_server_closes_ends_beside_idle_ones_that_are_older() {
    let server = Server::start("closed-beside", Place::Tmpfs);
    let older = [0, 1].map(|_| server.connect(impatient()));
    let other = Other::new(&server, "w");
    let mut younger = other.connect();
    younger.write(0, &[1; BLOCK], false).expect("a write");
    let closed = server.workers.close_volume(server.pool.id(), other.volume);
    assert_eq!(server.runtime.block_on(closed), 1);
    let clock = blockd_media::clock::Clock::start();
    assert!(younger.receive().is_err());
    let took = clock.elapsed();
    assert!(took < Duration::from_secs(5), "the connection ended after {took:?}");
    for client in older {
        client.disconnect().expect("a goodbye");
    }
    server.runtime.block_on(other.listener.stop());
    server.stop();
}

#[test]
fn connections_move_between_workers_and_lose_nothing() {
    let mut movers = Movers::new("moving");
    movers.move_four(4);
    movers.stop();
}

#[test]
fn a_connection_moves_only_when_limits_hold_back_none_of_its_requests() {
    let mut movers = Movers::new("held");
    let others = movers.others.each_ref().map(|other| other.volume);
    for volume in [movers.server.volume].into_iter().chain(others) {
        let settings = VolumeSettings { iops: 60, ..VolumeSettings::default() };
        let control = Control::Configure { volume, settings };
        movers.server.runtime.block_on(movers.server.pool.control(control)).expect("a limit");
    }
    // More than the limit lets through at once, and no more than is received at once: the rest
    // waits in the connection.
    movers.move_four(12);
    movers.stop();
}

#[test]
fn a_connection_that_can_not_move_is_served_where_it_is() {
    let mut movers = Movers::new("stay");
    let closed = Other::new(&movers.server, "closed");
    for _ in 0..2 {
        // No connection moves while a volume is being closed, which takes 2 s as this client reads
        // one reply only.
        let mut unread = closed.connect();
        for _ in 0..32 {
            unread.send(Request::Read { offset: 0, len: 1 << 20 }).expect("a request");
        }
        assert_eq!(unread.receive().expect("an answer").result, Ok(()));
        let (workers, id) = (movers.server.workers.clone(), movers.server.pool.id());
        let volume = closed.volume;
        let close = async move { workers.close_volume(id, volume).await };
        let closing = movers.server.runtime.spawn(close);
        let clock = blockd_media::clock::Clock::start();
        while !closing.is_finished() {
            movers.step(4);
        }
        assert_eq!(movers.server.runtime.block_on(closing).expect("no panic"), 1);
        // Long enough for each worker to look for a connection to give away.
        assert!(clock.elapsed() > Duration::from_millis(1500), "{:?}", clock.elapsed());
    }
    movers.step(4);
    movers.server.runtime.block_on(closed.listener.stop());
    movers.stop();
}

#[test]
fn a_file_on_disk_holds_what_was_written() {
    compare("disk", Place::Disk, 1, 600);
}

#[test]
fn a_file_in_memory_holds_what_was_written() {
    compare("tmpfs", Place::Tmpfs, 2, 900);
}

#[test]
fn memory_holds_what_was_written() {
    compare("memory", Place::Memory, 3, 900);
}

#[test]
fn requests_in_flight_are_answered_by_their_cookies() {
    let server = Server::start("pipeline", Place::Disk);
    let options = ConnectOptions { depth: 64, ..forms()[0].clone() };
    let mut client = server.connect(options);
    let (mut sent, mut done) = (0_u32, 0_u32);
    while done < 20_000 {
        while client.room() && sent < 20_000 {
            let block = sent % 5000;
            let data = [u8::try_from(block % 251).unwrap_or(0); BLOCK];
            let offset = u64::from(block) * BLOCK as u64;
            client.send(Request::Write { offset, data: &data, fua: false }).expect("a request");
            sent += 1;
        }
        let completion = client.receive().expect("an answer");
        completion.result.expect("a write");
        client.recycle(completion.data);
        done += 1;
    }
    client.flush().expect("a flush");
    let mut data = vec![0; 5000 * BLOCK];
    client.read(0, &mut data).expect("a read");
    for (block, bytes) in data.chunks(BLOCK).enumerate() {
        assert!(bytes.iter().all(|&byte| usize::from(byte) == block % 251), "block {block}");
    }
    server.stop();
}

#[test]
fn flushes_of_many_clients_share_flushes_of_the_device() {
    const CLIENTS: u64 = 16;
    const FLUSHES: u64 = 100;
    let server = Server::start("flushes", Place::Disk);
    let mut first = server.connect(forms()[0].clone());
    for n in 0..CLIENTS {
        first.write(n << 20, &[1; BLOCK], false).expect("a write");
    }
    first.flush().expect("a flush");
    let before = server.pool.stats().flushes.load(Ordering::Relaxed);
    std::thread::scope(|scope| {
        for n in 0..CLIENTS {
            let mut client = server.connect(forms()[0].clone());
            scope.spawn(move || {
                for _ in 0..FLUSHES {
                    client.write(n << 20, &[2; BLOCK], false).expect("a write");
                    client.flush().expect("a flush");
                }
            });
        }
    });
    let made = server.pool.stats().flushes.load(Ordering::Relaxed) - before;
    println!("{made} flushes of the device for {} of clients", CLIENTS * FLUSHES);
    assert!(made * 2 < CLIENTS * FLUSHES, "{made} flushes");
    server.stop();
}

#[test]
fn a_closed_volume_ends_its_connections() {
    let server = Server::start("close", Place::Memory);
    let mut client = server.connect(forms()[0].clone());
    client.write(0, &[1; BLOCK], false).expect("a write");
    let id = server.pool.id();
    let closed = server.runtime.block_on(server.workers.close_volume(id, server.volume));
    assert_eq!(closed, 1);
    assert!(client.write(0, &[2; BLOCK], false).is_err());
    assert!(server.workers.connections().is_empty());
    server.stop();
}

#[test]
fn a_request_over_more_pieces_than_a_plan_holds_is_right() {
    for place in [Place::Disk, Place::Tmpfs] {
        let server = Server::start("scattered", place);
        let mut client = server.connect(forms()[0].clone());
        // Every other block, so that the 256 blocks of a request are 256 pieces.
        let mut expected = vec![0; 2 << 20];
        for block in (0..512).step_by(2) {
            let byte = u8::try_from(block % 251 + 1).unwrap();
            expected[block * BLOCK..][..BLOCK].fill(byte);
            client.write((block * BLOCK) as u64, &[byte; BLOCK], false).unwrap();
        }
        let mut read = vec![1; 2 << 20];
        client.read(0, &mut read).unwrap();
        assert!(read == expected);
        // Written over in one go, across what is valid and what is not.
        expected
            .iter_mut()
            .enumerate()
            .for_each(|(at, byte)| *byte = u8::try_from(at % 253).unwrap());
        client.write(0, &expected, true).unwrap();
        client.read(0, &mut read).unwrap();
        assert!(read == expected);
        drop(client);
        server.stop();
    }
}
