//! The reports of `vgs` and `lvs`, as JSON.

use std::path::PathBuf;

use serde::Deserialize;

use crate::coordinator::Device;

/// A volume group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Group {
    pub(super) size: u64,
    pub(super) free: u64,
    pub(super) extent_size: u64,
    /// Empty where it is not shared.
    pub(super) lock_type: String,
    pub(super) tags: Vec<String>,
    pub(super) devices: Vec<Device>,
}

/// A logical volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Volume {
    pub(super) name: String,
    pub(super) uuid: String,
    pub(super) size: u64,
    pub(super) is_active: bool,
    pub(super) path: PathBuf,
    pub(super) lock_args: String,
    pub(super) tags: Vec<String>,
    /// The tags of its group; none where they were not asked for.
    pub(super) group_tags: Vec<String>,
}

/// Arguments of a report of these fields, for one group.
pub(super) fn words<'a>(fields: &'a str, group: &'a str) -> [&'a str; 8] {
    ["--reportformat", "json", "--units", "b", "--nosuffix", "-o", fields, group]
}

#[derive(Deserialize)]
struct Report<T> {
    report: [T; 1],
}

#[derive(Deserialize)]
struct Groups {
    vg: Vec<GroupRow>,
}

/// One row for each physical volume.
#[derive(Deserialize)]
struct GroupRow {
    vg_size: String,
    vg_free: String,
    vg_extent_size: String,
    vg_lock_type: String,
    vg_tags: String,
    pv_name: String,
    pv_uuid: String,
}

#[derive(Deserialize)]
struct Volumes {
    lv: Vec<VolumeRow>,
}

#[derive(Deserialize)]
struct VolumeRow {
    lv_name: String,
    lv_uuid: String,
    lv_size: String,
    lv_active_locally: String,
    lv_path: String,
    lv_lockargs: String,
    lv_tags: String,
    #[serde(default)]
    vg_tags: String,
}

/// Reads what `vgs` printed for one group.
pub(super) fn group(text: &str) -> Result<Group, String> {
    let Report { report: [Groups { vg: rows }] } = parse(text)?;
    let first = rows.first().ok_or("no volume group")?;
    let device =
        |row: &GroupRow| Device { id: row.pv_uuid.clone(), path: PathBuf::from(&row.pv_name) };
    let mut devices: Vec<_> = rows.iter().map(device).collect();
    devices.sort();
    Ok(Group {
        size: bytes(&first.vg_size)?,
        free: bytes(&first.vg_free)?,
        extent_size: bytes(&first.vg_extent_size)?,
        lock_type: first.vg_lock_type.clone(),
        tags: tags(&first.vg_tags),
        devices,
    })
}

/// Reads what `lvs` printed for one group.
pub(super) fn volumes(text: &str) -> Result<Vec<Volume>, String> {
    let Report { report: [Volumes { lv: rows }] } = parse(text)?;
    let volume = |row: VolumeRow| {
        Ok(Volume {
            name: row.lv_name,
            uuid: row.lv_uuid,
            size: bytes(&row.lv_size)?,
            is_active: row.lv_active_locally == "active locally",
            path: PathBuf::from(row.lv_path),
            lock_args: row.lv_lockargs,
            tags: tags(&row.lv_tags),
            group_tags: tags(&row.vg_tags),
        })
    };
    rows.into_iter().map(volume).collect()
}

fn parse<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, String> {
    serde_json::from_str(text).map_err(|error| format!("the report can't be read: {error}"))
}

fn tags(text: &str) -> Vec<String> {
    text.split(',').filter(|tag| !tag.is_empty()).map(str::to_owned).collect()
}

fn bytes(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("{text} is no number of bytes"))
}
