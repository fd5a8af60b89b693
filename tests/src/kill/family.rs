//! A family of volumes, snapshots and clones that changes by one command after the other, each of
//! which has happened as a whole after a crash, or not at all, and has happened once it was
//! answered.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_testkit::clock::Clock;
use blockd_testkit::daemon::Daemon;
use blockd_testkit::nbd::Connection;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::content::SECTOR;
use super::volume::Wrong;

/// Bytes of each volume.
const SIZE: u64 = 4 << 20;
/// Blocks that are written, some of them in one extent.
const BLOCKS: usize = 12;
const BLOCK: usize = 4096;
/// Begins the names of the family, and of nothing else.
const PREFIX: &str = "family-";
/// Volumes and clones, and snapshots, beyond which some are deleted.
const MOST: usize = 4;
/// After a command has failed, it is soon known that the daemon was to die.
const PATIENCE: Duration = Duration::from_secs(60);

/// The content of a volume or snapshot: the number of each block's last write, 0 for none.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Member {
    snapshot: bool,
    blocks: [u64; BLOCKS],
}

type Members = BTreeMap<String, Member>;

/// The kinds of commands.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
enum Kind {
    Add,
    Write,
    Snapshot,
    Group,
    Clone,
    Rollback,
    Delete,
    Rename,
}

/// Commands that a crash met, before they were answered.
#[derive(Clone, Copy, Default, Debug, Serialize, Deserialize)]
pub struct Met([u64; 8]);

impl Met {
    /// Both together.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self(std::array::from_fn(|at| self.0[at] + other.0[at]))
    }

    /// Whether every command is among them, but for the first, which comes only once. Writes need
    /// not be: these are short, and the load beside the family has writes at every crash.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        let commands = &self.0[Kind::Snapshot as usize..];
        commands.iter().all(|&count| count > 0)
    }
}

impl std::fmt::Display for Met {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [add, write, snapshot, group, clone, rollback, delete, rename] = self.0;
        write!(
            f,
            "{add} in add, {write} in writes, {snapshot} in snapshot, {group} in snapshot of \
             several, {clone} in clone, {rollback} in rollback, {delete} in del, {rename} in rename"
        )
    }
}

/// A command that was not answered yet: what it was, and what is there once it has happened.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Doubt {
    kind: Kind,
    after: Members,
}

/// The known state of the family; can be kept where a crash does not reach.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Known {
    members: Members,
    doubt: Option<Doubt>,
    /// The last number that was given out, to names and writes.
    number: u64,
}

/// Where what is known is kept from before each command.
type Keep = Box<dyn FnMut(&str) -> Result<()> + Send>;

/// The family and what is known of it.
pub struct Family {
    known: Known,
    rng: fastrand::Rng,
    keep: Option<Keep>,
    /// Answered commands.
    pub changes: Arc<AtomicU64>,
    /// Commands that a crash met.
    pub met: Met,
}

impl std::fmt::Debug for Family {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Family").field("known", &self.known).finish_non_exhaustive()
    }
}

/// A command, with its arguments.
enum Command {
    Write(String, usize),
    Snapshot(Vec<String>),
    Clone(String),
    Rollback(String, String),
    Delete(String),
    Rename(String),
}

impl Family {
    /// Nothing is there, or what was kept of an earlier one.
    ///
    /// # Errors
    /// When what was kept is none of it.
    pub fn new(seed: u64, kept: Option<&str>) -> Result<Self> {
        let known = kept.map(serde_json::from_str).transpose().context("a family that was kept")?;
        Ok(Self {
            known: known.unwrap_or_default(),
            rng: fastrand::Rng::with_seed(seed),
            keep: None,
            changes: Arc::default(),
            met: Met::default(),
        })
    }

    /// From now on each command is kept before it is begun.
    pub fn keep_in(&mut self, keep: Keep) {
        self.keep = Some(keep);
    }

