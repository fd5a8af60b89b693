//! Through the trees: every page once, every leaf once for each volume that has it.

use std::collections::HashMap;

use blockd_mapper::entry::Entry;
use blockd_mapper::format::catalogue::{RECORDS_PER_PAGE, VolumeRecord, decode_catalogue};
use blockd_mapper::format::index_page::decode_index;
use blockd_mapper::format::leaf_page::decode_leaf;
use blockd_mapper::format::page::{PageExpect, PageKind};
use blockd_mapper::format::under_page::decode_under;
use blockd_mapper::format::{
    INDEX_FANOUT, PageRef, Place, Problem, Structure, capacity_of, levels_for,
};
use blockd_mapper::leaf::LEAF_ENTRIES;
use blockd_mapper::units::{PageAddress, SlotIndex, VolumeId};

use super::{Fault, Reader, State, VolumeView};

/// The entries of a leaf.
pub type Entries = [Entry; LEAF_ENTRIES];

/// A leaf in which nothing is mapped.
pub(crate) const NO_ENTRIES: Entries = [Entry::Unmapped; LEAF_ENTRIES];

/// The visitor stopped the walk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stopped;

/// A page of a tree that is in use and sound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageUse {
    /// Where it lies.
    pub address: PageAddress,
    /// The kind of structure.
    pub structure: Structure,
    /// The volume by way of which it was found; 0 for the catalogue.
    pub volume: u32,
    /// Its level: 0 for leaves and catalogue pages.
    pub level: u8,
    /// Which page of its level.
    pub index: u64,
}

/// A leaf of a volume.
#[derive(Debug, Clone, Copy)]
pub struct Leaf<'a> {
    /// The volume.
    pub volume: &'a VolumeView,
    /// Which of the volume.
    pub slot: SlotIndex,
    /// Its number: volumes that share a leaf show the same.
    pub number: u64,
    /// Its entries when it is met for the first time.
    pub fresh: Option<&'a Entries>,
}

/// Callbacks of a walk over a pool.
pub trait Visitor {
    /// A page that is in use, once each.
    fn page(&mut self, page: PageUse) -> Result<(), Stopped>;

    /// A part of the catalogue that can't be read: these places for records.
    fn catalogue_lost(
        &mut self,
        places: std::ops::Range<u64>,
        fault: &Fault,
    ) -> Result<(), Stopped> {
        let _ = (places, fault);
        Ok(())
    }

    /// Labels that can't be read: those of a volume, or of all in these places of the catalogue.
    fn labels_lost(
        &mut self,
        volume: Option<&VolumeView>,
        places: std::ops::Range<u64>,
        fault: &Fault,
    ) -> Result<(), Stopped> {
        let _ = (volume, places, fault);
        Ok(())
    }

    /// A part of a volume that can't be read: these slots.
    fn lost(
        &mut self,
        volume: &VolumeView,
        slots: std::ops::Range<u64>,
        fault: &Fault,
    ) -> Result<(), Stopped> {
        let _ = (volume, slots, fault);
        Ok(())
    }

    /// Reports a violation of a rule.
    fn problem(&mut self, what: &'static str, text: String) -> Result<(), Stopped> {
        let _ = (what, text);
        Ok(())
    }

    /// Whether every leaf is to be read again for each volume that has it.
    fn every_leaf(&self) -> bool {
        false
    }

    /// A volume of which the leaves follow.
    fn volume(&mut self, volume: &VolumeView) -> Result<(), Stopped> {
        let _ = volume;
        Ok(())
    }

    /// A leaf with anything in it, in the order of slots.
    fn leaf(&mut self, leaf: &Leaf<'_>) -> Result<(), Stopped> {
        let _ = leaf;
        Ok(())
    }
}

