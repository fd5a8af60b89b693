//! A disk of this machine: its properties and its users.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

/// The least that a pool and a volume fit on.
const SMALLEST: u64 = 256 << 20;
/// The part of both ends that is overwritten: a pool has its superblocks there, other formats their
/// tables.
const ENDS: usize = 4 << 20;

/// A block device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Disk {
    /// Its node, links followed.
    pub path: PathBuf,
    /// The kernel's name for it.
    pub name: String,
    /// Bytes.
    pub bytes: u64,
    /// Its model, or the file behind a loop device.
    pub model: String,
    /// Names of its partitions.
    pub partitions: Vec<String>,
    /// Why it may not be erased, one for each reason.
    pub uses: Vec<String>,
}

impl Disk {
    /// Reads the properties of a device.
    ///
    /// # Errors
    /// When there is none, or it is none, or too small.
    pub fn look(path: &Path) -> Result<Self> {
        let shown = path.display();
        let path = path.canonicalize().with_context(|| format!("device {shown}"))?;
        let kind = fs::metadata(&path)?.file_type();
        ensure!(kind.is_block_device(), "device {shown}: no block device");
        let name = path.file_name().context("a device without a name")?;
        let name = name.to_string_lossy().into_owned();
        let class = PathBuf::from("/sys/class/block").join(&name);
        let text = |file: &Path| fs::read_to_string(file).map(|text| text.trim().to_owned());
        let sectors: u64 = text(&class.join("size")).context("its size")?.parse()?;
        let bytes = sectors * 512;
        ensure!(bytes >= SMALLEST, "device {shown}: {bytes} bytes, at least {SMALLEST} are needed");
        let models = ["device/model", "loop/backing_file", "dm/name"];
        let model = models.iter().find_map(|file| text(&class.join(file)).ok());
        let partitions = partitions(&class)?;
        let mut uses = uses(&name, &class)?;
        for partition in &partitions {
            uses.extend(self::uses(partition, &class.join(partition))?);
        }
        if text(&class.join("ro")).is_ok_and(|ro| ro == "1") {
            uses.push(format!("{name} is read-only"));
        }
        let model = model.unwrap_or_else(|| "unknown".to_owned());
        Ok(Self { path, name, bytes, model, partitions, uses })
    }

    /// Refuses a disk that is in use. An exclusive open makes the kernel refuse a second owner as
    /// well.
    ///
    /// # Errors
    /// When it is in use; the message names the user.
    pub fn refuse_if_used(&self) -> Result<()> {
        if !self.uses.is_empty() {
            bail!("{} is not erased: {}", self.path.display(), self.uses.join("; "));
        }
        let alone =
            OpenOptions::new().read(true).write(true).custom_flags(libc::O_EXCL).open(&self.path);
        alone.with_context(|| {
            format!("{} is not erased: it can't be had alone", self.path.display())
        })?;
        Ok(())
    }

    /// Overwrites both ends with zeroes.
    ///
    /// # Errors
    /// When it can't be written.
    pub fn forget(&self) -> Result<()> {
        let context = || format!("erase the ends of {}", self.path.display());
        let mut options = OpenOptions::new();
        let file = options.write(true).custom_flags(libc::O_EXCL).open(&self.path);
        let file = file.with_context(context)?;
        let zeroes = vec![0; ENDS];
        file.write_all_at(&zeroes, 0).with_context(context)?;
        file.write_all_at(&zeroes, self.bytes - ENDS as u64).with_context(context)?;
        file.sync_all().with_context(context)
    }

    /// Prints its properties.
    pub fn print(&self) {
        println!("device      {}", self.path.display());
        println!("model       {}", self.model);
        println!(
            "size        {:.1} GiB ({} bytes)",
            self.bytes as f64 / 2_f64.powi(30),
            self.bytes
        );
        let partitions = self.partitions.join(" ");
        println!("partitions  {}", if partitions.is_empty() { "none" } else { &partitions });
        let uses = self.uses.join("; ");
        println!("used        {}", if uses.is_empty() { "no" } else { &uses });
    }

    /// Returns the properties as JSON.
    #[must_use]
    pub fn to_json(&self) -> Value {
        json!({ "path": self.path, "model": self.model, "bytes": self.bytes })
    }
}

fn partitions(class: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(class)? {
        let entry = entry?;
        if entry.path().join("partition").exists() {
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// Returns the users of a disk or a partition: file systems, swap, other devices on top.
fn uses(name: &str, class: &Path) -> Result<Vec<String>> {
    let mut uses = Vec::new();
    let number = fs::read_to_string(class.join("dev"))?;
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    uses.extend(mounted(&mounts, number.trim()).map(|at| format!("{name} is mounted on {at}")));
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    let node = format!("/dev/{name}");
    if swaps.lines().any(|line| line.split_whitespace().next() == Some(node.as_str())) {
        uses.push(format!("{name} is swap"));
    }
    if let Ok(holders) = fs::read_dir(class.join("holders")) {
        for holder in holders {
            uses.push(format!("{name} is held by {}", holder?.file_name().to_string_lossy()));
        }
    }
    Ok(uses)
}

/// Where a device with these numbers is mounted. A line: id, parent, numbers, root, place.
fn mounted<'a>(mounts: &'a str, number: &'a str) -> impl Iterator<Item = &'a str> {
    mounts.lines().filter_map(move |line| {
        let mut fields = line.split_whitespace();
        (fields.nth(2)? == number).then(|| fields.nth(1))?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_found_by_number() {
        let mounts = "25 1 254:1 / / rw,relatime - ext4 /dev/vda1 rw\n\
                      26 25 0:5 / /dev rw - devtmpfs dev rw\n\
                      27 25 254:1 /sub /mnt rw - ext4 /dev/vda1 rw\n";
        assert_eq!(mounted(mounts, "254:1").collect::<Vec<_>>(), ["/", "/mnt"]);
        assert_eq!(mounted(mounts, "254:2").count(), 0);
    }

    #[test]
    fn a_path_that_is_no_block_device_is_refused() {
        let said = Disk::look(Path::new("/dev/null")).unwrap_err().to_string();
        assert!(said.contains("no block device"), "{said}");
        assert!(Disk::look(Path::new("/no/such")).is_err());
    }
}
