//! Checks of a package: its files and their rights, and the scripts' behaviour when it is
//! installed, upgraded under a daemon that serves, removed and purged.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use blockd_testkit::nbd::Connection;

use super::served::Served;
use crate::command;

/// Bytes that a volume has from before an upgrade.
const CONTENT_BYTES: usize = 1 << 20;

/// The first version of systemd that measures a unit that is not loaded.
const FIRST_OFFLINE: u32 = 250;

/// The most that the unit's exposure may be, in tenths.
const MAX_EXPOSURE: u32 = 29;

/// Files that the daemon's package must have, and their rights.
const DAEMON: [(&str, &str); 9] = [
    ("-rwxr-xr-x", "./usr/bin/blockd"),
    ("-rw-r--r--", "./etc/blockd/blockd.toml"),
    ("-rw-r--r--", "./lib/systemd/system/blockd.service"),
    ("-rw-r--r--", "./usr/share/man/man1/blockd.1.gz"),
    ("-rw-r--r--", "./usr/share/bash-completion/completions/blockd"),
    ("-rw-r--r--", "./usr/share/zsh/vendor-completions/_blockd"),
    ("-rw-r--r--", "./usr/share/fish/vendor_completions.d/blockd.fish"),
    ("-rw-r--r--", "./usr/share/doc/blockd/copyright"),
    ("-rw-r--r--", "./usr/share/doc/blockd/changelog.gz"),
];

pub(super) fn plugin(package: &Path, folder: &Path) -> Result<()> {
    contents(package, &[("-rwxr-xr-x", "./usr/bin/blockd-csi")])?;
    lint(package)?;
    let root = Root::new(folder, "root-csi")?;
    root.dpkg(&["--install", &package.to_string_lossy()])?;
    let version = command::output(Command::new(root.path("usr/bin/blockd-csi")).arg("--version"))?;
    ensure!(version.starts_with(concat!("blockd-csi ", env!("CARGO_PKG_VERSION"))), "{version}");
    Ok(())
}

pub(super) fn daemon(sources: &Path, package: &Path, previous: &Path, folder: &Path) -> Result<()> {
    contents(package, &DAEMON)?;
    lint(package)?;
    let root = Root::new(folder, "root")?;
    root.dpkg(&["--install", &previous.to_string_lossy()])?;
    let config = root.path("etc/blockd/blockd.toml");
    let shipped = fs::read_to_string(sources.join("deploy/blockd.toml"))?;
    // Changes of an administrator survive the next version, and the removal of the package.
    let ours = format!("{shipped}\n# ours\n");
    fs::write(&config, &ours)?;
    let pool = root.path("var/lib/blockd/default.pool");
    upgrade(&root, &pool, package)?;
    ensure!(fs::read_to_string(&config)? == ours, "an upgrade changed the configuration");
    unit(&root)?;
    root.dpkg(&["--remove", "blockd"])?;
    ensure!(config.exists() && !root.path("usr/bin/blockd").exists(), "removing is not that");
    root.dpkg(&["--purge", "blockd"])?;
    ensure!(!config.exists(), "purging leaves the configuration");
    ensure!(pool.exists(), "purging takes pools with it");
    root.dpkg(&["--install", &package.to_string_lossy()])?;
    ensure!(fs::read_to_string(&config)? == shipped, "not the configuration of the sources");
    Ok(())
}

/// Installs the package under a daemon of the previous one that serves an attached volume to a
/// client, and restarts it, as systemd does for the package's script.
fn upgrade(root: &Root, pool: &Path, package: &Path) -> Result<()> {
    let content: Vec<u8> = (0..CONTENT_BYTES).map(|at| (at / 7 % 251).to_le_bytes()[0]).collect();
    let old = Served::start(&root.0, pool)?;
    old.ask(&["add", "--size", "8M", "packaged"])?;
    let mut client = Connection::open(&old.nbd_socket(), "packaged")?;
    client.write(0, &content)?;
    root.dpkg(&["--install", &package.to_string_lossy()])?;
    // The daemon that runs is not touched by the files that replace its own.
    ensure!(client.read(0, CONTENT_BYTES)? == content, "an upgrade changed what the daemon serves");
    client.write(CONTENT_BYTES as u64, &content)?;
    drop(client);
    old.stop()?;
    let new = Served::start(&root.0, pool)?;
    let listed: serde_json::Value = serde_json::from_str(&new.ask(&["--json", "list"])?)?;
    let volume = &listed["volumes"][0];
    ensure!(volume["name"] == "packaged" && volume["attached"] == true, "{listed}");
    let mut client = Connection::open(&new.nbd_socket(), "packaged")?;
    let read = client.read(0, 2 * CONTENT_BYTES)?;
    ensure!(read == [&content[..], &content].concat(), "an upgrade changed the volume");
    drop(client);
    new.stop()
}

