//! Persistent reservations by the kernel's own calls (`linux/pr.h`), which are the same for SCSI
//! and NVMe.

use std::fs::File;
use std::os::fd::AsRawFd;

use anyhow::{Context, Result, bail, ensure};

/// Only hosts with a key write, all of them hold the reservation, and anyone reads.
const WRITE_EXCLUSIVE_ALL_REGISTRANTS: u32 = 5;
/// The key that this host had before does not matter.
const IGNORE_KEY: u32 = 1;

/// `struct pr_registration`
#[repr(C)]
pub(super) struct Registration {
    old_key: u64,
    new_key: u64,
    flags: u32,
    pad: u32,
}

/// `struct pr_reservation`
#[repr(C)]
pub(super) struct Reservation {
    key: u64,
    kind: u32,
    flags: u32,
}

/// `struct pr_preempt`. Its fields are called `old_key` and `new_key`, and both drivers pass the
/// first as the key of the caller and the second as the one to remove.
#[repr(C)]
pub(super) struct Preemption {
    own_key: u64,
    victim: u64,
    kind: u32,
    flags: u32,
}

nix::ioctl_write_ptr!(pr_register, b'p', 200, Registration);
nix::ioctl_write_ptr!(pr_reserve, b'p', 201, Reservation);
nix::ioctl_write_ptr!(pr_preempt_abort, b'p', 204, Preemption);

/// The guest's half: `register KEY`, `reserve KEY`, or `fence KEY VICTIM`.
///
/// # Errors
/// When the disk refuses, or the words are others.
pub fn reservation(disk: &str, words: &[String]) -> Result<()> {
    let file = File::options().read(true).write(true).open(disk);
    let file = file.with_context(|| format!("opening {disk}"))?;
    let fd = file.as_raw_fd();
    let key = |word: &str| word.parse::<u64>().with_context(|| format!("{word:?} is no key"));
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let kind = WRITE_EXCLUSIVE_ALL_REGISTRANTS;
    let status = match words[..] {
        ["register", new] => {
            let all = Registration { old_key: 0, new_key: key(new)?, flags: IGNORE_KEY, pad: 0 };
            // SAFETY: the kernel reads a `pr_registration` there.
            unsafe { pr_register(fd, &raw const all) }
        }
        ["reserve", own] => {
            let all = Reservation { key: key(own)?, kind, flags: 0 };
            // SAFETY: the kernel reads a `pr_reservation` there.
            unsafe { pr_reserve(fd, &raw const all) }
        }
        ["fence", own, victim] => {
            let all = Preemption { own_key: key(own)?, victim: key(victim)?, kind, flags: 0 };
            // SAFETY: the kernel reads a `pr_preempt` there.
            unsafe { pr_preempt_abort(fd, &raw const all) }
        }
        _ => bail!("{words:?}: register KEY, reserve KEY or fence KEY VICTIM"),
    }
    .with_context(|| format!("{words:?} on {disk}"))?;
    // A refusal by the disk is no error of the call: its status is the result.
    ensure!(status == 0, "{words:?} on {disk}: the disk refuses with status {status:#x}");
    Ok(())
}
