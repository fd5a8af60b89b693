//! Requests for more space, as data paths outside of the daemon make them: over a real socket of a
//! real daemon.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

#[path = "../cli_support/mod.rs"]
mod cli_support;
mod shutdown;

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use blockd_api::extend::{Extend, Form, Message};
use blockd_media::clock::Clock;
use blockd_nbd::client::Client;
use serde_json::Value;

use cli_support::{Daemon, LIMIT, connect_patient, pattern};

const MIB: u64 = 1 << 20;
/// 64 extents of 256 KiB.
const QUANTUM: u64 = 16 * MIB;
/// Long enough for a daemon that would answer wrongly to have done so.
const A_WHILE: Duration = Duration::from_millis(800);

/// A daemon whose pool has a socket for requests, and a volume.
struct Rig {
    daemon: Daemon,
    socket: PathBuf,
}

impl Rig {
    fn new() -> Self {
        let mut daemon = Daemon::start("128M");
        assert!(daemon.terminate().success());
        let socket = daemon.ring_dir().join("extend.sock");
        daemon.process.arguments = vec!["--listen".to_owned(), socket.display().to_string()];
        daemon.start_again();
        daemon.ok(&["add", "--nbd", "--size", "1G", "data"]);
        Self { daemon, socket }
    }

    /// With a second volume that has taken all there was, and writes no more.
    fn full() -> Self {
        let rig = Self::new();
        rig.fill().stop(&rig.daemon);
        rig
    }

    /// A neighbour that writes until the pool is full, and then waits for space.
    fn fill(&self) -> Neighbour {
        self.daemon.ok(&["add", "--nbd", "--size", "1G", "filler"]);
        let mut client = self.client("filler");
        let write = move || {
            let block = pattern(usize::try_from(MIB).unwrap(), 3);
            (0..1024).take_while(|at| client.write(at * MIB, &block, false).is_ok()).count()
        };
        let neighbour = Neighbour(std::thread::spawn(write));
        self.is_shown(|pool| pool["blocked_writes"] != 0);
        neighbour
    }

