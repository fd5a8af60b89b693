//! Volumes and pools of the daemon's answers, as people read them.

use blockd_api::v1;
use blockd_media::error::Error;
use blockd_media::units;

/// A day and a time of it, in UTC.
pub(crate) fn date(unix_ms: i64) -> String {
    units::utc(unix_ms).replace('Z', " UTC")
}

/// Whether a volume is a namespace, with a device of the kernel's own.
pub(crate) fn is_namespace(volume: &v1::Volume) -> bool {
    volume.usage() != v1::PmemUsage::Unspecified
        && volume.front_end() == v1::FrontEnd::Unspecified
        && (volume.dax || !volume.device_path.is_empty())
}

/// The volume of an answer. A daemon that leaves it out breaks the contract.
pub(crate) fn volume(volume: Option<v1::Volume>) -> Result<v1::Volume, Error> {
    volume.ok_or_else(|| lacks("volume"))
}

/// The pool of an answer.
pub(crate) fn pool(pool: Option<v1::Pool>) -> Result<v1::Pool, Error> {
    pool.ok_or_else(|| lacks("pool"))
}

/// The device of an answer.
pub(crate) fn device(device: Option<v1::Device>) -> Result<v1::Device, Error> {
    device.ok_or_else(|| lacks("device"))
}

fn lacks(what: &str) -> Error {
    Error::Unexpected {
        what: "the daemon's answer".to_owned(),
        problem: format!("lacks the {what}"),
    }
}

/// Where clients find an attached volume: its block device, or its URI.
pub(crate) fn place(volume: &v1::Volume) -> &str {
    if volume.device_path.is_empty() { &volume.nbd_uri } else { &volume.device_path }
}

/// In words whether clients can use it.
pub(crate) fn state(volume: &v1::Volume) -> &'static str {
    let in_pmem = volume.usage() != v1::PmemUsage::Unspecified;
    match (volume.attached, volume.read_only) {
        _ if in_pmem && volume.state().word() != "ready" => volume.state().word(),
        _ if is_namespace(volume) && volume.device_problem.is_empty() => "ready",
        _ if is_namespace(volume) => "not served",
        _ if !volume.device_problem.is_empty() => "attached, not served",
        (false, _) if volume.kind() == v1::VolumeKind::Snapshot => "snapshot",
        (false, _) => "detached",
        (true, false) => "attached",
        (true, true) => "attached, read-only",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_date_is_that_of_the_calendar() {
        let dates = [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_399_999, "2000-02-28 23:59:59 UTC"),
            (951_782_400_000, "2000-02-29 00:00:00 UTC"),
            (1_700_000_000_000, "2023-11-14 22:13:20 UTC"),
            (4_107_542_400_000, "2100-03-01 00:00:00 UTC"),
        ];
        for (unix_ms, expected) in dates {
            assert_eq!(date(unix_ms), expected);
        }
    }
}
