//! Misbehaving clients once connected, with real volumes: they lose their own connection at most.
#![forbid(unsafe_code)]

#[path = "nbd_support/mod.rs"]
#[expect(dead_code, reason = "shared with the tests of the handshake")]
mod support;

use std::io::{Read, Write};
use std::net::Shutdown;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use blockd_engine::pool::{Control, PoolHandle, create, open};
use blockd_media::pool::PoolSpec;
use blockd_media::{DeviceKind, DeviceSpec};
use blockd_nbd::client::{Client, ClientError, ConnectOptions, Request, ServerAddress, Uri};
use blockd_nbd::codec::request::Header;
use blockd_nbd::codec::{chunk, cmd, errno, flag, opt, rep};
use blockd_nbd::{ExportError, ExportInfo};
use blockd_serve::nbd::handshake::Tls;
use blockd_serve::nbd::listener::{Limits, Listener, ListenerOptions, bind};
use blockd_serve::nbd::{Exports, Opened};
use blockd_serve::worker::{Target, WorkerOptions, Workers};
use blockd_testkit::folder::Folder;
use support::{Raw, go, request, unix, until};
use tokio::runtime::Runtime;

/// Bytes of the volume.
const SIZE: u64 = 64 << 20;

/// The volume by three names: `v`, `frozen`, which is read-only, and the empty one.
struct One(Target);

fn info(read_only: bool) -> ExportInfo {
    ExportInfo {
        name: if read_only { "frozen" } else { "v" }.to_owned(),
        description: String::new(),
        size: SIZE,
        block_size: 512,
        preferred_size: 4096,
        read_only,
        multi_conn: true,
    }
}

impl Exports for One {
    type Volume = Target;

    async fn list(&self) -> Vec<ExportInfo> {
        vec![info(false), info(true)]
    }

    async fn open(&self, name: &str) -> Result<Opened<Target>, ExportError> {
        Ok(Opened { info: info(name == "frozen"), volume: self.0.clone() })
    }
}

/// A pool in a file, a volume in it, and a socket in front.
struct Server {
    runtime: Runtime,
    pool: PoolHandle,
    workers: Workers,
    _listener: Listener,
    scratch: Folder,
}

fn spec(file: &Path, rings: &Path) -> PoolSpec {
    let path = file.to_owned();
    let kind = DeviceKind::File;
    let size = Some(192 << 20);
    let device = DeviceSpec { path, kind, size, preallocate: false, direct: true };
    let mut spec = PoolSpec::new("test", device, rings.to_owned());
    // Nothing is durable here unless a client requests it.
    spec.commit_interval = Duration::from_secs(3600);
    spec
}

impl Server {
    fn start() -> Self {
        let scratch = Folder::new("nbd").expect("a folder");
        let spec = spec(&scratch.path().join("pool"), Path::new("/dev/shm"));
        create(&spec).expect("a pool");
        Self::serve(scratch, &spec)
    }

    fn serve(scratch: Folder, spec: &PoolSpec) -> Self {
        let (pool, _) = open(spec).expect("an open pool");
        let runtime = Runtime::new().expect("a runtime");
        let control = Control::Create { name: "v".to_owned(), size: SIZE, block_size: 512 };
        runtime.block_on(pool.control(control)).expect("a volume");
        let volume = runtime.block_on(pool.volumes()).expect("volumes")[0].id;
        let options = WorkerOptions {
            buffer_bytes: 8 << 20,
            send_limit: Duration::from_secs(2),
            // A client whose end is not seen is not closed for another reason.
            receive_limit: Duration::from_secs(3600),
            ..WorkerOptions::default()
        };
        let workers = Workers::start(options).expect("workers");
        runtime.block_on(workers.add_pool(&pool)).expect("a pool that is served");
        let target = Target { pool: pool.clone(), volume, name: "v".to_owned() };
        let address = unix(&scratch.path().join("nbd.sock"));
        let options = ListenerOptions { address, limits: Limits::default(), tls: Tls::Off };
        let entered = runtime.enter();
        let bound = bind(options).expect("a listener");
        let listener = bound.serve(Arc::new(One(target)), Arc::new(workers.clone()));
        drop(entered);
        Self { runtime, pool, workers, _listener: listener, scratch }
    }

