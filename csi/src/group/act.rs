//! The calls of the group service. A group exists as long as one of its snapshots: the daemon
//! creates all of them with one record, so that no group is created in part, and a repeat finishes
//! an interrupted deletion.

use std::collections::BTreeSet;
use std::sync::Arc;

use blockd_api::v1;

use crate::controller::{check_snapshot_parameters, ours, refuse_family, snapshot_to_wire};
use crate::error::Error;
use crate::ids::{GroupId, Kind, MAX_GROUP, Names, SnapshotId, VolumeId};
use crate::labels;
use crate::limits;
use crate::plugin::Plugin;
use crate::proto;

const SOURCES: &str = "source_volume_ids";
const SNAPSHOTS: &str = "snapshot_ids";

/// Limit of snapshot ids in a request: a list that is longer than any group is refused by its
/// length, without a look at its items.
const MAX_LISTED: usize = 1024;

/// A snapshot of a group, and its description by the daemon.
type Member = (SnapshotId, v1::Volume);

pub(super) async fn create(
    plugin: Arc<Plugin>,
    request: proto::CreateVolumeGroupSnapshotRequest,
) -> Result<proto::CreateVolumeGroupSnapshotResponse, Error> {
    limits::name("name", &request.name)?;
    check_each(SOURCES, &request.source_volume_ids, MAX_GROUP)?;
    limits::map("secrets", &request.secrets)?;
    check_snapshot_parameters(&request.parameters)?;
    let _name = plugin.locks.take_name("group", &request.name)?;
    let names = &plugin.settings.names;
    let all = ours(&plugin).await?;
    if let Some((group, members)) = present(names, &all, &request.name) {
        check_same(&request, &group, &members, names)?;
        let members = remember_encryption(&plugin, &all, members).await?;
        let group_snapshot = Some(to_wire(&plugin, &group, &members));
        return Ok(proto::CreateVolumeGroupSnapshotResponse { group_snapshot });
    }
    let sources = sources(&plugin, &all, &request.source_volume_ids).await?;
    let group = names.group(&sources[0].pool, &request.name, sources.len());
    let _group = plugin.locks.take(&group.to_string())?;
    let member = |source: &VolumeId| v1::SnapshotMember {
        volume: source.name.clone(),
        name: group.member(source).name,
    };
    let members = sources.iter().map(member).collect();
    let asked =
        v1::CreateSnapshotsRequest { pool: group.pool.clone(), members, ..Default::default() };
    let made = plugin.daemon.create_snapshots(asked).await?.snapshots;
    if made.len() != sources.len() {
        let problem = format!("answered with {} snapshots of {}", made.len(), sources.len());
        return Err(Error::unexpected("CreateSnapshots of the daemon", problem));
    }
    let made: Vec<Member> = made.into_iter().map(|one| (id_of(&one), one)).collect();
    let made = remember_encryption(&plugin, &all, made).await?;
    let group_snapshot = Some(to_wire(&plugin, &group, &made));
    Ok(proto::CreateVolumeGroupSnapshotResponse { group_snapshot })
}

/// Gives the snapshots of encrypted volumes the label that says so. The daemon gives all snapshots
/// of a cut the same labels, and a group may have volumes of both kinds.
async fn remember_encryption(
    plugin: &Plugin,
    all: &[(v1::Volume, Kind)],
    mut members: Vec<Member>,
) -> Result<Vec<Member>, Error> {
    for (id, snapshot) in &mut members {
        let source = id.source();
        let is_source = |one: &&v1::Volume| one.pool == source.pool && one.name == source.name;
        let source = all.iter().map(|(volume, _)| volume).find(is_source);
        let labels = source.map(|one| labels::of_snapshot(&plugin.settings.keys, &one.labels));
        let set_labels = labels.unwrap_or_default();
        if set_labels.iter().all(|(key, kind)| snapshot.labels.get(key) == Some(kind)) {
            continue;
        }
        let asked = v1::ConfigureVolumeRequest {
            name: id.name.clone(),
            pool: id.pool.clone(),
            set_labels,
            ..Default::default()
        };
        *snapshot = plugin.daemon.configure_volume(asked).await?.volume.unwrap_or_default();
    }
    Ok(members)
}

