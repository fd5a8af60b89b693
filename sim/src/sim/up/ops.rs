//! The operations of a plan, as devices are asked for them.

use blockd_mapper::error::MapperError;
use blockd_mapper::plan::{OpKind, Plan, PlanOp, Step};
use blockd_mapper::worker::{Attachment, Worker};

use super::{Kind, Request};
use crate::sim::content::{UNIT, UNIT_BYTES, Value, index};
use crate::sim::core::{Core, Origin, bytes, units};
use crate::sim::disk::Action;
use crate::sim::marks::Mark;

pub(super) fn put<T>(all: &mut Vec<Option<T>>, free: &mut Vec<usize>, item: T) -> usize {
    match free.pop() {
        Some(at) => {
            all[at] = Some(item);
            at
        }
        None => {
            all.push(Some(item));
            all.len() - 1
        }
    }
}

/// Sends one operation of a plan. `false`: it was done on the spot.
pub(super) fn send_op(
    core: &mut Core,
    request: &mut Request,
    part_start: usize,
    place: (usize, usize),
    op: &PlanOp,
) -> bool {
    let (start, count) = (op.offset / UNIT, op.len / UNIT);
    let at = part_start - request.start + units(op.buffer_offset);
    let origin = Origin::Part(place.0, place.1);
    let (action, origin, device) = match op.kind {
        OpKind::ReadZeroes => {
            request.buffer[at..at + units(op.len)].fill(Value::ZERO);
            return false;
        }
        OpKind::Read => (Action::Read { start, count }, origin, op.device),
        OpKind::Write { fua } => {
            let values = request.buffer[at..at + units(op.len)].to_vec();
            (Action::Write { start, values, fua }, origin, op.device)
        }
        OpKind::WriteZeroes { fua } => {
            let values = vec![Value::ZERO; index(count)];
            (Action::Write { start, values, fua }, origin, op.device)
        }
        OpKind::Copy { from_device, from_offset } => {
            let action = Action::Read { start: from_offset / UNIT, count };
            (action, Origin::CopyRead(place.0, place.1), from_device)
        }
        OpKind::Flush => (Action::Flush, origin, op.device),
    };
    core.submit(device, action, origin, true);
    true
}

/// Plans a read of units by the cache, and takes over what that has served.
pub(super) fn read_cached(
    core: &Core,
    worker: &mut Worker,
    attachment: &Attachment,
    request: &mut Request,
    (start, len): (usize, usize),
    plan: &mut Plan,
) -> Result<Step, MapperError> {
    let mut served = std::mem::take(&mut request.bytes);
    served.clear();
    served.resize(len * UNIT_BYTES, 0);
    let step = worker.read_cached(attachment, bytes(start), &mut served, plan);
    if let Ok(Step::Issue { covered } | Step::Done { covered }) = step {
        let values = core.contents.intern_all(&served[..index(covered)]);
        // What is read from the media is overwritten later.
        let at = start - request.start;
        request.buffer[at..at + values.len()].copy_from_slice(&values);
    }
    request.bytes = served;
    step
}

/// Gives a read's units to the cache.
pub(super) fn keep(core: &Core, worker: &Worker, request: &Request, start: usize, plan: &mut Plan) {
    let values = &request.buffer[start - request.start..];
    let mut read = vec![0; values.len() * UNIT_BYTES];
    for (value, unit) in values.iter().zip(read.chunks_mut(UNIT_BYTES)) {
        core.contents.bytes(*value, unit);
    }
    worker.keep(plan, &read);
}

pub(super) fn mark_plan(core: &mut Core, kind: Option<Kind>, ops: &[PlanOp]) {
    if kind != Some(Kind::Write) {
        return;
    }
    if ops.iter().any(|op| matches!(op.kind, OpKind::Copy { .. })) {
        core.marks.hit(Mark::CopyOnWrite);
    }
    if ops.iter().any(|op| matches!(op.kind, OpKind::WriteZeroes { .. })) {
        core.marks.hit(Mark::PartialFill);
    }
    if ops.iter().any(|op| matches!(op.kind, OpKind::Write { fua: true })) {
        core.marks.hit(Mark::FuaShort);
    }
}
