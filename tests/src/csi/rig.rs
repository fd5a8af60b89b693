//! The daemon and the plugin beside it, as processes of a test: started, killed, stopped for a
//! while, and with a relay between them that can be cut at any message.
//!
//! ```no_run
//! use blockd_tests::csi::rig::{Rig, Settings};
//! let mut rig = Rig::start("example", &Settings::default()).unwrap();
//! let driver = rig.plugin.driver().unwrap();
//! rig.plugin.kill().unwrap();
//! rig.plugin.start().unwrap();
//! ```

mod relay;

use std::fs::{self, File};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use blockd_api::v1;
use blockd_api::v1::control_client::ControlClient;
use blockd_csi::proto::ProbeRequest;
use blockd_testkit::clock::Clock;
use blockd_testkit::daemon::{self, Daemon};
use blockd_testkit::folder::Folder;
use blockd_testkit::{http, tools};
use hyper_util::rt::TokioIo;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::runtime::Runtime;
use tonic::transport::{Endpoint, Uri};

use super::{Driver, Options};
pub use relay::Relay;

/// A start that takes longer has failed.
const START_LIMIT: Duration = Duration::from_secs(60);
/// How long a call may take that nothing is in the way of: machines stall for seconds.
const CALL_LIMIT: Duration = Duration::from_secs(60);
/// Loopback addresses are all of this machine: each plugin has one of its own, so that no two
/// tests would use the same port.
const METRICS_PORT: u16 = 9650;

/// The settings of a daemon and its plugin.
#[derive(Clone, Debug)]
pub struct Settings {
    pub daemon: daemon::Settings,
    /// The configuration of the plugin.
    pub config: String,
    /// Empty: as it is built.
    pub driver_name: String,
    /// The node's name.
    pub node: String,
    /// More words for the plugin's command line.
    pub words: Vec<String>,
    /// A script of a shell that prepares the plugin's surroundings in a mount namespace of its own,
    /// whose mounts are propagated as before, and becomes the plugin with `exec "$@"`. Empty: the
    /// plugin is started as it is.
    pub launcher: String,
    /// More variables for the plugin's environment.
    pub variables: Vec<(String, String)>,
    /// The plugin's log level.
    pub log: String,
    /// Where the plugin's and the kubelet's folders lie, to outlive the machine; else in one that
    /// goes with the test.
    pub home: Option<PathBuf>,
}

impl Default for Settings {
    fn default() -> Self {
        // Sparse: blocks that are never written take no space.
        let daemon = daemon::Settings { pool_size: 16 << 30, ..daemon::Settings::default() };
        Self {
            daemon,
            config: String::new(),
            driver_name: String::new(),
            node: "node-a".to_owned(),
            words: Vec::new(),
            launcher: String::new(),
            variables: Vec::new(),
            log: "info,blockd_csi=debug".to_owned(),
            home: None,
        }
    }
}

/// Both of them. The plugin ends first.
#[derive(Debug)]
pub struct Rig {
    pub plugin: Plugin,
    pub daemon: Daemon,
}

impl Rig {
    /// Starts both and waits until they serve.
    ///
    /// # Errors
    /// When one of them does not.
    pub fn start(name: &str, settings: &Settings) -> Result<Self> {
        let mut daemon = Daemon::new(name, &settings.daemon)?;
        daemon.start()?;
        let mut plugin = Plugin::new(name, &daemon.control_socket(), settings)?;
        plugin.start()?;
        let rig = Self { plugin, daemon };
        rig.wait_until_ready()?;
        Ok(rig)
    }

    /// Waits until the plugin reports that its daemon is ready, which can be a moment after the
    /// daemon can be reached.
    ///
    /// # Errors
    /// When it does not.
    pub fn wait_until_ready(&self) -> Result<()> {
        let driver = self.plugin.driver()?;
        let is_ready = || driver.probe(ProbeRequest {}).ok()?.ready.filter(|ready| *ready);
        tools::wait_until("daemon and plugin to be ready", START_LIMIT, is_ready).map(drop)
    }

    /// The daemon as it is asked directly.
    ///
    /// # Errors
    /// When a thread can't be started.
    pub fn control(&self) -> Result<Control> {
        Control::new(&self.daemon.control_socket())
    }

    /// Options to examine the plugin with: everything that goes without block devices.
    #[must_use]
    pub fn options(&self) -> Options {
        Options {
            endpoint: self.plugin.endpoint(),
            mutable_parameters: super::cx::one("csi.blockd.io/iops", "1000"),
            rows: true,
            staging_dir: self.plugin.kubelet_dir().join("plugins/kubernetes.io/csi"),
            target_dir: self.plugin.kubelet_dir().join("pods"),
            ..Options::default()
        }
    }
}

