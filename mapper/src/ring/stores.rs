//! Stands for the death of the process between two stores to a ring.

use std::cell::Cell;

thread_local! {
    static LEFT: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Limits this thread to `stores` stores to rings; later ones are skipped. `None` removes the
/// limit. Returns the stores that were left.
pub fn stop_after(stores: Option<u64>) -> Option<u64> {
    LEFT.replace(stores)
}

pub(crate) fn allowed() -> bool {
    LEFT.get().is_none_or(|left| {
        LEFT.set(Some(left.saturating_sub(1)));
        left > 0
    })
}
