//! The commit rules hold in the model, and the model notices when one of them is removed.

use std::time::Duration;

use blockd_sim::model::directed::Directed;
use blockd_sim::model::exhaustive::{SPACES, Space, enumerate};
use blockd_sim::model::generate::Commits;
use blockd_sim::model::mutation::Mutation;
use blockd_sim::model::runner::{Limits, run_random};
use blockd_sim::model::step::KINDS;

fn limits(histories: u64, violations: u64) -> Limits {
    Limits { time: Duration::from_secs(20), histories, violations, threads: 1 }
}

#[test]
fn random_histories_keep_every_promise() {
    let report = run_random(&Commits::new(Mutation::Nothing), 7, limits(60_000, 1));
    assert!(report.first.is_none(), "replay with seed {:?}", report.first);
    assert!(report.counters.checks > 100_000, "the oracle compared next to nothing");
    for (kind, n) in KINDS.iter().zip(report.counters.kinds) {
        assert!(n > 0, "{kind} never happened");
    }
}

#[test]
fn scripted_histories_keep_every_promise() {
    for directed in Directed::all() {
        let world = directed.run(Mutation::Nothing);
        assert!(world.fault.is_none(), "{}: {:?}", directed.story, world.fault);
        assert!(world.checks > 0 && !world.exhausted, "{}", directed.story);
    }
}

#[test]
fn scripted_histories_catch_their_mutations() {
    for directed in Directed::all() {
        for mutation in directed.catches {
            let fault = directed.run(*mutation).fault;
            assert!(fault.is_some(), "{mutation:?} not caught: {}", directed.story);
        }
    }
}

// Whatever has no script of its own must be frequent enough for a short random run.
#[test]
fn every_mutation_is_caught() {
    for mutation in Mutation::ALL {
        if Directed::of(*mutation).next().is_some() {
            continue;
        }
        let report = run_random(&Commits::new(*mutation), 1, limits(60_000, 1));
        assert!(report.violations > 0, "{} {mutation:?} not caught", mutation.rule());
    }
}

#[test]
fn short_histories_are_enumerated_without_violation() {
    for space in SPACES {
        let short = Space { depth: 4, ..*space };
        let found = enumerate(&short, Mutation::Nothing, Duration::from_secs(20));
        assert!(found.complete && found.histories > 50, "{}", space.name);
        assert_eq!(found.violations, 0, "{}: {:?}", space.name, found.first);
    }
}
