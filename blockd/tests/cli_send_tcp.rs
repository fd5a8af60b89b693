//! `blockd send` and `blockd receive --listen` over TCP: certificates, refusals that reach the
//! sender, and transfers that go on by themselves when either end was killed.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use cli_support::{Daemon, catches_interrupts, connect, pattern, signal, wait_until};
use rcgen::{CertificateParams, CertifiedIssuer, IsCa, KeyPair};

const MIB: u64 = 1 << 20;

/// A receiver that listens, and ends with its test.
struct Listening {
    child: Child,
    address: String,
    said: BufReader<std::process::ChildStderr>,
}

impl Listening {
    fn start(daemon: &Daemon, at: &str, arguments: &[&str]) -> Self {
        let all = [&["receive", "--listen", at, "--sync-every", "1M"], arguments].concat();
        let mut command = daemon.command(&all);
        let command = command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut said = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        let address = line.trim_end().strip_prefix("blockd: waiting for senders at ");
        let address = address.unwrap_or_else(|| panic!("{line}")).to_owned();
        Self { child, address, said }
    }

    fn target(&self) -> String {
        format!("tcp://{}", self.address)
    }

    /// Waits for its own end, and returns what it has said.
    fn ended(&mut self) -> String {
        let mut text = String::new();
        self.said.read_to_string(&mut text).unwrap();
        assert!(self.child.wait().unwrap().success(), "{text}");
        text
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn raw(daemon: &Daemon, volume: &str) -> Vec<u8> {
    let output = daemon.run(&["export", volume, "-"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// The stream of a snapshot.
fn streamed(daemon: &Daemon, snapshot: &str) -> Vec<u8> {
    let output = daemon.run(&["send", snapshot]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// Bytes of the volume `data` that a receiver has of a stream that is not whole.
fn received(daemon: &Daemon) -> u64 {
    let output = daemon.run(&["--json", "receive", "data", "--position"]);
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    found["received_bytes"].as_u64().unwrap_or(0)
}

/// A volume `data` with the snapshots `mon` and `tue`, and a daemon to send to.
fn two_hosts() -> (Daemon, Daemon) {
    let daemon = Daemon::start("512M");
    daemon.ok(&["add", "data", "--size", "64M"]);
    for (day, at, len) in [("mon", 0, 20), ("tue", 40, 3)] {
        let mut client = connect(&daemon, "data");
        for part in 0..len {
            client.write((at + part) * MIB, &pattern(1 << 20, at + part), false).unwrap();
        }
        client.disconnect().unwrap();
        daemon.ok(&["snapshot", "data", "--tag", day]);
    }
    (daemon, Daemon::start("512M"))
}

#[test]
fn streams_arrive_one_after_the_other_under_the_senders_name() {
    let (here, there) = two_hosts();
    let mut listening = Listening::start(&there, "127.0.0.1:0", &[]);
    let target = listening.target();
    let said = here.ok(&["send", "data@mon", &target]);
    assert_eq!(said, format!("data@mon: 20 MiB sent to {target}\n"));
    assert!(raw(&there, "data") == raw(&here, "data@mon"));
    let since = ["send", "data@tue", &target, "--since", "data@mon", "--compress", "zstd:1"];
    here.ok(&since);
    assert!(raw(&there, "data") == raw(&here, "data@tue"));
    assert_eq!(here.ok(&since), format!("data@tue: {target} has it already\n"));
    let named = format!("{target}/copy");
    here.ok(&["send", "data@tue", &named]);
    assert!(raw(&there, "copy") == raw(&here, "data@tue"));
    signal(&listening.child, "TERM");
    assert_eq!(listening.ended(), "");
}

#[test]
fn the_sender_names_what_the_receiver_refused() {
    let (here, there) = two_hosts();
    let listening = Listening::start(&there, "127.0.0.1:0", &["data"]);
    let target = listening.target();
    let since = ["send", "data@tue", &target, "--since", "data@mon"];
    let (code, error) = here.failure(&since);
    assert!(code == 4 && error.contains("volume data does not exist"), "{code} {error}");
    here.ok(&["send", "data@mon", &target]);
    here.ok(&["snapshot", "data", "--tag", "wed"]);
    let (code, error) = here.failure(&["send", "data@wed", &target, "--since", "data@tue"]);
    assert!(code == 7 && error.starts_with("refused by 127.0.0.1:"), "{code} {error}");
    assert!(error.contains("is no copy of what the backup begins with"), "{error}");
    // It goes on, whatever else comes.
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 1000], &hello_of_version_2()] {
        let mut other = TcpStream::connect(&listening.address).unwrap();
        other.write_all(bytes).unwrap();
        let _ = other.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = other.read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer).into_owned();
        if bytes.len() == 658 {
            assert!(answer.contains("speaks version 2: this blockd speaks 1"), "{answer}");
        }
    }
    here.ok(&since);
    assert!(raw(&there, "data") == raw(&here, "data@tue"));
}

/// Its writes wait longer than a connection may be silent otherwise.
#[test]
fn a_receiver_whose_pool_is_full_refuses_the_sender() {
    let (here, _) = two_hosts();
    let there = Daemon::start("16M");
    let listening = Listening::start(&there, "127.0.0.1:0", &["--reconnect", "45s"]);
    let (code, error) = here.failure(&["send", "data@mon", &listening.target()]);
    assert!(code == 8 && error.contains("if the pool is full, writes wait"), "{code} {error}");
    assert!(!error.contains("trying again"), "{error}");
}

/// Each of them is given 10 s, and the sender waits for 60 s.
#[test]
fn silent_connections_hold_no_sender_up() {
    let (here, there) = two_hosts();
    let listening = Listening::start(&there, "127.0.0.1:0", &[]);
    let silent = [(); 7].map(|()| TcpStream::connect(&listening.address).unwrap());
    here.ok(&["send", "data@mon", &listening.target(), "--reconnect", "1ms"]);
    assert!(raw(&there, "data") == raw(&here, "data@mon"));
    drop(silent);
}

/// Senders that closed while another was served are not served as if they were there.
#[test]
fn a_sender_that_closes_before_its_turn_changes_nothing() {
    let (here, there) = two_hosts();
    let [monday, tuesday] = ["data@mon", "data@tue"].map(|day| streamed(&here, day));
    let mut receive = there.command(&["receive", "copy"]);
    let receive = receive.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut cut_off = receive.spawn().unwrap();
    cut_off.stdin.take().unwrap().write_all(&monday[..monday.len() / 2]).unwrap();
    assert!(!cut_off.wait().unwrap().success());
    let position = there.ok(&["receive", "copy", "--position"]);
    let mut listening = Listening::start(&there, "127.0.0.1:0", &[]);
    let begun = |name: &str, stream: &[u8]| {
        let mut tcp = TcpStream::connect(&listening.address).unwrap();
        tcp.write_all(&hello(name, stream)).unwrap();
        tcp
    };
    let mut slow = begun("slow", &monday);
    slow.read_exact(&mut [0; 16]).unwrap();
    let closed = [(); 2].map(|()| begun("copy", &tuesday).local_addr().unwrap());
    let mut line = || {
        let mut line = String::new();
        listening.said.read_line(&mut line).unwrap();
        line
    };
    // One waits to be served next, and the other one's place is free at once.
    let is_one = |line: &str| {
        let of = |at: &std::net::SocketAddr| line.contains(&format!("error: sender {at}: "));
        closed.iter().any(of) && line.contains("closed before the stream began")
    };
    let first = line();
    assert!(is_one(&first), "{first}");
    drop(slow);
    let rest = [line(), line()];
    assert!(!is_one(&rest[0]) && is_one(&rest[1]), "{rest:?}");
    assert_eq!(there.ok(&["receive", "copy", "--position"]), position);
}

/// The begin of a sender of a whole stream.
fn hello(name: &str, stream: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; 658];
    bytes[..8].copy_from_slice(b"blkdsend");
    bytes[8] = 1;
    bytes[16] = name.len().try_into().unwrap();
    bytes[18..18 + name.len()].copy_from_slice(name.as_bytes());
    bytes[146..].copy_from_slice(&stream[..512]);
    bytes
}

fn hello_of_version_2() -> Vec<u8> {
    let mut bytes = vec![0; 658];
    bytes[..8].copy_from_slice(b"blkdsend");
    bytes[8] = 2;
    bytes
}

/// The sender goes on by itself when a receiver was killed and is back; a sender that was killed is
/// started again.
#[test]
fn a_transfer_goes_on_where_either_end_was_killed() {
    let (here, there) = two_hosts();
    let mut listening = Listening::start(&there, "127.0.0.1:0", &["data"]);
    let (address, target) = (listening.address.clone(), listening.target());
    let mut send = here.command(&["send", "data@mon", &target]);
    let mut sender = send.stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    for round in 0..4 {
        std::thread::sleep(Duration::from_millis(60));
        let before = received(&there);
        if round % 2 == 0 {
            drop(listening);
            listening = Listening::start(&there, &address, &["data"]);
        } else {
            sender.kill().unwrap();
            sender.wait().unwrap();
            sender = send.spawn().unwrap();
        }
        let now = received(&there);
        assert!(now >= before || now == 0, "{now} of {before} bytes are left");
    }
    assert!(sender.wait().unwrap().success());
    assert!(raw(&there, "data") == raw(&here, "data@mon"));
    wait_until("the hidden volume is gone", || !there.ok(&["list", "--all"]).contains(".receive-"));
}

/// Forwards connections. Of the first this much is sent on and no more, until the receiver closes.
fn stalled(to: String, most: u64) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let target = format!("tcp://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        let mut most = most;
        for mut one in listener.incoming().map(Result::unwrap) {
            // There is none while the receiver is started again.
            let Ok(mut other) = TcpStream::connect(&to) else { continue };
            let (from, mut into) = (one.try_clone().unwrap(), other.try_clone().unwrap());
            let most = std::mem::replace(&mut most, u64::MAX);
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut from.take(most), &mut into);
            });
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut other, &mut one);
                let _ = one.shutdown(std::net::Shutdown::Both);
            });
        }
    });
    target
}

