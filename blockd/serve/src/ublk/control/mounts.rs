//! The daemon's own mount namespace. A file system on one of our devices that stays mounted in
//! there would keep the device from going away, and the daemon's end would wait for IO that only
//! the daemon can do.

use std::fs;
use std::io;
use std::path::Path;

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};

/// Gives the process a mount namespace of its own, in which mounts and unmounts of the system's
/// show up, and none of its own is seen outside. Only before it has threads.
///
/// A service manager that forbids new namespaces may have given the service one, which is used
/// then.
pub fn enter_own_namespace() -> io::Result<()> {
    match unshare(CloneFlags::CLONE_NEWNS) {
        Err(Errno::EPERM) if is_apart(Path::new("/proc")) => {}
        made => made?,
    }
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_SLAVE | MsFlags::MS_REC, none)?;
    Ok(())
}

/// Whether the process has another mount namespace than the first process, by their links in /proc.
/// False where either is unknown.
fn is_apart(proc: &Path) -> bool {
    let namespace = |process| fs::read_link(proc.join(process).join("ns/mnt")).ok();
    match (namespace("self"), namespace("1")) {
        (Some(own), Some(first)) => own != first,
        _ => false,
    }
}

/// Detaches file systems on these ublk devices and their partitions from the own namespace. Says
/// which there were.
pub fn detach_own(numbers: &[u32]) -> Vec<String> {
    let names: Vec<String> = numbers.iter().map(|number| format!("ublkb{number}")).collect();
    detach_own_of(&names)
}

/// The same of block devices of these names, which the kernel serves itself: a file system that was
/// unmounted everywhere else would keep them in use.
pub fn detach_own_of(names: &[String]) -> Vec<String> {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mut points = points_of(&table, names);
    // One on top of another goes first.
    points.reverse();
    for point in &points {
        if let Err(error) = umount2(point.as_str(), MntFlags::MNT_DETACH) {
            tracing::warn!(%error, point, "a file system on our device stays in our namespace");
        }
    }
    points
}

/// Where file systems on these devices are mounted, by a table of mounts.
fn points_of(table: &str, names: &[String]) -> Vec<String> {
    let on_ours = |source: &str| {
        names.iter().any(|own| {
            let rest =
                source.strip_prefix("/dev/").and_then(|name| name.strip_prefix(own.as_str()));
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('p'))
        })
    };
    let mut points = Vec::new();
    for line in table.lines() {
        let mut words = line.split(' ');
        let Some(point) = words.nth(4) else { continue };
        let source = words.skip_while(|word| *word != "-").nth(2).unwrap_or_default();
        if on_ours(source) || device_name(line).is_some_and(|name| on_ours(&name)) {
            points.push(unescaped(point));
        }
    }
    points
}

/// The path of the block device that a line of the table is about, by its numbers.
fn device_name(line: &str) -> Option<String> {
    let numbers = line.split(' ').nth(2)?;
    let target = fs::read_link(format!("/sys/dev/block/{numbers}")).ok()?;
    Some(format!("/dev/{}", target.file_name()?.to_str()?))
}

/// Blanks and their like are octal in the table.
fn unescaped(text: &str) -> String {
    let codes = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];
    codes.iter().fold(text.to_owned(), |text, (code, plain)| text.replace(code, plain))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_namespace_other_than_that_of_the_first_process_is_ours() {
        let proc = std::env::temp_dir().join(format!("blockd-mounts-{}", std::process::id()));
        for (process, namespace) in [("1", "mnt:[1]"), ("self", "mnt:[2]")] {
            fs::create_dir_all(proc.join(process).join("ns")).unwrap();
            symlink(namespace, proc.join(process).join("ns/mnt")).unwrap();
        }
        assert!(is_apart(&proc));
        fs::remove_file(proc.join("1/ns/mnt")).unwrap();
        assert!(!is_apart(&proc), "unknown");
        symlink("mnt:[2]", proc.join("1/ns/mnt")).unwrap();
        assert!(!is_apart(&proc), "shared with the system");
        fs::remove_dir_all(proc).unwrap();
    }

    #[test]
    fn only_mounts_of_these_devices_are_found() {
        let table = "20 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
                     21 20 259:900001 / /mnt/a\\040b rw shared:1 - ext4 /dev/ublkb3 rw\n\
                     22 20 259:900002 / /mnt/c rw - xfs /dev/ublkb3p2 rw\n\
                     23 20 259:900003 / /mnt/d rw - xfs /dev/ublkb31 rw\n";
        assert_eq!(points_of(table, &["ublkb3".to_owned()]), ["/mnt/a b", "/mnt/c"]);
        assert!(points_of(table, &[]).is_empty());
    }
}