/// A plugin that runs, or did, or will.
#[derive(Debug)]
pub struct Plugin {
    program: PathBuf,
    child: Option<Child>,
    folder: Folder,
    /// The node's state that outlives a restart.
    home: PathBuf,
    /// The socket: a path may have 107 bytes.
    runtime: Folder,
    blockd_socket: PathBuf,
    driver_name: String,
    node: String,
    words: Vec<String>,
    launcher: String,
    variables: Vec<(String, String)>,
    log_level: String,
    metrics: String,
}

impl Plugin {
    /// A plugin of a daemon with this socket; nothing runs yet.
    ///
    /// # Errors
    /// When it can't be built, or a folder not be made.
    pub fn new(name: &str, blockd_socket: &Path, settings: &Settings) -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let pid = std::process::id();
        let [_, high, middle, low] = (pid << 6 | number & 0x3f).to_be_bytes();
        let folder = Folder::new(name)?;
        let plugin = Self {
            program: tools::blockd_csi()?,
            child: None,
            home: settings.home.clone().unwrap_or_else(|| folder.path().to_path_buf()),
            folder,
            runtime: Folder::below(Path::new("/dev/shm"), name)?,
            blockd_socket: blockd_socket.to_path_buf(),
            driver_name: settings.driver_name.clone(),
            node: settings.node.clone(),
            words: settings.words.clone(),
            launcher: settings.launcher.clone(),
            variables: settings.variables.clone(),
            log_level: settings.log.clone(),
            metrics: format!("127.{high}.{middle}.{}:{METRICS_PORT}", low.clamp(1, 254)),
        };
        fs::write(plugin.config(), &settings.config).context("writing the configuration")?;
        fs::create_dir_all(plugin.kubelet_dir())?;
        Ok(plugin)
    }

    fn config(&self) -> PathBuf {
        self.folder.path().join("csi.toml")
    }

    /// The folder that stands for the kubelet's.
    #[must_use]
    pub fn kubelet_dir(&self) -> PathBuf {
        self.home.join("kubelet")
    }

    /// Its socket, in a folder that the plugin makes.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.runtime.path().join("csi/csi.sock")
    }

    /// Its socket as options have it.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.socket().display())
    }

    /// From the next start on it talks to the daemon through this socket.
    pub fn redirect(&mut self, blockd_socket: &Path) {
        self.blockd_socket = blockd_socket.to_path_buf();
    }

    /// Starts it and waits until its socket answers, whether or not the daemon is there.
    ///
    /// # Errors
    /// When it ends instead, or does not serve in time; the message has its log.
    pub fn start(&mut self) -> Result<()> {
        ensure!(self.child.is_none(), "the plugin runs already");
        let log = File::options().create(true).append(true).open(self.log_path())?;
        let mut command = if self.launcher.is_empty() {
            Command::new(&self.program)
        } else {
            let mut command = Command::new("unshare");
            command.args(["--mount", "--propagation", "unchanged", "sh", "-e", "-c"]);
            command.args([&self.launcher, "sh"]).arg(&self.program);
            command.env("HOME_FOLDER", &self.home);
            command
        };
        command.arg("--endpoint").arg(self.endpoint()).args(["--node-id", &self.node]);
        command.arg("--blockd-socket").arg(&self.blockd_socket);
        command.arg("--config").arg(self.config());
        command.arg("--kubelet-dir").arg(self.kubelet_dir());
        command.arg("--state-dir").arg(self.state_dir());
        command.args(["--metrics-address", &self.metrics]).args(&self.words);
        if !self.driver_name.is_empty() {
            command.args(["--driver-name", &self.driver_name]);
        }
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command.env("BLOCKD_CSI_LOG", &self.log_level);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        self.child = Some(command.spawn().context("starting the plugin")?);
        let start = Clock::start();
        loop {
            if UnixStream::connect(self.socket()).is_ok() {
                return Ok(());
            }
            let child = self.child.as_mut().context("the plugin does not run")?;
            if let Some(status) = child.try_wait()? {
                self.child = None;
                bail!("the plugin ended with {status}; {}", self.last_words());
            }
            if start.elapsed() > START_LIMIT {
                bail!("the plugin does not serve; {}", self.last_words());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Ends it as a crash would.
    ///
    /// # Errors
    /// When it does not run.
    pub fn kill(&mut self) -> Result<()> {
        let mut child = self.child.take().context("the plugin does not run")?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// When it does not run.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let child = self.child.as_ref().context("the plugin does not run")?;
        Ok(kill(Pid::from_raw(i32::try_from(child.id())?), signal)?)
    }

    /// Stops all of its threads, until it is sent SIGCONT.
    ///
    /// # Errors
    /// When it does not run.
    pub fn freeze(&self) -> Result<()> {
        tools::freeze(self.pid().context("the plugin does not run")?)
    }

    /// Ends it in order.
    ///
    /// # Errors
    /// When it does not run, does not end in time, or reports an error.
    pub fn stop(&mut self) -> Result<()> {
        let mut child = self.child.take().context("the plugin does not run")?;
        kill(Pid::from_raw(i32::try_from(child.id())?), Signal::SIGTERM)?;
        let status =
            tools::wait_until("the plugin to end", START_LIMIT, || child.try_wait().ok().flatten());
        let status = status.with_context(|| self.last_words())?;
        ensure!(status.success(), "the plugin ended with {status}; {}", self.last_words());
        Ok(())
    }

    /// A client of it, which need not be answered at once.
    ///
    /// # Errors
    /// When a thread can't be started.
    pub fn client(&self, limit: Duration) -> Result<Driver> {
        Driver::unasked(&self.endpoint(), limit)
    }

    /// A client of it, with its capabilities.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn driver(&self) -> Result<Driver> {
        Driver::connect(&self.endpoint(), CALL_LIMIT).with_context(|| self.last_words())
    }

    /// The log since its first start.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// Where it logs.
    #[must_use]
    pub fn log_path(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    /// Where it keeps what it remembers.
    #[must_use]
    pub fn state_dir(&self) -> PathBuf {
        self.home.join("state")
    }

    /// The end of its log, for messages.
    #[must_use]
    pub fn last_words(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        format!("its log ends:\n{}", lines[lines.len().saturating_sub(20)..].join("\n"))
    }

    /// Its process, while it runs.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Where it serves its metrics.
    #[must_use]
    pub fn metrics_address(&self) -> &str {
        &self.metrics
    }

    /// Its metrics, as they are scraped.
    ///
    /// # Errors
    /// When it does not serve them.
    pub fn metrics(&self) -> Result<String> {
        self.get("/metrics")
    }

    /// Whether it is alive, by the kubelet's probe.
    ///
    /// # Errors
    /// When it does not.
    pub fn alive(&self) -> Result<()> {
        self.get("/healthz").map(|_| ())
    }

    fn get(&self, path: &str) -> Result<String> {
        let stream = TcpStream::connect(&self.metrics)?;
        stream.set_read_timeout(Some(CALL_LIMIT))?;
        let (status, body) = http::get(stream, path)?;
        ensure!(status == 200, "{path}: {status} {body}");
        Ok(body)
    }
}

impl Drop for Plugin {
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

/// The daemon's own interface, asked without the plugin.
#[derive(Debug)]
pub struct Control {
    runtime: Arc<Runtime>,
    client: ControlClient<tonic::transport::Channel>,
}

impl Control {
    /// The daemon with this socket.
    ///
    /// # Errors
    /// When a thread can't be started.
    pub fn new(socket: &Path) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .context("starting a thread for calls")?;
        let to = socket.to_path_buf();
        let connector = tower::service_fn(move |_: Uri| {
            let to = to.clone();
            async move { tokio::net::UnixStream::connect(to).await.map(TokioIo::new) }
        });
        let enter = runtime.enter();
        let endpoint = Endpoint::from_static("http://blockd.invalid").timeout(CALL_LIMIT);
        let client = ControlClient::new(endpoint.connect_with_connector_lazy(connector));
        drop(enter);
        Ok(Self { runtime: Arc::new(runtime), client })
    }

    /// Every volume and snapshot there is, hidden ones too.
    ///
    /// # Errors
    /// When the daemon does not answer.
    pub fn volumes(&self) -> Result<Vec<v1::Volume>> {
        let request = v1::ListVolumesRequest { brief: true, ..Default::default() };
        let mut client = self.client.clone();
        let answer = self.runtime.block_on(async move { client.list_volumes(request).await })?;
        Ok(answer.into_inner().volumes)
    }

    /// Their names.
    ///
    /// # Errors
    /// As [`Self::volumes`].
    pub fn names(&self) -> Result<Vec<String>> {
        Ok(self.volumes()?.into_iter().map(|volume| volume.name).collect())
    }

    /// The volume of an id of the plugin's.
    ///
    /// # Errors
    /// As [`Self::volumes`], and when there is none.
    pub fn volume(&self, id: &str) -> Result<v1::Volume> {
        let (pool, name) = id.split_once('/').with_context(|| format!("{id} is no id"))?;
        let all = self.volumes()?;
        let found = all.into_iter().find(|one| one.pool == pool && one.name == name);
        found.with_context(|| format!("the daemon has no {id}"))
    }

    /// The daemon's counters.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn stats(&self) -> Result<v1::StatsResponse> {
        let mut client = self.client.clone();
        let request = v1::StatsRequest::default();
        Ok(self.runtime.block_on(async move { client.stats(request).await })?.into_inner())
    }

    /// The default pool.
    ///
    /// # Errors
    /// When the daemon does not answer.
    pub fn pool(&self) -> Result<v1::Pool> {
        self.pool_named("")
    }

    /// The pool of that name.
    ///
    /// # Errors
    /// When the daemon does not answer, or has none.
    pub fn pool_named(&self, name: &str) -> Result<v1::Pool> {
        let mut client = self.client.clone();
        let request = v1::GetPoolRequest { name: name.to_owned() };
        let answer = self.runtime.block_on(async move { client.get_pool(request).await })?;
        answer.into_inner().pool.context("no pool")
    }
}