/// Runs a command whose receiver is stopped, and started again, in the middle of the first stream.
fn with_a_restart(here: &Daemon, there: &Daemon, words: &[&str]) -> Output {
    let mut listening = Listening::start(there, "127.0.0.1:0", &[]);
    let address = listening.address.clone();
    let target = stalled(address.clone(), 10 * MIB);
    let mut command = here.command(&[words, &[target.as_str()]].concat());
    let sender = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_until("a part has come", || received(there) > 0);
    signal(&listening.child, "TERM");
    listening.ended();
    let _again = Listening::start(there, &address, &[]);
    let output = sender.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output
}

#[test]
fn a_sender_goes_on_when_its_receiver_was_stopped_and_is_back() {
    let (here, there) = two_hosts();
    with_a_restart(&here, &there, &["send", "data@mon"]);
    assert!(raw(&there, "data") == raw(&here, "data@mon"));
}

/// A move would detach the volume too early otherwise.
#[test]
fn bytes_of_a_round_are_those_of_all_its_attempts() {
    let (here, there) = two_hosts();
    let output = with_a_restart(&here, &there, &["--json", "move", "data"]);
    let done: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let bytes = done["rounds"][0]["written_bytes"].as_u64().unwrap();
    // What was not durable at the receiver is sent twice.
    assert!((23 * MIB..46 * MIB).contains(&bytes), "{done}");
}

