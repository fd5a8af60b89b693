//! The fake kernel's state as files.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FileType, Mode as FileMode, mknodat};

use super::region::{FakeNamespace, FakeRegion};
use super::{Shown, State};
use crate::media::Domain;
use crate::platform::{Mode, PageMap};

fn put(folder: &Path, name: &str, text: impl std::fmt::Display) -> io::Result<()> {
    let path = folder.join(name);
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::write(path, format!("{text}\n"))
}

/// Where in memory each region begins.
const BASE: u64 = 4 << 30;

static VERSION: AtomicU64 = AtomicU64::new(0);

/// Renders the folders again, and replaces the former ones atomically: a concurrent reader sees
/// those, or missing files, as with a kernel.
pub(super) fn render(root: &Path, state: &State) -> io::Result<()> {
    let version = VERSION.fetch_add(1, Ordering::Relaxed);
    let (sys, proc) = (root.join(format!("sys-{version}")), root.join(format!("proc-{version}")));
    for name in ["dev", "run", "media"] {
        fs::create_dir_all(root.join(name))?;
    }
    for name in ["bus/dax/devices", "class/block", "block"] {
        fs::create_dir_all(sys.join(name))?;
    }
    put(&sys.join("devices/ndbus0"), "provider", "ACPI.NFIT")?;
    for driver in ["nd_pmem", "dax_pmem"] {
        fs::create_dir_all(sys.join("bus/nd/drivers").join(driver))?;
    }
    fs::create_dir_all(sys.join("bus/nd/devices"))?;
    let mut devices = BTreeSet::new();
    let mut module = 0;
    for region in &state.regions {
        show_region(&sys, region, &mut module)?;
        let is_seen = |one: &&FakeNamespace| one.size > 0 && region.shown == Shown::Whole;
        for namespace in region.namespaces.iter().filter(is_seen) {
            devices.extend(show_namespace(root, &sys, region, namespace)?);
        }
    }
    processes(&proc, state)?;
    replace(root, "sys", &sys)?;
    replace(root, "proc", &proc)?;
    for entry in fs::read_dir(root.join("dev"))? {
        let entry = entry?;
        if !devices.contains(&*entry.file_name().to_string_lossy()) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Former versions that stay, so that a reader in the middle of a folder of one reads it to its
/// end.
const KEPT: usize = 8;

fn replace(root: &Path, name: &str, by: &Path) -> io::Result<()> {
    let link = root.join(name);
    let next = by.with_extension("next");
    symlink(by, &next)?;
    fs::rename(&next, &link)?;
    let mut versions = Vec::new();
    for entry in fs::read_dir(root)? {
        let own = entry?.file_name().to_string_lossy().into_owned();
        let digits = own.strip_prefix(name).and_then(|rest| rest.strip_prefix('-'));
        versions.extend(digits.and_then(|digits| digits.parse::<u64>().ok()));
    }
    versions.sort_unstable();
    for version in versions.iter().rev().skip(KEPT) {
        fs::remove_dir_all(root.join(format!("{name}-{version}")))?;
    }
    Ok(())
}

fn show_region(sys: &Path, region: &FakeRegion, module: &mut u32) -> io::Result<()> {
    let (spec, number) = (&region.spec, region.number);
    let name = format!("region{number}");
    let folder = sys.join("devices/ndbus0").join(&name);
    let devices = sys.join("bus/nd/devices");
    fs::create_dir_all(&folder)?;
    symlink(&folder, devices.join(&name))?;
    put(&folder, "mappings", spec.ways)?;
    for way in 0..spec.ways {
        put(&folder, &format!("mapping{way}"), format!("nmem{module},0,{},{way}", spec.size))?;
        let id = format!("8680-57341200-{:08x}-{way}", spec.cookie);
        put(&devices.join(format!("nmem{module}")), "nfit/id", id)?;
        *module += 1;
    }
    let is_labelled = spec.labelled && region.shown != Shown::WithoutLabels;
    put(&folder, "resource", format!("{:#x}", BASE))?;
    put(&folder, "set_cookie", format!("{:#x}", spec.cookie))?;
    put(&folder, "devtype", if spec.volatile { "nd_volatile" } else { "nd_pmem" })?;
    put(&folder, "nstype", if is_labelled { 5 } else { 4 })?;
    put(&folder, "size", spec.size)?;
    if is_labelled {
        put(&folder, "available_size", region.available())?;
    }
    put(&folder, "max_available_extent", region.largest())?;
    if let Some(align) = spec.align {
        put(&folder, "align", format!("{align:#x}"))?;
    }
    put(&folder, "numa_node", spec.node.map_or(-1, i64::from))?;
    match spec.domain {
        Domain::CpuCache => put(&folder, "persistence_domain", "cpu_cache")?,
        Domain::MemoryController => put(&folder, "persistence_domain", "memory_controller")?,
        Domain::Unknown => {}
    }
    put(&folder, "read_only", 0)?;
    let bad: Vec<String> = region.bad_blocks.iter().map(|(a, b)| format!("{a} {b}")).collect();
    if region.shown == Shown::NotEnabled {
        // A socket is answered with ENXIO when it is opened, as the list is then.
        let (kind, mode) = (FileType::Socket, FileMode::from_raw_mode(0o600));
        mknodat(rustix::fs::CWD, folder.join("badblocks"), kind, mode, 0)?;
    } else {
        put(&folder, "badblocks", bad.join("\n"))?;
        symlink(sys.join("bus/nd/drivers/nd_region"), folder.join("driver"))?;
    }
    if region.shown != Shown::Whole {
        return Ok(());
    }
    let seed = region.namespace_seed();
    put(
        &folder,
        "namespace_seed",
        seed.map_or(String::new(), |n| format!("namespace{number}.{n}")),
    )?;
    for (mode, word) in super::region::KINDS {
        let seed = region.claim_seed(mode).map(|n| format!("{word}{number}.{n}"));
        put(&folder, &format!("{word}_seed"), seed.unwrap_or_default())?;
    }
    show_claims(sys, region, &folder)?;
    for namespace in &region.namespaces {
        show_attributes(sys, region, namespace, &folder)?;
    }
    Ok(())
}

fn show_attributes(
    sys: &Path,
    region: &FakeRegion,
    namespace: &FakeNamespace,
    folder: &Path,
) -> io::Result<()> {
    let (spec, number) = (&region.spec, region.number);
    let own = folder.join(format!("namespace{number}.{}", namespace.number));
    put(&own, "size", namespace.size)?;
    if namespace.size > 0 {
        put(&own, "resource", format!("{:#x}", BASE + namespace.start))?;
    }
    put(&own, "force_raw", u8::from(namespace.force_raw))?;
    let holder = region.claimer(namespace.number);
    let holder = holder.map(|one| format!("{}{number}.{}", one.word(), one.number));
    put(&own, "holder", holder.unwrap_or_default())?;
    if spec.labelled {
        put(&own, "uuid", &namespace.uuid)?;
        put(&own, "alt_name", &namespace.alt_name)?;
    }
    if namespace.bound {
        symlink(sys.join("bus/nd/drivers/nd_pmem"), own.join("driver"))?;
    }
    Ok(())
}

fn show_claims(sys: &Path, region: &FakeRegion, folder: &Path) -> io::Result<()> {
    let number = region.number;
    for claim in &region.claims {
        let own = folder.join(format!("{}{number}.{}", claim.word(), claim.number));
        put(&own, "uuid", &claim.uuid)?;
        let namespace = claim.namespace.map(|n| format!("namespace{number}.{n}"));
        put(&own, "namespace", namespace.unwrap_or_default())?;
        if claim.mode == Mode::Sector {
            let sizes = "512 520 528 4096 4104 4160 4224";
            let marked =
                sizes.replace("4096", if claim.sector_size > 0 { "[4096]" } else { "4096" });
            put(&own, "sector_size", marked)?;
        } else {
            let map = match claim.map {
                None => "none",
                Some(PageMap::Memory) => "ram",
                Some(PageMap::Device) => "pmem",
            };
            put(&own, "mode", map)?;
            put(&own, "align", claim.align)?;
        }
        if claim.bound {
            let driver = if claim.mode == Mode::Devdax { "dax_pmem" } else { "nd_pmem" };
            symlink(sys.join("bus/nd/drivers").join(driver), own.join("driver"))?;
        }
    }
    Ok(())
}

/// A number that is the same for the same device.
fn minor(region: &FakeRegion, namespace: &FakeNamespace) -> u64 {
    (region.number as u64) * 64 + namespace.number
}

fn show_namespace(
    root: &Path,
    sys: &Path,
    region: &FakeRegion,
    namespace: &FakeNamespace,
) -> io::Result<Option<String>> {
    let Some((name, mode, bytes)) = region.device_of(namespace) else { return Ok(None) };
    let number = region.number;
    let folder = sys.join(format!("devices/ndbus0/region{number}"));
    let carrier = match region.claimer(namespace.number) {
        Some(claim) => folder.join(format!("{}{number}.{}", claim.word(), claim.number)),
        None => folder.join(format!("namespace{number}.{}", namespace.number)),
    };
    let minor = minor(region, namespace);
    if mode == Mode::Devdax {
        fs::create_dir_all(carrier.join(&name))?;
        let own = sys.join("bus/dax/devices").join(&name);
        put(&own, "dev", format!("252:{minor}"))?;
        put(&own, "size", bytes)?;
    } else {
        let own = carrier.join("block").join(&name);
        put(&own, "dev", format!("259:{minor}"))?;
        put(&own, "size", bytes / 512)?;
        put(&own, "badblocks", "")?;
        fs::create_dir_all(own.join("holders"))?;
        symlink(&own, sys.join("class/block").join(&name))?;
        symlink(&own, sys.join("block").join(&name))?;
    }
    // Blocks of a sector device lie anywhere, and old ones stay: it has bytes of its own.
    let own = if mode == Mode::Sector { "-sectors" } else { "" };
    let media = format!("media/{:x}-{:x}{own}", region.spec.cookie, namespace.start);
    let media = root.join(media);
    set_length(&media, bytes)?;
    let node: PathBuf = root.join("dev").join(&name);
    let same = fs::canonicalize(&node).is_ok_and(|path| path == media);
    if !same {
        let _ = fs::remove_file(&node);
        symlink(&media, &node)?;
    }
    Ok(Some(name))
}

/// Makes a device's file as long as the device. Data beyond its end stays on the media, and
/// reappears when the device becomes longer.
fn set_length(media: &Path, bytes: u64) -> io::Result<()> {
    let options = || File::options().create(true).truncate(false).read(true).write(true).clone();
    let file = options().open(media)?;
    let length = file.metadata()?.len();
    let behind = options().open(media.with_extension("behind"))?;
    if length > bytes {
        copy(&file, &behind, bytes, length)?;
    }
    file.set_len(bytes)?;
    if length < bytes {
        copy(&behind, &file, length, bytes.min(behind.metadata()?.len()))?;
    }
    Ok(())
}

/// Copies non-zero bytes, and zeroes the others.
fn copy(from: &File, to: &File, at: u64, end: u64) -> io::Result<()> {
    const PIECE: u64 = 64 << 10;
    let (mut page, mut there) = (vec![0; 64 << 10], vec![0; 64 << 10]);
    let mut at = at;
    while at < end {
        let part = usize::try_from(PIECE.min(end - at)).unwrap_or(0);
        from.read_exact_at(&mut page[..part], at)?;
        there.fill(0);
        let has = to.metadata()?.len().saturating_sub(at);
        let has = usize::try_from(has).unwrap_or(part).min(part);
        to.read_exact_at(&mut there[..has], at)?;
        if page[..part] != there[..part] {
            to.write_all_at(&page[..part], at)?;
        }
        at += part as u64;
    }
    Ok(())
}

fn processes(proc: &Path, state: &State) -> io::Result<()> {
    put(proc, "swaps", "Filename Type Size")?;
    for (pid, comm) in [(1, "init"), (77, "database")] {
        let folder = proc.join(pid.to_string());
        put(&folder, "comm", comm)?;
        put(&folder, "maps", "7f0000000000-7f0000001000 r--p 00000000 08:01 7 /usr/lib/libc.so")?;
        fs::create_dir_all(folder.join("fd"))?;
        let line = |(device, point): (&String, &String)| {
            format!("30 1 0:99 / {point} rw - ext4 /dev/{device} rw,dax=always")
        };
        let shown = |(device, point): &(String, String)| {
            format!("31 1 0:6 /{device} {point} rw - devtmpfs udev rw")
        };
        let shown = state.shown_at.iter().map(shown);
        let table: Vec<String> = state.mounts.iter().map(line).chain(shown).collect();
        put(&folder, "mountinfo", table.join("\n"))?;
    }
    for (at, device) in state.open.iter().enumerate() {
        symlink(format!("/dev/{device}"), proc.join(format!("77/fd/{}", at + 3)))?;
    }
    Ok(())
}
