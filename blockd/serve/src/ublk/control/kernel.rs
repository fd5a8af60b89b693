//! The kernel's driver, by way of libublk. Only commands of `/dev/ublk-control` go this way.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::bounded;
use libublk::ctrl::{UblkCtrl, UblkCtrlBuilder};
use libublk::io::UblkDev;
use libublk::{UblkError, UblkFlags, sys};
use nix::errno::Errno;

use super::driver::{
    AddRequest, DeviceControl, DeviceInfo, DeviceState, Driver, DriverError, Fetch, Serve,
};
use super::seat::{Patience, STACK_BYTES};
use super::{DeviceError, called};
use crate::ublk::descriptor;

/// Where commands are sent.
pub const CONTROL_PATH: &str = "/dev/ublk-control";

/// The driver's limit on devices: on all up to 6.14, and on those of users without privilege since.
const LIMIT_PATH: &str = "/sys/module/ublk_drv/parameters/ublks_max";

/// How often a device that is not quiesced yet is looked at. libublk looks each 100 ms, which is a
/// tenth of the pause that a restart may have.
const LOOK: Duration = Duration::from_millis(10);
/// How long it is looked at before libublk does: closing what a dead process had open takes less.
const LOOKING: Duration = Duration::from_secs(10);

/// libublk's control commands.
#[derive(Clone, Copy, Debug, Default)]
pub struct LibublkDriver;

/// The driver's features; `None` when it does not answer in time. For callers that must not lose a
/// thread.
pub fn features_within(limit: Duration) -> Option<Result<u64, DriverError>> {
    let (send, receive) = bounded(1);
    let ask = move || drop(send.send(LibublkDriver.features()));
    let thread = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(ask);
    thread.ok()?;
    receive.recv_timeout(limit).ok()
}

impl Driver for LibublkDriver {
    fn is_there(&self) -> bool {
        Path::new(CONTROL_PATH).exists()
    }

    fn features(&self) -> Result<u64, DriverError> {
        let refused = |source| DriverError { command: "GET_FEATURES", source };
        // libublk keeps the reason to itself.
        File::options().read(true).write(true).open(CONTROL_PATH).map_err(refused)?;
        let too_old = || refused(Errno::EOPNOTSUPP.into());
        UblkCtrl::get_features().ok_or_else(too_old)
    }

    fn numbers(&self) -> Vec<u32> {
        let Ok(folder) = fs::read_dir("/sys/class/ublk-char") else { return Vec::new() };
        let number = |entry: fs::DirEntry| {
            entry.file_name().to_str()?.strip_prefix("ublkc")?.parse::<u32>().ok()
        };
        folder.flatten().filter_map(number).collect()
    }

    fn limit(&self) -> Option<u64> {
        fs::read_to_string(LIMIT_PATH).ok()?.trim().parse().ok()
    }

    fn add(&self, request: &AddRequest) -> Result<Box<dyn DeviceControl>, DriverError> {
        let command = "ADD_DEV";
        let number = request.number.map_or(Ok(-1), i32::try_from);
        let number = number.map_err(|_| invalid(command))?;
        let control = UblkCtrlBuilder::default()
            .name("blockd")
            .id(number)
            .nr_queues(request.queues)
            .depth(request.depth)
            .io_buf_bytes(request.max_bytes)
            .ctrl_flags(request.flags)
            .ctrl_target_flags(request.mark)
            .dev_flags(UblkFlags::UBLK_DEV_F_ADD_DEV)
            .build()
            .map_err(|error| of(command, error))?;
        // Devices outlive the daemon: they wait for the next one.
        control.disown();
        // A refusal with EBUSY is no error to libublk: whether the device is there is asked.
        let mut device = KernelDevice { control };
        if device.refresh()?.mark != request.mark {
            return Err(DriverError { command, source: Errno::EBUSY.into() });
        }
        Ok(Box::new(device))
    }

    fn open(&self, number: u32) -> Result<Box<dyn DeviceControl>, DriverError> {
        let command = "GET_DEV_INFO";
        let number = i32::try_from(number).map_err(|_| invalid(command))?;
        let control = UblkCtrlBuilder::default()
            .name("blockd")
            .id(number)
            .dev_flags(UblkFlags::UBLK_DEV_F_RECOVER_DEV)
            .build()
            .map_err(|error| of(command, error))?;
        Ok(Box::new(KernelDevice { control }))
    }
}

fn invalid(command: &'static str) -> DriverError {
    DriverError { command, source: Errno::EINVAL.into() }
}

