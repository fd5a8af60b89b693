//! The rules of the claim page: no history breaks them, and each one is needed.

use blockd_mapper::claim::ClaimMutation;
use blockd_sim::claim::{run, search};

/// With all rules.
const HISTORIES: u64 = 10_000;
/// Without one; the first that fails ends the search.
const MUTATED: u64 = 60_000;

#[test]
fn no_write_lands_after_another_open_owns_the_pool() {
    let found = search(1, HISTORIES, None);
    assert_eq!(found.first, None);
    assert!(found.met.is_complete(), "{:?}", found.met);
}

/// An owner at home begins while another host, whose watch is over, writes its claim. It may lose
/// the pool then, though no host is late: in this history it does.
#[test]
fn an_owner_at_home_may_lose_to_a_claim_under_way() {
    let (met, fault) = run(1_393_967_269_004_481_735, None);
    assert_eq!((met.lost, fault), (1, None), "{met:?}");
}

#[test]
fn each_rule_of_the_claim_is_needed() {
    for &rule in ClaimMutation::ALL {
        let found = search(1, MUTATED, Some(rule));
        assert!(found.first.is_some(), "without {rule:?} nothing was noticed");
    }
}
