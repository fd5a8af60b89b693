//! The state that survives a crash of the simulated host's process: devices, ring memory, the
//! oracle, and the randomness that drives everything.

mod devices;
mod faults;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockd_mapper::io::{IoCommand, IoError, IoOp};
use blockd_mapper::ring::RingMemory;
use blockd_mapper::units::DeviceIndex;

use super::content::{Contents, UNIT, UNIT_BYTES, index};
use super::disk::{Action, Answered, Disk, Fault};
use super::marks::{Mark, Marks};
use super::oracle::Oracle;
use super::profile::Profile;

/// Ring memory of the simulation: it can be copied, set aside and brought back.
#[derive(Debug)]
pub struct Ring(Box<[AtomicU64]>);

impl RingMemory for Ring {
    fn words(&self) -> &[AtomicU64] {
        &self.0
    }
}

impl Ring {
    /// Memory with these words.
    #[must_use]
    pub fn of(words: impl IntoIterator<Item = u64>) -> Arc<Self> {
        Arc::new(Self(words.into_iter().map(AtomicU64::new).collect()))
    }

    /// A copy of the words.
    #[must_use]
    pub fn image(&self) -> Vec<u64> {
        self.0.iter().map(|word| word.load(Ordering::SeqCst)).collect()
    }
}

/// The requester of a device operation.
#[derive(Debug)]
pub enum Origin {
    /// The engine, an opening or a creation: the command goes back with the result.
    Command(IoCommand),
    /// A part of a client's request: its number, the operation of its plan.
    Part(usize, usize),
    /// The reading half of a copy.
    CopyRead(usize, usize),
}

/// Kinds of IO that a script can hold back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    /// A client's reads.
    Read,
    /// A client's writes, and the writing half of copies.
    Write,
    /// The reading half of copies.
    CopyRead,
    /// Flushes.
    Flush,
    /// Blocks of the log.
    Log,
    /// Pages of the trees.
    Page,
    /// Superblocks.
    Super,
    /// The writing half of folds.
    Fold,
    /// Anything else.
    Other,
}

fn class(action: &Action, origin: &Origin) -> Class {
    match (action, origin) {
        (Action::Flush, _) => Class::Flush,
        (Action::Read { .. }, Origin::Part(..)) => Class::Read,
        (_, Origin::CopyRead(..)) => Class::CopyRead,
        (Action::Write { .. }, Origin::Part(..)) => Class::Write,
        (_, Origin::Command(IoCommand { op: IoOp::Write { buffer, .. }, .. })) => {
            let bytes = buffer.as_bytes();
            if is_superblock(bytes) {
                Class::Super
            } else if bytes.starts_with(b"BDwl") {
                Class::Log
            } else if is_metadata(bytes) {
                Class::Page
            } else {
                Class::Fold
            }
        }
        _ => Class::Other,
    }
}

/// The events of a history, recorded only on request.
#[derive(Debug, Default)]
pub struct Trace {
    lines: Option<Vec<String>>,
    step: u64,
}

impl Trace {
    /// Creates a trace that records its events.
    #[must_use]
    pub fn kept() -> Self {
        Self { lines: Some(Vec::new()), step: 0 }
    }

    /// Notes an event.
    pub fn note(&mut self, line: impl FnOnce() -> String) {
        self.step += 1;
        if let Some(lines) = &mut self.lines {
            lines.push(format!("{:>6} {}", self.step, line()));
        }
    }

    /// The events so far.
    #[must_use]
    pub fn lines(&self) -> &[String] {
        self.lines.as_deref().unwrap_or_default()
    }
}

/// See the module.
#[derive(Debug)]
pub struct Core {
    /// Decides everything.
    pub random: fastrand::Rng,
    /// The kind of history.
    pub profile: Profile,
    /// The devices.
    pub disks: Vec<Disk>,
    /// The extents that each of them has in the pool.
    pub extents: Vec<u64>,
    /// The same as the device table had them last: fewer while a device grows.
    pub recorded: Vec<u64>,
    /// Devices that have left the pool.
    pub gone: BTreeSet<usize>,
    /// The bytes of metadata units.
    pub contents: Contents,
    /// The oracle, with the promises to clients.
    pub oracle: Oracle,
    /// The covered situations.
    pub marks: Marks,
    /// The delta ring's memory.
    pub ring: Arc<Ring>,
    /// Images of it from earlier openings.
    pub old_rings: Vec<Vec<u64>>,
    /// Identity of the host's boot.
    pub boot: u64,
    /// Identity of the pool.
    pub pool_id: [u8; 16],
    /// The clock, in nanoseconds.
    pub now: u64,
    /// The trace of events.
    pub trace: Trace,
    /// A flush failed since the pool was opened.
    pub flush_failed: bool,
    /// An IO of the mapper itself failed since the pool was opened.
    pub metadata_failed: bool,
    /// Metadata was damaged on purpose: refusing is right, wrong data is not.
    pub damaged: bool,
    /// Device events so far: the boundaries at which a crash can be put.
    pub boundaries: u64,
    /// No faults but crashes from here on.
    pub calm: bool,
    /// The requesters of the operations in flight.
    pub origins: BTreeMap<u64, Origin>,
    /// The classes of operations that are held back at submission, until [`Core::release`].
    pub holding: Vec<Class>,
    held: BTreeMap<u64, Class>,
    /// Operations of folds.
    folds: BTreeSet<u64>,
    /// The next flush fails, and the device drops its volatile data.
    pub fail_flush: bool,
    next_token: u64,
}