pub(super) async fn delete(
    plugin: Arc<Plugin>,
    request: proto::DeleteVolumeGroupSnapshotRequest,
) -> Result<proto::DeleteVolumeGroupSnapshotResponse, Error> {
    let id = &request.group_snapshot_id;
    limits::required("group_snapshot_id", id)?;
    limits::map("secrets", &request.secrets)?;
    let _lock = plugin.locks.take(id)?;
    let Some((group, members)) = find(&plugin, id).await? else {
        return Ok(proto::DeleteVolumeGroupSnapshotResponse {});
    };
    check_listed(&plugin.settings.names, &group, &members, &request.snapshot_ids)?;
    // All detectable conflicts are found before the first deletion.
    if let Some((used, _)) = members.iter().find(|(_, snapshot)| snapshot.attached) {
        let problem = format!("can't be deleted: its snapshot {used} is attached");
        return Err(Error::in_use(format!("group snapshot {group}"), problem));
    }
    for (member, _) in members {
        let asked = v1::DeleteVolumeRequest {
            name: member.name,
            pool: member.pool,
            force: false,
            ..Default::default()
        };
        plugin.daemon.delete_volume(asked).await?;
    }
    Ok(proto::DeleteVolumeGroupSnapshotResponse {})
}

pub(super) async fn get(
    plugin: Arc<Plugin>,
    request: proto::GetVolumeGroupSnapshotRequest,
) -> Result<proto::GetVolumeGroupSnapshotResponse, Error> {
    let id = &request.group_snapshot_id;
    limits::required("group_snapshot_id", id)?;
    limits::map("secrets", &request.secrets)?;
    let found = find(&plugin, id).await?;
    let (group, members) = found.ok_or_else(|| Error::not_found("group snapshot", id))?;
    let (left, count) = (members.len(), group.count());
    if left != count {
        // Its deletion was begun: it is nothing any more that could be restored as a whole.
        let what = format!("{id}, of which {left} of {count} snapshots are left,");
        return Err(Error::not_found("group snapshot", what));
    }
    check_listed(&plugin.settings.names, &group, &members, &request.snapshot_ids)?;
    let group_snapshot = Some(to_wire(&plugin, &group, &members));
    Ok(proto::GetVolumeGroupSnapshotResponse { group_snapshot })
}

/// A list of ids that has to be there, with each once.
fn check_each(field: &str, ids: &[String], limit: usize) -> Result<(), Error> {
    if ids.is_empty() {
        return Err(Error::missing(field));
    }
    limits::list(field, ids.len(), limit)?;
    let mut seen = BTreeSet::new();
    for id in ids {
        limits::required(field, id)?;
        if !seen.insert(id) {
            return Err(Error::invalid(field, id, "in it once"));
        }
    }
    Ok(())
}

/// Returns the source volumes: all of them exist, in one pool.
async fn sources(
    plugin: &Plugin,
    all: &[(v1::Volume, Kind)],
    ids: &[String],
) -> Result<Vec<VolumeId>, Error> {
    let mut found: Vec<VolumeId> = Vec::with_capacity(ids.len());
    for id in ids {
        if let Some(id) = plugin.settings.cells.parse(id) {
            return Err(refuse_family(&id, "snapshots"));
        }
        let source = plugin.settings.names.parse_volume(id);
        let is_it = |source: &VolumeId| {
            let mut volumes = all.iter().filter(|(_, kind)| *kind == Kind::Volume);
            volumes.any(|(one, _)| one.pool == source.pool && one.name == source.name)
        };
        found.push(match source.filter(is_it) {
            Some(source) => source,
            // It has the last word on why: a pool that does not serve lists nothing.
            None => plugin.volume(id).await?.0,
        });
    }
    let apart = |other: &&VolumeId| other.pool != found[0].pool;
    if let Some(other) = found.iter().find(apart) {
        let problem = format!(
            "and {other} can't be cut at one moment: they are in the pools {} and {}",
            found[0].pool, other.pool
        );
        return Err(Error::in_use(&found[0], problem));
    }
    Ok(found)
}

/// The group of this name, whatever its pool and members.
fn present(
    names: &Names,
    all: &[(v1::Volume, Kind)],
    name: &str,
) -> Option<(GroupId, Vec<Member>)> {
    let mut groups = all.iter().filter(|(_, kind)| *kind == Kind::Snapshot);
    let group = groups.find_map(|(snapshot, _)| {
        names.group_of(&id_of(snapshot)).filter(|group| group.is_named(name))
    })?;
    let members = members(names, all.iter().map(|(volume, _)| volume), &group);
    Some((group, members))
}

