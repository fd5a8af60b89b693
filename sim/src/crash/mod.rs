//! Crashes at each boundary of device IO of traces written by hand, with the choices of writes that
//! a device's cache keeps, and again at each boundary of the recovery from them.
//!
//! One request is under way at a time, so that the allowed contents afterwards are known exactly: a
//! unit of a volume has its content of the last state known to be durable or of any later one, and
//! after the death of the process its content before or after the interrupted operation.

pub mod memory;
pub mod record;
pub mod script;

mod past;

use std::fmt;
use std::ops::RangeInclusive;
use std::time::Instant;

use crate::rig::{Event, Journal, Media, Rig};
use crate::sim::enumerate::{Counts, Depth};
use crate::sim::runner::clock;

use past::{Keep, Past};
use record::{Recording, State, UNIT, record};
use script::Script;

/// Single writes that are kept or torn at a boundary, at the most.
const SINGLES: usize = 48;

/// A violation, and its place.
#[derive(Clone, Debug)]
pub struct Finding {
    /// The trace.
    pub script: &'static str,
    /// Events of device IO before the crash.
    pub boundary: usize,
    /// The description.
    pub text: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, boundary {}: {}", self.script, self.boundary, self.text)
    }
}

/// A run over one script.
struct Run<'a> {
    recording: &'a Recording,
    depth: Depth,
    until: Instant,
    counts: &'a mut Counts,
    random: fastrand::Rng,
    /// Bytes of a volume that are never of two states.
    unit: usize,
}

/// A crash: its name, and the rest of the host.
struct Crash {
    name: String,
    /// The contents of the devices, and the writes that may be lost.
    past: Past,
    /// The ring, after the death of the process only.
    ring: Option<Vec<u64>>,
    /// The host's boot: another one after each loss of power.
    boot: u8,
    /// States that may show; after a death of the process, and after a loss of power.
    killed: RangeInclusive<usize>,
    lost: RangeInclusive<usize>,
}

/// Enumerates the crashes of a script, or those at one boundary of it. `false`: time ran out.
pub fn enumerate(
    script: &Script,
    only: Option<usize>,
    depth: Depth,
    seed: u64,
    until: Instant,
    counts: &mut Counts,
) -> Result<bool, Finding> {
    let finding = |boundary, text| Finding { script: script.name, boundary, text };
    let recording = record(script, seed).map_err(|text| finding(0, text))?;
    counts.traces += 1;
    let boundaries = only.map_or(0..=recording.events.len(), |at| at..=at);
    let random = fastrand::Rng::with_seed(seed);
    let mut run = Run { recording: &recording, depth, until, counts, random, unit: UNIT };
    for boundary in boundaries {
        run.counts.boundaries += 1;
        run.random = fastrand::Rng::with_seed(seed ^ boundary as u64);
        match run.boundary(boundary) {
            Ok(true) => {}
            Ok(false) => return Ok(false),
            Err(text) => return Err(finding(boundary, text)),
        }
    }
    Ok(true)
}

