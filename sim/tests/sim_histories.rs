//! Short forms of what `sim` and `crash` run for longer: seeded histories of the real mapper, the
//! same history twice, and every crash of short traces.

use blockd_sim::sim::enumerate::{Counts, Depth, trace};
use blockd_sim::sim::profile::Aim;
use blockd_sim::sim::runner::{Limits, history, run, seed_of};

#[test]
fn histories_break_no_promise() {
    let limits =
        Limits { seconds: 10.0, histories: 60, threads: 2, stop_at_first: true, by_chance: false };
    let total = run(11, Aim::Any, limits);
    assert!(total.checks > 0, "the oracle compared nothing");
    assert!(total.marks.crashes() > 0);
    assert!(total.violations.is_empty(), "{:?}", total.violations);
}

#[test]
fn a_seed_is_one_history() {
    for number in 0..4 {
        let seed = seed_of(5, number);
        let (first, second) = (history(seed, Aim::Any, true), history(seed, Aim::Any, true));
        assert!(!first.trace.is_empty());
        assert_eq!(first.trace, second.trace, "history {seed}");
    }
}

#[test]
fn every_crash_of_a_short_trace_is_recovered_from() {
    let mut counts = Counts::default();
    for number in 0..2 {
        let depth = Depth { subsets: 1, nested_every: 8 };
        trace(seed_of(3, number), depth, &mut counts).unwrap();
    }
    assert!(counts.crash_points > 0 && counts.nested > 0 && counts.checks > 0, "{counts:?}");
}
