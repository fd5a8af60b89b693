//! Volumes that come and go: whether anything of the daemon grows with them.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_api::v1;
use blockd_api::v1::control_client::ControlClient;
use blockd_testkit::clock::Clock;
use blockd_testkit::daemon::Daemon;
use tonic::transport::Channel;

use super::{Bench, PAUSE, attach, kib_of};
use crate::control;
use crate::report::{Budget, Row};

/// The volume of a round, its snapshot, and clones of that.
const VOLUME: &str = "volume";
const CUT: &str = "cut";
const CLONES: [&str; 3] = ["clone-1", "clone-2", "clone-3"];
const SIZE: i64 = 64 << 20;
/// Bytes of a write.
const PIECE: usize = 256 << 10;
/// Rounds before the first look: buffers, caches and metadata have what they need.
const WARM: u64 = 2000;
/// The allowed growth of memory, which covers random retention of an allocator.
const MOST_MIB: f64 = 1.0;

/// Threads of the control runtime come and go.
const MOST_THREADS: f64 = 8.0;

/// The parts that may not grow.
#[derive(Clone, Copy, Debug)]
struct Held {
    /// Without pages of a pool in memory, of which more and more are mapped.
    own_kib: u64,
    descriptors: u64,
    threads: u64,
    metadata_bytes: i64,
    used_bytes: i64,
}

impl Bench {
    /// Makes volumes, writes to them, makes snapshots and clones, and deletes all, for this long.
    ///
    /// # Errors
    /// When the daemon fails or refuses a call, or a clone has another content than its volume.
    pub fn churn(&self, time: Duration) -> Result<Vec<Row>> {
        let mut daemon = Daemon::new("bench-churn", &self.settings())?;
        daemon.start()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let rows = runtime.block_on(churn(&daemon, time));
        let rows = rows.with_context(|| daemon.last_words())?;
        daemon.stop()?;
        Ok(rows)
    }
}

async fn churn(daemon: &Daemon, time: Duration) -> Result<Vec<Row>> {
    let mut client = control::connect(daemon);
    let mut random = fastrand::Rng::with_seed(1);
    for _ in 0..WARM {
        round(daemon, &mut client, &mut random).await?;
    }
    let before = held(daemon, &mut client).await?;
    let clock = Clock::start();
    let mut rounds = 0_u32;
    while clock.elapsed() < time {
        round(daemon, &mut client, &mut random).await?;
        rounds += 1;
    }
    let after = held(daemon, &mut client).await?;
    let row = |name: &str, after: f64, before: f64, unit, budget| {
        Row::new(format!("{name}: growth over {rounds} rounds"), after - before, unit, budget)
    };
    let mib = |bytes: i64| bytes as f64 / f64::from(1 << 20);
    let kib = |kib: u64| kib as f64 / 1024.0;
    let exact = Budget::Exactly(0.0);
    Ok(vec![
        row("memory", kib(after.own_kib), kib(before.own_kib), "MiB", Budget::AtMost(MOST_MIB)),
        row("descriptors", after.descriptors as f64, before.descriptors as f64, "", exact),
        row(
            "threads",
            after.threads as f64,
            before.threads as f64,
            "",
            Budget::AtMost(MOST_THREADS),
        ),
        row("metadata", mib(after.metadata_bytes), mib(before.metadata_bytes), "MiB", exact),
        row("used", mib(after.used_bytes), mib(before.used_bytes), "MiB", exact),
    ])
}

/// A volume is made, written and read through a snapshot's clones, and all of it is deleted.
async fn round(
    daemon: &Daemon,
    client: &mut ControlClient<Channel>,
    random: &mut fastrand::Rng,
) -> Result<()> {
    let name = VOLUME.to_owned();
    let made = v1::CreateVolumeRequest { name, size_bytes: SIZE, ..Default::default() };
    client.create_volume(made).await?;
    attach(client, VOLUME, v1::FrontEnd::Nbd).await?;
    let mut data = vec![0; PIECE];
    random.fill(&mut data);
    let offset = random.u64(..SIZE.unsigned_abs() / PIECE as u64) * PIECE as u64;
    let mut connection = daemon.connect(VOLUME)?;
    connection.write(offset, &data)?;
    connection.flush()?;
    let members = vec![v1::SnapshotMember { volume: VOLUME.to_owned(), name: CUT.to_owned() }];
    let cut = v1::CreateSnapshotsRequest { members, ..Default::default() };
    client.create_snapshots(cut).await?;
    let names = CLONES.map(str::to_owned).to_vec();
    let clones = v1::CloneVolumesRequest { snapshot: CUT.to_owned(), names, ..Default::default() };
    client.clone_volumes(clones).await?;
    connection.write(0, &data)?;
    attach(client, CLONES[0], v1::FrontEnd::Nbd).await?;
    let found = daemon.connect(CLONES[0])?.read(offset, PIECE)?;
    ensure!(offset == 0 || found == data, "a clone has other bytes than its snapshot");
    drop(connection);
    for name in CLONES.into_iter().chain([VOLUME, CUT]) {
        let asked =
            v1::DeleteVolumeRequest { name: name.into(), force: true, ..Default::default() };
        client.delete_volume(asked).await?;
    }
    Ok(())
}

/// Looks once all is given back that the rounds before have left.
async fn held(daemon: &Daemon, client: &mut ControlClient<Channel>) -> Result<Held> {
    tokio::time::sleep(PAUSE).await;
    let pid = daemon.pid().context("the daemon does not run")?;
    let pool = client.get_pool(v1::GetPoolRequest::default()).await?.into_inner().pool;
    let pool = pool.context("no pool in the answer")?;
    let count = |folder: &str| -> Result<u64> {
        Ok(fs::read_dir(format!("/proc/{pid}/{folder}"))?.count() as u64)
    };
    Ok(Held {
        own_kib: kib_of(pid, "status", "RssAnon:")?,
        descriptors: count("fd")?,
        threads: count("task")?,
        metadata_bytes: pool.metadata_bytes,
        used_bytes: pool.size_bytes - pool.free_bytes,
    })
}
