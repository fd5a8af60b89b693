//! The requests to a device and their answers, written where the crash can't reach: on another
//! disk, record by record, before the next request is sent. After the crash the ledger gives the
//! allowed content of every sector.
//!
//! A record is a sector. Those of one run have its number, which older ones don't.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, ensure};
use blockd_testkit::nbd::{FUA, Kind, Request};

use super::device::{Buffer, Device};
use super::rounds::Moment;
use crate::kill::content::{self, Generation, SECTOR};
use crate::kill::volume::Wrong;

/// Bytes of the disk that hold records.
const RECORDS: u64 = 48 << 20;
/// Sectors of the unit that is given back.
const WHOLE: u64 = 8;
/// Where the states at the start of a run lie, one of each two by turns.
const STATES: u64 = RECORDS;
/// Bytes of each.
const STATE: u64 = 4 << 20;
/// Where a counter is kept that has nothing to do with the device.
const COUNTER: u64 = STATES + 2 * STATE;
/// Where a text is kept by turns, and bytes of each of the two.
const TEXTS: u64 = COUNTER + (64 << 10);
const TEXT: u64 = 64 << 10;
/// Added to the numbers of snapshots in records, far from those of requests.
const SNAPSHOTS: u64 = 1 << 41;
/// Bytes of the whole disk.
pub const SIZE: u64 = COUNTER + (1 << 20);

/// The ledger of a run.
#[derive(Debug)]
pub struct Ledger {
    disk: Device,
    run: u64,
    next: AtomicU64,
}

impl Ledger {
    /// A new run on this disk, that begins with these contents, which have to be durable.
    ///
    /// # Errors
    /// When the disk can't be written.
    pub fn new(disk: Device, run: u64, contents: &[Generation]) -> Result<Self> {
        ensure!(disk.size >= SIZE, "a ledger needs {SIZE} bytes, the disk has {}", disk.size);
        let text = format!("state {run} {}", contents.len());
        let bytes: Vec<u8> = contents.iter().flat_map(|number| number.to_le_bytes()).collect();
        let place = STATES + run % 2 * STATE;
        ensure!(bytes.len() as u64 + SECTOR as u64 <= STATE, "too many sectors");
        put(&disk, place + SECTOR as u64, &bytes)?;
        // After what it speaks of: a state is there as a whole or not at all.
        put(&disk, place, text.as_bytes())?;
        Ok(Self { disk, run, next: AtomicU64::new(0) })
    }

    /// A request is about to be sent. False when there is no room for it, and it must not be.
    ///
    /// # Errors
    /// When the disk can't be written.
    pub fn begins(&self, request: &Request, generation: Generation) -> Result<bool> {
        let Request { kind, flags, cookie, offset, len } = request;
        let (mut first, mut count) = (offset / SECTOR as u64, u64::from(*len) / SECTOR as u64);
        if *kind == Kind::Trim {
            // Only whole blocks are given back.
            let end = (first + count) / WHOLE * WHOLE;
            first = first.next_multiple_of(WHOLE);
            count = end.saturating_sub(first);
        }
        let word = match kind {
            Kind::Write => "write",
            Kind::WriteZeroes | Kind::Trim => "zero",
            Kind::Flush => "flush",
            Kind::Read => return Ok(true),
        };
        // The kernel has no call that zeroes or trims and is durable when it comes back.
        let fua = if *kind == Kind::Write { flags & FUA } else { 0 };
        self.add(&format!("{word} {cookie} {first} {count} {generation} {fua}"))
    }

    /// Notes that a request was answered.
    ///
    /// # Errors
    /// When the disk can't be written.
    pub fn done(&self, request: &Request) -> Result<()> {
        if request.kind == Kind::Read {
            return Ok(());
        }
        // Without room it counts as not answered, which is the weaker condition.
        self.add(&format!("done {} 0 0 0 0", request.cookie)).map(|_| ())
    }

