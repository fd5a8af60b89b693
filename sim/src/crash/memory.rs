//! The same traces on persistent memory: writes of a device are stores to a memory that computes
//! which of its words a loss of power could leave, and a flush is a fence.

use blockd_pmem::media::{LANE_BYTES, Lanes, Media as _};
use blockd_pmem::recorder::Recorder;

use super::past::Past;
use super::record::{Recording, UNIT, record};
use super::script::Script;
use super::{Crash, Finding, Run};
use crate::rig::Event;
use crate::sim::enumerate::{Counts, Depth};

/// How the pool's writes reach the memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// Through a lane: a unit of a volume is never torn.
    Lanes,
    /// Plain stores: a unit of a volume may be torn by words, and the pool must stay sound.
    Plain,
    /// Plain stores that are expected to keep units whole. For tests, which must detect the fault.
    PlainButWhole,
    /// Without the fence of this number, counted from 0. For tests: to be noticed.
    WithoutFence(usize),
    /// Without any fence. For tests: to be noticed.
    WithoutFences,
}

/// The unit that is stored as a whole.
const WORD: usize = 8;
/// Images that are recovered from at each moment.
const TAKEN: usize = 2;
/// The same where a single fence is missing, which few images show.
const SEARCHED: usize = 40;

/// The devices, with a lane in front of each where there are lanes.
struct Memory {
    devices: Vec<Recorder>,
    front: usize,
    fences: usize,
    taken: usize,
}

impl Memory {
    fn new(recording: &Recording, way: Way) -> Result<Self, String> {
        let front = if way == Way::Lanes { LANE_BYTES } else { 0 };
        let front = usize::try_from(front).map_err(|error| error.to_string())?;
        let device = |content: &Vec<u8>| {
            let mut bytes = vec![0; front];
            bytes.extend_from_slice(content);
            Recorder::new(bytes)
        };
        let devices = recording.base.iter().map(device).collect();
        let taken = if matches!(way, Way::WithoutFence(_)) { SEARCHED } else { TAKEN };
        Ok(Self { devices, front, fences: 0, taken })
    }

    /// Carries out an event. Gives the device, and its moments from before to after.
    fn perform(&mut self, event: &Event, way: Way) -> Result<(usize, usize, usize), String> {
        let text = |error: blockd_pmem::media::MediaError| error.to_string();
        match event {
            Event::Write { device, at, bytes, fua } => {
                let place = (self.front + at) as u64;
                if way == Way::Lanes {
                    // Earlier stores are durable: their log is dropped.
                    let memory = Recorder::new(self.devices[*device].present());
                    let (lanes, _) = Lanes::open(memory.another_thread(), 0..LANE_BYTES)
                        .map_err(|error| error.to_string())?;
                    let before = memory.moment();
                    lanes.write(0, place, bytes).map_err(text)?;
                    self.devices[*device] = memory;
                    return Ok((*device, before, self.devices[*device].moment()));
                }
                let before = self.devices[*device].moment();
                self.devices[*device].write(place, bytes).map_err(text)?;
                if *fua {
                    self.fence(*device, way);
                }
                Ok((*device, before, self.devices[*device].moment()))
            }
            Event::Flush { device } => {
                let before = self.devices[*device].moment();
                self.fence(*device, way);
                Ok((*device, before, self.devices[*device].moment()))
            }
        }
    }

    fn fence(&mut self, device: usize, way: Way) {
        let number = self.fences;
        self.fences += 1;
        if way != Way::WithoutFences && way != Way::WithoutFence(number) {
            self.devices[device].fence();
        }
    }

    /// Returns possible contents of a device at a moment, after replay of its lane where it has
    /// one.
    fn images(&self, device: usize, moment: usize, seed: u64) -> Result<Vec<Vec<u8>>, String> {
        let images = self.devices[device].images(moment, 2 * self.taken, seed);
        let mut random = fastrand::Rng::with_seed(seed);
        let mut taken = Vec::new();
        for image in random.choose_multiple(images, self.taken) {
            taken.push(self.opened(image)?);
        }
        Ok(taken)
    }

    fn opened(&self, image: Vec<u8>) -> Result<Vec<u8>, String> {
        if self.front == 0 {
            return Ok(image);
        }
        let memory = Recorder::new(image);
        Lanes::open(memory.another_thread(), 0..LANE_BYTES).map_err(|error| error.to_string())?;
        Ok(memory.present().split_off(self.front))
    }
}

/// Loses power after each event of a script, and within each that goes through a lane. Gives how
/// many fences there were.
pub fn in_memory(
    script: &Script,
    way: Way,
    seed: u64,
    until: std::time::Instant,
    counts: &mut Counts,
) -> Result<usize, Finding> {
    let finding = |boundary, text| Finding { script: script.name, boundary, text };
    let recording = record(script, seed).map_err(|text| finding(0, text))?;
    let mut memory = Memory::new(&recording, way).map_err(|text| finding(0, text))?;
    let depth = Depth { subsets: 0, nested_every: 0 };
    let random = fastrand::Rng::with_seed(seed);
    let unit = if matches!(way, Way::Lanes | Way::PlainButWhole) { UNIT } else { WORD };
    let mut run = Run { recording: &recording, depth, until, counts, random, unit };
    for (number, event) in recording.events.iter().enumerate() {
        let failed = |text| finding(number, text);
        let (device, before, after) = memory.perform(event, way).map_err(failed)?;
        let within = before + (after - before) / 2;
        let moments = if way == Way::Lanes { vec![within, after] } else { vec![after] };
        for moment in moments {
            let done = usize::from(moment == after);
            let states = run.after_loss(number + done);
            let drawn = seed ^ ((number as u64) << 8 | moment as u64);
            for image in memory.images(device, moment, drawn).map_err(failed)? {
                let mut devices = Vec::new();
                for (other, recorder) in memory.devices.iter().enumerate() {
                    devices.push(if other == device {
                        image.clone()
                    } else {
                        let lost = recorder.images(recorder.moment(), 0, drawn).swap_remove(0);
                        memory.opened(lost).map_err(failed)?
                    });
                }
                let crash = Crash {
                    name: format!("moment {moment} of {before} to {after}"),
                    past: Past::of(&devices, &[]),
                    ring: None,
                    boot: 2,
                    killed: states.clone(),
                    lost: states.clone(),
                };
                run.counts.crash_points += 1;
                run.recover(&crash, false).map_err(failed)?;
            }
        }
    }
    Ok(memory.fences)
}
