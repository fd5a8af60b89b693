use proptest::prelude::*;

use super::*;

const SECOND: u64 = 1_000_000_000;
const RULES: Rules =
    Rules { hold_ns: 10 * SECOND, errors_hold_ns: 60 * SECOND, notify_ns: 60 * SECOND };

fn at(second: u64) -> Moment {
    let unix_ms = 1_000_000 + i64::try_from(second).unwrap() * 1000;
    Moment { ns: second * SECOND, unix_ms }
}

fn subject() -> Subject {
    Subject { pool: "p".to_owned(), volume: "v".to_owned() }
}

fn gone() -> Finding {
    Finding::new(Code::DeviceGone, Severity::Failure, "gone").of_device("/dev/x")
}

fn errors() -> Finding {
    Finding::new(Code::IoErrors, Severity::Failure, "errors")
}

fn low() -> Finding {
    Finding::new(Code::SpaceLow, Severity::Warning, "low")
}

fn full() -> Finding {
    Finding::new(Code::MetadataLow, Severity::Warning, "little")
}

/// Looks once, and returns the notices: the codes that began, and the number of recoveries.
fn look(ledger: &mut Ledger, second: u64, found: Vec<Finding>) -> (Vec<Code>, usize) {
    let mut notices = Vec::new();
    ledger.look(at(second), &subject(), found, &mut notices);
    counted(&notices)
}

fn counted(notices: &[Notice]) -> (Vec<Code>, usize) {
    let began = notices.iter().filter_map(|one| match one {
        Notice::Abnormal(_, finding) => Some(finding.code),
        Notice::Recovered(..) => None,
    });
    let began: Vec<Code> = began.collect();
    let recovered = notices.len() - began.len();
    (began, recovered)
}

/// Row: H27.
#[test]
fn a_cause_begins_once_and_ends_once_after_its_hold_time() {
    let mut ledger = Ledger::new(RULES);
    assert_eq!(look(&mut ledger, 0, vec![]), (vec![], 0));
    assert_eq!(look(&mut ledger, 5, vec![gone()]), (vec![Code::DeviceGone], 0));
    assert_eq!(look(&mut ledger, 10, vec![gone()]), (vec![], 0));
    // Not found any more, and held.
    assert_eq!(look(&mut ledger, 15, vec![]), (vec![], 0));
    assert_eq!(ledger.state(&subject()).unwrap().severity(), Some(Severity::Failure));
    assert_eq!(look(&mut ledger, 20, vec![]), (vec![], 1));
    let state = ledger.state(&subject()).unwrap();
    assert_eq!((state.severity(), state.last_transition), (None, at(20).unix_ms));
    assert_eq!(look(&mut ledger, 25, vec![]), (vec![], 0));
}

/// Row: H27.
#[test]
fn a_cause_that_comes_back_within_the_hold_time_goes_on() {
    let mut ledger = Ledger::new(RULES);
    look(&mut ledger, 0, vec![gone()]);
    for second in (5..200).step_by(5) {
        let found = if second % 10 == 0 { vec![gone()] } else { vec![] };
        assert_eq!(look(&mut ledger, second, found), (vec![], 0), "{second}");
    }
    let state = ledger.state(&subject()).unwrap();
    assert_eq!(state.causes()[0].first_seen, at(0).unix_ms);
    assert_eq!(state.causes()[0].last_probe, at(195).unix_ms);
}

/// Row: H45.
#[test]
fn several_causes_are_reported_the_worst_first_and_recover_together() {
    let mut ledger = Ledger::new(RULES);
    let (began, _) = look(&mut ledger, 0, vec![low(), gone()]);
    assert_eq!(began.len(), 2);
    let codes = |ledger: &Ledger| {
        let state = ledger.state(&subject()).unwrap();
        state.causes().iter().map(|one| one.finding.code).collect::<Vec<_>>()
    };
    assert_eq!(codes(&ledger), [Code::DeviceGone, Code::SpaceLow]);
    assert_eq!(look(&mut ledger, 30, vec![low()]), (vec![], 0));
    assert_eq!(codes(&ledger), [Code::SpaceLow]);
    let mut notices = Vec::new();
    ledger.look(at(60), &subject(), vec![], &mut notices);
    let episode = Episode { since: at(0).unix_ms, codes: vec![Code::SpaceLow, Code::DeviceGone] };
    assert_eq!(notices, [Notice::Recovered(subject(), episode)]);
}

/// Row: H40.
#[test]
fn a_severity_that_changes_is_a_transition_and_is_reported_when_it_is_worse() {
    let mut ledger = Ledger::new(RULES);
    look(&mut ledger, 0, vec![full()]);
    let worse = Finding { severity: Severity::Failure, ..full() };
    assert_eq!(look(&mut ledger, 5, vec![worse]), (vec![Code::MetadataLow], 0));
    let cause = ledger.state(&subject()).unwrap().causes()[0].clone();
    assert_eq!((cause.first_seen, cause.last_transition), (at(0).unix_ms, at(5).unix_ms));
    assert_eq!(look(&mut ledger, 10, vec![full()]), (vec![], 0));
    let cause = ledger.state(&subject()).unwrap().causes()[0].clone();
    assert_eq!(cause.last_transition, at(10).unix_ms);
}

