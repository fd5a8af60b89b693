//! Fields of requests, checked.

use std::collections::HashMap;
use std::path::PathBuf;

use blockd_csi_base::bytes::Bytes;
use blockd_csi_base::quantity;

use super::content::Making;
use super::flags::Options;
use super::kata;
use super::modes;
use super::paths::{self, Refused};
use super::records::Place;
use super::steps::FileSystemSpec;
use super::world::{Result, Wanted};
use crate::capability::{Access, Capability, FileSystem, Mount, Reach};
use crate::error::Error;
use crate::limits;
use crate::parameters;
use crate::plugin::Plugin;
use crate::pmem;
use crate::room;
use crate::sizes::{Range, Rules};

/// The attribute of inline volumes, which live with their pod.
const EPHEMERAL: &str = "csi.storage.k8s.io/ephemeral";

/// The attributes of such a volume, beside those that sidecars and kubelet add.
const INLINE: &str = "size, class, fsType, usage, eraseAfter, kataContainers or sizeSemantics";

/// An id of a volume.
///
/// # Errors
/// The field is missing or too long.
pub fn id(id: &str) -> Result<()> {
    limits::required("volume_id", id)
}

/// A path that is below kubelet's folder, as the mount table has it.
///
/// # Errors
/// The path is missing, or leads elsewhere.
pub fn path(plugin: &Plugin, field: &str, path: &str) -> Result<PathBuf> {
    limits::path(field, path)?;
    let kubelet = &plugin.settings.kubelet_dir;
    let failed = |error| Error::io(format!("checking {field}"), error);
    paths::check(kubelet, path).map_err(failed)?.map_err(|refused| {
        let allowed = match refused {
            Refused::Form(allowed) => allowed.to_owned(),
            Refused::Outside(kubelet) => format!("a path below {}", kubelet.display()),
            Refused::Link => "a path without symbolic links".to_owned(),
        };
        Error::invalid(field, path, allowed)
    })
}

/// Maps that mean nothing to us.
///
/// # Errors
/// One is too long.
pub fn maps(context: &HashMap<String, String>, secrets: &HashMap<String, String>) -> Result<()> {
    limits::map("publish_context", context)?;
    limits::map("secrets", secrets)
}

/// Paths of a volume that exists somewhere, whether or not it has ever been there. At one that is
/// not absolute it never was: that is found when the volume was.
///
/// # Errors
/// The first is missing, or one is too long or no path.
pub fn plain_paths(path: &str, staging: &str) -> Result<()> {
    limits::any_path("volume_path", path)?;
    if staging.is_empty() { Ok(()) } else { limits::path("staging_target_path", staging) }
}

/// Where the daemon has a volume of this id; `None` when it can't exist.
#[must_use]
pub fn place(plugin: &Plugin, id: &str) -> Option<Place> {
    if let Some(id) = plugin.settings.cells.parse(id) {
        return Some(Place { pool: id.cell, name: id.volume });
    }
    let id = plugin.settings.names.parse_volume(id)?;
    Some(Place { pool: id.pool, name: id.name })
}

/// The capability of a stage or publication.
///
/// # Errors
/// The capability is missing, malformed, or not supported.
pub fn capability(
    reach: Reach,
    wire: Option<&crate::proto::VolumeCapability>,
) -> Result<Capability> {
    let parsed = Capability::parse_for(reach, "volume_capability", wire);
    parsed.map_err(crate::capability::Refusal::exceeds)
}

/// How a capability is seen.
#[must_use]
pub fn access(capability: &Capability) -> modes::Access {
    if capability.is_block() { modes::Access::Block } else { modes::Access::Mount }
}

/// Returns the requested file system; `None` for a device.
///
/// # Errors
/// A mount option is none, or the volume's context is not of ours.
pub fn file_system_spec(
    plugin: &Plugin,
    capability: &Capability,
    context: &HashMap<String, String>,
) -> Result<Option<FileSystemSpec>> {
    limits::map("volume_context", context)?;
    let Access::Mount(mount) = &capability.access else { return Ok(None) };
    let keys = &plugin.settings.keys;
    let of_class = context
        .get(&keys.fs_type())
        .map(|name| parameters::file_system(&format!("volume_context.{}", keys.fs_type()), name));
    let file_system = mount.file_system.or(of_class.transpose()?.flatten());
    let mkfs = context.get(&keys.mkfs_options()).map(|text| {
        parameters::mkfs_options(&format!("volume_context.{}", keys.mkfs_options()), text)
    });
    let usage = keys.of_context(pmem::USAGE);
    let usage = context
        .get(&usage)
        .map(|text| pmem::Usage::parse(&format!("volume_context.{usage}"), text))
        .transpose()?;
    let mapped = usage == Some(pmem::Usage::AppDirect);
    let in_image = kata(plugin, context).is_some();
    let name = file_system.map(|one| one.name().to_owned()).unwrap_or_default();
    let making = Making { mapped, options: mkfs.transpose()?.unwrap_or_default() };
    Ok(Some(FileSystemSpec { making, dax: mapped && !in_image, ..options(mount, name)? }))
}

