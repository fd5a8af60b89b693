//! `blockd tune`: what marks and quantum should be, from what was written lately.

use std::time::Duration;

use blockd_api::v1::GetPoolRequest;
use serde::Serialize;

use super::args::duration;
use super::{Context, amount, shapes};
use crate::error::Error;
use crate::units::{self, exact};

/// Propose marks and quantum for a pool
///
/// From the speed at which the pool was filled lately, its peak of the last minutes, and the time
/// that has to be lived through until somebody has made it larger. Changes nothing: what is printed
/// goes into the configuration, which the daemon reads again on SIGHUP.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd tune --outage 2m")]
pub(crate) struct Tune {
    /// The pool [default: the daemon's default pool]
    #[arg(default_value = "", hide_default_value = true)]
    pub pool: String,

    /// How long it may take until there is more space, or somebody has come
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    pub outage: Duration,
}

/// What is proposed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
struct Proposal {
    pool: String,
    write_rate_bytes: u64,
    outage_seconds: u64,
    low: String,
    very_low: String,
    quantum_bytes: u64,
    /// What would be written in that time, at that speed.
    needed_bytes: u64,
    free_bytes: u64,
    enough: bool,
}

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
    }
}

impl Tune {
    pub(super) async fn run(self, context: &Context) -> Result<(), Error> {
        let request = GetPoolRequest { name: self.pool };
        let pool = shapes::pool(context.client().await?.get_pool(request).await?.pool)?;
        let volumes = pool.volume_count.saturating_sub(pool.snapshot_count);
        let proposal = propose(
            &pool.name,
            amount(pool.write_rate_bytes),
            amount(pool.free_bytes),
            pool.extent_size.into(),
            volumes.into(),
            self.outage.as_secs().max(1),
        );
        context.output.either(&proposal, || human(&proposal))
    }
}

fn human(proposal: &Proposal) -> String {
    let Proposal { outage_seconds, low, very_low, .. } = proposal;
    let size = units::human;
    let seen = match proposal.write_rate_bytes {
        0 => "nothing was written for the first time lately: ask again under load".to_owned(),
        rate => format!(
            "{}/s were written for the first time lately: {} in {outage_seconds} s",
            size(rate),
            size(proposal.needed_bytes)
        ),
    };
    let enough = if proposal.enough { "is enough" } else { "is NOT enough" };
    format!(
        "# Pool {}: {seen}.\n# {} are free, which {enough}.\n[pool.space]\nlow = \"{low}\"\n\
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
    fn without_load_the_defaults_are_proposed() {
        let proposal = propose("p", 0, 1 << 30, 256 << 10, 0, 5);
        assert_eq!((proposal.low.as_str(), proposal.very_low.as_str()), ("20s", "5s"));
        assert_eq!((proposal.quantum_bytes, proposal.enough), (16 << 20, true));
        assert!(human(&proposal).contains("nothing was written"), "{}", human(&proposal));
        let huge = propose("p", u64::MAX, 0, 1 << 20, 1, 3600);
        assert_eq!((huge.quantum_bytes, huge.enough), (MAX_QUANTUM, false));
    }
}
