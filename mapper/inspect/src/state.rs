//! The state of the volumes by catalogue and log: the catalogue's records, with the log's changes
//! over their trees.
//!
//! The changes of the log lie in layers. A snapshot shares the layers of its source, so memory
//! grows with the log and not with snapshots times changes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use blockd_mapper::entry::{Composite, Entry};
use blockd_mapper::format::catalogue::{VolumeKind, VolumeRecord};
use blockd_mapper::format::record::Change;
use blockd_mapper::format::settings::VolumeSettings;
use blockd_mapper::format::{Labels, PageRef, VolumeName};
use blockd_mapper::geometry::{Geometry, LEAF_ENTRIES};
use blockd_mapper::units::{ExtentIndex, Lsn, SlotIndex, VolumeId, WallTime};

use super::walk::{Entries, PageUse, Stopped, Visitor};
use super::{LogEnd, Reader, labels, read_log, walk};

/// The log's changes of a slot.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct SlotChange {
    /// Everything from before is gone.
    cleared: bool,
    entries: BTreeMap<u8, Entry>,
}

/// Changes between two moments at which a volume was shared or cut.
#[derive(Debug, Clone, Default)]
struct Layer {
    /// First of all, the volume was cut off at this size.
    cut: Option<u64>,
    slots: BTreeMap<u32, SlotChange>,
}

impl Layer {
    fn touches(&self, geometry: Geometry, slot: SlotIndex) -> bool {
        let behind = |size: u64| slot.0 + 1 >= geometry.slots_for(size);
        self.slots.contains_key(&slot.0) || self.cut.is_some_and(behind)
    }

    fn apply(&self, geometry: Geometry, slot: SlotIndex, entries: &mut Entries) {
        if let Some(size) = self.cut {
            for (extent, entry) in (slot.first_extent().0..).zip(entries.iter_mut()) {
                *entry = cut_entry(geometry, *entry, extent, size);
            }
        }
        let Some(change) = self.slots.get(&slot.0) else { return };
        if change.cleared {
            entries.fill(Entry::Unmapped);
        }
        for (&index, &entry) in &change.entries {
            entries[usize::from(index)] = entry;
        }
    }
}

/// Returns the rest of an entry when its volume ends at `size` bytes.
pub(crate) fn cut_entry(geometry: Geometry, entry: Entry, extent: u64, size: u64) -> Entry {
    let start = extent * geometry.extent_size();
    if start >= size {
        return Entry::Unmapped;
    }
    entry.keep(geometry.touched(0, (size - start).min(geometry.extent_size())))
}

/// A volume or snapshot at the end of the log.
#[derive(Debug, Clone)]
pub struct VolumeView {
    /// The record of the catalogue or of the log, with the final size by the log. The root is that
    /// of the tree below the changes of the log.
    pub record: VolumeRecord,
    /// Its labels.
    pub labels: Labels,
    /// The volume whose tree it is; the volume's own id unless the log made or rolled back the
    /// volume.
    pub(crate) tree: VolumeId,
    /// Slots of that tree.
    pub(crate) tree_slots: u32,
    layers: Vec<Arc<Layer>>,
}

impl VolumeView {
    /// A volume as the catalogue has it.
    pub(crate) fn new(geometry: Geometry, record: VolumeRecord) -> Self {
        let tree_slots = geometry.slots_for(record.size);
        let labels = Labels::default();
        Self { record, labels, tree: record.id, tree_slots, layers: Vec::new() }
    }

    /// The slots that the log changes.
    pub(crate) fn changed_slots(&self) -> BTreeSet<u32> {
        self.layers.iter().flat_map(|layer| layer.slots.keys().copied()).collect()
    }

    /// Which changes of the log lie over a slot: equal keys over equal pages are equal entries.
    pub(crate) fn key(&self, geometry: Geometry, slot: SlotIndex) -> Vec<usize> {
        let touching = self.layers.iter().filter(|layer| layer.touches(geometry, slot));
        touching.map(|layer| Arc::as_ptr(layer).addr()).collect()
    }

    /// Brings the entries of a slot to the end of the log.
    pub(crate) fn apply(&self, geometry: Geometry, slot: SlotIndex, entries: &mut Entries) {
        for layer in &self.layers {
            layer.apply(geometry, slot, entries);
        }
    }

