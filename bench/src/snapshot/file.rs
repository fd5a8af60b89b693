//! Time to take and to delete a snapshot while a volume is written, on a sparse file on a disk.
//! Log, pages and flushes are carried out; so are the writes that are stopped.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Context, Result, anyhow, bail};
use blockd_mapper::engine::Control;
use blockd_mapper::io::IoBuffer;
use blockd_mapper::plan::{Answer, OpKind, Plan, Step};
use blockd_mapper::worker::{Attachment, Worker};
use blockd_testkit::clock::Clock;

use super::{Places, largest, map, median, ms, take};
use crate::budgets::rig::{BLOCK, EXTENT, Media, Rig};
use crate::report::{Budget, Row};

/// Bytes that are mapped.
const SIZE: u64 = 100 << 30;
/// Snapshots that are taken and deleted.
const ROUNDS: u64 = 9;
/// Threads that write.
const WRITERS: u64 = 2;
/// Extents that each of them goes round, so that most of its writes change no map.
const BUSY: u64 = 64;
/// Milliseconds for which writes may be stopped.
const STOP_MS: f64 = 5.0;
/// How long writes are measured without a snapshot.
const CONTROL_SECONDS: f64 = 0.02;

/// Takes and deletes snapshots of 100 GiB.
pub fn rows(places: &Places, quick: bool) -> Result<Vec<Row>> {
    let size = if quick { SIZE / 16 } else { SIZE };
    let path = places.disk.path().join("pool");
    let workers = usize::try_from(WRITERS)? + 1;
    let mut rig = Rig::create_for(Media::create(&path, size + size / 4)?, None, workers)?;
    let volume = rig.volume("data", size)?;
    map(&mut rig, &volume, 0..size)?;
    rig.control(Control::Checkpoint)?;
    if !rig.media.become_durable(&path)? {
        println!("note: {} takes no O_DIRECT: this is the page cache", path.display());
    }
    let (mut create, mut delete) = (vec![], vec![]);
    let (mut stopped, mut writes, mut control) = (vec![], vec![], vec![]);
    for round in 0..ROUNDS {
        let without = under_writes(&mut rig, &volume, round, |rig| {
            let clock = Clock::start();
            while clock.seconds() < CONTROL_SECONDS {
                rig.settle()?;
            }
            Ok(())
        })?;
        control.push(ms(without.1));
        let mut taken = None;
        let (parked, longest) = under_writes(&mut rig, &volume, round, |rig| {
            taken = Some(take(rig, volume.id(), "taken")?);
            Ok(())
        })?;
        stopped.push(ms(parked));
        writes.push(ms(longest));
        let (id, timed) = taken.context("no snapshot was taken")?;
        create.push(ms(timed.ns));
        delete.push(ms(rig.timed(Control::Delete { volume: id })?.ns));
        rig.release()?;
    }
    rig.media.durable = false;
    rig.close(volume)?;
    std::fs::remove_file(path)?;
    let stop = median(stopped.clone());
    let row = |name: &str, figure, budget| Row::new(name, figure, "ms", budget);
    Ok(vec![
        row("snapshot under writes, until answered", median(create), Budget::None),
        row("writes stopped, median", stop, Budget::AtMost(STOP_MS)),
        row("writes stopped, longest of 9", largest(&stopped), Budget::None),
        row("longest write meanwhile, its IO included, median", median(writes), Budget::None),
        row("longest write without a snapshot, median", median(control), Budget::None),
        row("delete, until answered", median(delete), Budget::None),
    ])
}

/// The counts of the writers.
#[derive(Debug, Default)]
struct Watch {
    stop: AtomicBool,
    written: AtomicU64,
    /// The longest that a write had to wait before its IO, in nanoseconds.
    parked: AtomicU64,
    /// The longest that one took in all.
    longest: AtomicU64,
}

