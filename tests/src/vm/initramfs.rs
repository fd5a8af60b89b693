//! The guest's root: an archive in memory, of the form that the kernel unpacks (cpio, "newc").

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use blockd_testkit::tools;

use super::packages;

const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const PLAIN: u32 = 0o100_644;
const LINK: u32 = 0o120_777;

/// Where the little tools lie. Last in the guest's `PATH`: a real tool of the same name is found
/// before them, and the shell, which is none of them, does not prefer them either.
const APPLETS: &str = "/busybox";

/// Folders whose old names are links into `/usr`, as on every system of today.
const MERGED: [&str; 4] = ["bin", "sbin", "lib", "lib64"];

/// An archive that grows by files.
#[derive(Debug, Default)]
pub(super) struct Initramfs {
    bytes: Vec<u8>,
    /// Names so far, so that nothing is put in twice.
    names: BTreeSet<String>,
    inode: u32,
}

impl Initramfs {
    /// A root with a shell, busybox's tools and empty mount points. Unpacked packages come first:
    /// their libraries take the place of those that are installed here.
    pub(super) fn new(packages: &[PathBuf]) -> Result<Self> {
        let mut root = Self::default();
        for folder in MERGED {
            root.folder(&format!("/usr/{folder}"));
            root.link(&format!("/{folder}"), &format!("usr/{folder}"));
        }
        for folder in ["/proc", "/sys", "/dev", "/run", "/tmp", "/var", "/mnt", "/etc", "/root"] {
            root.folder(folder);
        }
        for unpacked in packages {
            for (host, guest) in packages::files(unpacked)? {
                match fs::read_link(&host) {
                    Ok(target) => root.link(&guest, &target.to_string_lossy()),
                    Err(_) => root.file(&host, &guest, true)?,
                }
            }
        }
        let busybox = tools::find("busybox")?;
        let listed = tools::text(Command::new(&busybox).arg("--list"))?;
        root.program_at(&busybox, &format!("{APPLETS}/busybox"))?;
        for applet in listed.lines().filter(|applet| *applet != "busybox") {
            root.link(&format!("{APPLETS}/{applet}"), "busybox");
        }
        root.program_at(&tools::find("dash")?, "/bin/sh")?;
        root.put("/etc/passwd", PLAIN, b"root:x:0:0:root:/root:/bin/sh\n");
        root.put("/etc/group", PLAIN, b"root:x:0:\n");
        Ok(root)
    }

    /// A program with the shared libraries it names, at the path it has here.
    pub(super) fn program(&mut self, program: &Path) -> Result<()> {
        let path = program.to_string_lossy().into_owned();
        self.program_at(program, &path)
    }

    /// As [`Self::program`], at another path.
    pub(super) fn program_at(&mut self, program: &Path, guest: &str) -> Result<()> {
        self.file(program, guest, true)?;
        for library in libraries(program)? {
            let path = library.to_string_lossy().into_owned();
            self.file(&library, &path, true)?;
        }
        Ok(())
    }

    /// A file of the host.
    pub(super) fn file(&mut self, host: &Path, guest: &str, executable: bool) -> Result<()> {
        let bytes = fs::read(host).with_context(|| format!("reading {}", host.display()))?;
        self.put(guest, if executable { PROGRAM } else { PLAIN }, &bytes);
        Ok(())
    }

    /// A script or another text.
    pub(super) fn text(&mut self, guest: &str, text: &str, executable: bool) {
        self.put(guest, if executable { PROGRAM } else { PLAIN }, text.as_bytes());
    }

    /// The archive, with its end.
    pub(super) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn folder(&mut self, guest: &str) {
        self.put(guest, FOLDER, &[]);
    }

    fn link(&mut self, guest: &str, target: &str) {
        self.put(guest, LINK, target.as_bytes());
    }

    /// Adds an entry and the folders above it, each once.
    fn put(&mut self, guest: &str, mode: u32, bytes: &[u8]) {
        let name = merged(guest);
        let above: Vec<usize> = name.match_indices('/').map(|(at, _)| at).collect();
        for at in above {
            if self.names.insert(name[..at].to_owned()) {
                let folder = name[..at].to_owned();
                self.entry(&folder, FOLDER, &[]);
            }
        }
        if self.names.insert(name.clone()) {
            self.entry(&name, mode, bytes);
        }
    }

    fn entry(&mut self, name: &str, mode: u32, bytes: &[u8]) {
        self.inode += 1;
        let links = if mode == FOLDER { 2 } else { 1 };
        let header = format!(
            "070701{:08x}{mode:08x}{zero}{zero}{links:08x}{zero}{:08x}\
             {zero}{zero}{zero}{zero}{:08x}{zero}",
            self.inode,
            bytes.len(),
            name.len() + 1,
            zero = "00000000",
        );
        // Fields: inode, mode, owner, group, links, time, size, four device numbers, length of the
        // name with its NUL, checksum that this form does not have.
        self.bytes.extend_from_slice(header.as_bytes());
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(bytes);
        self.pad();
    }

    /// Names and contents end on a multiple of four.
    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

/// The name in the archive: no `/` in front, and the links of [`MERGED`] followed, since a file
/// can't be unpacked through a name that is not a folder.
fn merged(guest: &str) -> String {
    let name = guest.trim_start_matches('/');
    match name.split_once('/') {
        Some((first, _)) if MERGED.contains(&first) => format!("usr/{name}"),
        _ => name.to_owned(),
    }
}

/// The libraries that the dynamic linker would load for a program; none if it is linked statically.
fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(program).output().context("cannot start ldd")?;
    // `ldd` fails on scripts and static programs, which need nothing.
    let text = String::from_utf8_lossy(&output.stdout);
    let paths = text.lines().filter_map(|line| {
        let found = line.split_once("=> ").map_or(line, |(_, found)| found);
        let path = found.split_whitespace().next()?;
        path.starts_with('/').then(|| PathBuf::from(path))
    });
    Ok(paths.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_folders_are_followed() {
        assert_eq!(merged("/lib/x86_64-linux-gnu/libc.so.6"), "usr/lib/x86_64-linux-gnu/libc.so.6");
        assert_eq!(merged("/usr/bin/fio"), "usr/bin/fio");
        assert_eq!(merged("/bin"), "bin");
    }

    #[test]
    fn an_archive_has_the_form_that_cpio_reads() {
        let mut root = Initramfs::default();
        root.text("/a/b", "text\n", true);
        root.text("/a/b", "again\n", true);
        root.link("/a/c", "b");
        let folder = std::env::temp_dir().join(format!("blockd-cpio-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("archive"), root.finish()).unwrap();
        let line = format!("cd {} && busybox cpio -i <archive && cat a/c", folder.display());
        let said = tools::shell(&line);
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(said.unwrap(), "text\n");
    }
}
