//! Snapshots of several volumes are one cut: what they hold together is what some moment held.
//!
//! Writers on all volumes number the beginning and the end of each write from one counter. A write
//! that ended before another began comes before it, so a set of snapshots that has the later one
//! has to have the earlier one as well, whatever volume it went to.

#![allow(clippy::unwrap_used, reason = "a test ends where an expectation fails")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use blockd_testkit::daemon::{Daemon, Settings};
use blockd_testkit::nbd::Connection;

const BLOCK: u64 = 4096;
const SIZE: u64 = 32 << 20;
const VOLUMES: [&str; 4] = ["data", "index", "log", "meta"];
const WRITERS_EACH: u64 = 2;
/// Blocks of a writer, which it writes again and again; each in an extent of its own.
const BLOCKS: u64 = 24;
const STRIDE: u64 = 512 << 10;
/// Rounds until the daemon is killed.
const ROUNDS: usize = 12;
/// Attempts to see that snapshots taken one by one are no cut.
const ATTEMPTS: usize = 10;

/// When a write began and ended; it has not ended while that is `u64::MAX`.
#[derive(Debug)]
struct Written {
    began: u64,
    ended: AtomicU64,
}

/// All writes of a block, in order: its number says which of them it holds.
type History = std::sync::Mutex<Vec<Arc<Written>>>;

struct Writer {
    volume: usize,
    first_block: u64,
    histories: Vec<History>,
}

impl Writer {
    fn offset(&self, block: u64) -> u64 {
        self.first_block * BLOCK + block * STRIDE
    }

    fn write_on(&self, mut connection: Connection, ticks: &AtomicU64, stop: &AtomicBool) {
        let mut content = vec![0; usize::try_from(BLOCK).unwrap()];
        let mut random = fastrand::Rng::with_seed(self.first_block);
        while !stop.load(Ordering::Relaxed) {
            let block = random.u64(..BLOCKS);
            let history = &self.histories[usize::try_from(block).unwrap()];
            let write = Arc::new(Written {
                began: ticks.fetch_add(1, Ordering::SeqCst),
                ended: AtomicU64::new(u64::MAX),
            });
            let number = {
                let mut history = history.lock().unwrap();
                history.push(Arc::clone(&write));
                history.len() as u64
            };
            content.as_chunks_mut::<8>().0.iter_mut().for_each(|at| *at = number.to_le_bytes());
            connection.write(self.offset(block), &content).unwrap();
            write.ended.store(ticks.fetch_add(1, Ordering::SeqCst), Ordering::SeqCst);
        }
    }
}

fn attach(daemon: &Daemon, tag: &str) {
    for volume in VOLUMES {
        daemon.cli(&["attach", "--nbd", &format!("{volume}@{tag}")]).unwrap();
    }
}

/// The last beginning of a write that is there, and the first end of one that is not.
struct Cut {
    last_there: u64,
    first_missing: u64,
    there: usize,
}

fn look(daemon: &Daemon, writers: &[Arc<Writer>], name: impl Fn(&str) -> String) -> Cut {
    let mut cut = Cut { last_there: 0, first_missing: u64::MAX, there: 0 };
    let open = |volume: &&str| daemon.connect(&name(volume)).unwrap();
    let mut connections: Vec<_> = VOLUMES.iter().map(open).collect();
    for writer in writers {
        for (block, history) in (0..).zip(&writer.histories) {
            let data = connections[writer.volume].read(writer.offset(block), 4096).unwrap();
            let (numbers, _) = data.as_chunks::<8>();
            assert!(numbers.iter().all(|number| *number == numbers[0]), "a write is there in part");
            let number = usize::try_from(u64::from_le_bytes(numbers[0])).unwrap();
            let history = history.lock().unwrap();
            assert!(number <= history.len(), "{number} of {}", history.len());
            for write in &history[..number] {
                cut.last_there = cut.last_there.max(write.began);
            }
            for write in &history[number..] {
                cut.first_missing = cut.first_missing.min(write.ended.load(Ordering::SeqCst));
            }
            cut.there += number;
        }
    }
    cut
}

