//! Images for virtual machines, seen from inside of one: the device itself is the file system, or a
//! partition of it is, and both can be mapped.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use blockd_pmem::media::{Mapping, MappingOptions, Media, Medium};
use blockd_testkit::folder::Folder;
use blockd_testkit::tools;

use crate::vm::{Drive, Vm};
use crate::workload::guest::shell;

/// Bytes of an image: a multiple of 128 MiB, for its machine.
const IMAGE: &str = "128Mi";
/// The content of the file in it.
pub(super) const TEXT: &str = "a file from outside\n";

/// Adds one image of each kind to a machine, and one that the plugin has made. The host's half.
///
/// # Errors
/// When they can't be made.
pub(super) fn with_images(vm: Vm, folder: &Folder, staged: &Path) -> Result<Vm> {
    let plain = image(folder, "plain", &[])?;
    let parted = image(folder, "parted", &["--partition"])?;
    // It is as large as its volume happened to be, and so comes behind all that is aligned.
    let (size, path) = (fs::metadata(staged)?.len(), staged.display());
    let memory = format!("memory-backend-file,id=staged,share=on,mem-path={path},size={size}");
    let vm = vm.drive(Drive::Nvdimm(plain)).drive(Drive::Nvdimm(parted));
    Ok(vm.arguments(&["-object", &memory, "-device", "nvdimm,memdev=staged"]))
}

/// An image with a file system in it.
fn image(folder: &Folder, name: &str, more: &[&str]) -> Result<PathBuf> {
    let content = folder.path().join(format!("{name}-content"));
    fs::create_dir_all(&content)?;
    fs::write(content.join("file"), TEXT)?;
    let path = folder.path().join(name);
    let mut make = Command::new(tools::blockd_csi()?);
    let said = tools::text(make.args(["kata-image", "--size", IMAGE]).args(more).arg(&path))?;
    let (at, bytes) = said.trim().split_once(' ').with_context(|| said.clone())?;
    let blocks = bytes.parse::<u64>()? / 4096;
    let mut mkfs = Command::new("mkfs.ext4");
    mkfs.args(["-q", "-b", "4096", "-E", &format!("offset={at}"), "-d"]).arg(&content);
    tools::text(mkfs.arg(&path).arg(blocks.to_string()))?;
    Ok(path)
}

/// The guest's half.
///
/// # Errors
/// When a device is not there, or can't be mounted with DAX or mapped.
pub(super) fn inside() -> Result<String> {
    let devices = shell("ls -d /dev/pmem*")?;
    let names: Vec<&str> = devices.split_whitespace().collect();
    // The tables of two are in front of what the machine sees; that of the third within it.
    let part = names.iter().find(|name| name.ends_with("p1")).context("no partition")?;
    let parted = part.trim_end_matches("p1");
    let mut all: Vec<&str> = names.iter().copied().filter(|name| *name != parted).collect();
    all.sort_unstable();
    ensure!(names.len() == 4 && all.len() == 3, "{names:?}");
    for (number, device) in all.into_iter().enumerate() {
        let folder = format!("/mnt/{number}");
        shell(&format!("mkdir -p {folder}; mount -t ext4 -o dax {device} {folder}"))?;
        let folder = Path::new(&folder);
        ensure!(fs::read_to_string(folder.join("file"))? == TEXT, "{device}: another file");
        let path = folder.join("mapped");
        File::create(&path)?.set_len(1 << 21)?;
        shell(&format!("fallocate -l 2M {}", path.display()))?;
        let mapping = Mapping::open(&path, &MappingOptions::default())?;
        ensure!(mapping.medium() == Medium::DaxFile, "{device}: {:?}", mapping.medium());
        mapping.write(4096, TEXT.as_bytes())?;
        mapping.fence();
    }
    Ok("3 images seen as devices, all with DAX, one of them the plugin's".to_owned())
}
