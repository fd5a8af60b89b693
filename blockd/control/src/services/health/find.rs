//! Derives findings about a pool or a volume from the figures of one look.

use blockd_engine::pool::{SpaceNow, SpaceState};
use blockd_engine::stats::MediaOp;
use blockd_mapper::engine::VolumeSummary;
use blockd_mapper::pool::Space;
use blockd_media::error::shown;
use blockd_media::finding::{Code, Finding, Severity};
use blockd_media::units::{counted, human};
use nix::errno::Errno;

use super::super::served::MISSING;

/// Little is left for metadata when it is less than so much of what it takes, in percent.
const METADATA_LOW_PERCENT: u64 = 10;

/// The space as a pool's thread reports it, and the free space below it.
#[derive(Clone, Copy, Debug)]
pub(super) struct SpaceSeen {
    pub(super) own: Space,
    pub(super) now: SpaceNow,
    /// Free in the file systems below sparse files; `None` where nothing is sparse.
    pub(super) below: Option<u64>,
    /// Writes of metadata that wait for space below.
    pub(super) metadata_waiting: u64,
}

/// A pool that serves nothing.
pub(super) fn failed(pool: &str, failure: &str, reason: &'static str, was_open: bool) -> Finding {
    let text = match was_open {
        true => {
            format!(
                "pool {name} has failed, and no write reaches it any more; put that right, then \
                 `blockd pool close --force {name}` and `blockd pool open {name}`: {failure}",
                name = shown(pool)
            )
        }
        // The error names the pool, and says what to do.
        false if reason == MISSING => failure.to_owned(),
        // `pool open` goes by the configuration that was read last.
        false if reason == "configuration" => format!(
            "pool {} could not be opened; correct its configuration, then reload the daemon: \
             {failure}",
            shown(pool)
        ),
        false => format!(
            "pool {name} could not be opened; put that right, then `blockd pool open {name}`: \
             {failure}",
            name = shown(pool)
        ),
    };
    Finding::new(Code::PoolFailed, Severity::Failure, &text).because(reason)
}

/// A pool that is open to be read only.
pub(super) fn read_only(pool: &str) -> Finding {
    let text = format!("pool {} is open to be read only: it has unknown features", shown(pool));
    Finding::new(Code::PoolReadOnly, Severity::Failure, &text).because("unknown-feature")
}

/// The finding about a pool whose thread has not answered for this many seconds.
pub(super) fn late(pool: &str, who: &'static str, seconds: u64) -> Finding {
    let what = match who {
        "pool-thread" => "its thread",
        _ => "the operating system",
    };
    let text = format!("pool {}: {what} has not answered for {seconds} s", shown(pool));
    Finding::new(Code::ProbeLate, Severity::Unknown, &text).because(who)
}

/// The findings about a pool's space.
pub(super) fn of_space(pool: &str, seen: &SpaceSeen) -> Vec<Finding> {
    let name = shown(pool);
    let mut found = Vec::new();
    let free = seen.own.free.min(seen.below.unwrap_or(u64::MAX));
    let (code, severity) = match seen.now.state {
        SpaceState::Normal => (None, Severity::Warning),
        SpaceState::Low => (Some(Code::SpaceLow), Severity::Warning),
        SpaceState::VeryLow => (Some(Code::SpaceVeryLow), Severity::Warning),
        SpaceState::Full => (Some(Code::SpaceFull), Severity::Failure),
    };
    if let Some(code) = code {
        let text = format!("pool {name} has {} free of {}", human(free), human(seen.own.total));
        found.push(Finding::new(code, severity, &text));
    }
    let waiting = seen.metadata_waiting;
    let left = seen.own.metadata_free.saturating_add(seen.own.free);
    if waiting > 0 {
        let text = format!("{waiting} writes of metadata of pool {name} wait for space below it");
        let finding = Finding::new(Code::MetadataLow, Severity::Failure, &text);
        found.push(finding.because("no-space-below").counted(waiting));
    } else if left.saturating_mul(100) < seen.own.metadata.saturating_mul(METADATA_LOW_PERCENT) {
        let severity = if left == 0 { Severity::Failure } else { Severity::Warning };
        let (left, used) = (human(left), human(seen.own.metadata));
        let text = format!("pool {name} has {left} left for metadata, which takes {used}");
        found.push(Finding::new(Code::MetadataLow, severity, &text));
    }
    found
}

