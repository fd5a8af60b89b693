//! Amounts of bytes: what `int64` of the interface holds, and never negative.

use std::fmt;

use crate::error::Invalid;

/// Bytes, from 0 to 2^63 - 1.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Bytes(i64);

impl Bytes {
    /// None.
    pub const ZERO: Self = Self(0);
    /// The most that `int64` holds.
    pub const MAX: Self = Self(i64::MAX);

    /// `None` for a negative value.
    #[must_use]
    pub const fn new(bytes: i64) -> Option<Self> {
        if bytes < 0 { None } else { Some(Self(bytes)) }
    }

    /// `None` beyond 2^63 - 1.
    #[must_use]
    pub fn from_u128(bytes: u128) -> Option<Self> {
        i64::try_from(bytes).ok().map(Self)
    }

    /// A constant of the program; a negative value becomes 0.
    #[must_use]
    pub const fn constant(bytes: i64) -> Self {
        if bytes < 0 { Self::ZERO } else { Self(bytes) }
    }

    /// Converts a field of a message.
    ///
    /// # Errors
    /// The value is negative.
    pub fn from_wire(field: &str, bytes: i64) -> Result<Self, Invalid> {
        Self::new(bytes).ok_or_else(|| Invalid::new(field, bytes, "from 0 to 2^63 - 1"))
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> i64 {
        self.0
    }

    /// The number, for arithmetic that must not overflow.
    #[must_use]
    pub fn wide(self) -> u128 {
        u128::from(self.0.unsigned_abs())
    }

    /// Whether it is none.
    #[must_use]
    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// `None` beyond 2^63 - 1.
    #[must_use]
    pub fn checked_add(self, other: Self) -> Option<Self> {
        self.0.checked_add(other.0).map(Self)
    }

    /// At most 2^63 - 1.
    #[must_use]
    pub const fn saturating_add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    /// At least 0.
    #[must_use]
    pub fn saturating_sub(self, other: Self) -> Self {
        Self((self.0 - other.0).max(0))
    }

    /// The next multiple of `granule`; `None` beyond 2^63 - 1. A granule of 0 changes nothing.
    #[must_use]
    pub fn round_up(self, granule: Self) -> Option<Self> {
        match self.0.checked_rem(granule.0) {
            None | Some(0) => Some(self),
            Some(rest) => self.0.checked_add(granule.0 - rest).map(Self),
        }
    }

    /// The multiple of `granule` that is not above.
    #[must_use]
    pub fn round_down(self, granule: Self) -> Self {
        Self(self.0 - self.0.checked_rem(granule.0).unwrap_or(0))
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} B", self.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{prop_assert, prop_assert_eq, proptest};

    use super::*;

    #[test]
    fn negative_values_are_refused_with_field_and_value() {
        for bytes in [-1, i64::MIN] {
            let error = Bytes::from_wire("limit_bytes", bytes).unwrap_err();
            assert!(error.to_string().starts_with(&format!("limit_bytes is {bytes}:")), "{error}");
        }
        assert_eq!(Bytes::from_wire("limit_bytes", 0).unwrap(), Bytes::ZERO);
        assert_eq!(Bytes::from_wire("limit_bytes", i64::MAX).unwrap(), Bytes::MAX);
    }

    proptest! {
        #[test]
        fn rounding_is_exact_or_fails(bytes in 0..=i64::MAX, granule in 1_i64..=1 << 40) {
            let (bytes, granule) = (Bytes(bytes), Bytes(granule));
            let below = bytes.round_down(granule);
            prop_assert_eq!(below.get() % granule.get(), 0);
            prop_assert!(below <= bytes && bytes.get() - below.get() < granule.get());
            match bytes.round_up(granule) {
                Some(above) => {
                    prop_assert_eq!(above.get() % granule.get(), 0);
                    prop_assert!(above >= bytes && above.get() - bytes.get() < granule.get());
                }
                None => prop_assert!(bytes.get() > i64::MAX - granule.get()),
            }
        }
    }
}
