//! Checks of a package: its files and their rights, the scripts' behaviour when it is installed,
//! upgraded, removed and purged, and a daemon that serves.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::command;
use blockd_testkit::clock::Clock;

/// How long the installed daemon may take to serve, or to end.
const LIMIT: Duration = Duration::from_secs(60);

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

pub(super) fn daemon(sources: &Path, package: &Path, folder: &Path) -> Result<()> {
    contents(package, &DAEMON)?;
    lint(package)?;
    let root = Root::new(folder, "root")?;
    let name = package.to_string_lossy().into_owned();
    root.dpkg(&["--install", &name])?;
    unit(&root)?;
    let config = root.path("etc/blockd/blockd.toml");
    let shipped = fs::read(sources.join("deploy/blockd.toml"))?;
    ensure!(fs::read(&config)? == shipped, "the configuration is not the one of the sources");
    let pool = root.path("var/lib/blockd/default.pool");
    serve(&root, &pool)?;
    // Changes of an administrator survive the next version, and the removal of the package.
    let ours = format!("{}\n# ours\n", String::from_utf8(shipped)?);
    fs::write(&config, &ours)?;
    root.dpkg(&["--install", &name])?;
    ensure!(fs::read_to_string(&config)? == ours, "an upgrade changed the configuration");
    root.dpkg(&["--remove", "blockd"])?;
    ensure!(config.exists() && !root.path("usr/bin/blockd").exists(), "removing is not that");
    root.dpkg(&["--purge", "blockd"])?;
    ensure!(!config.exists(), "purging leaves the configuration");
    ensure!(pool.exists(), "purging takes pools with it");
    Ok(())
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
    // A package of one's own has no bug of Debian's that it closes.
    lintian.args(["--fail-on", "error", "--suppress-tags", "initial-upload-closes-no-bugs"]);
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
    fs::remove_file(&file)?;
    Ok(())
}

/// The installed daemon with a pool in a file: makes a volume, and ends in order.
fn serve(root: &Root, pool: &Path) -> Result<()> {
    let program = root.path("usr/bin/blockd");
    let config = root.path("check.toml");
    let (run, state) = (root.path("run"), root.path("var/lib/blockd"));
    fs::create_dir_all(&run)?;
    fs::create_dir_all(&state)?;
    let text = format!(
        "runtime_dir = {run:?}\nstate_dir = {state:?}\n[ublk]\nenabled = \"off\"\n[[pool]]\nname = \
         \"default\"\npath = {pool:?}\nsize = \"256M\"\nvolatile = true\n"
    );
    fs::write(&config, text)?;
    let log = fs::File::create(root.path("log"))?;
    let mut command = Command::new(&program);
    command.arg("serve").arg("--config").arg(&config).stdin(Stdio::null());
    let mut daemon = Running(command.stdout(log.try_clone()?).stderr(log).spawn()?);
    let socket = run.join("control.sock");
    let ask = |words: &[&str]| {
        command::output(Command::new(&program).arg("--socket").arg(&socket).args(words))
    };
    let watch = Clock::start();
    while ask(&["version"]).is_err() || !socket.exists() {
        let ended = daemon.0.try_wait()?.is_some() || watch.elapsed() > LIMIT;
        ensure!(!ended, "the daemon does not serve: {}", fs::read_to_string(root.path("log"))?);
        std::thread::sleep(Duration::from_millis(50));
    }
    ask(&["add", "--size", "8M", "packaged"])?;
    let listed = ask(&["list"])?;
    ensure!(listed.contains("packaged"), "{listed}");
    command::output(Command::new("kill").arg(daemon.0.id().to_string()))?;
    let watch = Clock::start();
    let status = loop {
        if let Some(status) = daemon.0.try_wait()? {
            break status;
        }
        ensure!(watch.elapsed() < LIMIT, "the daemon does not end");
        std::thread::sleep(Duration::from_millis(50));
    };
    if !status.success() {
        bail!("the daemon ended with {status}: {}", fs::read_to_string(root.path("log"))?);
    }
    fs::remove_file(&config)?;
    Ok(())
}

/// Ends with its parent.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
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
