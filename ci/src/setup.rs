//! `cargo ci setup`: installs missing tools of tests and benches. Debian's package manager is the
//! only one it knows; elsewhere it names what is missing.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::command;

/// A program that a test or a bench starts, or a library that a build needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tool {
    /// The name of the program, or the beginning of the library's file name, which has `.so`.
    pub(crate) program: &'static str,
    /// The Debian package that has it.
    pub(crate) package: &'static str,
}

/// libublk's constants are read from the kernel's header with it, when blockd is built.
pub(crate) const LIBCLANG: Tool = Tool { program: "libclang.so", package: "libclang-dev" };
/// Runs the reader written from the format's description.
pub(crate) const PYTHON: Tool = Tool { program: "python3", package: "python3" };
/// The pump's figures are compared with its figures.
pub(crate) const FIO: Tool = Tool { program: "fio", package: "fio" };
/// Makes the loop device that the pump also runs on.
pub(crate) const LOSETUP: Tool = Tool { program: "losetup", package: "util-linux" };
/// Makes the file system that a whole-system test mounts.
pub(crate) const MKFS: Tool = Tool { program: "mkfs.ext4", package: "e2fsprogs" };

/// The tools for virtual machines.
pub(crate) const MACHINES: [Tool; 10] = [
    LIBCLANG,
    Tool { program: "qemu-system-x86_64", package: "qemu-system-x86" },
    Tool { program: "busybox", package: "busybox-static" },
    Tool { program: "dash", package: "dash" },
    Tool { program: "depmod", package: "kmod" },
    Tool { program: "xz", package: "xz-utils" },
    Tool { program: "strip", package: "binutils" },
    Tool { program: "dmsetup", package: "dmsetup" },
    Tool { program: "mkfs.xfs", package: "xfsprogs" },
    MKFS,
];

/// The tools that workloads start in virtual machines, beside [`MACHINES`].
pub(crate) const WORKLOADS: [Tool; 25] = [
    FIO,
    PYTHON,
    Tool { program: "xfs_repair", package: "xfsprogs" },
    Tool { program: "mkfs.btrfs", package: "btrfs-progs" },
    Tool { program: "btrfs", package: "btrfs-progs" },
    Tool { program: "e2fsck", package: "e2fsprogs" },
    Tool { program: "resize2fs", package: "e2fsprogs" },
    Tool { program: "cryptsetup", package: "cryptsetup-bin" },
    Tool { program: "lvm", package: "lvm2" },
    Tool { program: "sfdisk", package: "fdisk" },
    Tool { program: "blkdiscard", package: "util-linux" },
    Tool { program: "blockdev", package: "util-linux" },
    Tool { program: "fstrim", package: "util-linux" },
    Tool { program: "blkid", package: "util-linux" },
    Tool { program: "mkswap", package: "util-linux" },
    Tool { program: "wipefs", package: "util-linux" },
    LOSETUP,
    Tool { program: "xfs_growfs", package: "xfsprogs" },
    Tool { program: "xfs_io", package: "xfsprogs" },
    Tool { program: "dd", package: "coreutils" },
    Tool { program: "sha256sum", package: "coreutils" },
    // Labels of persistent memory, and the kernel's own tools for its regions.
    Tool { program: "ndctl", package: "ndctl" },
    Tool { program: "filefrag", package: "e2fsprogs" },
    // They check the output for dm-thin.
    Tool { program: "thin_restore", package: "thin-provisioning-tools" },
    Tool { program: "thin_check", package: "thin-provisioning-tools" },
];

/// Serves raw and qcow2 images over NBD.
const QEMU_NBD: Tool = Tool { program: "qemu-nbd", package: "qemu-utils" };
/// Makes qcow2 images, and reads and writes them for import and export.
const QEMU_IMG: Tool = Tool { program: "qemu-img", package: "qemu-utils" };
/// The other NBD server of QEMU, where the package of `qemu-nbd` does not bring it.
const QEMU_STORAGE_DAEMON: Tool =
    Tool { program: "qemu-storage-daemon", package: "qemu-system-common" };
/// Serves files and memory over NBD.
const NBDKIT: Tool = Tool { program: "nbdkit", package: "nbdkit" };
/// The first NBD server.
const NBD_SERVER: Tool = Tool { program: "nbd-server", package: "nbd-server" };
/// Counts system calls of a server.
const PERF: Tool = Tool { program: "perf", package: "linux-perf" };

