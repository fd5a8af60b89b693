//! The commands that the pool's thread carries out for others.

use std::sync::Arc;

use blockd_mapper::engine::{Engine, Outcome};
use blockd_mapper::units::WallTime;
use blockd_media::pool::PoolError;

use super::super::driver::Served;
use super::super::handle::{Ask, Count, Policy, SpaceNow};
use super::super::keep::Keep;
use super::PoolThread;

/// How long the thread counts what volumes take before it looks for something else to do. The
/// mapper's own steps are about as long.
const COUNT_NS: u64 = 1_000_000;

fn space_now(engine: &Engine) -> SpaceNow {
    let watch = engine.space_watch();
    let (very_low, low) = watch.marks_in_bytes();
    SpaceNow {
        state: watch.state(),
        rate: watch.rate(),
        average: watch.average(),
        seconds_to_full: watch.seconds_to_full(),
        low,
        very_low,
        horizon_ns: watch.horizon_ns(),
        available: engine.available(),
    }
}

impl PoolThread {
    /// Carries out the commands that wait, and one walk at most in each turn: with any number of
    /// requests for walks, commits get their turn in between.
    pub(super) fn take_asks(&mut self) {
        let mut walked = false;
        while let Some(ask) = self.held.take().or_else(|| self.asks.take()) {
            let walks = matches!(ask, Ask::Count(..) | Ask::Diff(..));
            if walks && walked {
                self.held = Some(ask);
                return;
            }
            walked |= walks;
            match ask {
                Ask::Control(control, answer) => {
                    let now = u64::try_from(blockd_media::clock::wall_ms()).unwrap_or(0);
                    self.engine.set_wall_time(WallTime::from_ms(now));
                    let id = self.engine.submit(control);
                    self.answers.insert(id, answer);
                }
                Ask::Space(answer) => {
                    let now = space_now(&self.engine);
                    let _ = answer.send((self.engine.space(), now));
                }
                Ask::Policy(Policy::Marks(marks)) => self.engine.set_marks(marks),
                Ask::Policy(Policy::Quantum(bytes)) => {
                    self.engine.set_quantum(bytes.div_ceil(self.shared.extent_size.max(1)));
                }
                Ask::Policy(Policy::FoldRate(bytes)) => self.engine.set_fold_rate(bytes),
                Ask::Policy(Policy::FreeBelow(free)) => self.engine.set_free_below(free),
                Ask::Policy(Policy::FullBelow) => {
                    self.engine.set_full_below(&self.shared.below.full());
                }
                Ask::Policy(Policy::Extended(ns)) => self.engine.note_extension(ns),
                Ask::Releasing(answer) => drop(answer.send(self.engine.releasing())),
                Ask::Folds(begin, answer) => {
                    if begin {
                        self.engine.fold_now();
                    }
                    let mut status = self.engine.fold_status();
                    status.settled &= self.engine.releasing().is_empty();
                    let _ = answer.send(status);
                }
                Ask::Evacuation(rate, answer) => {
                    if let Some(rate) = rate {
                        self.engine.set_evacuation_rate(rate);
                    }
                    let _ = answer.send(self.engine.evacuation_status());
                }
                Ask::Rebalance(answer) => drop(answer.send(self.engine.rebalance_status())),
                Ask::Count(mut count, answer) => {
                    self.count(&mut count);
                    let _ = answer.send(*count);
                }
                Ask::Diff(request, answer) => {
                    let part = self.engine.diff(&request).map_err(PoolError::from);
                    let _ = answer.send(part);
                }
                Ask::TakeUp(answer) => drop(answer.send(self.take_up())),
                Ask::Keep(handle, volume, most, answer) => {
                    let kept = self.engine.keep_reserve(volume, most).map_err(PoolError::from);
                    let _ = answer.send(kept.map(|kept| Keep::new(handle, volume, kept)));
                }
                Ask::ReleaseKept(volume, extents) => self.engine.release_kept(volume, extents),
                // Its failure is final.
                Ask::Abandon => self.abandoned = self.has_failed(),
                Ask::Metadata(answer) => drop(answer.send(self.engine.metadata_extents())),
            }
        }
    }

    /// Makes devices that were opened since the pool was known to the ring.
    fn take_up(&mut self) -> std::io::Result<()> {
        for device in self.shared.devices().skip(self.served.len()) {
            let slot = self.ring.add_device(device)?;
            self.served.push(Served { device: Arc::clone(device), slot });
            self.seen.add_device();
        }
        Ok(())
    }

    /// Counts for a moment: other calls to the engine wait meanwhile.
    fn count(&self, count: &mut Count) {
        let until = self.clock.ns() + COUNT_NS;
        while !count.is_done() {
            let begun = match (count.walk.take(), count.todo.pop()) {
                (Some(walk), last) => {
                    count.todo.extend(last);
                    Ok(walk)
                }
                (None, Some(set)) => self.engine.begin_account(&set),
                (None, None) => return,
            };
            let counted = begun.and_then(|mut walk| {
                let figures = self.engine.account(&mut walk)?;
                Ok((walk, figures))
            });
            match counted {
                Ok((walk, None)) => count.walk = Some(walk),
                Ok((_, Some(figures))) => count.done.push(Ok(figures)),
                Err(error) => count.done.push(Err(error.into())),
            }
            if self.clock.ns() >= until {
                return;
            }
        }
    }

    pub(super) fn answer(&mut self) {
        while let Some((id, outcome)) = self.engine.take_outcome() {
            self.closed |= outcome == Ok(Outcome::Closed);
            if let Some(answer) = self.answers.remove(&id) {
                let _ = answer.send(outcome.map_err(PoolError::from));
            }
        }
    }
}
