//! `blockd diff`.

use blockd_api::v1::{self, DiffVolumeRequest, VolumeRange};
use blockd_media::error::Error;
use serde::Serialize;

use super::{Context, amount, names, size_argument};

/// Show what a volume holds, or what has changed since a snapshot
///
/// Prints ranges with data to be read, and ranges that read as zeroes now and did not before. Both
/// volumes must be of one family: a volume, its snapshots, their clones and so on. Ranges are whole
/// sub-blocks (4 KiB where extents have 256 KiB). What is written meanwhile may or may not be among
/// them: compare two snapshots for an answer that stays true. With --json, an object on each line,
/// and sums on the last.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  blockd diff data\n  blockd diff data@tuesday --since data@monday"
)]
pub(crate) struct Diff {
    /// The volume or snapshot, NAME or POOL/NAME
    pub name: String,

    /// Snapshot to compare with; without it, allocated ranges are shown
    #[arg(long, value_name = "SNAPSHOT")]
    pub since: Option<String>,

    /// The first byte, like the end of what was seen before
    #[arg(long, value_name = "SIZE", default_value = "0", allow_negative_numbers = true)]
    pub from: String,

    /// The pool that they are in [default: the daemon's default pool]
    #[arg(long, default_value = "", hide_default_value = true)]
    pub pool: String,
}

/// A line of the output of `--json`.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct RangeShape {
    offset_bytes: u64,
    length_bytes: u64,
    state: &'static str,
}

/// The last line of the output of `--json`.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
struct Sums {
    volume_bytes: u64,
    data_bytes: u64,
    zero_bytes: u64,
}

/// Joins what parts of an answer have cut, and leaves out what does not matter.
#[derive(Debug, Default)]
struct Joined {
    /// Ranges that are the same, or have no data where everything is asked for, are of no interest.
    with_zeroes: bool,
    last: Option<RangeShape>,
    sums: Sums,
}

impl Joined {
    /// Takes a range; gives the one before it when that is complete.
    fn add(&mut self, range: &VolumeRange) -> Option<RangeShape> {
        let (offset, length) = (amount(range.offset_bytes), amount(range.length_bytes));
        let state = match range.state() {
            v1::RangeState::Data => "data",
            v1::RangeState::Zero if self.with_zeroes => "zero",
            _ => return self.last.take(),
        };
        match state {
            "data" => self.sums.data_bytes += length,
            _ => self.sums.zero_bytes += length,
        }
        let goes_on = |last: &&mut RangeShape| {
            last.state == state && last.offset_bytes + last.length_bytes == offset
        };
        if let Some(last) = self.last.as_mut().filter(goes_on) {
            last.length_bytes += length;
            return None;
        }
        let new = RangeShape { offset_bytes: offset, length_bytes: length, state };
        self.last.replace(new)
    }
}

impl Diff {
    pub(super) async fn run(mut self, context: &Context) -> Result<(), Error> {
        names::place(&mut self.pool, [&mut self.name].into_iter().chain(&mut self.since))?;
        let from_bytes = size_argument("from", &self.from)?;
        let mut joined = Joined { with_zeroes: self.since.is_some(), ..Joined::default() };
        let request = DiffVolumeRequest {
            name: self.name,
            pool: self.pool,
            since: self.since.unwrap_or_default(),
            from_bytes,
        };
        let mut client = context.client().await?;
        let mut stream = client.diff_volume(request).await?;
        while let Some(part) = client.next(&mut stream).await? {
            joined.sums.volume_bytes = amount(part.volume_bytes);
            let complete: Vec<_> =
                part.ranges.iter().filter_map(|range| joined.add(range)).collect();
            print(&complete, context)?;
        }
        let rest: Vec<_> = joined.last.take().into_iter().collect();
        print(&rest, context)?;
        let sums = &joined.sums;
        if context.output.is_json() {
            return context.output.json_line(sums);
        }
        let size = |bytes| context.output.size(bytes);
        let zeroes = if joined.with_zeroes {
            format!(", {} of zeroes", size(sums.zero_bytes))
        } else {
            String::new()
        };
        let of = size(sums.volume_bytes);
        context.output.text(&format!("{} of data{zeroes}, of {of}\n", size(sums.data_bytes)))
    }
}

fn print(ranges: &[RangeShape], context: &Context) -> Result<(), Error> {
    if context.output.is_json() {
        return ranges.iter().try_for_each(|range| context.output.json_line(range));
    }
    let mut text = String::new();
    for RangeShape { offset_bytes, length_bytes, state } in ranges {
        text.push_str(&format!("{offset_bytes:>16}  {length_bytes:>14}  {state}\n"));
    }
    if text.is_empty() { Ok(()) } else { context.output.text(&text) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_were_cut_are_joined() {
        let range = |offset_bytes, length_bytes, state: v1::RangeState| VolumeRange {
            offset_bytes,
            length_bytes,
            state: state.into(),
        };
        use v1::RangeState::{Data, Same, Zero};
        let all = [
            range(0, 10, Data),
            range(10, 10, Data),
            range(20, 5, Zero),
            range(25, 5, Same),
            range(30, 5, Zero),
        ];
        let join = |with_zeroes| {
            let mut joined = Joined { with_zeroes, ..Joined::default() };
            let mut seen: Vec<_> = all.iter().filter_map(|one| joined.add(one)).collect();
            seen.extend(joined.last.take());
            let seen: Vec<_> =
                seen.iter().map(|one| (one.offset_bytes, one.length_bytes, one.state)).collect();
            (seen, joined.sums.data_bytes, joined.sums.zero_bytes)
        };
        assert_eq!(join(false), (vec![(0, 20, "data")], 20, 0));
        assert_eq!(join(true), (vec![(0, 20, "data"), (20, 5, "zero"), (30, 5, "zero")], 20, 10));
    }
}
