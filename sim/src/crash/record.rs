//! Runs a script once and keeps all of it: the operations of the devices, and the contents of the
//! volumes after each step.

use std::collections::BTreeMap;
use std::sync::Arc;

use blockd_mapper::engine::{Control, Outcome};
use blockd_mapper::open::OpenOptions;
use blockd_mapper::pool::Tuning;
use blockd_mapper::ring::{RingMemory, VecRingMemory, words_needed};
use blockd_mapper::units::VolumeId;

use crate::rig::{Event, Journal, Media, Request, Rig, image};

use super::script::{Do, Script};

/// Bytes of a unit: the unit that a device writes as a whole.
pub const UNIT: usize = 512;
const EXTENT: usize = 64 << 10;
const SLOTS: usize = 2;
const RING: u64 = 64;
/// Time between two looks at a device that leaves, and how often at the most.
const LOOK_NS: u64 = 100_000_000;
const PATIENCE: u32 = 1000;

/// The contents of the volumes, by name.
pub type State = BTreeMap<String, Vec<u8>>;

/// A script as it went.
#[derive(Debug)]
pub struct Recording {
    /// The devices before the first event.
    pub base: Vec<Vec<u8>>,
    /// The events of the devices.
    pub events: Vec<Event>,
    /// The ring at each event.
    pub images: Vec<Vec<u64>>,
    /// The ring at the end.
    pub last_image: Vec<u64>,
    /// Events until each state was answered; `states[0]` is the empty pool.
    pub ends: Vec<usize>,
    /// The volumes after each step.
    pub states: Vec<State>,
    /// The newest state that is durable once each state has been answered.
    pub durable: Vec<usize>,
}

/// A ring with these words, or an empty one.
#[must_use]
pub fn ring(words: Option<&[u64]>) -> Arc<dyn RingMemory> {
    let memory = VecRingMemory::new(SLOTS, RING);
    debug_assert_eq!(memory.words().len(), words_needed(SLOTS, RING));
    for (word, value) in memory.words().iter().zip(words.unwrap_or_default()) {
        word.store(*value, std::sync::atomic::Ordering::SeqCst);
    }
    Arc::new(memory)
}

/// How a pool is opened here.
#[must_use]
pub fn options(media: &Media, boot: u8, open_id: u64, ring: &Arc<dyn RingMemory>) -> OpenOptions {
    let tuning = Tuning {
        workers: SLOTS - 1,
        quantum: 2,
        spare_leaves: 32,
        max_leaves: 512,
        ..Tuning::default()
    };
    OpenOptions {
        ring: Some(Arc::clone(ring)),
        boot_id: [boot; 16],
        open_id,
        accept_loss: false,
        tuning,
        ..media.options()
    }
}

struct Recorder {
    rig: Rig,
    ids: BTreeMap<&'static str, VolumeId>,
    state: State,
    random: fastrand::Rng,
    recording: Recording,
    /// Folds up to the last step that was to fold.
    folded: u64,
}

/// Runs a script.
pub fn record(script: &Script, seed: u64) -> Result<Recording, String> {
    let sizes: Vec<usize> = script.devices.iter().map(|extents| extents * EXTENT).collect();
    let text = |error: &dyn std::fmt::Display| format!("{}: {error}", script.name);
    let media = Media::create_with(64 << 10, &sizes, Some(EXTENT as u64), script.composite)
        .map_err(|error| text(&error))?;
    let ring = ring(None);
    let how = options(&media, 1, 1, &ring);
    let mut rig = Rig::open_with(media, how).map_err(|(error, _)| text(&error))?;
    rig.media.journal = Some(Journal { ring: Some(Arc::clone(&ring)), ..Journal::default() });
    let recording = Recording {
        base: rig.media.devices.clone(),
        events: Vec::new(),
        images: Vec::new(),
        last_image: Vec::new(),
        ends: vec![0],
        states: vec![State::new()],
        durable: vec![0],
    };
    let (ids, state, random) = (BTreeMap::new(), State::new(), fastrand::Rng::with_seed(seed));
    let mut recorder = Recorder { rig, ids, state, random, recording, folded: 0 };
    for step in script.steps {
        recorder.step(*step).map_err(|error| text(&error))?;
    }
    let mut recording = recorder.recording;
    let journal = recorder.rig.media.journal.unwrap_or_default();
    (recording.events, recording.images) = (journal.events, journal.images);
    recording.last_image = image(&*ring);
    Ok(recording)
}

