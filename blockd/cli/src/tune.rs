//! `blockd tune`: proposes marks and quantum from the recent fill rate, and remedies for volumes
//! that are held back.

use std::time::Duration;

use blockd_api::v1::{GetPoolRequest, StatsRequest, StatsResponse};
use blockd_media::error::Error;
use blockd_media::units::{self, exact};
use serde::Serialize;

use super::duration::duration;
use super::holds::{self, WHOLE};
use super::output::percent;
use super::{Context, amount, answers};

/// Propose marks and quantum for a pool
///
/// Uses the recent fill rate of the pool, its peak of the last minutes, and the time until an
/// operator has made the pool larger. Watches the pool for two seconds, and names volumes that are
/// held back meanwhile, with a remedy for each.
/// Changes nothing: what is printed goes into the configuration, which the daemon reads again on
/// SIGHUP.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd tune --outage 2m")]
pub(crate) struct Tune {
    /// The pool [default: the daemon's default pool]
    #[arg(default_value = "", hide_default_value = true)]
    pub pool: String,

    /// Longest time until the pool has been made larger or an operator has reacted
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    pub outage: Duration,
}

/// A proposed setting.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
struct Proposal {
    pool: String,
    write_rate_bytes: u64,
    outage_seconds: u64,
    low: String,
    very_low: String,
    quantum_bytes: u64,
    /// The bytes that would be written in that time, at that speed.
    needed_bytes: u64,
    free_bytes: u64,
    enough: bool,
    /// Volumes that are held back now.
    held: Vec<HeldVolume>,
}

/// A volume that is held back, and why.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
struct HeldVolume {
    volume: String,
    reason: &'static str,
    /// All connections and queues together: 1000000000 for each that was all the time.
    ns_per_second: u64,
    advice: String,
}

/// How long volumes are watched.
const WATCH: Duration = Duration::from_secs(2);
/// Shorter holds are not reported: a twentieth of one connection's time, in nanoseconds a second.
const LEAST_HOLD: u64 = WHOLE / 20;

/// A volume that is written alone gets through an outage with two grants.
const GRANTS: u64 = 2;
/// Larger grants would lie idle in most volumes.
const MAX_QUANTUM: u64 = 1 << 30;

fn propose(pool: &str, rate: u64, free: u64, extent: u64, volumes: u64, outage: u64) -> Proposal {
    let needed = rate.saturating_mul(outage);
    let each = needed / volumes.max(1) / GRANTS;
    let quantum = each.clamp(16 << 20, MAX_QUANTUM).next_multiple_of(extent.max(1));
    Proposal {
        pool: pool.to_owned(),
        write_rate_bytes: rate,
        outage_seconds: outage,
        // Asked for four times as early as it becomes slow, as the defaults do.
        low: format!("{}s", outage.max(5) * 4),
        very_low: format!("{}s", outage.max(5)),
        quantum_bytes: quantum,
        needed_bytes: needed,
        free_bytes: free,
        enough: free >= needed,
        held: Vec::new(),
    }
}

/// The advice for a volume that is held back for this reason.
fn advice(pool: &str, volume: &str, reason: &str) -> String {
    match reason {
        "limit" => format!(
            "raise its limits with blockd set {pool}/{volume} --iops N --bandwidth SIZE, or 0 for none"
        ),
        "space" => {
            format!("the pool is full: blockd pool grow {pool}, or delete or discard something")
        }
        "memory" => "raise buffer_size in [workers]".to_owned(),
        _ => {
            "others have their turns: raise count in [workers] while processors are idle, or move \
              it to another pool while they are not"
                .to_owned()
        }
    }
}

/// Volumes that were held back between two answers.
fn held_volumes(then: &StatsResponse, now: &StatsResponse) -> Vec<HeldVolume> {
    let interval_ns = now.time_ns.saturating_sub(then.time_ns);
    let mut list = Vec::new();
    for stats in &now.volumes {
        let before = then
            .volumes
            .iter()
            .find(|one| (&one.pool, &one.volume) == (&stats.pool, &stats.volume));
        for held in holds::between(Some(stats), before, interval_ns) {
            if held.ns_per_second >= LEAST_HOLD {
                list.push(HeldVolume {
                    volume: stats.volume.clone(),
                    reason: held.reason,
                    ns_per_second: held.ns_per_second,
                    advice: advice(&stats.pool, &stats.volume, held.reason),
                });
            }
        }
    }
    list.sort_by_key(|one| std::cmp::Reverse(one.ns_per_second));
    list
}

