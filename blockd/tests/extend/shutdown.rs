//! Daemons that end, or close a pool, by a request on the socket.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use blockd_api::extend::Form;
use blockd_media::clock::Clock;
use serde_json::Value;

use super::cli_support::{Daemon, LIMIT, pattern};
use super::{A_WHILE, Rig, answer, client, logged};

#[test]
fn a_shutdown_ends_the_daemon_in_order_and_then_the_connection() {
    for more in [&["--shutdown"][..], &["--shutdown", "--ascii"]] {
        let mut rig = Rig::full();
        let mut waiting = rig.ask(Form::Binary, 1 << 30);
        rig.logged(&["volume data waits for space"], 1);
        let reply = rig.request(&[&["--json"], more].concat()).output().unwrap();
        assert!(reply.status.success(), "{reply:?}");
        // The process is gone when the connection is: its lock can be had.
        let path = rig.daemon.dir.join("default.pool");
        let checked = rig.daemon.json(&["pool", "check", path.to_str().unwrap()]);
        assert_eq!((&checked["clean"], &checked["damaged"]), (&true.into(), &false.into()));
        assert!(rig.daemon.wait().success());
        assert_eq!(answer(&mut waiting, LIMIT), None, "the waiting client gets no answer");
        assert!(!rig.socket.exists());
        rig.daemon.start_again();
        assert_eq!(rig.daemon.json(&["list"])["volumes"].as_array().unwrap().len(), 2);
    }
}

/// A daemon with two pools, each with a socket and an attached volume.
struct Pair {
    pub(super) daemon: Daemon,
    /// Of the pools `default` and `w`.
    sockets: [PathBuf; 2],
    /// The file of `w`.
    pool: PathBuf,
}

/// Bytes of a write, and writes until a volume's end.
const BLOCK: usize = 64 << 10;

const BLOCKS: u64 = 512;

/// The bytes that a writer writes at a place: other bytes at each.
pub(super) fn block(at: u64) -> Vec<u8> {
    pattern(BLOCK, at)
}

impl Pair {
    pub(super) fn new() -> Self {
        let mut daemon = Daemon::start("128M");
        assert!(daemon.terminate().success());
        let pool = daemon.dir.join("w.pool");
        let config = fs::read_to_string(daemon.config()).unwrap();
        let table = format!("[[pool]]\nname = \"w\"\npath = {pool:?}\nsize = \"128M\"\n");
        let health = "[health]\ninterval = \"1s\"\n";
        fs::write(daemon.config(), format!("{config}{table}{health}")).unwrap();
        let names = ["default", "w"];
        let sockets = names.map(|name| daemon.ring_dir().join(format!("{name}.extend")));
        for (name, socket) in names.iter().zip(&sockets) {
            let listen = format!("{name}={}", socket.display());
            daemon.process.arguments.extend(["--listen".to_owned(), listen]);
        }
        daemon.start_again();
        for name in names {
            daemon.ok(&["add", "--nbd", "--pool", name, "--size", "32M", "data"]);
        }
        Self { daemon, sockets, pool }
    }

    /// Writes blocks one after the other until that fails, or `stop` is set and a whole round is
    /// done. Counts what is answered.
    fn writer(&self, pool: &str, stop: &Arc<AtomicBool>) -> (Arc<AtomicU64>, JoinHandle<bool>) {
        let (answered, stop) = (Arc::new(AtomicU64::new(0)), Arc::clone(stop));
        let mut client = client(&self.daemon, pool, "data");
        let counted = Arc::clone(&answered);
        let write = move || {
            loop {
                let at = answered.load(Ordering::SeqCst);
                if client.write(at % BLOCKS * BLOCK as u64, &block(at % BLOCKS), false).is_err() {
                    return false;
                }
                if answered.fetch_add(1, Ordering::SeqCst) >= BLOCKS && stop.load(Ordering::SeqCst)
                {
                    return true;
                }
            }
        };
        (counted, std::thread::spawn(write))
    }

    /// The first blocks of a pool's volume are what its writer wrote.
    fn holds(&self, pool: &str, blocks: u64) {
        let mut client = client(&self.daemon, pool, "data");
        let mut bytes = vec![0; BLOCK];
        for at in 0..blocks.min(BLOCKS) {
            client.read(at * BLOCK as u64, &mut bytes).unwrap();
            assert!(bytes == block(at), "pool {pool} has other bytes in block {at}");
        }
    }

    fn shut_down(&self, at: usize) {
        let socket = self.sockets[at].to_str().unwrap();
        self.daemon.ok(&["extend-request", "--socket", socket, "--shutdown"]);
        assert!(!self.sockets[at].exists());
    }

