//! Compares a pool with the rules it has to keep, and lists the violations.

use std::collections::HashSet;
use std::ops::Range;

use blockd_mapper::error::MapperError;
use blockd_mapper::format::catalogue::VolumeKind;
use blockd_mapper::geometry::Geometry;
use blockd_mapper::io::IoError;
use blockd_mapper::units::{PhysicalExtent, VolumeId};

pub use super::owners::Account;
use super::owners::{Owner, Owners};
use super::walk::{self, Leaf, PageUse, Stopped, Visitor};
use super::{CopyState, Entries, Fault, LogEnd, Reader, State, VolumeView};

/// Limit of stored findings; further ones are only counted. A pool that is damaged everywhere has
/// one for each page.
pub const MAX_FINDINGS: usize = 10_000;

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// A state that a crash may leave.
    Note,
    /// A state that no crash leaves, and that does not keep the pool from being opened: the next
    /// open corrects it, or goes on without labels that are lost. A repair would do more harm than
    /// good; check the disk.
    Warning,
    /// Data is lost, or a rule is broken.
    Damage,
}

/// One thing that is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// Which part of the metadata: superblock, catalogue, labels, log, tree, leaf, extent, volume,
    /// space.
    pub kind: &'static str,
    /// The volume it is about.
    pub volume: Option<VolumeId>,
    /// Its name.
    pub name: Option<String>,
    /// The bytes of the volume it is about.
    pub range: Option<Range<u64>>,
    /// The description of the finding.
    pub text: String,
}

/// The result of a check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// The findings, in the order in which they were found.
    pub findings: Vec<Finding>,
    /// Findings beyond those kept.
    pub more: u64,
    /// Bad enough to call the pool damaged.
    pub damaged: bool,
    /// Closed in order.
    pub clean: bool,
    /// Volumes.
    pub volumes: u64,
    /// Snapshots.
    pub snapshots: u64,
    /// Pages of metadata that were read.
    pub pages: u64,
    /// Leaves, each once.
    pub leaves: u64,
    /// References from volumes to leaves.
    pub leaf_references: u64,
    /// The log.
    pub log: LogEnd,
    /// Extents by their use.
    pub account: Account,
}

/// How far a check is. A repair that searches the media for pages counts extents in place of
/// volumes, and the pages that it finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Volumes done.
    pub volumes: u64,
    /// The total.
    pub of: u64,
    /// Pages read.
    pub pages: u64,
}

/// Checks a pool. Fails only where there is no superblock to begin with, or `progress` refuses.
pub fn check(
    reader: &mut Reader<'_>,
    progress: &mut dyn FnMut(Progress) -> Result<(), IoError>,
) -> Result<Report, MapperError> {
    let stopped = |_| MapperError::Internal("the check was stopped");
    let mut checker = Checker::new(reader, progress);
    checker.superblocks(reader);
    let mut state = State::of_checkpoint(reader, &mut checker).map_err(stopped)?;
    let next_id = state.next_volume_id;
    let log = if reader.superblock().clean {
        checker.of = state.volumes.len() as u64;
        state.replay(reader, &mut checker).map_err(stopped)?
    } else {
        // The next open reads these trees, also of volumes that the log deletes.
        checker.state(&state, next_id).map_err(stopped)?;
        checker.of = state.volumes.len() as u64 * 2;
        walk::volumes(reader, &state, &mut checker).map_err(stopped)?;
        let log = state.replay(reader, &mut checker).map_err(stopped)?;
        checker.again(reader);
        log
    };
    if let Some(fault) = &log.broken {
        let text = format!("{fault}; durable changes behind it can't be read");
        checker.finding(Severity::Damage, "log", None, None, text);
    }
    checker.state(&state, state.next_volume_id).map_err(stopped)?;
    walk::volumes(reader, &state, &mut checker).map_err(stopped)?;
    Ok(checker.report(reader, &state, log))
}

