//! The mapper without a kernel below it: a model of its protocol, a model of several hosts on one
//! array, histories of many workers over disks that fail, images that losses of power can leave,
//! and the rig that they stand on.
#![forbid(unsafe_code)]

#[cfg(feature = "mutations")]
pub mod claim;
#[cfg(feature = "mutations")]
pub mod crash;
#[cfg(feature = "mutations")]
pub mod hosts;
#[cfg(feature = "mutations")]
pub mod model;
pub mod rig;
#[cfg(feature = "mutations")]
pub mod sim;
