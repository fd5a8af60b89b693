//! Tenants with a connection and a thread each, that run at the same time.

use std::sync::Barrier;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use blockd_testkit::clock::Clock;

use crate::load::{Event, Pattern};
use crate::nbd::client::Client;

/// The longest wait for a reply. Longer than the daemon's own timeouts, which are a minute.
const PATIENCE: Duration = Duration::from_secs(90);

/// A tenant and its requests.
pub(super) struct Tenant<'a> {
    pub(super) uri: &'a str,
    pub(super) pattern: Pattern,
}

/// The throughput and latency of a tenant.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Found {
    /// Operations that ended while all tenants ran.
    pub(super) operations: u64,
    /// Latencies of the operations that began in that time, sorted.
    pub(super) latencies_ns: Vec<u64>,
}

/// Runs all of them at once: `warm_up`, and then `time`, which counts.
pub(super) fn together(
    tenants: &[Tenant<'_>],
    warm_up: Duration,
    time: Duration,
) -> Result<Vec<Found>> {
    // Connected before any of them begins.
    let clients: Vec<Client> = tenants
        .iter()
        .map(|tenant| Client::connect(tenant.uri)?.with_patience(PATIENCE))
        .collect::<Result<_>>()?;
    let barrier = Barrier::new(tenants.len());
    let from = u64::try_from(warm_up.as_nanos())?;
    let until = from + u64::try_from(time.as_nanos())?;
    std::thread::scope(|scope| {
        let threads: Vec<_> = clients
            .into_iter()
            .zip(tenants)
            .map(|(client, tenant)| {
                let barrier = &barrier;
                scope.spawn(move || {
                    barrier.wait();
                    one(client, &tenant.pattern, from, until)
                })
            })
            .collect();
        let joined = threads.into_iter().enumerate().map(|(number, thread)| {
            let found = thread.join().map_err(|_| anyhow!("a tenant's thread panicked"))?;
            found.with_context(|| format!("tenant {number}"))
        });
        joined.collect()
    })
}

fn one(mut client: Client, pattern: &Pattern, from: u64, until: u64) -> Result<Found> {
    let clock = Clock::start();
    let mut begun = vec![0; pattern.depth];
    let mut found = Found { operations: 0, latencies_ns: Vec::new() };
    client.run(pattern, |event| {
        let now = clock.ns();
        match event {
            Event::Start(slot) => {
                begun[slot] = now;
                now < until
            }
            Event::End(slot) => {
                found.operations += u64::from((from..until).contains(&now));
                if begun[slot] >= from {
                    found.latencies_ns.push(now - begun[slot]);
                }
                true
            }
        }
    })?;
    client.leave()?;
    found.latencies_ns.sort_unstable();
    Ok(found)
}
