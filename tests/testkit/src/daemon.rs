//! A daemon for a test: its own folders, configuration and log, started, killed and asked things.
//!
//! ```no_run
//! use blockd_testkit::daemon::{Daemon, Settings};
//! let mut daemon = Daemon::new("example", &Settings::default()).unwrap();
//! daemon.start().unwrap();
//! daemon.cli(&["add", "--size", "1G", "data"]).unwrap();
//! daemon.kill().unwrap();
//! daemon.start().unwrap();
//! assert_eq!(daemon.stop().unwrap().code(), Some(0));
//! ```

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Read;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use nix::unistd::Pid;
use serde_json::Value;

use crate::clock::Clock;
use crate::folder::Folder;
use crate::nbd::Connection;
use crate::other_host::OtherHost;
use crate::{http, tools};

/// A start that takes longer has failed. Replaying a log and waiting for a dead owner's IO are part
/// of it, and the machine may be an emulated one.
const START_LIMIT: Duration = Duration::from_secs(60);
/// Connections that were not greeted for so long are given up, and a new one is tried.
const GREETING_LIMIT: Duration = Duration::from_secs(5);
/// The same for an orderly stop.
const STOP_LIMIT: Duration = Duration::from_secs(60);

/// How long it may take to write its metrics down: milliseconds, but where nothing is fast.
const METRICS_LIMIT: Duration = Duration::from_secs(30);

/// Precedes the UUID of a namespace that stands in place of a pool's path.
pub const NAMESPACE: &str = "namespace:";

/// Precedes the key of a region in that place.
pub const REGION: &str = "region:";

/// Where a daemon has its files.
#[derive(Clone, Debug, Default)]
pub enum Home {
    /// In new folders where temporary files go and in memory, which are removed with the daemon.
    #[default]
    Temporary,
    /// The same, with files that are not in memory below this folder.
    Below(PathBuf),
    /// In this folder, which stays: the sockets and the delta ring in `run` below it.
    Kept(PathBuf),
}

/// The parts of a daemon's configuration that a test chooses.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where its files are.
    pub home: Home,
    /// The daemon's program. Without one, that of [`tools::blockd`].
    pub program: Option<PathBuf>,
    /// Where the pool lies: a block device, or a file in a folder that is there. Without one, a
    /// file in the daemon's own folder.
    pub pool: Option<PathBuf>,
    /// Bytes of a pool file.
    pub pool_size: u64,
    /// Further lines of the pool's table.
    pub pool_lines: String,
    /// The tables of all pools, in place of the one that the settings above describe.
    pub pools: Option<String>,
    /// Lines in front of all tables.
    pub lines: String,
    /// Further tables.
    pub tables: String,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            home: Home::Temporary,
            program: None,
            pool: None,
            pool_size: 1 << 30,
            pool_lines: String::new(),
            pools: None,
            lines: String::new(),
            tables: String::new(),
        }
    }
}

/// A daemon that ended instead of serving.
#[derive(Debug)]
pub struct Ended {
    /// How.
    pub status: ExitStatus,
    said: String,
}

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the daemon ended with {} instead of serving; {}", self.status, self.said)
    }
}

impl std::error::Error for Ended {}

/// Whether a file would lie in memory, as temporary ones do on some hosts.
fn in_memory(pool: &Path) -> bool {
    let kind = pool.parent().map(statfs).and_then(Result::ok).map(|fs| fs.filesystem_type());
    kind == Some(TMPFS_MAGIC) && !pool.starts_with("/dev/dax") && !is_device(pool)
}

/// A daemon that runs, or did, or will.
#[derive(Debug)]
pub struct Daemon {
    program: PathBuf,
    child: Option<Child>,
    /// Everything but the sockets.
    folder: Folder,
    /// Sockets and delta ring: a tmpfs.
    runtime: Folder,
    pool: PathBuf,
    host: Option<OtherHost>,
    /// Further words for `blockd serve`, from the next start on.
    pub arguments: Vec<String>,
}

impl Daemon {
    /// Folders and configuration; nothing runs yet.
    ///
    /// # Errors
    /// When the daemon can't be built or a folder not be made.
    pub fn new(name: &str, settings: &Settings) -> Result<Self> {
        let memory = Path::new("/dev/shm");
        let (folder, runtime) = match &settings.home {
            Home::Temporary => (Folder::new(name)?, Folder::below(memory, name)?),
            Home::Below(parent) => (Folder::below(parent, name)?, Folder::below(memory, name)?),
            Home::Kept(path) => (Folder::kept(path)?, Folder::kept(&path.join("run"))?),
        };
        let pool = settings.pool.clone().unwrap_or_else(|| folder.path().join("pool"));
        let program = settings.program.clone().map_or_else(tools::blockd, Ok)?;
        let arguments = Vec::new();
        let daemon = Self { program, child: None, folder, runtime, pool, host: None, arguments };
        daemon.configure(settings)?;
        Ok(daemon)
    }