    /// Notes a moment of a snapshot's life. False when there is no room for it.
    ///
    /// # Errors
    /// When the disk can't be written.
    pub fn snapshot(&self, moment: Moment, number: u64) -> Result<bool> {
        let word = match moment {
            Moment::Begins => "snapshot",
            Moment::Taken => "done",
            Moment::Goes => "delete",
        };
        self.add(&format!("{word} {} 0 0 0 0", SNAPSHOTS + number))
    }

    /// The order of records is that in which places are taken; each is on the disk before its
    /// caller goes on.
    fn add(&self, text: &str) -> Result<bool> {
        let place = self.next.fetch_add(SECTOR as u64, Ordering::SeqCst);
        if place >= RECORDS {
            return Ok(false);
        }
        put(&self.disk, place, format!("{} {text}", self.run).as_bytes())?;
        Ok(true)
    }
}

/// Writes a text or bytes, filled up to whole sectors.
fn put(disk: &Device, offset: u64, bytes: &[u8]) -> Result<()> {
    let mut buffer = Buffer::default();
    let len = bytes.len().next_multiple_of(SECTOR);
    let memory = buffer.of(len);
    memory.fill(0);
    memory[..bytes.len()].copy_from_slice(bytes);
    let len = u32::try_from(len)?;
    let request = Request { kind: Kind::Write, flags: 0, cookie: 0, offset, len };
    disk.ask(&request, &mut buffer).context("writing the ledger")
}

/// Keeps a number on the ledger's disk.
///
/// # Errors
/// When it can't be written.
pub fn keep(disk: &Device, number: u64) -> Result<()> {
    put(disk, COUNTER, number.to_string().as_bytes())
}

/// The number that was kept last, 0 on a new disk.
#[must_use]
pub fn kept(disk: &[u8]) -> u64 {
    let text = disk.get(usize::try_from(COUNTER).unwrap_or(0)..).map(text_of).unwrap_or_default();
    text.parse().unwrap_or(0)
}

/// Keeps a text on the ledger's disk, in place of the one before the last. Numbers count up.
///
/// # Errors
/// When it can't be written, or is too long.
pub fn keep_text(disk: &Device, number: u64, text: &str) -> Result<()> {
    let sum = crc32c::crc32c(text.as_bytes());
    let line = format!("{number} {sum} {}\n{text}", text.len());
    ensure!(line.len() as u64 <= TEXT, "a text of {} bytes is kept", text.len());
    put(disk, TEXTS + number % 2 * TEXT, line.as_bytes())
}

/// The last text that was kept as a whole, with its number.
#[must_use]
pub fn kept_text(disk: &[u8]) -> Option<(u64, String)> {
    let kept = |turn: u64| {
        let from = usize::try_from(TEXTS + turn * TEXT).ok()?;
        let all = disk.get(from..)?.get(..usize::try_from(TEXT).ok()?)?;
        let (head, rest) = all.split_at(all.iter().position(|&byte| byte == b'\n')?);
        let head = std::str::from_utf8(head).ok()?;
        let mut words = head.split(' ').map(str::parse);
        let mut word = || words.next()?.ok();
        let (number, sum, len): (u64, u64, u64) = (word()?, word()?, word()?);
        let text = rest.get(1..=usize::try_from(len).ok()?)?;
        let whole = u64::from(crc32c::crc32c(text)) == sum;
        whole.then(|| Some((number, String::from_utf8(text.to_vec()).ok()?)))?
    };
    [kept(0), kept(1)].into_iter().flatten().max_by_key(|(number, _)| *number)
}

fn text_of(sector: &[u8]) -> String {
    let end = sector.iter().take(SECTOR).position(|&byte| byte == 0).unwrap_or(0);
    String::from_utf8_lossy(&sector[..end]).into_owned()
}

