//! Counted errors that are not reported yet.

/// The state of some counters that only grow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tally<const N: usize> {
    /// As they were when an episode began, or was acknowledged.
    base: [u64; N],
    /// As they were at the last look.
    last: [u64; N],
}

impl<const N: usize> Default for Tally<N> {
    fn default() -> Self {
        Self { base: [0; N], last: [0; N] }
    }
}

impl<const N: usize> Tally<N> {
    /// Takes the present counts. Returns the counts of this episode, if they grew since the last
    /// look. Counts that are reported already, or held, belong to the same episode.
    pub fn look(&mut self, now: [u64; N], goes_on: bool) -> Option<[u64; N]> {
        // Counters that started again have counted all of theirs since.
        if (0..N).any(|at| now[at] < self.last[at]) {
            *self = Self::default();
        }
        if now == self.last {
            return None;
        }
        if !goes_on {
            self.base = self.last;
        }
        self.last = now;
        Some(std::array::from_fn(|at| now[at] - self.base[at]))
    }

    /// Forgets the counts up to the last look, which belong to another device or volume.
    pub const fn forget(&mut self) {
        self.base = self.last;
    }

    /// All up to now is known.
    pub const fn acknowledge(&mut self, now: [u64; N]) {
        self.base = now;
        self.last = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Row: H7.
    #[test]
    fn errors_are_counted_from_the_beginning_of_an_episode_or_the_acknowledgement() {
        let mut tally = Tally::default();
        assert_eq!(tally.look([0, 0], false), None);
        assert_eq!(tally.look([2, 1], false), Some([2, 1]), "also those before the first look");
        assert_eq!(tally.look([2, 1], true), None);
        assert_eq!(tally.look([5, 1], true), Some([5, 1]));
        // The episode is over: the next begins with what is new.
        assert_eq!(tally.look([6, 1], false), Some([1, 0]));
        tally.acknowledge([8, 1]);
        assert_eq!(tally.look([8, 1], false), None);
        assert_eq!(tally.look([8, 4], false), Some([0, 3]));
        assert_eq!(tally.look([1, 0], false), Some([1, 0]), "counted anew");
    }
}
