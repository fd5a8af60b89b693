//! The pump: the mapper on a real file or device by one ring and one thread, beside fio.

pub mod driver;
pub mod fio;
pub mod pattern;
pub mod place;
mod print;
pub mod run;

use anyhow::{Context, Result, ensure};
use blockd_mapper::engine::Control;
use blockd_mapper::units::VolumeId;
use blockd_mapper::worker::Attachment;

use crate::cpu::clock_cost_ns;
use crate::ring::{Ring, SLOT_BYTES};
use crate::stats::{Ratio, median};

use driver::Driver;
use fio::{Job, Peer};
use pattern::Expected;
use place::Place;
use run::{Blocks, DEPTH, Figures, Work, run};

pub use print::{print, to_json};

/// A workload and its targets.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    /// The printed name.
    pub name: &'static str,
    job: Job,
    /// The least ratio to fio.
    pub target: Option<f64>,
}

/// Writes between two flushes.
const FLUSH_EACH: u64 = 16;

/// All workloads, in the order in which they are run: those on a filled volume first.
pub const WORKLOADS: [Workload; 5] = [
    workload("read", false, false, None, None),
    workload("overwrite", true, false, None, Some(0.95)),
    workload("overwrite, flush each 16", true, false, Some(FLUSH_EACH), None),
    workload("first write", true, true, None, Some(0.90)),
    workload("first write, flush each 16", true, true, Some(FLUSH_EACH), None),
];

const fn workload(
    name: &'static str,
    writes: bool,
    once: bool,
    flush_each: Option<u64>,
    target: Option<f64>,
) -> Workload {
    Workload { name, job: Job { writes, once, flush_each }, target }
}

/// How much is measured.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Bytes of the pool; the file has twice as many, the other half is fio's.
    pub size: u64,
    /// Seconds of each run.
    pub seconds: f64,
    /// Interleaved pairs of each workload.
    pub pairs: usize,
}

/// The results of one workload.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Which.
    pub workload: Workload,
    /// The pump's results, each round.
    pub runs: Vec<Figures>,
    /// IOPS of fio, each round.
    pub fio: Vec<f64>,
    /// Pump / fio.
    pub ratio: Ratio,
    /// Fio / fio, in the same rounds.
    pub control: Ratio,
}

impl Outcome {
    /// Median IOPS of the pump.
    #[must_use]
    pub fn iops(&self) -> f64 {
        let iops: Vec<f64> = self.runs.iter().map(|r| r.ops as f64 / r.seconds).collect();
        median(&iops).unwrap_or(0.0)
    }

    /// Median IOPS of fio.
    #[must_use]
    pub fn fio_iops(&self) -> f64 {
        median(&self.fio).unwrap_or(0.0)
    }
}

/// The results of the pump on one device.
#[derive(Clone, Debug)]
pub struct Results {
    /// The results of each workload.
    pub outcomes: Vec<Outcome>,
    /// Blocks read and compared after the pool was closed and opened again.
    pub verified: usize,
    /// The cost of two readings of the clock, in nanoseconds; subtracted from the times per
    /// operation.
    pub clock_ns: f64,
}

/// Runs every workload on a place that is `2 * effort.size` bytes large.
pub fn measure(place: &Place, effort: &Effort) -> Result<Results> {
    ensure!(effort.pairs > 0, "at least one pair");
    let mut bench = Bench::prepare(place, effort)?;
    let mut outcomes = Vec::new();
    for workload in WORKLOADS {
        // More pairs make the interval narrower; without a target there is nothing to resolve.
        let pairs = if workload.target.is_some() { effort.pairs } else { effort.pairs.min(9) };
        outcomes.push(bench.workload(workload, pairs)?);
    }
    let clock_ns = clock_cost_ns(bench.driver.clock);
    let verified = bench.verify_reopened(place, effort)?;
    Ok(Results { outcomes, verified, clock_ns })
}

/// A pool with one volume, and the peer beside it.
#[derive(Debug)]
struct Bench {
    driver: Driver,
    volume: VolumeId,
    attachment: Attachment,
    expected: Expected,
    /// Every block once, in random order.
    order: Vec<u32>,
    peer: Peer,
    seconds: f64,
    filled: bool,
    volumes: u32,
}

const POOL_NAME: &str = "pump";