/// Writes that wait because the pool's claim was not renewed in time.
pub(super) fn claim_late(pool: &str) -> Finding {
    let text = format!("claim of pool {} not renewed in time: its writes wait", shown(pool));
    Finding::new(Code::WritesBlocked, Severity::Failure, &text).because("claim-late")
}

/// Writes that wait for space.
pub(super) fn blocked(what: &str, writes: u64, seconds: u64) -> Finding {
    let (who, verb) = (counted(writes, "write"), if writes == 1 { "waits" } else { "wait" });
    let text = format!("{who} of {what} {verb} for space, the first for {seconds} s");
    Finding::new(Code::WritesBlocked, Severity::Failure, &text).counted(writes)
}

/// A device that is not there any more.
pub(super) fn device_gone(path: &str, reason: &'static str, problem: &str) -> Finding {
    let text = format!("device {path} {problem}");
    Finding::new(Code::DeviceGone, Severity::Failure, &text).of_device(path).because(reason)
}

/// IO of a device that failed, by [`MediaOp`].
pub(super) fn device_errors(path: &str, errors: [u64; 3], last: u64) -> Finding {
    let kinds = MediaOp::ALL.into_iter().zip(errors).filter(|(_, count)| *count > 0);
    let kinds: Vec<String> = kinds.map(|(op, count)| counted(count, op.name())).collect();
    let errno = Errno::from_raw(i32::try_from(last).unwrap_or(0));
    let text = format!("device {path}: {} failed, the last with {errno:?}", kinds.join(", "));
    let reason = match errno {
        Errno::ENODEV | Errno::ENXIO => "device-missing",
        Errno::ENODATA => "medium",
        Errno::ETIMEDOUT => "timeout",
        Errno::EILSEQ => "protection",
        Errno::EROFS | Errno::EPERM | Errno::EACCES => "read-only",
        _ => "io",
    };
    let sum = errors.iter().fold(0_u64, |sum, count| sum.saturating_add(*count));
    let finding = Finding::new(Code::DeviceErrors, Severity::Failure, &text);
    finding.of_device(path).because(reason).counted(sum)
}

/// A device whose IO takes so long, or has one under way for so long.
pub(super) fn device_slow(path: &str, ns: u64, is_stuck: bool, threshold_ns: u64) -> Finding {
    let (ms, threshold) = (ns / 1_000_000, threshold_ns / 1_000_000);
    let (text, reason) = match is_stuck {
        true => (format!("device {path}: an IO has been under way for {ms} ms"), "stuck"),
        false => (format!("device {path}: half of its IO takes {ms} ms or more"), "latency"),
    };
    let text = format!("{text}; {threshold} ms is allowed");
    let finding = Finding::new(Code::DeviceSlow, Severity::Warning, &text);
    finding.of_device(path).because(reason)
}

/// Bad blocks of a device.
pub(super) fn device_bad_blocks(path: &str, sectors: u64) -> Finding {
    let text = format!("device {path}: the kernel lists {}", counted(sectors, "bad sector"));
    let finding = Finding::new(Code::BadBlocks, Severity::Warning, &text);
    finding.of_device(path).counted(sectors)
}

/// Bad blocks that meet a volume.
pub(super) fn volume_bad_blocks(volume: &str, extents: u64) -> Finding {
    let name = shown(volume);
    let text = format!("volume {name}: {} on bad blocks", counted(extents, "extent"));
    Finding::new(Code::BadBlocks, Severity::Failure, &text).counted(extents)
}

/// Reads, and all else, of a volume that failed by fault of its pool.
pub(super) fn io_errors(volume: &str, [reads, writes]: [u64; 2]) -> Finding {
    let kinds = [(reads, "read"), (writes, "write")];
    let kinds = kinds.into_iter().filter(|(count, _)| *count > 0);
    let kinds: Vec<String> = kinds.map(|(count, what)| counted(count, what)).collect();
    let text = format!("volume {}: {} failed", shown(volume), kinds.join(" and "));
    let finding = Finding::new(Code::IoErrors, Severity::Failure, &text);
    finding.counted(reads.saturating_add(writes))
}

/// A block device that is not served.
pub(super) fn not_served(volume: &str, problem: &str) -> Finding {
    let text = format!("the device of volume {} is not served: {problem}", shown(volume));
    Finding::new(Code::DeviceNotServed, Severity::Failure, &text)
}

/// An attached volume that its pool does not have.
pub(super) fn missing(pool: &str, volume: &str) -> Finding {
    let (volume, pool) = (shown(volume), shown(pool));
    let text = format!("volume {volume} is attached, and pool {pool} does not have it");
    Finding::new(Code::VolumeMissing, Severity::Failure, &text)
}

