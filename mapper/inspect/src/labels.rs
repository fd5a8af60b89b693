//! The labels of the last checkpoint.

use std::collections::BTreeMap;

use blockd_mapper::format::labels::{Labels, decode_labels};
use blockd_mapper::format::page::PageExpect;
use blockd_mapper::format::{INDEX_FANOUT, PageRef, Place, Structure, capacity_of, label_levels};
use blockd_mapper::units::VolumeId;

use super::walk::{PageUse, Stopped, Visitor, index_page};
use super::{Fault, Reader, VolumeView};

/// Reads the labels of volumes, which come with their places in the catalogue, and gives them to
/// these. Damaged parts are reported to the visitor and left out.
pub(crate) fn read(
    reader: &mut Reader<'_>,
    places: &BTreeMap<u64, VolumeId>,
    volumes: &mut BTreeMap<VolumeId, VolumeView>,
    visitor: &mut dyn Visitor,
) -> Result<(), Stopped> {
    let levels = label_levels(u64::from(reader.superblock().catalogue_records));
    let mut pending = vec![(reader.superblock().labels_root, levels, 0_u64)];
    while let Some((reference, level, index)) = pending.pop() {
        if reference.is_none() {
            continue;
        }
        let (address, span) = (reference.address, capacity_of(level));
        let of = places.get(&index).filter(|_| level == 0).and_then(|id| volumes.get_mut(id));
        let volume = of.as_ref().map_or(0, |view| view.record.id.0);
        let read = if level == 0 {
            label_page(reader, reference, index, volume).map(|labels| {
                if let Some(view) = of {
                    view.labels = labels;
                }
            })
        } else {
            index_page(reader, reference, None, level, index).map(|found| {
                let children = (index * INDEX_FANOUT..).zip(found);
                pending.extend(children.map(|(child, to)| (to, level - 1, child)));
            })
        };
        let structure = if level == 0 { Structure::LabelPage } else { Structure::IndexPage };
        match read {
            Ok(()) => visitor.page(PageUse { address, structure, volume, level, index })?,
            Err(fault) => {
                let of = volumes.get(&VolumeId(volume));
                visitor.labels_lost(of, index * span..(index + 1) * span, &fault)?;
            }
        }
    }
    Ok(())
}

fn label_page(
    reader: &mut Reader<'_>,
    reference: PageRef,
    place: u64,
    volume: u32,
) -> Result<Labels, Fault> {
    let page = reader.page(reference, Structure::LabelPage)?;
    let expect = PageExpect::labels(reader.superblock().pool_id, place, volume, reference.sum);
    Ok(decode_labels(&page.0, &expect, Place::Page(reference.address))?)
}