    /// Waits until the pool is shown like that.
    fn is_shown(&self, like: impl Fn(&Value) -> bool) {
        let clock = Clock::start();
        loop {
            let shown = &self.daemon.json(&["pool", "show"])["pool"];
            if like(shown) {
                return;
            }
            assert!(clock.elapsed() < LIMIT, "{shown}\n{}", self.daemon.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn client(&self, volume: &str) -> Client {
        client(&self.daemon, "default", volume)
    }

    /// Bytes granted to `data` and not used, as both commands show them.
    fn reserved(&self) -> u64 {
        let shown = &self.daemon.json(&["show", "data"])["volume"]["reserved_bytes"];
        let list = self.daemon.json(&["list"]);
        let listed = list["volumes"].as_array().unwrap().iter().find(|one| one["name"] == "data");
        assert_eq!(&listed.unwrap()["reserved_bytes"], shown);
        shown.as_u64().unwrap()
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream
    }

    /// A client that has asked for space for `data`.
    fn ask(&self, form: Form, virtual_size: u64) -> UnixStream {
        let mut stream = self.connect();
        stream.write_all(&message(form, "data", virtual_size)).unwrap();
        stream
    }

    /// Bytes sent, and what comes back before the daemon hangs up.
    fn says(&self, bytes: &[u8]) -> Vec<u8> {
        let mut stream = self.connect();
        stream.write_all(bytes).unwrap();
        let mut answer = Vec::new();
        // Unread bytes cause a reset.
        let _ = stream.read_to_end(&mut answer);
        answer
    }

    fn logged(&self, words: &[&str], count: usize) {
        logged(&self.daemon, words, count);
    }

    fn request(&self, more: &[&str]) -> Command {
        let socket = self.socket.to_str().unwrap();
        let mut command = self.daemon.command(&["extend-request", "--socket", socket]);
        command.args(more).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }
}

fn client(daemon: &Daemon, pool: &str, volume: &str) -> Client {
    connect_patient(daemon, &format!("{pool}/{volume}"))
}

/// A thread that writes to the volume `filler`.
struct Neighbour(std::thread::JoinHandle<usize>);

impl Neighbour {
    /// Ends what it waits for.
    fn stop(self, daemon: &Daemon) {
        daemon.ok(&["detach", "--force", "filler"]);
        assert!(self.0.join().unwrap() > 16, "the pool was full early");
    }
}

/// Waits until `count` lines of the log have all these words.
fn logged(daemon: &Daemon, words: &[&str], count: usize) {
    let clock = Clock::start();
    let lines =
        |log: &str| log.lines().filter(|line| words.iter().all(|word| line.contains(word))).count();
    while lines(&daemon.log()) != count {
        let log = daemon.log();
        assert!(clock.elapsed() < LIMIT, "{} of {count} {words:?}\n{log}", lines(&log));
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn message(form: Form, name: &str, virtual_size: u64) -> Vec<u8> {
    let name = name.as_bytes().to_vec();
    let (current_size, metadata_size) = (0, 0);
    let extend = Extend { form, name, virtual_size, current_size, metadata_size };
    Message::Extend(extend).encode().unwrap()
}

/// The answer that a client gets, if it comes within `limit`.
fn answer(stream: &mut UnixStream, limit: Duration) -> Option<u8> {
    stream.set_read_timeout(Some(limit)).unwrap();
    let mut byte = [0];
    stream.read_exact(&mut byte).ok().map(|()| byte[0])
}

#[test]
fn where_there_is_space_the_answer_comes_at_once_in_the_form_of_the_request() {
    let rig = Rig::new();
    let mode = fs::metadata(&rig.socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let mut stream = rig.connect();
    for (form, expected) in [(Form::Binary, 0), (Form::Ascii, b'0'), (Form::Binary, 0)] {
        // One connection, message after message.
        stream.write_all(&message(form, "data", 1 << 30)).unwrap();
        assert_eq!(answer(&mut stream, LIMIT), Some(expected));
    }
    let socket = rig.socket.to_str().unwrap();
    let request = ["extend-request", "--socket", socket, "data", "1G", "0", "0"];
    assert_eq!(rig.daemon.ok(&request), "data: there is space\n");
    let reply = rig.daemon.json(&[&request[..], &["--ascii"]].concat());
    assert_eq!((&reply["answered"], &reply["form"]), (&true.into(), &"ascii".into()));
    assert_eq!(rig.reserved(), QUANTUM, "requests do not add up");
}

#[test]
fn an_answered_request_has_a_quantum_for_its_volume_whatever_neighbours_write() {
    let rig = Rig::new();
    assert_eq!(rig.reserved(), 0);
    assert_eq!(answer(&mut rig.ask(Form::Binary, 1 << 30), LIMIT), Some(0));
    assert_eq!(rig.reserved(), QUANTUM);
    let neighbour = rig.fill();
    assert_eq!(rig.reserved(), QUANTUM, "a neighbour that waits gets nothing of it");
    let mut client = rig.client("data");
    for at in 0..QUANTUM / MIB {
        client.write(at * MIB, &pattern(usize::try_from(MIB).unwrap(), at), true).unwrap();
    }
    assert_eq!(rig.reserved(), 0);
    assert!(!neighbour.0.is_finished(), "the pool was full all the time");
    neighbour.stop(&rig.daemon);
}

#[test]
fn reserved_space_is_limited_by_the_quota_and_a_used_up_quota_holds_back_no_other() {
    let rig = Rig::new();
    rig.daemon.ok(&["set", "data", "--quota", "1M"]);
    assert_eq!(answer(&mut rig.ask(Form::Binary, 1 << 30), LIMIT), Some(0));
    assert_eq!(rig.reserved(), MIB);
    let mut waiting = rig.ask(Form::Binary, 1 << 30);
    rig.logged(&["volume data waits for space: its quota is used up"], 1);
    rig.daemon.ok(&["add", "--nbd", "--size", "1G", "other"]);
    let socket = rig.socket.to_str().unwrap();
    rig.daemon.ok(&["extend-request", "--socket", socket, "other", "1G", "0", "0"]);
    assert_eq!(answer(&mut waiting, A_WHILE), None);
    rig.daemon.ok(&["set", "data", "--quota", "2M"]);
    assert_eq!(answer(&mut waiting, LIMIT), Some(0));
    assert_eq!(rig.reserved(), 2 * MIB);
}

#[test]
fn where_less_than_a_quantum_is_left_a_request_gets_that() {
    let rig = Rig::new();
    rig.fill().stop(&rig.daemon);
    rig.daemon.ok(&["attach", "--nbd", "filler"]);
    let mut client = rig.client("filler");
    client.trim(0, 4 * MIB).unwrap();
    client.flush().unwrap();
    assert_eq!(answer(&mut rig.ask(Form::Binary, 1 << 30), LIMIT), Some(0));
    let reserved = rig.reserved();
    assert!((1..=5 * MIB).contains(&reserved), "{reserved}");
    rig.daemon.ok(&["detach", "--force", "filler"]);
    // Nothing at all is left now, which is no reason for another answer.
    let mut waiting = rig.ask(Form::Binary, 1 << 30);
    while answer(&mut waiting, A_WHILE).is_some() {
        waiting.write_all(&message(Form::Binary, "data", 1 << 30)).unwrap();
    }
    let reserved = rig.reserved();
    assert!((1..QUANTUM).contains(&reserved), "{reserved}");
}

#[test]
fn a_hang_up_a_detach_and_a_restart_leave_nothing_reserved() {
    let mut rig = Rig::full();
    let waiting = rig.ask(Form::Binary, 1 << 30);
    rig.logged(&["volume data waits for space"], 1);
    drop(waiting);
    rig.logged(&["extend", "hung up"], 1);
    rig.daemon.ok(&["del", "--force", "filler"]);
    rig.is_shown(|pool| pool["free_bytes"].as_u64().unwrap() > 2 * QUANTUM);
    std::thread::sleep(A_WHILE);
    assert_eq!(rig.reserved(), 0);
    assert_eq!(answer(&mut rig.ask(Form::Binary, 1 << 30), LIMIT), Some(0));
    assert_eq!(rig.reserved(), QUANTUM);
    rig.daemon.ok(&["detach", "data"]);
    assert_eq!(rig.reserved(), 0);
    assert_eq!(answer(&mut rig.ask(Form::Binary, 1 << 30), LIMIT), Some(0));
    assert_eq!(rig.reserved(), QUANTUM, "a volume that is not attached can have some too");
    assert!(rig.daemon.terminate().success());
    rig.daemon.start_again();
    assert_eq!(rig.reserved(), 0);
}

#[test]
fn a_full_pool_lets_wait_until_a_volume_is_deleted() {
    let rig = Rig::full();
    // A volume that can use no more is answered.
    let all = rig.request(&["data", "1G", "1G", "0"]).output().unwrap();
    assert!(all.status.success(), "{all:?}");
    let refused = rig.request(&["data", "1G", "0", "0", "--timeout", "500ms"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(8), "{refused:?}");
    rig.logged(&["extend", "hung up"], 1);
    let waiting = rig.request(&["--json", "--wait", "data", "1G", "0", "0"]).spawn().unwrap();
    rig.logged(&["volume data waits for space"], 2);
    std::thread::sleep(A_WHILE);
    rig.daemon.ok(&["del", "--force", "filler"]);
    let ended = waiting.wait_with_output().unwrap();
    assert!(ended.status.success(), "{ended:?}");
    let reply: serde_json::Value = serde_json::from_slice(&ended.stdout).unwrap();
    assert_eq!(reply["answered"], true);
    assert!(reply["waited_ms"].as_u64().unwrap() >= 700, "{reply}");
    assert!(rig.reserved() > 0);
}

#[test]
fn a_full_pool_lets_wait_until_it_is_grown() {
    let rig = Rig::full();
    let mut stream = rig.ask(Form::Binary, 1 << 30);
    rig.logged(&["volume data waits for space"], 1);
    assert_eq!(answer(&mut stream, A_WHILE), None);
    rig.daemon.ok(&["pool", "grow", "--size", "+32M"]);
    assert_eq!(answer(&mut stream, LIMIT), Some(0));
    assert!(rig.reserved() > 0);
}

#[test]
fn the_first_client_is_answered_first_and_a_disconnected_one_is_skipped() {
    let rig = Rig::full();
    rig.daemon.ok(&["add", "--nbd", "--size", "1G", "other"]);
    let ask_other = || {
        let mut stream = rig.connect();
        stream.write_all(&message(Form::Ascii, "other", 1 << 30)).unwrap();
        stream
    };
    let gone = rig.ask(Form::Binary, 1 << 30);
    rig.logged(&["volume data waits for space"], 1);
    let mut first = rig.ask(Form::Binary, 1 << 30);
    rig.logged(&["volume data waits for space"], 2);
    let mut second = ask_other();
    rig.logged(&["volume other waits for space"], 1);
    drop(gone);
    rig.logged(&["extend", "hung up"], 1);
    rig.daemon.ok(&["attach", "--nbd", "filler"]);
    let mut client = rig.client("filler");
    // An extent after the other, until the first has one, and before it has a quantum.
    for extent in 0..32 {
        client.trim(extent * MIB / 4, MIB / 4).unwrap();
        client.flush().unwrap();
        if let Some(byte) = answer(&mut first, A_WHILE) {
            assert_eq!((byte, answer(&mut second, Duration::from_millis(1))), (0, None));
            rig.daemon.ok(&["del", "--force", "filler"]);
            assert_eq!(answer(&mut second, LIMIT), Some(b'0'));
            return;
        }
        assert_eq!(answer(&mut second, Duration::from_millis(1)), None, "it passed by the first");
    }
    panic!("no answer\n{}", rig.daemon.log());
}

#[test]
fn a_client_that_has_only_ended_what_it_says_still_waits() {
    let rig = Rig::full();
    let mut stream = rig.ask(Form::Ascii, 1 << 30);
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    rig.logged(&["volume data waits for space"], 1);
    assert_eq!(answer(&mut stream, A_WHILE), None);
    rig.daemon.ok(&["del", "--force", "filler"]);
    assert_eq!(answer(&mut stream, LIMIT), Some(b'0'));
}

#[test]
fn a_request_that_is_malformed_or_names_no_volume_is_disconnected_and_logged_once() {
    let rig = Rig::new();
    rig.daemon.ok(&["snapshot", "data=then"]);
    let good = message(Form::Binary, "data", 1 << 30);
    let with = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        bytes
    };
    let cases: [(Vec<u8>, &str); 10] = [
        (vec![0, 2, 0], "total length is 2"),
        (vec![0xff, 0xff, 0], "total length is 65535"),
        (with(1, 32), "must be 33"),
        (with(2, 2), "type is 0x02"),
        (with(3, 0), "name length is 0"),
        (with(5, 0), "NUL at byte 1"),
        (with(8, b'x'), "does not end with NUL"),
        (vec![0, 4, 1, 0], "total length is 4"),
        (message(Form::Binary, "none", 1), "volume none does not exist"),
        (message(Form::Binary, "then", 1), "volume then does not exist"),
    ];
    for (bytes, problem) in &cases {
        assert!(rig.says(bytes).is_empty(), "{problem}");
        rig.logged(&["extend: unix uid", problem], 1);
    }
    // Cut in the middle: the client goes away.
    let mut stream = rig.connect();
    stream.write_all(&good[..9]).unwrap();
    drop(stream);
    rig.logged(&["a message was cut after 9 bytes"], 1);
    // Nothing said is nothing wrong.
    drop(rig.connect());
    assert_eq!(answer(&mut rig.ask(Form::Binary, 1), LIMIT), Some(0), "it goes on");
    let log = rig.daemon.log();
    assert_eq!(log.matches("sent nonsense").count(), cases.len() + 1, "{log}");
    let none = rig.request(&["none", "1G", "0", "0"]).output().unwrap();
    assert_eq!(none.status.code(), Some(8));
    assert!(String::from_utf8_lossy(&none.stderr).contains("hung up without an answer"));
}

#[test]
fn a_message_that_does_not_come_whole_in_time_is_hung_up_on() {
    let rig = Rig::new();
    let bytes = message(Form::Binary, "data", 1 << 30);
    let mut slow = rig.connect();
    slow.write_all(&bytes[..5]).unwrap();
    // It is waited for.
    slow.set_read_timeout(Some(A_WHILE)).unwrap();
    let early = slow.read(&mut [0]);
    let waits = early.as_ref().is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
    assert!(waits, "{early:?}\n{}", rig.daemon.log());
    slow.write_all(&bytes[5..9]).unwrap();
    slow.set_read_timeout(Some(LIMIT)).unwrap();
    let end = slow.read(&mut [0]);
    assert!(matches!(end, Ok(0)), "{end:?}\n{}", rig.daemon.log());
    // Why, and after how long, is the daemon's to say.
    rig.logged(&["a message was not whole after 10 s, 9 bytes of it came"], 1);
}

/// Becomes another user, for which this has to be root.
#[test]
fn other_users_are_turned_away_also_where_the_file_lets_them() {
    const OTHER_USER: u32 = 65534;
    let rig = Rig::new();
    let connect = "import socket, sys\n\
                   s = socket.socket(socket.AF_UNIX)\n\
                   s.connect(sys.argv[1])\n\
                   s.settimeout(60)\n\
                   try: s.sendall(b'\\0\\3\\1')\n\
                   except BrokenPipeError: pass\n\
                   try: print('received', len(s.recv(9)))\n\
                   except ConnectionResetError: print('received 0')\n";
    let stranger = || {
        let mut command = Command::new("python3");
        command.args(["-c", connect]).arg(&rig.socket).uid(OTHER_USER).current_dir("/");
        command.output().unwrap()
    };
    let kept_out = stranger();
    assert!(String::from_utf8_lossy(&kept_out.stderr).contains("PermissionError"), "{kept_out:?}");
    fs::set_permissions(&rig.socket, fs::Permissions::from_mode(0o666)).unwrap();
    let turned_away = stranger();
    assert_eq!(String::from_utf8_lossy(&turned_away.stdout), "received 0\n", "{turned_away:?}");
    rig.logged(&["unix uid 65534", "was turned away"], 1);
    assert_eq!(rig.daemon.json(&["version"])["daemon"]["ready"], true);
}

#[test]
fn a_socket_of_the_configuration_is_served_and_a_wrong_one_is_refused() {
    let socket = PathBuf::from("/dev/shm").join(format!("blockd-extend-{}", std::process::id()));
    let mut daemon = Daemon::start_with("128M", &format!("[pool.extend]\nsocket = {socket:?}"));
    daemon.ok(&["add", "--nbd", "--size", "1M", "data"]);
    let path = socket.to_str().unwrap();
    daemon.ok(&["extend-request", "--socket", path, "data", "1M", "0", "0"]);
    let other = daemon.ring_dir().join("other.sock");
    let config = fs::read_to_string(daemon.config()).unwrap();
    let changed = config.replace(path, other.to_str().unwrap());
    fs::write(daemon.config(), format!("{changed}nonsense = 1\n")).unwrap();
    daemon.hang_up();
    logged(&daemon, &["SIGHUP: all stays as it was configured", "nonsense"], 1);
    daemon.ok(&["extend-request", "--socket", path, "data", "1M", "0", "0"]);
    fs::write(daemon.config(), &changed).unwrap();
    daemon.hang_up();
    logged(&daemon, &["SIGHUP: pool.space, pool.extend and pool.read_cache are as configured"], 1);
    assert!(!socket.exists());
    let path = other.to_str().unwrap();
    daemon.ok(&["extend-request", "--socket", path, "data", "1M", "0", "0"]);
    assert!(daemon.terminate().success());
    assert!(!other.exists());
    for (listen, problem) in [("none=/dev/shm/x", "listen is"), ("relative", "listen is")] {
        let mut serve = daemon.command(&["serve", "--listen", listen, "--config"]);
        let output = serve.arg(daemon.config()).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(3), "{error}");
        assert!(error.contains(problem), "{error}");
    }
}
