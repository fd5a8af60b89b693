//! One line of a dump, read.

use blockd_mapper::entry::Composite;
use blockd_mapper::format::VolumeName;
use blockd_mapper::format::catalogue::{VolumeKind, VolumeRecord, check_volume};
use blockd_mapper::format::placement::Placement;
use blockd_mapper::format::settings::{OnFull, VolumeSettings};
use blockd_mapper::format::superblock::{DeviceRecord, DeviceState};
use blockd_mapper::format::{PageRef, PoolId};
use blockd_mapper::units::{Epoch, Lsn, PhysicalExtent, VolumeId, WallTime};

use super::dump::{DUMP_VERSION, FIRST_WORDS};

/// The content of a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Line {
    Pool(PoolLine),
    Features { compat: u64, ro_compat: u64, incompat: u64 },
    Log { start: u64, extents: u32, sequence: u64 },
    Reserve { start: u64, extents: u32 },
    Device(DeviceRecord),
    Volume(Box<VolumeRecord>),
    Settings(VolumeSettings),
    Label { key: String, value: String },
    Leaf { slot: u32, number: u64 },
    Share { slot: u32, number: u64 },
    Map { at: usize, count: usize, first: u64, valid: u64 },
    Over { at: usize, composite: Composite },
    Lost { slot: u64, count: u64 },
}

/// The pool as its line has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct PoolLine {
    pub(crate) pool_id: PoolId,
    pub(crate) extent_size: u32,
    pub(crate) node: u32,
    pub(crate) epoch: Epoch,
    pub(crate) generation: u64,
    pub(crate) lsn: Lsn,
    pub(crate) next_volume_id: u32,
}

/// Whether a text begins as a dump of this version.
pub(crate) fn first_line(line: &str) -> Result<(), super::DumpError> {
    use super::DumpError;
    let version = line.strip_prefix(FIRST_WORDS).and_then(|rest| rest.strip_prefix(' '));
    let version = version.ok_or(DumpError::NoDump)?;
    match version.parse::<u32>() {
        Ok(DUMP_VERSION) => Ok(()),
        _ => Err(DumpError::Version { found: version.chars().take(20).collect() }),
    }
}

/// The number of lines and the sum, if it is the last line.
pub(crate) fn last_line(line: &str) -> Option<(u64, u64)> {
    let (lines, sum) = line.strip_prefix("end ")?.split_once(' ')?;
    Some((lines.parse().ok()?, u64::from_str_radix(sum, 16).ok()?))
}

/// Reads any line between.
pub(crate) fn parse(line: &str) -> Result<Line, String> {
    let mut words = Words(line.split(' '));
    let line = match words.next()? {
        "pool" => Line::Pool(PoolLine {
            pool_id: words.id()?,
            extent_size: words.named("extent")?,
            node: words.named("node")?,
            epoch: Epoch(words.named("epoch")?),
            generation: words.named("generation")?,
            lsn: Lsn(words.named("lsn")?),
            next_volume_id: words.named("next")?,
        }),
        "features" => {
            let (compat, ro_compat, incompat) = (words.hex()?, words.hex()?, words.hex()?);
            Line::Features { compat, ro_compat, incompat }
        }
        "log" => {
            let (start, extents) = (words.number()?, words.number()?);
            Line::Log { start, extents, sequence: words.named("sequence")? }
        }
        "reserve" => Line::Reserve { start: words.number()?, extents: words.number()? },
        "device" => Line::Device(device(&mut words)?),
        "volume" => return volume(VolumeKind::Volume, words, line),
        "snapshot" => return volume(VolumeKind::Snapshot, words, line),
        "settings" => {
            let (on_full, timeout): (u8, u32) = (words.named("on_full")?, words.named("timeout")?);
            let on_full = match (on_full, timeout) {
                (0, 0) => OnFull::Block,
                (1, _) => OnFull::Timeout(timeout),
                (2, 0) => OnFull::Error,
                _ => return Err(format!("on_full {on_full} with timeout {timeout} is unknown")),
            };
            let settings = VolumeSettings {
                on_full,
                thick: words.named::<u8>("thick")? == 1,
                reservation: words.named("reservation")?,
                quota: words.named("quota")?,
                iops: words.named("iops")?,
                bandwidth: words.named("bandwidth")?,
                placement: words.placement()?,
            };
            settings.check().map_err(|error| error.to_string())?;
            Line::Settings(settings)
        }
        // A value may have blanks.
        "label" => {
            let label = line.split_once(' ').and_then(|(_, label)| label.split_once('='));
            let (key, value) = label.ok_or("a label has a key and a value")?;
            return Ok(Line::Label { key: key.to_owned(), value: value.to_owned() });
        }
        "leaf" => Line::Leaf { slot: words.number()?, number: words.number()? },
        "share" => Line::Share { slot: words.number()?, number: words.number()? },
        "map" => {
            let (at, count) = (words.number()?, words.number()?);
            Line::Map { at, count, first: words.number()?, valid: words.hex()? }
        }
        "over" => {
            let at = words.number()?;
            let (overlay, top) = (PhysicalExtent(words.number()?), words.hex()?);
            let (base, under) = (PhysicalExtent(words.number()?), words.hex()?);
            Line::Over { at, composite: Composite { overlay, top, base, under } }
        }
        "lost" => Line::Lost { slot: words.number()?, count: words.number()? },
        other => return Err(format!("{other:?} is no word of a dump")),
    };
    match words.0.next() {
        None => Ok(line),
        Some(more) => Err(format!("{more:?} stands where the line should end")),
    }
}

