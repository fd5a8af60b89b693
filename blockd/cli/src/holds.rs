//! How long a volume was held back between two answers of the daemon.

use blockd_api::v1::{self, Hold};
use serde::Serialize;

/// The reasons, in the order that they are shown.
pub(crate) const REASONS: [(Hold, &str); 4] = [
    (Hold::Turn, "turn"),
    (Hold::Limit, "limit"),
    (Hold::Space, "space"),
    (Hold::Memory, "memory"),
];

/// The part of [`Held::ns_per_second`] of a connection that is held back all the time.
pub(crate) const WHOLE: u64 = 1_000_000_000;

/// How long connections and queues of a volume were held back for one reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Held {
    pub reason: &'static str,
    /// Nanoseconds a second, all connections and queues together: 1000000000 for each that was held
    /// back all the time.
    pub ns_per_second: u64,
    /// Connections and queues that are held back now.
    pub now: u64,
}

/// For each of [`REASONS`], from counters at both ends of the interval; 0 where there are none.
pub(crate) fn between(
    now: Option<&v1::VolumeStats>,
    then: Option<&v1::VolumeStats>,
    interval_ns: u64,
) -> Vec<Held> {
    let find = |stats: Option<&v1::VolumeStats>, reason: Hold| {
        let holds = stats.into_iter().flat_map(|stats| &stats.holds);
        let found = holds.copied().find(|one| one.reason() == reason);
        found.unwrap_or_default()
    };
    let held = |&(reason, name): &(Hold, &'static str)| {
        let (now, then) = (find(now, reason), find(then, reason));
        let ns = u128::from(now.ns.saturating_sub(then.ns)) * u128::from(WHOLE);
        let rate = ns.checked_div(u128::from(interval_ns)).unwrap_or(0);
        let ns_per_second = u64::try_from(rate).unwrap_or(u64::MAX);
        Held { reason: name, ns_per_second, now: now.now }
    };
    REASONS.iter().map(held).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holds_are_per_second_of_the_interval() {
        let stats = |ns| v1::VolumeStats {
            holds: vec![v1::HoldStats { reason: Hold::Limit.into(), count: 1, ns, now: 2 }],
            ..Default::default()
        };
        let (now, then) = (stats(3_500_000_000), stats(500_000_000));
        let held = between(Some(&now), Some(&then), 2 * WHOLE);
        let limit = Held { reason: "limit", ns_per_second: 1_500_000_000, now: 2 };
        assert_eq!(held[1], limit);
        assert_eq!(held[0], Held { reason: "turn", ns_per_second: 0, now: 0 });
        // Without an interval there is no rate; before a volume was first served it had no holds.
        assert_eq!(between(Some(&now), None, 0)[1].ns_per_second, 0);
        assert_eq!(between(Some(&now), None, WHOLE)[1].ns_per_second, 3_500_000_000);
        assert!(between(None, None, WHOLE).iter().all(|one| one.ns_per_second == 0));
    }
}
