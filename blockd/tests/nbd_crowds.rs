//! Clients that connect in crowds, stay idle or stop halfway, against a daemon: they cost others
//! nothing.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;
#[path = "nbd_support/mod.rs"]
#[expect(dead_code, reason = "shared with the tests of the handshake")]
mod support;

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddrV4, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use blockd_media::clock::Clock;
use blockd_nbd::codec::{cmd, errno, opt, rep};
use cli_support::{Daemon, LIMIT};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, connect, socket};
use support::{PATIENCE, Raw, go, request, until};

/// The longest delay of other clients, on a busy machine.
const SOON: Duration = Duration::from_secs(5);

const ONE: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 1);
const OTHER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

/// A daemon with a volume `v`, which serves NBD over TCP and on a Unix socket, and metrics.
struct Server {
    daemon: Daemon,
    tcp: SocketAddrV4,
    http: SocketAddrV4,
}

impl Server {
    /// `keys` are those of `[nbd]`.
    fn start(keys: &str) -> Self {
        Self::start_sized("1G", keys)
    }

    /// With a pool of that size.
    fn start_sized(size: &str, keys: &str) -> Self {
        raise_limit();
        let more = format!(
            "[pool.space]\nlow = \"off\"\nvery_low = \"off\"\n[metrics]\naddress = \"0\"\n\
             [nbd]\n{keys}\n[[nbd.listener]]\ntcp = \"127.0.0.1:0\"\n"
        );
        let mut daemon = Daemon::start_with(size, &more);
        // One worker has them all.
        let text = fs::read_to_string(daemon.config()).unwrap().replace("count = 2", "count = 1");
        let unix = daemon.ring_dir().join("nbd.sock");
        let text = format!("{text}[[nbd.listener]]\nunix = {unix:?}\n");
        daemon.terminate();
        fs::write(daemon.config(), text).unwrap();
        fs::remove_file(daemon.dir.join("log")).unwrap();
        daemon.start_again();
        let log = daemon.log();
        let address = |before: &str| -> SocketAddrV4 {
            let rest = log.split(before).nth(1).unwrap();
            let is_part = |c: char| c.is_ascii_digit() || c == '.' || c == ':';
            rest[..rest.find(|c| !is_part(c)).unwrap()].parse().unwrap()
        };
        let (tcp, http) = (address("NBD is served on tcp:"), address("http://"));
        daemon.ok(&["add", "--nbd", "--size", "64M", "v"]);
        Self { daemon, tcp, http }
    }

    /// A connection from an address of this host, which has said nothing yet.
    fn connect(&self, from: Ipv4Addr) -> Raw<TcpStream> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let fd = socket(AddressFamily::Inet, SockType::Stream, flags, None).unwrap();
        bind(fd.as_raw_fd(), &SockaddrIn::from(SocketAddrV4::new(from, 0))).unwrap();
        connect(fd.as_raw_fd(), &SockaddrIn::from(self.tcp)).unwrap();
        let stream = TcpStream::from(fd);
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Raw(stream)
    }

    /// A connection with the export, over a Unix socket.
    fn enter_unix(&self) -> Raw {
        let stream = UnixStream::connect(self.daemon.ring_dir().join("nbd.sock")).unwrap();
        let mut raw = Raw::new(stream);
        assert_eq!(begin(&mut raw), rep::ACK);
        raw
    }

    /// A connection with the export.
    fn enter(&self, from: Ipv4Addr) -> Raw<TcpStream> {
        let mut raw = self.connect(from);
        assert_eq!(begin(&mut raw), rep::ACK);
        raw
    }

    fn metric(&self, name: &str) -> u64 {
        let stream = TcpStream::connect(self.http).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let (_, page) = blockd_testkit::http::get(stream, "/metrics").unwrap();
        let of = |line: &&str| line.split('{').next() == Some(name);
        let values = page.lines().filter(of).map(|line| line.rsplit(' ').next().unwrap());
        values.map(|value| value.parse::<u64>().unwrap()).sum()
    }

    /// A client at another address connects and reads, without having to wait.
    fn works_from(&self, from: Ipv4Addr) {
        let clock = Clock::start();
        let mut raw = self.enter(from);
        flush(&mut raw, 1);
        let took = clock.elapsed();
        assert!(took < SOON, "another client waited for {took:?}");
    }
}

/// The test holds as many descriptors as the daemon.
fn raise_limit() {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
}

fn begin<S: Read + Write>(raw: &mut Raw<S>) -> u32 {
    raw.greet();
    raw.option(opt::GO, &go("v"));
    raw.outcome()
}