    /// Returns the layer for changes, which is not shared.
    fn top(&mut self) -> &mut Layer {
        let shared = self.layers.last_mut().is_none_or(|top| Arc::get_mut(top).is_none());
        if shared {
            self.layers.push(Arc::default());
        }
        let last = self.layers.len() - 1;
        Arc::make_mut(&mut self.layers[last])
    }

    fn slot(&mut self, slot: u32) -> &mut SlotChange {
        self.top().slots.entry(slot).or_default()
    }

    fn cut(&mut self, size: u64) {
        self.layers.push(Arc::new(Layer { cut: Some(size), slots: BTreeMap::new() }));
    }
}

/// A snapshot, or with a size a clone, that the log makes.
struct New {
    id: VolumeId,
    name: VolumeName,
    size: Option<u64>,
    lsn: Lsn,
    made: WallTime,
}

/// All volumes and snapshots of a pool.
#[derive(Debug, Clone)]
pub struct State {
    geometry: Geometry,
    /// Volumes by id.
    pub volumes: BTreeMap<VolumeId, VolumeView>,
    /// This id and all above were never used.
    pub next_volume_id: u32,
    /// The last change that is in it.
    pub lsn: Lsn,
}

impl State {
    /// No volume.
    pub(crate) fn empty(reader: &Reader<'_>) -> Self {
        Self {
            geometry: reader.geometry(),
            volumes: BTreeMap::new(),
            next_volume_id: reader.superblock().next_volume_id,
            lsn: reader.superblock().checkpoint_lsn,
        }
    }

    /// Returns the state of the last checkpoint. Unreadable parts are reported to the visitor and
    /// left out.
    pub fn of_checkpoint(
        reader: &mut Reader<'_>,
        visitor: &mut dyn Visitor,
    ) -> Result<Self, Stopped> {
        let mut state = Self::empty(reader);
        let mut places = BTreeMap::new();
        for (place, record) in walk::catalogue(reader, visitor)? {
            places.insert(place, record.id);
            let view = VolumeView::new(state.geometry, record);
            if state.volumes.insert(record.id, view).is_some() {
                visitor.problem("catalogue", format!("volume {} stands in it twice", record.id))?;
            }
        }
        labels::read(reader, &places, &mut state.volumes, visitor)?;
        Ok(state)
    }

    /// Applies the changes of the log after the checkpoint. Changes that cannot be applied are
    /// reported to the visitor.
    pub fn replay(
        &mut self,
        reader: &mut Reader<'_>,
        visitor: &mut dyn Visitor,
    ) -> Result<LogEnd, Stopped> {
        let mut stopped = Ok(());
        let end = read_log(reader, |entry| {
            if entry.in_checkpoint || stopped.is_err() {
                return;
            }
            if let Err(problem) = self.apply(entry.change, entry.lsn) {
                stopped = visitor.problem("log", format!("LSN {}: {problem}", entry.lsn));
            }
            self.lsn = self.lsn.max(entry.lsn);
        });
        stopped.map(|()| end)
    }

