//! The remains of an attacker once its sockets are closed: nothing, within a second.

use std::time::Duration;

use anyhow::{Result, ensure};
use blockd_testkit::clock::Clock;

use super::client::{Client, Manner, READ, Request, WRITE};
use super::site::{Site, Transport, VICTIM};

/// Everything that an attacker held is free after this time.
pub(super) const LIMIT: Duration = Duration::from_secs(1);
/// One look that takes longer has failed, and another follows if there is time.
const LOOK: Duration = Duration::from_secs(1);
/// Precedes the free IO memory of each worker in the metrics.
const FREE_MEMORY: &str = "blockd_worker_free_memory_bytes{";

/// The resources that clients hold in a daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Held {
    /// Connections of all volumes.
    connections: u64,
    /// Bytes of IO memory that are free, for each worker.
    free: Vec<u64>,
    /// Open descriptors.
    descriptors: usize,
}

impl Held {
    /// Looks.
    ///
    /// # Errors
    /// When the daemon does not answer in time.
    pub(super) fn now(site: &Site) -> Result<Self> {
        let metrics = site.get("/metrics", LOOK)?;
        let of = |line: &str| line.rsplit(' ').next()?.parse().ok();
        let free: Vec<u64> =
            metrics.lines().filter(|line| line.starts_with(FREE_MEMORY)).filter_map(of).collect();
        ensure!(free.len() == 2, "no {FREE_MEMORY} of two workers");
        let output = site.verb(LOOK, &["list", "--json"]).output()?;
        ensure!(
            output.status.success(),
            "blockd list: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        let list: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        let volumes = list["volumes"].as_array().map(Vec::as_slice).unwrap_or_default();
        ensure!(!volumes.is_empty(), "blockd list has no volumes");
        let connections = volumes.iter().filter_map(|volume| volume["connections"].as_u64()).sum();
        Ok(Self { connections, free, descriptors: site.descriptors()? })
    }

    /// The resources that are held beyond those held before.
    fn beyond(&self, before: &Self) -> Option<String> {
        let mut beyond = Vec::new();
        if self.connections > before.connections {
            beyond.push(format!("{} connections in list", self.connections - before.connections));
        }
        for (worker, (now, then)) in self.free.iter().zip(&before.free).enumerate() {
            if now < then {
                beyond.push(format!("{} KiB of worker {worker}", (then - now) >> 10));
            }
        }
        if self.descriptors > before.descriptors {
            beyond.push(format!("{} descriptors", self.descriptors - before.descriptors));
        }
        (!beyond.is_empty()).then(|| beyond.join(", "))
    }
}

/// Looks again until nothing is left and a new client is served, and returns how long that took.
///
/// # Errors
/// When something is left after [`LIMIT`].
pub(super) fn nothing(
    site: &Site,
    transport: Transport,
    before: &Held,
    closed: Clock,
) -> Result<Duration, String> {
    loop {
        let look = match Held::now(site) {
            Ok(now) => now.beyond(before).or_else(|| {
                let served = served(site, transport).err();
                served.map(|error| format!("a new client is not served: {error:#}"))
            }),
            Err(error) => Some(format!("{error:#}")),
        };
        let took = closed.elapsed();
        match look {
            None if took <= LIMIT => return Ok(took),
            None => return Err(format!("nothing only after {:.1} s", took.as_secs_f64())),
            Some(left) if took > LIMIT => return Err(left),
            Some(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// A new client reads and overwrites a block of another volume.
fn served(site: &Site, transport: Transport) -> Result<()> {
    let mut client = Client::open(site.address(transport), VICTIM, Manner::victim(LOOK))?;
    let mut data = vec![0; 4096];
    client.ask(Request { kind: READ, offset: 0, len: 4096 }, &[], &mut data)?;
    let write = Request { kind: WRITE, offset: 0, len: 4096 };
    client.ask(write, &data, &mut [])
}

/// Waits until a daemon without clients holds nothing for them, for comparison.
///
/// # Errors
/// When it does not answer.
pub(super) fn quiet(site: &Site) -> Result<Held> {
    let start = Clock::start();
    let mut held = Held::now(site)?;
    // Connections of the setup were closed a moment ago. Resources that are still
    // held after the limit are not an attacker's.
    while start.elapsed() < LIMIT {
        std::thread::sleep(Duration::from_millis(20));
        let now = Held::now(site)?;
        if now == held && now.connections == 0 {
            break;
        }
        held = now;
    }
    Ok(held)
}
