//! `cargo ci package`: Debian packages of daemon and plugin, made of the release binaries, then
//! judged and used.

mod check;
pub(crate) mod served;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::steps::{Outcome, Steps};
use crate::{built, command};

/// The definition of a package.
#[derive(Debug, Clone, Copy)]
struct Package {
    name: &'static str,
    depends: &'static str,
    recommends: &'static str,
    summary: &'static str,
    description: &'static [&'static str],
}

const DAEMON: Package = Package {
    name: "blockd",
    depends: "kmod",
    recommends: "",
    summary: "thin-provisioned block devices from user space",
    description: &[
        "Pools on files or disks hold volumes that take space only for what is",
        "written to them, with snapshots, clones and limits. Volumes are block",
        "devices by ublk, or served over NBD. Restarting the daemon takes no device",
        "away.",
    ],
};

const PLUGIN: Package = Package {
    name: "blockd-csi",
    depends: "e2fsprogs",
    recommends: "xfsprogs, btrfs-progs",
    summary: "CSI plugin of blockd: its volumes in Kubernetes",
    description: &[
        "Makes, snapshots, expands, formats and mounts volumes of a node's blockd, by",
        "version 1.12 of the Container Storage Interface. It usually runs in a",
        "container; this package is for building its image, and for nodes without.",
    ],
};

/// Makes both packages of binaries that are built if need be, and checks them; true when all held.
/// The upgrade is from `previous`, else from the same program under an older version.
pub(crate) fn run(root: &Path, built: bool, previous: Option<&Path>) -> bool {
    let mut steps = Steps::new();
    if !built {
        steps.run("daemon and plugin", || built::shipped(root));
    }
    steps.run("packages", || {
        if !command::installed("dpkg-deb") {
            return Ok(Outcome::NotRun("there is no dpkg-deb here"));
        }
        let target = command::target_dir(root);
        packages(root, &target.join("release"), &target.join("package"), previous)?;
        Ok(Outcome::Passed)
    });
    steps.finish()
}

/// Makes both packages of the binaries in a folder, and checks them. Beside each of them, the new
/// folder has its files as they are installed.
///
/// # Errors
/// When one can't be made, or does not hold.
pub(crate) fn packages(
    root: &Path,
    binaries: &Path,
    folder: &Path,
    previous: Option<&Path>,
) -> Result<[PathBuf; 2]> {
    let _ = fs::remove_dir_all(folder);
    fs::create_dir_all(folder)?;
    let daemon = daemon(root, &binaries.join("blockd"), folder)?;
    let plugin = plugin(root, &binaries.join("blockd-csi"), folder)?;
    let previous = match previous {
        Some(file) => file.canonicalize().with_context(|| file.display().to_string())?,
        None => stand_in(folder)?,
    };
    check::daemon(root, &daemon, &previous, folder)?;
    check::plugin(&plugin, folder)?;
    for package in [&daemon, &plugin] {
        let kib = fs::metadata(package)?.len() / 1024;
        println!("package: {} ({kib} KiB)", package.display());
    }
    Ok([daemon, plugin])
}

/// The time that files of a release have, in seconds since 1970: `SOURCE_DATE_EPOCH`, else that of
/// the last commit, so that the same sources make the same files.
///
/// # Errors
/// When there is neither.
pub(crate) fn epoch(root: &Path) -> Result<u64> {
    let text = match std::env::var("SOURCE_DATE_EPOCH") {
        Ok(text) => text,
        Err(_) => {
            let mut git = Command::new("git");
            command::output(git.current_dir(root).args(["log", "-1", "--format=%ct"]))?
        }
    };
    text.trim().parse().with_context(|| format!("SOURCE_DATE_EPOCH is {text}"))
}

/// A time in a format of `date`.
///
/// # Errors
/// When `date` fails.
pub(crate) fn date(epoch: u64, format: &str) -> Result<String> {
    let mut date = Command::new("date");
    date.env("LC_ALL", "C").args(["--utc", &format!("--date=@{epoch}"), format]);
    Ok(command::output(&mut date)?.trim().to_owned())
}

