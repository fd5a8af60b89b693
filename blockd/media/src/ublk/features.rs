//! Features of the kernel's ublk driver: their names, their first versions of Linux, and their use
//! in blockd.

use libublk::sys;

/// A feature.
#[derive(Clone, Copy, Debug)]
pub struct Feature {
    /// Its bit.
    pub flag: u64,
    /// As the kernel calls it, without `UBLK_F_`.
    pub name: &'static str,
    /// The first kernel that has it.
    pub since: &'static str,
    /// Its use in blockd; empty when it is not used.
    pub used_for: &'static str,
}

const fn feature(
    flag: u32,
    name: &'static str,
    since: &'static str,
    used_for: &'static str,
) -> Feature {
    // A constant function has no other way from 32 to 64 bits.
    Feature { flag: flag as u64, name, since, used_for }
}

/// All that are known, by their bits.
pub const FEATURES: &[Feature] = &[
    feature(
        sys::UBLK_F_SUPPORT_ZERO_COPY,
        "SUPPORT_ZERO_COPY",
        "6.15",
        "zero copy, together with AUTO_BUF_REG",
    ),
    feature(sys::UBLK_F_URING_CMD_COMP_IN_TASK, "URING_CMD_COMP_IN_TASK", "6.0", ""),
    feature(sys::UBLK_F_NEED_GET_DATA, "NEED_GET_DATA", "6.0", ""),
    feature(
        sys::UBLK_F_USER_RECOVERY,
        "USER_RECOVERY",
        "6.1",
        "devices outlive the daemon; needed",
    ),
    feature(
        sys::UBLK_F_USER_RECOVERY_REISSUE,
        "USER_RECOVERY_REISSUE",
        "6.1",
        "requests without an answer are repeated; needed",
    ),
    feature(sys::UBLK_F_UNPRIVILEGED_DEV, "UNPRIVILEGED_DEV", "6.3", ""),
    feature(
        sys::UBLK_F_CMD_IOCTL_ENCODE,
        "CMD_IOCTL_ENCODE",
        "6.4",
        "commands in the form that newer kernels want; needed",
    ),
    feature(sys::UBLK_F_USER_COPY, "USER_COPY", "6.5", ""),
    feature(sys::UBLK_F_ZONED, "ZONED", "6.6", ""),
    feature(sys::UBLK_F_USER_RECOVERY_FAIL_IO, "USER_RECOVERY_FAIL_IO", "6.13", ""),
    feature(sys::UBLK_F_UPDATE_SIZE, "UPDATE_SIZE", "6.16", "resize while attached"),
    feature(sys::UBLK_F_AUTO_BUF_REG, "AUTO_BUF_REG", "6.16", "zero copy"),
    feature(sys::UBLK_F_QUIESCE, "QUIESCE", "6.16", "asked for, for hand-over"),
    feature(sys::UBLK_F_PER_IO_DAEMON, "PER_IO_DAEMON", "6.16", ""),
    feature(sys::UBLK_F_BUF_REG_OFF_DAEMON, "BUF_REG_OFF_DAEMON", "6.16", ""),
    feature(sys::UBLK_F_BATCH_IO, "BATCH_IO", "7.0", ""),
    feature(sys::UBLK_F_INTEGRITY, "INTEGRITY", "7.0", ""),
    feature(sys::UBLK_F_SAFE_STOP_DEV, "SAFE_STOP_DEV", "7.0", ""),
    feature(sys::UBLK_F_NO_AUTO_PART_SCAN, "NO_AUTO_PART_SCAN", "7.x", ""),
    feature(sys::UBLK_F_SHMEM_ZC, "SHMEM_ZC", "7.x", ""),
];

/// Without these no device is made: it would not outlive the daemon.
pub const NEEDED: u64 = (sys::UBLK_F_USER_RECOVERY
    | sys::UBLK_F_USER_RECOVERY_REISSUE
    | sys::UBLK_F_CMD_IOCTL_ENCODE) as u64;

/// Requests' own pages are registered with the ring, and nothing is copied.
pub const ZERO_COPY: u64 = (sys::UBLK_F_SUPPORT_ZERO_COPY | sys::UBLK_F_AUTO_BUF_REG) as u64;

/// A device's size can be changed while it is there.
pub const UPDATE_SIZE: u64 = sys::UBLK_F_UPDATE_SIZE as u64;

/// Asked for where the driver has them.
const WISHED: u64 = UPDATE_SIZE | sys::UBLK_F_QUIESCE as u64;

/// The features to request from a driver that has these.
#[must_use]
pub fn to_ask(driver: u64, zero_copy: bool) -> u64 {
    let zero_copy = if zero_copy && driver & ZERO_COPY == ZERO_COPY { ZERO_COPY } else { 0 };
    NEEDED | (driver & WISHED) | zero_copy
}

/// Names of features, in the order of their bits; those without a name by their number.
#[must_use]
pub fn names(flags: u64) -> Vec<String> {
    let one = |bit: u32| {
        let flag = 1_u64 << bit;
        let known = FEATURES.iter().find(|feature| feature.flag == flag);
        known.map_or_else(|| format!("bit {bit}"), |feature| feature.name.to_owned())
    };
    (0..u64::BITS).filter(|bit| flags & (1 << bit) != 0).map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The features of Linux 6.12 and 7.2.
    const OLD: u64 = 0x1fe;
    const NEW: u64 = 0xf_ffff;

    #[test]
    fn each_bit_has_one_name_in_order() {
        let flags: Vec<u64> = FEATURES.iter().map(|one| one.flag).collect();
        assert_eq!(flags, (0..20).map(|bit| 1 << bit).collect::<Vec<_>>());
        assert_eq!(names(OLD).len(), 8);
        assert_eq!(names(8 | 1 << 63), ["USER_RECOVERY", "bit 63"]);
    }

    #[test]
    fn nothing_is_asked_for_that_the_driver_lacks() {
        assert_eq!(to_ask(OLD, true), 0x58);
        assert_eq!(to_ask(NEW, false), 0x1458);
        assert_eq!(to_ask(NEW, true), 0x1c59);
        assert_eq!(to_ask(NEW & !1, true), 0x1458);
    }
}