/// Does something while threads write: the longest that a write was stopped meanwhile, and that one
/// took in all.
fn under_writes(
    rig: &mut Rig,
    volume: &Attachment,
    round: u64,
    mut what: impl FnMut(&mut Rig) -> Result<()>,
) -> Result<(u64, u64)> {
    let mut writers = Vec::new();
    for number in 0..WRITERS {
        writers.push(Writer::new(rig, volume, (round * WRITERS + number) * BUSY)?);
    }
    let watch = Watch::default();
    std::thread::scope(|scope| {
        let writers = writers.into_iter();
        let busy: Vec<_> =
            writers.map(|mut writer| scope.spawn(|| writer.run(&watch).map(|()| writer))).collect();
        let ended = || busy.iter().any(|writer| writer.is_finished());
        let mut watched = || -> Result<(u64, u64)> {
            let until = |rig: &mut Rig, count| -> Result<()> {
                while watch.written.load(Ordering::Relaxed) < count && !ended() {
                    rig.settle()?;
                }
                Ok(())
            };
            // Once round first: no allocation is measured.
            until(rig, 2 * WRITERS * BUSY)?;
            watch.parked.store(0, Ordering::Relaxed);
            watch.longest.store(0, Ordering::Relaxed);
            what(rig)?;
            // A write that was stopped counts when it has ended.
            until(rig, watch.written.load(Ordering::Relaxed) + 2 * WRITERS)?;
            let figures = [&watch.parked, &watch.longest].map(|at| at.load(Ordering::Relaxed));
            Ok((figures[0], figures[1]))
        };
        let figures = watched();
        watch.stop.store(true, Ordering::Relaxed);
        while !busy.iter().all(|writer| writer.is_finished()) {
            rig.settle()?;
        }
        for writer in busy {
            writer.join().map_err(|_| anyhow!("a writer has panicked"))??.end();
        }
        figures
    })
}

/// Writes blocks in a thread of its own.
struct Writer {
    worker: Worker,
    attached: Attachment,
    first: u64,
    file: File,
    block: IoBuffer,
    plan: Plan,
    clock: Clock,
}

impl Writer {
    fn new(rig: &Rig, volume: &Attachment, first: u64) -> Result<Self> {
        let mut worker = rig.pool.worker()?;
        let attached = worker.attach(volume.id())?;
        let block = IoBuffer::new(1).context("no memory for a block")?;
        let (file, plan) = (rig.media.handle()?, Plan::with_capacity(Plan::MIN_OPS));
        Ok(Self { worker, attached, first, file, block, plan, clock: Clock::start() })
    }

    fn end(mut self) {
        self.worker.detach(self.attached);
    }

    /// Writes until it is stopped.
    fn run(&mut self, watch: &Watch) -> Result<()> {
        let mut number = 0;
        while !watch.stop.load(Ordering::Relaxed) {
            let from = self.clock.ns();
            let offset = (self.first + number % BUSY) * EXTENT;
            self.write(offset, watch).with_context(|| format!("write at byte {offset}"))?;
            watch.longest.fetch_max(self.clock.ns() - from, Ordering::Relaxed);
            watch.written.fetch_add(1, Ordering::Relaxed);
            number += 1;
        }
        Ok(())
    }

    fn write(&mut self, offset: u64, watch: &Watch) -> Result<()> {
        let from = self.clock.ns();
        loop {
            match self.worker.write(&self.attached, offset, BLOCK, false, &mut self.plan)? {
                Step::Issue { .. } => break,
                // The pool's thread opens the volume again.
                _ => std::thread::yield_now(),
            }
        }
        watch.parked.fetch_max(self.clock.ns() - from, Ordering::Relaxed);
        for op in self.plan.ops() {
            let data = self.block.as_bytes_mut();
            if op.len != data.len() as u64 {
                bail!("an operation on {} bytes for a write of {BLOCK}", op.len);
            }
            if let OpKind::Copy { from_offset, .. } = op.kind {
                self.file.read_exact_at(data, from_offset)?;
            }
            self.file.write_all_at(data, op.offset)?;
        }
        match self.worker.complete(&self.attached, &mut self.plan, Ok(()))? {
            Answer::Done => Ok(()),
            Answer::Wait(_) => bail!("a write without FUA waits for a commit"),
        }
    }
}
