//! The daemon as a process: start, readiness, protection, refusals, and its end.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where an expectation fails")]

#[path = "daemon/metrics.rs"]
mod metrics;

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use blockd_media::clock::Clock;
use blockd_nbd::client::{Client, Request};
use blockd_testkit::http;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// How long anything may take here, on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// A folder on a tmpfs, with a configuration in it.
struct Place(PathBuf);

impl Place {
    fn new(more: &str) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path =
            Path::new("/dev/shm").join(format!("blockd-daemon-{}-{number}", std::process::id()));
        fs::create_dir(&path).unwrap();
        let place = Self(path);
        let at = place.0.display();
        let text = format!(
            "runtime_dir = \"{at}/run\"\nstate_dir = \"{at}/state\"\n{more}\n\
             [workers]\ncount = 1\nbuffer_size = \"4M\"\n\
             [[pool]]\nname = \"default\"\npath = \"{at}/pool\"\nsize = \"64M\"\nvolatile = true\n\
             extent_size = \"64K\"\nlock_wait = \"5s\"\n"
        );
        fs::write(place.path("c.toml"), text).unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_blockd"));
        command.env("BLOCKD_SOCKET", self.path("run/control.sock"));
        command.args(["serve", "--config"]).arg(self.path("c.toml"));
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.env_remove("NOTIFY_SOCKET").env_remove("JOURNAL_STREAM");
        command
    }

    /// A daemon that is expected not to come up.
    fn refused(&self) -> Output {
        let output = self.command().stderr(Stdio::piped()).output().unwrap();
        assert!(!output.status.success());
        output
    }

    /// Adds a volume and writes to it. The daemon grants more than the write needs.
    fn with_reserve(&self, name: &str) -> Client {
        let added = self.blockd(&["add", "--nbd", "--size", "64M", name]);
        let uri = String::from_utf8(added.stdout).unwrap().trim_end().parse().unwrap();
        let mut client = Client::connect(&uri, &Default::default()).unwrap();
        client.write(0, &[1; 4096], true).unwrap();
        client
    }

    fn blockd(&self, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_blockd"));
        command.env("BLOCKD_SOCKET", self.path("run/control.sock"));
        command.args(args).output().unwrap()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

struct Daemon<'a> {
    place: &'a Place,
    child: Child,
    manager: UnixDatagram,
    log: PathBuf,
}

impl<'a> Daemon<'a> {
    /// Starts one and waits until it says that it is ready.
    fn start(place: &'a Place) -> Self {
        Self::start_as(place, Place::command)
    }

    fn start_as(place: &'a Place, command: impl FnOnce(&Place) -> Command) -> Self {
        let address = place.path("notify");
        let _ = fs::remove_file(&address);
        let manager = UnixDatagram::bind(&address).unwrap();
        manager.set_read_timeout(Some(LIMIT)).unwrap();
        let log = place.path("log");
        let mut command = command(place);
        command.env("NOTIFY_SOCKET", &address).env("WATCHDOG_USEC", "300000");
        let child = command.stderr(fs::File::create(&log).unwrap()).spawn().unwrap();
        let daemon = Self { place, child, manager, log };
        daemon.wait_for("READY=1");
        daemon
    }

    /// Waits for a notification with a line that begins like this.
    fn wait_for(&self, state: &str) {
        let clock = Clock::start();
        let mut buffer = [0; 4096];
        while clock.elapsed() < LIMIT {
            let length = self.manager.recv(&mut buffer).unwrap_or_else(|error| {
                panic!("no {state}: {error}\n{}", fs::read_to_string(&self.log).unwrap())
            });
            if String::from_utf8_lossy(&buffer[..length])
                .lines()
                .any(|line| line.starts_with(state))
            {
                return;
            }
        }
        panic!("no {state} in time");
    }

    /// Reads its output from now on, as a daemon whose output is not read blocks.
    fn listen(&self) {
        let manager = self.manager.try_clone().unwrap();
        std::thread::spawn(move || while manager.recv(&mut [0; 4096]).is_ok() {});
    }

    fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).unwrap();
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.child.id()).unwrap())
    }

    fn end(mut self, signal: Signal) -> ExitStatus {
        self.signal(signal);
        self.child.wait().unwrap()
    }

    /// Where the metrics server listens.
    fn http_address(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap();
        log.split("http://").nth(1).and_then(|rest| rest.split('/').next()).unwrap().to_owned()
    }

    /// The status and body of an answer of the metrics server.
    fn get(&self, path: &str) -> (u16, String) {
        let stream = TcpStream::connect(self.http_address()).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        http::get(stream, path).unwrap()
    }

    fn proc(&self, name: &str) -> String {
        fs::read_to_string(format!("/proc/{}/{name}", self.pid())).unwrap()
    }
}