/// Checks the trees of the last checkpoint, without the log behind it: the structures that do not
/// change while a daemon serves the pool. A page is used again when a newer checkpoint is durable,
/// so a check without damage proves soundness, and damage counts only if no newer superblock
/// appeared meanwhile. A copy of the superblock that is just being written looks damaged for a
/// moment: only findings that persist a little later count.
pub fn check_checkpoint(
    reader: &mut Reader<'_>,
    progress: &mut dyn FnMut(Progress) -> Result<(), IoError>,
) -> Result<Report, MapperError> {
    let stopped = |_| MapperError::Internal("the check was stopped");
    let mut checker = Checker::new(reader, progress);
    checker.is_served = true;
    checker.superblocks(reader);
    let state = State::of_checkpoint(reader, &mut checker).map_err(stopped)?;
    checker.of = state.volumes.len() as u64;
    checker.state(&state, state.next_volume_id).map_err(stopped)?;
    walk::volumes(reader, &state, &mut checker).map_err(stopped)?;
    let log = LogEnd::unread(reader.superblock());
    Ok(checker.report(reader, &state, log))
}

struct Checker<'p> {
    geometry: Geometry,
    clean: bool,
    /// A daemon has the pool open.
    is_served: bool,
    owners: Owners,
    /// Where each leaf ends in its volume, and its lineage, by its number.
    leaves: Vec<(u64, VolumeId)>,
    references: u64,
    pages: u64,
    findings: Vec<Finding>,
    known: HashSet<String>,
    more: u64,
    damaged: bool,
    done: u64,
    of: u64,
    progress: &'p mut dyn FnMut(Progress) -> Result<(), IoError>,
}

impl<'p> Checker<'p> {
    fn new(
        reader: &Reader<'_>,
        progress: &'p mut dyn FnMut(Progress) -> Result<(), IoError>,
    ) -> Self {
        Self {
            geometry: reader.geometry(),
            clean: reader.superblock().clean,
            is_served: false,
            owners: Owners::new(reader.superblock()),
            leaves: Vec::new(),
            references: 0,
            pages: 0,
            findings: Vec::new(),
            known: HashSet::new(),
            more: 0,
            damaged: false,
            done: 0,
            of: 0,
            progress,
        }
    }

    /// The same again, for the state behind the log.
    fn again(&mut self, reader: &Reader<'_>) {
        self.owners = Owners::new(reader.superblock());
        self.leaves.clear();
        (self.references, self.pages) = (0, 0);
    }

    fn finding(
        &mut self,
        severity: Severity,
        kind: &'static str,
        volume: Option<&VolumeView>,
        range: Option<Range<u64>>,
        text: String,
    ) {
        self.damaged |= severity == Severity::Damage;
        let id = volume.map(|view| view.record.id);
        // The trees are gone through twice where there is a log.
        if !self.known.insert(format!("{kind} {id:?} {range:?} {text}")) {
            return;
        }
        if self.findings.len() >= MAX_FINDINGS {
            self.known.clear();
            self.more += 1;
            return;
        }
        let name = volume.map(|view| view.record.name.as_str().to_owned());
        self.findings.push(Finding { severity, kind, volume: id, name, range, text });
    }

    fn superblocks(&mut self, reader: &mut Reader<'_>) {
        let is_served = self.is_served;
        let unknown = reader.superblock().unknown_ro_compat();
        if unknown != 0 {
            let text = format!("features {unknown:#x} are unknown to this build: read-only for it");
            self.finding(Severity::Note, "superblock", None, None, text);
        }
        // An orderly end leaves all copies equal, and so does the start of a daemon. A crash may
        // leave one pair of them torn or behind. Other damage is not reported where a repair would
        // drop changes that a start of the daemon restores.
        let left = |severity| if self.clean { Severity::Damage } else { severity };
        let broken = |severity| if is_served { Severity::Damage } else { left(severity) };
        let newest = reader.superblock().generation;
        let mut found = Vec::new();
        for copy in reader.copies() {
            let at = format!("copy at byte {} of device {}", copy.offset, copy.device);
            found.push(match copy.state {
                CopyState::Good | CopyState::Newer(_) => continue,
                CopyState::Stale(generation) => {
                    let text = format!("{at} is of generation {generation}");
                    if newest.abs_diff(generation) > 1 {
                        (broken(Severity::Warning), text)
                    } else {
                        (left(Severity::Note), text)
                    }
                }
                CopyState::Torn(fault) => {
                    (broken(Severity::Note), format!("{at} can't be used: {fault}"))
                }
                CopyState::Bad(fault) => {
                    (broken(Severity::Warning), format!("{at} can't be used: {fault}"))
                }
            });
        }
        for (severity, text) in found {
            self.finding(severity, "superblock", None, None, text);
        }
    }

