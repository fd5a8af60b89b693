//! A pool's metadata as lines of text.
//!
//! The first line has the version, the last the number of lines and their sum, so that a dump that
//! was cut short or edited is recognised. Kinds of lines are added without a new version: a release
//! that does not know one refuses the dump at that line. Leaves are numbered and stand
//! where they are met first; volumes that share one name its number.

use std::fmt::Write as _;
use std::ops::Range;

use blockd_mapper::entry::{Composite, Entry};
use blockd_mapper::error::MapperError;
use blockd_mapper::format::catalogue::{VolumeKind, VolumeRecord};
use blockd_mapper::format::settings::OnFull;
use blockd_mapper::format::superblock::DeviceState;
use blockd_mapper::units::VolumeId;

use super::check::{Progress, lost_labels};
use super::walk::{self, Leaf, PageUse, Stopped, Visitor};
use super::{Entries, Fault, Reader, State, VolumeView};

/// Version of the text.
pub const DUMP_VERSION: u32 = 1;
/// How the first line begins.
pub(crate) const FIRST_WORDS: &str = "blockd dump";
/// Text is given away in pieces of about this many bytes.
const PIECE: usize = 64 << 10;

/// A range of a volume that cannot be read any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lost {
    /// The volume; 0 for records of the catalogue.
    pub volume: VolumeId,
    /// Its name.
    pub name: String,
    /// The bytes of it; places of records for the catalogue.
    pub range: Range<u64>,
    /// Why.
    pub text: String,
}

/// The counts of a dump.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DumpReport {
    /// Volumes and snapshots.
    pub volumes: u64,
    /// Leaves, each once.
    pub leaves: u64,
    /// Changes of the log that are in it.
    pub log_changes: u64,
    /// The parts that are missing because they cannot be read.
    pub lost: Vec<Lost>,
}

/// Writes a pool, as it is at the end of its log, as text. `out` gets the text in pieces, and may
/// refuse; `progress` receives the progress.
pub fn dump(
    reader: &mut Reader<'_>,
    out: &mut dyn FnMut(&str) -> Result<(), Stopped>,
    progress: &mut dyn FnMut(Progress),
) -> Result<DumpReport, MapperError> {
    let mut dumper = Dumper::new(out, progress);
    dumper.all(reader).map_err(|Stopped| MapperError::Internal("the dump was stopped"))?;
    Ok(dumper.report)
}

struct Dumper<'o> {
    out: &'o mut dyn FnMut(&str) -> Result<(), Stopped>,
    text: String,
    lines: u64,
    sum: xxhash_rust::xxh3::Xxh3,
    span: u64,
    report: DumpReport,
    progress: &'o mut dyn FnMut(Progress),
    now: Progress,
}

impl<'o> Dumper<'o> {
    fn new(
        out: &'o mut dyn FnMut(&str) -> Result<(), Stopped>,
        progress: &'o mut dyn FnMut(Progress),
    ) -> Self {
        let (text, sum) = (String::new(), xxhash_rust::xxh3::Xxh3::new());
        let (report, now) = (DumpReport::default(), Progress { volumes: 0, of: 0, pages: 0 });
        Self { out, text, lines: 0, sum, span: 0, report, progress, now }
    }

    fn all(&mut self, reader: &mut Reader<'_>) -> Result<(), Stopped> {
        self.span = reader.geometry().leaf_span();
        let mut state = State::of_checkpoint(reader, self)?;
        let log = state.replay(reader, self)?;
        self.report.log_changes = log.pending;
        self.now.of = state.volumes.len() as u64;
        if let Some(fault) = log.broken {
            self.lose(VolumeId(0), "", 0..0, format!("{fault}; changes behind it are lost"));
        }
        self.header(reader, &state, log.next_sequence)?;
        walk::volumes(reader, &state, self)?;
        let (lines, sum) = (self.lines, self.sum.digest());
        let _ = writeln!(self.text, "end {lines} {sum:016x}");
        (self.out)(&self.text)
    }

    fn header(&mut self, reader: &Reader<'_>, state: &State, sequence: u64) -> Result<(), Stopped> {
        let s = reader.superblock();
        self.line(&format!("{FIRST_WORDS} {DUMP_VERSION}"))?;
        let (id, lsn, next) = (u128::from_be_bytes(s.pool_id), state.lsn, state.next_volume_id);
        self.line(&format!(
            "pool {id:032x} extent {} node {} epoch {} generation {} lsn {lsn} next {next}",
            s.extent_size, s.node, s.epoch, s.generation
        ))?;
        let (compat, ro_compat) = (s.compat, s.ro_compat);
        self.line(&format!("features {compat:x} {ro_compat:x} {:x}", s.incompat))?;
        self.line(&format!("log {} {} sequence {sequence}", s.wal_start, s.wal_extents))?;
        self.line(&format!("reserve {} {}", s.reserve_start, s.reserve_extents))?;
        for device in s.devices.as_slice() {
            let state = match device.state {
                DeviceState::InUse => String::new(),
                DeviceState::Leaving => " leaving".to_owned(),
                DeviceState::Removed => " removed".to_owned(),
                DeviceState::Shrinking => format!(" shrinking {}", device.keeps),
            };
            self.line(&format!(
                "device {:032x} size {} first {} extents {} block {} class {}{state}",
                u128::from_be_bytes(device.uuid),
                device.size,
                device.first,
                device.extents,
                device.block_size,
                device.class
            ))?;
        }
        Ok(())
    }

