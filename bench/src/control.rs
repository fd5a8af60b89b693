//! The cost of calls of the control API, with few volumes and with many: CPU time of the daemon, so
//! that disks and other programs do not count.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_api::v1;
use blockd_api::v1::control_client::ControlClient;
use blockd_testkit::daemon::{Daemon, Settings};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::task::JoinSet;
use tonic::transport::{Channel, Endpoint};

use crate::cpu::process_cpu;
use crate::stats::median;

/// Bytes of a volume: they are never written.
const SIZE: i64 = 8 << 20;
/// Bytes of the pool: a sparse file, so that these are not taken.
const POOL: u64 = 16 << 30;
/// The snapshot that clones are made of, and its volume.
const SNAPSHOT: &str = "snapshot";
const SOURCE: &str = "source";
/// Calls on their way while volumes are made: a commit then has many of them.
const AT_ONCE: usize = 64;
/// How long nothing is asked before something is measured: what the last calls left is done then.
const PAUSE: Duration = Duration::from_secs(2);
/// How long the daemon is measured while nothing is asked: two looks of its health checks.
const IDLE: Duration = Duration::from_secs(10);

/// A call that is measured, or the time without any.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Row {
    /// `blockd add --nbd`: a volume is made and attached.
    Add,
    /// A volume is made of a snapshot.
    Clone,
    /// A volume is attached over NBD.
    Attach,
    /// A volume is detached.
    Detach,
    /// A volume is deleted.
    Delete,
    /// Nothing is asked for a second.
    Idle,
}

impl Row {
    /// All of them, in the order in which they are measured and shown.
    pub const ALL: [Self; 6] =
        [Self::Add, Self::Detach, Self::Attach, Self::Delete, Self::Clone, Self::Idle];

    /// The name in tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Add => "add",
            Self::Clone => "clone",
            Self::Attach => "attach",
            Self::Detach => "detach",
            Self::Delete => "del",
            Self::Idle => "idle, a second",
        }
    }
}

/// How it is measured.
#[derive(Clone, Debug)]
pub struct Bench {
    /// The daemon's program.
    pub blockd: PathBuf,
    /// Numbers of volumes, the lowest first.
    pub volumes: Vec<usize>,
    /// Calls of each kind in a round.
    pub calls: usize,
    /// Rounds, of which the median counts.
    pub rounds: usize,
}

/// CPU time of a row in milliseconds, for each number of volumes.
#[derive(Clone, PartialEq, Debug)]
pub struct Figure {
    /// The call.
    pub row: Row,
    /// One for each number of volumes.
    pub cpu_ms: Vec<f64>,
}

impl Figure {
    /// The time with most volumes divided by that with fewest.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        match (self.cpu_ms.first(), self.cpu_ms.last()) {
            (Some(few), Some(many)) if *few > 0.0 => many / few,
            _ => f64::NAN,
        }
    }
}

impl Bench {
    /// Measures all rows for each number of volumes, all of which are attached over NBD.
    ///
    /// # Errors
    /// When the daemon fails or refuses a call.
    pub fn measure(&self) -> Result<Vec<Figure>> {
        let settings = Settings {
            program: Some(self.blockd.clone()),
            pool_size: POOL,
            tables: "[log]\nlevel = \"warn\"".to_owned(),
            ..Settings::default()
        };
        let mut daemon = Daemon::new("bench-control", &settings)?;
        daemon.start()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let measured = runtime.block_on(self.all(&daemon));
        let figures = measured.with_context(|| daemon.last_words())?;
        daemon.stop()?;
        Ok(figures)
    }

    async fn all(&self, daemon: &Daemon) -> Result<Vec<Figure>> {
        let mut rig = Rig::new(daemon)?;
        rig.call(Row::Add, SOURCE).await?;
        let members =
            vec![v1::SnapshotMember { volume: SOURCE.to_owned(), name: SNAPSHOT.to_owned() }];
        let snapshot = v1::CreateSnapshotsRequest { members, ..Default::default() };
        rig.client.create_snapshots(snapshot).await?;
        // The code is in memory, and pools of memory have what they need.
        rig.rounds(1, self.calls).await?;
        let mut figures: Vec<Figure> =
            Row::ALL.into_iter().map(|row| Figure { row, cpu_ms: Vec::new() }).collect();
        for &volumes in &self.volumes {
            rig.fill(volumes).await?;
            let found = rig.rounds(self.rounds, self.calls).await?;
            for (figure, cpu_ms) in figures.iter_mut().zip(found) {
                figure.cpu_ms.push(cpu_ms);
            }
        }
        Ok(figures)
    }
}