/// Its sender may connect again: an answer would be the end.
#[test]
fn a_stream_that_breaks_off_is_not_refused() {
    let (here, there) = two_hosts();
    let monday = streamed(&here, "data@mon");
    let listening = Listening::start(&there, "127.0.0.1:0", &[]);
    let mut sender = TcpStream::connect(&listening.address).unwrap();
    sender.write_all(&hello("copy", &monday)).unwrap();
    // Less than the chunk has.
    sender.write_all(&(1_u32 << 20).to_le_bytes()).unwrap();
    sender.write_all(&monday[..512 << 10]).unwrap();
    sender.shutdown(std::net::Shutdown::Write).unwrap();
    let mut answers = Vec::new();
    let _ = sender.read_to_end(&mut answers);
    assert_eq!(answers.len(), 16, "{}", String::from_utf8_lossy(&answers));
}

/// A stretch of zeroes that takes long to read would be silence otherwise, at each attempt.
#[test]
fn a_receiver_sees_how_far_a_whole_stream_is_in_zeroes() {
    let here = Daemon::start("512M");
    here.ok(&["add", "data", "--size", "64M"]);
    let mut client = connect(&here, "data");
    client.write(40 * MIB, &pattern(1 << 20, 1), false).unwrap();
    client.disconnect().unwrap();
    here.ok(&["snapshot", "data", "--tag", "mon"]);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let target = format!("tcp://{}", listener.local_addr().unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| here.run(&["send", "data@mon", &target, "--reconnect", "1ms"]));
        let mut tcp = listener.accept().unwrap().0;
        drop(listener);
        tcp.read_exact(&mut [0; 658]).unwrap();
        let mut send_from_0 = [0; 16];
        send_from_0[0] = 1;
        tcp.write_all(&send_from_0).unwrap();
        // The first chunk: its length, the header of the stream, and a record.
        let mut begin = [0; 4 + 512 + 24];
        tcp.read_exact(&mut begin).unwrap();
        drop(tcp);
        let record = begin.last_chunk::<24>().unwrap();
        let kind = u32::from_le_bytes(*record.first_chunk().unwrap());
        let offset = u64::from_le_bytes(*record[8..].first_chunk().unwrap());
        assert_eq!((kind, offset), (2, 0));
    });
}