fn of(command: &'static str, error: UblkError) -> DriverError {
    let source = match error {
        UblkError::UringIOError(code) | UblkError::OtherError(code) => {
            io::Error::from_raw_os_error(code.saturating_neg())
        }
        UblkError::IOError(error) => error,
        UblkError::InvalidVal => Errno::EINVAL.into(),
        other => io::Error::other(other.to_string()),
    };
    DriverError { command, source }
}

/// The result of a command. libublk takes EBUSY for a success.
fn done(command: &'static str, result: Result<i32, UblkError>) -> Result<(), DriverError> {
    match result {
        Ok(code) if code < 0 => {
            let source = io::Error::from_raw_os_error(code.saturating_neg());
            Err(DriverError { command, source })
        }
        Ok(_) => Ok(()),
        Err(error) => Err(of(command, error)),
    }
}

struct KernelDevice {
    control: UblkCtrl,
}

impl DeviceControl for KernelDevice {
    fn info(&self) -> DeviceInfo {
        let info = self.control.dev_info();
        DeviceInfo {
            number: info.dev_id,
            state: match u32::from(info.state) {
                sys::UBLK_S_DEV_DEAD => DeviceState::Dead,
                sys::UBLK_S_DEV_LIVE => DeviceState::Live,
                sys::UBLK_S_DEV_QUIESCED => DeviceState::Quiesced,
                sys::UBLK_S_DEV_FAIL_IO => DeviceState::Failing,
                _ => DeviceState::Unknown(info.state),
            },
            flags: info.flags,
            queues: info.nr_hw_queues,
            depth: info.queue_depth,
            max_bytes: info.max_io_buf_bytes,
            pid: info.ublksrv_pid,
            mark: info.ublksrv_flags,
        }
    }

    fn refresh(&mut self) -> Result<DeviceInfo, DriverError> {
        done("GET_DEV_INFO", self.control.read_dev_info())?;
        Ok(self.info())
    }

    fn begin_recovery(&mut self) -> Result<(), DriverError> {
        let patience = Patience::new(LOOKING);
        while self.refresh()?.state == DeviceState::Live && !patience.is_over() {
            std::thread::sleep(LOOK);
        }
        match done("START_USER_RECOVERY", self.control.start_user_recover()) {
            // Up to Linux 6.12, where a process died after this command and before its queues were
            // served: the device is as the command leaves it.
            Err(error)
                if error.errno() == Some(libc::EINVAL)
                    && self.refresh()?.state == DeviceState::Quiesced =>
            {
                Ok(())
            }
            result => result,
        }
    }

    fn serve(&mut self, how: Serve<'_>, fetch: Fetch<'_>) -> Result<(), DeviceError> {
        let command = match how {
            Serve::Start(_) => "START_DEV",
            Serve::Recover => "END_USER_RECOVERY",
        };
        let device = called(Some(self.info().number));
        let refused = |error: DriverError| {
            let DriverError { command, source } = error;
            DeviceError::Refused { command, device: device.clone(), source }
        };
        let fill = |device: &mut UblkDev| {
            if let Serve::Start(params) = how {
                device.tgt.params = params.to_kernel();
                device.tgt.dev_size = params.size;
            }
            Ok(())
        };
        let queues = UblkDev::new("blockd".to_owned(), fill, &self.control)
            .map_err(|error| refused(of("open /dev/ublkcN", error)))?;
        let file = descriptor::opened(&queues)
            .map_err(|source| refused(DriverError { command: "open /dev/ublkcN", source }))?;
        fetch(Arc::new(file))?;
        // libublk's own queues would say this, and it waits until all have.
        for _ in 0..self.info().queues {
            queues.notify_buffer_registration_complete(false);
        }
        done(command, self.control.start_dev(&queues)).map_err(refused)
    }

    fn resize(&mut self, bytes: u64) -> Result<(), DriverError> {
        done("UPDATE_SIZE", self.control.update_size(bytes))
    }

    fn stop(&mut self) -> Result<(), DriverError> {
        done("STOP_DEV", self.control.stop_dev())
    }

    fn delete(&mut self, wait: bool) -> Result<(), DriverError> {
        if !wait {
            return done("DEL_DEV_ASYNC", self.control.del_dev_async());
        }
        done("DEL_DEV", self.control.del_dev())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_is_an_error_whatever_libublk_says() {
        let error = done("DEL_DEV", Ok(-libc::EBUSY)).unwrap_err();
        assert_eq!((error.command, error.errno()), ("DEL_DEV", Some(libc::EBUSY)));
        assert!(done("DEL_DEV", Ok(0)).is_ok());
        let error = done("ADD_DEV", Err(UblkError::UringIOError(-libc::EACCES))).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EACCES));
    }
}
