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
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use blockd_media::clock::Clock;
use blockd_nbd::codec::{cmd, opt, rep};
use cli_support::{Daemon, LIMIT};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, connect, socket};
use support::{PATIENCE, Raw, go, request, until};

/// What others may be held up by, on a busy machine.
const SOON: Duration = Duration::from_secs(2);

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
        raise_limit();
        let more = format!(
            "[metrics]\naddress = \"0\"\n[nbd]\n{keys}\n[[nbd.listener]]\ntcp = \"127.0.0.1:0\"\n"
        );
        let mut daemon = Daemon::start_with("1G", &more);
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

    /// A connection with the export.
    fn enter(&self, from: Ipv4Addr) -> Raw<TcpStream> {
        let mut raw = self.connect(from);
        assert_eq!(begin(&mut raw), rep::ACK);
        raw
    }

    fn metric(&self, name: &str) -> u64 {
        let mut stream = TcpStream::connect(self.http).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut page = String::new();
        stream.read_to_string(&mut page).unwrap();
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
fn a_crowd_that_connects_and_says_nothing_holds_up_nobody() {
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

#[test]
fn five_thousand_idle_connections_take_little_memory() {
    const CROWD: usize = 5000;
    /// Of the daemon's own memory for each; what the kernel has for sockets is not in it.
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
        let stream = UnixStream::connect(server.daemon.ring_dir().join("nbd.sock")).unwrap();
        let mut raw = Raw::new(stream);
        assert_eq!(begin(&mut raw), rep::ACK);
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
    let server = Server::start("receive_timeout = \"1s\"");
    let mut idle = server.enter(OTHER);
    let header = request(cmd::WRITE, 1, 0, 1 << 20);
    // A part of the header, and of the payload: as it is copied and as it is received in place.
    for (at, sent) in [20, 128, 512 << 10].into_iter().enumerate() {
        let mut stopped = server.enter(ONE);
        let clock = Clock::start();
        stopped.say(&[&header[..], &vec![7; 1 << 20]].concat()[..sent]);
        assert!(stopped.closed());
        let took = clock.elapsed();
        assert!(took > Duration::from_millis(900) && took < LIMIT / 6, "{sent} bytes: {took:?}");
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
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(clock.elapsed() > Duration::from_secs(2));
    assert_eq!(slow.hear(16)[4..8], [0; 4]);
    flush(&mut idle, 1);
}

#[test]
fn a_client_without_requests_is_closed_where_that_is_configured_and_one_at_work_is_not() {
    let server = Server::start("idle_timeout = \"1s\"");
    let mut idle = server.enter(ONE);
    let mut at_work = server.enter(ONE);
    let clock = Clock::start();
    while clock.elapsed() < Duration::from_secs(3) {
        flush(&mut at_work, 1);
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(idle.closed());
    assert_eq!(server.metric("blockd_worker_idle_timeouts_total"), 1);
    flush(&mut at_work, 2);
}