impl Drop for Daemon<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_file(self.place.path("notify"));
    }
}

/// Asserts the output of a daemon that does not start: its exit code, and one line.
fn check_refusal(output: &Output, code: i32, text: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    let errors: Vec<&str> =
        said.lines().filter(|line| line.starts_with("blockd: error:")).collect();
    assert_eq!(errors.len(), 1, "{said}");
    assert!(errors[0].contains(text), "{said}");
    assert_eq!(output.status.code(), Some(code), "{said}");
}

fn has_capability(daemon: &Daemon<'_>, bit: u32) -> bool {
    let status = daemon.proc("status");
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    u64::from_str_radix(mask.trim(), 16).unwrap() & (1 << bit) != 0
}

#[test]
fn it_serves_reports_its_state_and_ends_in_order() {
    let place = Place::new("[metrics]\naddress = \"127.0.0.1:0\"");
    let daemon = Daemon::start(&place);
    assert_eq!(daemon.get("/healthz"), (200, "ok\n".to_owned()));
    assert_eq!(daemon.get("/readyz"), (200, "ready\n".to_owned()));
    assert_eq!(daemon.get("/nothing").0, 404);
    assert!(place.blockd(&["add", "--size", "37M", "v"]).status.success());
    let (status, metrics) = daemon.get("/metrics");
    let size = r#"blockd_volume_size_bytes{pool="default",volume="v"} 38797312"#;
    assert!(status == 200 && metrics.lines().any(|line| line == size), "{metrics}");
    assert!(metrics.ends_with("# EOF\n"));
    daemon.wait_for("WATCHDOG=1");
    daemon.signal(Signal::SIGHUP);
    assert_eq!(daemon.get("/healthz").0, 200);
    daemon.signal(Signal::SIGTERM);
    daemon.wait_for("STOPPING=1");
    let status = daemon.end(Signal::SIGCONT);
    assert_eq!(status.code(), Some(0));
    assert!(!place.path("run/control.sock").exists() && !place.path("run/nbd.sock").exists());
}

#[test]
fn metrics_have_the_time_of_the_newest_replica() {
    let place = Place::new("[metrics]\naddress = \"127.0.0.1:0\"");
    let daemon = Daemon::start(&place);
    let label = "blockd.io/replicated-unix-ms=1700000000123";
    assert!(place.blockd(&["add", "--size", "1M", "v", "--label", label]).status.success());
    assert!(place.blockd(&["add", "--size", "1M", "other"]).status.success());
    let (_, metrics) = daemon.get("/metrics");
    let of = metrics.lines().filter(|line| line.starts_with("blockd_volume_replicated_"));
    let only =
        "blockd_volume_replicated_timestamp_seconds{pool=\"default\",volume=\"v\"} 1700000000";
    assert_eq!(of.collect::<Vec<_>>(), [only]);
}

#[test]
fn a_pool_has_promised_the_sizes_of_its_volumes_and_not_of_their_snapshots() {
    let place = Place::new("[metrics]\naddress = \"127.0.0.1:0\"");
    let daemon = Daemon::start(&place);
    assert!(place.blockd(&["add", "--size", "3M", "v"]).status.success());
    assert!(place.blockd(&["snapshot", "v=s"]).status.success());
    let (_, metrics) = daemon.get("/metrics");
    let of = metrics.lines().filter(|line| line.starts_with("blockd_pool_promised_bytes"));
    let only = "blockd_pool_promised_bytes{pool=\"default\"} 3145728";
    assert_eq!(of.collect::<Vec<_>>(), [only]);
    let shown = place.blockd(&["pool", "show", "--json"]);
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains("\"promised_bytes\": 3145728"), "{shown}");
}

/// Of what a client may do to the metrics server.
#[test]
fn half_http_requests_do_not_block_metrics_and_readiness() {
    /// Far below the time limit of a request's head, on a busy machine too.
    const SOON: Duration = Duration::from_secs(5);
    let place = Place::new("[metrics]\naddress = \"127.0.0.1:0\"");
    let daemon = Daemon::start(&place);
    let address = daemon.http_address();
    let half = |_| {
        let mut stream = TcpStream::connect(&address).unwrap();
        // The server may have closed it by now.
        let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n");
        stream
    };
    let _held: Vec<TcpStream> = (0..200).map(half).collect();
    for path in ["/readyz", "/metrics", "/healthz"] {
        let clock = Clock::start();
        assert_eq!(daemon.get(path).0, 200);
        assert!(clock.elapsed() < SOON, "{path} took {:?}", clock.elapsed());
    }
    let mut with_body = TcpStream::connect(&address).unwrap();
    with_body.set_read_timeout(Some(LIMIT)).unwrap();
    with_body.write_all(b"GET /readyz HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n").unwrap();
    let mut answer = String::new();
    with_body.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    assert_eq!(daemon.end(Signal::SIGTERM).code(), Some(0));
}