impl Recorder {
    fn step(&mut self, step: Do) -> Result<(), String> {
        if let Do::FlushEach(name, count) = step {
            for number in 0..count {
                self.step(Do::Write(name, number * 40, 8))?;
                self.step(Do::Flush(name))?;
            }
            return Ok(());
        }
        self.perform(step).map_err(|error| format!("{step:?}: {error}"))?;
        // A change of structure is durable on answer, and all that was answered before it.
        let durable = !matches!(
            step,
            Do::Write(..)
                | Do::Fua(..)
                | Do::Discard(..)
                | Do::Zeroes(..)
                | Do::FlushEach(..)
                | Do::Fold
        );
        let events = self.rig.media.journal.as_ref().map_or(0, |journal| journal.events.len());
        let before = self.recording.durable.last().copied().unwrap_or(0);
        // A FUA write behind durable states only is durable with them.
        let at = self.recording.states.len();
        let fua = matches!(step, Do::Fua(..)) && before + 1 == at;
        self.recording.states.push(self.state.clone());
        self.recording.ends.push(events);
        self.recording.durable.push(if durable || fua { at } else { before });
        Ok(())
    }

    fn perform(&mut self, step: Do) -> Result<(), String> {
        match step {
            Do::Write(name, at, len) => self.write(name, at, len, false),
            Do::Fua(name, at, len) => self.write(name, at, len, true),
            Do::Discard(name, at, len) => {
                let whole = (at.next_multiple_of(8) * UNIT, (at + len) / 8 * 8 * UNIT);
                self.request(name, at, Request::Discard { len: len * UNIT })?;
                self.data(name)?[whole.0..whole.1].fill(0);
                Ok(())
            }
            Do::Zeroes(name, at, len, unmap) => {
                self.request(name, at, Request::Zeroes { len: len * UNIT, unmap })?;
                self.data(name)?[at * UNIT..(at + len) * UNIT].fill(0);
                Ok(())
            }
            Do::Flush(name) => {
                let id = self.id(name)?;
                self.rig.flush(id).map_err(|error| error.to_string())
            }
            Do::Fold => {
                self.rig.check()?;
                let folded = self.rig.engine().fold_status().folded;
                let before = std::mem::replace(&mut self.folded, folded);
                if folded > before { Ok(()) } else { Err("nothing was folded".to_owned()) }
            }
            Do::Disable => {
                self.structure(step)?;
                self.rig.check()?;
                match self.rig.engine().fold_status().is_enabled {
                    true => Err("composite entries are still there".to_owned()),
                    false => Ok(()),
                }
            }
            Do::Leave(device) => self.empty(Control::RemoveDevice { device }),
            Do::Shrink(device, extents) => {
                self.empty(Control::ShrinkDevice { device, size: (extents * EXTENT) as u64 })
            }
            _ => self.structure(step),
        }
    }

    /// Has a device leave or shrink, and waits until it has.
    fn empty(&mut self, control: Control) -> Result<(), String> {
        self.rig.control(control).map_err(|error| error.to_string())?;
        let mut moved = 0;
        for _ in 0..PATIENCE {
            let status = self.rig.engine().evacuation_status();
            moved = moved.max(status.moved);
            match status.device {
                Some(_) => self.rig.pass(LOOK_NS),
                None if moved > 0 => return Ok(()),
                None => return Err("nothing was moved".to_owned()),
            }
        }
        Err(format!("it never ends: {:?}", self.rig.engine().evacuation_status()))
    }