/// The linker and the emulator for another processor architecture.
pub(crate) const AARCH64: [Tool; 2] = [
    Tool { program: "aarch64-linux-gnu-gcc", package: "gcc-aarch64-linux-gnu" },
    Tool { program: "qemu-aarch64", package: "qemu-user" },
];

/// The tools of `cargo ci bench nbd`; tests do not need them. QEMU's tools come first: newer ones
/// have both servers in one package.
pub(crate) const NBD_BENCH: [Tool; 8] =
    [LIBCLANG, QEMU_NBD, QEMU_IMG, QEMU_STORAGE_DAEMON, NBDKIT, NBD_SERVER, PERF, FIO];

/// The programs that `cargo ci bench tools` compares with ours.
pub(crate) const TOOLS_BENCH: [Tool; 3] =
    [LIBCLANG, QEMU_IMG, Tool { program: "nbdcopy", package: "libnbd-bin" }];
/// The programs that `cargo ci bench clones` compares with ours.
pub(crate) const CLONES_BENCH: [Tool; 3] = [LIBCLANG, QEMU_NBD, QEMU_IMG];
/// The tools of `cargo ci bench ublk` in its virtual machine, beside [`MACHINES`].
pub(crate) const UBLK_BENCH: [Tool; 2] = [FIO, LOSETUP];
/// Installs Debian for `cargo ci bench snapshot --only packing`.
pub(crate) const MMDEBSTRAP: Tool = Tool { program: "mmdebstrap", package: "mmdebstrap" };
/// The build dependencies and tools of `cargo ci bench --device`.
pub(crate) const DEVICE_BENCH: [Tool; 2] = [LIBCLANG, FIO];

/// The build dependencies of the demo, and its tools to make, check and read an unmounted file
/// system.
pub(crate) const DEMO: [Tool; 4] = [
    LIBCLANG,
    Tool { program: "mke2fs", package: "e2fsprogs" },
    Tool { program: "e2fsck", package: "e2fsprogs" },
    Tool { program: "debugfs", package: "e2fsprogs" },
];

/// The build dependencies of `cargo ci docs`, and the tools in commands that it runs.
pub(crate) const DOCUMENTS: [Tool; 3] = [
    LIBCLANG,
    Tool { program: "mke2fs", package: "e2fsprogs" },
    Tool { program: "nbdinfo", package: "libnbd-bin" },
];

/// The tools of the daemon's tests: third-party clients, and tools to examine file systems.
pub(crate) const CLIENTS: [Tool; 10] = [
    QEMU_IMG,
    Tool { program: "qemu-io", package: "qemu-utils" },
    Tool { program: "nbdinfo", package: "libnbd-bin" },
    Tool { program: "nbdcopy", package: "libnbd-bin" },
    // Comes with the bindings for Python.
    Tool { program: "nbdsh", package: "python3-libnbd" },
    Tool { program: "nbd-client", package: "nbd-client" },
    Tool { program: "fstrim", package: "util-linux" },
    Tool { program: "openssl", package: "openssl" },
    Tool { program: "strace", package: "strace" },
    Tool { program: "xfs_repair", package: "xfsprogs" },
];

/// Everything that `setup` sees to.
pub(crate) fn all() -> Vec<Tool> {
    [&[PYTHON, FIO, LOSETUP, MKFS, QEMU_IMG][..], &DEMO, &MACHINES, &WORKLOADS, &CLIENTS].concat()
}

/// Installs the missing tools of [`all`] and prints its actions.
///
/// # Errors
/// When something is missing and cannot be installed.
pub(crate) fn run() -> Result<()> {
    let tools = all();
    for tool in &tools {
        if is_here(*tool) {
            println!("setup: {} is here", tool.program);
        }
    }
    ensure(&tools)
}

/// Makes sure that these tools are here: installs them when we are root on a Debian machine.
///
/// # Errors
/// When one is missing and cannot be installed; the message names the package.
pub(crate) fn ensure(tools: &[Tool]) -> Result<()> {
    let missing: Vec<Tool> = tools.iter().copied().filter(|tool| !is_here(*tool)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let root = is_root().context("finding out whether we are root")?;
    if !root || !command::installed("apt-get") {
        bail!("{}", complaint(&missing));
    }
    install(&missing)
}

fn is_here(tool: Tool) -> bool {
    match tool.program.strip_suffix(".so") {
        Some(library) => library_folders().iter().any(|folder| has_library(folder, library)),
        None => command::installed(tool.program),
    }
}

/// Where build scripts look for a library, on Debian and its like.
fn library_folders() -> Vec<PathBuf> {
    let inside = |folder: &str, rest: &str| -> Vec<PathBuf> {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path().join(rest)).collect()
    };
    let mut folders: Vec<PathBuf> =
        std::env::var_os("LIBCLANG_PATH").map(PathBuf::from).into_iter().collect();
    folders.extend(["/usr/lib", "/usr/lib64", "/usr/local/lib"].map(PathBuf::from));
    // llvm-14/lib, and folders of architectures.
    folders.extend(inside("/usr/lib", "lib"));
    folders.extend(inside("/usr/lib", ""));
    folders
}