impl Core {
    /// A host with empty devices.
    #[must_use]
    pub fn new(seed: u64, profile: Profile) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let units = u64::from(profile.extent_size) / UNIT;
        let disks = profile.devices.iter().map(|extents| Disk::new(extents * units)).collect();
        let extents = profile.devices.clone();
        let mut pool_id = [0; 16];
        random.fill(&mut pool_id);
        Self {
            boot: random.u64(1..),
            random,
            profile,
            disks,
            recorded: extents.clone(),
            extents,
            gone: BTreeSet::new(),
            contents: Contents::default(),
            oracle: Oracle::default(),
            marks: Marks::default(),
            ring: Ring::of([]),
            old_rings: Vec::new(),
            pool_id,
            now: 1,
            trace: Trace::default(),
            flush_failed: false,
            metadata_failed: false,
            damaged: false,
            boundaries: 0,
            calm: false,
            origins: BTreeMap::new(),
            holding: Vec::new(),
            held: BTreeMap::new(),
            folds: BTreeSet::new(),
            fail_flush: false,
            next_token: 0,
        }
    }

    /// Whether something of this probability happens now.
    pub fn chance(&mut self, probability: f64) -> bool {
        probability > 0.0 && self.random.f64() < probability
    }

    /// The boot's identity as the mapper takes it.
    #[must_use]
    pub fn boot_id(&self) -> [u8; 16] {
        let mut id = [0x42; 16];
        id[..8].copy_from_slice(&self.boot.to_le_bytes());
        id
    }

    /// Hands an operation to a device.
    pub fn submit(&mut self, device: DeviceIndex, action: Action, origin: Origin, data: bool) {
        self.next_token += 1;
        let token = self.next_token;
        self.trace.note(|| format!("submit {token} dev{device} {} {origin:?}", show(&action)));
        let class = class(&action, &origin);
        if self.holding.contains(&class) {
            self.held.insert(token, class);
        }
        self.origins.insert(token, origin);
        self.check_place(device, &action);
        self.disks[usize::from(device.0)].submit(token, action, data);
    }

    /// Releases held back operations of a class.
    pub fn release(&mut self, class: Class) {
        self.held.retain(|_, held| *held != class);
    }

    /// Releases all operations, and holds none back from here on.
    pub fn release_all(&mut self) {
        self.holding.clear();
        self.held.clear();
    }

    /// Releases one held back operation, counted from the oldest.
    pub fn release_held(&mut self, number: usize) {
        if let Some(token) = self.held.keys().nth(number).copied() {
            self.held.remove(&token);
        }
    }

    /// Makes the devices execute the held back operations, without an answer.
    pub fn execute_held(&mut self) {
        for disk in &mut self.disks {
            for at in 0..disk.flights().len() {
                if self.held.contains_key(&disk.flights()[at].token) {
                    disk.execute(at, 0);
                }
            }
        }
    }

    /// Cancels the held back operations: its owner dies before it is sent.
    pub fn forget_held(&mut self) {
        if let Some((&first, _)) = self.held.first_key_value() {
            for disk in &mut self.disks {
                disk.forget_since(first);
            }
        }
    }

    /// Whether an operation may be answered now.
    fn may(&self, device: usize, at: usize) -> bool {
        let disk = &self.disks[device];
        disk.ready(at) && !self.held.contains_key(&disk.flights()[at].token)
    }

    /// The token that the next operation will get.
    #[must_use]
    pub fn next_token(&self) -> u64 {
        self.next_token + 1
    }

    /// Hands a command of the mapper to its device.
    pub fn submit_command(&mut self, command: IoCommand) {
        let action = match &command.op {
            IoOp::Fence => Action::Fence,
            IoOp::Flush => Action::Flush,
            IoOp::Read { offset, buffer } => {
                let count = buffer.as_bytes().len() as u64 / UNIT;
                Action::Read { start: offset / UNIT, count }
            }
            IoOp::Write { offset, buffer, fua } => {
                let values = self.contents.intern_all(buffer.as_bytes());
                if is_superblock(buffer.as_bytes()) {
                    self.marks.hit(Mark::CheckpointWritten);
                }
                Action::Write { start: offset / UNIT, values, fua: *fua }
            }
            IoOp::Discard { offset, len } => {
                Action::Discard { start: offset / UNIT, count: len / UNIT }
            }
        };
        self.submit(command.device, action, Origin::Command(command), false);
    }

    /// The same for one of an open pool, which may be of a fold: that moves clients' data.
    pub fn submit_of_engine(&mut self, command: IoCommand) {
        let of_fold = match &command.op {
            IoOp::Read { .. } => true,
            IoOp::Write { buffer, .. } => !is_metadata(buffer.as_bytes()),
            _ => false,
        };
        let token = self.next_token();
        self.submit_command(command);
        if of_fold {
            self.folds.insert(token);
            self.disks.iter_mut().for_each(|disk| disk.is_data(token));
        }
    }

    /// Whether any device has something to do.
    #[must_use]
    pub fn has_flights(&self) -> bool {
        (0..self.disks.len())
            .any(|device| (0..self.disks[device].flights().len()).any(|at| self.may(device, at)))
    }

    /// IO of dead owners that has still to land.
    #[must_use]
    pub fn dead(&self) -> usize {
        self.disks.iter().map(Disk::dead).sum()
    }

    /// Executes one operation of a dead owner.
    pub fn land(&mut self, opening: bool) {
        let candidates: Vec<usize> =
            (0..self.disks.len()).filter(|at| self.disks[*at].dead() > 0).collect();
        if candidates.is_empty() {
            return;
        }
        let at = candidates[self.random.usize(..candidates.len())];
        self.boundaries += 1;
        if self.disks[at].land(&mut self.random) {
            self.marks.hit(Mark::DeadWriteLanded);
            if opening {
                self.marks.hit(Mark::DeadWriteWhileOpening);
            }
        }
        self.trace.note(|| format!("dead IO lands on dev{at}"));
    }

    /// One event of device IO. Returns an answer, unless the event was the doing without it.
    pub fn device_event(&mut self) -> Option<(Origin, Answered)> {
        let (device, at) = self.pick()?;
        self.boundaries += 1;
        let late = self.profile.late;
        if self.chance(late) {
            let garbage = self.random.u64(..);
            self.disks[device].execute(at, garbage);
            self.marks.hit(Mark::SlowIo);
            return None;
        }
        let fault = self.fault(device, at);
        let answered = self.disks[device].answer(at, fault, &mut self.random);
        self.count_fault(&answered);
        self.trace.note(|| {
            format!("answer {} {} {:?}", answered.token, show(&answered.action), answered.fault)
        });
        let origin = self.origins.remove(&answered.token)?;
        Some((origin, answered))
    }

    fn pick(&mut self) -> Option<(usize, usize)> {
        let first = self.random.usize(..self.disks.len());
        for step in 0..self.disks.len() {
            let device = (first + step) % self.disks.len();
            let count = self.disks[device].flights().len();
            if count == 0 {
                continue;
            }
            let start = self.random.usize(..count);
            let ready =
                (0..count).map(|step| (start + step) % count).find(|at| self.may(device, *at));
            if let Some(at) = ready {
                return Some((device, at));
            }
            if (0..count).any(|at| !self.disks[device].ready(at)) {
                self.marks.hit(Mark::FenceWaited);
            }
        }
        None
    }

    /// Fills a command's buffer with the result of a read, and gives the mapper's view of the
    /// result.
    pub fn settle_command(
        &self,
        command: &mut IoCommand,
        answered: &Answered,
    ) -> Result<(), IoError> {
        if let IoOp::Read { buffer, .. } = &mut command.op {
            let bytes = buffer.as_bytes_mut();
            for (unit, value) in bytes.chunks_mut(UNIT_BYTES).zip(&answered.values) {
                self.contents.bytes(*value, unit);
            }
        }
        submitter_result(answered.fault)
    }
}