impl Run<'_> {
    /// Whether there was time for all crashes at a boundary.
    fn boundary(&mut self, boundary: usize) -> Result<bool, String> {
        let mut crashes = self.kills(boundary);
        crashes.extend(self.losses(boundary));
        for crash in crashes {
            if clock() > self.until {
                return Ok(false);
            }
            self.counts.crash_points += 1;
            let every = self.depth.nested_every;
            let nested = every > 0 && self.counts.crash_points.is_multiple_of(every);
            self.recover(&crash, nested)?;
        }
        Ok(true)
    }

    /// The state that the event with this number led to, once it is answered.
    fn step_of(&self, event: usize) -> usize {
        let ends = &self.recording.ends;
        ends.iter().position(|end| *end > event).unwrap_or(ends.len() - 1)
    }

    /// The states that a loss of power may show at this event.
    fn after_loss(&self, boundary: usize) -> RangeInclusive<usize> {
        let answered = self.recording.ends.iter().rposition(|end| *end <= boundary).unwrap_or(0);
        self.recording.durable[answered]..=self.step_of(boundary)
    }

    /// The process dies: just after the last event, and just before the next one.
    fn kills(&self, boundary: usize) -> Vec<Crash> {
        let recording = self.recording;
        let crash = |name: &str, event: Option<usize>| {
            let image = event.map_or(&recording.last_image, |event| &recording.images[event]);
            let last = recording.states.len() - 1;
            let after = event.map_or(last, |event| self.step_of(event));
            let before = if event.is_some() { after.saturating_sub(1) } else { after };
            Crash {
                name: format!("death {name}"),
                past: Past::of(&recording.base, &recording.events[..boundary]),
                ring: Some(image.clone()),
                boot: 1,
                killed: before..=after,
                lost: self.after_loss(boundary),
            }
        };
        let mut all = Vec::new();
        if boundary > 0 {
            all.push(crash("after the event", Some(boundary - 1)));
        }
        let next = (boundary < recording.events.len()).then_some(boundary);
        all.push(crash("before the next event", next));
        all
    }

    fn losses(&mut self, boundary: usize) -> Vec<Crash> {
        let recording = self.recording;
        let past = Past::of(&recording.base, &recording.events[..boundary]);
        let mut all = Vec::new();
        for keep in keeps(&past, self.depth.subsets, &mut self.random) {
            // A torn write was in flight: not answered.
            let torn = keep.tears_last() && boundary > 0;
            let states = self.after_loss(boundary - usize::from(torn));
            all.push(Crash {
                name: format!("{keep:?}"),
                past: past.settled(&keep),
                ring: None,
                boot: 2,
                killed: states.clone(),
                lost: states,
            });
        }
        all
    }

    /// Opens after a crash and compares; with `nested` crashes at each event of that as well.
    fn recover(&mut self, crash: &Crash, nested: bool) -> Result<(), String> {
        let ring = record::ring(crash.ring.as_deref());
        let journal = nested.then(|| Journal { ring: Some(ring.clone()), ..Journal::default() });
        let media = Media { devices: crash.past.now(), journal };
        let id = 1000 + self.counts.recoveries;
        let how = record::options(&media, crash.boot, id, &ring);
        let name = &crash.name;
        // A pool after a crash is sound for readers that do not open it.
        media.inspect().map_err(|text| format!("{name}: {text}"))?;
        let mut rig = Rig::open_with(media, how)
            .map_err(|(error, _)| format!("{name}: not opened: {error}"))?;
        let journal = rig.media.journal.take();
        self.compare(&mut rig, &crash.killed).map_err(|text| format!("{name}: {text}"))?;
        let Some(journal) = journal else { return Ok(()) };
        for event in 0..journal.events.len() {
            if clock() > self.until {
                return Ok(());
            }
            for again in self.nested(crash, &journal, event + 1) {
                self.counts.nested += 1;
                self.recover(&again, false)
                    .map_err(|text| format!("{name}, then opening event {event}: {text}"))?;
            }
        }
        Ok(())
    }

    /// The crashes after this many events of an opening.
    fn nested(&mut self, crash: &Crash, journal: &Journal, events: usize) -> Vec<Crash> {
        let past = crash.past.then(&journal.events[..events]);
        let mut all: Vec<Crash> = keeps(&past, 0, &mut self.random)
            .into_iter()
            .map(|keep| Crash {
                name: format!("{keep:?}"),
                past: past.settled(&keep),
                ring: None,
                boot: crash.boot + 1,
                killed: crash.lost.clone(),
                lost: crash.lost.clone(),
            })
            .collect();
        all.push(Crash {
            name: "death".into(),
            past,
            ring: journal.images.get(events - 1).cloned(),
            boot: crash.boot,
            killed: crash.killed.clone(),
            lost: crash.lost.clone(),
        });
        all
    }

    fn compare(&mut self, rig: &mut Rig, allowed: &RangeInclusive<usize>) -> Result<(), String> {
        let states = &self.recording.states[allowed.clone()];
        let held = contents(rig)?;
        let same_shape = |state: &&State| {
            state.len() == held.len()
                && state.iter().all(|(n, d)| held.get(n).is_some_and(|h| h.len() == d.len()))
        };
        if !states.iter().any(|state| same_shape(&state)) {
            let shape: Vec<_> = held.iter().map(|(name, data)| (name, data.len())).collect();
            return Err(format!("volumes {shape:?} are of no state of {allowed:?}"));
        }
        for (name, data) in &held {
            let same: Vec<&Vec<u8>> = states.iter().filter_map(|state| state.get(name)).collect();
            for (number, unit) in data.chunks(self.unit).enumerate() {
                let at = number * self.unit;
                if !same.iter().any(|d| d.get(at..at + unit.len()) == Some(unit)) {
                    return Err(format!("unit {number} of {name} is of no state of {allowed:?}"));
                }
            }
            self.counts.checks += (data.len() / self.unit) as u64;
        }
        rig.check()?;
        if rig.engine().fold_status().folded > 0 && contents(rig)? != held {
            return Err("folds after the opening have changed a volume".to_owned());
        }
        rig.media.inspect()?;
        self.counts.recoveries += 1;
        Ok(())
    }
}

/// The volumes of a pool.
fn contents(rig: &mut Rig) -> Result<State, String> {
    let mut held = State::new();
    for info in rig.engine().volumes() {
        let len = usize::try_from(info.size).unwrap_or(usize::MAX);
        let data = rig.read(info.id, 0, len).map_err(|error| error.to_string())?;
        held.insert(info.name, data);
    }
    Ok(held)
}

/// The choices of surviving writes: nothing, all, each write alone, whole and torn, the last one
/// torn over all others, and subsets.
fn keeps(past: &Past, subsets: usize, random: &mut fastrand::Rng) -> Vec<Keep> {
    let total = past.volatile();
    let mut all = vec![Keep::none(total)];
    if let Some(Event::Write { bytes, .. }) = past.last() {
        let units = bytes.len() / UNIT;
        let mask: Vec<bool> = (0..units).map(|_| random.bool()).collect();
        all.push(Keep::torn_last(vec![true; total], mask));
    }
    if total == 0 {
        return all;
    }
    all.push(Keep::chosen(vec![true; total]));
    let first = total.saturating_sub(SINGLES);
    for one in first..total {
        all.push(Keep::chosen((0..total).map(|at| at == one).collect()));
    }
    if total > 1 {
        for _ in 0..subsets.min(1 << total.min(16)) {
            all.push(Keep::chosen((0..total).map(|_| random.bool()).collect()));
        }
    }
    all
}