/// Row: H7.
#[test]
fn errors_end_by_time_or_when_they_are_acknowledged() {
    let mut ledger = Ledger::new(RULES);
    look(&mut ledger, 0, vec![errors()]);
    assert_eq!(look(&mut ledger, 55, vec![]), (vec![], 0), "a minute is not over");
    assert_eq!(look(&mut ledger, 60, vec![]), (vec![], 1));
    look(&mut ledger, 65, vec![errors(), gone()]);
    let mut notices = Vec::new();
    assert!(ledger.acknowledge(at(66), &subject(), &mut notices));
    assert!(!ledger.acknowledge(at(66), &subject(), &mut notices), "there are none left");
    let left = ledger.state(&subject()).unwrap().causes();
    assert_eq!(left.iter().map(|one| one.finding.code).collect::<Vec<_>>(), [Code::DeviceGone]);
    assert!(notices.is_empty(), "another cause is still there");
    assert_eq!(look(&mut ledger, 90, vec![]), (vec![], 1));
}

/// Row: H28.
#[test]
fn a_cause_that_begins_again_and_again_is_reported_seldom() {
    let mut ledger = Ledger::new(RULES);
    let (mut begun, mut recovered) = (0, 0);
    for second in (0..1200).step_by(5) {
        // Each time longer away than the hold time.
        let found = if second % 20 == 0 { vec![gone()] } else { vec![] };
        let (codes, over) = look(&mut ledger, second, found);
        begun += codes.len();
        recovered += over;
    }
    assert_eq!(begun, recovered);
    // 60 episodes in 20 minutes.
    assert!((20..=23).contains(&begun), "{begun}");
}

#[test]
fn a_volume_that_is_gone_is_forgotten_and_reported_no_more() {
    let mut ledger = Ledger::new(RULES);
    look(&mut ledger, 0, vec![gone()]);
    ledger.retain(|subject| subject.volume.is_empty());
    assert_eq!(ledger.state(&subject()), None);
    assert_eq!(look(&mut ledger, 60, vec![]), (vec![], 0));
}

#[test]
fn the_causes_of_one_are_bounded() {
    let mut ledger = Ledger::new(RULES);
    let many = |from: usize| {
        let device = |n: usize| low().of_device(format!("/dev/{}", from + n));
        (0..100).map(device).chain([gone()]).collect::<Vec<_>>()
    };
    look(&mut ledger, 0, many(0));
    look(&mut ledger, 1, many(1000));
    let state = ledger.state(&subject()).unwrap();
    assert_eq!(state.causes().len(), MAX_CAUSES);
    assert_eq!(state.severity(), Some(Severity::Failure), "the worst is among them");
}

/// The findings of a look: any of four causes.
fn findings(bits: u8) -> Vec<Finding> {
    let all = [gone(), errors(), low(), full()];
    let wanted = |at: &usize| bits & (1 << at) != 0;
    (0..all.len()).filter(wanted).map(|at| all[at].clone()).collect()
}

proptest! {
    /// Row: H27.
    #[test]
    fn every_reported_episode_ends_exactly_once(
        looks in proptest::collection::vec((1..40_u64, 0..16_u8), 1..200),
    ) {
        let mut ledger = Ledger::new(RULES);
        let (mut second, mut is_open) = (0, false);
        for (pause, bits) in looks {
            second += pause;
            let mut notices = Vec::new();
            let found = findings(bits);
            ledger.look(at(second), &subject(), found.clone(), &mut notices);
            for notice in &notices {
                match notice {
                    Notice::Abnormal(..) => is_open = true,
                    Notice::Recovered(..) => {
                        prop_assert!(is_open, "it recovers from nothing");
                        is_open = false;
                    }
                }
            }
            let state = ledger.state(&subject()).unwrap();
            // What is there now is shown, and nothing is wrong once it has recovered.
            prop_assert!(state.causes().len() >= found.len());
            let recovered = notices.iter().any(|one| matches!(one, Notice::Recovered(..)));
            prop_assert!(!recovered || state.severity().is_none());
            prop_assert!(state.causes().iter().all(|one| one.first_seen <= one.last_probe));
        }
        let mut notices = Vec::new();
        ledger.look(at(second + 1000), &subject(), vec![], &mut notices);
        prop_assert_eq!(counted(&notices), (vec![], usize::from(is_open)));
        prop_assert_eq!(ledger.state(&subject()).unwrap().severity(), None);
    }

    /// Row: H28.
    #[test]
    fn no_input_makes_more_events_than_the_limit(
        looks in proptest::collection::vec((0..30_u64, 0..16_u8), 1..300),
    ) {
        let mut ledger = Ledger::new(RULES);
        let (mut second, mut begun) = (0, BTreeMap::<Code, u64>::new());
        for (pause, bits) in looks {
            second += pause;
            let (began, _) = look(&mut ledger, second, findings(bits));
            for code in began {
                *begun.entry(code).or_default() += 1;
            }
        }
        let most = u64::from(BURST) + second * SECOND / RULES.notify_ns;
        prop_assert!(begun.values().all(|&times| times <= most), "{begun:?} in {second} s");
    }
}