fn daemon(root: &Path, program: &Path, folder: &Path) -> Result<PathBuf> {
    let tree = folder.join("blockd");
    let deploy = root.join("deploy");
    put_program(program, &tree.join("usr/bin/blockd"))?;
    put(&deploy.join("blockd.service"), &tree.join("lib/systemd/system/blockd.service"), 0o644)?;
    put(&deploy.join("blockd.toml"), &tree.join("etc/blockd/blockd.toml"), 0o644)?;
    let say = |words: &[&str]| command::output(Command::new(program).args(words));
    let man = tree.join("usr/share/man/man1");
    say(&["man", "--dir", &man.to_string_lossy()])?;
    for entry in fs::read_dir(&man)? {
        command::output(Command::new("gzip").arg("-9n").arg(entry?.path()))?;
    }
    for (shell, path) in [
        ("bash", "bash-completion/completions/blockd"),
        ("zsh", "zsh/vendor-completions/_blockd"),
        ("fish", "fish/vendor_completions.d/blockd.fish"),
    ] {
        let path = tree.join("usr/share").join(path);
        fs::create_dir_all(path.parent().context("a folder")?)?;
        fs::write(path, say(&["completions", shell])?)?;
    }
    fs::create_dir_all(tree.join("DEBIAN"))?;
    fs::write(tree.join("DEBIAN/conffiles"), "/etc/blockd/blockd.toml\n")?;
    for script in ["postinst", "prerm", "postrm"] {
        put(&deploy.join("package").join(script), &tree.join("DEBIAN").join(script), 0o755)?;
    }
    finish(root, &DAEMON, program, &tree, folder)
}

fn plugin(root: &Path, program: &Path, folder: &Path) -> Result<PathBuf> {
    let tree = folder.join("blockd-csi");
    put_program(program, &tree.join("usr/bin/blockd-csi"))?;
    let documents = tree.join("usr/share/doc/blockd-csi");
    put(&root.join("docs/KUBERNETES.md"), &documents.join("KUBERNETES.md"), 0o644)?;
    put(&root.join("docs/CLI_CSI.md"), &documents.join("CLI_CSI.md"), 0o644)?;
    finish(root, &PLUGIN, program, &tree, folder)
}

/// Adds the files of every package, and builds the archive.
fn finish(
    root: &Path,
    package: &Package,
    program: &Path,
    tree: &Path,
    folder: &Path,
) -> Result<PathBuf> {
    let version = env!("CARGO_PKG_VERSION");
    let asked = command::output(Command::new("dpkg").arg("--print-architecture"))?;
    let architecture = asked.trim();
    let documents = tree.join("usr/share/doc").join(package.name);
    put(&root.join("deploy/package/copyright"), &documents.join("copyright"), 0o644)?;
    let epoch = epoch(root)?;
    let date = date(epoch, "--rfc-email")?;
    let changes = format!(
        "{} ({version}) unstable; urgency=medium\n\n  * See CHANGELOG.md of the sources.\n\n -- \
         blockd \
         authors <authors@blockd.invalid>  {date}\n",
        package.name
    );
    let changelog = documents.join("changelog");
    fs::write(&changelog, changes)?;
    command::output(Command::new("gzip").arg("-9n").arg(&changelog))?;
    let (libraries, kib) = (libraries(program)?, kib(tree)?);
    let recommends = match package.recommends {
        "" => String::new(),
        list => format!("Recommends: {list}\n"),
    };
    let control = format!(
        "Package: {}\nVersion: {version}\nArchitecture: {architecture}\nSection: admin\nPriority: \
         optional\nMaintainer: blockd authors <authors@blockd.invalid>\nInstalled-Size: {kib}\n\
         Depends: {libraries}{}\n{recommends}Description: {}\n {}\n",
        package.name,
        package.depends,
        package.summary,
        package.description.join("\n ")
    );
    fs::create_dir_all(tree.join("DEBIAN"))?;
    fs::write(tree.join("DEBIAN/control"), control)?;
    let file = folder.join(format!("{}_{version}_{architecture}.deb", package.name));
    let mut build = Command::new("dpkg-deb");
    build.env("SOURCE_DATE_EPOCH", epoch.to_string()).args([
        "--root-owner-group",
        "-Zxz",
        "-z3",
        "--build",
    ]);
    command::output(build.arg(tree).arg(&file))?;
    Ok(file)
}