    fn uri(&self, export: &str) -> Uri {
        let server = ServerAddress::Unix(self.scratch.path().join("nbd.sock"));
        Uri { server, export: export.to_owned() }
    }

    fn client(&self) -> Client {
        Client::connect(&self.uri("v"), &ConnectOptions::default()).expect("a connection")
    }

    /// A connection in its transmission phase; `options` come before GO.
    fn raw_with(&self, export: &str, options: &[u32]) -> Raw {
        let path = self.scratch.path().join("nbd.sock");
        let mut raw =
            Raw::new(std::os::unix::net::UnixStream::connect(path).expect("a connection"));
        raw.greet();
        for option in options {
            raw.option(*option, &[]);
            assert_eq!(raw.outcome(), rep::ACK);
        }
        raw.option(opt::GO, &go(export));
        assert_eq!(raw.outcome(), rep::ACK);
        raw
    }

    fn raw(&self) -> Raw {
        self.raw_with("v", &[])
    }

    /// Asserts that another client can write, read and flush.
    fn works(&self) {
        let mut client = self.client();
        let data = [0x77; 4096];
        client.write(SIZE - 4096, &data, true).expect("a write");
        let mut read = [0; 4096];
        client.read(SIZE - 4096, &mut read).expect("a read");
        assert_eq!(read, data);
        client.flush().expect("a flush");
        assert_eq!(self.pool.failure(), None);
    }

    fn connections(&self) -> usize {
        self.workers.connections().len()
    }

    fn stop(self) {
        self.runtime.block_on(self.workers.drain(Duration::from_secs(20)));
        self.runtime.block_on(self.pool.close()).expect("an orderly close");
    }
}

fn with_flags(flags: u16, mut request: Vec<u8>) -> Vec<u8> {
    request[4..6].copy_from_slice(&flags.to_be_bytes());
    request
}

fn extended(flags: u16, kind: u16, cookie: u64, range: (u64, u64)) -> Vec<u8> {
    let mut bytes = Vec::new();
    Header { flags, kind, cookie, offset: range.0, len: range.1 }.encode(true, &mut bytes);
    bytes
}

/// The next simple reply's errno; its cookie has to be the one that is expected.
fn simple(raw: &mut Raw, cookie: u64) -> u32 {
    let reply = raw.hear(16);
    assert_eq!(reply[..4], 0x6744_6698_u32.to_be_bytes());
    assert_eq!(reply[8..], cookie.to_be_bytes());
    u32::from_be_bytes(reply[4..8].try_into().expect("four bytes"))
}

#[test]
fn bad_magic_ends_the_connection_and_no_other() {
    let server = Server::start();
    for garbage in [&[0xff; 100][..], b"GET / HTTP/1.1\r\n\r\n", &extended(0, 3, 1, (0, 0))] {
        let mut raw = server.raw();
        raw.say(garbage);
        assert!(raw.closed());
    }
    let mut raw = server.raw_with("v", &[opt::EXTENDED_HEADERS]);
    raw.say(&request(cmd::FLUSH, 1, 0, 0));
    assert!(raw.closed());
    server.works();
    server.stop();
}