fn device(words: &mut Words<'_>) -> Result<DeviceRecord, String> {
    let record = DeviceRecord {
        uuid: words.id()?,
        size: words.named("size")?,
        first: PhysicalExtent(words.named("first")?),
        extents: words.named("extents")?,
        block_size: words.named("block")?,
        class: words.named("class")?,
        ..DeviceRecord::default()
    };
    let (state, keeps) = words.state()?;
    Ok(DeviceRecord { state, keeps, ..record })
}

fn volume(kind: VolumeKind, mut words: Words<'_>, line: &str) -> Result<Line, String> {
    let id = VolumeId(words.number()?);
    let lineage = VolumeId(words.named("lineage")?);
    let origin = VolumeId(words.named("origin")?);
    let block_size = words.named("block")?;
    let size = words.named("size")?;
    let created_lsn = Lsn(words.named("lsn")?);
    let made = WallTime(words.named("made")?);
    // The name is the rest of the line: it may have blanks.
    let (_, name) = line.split_once(" name ").ok_or("the name is missing")?;
    let name = VolumeName::new(name).map_err(|error| error.to_string())?;
    check_volume(size, block_size).map_err(|problem| problem.to_string())?;
    if id.0 == 0 || lineage.0 == 0 {
        return Err("id and lineage must not be 0".to_owned());
    }
    if made > WallTime::LAST {
        return Err(format!("{made} milliseconds is beyond the last time there is"));
    }
    Ok(Line::Volume(Box::new(VolumeRecord {
        id,
        lineage,
        origin,
        kind,
        block_size,
        size,
        created_lsn,
        made,
        root: PageRef::NONE,
        levels: 0,
        name,
        settings: VolumeSettings::default(),
    })))
}

struct Words<'a>(std::str::Split<'a, char>);

impl<'a> Words<'a> {
    fn next(&mut self) -> Result<&'a str, String> {
        self.0.next().ok_or_else(|| "the line ends too early".to_owned())
    }

    fn number<T: std::str::FromStr>(&mut self) -> Result<T, String> {
        let word = self.next()?;
        word.parse().map_err(|_| format!("{word:?} is no number that fits here"))
    }

    fn named<T: std::str::FromStr>(&mut self, name: &str) -> Result<T, String> {
        let word = self.next()?;
        if word != name {
            return Err(format!("{word:?} stands where {name:?} should"));
        }
        self.number()
    }

    /// A device's state, which dumps name only where it is not in use, and the extents that one
    /// keeps which shrinks.
    fn state(&mut self) -> Result<(DeviceState, u64), String> {
        match self.0.next() {
            None => Ok((DeviceState::InUse, 0)),
            Some("leaving") => Ok((DeviceState::Leaving, 0)),
            Some("removed") => Ok((DeviceState::Removed, 0)),
            Some("shrinking") => Ok((DeviceState::Shrinking, self.number()?)),
            Some(other) => Err(format!("{other:?} is no state of a device")),
        }
    }

    /// A volume's placement, which dumps name only where it is not the default.
    fn placement(&mut self) -> Result<Placement, String> {
        let Some(word) = self.0.next() else { return Ok(Placement::default()) };
        if word != "placement" {
            return Err(format!("{word:?} stands where \"placement\" should"));
        }
        let (policy, mark) = (self.number()?, self.number()?);
        let placement = Placement::decode(policy, mark);
        placement.ok_or_else(|| format!("placement {policy} {mark} is unknown"))
    }

    fn hex(&mut self) -> Result<u64, String> {
        let word = self.next()?;
        u64::from_str_radix(word, 16).map_err(|_| format!("{word:?} is no hexadecimal number"))
    }

    fn id(&mut self) -> Result<[u8; 16], String> {
        let word = self.next()?;
        let id = u128::from_str_radix(word, 16).map_err(|_| format!("{word:?} is no identity"))?;
        Ok(id.to_be_bytes())
    }
}