#[test]
fn a_volume_moves_while_it_is_used_and_is_attached_there() {
    let (here, there) = two_hosts();
    let listening = Listening::start(&there, "127.0.0.1:0", &[]);
    let target = listening.target();
    let mut client = connect(&here, "data");
    client.write(50 * MIB, &pattern(1 << 20, 50), false).unwrap();
    let (code, error) = here.failure(&["move", "data", &target]);
    assert!(code == 7 && error.contains("has it up to data@move-1: end the programs"), "{error}");
    assert!(raw(&there, "data") == raw(&here, "data@move-1"));
    client.write(51 * MIB, &pattern(1 << 20, 51), false).unwrap();
    client.disconnect().unwrap();
    wait_until("the client is gone", || here.json(&["show", "data"])["volume"]["connections"] == 0);
    let done = here.json(&["move", "data", &target]);
    let rounds = done["rounds"].as_array().unwrap();
    assert_eq!((rounds.len(), &rounds[0]["since"]), (2, &"data@move-1".into()), "{done}");
    assert_eq!(rounds[0]["written_bytes"], MIB);
    assert!(raw(&there, "data") == raw(&here, "data"));
    assert_eq!(there.json(&["show", "data"])["volume"]["attached"], true);
    assert_eq!(here.json(&["show", "data"])["volume"]["attached"], false);
    assert_eq!(here.json(&["show", "data"])["snapshots"].as_array().unwrap().len(), 3);
}

#[test]
fn a_replica_gets_what_changed_and_a_few_snapshots_stay() {
    let (here, there) = two_hosts();
    let mut listening = Listening::start(&there, "127.0.0.1:0", &["--keep", "2"]);
    let (address, target) = (listening.address.clone(), listening.target());
    for round in 1..=4_u64 {
        let mut client = connect(&here, "data");
        client.write((30 + round) * MIB, &pattern(1 << 20, round), false).unwrap();
        client.disconnect().unwrap();
        if round == 3 {
            // Without a receiver the snapshot stays, and is sent by the next.
            drop(listening);
            let failed = here.failure(&["replicate", "data", &target, "--reconnect", "1ms"]);
            assert_eq!(failed.0, 9, "{}", failed.1);
            listening = Listening::start(&there, &address, &["--keep", "2"]);
        }
        let done = here.json(&["replicate", "data", &target, "--keep", "2"]);
        let sent = done["rounds"].as_array().unwrap();
        assert_eq!(sent.len(), if round == 3 { 2 } else { 1 }, "{done}");
        assert!(raw(&there, "data") == raw(&here, "data"), "{round}");
    }
    assert_eq!(snapshots(&here, "data@replica-").len(), 2);
    assert_eq!(snapshots(&there, "data@").len(), 2);
    let labels = here.json(&["show", "data"])["volume"]["labels"].take();
    assert!(labels["blockd.io/replicated-unix-ms"].as_str().unwrap().parse::<u64>().is_ok());
}