impl Bench {
    fn prepare(place: &Place, effort: &Effort) -> Result<Self> {
        // Three quarters are the volume: the rest is log, reserve and pages of the map.
        let extent = u64::from(blockd_mapper::geometry::DEFAULT_EXTENT_SIZE);
        let volume_size = (effort.size / 4 * 3).next_multiple_of(extent);
        let blocks = u32::try_from(volume_size / u64::from(SLOT_BYTES))
            .context("volumes of up to 16 TiB")?;
        let mut ring = Ring::new(place.open()?, DEPTH)?;
        driver::create(&mut ring, POOL_NAME, effort.size)?;
        let (mut driver, _) = Driver::open(ring, POOL_NAME, effort.size)?;
        let volume = driver.create_volume("volume-0", volume_size)?;
        let attachment = driver.worker.attach(volume)?;
        let mut order: Vec<u32> = (0..blocks).collect();
        fastrand::Rng::with_seed(1).shuffle(&mut order);
        Ok(Self {
            driver,
            volume,
            attachment,
            expected: Expected::new(blocks as usize)?,
            order,
            peer: Peer {
                path: place.path.clone(),
                offset: effort.size,
                size: volume_size,
                direct: place.direct,
                seconds: effort.seconds,
            },
            seconds: effort.seconds,
            filled: false,
            volumes: 1,
        })
    }

    /// Rounds of pump, fio and fio; the order turns from round to round, so that a machine that
    /// slows down slows all three.
    fn workload(&mut self, workload: Workload, pairs: usize) -> Result<Outcome> {
        let (mut runs, mut fio, mut ratios, mut controls) = (vec![], vec![], vec![], vec![]);
        self.pump(workload, 0)?;
        for round in 0..pairs {
            let seed = round as u64 + 1;
            let (figures, first, second);
            if round % 2 == 0 {
                figures = self.pump(workload, seed)?;
                first = self.peer.run(workload.job, seed)?.iops;
                second = self.peer.run(workload.job, seed + 1000)?.iops;
            } else {
                second = self.peer.run(workload.job, seed + 1000)?.iops;
                first = self.peer.run(workload.job, seed)?.iops;
                figures = self.pump(workload, seed)?;
            }
            ratios.push(figures.ops as f64 / figures.seconds / first);
            controls.push(second / first);
            runs.push(figures);
            fio.push(first);
        }
        let (ratio, control) = (Ratio::of(&ratios), Ratio::of(&controls));
        Ok(Outcome {
            workload,
            runs,
            fio,
            ratio: ratio.context("no ratio")?,
            control: control.context("no control")?,
        })
    }

    /// One run of the pump, with the volume as the workload needs it.
    fn pump(&mut self, workload: Workload, seed: u64) -> Result<Figures> {
        if workload.job.once {
            self.new_volume()?;
        } else if !self.filled {
            self.fill()?;
        }
        let blocks = if workload.job.once {
            Blocks::Once(self.order.iter())
        } else {
            Blocks::Random(fastrand::Rng::with_seed(seed))
        };
        let work = Work {
            writes: workload.job.writes,
            blocks,
            flush_each: workload.job.flush_each,
            seconds: Some(self.seconds),
            thorough: false,
        };
        run(&mut self.driver, &self.attachment, &mut self.expected, work)
    }

    fn fill(&mut self) -> Result<()> {
        let order: Vec<u32> = (0..u32::try_from(self.expected.blocks())?).collect();
        let work = Work {
            writes: true,
            blocks: Blocks::Once(order.iter()),
            flush_each: None,
            seconds: None,
            thorough: false,
        };
        run(&mut self.driver, &self.attachment, &mut self.expected, work)?;
        // Reads and overwrites are measured with the map at rest.
        self.driver.control(Control::Checkpoint)?;
        self.filled = true;
        Ok(())
    }

    /// Puts an empty volume in the place of the present one.
    fn new_volume(&mut self) -> Result<()> {
        let size = self.attachment.size();
        self.driver.control(Control::Delete { volume: self.volume })?;
        // The extents of the former one are free when its end is in the map.
        self.driver.control(Control::Checkpoint)?;
        self.volume = self.driver.create_volume(&format!("volume-{}", self.volumes), size)?;
        let attachment = self.driver.worker.attach(self.volume)?;
        self.driver.worker.detach(std::mem::replace(&mut self.attachment, attachment));
        self.volumes += 1;
        self.expected.clear();
        self.filled = false;
        Ok(())
    }

    /// Closes the pool, opens it as another process would, and compares every byte of the volume.
    fn verify_reopened(mut self, place: &Place, effort: &Effort) -> Result<usize> {
        self.driver.worker.detach(self.attachment);
        // A new description: the lock of the old one must be gone for it.
        drop(self.driver.close()?);
        let ring = Ring::new(place.open()?, DEPTH)?;
        let (mut driver, report) = Driver::open(ring, POOL_NAME, effort.size)?;
        ensure!(report.was_clean, "the pool was closed and is not clean: {report:?}");
        let attachment = driver.worker.attach(self.volume)?;
        let work = Work {
            writes: false,
            blocks: Blocks::Once(self.order.iter()),
            flush_each: None,
            seconds: None,
            thorough: true,
        };
        let figures = run(&mut driver, &attachment, &mut self.expected, work)?;
        ensure!(figures.ops == self.order.len() as u64, "not every block was read");
        driver.worker.detach(attachment);
        drop(driver.close()?);
        Ok(self.order.len())
    }
}