/// The snapshots of a group that are there, by id.
fn members<'a>(
    names: &Names,
    all: impl Iterator<Item = &'a v1::Volume>,
    group: &GroupId,
) -> Vec<Member> {
    let is_member = |one: &&v1::Volume| {
        one.kind() == v1::VolumeKind::Snapshot
            && names.kind(&one.name) == Kind::Snapshot
            && names.group_of(&id_of(one)).as_ref() == Some(group)
    };
    let members = all.filter(is_member).map(|one| (id_of(one), one.clone()));
    let mut members: Vec<Member> = members.collect();
    members.sort_by(|one, other| one.0.cmp(&other.0));
    members
}

/// The group of an id, with the snapshots that are left of it; `None` if there are none. A pool
/// that does not serve is an error: its snapshots still exist.
async fn find(plugin: &Plugin, id: &str) -> Result<Option<(GroupId, Vec<Member>)>, Error> {
    let names = &plugin.settings.names;
    let Some(group) = names.parse_group(id) else { return Ok(None) };
    if !plugin.has_pool(&group.pool).await? {
        return Ok(None);
    }
    let asked = v1::ListVolumesRequest { pool: group.pool.clone(), brief: true };
    let all = match plugin.daemon.list_volumes(asked).await {
        Ok(answer) => answer.volumes,
        Err(error) if error.is_absent() => return Ok(None),
        Err(error) => return Err(error),
    };
    let members = members(names, all.iter(), &group);
    Ok((!members.is_empty()).then_some((group, members)))
}

/// Refuses a request for a group that is there and is another.
fn check_same(
    request: &proto::CreateVolumeGroupSnapshotRequest,
    group: &GroupId,
    members: &[Member],
    names: &Names,
) -> Result<(), Error> {
    let asked: BTreeSet<Option<VolumeId>> =
        request.source_volume_ids.iter().map(|id| names.parse_volume(id)).collect();
    let there: BTreeSet<Option<VolumeId>> =
        members.iter().map(|(id, _)| Some(id.source())).collect();
    let it = ("group snapshot", request.name.as_str());
    if members.len() != group.count() {
        let left = format!("{} of {}, since its deletion", members.len(), group.count());
        return Err(Error::exists(it, SNAPSHOTS, left, request.source_volume_ids.len()));
    }
    if asked != there || asked.len() != request.source_volume_ids.len() {
        let shown: Vec<String> = members.iter().map(|(id, _)| id.source().to_string()).collect();
        let asked = request.source_volume_ids.join(", ");
        return Err(Error::exists(it, SOURCES, shown.join(", "), asked));
    }
    Ok(())
}

/// Refuses a list that is not that of the group's snapshots. Snapshots that an interrupted deletion
/// has already removed are recognised by their names.
fn check_listed(
    names: &Names,
    group: &GroupId,
    members: &[Member],
    listed: &[String],
) -> Result<(), Error> {
    check_each(SNAPSHOTS, listed, MAX_LISTED)?;
    for id in listed {
        let snapshot = names.parse_snapshot(id).and_then(|id| names.group_of(&id));
        if snapshot.as_ref() != Some(group) {
            return Err(Error::invalid(SNAPSHOTS, id, format!("a snapshot of {group}")));
        }
    }
    let is_listed = |id: &SnapshotId| listed.contains(&id.to_string());
    if let Some((missing, _)) = members.iter().find(|(id, _)| !is_listed(id)) {
        let allowed = format!("all of {group}: {missing} is one of them");
        return Err(Error::invalid(SNAPSHOTS, listed.join(", "), allowed));
    }
    if listed.len() != group.count() {
        let allowed = format!("the {} of {group}", group.count());
        return Err(Error::invalid(SNAPSHOTS, format!("{} snapshots", listed.len()), allowed));
    }
    Ok(())
}

fn id_of(snapshot: &v1::Volume) -> SnapshotId {
    SnapshotId { pool: snapshot.pool.clone(), name: snapshot.name.clone() }
}

fn to_wire(plugin: &Plugin, group: &GroupId, members: &[Member]) -> proto::VolumeGroupSnapshot {
    let mut snapshots: Vec<proto::Snapshot> =
        members.iter().map(|(_, snapshot)| snapshot_to_wire(plugin, snapshot)).collect();
    // The same answer to each repeat, in whatever order it names the volumes.
    snapshots.sort_by(|one, other| one.snapshot_id.cmp(&other.snapshot_id));
    proto::VolumeGroupSnapshot {
        group_snapshot_id: group.to_string(),
        // One record made all of them, with one time.
        creation_time: snapshots.first().and_then(|first| first.creation_time),
        snapshots,
        ready_to_use: true,
    }
}
