//! From the text of a dump back to metadata, in two passes: the first judges all of it before
//! anything is written, the second writes.

mod content;

use std::collections::HashSet;

use blockd_mapper::entry::Entry;
use blockd_mapper::error::MapperError;
use blockd_mapper::format::Labels;
use blockd_mapper::open::PresentDevice;
use blockd_mapper::units::{DeviceIndex, PhysicalExtent};

use super::dump_line::{Line, first_line, last_line, parse};
use super::rebuild::{Builder, MediaMut, PageSource};
use super::walk::NO_ENTRIES;
use super::{Entries, IDS_SKIPPED, reader};

use content::Content;

/// Epochs that are skipped: more than there are openings of a pool, and few of all.
const EPOCHS_SKIPPED: u64 = 1 << 32;

/// The error of a second pass that reads something else than the first.
const CHANGED: MapperError = MapperError::Internal("the dump has changed between two readings");

/// Lines that were read, without the last one, which has their sum.
#[derive(Default)]
struct Lines {
    count: u64,
    sum: xxhash_rust::xxh3::Xxh3,
}

impl std::fmt::Debug for Lines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lines").field("count", &self.count).finish_non_exhaustive()
    }
}

impl Lines {
    fn add(&mut self, line: &str) {
        self.sum.update(line.as_bytes());
        self.sum.update(b"\n");
        self.count += 1;
    }
}

/// Why a dump can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DumpError {
    /// The file is not a dump.
    #[error("it is no dump of a pool: the first line must be \"blockd dump\" and a version")]
    NoDump,
    /// Another version wrote it.
    #[error("it is of version {found}: this build reads version {}", super::dump::DUMP_VERSION)]
    Version {
        /// The version found.
        found: String,
    },
    /// The end is missing.
    #[error("it was cut short: the last line, with the sum, is missing after line {lines}")]
    Cut {
        /// Lines there are.
        lines: u64,
    },
    /// The dump was changed.
    #[error(
        "it was changed: its {lines} lines have sum {computed:016x}, the last line says {recorded}"
    )]
    Edited {
        /// Lines there are.
        lines: u64,
        /// Their sum.
        computed: u64,
        /// The sum in the last line.
        recorded: String,
    },
    /// A line makes no sense.
    #[error("line {line}: {problem}")]
    Line {
        /// Which, from 1.
        line: u64,
        /// The problem.
        problem: String,
    },
}

/// The first pass.
pub struct Scan {
    read: Lines,
    end: Option<(u64, u64)>,
    /// The first thing that is wrong; whether it was edited is known at the end only.
    problem: Option<DumpError>,
    content: Content,
}

impl std::fmt::Debug for Scan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scan").field("read", &self.read).finish_non_exhaustive()
    }
}

impl Default for Scan {
    fn default() -> Self {
        Self::new()
    }
}

impl Scan {
    /// Creates the state before the first line.
    #[must_use]
    pub fn new() -> Self {
        let content = Content::default();
        Self { read: Lines::default(), end: None, problem: None, content }
    }

    /// The next line, without its line feed. `false`: later lines do not change the verdict.
    pub fn line(&mut self, line: &str) -> bool {
        if self.read.count == 0
            && let Err(error) = first_line(line)
        {
            self.problem = Some(error);
            return false;
        }
        if let Some(end) = last_line(line) {
            self.end = Some(end);
            return false;
        }
        self.read.add(line);
        if self.read.count > 1 && self.problem.is_none() {
            let taken = parse(line).and_then(|line| self.content.take(line));
            let line = self.read.count;
            self.problem = taken.err().map(|problem| DumpError::Line { line, problem });
        }
        true
    }

    /// The judgement.
    pub fn finish(mut self) -> Result<Plan, DumpError> {
        let lines = self.read.count;
        if let Some(error @ (DumpError::NoDump | DumpError::Version { .. })) = self.problem {
            return Err(error);
        }
        if lines == 0 {
            return Err(DumpError::NoDump);
        }
        let Some((recorded_lines, sum)) = self.end else { return Err(DumpError::Cut { lines }) };
        let computed = self.read.sum.digest();
        if (recorded_lines, sum) != (lines, computed) {
            let recorded = format!("{recorded_lines} lines, {sum:016x}");
            return Err(DumpError::Edited { lines, computed, recorded });
        }
        if let Some(problem) = self.problem {
            return Err(problem);
        }
        let ended = self.content.end();
        ended.map_err(|problem| DumpError::Line { line: lines, problem })?;
        Ok(Plan { content: self.content, end: (lines, computed) })
    }
}

