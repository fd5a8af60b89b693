//! The life of ublk devices: added, started, recovered, resized, stopped.
//!
//! [`Driver`] has the commands of the kernel's driver, and [`LibublkDriver`] sends them.
//! [`Devices`] has a thread for each device, since any command may hang in the kernel and must then
//! hang alone.

mod device;
mod devices;
mod driver;
mod kernel;
mod links;
mod mark;
pub mod mounts;
mod params;
mod ready;
mod recovery;
mod seat;
#[cfg(test)]
mod tests;
mod users;

pub use device::{DeviceSpec, DeviceView};
pub use devices::{DeviceOptions, Devices, UblkStats};
pub use driver::{
    AddRequest, DeviceControl, DeviceInfo, DeviceState, Driver, DriverError, Fetch, Serve,
};
pub use kernel::{CONTROL_PATH, LibublkDriver, features_within};
pub use mark::Mark;
pub use params::Params;
pub use recovery::Recovered;
pub use users::User;

use super::host::QueueHost;
use crate::FrontendError;

/// Why something was not done with a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The kernel has no ublk driver, or it is not loaded.
    #[error("{CONTROL_PATH} is not there: load the kernel's driver with `modprobe ublk_drv`")]
    NoDriver,
    /// The kernel refused.
    #[error("{command} of {device}: {source}")]
    Refused {
        /// The command, as the kernel calls it.
        command: &'static str,
        /// Which device, for people.
        device: String,
        /// Why.
        source: std::io::Error,
    },
    /// The module's limit is reached.
    #[error(
        "the ublk driver has {max} devices, all that its parameter ublks_max allows: write more \
         to /sys/module/ublk_drv/parameters/ublks_max"
    )]
    Exhausted {
        /// The limit.
        max: u64,
    },
    /// A command did not come back in time, or one before it has not.
    #[error("{device} hangs in {command} and is left alone")]
    Hangs {
        /// Which device, for people.
        device: String,
        /// The command, as the kernel calls it.
        command: &'static str,
    },
    /// The device is in use.
    #[error("{device} is {}", users::listed(users))]
    InUse {
        /// Which device, for people.
        device: String,
        /// Who.
        users: Vec<User>,
    },
    /// A process that lives serves it.
    #[error("{device} is served by process {pid} ({name}), which lives: stop that first")]
    Served {
        /// Which device, for people.
        device: String,
        /// The process.
        pid: i32,
        /// Its name.
        name: String,
    },
    /// The workers refused.
    #[error("a queue of {device}: {source}")]
    Queue {
        /// Which device, for people.
        device: String,
        /// Why.
        source: FrontendError,
    },
    /// The volume has no device that is served.
    #[error("the volume has no device that is served")]
    NotServed,
    /// The operating system refuses.
    #[error("{what}: {source}")]
    Io {
        /// The failed step.
        what: &'static str,
        /// Why not.
        source: std::io::Error,
    },
}

/// How a device is called in messages; one without a number is new.
fn called(number: Option<u32>) -> String {
    number.map_or_else(|| "a new ublk device".to_owned(), |number| format!("/dev/ublkb{number}"))
}