/// A request of a run, as it is found.
#[derive(Clone, Copy, Debug)]
struct Entry {
    cookie: u64,
    first: u64,
    count: u64,
    generation: Generation,
    fua: bool,
    /// The record's number, and that of the answer.
    began: usize,
    done: Option<usize>,
}

/// A snapshot of which a ledger has records.
#[derive(Debug)]
pub struct Snapshot {
    pub number: u64,
    /// Whether the snapshot was answered.
    pub taken: bool,
    /// Whether the deletion of it was begun.
    pub goes: bool,
    pub content: Judge,
}

/// The allowed content of sectors after a crash.
#[derive(Clone, Debug)]
pub struct Judge {
    /// The number of the last run; 0 when there was none.
    pub run: u64,
    /// For each sector what it may hold. The first is what was durable.
    allowed: Vec<Vec<Generation>>,
    /// The newest write.
    pub last: Generation,
    /// Writes and zeroes that were durable, and those that need not be there.
    pub durable: u64,
    pub open: u64,
}

impl Judge {
    /// Reads a ledger's disk.
    ///
    /// # Errors
    /// When it makes no sense.
    pub fn read(disk: &[u8], sectors: usize) -> Result<Self> {
        Self::at(disk, sectors, |_| true, true)
    }

    /// The same at a moment in the middle: of the flushes that were answered, these had been by
    /// then. Without `fua`, it is not known which writes that were to be durable by themselves had
    /// been answered.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn at(
        disk: &[u8],
        sectors: usize,
        flushed: impl Fn(u64) -> bool,
        fua: bool,
    ) -> Result<Self> {
        let mut judge =
            Self { run: 0, allowed: vec![vec![0]; sectors], last: 0, durable: 0, open: 0 };
        judge.state(disk)?;
        let Records { changes, mut flushes, .. } = records(disk, judge.run)?;
        flushes.retain(|flush| flush.done.is_some() && flushed(flush.cookie));
        for entry in &changes {
            let covered = entry.done.is_some_and(|done| {
                entry.fua && fua || flushes.iter().any(|flush| flush.began > done)
            });
            judge.take(entry, covered)?;
        }
        Ok(judge)
    }

    /// The allowed contents of the snapshots of the last run: changes that were answered before the
    /// snapshot was asked for are there, flushed or not, and none that began after its answer.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn snapshots(disk: &[u8], sectors: usize) -> Result<Vec<Snapshot>> {
        let mut start =
            Self { run: 0, allowed: vec![vec![0]; sectors], last: 0, durable: 0, open: 0 };
        start.state(disk)?;
        let Records { changes, snapshots, deleted, .. } = records(disk, start.run)?;
        let mut found = Vec::new();
        for Entry { cookie, began, done, .. } in snapshots {
            let mut content = start.clone();
            for entry in changes.iter().filter(|entry| done.is_none_or(|done| entry.began < done)) {
                content.take(entry, entry.done.is_some_and(|done| done < began))?;
            }
            let (number, goes) = (cookie - SNAPSHOTS, deleted.contains(&cookie));
            found.push(Snapshot { number, taken: done.is_some(), goes, content });
        }
        Ok(found)
    }

    /// Takes the next change into account, which has to be there or may be.
    fn take(&mut self, entry: &Entry, has_to_be: bool) -> Result<()> {
        self.last = self.last.max(entry.generation);
        *(if has_to_be { &mut self.durable } else { &mut self.open }) += 1;
        for sector in entry.first..entry.first + entry.count {
            let place = usize::try_from(sector).ok().and_then(|at| self.allowed.get_mut(at));
            let place = place.context("a request beyond the end")?;
            if has_to_be {
                place.clear();
            }
            place.push(entry.generation);
        }
        Ok(())
    }

    /// The newer of the two states at the start of a run.
    fn state(&mut self, disk: &[u8]) -> Result<()> {
        for slot in 0..2 {
            let place = usize::try_from(STATES + slot * STATE)?;
            let text = disk.get(place..).map(text_of).context("no ledger: too small")?;
            let mut words = text.split(' ');
            if words.next() != Some("state") {
                continue;
            }
            let mut number = || words.next().and_then(|word| word.parse::<u64>().ok());
            let (run, count) = (number().context("a run")?, number().context("a count")?);
            ensure!(count == self.allowed.len() as u64, "a ledger of another device");
            if run <= self.run {
                continue;
            }
            self.run = run;
            let bytes = disk[place + SECTOR..].chunks_exact(4);
            for (place, bytes) in self.allowed.iter_mut().zip(bytes) {
                let generation = Generation::from_le_bytes(bytes.try_into()?);
                *place = vec![generation];
                self.last = self.last.max(generation);
            }
        }
        Ok(())
    }

    /// Which of the allowed contents a sector holds.
    ///
    /// # Errors
    /// When it holds none of them.
    pub fn found(&self, id: u32, sector: u64, bytes: &[u8]) -> Result<Generation, Wrong> {
        let allowed = usize::try_from(sector).ok().and_then(|at| self.allowed.get(at));
        let allowed = allowed.map_or(&[][..], Vec::as_slice);
        let held = allowed.iter().rev().find(|&&one| content::holds(bytes, id, sector, one));
        held.copied().ok_or_else(|| {
            let found = content::describe(bytes);
            Wrong(format!("volume {id}, sector {sector}: {found}; right is one of {allowed:?}"))
        })
    }
}