/// Names of snapshots that begin like that.
fn snapshots(daemon: &Daemon, begin: &str) -> Vec<String> {
    let listed = daemon.json(&["list"]);
    let names = listed["volumes"].as_array().unwrap().iter();
    let names = names.map(|one| one["name"].as_str().unwrap().to_owned());
    names.filter(|name| name.starts_with(begin)).collect()
}

fn write(daemon: &Daemon, seed: u64) {
    let mut client = connect(daemon, "data");
    client.write(30 * MIB, &pattern(1 << 20, seed), false).unwrap();
    client.disconnect().unwrap();
    let connections = || daemon.json(&["show", "data"])["volume"]["connections"].take();
    wait_until("the client is gone", || connections() == 0);
}

#[test]
fn a_move_leaves_snapshots_of_others_whatever_their_names() {
    let (here, there) = two_hosts();
    let listening = Listening::start(&there, "127.0.0.1:0", &[]);
    for tag in ["move-before-upgrade", "move-7", "move-7.0123456789ab-1"] {
        here.ok(&["snapshot", "data", "--tag", tag]);
    }
    let done = here.json(&["move", "data", &listening.target()]);
    let rounds = done["rounds"].as_array().unwrap();
    assert_eq!((rounds.len(), &rounds[0]["snapshot"]), (2, &"data@move-8".into()), "{done}");
    assert_eq!(done["deleted_snapshots"], serde_json::json!(["data@move-8"]));
    assert_eq!(snapshots(&here, "data@move-").len(), 4);
}

#[test]
fn a_volume_that_is_replicated_moves_to_the_same_receiver() {
    let (here, there) = two_hosts();
    let listening = Listening::start(&there, "127.0.0.1:0", &[]);
    let target = listening.target();
    here.ok(&["replicate", "data", &target]);
    write(&here, 1);
    let done = here.json(&["move", "data", &target]);
    let rounds = done["rounds"].as_array().unwrap();
    assert_eq!(rounds[0]["since"], "data@replica-1", "{done}");
    assert_eq!(rounds[0]["written_bytes"], MIB, "{done}");
    assert!(raw(&there, "data") == raw(&here, "data"));
    assert_eq!(snapshots(&here, "data@replica-").len(), 0);
    // And back to a replica, as long as none of the two is written.
    let done = here.json(&["replicate", "data", &target]);
    assert_eq!(done["rounds"][0]["since"], "data@move-2", "{done}");
    // Which a move that goes on beside it may be sending from.
    assert_eq!(snapshots(&here, "data@move-").len(), 1, "{done}");
}

/// The records of what was received have names that begin like those of the snapshots to be sent.
#[test]
fn a_replica_is_replicated_and_keeps_its_base() {
    let (first, second) = two_hosts();
    let third = Daemon::start("512M");
    let to_second = Listening::start(&second, "127.0.0.1:0", &[]);
    let to_third = Listening::start(&third, "127.0.0.1:0", &[]);
    for round in 0..3 {
        write(&first, round);
        first.ok(&["replicate", "data", &to_second.target()]);
        let done = second.json(&["replicate", "data", &to_third.target()]);
        assert_eq!(done["rounds"].as_array().unwrap().len(), 1, "{done}");
        assert!(raw(&third, "data") == raw(&first, "data"), "{round}");
    }
}

