//! One run of a workload: requests in slots, each planned by the mapper, done by the ring.

use anyhow::{Context, Result, bail, ensure};
use blockd_mapper::plan::{Answer, CommitTicket, OpKind, Plan, Step};
use blockd_mapper::worker::Attachment;

use super::driver::{Driver, EngineCounts};
use super::pattern::Expected;
use crate::alloc_count::allocations;
use crate::ring::{Ended, SLOT_BYTES, SlotOp};

/// Requests in flight, the same as fio's.
pub const DEPTH: usize = 32;

/// Requests that are handed to the kernel at once. It holds the disk's requests back until it has
/// seen all of a batch: with the whole queue in one, the disk would idle while it is planned.
const BATCH: usize = 4;

/// One request in this many is timed inside the mapper: two readings of the clock cost about as
/// much as an overwrite's plan.
const SAMPLE: u64 = 16;

/// A run without progress for so long has a fault.
const STALL_SECONDS: f64 = 20.0;

/// Which blocks a run uses.
#[derive(Clone, Debug)]
pub enum Blocks<'a> {
    /// Any, again and again.
    Random(fastrand::Rng),
    /// Each of these once.
    Once(std::slice::Iter<'a, u32>),
}

/// The workload of a run.
#[derive(Clone, Debug)]
pub struct Work<'a> {
    /// Writes, not reads.
    pub writes: bool,
    /// Where.
    pub blocks: Blocks<'a>,
    /// Writes between two flushes.
    pub flush_each: Option<u64>,
    /// At most so long; without it, until the blocks are used up.
    pub seconds: Option<f64>,
    /// Compares every byte read, not the stamps alone.
    pub thorough: bool,
}

/// The results of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Figures {
    /// Reads or writes.
    pub ops: u64,
    /// How long it took.
    pub seconds: f64,
    /// Flushes that the workload asked for.
    pub flushes: u64,
    /// Flushes that the worker planned itself, with nothing to commit.
    pub data_flushes: u64,
    /// Requests that had to wait for space, leaves, pages or room in the delta ring.
    pub parked: u64,
    /// Time in planning, of the requests sampled.
    pub plan_ns: u64,
    /// Requests whose plan was timed.
    pub plans: u64,
    /// Time in completing, of the requests sampled.
    pub complete_ns: u64,
    /// Requests whose completion was timed.
    pub completions: u64,
    /// Heap allocations of the worker.
    pub allocations: u64,
    /// The counts of the engine meanwhile.
    pub engine: EngineCounts,
    /// System calls.
    pub enters: u64,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Idle,
    InFlight,
    Parked,
    Committing(CommitTicket),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Operation {
    Read,
    Write,
    Flush,
}

#[derive(Debug)]
struct Slot {
    plan: Plan,
    state: State,
    operation: Operation,
    block: usize,
    timed: bool,
}

/// A run in progress.
#[derive(Debug)]
struct Run<'a, 'w> {
    driver: &'a mut Driver,
    volume: &'a Attachment,
    expected: &'a mut Expected,
    work: Work<'w>,
    slots: Vec<Slot>,
    idle: Vec<usize>,
    parked: Vec<usize>,
    committing: usize,
    events: u64,
    until_flush: u64,
    begun: u64,
    stopped: bool,
    figures: Figures,
}

/// Does a workload on a volume.
pub fn run(
    driver: &mut Driver,
    volume: &Attachment,
    expected: &mut Expected,
    work: Work<'_>,
) -> Result<Figures> {
    for slot in 0..DEPTH {
        expected.prepare(driver.ring.buffer(slot)?);
    }
    let slot = |_| Slot {
        plan: Plan::with_capacity(Plan::MIN_OPS),
        state: State::Idle,
        operation: Operation::Read,
        block: 0,
        timed: false,
    };
    let events = driver.pool.events();
    let until_flush = work.flush_each.unwrap_or(u64::MAX);
    let run = Run {
        driver,
        volume,
        expected,
        work,
        slots: (0..DEPTH).map(slot).collect(),
        idle: (0..DEPTH).collect(),
        parked: Vec::with_capacity(DEPTH),
        committing: 0,
        events,
        until_flush,
        begun: 0,
        stopped: false,
        figures: Figures::default(),
    };
    run.finish()
}

