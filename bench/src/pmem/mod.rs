//! The copy engine for persistent memory on memory of this host, beside the bare instructions.
//!
//! Both sides map the same file, so that the same pages are written. They differ in the engine's
//! own work: the checks of a range, the routines that survive bad memory, lanes.

#[expect(unsafe_code, reason = "the bare instructions that the engine is held against")]
pub mod bare;

use std::fs::File;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use blockd_pmem::media::{BLOCK, LANE_BYTES, Lanes, Mapping, MappingOptions, Media};
use nix::sys::memfd::{MFdFlags, memfd_create};
use serde_json::{Value, json};

use crate::stats::{Ratio, Verdict, median};
use bare::{Bare, thread_ns};

/// Bytes of a source that stays in a processor's second cache.
const SOURCE: usize = 1 << 20;
/// Large requests.
const LARGE: usize = 64 << 10;
/// Eight blocks.
const EIGHT: usize = 8 * BLOCK;
/// Lanes lie in front of the data area.
const LANES: u64 = 2 << 20;

/// How much is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Effort {
    /// Bytes that are written and read.
    pub bytes: u64,
    /// Bytes moved in one run. A pair is two runs of each side.
    pub moved: usize,
    /// Interleaved pairs.
    pub pairs: usize,
}

/// One line of the table.
#[derive(Clone, PartialEq, Debug)]
pub struct Line {
    /// The name of the measurement.
    pub name: &'static str,
    /// Nanoseconds for one operation, the engine's.
    pub ours: f64,
    /// The same, of the bare instructions.
    pub bare: f64,
    /// Time of the engine for each time of the bare instructions.
    pub ratio: Ratio,
    /// At most so much, where something was promised.
    pub most: Option<f64>,
}

impl Line {
    /// The verdict. An interval that is wholly on one side resolves it.
    #[must_use]
    pub fn verdict(&self) -> Option<Verdict> {
        let most = self.most?;
        Some(if self.ratio.high <= most {
            Verdict::Met
        } else if self.ratio.low > most {
            Verdict::NotMet
        } else {
            Verdict::NotResolved
        })
    }

    /// Returns the results as JSON.
    #[must_use]
    pub fn to_json(&self) -> Value {
        json!({
            "name": self.name, "ours_ns": self.ours, "bare_ns": self.bare,
            "ratio": self.ratio.median, "low": self.ratio.low, "high": self.ratio.high,
            "most": self.most, "verdict": self.verdict().map(|verdict| verdict.to_string()),
        })
    }
}

/// The file, mapped by both sides, and the copied data.
struct Rig {
    map: Mapping,
    lanes: Lanes<Arc<Mapping>>,
    bare: Bare,
    source: Vec<u8>,
    to: Vec<u8>,
    bytes: u64,
    moved: usize,
}

/// One kind of work: bytes of a request, how many share a fence, the engine's and the bare way.
struct Case {
    name: &'static str,
    size: usize,
    batch: usize,
    most: Option<f64>,
    ours: fn(&mut Rig, u64, usize) -> Result<()>,
    bare: fn(&mut Rig, u64, usize),
}

fn write(rig: &mut Rig, at: u64, from: usize, size: usize) -> Result<()> {
    Ok(rig.map.write(at, &rig.source[from..from + size])?)
}

/// Durable when it comes back.
fn write_whole(rig: &mut Rig, at: u64, from: usize, size: usize) -> Result<()> {
    Ok(rig.lanes.write(0, at, &rig.source[from..from + size])?)
}

/// Where the blocks go that are written at once: none of them beside another.
fn apart(rig: &Rig, at: u64, index: usize) -> u64 {
    LANES + (at - LANES + index as u64 * rig.bytes / 8) % rig.bytes
}

