//! A writer in place against the end of a fold or a move, in every order of their accesses.

use loom::sync::Arc;

use crate::leaf::Leaf;
use crate::mapping::Mapping;
use crate::shared_counts::SharedCounts;
use crate::units::PhysicalExtent;

type Look = fn(&Leaf, &SharedCounts) -> Option<PhysicalExtent>;

const FROM: PhysicalExtent = PhysicalExtent(0);
const TO: PhysicalExtent = PhysicalExtent(1);

fn look(leaf: &Leaf, counts: &SharedCounts) -> Option<PhysicalExtent> {
    leaf.alone(0, 1, |physical| counts.known(physical))
}

fn look_once(leaf: &Leaf, counts: &SharedCounts) -> Option<PhysicalExtent> {
    leaf.load(0).physical.filter(|physical| counts.extra(*physical) == 0)
}

/// A writer that came after the copy had begun never writes to the copied extent.
fn never_finds_the_former_place(look: Look) {
    loom::model(move || {
        let pair = Arc::new((Leaf::new(), SharedCounts::default()));
        pair.0.replace(0, Mapping { physical: Some(FROM), valid: 1 });
        pair.1.add(FROM, 1);
        let fold = {
            let pair = Arc::clone(&pair);
            loom::thread::spawn(move || {
                pair.0.replace(0, Mapping { physical: Some(TO), valid: 1 });
                pair.1.sub(FROM);
            })
        };
        assert_ne!(look(&pair.0, &pair.1), Some(FROM), "a write that is never read");
        fold.join().unwrap();
        assert_eq!(look(&pair.0, &pair.1), Some(TO));
    });
}

#[test]
fn loom_alone_is_never_the_former_place() {
    never_finds_the_former_place(look);
}

#[test]
#[should_panic(expected = "a write that is never read")]
fn loom_alone_finds_a_missing_second_look() {
    never_finds_the_former_place(look_once);
}
