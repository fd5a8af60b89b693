//! The turns of devices when a volume is spread over all of them.

/// Parts that free space is divided into. Shares and not extents are added up, so that a turn
/// weighs the same however much is free by then.
const PARTS: u64 = 1 << 20;

/// A weighted round robin of devices, smoothed, so that the runs of a device that has more free
/// space lie apart. Each volume has its own: of two volumes that are written together, a
/// common one could give the one device to the one and the other to the other.
#[derive(Debug, Default)]
pub(crate) struct Spread {
    /// The device of the last stripe.
    device: Option<usize>,
    /// Extents that the stripe still lacks.
    left: u64,
    /// By device, the shares that it was passed over with.
    credits: Vec<i64>,
}

impl Spread {
    /// The device that the next extents come from, and at most how many. `free` has the free
    /// extents of each device. `None` where there are none.
    pub(crate) fn next(
        &mut self,
        stripe: u64,
        free: impl Iterator<Item = u64> + Clone,
    ) -> Option<(usize, u64)> {
        let has_some = |device: &usize| free.clone().nth(*device).is_some_and(|free| free > 0);
        let present = self.device.filter(|_| self.left > 0).filter(has_some);
        let Some(device) = present else {
            self.device = Some(self.turn(free)?);
            self.left = stripe;
            return Some((self.device?, stripe));
        };
        Some((device, self.left))
    }

    /// Notes extents that were taken from the device of the present stripe.
    pub(crate) fn took(&mut self, count: u64) {
        self.left = self.left.saturating_sub(count);
    }

    fn turn(&mut self, free: impl Iterator<Item = u64> + Clone) -> Option<usize> {
        let total: u64 = free.clone().sum();
        if total == 0 {
            return None;
        }
        let mut shares = 0;
        // Not the same one twice, unless it is ahead of the others: it has more than half.
        let (mut next, mut other): (Option<usize>, Option<usize>) = (None, None);
        for (device, free) in free.enumerate() {
            if self.credits.len() == device {
                self.credits.push(0);
            }
            if free == 0 {
                self.credits[device] = 0;
                continue;
            }
            let share = u128::from(free) * u128::from(PARTS) / u128::from(total);
            let share = i64::try_from(share).unwrap_or(0).max(1);
            shares += share;
            self.credits[device] += share;
            let is_best = |best: usize| self.credits[device] > self.credits[best];
            if next.is_none_or(is_best) {
                next = Some(device);
            }
            let is_due = self.device != Some(device) && self.credits[device] > 0;
            if is_due && other.is_none_or(is_best) {
                other = Some(device);
            }
        }
        let next = other.or(next)?;
        self.credits[next] -= shares;
        Some(next)
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    /// The devices of this many stripes.
    fn turns(spread: &mut Spread, free: &mut [u64], stripe: u64, count: usize) -> Vec<usize> {
        let mut turn = || {
            let (device, most) = spread.next(stripe, free.iter().copied())?;
            let taken = most.min(free[device]);
            free[device] -= taken;
            spread.took(taken);
            Some(device)
        };
        (0..count).map_while(|_| turn()).collect()
    }

    #[test]
    fn equal_devices_take_turns() {
        let mut free = [1000; 3];
        let turns = turns(&mut Spread::default(), &mut free, 4, 300);
        assert!(turns.chunks(3).all(|three| {
            let mut three = three.to_vec();
            three.sort_unstable();
            three == [0, 1, 2]
        }));
    }

    #[test]
    fn a_device_gets_its_share_of_what_is_free_and_no_two_stripes_in_a_row() {
        let mut free = [20_000, 30_000, 40_000];
        let turns = turns(&mut Spread::default(), &mut free, 4, 2250);
        assert!(turns.windows(2).all(|two| two[0] != two[1]));
        for (free, all) in free.into_iter().zip([20_000_u64, 30_000, 40_000]) {
            assert!((free * 100).abs_diff(all * 90) <= all, "{free} of {all} are left");
        }
    }

    #[test]
    fn a_device_with_most_of_the_free_space_gets_its_share_too() {
        let mut free = [9_000_000, 1_000_000];
        let turns = turns(&mut Spread::default(), &mut free, 1, 1000);
        let small = turns.iter().filter(|device| **device == 1).count();
        assert!((99..=101).contains(&small), "{small}");
    }

    #[test]
    fn a_stripe_goes_on_in_the_next_grant_and_elsewhere_when_its_device_is_full() {
        let mut spread = Spread::default();
        let (device, _) = spread.next(4, [8, 8].into_iter()).unwrap();
        spread.took(3);
        assert_eq!(spread.next(4, [8, 8].into_iter()), Some((device, 1)));
        let mut full = [8, 8];
        full[device] = 0;
        assert_eq!(spread.next(4, full.into_iter()), Some((1 - device, 4)));
        assert_eq!(spread.next(4, [0, 0].into_iter()), None);
    }
}