    /// Rules among volumes.
    fn state(&mut self, state: &State, next_id: u32) -> Result<(), Stopped> {
        for name in state.double_names() {
            self.problem("volume", format!("name {:?} is used twice", name.as_str()))?;
        }
        for view in state.volumes.values() {
            let record = &view.record;
            let mut wrong = |text: String| {
                self.finding(Severity::Damage, "volume", Some(view), None, text);
            };
            if record.id.0 >= next_id {
                wrong(format!("its id is not below the next one, {next_id}"));
            }
            let founder = record.origin.0 == 0;
            if founder != (record.lineage == record.id) || record.lineage > record.id {
                let (lineage, origin) = (record.lineage, record.origin);
                wrong(format!("lineage {lineage} doesn't fit origin {origin}"));
            }
            if record.origin >= record.id {
                wrong(format!("origin {} is younger than it", record.origin));
            }
            if founder && record.kind == VolumeKind::Snapshot {
                wrong("a snapshot of nothing".to_owned());
            }
            if let Some(origin) = state.volumes.get(&record.origin)
                && origin.record.lineage != record.lineage
            {
                wrong(format!("origin {} is of another lineage", record.origin));
            }
            if record.created_lsn > state.lsn {
                let (created, last) = (record.created_lsn, state.lsn);
                wrong(format!("made at LSN {created}, behind the last, {last}"));
            }
        }
        Ok(())
    }

    fn bytes(&self, view: &VolumeView, slots: &Range<u64>) -> Range<u64> {
        let size = view.record.size;
        let at = |slot: u64| slot.saturating_mul(self.geometry.leaf_span()).min(size);
        at(slots.start)..at(slots.end)
    }

    fn entries(&mut self, leaf: &Leaf<'_>, entries: &Entries) -> u64 {
        let extent_size = self.geometry.extent_size();
        let lineage = leaf.volume.record.lineage;
        let mut end = 0;
        for (extent, entry) in (leaf.slot.first_extent().0..).zip(entries) {
            if !entry.is_mapped() {
                continue;
            }
            let start = extent * extent_size;
            let last = 64 - u64::from(entry.valid().leading_zeros());
            end = start + (last * self.geometry.sub_block_size()).max(1);
            // One logical extent each, and overlay and base differ: so no volume names an extent
            // twice, in whichever way.
            let owner = Owner::Lineage(lineage.0, extent);
            for physical in entry.extents() {
                let Err(other) = self.owners.claim(physical, owner) else { continue };
                if other != owner {
                    let text = self.clash(physical, other);
                    let range = start..start + extent_size;
                    self.finding(Severity::Damage, "extent", Some(leaf.volume), Some(range), text);
                }
            }
        }
        end
    }

    fn clash(&self, physical: PhysicalExtent, other: Owner) -> String {
        match other {
            Owner::Free => format!("extent {physical} can't be taken"),
            Owner::Fixed if self.owners.get(physical).is_none() => {
                format!("extent {physical} lies on no device")
            }
            Owner::Fixed => format!("extent {physical} belongs to the superblocks or the log"),
            Owner::Reserve => format!("extent {physical} is of the run kept for metadata"),
            Owner::Pages => format!("extent {physical} holds metadata"),
            Owner::Lineage(lineage, at) => format!(
                "extent {physical} is also that of byte {} in the lineage of volume {lineage}",
                at * self.geometry.extent_size()
            ),
        }
    }

