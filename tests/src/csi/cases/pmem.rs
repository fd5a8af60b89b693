//! Volumes in persistent memory: the rows P14 to P30 and P45, for whatever kind the class of the
//! options is of.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use blockd_csi::proto::volume_capability::access_mode::Mode;
use blockd_csi::proto::{GetCapacityRequest, GetCapacityResponse, Volume};
use tonic::Code;

use crate::csi::case::Need::{Host, Rows};
use crate::csi::case::{CAPACITY, CREATE, STAGE, cases};
use crate::csi::cx::{
    Cx, Mount, block, mounted_as, mounted_at, mounts, not_offered, one, range, refused, says,
};

cases! { [CREATE, Rows]
    a_volume_reports_its_charged_and_its_usable_bytes;
    a_size_is_rounded_up_unless_the_limit_forbids;
    the_smallest_volume_is_that_of_the_pool: CAPACITY;
    an_unavailable_size_is_refused_with_the_free_space: CAPACITY;
    usage_is_one_that_the_class_can_have;
    kata_image_is_app_direct_or_refused;
    kata_containers_is_a_boolean_as_strconv_reads_it;
    kata_excludes_file_io_raw_block_and_btrfs;
    erase_after_has_two_spellings;
    a_mount_for_app_direct_has_dax_and_no_other_has: STAGE, Host;
    a_raw_block_volume_is_a_device: STAGE, Host;
    a_volume_with_an_image_is_used_like_any_other: STAGE, Host;
}

/// The value of one of the driver's keys in a volume's context.
fn attribute(cx: &Cx<'_>, volume: &Volume, word: &str) -> Option<String> {
    volume.volume_context.get(&format!("{}/{word}", cx.offers().name)).cloned()
}

/// A volume of the class, if that is in persistent memory, and what it is used for.
fn volume(cx: &mut Cx<'_>) -> Result<(Volume, String)> {
    let volume = cx.volume()?;
    match attribute(cx, &volume, "usage") {
        Some(usage) => Ok((volume, usage)),
        None => not_offered("persistent memory"),
    }
}

/// The usage of the class's volumes.
fn usage(cx: &mut Cx<'_>) -> Result<String> {
    let (volume, usage) = volume(cx)?;
    cx.delete(&volume.volume_id)?;
    Ok(usage)
}

fn bytes(cx: &Cx<'_>, volume: &Volume, word: &str) -> Result<i64> {
    let text = attribute(cx, volume, word).with_context(|| format!("no {word}: {volume:?}"))?;
    Ok(text.parse()?)
}

fn capacity(cx: &Cx<'_>, parameters: HashMap<String, String>) -> Result<GetCapacityResponse> {
    let request = GetCapacityRequest { parameters, ..Default::default() };
    Ok(cx.driver.get_capacity(request)?)
}

/// Row: P19.
fn a_volume_reports_its_charged_and_its_usable_bytes(cx: &mut Cx<'_>) -> Result<()> {
    let (volume, _) = volume(cx)?;
    let (usable, charged) =
        (bytes(cx, &volume, "usable-bytes")?, bytes(cx, &volume, "charged-bytes")?);
    ensure!(volume.capacity_bytes == charged, "{volume:?}");
    ensure!(usable >= cx.options.size && usable <= charged, "{usable} of {charged}");
    let level = attribute(cx, &volume, "durability");
    let levels = ["power-safe", "restart-safe", "volatile"];
    ensure!(level.as_deref().is_some_and(|level| levels.contains(&level)), "{level:?}");
    let erased = attribute(cx, &volume, "erase-after");
    ensure!(matches!(erased.as_deref(), Some("true" | "false")), "{erased:?}");
    // As other drivers have it, what is asked for is what is taken.
    let request = cx.request_with("sizeSemantics", "charged");
    let counted = cx.create(&request)?;
    ensure!(counted.capacity_bytes >= cx.options.size, "{counted:?}");
    ensure!(counted.capacity_bytes <= charged, "{counted:?}");
    Ok(())
}