    /// From the next start on the pool is another, or lies elsewhere.
    ///
    /// # Errors
    /// When the configuration can't be written.
    pub fn move_pool(&mut self, settings: &Settings) -> Result<()> {
        self.pool = settings.pool.clone().context("where the pool is to be")?;
        self.configure(settings)
    }

    /// Writes the configuration anew, for the next start, with the pool where it was.
    ///
    /// # Errors
    /// When it can't be written.
    pub fn configure(&self, settings: &Settings) -> Result<()> {
        let mut text = settings.lines.clone();
        let (runtime, folder) = (self.runtime.path(), self.folder.path());
        writeln!(text, "runtime_dir = {runtime:?}\nstate_dir = {:?}", folder.join("state"))?;
        writeln!(text, "{}", settings.tables)?;
        match &settings.pools {
            Some(pools) => text.push_str(pools),
            None => self.write_pool(&mut text, settings)?,
        }
        fs::write(self.config(), text).context("writing the configuration")
    }

    fn write_pool(&self, text: &mut String, settings: &Settings) -> Result<()> {
        writeln!(text, "[[pool]]\nname = \"default\"")?;
        let place = self.pool.to_string_lossy();
        if let Some(uuid) = place.strip_prefix(NAMESPACE) {
            writeln!(text, "namespace = {uuid:?}")?;
        } else if let Some(key) = place.strip_prefix(REGION) {
            writeln!(text, "region = {key:?}")?;
        } else {
            writeln!(text, "path = {place:?}")?;
        }
        if !is_device(&self.pool) {
            writeln!(text, "size = {}", settings.pool_size)?;
        }
        if in_memory(&self.pool) {
            writeln!(text, "volatile = true")?;
        }
        text.push_str(&settings.pool_lines);
        Ok(())
    }

    /// The address at which it serves metrics since its first start.
    ///
    /// # Errors
    /// When it serves none.
    pub fn metrics_address(&self) -> Result<String> {
        let log = self.log();
        let address = log.split("http://").nth(1).and_then(|rest| rest.split('/').next());
        address.map(str::to_owned).context("the log has no address of metrics")
    }

    /// The answer of its Prometheus endpoint, at the configured address.
    ///
    /// # Errors
    /// When no address is configured, or there is no answer in time.
    pub fn metrics(&self) -> Result<String> {
        let stream = TcpStream::connect(self.metrics_address()?)?;
        stream.set_read_timeout(Some(METRICS_LIMIT))?;
        let (status, body) = http::get(stream, "/metrics")?;
        ensure!(status == 200, "the metrics server answers with {status}: {body}");
        Ok(body)
    }

    /// The pool's file or device.
    #[must_use]
    pub fn pool(&self) -> &Path {
        &self.pool
    }

    /// The folder of configuration, state and log.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The folder of the sockets.
    #[must_use]
    pub fn runtime(&self) -> &Path {
        self.runtime.path()
    }

    /// Its configuration file.
    #[must_use]
    pub fn config(&self) -> PathBuf {
        self.folder.path().join("blockd.toml")
    }

    /// Where it serves NBD.
    #[must_use]
    pub fn nbd_socket(&self) -> PathBuf {
        self.runtime.path().join("nbd.sock")
    }

    /// Where it is controlled.
    #[must_use]
    pub fn control_socket(&self) -> PathBuf {
        self.runtime.path().join("control.sock")
    }

    /// A volume as NBD clients write it.
    #[must_use]
    pub fn uri(&self, volume: &str) -> String {
        format!("nbd+unix:///{volume}?socket={}", self.nbd_socket().display())
    }

