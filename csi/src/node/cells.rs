//! Volumes in cells of their own: before one is staged, its cell comes to this node, or the volume
//! is attached on standby. Nothing but that looks at the volume group, which may hang.

use std::collections::HashMap;

use blockd_api::v1::{self, FrontEnd};
use tonic::Code;

use super::real::mark_of;
use super::world::{Result, Unfinished};
use crate::capability::{Capability, Mode};
use crate::cells::{self, Aim, CellId};
use crate::error::Error;
use crate::parameters;
use crate::plugin::Plugin;
use crate::provision;
use crate::sizes::Range;

/// Prepares to stage a volume. With the front end of NBD it is staged then.
///
/// # Errors
/// NOT_FOUND: there is no such cell. FAILED_PRECONDITION: another node uses it.
pub(super) async fn stage(
    plugin: &Plugin,
    id: &CellId,
    capability: &Capability,
    front_end: FrontEnd,
) -> Result<()> {
    let aim = match capability.mode {
        Mode::ManyNodes => Aim::Shared(front_end),
        _ => Aim::Alone,
    };
    cells::bring(&plugin.daemon, &plugin.settings.place.node, id, aim).await?;
    if front_end != FrontEnd::Nbd {
        return Ok(());
    }
    if !capability.is_block() {
        let allowed = "block with front-end: nbd, which makes no device to mount";
        return Err(Error::invalid("volume_capability.access_type", "mount", allowed));
    }
    if let Some(volume) = plugin.daemon.find_volume(&id.cell, &id.volume).await? {
        if volume.standby {
            return Ok(());
        }
        // A later stage would format it, with all that is written to it until then.
        let key = plugin.settings.keys.unfinished();
        let is_exported = volume.attached && volume.front_end() == FrontEnd::Nbd;
        if !is_exported && mark_of(&volume, &key) != Unfinished::Nothing {
            let problem = format!(
                "holds the rest of an interrupted mkfs, which a stage with front-end: ublk \
                 removes; if it was written over NBD since, remove its label {key} instead"
            );
            return Err(Error::in_use(format_args!("volume {id}"), problem));
        }
    }
    let request = v1::AttachVolumeRequest {
        name: id.volume.clone(),
        pool: id.cell.clone(),
        read_only: capability.mode == Mode::ReaderOnly,
        front_end: FrontEnd::Nbd.into(),
        ..Default::default()
    };
    plugin.daemon.attach_volume(request).await.map(drop)
}

/// Ends the export of a volume that is staged over NBD. False: it is not.
///
/// # Errors
/// FAILED_PRECONDITION: clients are connected.
pub(super) async fn unstage(plugin: &Plugin, id: &CellId) -> Result<bool> {
    let found = plugin.daemon.find_volume(&id.cell, &id.volume).await?;
    if !found.is_some_and(|volume| volume.attached && volume.front_end() == FrontEnd::Nbd) {
        return Ok(false);
    }
    let request =
        v1::DetachVolumeRequest { name: id.volume.clone(), pool: id.cell.clone(), force: false };
    match plugin.daemon.detach_volume(request).await {
        Err(error) if !error.is_absent() => Err(error),
        _ => Ok(true),
    }
}

/// Prepares to make a volume larger, and does so if it is staged over NBD. `None`: it is not. The
/// cell of one that is on standby here comes, unless another node uses it.
///
/// # Errors
/// FAILED_PRECONDITION: another node uses it. Or the volume can't have that size.
pub(super) async fn expand(plugin: &Plugin, id: &CellId, range: &Range) -> Result<Option<i64>> {
    let (daemon, node) = (&plugin.daemon, &plugin.settings.place.node);
    let mut found = daemon.find_volume(&id.cell, &id.volume).await?;
    if found.as_ref().is_some_and(|volume| volume.standby) {
        match cells::bring(daemon, node, id, Aim::Alone).await {
            Ok(()) => found = daemon.find_volume(&id.cell, &id.volume).await?,
            // It is refused below.
            Err(error) if cells::is_used_elsewhere(&error) => {}
            Err(error) => return Err(to_be_repeated(id, error)),
        }
    }
    let is_exported = |volume: &v1::Volume| volume.attached && volume.front_end() == FrontEnd::Nbd;
    let Some(volume) = found.filter(is_exported) else { return Ok(None) };
    refuse_standby(&id.to_string(), &volume)?;
    let volume = provision::expand(plugin, volume, range).await?;
    Ok(Some(plugin.capacity(&volume).get()))
}