/// Returns the result that the submitter receives.
pub fn submitter_result(fault: Fault) -> Result<(), IoError> {
    match fault {
        Fault::None | Fault::Dropped | Fault::Misdirected(_) => Ok(()),
        Fault::Media => Err(IoError::Media),
        Fault::NoSpace => Err(IoError::NoSpace),
    }
}

fn is_metadata(bytes: &[u8]) -> bool {
    is_superblock(bytes) || bytes.starts_with(b"BDwl") || bytes.starts_with(b"BDpg")
}

fn is_superblock(bytes: &[u8]) -> bool {
    bytes.starts_with(b"BLOCKDsb")
}

fn show(action: &Action) -> String {
    match action {
        Action::Read { start, count } => format!("read {start}+{count}"),
        Action::Write { start, values, fua } => {
            let fua = if *fua { " fua" } else { "" };
            format!("write {start}+{}{fua} {:?}", values.len(), values.first())
        }
        Action::Discard { start, count } => format!("discard {start}+{count}"),
        Action::Flush => "flush".into(),
        Action::Fence => "fence".into(),
    }
}

/// A position in units as bytes.
#[must_use]
pub fn bytes(units: usize) -> u64 {
    units as u64 * UNIT
}

/// A position in bytes as units.
#[must_use]
pub fn units(bytes: u64) -> usize {
    index(bytes / UNIT)
}
