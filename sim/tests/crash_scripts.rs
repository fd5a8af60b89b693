//! The crash enumeration of traces written by hand: it finds nothing in the unmodified mapper, and
//! finds the fault when a rule is removed.

#![allow(clippy::unwrap_used, reason = "test code")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use blockd_mapper::mutation::{self, Mutation, Situation, times_met};
use blockd_sim::crash::{enumerate, script::SCRIPTS};
use blockd_sim::sim::enumerate::{Counts, Depth};
use blockd_sim::sim::runner::clock;

/// Rules that one request at a time and orderly devices suffice to show.
const CAUGHT: [Mutation; 12] = [
    Mutation::LogBeforeData,
    Mutation::AnswerBeforeLog,
    Mutation::ClearBitsRead,
    Mutation::BitsAtSubmission,
    Mutation::FuaWithoutCommit,
    Mutation::NoRecord,
    Mutation::TrimAtCapture,
    Mutation::NoDiscardRecord,
    Mutation::NoStructureRecord,
    Mutation::ReplayedIsDurable,
    Mutation::NextNotWritten,
    Mutation::CheckpointUnflushed,
];

/// All that a composite entry meets in its life.
const MET: [Situation; 9] = [
    Situation::Redirected,
    Situation::OverlayGrew,
    Situation::OverlayCopied,
    Situation::BaseDropped,
    Situation::FoldedDown,
    Situation::FoldedUp,
    Situation::BasesWritten,
    Situation::CompositeEnabled,
    Situation::CompositeDisabled,
];

/// All scripts take some seconds: this is for a script without an end, and for slow machines.
const LIMIT: Duration = Duration::from_secs(900);

fn run(nested_every: u64, counts: &mut Counts) -> Result<(), String> {
    let until = clock() + LIMIT;
    let depth = Depth { subsets: 4, nested_every };
    for script in SCRIPTS {
        let ended =
            catch_unwind(AssertUnwindSafe(|| enumerate(script, None, depth, 1, until, counts)));
        match ended {
            Ok(Ok(whole)) => assert!(whole, "{}: no end in sight", script.name),
            Ok(Err(finding)) => return Err(finding.to_string()),
            Err(_) => return Err(format!("{}: panicked", script.name)),
        }
    }
    Ok(())
}

/// One test, for mutations hold in the whole process.
#[test]
fn every_script_and_some_mutations() {
    let mut counts = Counts::default();
    run(100, &mut counts).unwrap();
    println!("{counts:?}");
    assert!(counts.crash_points > 1000 && counts.nested > 100 && counts.checks > 100_000);
    for situation in MET {
        assert!(times_met(situation) > 0, "not met: {}", situation.what());
    }
    for mutation in CAUGHT {
        mutation::set(Some(mutation));
        let found = run(16, &mut Counts::default());
        mutation::set(None);
        assert!(found.is_err(), "{mutation:?} was not noticed");
    }
}
