//! From a failing history to a short one.

use super::mutation::Mutation;
use super::state::{Config, World};
use super::step::Step;

/// Runs steps in order; those that are not possible are passed over.
pub fn replay(cfg: Config, mutation: Mutation, steps: &[Step]) -> World {
    let mut world = World::new(cfg, mutation);
    for step in steps {
        world.apply(*step);
        if world.fault.is_some() || world.exhausted {
            break;
        }
    }
    world
}

/// Leaves out steps as long as a violation remains; returns the reduced history and its violation.
pub fn shrink<S: Clone, F>(steps: &[S], replay: impl Fn(&[S]) -> Option<F>) -> (Vec<S>, Option<F>) {
    let mut kept = steps.to_vec();
    let mut fault = replay(&kept);
    let mut width = kept.len() / 2;
    while width > 0 && fault.is_some() {
        let (mut at, mut removed) = (0, false);
        while at + width <= kept.len() {
            let mut fewer = kept.clone();
            fewer.drain(at..at + width);
            let found = replay(&fewer);
            if found.is_some() {
                (kept, fault, removed) = (fewer, found, true);
            } else {
                at += 1;
            }
        }
        if !removed {
            width /= 2;
        }
    }
    (kept, fault)
}