    /// Runs command after command until it is stopped, or until the daemon is gone: then `stop` has
    /// to be set soon.
    ///
    /// # Errors
    /// When a command failed though the daemon was not to die.
    pub fn run(&mut self, daemon: &Daemon, stop: &AtomicBool) -> Result<(), Wrong> {
        while !stop.load(Ordering::Relaxed) {
            let Err(error) = self.step(daemon) else { continue };
            let failed = Clock::start();
            while !stop.load(Ordering::Relaxed) {
                if failed.elapsed() > PATIENCE {
                    let kind = self.known.doubt.as_ref().map(|doubt| doubt.kind);
                    return Err(Wrong(format!("{kind:?}: {error:#}")));
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        Ok(())
    }

    fn step(&mut self, daemon: &Daemon) -> Result<()> {
        let Some(command) = self.draw() else {
            return self.make(daemon);
        };
        let (kind, after) = self.after(&command);
        self.begin(kind, after)?;
        self.carry_out(&command, daemon)?;
        self.end()
    }

    /// The first volume of the family.
    fn make(&mut self, daemon: &Daemon) -> Result<()> {
        let name = self.name();
        let mut after = self.known.members.clone();
        after.insert(name.clone(), Member { snapshot: false, blocks: [0; BLOCKS] });
        self.begin(Kind::Add, after)?;
        daemon.cli(&["add", "--nbd", "--size", &SIZE.to_string(), &name])?;
        self.end()
    }

    fn name(&mut self) -> String {
        self.known.number += 1;
        format!("{PREFIX}{}", self.known.number)
    }

    fn names(&self, snapshots: bool) -> Vec<String> {
        let those = self.known.members.iter().filter(|(_, one)| one.snapshot == snapshots);
        those.map(|(name, _)| name.clone()).collect()
    }

    /// `None` when there is no volume.
    fn draw(&mut self) -> Option<Command> {
        let (volumes, snapshots) = (self.names(false), self.names(true));
        let rng = &mut self.rng;
        let volume = rng.choice(&volumes)?.clone();
        let Some(snapshot) = rng.choice(&snapshots).cloned() else {
            return Some(Command::Snapshot(vec![volume]));
        };
        Some(match rng.u8(..11) {
            0..2 => Command::Write(volume, rng.usize(..BLOCKS)),
            2..6 if snapshots.len() >= MOST => Command::Delete(snapshot),
            2..4 => Command::Snapshot(vec![volume]),
            4..6 => Command::Snapshot(volumes),
            6 if volumes.len() >= MOST => Command::Delete(volume),
            6 => Command::Clone(snapshot),
            7 => Command::Rollback(volume, snapshot),
            8 => Command::Delete(snapshot),
            9 => Command::Rename(if rng.bool() { volume } else { snapshot }),
            _ if volumes.len() > 1 => Command::Delete(volume),
            _ => Command::Clone(snapshot),
        })
    }

    /// The kind of a command, and the members after it.
    fn after(&mut self, command: &Command) -> (Kind, Members) {
        let mut after = self.known.members.clone();
        let number = self.known.number + 1;
        let blocks = |members: &Members, name: &str| members.get(name).map(|one| one.blocks);
        let kind = match command {
            Command::Write(name, block) => {
                self.known.number = number;
                if let Some(one) = after.get_mut(name) {
                    one.blocks[*block] = number;
                }
                Kind::Write
            }
            Command::Snapshot(sources) => {
                for source in sources {
                    let blocks = blocks(&after, source).unwrap_or_default();
                    after.insert(self.name(), Member { snapshot: true, blocks });
                }
                if sources.len() > 1 { Kind::Group } else { Kind::Snapshot }
            }
            Command::Clone(snapshot) => {
                let blocks = blocks(&after, snapshot).unwrap_or_default();
                after.insert(self.name(), Member { snapshot: false, blocks });
                Kind::Clone
            }
            Command::Rollback(name, snapshot) => {
                let blocks = blocks(&after, snapshot).unwrap_or_default();
                after.insert(name.clone(), Member { snapshot: false, blocks });
                Kind::Rollback
            }
            Command::Delete(name) => {
                after.remove(name);
                Kind::Delete
            }
            Command::Rename(name) => {
                if let Some(one) = after.remove(name) {
                    after.insert(self.name(), one);
                }
                Kind::Rename
            }
        };
        (kind, after)
    }

    fn carry_out(&self, command: &Command, daemon: &Daemon) -> Result<()> {
        let last = self.known.number;
        match command {
            Command::Write(name, block) => {
                let mut connection = connect(daemon, name)?;
                connection.write(offset(*block), &content(last))?;
                return connection.flush();
            }
            Command::Snapshot(sources) => {
                let first = last + 1 - sources.len() as u64;
                let pairs = sources.iter().zip(first..);
                let words: Vec<String> =
                    pairs.map(|(source, number)| format!("{source}={PREFIX}{number}")).collect();
                let mut all = vec!["snapshot"];
                all.extend(words.iter().map(String::as_str));
                daemon.cli(&all)
            }
            Command::Clone(snapshot) => {
                daemon.cli(&["clone", snapshot, &format!("{PREFIX}{last}")])
            }
            Command::Rollback(name, snapshot) => {
                daemon.cli(&["rollback", "--force", name, snapshot])
            }
            Command::Delete(name) => daemon.cli(&["del", "--force", name]),
            Command::Rename(name) => daemon.cli(&["rename", name, &format!("{PREFIX}{last}")]),
        }
        .map(|_| ())
    }

    fn begin(&mut self, kind: Kind, after: Members) -> Result<()> {
        self.known.doubt = Some(Doubt { kind, after });
        self.note()
    }

    fn end(&mut self) -> Result<()> {
        if let Some(doubt) = self.known.doubt.take() {
            self.known.members = doubt.after;
            self.changes.fetch_add(1, Ordering::Relaxed);
        }
        self.note()
    }

    fn note(&mut self) -> Result<()> {
        let Some(keep) = &mut self.keep else { return Ok(()) };
        keep(&serde_json::to_string(&self.known)?)
    }

    /// After a start: everything is as it was before the last command or after it, and after it if
    /// that was answered.
    ///
    /// # Errors
    /// When that is not the case.
    pub fn compare(&mut self, daemon: &Daemon) -> Result<()> {
        let doubt = self.known.doubt.take();
        let mut expected = vec![self.known.members.clone()];
        if let Some(doubt) = doubt {
            self.met.0[doubt.kind as usize] += 1;
            if doubt.kind == Kind::Write {
                self.mend(daemon, &doubt.after)?;
                expected.clear();
            }
            expected.push(doubt.after);
        }
        let found = self.read(daemon)?;
        let same = |members: &Members| {
            let blocks = members.iter().map(|(name, one)| (name, &one.blocks));
            blocks.eq(found.iter())
        };
        let at = expected.iter().position(same);
        let wrong = || Wrong(format!("found {found:?}, expected one of {expected:?}"));
        self.known.members = expected.swap_remove(at.ok_or_else(wrong)?);
        self.note()
    }

    /// Writes again the block that was being written: each of its sectors may be old or new.
    fn mend(&self, daemon: &Daemon, after: &Members) -> Result<()> {
        for (name, new) in after {
            let old = self.known.members.get(name).with_context(|| name.clone())?;
            for (block, (old, new)) in old.blocks.iter().zip(new.blocks).enumerate() {
                if *old == new {
                    continue;
                }
                let mut connection = connect(daemon, name)?;
                let data = connection.read(offset(block), BLOCK)?;
                let either = |sector: &[u8]| [*old, new].iter().any(|one| is_all(sector, *one));
                let wrong = || Wrong(format!("{name}, block {block}: neither {old} nor {new}"));
                ensure!(data.chunks_exact(SECTOR).all(either), wrong());
                connection.write(offset(block), &content(new))?;
                connection.flush()?;
            }
        }
        Ok(())
    }

    /// The members that are there, and the number in each of their blocks.
    fn read(&self, daemon: &Daemon) -> Result<BTreeMap<String, [u64; BLOCKS]>> {
        let mut found = BTreeMap::new();
        let mut names = Vec::new();
        names_in(&daemon.cli(&["list"])?, PREFIX, &mut names);
        for name in names {
            let mut connection = connect(daemon, &name)?;
            ensure!(connection.size == SIZE, Wrong(format!("{name} has another size")));
            let mut blocks = [0; BLOCKS];
            for (block, number) in blocks.iter_mut().enumerate() {
                let data = connection.read(offset(block), BLOCK)?;
                *number = u64::from_le_bytes(*data.first_chunk().context("an empty block")?);
                let wrong = || Wrong(format!("{name}, block {block}: of several writes"));
                ensure!(is_all(&data, *number), wrong());
            }
            found.insert(name, blocks);
        }
        Ok(found)
    }
}

fn connect(daemon: &Daemon, name: &str) -> Result<Connection> {
    // Once attached, it is so after the next start as well.
    daemon.connect(name).or_else(|_| {
        daemon.cli(&["attach", "--nbd", name])?;
        daemon.connect(name)
    })
}

const fn offset(block: usize) -> u64 {
    // The first two lie in one extent, whatever its size.
    if block == 1 { BLOCK as u64 } else { block as u64 * (SIZE / BLOCKS as u64 / 4096 * 4096) }
}

fn content(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(BLOCK / 8)
}

fn is_all(bytes: &[u8], number: u64) -> bool {
    bytes.chunks_exact(8).all(|word| word == number.to_le_bytes())
}

/// Adds the names in a list of volumes that begin like this.
pub fn names_in(listed: &Value, prefix: &str, names: &mut Vec<String>) {
    match listed {
        Value::Array(rows) => rows.iter().for_each(|row| names_in(row, prefix, names)),
        Value::Object(fields) => {
            let name = fields.get("name").and_then(Value::as_str);
            names.extend(name.filter(|name| name.starts_with(prefix)).map(str::to_owned));
            fields.values().for_each(|value| names_in(value, prefix, names));
        }
        _ => {}
    }
}
