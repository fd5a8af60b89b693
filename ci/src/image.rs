//! `cargo ci image`: gathers the contents of the images of daemon and plugin, uses them as a root
//! file system, and builds the images if buildah is installed.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::steps::{Outcome, Steps};
use crate::{built, command, setup};

/// The tools that the plugin starts.
const TOOLS: [setup::Tool; 13] = [
    setup::Tool { program: "cryptsetup", package: "cryptsetup-bin" },
    setup::Tool { program: "blkid", package: "util-linux" },
    setup::Tool { program: "blockdev", package: "util-linux" },
    setup::Tool { program: "mkfs.ext4", package: "e2fsprogs" },
    setup::Tool { program: "e2fsck", package: "e2fsprogs" },
    setup::Tool { program: "resize2fs", package: "e2fsprogs" },
    setup::Tool { program: "mkfs.xfs", package: "xfsprogs" },
    setup::Tool { program: "xfs_growfs", package: "xfsprogs" },
    setup::Tool { program: "mkfs.btrfs", package: "btrfs-progs" },
    setup::Tool { program: "btrfs", package: "btrfs-progs" },
    setup::Tool { program: "losetup", package: "util-linux" },
    setup::Tool { program: "mount", package: "mount" },
    setup::Tool { program: "umount", package: "mount" },
];

/// Folders whose old names are links into `/usr`, as on every system of today.
const MERGED: [&str; 4] = ["bin", "sbin", "lib", "lib64"];

/// Each of them is tried in the finished root: an argument, and its output.
const TRIED: [(&str, &[&str], &str); 10] = [
    ("blockd-csi", &["--version"], "blockd-csi "),
    ("cryptsetup", &["--version"], "cryptsetup"),
    ("blkid", &["-V"], "blkid"),
    ("mkfs.ext4", &["-V"], "mke2fs"),
    ("mkfs.xfs", &["-V"], "mkfs.xfs"),
    ("mkfs.btrfs", &["-V"], "mkfs.btrfs"),
    ("btrfs", &["version"], "btrfs"),
    ("blockdev", &["--version"], "blockdev"),
    ("losetup", &["--version"], "losetup"),
    ("mount", &["--version"], "mount"),
];

/// Gathers, tries and builds; true when all held.
pub(crate) fn run(root: &Path, built: bool) -> bool {
    let mut steps = Steps::new();
    if !built {
        steps.run("daemon and plugin", || built::shipped(root));
    }
    let folder = command::target_dir(root).join("image");
    steps.run("gather", || gather(root, &folder));
    steps.run("use", || try_out(&folder));
    steps.run("build", || build(root, &folder));
    steps.finish()
}

fn gather(root: &Path, folder: &Path) -> Result<Outcome> {
    setup::ensure(&TOOLS)?;
    let _ = fs::remove_dir_all(folder);
    let release = command::target_dir(root).join("release");
    for (name, tools) in [("blockd", &[][..]), ("blockd-csi", &TOOLS[..])] {
        let mut tree = Tree::new(&folder.join(name))?;
        let program = release.join(name);
        ensure!(program.is_file(), "there is no {}", program.display());
        tree.program(&program, &format!("/usr/bin/{name}"))?;
        let inside = tree.folder.join("usr/bin").join(name);
        command::output(Command::new("strip").arg("--strip-unneeded").arg(inside))?;
        for tool in tools {
            let path = find(tool.program)?;
            tree.program(&path, &path.to_string_lossy())?;
        }
        if !tools.is_empty() {
            // Without it mkfs.ext4 makes file systems with few features.
            tree.file(Path::new("/etc/mke2fs.conf"), "/etc/mke2fs.conf")?;
        }
        println!("{name}: {} files, {} KiB", tree.seen.len(), kib(&tree.folder)?);
    }
    Ok(Outcome::Passed)
}

/// A root that grows by programs.
struct Tree {
    folder: PathBuf,
    seen: BTreeSet<PathBuf>,
}