/// Whether there is `NAME.so`, or `NAME-14.so`, with whatever version behind it.
fn has_library(folder: &Path, name: &str) -> bool {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.into_iter().any(|entry| {
        let file = entry.file_name().to_string_lossy().into_owned();
        let Some(rest) = file.strip_prefix(name) else { return false };
        let version = rest.split(".so").next().unwrap_or_default();
        let is_version = |text: &str| text.chars().all(|c| c.is_ascii_digit() || c == '.');
        rest.contains(".so") && is_version(version.strip_prefix('-').unwrap_or(version))
    })
}

/// Installs missing packages, and then those that this removed: a package can be newer than another
/// of the same source that is here, and push it out.
fn install(missing: &[Tool]) -> Result<()> {
    let were_here: Vec<Tool> = all().into_iter().filter(|tool| is_here(*tool)).collect();
    install_packages(missing)?;
    let gone: Vec<Tool> = were_here.into_iter().filter(|tool| !is_here(*tool)).collect();
    if !gone.is_empty() {
        install_packages(&gone)?;
    }
    match missing.iter().find(|tool| !is_here(**tool)) {
        None => Ok(()),
        Some(tool) => bail!("{} was pushed out by {}", tool.package, packages(&gone).join(" ")),
    }
}

fn install_packages(missing: &[Tool]) -> Result<()> {
    let packages = packages(missing);
    println!("setup: installing {}", packages.join(" "));
    command::run(apt_get().arg("update"))?;
    command::run(apt_get().args(["install", "-y", "--no-install-recommends"]).args(&packages))?;
    for tool in missing {
        if !is_here(*tool) {
            bail!("{} was installed, yet there is no {}", tool.package, tool.program);
        }
    }
    println!("setup: installed {}", packages.join(" "));
    Ok(())
}

fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive").arg("-q").stdin(Stdio::null());
    command
}

/// The packages of these tools, each once.
fn packages(tools: &[Tool]) -> Vec<&'static str> {
    let mut names: Vec<&'static str> = tools.iter().map(|tool| tool.package).collect();
    names.sort_unstable();
    names.dedup();
    names
}

fn complaint(missing: &[Tool]) -> String {
    let programs: Vec<&str> = missing.iter().map(|tool| tool.program).collect();
    format!(
        "missing: {}; install the package(s) {}, or run `cargo ci setup` as root on Debian",
        programs.join(", "),
        packages(missing).join(", ")
    )
}

/// Whether this process has root's permissions: the owner of our own entry in /proc is the
/// effective user.
///
/// # Errors
/// When that can't be found out.
pub(crate) fn is_root() -> std::io::Result<bool> {
    Ok(std::fs::metadata("/proc/self")?.uid() == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_that_are_here_need_nothing() {
        ensure(&[Tool { program: "sh", package: "dash" }]).unwrap();
    }

    #[test]
    fn a_library_is_distinguished_from_similar_names() {
        let folder = std::env::temp_dir().join(format!("ci-libraries-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let has = |file: &str| {
            fs::write(folder.join(file), "").unwrap();
            let found = has_library(&folder, "libclang");
            fs::remove_file(folder.join(file)).unwrap();
            found
        };
        let found = ["libclang.so", "libclang-14.so.1", "libclang.so.1", "libclang-14.so.14.0.6"];
        assert!(found.iter().all(|file| has(file)));
        assert!(!["libclang-cpp.so.14", "libclang.a", "libclangd.so"].iter().any(|file| has(file)));
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn the_complaint_names_programs_and_packages() {
        let text = complaint(&[FIO, LOSETUP]);
        assert!(text.contains("fio, losetup") && text.contains("fio, util-linux"), "{text}");
    }

    #[test]
    fn a_package_is_installed_once() {
        let twice = Tool { program: "mount", package: "util-linux" };
        assert_eq!(packages(&[LOSETUP, twice]), ["util-linux"]);
    }
}