    fn structure(&mut self, step: Do) -> Result<(), String> {
        let control = match step {
            Do::Create(name, units) => {
                self.state.insert(name.to_owned(), vec![0; units * UNIT]);
                let size = (units * UNIT) as u64;
                Control::Create { name: name.to_owned(), size, block_size: 512 }
            }
            Do::Snapshot(source, name) => {
                self.copy(source, name)?;
                Control::Snapshot { source: self.id(source)?, name: name.to_owned() }
            }
            Do::Group(members) => {
                for (source, name) in members {
                    self.copy(source, name)?;
                }
                let id = |(source, name): &(&str, &str)| Ok((self.id(source)?, (*name).to_owned()));
                Control::SnapshotGroup {
                    members: members.iter().map(id).collect::<Result<_, String>>()?,
                }
            }
            Do::LargeClone(source, name, units) => {
                self.copy(source, name)?;
                self.data(name)?.resize(units * UNIT, 0);
                let size = Some((units * UNIT) as u64);
                Control::Clone { source: self.id(source)?, name: name.to_owned(), size }
            }
            Do::CloneOf(source, name) => {
                self.copy(source, name)?;
                Control::Clone { source: self.id(source)?, name: name.to_owned(), size: None }
            }
            Do::Rollback(name, snapshot) => {
                self.copy(snapshot, name)?;
                Control::Rollback { volume: self.id(name)?, snapshot: self.id(snapshot)? }
            }
            Do::Reset(name, snapshot) => self.reset(name, snapshot)?,
            Do::Resize(name, units) => {
                self.data(name)?.resize(units * UNIT, 0);
                Control::Resize { volume: self.id(name)?, size: (units * UNIT) as u64 }
            }
            Do::Rename(name, to) => {
                let (data, id) = (self.data(name)?.clone(), self.id(name)?);
                self.state.remove(name);
                self.state.insert(to.to_owned(), data);
                self.ids.insert(to, id);
                Control::Rename { volume: id, name: to.to_owned() }
            }
            Do::Delete(name) => {
                self.state.remove(name);
                Control::Delete { volume: self.id(name)? }
            }
            Do::Enable => Control::SetComposite { enabled: true },
            Do::Disable => Control::SetComposite { enabled: false },
            _ => Control::Checkpoint,
        };
        let outcome = self.rig.control(control).map_err(|error| error.to_string())?;
        match (step, outcome) {
            (
                Do::Create(name, _)
                | Do::Snapshot(_, name)
                | Do::CloneOf(_, name)
                | Do::LargeClone(_, name, _),
                Outcome::Created(id),
            ) => {
                self.ids.insert(name, id);
            }
            (Do::Group(members), Outcome::CreatedGroup(ids)) => {
                self.ids.extend(members.iter().map(|(_, name)| *name).zip(ids));
            }
            _ => {}
        }
        Ok(())
    }

    fn reset(&mut self, name: &str, snapshot: &str) -> Result<Control, String> {
        let size = self.data(name)?.len();
        self.copy(snapshot, name)?;
        self.data(name)?.resize(size, 0);
        let (volume, snapshot) = (self.id(name)?, self.id(snapshot)?);
        Ok(Control::Reset { volume, snapshot, size: size as u64 })
    }

    fn write(&mut self, name: &str, at: usize, len: usize, fua: bool) -> Result<(), String> {
        let mut data = vec![0; len * UNIT];
        self.random.fill(&mut data);
        let done = self.request(name, at, Request::Write { data: &data, fua })?;
        self.data(name)?[at * UNIT..at * UNIT + done].copy_from_slice(&data[..done]);
        Ok(())
    }

    /// Returns how many bytes found room.
    fn request(&mut self, name: &str, at: usize, request: Request<'_>) -> Result<usize, String> {
        let id = self.id(name)?;
        let done = self.rig.request(id, (at * UNIT) as u64, request);
        let done = done.map_err(|error| error.to_string())?;
        match (request, done.stuck) {
            (Request::Write { .. }, _) | (_, None) => Ok(done.bytes),
            (_, Some(reason)) => Err(format!("stuck: {reason:?}")),
        }
    }

    fn copy(&mut self, from: &str, to: &str) -> Result<(), String> {
        let data = self.data(from)?.clone();
        self.state.insert(to.to_owned(), data);
        Ok(())
    }

    fn id(&self, name: &str) -> Result<VolumeId, String> {
        self.ids.get(name).copied().ok_or_else(|| format!("there is no {name}"))
    }

    fn data(&mut self, name: &str) -> Result<&mut Vec<u8>, String> {
        self.state.get_mut(name).ok_or_else(|| format!("there is no {name}"))
    }
}
