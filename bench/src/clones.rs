//! Clones of one image: how long it takes to make and attach them with few and with many there,
//! and what they cost while nothing is written, beside overlays of qemu.

mod churn;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_api::v1;
use blockd_api::v1::control_client::ControlClient;
use blockd_testkit::clock::Clock;
use blockd_testkit::daemon::{Daemon, Home, Settings};
use blockd_testkit::nbd::Connection;
use blockd_testkit::tools;
use serde_json::{Value, json};
use tonic::transport::Channel;

use crate::control;
use crate::stats::{median, quantile};

/// The volume with the image, and its snapshot.
pub(crate) const IMAGE: &str = "image";
pub(crate) const SNAPSHOT: &str = "golden";
/// Bytes of a stretch of the image that is written, and from one to the next.
const STRETCH: u64 = 1 << 20;
const STRIDE: u64 = 8 << 20;
/// Bytes that a client reads once it is connected.
const FIRST_READ: usize = 4096;
/// How long a server of a peer may take to listen.
const PATIENCE: Duration = Duration::from_secs(10);
/// Clients that are connected when the daemon is killed: each takes a descriptor of ours.
const MOST_CLIENTS: usize = 1000;
/// Time without calls before memory is measured.
const PAUSE: Duration = Duration::from_secs(2);

/// How it is measured.
#[derive(Clone, Debug)]
pub struct Bench {
    /// The daemon's program.
    pub blockd: PathBuf,
    /// Where pool and images lie.
    pub folder: PathBuf,
    /// Bytes of the image.
    pub size: u64,
    /// Numbers of clones, the lowest first.
    pub clones: Vec<usize>,
    /// Overlays of the peer.
    pub overlays: usize,
}

/// Milliseconds of the same step for each of many.
#[derive(Clone, PartialEq, Debug)]
pub struct Times {
    /// The middle one.
    pub p50: f64,
    /// The one that 19 of 20 do not exceed.
    pub p95: f64,
}

impl Times {
    pub(crate) fn of(seconds: &[f64]) -> Result<Self> {
        let at = |part: f64| quantile(seconds, part).map(|one| one * 1000.0).context("no times");
        Ok(Self { p50: at(0.5)?, p95: at(0.95)? })
    }

    pub(crate) fn to_json(&self) -> Value {
        json!({ "p50_ms": self.p50, "p95_ms": self.p95 })
    }
}

/// The figures with one number of clones.
#[derive(Clone, PartialEq, Debug)]
pub struct Figures {
    /// Clones.
    pub clones: usize,
    /// A call that makes one.
    pub make: Times,
    /// The calls that make and attach one over NBD, a connection, and a first read.
    pub make_and_read: Times,
    /// Memory of the daemon for each, in KiB, with all of them attached.
    pub rss_kib: f64,
    /// Of it, memory that is locked.
    pub locked_kib: f64,
    /// Seconds of `blockd list`.
    pub list_s: f64,
    /// Seconds from the start of the daemon until the last clone is read.
    pub restart_s: f64,
    /// Seconds to detach and delete all, one after the other.
    pub delete_s: f64,
}

impl Figures {
    /// Returns them as JSON.
    #[must_use]
    pub fn to_json(&self) -> Value {
        json!({
            "clones": self.clones, "make": self.make.to_json(),
            "make_and_read": self.make_and_read.to_json(), "rss_kib": self.rss_kib,
            "locked_kib": self.locked_kib, "list_s": self.list_s, "restart_s": self.restart_s,
            "delete_s": self.delete_s,
        })
    }
}

/// The figures of overlays of the same image.
#[derive(Clone, PartialEq, Debug)]
pub struct Overlays {
    /// `qemu-img create -b`.
    pub make: Times,
    /// The same, the start of a qemu-nbd, a connection, and a first read.
    pub make_and_read: Times,
    /// Memory of each qemu-nbd that is its own alone, in KiB.
    pub own_kib: f64,
}

impl Overlays {
    /// Returns them as JSON.
    #[must_use]
    pub fn to_json(&self) -> Value {
        json!({
            "make": self.make.to_json(), "make_and_read": self.make_and_read.to_json(),
            "own_kib": self.own_kib,
        })
    }
}

