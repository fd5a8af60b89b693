//! Fencing by persistent reservations: a host whose key is registered may write, others may not.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use crate::error::HostsError;
use crate::fence::{Fence, Key};
use crate::reservation_ioctl::{
    Preemption, Registration, Reservation, preempt_and_abort, register, reserve,
};

/// `PR_WRITE_EXCLUSIVE_ALL_REGS`: every registered host may write, and others may read. The end of
/// one host leaves the reservation to the rest.
const ALL_REGISTRANTS: u32 = 5;
/// `PR_FL_IGNORE_KEY`: also where another key of this host is registered.
const IGNORE_KEY: u32 = 1;
/// `PR_STS_RESERVATION_CONFLICT`, which is SCSI's status.
const CONFLICT: i32 = 0x18;

/// The devices of one group, all of which take part in each call.
#[derive(Clone, Debug)]
pub struct Reservations {
    devices: Vec<PathBuf>,
}

/// Which of two answers a device gave; others are errors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Answer {
    Done,
    Conflict,
}

impl Reservations {
    /// For these block devices.
    #[must_use]
    pub const fn new(devices: Vec<PathBuf>) -> Self {
        Self { devices }
    }

    fn each(&self) -> impl Iterator<Item = Result<(&Path, File), HostsError>> {
        self.devices.iter().map(|path| {
            let opened = OpenOptions::new().read(true).write(true).open(path);
            let file = opened.map_err(failed("open", path))?;
            Ok((path.as_path(), file))
        })
    }
}

impl Fence for Reservations {
    fn join(&self, key: Key, former: &[Key], others: bool) -> Result<(), HostsError> {
        for device in self.each() {
            let (path, file) = device?;
            if !(changes(&file, key, key).map_err(unsupported(path))?
                || adds(&file, key).map_err(unsupported(path))?
                || replaces(&file, former, key).map_err(unsupported(path))?)
            {
                return Err(unsuitable(path, "refuses the registration of this host's key"));
            }
            let asked = Reservation { key: key.number(), kind: ALL_REGISTRANTS, flags: 0 };
            let reserved = self::answer(reserve(&file, &asked)).map_err(unsupported(path))?;
            // A registrant may make the reservation that there is once more, by SCSI; Linux's NVMe
            // target refuses that. Of another type, it would refuse the writes that come.
            if reserved == Answer::Conflict && !others {
                let problem = "is reserved by other software, or with another type than write \
                               exclusive for all registrants";
                return Err(unsuitable(path, problem));
            }
        }
        Ok(())
    }

    fn is_member(&self, key: Key) -> Result<bool, HostsError> {
        let mut answer = Ok(true);
        for device in self.each() {
            let asked = device.and_then(|(path, file)| {
                changes(&file, key, key).map_err(failed("ask for the key on", path))
            });
            match asked {
                Ok(true) => {}
                Ok(false) => return Ok(false),
                Err(error) => answer = Err(error),
            }
        }
        answer
    }

    fn fence(&self, own: Key, other: Key) -> Result<bool, HostsError> {
        let mut is_first = None;
        for device in self.each() {
            let (path, file) = device?;
            // Against their names: the caller's key first, then the key that is removed.
            let (old_key, new_key) = (own.number(), other.number());
            let asked = Preemption { old_key, new_key, kind: ALL_REGISTRANTS, flags: 0 };
            let answer = answer(preempt_and_abort(&file, &asked));
            let is_done = answer.map_err(failed("fence on", path))? == Answer::Done;
            is_first.get_or_insert(is_done);
            if is_done {
                continue;
            }
            // There is no such key, as after a call like this one, or none of ours.
            if !changes(&file, own, own).map_err(failed("ask for the key on", path))? {
                return Err(HostsError::Fenced { group: path.display().to_string() });
            }
        }
        Ok(is_first == Some(true))
    }

    fn leave(&self, key: Key) -> Result<(), HostsError> {
        for device in self.each() {
            let (path, file) = device?;
            let asked = Registration { old_key: key.number(), new_key: 0, flags: 0, pad: 0 };
            answer(register(&file, &asked)).map_err(failed("remove the key from", path))?;
        }
        Ok(())
    }
}

/// Whether a key was registered, and could be changed; into itself to find that out.
fn changes(file: &File, from: Key, to: Key) -> io::Result<bool> {
    let asked = Registration { old_key: from.number(), new_key: to.number(), flags: 0, pad: 0 };
    Ok(answer(register(file, &asked))? == Answer::Done)
}

/// Registers a key. SCSI does that in place of another one of this host; NVMe refuses it then.
fn adds(file: &File, key: Key) -> io::Result<bool> {
    let asked = Registration { old_key: 0, new_key: key.number(), flags: IGNORE_KEY, pad: 0 };
    Ok(answer(register(file, &asked))? == Answer::Done)
}

fn replaces(file: &File, former: &[Key], key: Key) -> io::Result<bool> {
    for former in former {
        if changes(file, *former, key)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn answer(result: io::Result<i32>) -> io::Result<Answer> {
    match result {
        Ok(0) => Ok(Answer::Done),
        Ok(CONFLICT) => Ok(Answer::Conflict),
        Ok(status) => Err(io::Error::other(format!("status {status:#x} of the device"))),
        // Some drivers give the error that a write would get.
        Err(error) if error.raw_os_error() == Some(libc::EBADE) => Ok(Answer::Conflict),
        Err(error) => Err(error),
    }
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> HostsError + use<> {
    let what = format!("{what} {}", path.display());
    move |source| HostsError::Io { what, source }
}

fn unsuitable(path: &Path, problem: &str) -> HostsError {
    HostsError::Unsuitable { group: path.display().to_string(), problem: problem.to_owned() }
}

/// The kernel says in several ways that a device knows no reservations.
fn unsupported(path: &Path) -> impl FnOnce(io::Error) -> HostsError + use<> {
    let path = path.to_owned();
    move |source| match source.raw_os_error() {
        Some(libc::EOPNOTSUPP | libc::ENOTTY | libc::EINVAL) => {
            unsuitable(&path, "has no persistent reservations, so that no host can be fenced")
        }
        _ => failed("register this host on", &path)(source),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::HostNumber;

    #[test]
    fn what_has_no_reservations_is_named() {
        let path = std::env::temp_dir().join(format!("blockd-pr-{}", std::process::id()));
        std::fs::write(&path, "a file").unwrap();
        let fence = Reservations::new(vec![path.clone()]);
        let key = Key::new(HostNumber(1), 7);
        let errors = [
            fence.join(key, &[], false),
            fence.is_member(key).map(drop),
            fence.fence(key, key).map(drop),
        ];
        std::fs::remove_file(&path).unwrap();
        let path = path.display();
        for (error, what) in errors.into_iter().zip(["", "ask for the key on", "fence on"]) {
            let text = error.unwrap_err().to_string();
            assert!(text.starts_with(what) && text.contains(&path.to_string()), "{text}");
        }
        assert!(fence.leave(key).unwrap_err().to_string().starts_with("open "));
    }
}