    /// Applies one change, or says why that can't be.
    fn apply(&mut self, change: &Change, lsn: Lsn) -> Result<(), String> {
        match *change {
            Change::Map { volume, extent, physical, valid } => {
                self.map(volume, extent, Entry::Mapped { physical, valid })
            }
            Change::Unmap { volume, extent } => self.map(volume, extent, Entry::Unmapped),
            Change::Composite { volume, extent, overlay, top, base, under } => {
                let composite = Composite { overlay, top, base, under };
                self.map(volume, extent, Entry::Composite(composite))
            }
            Change::UnmapLeaf { volume, slot } => {
                let change = self.view(volume)?.slot(slot.0);
                *change = SlotChange { cleared: true, entries: BTreeMap::new() };
                Ok(())
            }
            Change::Create { volume, size, block_size, made, ref name } => self.add(VolumeRecord {
                id: volume,
                lineage: volume,
                origin: VolumeId(0),
                kind: VolumeKind::Volume,
                block_size,
                size,
                created_lsn: lsn,
                made,
                root: PageRef::NONE,
                levels: 0,
                name: **name,
                settings: VolumeSettings::default(),
            }),
            Change::Delete { volume } => {
                self.view(volume)?;
                self.volumes.remove(&volume);
                Ok(())
            }
            Change::Resize { volume, size } => {
                let view = self.view(volume)?;
                if size < view.record.size {
                    view.cut(size);
                }
                view.record.size = size;
                Ok(())
            }
            Change::Snapshot { volume, source, made, ref name } => {
                self.share(source, &New { id: volume, name: **name, size: None, lsn, made })
            }
            Change::Clone { volume, source, size, made, ref name } => {
                self.share(source, &New { id: volume, name: **name, size: Some(size), lsn, made })
            }
            Change::Rollback { volume, snapshot, size } => self.roll_back(volume, snapshot, size),
            Change::Rename { volume, ref name } => {
                self.view(volume)?.record.name = **name;
                Ok(())
            }
            Change::SnapshotGroup { volume, made, ref members } => {
                for (id, member) in (volume.0..).zip(members.iter()) {
                    let new = New { id: VolumeId(id), name: member.name, size: None, lsn, made };
                    self.share(member.source, &new)?;
                }
                Ok(())
            }
        }
    }

    fn view(&mut self, id: VolumeId) -> Result<&mut VolumeView, String> {
        self.volumes.get_mut(&id).ok_or_else(|| format!("volume {id} does not exist"))
    }

    fn map(&mut self, id: VolumeId, extent: ExtentIndex, entry: Entry) -> Result<(), String> {
        let geometry = self.geometry;
        let view = self.view(id)?;
        if extent.0 >= geometry.extents_for(view.record.size) {
            return Err(format!("extent {extent} lies beyond the end of volume {id}"));
        }
        let index = u8::try_from(extent.0 % LEAF_ENTRIES).unwrap_or(u8::MAX);
        view.slot(extent.slot().0).entries.insert(index, entry);
        Ok(())
    }

    fn add(&mut self, record: VolumeRecord) -> Result<(), String> {
        self.add_view(VolumeView::new(self.geometry, record))
    }

    fn add_view(&mut self, view: VolumeView) -> Result<(), String> {
        let id = view.record.id;
        if id.0 < self.next_volume_id {
            return Err(format!("volume {id} is made, and its id was used before"));
        }
        self.next_volume_id = id.0.saturating_add(1);
        self.volumes.insert(id, view);
        Ok(())
    }

    fn share(&mut self, source: VolumeId, new: &New) -> Result<(), String> {
        let New { id, name, size, lsn, made } = *new;
        let mut view = self.view(source)?.clone();
        let kind = if size.is_some() { VolumeKind::Volume } else { VolumeKind::Snapshot };
        view.record = VolumeRecord {
            id,
            origin: source,
            kind,
            size: size.unwrap_or(view.record.size),
            created_lsn: lsn,
            made,
            name,
            settings: VolumeSettings::default(),
            ..view.record
        };
        view.labels = Labels::default();
        self.add_view(view)
    }

    fn roll_back(
        &mut self,
        id: VolumeId,
        snapshot: VolumeId,
        size: Option<u64>,
    ) -> Result<(), String> {
        let from = self.view(snapshot)?.clone();
        let to = self.view(id)?;
        if to.record.lineage != from.record.lineage || from.record.kind != VolumeKind::Snapshot {
            return Err(format!(
                "volume {id} is rolled back to {snapshot}, no snapshot of its own"
            ));
        }
        let (root, levels) = (from.record.root, from.record.levels);
        let size = size.unwrap_or(from.record.size);
        to.record = VolumeRecord { root, levels, size, ..to.record };
        (to.tree, to.tree_slots, to.layers) = (from.tree, from.tree_slots, from.layers);
        Ok(())
    }

    /// Names that several volumes have: there must be none.
    #[must_use]
    pub fn double_names(&self) -> Vec<VolumeName> {
        let mut seen = std::collections::HashSet::new();
        let names = self.volumes.values().map(|view| view.record.name);
        names.filter(|name| !seen.insert(*name)).collect()
    }
}

/// For callers that need only the state.
impl Visitor for () {
    fn page(&mut self, _: PageUse) -> Result<(), Stopped> {
        Ok(())
    }
}