    /// The log since its first start.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    fn log_path(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    /// Its process, while it runs.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Whether its process was started and has not ended.
    pub fn is_running(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    /// Starts it and waits until it serves.
    ///
    /// # Errors
    /// When it ends instead, or does not serve in time; the message has its log.
    pub fn start(&mut self) -> Result<Duration> {
        let start = Clock::start();
        self.spawn()?;
        self.wait_until_serving(START_LIMIT)?;
        Ok(start.elapsed())
    }

    /// Starts it and does not wait.
    ///
    /// # Errors
    /// When its process can't be started.
    pub fn spawn(&mut self) -> Result<()> {
        ensure!(self.child.is_none(), "the daemon runs already");
        let log = File::options().create(true).append(true).open(self.log_path())?;
        let mut command = self.program_command();
        command.arg("serve").arg("--config").arg(self.config()).args(&self.arguments);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        self.child = Some(command.spawn().context("starting the daemon")?);
        Ok(())
    }

    /// From the next start on it runs as if on this host.
    pub fn move_to(&mut self, host: OtherHost) {
        self.host = Some(host);
    }

    /// The program, to be run on its host.
    #[must_use]
    pub fn program_command(&self) -> Command {
        match &self.host {
            Some(host) => host.command(&self.program),
            None => Command::new(&self.program),
        }
    }

    /// Waits until both of its sockets answer.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn wait_until_serving(&mut self, limit: Duration) -> Result<()> {
        let sockets = [self.nbd_socket(), self.control_socket()];
        let start = Clock::start();
        loop {
            // The NBD server speaks first, as soon as the pools are open.
            let greeted = UnixStream::connect(&sockets[0]).is_ok_and(|mut stream| {
                let limit = stream.set_read_timeout(Some(GREETING_LIMIT));
                limit.is_ok() && stream.read_exact(&mut [0; 16]).is_ok()
            });
            if greeted && UnixStream::connect(&sockets[1]).is_ok() {
                return Ok(());
            }
            let child = self.child.as_mut().context("the daemon does not run")?;
            if let Some(status) = child.try_wait()? {
                self.child = None;
                return Err(Ended { status, said: self.last_words() }.into());
            }
            if start.elapsed() > limit {
                bail!("the daemon does not serve after {limit:?}; {}", self.last_words());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Ends it as a crash would, and returns when its process is gone. IO that it had on its way
    /// may still be under way.
    ///
    /// # Errors
    /// When it does not run.
    pub fn kill(&mut self) -> Result<()> {
        let mut child = self.child.take().context("the daemon does not run")?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// Lets go of its process, for another daemon to be started in its place.
    pub fn let_go(&mut self) -> Option<Child> {
        self.child.take()
    }

    /// Ends it in order, and waits for its end.
    ///
    /// # Errors
    /// When it does not run, or does not end in time.
    pub fn stop(&mut self) -> Result<ExitStatus> {
        self.signal(Signal::SIGTERM)?;
        self.wait(STOP_LIMIT)
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// When it does not run.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = self.pid().context("the daemon does not run")?;
        kill(Pid::from_raw(i32::try_from(pid)?), signal).context("signalling the daemon")
    }

    /// Stops it as a host that freezes does, until it is sent SIGCONT.
    ///
    /// # Errors
    /// When it does not run.
    pub fn freeze(&self) -> Result<()> {
        tools::freeze(self.pid().context("the daemon does not run")?)
    }

    /// Waits for it to end.
    ///
    /// # Errors
    /// When it does not in time.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let child = self.child.as_mut().context("the daemon does not run")?;
        let ended = || child.try_wait().ok().flatten();
        let status = tools::wait_until("the daemon to end", limit, ended)
            .with_context(|| self.last_words())?;
        self.child = None;
        Ok(status)
    }

    /// Runs a verb of the command line with `--json` and returns what it prints.
    ///
    /// # Errors
    /// When it does not exit with 0, or prints no JSON.
    pub fn cli(&self, words: &[&str]) -> Result<Value> {
        let output = self.cli_output(&[&["--json"], words].concat())?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        if !output.status.success() {
            let errors = String::from_utf8_lossy(&output.stderr);
            bail!("{}: blockd {}\n{said}{errors}", output.status, words.join(" "));
        }
        if said.trim().is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_str(&said).with_context(|| format!("no JSON: {said}"))
    }

    /// A verb of the command line for this daemon, to be run.
    #[must_use]
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.env("BLOCKD_SOCKET", self.control_socket()).args(words).stdin(Stdio::null());
        command
    }

    /// Runs a verb of the command line, however it ends.
    ///
    /// # Errors
    /// When it can't be started.
    pub fn cli_output(&self, words: &[&str]) -> Result<Output> {
        let mut command = self.command(words);
        command.output().with_context(|| format!("cannot start: {}", tools::describe(&command)))
    }

    /// Makes a volume and attaches it.
    ///
    /// # Errors
    /// When the daemon refuses.
    pub fn add(&self, name: &str, size: u64) -> Result<()> {
        self.cli(&["add", "--size", &size.to_string(), name]).map(|_| ())
    }

    /// A connection to a volume of its default pool.
    ///
    /// # Errors
    /// As [`Connection::open`].
    pub fn connect(&self, volume: &str) -> Result<Connection> {
        Connection::open(&self.nbd_socket(), volume)
    }

    /// The end of its log, for messages.
    #[must_use]
    pub fn last_words(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        format!("its log ends:\n{}", lines[lines.len().saturating_sub(20)..].join("\n"))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            eprintln!("{}", self.last_words());
        }
    }
}

fn is_device(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    if [NAMESPACE, REGION].iter().any(|begin| path.to_string_lossy().starts_with(begin)) {
        return true;
    }
    let is_one = |kind: fs::FileType| kind.is_block_device() || kind.is_char_device();
    fs::metadata(path).is_ok_and(|data| is_one(data.file_type()))
}