/// Reads the records of the catalogue, each with its place.
pub(crate) fn catalogue(
    reader: &mut Reader<'_>,
    visitor: &mut dyn Visitor,
) -> Result<Vec<(u64, VolumeRecord)>, Stopped> {
    let superblock = reader.superblock().clone();
    let pages = u64::from(superblock.catalogue_records).div_ceil(RECORDS_PER_PAGE);
    let levels = superblock.catalogue_levels;
    if levels != levels_for(pages) && pages > 0 {
        let text = format!("{levels} levels over {pages} pages, expected {}", levels_for(pages));
        visitor.problem("catalogue", text)?;
    }
    let mut records = Vec::new();
    let mut pending = vec![(superblock.catalogue_root, levels, 0_u64)];
    while let Some((reference, level, index)) = pending.pop() {
        if reference.is_none() {
            continue;
        }
        let capacity = capacity_of(level).saturating_mul(RECORDS_PER_PAGE);
        let places = index * capacity..(index + 1) * capacity;
        let read = if level == 0 {
            catalogue_page(reader, reference, index).map(|found| records.extend(found))
        } else {
            index_page(reader, reference, None, level, index).map(|found| {
                for (child, reference) in (index * INDEX_FANOUT..).zip(found) {
                    pending.push((reference, level - 1, child));
                }
            })
        };
        let structure = if level == 0 { Structure::CataloguePage } else { Structure::IndexPage };
        let address = reference.address;
        match read {
            Ok(()) => visitor.page(PageUse { address, structure, volume: 0, level, index })?,
            Err(fault) => visitor.catalogue_lost(places, &fault)?,
        }
    }
    Ok(records)
}

fn catalogue_page(
    reader: &mut Reader<'_>,
    reference: PageRef,
    index: u64,
) -> Result<Vec<(u64, VolumeRecord)>, Fault> {
    let place = Place::Page(reference.address);
    let page = reader.page(reference, Structure::CataloguePage)?;
    let expect = PageExpect::catalogue(reader.superblock().pool_id, index, reference.sum);
    let (geometry, limits) = (reader.geometry(), *reader.limits());
    let decoded = decode_catalogue(&page.0, &expect, geometry, &limits, place)?;
    let places = index * RECORDS_PER_PAGE..;
    let records = places.zip(decoded.records()).filter_map(|(at, one)| Some((at, (*one)?)));
    Ok(records.collect())
}

/// The references of an index page of a volume, or without one of the catalogue.
pub(crate) fn index_page(
    reader: &mut Reader<'_>,
    reference: PageRef,
    volume: Option<u32>,
    level: u8,
    index: u64,
) -> Result<Vec<PageRef>, Fault> {
    let place = Place::Page(reference.address);
    let page = reader.page(reference, Structure::IndexPage)?;
    let (id, sum) = (reader.superblock().pool_id, reference.sum);
    let expect = match volume {
        Some(_) => PageExpect::index(id, level, index, sum),
        None => PageExpect::catalogue_index(id, level, index, sum),
    };
    let decoded = decode_index(&page.0, &expect, reader.limits(), place)?;
    Ok(decoded.iter().collect())
}

/// The entries of a leaf page, with its reference to an under page.
fn leaf_page(
    reader: &mut Reader<'_>,
    reference: PageRef,
    slot: SlotIndex,
) -> Result<(Box<Entries>, PageRef), Fault> {
    let page = reader.page(reference, Structure::LeafPage)?;
    let expect = PageExpect::leaf(reader.superblock().pool_id, slot, reference.sum);
    decode_whole_leaf(reader, &page.0, reference.address, &expect)
}

/// The same of a page that is read already.
pub(crate) fn decode_whole_leaf(
    reader: &mut Reader<'_>,
    page: &[u8],
    address: PageAddress,
    expect: &PageExpect,
) -> Result<(Box<Entries>, PageRef), Fault> {
    let limits = *reader.limits();
    let leaf = decode_leaf(page, expect, &limits, Place::Page(address))?;
    let mut entries = Box::new(NO_ENTRIES);
    if let Some(plain) = leaf.plain() {
        for (entry, mapping) in entries.iter_mut().zip(plain) {
            *entry = mapping.into();
        }
        return Ok((entries, leaf.under()));
    }
    let under = leaf.under();
    let page = reader.page(under, Structure::UnderPage)?;
    let expect = PageExpect { kind: PageKind::Under, sum: Some(under.sum), ..*expect };
    let place = Place::Page(under.address);
    let bases = decode_under(&page.0, &expect, &limits, place, |index| leaf.overlay(index))?;
    for (entry, whole) in entries.iter_mut().zip(bases.whole(&leaf)) {
        *entry = whole;
    }
    Ok((entries, under))
}

