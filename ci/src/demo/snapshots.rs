//! The second half of the demo: snapshot, change, difference, clone, increment, rollback. Each
//! image that comes out has a checksum that is known before.

use std::fs::File;
use std::hash::{DefaultHasher, Hasher};
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result};
use blockd_testkit::daemon::Daemon;

use super::{quiet, show, text, tool};
use crate::command;

/// Large enough for the project's own documents, small enough to be read several times.
const VOLUME_SIZE: &str = "64M";

/// The unit in which images are compared.
const BLOCK: usize = 4096;

/// Images that were compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Images {
    pub(super) count: u64,
    pub(super) differ: u64,
}

impl Images {
    fn compare(&mut self, what: &str, expected: u64, image: &Path) -> Result<()> {
        let found = sum(image)?;
        self.count += 1;
        self.differ += u64::from(found != expected);
        let verdict = if found == expected { "the same" } else { "DIFFERS" };
        println!("  {what}: {found:016x}, {verdict}");
        Ok(())
    }
}

/// Does all of it on a volume of its own.
pub(super) fn run(
    daemon: &Daemon,
    folder: &Path,
    content: &Path,
    mut step: impl FnMut(&str),
) -> Result<Images> {
    let mut images = Images::default();
    let path = |name: &str| folder.join(name);
    let (before, after, out) = (path("before"), path("after"), path("out"));

    step("a small file system with the project's documents, and a snapshot of it");
    let mut mke2fs = tool("mke2fs");
    mke2fs.args(["-q", "-t", "ext4", "-d"]).arg(content).arg(&before).arg(VOLUME_SIZE);
    command::run(&mut mke2fs)?;
    quiet(daemon, &["import", text(&before)?, "work"])?;
    println!("$ blockd snapshot work --tag before");
    show(daemon, &["snapshot", "work", "--tag", "before"])?;
    let sum_before = sum(&before)?;

    step("changing it: a file more, and a file less");
    std::fs::copy(&before, &after)?;
    let (added, gone) = (path("added"), first_file(content)?);
    std::fs::write(&added, vec![7; 3 << 20])?;
    for request in [format!("write {} added", text(&added)?), format!("rm /{gone}")] {
        let mut debugfs = tool("debugfs");
        debugfs.args(["-w", "-R", &request]).arg(&after);
        command::run(debugfs.stderr(std::process::Stdio::null()))?;
    }
    let blocks = write_difference(daemon, &before, &after)?;
    println!("  {blocks} blocks of 4 KiB written over NBD, without {gone}");
    println!("$ blockd snapshot work --tag after");
    show(daemon, &["snapshot", "work", "--tag", "after"])?;
    println!("$ blockd diff work@after --since work@before");
    show(daemon, &["diff", "work@after", "--since", "work@before"])?;
    let sum_after = sum(&after)?;

    step("a clone of how it was, and the difference as a backup that brings it up to date");
    quiet(daemon, &["clone", "work@before", "copy"])?;
    export(daemon, "copy", &out)?;
    images.compare("the clone beside the image before", sum_before, &out)?;
    println!("$ blockd export work@after increment --since work@before");
    let increment = path("increment");
    show(daemon, &["export", "work@after", text(&increment)?, "--since", "work@before"])?;
    println!("$ blockd import increment copy --apply");
    show(daemon, &["import", text(&increment)?, "copy", "--apply"])?;
    export(daemon, "copy", &out)?;
    images.compare("the clone with the backup beside the image after", sum_after, &out)?;

    step("rolling the volume back, and the space of the snapshots");
    println!("$ blockd detach work && blockd rollback work work@before");
    quiet(daemon, &["detach", "work"])?;
    show(daemon, &["rollback", "work", "work@before"])?;
    export(daemon, "work", &out)?;
    images.compare("the volume beside the image before", sum_before, &out)?;
    export(daemon, "work@after", &out)?;
    images.compare("the later snapshot beside the image after", sum_after, &out)?;
    let mut e2fsck = tool("e2fsck");
    command::run(e2fsck.args(["-f", "-n"]).arg(&out))?;
    println!("$ blockd space work work@before work@after");
    show(daemon, &["space", "work", "work@before", "work@after"])?;
    Ok(images)
}

fn export(daemon: &Daemon, volume: &str, to: &Path) -> Result<()> {
    quiet(daemon, &["export", volume, text(to)?, "--force"]).map(drop)
}

/// The name of a regular file right in the folder, the first one.
fn first_file(folder: &Path) -> Result<String> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            names.extend(entry.file_name().into_string().ok());
        }
    }
    names.sort();
    names.into_iter().next().with_context(|| format!("no file in {}", folder.display()))
}

/// Writes the blocks in which an image differs from another to the volume that holds the other.
fn write_difference(daemon: &Daemon, before: &Path, after: &Path) -> Result<u64> {
    let (before, after) = (std::fs::read(before)?, std::fs::read(after)?);
    let mut connection = daemon.connect("work")?;
    let mut count = 0;
    let pairs = before.chunks(BLOCK).zip(after.chunks(BLOCK));
    for (number, (_, new)) in (0..).zip(pairs).filter(|(_, (old, new))| old != new) {
        connection.write(number * BLOCK as u64, new)?;
        count += 1;
    }
    connection.flush()?;
    Ok(count)
}

/// A checksum of all bytes of a file.
fn sum(path: &Path) -> Result<u64> {
    let mut file = File::open(path).with_context(|| format!("opening {}", path.display()))?;
    let (mut hasher, mut buffer) = (DefaultHasher::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hasher.finish()),
            len => hasher.write(&buffer[..len]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_that_differ_are_counted() {
        let dir = std::env::temp_dir().join(format!("blockd-demo-images-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (one, other) = (dir.join("one"), dir.join("other"));
        std::fs::write(&one, vec![1; 3 << 20]).unwrap();
        let mut bytes = vec![1; 3 << 20];
        bytes[2 << 20] = 2;
        std::fs::write(&other, bytes).unwrap();
        let (mut images, expected) = (Images::default(), sum(&one).unwrap());
        images.compare("itself", expected, &one).unwrap();
        images.compare("another", expected, &other).unwrap();
        assert_eq!(images, Images { count: 2, differ: 1 });
        assert_eq!(first_file(&dir).unwrap(), "one");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