fn flush<S: Read + Write>(raw: &mut Raw<S>, cookie: u64) {
    raw.say(&request(cmd::FLUSH, cookie, 0, 0));
    let reply = raw.hear(16);
    assert_eq!((&reply[4..8], &reply[8..]), (&[0; 4][..], &cookie.to_be_bytes()[..]));
}

#[test]
fn more_connections_of_one_host_than_it_may_have_leave_room_for_others() {
    let server = Server::start("max_connections_per_peer = 1024\nmax_connections = 1100");
    let _idle: Vec<_> = (0..1024).map(|_| server.enter(ONE)).collect();
    // With these the listener would be full.
    for _ in 0..76 {
        assert!(server.connect(ONE).closed(), "beyond the limit of its host");
    }
    server.works_from(OTHER);
    assert_eq!(server.metric("blockd_listener_peer_refused_total"), 76);
    assert!(server.daemon.log().contains("nbd.max_connections_per_peer"));
}

#[test]
fn a_crowd_that_connects_and_says_nothing_delays_no_client() {
    let server = Server::start("");
    let _mute: Vec<_> = (0..1000).map(|_| server.connect(ONE)).collect();
    server.works_from(OTHER);
    // Nor, for long, another client of its own.
    server.works_from(ONE);
}

#[test]
fn a_full_listener_closes_the_longest_idle_connection_of_the_peer_that_has_most() {
    let server = Server::start("max_connections = 5\nreceive_timeout = \"1h\"");
    let mut of_other = server.enter(OTHER);
    // Half a request is not idle.
    let mut half = server.enter(ONE);
    half.say(&request(cmd::WRITE, 1, 0, 4096)[..20]);
    let mut first = server.enter(ONE);
    let mut second = server.enter(ONE);
    let mut third = server.enter(ONE);
    assert_eq!(begin(&mut server.connect(ONE)), rep::ERR_POLICY, "no connection is idle yet");
    assert_eq!(server.metric("blockd_listener_full_refused_total"), 1);

    // Another host's idle connection is no room for the host that has most.
    let clock = Clock::start();
    while clock.elapsed() < Duration::from_secs(11) {
        for raw in [&mut first, &mut second, &mut third] {
            flush(raw, 1);
        }
        assert_eq!(begin(&mut server.connect(ONE)), rep::ERR_POLICY);
        std::thread::sleep(Duration::from_millis(100));
    }
    let clock = Clock::start();
    let mut newest = loop {
        // The first one has had no request for less time than the second.
        flush(&mut first, 1);
        let mut raw = server.connect(ONE);
        if begin(&mut raw) == rep::ACK {
            break raw;
        }
        assert!(clock.elapsed() < LIMIT, "there is no room although clients are idle");
        std::thread::sleep(Duration::from_millis(100));
    };
    assert!(clock.elapsed() > Duration::from_secs(8), "clients had been idle for a moment only");
    assert!(second.closed());
    assert_eq!(server.metric("blockd_listener_idle_displaced_total"), 1);
    assert!(server.daemon.log().contains("closed an idle connection: its listener is full"));
    for (cookie, raw) in
        [&mut of_other, &mut first, &mut third, &mut newest].into_iter().enumerate()
    {
        flush(raw, cookie as u64);
    }
    half.say(&request(cmd::WRITE, 1, 0, 4096)[20..]);
    half.say(&[1; 4096]);
    assert_eq!(half.hear(16)[4..8], [0; 4]);
}

/// Connections that negotiate count for their host, too.
#[test]
fn a_host_whose_connections_negotiate_takes_the_place_of_no_other() {
    let server = Server::start("max_connections = 4\nreceive_timeout = \"1h\"");
    let mut of_other = server.enter(OTHER);
    std::thread::sleep(Duration::from_secs(11));
    let negotiating = [(); 3].map(|()| {
        let mut raw = server.connect(ONE);
        raw.greet();
        raw.option(opt::INFO, &go("v"));
        assert_eq!(raw.outcome(), rep::ACK);
        raw
    });
    assert_eq!(begin(&mut server.connect(ONE)), rep::ERR_POLICY);
    flush(&mut of_other, 1);
    drop(negotiating);
}

#[test]
fn five_thousand_idle_connections_take_little_memory() {
    const CROWD: usize = 5000;
    /// Of the daemon's own memory for each; the kernel's memory for sockets is not in it.
    const EACH: u64 = 8 << 10;
    let server = Server::start("");
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    if hard < 6000 {
        println!("not run: the limit on open files is {hard}");
        return;
    }
    server.works_from(OTHER);
    let before = server.daemon.resident();
    let enter = |_| {
        let mut raw = server.enter_unix();
        flush(&mut raw, 1);
        raw
    };
    let mut crowd: Vec<_> = (0..CROWD).map(enter).collect();
    let grown = server.daemon.resident().saturating_sub(before);
    println!("{CROWD} idle connections: {} bytes each", grown / CROWD as u64);
    assert!(grown < CROWD as u64 * EACH, "{grown} bytes for {CROWD} connections");
    assert_eq!(server.metric("blockd_worker_connections"), CROWD as u64);
    server.works_from(OTHER);
    for raw in crowd.iter_mut().step_by(100) {
        flush(raw, 2);
    }
    drop(crowd);
    until("all are gone", || server.metric("blockd_worker_connections") == 0);
}