/// Files, rights and owners in the archive.
fn contents(package: &Path, expected: &[(&str, &str)]) -> Result<()> {
    let listed = command::output(Command::new("dpkg-deb").arg("--contents").arg(package))?;
    for line in listed.lines() {
        ensure!(line.contains(" root/root "), "{line}: has another owner than root");
    }
    for (rights, file) in expected {
        let is_it = |line: &&str| line.starts_with(rights) && line.ends_with(&format!(" {file}"));
        ensure!(listed.lines().any(|line| is_it(&line)), "no {rights} {file} in\n{listed}");
    }
    Ok(())
}

/// Debian's own judge, where it is.
fn lint(package: &Path) -> Result<()> {
    if !command::installed("lintian") {
        println!("package: not judged by lintian, which is not here");
        return Ok(());
    }
    let mut lintian = Command::new("lintian");
    // A package of one's own has no bug of Debian's that it closes, and those of a release run on
    // systems that are older than the one they are made on.
    let tags = "initial-upload-closes-no-bugs,statically-linked-binary";
    lintian.args(["--fail-on", "error", "--suppress-tags", tags]);
    print!("{}", command::output(lintian.arg("--allow-root").arg(package))?);
    Ok(())
}

/// systemd's judge of the unit, with the program where it was installed.
fn unit(root: &Root) -> Result<()> {
    if !command::installed("systemd-analyze") {
        println!("package: the unit is not judged by systemd-analyze, which is not here");
        return Ok(());
    }
    let installed = fs::read_to_string(root.path("lib/systemd/system/blockd.service"))?;
    let program = root.path("usr/bin/blockd");
    let moved = installed.replace("/usr/bin/blockd", &program.to_string_lossy());
    ensure!(moved != installed, "the unit starts no /usr/bin/blockd");
    let file = root.path("blockd.service");
    // Of this machine's units, those that it names may be missing; and its manual is not here.
    let moved: Vec<&str> =
        moved.lines().filter(|line| !line.starts_with("Documentation=")).collect();
    fs::write(&file, moved.join("\n"))?;
    let mut verify = Command::new("systemd-analyze");
    verify.args(["verify", "--recursive-errors=no", "--man=no"]).arg(&file).stdin(Stdio::null());
    command::output(&mut verify)?;
    exposure(&file)?;
    fs::remove_file(&file)?;
    Ok(())
}

/// systemd's figure of how much a service could do to the system when it is taken over, from 0 to
/// 10, in tenths. A unit that is not confined has 96.
fn exposure(unit: &Path) -> Result<()> {
    let version = command::output(Command::new("systemd-analyze").arg("--version"))?;
    let version = version.split_whitespace().nth(1).and_then(|word| word.parse().ok());
    if version.is_none_or(|version: u32| version < FIRST_OFFLINE) {
        println!("package: the unit's exposure is not measured: systemd is older than 250");
        return Ok(());
    }
    let mut security = Command::new("systemd-analyze");
    security.args(["security", "--offline=true", "--no-pager"]).stdin(Stdio::null());
    security.arg(format!("--threshold={MAX_EXPOSURE}")).arg(unit);
    let judged = command::output(&mut security).context("the unit may do too much")?;
    println!("package: {}", judged.lines().last().unwrap_or_default().trim_start_matches("→ "));
    Ok(())
}

/// A folder that dpkg takes for the root of a system.
struct Root(PathBuf);

impl Root {
    fn new(folder: &Path, name: &str) -> Result<Self> {
        let root = folder.canonicalize()?.join(name);
        for part in ["info", "updates"] {
            fs::create_dir_all(root.join("var/lib/dpkg").join(part))?;
        }
        fs::write(root.join("var/lib/dpkg/status"), "")?;
        Ok(Self(root))
    }

    fn path(&self, below: &str) -> PathBuf {
        self.0.join(below)
    }

    /// Scripts run outside of it, as there is no shell inside, and know that by DPKG_ROOT.
    fn dpkg(&self, words: &[&str]) -> Result<()> {
        let mut dpkg = Command::new("dpkg");
        dpkg.arg(format!("--root={}", self.0.display())).stdin(Stdio::null());
        dpkg.args(["--force-script-chrootless", "--force-depends", "--force-confold"]);
        dpkg.args(["--force-not-root", "--log=/dev/null"]).args(words);
        command::output(&mut dpkg).map(|_| ()).context("dpkg")
    }
}