/// The state of a leaf that was visited before.
#[derive(Debug, Clone, Copy)]
enum Met {
    Number(u64),
    /// The leaf maps nothing.
    Empty,
    /// Damaged; with a number where the log alone maps something in it.
    Bad(Fault, Option<u64>),
}

/// Identifies a leaf: its page, and the changes of the log over it.
type Key = (PageAddress, u32, Vec<usize>);

/// A walk through the volumes of a state.
struct Walk<'a, 'm> {
    reader: &'a mut Reader<'m>,
    visitor: &'a mut dyn Visitor,
    met: HashMap<Key, Met>,
    next: u64,
    /// Pages that were reported, and the place in a tree for which a leaf page was first named.
    reported: HashMap<PageAddress, (SlotIndex, u64)>,
    /// The volume of each index page's tree.
    index_pages: HashMap<PageAddress, VolumeId>,
}

/// Visits all volumes of a state, by id.
pub fn volumes(
    reader: &mut Reader<'_>,
    state: &State,
    visitor: &mut dyn Visitor,
) -> Result<(), Stopped> {
    let (met, reported, index_pages) = (HashMap::new(), HashMap::new(), HashMap::new());
    let mut walk = Walk { reader, visitor, met, next: 1, reported, index_pages };
    for view in state.volumes.values() {
        walk.visitor.volume(view)?;
        walk.volume(view)?;
    }
    Ok(())
}

impl Walk<'_, '_> {
    fn volume(&mut self, view: &VolumeView) -> Result<(), Stopped> {
        let mut changed = view.changed_slots();
        let levels = view.record.levels;
        let expected = levels_for(u64::from(view.tree_slots)).max(1);
        if levels != 0 && levels != expected {
            let id = view.record.id;
            let text = format!("volume {id}: a tree of {levels} levels, expected {expected}");
            self.visitor.problem("tree", text)?;
        }
        let mut pending = vec![(view.record.root, levels, 0_u64)];
        while let Some((reference, level, index)) = pending.pop() {
            if reference.is_none() {
                continue;
            }
            if level == 0 {
                let slot = SlotIndex(u32::try_from(index).unwrap_or(u32::MAX));
                while changed.first().is_some_and(|first| *first < slot.0) {
                    let first = changed.pop_first().unwrap_or(0);
                    self.leaf(view, SlotIndex(first), PageRef::NONE)?;
                }
                changed.remove(&slot.0);
                self.leaf(view, slot, reference)?;
                continue;
            }
            match self.index(view, reference, level, index)? {
                Some(children) => {
                    let children = (index * INDEX_FANOUT..).zip(children);
                    let mut children: Vec<_> =
                        children.map(|(child, to)| (to, level - 1, child)).collect();
                    children.reverse();
                    pending.extend(children);
                }
                None => continue,
            }
        }
        for slot in changed {
            self.leaf(view, SlotIndex(slot), PageRef::NONE)?;
        }
        Ok(())
    }

    /// Returns the references of an index page; `None` if it cannot be used, which is reported to
    /// the visitor.
    fn index(
        &mut self,
        view: &VolumeView,
        reference: PageRef,
        level: u8,
        index: u64,
    ) -> Result<Option<Vec<PageRef>>, Stopped> {
        let span = capacity_of(level);
        let slots = index * span..((index + 1) * span).min(u64::from(view.tree_slots));
        // Volumes that the log has made or rolled back share the tree of another. The same place
        // of it is as its header says, so no page can be named twice by one tree.
        let first = !self.index_pages.contains_key(&reference.address);
        let of = *self.index_pages.entry(reference.address).or_insert(view.tree);
        if of != view.tree {
            let text = "named by one parent only";
            let problem = Problem::field("page address", reference.address.0, text);
            let fault = problem.of(Structure::IndexPage, Place::Page(reference.address)).into();
            self.visitor.lost(view, slots, &fault)?;
            return Ok(None);
        }
        match index_page(self.reader, reference, Some(view.record.id.0), level, index) {
            Ok(children) => {
                if first {
                    self.visitor.page(PageUse {
                        address: reference.address,
                        structure: Structure::IndexPage,
                        volume: view.tree.0,
                        level,
                        index,
                    })?;
                }
                Ok(Some(children))
            }
            Err(fault) => {
                self.visitor.lost(view, slots, &fault)?;
                Ok(None)
            }
        }
    }

