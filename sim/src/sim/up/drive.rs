//! Requests and plans on their way through the mapper.

use blockd_mapper::plan::{Answer, OpKind, ParkReason, Plan, Step};

use super::ops::{keep, mark_plan, put, send_op};
use super::{Kind, Part, Up};
use crate::sim::content::UNIT;
use crate::sim::core::{Core, Origin, submitter_result, units};
use crate::sim::disk::{Action, Answered};
use crate::sim::marks::Mark;
use crate::sim::oracle::{Breach, Violation};

impl Up {
    pub(super) fn start_part(
        &mut self,
        core: &mut Core,
        request: usize,
        start: usize,
        rest: usize,
    ) -> Result<(), Violation> {
        let mut plan = self.spare_plans.pop().unwrap_or_else(|| Plan::with_capacity(48));
        plan.begin();
        let part = Part {
            request,
            start,
            len: 0,
            rest,
            plan,
            stage: 0,
            outstanding: 0,
            error: None,
            ticket: None,
            parked: None,
            flushing: false,
        };
        let part = put(&mut self.parts, &mut self.free_parts, part);
        self.drive(core, part)
    }

    /// Takes a part as far as it goes without waiting.
    pub(super) fn drive(&mut self, core: &mut Core, at: usize) -> Result<(), Violation> {
        loop {
            let Some(part) = self.parts[at].as_mut() else { return Ok(()) };
            let Some(request) = self.requests[part.request].as_mut() else { return Ok(()) };
            let flush = request.kind == Kind::Flush || part.flushing;
            if part.rest == 0 && !flush {
                return self.part_done(core, at);
            }
            let before = self.pool.events();
            let worker = request.worker;
            let step = self.ask(core, at);
            self.after_call(core);
            match step {
                Ok(Step::Issue { covered }) => return self.issue(core, at, units(covered)),
                Ok(Step::Done { covered }) => {
                    self.touch(at);
                    let Some(part) = self.parts[at].as_mut() else { return Ok(()) };
                    let covered = units(covered);
                    if flush {
                        core.marks.hit(Mark::FlushShort);
                        return self.part_ended(core, at);
                    }
                    if covered == 0 || covered > part.rest {
                        let text = format!("{covered} units done of {} asked for", part.rest);
                        return Err(Violation::new(Breach::Error, text));
                    }
                    part.start += covered;
                    part.rest -= covered;
                }
                Ok(Step::Wait(ticket)) => {
                    self.touch(at);
                    core.marks.hit(Mark::FlushLong);
                    if let Some(part) = self.parts[at].as_mut() {
                        part.ticket = Some(ticket);
                    }
                    self.waiting.push(at);
                    return Ok(());
                }
                Ok(Step::Park(reason)) => {
                    self.park(core, at, worker, reason, before);
                    return Ok(());
                }
                Err(error) => return self.fail_part(core, at, error),
            }
        }
    }

    fn park(&mut self, core: &mut Core, at: usize, worker: usize, reason: ParkReason, before: u64) {
        core.trace.note(|| format!("part {at} parks: {reason:?}"));
        core.marks.hit(match reason {
            ParkReason::Space => Mark::ParkSpace,
            ParkReason::Slowed => Mark::ParkSlowed,
            // Histories have few leaves: memory does not run out.
            ParkReason::Leaves | ParkReason::Metadata => Mark::ParkMetadata,
            ParkReason::Ring => Mark::ParkRing,
            ParkReason::InFlight => Mark::ParkInFlight,
            ParkReason::Gated => Mark::ParkGated,
        });
        if reason == ParkReason::Space {
            self.was_full = true;
        }
        let is_flush = |part: &Part| {
            let request = self.requests[part.request].as_ref();
            part.flushing || request.is_some_and(|request| request.kind == Kind::Flush)
        };
        if self.parts[at].as_ref().is_some_and(is_flush) {
            core.marks.hit(Mark::FlushJoined);
        }
        if let Some(part) = self.parts[at].as_mut() {
            part.parked = Some(reason);
        }
        if self.pool.events() == before {
            self.parked[worker].insert(at);
        } else {
            self.retry.push(at);
        }
    }

    fn issue(&mut self, core: &mut Core, at: usize, covered: usize) -> Result<(), Violation> {
        self.touch(at);
        let Some(part) = self.parts[at].as_mut() else { return Ok(()) };
        let request = part.request;
        part.len = covered;
        part.stage = 0;
        part.error = None;
        part.parked = None;
        let rest = part.rest.saturating_sub(covered);
        let kind = self.requests[request].as_ref().map(|request| request.kind);
        mark_plan(core, kind, part.plan.ops());
        if rest > 0 && !part.flushing {
            core.marks.hit(Mark::SplitRequest);
            if core.random.bool() {
                // The rest at once, beside this part; otherwise after it.
                part.rest = covered;
                let start = part.start + covered;
                if let Some(request) = self.requests[request].as_mut() {
                    request.parts += 1;
                }
                self.send_stage(core, at)?;
                return self.start_part(core, request, start, rest);
            }
        }
        self.send_stage(core, at)
    }