#[test]
fn an_unknown_command_or_flag_is_einval_and_the_connection_lives() {
    let server = Server::start();
    let mut raw = server.raw();
    raw.say(&request(200, 1, 0, 512));
    assert_eq!(simple(&mut raw, 1), errno::EINVAL);
    for kind in [cmd::READ, cmd::TRIM, cmd::FLUSH, cmd::WRITE_ZEROES, cmd::CACHE] {
        raw.say(&with_flags(1 << 14, request(kind, 2, 0, 512)));
        assert_eq!(simple(&mut raw, 2), errno::EINVAL);
    }
    // The payload of a refused write is not taken for requests.
    raw.say(&with_flags(1 << 14, request(cmd::WRITE, 3, 0, 512)));
    raw.say(&[0xab; 512]);
    assert_eq!(simple(&mut raw, 3), errno::EINVAL);
    // Neither structured replies nor a context were agreed on.
    raw.say(&request(cmd::BLOCK_STATUS, 4, 0, 512));
    assert_eq!(simple(&mut raw, 4), errno::EINVAL);
    raw.say(&request(cmd::FLUSH, 5, 0, 0));
    assert_eq!(simple(&mut raw, 5), 0);
    server.stop();
}

#[test]
fn offsets_that_wrap_and_reads_of_four_gigabytes_are_einval() {
    let server = Server::start();
    let mut raw = server.raw();
    for (offset, len) in [(u64::MAX - 511, 1024), (!511, 512), (0, u32::MAX), (0, !511)] {
        for kind in [cmd::READ, cmd::TRIM, cmd::CACHE] {
            raw.say(&request(kind, 7, offset, len));
            assert_eq!(simple(&mut raw, 7), errno::EINVAL);
        }
        raw.say(&request(cmd::WRITE_ZEROES, 8, offset, len));
        assert_eq!(simple(&mut raw, 8), errno::ENOSPC);
    }
    server.stop();
}

#[test]
fn a_write_of_four_gigabytes_ends_the_connection_and_one_a_bit_too_long_does_not() {
    let server = Server::start();
    let mut raw = server.raw();
    raw.say(&request(cmd::WRITE, 1, 0, !511));
    assert_ne!(simple(&mut raw, 1), 0);
    assert!(raw.closed());
    let mut raw = server.raw();
    let len = (32 << 20) + 4096;
    raw.say(&request(cmd::WRITE, 2, 0, len));
    raw.say(&vec![1; usize::try_from(len).unwrap()]);
    assert_eq!(simple(&mut raw, 2), errno::EINVAL);
    raw.say(&request(cmd::READ, 3, 0, 512));
    assert_eq!(simple(&mut raw, 3), 0);
    assert_eq!(raw.hear(512), [0; 512]);
    server.stop();
}

#[test]
fn the_longest_write_and_read_there_may_be_are_carried_out() {
    let server = Server::start();
    let data: Vec<u8> = (0..8_u32 << 20).flat_map(u32::to_be_bytes).collect();
    for extended in [true, false] {
        for structured in [true, false] {
            let options = ConnectOptions { structured, extended, ..ConnectOptions::default() };
            let mut client = Client::connect(&server.uri("v"), &options).unwrap();
            client.send(Request::Write { offset: 0, data: &data, fua: false }).unwrap();
            assert!(client.receive().unwrap().result.is_ok());
            client.send(Request::Read { offset: 0, len: 32 << 20 }).unwrap();
            assert!(client.receive().unwrap().data == data);
        }
    }
    server.stop();
}

#[test]
fn a_write_past_the_end_is_enospc_and_writes_nothing() {
    let server = Server::start();
    let mut raw = server.raw();
    for (offset, len) in [(SIZE, 512), (SIZE - 512, 1024), (1 << 62, 4096)] {
        raw.say(&request(cmd::WRITE, 1, offset, len));
        raw.say(&vec![9; usize::try_from(len).unwrap()]);
        assert_eq!(simple(&mut raw, 1), errno::ENOSPC);
    }
    raw.say(&request(cmd::READ, 2, SIZE - 512, 512));
    assert_eq!(simple(&mut raw, 2), 0);
    assert_eq!(raw.hear(512), [0; 512]);
    server.stop();
}

