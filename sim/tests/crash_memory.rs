//! Pools in persistent memory: whatever words a loss of power leaves of log, superblocks, map and
//! data, the pool opens and keeps all promises. A fence that is missing is noticed.

#![allow(clippy::unwrap_used, reason = "test code")]
#![forbid(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use blockd_sim::crash::memory::{Way, in_memory};
use blockd_sim::crash::script::{SCRIPTS, Script};
use blockd_sim::sim::enumerate::Counts;
use blockd_sim::sim::runner::clock;

/// Long traces take too long word by word.
fn scripts() -> impl Iterator<Item = &'static Script> {
    SCRIPTS.iter().filter(|script| script.steps.len() <= 6)
}

fn run(script: &Script, way: Way, counts: &mut Counts) -> Result<usize, String> {
    let until = clock() + Duration::from_secs(60);
    let ended = catch_unwind(AssertUnwindSafe(|| in_memory(script, way, 1, until, counts)));
    match ended {
        Ok(ended) => ended.map_err(|finding| finding.to_string()),
        Err(_) => Err(format!("{}: panicked", script.name)),
    }
}

/// Row: P24.
#[test]
fn units_are_whole_where_writes_go_through_lanes() {
    let mut counts = Counts::default();
    for script in scripts() {
        run(script, Way::Lanes, &mut counts).unwrap();
    }
    println!("{counts:?}");
    assert!(counts.recoveries > 100, "{counts:?}");
}

#[test]
fn a_pool_outlives_every_set_of_words() {
    let mut counts = Counts::default();
    for script in scripts() {
        run(script, Way::Plain, &mut counts).unwrap();
    }
    println!("{counts:?}");
    assert!(counts.recoveries > 100, "{counts:?}");
}

#[test]
fn a_missing_lane_or_fence_is_noticed() {
    let found = |way| {
        let mut counts = Counts::default();
        scripts().filter(|script| run(script, way, &mut counts).is_err()).count()
    };
    assert!(found(Way::PlainButWhole) > 0, "lanes are not needed");
    assert!(found(Way::WithoutFences) > 0, "fences are not needed");
    let first = scripts().next().unwrap();
    let fences = run(first, Way::Plain, &mut Counts::default()).unwrap();
    let noticed: Vec<bool> = (0..fences)
        .map(|number| run(first, Way::WithoutFence(number), &mut Counts::default()).is_err())
        .collect();
    // The one in the middle is behind data, whose place holds zeroes here, before and after: the
    // scripts of `crash_scripts`, where a place is used again, show that one.
    assert_eq!(noticed, [true, false, true], "{}", first.name);
}