    /// Sends the operations of the part's stage; finishes the plan when there are none left.
    fn send_stage(&mut self, core: &mut Core, at: usize) -> Result<(), Violation> {
        loop {
            let Some(part) = self.parts[at].as_mut() else { return Ok(()) };
            let Some(request) = self.requests[part.request].as_mut() else { return Ok(()) };
            let stage = part.stage;
            for (number, op) in part.plan.ops().iter().enumerate() {
                if op.stage == stage && send_op(core, request, part.start, (at, number), op) {
                    part.outstanding += 1;
                }
            }
            if part.outstanding > 0 {
                return Ok(());
            }
            if part.stage >= 1 || part.error.is_some() {
                return self.finish_plan(core, at);
            }
            part.stage += 1;
        }
    }

    /// A device has answered an operation of a part.
    pub fn answered(
        &mut self,
        core: &mut Core,
        at: usize,
        op: usize,
        copy_read: bool,
        answered: Answered,
    ) -> Result<(), Violation> {
        let Some(part) = self.parts[at].as_mut() else { return Ok(()) };
        let Some(request) = self.requests[part.request].as_mut() else { return Ok(()) };
        let planned = part.plan.ops()[op];
        match submitter_result(answered.fault) {
            Ok(()) if copy_read => {
                let start = planned.offset / UNIT;
                let action = Action::Write { start, values: answered.values, fua: false };
                core.submit(planned.device, action, Origin::Part(at, op), true);
                return Ok(());
            }
            Ok(()) => {
                if matches!(planned.kind, OpKind::Read) {
                    let to = part.start - request.start + units(planned.buffer_offset);
                    let values = &answered.values;
                    request.buffer[to..to + values.len()].copy_from_slice(values);
                }
            }
            Err(error) => {
                part.error = Some(error);
                request.io_failed = true;
            }
        }
        part.outstanding -= 1;
        if part.outstanding > 0 {
            return Ok(());
        }
        if part.stage >= 1 || part.error.is_some() {
            return self.finish_plan(core, at);
        }
        part.stage += 1;
        self.send_stage(core, at)
    }

    fn finish_plan(&mut self, core: &mut Core, at: usize) -> Result<(), Violation> {
        let Some(part) = self.parts[at].as_mut() else { return Ok(()) };
        let Some(request) = self.requests[part.request].as_ref() else { return Ok(()) };
        let attachment = &self.attached[request.worker][&request.volume];
        let result = part.error.map_or(Ok(()), Err);
        if result.is_ok() && part.plan.fills_cache() {
            keep(core, &self.workers[request.worker], request, part.start, &mut part.plan);
        }
        let answer = self.workers[request.worker].complete(attachment, &mut part.plan, result);
        core.trace.note(|| format!("part {at} complete({result:?}): {answer:?}"));
        let flush = request.kind == Kind::Flush || part.flushing;
        part.start += part.len;
        part.rest -= part.len.min(part.rest);
        part.len = 0;
        self.after_call(core);
        match answer {
            Ok(Answer::Done) if flush => {
                core.marks.hit(Mark::FlushShort);
                self.part_ended(core, at)
            }
            Ok(Answer::Done) => self.drive(core, at),
            Ok(Answer::Wait(ticket)) => {
                core.marks.hit(Mark::FuaLong);
                if let Some(part) = self.parts[at].as_mut() {
                    part.ticket = Some(ticket);
                }
                self.waiting.push(at);
                Ok(())
            }
            Err(error) => self.fail_part(core, at, error),
        }
    }

    /// Continues a random request whose commit is done.
    pub fn committed(&mut self, core: &mut Core) -> Result<(), Violation> {
        let ready: Vec<usize> =
            (0..self.waiting.len()).filter(|at| self.is_committed(self.waiting[*at])).collect();
        if ready.is_empty() {
            return Ok(());
        }
        let at = self.waiting.swap_remove(ready[core.random.usize(..ready.len())]);
        let Some(part) = self.parts[at].as_mut() else { return Ok(()) };
        let Some(ticket) = part.ticket.take() else { return Ok(()) };
        let result = self.pool.commit_state(&ticket).unwrap_or(Ok(()));
        core.trace.note(|| format!("part {at} commit: {result:?}"));
        let flush = part.flushing
            || self.requests[part.request].as_ref().is_some_and(|r| r.kind == Kind::Flush);
        match result {
            Ok(()) if flush => self.part_ended(core, at),
            Ok(()) => self.drive(core, at),
            Err(error) => self.fail_part(core, at, error),
        }
    }

    /// Retries a parked request.
    pub fn retry(&mut self, core: &mut Core) -> Result<(), Violation> {
        if self.retry.is_empty() {
            return Ok(());
        }
        let at = self.retry.swap_remove(core.random.usize(..self.retry.len()));
        let parked = self.parts[at].as_mut().and_then(|part| part.parked.take());
        self.drive(core, at)?;
        let still = self.parts[at].as_ref().is_some_and(|part| part.parked.is_some());
        if parked == Some(ParkReason::Space) && !still {
            core.marks.hit(Mark::SpaceResumed);
        }
        Ok(())
    }
}
