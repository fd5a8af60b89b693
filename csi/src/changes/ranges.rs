//! Selects the ranges that a backup has to copy from the daemon's ranges, which cover every byte.

use blockd_api::v1::{DiffVolumeResponse, RangeState, VolumeRange};

use crate::error::Error;
use crate::proto::BlockMetadata;

/// Ranges of one message at the most: some 20 KiB, of which a few wait for their caller.
pub(super) const MAX_RESULTS: usize = 1024;

/// Selects which ranges are returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Wanted {
    /// Ranges with data.
    Data,
    /// Ranges that differ from the base: data, and zeroes in place of the base's data. A backup
    /// without the zeroes would keep the old data.
    Changed,
}

/// Ranges on their way. Neighbours that are both wanted become one, so that there are as few as
/// there can be, and the same ones wherever the daemon cuts its messages.
#[derive(Debug)]
pub(super) struct Ranges {
    wanted: Wanted,
    max: usize,
    size: i64,
    /// The offset at which the next range has to begin.
    at: i64,
    /// Begin and end of the last one, which may still become longer.
    last: Option<(i64, i64)>,
    done: Vec<BlockMetadata>,
    has_message: bool,
}

impl Ranges {
    /// From a byte on, of a volume of that size; at most `max` in a message.
    pub(super) const fn new(wanted: Wanted, max: usize, from: i64, size: i64) -> Self {
        Self { wanted, max, size, at: from, last: None, done: Vec::new(), has_message: false }
    }

    /// Takes a message of the daemon's.
    ///
    /// # Errors
    /// The message does not continue at the end of the last one, or describes another volume.
    pub(super) fn take(&mut self, part: &DiffVolumeResponse) -> Result<(), Error> {
        if part.volume_bytes != self.size {
            return Err(broken(format_args!("of {} bytes, not {}", part.volume_bytes, self.size)));
        }
        for range in &part.ranges {
            self.take_one(range)?;
        }
        if part.next_bytes != self.at {
            return Err(broken(format_args!("goes on at {}, not {}", part.next_bytes, self.at)));
        }
        Ok(())
    }

    fn take_one(&mut self, range: &VolumeRange) -> Result<(), Error> {
        let VolumeRange { offset_bytes: from, length_bytes: len, .. } = *range;
        let end = from.checked_add(len).filter(|end| len > 0 && *end <= self.size);
        let Some(end) = end.filter(|_| from == self.at) else {
            return Err(broken(format_args!("has {len} bytes at {from}, after {}", self.at)));
        };
        self.at = end;
        let is_wanted = match (range.state(), self.wanted) {
            (RangeState::Data, _) | (RangeState::Zero, Wanted::Changed) => true,
            (RangeState::Zero, Wanted::Data) | (RangeState::Same, Wanted::Changed) => false,
            (state, _) => return Err(broken(format_args!("says {state:?}"))),
        };
        if !is_wanted {
            self.finish_last();
            return Ok(());
        }
        let begin = self.last.map_or(from, |(begin, _)| begin);
        self.last = Some((begin, end));
        Ok(())
    }

    fn finish_last(&mut self) {
        if let Some((begin, end)) = self.last.take() {
            self.done.push(BlockMetadata { byte_offset: begin, size_bytes: end - begin });
        }
    }

    /// The ranges of a message that is full, if there is one.
    pub(super) fn full(&mut self) -> Option<Vec<BlockMetadata>> {
        if self.done.len() < self.max {
            return None;
        }
        self.has_message = true;
        let rest = self.done.split_off(self.max);
        Some(std::mem::replace(&mut self.done, rest))
    }

    /// Returns the ranges of the last messages. A stream has at least one message, which reports
    /// the volume's size even without ranges.
    ///
    /// # Errors
    /// The daemon's stream ended before the end of the volume.
    pub(super) fn end(mut self) -> Result<Vec<Vec<BlockMetadata>>, Error> {
        if self.at != self.size {
            return Err(broken(format_args!("ended at {} of {}", self.at, self.size)));
        }
        self.finish_last();
        let mut messages = Vec::new();
        while let Some(full) = self.full() {
            messages.push(full);
        }
        if !self.done.is_empty() || !self.has_message {
            messages.push(self.done);
        }
        Ok(messages)
    }
}

