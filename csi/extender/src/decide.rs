//! Which nodes a pod may go to, and which of them are better.

use std::collections::BTreeMap;

use blockd_csi_base::bytes::Bytes;

use super::demand::Demand;
use super::score::{self, Mode, Rule};

/// The known figures of a node.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Figures {
    /// Bytes that can still be allocated there, by class.
    pub capacities: BTreeMap<String, Bytes>,
    /// Why there is no more than that, if something failed.
    pub problem: Option<String>,
}

/// Whether a pod with this demand fits on a node: equal is enough.
///
/// # Errors
/// The reason, which Kubernetes shows for a pending pod.
pub fn predicate(demand: &Demand, node: &Figures) -> Result<(), String> {
    for (class, wanted) in demand {
        let Some(free) = node.capacities.get(class) else {
            let why = node.problem.as_deref().unwrap_or("the node reports no such class");
            return Err(format!("no capacity known of class {class}: {why}"));
        };
        if free.wide() < *wanted {
            return Err(format!("class {class}: {wanted} bytes requested, {free} bytes free"));
        }
    }
    Ok(())
}

/// Returns each node's score for a pod with this demand, from 0 to 10, in the order of the nodes. A
/// node's score is the lowest over the requested classes; for a pod without demand all scores are
/// equal.
#[must_use]
pub fn prioritize(demand: &Demand, nodes: &[Figures], rule: &Rule) -> Vec<i64> {
    let capacity =
        |node: &Figures, class: &str| node.capacities.get(class).copied().unwrap_or_default();
    let most = |class: &str, wanted: u128| {
        let left = nodes.iter().map(|node| capacity(node, class).wide().saturating_sub(wanted));
        left.max().unwrap_or_default()
    };
    let classes: Vec<(&str, u128, u128)> =
        demand.iter().map(|(class, wanted)| (&**class, *wanted, most(class, *wanted))).collect();
    let score = |node: &Figures| {
        let scores = classes.iter().map(|&(class, wanted, most)| {
            let capacity = capacity(node, class);
            match rule.mode {
                Mode::Bytes => score::bytes(capacity, wanted, most),
                Mode::Legacy => score::legacy(capacity, rule.divisor(class)),
                Mode::LegacyProposal => score::legacy_proposal(capacity, rule.divisor(class)),
            }
        });
        scores.min().unwrap_or_default()
    };
    nodes.iter().map(score).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{prop_assert, prop_assert_eq, proptest};

    use super::super::score::Divisor;
    use super::*;

    fn demand(pairs: &[(&str, u128)]) -> Demand {
        pairs.iter().map(|(class, bytes)| ((*class).to_owned(), *bytes)).collect()
    }

    fn node(pairs: &[(&str, i64)]) -> Figures {
        let pair = |&(class, bytes): &(&str, i64)| (class.to_owned(), Bytes::new(bytes).unwrap());
        Figures { capacities: pairs.iter().map(pair).collect(), problem: None }
    }

    fn rule(mode: Mode) -> Rule {
        Rule { mode, default: Divisor::ONE, divisors: BTreeMap::new() }
    }

    /// Row: T27.
    #[test]
    fn equal_is_enough_and_a_byte_less_is_not() {
        let wanted = demand(&[("thin", 524_288_000)]);
        assert_eq!(predicate(&wanted, &node(&[("thin", 524_288_000)])), Ok(()));
        assert_eq!(
            predicate(&wanted, &node(&[("thin", 524_287_999)])).unwrap_err(),
            "class thin: 524288000 bytes requested, 524287999 bytes free"
        );
    }

    /// Row: T27.
    #[test]
    fn each_class_has_to_have_room() {
        let wanted = demand(&[("thick", 10), ("thin", 10)]);
        assert_eq!(predicate(&wanted, &node(&[("thick", 10), ("thin", 10)])), Ok(()));
        assert!(predicate(&wanted, &node(&[("thick", 9), ("thin", 100)])).is_err());
        assert!(predicate(&wanted, &node(&[("thick", 100), ("thin", 9)])).is_err());
        assert_eq!(predicate(&demand(&[]), &node(&[])), Ok(()));
    }

    /// Row: T27.
    #[test]
    fn a_node_without_figures_is_refused_with_the_reason() {
        let wanted = demand(&[("thin", 1)]);
        assert_eq!(
            predicate(&wanted, &node(&[("thick", 100)])).unwrap_err(),
            "no capacity known of class thin: the node reports no such class"
        );
        let away = Figures { problem: Some("no answer".to_owned()), ..Figures::default() };
        assert_eq!(
            predicate(&wanted, &away).unwrap_err(),
            "no capacity known of class thin: no answer"
        );
    }

    /// Row: T30.
    #[test]
    fn bytes_are_the_default_and_prefer_the_most_remaining_space() {
        let nodes = [node(&[("a", 600)]), node(&[("a", 1100)]), node(&[("a", 99)]), node(&[])];
        let wanted = demand(&[("a", 100)]);
        assert_eq!(prioritize(&wanted, &nodes, &rule(Mode::Bytes)), [5, 10, 0, 0]);
        // Below a gibibyte the older rule does not distinguish capacities.
        assert_eq!(prioritize(&wanted, &nodes, &rule(Mode::Legacy)), [1, 1, 1, 0]);
        assert_eq!(prioritize(&demand(&[]), &nodes, &rule(Mode::Bytes)), [0, 0, 0, 0]);
    }

    /// Row: T28.
    #[test]
    fn the_score_of_a_node_is_that_of_its_worst_class() {
        const GIB: i64 = 1 << 30;
        let nodes = [node(&[("a", 16 * GIB), ("b", 4 * GIB)])];
        let wanted = demand(&[("a", 1), ("b", 1)]);
        for mode in [Mode::Legacy, Mode::LegacyProposal] {
            assert_eq!(prioritize(&wanted, &nodes, &rule(mode)), [2]);
            let tenth = Divisor::parse("divisor", "16").unwrap();
            let rule = Rule { divisors: [("a".to_owned(), tenth)].into(), ..rule(mode) };
            let expected = if mode == Mode::Legacy { 1 } else { 0 };
            assert_eq!(prioritize(&wanted, &nodes, &rule), [expected]);
        }
    }

    proptest! {
        /// Row: T27.
        #[test]
        fn a_node_passes_exactly_if_all_fits(
            wanted in proptest::collection::btree_map("[a-c]", 0..1000_u128, 0..4),
            free in proptest::collection::btree_map("[a-c]", 0..1000_i64, 0..4),
        ) {
            let pairs: Vec<(&str, i64)> = free.iter().map(|(k, v)| (k.as_str(), *v)).collect();
            let fits = wanted.iter().all(|(class, bytes)| {
                free.get(class).is_some_and(|free| u128::from(free.unsigned_abs()) >= *bytes)
            });
            prop_assert_eq!(predicate(&wanted, &node(&pairs)).is_ok(), fits);
        }

        /// Row: T30.
        #[test]
        fn more_room_is_never_worth_less(
            wanted in 0..=i64::MAX,
            free in proptest::collection::vec(0..=i64::MAX, 1..10),
        ) {
            let nodes: Vec<Figures> = free.iter().map(|free| node(&[("a", *free)])).collect();
            let wanted = demand(&[("a", u128::from(wanted.unsigned_abs()))]);
            for mode in [Mode::Bytes, Mode::Legacy] {
                let scores = prioritize(&wanted, &nodes, &rule(mode));
                for (one, score) in free.iter().zip(&scores) {
                    for (other, beside) in free.iter().zip(&scores) {
                        prop_assert!(one > other || score <= beside);
                    }
                }
                let fits = nodes.iter().map(|node| predicate(&wanted, node).is_ok());
                let worth = scores.iter().map(|score| *score > 0);
                if mode == Mode::Bytes {
                    let none = |free: &i64| *free == 0;
                    let expected: Vec<bool> =
                        fits.zip(&free).map(|(fits, free)| fits && !none(free)).collect();
                    prop_assert_eq!(worth.collect::<Vec<bool>>(), expected);
                }
            }
        }
    }
}