/// A dump that makes sense.
#[derive(Debug)]
pub struct Plan {
    content: Content,
    /// Lines in front of the last one, and their sum.
    end: (u64, u64),
}

/// The content of the devices that a dump is to be restored to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    handles: Vec<u8>,
    generation: u64,
    epoch: u64,
    next_volume_id: u32,
    /// Every device says by a superblock of its own that it is the one of the dump.
    pub known: bool,
    /// The error of structures of a later release on the devices, which this one does not know.
    pub later: Option<MapperError>,
}

impl Plan {
    /// Volumes and snapshots in it.
    #[must_use]
    pub const fn volumes(&self) -> u64 {
        self.content.volumes
    }

    /// Slots of volumes that were lost already when it was written.
    #[must_use]
    pub const fn lost_slots(&self) -> u64 {
        self.content.lost_slots
    }

    /// The pool that it is of.
    #[must_use]
    pub fn pool_id(&self) -> [u8; 16] {
        self.content.pool.unwrap_or_default().pool_id
    }

    /// Finds out which device is which. One that says nothing is taken for one that is left over,
    /// in the order given.
    pub fn target(
        &self,
        media: &mut dyn MediaMut,
        present: &[PresentDevice],
    ) -> Result<Target, MapperError> {
        let refuse = |device: &PresentDevice, problem: String| {
            Err(MapperError::Device { name: device.name.clone(), problem })
        };
        let table = &self.content.devices;
        if present.len() != table.iter().filter(|device| device.is_present()).count() {
            let (value, allowed) = (present.len() as u64, "as many as the dump has");
            return Err(MapperError::Invalid { field: "devices", value, allowed });
        }
        let pool = self.content.pool.unwrap_or_default();
        let mut target = Target {
            handles: vec![u8::MAX; table.len()],
            generation: pool.generation,
            epoch: pool.epoch.0,
            next_volume_id: pool.next_volume_id,
            known: true,
            later: None,
        };
        let mut unknown = Vec::new();
        for (handle, device) in (0..).zip(present) {
            if let Some(error) = reader::too_new(media, DeviceIndex(handle), device) {
                target.later.get_or_insert_with(|| error.into());
            }
            let Some(own) = reader::newest_copy(media, DeviceIndex(handle), device) else {
                unknown.push(handle);
                continue;
            };
            if own.pool_id != pool.pool_id {
                let found = blockd_mapper::open::find::hex(&own.pool_id);
                return refuse(device, format!("belongs to pool {found}"));
            }
            let features = own.unknown_ro_compat();
            if features != 0 {
                target.later.get_or_insert(MapperError::Unsupported { features });
            }
            target.generation = target.generation.max(own.generation);
            target.epoch = target.epoch.max(own.epoch.0);
            // No id is used twice, since backups identify snapshots by them. Volumes in the log of
            // a pool in use are in no superblock yet.
            if !own.clean || own.next_volume_id > pool.next_volume_id {
                let next = own.next_volume_id.max(pool.next_volume_id);
                let next = next.saturating_add(IDS_SKIPPED);
                target.next_volume_id = target.next_volume_id.max(next);
            }
            let record = own.devices.as_slice().get(usize::from(own.this_device.0));
            let at = record.and_then(|own| table.iter().position(|d| d.uuid == own.uuid));
            match at {
                // It had left the pool when the dump was made.
                Some(at) if !table[at].is_present() => {}
                Some(at) if target.handles[at] == u8::MAX => target.handles[at] = handle,
                Some(_) => return refuse(device, "is the same device as another one".to_owned()),
                None => return refuse(device, "is not one of the dump's devices".to_owned()),
            }
        }
        target.known = unknown.is_empty();
        let free = target.handles.iter_mut().zip(table);
        let free = free.filter(|(handle, record)| **handle == u8::MAX && record.is_present());
        for ((place, _), handle) in free.zip(unknown) {
            *place = handle;
        }
        for (record, handle) in table.iter().zip(&target.handles) {
            let Some(device) = present.get(usize::from(*handle)) else { continue };
            if device.size < record.size {
                let (size, needed) = (device.size, record.size);
                return refuse(device, format!("has {size} bytes, {needed} are needed"));
            }
        }
        Ok(target)
    }

