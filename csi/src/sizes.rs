//! From a request to a size: bytes from end to end, rounded only to the granule, and only as far as
//! the limit allows.

use blockd_csi_base::bytes::Bytes;
use blockd_luks::{GRANULE_BYTES, HEADER_BYTES};

use crate::error::Error;
use crate::proto::CapacityRange;

/// The largest volume of a pool: 2^50 bytes, by its format.
pub const MAX_VOLUME: Bytes = Bytes::constant(1_125_899_906_842_624);

/// Bytes that the header of an encrypted volume takes, on top of the requested size.
pub const LUKS_HEADER: Bytes = Bytes::constant(HEADER_BYTES.cast_signed());

/// Sizes of encrypted volumes are multiples of it.
pub const LUKS_GRANULE: Bytes = Bytes::constant(GRANULE_BYTES.cast_signed());

/// The size of a device with this size behind a header.
///
/// # Errors
/// OUT_OF_RANGE: no device is as large.
pub fn with_header(size: Bytes, header: Bytes) -> Result<Bytes, Error> {
    let whole = size.saturating_add(header);
    if whole <= MAX_VOLUME {
        return Ok(whole);
    }
    let allowed = format!("at most {}, with the header", MAX_VOLUME.saturating_sub(header));
    Err(Error::out_of_range("capacity_range", size, allowed))
}

/// The requested sizes; 0 is "not given" for each.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Range {
    /// At least.
    pub required: Bytes,
    /// At most.
    pub limit: Bytes,
}

/// The possible sizes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rules {
    /// The size when none is requested.
    pub default: Bytes,
    /// The smallest size.
    pub minimum: Bytes,
    /// Sizes are multiples of it: the volume's logical block.
    pub granule: Bytes,
}

impl Range {
    /// Reads the range of a message; nothing is the same as twice 0.
    ///
    /// # Errors
    /// A size is negative, or the limit is below the required size.
    pub fn parse(field: &str, wire: Option<&CapacityRange>) -> Result<Self, Error> {
        let Some(wire) = wire else { return Ok(Self::default()) };
        let required = Bytes::from_wire(&format!("{field}.required_bytes"), wire.required_bytes)?;
        let limit = Bytes::from_wire(&format!("{field}.limit_bytes"), wire.limit_bytes)?;
        if !limit.is_zero() && required > limit {
            let allowed = format!("0, or no less than required_bytes, {required}");
            return Err(Error::invalid(format_args!("{field}.limit_bytes"), limit, allowed));
        }
        Ok(Self { required, limit })
    }

