//! The commands of the kernel's driver. Tests use an implementation of their own.

use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::sync::Arc;

use super::{DeviceError, Params};

/// The driver refused a command.
#[derive(Debug)]
pub struct DriverError {
    /// The command, as the kernel calls it.
    pub command: &'static str,
    /// Why.
    pub source: io::Error,
}

impl DriverError {
    pub(super) fn errno(&self) -> Option<i32> {
        self.source.raw_os_error()
    }
}

/// In which state a device is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceState {
    /// Added and not started, or stopped.
    Dead,
    /// Served, or its server has just died and the kernel has not noticed.
    Live,
    /// Its server has died; requests wait for the next one.
    Quiesced,
    /// Its server has died; requests fail until the next one.
    Failing,
    /// One that is not known here.
    Unknown(u16),
}

/// The kernel's information about a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceInfo {
    /// N of `/dev/ublkbN`.
    pub number: u32,
    /// In which state it is.
    pub state: DeviceState,
    /// The granted ones of the requested features.
    pub flags: u64,
    /// How many queues it has.
    pub queues: u16,
    /// Requests that each can have in flight.
    pub depth: u16,
    /// Most bytes of a request.
    pub max_bytes: u32,
    /// The process that serves it, as that one gave it.
    pub pid: i32,
    /// The mark that the process that added it left there.
    pub mark: u64,
}

/// A device to add.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AddRequest {
    /// Its number; any without.
    pub number: Option<u32>,
    /// How many queues.
    pub queues: u16,
    /// Requests that each can have in flight.
    pub depth: u16,
    /// Most bytes of a request.
    pub max_bytes: u32,
    /// Features; the kernel drops what it does not know.
    pub flags: u64,
    /// Kept by the kernel as long as the device is there.
    pub mark: u64,
}

/// Gives a device's queues to the workers that serve them, with the open `/dev/ublkcN`.
pub type Fetch<'a> = &'a mut dyn FnMut(Arc<File>) -> Result<(), DeviceError>;

/// How a device begins to serve.
#[derive(Clone, Copy, Debug)]
pub enum Serve<'a> {
    /// For the first time.
    Start(&'a Params),
    /// Again, after the server before has died.
    Recover,
}

/// The kernel's driver.
pub trait Driver: Send + Sync + Debug {
    /// Whether it is there.
    fn is_there(&self) -> bool;
    /// The driver's features.
    fn features(&self) -> Result<u64, DriverError>;
    /// Numbers of all devices of the machine, of any owner.
    fn numbers(&self) -> Vec<u32>;
    /// How many devices it allows, where it counts them.
    fn limit(&self) -> Option<u64>;
    /// Adds a device. The returned handle stays on this thread.
    fn add(&self, request: &AddRequest) -> Result<Box<dyn DeviceControl>, DriverError>;
    /// Opens an existing device. The returned handle stays on this thread.
    fn open(&self, number: u32) -> Result<Box<dyn DeviceControl>, DriverError>;
}

/// Commands of one device, from one thread. Letting it go changes nothing about the device.
pub trait DeviceControl {
    /// As it was when last asked.
    fn info(&self) -> DeviceInfo;
    /// Reads the present state from the kernel.
    fn refresh(&mut self) -> Result<DeviceInfo, DriverError>;
    /// `START_USER_RECOVERY`.
    fn begin_recovery(&mut self) -> Result<(), DriverError>;
    /// Opens the queues, has them fetched, and starts.
    fn serve(&mut self, how: Serve<'_>, fetch: Fetch<'_>) -> Result<(), DeviceError>;
    /// `UPDATE_SIZE`.
    fn resize(&mut self, bytes: u64) -> Result<(), DriverError>;
    /// `STOP_DEV`.
    fn stop(&mut self) -> Result<(), DriverError>;
    /// `DEL_DEV`, which waits until no process has the device open, or `DEL_DEV_ASYNC`, which does
    /// not: its number is free when the last has closed it.
    fn delete(&mut self, wait: bool) -> Result<(), DriverError>;
}