    /// Begins the second pass. The old metadata is written over from here on.
    pub fn begin<'m>(
        self,
        media: &'m mut dyn MediaMut,
        target: Target,
    ) -> Result<Restoring<'m>, MapperError> {
        let known = self.content.known.ok_or(MapperError::Internal("the dump has no head"))?;
        let mut superblock = known.superblock;
        // A copy that is left from before must not be taken for a newer one, or for a twin.
        superblock.generation = target.generation.saturating_add(2);
        // Nor a page of it for one of a later owner, should it be cut off.
        superblock.epoch.0 = target.epoch.saturating_add(EPOCHS_SKIPPED);
        superblock.next_volume_id = target.next_volume_id;
        let avoid = HashSet::new();
        let pages = PageSource::new(&superblock, &known.owners, &avoid, self.content.pages)?;
        let builder = Builder::new(media, superblock, target.handles, pages);
        let (read, end) = (Lines::default(), self.end);
        Ok(Restoring { builder, leaf: None, labels: Vec::new(), read, end })
    }
}

/// The second pass.
#[derive(Debug)]
pub struct Restoring<'m> {
    builder: Builder<'m>,
    leaf: Option<(u32, u64, Box<Entries>)>,
    /// Labels of the volume so far.
    labels: Vec<(String, String)>,
    read: Lines,
    /// The same of the first pass.
    end: (u64, u64),
}

impl Restoring<'_> {
    /// The next line, as in the first pass.
    pub fn line(&mut self, line: &str) -> Result<(), MapperError> {
        if last_line(line).is_some() {
            return Ok(());
        }
        self.read.add(line);
        if self.read.count == 1 {
            return Ok(());
        }
        match parse(line).map_err(|_| CHANGED)? {
            Line::Volume(record) => {
                self.end_leaf()?;
                self.labels.clear();
                self.builder.volume(*record)
            }
            Line::Settings(settings) => {
                self.builder.settings(settings);
                Ok(())
            }
            Line::Label { key, value } => {
                self.labels.push((key, value));
                let labels = self.labels.iter().map(|(key, value)| (key, value));
                self.builder.labels(Labels::new(labels)?);
                Ok(())
            }
            Line::Leaf { slot, number } => {
                self.end_leaf()?;
                self.leaf = Some((slot, number, Box::new(NO_ENTRIES)));
                Ok(())
            }
            Line::Share { slot, number } => {
                self.end_leaf()?;
                self.builder.share(number, slot)
            }
            Line::Map { at, count, first, valid } => {
                if let Some((_, _, entries)) = &mut self.leaf {
                    for (entry, physical) in entries.iter_mut().skip(at).take(count).zip(first..) {
                        let physical = PhysicalExtent(physical);
                        *entry = Entry::Mapped { physical, valid };
                    }
                }
                Ok(())
            }
            Line::Over { at, composite } => {
                let leaf = self.leaf.as_mut().and_then(|(.., entries)| entries.get_mut(at));
                if let Some(entry) = leaf {
                    *entry = Entry::Composite(composite);
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn end_leaf(&mut self) -> Result<(), MapperError> {
        match self.leaf.take() {
            Some((slot, number, entries)) => self.builder.leaf(number, slot, &entries),
            None => Ok(()),
        }
    }

    /// Writes the rest, and makes it valid. Returns the pages written.
    ///
    /// # Errors
    /// If the lines were not those of the first pass: nothing of them is valid then.
    pub fn finish(mut self) -> Result<u64, MapperError> {
        if (self.read.count, self.read.sum.digest()) != self.end {
            return Err(CHANGED);
        }
        self.end_leaf()?;
        let pages = self.builder.pages_written;
        self.builder.finish()?;
        Ok(pages)
    }
}