impl Tree {
    fn new(folder: &Path) -> Result<Self> {
        for name in MERGED {
            fs::create_dir_all(folder.join("usr").join(name))?;
            symlink(Path::new("usr").join(name), folder.join(name))?;
        }
        for name in ["dev", "etc", "proc", "run", "sys", "tmp", "var/lib"] {
            fs::create_dir_all(folder.join(name))?;
        }
        // The extender runs as the unprivileged user 65534, and tools look up its name.
        let people = "root:x:0:0:root:/:/none\nnobody:x:65534:65534:nobody:/:/none\n";
        fs::write(folder.join("etc/passwd"), people)?;
        fs::write(folder.join("etc/group"), "root:x:0:\ndisk:x:6:\nnogroup:x:65534:\n")?;
        // resize2fs reads the mount table, and a runtime need not make this link.
        symlink("../proc/self/mounts", folder.join("etc/mtab"))?;
        Ok(Self { folder: folder.to_owned(), seen: BTreeSet::new() })
    }

    /// A program at this path, and its libraries at theirs.
    fn program(&mut self, program: &Path, path: &str) -> Result<()> {
        self.file(program, path)?;
        let listed = command::output(Command::new("ldd").arg(program))?;
        for line in listed.lines() {
            let found = line.split_once("=> ").map_or(line, |(_, found)| found);
            let Some(library) = found.split_whitespace().next() else { continue };
            if library.starts_with('/') {
                self.file(Path::new(library), library)?;
            }
        }
        Ok(())
    }

    fn file(&mut self, from: &Path, path: &str) -> Result<()> {
        let to = self.folder.join(merged(path));
        if !self.seen.insert(to.clone()) {
            return Ok(());
        }
        fs::create_dir_all(to.parent().context("a folder")?)?;
        // Links are followed: mkfs.ext4 is one.
        fs::copy(from, &to).with_context(|| from.display().to_string())?;
        let is_program = fs::metadata(from)?.permissions().mode() & 0o111 != 0;
        let mode = if is_program { 0o755 } else { 0o644 };
        fs::set_permissions(&to, fs::Permissions::from_mode(mode))?;
        Ok(())
    }
}

/// The path below the root, with the links of [`MERGED`] followed.
fn merged(path: &str) -> String {
    let path = path.trim_start_matches('/');
    match path.split_once('/') {
        Some((first, _)) if MERGED.contains(&first) => format!("usr/{path}"),
        _ => path.to_owned(),
    }
}

fn find(program: &str) -> Result<PathBuf> {
    let folders = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"].map(PathBuf::from);
    let found = folders.iter().map(|folder| folder.join(program)).find(|path| path.is_file());
    found.with_context(|| format!("{program} is not in the system's folders"))
}

fn kib(tree: &Path) -> Result<u64> {
    let listed = command::output(Command::new("du").args(["--summarize", "-k"]).arg(tree))?;
    listed.split_whitespace().next().and_then(|kib| kib.parse().ok()).context("output of du")
}