/// The error of a cell that can't come now. After FAILED_PRECONDITION the kubelet makes the volume
/// no larger on this node until it is staged again.
fn to_be_repeated(id: &CellId, error: Error) -> Error {
    match error {
        Error::InUse { what, problem } => Error::Aborted { what, problem },
        error if error.code() == Code::FailedPrecondition => {
            Error::Aborted { what: format!("volume {id}:"), problem: error.to_string() }
        }
        error => error,
    }
}

/// Refuses to make a volume larger whose cell is on another node.
///
/// # Errors
/// FAILED_PRECONDITION.
pub(super) fn refuse_standby(id: &str, volume: &v1::Volume) -> Result<()> {
    if !volume.standby {
        return Ok(());
    }
    let problem = "is attached on standby: it grows on the node that has its cell, and shows its \
                   new size here when the cell comes";
    Err(Error::in_use(format_args!("volume {id}"), problem))
}

/// How a volume is attached, by its context.
///
/// # Errors
/// The context has another value.
pub(super) fn front_end(plugin: &Plugin, context: &HashMap<String, String>) -> Result<FrontEnd> {
    let key = plugin.settings.keys.front_end();
    let Some(name) = context.get(&key) else { return Ok(FrontEnd::Ublk) };
    parameters::front_end(&format!("volume_context.{key}"), name)
}

/// Refuses to publish a volume that has no device.
///
/// # Errors
/// FAILED_PRECONDITION, with `front-end: nbd`.
pub(super) fn check_published(id: &str, front_end: FrontEnd) -> Result<()> {
    if front_end != FrontEnd::Nbd {
        return Ok(());
    }
    let problem = "has front-end: nbd and so no device to publish: clients connect to its export, \
                   which `blockd show` names";
    Err(Error::in_use(format_args!("volume {id}"), problem))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capability::Access;
    use crate::testing::{Cell, MIB, Rig};

    #[tokio::test]
    async fn growth_is_repeated_unless_another_node_uses_the_volume() {
        let rig = Rig::simple();
        let plugin = rig.plugin();
        rig.fake.add_group("san", 10_240 * MIB);
        let id = plugin.settings.cells.id("san", "pvc-1");
        let set_silent = |is_silent: bool| {
            let standby = Some(id.volume.clone());
            let cell = Cell { holder: 2, is_silent, is_used: true, standby, ..Cell::default() };
            rig.fake.change_group("san", |group| drop(group.cells.insert(id.cell.clone(), cell)));
        };
        set_silent(true);
        let error = expand(&plugin, &id, &Range::default()).await.unwrap_err();
        assert_eq!(error.code(), Code::Aborted, "{error}");
        assert!(error.to_string().contains("blockd node declare-dead san/2"), "{error}");
        // Refused by the node part, as it is on standby.
        set_silent(false);
        assert_eq!(expand(&plugin, &id, &Range::default()).await.unwrap(), None);
    }

    #[tokio::test]
    async fn the_rest_of_an_interrupted_mkfs_is_not_exported() {
        let rig = Rig::simple();
        let plugin = rig.plugin();
        rig.fake.add_group("san", 10_240 * MIB);
        let id = plugin.settings.cells.id("san", "pvc-1");
        let (group, name) = (id.group.clone(), id.cell.clone());
        let cell =
            v1::CreateCellRequest { group, name, device_bytes: 128 * MIB, ..Default::default() };
        plugin.daemon.create_cell(cell).await.unwrap();
        rig.fake.add(&id.cell, &id.volume, 64 * MIB);
        rig.fake.change(&id.cell, &id.volume, |volume| {
            volume.labels.insert(plugin.settings.keys.unfinished(), "file-system".to_owned());
        });
        let block = Capability { access: Access::Block, mode: Mode::Writer };
        let error = stage(&plugin, &id, &block, FrontEnd::Nbd).await.unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
        assert!(error.to_string().contains("interrupted mkfs"), "{error}");
        // One that is exported already, as by an older plugin, may have been written since.
        rig.fake.change(&id.cell, &id.volume, |volume| {
            volume.attached = true;
            volume.set_front_end(FrontEnd::Nbd);
        });
        stage(&plugin, &id, &block, FrontEnd::Nbd).await.unwrap();
    }
}