const CASES: [Case; 9] = [
    Case {
        name: "control: write 4 KiB, bare beside bare",
        size: BLOCK,
        batch: 1,
        most: None,
        ours: |rig, at, from| {
            rig.bare.write(at, &rig.source[from..from + BLOCK]);
            rig.bare.fence();
            Ok(())
        },
        bare: |rig, at, from| {
            rig.bare.write(at, &rig.source[from..from + BLOCK]);
            rig.bare.fence();
        },
    },
    Case {
        name: "write 4 KiB, random, atomicity none",
        size: BLOCK,
        batch: 1,
        most: Some(1.1),
        ours: |rig, at, from| {
            write(rig, at, from, BLOCK)?;
            rig.map.fence();
            Ok(())
        },
        bare: |rig, at, from| {
            rig.bare.write(at, &rig.source[from..from + BLOCK]);
            rig.bare.fence();
        },
    },
    Case {
        name: "write 4 KiB, random, atomicity block",
        size: BLOCK,
        batch: 1,
        most: Some(2.3),
        ours: |rig, at, from| write_whole(rig, at, from, BLOCK),
        bare: |rig, at, from| {
            rig.bare.write(at, &rig.source[from..from + BLOCK]);
            rig.bare.fence();
        },
    },
    Case {
        name: "write 4 KiB, random, atomicity block, 8 at once",
        size: EIGHT,
        batch: 1,
        most: None,
        ours: |rig, at, from| {
            let part = |index: usize| &rig.source[from + index * BLOCK..][..BLOCK];
            let writes: [(u64, &[u8]); 8] =
                std::array::from_fn(|index| (apart(rig, at, index), part(index)));
            Ok(rig.lanes.write_each(0, &writes)?)
        },
        bare: |rig, at, from| {
            for index in 0..8 {
                let part = &rig.source[from + index * BLOCK..][..BLOCK];
                rig.bare.write(apart(rig, at, index), part);
                rig.bare.fence();
            }
        },
    },
    Case {
        name: "read 4 KiB, random",
        size: BLOCK,
        batch: 1,
        most: Some(1.1),
        ours: |rig, at, from| Ok(rig.map.read(at, &mut rig.to[from..from + BLOCK])?),
        bare: |rig, at, from| rig.bare.read(at, &mut rig.to[from..from + BLOCK]),
    },
    Case {
        name: "write 4 KiB, random, atomicity none, a fence for 32",
        size: BLOCK,
        batch: 32,
        most: None,
        ours: |rig, at, from| write(rig, at, from, BLOCK),
        bare: |rig, at, from| rig.bare.write(at, &rig.source[from..from + BLOCK]),
    },
    Case {
        name: "write 64 KiB, random, atomicity none",
        size: LARGE,
        batch: 1,
        most: None,
        ours: |rig, at, from| {
            write(rig, at, from, LARGE)?;
            rig.map.fence();
            Ok(())
        },
        bare: |rig, at, from| {
            rig.bare.write(at, &rig.source[from..from + LARGE]);
            rig.bare.fence();
        },
    },
    Case {
        name: "write 64 KiB, random, atomicity block",
        size: LARGE,
        batch: 1,
        most: None,
        ours: |rig, at, from| write_whole(rig, at, from, LARGE),
        bare: |rig, at, from| {
            rig.bare.write(at, &rig.source[from..from + LARGE]);
            rig.bare.fence();
        },
    },
    Case {
        name: "read 64 KiB, random",
        size: LARGE,
        batch: 1,
        most: None,
        ours: |rig, at, from| Ok(rig.map.read(at, &mut rig.to[from..from + LARGE])?),
        bare: |rig, at, from| rig.bare.read(at, &mut rig.to[from..from + LARGE]),
    },
];

impl Rig {
    fn new(effort: Effort) -> Result<Self> {
        ensure!(effort.bytes >= (1 << 20), "{} bytes are too few to be random in", effort.bytes);
        let file = File::from(memfd_create(c"blockd-bench-pmem", MFdFlags::MFD_CLOEXEC)?);
        let file = Arc::new(file);
        let len = LANES + effort.bytes;
        let bytes = i64::try_from(len)?;
        nix::fcntl::fallocate(&*file, nix::fcntl::FallocateFlags::empty(), 0, bytes)
            .with_context(|| format!("{bytes} bytes of memory"))?;
        let open = || Mapping::from_file(Arc::clone(&file), &MappingOptions::default());
        let map = open()?;
        let lanes = Lanes::format(Arc::new(open()?), 0..LANE_BYTES, 1)?;
        let bare = Bare::new(&file, usize::try_from(len)?)?;
        let source = (0..=255).cycle().take(SOURCE).collect();
        let (bytes, moved) = (effort.bytes, effort.moved);
        let rig = Self { map, lanes, bare, source, to: vec![1; SOURCE], bytes, moved };
        // Pages are there, and in the tables of each mapping, before anything is measured.
        let mut buffer = vec![0; SOURCE];
        for at in (0..len).step_by(SOURCE) {
            rig.map.zero(at, SOURCE as u64)?;
            rig.lanes.media().read(at, &mut buffer)?;
            rig.bare.read(at, &mut buffer);
            rig.bare.write(at, &buffer);
        }
        Ok(rig)
    }