    fn line(&mut self, line: &str) -> Result<(), Stopped> {
        self.sum.update(line.as_bytes());
        self.sum.update(b"\n");
        self.lines += 1;
        self.text.push_str(line);
        self.text.push('\n');
        if self.text.len() < PIECE {
            return Ok(());
        }
        let text = std::mem::take(&mut self.text);
        (self.out)(&text)
    }

    fn lose(&mut self, volume: VolumeId, name: &str, range: Range<u64>, text: String) {
        self.report.lost.push(Lost { volume, name: name.to_owned(), range, text });
    }

    /// The settings of a volume, unless they are the defaults.
    fn settings(&mut self, record: &VolumeRecord) -> Result<(), Stopped> {
        if record.settings.is_default() {
            return Ok(());
        }
        let settings = &record.settings;
        let (kind, timeout) = match settings.on_full {
            OnFull::Block => (0, 0),
            OnFull::Timeout(ms) => (1, ms),
            OnFull::Error => (2, 0),
        };
        let placement = match settings.placement.encode() {
            (0, _) => String::new(),
            (policy, mark) => format!(" placement {policy} {mark}"),
        };
        self.line(&format!(
            "settings on_full {kind} timeout {timeout} thick {} reservation {} quota {} iops {} \
             bandwidth {}{placement}",
            u8::from(settings.thick),
            settings.reservation,
            settings.quota,
            settings.iops,
            settings.bandwidth
        ))
    }

    /// Neighbours that lie in a row and have equal bitmaps stand in one line. A composite entry has
    /// a line of its own.
    fn entries(&mut self, entries: &Entries) -> Result<(), Stopped> {
        let mut run: Option<(usize, u64, u64, u64)> = None;
        let ends = std::iter::once(&Entry::Unmapped);
        for (index, entry) in entries.iter().chain(ends).enumerate() {
            if let (Some((_, first, count, run_valid)), &Entry::Mapped { physical, valid }) =
                (&mut run, entry)
                && physical.0 == *first + *count
                && valid == *run_valid
            {
                *count += 1;
                continue;
            }
            if let Some((at, first, count, valid)) = run.take() {
                self.line(&format!("map {at} {count} {first} {valid:x}"))?;
            }
            match *entry {
                Entry::Unmapped => {}
                Entry::Mapped { physical, valid } => run = Some((index, physical.0, 1, valid)),
                Entry::Composite(Composite { overlay, top, base, under }) => {
                    self.line(&format!("over {index} {overlay} {top:x} {base} {under:x}"))?;
                }
            }
        }
        Ok(())
    }
}

impl Visitor for Dumper<'_> {
    fn page(&mut self, _: PageUse) -> Result<(), Stopped> {
        self.now.pages += 1;
        if self.now.pages.is_multiple_of(256) {
            (self.progress)(self.now);
        }
        Ok(())
    }

    fn catalogue_lost(&mut self, places: Range<u64>, fault: &Fault) -> Result<(), Stopped> {
        self.lose(VolumeId(0), "", places, format!("{fault}; volumes in these places are lost"));
        Ok(())
    }

    fn labels_lost(
        &mut self,
        volume: Option<&VolumeView>,
        places: Range<u64>,
        fault: &Fault,
    ) -> Result<(), Stopped> {
        let text = lost_labels(volume, &places, fault);
        let (id, name) =
            volume.map_or((VolumeId(0), ""), |view| (view.record.id, view.record.name.as_str()));
        self.lose(id, name, 0..0, text);
        Ok(())
    }

    fn lost(
        &mut self,
        volume: &VolumeView,
        slots: Range<u64>,
        fault: &Fault,
    ) -> Result<(), Stopped> {
        let size = volume.record.size;
        let range = (slots.start * self.span).min(size)..(slots.end * self.span).min(size);
        self.lose(volume.record.id, volume.record.name.as_str(), range, fault.to_string());
        self.line(&format!("lost {} {}", slots.start, slots.end - slots.start))
    }

    fn problem(&mut self, what: &'static str, text: String) -> Result<(), Stopped> {
        self.lose(VolumeId(0), "", 0..0, format!("{what}: {text}"));
        Ok(())
    }

    fn volume(&mut self, volume: &VolumeView) -> Result<(), Stopped> {
        self.now.volumes = self.report.volumes;
        (self.progress)(self.now);
        self.report.volumes += 1;
        let record = &volume.record;
        let kind = match record.kind {
            VolumeKind::Volume => "volume",
            VolumeKind::Snapshot => "snapshot",
        };
        self.line(&format!(
            "{kind} {} lineage {} origin {} block {} size {} lsn {} made {} name {}",
            record.id,
            record.lineage,
            record.origin,
            record.block_size,
            record.size,
            record.created_lsn,
            record.made,
            record.name.as_str()
        ))?;
        self.settings(record)?;
        for (key, value) in volume.labels.iter() {
            self.line(&format!("label {key}={value}"))?;
        }
        Ok(())
    }

    fn leaf(&mut self, leaf: &Leaf<'_>) -> Result<(), Stopped> {
        let Some(entries) = leaf.fresh else {
            return self.line(&format!("share {} {}", leaf.slot, leaf.number));
        };
        self.report.leaves += 1;
        self.line(&format!("leaf {} {}", leaf.slot, leaf.number))?;
        self.entries(entries)
    }
}