/// The records of a run: requests with their answers, each kind in the order in which they began.
struct Records {
    changes: Vec<Entry>,
    flushes: Vec<Entry>,
    snapshots: Vec<Entry>,
    /// Cookies of snapshots whose deletion was begun.
    deleted: HashSet<u64>,
}

fn records(disk: &[u8], run: u64) -> Result<Records> {
    let mut begun = [(); 3].map(|()| HashMap::new());
    let (mut done, mut deleted) = (Vec::new(), HashSet::new());
    let records = disk.get(..usize::try_from(RECORDS)?).context("no ledger: too small")?;
    for (number, sector) in records.chunks_exact(SECTOR).enumerate() {
        if sector[0] == 0 {
            continue;
        }
        let text = text_of(sector);
        let words: Vec<&str> = text.split(' ').collect();
        let [its_run, word, numbers @ ..] = words.as_slice() else { continue };
        if its_run.parse() != Ok(run) {
            continue;
        }
        let numbers: Vec<u64> = numbers.iter().filter_map(|word| word.parse().ok()).collect();
        let [cookie, first, count, generation, fua] = numbers[..] else { continue };
        let entry = Entry {
            cookie,
            first,
            count,
            generation: if *word == "zero" { 0 } else { Generation::try_from(generation)? },
            fua: fua != 0,
            began: number,
            done: None,
        };
        match *word {
            "write" | "zero" => drop(begun[0].insert(cookie, entry)),
            "flush" => drop(begun[1].insert(cookie, entry)),
            "snapshot" => drop(begun[2].insert(cookie, entry)),
            "delete" => drop(deleted.insert(cookie)),
            _ => done.push((cookie, number)),
        }
    }
    for (cookie, number) in done {
        for entries in &mut begun {
            if let Some(entry) = entries.get_mut(&cookie) {
                entry.done = Some(number);
            }
        }
    }
    let [changes, flushes, snapshots] = begun.map(|entries: HashMap<u64, Entry>| {
        let mut entries: Vec<Entry> = entries.into_values().collect();
        entries.sort_by_key(|entry| entry.began);
        entries
    });
    Ok(Records { changes, flushes, snapshots, deleted })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECTORS: usize = 64;

    fn disk(states: &[(u64, Generation)], records: &[&str]) -> Vec<u8> {
        let mut disk = vec![0; usize::try_from(SIZE).unwrap()];
        let mut put = |at: u64, bytes: &[u8]| {
            let at = usize::try_from(at).unwrap();
            disk[at..at + bytes.len()].copy_from_slice(bytes);
        };
        for (run, generation) in states {
            let place = STATES + run % 2 * STATE;
            put(place, format!("state {run} {SECTORS}").as_bytes());
            put(place + SECTOR as u64, &generation.to_le_bytes().repeat(SECTORS));
        }
        for (number, record) in records.iter().enumerate() {
            put((number * SECTOR) as u64, record.as_bytes());
        }
        disk
    }

    fn judged(judge: &Judge, sector: u64) -> Vec<Generation> {
        let mut bytes = [0; SECTOR];
        let allowed = |&one: &Generation| {
            content::fill(&mut bytes, 1, sector, one);
            judge.found(1, sector, &bytes).is_ok()
        };
        (0..10).filter(allowed).collect()
    }

    #[test]
    fn data_that_a_flush_covers_has_to_be_there() {
        let disk = disk(
            &[(1, 9), (2, 5)],
            &[
                "2 write 1 0 8 6 0",
                "2 done 1 0 0 0 0",
                "2 write 2 8 8 7 0",
                "2 flush 3 0 0 0 0",
                // Answered after the flush was sent: not covered.
                "2 done 2 0 0 0 0",
                "2 done 3 0 0 0 0",
                "2 zero 4 0 4 0 0",
                "2 write 5 16 8 8 1",
                "2 done 5 0 0 0 0",
                // Of the run before.
                "1 write 6 24 8 9 0",
            ],
        );
        let judge = Judge::read(&disk, SECTORS).unwrap();
        assert_eq!((judge.run, judge.last, judge.durable, judge.open), (2, 8, 2, 2));
        assert_eq!(judged(&judge, 0), [0, 6]);
        assert_eq!(judged(&judge, 5), [6]);
        assert_eq!(judged(&judge, 8), [5, 7]);
        assert_eq!(judged(&judge, 16), [8]);
        assert_eq!(judged(&judge, 24), [5]);
    }

    #[test]
    fn a_flush_that_was_not_answered_covers_nothing() {
        let disk = disk(&[(1, 0)], &["1 write 1 0 8 3 0", "1 done 1 0 0 0 0", "1 flush 2 0 0 0 0"]);
        let judge = Judge::read(&disk, SECTORS).unwrap();
        assert_eq!(judged(&judge, 0), [0, 3]);
    }

    #[test]
    fn a_snapshot_has_what_was_answered_before_it_and_nothing_begun_after_it() {
        let (one, other) = (SNAPSHOTS + 1, SNAPSHOTS + 2);
        let records = [
            "2 write 1 0 8 6 0".to_owned(),
            "2 done 1 0 0 0 0".to_owned(),
            "2 write 2 8 8 7 0".to_owned(),
            format!("2 snapshot {one} 0 0 0 0"),
            "2 write 3 16 8 8 0".to_owned(),
            "2 done 2 0 0 0 0".to_owned(),
            format!("2 done {one} 0 0 0 0"),
            "2 write 4 0 8 9 0".to_owned(),
            "2 done 4 0 0 0 0".to_owned(),
            format!("2 snapshot {other} 0 0 0 0"),
            format!("2 delete {one} 0 0 0 0"),
        ];
        let records: Vec<&str> = records.iter().map(String::as_str).collect();
        let found = Judge::snapshots(&disk(&[(2, 5)], &records), SECTORS).unwrap();
        let facts = found.iter().map(|one| (one.number, one.taken, one.goes));
        assert_eq!(facts.collect::<Vec<_>>(), [(1, true, true), (2, false, false)]);
        let contents = [0, 8, 16, 24].map(|sector| judged(&found[0].content, sector));
        assert_eq!(contents, [vec![6], vec![5, 7], vec![5, 8], vec![5]]);
        assert_eq!(judged(&found[1].content, 0), [9]);
        assert_eq!(judged(&found[1].content, 8), [7]);
    }
}