#[test]
fn a_client_that_stops_in_the_middle_of_a_request_is_dropped_and_a_slow_one_is_not() {
    let server = Server::start("receive_timeout = \"3s\"");
    let mut idle = server.enter(OTHER);
    let header = request(cmd::WRITE, 1, 0, 1 << 20);
    // A part of the header, and of the payload: as it is copied and as it is received in place.
    for (at, sent) in [20, 128, 512 << 10].into_iter().enumerate() {
        let mut stopped = server.enter(ONE);
        let clock = Clock::start();
        stopped.say(&[&header[..], &vec![7; 1 << 20]].concat()[..sent]);
        assert!(stopped.closed());
        let took = clock.elapsed();
        assert!(took > Duration::from_millis(2900), "{sent} bytes: {took:?}");
        until("it is counted", || {
            server.metric("blockd_worker_receive_timeouts_total") == at as u64 + 1
        });
    }
    assert!(server.daemon.log().contains("nbd.receive_timeout"));
    let mut slow = server.enter(ONE);
    let flush_request = request(cmd::FLUSH, 9, 0, 0);
    let clock = Clock::start();
    for byte in &flush_request {
        slow.say(&[*byte]);
        std::thread::sleep(Duration::from_millis(150));
    }
    assert!(clock.elapsed() > Duration::from_secs(3));
    assert_eq!(slow.hear(16)[4..8], [0; 4]);
    flush(&mut idle, 1);
}