/// A volume that may map no other extent.
pub(super) fn quota(volume: &VolumeSummary, extent_size: u64) -> Option<Finding> {
    let quota = volume.settings.quota;
    let is_full = quota > 0 && volume.mapped.saturating_add(extent_size) > quota;
    is_full.then(|| {
        let text = format!("volume {} has used its quota of {}", shown(&volume.name), human(quota));
        Finding::new(Code::QuotaFull, Severity::Failure, &text)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn space(state: SpaceState) -> SpaceSeen {
        let own = Space {
            total: 100 * MIB,
            free: 3 * MIB,
            metadata: 2 * MIB,
            metadata_free: MIB,
            ..Space::default()
        };
        let now = SpaceNow { state, ..SpaceNow::default() };
        SpaceSeen { own, now, below: None, metadata_waiting: 0 }
    }

    fn codes(seen: &SpaceSeen) -> Vec<(Code, Severity)> {
        of_space("p", seen).iter().map(|one| (one.code, one.severity)).collect()
    }

    /// Row: H5.
    #[test]
    fn each_state_of_space_has_its_code_and_the_message_has_numbers() {
        assert_eq!(codes(&space(SpaceState::Normal)), []);
        assert_eq!(codes(&space(SpaceState::Low)), [(Code::SpaceLow, Severity::Warning)]);
        assert_eq!(codes(&space(SpaceState::VeryLow)), [(Code::SpaceVeryLow, Severity::Warning)]);
        assert_eq!(codes(&space(SpaceState::Full)), [(Code::SpaceFull, Severity::Failure)]);
        let below = SpaceSeen { below: Some(MIB), ..space(SpaceState::Low) };
        let message = &of_space("p", &below)[0].message;
        assert_eq!(message, "pool p has 1 MiB free of 100 MiB");
    }

    /// Row: H5.
    #[test]
    fn metadata_is_low_when_neither_it_nor_the_pool_has_anything_left() {
        let with = |free, metadata_free| {
            let mut seen = space(SpaceState::Normal);
            seen.own.free = free;
            seen.own.metadata_free = metadata_free;
            seen
        };
        assert_eq!(codes(&with(3 * MIB, 0)), [], "it takes of what is free");
        assert_eq!(codes(&with(0, MIB / 8)), [(Code::MetadataLow, Severity::Warning)]);
        assert_eq!(codes(&with(0, 0)), [(Code::MetadataLow, Severity::Failure)]);
        let waits = SpaceSeen { metadata_waiting: 2, ..with(3 * MIB, MIB) };
        assert_eq!(codes(&waits), [(Code::MetadataLow, Severity::Failure)]);
    }

    /// Row: H3.
    #[test]
    fn errors_of_a_device_are_reported_by_kind_with_the_devices_name() {
        let found = device_errors("/dev/vdb", [1, 2, 0], 5);
        let text = "device /dev/vdb: 1 read, 2 writes failed, the last with EIO";
        assert_eq!((found.message.as_str(), found.count), (text, 3));
        assert_eq!((found.device.as_str(), found.reason), ("/dev/vdb", "io"));
        let medium = device_errors("/dev/vdb", [0, 0, 2], 61);
        assert_eq!(medium.reason, "medium");
        assert_eq!(medium.message, "device /dev/vdb: 2 flushes failed, the last with ENODATA");
    }

    /// Row: H7.
    #[test]
    fn faults_of_a_volume_are_reported_by_kind() {
        let found = io_errors("v", [1, 0]);
        assert_eq!((found.message.as_str(), found.count), ("volume v: 1 read failed", 1));
        assert_eq!(io_errors("v", [2, 1]).message, "volume v: 2 reads and 1 write failed");
    }

    /// Row: H4.
    #[test]
    fn a_failed_pool_says_why_and_what_helps() {
        let found = failed("p", "device \"x\": belongs to pool 12", "wrong-pool", false);
        assert_eq!((found.code, found.reason), (Code::PoolFailed, "wrong-pool"));
        assert!(found.message.contains("belongs to pool 12"), "{}", found.message);
        assert!(found.message.contains("`blockd pool open p`"), "{}", found.message);
        let found = failed("p", "size is 0", "configuration", false);
        let advice = "correct its configuration, then reload the daemon: size is 0";
        assert!(found.message.ends_with(advice), "{}", found.message);
        let found = failed("p", "flush on device 0 failed: media error", "io", true);
        assert!(found.message.contains("`blockd pool close --force p`"), "{}", found.message);
    }
}
