//! Memory that is read and written by copying, and the steps that make stores durable.

mod access;
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "routines in assembly")]
#[path = "copy.rs"]
mod engine;
#[cfg(not(target_arch = "x86_64"))]
#[expect(unsafe_code, reason = "copies between memory and mappings")]
#[path = "plain.rs"]
mod engine;
mod error;
#[expect(unsafe_code, reason = "a handler of signals")]
mod fault;
mod lanes;
mod level;
#[expect(unsafe_code, reason = "maps files, and copies to and from them")]
mod map;

pub use access::Media;
pub use error::MediaError;
pub use lanes::{BLOCK, LANE_BYTES, Lanes, Replayed};
pub use level::{Domain, Durability, Medium};
pub use map::{Mapping, MappingOptions};
