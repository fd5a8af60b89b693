//! Something that is wrong, as one look finds it.

use blockd_api::v1;

/// How bad it is; the worst is the greatest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Severity {
    /// The state is unknown: the last known one is old.
    Unknown,
    /// The object works, but needs attention.
    Warning,
    /// Something does not work.
    Failure,
}

impl Severity {
    /// Its name in text, JSON and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Warning => "warning",
            Self::Failure => "failure",
        }
    }

    /// As the control API has it.
    #[must_use]
    pub const fn wire(self) -> v1::Severity {
        match self {
            Self::Unknown => v1::Severity::Unknown,
            Self::Warning => v1::Severity::Warning,
            Self::Failure => v1::Severity::Failure,
        }
    }
}

/// The code of a cause. Causes of one severity are reported in this order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Code {
    /// The pool could not be opened, or failed since.
    PoolFailed,
    /// A device of the pool is not there any more.
    DeviceGone,
    /// A volume is attached, and its pool has none of that name and identity.
    VolumeMissing,
    /// The volume's block device is not served.
    DeviceNotServed,
    /// Reads or writes of a volume failed.
    IoErrors,
    /// IO of a device of the pool failed.
    DeviceErrors,
    /// The pool was opened to be read only.
    PoolReadOnly,
    /// Writes wait for space.
    WritesBlocked,
    /// Nothing is left in the pool.
    SpaceFull,
    /// The volume's own quota is used up.
    QuotaFull,
    /// Little or nothing is left for metadata.
    MetadataLow,
    /// The kernel lists bad blocks of a device.
    BadBlocks,
    /// IO of a device takes long.
    DeviceSlow,
    /// Very little is left in the pool.
    SpaceVeryLow,
    /// Little is left in the pool.
    SpaceLow,
    /// The pool has not answered for long.
    ProbeLate,
}

impl Code {
    /// All of them.
    pub const ALL: [Self; 16] = [
        Self::PoolFailed,
        Self::DeviceGone,
        Self::VolumeMissing,
        Self::DeviceNotServed,
        Self::IoErrors,
        Self::DeviceErrors,
        Self::PoolReadOnly,
        Self::WritesBlocked,
        Self::SpaceFull,
        Self::QuotaFull,
        Self::MetadataLow,
        Self::BadBlocks,
        Self::DeviceSlow,
        Self::SpaceVeryLow,
        Self::SpaceLow,
        Self::ProbeLate,
    ];

    /// Its name in text, JSON and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::PoolFailed => "pool-failed",
            Self::DeviceGone => "device-gone",
            Self::VolumeMissing => "volume-missing",
            Self::DeviceNotServed => "device-not-served",
            Self::IoErrors => "io-errors",
            Self::DeviceErrors => "device-errors",
            Self::PoolReadOnly => "pool-read-only",
            Self::WritesBlocked => "writes-blocked",
            Self::SpaceFull => "space-full",
            Self::QuotaFull => "quota-full",
            Self::MetadataLow => "metadata-low",
            Self::BadBlocks => "bad-blocks",
            Self::DeviceSlow => "device-slow",
            Self::SpaceVeryLow => "space-very-low",
            Self::SpaceLow => "space-low",
            Self::ProbeLate => "probe-late",
        }
    }

    /// As the control API has it.
    #[must_use]
    pub const fn wire(self) -> v1::HealthCode {
        match self {
            Self::PoolFailed => v1::HealthCode::PoolFailed,
            Self::DeviceGone => v1::HealthCode::DeviceGone,
            Self::VolumeMissing => v1::HealthCode::VolumeMissing,
            Self::DeviceNotServed => v1::HealthCode::DeviceNotServed,
            Self::IoErrors => v1::HealthCode::IoErrors,
            Self::DeviceErrors => v1::HealthCode::DeviceErrors,
            Self::PoolReadOnly => v1::HealthCode::PoolReadOnly,
            Self::WritesBlocked => v1::HealthCode::WritesBlocked,
            Self::SpaceFull => v1::HealthCode::SpaceFull,
            Self::QuotaFull => v1::HealthCode::QuotaFull,
            Self::MetadataLow => v1::HealthCode::MetadataLow,
            Self::BadBlocks => v1::HealthCode::BadBlocks,
            Self::DeviceSlow => v1::HealthCode::DeviceSlow,
            Self::SpaceVeryLow => v1::HealthCode::SpaceVeryLow,
            Self::SpaceLow => v1::HealthCode::SpaceLow,
            Self::ProbeLate => v1::HealthCode::ProbeLate,
        }
    }

    /// The code for one of the control API; `None` for one that only a newer daemon knows.
    #[must_use]
    pub fn of_wire(code: v1::HealthCode) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.wire() == code)
    }
}