/// The daemon's package as if it were an older version, for an upgrade.
fn stand_in(folder: &Path) -> Result<PathBuf> {
    let tree = folder.join("blockd");
    let control = tree.join("DEBIAN/control");
    let text = fs::read_to_string(&control)?;
    let older = text.replacen("\nVersion: ", "\nVersion: 0~", 1);
    ensure!(older != text, "the package has no version");
    fs::write(&control, older)?;
    let file = folder.join("previous.deb");
    let mut build = Command::new("dpkg-deb");
    build.args(["--root-owner-group", "-Zgzip", "-z1", "--build"]).arg(&tree).arg(&file);
    let built = command::output(&mut build);
    fs::write(&control, text)?;
    built.map(|_| file)
}

/// The libraries that a program needs, for its package. None if they are all part of it.
fn libraries(program: &Path) -> Result<String> {
    if needed(program)?.is_empty() {
        return Ok(String::new());
    }
    Ok(format!("libc6 (>= {}), libgcc-s1, ", libc(program)?))
}

/// Shared libraries that a program is linked to, by name.
///
/// # Errors
/// When objdump fails.
pub(crate) fn needed(program: &Path) -> Result<Vec<String>> {
    let headers = command::output(Command::new("objdump").arg("-p").arg(program))?;
    let names = headers.lines().filter_map(|line| line.trim().strip_prefix("NEEDED"));
    Ok(names.map(|name| name.trim().to_owned()).collect())
}

/// The C library that a program needs: the newest version that it names.
fn libc(program: &Path) -> Result<String> {
    let bytes = fs::read(program).with_context(|| program.display().to_string())?;
    let mut newest = 0;
    for at in memchr(&bytes, b"GLIBC_2.") {
        let digits = bytes[at..].iter().take_while(|byte| byte.is_ascii_digit()).take(3);
        let minor = digits.fold(0, |sum: u32, digit| sum * 10 + u32::from(digit - b'0'));
        newest = newest.max(minor);
    }
    ensure!(newest > 0, "{} needs no C library?", program.display());
    Ok(format!("2.{newest}"))
}

/// Where a text ends, each time that it is there.
pub(crate) fn memchr<'a>(bytes: &'a [u8], text: &'a [u8]) -> impl Iterator<Item = usize> + 'a {
    let found = bytes.windows(text.len()).enumerate().filter(move |(_, window)| *window == text);
    found.map(|(at, _)| at + text.len())
}

fn kib(tree: &Path) -> Result<u64> {
    let mut sum = 0;
    for entry in fs::read_dir(tree)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        sum += if metadata.is_dir() { kib(&entry.path())? } else { metadata.len().div_ceil(1024) };
    }
    Ok(sum)
}

fn put(from: &Path, to: &Path, mode: u32) -> Result<()> {
    fs::create_dir_all(to.parent().context("a folder")?)?;
    fs::copy(from, to).with_context(|| from.display().to_string())?;
    fs::set_permissions(to, fs::Permissions::from_mode(mode))?;
    Ok(())
}

/// A program without debug information.
fn put_program(from: &Path, to: &Path) -> Result<()> {
    ensure!(from.is_file(), "there is no {}: `cargo ci package` builds it", from.display());
    fs::create_dir_all(to.parent().context("a folder")?)?;
    let mut strip = Command::new("strip");
    strip.stdin(Stdio::null()).arg("--strip-unneeded").arg("-o").arg(to).arg(from);
    command::output(&mut strip)?;
    fs::set_permissions(to, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_version_of_the_c_library_counts() {
        let file = std::env::temp_dir().join(format!("ci-package-{}", std::process::id()));
        fs::write(&file, b"x\0GLIBC_2.9\0GLIBC_2.34\0GLIBC_2.17\0GLIBC_PRIVATE\0").unwrap();
        assert_eq!(libc(&file).unwrap(), "2.34");
        fs::write(&file, b"static").unwrap();
        assert!(libc(&file).is_err());
        fs::remove_file(&file).unwrap();
    }
}
