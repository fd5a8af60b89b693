//! The cases, a file for each part of the specification.

mod capacity;
mod changes;
mod clone;
mod create;
mod delete;
mod ephemeral;
mod expand;
mod group;
mod health;
mod identity;
mod input;
mod list;
mod modes;
mod modify;
mod node;
mod paths;
mod pmem;
mod publish;
mod sizes;
mod snapshot;
mod source;
mod stage;
mod topology;
mod use_of;
mod validate;

use super::case::Case;

/// Every case there is.
pub(super) fn all() -> impl Iterator<Item = &'static Case> {
    let files: [&'static [Case]; 25] = [
        identity::CASES,
        create::CASES,
        sizes::CASES,
        topology::CASES,
        delete::CASES,
        validate::CASES,
        list::CASES,
        capacity::CASES,
        snapshot::CASES,
        source::CASES,
        group::CASES,
        changes::CASES,
        clone::CASES,
        expand::CASES,
        modify::CASES,
        input::CASES,
        health::CASES,
        node::CASES,
        stage::CASES,
        publish::CASES,
        modes::CASES,
        use_of::CASES,
        paths::CASES,
        pmem::CASES,
        ephemeral::CASES,
    ];
    files.into_iter().flatten()
}
