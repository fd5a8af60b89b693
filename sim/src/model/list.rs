//! A list of fixed capacity, so that a whole model state is one flat value.

/// Up to `N` items stored in place; a history allocates nothing.
#[derive(Clone, Copy, Debug)]
pub struct List<T: Copy, const N: usize> {
    len: usize,
    items: [T; N],
}

impl<T: Copy, const N: usize> List<T, N> {
    /// An empty list; `blank` only fills the unused places.
    pub fn new(blank: T) -> Self {
        Self { len: 0, items: [blank; N] }
    }

    /// How many items are stored.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if nothing is stored.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// True if `more` items still fit.
    pub fn fits(&self, more: usize) -> bool {
        self.len + more <= N
    }

    /// Forgets every item.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Appends; callers check `fits` first, and running over is a bug of the model.
    pub fn push(&mut self, item: T) {
        assert!(self.len < N, "model list is full: the step must check its guard first");
        self.items[self.len] = item;
        self.len += 1;
    }

    /// The stored items.
    pub fn all(&self) -> &[T] {
        &self.items[..self.len]
    }

    /// The stored items, to change in place.
    pub fn all_mut(&mut self) -> &mut [T] {
        &mut self.items[..self.len]
    }

    /// Takes out the item at `at`; the order of the others stays.
    pub fn remove(&mut self, at: usize) -> T {
        let item = self.items[at];
        self.items.copy_within(at + 1..self.len, at);
        self.len -= 1;
        item
    }

    /// Keeps only items for which `keep` holds, in order.
    pub fn retain(&mut self, mut keep: impl FnMut(&T) -> bool) {
        let mut kept = 0;
        for at in 0..self.len {
            if keep(&self.items[at]) {
                self.items[kept] = self.items[at];
                kept += 1;
            }
        }
        self.len = kept;
    }
}