struct Load {
    writers: Vec<Arc<Writer>>,
    ticks: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Load {
    fn start(daemon: &Daemon) -> Self {
        let mut load = Self {
            writers: Vec::new(),
            ticks: Arc::new(AtomicU64::new(1)),
            stop: Arc::new(AtomicBool::new(false)),
            threads: Vec::new(),
        };
        for (volume, name) in VOLUMES.iter().enumerate() {
            for first_block in 0..WRITERS_EACH {
                let histories = (0..BLOCKS).map(|_| History::default()).collect();
                let writer = Arc::new(Writer { volume, first_block, histories });
                load.writers.push(Arc::clone(&writer));
                let connection = daemon.connect(name).unwrap();
                let (ticks, stop) = (Arc::clone(&load.ticks), Arc::clone(&load.stop));
                let write = move || writer.write_on(connection, &ticks, &stop);
                load.threads.push(std::thread::spawn(write));
            }
        }
        load
    }

    fn now(&self) -> u64 {
        self.ticks.load(Ordering::SeqCst)
    }

    /// Lets some more writes happen.
    fn go_on(&self, writes: u64) {
        let until = self.now() + 2 * writes;
        while self.now() < until {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    fn end(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| thread.join().unwrap());
    }
}

/// A cut has everything that had ended before it was asked for, nothing that began after it was
/// answered, and nothing without what came before.
fn assert_cut(cut: &Cut, asked: u64, answered: u64) {
    let Cut { last_there, first_missing, .. } = *cut;
    assert!(first_missing > last_there, "{last_there} is there, {first_missing} ended before it");
    assert!(first_missing >= asked, "{first_missing} had ended when it was asked for at {asked}");
    assert!(last_there < answered, "{last_there} began after the answer at {answered}");
}

#[test]
fn snapshots_of_several_volumes_are_one_cut_and_outlive_a_kill() {
    let mut daemon = Daemon::new("cut", &Settings::default()).unwrap();
    daemon.start().unwrap();
    VOLUMES.iter().for_each(|name| daemon.add(name, SIZE).unwrap());
    let mut load = Load::start(&daemon);
    let mut taken = Vec::new();
    for round in 0..ROUNDS {
        load.go_on(400);
        let asked = load.now();
        let tag = format!("r{round}");
        let words = [&["snapshot", "--tag", &tag], &VOLUMES[..]].concat();
        daemon.cli(&words).unwrap();
        let answered = load.now();
        attach(&daemon, &tag);
        taken.push((tag, asked, answered));
    }
    load.go_on(400);
    let mut before = 0;
    let mut look_at_all = |daemon: &Daemon, load: &Load| {
        before = 0;
        for (tag, asked, answered) in &taken {
            let cut = look(daemon, &load.writers, |volume| format!("{volume}@{tag}"));
            assert_cut(&cut, *asked, *answered);
            assert!(cut.there > before, "nothing was written between two snapshots");
            before = cut.there;
        }
    };
    look_at_all(&daemon, &load);
    // The same by volumes of their own, one after the other: the test can detect a difference.
    let apart = (0..ATTEMPTS).any(|attempt| {
        let tag = format!("apart{attempt}");
        for volume in VOLUMES {
            load.go_on(50);
            daemon.cli(&["snapshot", "--tag", &tag, volume]).unwrap();
        }
        attach(&daemon, &tag);
        let cut = look(&daemon, &load.writers, |volume| format!("{volume}@{tag}"));
        cut.first_missing <= cut.last_there
    });
    assert!(apart, "snapshots taken apart look like one cut: nothing is shown by the others");
    load.end();
    daemon.kill().unwrap();
    daemon.start().unwrap();
    look_at_all(&daemon, &load);
}