#[test]
fn too_low_a_limit_on_open_files_is_logged_and_the_daemon_serves() {
    let place = Place::new("[metrics]\naddress = \"0\"");
    let serve = "ulimit -n 1500 && exec \"$0\" serve --config \"$1\"";
    let daemon = Daemon::start_as(&place, |_| {
        let mut command = Command::new("sh");
        command.args(["-c", serve, env!("CARGO_BIN_EXE_blockd")]).arg(place.path("c.toml"));
        command.env("BLOCKD_SOCKET", place.path("run/control.sock"));
        command
    });
    let log = fs::read_to_string(&daemon.log).unwrap();
    let line = log.lines().find(|line| line.contains("too low for nbd.max_connections"));
    let line = line.unwrap_or_else(|| panic!("{log}"));
    assert!(line.contains("limit=1500") && line.contains("wanted=9216"), "{line}");
    drop(place.with_reserve("v"));
    assert_eq!(daemon.get("/readyz").0, 200);
    assert_eq!(daemon.end(Signal::SIGTERM).code(), Some(0));
}

#[test]
fn attached_volumes_come_back_after_a_kill() {
    let place = Place::new("");
    let daemon = Daemon::start(&place);
    let added = place.blockd(&["add", "--size", "8M", "v"]);
    assert!(added.status.success(), "{added:?}");
    daemon.end(Signal::SIGKILL);
    let daemon = Daemon::start(&place);
    let shown = place.blockd(&["show", "v", "--json"]);
    let text = String::from_utf8(shown.stdout).unwrap();
    assert!(text.contains("\"attached\": true") && text.contains("8388608"), "{text}");
    assert_eq!(daemon.end(Signal::SIGINT).code(), Some(0));
}

/// Every thread that writeback waits for.
#[test]
fn writeback_can_rely_on_it() {
    /// `PF_MEMALLOC_NOIO` and `PF_LOCAL_THROTTLE` of `linux/sched.h`.
    const IO_FLUSHER: u64 = 0x0008_0000 | 0x0010_0000;
    const CAP_IPC_LOCK: u32 = 14;
    const CAP_SYS_RESOURCE: u32 = 24;
    let place = Place::new("");
    let daemon = Daemon::start(&place);
    let status = daemon.proc("status");
    let locked = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap();
    let locked: u64 = locked.trim().trim_end_matches(" kB").parse().unwrap();
    if has_capability(&daemon, CAP_IPC_LOCK) {
        assert!(locked > 0);
    } else {
        println!("not run: locked memory, because CAP_IPC_LOCK is missing");
    }
    let privileged = has_capability(&daemon, CAP_SYS_RESOURCE);
    let threads = || {
        let mut seen = Vec::new();
        for thread in fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap() {
            // One that ends meanwhile is none of those.
            let Ok(stat) = fs::read_to_string(thread.unwrap().path().join("stat")) else {
                continue;
            };
            let (name, rest) = stat.rsplit_once(')').unwrap();
            let name = name.split_once('(').unwrap().1.to_owned();
            let flags: u64 = rest.split_whitespace().nth(6).unwrap().parse().unwrap();
            if name.starts_with("worker-") || name.starts_with("pool-") {
                seen.push((name, flags));
            }
        }
        seen.sort();
        seen
    };
    // A thread that begins has the name of its parent, until it has its own.
    let mut seen = threads();
    for _ in 0..100 {
        if seen.len() == 2 {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
        seen = threads();
    }
    for (name, flags) in &seen {
        assert!(!privileged || flags & IO_FLUSHER == IO_FLUSHER, "{name}: {flags:#x}");
    }
    let names: Vec<&str> = seen.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["pool-default", "worker-0"]);
    if privileged {
        assert_eq!(daemon.proc("oom_score_adj").trim(), "-1000");
    } else {
        println!("not run: IO flushers and OOM score, because CAP_SYS_RESOURCE is missing");
    }
    let limits = daemon.proc("limits");
    let files = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let files: Vec<&str> = files.split_whitespace().collect();
    assert_eq!(files[3], files[4]);
}

#[test]
fn a_second_daemon_is_refused_by_the_name_of_the_first() {
    let place = Place::new("");
    let daemon = Daemon::start(&place);
    let first = format!("used by another daemon, process {}", daemon.pid());
    check_refusal(&place.refused(), 7, &first);
    assert!(place.blockd(&["list"]).status.success());
}