    /// Whether neither is given.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.required.is_zero() && self.limit.is_zero()
    }

    /// Whether a volume of that size satisfies the request.
    #[must_use]
    pub fn has(&self, size: Bytes) -> bool {
        size >= self.required && (self.limit.is_zero() || size <= self.limit)
    }

    /// The size of a new volume.
    ///
    /// # Errors
    /// OUT_OF_RANGE: no size that is possible is in the range.
    pub fn choose(&self, rules: &Rules) -> Result<Bytes, Error> {
        let wanted = if !self.required.is_zero() {
            self.required
        } else if !self.limit.is_zero() && self.limit < rules.default {
            self.limit.round_down(rules.granule)
        } else {
            rules.default
        };
        let allowed = || {
            let Rules { minimum, granule, .. } = rules;
            format!("a range with a multiple of {granule} from {minimum} to {MAX_VOLUME} in it")
        };
        let refused = || {
            let (required, limit) = (self.required, self.limit);
            let value = format!("required_bytes {required}, limit_bytes {limit}");
            Error::out_of_range("capacity_range", value, allowed())
        };
        if wanted.is_zero() {
            return Err(refused());
        }
        let size = wanted.max(rules.minimum).round_up(rules.granule).ok_or_else(refused)?;
        if size > MAX_VOLUME || !self.has(size) {
            return Err(refused());
        }
        Ok(size)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{Just, Strategy, prop_assert, prop_assert_eq, prop_oneof, proptest};
    use tonic::Code;

    use super::*;

    const MIB: i64 = 1_048_576;
    const GIB: i64 = 1_073_741_824;
    const TIB: i64 = 1_099_511_627_776;

    fn bytes(bytes: i64) -> Bytes {
        Bytes::new(bytes).unwrap()
    }

    fn range(required: i64, limit: i64) -> Range {
        let wire = CapacityRange { required_bytes: required, limit_bytes: limit };
        Range::parse("capacity_range", Some(&wire)).unwrap()
    }

    const RULES: Rules = Rules {
        default: Bytes::constant(GIB),
        minimum: Bytes::constant(8 * MIB),
        granule: Bytes::constant(512),
    };

    #[test]
    fn negative_sizes_and_a_limit_below_the_required_size_are_invalid() {
        for (required, limit, field) in [
            (-1, 0, "required_bytes is -1"),
            (i64::MIN, 1, "required_bytes is -9223372036854775808"),
            (0, -1, "limit_bytes is -1"),
            (2, 1, "limit_bytes is 1"),
            (i64::MAX, i64::MAX - 1, "limit_bytes is 9223372036854775806"),
        ] {
            let wire = CapacityRange { required_bytes: required, limit_bytes: limit };
            let error = Range::parse("capacity_range", Some(&wire)).unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument);
            assert!(error.to_string().starts_with(&format!("capacity_range.{field}")), "{error}");
        }
        assert!(Range::parse("c", None).unwrap().is_empty());
    }

    #[test]
    fn sizes_are_rounded_to_the_granule_and_only_if_the_limit_allows() {
        let made = [
            // (required, limit) and the resulting size.
            ((0, 0), GIB),
            ((0, GIB + 1), GIB),
            ((0, 500 * MIB), 500 * MIB),
            ((0, 500 * MIB + 511), 500 * MIB),
            ((500 * MIB, 0), 500 * MIB),
            ((500 * MIB, 500 * MIB), 500 * MIB),
            ((37 * MIB, 0), 38_797_312),
            ((37 * MIB + 1, 0), 37 * MIB + 512),
            ((GIB - 1, 0), GIB),
            ((GIB + 1, 0), GIB + 512),
            ((GIB + 512, GIB + 512), GIB + 512),
            ((1, 0), 8 * MIB),
            ((1, 8 * MIB), 8 * MIB),
            ((16 * TIB, 0), 16 * TIB),
            ((1024 * TIB, 0), 1024 * TIB),
        ];
        for ((required, limit), size) in made {
            assert_eq!(range(required, limit).choose(&RULES).unwrap().get(), size, "{required}");
        }
        let refused = [
            (GIB + 1, GIB + 1),
            (GIB + 1, GIB + 511),
            (1, 8 * MIB - 1),
            (0, 511),
            (0, 1),
            (0, 8 * MIB - 1),
            (1024 * TIB + 1, 0),
            (i64::MAX, 0),
            (i64::MAX, i64::MAX),
        ];
        for (required, limit) in refused {
            let error = range(required, limit).choose(&RULES).unwrap_err();
            assert_eq!(error.code(), Code::OutOfRange, "{required} {limit}");
            assert!(error.to_string().contains(&required.to_string()), "{error}");
        }
    }

    #[test]
    fn the_default_is_a_setting_and_never_above_the_limit() {
        let rules = Rules { default: bytes(64 * MIB), ..RULES };
        assert_eq!(range(0, 0).choose(&rules).unwrap(), bytes(64 * MIB));
        assert_eq!(range(0, GIB).choose(&rules).unwrap(), bytes(64 * MIB));
        assert_eq!(range(0, 32 * MIB).choose(&rules).unwrap(), bytes(32 * MIB));
        let rules = Rules { default: bytes(MIB), ..RULES };
        assert_eq!(range(0, 0).choose(&rules).unwrap(), bytes(8 * MIB));
    }

    /// Sizes from 1 B to 16 TiB, among them those where mistakes are made.
    fn sizes() -> impl Strategy<Value = i64> {
        let edges = [1, 511, 512, 513, 4095, 4096, 4097, MIB, GIB, 2 * GIB, TIB, 16 * TIB];
        let edges = proptest::sample::select(edges.to_vec());
        let near = (edges, -1_i64..=1).prop_map(|(edge, by)| (edge + by).clamp(1, 16 * TIB));
        prop_oneof![near, 1..=16 * TIB, (0_u32..44).prop_map(|bits| 1_i64 << bits)]
    }

    proptest! {
        #[test]
        fn a_size_is_the_smallest_multiple_that_satisfies_the_request(
            required in sizes(),
            granule in prop_oneof![Just(512_i64), Just(1024), Just(2048), Just(4096)],
            minimum in prop_oneof![Just(1_i64), Just(8 * MIB), Just(300 * MIB)],
        ) {
            let rules = Rules { minimum: bytes(minimum), granule: bytes(granule), ..RULES };
            let size = range(required, 0).choose(&rules).unwrap().get();
            prop_assert_eq!(size % granule, 0);
            prop_assert!(size >= required && size >= minimum);
            prop_assert!(size - required.max(minimum) < granule);
        }

        #[test]
        fn an_exact_size_is_that_size_or_an_error(required in sizes()) {
            let rules = Rules { minimum: bytes(1), ..RULES };
            match range(required, required).choose(&rules) {
                Ok(size) => prop_assert_eq!(size.get(), required),
                Err(error) => {
                    prop_assert_eq!(error.code(), Code::OutOfRange);
                    prop_assert!(required % 512 != 0);
                }
            }
        }

        #[test]
        fn every_answer_is_in_the_requested_range(
            one in 0..=i64::MAX, other in 0..=i64::MAX, has_limit: bool,
        ) {
            let (low, high) = (one.min(other), one.max(other));
            let range = range(low, if has_limit { high } else { 0 });
            if let Ok(size) = range.choose(&RULES) {
                prop_assert!(range.has(size) && size <= MAX_VOLUME);
                prop_assert_eq!(size.get() % 512, 0);
            }
        }
    }
}
