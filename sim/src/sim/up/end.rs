//! How requests end, and which errors are excused.

use blockd_mapper::error::MapperError;

use super::{Kind, Request, Up};
use crate::sim::content::{UNIT, index};
use crate::sim::core::Core;
use crate::sim::marks::Mark;
use crate::sim::oracle::{Breach, Violation};

impl Up {
    pub(super) fn part_done(&mut self, core: &mut Core, at: usize) -> Result<(), Violation> {
        let Some(part) = self.parts[at].as_mut() else { return Ok(()) };
        let Some(request) = self.requests[part.request].as_ref() else { return Ok(()) };
        let zeroes = matches!(request.kind, Kind::Zeroes { .. } | Kind::Discard);
        if request.fua && zeroes && request.parts == 1 && request.error.is_none() {
            part.flushing = true;
            return self.drive(core, at);
        }
        self.part_ended(core, at)
    }

    pub(super) fn fail_part(
        &mut self,
        core: &mut Core,
        at: usize,
        error: MapperError,
    ) -> Result<(), Violation> {
        if let Some(part) = &self.parts[at]
            && let Some(request) = self.requests[part.request].as_mut()
        {
            request.error.get_or_insert(error);
        }
        self.part_ended(core, at)
    }

    pub(super) fn part_ended(&mut self, core: &mut Core, at: usize) -> Result<(), Violation> {
        let Some(part) = self.parts[at].take() else { return Ok(()) };
        self.free_parts.push(at);
        self.spare_plans.push(part.plan);
        let Some(request) = self.requests[part.request].as_mut() else { return Ok(()) };
        request.parts -= 1;
        if request.parts > 0 {
            return Ok(());
        }
        let request = self.requests[part.request].take();
        self.free_requests.push(part.request);
        self.live -= 1;
        request.map_or(Ok(()), |request| self.end(core, &request))
    }

    fn end(&mut self, core: &mut Core, request: &Request) -> Result<(), Violation> {
        core.trace.note(|| {
            format!(
                "answer {:?} volume {} {}+{}: {:?}",
                request.kind, request.volume, request.start, request.len, request.error
            )
        });
        if matches!(request.kind, Kind::Discard | Kind::Zeroes { .. }) {
            self.overtake(request);
        }
        if let Some(error) = &request.error {
            return self.end_failed(core, request, error);
        }
        if let Some(change) = request.change {
            core.oracle.end_change(request.volume, change, false, request.fua);
        }
        match request.kind {
            Kind::Read => {
                core.marks.hit(Mark::Read);
                if let Some(reading) = &request.reading {
                    core.oracle.end_read(reading, &request.buffer)?;
                }
            }
            Kind::Verify => {
                let durable = self.verifying == Some(true);
                core.oracle.settle(request.volume, request.start, &request.buffer, durable)?;
            }
            Kind::Write if request.fua => core.marks.hit(Mark::WriteFua),
            Kind::Write => core.marks.hit(Mark::Write),
            Kind::Discard => core.marks.hit(Mark::Discard),
            Kind::Zeroes { unmap: true } => core.marks.hit(Mark::ZeroesUnmap),
            Kind::Zeroes { unmap: false } => core.marks.hit(Mark::ZeroesKeep),
            Kind::Flush => {
                core.marks.hit(Mark::Flush);
                core.oracle.end_flush(request.volume, request.since);
            }
        }
        Ok(())
    }

    fn end_failed(
        &self,
        core: &mut Core,
        request: &Request,
        error: &MapperError,
    ) -> Result<(), Violation> {
        if let Some(reading) = &request.reading {
            core.oracle.drop_read(reading);
        }
        if let Some(change) = request.change {
            if request.begun {
                core.oracle.end_change(request.volume, change, true, false);
            } else {
                core.oracle.withdraw(request.volume, change);
            }
        }
        let volume = core.oracle.volumes().get(&request.volume);
        let excused = match error {
            MapperError::Io { .. } => request.io_failed || self.pool.failure().is_some(),
            MapperError::NoVolume(_) => volume.is_none() || core.oracle.is_busy(request.volume),
            MapperError::OutOfRange { .. } => {
                core.oracle.was_cut(request.volume, request.since)
                    || core.oracle.is_busy(request.volume)
                    || volume.is_none()
            }
            MapperError::ReadOnly => volume.is_some_and(|volume| volume.snapshot),
            MapperError::NoSpace { needed: 0, free: 0 } => true,
            _ => self.pool.failure().is_some(),
        };
        if excused {
            return Ok(());
        }
        let text = format!("{:?} of volume {} failed: {error}", request.kind, request.volume);
        Err(Violation::new(Breach::Error, text))
    }

    /// A discard or write-zeroes has ended: notes the writes in flight that it went over.
    fn overtake(&mut self, done: &Request) {
        let units = self.sub_block_units();
        for other in self.requests.iter_mut().flatten() {
            let writes = matches!(other.kind, Kind::Write | Kind::Zeroes { .. });
            if writes && other.volume == done.volume {
                other.overtaken |= overlap(units, (other.start, other.len), (done.start, done.len));
            }
        }
    }

    /// Whether a write there would meet, in one sub-block, a write that was in flight already when
    /// a discard of the place was answered. The media alone orders these two, and nothing is
    /// promised for them (decision 0001), so no client of the simulation does it.
    #[must_use]
    pub fn overtakes(&self, volume: u32, place: (usize, usize)) -> bool {
        let units = self.sub_block_units();
        self.requests.iter().flatten().any(|other| {
            other.overtaken
                && other.volume == volume
                && overlap(units, (other.start, other.len), place)
        })
    }

    pub(super) fn sub_block_units(&self) -> usize {
        index(self.pool.geometry().sub_block_size() / UNIT)
    }
}

/// Whether two places, start and length, have a sub-block in common.
fn overlap(sub_block: usize, one: (usize, usize), other: (usize, usize)) -> bool {
    let span =
        |(start, len): (usize, usize)| (start / sub_block, (start + len).div_ceil(sub_block));
    let ((a, b), (c, d)) = (span(one), span(other));
    a < d && c < b
}