#[test]
fn requests_of_no_length_succeed_in_every_form() {
    let server = Server::start();
    for form in [&[][..], &[opt::STRUCTURED_REPLY], &[opt::EXTENDED_HEADERS]] {
        let mut raw = server.raw_with("v", form);
        for kind in [cmd::READ, cmd::WRITE, cmd::TRIM, cmd::WRITE_ZEROES, cmd::CACHE] {
            match form {
                [] => {
                    raw.say(&request(kind, 1, SIZE, 0));
                    assert_eq!(simple(&mut raw, 1), 0);
                }
                [opt::STRUCTURED_REPLY] => {
                    raw.say(&request(kind, 1, SIZE, 0));
                    let reply = raw.hear(20);
                    assert_eq!(reply[4..8], [0, 1, 0, 0], "one part, done, of no type");
                    assert_eq!(reply[16..], [0; 4]);
                }
                _ => {
                    let flags = if kind == cmd::WRITE { flag::PAYLOAD_LEN } else { 0 };
                    raw.say(&extended(flags, kind, 1, (SIZE, 0)));
                    let reply = raw.hear(32);
                    assert_eq!(reply[4..8], [0, 1, 0, 0], "one part, done, of no type");
                    assert_eq!(reply[16..24], SIZE.to_be_bytes());
                }
            }
        }
    }
    server.stop();
}

#[test]
fn unexpected_payload_is_skipped() {
    let server = Server::start();
    let mut raw = server.raw_with("v", &[opt::EXTENDED_HEADERS]);
    for (cookie, kind) in [(1_u64, cmd::BLOCK_STATUS), (2, cmd::READ), (3, 999)] {
        raw.say(&extended(flag::PAYLOAD_LEN, kind, cookie, (0, 24)));
        raw.say(&[0x25; 24]);
        let reply = raw.hear(32);
        assert_eq!(reply[6..8], chunk::ERROR.to_be_bytes());
        assert_eq!(reply[8..16], cookie.to_be_bytes());
        let len = u64::from_be_bytes(reply[24..].try_into().unwrap());
        let error = raw.hear(usize::try_from(len).unwrap());
        assert_eq!(error[..4], errno::EINVAL.to_be_bytes());
    }
    // It is unknown whether payload follows this one.
    raw.say(&extended(0, cmd::WRITE, 4, (0, 512)));
    raw.hear(32);
    let mut rest = Vec::new();
    raw.0.read_to_end(&mut rest).unwrap();
    server.works();
    server.stop();
}

#[test]
fn a_read_only_export_is_not_written_to() {
    let server = Server::start();
    let mut raw = server.raw_with("frozen", &[]);
    raw.say(&request(cmd::WRITE, 1, 0, 512));
    raw.say(&[1; 512]);
    assert_eq!(simple(&mut raw, 1), errno::EPERM);
    raw.say(&request(cmd::TRIM, 2, 0, 512));
    assert_eq!(simple(&mut raw, 2), errno::EPERM);
    // One that was not even advertised.
    raw.say(&with_flags(flag::FAST_ZERO, request(cmd::WRITE_ZEROES, 3, 0, 512)));
    assert_eq!(simple(&mut raw, 3), errno::EPERM);
    raw.say(&request(cmd::FLUSH, 4, 0, 0));
    assert_eq!(simple(&mut raw, 4), 0);
    server.stop();
}