#[test]
fn a_client_without_requests_is_closed_where_that_is_configured_and_one_at_work_is_not() {
    let server = Server::start("idle_timeout = \"3s\"");
    let mut idle = server.enter(ONE);
    let mut at_work = server.enter(ONE);
    let clock = Clock::start();
    while clock.elapsed() < Duration::from_secs(6) {
        flush(&mut at_work, 1);
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(idle.closed());
    assert_eq!(server.metric("blockd_worker_idle_timeouts_total"), 1);
    flush(&mut at_work, 2);
}

/// The errno of the next simple reply, and its cookie.
fn reply<S: Read + Write>(raw: &mut Raw<S>) -> (u32, u64) {
    let reply = raw.hear(16);
    let errno = u32::from_be_bytes(reply[4..8].try_into().unwrap());
    (errno, u64::from_be_bytes(reply[8..].try_into().unwrap()))
}

fn write<S: Read + Write>(raw: &mut Raw<S>, cookie: u64, offset: u64) {
    raw.say(&[request(cmd::WRITE, cookie, offset, 4096), vec![5; 4096]].concat());
}

/// A client of a volume with a limit sends 100 writes and then no more.
fn gets_all_answers<S: Read + Write>(mut raw: Raw<S>, send_no_more: impl Fn(&S)) {
    (0..100).for_each(|cookie| write(&mut raw, cookie, cookie * 4096));
    send_no_more(&raw.0);
    let mut answered: Vec<_> = (0..100).map(|_| reply(&mut raw)).collect();
    answered.sort_unstable();
    assert!(answered.into_iter().eq((0..100).map(|cookie| (0, cookie))));
    assert!(raw.closed());
}

#[test]
fn a_client_that_sends_no_more_gets_every_answer_although_limits_hold_it_back() {
    let server = Server::start("");
    server.daemon.ok(&["set", "--iops", "40", "v"]);
    let clock = Clock::start();
    gets_all_answers(server.enter_unix(), |socket| socket.shutdown(Shutdown::Write).unwrap());
    gets_all_answers(server.enter(ONE), |socket| socket.shutdown(Shutdown::Write).unwrap());
    assert!(clock.elapsed() > Duration::from_secs(4), "the limit held nothing back");
    // Half closed, or with a goodbye, while a long read has only begun.
    server.daemon.ok(&["set", "--iops", "0", "--bandwidth", "2M", "v"]);
    for says_goodbye in [false, true] {
        let mut raw = server.enter(ONE);
        raw.say(&request(cmd::READ, 1, 0, 8 << 20));
        if says_goodbye {
            raw.say(&request(cmd::DISC, 2, 0, 0));
        } else {
            raw.0.shutdown(Shutdown::Write).unwrap();
        }
        assert_eq!(reply(&mut raw), (0, 1));
        raw.hear(8 << 20);
        assert!(raw.closed());
    }
}

/// A client that writes into a full pool sends no more, and a read and a flush come last.
fn gets_an_answer_to_each<S: Read + Write>(mut raw: Raw<S>, send_no_more: impl Fn(&S)) {
    (0..30).for_each(|cookie| write(&mut raw, cookie, (200 << 20) + cookie * EXTENT));
    raw.say(&request(cmd::READ, 30, 0, 4096));
    raw.say(&request(cmd::FLUSH, 31, 0, 0));
    std::thread::sleep(Duration::from_millis(500));
    send_no_more(&raw.0);
    let mut answered = Vec::new();
    for _ in 0..32 {
        let (errno, cookie) = reply(&mut raw);
        answered.push((cookie, errno));
        if cookie == 30 {
            assert_eq!(raw.hear(4096), [5; 4096]);
        }
    }
    answered.sort_unstable();
    let expected = (0..32).map(|cookie| (cookie, if cookie < 30 { errno::ESHUTDOWN } else { 0 }));
    assert!(answered.iter().copied().eq(expected), "{answered:?}");
    assert!(raw.closed());
}

/// Bytes that a pool allocates at once.
const EXTENT: u64 = 256 << 10;

#[test]
fn a_client_that_sends_no_more_gets_every_answer_although_its_pool_is_full() {
    let server = Server::start_sized("64M", "");
    server.daemon.ok(&["resize", "v", "--size", "256M"]);
    let mut raw = server.enter_unix();
    raw.0.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let is_answered = |raw: &mut Raw, cookie| {
        write(raw, cookie, cookie * EXTENT);
        let mut reply = [0; 16];
        raw.0.read_exact(&mut reply).map(|()| assert_eq!(reply[4..8], [0; 4])).is_ok()
    };
    let written = (0..).take_while(|&cookie| is_answered(&mut raw, cookie)).count();
    assert!((50..256).contains(&written), "{written} writes");
    gets_an_answer_to_each(server.enter_unix(), |one| one.shutdown(Shutdown::Write).unwrap());
    gets_an_answer_to_each(server.enter(ONE), |one| one.shutdown(Shutdown::Write).unwrap());
    // One whose connection breaks leaves nothing that waits.
    let mut broken = server.enter(ONE);
    broken.say(&request(cmd::CACHE, 1, 0, 4096));
    (0..3).for_each(|cookie| write(&mut broken, cookie, (200 << 20) + cookie * EXTENT));
    until("only it is left", || server.metric("blockd_worker_connections") == 2);
    drop(broken);
    // The first one is still there, and waits.
    until("it ends", || server.metric("blockd_worker_connections") == 1);
}

#[test]
fn a_client_that_is_gone_is_noticed_although_limits_hold_it_back() {
    let server = Server::start("");
    server.daemon.ok(&["set", "--iops", "1", "v"]);
    // These have the limit to themselves for a while: each waits for its turn of the limit longer
    // than it may take to notice that a client is gone.
    let mut others: Vec<_> = (0..30).map(|_| server.enter_unix()).collect();
    for raw in &mut others {
        (0..10).for_each(|cookie| write(raw, cookie, 0));
    }
    let ends_soon = |what: &str, end: &mut dyn FnMut()| {
        // Limits hold the connection back, and it is looked at.
        std::thread::sleep(Duration::from_millis(500));
        until("it is looked at", || server.metric("blockd_worker_connections") == 31);
        let clock = Clock::start();
        end();
        until(what, || server.metric("blockd_worker_connections") == 30);
        let took = clock.elapsed();
        assert!(took < LIMIT / 2, "{what}: {took:?}");
    };
    let mut unix = Some(server.enter_unix());
    (0..10).for_each(|cookie| write(unix.as_mut().unwrap(), cookie, 0));
    ends_soon("a Unix socket that is closed", &mut || unix = None);
    // It has not read an answer that needs no admission.
    let mut tcp = Some(server.enter(ONE));
    tcp.as_mut().unwrap().say(&request(cmd::CACHE, 1, 0, 4096));
    (0..10).for_each(|cookie| write(tcp.as_mut().unwrap(), cookie, 0));
    ends_soon("a TCP connection that is reset", &mut || tcp = None);
    // This one shows only that it sends no more, and what it sent is no request.
    let mut half = Some(server.enter(ONE));
    half.as_mut().unwrap().say(&[request(cmd::WRITE, 1, 0, 1 << 20), vec![5; 100]].concat());
    ends_soon("half a write", &mut || half = None);
}