impl Tune {
    pub(super) async fn run(self, context: &Context) -> Result<(), Error> {
        let mut client = context.client().await?;
        let request = GetPoolRequest { name: self.pool };
        let pool = answers::pool(client.get_pool(request).await?.pool)?;
        let request = StatsRequest { pool: pool.name.clone(), volume: String::new() };
        let then = client.stats(request.clone()).await?;
        tokio::time::sleep(WATCH).await;
        let now = client.stats(request).await?;
        let volumes = pool.volume_count.saturating_sub(pool.snapshot_count);
        let mut proposal = propose(
            &pool.name,
            amount(pool.write_rate_bytes),
            amount(pool.free_bytes),
            pool.extent_size.into(),
            volumes.into(),
            self.outage.as_secs().max(1),
        );
        proposal.held = held_volumes(&then, &now);
        context.output.either(&proposal, || human(&proposal))
    }
}

fn human(proposal: &Proposal) -> String {
    let Proposal { outage_seconds, low, very_low, .. } = proposal;
    let size = units::human;
    let seen = match proposal.write_rate_bytes {
        0 => "no first writes were measured: run it again under load".to_owned(),
        rate => format!(
            "{}/s were written for the first time lately: {} in {outage_seconds} s",
            size(rate),
            size(proposal.needed_bytes)
        ),
    };
    let held = proposal.held.iter().map(|one| {
        let share = percent(one.ns_per_second, WHOLE);
        let HeldVolume { volume, reason, advice, .. } = one;
        format!("# Volume {volume} was held back {share} of the time ({reason}): {advice}.\n")
    });
    let held: String = held.collect();
    let enough = if proposal.enough { "is enough" } else { "is NOT enough" };
    format!(
        "# Pool {}: {seen}.\n# {} are free, which {enough}.\n{held}[pool.space]\nlow = \"{low}\"\n\
         very_low = \"{very_low}\"\nquantum = \"{}\"\n",
        proposal.pool,
        size(proposal.free_bytes),
        exact(proposal.quantum_bytes)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_is_lived_through_with_what_is_proposed() {
        let proposal = propose("p", 100 << 20, 10 << 30, 256 << 10, 4, 60);
        assert_eq!((proposal.low.as_str(), proposal.very_low.as_str()), ("240s", "60s"));
        // 6000 MiB in a minute, over four volumes, in two grants each.
        assert_eq!(proposal.quantum_bytes, 750 << 20);
        assert!(proposal.enough);
        assert!(!propose("p", 100 << 20, 1 << 30, 256 << 10, 4, 60).enough);
    }

    #[test]
    fn volumes_that_are_held_back_are_named_with_what_to_do() {
        let answer = |time_ns, ns: [u64; 4]| {
            let hold = |(at, ns): (usize, u64)| {
                let reason = holds::REASONS[at].0.into();
                blockd_api::v1::HoldStats { reason, count: 1, ns, now: 0 }
            };
            let volumes = vec![blockd_api::v1::VolumeStats {
                pool: "p".to_owned(),
                volume: "v".to_owned(),
                holds: ns.into_iter().enumerate().map(hold).collect(),
                ..Default::default()
            }];
            StatsResponse { time_ns, volumes, ..Default::default() }
        };
        let then = answer(WHOLE, [1, 2, 3, 4]);
        let now = answer(3 * WHOLE, [WHOLE / 5, 2 * WHOLE, WHOLE / 2, WHOLE / 20]);
        let mut proposal = propose("p", 0, 1 << 30, 256 << 10, 0, 5);
        proposal.held = held_volumes(&then, &now);
        let reasons: Vec<_> = proposal.held.iter().map(|one| one.reason).collect();
        assert_eq!(reasons, ["limit", "space", "turn"]);
        let text = human(&proposal);
        let line = "# Volume v was held back 99.9 % of the time (limit): raise its limits with \
                    blockd set p/v --iops N --bandwidth SIZE, or 0 for none.\n";
        assert!(text.contains(line), "{text}");
        assert!(text.contains("(space): the pool is full: blockd pool grow p"), "{text}");
        assert!(text.contains("(turn): others have their turns"), "{text}");
        let config = text.lines().find(|line| !line.starts_with('#'));
        assert_eq!(config, Some("[pool.space]"));
    }

    #[test]
    fn without_load_the_defaults_are_proposed() {
        let proposal = propose("p", 0, 1 << 30, 256 << 10, 0, 5);
        assert_eq!((proposal.low.as_str(), proposal.very_low.as_str()), ("20s", "5s"));
        assert_eq!((proposal.quantum_bytes, proposal.enough), (16 << 20, true));
        assert!(human(&proposal).contains("no first writes were measured"), "{}", human(&proposal));
        let huge = propose("p", u64::MAX, 0, 1 << 20, 1, 3600);
        assert_eq!((huge.quantum_bytes, huge.enough), (MAX_QUANTUM, false));
    }
}