/// Each program in the root that it is shipped in, where nothing else is.
fn try_out(folder: &Path) -> Result<Outcome> {
    if !setup::is_root()? {
        return Ok(Outcome::NotRun("only root may change its root"));
    }
    let inside = |tree: &Path, program: &str, words: &[&str]| {
        let mut command = Command::new("chroot");
        command.stdin(Stdio::null()).arg(tree).arg(program).args(words);
        let path = "/usr/sbin:/usr/bin";
        let output = command.env_clear().env("PATH", path).output().context("chroot")?;
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text).trim().to_owned();
        ensure!(output.status.success(), "{program} {words:?}: {}: {text}", output.status);
        Ok(text)
    };
    let (daemon, plugin) = (folder.join("blockd"), folder.join("blockd-csi"));
    let text = inside(&daemon, "blockd", &["version"])?;
    println!("blockd: {}", text.lines().next().unwrap_or_default());
    for (program, words, said) in TRIED {
        let text = inside(&plugin, program, words)?;
        let first = text.lines().next().unwrap_or_default();
        ensure!(text.contains(said), "{program} says {first}");
        println!("blockd-csi: {program}: {first}");
    }
    // Not only their versions: a file system is made, examined, checked and grown.
    let image = plugin.join("tmp/image");
    // Stands for the kernel's.
    fs::create_dir_all(plugin.join("proc/self"))?;
    fs::write(plugin.join("proc/self/mounts"), "")?;
    for (kind, words) in
        [("ext4", &["-q", "-F"][..]), ("xfs", &["-q", "-f"][..]), ("btrfs", &["-q", "-f"][..])]
    {
        fs::File::create(&image)?.set_len(512 << 20)?;
        let words = [words, &["/tmp/image"]].concat();
        inside(&plugin, &format!("mkfs.{kind}"), &words)?;
        let found = inside(&plugin, "blkid", &["-p", "-o", "value", "-s", "TYPE", "/tmp/image"])?;
        ensure!(found == kind, "mkfs.{kind} makes {found}");
        if kind == "ext4" {
            inside(&plugin, "e2fsck", &["-f", "-p", "/tmp/image"])?;
            fs::OpenOptions::new().write(true).open(&image)?.set_len(600 << 20)?;
            inside(&plugin, "resize2fs", &["/tmp/image"])?;
        }
    }
    encrypt(&plugin, &image, inside)?;
    fs::remove_file(&image)?;
    fs::remove_dir_all(plugin.join("proc/self"))?;
    Ok(Outcome::Passed)
}

/// An encrypted image, made with the libraries of the root and the derivation of the plugin.
fn encrypt(
    plugin: &Path,
    image: &Path,
    inside: impl Fn(&Path, &str, &[&str]) -> Result<String>,
) -> Result<()> {
    fs::File::create(image)?.set_len(32 << 20)?;
    // As a runtime gives them to a container; the bytes are those of a key as well.
    let devices = [("urandom", "9"), ("random", "8")];
    let devices = devices.map(|(name, minor)| (plugin.join("dev").join(name), minor));
    for (device, minor) in &devices {
        command::output(Command::new("mknod").arg(device).args(["c", "1", minor]))?;
    }
    let words = ["--batch-mode", "--disable-locks", "luksFormat", "--type", "luks2", "--pbkdf"];
    let words = [&words[..], &["argon2id", "--pbkdf-memory", "65536", "--pbkdf-parallel", "1"]];
    let key = ["--pbkdf-force-iterations", "4", "--keyfile-size", "32", "--key-file"];
    let words = [&words.concat()[..], &key, &["/dev/urandom", "/tmp/image"]].concat();
    inside(plugin, "cryptsetup", &words)?;
    let found = inside(plugin, "blkid", &["-p", "-o", "value", "-s", "TYPE", "/tmp/image"])?;
    ensure!(found == "crypto_LUKS", "cryptsetup makes {found}");
    for (device, _) in &devices {
        fs::remove_file(device)?;
    }
    Ok(())
}

/// The images, which need neither a network nor another image.
fn build(root: &Path, folder: &Path) -> Result<Outcome> {
    if !command::installed("buildah") {
        return Ok(Outcome::NotRun("there is no buildah here"));
    }
    for (name, recipe) in [("blockd", "Containerfile.blockd"), ("blockd-csi", "Containerfile.csi")]
    {
        let image = format!("{name}:{}", env!("CARGO_PKG_VERSION"));
        let mut buildah = Command::new("buildah");
        // Kept below the build folder: nothing on this machine changes.
        buildah.args(["--storage-driver", "vfs", "--root"]).arg(folder.join("storage"));
        buildah.arg("--runroot").arg(folder.join("run"));
        buildah.args(["bud", "--isolation", "chroot", "--tag", &image, "--file"]);
        buildah.arg(root.join("deploy/image").join(recipe)).arg(folder.join(name));
        command::run(buildah.stdin(Stdio::null()))?;
        println!("image: {image}");
    }
    Ok(Outcome::Passed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_folders_are_those_in_usr() {
        assert_eq!(merged("/lib64/ld.so"), "usr/lib64/ld.so");
        assert_eq!(merged("/usr/bin/x"), "usr/bin/x");
        assert_eq!(merged("/etc/mke2fs.conf"), "etc/mke2fs.conf");
    }
}