/// The image for virtual machines in a volume, if its context has one. The usage is AppDirect
/// unless the context has FileIO, which CreateVolume never combines with an image.
#[must_use]
pub fn kata(plugin: &Plugin, context: &HashMap<String, String>) -> Option<kata::ImageSpec> {
    let keys = &plugin.settings.keys;
    let value = |word| context.get(&keys.of_context(word)).map(String::as_str);
    let says = |word| value(word) == Some("true");
    says(pmem::KATA).then(|| kata::ImageSpec {
        partition: says(pmem::KATA_PARTITION),
        app_direct: value(pmem::USAGE) != Some(pmem::Usage::FileIo.name()),
    })
}

/// Whether the volume is encrypted, by its context.
///
/// # Errors
/// The encryption is of a kind that is not known here.
pub fn is_encrypted(plugin: &Plugin, context: &HashMap<String, String>) -> Result<bool> {
    let key = plugin.settings.keys.encryption();
    let field = format!("volume_context.{key}");
    context
        .get(&key)
        .map(|kind| parameters::encryption(&field, kind))
        .transpose()
        .map(|it| it.is_some())
}

fn options(mount: &Mount, file_system: String) -> Result<FileSystemSpec> {
    // The flags are not shown: they may hold secrets.
    let refused = |position| {
        let field = format!("volume_capability.mount.mount_flags[{position}]");
        Error::invalid(field, "not shown", "an option of a mount")
    };
    let options = Options::parse(&mount.flags).map_err(refused)?;
    let text = mount.flags.join("\0");
    let hash = xxhash_rust::xxh3::xxh3_64(text.as_bytes());
    Ok(FileSystemSpec { file_system, options, hash, making: Making::default(), dax: false })
}

/// Whether a volume lives with its pod.
#[must_use]
pub fn is_ephemeral(context: &HashMap<String, String>) -> bool {
    context.get(EPHEMERAL).is_some_and(|value| value == "true")
}

/// An inline volume: its place, its properties, and its file system.
///
/// # Errors
/// A parameter is unknown or wrong, or the daemon does not answer.
pub async fn inline(
    plugin: &Plugin,
    id: &str,
    capability: &Capability,
    context: &HashMap<String, String>,
) -> Result<(Place, Wanted, FileSystemSpec)> {
    limits::map("volume_context", context)?;
    let Access::Mount(mount) = &capability.access else {
        let field = "volume_capability.access_type";
        return Err(Error::invalid(field, "block", "mount: inline volumes are mounted"));
    };
    let settings = &plugin.settings;
    let (mut size, mut class, mut kind) = (Bytes::ZERO, None, None);
    let mut pmem = pmem::Parameters::default();
    for (key, value) in context {
        let field = format!("volume_context.{key}");
        if pmem.take(&field, key, value)? {
            continue;
        }
        match key.as_str() {
            "size" => size = quantity::size(&field, value)?,
            "class" => class = Some(value.as_str()),
            "fsType" => kind = parameters::file_system(&field, value)?,
            key if parameters::is_of_sidecars(key) => {}
            key => {
                let field = "a key of volume_context";
                return Err(Error::invalid(field, key, format!("one of {INLINE}")));
            }
        }
    }
    let file_system = mount.file_system.or(kind).unwrap_or(FileSystem::Ext4);
    let class = settings.config.class("volume_context.class", class)?;
    let pmem = pmem.of_class("volume_context.", class)?;
    pmem.check("volume_capability", capability, Some(file_system))?;
    let pools = plugin.pools().await?;
    let pool = room::best_pool(plugin, &pools, class).await?;
    let of_use = settings.config.minimum.of(Some(file_system));
    let rules = Rules {
        default: settings.config.default_size,
        minimum: pmem.minimum(pool, of_use, Some(file_system)),
        granule: pmem.granule(pool, room::granule(pool, class)),
    };
    let size = Range { required: size, limit: Bytes::ZERO }.choose(&rules)?;
    let place = Place { pool: pool.name.clone(), name: settings.names.ephemeral(id) };
    let wanted = Wanted { size_bytes: size.get(), class: class.name.clone(), pmem };
    let mapped = pmem.usage == Some(pmem::Usage::AppDirect);
    let spec = FileSystemSpec {
        making: Making { mapped, options: Vec::new() },
        dax: pmem.is_mapped() && !pmem.kata,
        ..options(mount, file_system.name().to_owned())?
    };
    Ok((place, wanted, spec))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Rig;

    #[tokio::test]
    async fn kata_image_is_app_direct_unless_the_context_has_file_io() {
        let plugin = Rig::simple().plugin();
        let asked = |pairs: &[(&str, &str)]| {
            let key = |word| plugin.settings.keys.of_context(word);
            let context = pairs.iter().map(|(word, value)| (key(word), (*value).to_owned()));
            kata(&plugin, &context.collect())
        };
        let is = |partition, app_direct| Some(kata::ImageSpec { partition, app_direct });
        let image = ("kata-containers", "true");
        assert_eq!(asked(&[("usage", "AppDirect")]), None);
        assert_eq!(asked(&[image]), is(false, true));
        assert_eq!(asked(&[image, ("usage", "AppDirect")]), is(false, true));
        assert_eq!(asked(&[image, ("kata-partition", "true")]), is(true, true));
        assert_eq!(asked(&[image, ("usage", "FileIO")]), is(false, false));
    }
}