#[test]
fn zeroes_give_space_back_or_keep_it_as_the_client_says() {
    const LEN: u64 = 1 << 20;
    let server = Server::start();
    let mut client = server.client();
    // Bytes that the volume takes, and whether it says that it reads as zeroes.
    let look = |client: &mut Client| {
        let ranges = client.block_status(0, LEN).unwrap();
        assert_eq!(ranges, client.block_status(0, LEN).unwrap());
        assert_eq!(ranges.iter().map(|range| range.len).sum::<u64>(), LEN);
        let mapped = server.runtime.block_on(server.pool.volumes()).unwrap()[0].mapped;
        let mut read = vec![1; 1 << 20];
        client.read(0, &mut read).unwrap();
        let zero = ranges.iter().all(|range| range.zero);
        assert_eq!(zero, read.iter().all(|byte| *byte == 0));
        // A range with space is no hole, and one without is.
        assert!(ranges.iter().all(|range| range.hole == (mapped == 0)));
        (mapped, zero)
    };
    assert_eq!(look(&mut client), (0, true));
    client.write(0, &vec![1; 1 << 20], false).unwrap();
    assert_eq!(look(&mut client), (LEN, false));
    client.write_zeroes(0, LEN, false).unwrap();
    assert_eq!(look(&mut client), (0, true));
    client.write_zeroes(0, LEN, true).unwrap();
    assert_eq!(look(&mut client), (LEN, true));
    client.write(0, &vec![1; 1 << 20], false).unwrap();
    client.trim(0, LEN).unwrap();
    assert_eq!(look(&mut client), (0, true));
    let fast = |no_hole| Request::WriteZeroes { offset: 0, len: LEN, no_hole, fast_zero: true };
    client.send(fast(true)).unwrap();
    assert_eq!(client.receive().unwrap().result.unwrap_err().errno, errno::ENOTSUP);
    client.send(fast(false)).unwrap();
    assert!(client.receive().unwrap().result.is_ok());
    server.stop();
}

#[test]
fn a_goodbye_in_the_middle_of_a_payload_harms_no_other_client() {
    let server = Server::start();
    for (length, sent) in [(4096_u32, 0), (4096, 4095), (8 << 20, 3 << 20), (8 << 20, 20)] {
        let mut raw = server.raw();
        raw.say(&request(cmd::WRITE, 1, 0, length));
        raw.say(&vec![1; sent]);
        drop(raw);
        let mut raw = server.raw();
        raw.say(&request(cmd::WRITE, 1, 0, length));
        raw.say(&vec![1; sent]);
        raw.0.shutdown(Shutdown::Write).unwrap();
        assert!(raw.closed());
    }
    until("all are gone", || server.connections() == 0);
    server.works();
    server.stop();
}

#[test]
fn a_client_that_sends_no_more_still_gets_every_answer() {
    let server = Server::start();
    let mut raw = server.raw();
    for cookie in 0..300 {
        raw.say(&request(cmd::WRITE, cookie, cookie * 4096, 4096));
        raw.say(&[3; 4096]);
    }
    raw.0.shutdown(Shutdown::Write).unwrap();
    let mut cookies: Vec<u64> = (0..300)
        .map(|_| {
            let reply = raw.hear(16);
            assert_eq!(reply[4..8], [0; 4]);
            u64::from_be_bytes(reply[8..].try_into().unwrap())
        })
        .collect();
    cookies.sort_unstable();
    assert!(cookies.into_iter().eq(0..300));
    assert!(raw.closed());
    server.stop();
}

#[test]
fn a_disconnect_answers_what_came_before_it() {
    let server = Server::start();
    let mut raw = server.raw();
    for cookie in 0..40 {
        raw.say(&request(cmd::WRITE, cookie, cookie * 4096, 4096));
        raw.say(&[4; 4096]);
    }
    raw.say(&request(cmd::DISC, 99, 0, 0));
    for _ in 0..40 {
        assert_eq!(raw.hear(16)[4..8], [0; 4]);
    }
    assert!(raw.closed());
    server.stop();
}

#[test]
fn hanging_up_with_a_queue_of_requests_leaves_nothing_behind() {
    let server = Server::start();
    for round in 0..60_u64 {
        let mut raw = server.raw();
        for cookie in 0..100 {
            raw.say(&request(cmd::READ, cookie, cookie * 65536 % SIZE, 4096));
            if round % 2 == 0 {
                raw.say(&request(cmd::WRITE, cookie, cookie * 4096, 512));
                raw.say(&[5; 512]);
            }
        }
        if round % 3 == 0 {
            raw.0.shutdown(Shutdown::Both).unwrap();
        }
    }
    until("all are gone", || server.connections() == 0);
    server.works();
    server.stop();
}