#[test]
fn a_port_or_socket_in_use_is_named_and_nothing_is_made() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = port.local_addr().unwrap();
    let place = Place::new(&format!("[[nbd.listener]]\ntcp = \"{address}\""));
    check_refusal(&place.refused(), 7, &address.to_string());
    let place = Place::new(&format!("[metrics]\naddress = \"{address}\""));
    check_refusal(&place.refused(), 7, &address.to_string());
    assert!(!place.path("pool").exists());
    let place = Place::new("");
    fs::create_dir(place.path("run")).unwrap();
    let _other = UnixListener::bind(place.path("run/nbd.sock")).unwrap();
    check_refusal(&place.refused(), 7, "nbd.sock");
    assert!(!place.path("pool").exists());
}

#[test]
fn a_wrong_configuration_is_named_by_file_and_line() {
    let place = Place::new("stop_timeout = \"soon\"");
    let line = format!("{}:3: stop_timeout is soon: must be", place.path("c.toml").display());
    check_refusal(&place.refused(), 3, &line);
    fs::write(place.path("c.toml"), "runtime_dir = ").unwrap();
    check_refusal(&place.refused(), 3, "c.toml:1: ");
    let long = format!("control_socket = \"/{}\"", "x".repeat(120));
    fs::write(place.path("c.toml"), long).unwrap();
    check_refusal(&place.refused(), 3, "at most 107 bytes");
    fs::remove_file(place.path("c.toml")).unwrap();
    check_refusal(&place.refused(), 4, "c.toml");
}

#[test]
fn a_damaged_list_of_attachments_is_named() {
    let place = Place::new("");
    fs::create_dir(place.path("state")).unwrap();
    fs::write(place.path("state/attachments.json"), "{").unwrap();
    check_refusal(&place.refused(), 10, "attachments.json");
}

#[test]
fn the_only_pool_failing_is_the_daemons_failure() {
    let place = Place::new("");
    let file = fs::File::create(place.path("pool")).unwrap();
    file.set_len(64 << 20).unwrap();
    (&file).write_all(b"data of another").unwrap();
    check_refusal(&place.refused(), 7, "holds something that is not a pool");
    let mut start = [0; 15];
    std::os::unix::fs::FileExt::read_exact_at(
        &fs::File::open(place.path("pool")).unwrap(),
        &mut start,
        0,
    )
    .unwrap();
    assert_eq!(&start, b"data of another");
}

#[test]
fn one_pool_failing_leaves_the_others_served() {
    let place = Place::new(
        "[metrics]\naddress = \"127.0.0.1:0\"\n[[pool]]\nname = \"bad\"\npath = \"/no/where\"",
    );
    let text = fs::read_to_string(place.path("c.toml")).unwrap();
    fs::write(place.path("c.toml"), format!("default_pool = \"default\"\n{text}")).unwrap();
    let daemon = Daemon::start(&place);
    let (status, text) = daemon.get("/readyz");
    assert_eq!(status, 503);
    assert!(text.starts_with("pool bad has failed: "), "{text}");
    assert_eq!(daemon.get("/healthz").0, 200);
    assert!(place.blockd(&["add", "--size", "1M", "v"]).status.success());
    assert_eq!(daemon.end(Signal::SIGTERM).code(), Some(0));
}

#[test]
fn the_service_manager_shows_a_failed_pool_until_it_is_closed() {
    use std::os::unix::fs::FileExt;
    let place = Place::new("[health]\ninterval = \"1s\"");
    let daemon = Daemon::start(&place);
    let media = fs::File::options().write(true).open(place.path("pool")).unwrap();
    media.write_all_at(&[0xa5; 8192], 0).unwrap();
    daemon.wait_for("STATUS=pool default has failed: ");
    // Of two, the other one once the last is closed.
    let other = place.path("other");
    let path = other.to_str().unwrap();
    let made = ["pool", "create", "other", "--size", "64M", "--volatile", "--path", path];
    assert!(place.blockd(&made).status.success());
    let media = fs::File::options().write(true).open(&other).unwrap();
    media.write_all_at(&[0xa5; 8192], 0).unwrap();
    daemon.wait_for("STATUS=pool other has failed: ");
    assert!(place.blockd(&["pool", "close", "--force", "other"]).status.success());
    daemon.wait_for("STATUS=pool default has failed: ");
    assert!(place.blockd(&["pool", "close", "--force", "default"]).status.success());
    daemon.wait_for("STATUS=serving");
}

#[test]
fn the_systemd_unit_has_what_the_daemon_needs() {
    let unit = include_str!("../../deploy/blockd.service");
    for line in [
        "Type=notify",
        "ExecStart=/usr/bin/blockd serve",
        "KillMode=mixed",
        "Restart=always",
        "WatchdogSec=60",
        "RuntimeDirectory=blockd",
        "RuntimeDirectoryPreserve=yes",
        "StateDirectory=blockd",
        "LimitMEMLOCK=infinity",
        "OOMScoreAdjust=-1000",
        "TimeoutStopSec=90",
    ] {
        assert_eq!(unit.lines().filter(|found| *found == line).count(), 1, "{line}");
    }
}
