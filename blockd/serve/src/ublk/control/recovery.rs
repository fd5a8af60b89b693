//! Recovery of a device that an earlier daemon left behind.

use std::time::Duration;

use blockd_media::ublk::features;

use super::DeviceError;
use super::called;
use super::device::{DeviceSpec, Kit, Serving};
use super::driver::{DeviceInfo, DeviceState, Serve};
use super::seat::{Patience, Seat};

/// How long the kernel may take to see that a server has died. The kernel is then still closing the
/// server's files; up to Linux 6.12 a queue without a request to spare shows it only when requests
/// take longer than the block layer's limit, which is 30 s where it could not be shortened.
const DEATH_LIMIT: Duration = Duration::from_secs(45);
/// A tenth of it would be a tenth of the pause that clients see.
const LOOK: Duration = Duration::from_millis(10);

/// How a device came back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Recovered {
    /// The device waited for a server, and continues.
    Continued,
    /// The device was gone, and was added again.
    Added,
    /// The device is served already.
    Served,
}

impl Kit {
    /// Serves a remembered device again: the one that waits if there is one, else a new one, with
    /// the same number where that is free.
    pub(super) fn recover(
        &self,
        seat: &mut Seat,
        spec: &DeviceSpec,
        number: Option<u32>,
    ) -> Result<(Serving, Recovered), DeviceError> {
        if !self.driver.is_there() {
            return Err(DeviceError::NoDriver);
        }
        if let Some(number) = number.filter(|number| self.driver.numbers().contains(number)) {
            seat.number_is(number);
            if let Some(served) = self.recover_there(seat, spec, number)? {
                return Ok((served, Recovered::Continued));
            }
        }
        self.add(seat, spec, number).map(|served| (served, Recovered::Added))
    }

    /// `None` when there is nothing left to go on with.
    fn recover_there(
        &self,
        seat: &mut Seat,
        spec: &DeviceSpec,
        number: u32,
    ) -> Result<Option<Serving>, DeviceError> {
        let Some(info) = self.find(seat, number)? else { return Ok(None) };
        if !self.is_of(spec, &info) {
            // Meanwhile another process was given the number.
            seat.control = None;
            return Ok(None);
        }
        match self.settled(seat, info)? {
            DeviceState::Quiesced | DeviceState::Failing => {}
            _ => {
                self.take_down(seat, false)?;
                return Ok(None);
            }
        }
        seat.command("START_USER_RECOVERY", |it| it.begin_recovery())?;
        let served = self.serve(seat, spec, info.flags, Serve::Recover)?;
        if served.info.flags & features::UPDATE_SIZE != 0 {
            // The daemon before may have died between the volume's new size and the device's.
            let size = spec.size;
            seat.command("UPDATE_SIZE", |control| control.resize(size))?;
        }
        Ok(Some(served))
    }

    /// Looks a device up; `None` when it is not there.
    pub(super) fn find(
        &self,
        seat: &mut Seat,
        number: u32,
    ) -> Result<Option<DeviceInfo>, DeviceError> {
        seat.number_is(number);
        seat.begin("GET_DEV_INFO");
        match self.driver.open(number) {
            Ok(control) => {
                let info = control.info();
                seat.control = Some(control);
                Ok(Some(info))
            }
            Err(error) if error.errno() == Some(libc::ENODEV) => Ok(None),
            Err(error) => Err(DeviceError::Refused {
                command: error.command,
                device: called(Some(number)),
                source: error.source,
            }),
        }
    }

    /// The state of a device once its server is known to be dead; an error if that lives.
    pub(super) fn settled(
        &self,
        seat: &mut Seat,
        info: DeviceInfo,
    ) -> Result<DeviceState, DeviceError> {
        let patience = Patience::new(DEATH_LIMIT);
        let mut info = info;
        while info.state == DeviceState::Live {
            if let Some(name) = self.living(info.pid) {
                let device = called(Some(info.number));
                return Err(DeviceError::Served { device, pid: info.pid, name });
            }
            if patience.is_over() {
                let device = called(Some(info.number));
                return Err(DeviceError::Hangs { device, command: "losing its server" });
            }
            std::thread::sleep(LOOK);
            info = seat.command("GET_DEV_INFO", |it| it.refresh())?;
        }
        Ok(info.state)
    }

    /// The name of a process that lives. We are none: our own devices are known, and our number may
    /// have been that of the daemon before.
    fn living(&self, pid: i32) -> Option<String> {
        let pid = u32::try_from(pid).ok().filter(|pid| *pid != std::process::id())?;
        let status = std::fs::read_to_string(self.places.proc.join(format!("{pid}/status")));
        let status = status.ok()?;
        let value = |key: &str| status.lines().find_map(|line| line.strip_prefix(key));
        let is_dead = value("State:").is_some_and(|state| state.trim().starts_with(['Z', 'X']));
        (!is_dead).then(|| value("Name:").unwrap_or("?").trim().to_owned())
    }
}
