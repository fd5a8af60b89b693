//! Detaching a volume and stopping the daemon while writes wait for a full pool and clients hold
//! requests of which only a part was sent.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Result, ensure};
use blockd_testkit::clock::Clock;
use blockd_testkit::tools::{self, wait_until};
use nix::sys::signal::Signal;
use serde::Serialize;

use super::Options;
use super::attack::{Attack, Running};
use super::site::{FULL, FULL_POOL, Identity, NEIGHBOUR, Site, Transport};

/// Each of them ends within this time.
const LIMIT: Duration = Duration::from_secs(5);
/// The wait goes on for this long, to report by how much [`LIMIT`] was missed.
const PATIENCE: Duration = Duration::from_secs(40);

/// How long something took to end.
#[derive(Clone, Debug, Serialize)]
pub struct End {
    pub what: &'static str,
    pub seconds: f64,
    /// Why it counts as missed.
    pub problem: Option<String>,
}

impl End {
    fn timed(what: &'static str, run: impl FnOnce() -> Result<()>) -> Self {
        let start = Clock::start();
        let error = run().err().map(|error| format!("{error:#}"));
        let took = start.elapsed();
        let late = (took > LIMIT).then(|| format!("took {:.1} s", took.as_secs_f64()));
        let problem = [late, error].into_iter().flatten().collect::<Vec<_>>().join("; ");
        let problem = (!problem.is_empty()).then_some(problem);
        Self { what, seconds: took.as_secs_f64(), problem }
    }
}

/// Times all of them.
pub(super) fn run(options: &Options, identity: &Identity) -> Result<Vec<End>> {
    let start = || -> Result<(Site, [Running; 3])> {
        let (program, folder) = (options.program.as_deref(), options.folder.as_deref());
        let site = Site::start(program, folder, identity)?;
        // In this order: writes of which a part was sent may hold the memory that others need.
        let full = Running::start(Attack::FullPool, &site, Transport::Unix)?;
        wait_until("writes to wait for space", LIMIT, || site.waiting_writes().ok()?)?;
        let half = Running::start(Attack::HalfWrites, &site, Transport::Unix)?;
        let half_over_tls = Running::start(Attack::HalfWrites, &site, Transport::Tls)?;
        Ok((site, [full, half, half_over_tls]))
    };
    let (site, attacks) = start()?;
    let detach = |pool: &str, volume: &str| -> Result<()> {
        let words = ["detach", "--force", "--pool", pool, volume];
        let mut command = site.verb(PATIENCE, &words);
        tools::output(command.stdin(Stdio::null())).map(drop)
    };
    let mut ends = vec![
        End::timed("detach a full pool", || detach(FULL_POOL, FULL)),
        End::timed("detach half-sent", || detach("default", NEIGHBOUR)),
    ];
    drop(attacks.map(Running::end));
    drop(site);
    let (mut site, attacks) = start()?;
    ends.push(End::timed("SIGTERM", || {
        site.daemon.signal(Signal::SIGTERM)?;
        let status = site.daemon.wait(PATIENCE)?;
        ensure!(status.success(), "{status}");
        Ok(())
    }));
    drop(attacks.map(Running::end));
    Ok(ends)
}