fn broken(problem: std::fmt::Arguments<'_>) -> Error {
    Error::unexpected("DiffVolume of the daemon", problem)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{Just, Strategy, prop_assert, prop_assert_eq, prop_oneof, proptest};
    use tonic::Code;

    use super::*;

    fn part(ranges: &[(i64, i64, RangeState)], size: i64) -> DiffVolumeResponse {
        let range = |(from, len, state): &(i64, i64, RangeState)| VolumeRange {
            offset_bytes: *from,
            length_bytes: *len,
            state: (*state).into(),
        };
        let next_bytes = ranges.last().map_or(0, |(from, len, _)| from + len);
        let ranges = ranges.iter().map(range).collect();
        DiffVolumeResponse { ranges, volume_bytes: size, next_bytes }
    }

    fn pairs(list: &[BlockMetadata]) -> Vec<(i64, i64)> {
        list.iter().map(|one| (one.byte_offset, one.size_bytes)).collect()
    }

    #[test]
    fn zeroes_that_replaced_data_are_changes_and_holes_hold_nothing() {
        use RangeState::{Data, Same, Zero};
        let delta = part(&[(0, 4, Same), (4, 4, Data), (8, 8, Zero), (16, 16, Same)], 32);
        let mut ranges = Ranges::new(Wanted::Changed, 9, 0, 32);
        ranges.take(&delta).unwrap();
        assert_eq!(pairs(&ranges.end().unwrap().concat()), [(4, 12)]);
        let whole = part(&[(0, 4, Zero), (4, 4, Data), (8, 8, Zero), (16, 16, Data)], 32);
        let mut ranges = Ranges::new(Wanted::Data, 9, 0, 32);
        ranges.take(&whole).unwrap();
        assert_eq!(pairs(&ranges.end().unwrap().concat()), [(4, 4), (16, 16)]);
    }

    #[test]
    fn a_volume_without_data_is_one_empty_message() {
        let mut ranges = Ranges::new(Wanted::Data, 9, 0, 32);
        ranges.take(&part(&[(0, 32, RangeState::Zero)], 32)).unwrap();
        assert_eq!(ranges.end().unwrap(), [vec![]]);
    }

    #[test]
    fn a_stream_that_lacks_something_is_an_error() {
        use RangeState::{Data, Same, Unspecified, Zero};
        let refused = |messages: &[DiffVolumeResponse]| {
            let mut ranges = Ranges::new(Wanted::Changed, 2, 0, 32);
            let taken = messages.iter().try_for_each(|one| ranges.take(one));
            let error = taken.and_then(|()| ranges.end().map(|_| ())).unwrap_err();
            assert_eq!(error.code(), Code::Internal, "{error}");
        };
        // Short, with a gap, back again, too far, of nothing, of no known state, of another size.
        refused(&[]);
        refused(&[part(&[(0, 16, Data)], 32)]);
        refused(&[part(&[(0, 8, Data), (16, 16, Data)], 32)]);
        refused(&[part(&[(0, 16, Data)], 32), part(&[(8, 24, Data)], 32)]);
        refused(&[part(&[(0, 33, Data)], 32)]);
        refused(&[part(&[(0, i64::MAX, Data)], 32)]);
        refused(&[part(&[(0, 0, Data), (0, 32, Data)], 32)]);
        refused(&[part(&[(0, 32, Unspecified)], 32)]);
        refused(&[part(&[(0, 16, Data), (16, 32, Zero)], 48)]);
        let mut wrong = part(&[(0, 32, Same)], 32);
        wrong.next_bytes = 16;
        refused(&[wrong]);
    }

    /// The state of a stretch of a volume, and whether the daemon's message ends after it.
    fn stretches() -> impl Strategy<Value = Vec<(i64, RangeState, bool)>> {
        let state =
            prop_oneof![Just(RangeState::Same), Just(RangeState::Data), Just(RangeState::Zero)];
        proptest::collection::vec((1_i64..9, state, proptest::bool::ANY), 0..60)
    }

    proptest! {
        #[test]
        fn each_selected_byte_is_reported_exactly_once(
            stretches in stretches(), max in 1_usize..9,
        ) {
            let size: i64 = stretches.iter().map(|(len, _, _)| len).sum();
            let mut ranges = Ranges::new(Wanted::Changed, max, 0, size);
            let (mut at, mut waiting, mut messages, mut expected) = (0, vec![], vec![], vec![]);
            let mut part_from = 0;
            for (len, state, ends) in stretches {
                waiting.push((at, len, state));
                if state != RangeState::Same {
                    expected.extend(at..at + len);
                }
                at += len;
                if ends {
                    ranges.take(&part(&waiting, size)).unwrap();
                    waiting.clear();
                    part_from = at;
                    while let Some(full) = ranges.full() {
                        messages.push(full);
                    }
                }
            }
            let mut last = part(&waiting, size);
            last.next_bytes = if waiting.is_empty() { part_from } else { at };
            ranges.take(&last).unwrap();
            messages.extend(ranges.end().unwrap());
            prop_assert!(!messages.is_empty());
            prop_assert!(messages.iter().all(|message| message.len() <= max));
            prop_assert!(messages.len() == 1 || messages.iter().all(|message| !message.is_empty()));
            let messages = pairs(&messages.concat());
            // They never touch: neighbours are one.
            prop_assert!(messages.windows(2).all(|two| two[0].0 + two[0].1 < two[1].0));
            let bytes: Vec<i64> = messages.iter().flat_map(|(at, len)| *at..at + len).collect();
            prop_assert_eq!(bytes, expected);
        }
    }
}
