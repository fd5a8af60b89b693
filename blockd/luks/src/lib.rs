//! LUKS2 above a block device: keys, the calls of `cryptsetup`, and the mappings of the kernel.
//!
//! A key reaches the program by its standard input only: it is in no argument, no environment and
//! no file of a disk. The callers run the commands, each with its own limit of time.

#![forbid(unsafe_code)]

mod call;
mod key;
mod mapping;

pub use self::call::{Call, Outcome};
pub use self::key::{BadKey, Key, MAX_KEY_BYTES};
pub use self::mapping::Mapping;

/// The program.
pub const PROGRAM: &str = "cryptsetup";

/// The only kind of encryption, as parameters name it.
pub const KIND: &str = "luks2";

/// Bytes of a device before its data: both headers and the key slots. It is the program's default,
/// and given in each call, so that no other version of the program chooses another one.
pub const HEADER_BYTES: u64 = 16 << 20;

/// Sizes of encrypted devices are multiples of it: the largest sector that LUKS2 encrypts as one.
pub const GRANULE_BYTES: u64 = 4096;
