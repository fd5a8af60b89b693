//! Requests about pools, and what is checked of requests before a call.

use std::path::PathBuf;

use blockd_api::v1;
use blockd_media::error::{Error, shown};
use blockd_media::pool::PmemOptions;
use blockd_media::units::from_wire;

use super::super::Control;
use super::super::volumes::checked_new_name;
use crate::config::{DeviceConfig, DeviceKind, PoolConfig, SizeWish};

/// Refuses what is said of persistent memory where the pool isn't in that.
fn check_pmem_fields(asked: &v1::CreatePoolRequest) -> Result<(), Error> {
    if asked.kind() == v1::DeviceKind::Pmem {
        return Ok(());
    }
    let allowed = "left out unless kind is pmem";
    if asked.power_safe {
        return Err(Error::invalid("power_safe", true, allowed));
    }
    if asked.atomicity() != v1::Atomicity::Unspecified {
        return Err(Error::invalid("atomicity", asked.atomicity().as_str_name(), allowed));
    }
    asked.erase.map_or(Ok(()), |erase| Err(Error::invalid("erase", erase, allowed)))
}

/// A pool that is configured or was created, and is to be started anew as it was. The fields of the
/// request have to be the same.
#[expect(deprecated, reason = "older clients send size_gb")]
pub(super) fn known_pool(
    known: PoolConfig,
    asked: &v1::CreatePoolRequest,
) -> Result<PoolConfig, Error> {
    let size = from_wire(asked.size_bytes, asked.size_gb)?;
    let first = &known.devices[0];
    let own_size = match first.size {
        SizeWish::Bytes(bytes) => bytes.to_string(),
        SizeWish::OfFree(percent) => format!("{percent} % of what is free"),
        SizeWish::Existing => "that of the device".to_owned(),
    };
    let is_memory = |is: bool| if is { "memory" } else { "a file or device" }.to_owned();
    let (was_memory, in_memory) =
        (first.kind == DeviceKind::Memory, asked.kind() == v1::DeviceKind::Memory);
    let stated = [
        ("path", !asked.path.is_empty(), first.path.display().to_string(), asked.path.clone()),
        ("size in bytes", size != 0, own_size, size.to_string()),
        (
            "extent size",
            asked.extent_size != 0,
            known.extent_size.to_string(),
            asked.extent_size.to_string(),
        ),
        ("composite", asked.no_composite, known.composite.to_string(), false.to_string()),
        ("kind", in_memory, is_memory(was_memory), is_memory(in_memory)),
    ];
    for (field, is_stated, existing, wanted) in stated {
        if is_stated && existing != wanted {
            let (name, field) = (shown(&known.name), field.to_owned());
            return Err(Error::Exists { what: "pool", name, field, existing, asked: wanted });
        }
    }
    Ok(known)
}

/// The pool that a request describes.
#[expect(deprecated, reason = "older clients send size_gb")]
pub(crate) fn wanted_pool(
    control: &Control,
    asked: &v1::CreatePoolRequest,
) -> Result<PoolConfig, Error> {
    checked_new_name(&asked.name)?;
    let size = from_wire(asked.size_bytes, asked.size_gb)?;
    let in_memory = asked.kind() == v1::DeviceKind::Memory;
    let path = PathBuf::from(&asked.path);
    if in_memory && !asked.path.is_empty() {
        return Err(Error::invalid("path", &asked.path, "empty for a pool in memory"));
    }
    if !in_memory && (!path.is_absolute() || asked.path.contains('\0')) {
        return Err(Error::invalid("path", &asked.path, "an absolute path"));
    }
    if in_memory && size == 0 {
        return Err(Error::invalid("size_bytes", 0, "more than 0 for a pool in memory"));
    }
    let kind = match asked.kind() {
        v1::DeviceKind::Unspecified => DeviceKind::Auto,
        v1::DeviceKind::File => DeviceKind::File,
        v1::DeviceKind::Disk => DeviceKind::Disk,
        v1::DeviceKind::Memory => DeviceKind::Memory,
        v1::DeviceKind::Pmem => DeviceKind::Pmem(PmemOptions {
            power_safe: asked.power_safe,
            whole_blocks: asked.atomicity() != v1::Atomicity::None,
            erase: asked.erase.unwrap_or(true),
        }),
    };
    check_pmem_fields(asked)?;
    let template = &control.0.options.template;
    let extent_size = if asked.extent_size == 0 { 256 << 10 } else { asked.extent_size };
    if !extent_size.is_power_of_two() || !((64 << 10)..=(1 << 20)).contains(&extent_size) {
        let allowed = "a power of two from 65536 to 1048576";
        return Err(Error::invalid("extent_size", extent_size, allowed));
    }
    Ok(PoolConfig {
        name: asked.name.clone(),
        space: control.space_of_new(&path),
        devices: vec![DeviceConfig {
            path,
            kind,
            size: if size == 0 { SizeWish::Existing } else { SizeWish::Bytes(size) },
            preallocate: asked.preallocate,
            direct: !asked.buffered,
        }],
        spares: Vec::new(),
        region: None,
        volatile: asked.volatile,
        extent_size,
        composite: !asked.no_composite,
        extend_socket: None,
        accept_loss: false,
        ..template.clone()
    })
}
