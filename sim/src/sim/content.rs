//! The content of a 512-byte unit of a simulated device, encoded in eight bytes.
//!
//! Client data is never real bytes: a unit holds a tag that names the write it came from, so moving
//! 64 KiB moves 128 words and every read says exactly whose data it got. Metadata has to be real
//! bytes, because the mapper decodes it; those units are kept in a [`Contents`] arena and the
//! device holds their index.

use std::cell::RefCell;
use std::rc::Rc;

/// Bytes of a unit: the unit that a device writes without tearing.
pub const UNIT: u64 = 512;
/// [`UNIT`] as a length in memory.
pub const UNIT_BYTES: usize = 512;
/// Units of a metadata page.
pub const PAGE_UNITS: usize = 8;

const METADATA: u64 = 1 << 63;
const GARBAGE: u64 = 1 << 62;
const UNIT_BITS: u32 = 24;
const VOLUME_BITS: u32 = 12;

/// The content of one unit: zeroes, a client's tag, metadata, or the result of a discard.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Value(pub u64);

/// The decoded meaning of a [`Value`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// 512 zero bytes.
    Zero,
    /// Data of a client: write number, volume ordinal, unit of the volume.
    Data {
        /// Which write of the history.
        write: u64,
        /// Which volume it was written to, by order of creation.
        volume: u64,
        /// The unit of that volume it was written to.
        unit: u64,
    },
    /// Real bytes that the mapper wrote.
    Metadata(usize),
    /// The content of a discarded unit.
    Garbage,
}

impl Value {
    /// Zeroes.
    pub const ZERO: Self = Self(0);

    /// The tag of a unit written by a client.
    #[must_use]
    pub fn data(write: u64, volume: u64, unit: u64) -> Self {
        debug_assert!(write > 0 && write < 1 << (62 - UNIT_BITS - VOLUME_BITS));
        debug_assert!(volume < 1 << VOLUME_BITS && unit < 1 << UNIT_BITS);
        Self((write << (UNIT_BITS + VOLUME_BITS)) | (volume << UNIT_BITS) | unit)
    }

    /// Returns the content of a discarded unit that the device neither kept nor zeroed.
    #[must_use]
    pub fn garbage(number: u64) -> Self {
        Self(GARBAGE | (number & (GARBAGE - 1)))
    }

    /// Decodes the value.
    #[must_use]
    pub fn kind(self) -> Kind {
        if self.0 == 0 {
            Kind::Zero
        } else if self.0 & METADATA != 0 {
            Kind::Metadata(usize::try_from(self.0 & !METADATA).unwrap_or(usize::MAX))
        } else if self.0 & GARBAGE != 0 {
            Kind::Garbage
        } else {
            Kind::Data {
                write: self.0 >> (UNIT_BITS + VOLUME_BITS),
                volume: (self.0 >> UNIT_BITS) & ((1 << VOLUME_BITS) - 1),
                unit: self.0 & ((1 << UNIT_BITS) - 1),
            }
        }
    }
}

impl std::fmt::Debug for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.kind() {
            Kind::Zero => write!(f, "zero"),
            Kind::Data { write, volume, unit } => write!(f, "w{write}/v{volume}/u{unit}"),
            Kind::Metadata(index) => write!(f, "metadata#{index}"),
            Kind::Garbage => write!(f, "garbage"),
        }
    }
}

/// The bytes of all metadata units of a history. Shared by the copies of its devices, because it
/// only grows; a branch that is thrown away gives its part back by [`Contents::truncate`].
#[derive(Clone, Default)]
pub struct Contents {
    units: Rc<RefCell<Vec<[u8; UNIT_BYTES]>>>,
}

impl std::fmt::Debug for Contents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Contents({} units)", self.units.borrow().len())
    }
}

impl Contents {
    /// Takes in one unit of real bytes.
    #[must_use]
    pub fn intern(&self, bytes: &[u8; UNIT_BYTES]) -> Value {
        if *bytes == [0; UNIT_BYTES] {
            return Value::ZERO;
        }
        // A client's data that the mapper has moved.
        let (words, _) = bytes.as_chunks::<8>();
        let tag = u64::from_le_bytes(words[0]);
        if tag & METADATA == 0 && words.iter().all(|word| *word == words[0]) {
            return Value(tag);
        }
        let mut units = self.units.borrow_mut();
        units.push(*bytes);
        Value(METADATA | (units.len() as u64 - 1))
    }

    /// Takes in whole units of real bytes.
    #[must_use]
    pub fn intern_all(&self, bytes: &[u8]) -> Vec<Value> {
        let (units, rest) = bytes.as_chunks::<UNIT_BYTES>();
        debug_assert!(rest.is_empty(), "IO is in whole units");
        units.iter().map(|unit| self.intern(unit)).collect()
    }

    /// The real bytes of a value. Data and garbage become bytes that repeat their tag.
    pub fn bytes(&self, value: Value, out: &mut [u8]) {
        match value.kind() {
            Kind::Zero => out.fill(0),
            Kind::Metadata(index) => out.copy_from_slice(&self.units.borrow()[index]),
            Kind::Data { .. } | Kind::Garbage => {
                for word in out.chunks_mut(8) {
                    word.copy_from_slice(&value.0.to_le_bytes()[..word.len()]);
                }
            }
        }
    }

    /// How many units are held: a mark for [`Contents::truncate`].
    #[must_use]
    pub fn mark(&self) -> usize {
        self.units.borrow().len()
    }

    /// Forgets every unit taken in since the mark.
    pub fn truncate(&self, mark: usize) {
        self.units.borrow_mut().truncate(mark);
    }
}

/// A length or position in memory. Everything simulated is far below 4 GiB.
#[must_use]
pub fn index(value: u64) -> usize {
    usize::try_from(value).expect("simulated sizes fit into memory")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_encode_their_kind() {
        assert_eq!(Value::ZERO.kind(), Kind::Zero);
        assert_eq!(Value::data(7, 3, 99).kind(), Kind::Data { write: 7, volume: 3, unit: 99 });
        assert_eq!(Value::garbage(u64::MAX).kind(), Kind::Garbage);
        let contents = Contents::default();
        let mut bytes = [0; UNIT_BYTES];
        assert_eq!(contents.intern(&bytes), Value::ZERO);
        bytes[9] = 1;
        let value = contents.intern(&bytes);
        assert_eq!(value.kind(), Kind::Metadata(0));
        let mut out = [0; UNIT_BYTES];
        contents.bytes(value, &mut out);
        assert_eq!(out, bytes);
        for moved in [Value::data(7, 3, 99), Value::garbage(5)] {
            contents.bytes(moved, &mut out);
            assert_eq!(contents.intern(&out), moved);
        }
    }
}