/// Bytes of a message at the most: a line of a terminal or two, and what a log takes.
pub const MAX_MESSAGE: usize = 256;

/// Something that is wrong with one pool or volume, as one look finds it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// The code of the cause.
    pub code: Code,
    /// How bad it is.
    pub severity: Severity,
    /// The device that it is about; empty where it is about none.
    pub device: String,
    /// Finer than the code, in small letters with hyphens; may be empty.
    pub reason: &'static str,
    /// Errors, bad blocks, writes that wait; 0 where nothing is counted.
    pub count: u64,
    /// One line for people, of at most [`MAX_MESSAGE`] bytes.
    pub message: String,
}

impl Finding {
    /// One about no device, with nothing counted.
    #[must_use]
    pub fn new(code: Code, severity: Severity, message: &str) -> Self {
        let (device, reason, count) = (String::new(), "", 0);
        Self { code, severity, device, reason, count, message: line(message) }
    }

    /// The same about a device.
    #[must_use]
    pub fn of_device(self, device: impl Into<String>) -> Self {
        Self { device: device.into(), ..self }
    }

    /// The same with a reason.
    #[must_use]
    pub fn because(self, reason: &'static str) -> Self {
        Self { reason, ..self }
    }

    /// The same with a count.
    #[must_use]
    pub fn counted(self, count: u64) -> Self {
        Self { count, ..self }
    }
}

/// One line of at most [`MAX_MESSAGE`] bytes: texts of the operating system and names may have any
/// content.
fn line(text: &str) -> String {
    const CUT: &str = "...";
    let plain = |c: char| if c.is_control() { ' ' } else { c };
    let mut line: String = text.chars().map(plain).collect();
    if line.len() > MAX_MESSAGE {
        let end = (0..=MAX_MESSAGE - CUT.len()).rev().find(|&at| line.is_char_boundary(at));
        line.truncate(end.unwrap_or(0));
        line.push_str(CUT);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_all_different_and_in_small_letters() {
        let names: std::collections::BTreeSet<_> = Code::ALL.map(Code::name).into();
        assert_eq!(names.len(), Code::ALL.len());
        let is_plain = |name: &&str| name.bytes().all(|b| b.is_ascii_lowercase() || b == b'-');
        assert!(names.iter().all(is_plain), "{names:?}");
    }

    #[test]
    fn every_code_has_the_same_name_in_the_control_api() {
        for number in 1..=16 {
            let code = v1::HealthCode::try_from(number).unwrap();
            assert_eq!(Code::of_wire(code).map(Code::name), Some(code.word().as_str()));
        }
        assert!(v1::HealthCode::try_from(17).is_err(), "a new code is to be added here");
        for severity in [Severity::Unknown, Severity::Warning, Severity::Failure] {
            assert_eq!(severity.wire().word(), Some(severity.name()));
        }
    }

    #[test]
    fn a_message_is_one_line_of_bounded_length() {
        let long = Finding::new(Code::PoolFailed, Severity::Failure, &"\u{e9}\n".repeat(500));
        assert!(long.message.len() <= MAX_MESSAGE, "{}", long.message.len());
        assert!(long.message.ends_with("...") && !long.message.contains('\n'));
        assert_eq!(Finding::new(Code::PoolFailed, Severity::Failure, "short").message, "short");
    }
}