    fn report(self, reader: &Reader<'_>, state: &State, log: LogEnd) -> Report {
        let snapshots = state.volumes.values();
        let snapshots =
            snapshots.filter(|view| view.record.kind == VolumeKind::Snapshot).count() as u64;
        Report {
            findings: self.findings,
            more: self.more,
            damaged: self.damaged,
            clean: reader.superblock().clean,
            volumes: state.volumes.len() as u64 - snapshots,
            snapshots,
            pages: self.pages,
            leaves: self.leaves.len() as u64,
            leaf_references: self.references,
            log,
            account: self.owners.account,
        }
    }
}

/// The loss of labels in words.
pub(crate) fn lost_labels(
    volume: Option<&VolumeView>,
    places: &Range<u64>,
    fault: &Fault,
) -> String {
    match volume {
        Some(_) => format!("{fault}; its labels are lost, its data is not affected"),
        None => {
            let last = places.end.saturating_sub(1);
            format!("{fault}; labels of volumes in places {} to {last} are lost", places.start)
        }
    }
}

impl Visitor for Checker<'_> {
    fn page(&mut self, page: PageUse) -> Result<(), Stopped> {
        self.pages += 1;
        let (extent, _) = self.geometry.page_place(page.address);
        match self.owners.claim(extent, Owner::Pages) {
            Ok(()) | Err(Owner::Pages | Owner::Reserve) => {}
            Err(other) => {
                let clash = self.clash(extent, other);
                let text =
                    format!("{} {} of tree {}: {clash}", page.structure, page.index, page.volume);
                self.finding(Severity::Damage, "extent", None, None, text);
            }
        }
        if self.pages.is_multiple_of(256) {
            let now = Progress { volumes: self.done, of: self.of, pages: self.pages };
            (self.progress)(now).map_err(|_| Stopped)?;
        }
        Ok(())
    }

    fn catalogue_lost(&mut self, places: Range<u64>, fault: &Fault) -> Result<(), Stopped> {
        let text = format!("{fault}; places {} to {} are lost", places.start, places.end - 1);
        self.finding(Severity::Damage, "catalogue", None, None, text);
        Ok(())
    }

    fn labels_lost(
        &mut self,
        volume: Option<&VolumeView>,
        places: Range<u64>,
        fault: &Fault,
    ) -> Result<(), Stopped> {
        let text = lost_labels(volume, &places, fault);
        // A daemon opens the pool without them. A repair would drop the delta ring.
        let is_settled = self.clean || self.is_served;
        let severity = if is_settled { Severity::Damage } else { Severity::Warning };
        self.finding(severity, "labels", volume, None, text);
        Ok(())
    }

    fn lost(
        &mut self,
        volume: &VolumeView,
        slots: Range<u64>,
        fault: &Fault,
    ) -> Result<(), Stopped> {
        let range = self.bytes(volume, &slots);
        self.finding(Severity::Damage, "tree", Some(volume), Some(range), fault.to_string());
        Ok(())
    }

    fn problem(&mut self, what: &'static str, text: String) -> Result<(), Stopped> {
        self.finding(Severity::Damage, what, None, None, text);
        Ok(())
    }

    fn volume(&mut self, _: &VolumeView) -> Result<(), Stopped> {
        self.done += 1;
        let now = Progress { volumes: self.done, of: self.of, pages: self.pages };
        (self.progress)(now).map_err(|_| Stopped)
    }

    fn leaf(&mut self, leaf: &Leaf<'_>) -> Result<(), Stopped> {
        self.references += 1;
        let lineage = leaf.volume.record.lineage;
        let number = usize::try_from(leaf.number - 1).unwrap_or(usize::MAX);
        if let Some(entries) = leaf.fresh {
            let end = self.entries(leaf, entries);
            self.leaves.push((end, lineage));
        }
        let Some(&(end, owner)) = self.leaves.get(number) else { return Ok(()) };
        if owner != lineage {
            let text = format!("slot {} is a leaf of the lineage of volume {owner}", leaf.slot);
            self.finding(Severity::Damage, "tree", Some(leaf.volume), None, text);
        }
        let size = leaf.volume.record.size;
        if end > size.next_multiple_of(self.geometry.sub_block_size()) {
            let text = format!("something is mapped up to byte {end}, beyond its size, {size}");
            self.finding(Severity::Damage, "tree", Some(leaf.volume), Some(size..end), text);
        }
        Ok(())
    }
}