#[test]
fn a_snapshot_is_sent_only_to_the_receiver_that_it_was_taken_for() {
    let (here, there) = two_hosts();
    let listening = Listening::start(&there, "127.0.0.1:0", &[]);
    let away = ["replicate", "data", "tcp://127.0.0.1:1", "--reconnect", "1ms"];
    assert_eq!(here.failure(&away).0, 9);
    let done = here.json(&["replicate", "data", &listening.target()]);
    let rounds = done["rounds"].as_array().unwrap();
    assert_eq!((rounds.len(), &rounds[0]["snapshot"]), (1, &"data@replica-2".into()), "{done}");
    let labels = |name: &str| here.json(&["show", name])["volume"]["labels"].take();
    let at = |target: &str, label: &str| serde_json::json!({ label: target });
    assert_eq!(labels("data@replica-1"), at("tcp://127.0.0.1:1", "blockd.io/sending-to"));
    assert_eq!(labels("data@replica-2"), at(&listening.target(), "blockd.io/sent-to"));
}

/// A command that was killed leaves its snapshot attached.
#[test]
fn attached_snapshots_are_deleted_and_used_ones_are_a_warning() {
    let (here, there) = two_hosts();
    let listening = Listening::start(&there, "127.0.0.1:0", &["--keep", "1"]);
    let replicate = ["replicate", "data", &listening.target()];
    here.ok(&replicate);
    here.ok(&["attach", "data@replica-1"]);
    // At the receiver one that is in use is no failure either.
    there.ok(&["attach", &snapshots(&there, "data@")[0]]);
    let done = here.json(&replicate);
    assert_eq!(done["deleted_snapshots"], serde_json::json!(["data@replica-1"]), "{done}");
    assert_eq!(snapshots(&there, "data@").len(), 2);
    here.ok(&["attach", "data@replica-2"]);
    let client = connect(&here, "data@replica-2");
    let done = here.json(&replicate);
    let warning = done["warnings"][0].as_str().unwrap();
    assert!(warning.starts_with("snapshot data@replica-2 stays: "), "{warning}");
    let newest = |name: &str| here.json(&["show", name])["volume"]["made_unix_ms"].to_string();
    let labels = here.json(&["show", "data"])["volume"]["labels"].take();
    assert_eq!(labels["blockd.io/replicated-unix-ms"], newest("data@replica-3").as_str());
    client.disconnect().unwrap();
    let connections = || here.json(&["show", "data@replica-2"])["volume"]["connections"].take();
    wait_until("the client is gone", || connections() == 0);
    let done = here.json(&replicate);
    let deleted = serde_json::json!(["data@replica-2", "data@replica-3"]);
    assert_eq!(done["deleted_snapshots"], deleted, "{done}");
}

/// Forwards two connections, and calls `before` with the number of each.
fn forwarded(to: String, before: impl Fn(u32) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let target = format!("tcp://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for (number, one) in (1..=2).zip(listener.incoming()) {
            let one = one.unwrap();
            // Its receiver drops a connection that does not begin in time.
            before(number);
            let other = TcpStream::connect(&to).unwrap();
            let ends = [(one.try_clone().unwrap(), other.try_clone().unwrap()), (other, one)];
            for (mut from, mut to) in ends {
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut to);
                    let _ = to.shutdown(std::net::Shutdown::Write);
                });
            }
        }
    });
    target
}

#[test]
fn a_move_fails_where_the_volume_is_written_behind_its_last_snapshot() {
    let (here, there) = two_hosts();
    let here = Arc::new(here);
    let listening = Listening::start(&there, "127.0.0.1:0", &[]);
    let at = Arc::clone(&here);
    let target = forwarded(listening.address.clone(), move |number| {
        // That of the last round.
        if number == 2 {
            at.ok(&["attach", "data"]);
            write(&at, 1);
        }
    });
    let (code, error) = here.failure(&["move", "data", &target]);
    let expected = format!(
        "volume data is attached again, and was written in {MIB} bytes since data@move-2, which \
         {target} has, attached: go on with one of the two"
    );
    assert!(code == 7 && error.contains(&expected), "{code} {error}");
    assert!(raw(&there, "data") == raw(&here, "data@move-2"));
}