    /// The daemon has no descriptor of the file of `w` any more.
    fn has_left_the_file(&self) {
        let pid = self.daemon.json(&["version"])["daemon"]["pid"].as_u64().unwrap();
        let clock = Clock::start();
        let is_open = || {
            let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
            let mut files = descriptors.filter_map(|one| fs::read_link(one.path()).ok());
            files.any(|file| file == self.pool)
        };
        while is_open() {
            assert!(clock.elapsed() < LIMIT, "the file stays open");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn state(&self, pool: &str) -> Value {
        self.daemon.json(&["pool", "show", pool])["pool"]["state"].clone()
    }
}

fn wait_for(count: &AtomicU64, least: u64) {
    let clock = Clock::start();
    while count.load(Ordering::SeqCst) < least {
        assert!(clock.elapsed() < LIMIT, "no IO");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_shutdown_closes_its_pool_alone_while_another_goes_on_with_its_io() {
    let pair = Pair::new();
    let (daemon, path) = (&pair.daemon, pair.pool.to_str().unwrap());
    let stop = Arc::new(AtomicBool::new(false));
    let (others, other) = pair.writer("default", &stop);
    let (written, writer) = pair.writer("w", &stop);
    wait_for(&written, 16);
    let (code, error) = daemon.failure(&["journal", "replay", path]);
    assert_eq!(code, 7, "{error}");
    pair.shut_down(1);
    // The connection and the socket are gone, the log is empty and another process can have it.
    assert!(!writer.join().unwrap(), "its client was hung up on");
    let checked = daemon.json(&["pool", "check", path]);
    assert_eq!((&checked["clean"], &checked["damaged"]), (&true.into(), &false.into()));
    let log = daemon.ok(&["journal", "dump", path]);
    assert_eq!(log, "0 block(s), 0 change(s), 0 to be replayed\n");
    assert_eq!(daemon.json(&["journal", "replay", path])["changed"], false);
    pair.has_left_the_file();
    // The other pool goes on.
    assert!(!other.is_finished());
    wait_for(&others, others.load(Ordering::SeqCst) + 32);
    // Nothing is wrong: it is closed on purpose, and stays so.
    assert_eq!((pair.state("w"), pair.state("default")), ("closed".into(), "open".into()));
    assert_eq!(daemon.json(&["version"])["daemon"]["ready"], true);
    // Health is watched each second here.
    std::thread::sleep(3 * A_WHILE);
    let health = daemon.ok(&["health", "--check"]);
    assert!(health.starts_with("healthy"), "{health}");
    let (_, error) = daemon.failure(&["show", "--pool", "w", "data"]);
    assert!(error.contains("closed by a shutdown request"), "{error}");
    let create = ["pool", "create", "w", "--path", path, "--size", "128M"];
    let (code, error) = daemon.failure(&create);
    assert!(code == 7 && error.contains("pool open"), "{error}");
    daemon.hang_up();
    logged(daemon, &["SIGHUP: pool.space, pool.extend and pool.read_cache are as configured"], 1);
    assert_eq!(pair.state("w"), "closed");
    assert!(!pair.sockets[1].exists());
    // It is opened with its attachment, every answered write, and its socket.
    assert_eq!(daemon.json(&["pool", "open", "w"])["changed"], true);
    assert_eq!(pair.state("w"), "open");
    pair.holds("w", written.load(Ordering::SeqCst));
    let socket = pair.sockets[1].to_str().unwrap();
    daemon.ok(&["extend-request", "--socket", socket, "data", "32M", "0", "0"]);
    stop.store(true, Ordering::SeqCst);
    assert!(other.join().unwrap(), "no write of the other pool failed");
    pair.holds("default", BLOCKS);
}

#[test]
fn a_daemon_with_two_pools_outlives_both_and_opens_them_at_its_next_start() {
    let mut pair = Pair::new();
    let stop = Arc::new(AtomicBool::new(true));
    assert!(pair.writer("w", &stop).1.join().unwrap());
    for at in [0, 1] {
        pair.shut_down(at);
    }
    assert_eq!((pair.state("w"), pair.state("default")), ("closed".into(), "closed".into()));
    assert!(pair.daemon.terminate().success());
    pair.daemon.start_again();
    assert_eq!((pair.state("w"), pair.state("default")), ("open".into(), "open".into()));
    pair.holds("w", BLOCKS);
    assert!(pair.sockets.iter().all(|socket| socket.exists()));
}