impl Run<'_, '_> {
    fn finish(mut self) -> Result<Figures> {
        let (engine, enters) = (self.driver.counts, self.driver.ring.enters());
        let start = self.driver.clock.seconds();
        let mut progress = (start, 0);
        loop {
            self.fill()?;
            self.driver.step_engine()?;
            self.answer_commits()?;
            self.retry_parked()?;
            if self.stopped && self.idle.len() == DEPTH {
                break;
            }
            self.driver.ring.submit(1)?;
            self.reap()?;
            let now = self.driver.clock.seconds();
            self.stopped |= self.work.seconds.is_some_and(|limit| now - start >= limit);
            let done = self.figures.ops + self.figures.flushes;
            if done > progress.1 {
                progress = (now, done);
            } else if now - progress.0 > STALL_SECONDS {
                bail!("no request has ended for {STALL_SECONDS} s: {:?}", self.slots);
            }
        }
        self.figures.seconds = self.driver.clock.seconds() - start;
        self.figures.engine = since(&engine, &self.driver.counts);
        self.figures.enters = self.driver.ring.enters() - enters;
        Ok(self.figures)
    }

    /// Begins requests in all idle slots.
    fn fill(&mut self) -> Result<()> {
        while !self.stopped
            && let Some(at) = self.idle.pop()
        {
            if !self.choose(at)? {
                self.stopped = true;
                self.idle.push(at);
                break;
            }
            self.begin(at)?;
            if self.driver.ring.unsubmitted() >= BATCH {
                self.driver.ring.submit(0)?;
            }
        }
        Ok(())
    }

    /// Decides the next operation of a slot. `false`: there is nothing left.
    fn choose(&mut self, at: usize) -> Result<bool> {
        self.begun += 1;
        let slot = &mut self.slots[at];
        slot.timed = self.begun.is_multiple_of(SAMPLE);
        if self.until_flush == 0 {
            self.until_flush = self.work.flush_each.unwrap_or(u64::MAX);
            slot.operation = Operation::Flush;
            return Ok(true);
        }
        let block = match &mut self.work.blocks {
            Blocks::Once(blocks) => match blocks.next() {
                Some(block) => *block as usize,
                None => return Ok(false),
            },
            Blocks::Random(random) => loop {
                let block = random.usize(..self.expected.blocks());
                if self.expected.is_free(block) {
                    break block;
                }
            },
        };
        slot.block = block;
        slot.operation = if self.work.writes { Operation::Write } else { Operation::Read };
        if self.work.writes {
            self.until_flush -= 1;
            self.expected.begin(block, self.driver.ring.buffer(at)?);
        }
        Ok(true)
    }

    /// Plans a slot's request and starts its IO.
    fn begin(&mut self, at: usize) -> Result<()> {
        let driver = &mut *self.driver;
        let slot = &mut self.slots[at];
        let (offset, len) = (slot.block as u64 * u64::from(SLOT_BYTES), u64::from(SLOT_BYTES));
        // Before the attempt: later changes will be seen.
        let events = driver.pool.events();
        let before = allocations();
        let from = if slot.timed { driver.clock.ns() } else { 0 };
        let step = match slot.operation {
            Operation::Read => driver.worker.read(self.volume, offset, len, &mut slot.plan),
            Operation::Write => {
                driver.worker.write(self.volume, offset, len, false, &mut slot.plan)
            }
            Operation::Flush => driver.worker.flush(self.volume, &mut slot.plan),
        };
        if slot.timed && slot.operation != Operation::Flush {
            self.figures.plan_ns += driver.clock.ns() - from;
            self.figures.plans += 1;
        }
        self.figures.allocations += allocations() - before;
        match step? {
            Step::Issue { covered } => {
                ensure!(
                    slot.operation == Operation::Flush || covered == len,
                    "a plan for {covered} bytes"
                );
                slot.state = State::InFlight;
                self.start(at)
            }
            Step::Done { .. } if slot.operation == Operation::Flush => self.ended(at),
            Step::Done { .. } => bail!("a read or write without IO"),
            Step::Wait(ticket) => {
                slot.state = State::Committing(ticket);
                self.committing += 1;
                Ok(())
            }
            Step::Park(_) => {
                self.figures.parked += 1;
                slot.state = State::Parked;
                self.events = if self.parked.is_empty() { events } else { self.events.min(events) };
                self.parked.push(at);
                Ok(())
            }
        }
    }

