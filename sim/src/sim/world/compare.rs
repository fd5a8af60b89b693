//! Compares a pool at rest with the oracle: the differences between its volumes, and the space that
//! a deletion frees.

use blockd_mapper::engine::{Control, DiffRequest, RangeState};
use blockd_mapper::error::MapperError;
use blockd_mapper::units::VolumeId;

use super::super::core::units;
use super::super::marks::Mark;
use super::super::oracle::{Breach, Intent, Violation};
use super::{Phase, World};

/// Pairs of volumes compared in a history at the most.
const PAIRS: usize = 12;

/// A volume is being deleted: its exclusive bytes, and the mapped bytes of all volumes before.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prediction {
    volume: u32,
    exclusive: u64,
    mapped: u64,
}

impl World {
    /// Compares volumes with each other, or a volume with nothing.
    pub(super) fn check_differences(&mut self) -> Result<(), Violation> {
        let ids: Vec<u32> = self.core.oracle.volumes().keys().copied().collect();
        for volume in &ids {
            self.check_difference(*volume, None)?;
        }
        for _ in 0..PAIRS.min(ids.len() * ids.len()) {
            let random = &mut self.core.random;
            let (one, other) = (ids[random.usize(..ids.len())], ids[random.usize(..ids.len())]);
            self.check_difference(one, Some(other))?;
        }
        Ok(())
    }

    fn check_difference(&mut self, volume: u32, base: Option<u32>) -> Result<(), Violation> {
        let broken = |text| Err(Violation::new(Breach::Difference, text));
        let mut from = 0;
        loop {
            let Phase::Up(up) = &self.phase else { return Ok(()) };
            let max_ranges = self.core.random.usize(1..20);
            let request = DiffRequest {
                volume: VolumeId(volume),
                base: base.map(VolumeId),
                from,
                to: u64::MAX,
                max_ranges,
            };
            let related = base.is_none_or(|base| self.core.oracle.are_related(volume, base));
            let part = match up.engine.diff(&request) {
                Ok(part) if related => part,
                Err(MapperError::OtherFamily { .. }) if !related => return Ok(()),
                other => return broken(format!("{volume} since {base:?}: {other:?}")),
            };
            for range in &part.ranges {
                if range.offset != from {
                    return broken(format!("{volume} since {base:?}: a gap before {range:?}"));
                }
                from += range.len;
                let found = units(range.offset)..units(range.offset + range.len);
                let state = match range.state {
                    RangeState::Same => None,
                    RangeState::Data => Some(true),
                    RangeState::Zero => Some(false),
                };
                self.core.oracle.check_difference(volume, base, found, state)?;
            }
            self.core.marks.hit(Mark::Difference);
            match part.next {
                Some(next) if next == from && !part.ranges.is_empty() => {}
                None if from == part.size => return Ok(()),
                other => return broken(format!("{volume} since {base:?} ends at {other:?}")),
            }
        }
    }

    /// Begins to delete a volume whose figures have been taken. `false`: none is there.
    pub(super) fn delete_with_prediction(&mut self) -> Result<bool, Violation> {
        let ids: Vec<u32> = self.core.oracle.volumes().keys().copied().collect();
        if ids.is_empty() {
            return Ok(false);
        }
        let volume = ids[self.core.random.usize(..ids.len())];
        let Phase::Up(up) = &self.phase else { return Ok(false) };
        let broken = |text| Violation::new(Breach::Invariant, text);
        let figures = up.engine.figures(&[VolumeId(volume)]);
        let figures = figures.map_err(|error| broken(format!("not counted: {error}")))?;
        if !figures.exact {
            return Err(broken(format!("at rest, and not exact: {figures:?}")));
        }
        let mapped = up.engine.space().mapped;
        self.prediction = Some(Prediction { volume, exclusive: figures.exclusive, mapped });
        let control = Control::Delete { volume: VolumeId(volume) };
        self.submit(control, Some(Intent::Delete { volume }), Mark::Delete)?;
        Ok(true)
    }

    /// Checks that a deletion freed the predicted space.
    pub(super) fn check_prediction(&mut self, prediction: Prediction) -> Result<(), Violation> {
        let Phase::Up(up) = &self.phase else { return Ok(()) };
        let mapped = up.engine.space().mapped;
        // With the volume gone, folds may have freed more.
        let profile = &self.core.profile;
        let may_be_composite = profile.composite || profile.controls[10] > 0;
        let folds = may_be_composite && profile.fold_rate > 0;
        let freed = prediction.mapped.saturating_sub(mapped);
        if freed < prediction.exclusive || (freed > prediction.exclusive && !folds) {
            let Prediction { volume, exclusive, mapped: before } = prediction;
            let text = format!(
                "volume {volume} has {exclusive} bytes alone; {before} bytes were mapped with it, \
                 {mapped} are without it"
            );
            return Err(Violation::new(Breach::GivenBack, text));
        }
        self.core.marks.hit(Mark::GivenBack);
        Ok(())
    }
}
