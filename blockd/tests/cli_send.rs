//! `blockd send` and `blockd receive`: random chains of snapshots between pools, cut off at every
//! message by the end of either side, and streams that are refused.
//!
//! `BLOCKD_SEND_CHAINS` is the number of random chains; `cargo ci test send` sets it.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cli_support::{Daemon, connect, pattern};
use fastrand::Rng;

const MIB: u64 = 1 << 20;
const HEADER: usize = 512;
const HEAD: usize = 24;
/// Chains of the short form.
const CHAINS: u64 = 3;

/// Pools, one of each extent size.
const POOLS: [&str; 3] = ["64K", "256K", "1M"];

/// A daemon with these pools.
fn pools() -> Daemon {
    let daemon = Daemon::start("64M");
    for extent in POOLS {
        let path = daemon.dir.join(format!("{extent}.pool"));
        let path = path.to_str().unwrap();
        let create = ["pool", "create", extent, "--path", path, "--size", "256M", "--volatile"];
        daemon.ok(&[&create[..], &["--extent-size", extent]].concat());
    }
    daemon
}

fn raw(daemon: &Daemon, volume: &str) -> Vec<u8> {
    let output = daemon.run(&["export", volume, "-"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

fn streamed(daemon: &Daemon, arguments: &[&str]) -> Vec<u8> {
    let output = daemon.run(&[&["send"], arguments].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// The messages of a stream: its header, and its records.
fn messages(stream: &[u8]) -> Vec<&[u8]> {
    let (header, mut rest) = stream.split_at(HEADER);
    let mut all = vec![header];
    while !rest.is_empty() {
        let number = |at: usize| u32::from_le_bytes(rest[at..at + 4].try_into().unwrap()) as usize;
        let len = match number(0) {
            1 => number(16),
            4 => number(20),
            3 => 8,
            _ => 0,
        };
        let (message, behind) = rest.split_at(HEAD + len);
        all.push(message);
        rest = behind;
    }
    all
}

/// Gives bytes to a receiver, then ends it: as a sender that died, or by killing it. Returns
/// whether it succeeded, and its error.
fn receive(daemon: &Daemon, volume: &str, bytes: &[u8], kill: Option<Duration>) -> (bool, String) {
    let mut command = daemon.command(&["receive", volume, "--sync-every", "1"]);
    let command = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut receiver: Child = command.spawn().unwrap();
    let mut pipe = receiver.stdin.take().unwrap();
    // One that has seen enough reads no further.
    let _ = pipe.write_all(bytes);
    if let Some(after) = kill {
        std::thread::sleep(after);
        receiver.kill().unwrap();
    }
    drop(pipe);
    let output = receiver.wait_with_output().unwrap();
    (output.status.success(), String::from_utf8(output.stderr).unwrap())
}

/// Sends a stream whose receiver or sender ends after each of its messages, until all of it has
/// come.
fn send_with_cuts(daemon: &Daemon, send: &[&str], to: &str, random: &mut Rng) {
    let name = to.split_once('/').unwrap().1;
    let mut position: Option<String> = None;
    let mut so_far = 0;
    loop {
        let resume = position.iter().flat_map(|at| ["--resume", at.as_str()]);
        let arguments: Vec<&str> = send.iter().copied().chain(resume).collect();
        let stream = streamed(daemon, &arguments);
        let messages = messages(&stream);
        // The header and one more message; also a part of the next.
        let whole: usize = messages.iter().take(2).map(|one| one.len()).sum();
        let is_last = messages.len() <= 2;
        let part = messages.get(2).map_or(0, |next| random.usize(..next.len()));
        let (succeeded, error) = match random.bool() {
            false => receive(daemon, to, &stream[..whole + part], None),
            true => {
                let after = Duration::from_millis(random.u64(..60));
                receive(daemon, to, &stream[..whole + part], Some(after))
            }
        };
        if succeeded {
            // Or the end was reached by a receiver that was killed before it could say so.
            let was_done = position.is_none() && so_far > 0;
            assert!(is_last || was_done, "a part was taken for the whole");
            return;
        }
        let found = daemon.run(&["receive", to, "--position", "--json"]);
        position = found.status.success().then(|| {
            let found: serde_json::Value = serde_json::from_slice(&found.stdout).unwrap();
            let bytes = found["received_bytes"].as_u64().unwrap();
            assert!(bytes >= so_far, "{name}: {so_far}, then {bytes} received");
            so_far = bytes;
            found["position"].as_str().unwrap().to_owned()
        });
        assert!(!error.contains("checksum"), "{error}");
    }
}

/// Writes here and there, discards, and may change the size.
fn change(daemon: &Daemon, volume: &str, random: &mut Rng) {
    if random.u8(..4) == 0 {
        let size = format!("{}M", random.u64(3..9));
        daemon.ok(&["resize", volume, "--size", &size, "--shrink"]);
    }
    let mut client = connect(daemon, volume);
    let blocks = client.size() / 4096;
    for _ in 0..random.u64(1..6) {
        let (at, len) = (random.u64(..blocks), random.u64(1..64));
        let len = len.min(blocks - at) * 4096;
        match random.u8(..4) {
            0 => client.write_zeroes(at * 4096, len, false).unwrap(),
            _ => {
                let data = pattern(usize::try_from(len).unwrap(), random.u64(..));
                client.write(at * 4096, &data, false).unwrap();
            }
        }
    }
    client.disconnect().unwrap();
}

/// Bytes that differ between two snapshots, or that one holds.
fn diff(daemon: &Daemon, snapshot: &str, since: Option<&str>) -> u64 {
    let since = since.iter().flat_map(|one| ["--since", one]);
    let arguments: Vec<&str> = ["diff", snapshot, "--json"].into_iter().chain(since).collect();
    let printed = daemon.ok(&arguments);
    let sums: serde_json::Value = serde_json::from_str(printed.lines().last().unwrap()).unwrap();
    sums["data_bytes"].as_u64().unwrap() + sums["zero_bytes"].as_u64().unwrap()
}

fn chain(daemon: &Daemon, seed: u64) {
    let mut random = Rng::with_seed(seed);
    let (from, to) = (random.usize(..3), random.usize(..3));
    let volume = format!("{}/data{seed}", POOLS[from]);
    let copy = format!("{}/copy{seed}", POOLS[to]);
    daemon.ok(&["add", &volume, "--size", "4M"]);
    let mut base: Option<String> = None;
    for step in 0..random.u8(2..5) {
        change(daemon, &volume, &mut random);
        daemon.ok(&["snapshot", &volume, "--tag", &step.to_string()]);
        let snapshot = format!("{volume}@{step}");
        let mut send = vec![snapshot.as_str()];
        if let Some(base) = &base {
            send.extend(["--since", base.as_str()]);
        }
        let stream = streamed(daemon, &send);
        let (wire, changed) = (stream.len() as u64, diff(daemon, &snapshot, base.as_deref()));
        // The header and the end have a size of their own.
        assert!(wire <= changed + changed / 100 + 600, "{seed}: {wire} bytes for {changed}");
        if random.bool() {
            send.extend(["--compress", "zstd:1"]);
        }
        let before = base.is_some().then(|| raw(daemon, &copy));
        if let Some(before) = before {
            // All but the end changes nothing that can be seen.
            assert!(!receive(daemon, &copy, &stream[..stream.len() - 1], None).0);
            assert!(raw(daemon, &copy) == before, "seed {seed}");
        }
        send_with_cuts(daemon, &send, &copy, &mut random);
        assert!(raw(daemon, &copy) == raw(daemon, &snapshot), "seed {seed}, step {step}");
        base = Some(snapshot);
    }
    // Nothing is left over.
    let listed = daemon.ok(&["list", "--all"]);
    assert!(!listed.contains(".receive-"), "{listed}");
    for pool in [from, to] {
        let listed = daemon.json(&["list", "--pool", POOLS[pool]]);
        for one in listed["volumes"].as_array().unwrap() {
            let name = format!("{}/{}", POOLS[pool], one["name"].as_str().unwrap());
            daemon.ok(&["del", &name, "--force"]);
        }
    }
}

#[test]
fn random_chains_arrive_whatever_ends_and_when() {
    let chains = std::env::var("BLOCKD_SEND_CHAINS").ok();
    let chains = chains.map_or(CHAINS, |text| text.parse().unwrap());
    let daemon = pools();
    for seed in 0..chains {
        chain(&daemon, seed);
    }
    println!("{chains} random chains arrived");
}

/// A volume `data` with two snapshots, and their streams.
fn two_days() -> (Daemon, Vec<u8>, Vec<u8>) {
    let daemon = Daemon::start("256M");
    daemon.ok(&["add", "data", "--size", "8M"]);
    let write = |at: u64, len: usize, seed: u64| {
        let mut client = connect(&daemon, "data");
        client.write(at, &pattern(len, seed), false).unwrap();
        client.disconnect().unwrap();
    };
    write(0, 1 << 20, 1);
    daemon.ok(&["snapshot", "data", "--tag", "mon"]);
    write(4 * MIB, 600 << 10, 2);
    daemon.ok(&["snapshot", "data", "--tag", "tue"]);
    let monday = streamed(&daemon, &["data@mon"]);
    let tuesday = streamed(&daemon, &["data@tue", "--since", "data@mon"]);
    (daemon, monday, tuesday)
}

#[test]
fn a_stream_that_does_not_fit_is_refused_by_name_and_changes_nothing() {
    let (daemon, monday, tuesday) = two_days();
    assert_eq!(receive(&daemon, "copy", &monday, None), (true, String::new()));
    let before = raw(&daemon, "copy");
    let parts = messages(&tuesday);
    assert!(parts.len() >= 5, "{}", parts.len());
    let mut swapped = parts.clone();
    swapped.swap(1, 2);
    let dropped: Vec<&[u8]> = [&parts[..1], &parts[2..]].concat();
    let mut edited = tuesday.clone();
    edited[HEADER + HEAD + 100] ^= 1;
    let mut newer = tuesday.clone();
    newer[8] = 4;
    let cases = [
        (swapped.concat(), "that no version of blockd writes"),
        (dropped.concat(), "that no version of blockd writes"),
        (edited, "was changed: the checksum of record 1 is wrong"),
        (newer, "is of a newer version, 4: this blockd reads up to 3"),
        (tuesday[..tuesday.len() - 1].to_vec(), "ends in the middle: it was cut short"),
        ([tuesday.as_slice(), b"x"].concat(), "goes on after its end"),
        (pattern(4096, 9), "is no incremental backup of blockd"),
    ];
    for (bytes, problem) in cases {
        let (succeeded, error) = receive(&daemon, "copy", &bytes, None);
        assert!(!succeeded && error.contains(problem), "{error}");
        assert!(raw(&daemon, "copy") == before, "{problem}");
    }
    // The wrong base.
    daemon.ok(&["snapshot", "data", "--tag", "wed"]);
    let wednesday = streamed(&daemon, &["data@wed", "--since", "data@tue"]);
    let (succeeded, error) = receive(&daemon, "copy", &wednesday, None);
    let named = error.contains("its newest snapshot is copy@mon.")
        && error.contains("the backup begins with data@tue, id ");
    assert!(!succeeded && named && !error.contains("--force"), "{error}");
    let (succeeded, error) = receive(&daemon, "unknown", &tuesday, None);
    assert!(!succeeded && error.contains("volume unknown does not exist"), "{error}");
    daemon.ok(&["add", "taken", "--size", "8M"]);
    let (succeeded, error) = receive(&daemon, "taken", &monday, None);
    assert!(!succeeded && error.contains("taken exists, and the stream begins with nothing"));
    // Written since.
    daemon.ok(&["attach", "copy"]);
    let mut client = connect(&daemon, "copy");
    client.write(MIB, &[1; 4096], false).unwrap();
    client.disconnect().unwrap();
    let refused = |error: &str| error.contains("was written since it held copy@mon.");
    cli_support::wait_until("it is refused as written since", || {
        let (succeeded, error) = receive(&daemon, "copy", &tuesday, None);
        !succeeded && refused(&error)
    });
}

#[test]
fn a_shrunk_snapshot_that_ends_within_a_sub_block_of_the_receiver_is_refused_with_a_way_out() {
    let daemon = pools();
    daemon.ok(&["add", "64K/data", "--size", "4M"]);
    let send = |day: &str, size: &str| {
        daemon.ok(&["resize", "64K/data", "--size", size, "--shrink"]);
        daemon.ok(&["snapshot", "64K/data", "--tag", day]);
        let snapshot = format!("64K/data@{day}");
        let since: &[&str] = if day == "mon" { &[] } else { &["--since", "64K/data@mon"] };
        let stream = streamed(&daemon, &[&[snapshot.as_str()], since].concat());
        receive(&daemon, "1M/copy", &stream, None)
    };
    assert!(send("mon", "4M").0);
    let (succeeded, error) = send("tue", "2052K");
    let expected =
        "delete data@tue at the sender, resize its volume to such a size, and send a new";
    let refused = error.contains("multiple of the pool's sub-block") && error.contains(expected);
    assert!(!succeeded && refused, "{error}");
    daemon.ok(&["del", "64K/data@tue"]);
    assert_eq!(send("wed", "2064K"), (true, String::new()));
    assert!(raw(&daemon, "1M/copy") == raw(&daemon, "64K/data@wed"));
}

/// Sizes are rounded up in persistent memory: the copy would not be found to be one.
#[test]
fn a_size_that_the_receivers_pool_does_not_have_is_refused() {
    let daemon = Daemon::start("64M");
    let file = daemon.ring_dir().join("near.pool");
    let made = ["--path", file.to_str().unwrap(), "--kind", "pmem", "--size", "64M"];
    daemon.ok(&[&["pool", "create", "near"], &made[..]].concat());
    daemon.ok(&["add", "data", "--size", "5M"]);
    daemon.ok(&["snapshot", "data", "--tag", "mon"]);
    let monday = streamed(&daemon, &["data@mon"]);
    let (succeeded, error) = receive(&daemon, "near/copy", &monday, None);
    let expected = "the size of data@mon is 5242880: must be at least 8388608, as sizes are \
                    multiples of 4194304 bytes here; delete data@mon at the sender";
    assert!(!succeeded && error.contains(expected), "{error}");
    // The same of one that changes its size later.
    let send = |size: &str, day: &str, since: &[&str]| {
        daemon.ok(&["resize", "data", "--size", size]);
        daemon.ok(&["snapshot", "data", "--tag", day]);
        let snapshot = format!("data@{day}");
        let stream = streamed(&daemon, &[&[snapshot.as_str()], since].concat());
        receive(&daemon, "near/copy", &stream, None)
    };
    assert_eq!(send("8M", "tue", &[]), (true, String::new()));
    let (succeeded, error) = send("9M", "wed", &["--since", "data@tue"]);
    let expected = "the size of data@wed is 9437184: must be like 12582912, to which it is rounded";
    assert!(!succeeded && error.contains(expected), "{error}");
    assert_eq!(send("12M", "thu", &["--since", "data@tue"]), (true, String::new()));
}

#[test]
fn nothing_of_a_stream_that_lacks_a_record_is_kept() {
    let (daemon, monday, _) = two_days();
    let parts = messages(&monday);
    assert!(parts.len() >= 4, "{}", parts.len());
    let (first, last) = (&parts[..1], &parts[2..]);
    let (succeeded, error) = receive(&daemon, "copy", &[first, last].concat().concat(), None);
    assert!(!succeeded && error.contains("what has come of it is deleted"), "{error}");
    // Had it a position, the rest would be a stream that is whole by itself.
    let (code, error) = daemon.failure(&["receive", "copy", "--position"]);
    assert!(code == 4 && error == "partly received volume copy does not exist", "{error}");
    assert_eq!(receive(&daemon, "copy", &monday, None), (true, String::new()));
    assert!(raw(&daemon, "copy") == raw(&daemon, "data@mon"));
}

/// A failure of the daemon at the same time does not keep it.
#[test]
fn nothing_of_a_stream_that_lacks_a_record_is_kept_when_its_last_piece_fails() {
    let (daemon, monday, _) = two_days();
    let parts = messages(&monday);
    let mut command = daemon.command(&["receive", "copy", "--reconnect", "1ms"]);
    let command = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut receiver = command.spawn().unwrap();
    let mut pipe = receiver.stdin.take().unwrap();
    pipe.write_all(parts[0]).unwrap();
    // One that holds the volume, and those of the transfer.
    cli_support::wait_until("it is connected", || {
        let shown = daemon.run(&["--json", "show", ".receive-copy"]).stdout;
        let shown: serde_json::Value = serde_json::from_slice(&shown).unwrap_or_default();
        shown["volume"]["connections"] == 5
    });
    daemon.ok(&["detach", ".receive-copy", "--force"]);
    pipe.write_all(parts[parts.len() - 1]).unwrap();
    drop(pipe);
    let error = String::from_utf8(receiver.wait_with_output().unwrap().stderr).unwrap();
    assert!(error.contains("what has come of it is deleted: send it again"), "{error}");
    let (code, error) = daemon.failure(&["receive", "copy", "--position"]);
    assert!(code == 4 && error == "partly received volume copy does not exist", "{error}");
}

#[test]
fn snapshots_that_are_kept_are_counted_for_each_volume() {
    let (daemon, monday, tuesday) = two_days();
    let ends = |volume: &str, keep: &[&str], stream: &[u8]| {
        let mut command = daemon.command(&[&["receive", volume, "-"], keep].concat());
        let mut receiver = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        receiver.stdin.take().unwrap().write_all(stream).unwrap();
        assert!(receiver.wait().unwrap().success());
    };
    ends("copy@home", &[], &monday);
    ends("copy", &["--keep", "1"], &monday);
    // Its base is there.
    ends("copy@home", &[], &tuesday);
    assert!(raw(&daemon, "copy@home") == raw(&daemon, "data@tue"));
}

/// A receive of `copy` that has all but the end of a stream, as durable data.
fn almost_done(daemon: &Daemon, stream: &[u8], socket: &Path) -> (Child, ChildStdin, Vec<u8>) {
    let parts = messages(stream);
    let (last, parts) = parts.split_last().unwrap();
    let mut command = daemon.command(&["receive", "copy", "--sync-every", "1"]);
    let command = command.env("BLOCKD_SOCKET", socket).stdin(Stdio::piped());
    let mut receiver = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut pipe = receiver.stdin.take().unwrap();
    pipe.write_all(&parts.concat()).unwrap();
    cli_support::wait_until("its data has come", || {
        let position = daemon.run(&["--json", "receive", "copy", "--position"]).stdout;
        let position: serde_json::Value = serde_json::from_slice(&position).unwrap_or_default();
        position["received_bytes"] == 1 << 20
    });
    (receiver, pipe, last.to_vec())
}

fn succeeds(receiver: Child) {
    let output = receiver.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_daemon_that_is_started_anew_between_two_pieces_is_waited_for() {
    let (mut daemon, monday, _) = two_days();
    let (receiver, mut pipe, last) = almost_done(&daemon, &monday, &daemon.socket());
    daemon.kill();
    pipe.write_all(&last).unwrap();
    drop(pipe);
    std::thread::sleep(Duration::from_millis(500));
    daemon.start_again();
    succeeds(receiver);
    assert!(raw(&daemon, "copy") == raw(&daemon, "data@mon"));
}

/// A socket that leads to the daemon's control socket, until it is closed.
struct Relay {
    path: PathBuf,
    is_open: Arc<AtomicBool>,
    ends: Arc<Mutex<Vec<UnixStream>>>,
}

impl Relay {
    fn start(daemon: &Daemon, folder: &Path) -> Self {
        let (path, socket) = (folder.join("relay.sock"), daemon.socket());
        let listener = UnixListener::bind(&path).unwrap();
        let (is_open, ends) = (Arc::new(AtomicBool::new(true)), Arc::new(Mutex::new(Vec::new())));
        let relay = Self { path, is_open: Arc::clone(&is_open), ends: Arc::clone(&ends) };
        std::thread::spawn(move || {
            for one in listener.incoming().map(Result::unwrap) {
                if !is_open.load(Ordering::SeqCst) {
                    continue;
                }
                let Ok(other) = UnixStream::connect(&socket) else { return };
                for (from, into) in [(&one, &other), (&other, &one)] {
                    let (mut from, mut into) =
                        (from.try_clone().unwrap(), into.try_clone().unwrap());
                    std::thread::spawn(move || std::io::copy(&mut from, &mut into));
                }
                ends.lock().unwrap().extend([one, other]);
            }
        });
        relay
    }

    fn close(&self) {
        self.is_open.store(false, Ordering::SeqCst);
        for end in self.ends.lock().unwrap().drain(..) {
            let _ = end.shutdown(std::net::Shutdown::Both);
        }
    }
}

/// The daemon serves NBD before its control socket.
#[test]
fn a_control_socket_that_is_away_between_two_pieces_is_waited_for() {
    let (daemon, monday, _) = two_days();
    let relay = Relay::start(&daemon, &daemon.ring_dir());
    let (mut receiver, mut pipe, last) = almost_done(&daemon, &monday, &relay.path);
    relay.close();
    pipe.write_all(&last).unwrap();
    drop(pipe);
    std::thread::sleep(Duration::from_millis(500));
    let ended = receiver.try_wait().unwrap();
    relay.is_open.store(true, Ordering::SeqCst);
    assert!(ended.is_none(), "{ended:?}");
    succeeds(receiver);
    assert!(raw(&daemon, "copy") == raw(&daemon, "data@mon"));
}

#[test]
fn a_stream_that_is_there_already_leaves_the_beginning_of_another() {
    let (daemon, monday, tuesday) = two_days();
    assert_eq!(receive(&daemon, "copy", &monday, None), (true, String::new()));
    assert!(!receive(&daemon, "copy", &tuesday[..tuesday.len() - 20], None).0);
    let position = daemon.ok(&["receive", "copy", "--position"]);
    assert_eq!(receive(&daemon, "copy", &monday, None), (true, String::new()));
    assert_eq!(daemon.ok(&["receive", "copy", "--position"]), position);
}

#[test]
fn one_volume_is_received_by_one_command_at_a_time() {
    let (daemon, monday, _) = two_days();
    let mut command = daemon.command(&["receive", "copy"]);
    let mut first = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut pipe = first.stdin.take().unwrap();
    pipe.write_all(&monday[..HEADER]).unwrap();
    cli_support::wait_until("it is being received", || {
        daemon.ok(&["list", "--all"]).contains(".receive-copy")
    });
    let (succeeded, error) = receive(&daemon, "copy", &monday, None);
    let expected = "is being received or imported by another command";
    assert!(!succeeded && error.contains(expected), "{error}");
    fs::write(daemon.dir.join("monday"), &monday).unwrap();
    let (code, error) = daemon.failure(&["import", "monday", "copy", "--apply"]);
    assert!(code == 7 && error.contains(expected), "{code} {error}");
    // Any user could hold a claim by a name alone.
    let claims = fs::read_dir(daemon.ring_dir()).unwrap().map(Result::unwrap);
    let is_claim =
        |entry: &fs::DirEntry| entry.file_name().as_encoded_bytes().starts_with(b"receive-");
    let modes: Vec<u32> =
        claims.filter(is_claim).map(|entry| entry.metadata().unwrap().mode() & 0o777).collect();
    assert_eq!(modes, [0o600]);
    pipe.write_all(&monday[HEADER..]).unwrap();
    drop(pipe);
    assert!(first.wait().unwrap().success());
    assert!(raw(&daemon, "copy") == raw(&daemon, "data@mon"));
}

/// A command that has the socket in another folder, as in a container, does not see the claim of
/// the first: the hidden volume has a connection all the time, also between two of its many pieces.
#[test]
fn a_volume_is_received_by_one_command_whatever_the_folder_of_its_socket() {
    const SIZE: u64 = 5 * MIB;
    let daemon = Daemon::start("256M");
    daemon.ok(&["add", "data", "--size", "5M"]);
    let streams = ["mon", "tue"].map(|day| {
        let mut client = connect(&daemon, "data");
        for at in (0..SIZE).step_by(64 << 10) {
            client.write(at, &pattern(4096, at + u64::from(day == "mon")), false).unwrap();
        }
        client.disconnect().unwrap();
        daemon.ok(&["snapshot", "data", "--tag", day]);
        streamed(&daemon, &[&format!("data@{day}")])
    });
    fs::write(daemon.dir.join("tue.blkd"), &streams[1]).unwrap();
    let mut first = daemon.command(&["receive", "copy", "--sync-every", "4K"]);
    let mut first = first.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut pipe = first.stdin.take().unwrap();
    let parts = messages(&streams[0]);
    assert!(parts.len() > 80, "{}", parts.len());
    let (begin, rest) = parts.split_at(10);
    pipe.write_all(&begin.concat()).unwrap();
    cli_support::wait_until("it is being received", || {
        daemon.run(&["receive", "copy", "--position"]).status.success()
    });
    let relay = Relay::start(&daemon, &daemon.dir);
    let mut other = daemon.command(&["receive", "copy", "tue.blkd"]);
    let other = other.env("BLOCKD_SOCKET", &relay.path).stdout(Stdio::null());
    let other = other.stderr(Stdio::piped()).spawn().unwrap();
    // Longer than the other looks for a moment without connections.
    let (rest, last) = rest.split_at(rest.len() - 5);
    for part in rest {
        pipe.write_all(part).unwrap();
        std::thread::sleep(Duration::from_millis(40));
    }
    let output = other.wait_with_output().unwrap();
    pipe.write_all(&last.concat()).unwrap();
    drop(pipe);
    let error = String::from_utf8(output.stderr).unwrap();
    let refused = error.contains("is being received or imported by another command");
    assert!(!output.status.success() && refused, "{error}");
    assert!(first.wait().unwrap().success());
    assert!(raw(&daemon, "copy") == raw(&daemon, "data@mon"));
}

#[test]
fn a_hidden_volume_is_left_out_of_lists_and_cannot_be_made() {
    let (daemon, monday, _) = two_days();
    let (succeeded, error) = receive(&daemon, "copy", &monday[..monday.len() - 20], None);
    assert!(!succeeded, "{error}");
    assert!(error.contains("`blockd receive copy --position` says how far it is"), "{error}");
    let listed = daemon.ok(&["list"]);
    assert!(!listed.contains("copy"), "{listed}");
    // It stays until it is deleted, and takes space.
    let last = listed.lines().last().unwrap();
    assert!(last.starts_with("1 partly received volume, ") && last.contains("--all"), "{listed}");
    let listed = daemon.ok(&["list", "--all"]);
    assert!(listed.contains(".receive-copy") && !listed.contains("partly received"), "{listed}");
    let position = daemon.ok(&["receive", "copy", "--position"]);
    assert!(position.starts_with("1048576:"), "{position}");
    for arguments in [
        &["add", ".receive-x", "--size", "1M"][..],
        &["rename", "data", ".receive-x"],
        &["clone", "data@mon", ".receive-x"],
        &["snapshot", "data=.receive-x"],
        &["import", "-", ".receive-x", "--size", "1M"],
        &["receive", ".receive-x"],
    ] {
        let (code, error) = daemon.failure(arguments);
        assert!(code == 3 && error.contains("does not begin with .receive-"), "{error}");
    }
    // Another stream takes its place, from its beginning.
    let tuesday = streamed(&daemon, &["data@tue"]);
    assert_eq!(receive(&daemon, "copy", &tuesday, None), (true, String::new()));
    assert!(raw(&daemon, "copy") == raw(&daemon, "data@tue"));
    let (code, error) = daemon.failure(&["receive", "copy", "--position"]);
    assert!(code == 4 && error == "partly received volume copy does not exist", "{error}");
    assert!(daemon.json(&["show", "copy"])["volume"]["labels"].as_object().unwrap().is_empty());
}

#[test]
fn a_position_of_another_stream_is_refused_on_both_sides() {
    let (daemon, monday, _) = two_days();
    assert!(!receive(&daemon, "copy", &monday[..monday.len() - 20], None).0);
    let position = daemon.ok(&["receive", "copy", "--position"]);
    let position = position.trim();
    let (code, error) = daemon.failure(&["send", "data@tue", "x", "--resume", position]);
    assert!(code == 3 && error.contains("a position of the stream of data@tue"), "{error}");
    assert!(!daemon.dir.join("x").exists());
    let rest = streamed(&daemon, &["data@mon", "--resume", position]);
    assert!(rest.len() < 600, "{}", rest.len());
    let (succeeded, error) = receive(&daemon, "other", &rest, None);
    let named = error.contains("volume other has 0 bytes of data@mon so far");
    assert!(!succeeded && named && error.contains("begins at 1048576"), "{error}");
    fs::write(daemon.dir.join("rest"), &rest).unwrap();
    let (code, error) = daemon.failure(&["import", "rest", "other", "--apply"]);
    assert!(code == 7 && error.contains("continues an earlier stream"), "{error}");
    daemon.ok(&["receive", "copy", "rest"]);
    assert!(raw(&daemon, "copy") == raw(&daemon, "data@mon"));
}

#[test]
fn a_dry_run_says_the_bytes_and_compression_makes_them_fewer() {
    let (daemon, monday, tuesday) = two_days();
    let dry = |arguments: &[&str]| daemon.json(&[arguments, &["--dry-run"]].concat());
    assert_eq!(dry(&["send", "data@mon"])["data_bytes"], 1 << 20);
    let since = ["send", "data@tue", "--since", "data@mon"];
    assert_eq!(dry(&since)["data_bytes"], 600 << 10);
    assert!(monday.len() > 1 << 20 && tuesday.len() > 600 << 10);
    daemon.ok(&["add", "text", "--size", "8M"]);
    let mut client = connect(&daemon, "text");
    client.write(0, &b"one line of many\n".repeat(61_681)[..1 << 20], false).unwrap();
    client.disconnect().unwrap();
    daemon.ok(&["snapshot", "text", "--tag", "now"]);
    let short = streamed(&daemon, &["text@now", "--compress", "zstd"]);
    assert!(short.len() < 10_000, "{}", short.len());
    assert_eq!(receive(&daemon, "copy", &short, None), (true, String::new()));
    assert!(raw(&daemon, "copy") == raw(&daemon, "text@now"));
    // It is a backup as well.
    fs::write(daemon.dir.join("short.blkd"), &short).unwrap();
    daemon.ok(&["import", "short.blkd", "other", "--apply"]);
    assert!(raw(&daemon, "other") == raw(&daemon, "text@now"));
}

/// A pipe between the two, as a shell makes it.
#[test]
fn a_sender_and_a_receiver_work_in_a_pipe() {
    let (daemon, ..) = two_days();
    let mut send = daemon.command(&["send", "data@mon"]);
    let mut sender = send.stdout(Stdio::piped()).spawn().unwrap();
    let mut receive = daemon.command(&["--json", "receive", "copy"]);
    let output = receive.stdin(sender.stdout.take().unwrap()).output().unwrap();
    assert!(sender.wait().unwrap().success() && output.status.success());
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&answer["created"], &answer["snapshot"]), (&true.into(), &"data@mon".into()));
    assert!(raw(&daemon, "copy") == raw(&daemon, "data@mon"));
}