    /// Submits a plan's operation to the ring. A block lies in one extent, so there is one
    /// operation.
    fn start(&mut self, at: usize) -> Result<()> {
        let [op] = self.slots[at].plan.ops() else {
            bail!("one operation was expected: {:?}", self.slots[at].plan.ops());
        };
        let op = match op.kind {
            OpKind::Read => SlotOp::Read { offset: op.offset },
            OpKind::Write { fua: false } => SlotOp::Write { offset: op.offset },
            OpKind::Flush => {
                self.figures.data_flushes += 1;
                SlotOp::Flush
            }
            OpKind::ReadZeroes => {
                self.driver.ring.buffer(at)?.0.fill(0);
                return self.io_ended(at);
            }
            other => bail!("not an operation of this workload: {other:?}"),
        };
        self.driver.ring.start(at, op)
    }

    fn reap(&mut self) -> Result<()> {
        while let Some(ended) = self.driver.ring.reap() {
            match ended {
                Ended::Command(command, result) => self.driver.command_ended(command, result)?,
                Ended::Slot(at, result) => {
                    result.with_context(|| format!("{:?}", self.slots[at]))?;
                    self.io_ended(at)?;
                }
            }
        }
        Ok(())
    }

    /// Completes a slot's IO in the mapper.
    fn io_ended(&mut self, at: usize) -> Result<()> {
        let slot = &mut self.slots[at];
        let before = allocations();
        let from = if slot.timed { self.driver.clock.ns() } else { 0 };
        let answer = self.driver.worker.complete(self.volume, &mut slot.plan, Ok(()));
        if slot.timed && slot.operation != Operation::Flush {
            self.figures.complete_ns += self.driver.clock.ns() - from;
            self.figures.completions += 1;
        }
        self.figures.allocations += allocations() - before;
        match answer? {
            Answer::Done => self.ended(at),
            Answer::Wait(_) => bail!("a commit for a request that asked for none"),
        }
    }

    /// The request is answered; its slot is free.
    fn ended(&mut self, at: usize) -> Result<()> {
        let slot = &mut self.slots[at];
        slot.state = State::Idle;
        match slot.operation {
            Operation::Read => {
                let page = &*self.driver.ring.buffer(at)?;
                if self.work.thorough {
                    self.expected.check_all(slot.block, page)?;
                } else {
                    self.expected.check_stamps(slot.block, page)?;
                }
                self.figures.ops += 1;
            }
            Operation::Write => {
                self.expected.end(slot.block);
                self.figures.ops += 1;
            }
            Operation::Flush => self.figures.flushes += 1,
        }
        self.idle.push(at);
        Ok(())
    }

    fn answer_commits(&mut self) -> Result<()> {
        for at in 0..DEPTH {
            if self.committing == 0 {
                break;
            }
            if let State::Committing(ticket) = self.slots[at].state
                && let Some(result) = self.driver.pool.commit_state(&ticket)
            {
                result?;
                self.committing -= 1;
                self.ended(at)?;
            }
        }
        Ok(())
    }

    fn retry_parked(&mut self) -> Result<()> {
        if self.parked.is_empty() || self.driver.pool.events() == self.events {
            return Ok(());
        }
        for at in std::mem::replace(&mut self.parked, Vec::with_capacity(DEPTH)) {
            self.begin(at)?;
        }
        Ok(())
    }
}

fn since(before: &EngineCounts, after: &EngineCounts) -> EngineCounts {
    EngineCounts {
        ns: after.ns - before.ns,
        allocations: after.allocations - before.allocations,
        flushes: after.flushes - before.flushes,
        log_writes: after.log_writes - before.log_writes,
        log_blocks: after.log_blocks - before.log_blocks,
        map_writes: after.map_writes - before.map_writes,
    }
}