#[test]
fn one_that_reads_no_answers_is_dropped_and_delays_no_other_client() {
    let server = Server::start();
    let raw = server.raw();
    raw.0.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    // More answers than any buffer holds. The server stops listening before that.
    for cookie in 0..2000 {
        if (&raw.0).write_all(&request(cmd::READ, cookie, 0, 1 << 20)).is_err() {
            break;
        }
    }
    server.works();
    until("it is dropped", || server.connections() == 0);
    server.stop();
}

#[test]
fn a_flush_covers_what_other_connections_wrote() {
    let server = Server::start();
    let (mut writer, mut flusher) = (server.client(), server.client());
    let file = server.scratch.path().join("pool");
    let data = [0x66; 8192];
    writer.write(1 << 20, &data, false).unwrap();
    flusher.flush().unwrap();
    // The media has the state that a power loss would leave: there is no delta ring to it.
    let copy = Folder::new("nbd").expect("a folder");
    std::fs::copy(&file, copy.path().join("pool")).unwrap();
    // A copy has the identity of its pool, and one host opens only one of them at a time.
    server.stop();
    let rings = PathBuf::from(format!("/dev/shm/blockd-strangers-{}", std::process::id()));
    std::fs::create_dir_all(&rings).unwrap();
    let mut spec = spec(&copy.path().join("pool"), &rings);
    spec.accept_loss = true;
    let after = Server::serve(copy, &spec);
    let mut read = [0; 8192];
    after.client().read(1 << 20, &mut read).unwrap();
    assert_eq!(read, data);
    after.stop();
    std::fs::remove_dir_all(&rings).unwrap();
}

#[test]
fn no_requests_end_the_server() {
    let server = Server::start();
    let mut random = fastrand::Rng::with_seed(11);
    for round in 0..150 {
        let wide = round % 3 == 2;
        let options: &[u32] = match round % 3 {
            0 => &[],
            1 => &[opt::STRUCTURED_REPLY],
            _ => &[opt::EXTENDED_HEADERS],
        };
        let raw = server.raw_with("v", options);
        raw.0.set_write_timeout(Some(Duration::from_secs(5))).unwrap();
        let mut bytes = Vec::new();
        for cookie in 0..random.u64(1..40) {
            let offset =
                if random.u8(..) < 200 { random.u64(0..SIZE) & !511 } else { random.u64(..) };
            let len = if random.u8(..) < 200 { random.u32(0..256) * 512 } else { random.u32(..) };
            let flags = if random.bool() { 0 } else { random.u16(0..64) };
            let kind = if random.u8(..) < 8 { cmd::DISC } else { random.u16(0..9) };
            if wide {
                bytes.extend(extended(flags, kind, cookie, (offset, len.into())));
            } else {
                bytes.extend(with_flags(flags, request(kind, cookie, offset, len)));
            }
            if kind == cmd::WRITE && random.u8(..) < 200 {
                bytes.extend(std::iter::repeat_n(7, usize::try_from(len % (1 << 20)).unwrap()));
            }
        }
        // It may hang up in the middle, or wait for payload that does not come.
        let _ = (&raw.0).write_all(&bytes);
        if random.bool() {
            let _ = raw.0.shutdown(Shutdown::Write);
            let _ = (&raw.0).take(1 << 20).read_to_end(&mut Vec::new());
        }
    }
    until("all are gone", || server.connections() == 0);
    server.works();
    server.stop();
}

#[test]
fn clients_see_the_size_they_negotiated_again_after_each_reconnect() {
    let server = Server::start();
    for round in 0..200 {
        let mut client = server.client();
        assert_eq!((client.size(), client.facts().block_min), (SIZE, 512));
        let offset = round * 4096;
        client.write(offset, &[8; 4096], false).unwrap();
        if round % 2 == 0 {
            client.disconnect().unwrap();
        }
    }
    let mut past = server.client();
    let status = past.block_status(0, 200 * 4096).unwrap();
    assert_eq!((status.len(), status[0].len, status[0].hole), (1, 200 * 4096, false));
    assert!(matches!(past.read(SIZE, &mut [0; 512]), Err(ClientError::BadRequest { .. })));
    server.stop();
}