    fn leaf(
        &mut self,
        view: &VolumeView,
        slot: SlotIndex,
        reference: PageRef,
    ) -> Result<(), Stopped> {
        if slot.0 >= view.tree_slots && !reference.is_none() {
            let id = view.record.id;
            let text = format!("volume {id}: slot {slot} lies beyond its end");
            return self.visitor.problem("tree", text);
        }
        self.same_place(view, slot, reference)?;
        let geometry = self.reader.geometry();
        let over = view.key(geometry, slot);
        let key = (reference.address, slot.0, over);
        let again = self.visitor.every_leaf();
        if let Some(met) = self.met.get(&key).copied().filter(|_| !again) {
            let number = match met {
                Met::Number(number) => Some(number),
                Met::Empty => None,
                Met::Bad(fault, number) => {
                    self.lost_leaf(view, slot, &fault)?;
                    number
                }
            };
            return number.map_or(Ok(()), |number| {
                self.visitor.leaf(&Leaf { volume: view, slot, number, fresh: None })
            });
        }
        let mut entries = Box::new(NO_ENTRIES);
        let mut fault = None;
        if !reference.is_none() {
            match leaf_page(self.reader, reference, slot) {
                Ok((read, under)) => {
                    entries = read;
                    self.report_leaf(view, slot, reference, under)?;
                }
                Err(found) => fault = Some(found),
            }
        }
        view.apply(geometry, slot, &mut entries);
        let empty = entries.iter().all(|entry| !entry.is_mapped());
        // Changes of the log to a damaged leaf are still reported, beside the damage.
        let met = match (fault, empty) {
            (Some(fault), _) => Met::Bad(fault, (!empty).then_some(self.next)),
            (None, true) => Met::Empty,
            (None, false) => Met::Number(self.next),
        };
        self.met.insert(key, met);
        if let Some(fault) = fault {
            self.lost_leaf(view, slot, &fault)?;
        }
        if empty {
            return Ok(());
        }
        let number = self.next;
        self.next += 1;
        self.visitor.leaf(&Leaf { volume: view, slot, number, fresh: Some(&entries) })
    }

    fn lost_leaf(
        &mut self,
        view: &VolumeView,
        slot: SlotIndex,
        fault: &Fault,
    ) -> Result<(), Stopped> {
        let first = u64::from(slot.0);
        self.visitor.lost(view, first..first + 1, fault)
    }

    fn report_leaf(
        &mut self,
        view: &VolumeView,
        slot: SlotIndex,
        reference: PageRef,
        under: PageRef,
    ) -> Result<(), Stopped> {
        let page = |address, structure| PageUse {
            address,
            structure,
            volume: view.tree.0,
            level: 0,
            index: u64::from(slot.0),
        };
        if self.reported.insert(reference.address, (slot, reference.sum)).is_some() {
            return Ok(());
        }
        self.visitor.page(page(reference.address, Structure::LeafPage))?;
        if under.is_none() {
            return Ok(());
        }
        if self.reported.insert(under.address, (slot, under.sum)).is_some() {
            let (id, address) = (view.record.id, under.address);
            let text = format!("volume {id}: under page {address} of slot {slot} has two parents");
            return self.visitor.problem("tree", text);
        }
        self.visitor.page(page(under.address, Structure::UnderPage))
    }

    /// A leaf page that several volumes have must be at the same slot in all, with the same sum.
    fn same_place(
        &mut self,
        view: &VolumeView,
        slot: SlotIndex,
        reference: PageRef,
    ) -> Result<(), Stopped> {
        let Some(&(at, sum)) = self.reported.get(&reference.address) else { return Ok(()) };
        if at == slot && sum == reference.sum {
            return Ok(());
        }
        let (id, address) = (view.record.id, reference.address);
        let text =
            format!("volume {id}: page {address} of slot {slot} is also a leaf of slot {at}");
        self.visitor.problem("tree", text)
    }
}