/// A receiver that begins each transfer and closes is not tried for ever: none comes further.
#[test]
fn a_sender_that_comes_no_further_gives_up() {
    let (here, _) = two_hosts();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let target = format!("tcp://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for tcp in listener.incoming() {
            let mut tcp = tcp.unwrap();
            tcp.read_exact(&mut [0; 658]).unwrap();
            let mut send_from_0 = [0; 16];
            send_from_0[0] = 1;
            tcp.write_all(&send_from_0).unwrap();
        }
    });
    let output = here.run(&["send", "data@mon", &target, "--reconnect", "60m"]);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(9), "{error}");
    assert_eq!(error.matches("; trying again").count(), 10, "{error}");
}

#[test]
fn a_signal_between_attempts_ends_a_sender() {
    let (here, _) = two_hosts();
    let mut send = here.command(&["send", "data@mon", "tcp://127.0.0.1:1"]);
    let mut sender = send.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(sender.stderr.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert!(line.contains("; trying again"), "{line}");
    signal(&sender, "TERM");
    assert_eq!(sender.wait().unwrap().code(), Some(130));
}

#[test]
fn a_receiver_of_one_stream_that_gets_none_fails() {
    let there = Daemon::start("64M");
    let mut listening = Listening::start(&there, "127.0.0.1:0", &["--once"]);
    signal(&listening.child, "TERM");
    assert_eq!(listening.child.wait().unwrap().code(), Some(130));
}

/// A receiver that has stopped reading holds a sender up, and a signal ends it nevertheless.
#[test]
fn a_sender_whose_receiver_is_silent_can_be_interrupted() {
    let (here, there) = two_hosts();
    let listening = Listening::start(&there, "127.0.0.1:0", &[]);
    let target = listening.target();
    signal(&listening.child, "STOP");
    let mut send = here.command(&["send", "data@mon", &target]);
    let sender = send.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    catches_interrupts(&sender);
    std::thread::sleep(Duration::from_millis(300));
    signal(&sender, "INT");
    let output = sender.wait_with_output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(130) && error.contains("interrupted"), "{error}");
    signal(&listening.child, "CONT");
    here.ok(&["send", "data@mon", &target]);
    assert!(raw(&there, "data") == raw(&here, "data@mon"));
}

/// Files of an authority, and of what it signed.
fn identities(daemon: &Daemon, authority: &str, names: &[&str]) {
    let mut of_authority = CertificateParams::new(Vec::new()).unwrap();
    of_authority.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    let issuer = CertifiedIssuer::self_signed(of_authority, key).unwrap();
    let write = |name: String, text: String| fs::write(daemon.dir.join(name), text).unwrap();
    write(format!("{authority}.pem"), issuer.pem());
    for name in names {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        write(format!("{name}.pem"), params.signed_by(&key, &issuer).unwrap().pem());
        write(format!("{name}.key"), key.serialize_pem());
    }
}