/// Makes volumes, and attaches them over NBD.
///
/// # Errors
/// When the daemon refuses a call.
pub fn fill(daemon: &Daemon, volumes: usize) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let filled = runtime.block_on(async { Rig::new(daemon)?.fill(volumes).await });
    filled.with_context(|| daemon.last_words())
}

/// A connection to a daemon's control socket, made at the first call.
#[must_use]
pub fn connect(daemon: &Daemon) -> ControlClient<Channel> {
    let path = daemon.control_socket();
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    // The host is not used, and has to be there.
    let endpoint = Endpoint::from_static("http://blockd.invalid");
    ControlClient::new(endpoint.connect_with_connector_lazy(connector))
}

/// A daemon that is called.
struct Rig {
    client: ControlClient<Channel>,
    pid: u32,
    /// Volumes that stay.
    filled: usize,
}

impl Rig {
    fn new(daemon: &Daemon) -> Result<Self> {
        let client = connect(daemon);
        let pid = daemon.pid().context("the daemon does not run")?;
        Ok(Self { client, pid, filled: 0 })
    }

    /// Makes and attaches volumes until there are this many.
    async fn fill(&mut self, volumes: usize) -> Result<()> {
        let mut calls = JoinSet::new();
        while self.filled < volumes || !calls.is_empty() {
            if self.filled < volumes && calls.len() < AT_ONCE {
                let (client, name) = (self.client.clone(), format!("filled-{}", self.filled));
                calls.spawn(async move { call(client, Row::Add, &name).await });
                self.filled += 1;
            } else if let Some(done) = calls.join_next().await {
                done??;
            }
        }
        Ok(())
    }

    /// The median CPU time of each row in milliseconds. Leaves no volumes.
    async fn rounds(&mut self, rounds: usize, calls: usize) -> Result<Vec<f64>> {
        let mut times = vec![Vec::new(); Row::ALL.len()];
        for _ in 0..rounds {
            for (row, times) in Row::ALL.into_iter().zip(&mut times) {
                if row != Row::Idle {
                    times.push(self.round(row, calls).await?);
                }
            }
        }
        tokio::time::sleep(PAUSE).await;
        let before = process_cpu(self.pid)?;
        tokio::time::sleep(IDLE).await;
        let idle = process_cpu(self.pid)?.saturating_sub(before);
        times[Row::ALL.len() - 1].push(ms(idle) / IDLE.as_secs_f64());
        times.iter().map(|times| median(times).context("no rounds")).collect()
    }

    async fn round(&mut self, row: Row, calls: usize) -> Result<f64> {
        let name = |number: usize| format!("measured-{number}");
        if row == Row::Delete {
            for number in 0..calls {
                self.call(Row::Detach, &name(number)).await?;
            }
        }
        tokio::time::sleep(PAUSE / 10).await;
        let before = process_cpu(self.pid)?;
        for number in 0..calls {
            self.call(row, &name(number)).await?;
        }
        let taken = process_cpu(self.pid)?.saturating_sub(before);
        if row == Row::Clone {
            for number in 0..calls {
                self.call(Row::Delete, &name(number)).await?;
            }
        }
        Ok(ms(taken) / calls as f64)
    }

    async fn call(&self, row: Row, name: &str) -> Result<()> {
        call(self.client.clone(), row, name).await
    }
}

async fn call(mut client: ControlClient<Channel>, row: Row, name: &str) -> Result<()> {
    let name = name.to_owned();
    let front_end = v1::FrontEnd::Nbd.into();
    let attach = v1::AttachVolumeRequest { name: name.clone(), front_end, ..Default::default() };
    let changed = match row {
        Row::Add => {
            let asked = v1::CreateVolumeRequest { name, size_bytes: SIZE, ..Default::default() };
            client.create_volume(asked).await?;
            client.attach_volume(attach).await?.into_inner().changed
        }
        Row::Clone => {
            let snapshot = SNAPSHOT.to_owned();
            let asked = v1::CloneVolumeRequest { name, snapshot, ..Default::default() };
            client.clone_volume(asked).await?.into_inner().changed
        }
        Row::Attach => client.attach_volume(attach).await?.into_inner().changed,
        Row::Detach => {
            let asked = v1::DetachVolumeRequest { name, ..Default::default() };
            client.detach_volume(asked).await?.into_inner().changed
        }
        Row::Delete => {
            let asked = v1::DeleteVolumeRequest { name, ..Default::default() };
            client.delete_volume(asked).await?.into_inner().changed
        }
        Row::Idle => true,
    };
    ensure!(changed, "{} changed nothing", row.name());
    Ok(())
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}