/// Row: P16.
fn a_size_is_rounded_up_unless_the_limit_forbids(cx: &mut Cx<'_>) -> Result<()> {
    let (volume, _) = volume(cx)?;
    let odd = cx.options.size + 1;
    let request = cx.request_of(odd, 0);
    let made = cx.create(&request)?;
    ensure!(made.capacity_bytes >= odd && made.capacity_bytes >= volume.capacity_bytes);
    ensure!(bytes(cx, &made, "usable-bytes")? >= odd, "{made:?}");
    // Exactly so much will do, and a byte less will not.
    let request = cx.request_of(odd, made.capacity_bytes);
    ensure!(cx.create(&request)?.capacity_bytes == made.capacity_bytes);
    let request = cx.request_of(odd, made.capacity_bytes - 1);
    refused(cx.create(&request), Code::OutOfRange).map(drop)
}

/// Row: P14.
fn the_smallest_volume_is_that_of_the_pool(cx: &mut Cx<'_>) -> Result<()> {
    usage(cx)?;
    let parameters = cx.options.parameters.clone();
    let least = capacity(cx, parameters)?.minimum_volume_size.context("no smallest volume")?;
    ensure!(least >= 4 << 20, "{least}");
    let mut request = cx.block_request();
    request.capacity_range = range(1, 0);
    let made = cx.create(&request)?;
    ensure!(made.capacity_bytes >= least, "{made:?}, at least {least}");
    ensure!(bytes(cx, &made, "usable-bytes")? >= 1, "{made:?}");
    Ok(())
}

/// Row: P3.
fn an_unavailable_size_is_refused_with_the_free_space(cx: &mut Cx<'_>) -> Result<()> {
    usage(cx)?;
    let parameters = cx.options.parameters.clone();
    let reported = capacity(cx, parameters)?;
    let most = reported.maximum_volume_size.context("no largest volume")?;
    ensure!(most <= reported.available_capacity, "{reported:?}");
    // The reported capacity may be less than the real one, since maps take space too.
    let request = cx.request_of(2 * reported.available_capacity, 0);
    let status = refused(cx.create(&request), Code::ResourceExhausted)?;
    says(&status, &["bytes free"])
}

/// Row: P24.
fn usage_is_one_that_the_class_can_have(cx: &mut Cx<'_>) -> Result<()> {
    let usual = usage(cx)?;
    for wrong in ["", "appdirect", "FileIo", "Volatile"] {
        let request = cx.request_with("usage", wrong);
        let status = refused(cx.create(&request), Code::InvalidArgument)?;
        says(&status, &["usage"])?;
    }
    let request = cx.request_with("usage", "AppDirect");
    if usual == "FileIO" {
        let status = refused(cx.create(&request), Code::InvalidArgument)?;
        says(&status, &["DAX"])?;
    } else {
        cx.create(&request)?;
    }
    let request = cx.request_with("usage", "FileIO");
    let made = cx.create(&request)?;
    ensure!(attribute(cx, &made, "usage").as_deref() == Some("FileIO"), "{made:?}");
    Ok(())
}

/// A device of ublk has no DAX, so stores of a virtual machine to an image on it would reach only
/// the host's page cache.
///
/// Row: P24.
fn kata_image_is_app_direct_or_refused(cx: &mut Cx<'_>) -> Result<()> {
    let usual = usage(cx)?;
    let request = cx.request_with("kataContainers", "true");
    if usual == "FileIO" {
        let status = refused(cx.create(&request), Code::InvalidArgument)?;
        return says(&status, &["kataContainers is true", "DAX", "pmem-direct"]);
    }
    let made = cx.create(&request)?;
    ensure!(attribute(cx, &made, "usage").as_deref() == Some("AppDirect"), "{made:?}");
    Ok(())
}

/// Row: P25.
fn kata_containers_is_a_boolean_as_strconv_reads_it(cx: &mut Cx<'_>) -> Result<()> {
    let usual = usage(cx)?;
    for wrong in ["", "yes", "no", "tRUE", "2", "on"] {
        let request = cx.request_with("kataContainers", wrong);
        let status = refused(cx.create(&request), Code::InvalidArgument)?;
        says(&status, &["kataContainers"])?;
    }
    for (text, has) in [("1", true), ("t", true), ("True", true), ("0", false), ("F", false)] {
        let request = cx.request_with("kataContainers", text);
        if has && usual == "FileIO" {
            let status = refused(cx.create(&request), Code::InvalidArgument)?;
            says(&status, &["kataContainers is true"])?;
            continue;
        }
        let made = cx.create(&request).with_context(|| text.to_owned())?;
        ensure!(attribute(cx, &made, "kata-containers").is_some() == has, "{text}: {made:?}");
        cx.delete(&made.volume_id)?;
    }
    Ok(())
}