#[test]
fn both_ends_have_to_show_a_certificate() {
    let (here, there) = two_hosts();
    identities(&there, "ca", &["receiver", "sender"]);
    identities(&there, "other-ca", &["stranger"]);
    let file = |name: &str| there.dir.join(name).to_str().unwrap().to_owned();
    let tls = |name: &str, ca: &str| {
        let files = [file(&format!("{name}.pem")), file(&format!("{name}.key")), file(ca)];
        let [cert, key, ca] = files;
        vec!["--tls-cert".to_owned(), cert, "--tls-key".to_owned(), key, "--tls-ca".to_owned(), ca]
    };
    let owned = tls("receiver", "ca.pem");
    let words: Vec<&str> = owned.iter().map(String::as_str).collect();
    // Beyond this host, too.
    let listening = Listening::start(&there, "0.0.0.0:0", &words);
    let port = listening.address.rsplit_once(':').unwrap().1;
    let target = format!("tcp://localhost:{port}");
    let send = |tls: &[String]| {
        let mut words = vec!["send", "data@mon", target.as_str(), "--reconnect", "1ms"];
        words.extend(tls.iter().map(String::as_str));
        here.run(&words)
    };
    for stranger in [tls("stranger", "ca.pem"), tls("sender", "other-ca.pem"), Vec::new()] {
        let output = send(&stranger);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(9), "{error}");
        assert!(error.contains("connection with localhost:"), "{error}");
    }
    let output = send(&tls("sender", "ca.pem"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(raw(&there, "data") == raw(&here, "data@mon"));
}

#[test]
fn without_certificates_no_connection_leaves_the_host() {
    let daemon = Daemon::start("64M");
    daemon.ok(&["add", "data", "--size", "1M"]);
    daemon.ok(&["snapshot", "data", "--tag", "mon"]);
    for arguments in
        [&["receive", "--listen", "0.0.0.0:0"][..], &["send", "data@mon", "tcp://192.0.2.1:7010"]]
    {
        let (code, error) = daemon.failure(arguments);
        let named = error.contains("must be of this host without --tls-cert, --tls-key");
        assert!(code == 3 && named, "{code} {error}");
    }
    let long = format!("tcp://127.0.0.1:1/{}", "x".repeat(129));
    let cases: [(&[&str], &str); 6] = [
        (&["send", "data@mon", &long], "xxx: must be 1 to 128 bytes"),
        (&["receive", "--listen", "localhost"], "listen is localhost: must be ADDRESS:PORT"),
        (&["send", "data@mon", "tcp://host"], "TARGET is tcp://host: must be like tcp://HOST:PORT"),
        (&["send", "data@mon", "tcp://127.0.0.1:1", "--resume", "0:a:b:c"], "without --resume"),
        (
            &["send", "data@mon", "tcp://127.0.0.1:1", "--reconnect", "1ms"],
            "connecting to 127.0.0.1:1",
        ),
        (
            &[
                "receive",
                "--listen",
                "127.0.0.1:0",
                "--tls-cert",
                "none.pem",
                "--tls-key",
                "none.key",
                "--tls-ca",
                "none.pem",
            ],
            "tls-ca is none.pem: must be a usable file in PEM",
        ),
    ];
    for (arguments, problem) in cases {
        let (_, error) = daemon.failure(arguments);
        assert!(error.contains(problem), "{error}");
    }
}

/// Timers of several receivers elapse at one time.
#[test]
fn commands_for_several_receivers_at_one_time_take_snapshots_of_their_own() {
    let (here, first) = two_hosts();
    let second = Daemon::start("512M");
    let targets = [
        Listening::start(&first, "127.0.0.1:0", &["--keep", "1"]),
        Listening::start(&second, "127.0.0.1:0", &["--keep", "1"]),
    ];
    for round in 0..4 {
        write(&here, round);
        std::thread::scope(|scope| {
            for target in &targets {
                scope.spawn(|| here.ok(&["replicate", "data", &target.target(), "--keep", "1"]));
            }
        });
        for there in [&first, &second] {
            assert!(raw(there, "data") == raw(&here, "data"), "round {round}");
        }
        assert_eq!(snapshots(&here, "data@replica-").len(), 2, "round {round}");
    }
}

/// A command that begins with an older snapshot goes on when another receiver's has taken one and
/// sent all of it.
#[test]
fn a_snapshot_that_another_receiver_has_is_not_taken_over() {
    let (here, first) = two_hosts();
    let second = Daemon::start("512M");
    let here = Arc::new(here);
    let to_first = Listening::start(&first, "127.0.0.1:0", &[]);
    let to_second = Listening::start(&second, "127.0.0.1:0", &[]);
    let (at, other) = (Arc::clone(&here), to_first.target());
    let target = forwarded(to_second.address.clone(), move |number| {
        if number == 1 {
            at.ok(&["replicate", "data", &other]);
        }
    });
    let label = format!("blockd.io/sending-to={target}");
    here.ok(&["snapshot", "data", "--tag", "replica-1", "--label", &label]);
    let done = here.json(&["replicate", "data", &target]);
    let of = |round: usize| done["rounds"][round]["snapshot"].as_str().unwrap();
    assert_eq!([of(0), of(1)], ["data@replica-1", "data@replica-3"], "{done}");
    write(&here, 1);
    let done = here.json(&["replicate", "data", &to_first.target()]);
    assert_eq!(done["rounds"][0]["since"], "data@replica-2", "{done}");
    assert!(raw(&first, "data") == raw(&here, "data"));
    assert_eq!(snapshots(&here, "data@replica-"), ["data@replica-3", "data@replica-4"]);
}
