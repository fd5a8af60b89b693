//! In which steps sizes of namespaces go, and why.

use std::fmt;

use super::region::Region;

/// The kernel's own alignment of regions that do not say theirs: what 1, 2, 3, 4 and 6 ways of its
/// 16 MiB have in common.
const UNKNOWN_ALIGN: u64 = 96 << 20;

/// The default alignment of namespaces: a huge page.
pub const HUGE_PAGE: u64 = 2 << 20;

/// The smallest part of a module of an interleave set, by the older rule.
const COARSE: u64 = 1 << 30;

/// The rule of rounding.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Rule {
    /// The kernel's rule: the least common multiple of a region's alignment and whole pages on each
    /// module.
    #[default]
    Formula,
    /// 1 GiB for each module of the interleave set.
    Coarse,
}

/// A step: sizes are multiples of it, and it is the least.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Step {
    bytes: u64,
    rule: Rule,
    page: u64,
    ways: u64,
    region_align: Option<u64>,
}

impl Step {
    /// The step of a region whose namespaces are aligned to `page`; nothing where it is beyond all
    /// sizes.
    #[must_use]
    pub fn of(region: &Region, page: u64, rule: Rule) -> Option<Self> {
        Self::new(region.ways, region.align, page, rule)
    }

    /// The step of a region, from its parameters.
    #[must_use]
    pub fn new(ways: u64, region_align: Option<u64>, page: u64, rule: Rule) -> Option<Self> {
        let least = least_common(page.checked_mul(ways)?, region_align.unwrap_or(UNKNOWN_ALIGN))?;
        let bytes = match rule {
            Rule::Formula => least,
            // The kernel's rule applies to this one as well.
            Rule::Coarse => least_common(COARSE.checked_mul(ways)?, least)?,
        };
        Some(Self { bytes, rule, page, ways, region_align })
    }

    /// Bytes of it.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.bytes
    }

    /// The least multiple that is not smaller, and not 0.
    #[must_use]
    pub fn round_up(self, size: u64) -> Option<u64> {
        size.max(1).checked_next_multiple_of(self.bytes)
    }

    /// The largest multiple that is not larger.
    #[must_use]
    pub fn round_down(self, size: u64) -> u64 {
        size / self.bytes * self.bytes
    }
}

/// Why sizes are rounded so.
impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, rule, page, ways, region_align } = *self;
        write!(f, "multiples of {bytes} bytes: ")?;
        match rule {
            Rule::Formula => write!(f, "{ways} way(s) of {page} bytes")?,
            Rule::Coarse => write!(f, "{ways} way(s) of {COARSE} bytes")?,
        }
        match region_align {
            Some(align) => write!(f, " and the region's alignment of {align}"),
            None => write!(f, " and {UNKNOWN_ALIGN}, as the region does not say its alignment"),
        }
    }
}

fn least_common(a: u64, b: u64) -> Option<u64> {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    a.checked_div(x)?.checked_mul(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn bytes(ways: u64, align: Option<u64>, rule: Rule) -> u64 {
        Step::new(ways, align, HUGE_PAGE, rule).unwrap().bytes()
    }

    /// Row: P16.
    #[test]
    fn sizes_go_up_to_the_next_step() {
        let step = Step::new(1, Some(16 * MIB), HUGE_PAGE, Rule::Formula).unwrap();
        assert_eq!(step.round_up(0), Some(16 * MIB));
        assert_eq!(step.round_up(16 * MIB), Some(16 * MIB));
        assert_eq!(step.round_up(16 * MIB + 1), Some(32 * MIB));
        assert_eq!(step.round_up(u64::MAX), None);
        assert_eq!(step.round_down(31 * MIB), 16 * MIB);
        let why = "multiples of 16777216 bytes: 1 way(s) of 2097152 bytes and the region's \
                   alignment of 16777216";
        assert_eq!(step.to_string(), why);
    }

    /// Row: P17.
    #[test]
    fn interleaved_sets_multiply_the_step() {
        // By the kernel's needs: a region says 16 MiB, or 96 MiB of 6 ways.
        assert_eq!(bytes(1, Some(16 * MIB), Rule::Formula), 16 * MIB);
        assert_eq!(bytes(2, Some(16 * MIB), Rule::Formula), 16 * MIB);
        assert_eq!(bytes(6, Some(96 * MIB), Rule::Formula), 96 * MIB);
        assert_eq!(bytes(6, Some(16 * MIB), Rule::Formula), 48 * MIB);
        assert_eq!(bytes(2, None, Rule::Formula), 96 * MIB);
        // By the older rule: ways x 1 GiB, which is the least size as well.
        for ways in [1, 2, 6] {
            let align = Some(if ways == 6 { 96 * MIB } else { 16 * MIB });
            let step = Step::new(ways, align, HUGE_PAGE, Rule::Coarse).unwrap();
            assert_eq!(step.bytes(), ways << 30);
            assert_eq!(step.round_up(1), Some(ways << 30));
        }
    }

    #[test]
    fn pages_of_a_gigabyte_make_large_steps() {
        let step = Step::new(2, Some(16 * MIB), 1 << 30, Rule::Formula).unwrap();
        assert_eq!(step.bytes(), 2 << 30);
        assert!(Step::new(u64::MAX, None, HUGE_PAGE, Rule::Formula).is_none());
    }
}