impl Bench {
    /// Measures each number of clones, with a daemon of its own.
    ///
    /// # Errors
    /// When the daemon fails or refuses a call, or a clone has another content than the image.
    pub fn measure(&self) -> Result<Vec<Figures>> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut all = Vec::new();
        for &clones in &self.clones {
            let mut daemon = Daemon::new("bench-clones", &self.settings())?;
            daemon.start()?;
            let figures = runtime.block_on(self.with(&mut daemon, clones));
            all.push(figures.with_context(|| daemon.last_words())?);
            daemon.stop()?;
        }
        Ok(all)
    }

    fn settings(&self) -> Settings {
        Settings {
            home: Home::Below(self.folder.clone()),
            program: Some(self.blockd.clone()),
            pool_size: self.size + (2 << 30),
            tables: "[log]\nlevel = \"warn\"".to_owned(),
            ..Settings::default()
        }
    }

    async fn with(&self, daemon: &mut Daemon, clones: usize) -> Result<Figures> {
        let image = daemon.folder().join("image");
        write_image(&image, self.size)?;
        daemon.cli(&["import", &image.to_string_lossy(), IMAGE])?;
        daemon.cli(&["snapshot", &format!("{IMAGE}={SNAPSHOT}")])?;
        daemon.cli(&["detach", IMAGE])?;
        let mut client = control::connect(daemon);
        // The code is in memory, and so is the leaf that all clones share.
        for name in ["warm-0", "warm-1"] {
            make(&mut client, name).await?;
            attach(&mut client, name, v1::FrontEnd::Nbd).await?;
            read(daemon, name)?;
        }
        std::thread::sleep(PAUSE);
        let before = memory(daemon)?;
        let (mut makes, mut reads) = (Vec::new(), Vec::new());
        let clock = Clock::start();
        for number in 0..clones {
            let name = format!("clone-{number}");
            let begun = clock.seconds();
            make(&mut client, &name).await?;
            let made = clock.seconds();
            attach(&mut client, &name, v1::FrontEnd::Nbd).await?;
            read(daemon, &name)?;
            makes.push(made - begun);
            reads.push(clock.seconds() - begun);
        }
        std::thread::sleep(PAUSE);
        let after = memory(daemon)?;
        let each = |at: usize| after[at].saturating_sub(before[at]) as f64 / clones as f64;
        let mut lists = Vec::new();
        for _ in 0..5 {
            let clock = Clock::start();
            let output = daemon.cli_output(&["list"])?;
            ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            lists.push(clock.seconds());
        }
        let restart_s = restart(daemon, clones)?;
        let mut client = control::connect(daemon);
        let clock = Clock::start();
        for number in 0..clones {
            delete(&mut client, &format!("clone-{number}")).await?;
        }
        Ok(Figures {
            clones,
            make: Times::of(&makes)?,
            make_and_read: Times::of(&reads)?,
            rss_kib: each(0),
            locked_kib: each(1),
            list_s: median(&lists).context("no lists")?,
            restart_s,
            delete_s: clock.seconds(),
        })
    }

    /// Measures overlays of the image.
    ///
    /// # Errors
    /// When a program of the peer fails.
    pub fn overlays(&self) -> Result<Overlays> {
        let folder = blockd_testkit::folder::Folder::below(&self.folder, "bench-overlays")?;
        let image = folder.path().join("image");
        write_image(&image, self.size)?;
        let mut servers = Servers::default();
        let (mut makes, mut reads) = (Vec::new(), Vec::new());
        let clock = Clock::start();
        for number in 0..=self.overlays {
            let overlay = folder.path().join(format!("overlay-{number}"));
            let begun = clock.seconds();
            let mut create = Command::new("qemu-img");
            create.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).arg(&image);
            tools::output(create.arg(&overlay))?;
            let made = clock.seconds();
            let socket = folder.path().join(format!("socket-{number}"));
            servers.start(&overlay, &socket)?;
            let listening = || Connection::open(&socket, "").ok();
            let mut connection = tools::wait_until("a qemu-nbd", PATIENCE, listening)?;
            expect_image(&connection.read(0, FIRST_READ)?)?;
            // The first one reads the programs.
            if number > 0 {
                makes.push(made - begun);
                reads.push(clock.seconds() - begun);
            }
        }
        let own_kib = servers.own_kib()?;
        Ok(Overlays { make: Times::of(&makes)?, make_and_read: Times::of(&reads)?, own_kib })
    }
}

/// Servers of a peer, which end with this.
#[derive(Debug, Default)]
struct Servers(Vec<Child>);

impl Servers {
    fn start(&mut self, overlay: &Path, socket: &Path) -> Result<()> {
        let mut serve = Command::new("qemu-nbd");
        serve.args(["-f", "qcow2", "--persistent", "-k"]).arg(socket).arg(overlay);
        serve.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        self.0.push(serve.spawn().context("starting qemu-nbd")?);
        Ok(())
    }

