//! Readers of composite entries against one writer, in every order of their accesses.

use std::fmt::Debug;

use loom::sync::Arc;

use super::*;
use crate::entry::Entry as Whole;

type Load = fn(&Pair) -> Whole;
type Replace = fn(&Pair, Whole);

/// A leaf and its under leaf.
struct Pair {
    leaf: Leaf,
    under: Leaf,
}

const fn at(physical: u64, valid: u64) -> Mapping {
    Mapping { physical: Some(PhysicalExtent(physical)), valid }
}

fn plain(physical: u64, valid: u64) -> Whole {
    Whole::from(at(physical, valid))
}

fn over(top: Mapping, base: Mapping) -> Whole {
    Whole::of(top, base)
}

fn load(pair: &Pair) -> Whole {
    pair.leaf.load_entry(0, || Some(&pair.under))
}

fn replace(pair: &Pair, new: Whole) {
    pair.leaf.replace_entry(0, new, Some(&pair.under));
}

fn load_base_first(pair: &Pair) -> Whole {
    loop {
        let entry = &pair.leaf.entries[0];
        let word = entry.word.load(Ordering::Acquire);
        let below = pair.under.load(0);
        let valid = entry.valid.load(Ordering::Acquire);
        let is_composite = word & KIND_MASK == COMPOSITE;
        let is_whole = !is_composite || below.physical.is_some();
        let same = entry.word.load(Ordering::Relaxed) == word;
        if word & KIND_MASK != BUSY && is_whole && same {
            let base = if is_composite { below } else { Mapping::UNMAPPED };
            return Whole::of(mapping(word, valid), base);
        }
        loom::thread::yield_now();
    }
}

fn load_without_second_look(pair: &Pair) -> Whole {
    let entry = &pair.leaf.entries[0];
    let word = entry.word.load(Ordering::Acquire);
    let valid = entry.valid.load(Ordering::Acquire);
    let base = if word & KIND_MASK == COMPOSITE { pair.under.load(0) } else { Mapping::UNMAPPED };
    Whole::of(mapping(word, valid), base)
}

fn replace_top_first(pair: &Pair, new: Whole) {
    let kind = if new.base().physical.is_some() { COMPOSITE } else { MAPPED };
    pair.leaf.put(0, new.top(), kind);
    if new.base() != pair.under.load(0) {
        pair.under.replace(0, new.base());
    }
}

/// The extent that a sub-block is read from.
fn place(entry: Whole, bit: u32) -> Option<PhysicalExtent> {
    let (top, base) = (entry.top(), entry.base());
    let first = [top, base].into_iter().find(|one| one.valid >> bit & 1 == 1);
    first.and_then(|one| one.physical)
}

/// A reader finds every sub-block where one of the states has it, and states in their order.
fn sees_only(states: fn() -> Vec<Whole>, replace: Replace, load: Load) {
    loom::model(move || {
        let states = states();
        let pair = Arc::new(Pair { leaf: Leaf::new(), under: Leaf::new() });
        pair.leaf.replace_entry(0, states[0], Some(&pair.under));
        let writer = {
            let (pair, states) = (Arc::clone(&pair), states.clone());
            loom::thread::spawn(move || states[1..].iter().for_each(|new| replace(&pair, *new)))
        };
        let first = load(&pair);
        for bit in 0..3 {
            let seen = place(first, bit);
            was(&states.iter().map(|state| place(*state, bit)).collect::<Vec<_>>(), seen);
        }
        writer.join().unwrap();
        assert_eq!(load(&pair), *states.last().unwrap());
    });
}

fn was<T: PartialEq + Debug>(states: &[T], seen: T) {
    assert!(states.contains(&seen), "{seen:?} never was");
}

/// A first write over a shared extent.
fn redirected() -> Vec<Whole> {
    vec![plain(1, 0b111), over(at(2, 0b1), at(1, 0b111))]
}

/// A discard of a sub-block that both extents have: the base must not show what it has there.
fn discarded() -> Vec<Whole> {
    vec![over(at(2, 0b11), at(1, 0b111)), over(at(2, 0b10), at(1, 0b110))]
}

/// The same where nothing is left that is read from the base.
fn discarded_with_the_base() -> Vec<Whole> {
    vec![over(at(2, 0b11), at(1, 0b101)), plain(2, 0b10)]
}

/// The overlay has it all, and its entry becomes one over another extent.
fn plain_and_redirected() -> Vec<Whole> {
    vec![over(at(2, 0b1), at(1, 0b11)), plain(2, 0b11), over(at(3, 0b10), at(2, 0b11))]
}

#[test]
fn loom_entry_redirect() {
    sees_only(redirected, replace, load);
}

#[test]
fn loom_entry_discard() {
    sees_only(discarded, replace, load);
}

#[test]
fn loom_entry_discard_with_the_base() {
    sees_only(discarded_with_the_base, replace, load);
}

#[test]
fn loom_entry_plain_and_redirected_again() {
    sees_only(plain_and_redirected, replace, load);
}

#[test]
#[should_panic(expected = "never was")]
fn loom_entry_finds_a_base_read_before_the_bits() {
    sees_only(discarded, replace, load_base_first);
}

#[test]
#[should_panic(expected = "never was")]
fn loom_entry_finds_a_missing_second_look() {
    sees_only(redirected, replace, load_without_second_look);
}

#[test]
#[should_panic(expected = "never was")]
fn loom_entry_finds_a_discard_of_the_overlay_first() {
    sees_only(discarded, replace_top_first, load);
}