    /// Nanoseconds for an operation. Both sides go to the same places in the same order.
    fn run(
        &mut self,
        case: &Case,
        seed: u64,
        one: impl Fn(&mut Self, u64, usize) -> Result<()>,
    ) -> Result<f64> {
        let mut random = fastrand::Rng::with_seed(seed);
        let places = self.bytes / case.size as u64;
        let sources = SOURCE / case.size;
        let order: Vec<(u64, usize)> = (0..self.moved / case.size)
            .map(|_| {
                let at = LANES + random.u64(0..places) * case.size as u64;
                (at, random.usize(0..sources) * case.size)
            })
            .collect();
        // Time of this thread: others that run meanwhile are no part of it. It never waits.
        let before = thread_ns()?;
        for batch in order.chunks(case.batch) {
            for &(at, from) in batch {
                one(self, at, from)?;
            }
            if case.batch > 1 {
                self.bare.fence();
            }
        }
        Ok((thread_ns()? - before) as f64 / order.len() as f64)
    }

    fn line(&mut self, case: &Case, pairs: usize) -> Result<Line> {
        let (mut ours, mut bare, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        // The first pair warms up.
        for pair in 0..=pairs as u64 {
            let our_side = |rig: &mut Self| rig.run(case, pair, case.ours);
            let bare_side = |rig: &mut Self| {
                rig.run(case, pair, |rig, at, from| {
                    (case.bare)(rig, at, from);
                    Ok(())
                })
            };
            // The second run finds its addresses in the tables of the first: each side is second
            // once.
            let first = our_side(self)?;
            let other = f64::midpoint(bare_side(self)?, bare_side(self)?);
            let one = f64::midpoint(first, our_side(self)?);
            if pair > 0 {
                ours.push(one);
                bare.push(other);
                ratios.push(one / other);
            }
        }
        Ok(Line {
            name: case.name,
            ours: median(&ours).context("no pairs")?,
            bare: median(&bare).context("no pairs")?,
            ratio: Ratio::of(&ratios).context("no pairs")?,
            most: case.most,
        })
    }
}

/// Measures everything, once.
///
/// # Errors
/// The memory cannot be allocated.
pub fn measure(effort: Effort) -> Result<Vec<Line>> {
    let mut rig = Rig::new(effort)?;
    CASES.iter().map(|case| rig.line(case, effort.pairs)).collect()
}

/// Prints the table.
pub fn print(lines: &[Line]) {
    println!("\n| engine, one thread | ours ns | bare ns | ours/bare | at most | |");
    println!("|---|---:|---:|---|---:|---|");
    for line in lines {
        println!(
            "| {} | {:.0} | {:.0} | {} | {} | {} |",
            line.name,
            line.ours,
            line.bare,
            line.ratio,
            line.most.map_or_else(|| "-".to_owned(), |most| most.to_string()),
            line.verdict().map_or_else(|| "-".to_owned(), |verdict| verdict.to_string()),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_is_held_against_the_most_that_was_promised() {
        let line = |low, high, most| Line {
            name: "a",
            ours: 1.0,
            bare: 1.0,
            ratio: Ratio { median: 1.0, low, high },
            most,
        };
        assert_eq!(line(1.0, 1.1, Some(1.1)).verdict(), Some(Verdict::Met));
        assert_eq!(line(1.2, 1.3, Some(1.1)).verdict(), Some(Verdict::NotMet));
        assert_eq!(line(1.0, 1.2, Some(1.1)).verdict(), Some(Verdict::NotResolved));
        assert_eq!(line(1.0, 1.2, None).verdict(), None);
    }

    #[test]
    fn every_case_runs_and_both_sides_do_the_same() {
        let effort = Effort { bytes: 4 << 20, moved: 1 << 20, pairs: 1 };
        let lines = measure(effort).unwrap();
        assert_eq!(lines.len(), CASES.len());
        let mut rig = Rig::new(effort).unwrap();
        let size = 4 * BLOCK;
        let one_place = |case: &&Case| case.name.starts_with("write") && case.size != EIGHT;
        for case in CASES.iter().filter(one_place) {
            let (mut by_us, mut by_bare) = (vec![0; case.size], vec![0; case.size]);
            (case.ours)(&mut rig, LANES, size.next_multiple_of(case.size)).unwrap();
            rig.bare.read(LANES, &mut by_us);
            rig.map.zero(LANES, case.size as u64).unwrap();
            (case.bare)(&mut rig, LANES, size.next_multiple_of(case.size));
            rig.map.read(LANES, &mut by_bare).unwrap();
            assert!(by_us == by_bare && by_us.iter().any(|byte| *byte != 0), "{}", case.name);
        }
    }
}