    /// Pages that no other process has: not those of the program and its libraries.
    fn own_kib(&self) -> Result<f64> {
        let own = |server: &Child| {
            let of = |line| kib_of(server.id(), "smaps_rollup", line);
            Ok(of("Private_Dirty:")? + of("Private_Clean:")?)
        };
        let each: Result<Vec<u64>> = self.0.iter().map(own).collect();
        Ok(each?.iter().sum::<u64>() as f64 / self.0.len() as f64)
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        for server in &mut self.0 {
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}

/// Kills the daemon under a client of each clone and starts it again. Returns the seconds until the
/// last clone is read; then each of them is.
fn restart(daemon: &mut Daemon, clones: usize) -> Result<f64> {
    let names = (0..clones).map(|number| format!("clone-{number}"));
    let connected: Result<Vec<_>> =
        names.clone().take(MOST_CLIENTS).map(|name| daemon.connect(&name)).collect();
    let connected = connected?;
    daemon.kill()?;
    drop(connected);
    let clock = Clock::start();
    daemon.start()?;
    read(daemon, &format!("clone-{}", clones - 1))?;
    let seconds = clock.seconds();
    for name in names {
        read(daemon, &name)?;
    }
    Ok(seconds)
}

/// Makes a clone of the image.
pub(crate) async fn make(client: &mut ControlClient<Channel>, name: &str) -> Result<()> {
    let (name, snapshot) = (name.to_owned(), SNAPSHOT.to_owned());
    let asked = v1::CloneVolumeRequest { name, snapshot, ..Default::default() };
    let changed = client.clone_volume(asked).await?.into_inner().changed;
    ensure!(changed, "a clone was there already");
    Ok(())
}

/// Attaches one, and returns the path of its block device, if it has one.
pub(crate) async fn attach(
    client: &mut ControlClient<Channel>,
    name: &str,
    front_end: v1::FrontEnd,
) -> Result<String> {
    let (name, front_end) = (name.to_owned(), front_end.into());
    let asked = v1::AttachVolumeRequest { name, front_end, ..Default::default() };
    let volume = client.attach_volume(asked).await?.into_inner().volume;
    Ok(volume.context("no volume in the answer")?.device_path)
}

/// Detaches and deletes one.
pub(crate) async fn delete(client: &mut ControlClient<Channel>, name: &str) -> Result<()> {
    let name = name.to_owned();
    let detach = v1::DetachVolumeRequest { name: name.clone(), ..Default::default() };
    client.detach_volume(detach).await?;
    client.delete_volume(v1::DeleteVolumeRequest { name, ..Default::default() }).await?;
    Ok(())
}

fn read(daemon: &Daemon, name: &str) -> Result<()> {
    expect_image(&daemon.connect(name)?.read(0, FIRST_READ)?).with_context(|| name.to_owned())
}

/// The image begins with bytes that are not zero.
fn expect_image(bytes: &[u8]) -> Result<()> {
    let mut expected = vec![0; FIRST_READ];
    fastrand::Rng::with_seed(1).fill(&mut expected);
    ensure!(bytes == expected, "other bytes than the image has");
    Ok(())
}

/// An image of which an eighth was written.
fn write_image(path: &Path, size: u64) -> Result<()> {
    let file = File::create(path)?;
    file.set_len(size)?;
    let mut random = fastrand::Rng::with_seed(1);
    let mut buffer = vec![0; usize::try_from(STRETCH)?];
    for offset in (0..size).step_by(usize::try_from(STRIDE)?) {
        random.fill(&mut buffer);
        file.write_all_at(&buffer, offset)?;
    }
    Ok(file.sync_all()?)
}

/// KiB of memory of the daemon, in all and locked.
fn memory(daemon: &Daemon) -> Result<[u64; 2]> {
    memory_of(daemon.pid().context("the daemon does not run")?)
}

/// The same of a process.
pub(crate) fn memory_of(pid: u32) -> Result<[u64; 2]> {
    // Not VmLck, which has the pages that are not there yet.
    Ok([kib_of(pid, "status", "VmRSS:")?, kib_of(pid, "smaps_rollup", "Locked:")?])
}

/// KiB in a line of a file of a process.
fn kib_of(pid: u32, file: &str, line: &str) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/{file}"))?;
    let found = text.lines().find_map(|one| one.strip_prefix(line)).unwrap_or_default();
    let number = found.trim().split(' ').next().unwrap_or_default();
    number.parse().with_context(|| format!("{line} {found}"))
}