/// Row: P29.
fn kata_excludes_file_io_raw_block_and_btrfs(cx: &mut Cx<'_>) -> Result<()> {
    usage(cx)?;
    let with = cx.request_with("kataContainers", "true");
    let mut wrong = vec![with.clone(), with.clone(), with];
    wrong[0].parameters.insert("usage".to_owned(), "FileIO".to_owned());
    wrong[1].volume_capabilities = vec![block(Mode::SingleNodeWriter)];
    wrong[2].volume_capabilities = vec![mounted_as("btrfs", Mode::SingleNodeWriter)];
    for request in wrong {
        refused(cx.create(&request), Code::InvalidArgument)?;
    }
    Ok(())
}

/// Row: P45.
fn erase_after_has_two_spellings(cx: &mut Cx<'_>) -> Result<()> {
    usage(cx)?;
    for key in ["eraseAfter", "eraseafter"] {
        for wrong in ["", "sometimes"] {
            let request = cx.request_with(key, wrong);
            let status = refused(cx.create(&request), Code::InvalidArgument)?;
            says(&status, &[key])?;
        }
        let request = cx.request_with(key, "true");
        let made = cx.create(&request)?;
        ensure!(attribute(cx, &made, "erase-after").as_deref() == Some("true"), "{made:?}");
    }
    let mut both = cx.request_with("eraseAfter", "true");
    both.parameters.extend(one("eraseafter", "true"));
    refused(cx.create(&both), Code::InvalidArgument).map(drop)
}

/// Whether these options of a mount have files mapped as they are.
fn has_dax(options: &str) -> bool {
    options.split(',').any(|word| word == "dax" || word == "dax=always")
}

/// Row: P23.
fn a_mount_for_app_direct_has_dax_and_no_other_has(cx: &mut Cx<'_>) -> Result<()> {
    let usual = usage(cx)?;
    let capability = cx.mount(Mode::SingleNodeWriter);
    let staged = cx.staged(capability)?;
    let target = cx.published(&staged)?;
    let options = mounted_at(&target)?.context("nothing is mounted")?.options;
    ensure!(has_dax(&options) == (usual == "AppDirect"), "{usual}: {options}");
    let file = Path::new(&target).join("file");
    fs::write(&file, b"kept")?;
    ensure!(fs::read(&file)? == b"kept", "another file");
    Ok(())
}

/// Row: P22.
fn a_raw_block_volume_is_a_device(cx: &mut Cx<'_>) -> Result<()> {
    use std::os::unix::fs::FileTypeExt;
    usage(cx)?;
    let staged = cx.staged(block(Mode::SingleNodeWriter))?;
    let target = cx.published(&staged)?;
    ensure!(fs::metadata(&target)?.file_type().is_block_device(), "{target} is no device");
    Ok(())
}

/// Row: P26.
fn a_volume_with_an_image_is_used_like_any_other(cx: &mut Cx<'_>) -> Result<()> {
    let usual = usage(cx)?;
    let request = cx.request_with("kataContainers", "true");
    if usual == "FileIO" {
        return refused(cx.create(&request), Code::InvalidArgument).map(drop);
    }
    let volume = cx.create(&request)?;
    let capability = cx.mount(Mode::SingleNodeWriter);
    let staged = cx.stage_volume(&volume, capability)?;
    let target = cx.published(&staged)?;
    let mount = mounted_at(&target)?.context("nothing is mounted")?;
    ensure!(mount.fs_type == cx.options.fs_type, "{}", mount.fs_type);
    let images = || -> Result<Vec<Mount>> {
        let holds = |mount: &Mount| mount.path.join("pmem-csi-vm.img").is_file();
        Ok(mounts()?.into_iter().filter(holds).collect())
    };
    let around = images()?;
    ensure!(!around.is_empty(), "no image is mounted");
    ensure!(around.iter().all(|mount| has_dax(&mount.options)), "an image without DAX");
    let file = Path::new(&target).join("file");
    fs::write(&file, b"kept")?;
    cx.unpublish(&staged.id, &target)?;
    cx.unstage(&staged.id, staged.path())?;
    ensure!(images()?.is_empty(), "the image is still mounted");
    cx.stage(&staged.stage)?;
    let target = cx.published(&staged)?;
    ensure!(fs::read(Path::new(&target).join("file"))? == b"kept", "another file");
    Ok(())
}
