//! Access modes on this node: which publications of a volume may coexist. Pure, so that a conflict
//! is answered without any call.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::capability::Mode;

/// Whether both modes need the same kind of device. A volume that was staged before an upgrade or
/// downgrade of the client continues in the mode that the client uses now.
#[must_use]
pub fn stage_alike(one: Mode, other: Mode) -> bool {
    (one == Mode::ReaderOnly) == (other == Mode::ReaderOnly)
}

/// Whether a call in one mode is a repeat of one in the other. The same claim becomes the old mode
/// or the one for many, depending on the client's version.
#[must_use]
pub fn repeat(one: Mode, other: Mode) -> bool {
    let many = |mode| matches!(mode, Mode::Writer | Mode::MultiWriter);
    one == other || (many(one) && many(other))
}

/// Whether a workload in one mode bears another one, in that mode. `strict`: the old mode has its
/// literal meaning.
fn bears(one: Mode, other: Mode, strict: bool) -> bool {
    match (one, other) {
        (Mode::MultiWriter, Mode::MultiWriter) | (Mode::ManyNodes, Mode::ManyNodes) => true,
        (Mode::Writer | Mode::MultiWriter, Mode::Writer | Mode::MultiWriter)
        | (Mode::ReaderOnly, Mode::ReaderOnly) => !strict,
        _ => false,
    }
}

/// How a volume is shown to a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// A file system, mounted on a folder.
    Mount,
    /// The device itself, bound to a file.
    Block,
}

/// A place where a volume is published, or is to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    pub path: PathBuf,
    #[serde(with = "named")]
    pub mode: Mode,
    pub read_only: bool,
    pub access: Access,
}

/// A mode in a file: by the name that the specification has for it.
pub mod named {
    use serde::de::Error as _;
    use serde::{Deserialize as _, Deserializer, Serializer};

    use crate::capability::Mode;

    /// Writes the name.
    ///
    /// # Errors
    /// The errors of the serializer.
    pub fn serialize<S: Serializer>(mode: &Mode, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(mode.name())
    }

    /// Reads the name.
    ///
    /// # Errors
    /// When there is no such mode.
    pub fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<Mode, D::Error> {
        let name = String::deserialize(from)?;
        Mode::of_name(&name).ok_or_else(|| D::Error::custom(format!("no access mode: {name}")))
    }
}

/// The decision on a publication beside the existing ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The same publication exists already.
    Repeat,
    /// The publication is added to the others.
    New,
    /// Its path is taken by one of another kind: `ALREADY_EXISTS`.
    Different,
    /// One of the two is exclusive: `FAILED_PRECONDITION`. The index of the existing publication.
    Conflict(usize),
}

/// Judges a publication by those that there are. `strict`: the old mode has its literal meaning.
#[must_use]
pub fn judge(there: &[Target], wanted: &Target, strict: bool) -> Verdict {
    if let Some(same) = at(there, &wanted.path) {
        let alike = same.access == wanted.access
            && same.read_only == wanted.read_only
            && repeat(same.mode, wanted.mode);
        return if alike { Verdict::Repeat } else { Verdict::Different };
    }
    let against = there.iter().position(|other| !bears(other.mode, wanted.mode, strict));
    against.map_or(Verdict::New, Verdict::Conflict)
}

/// The publication at this path.
#[must_use]
pub fn at<'a>(there: &'a [Target], path: &Path) -> Option<&'a Target> {
    there.iter().find(|target| target.path == path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use Mode::{MultiWriter, ReaderOnly as Reader, SingleWriter, Writer};

    const MODES: [Mode; 4] = [Writer, Reader, SingleWriter, MultiWriter];

    fn target(path: &str, mode: Mode, access: Access) -> Target {
        Target { path: path.into(), mode, read_only: mode == Reader, access }
    }

    /// For each of two modes: the answer for a second path, without and with strictness.
    const SECOND_PATHS: [(Mode, Mode, bool, bool); 16] = [
        (Writer, Writer, true, false),
        (Writer, Reader, false, false),
        (Writer, SingleWriter, false, false),
        (Writer, MultiWriter, true, false),
        (Reader, Writer, false, false),
        (Reader, Reader, true, false),
        (Reader, SingleWriter, false, false),
        (Reader, MultiWriter, false, false),
        (SingleWriter, Writer, false, false),
        (SingleWriter, Reader, false, false),
        (SingleWriter, SingleWriter, false, false),
        (SingleWriter, MultiWriter, false, false),
        (MultiWriter, Writer, true, false),
        (MultiWriter, Reader, false, false),
        (MultiWriter, SingleWriter, false, false),
        (MultiWriter, MultiWriter, true, true),
    ];

    #[test]
    fn a_second_path_is_judged_by_both_modes() {
        for access in [Access::Mount, Access::Block] {
            for (first, second, loose, strict) in SECOND_PATHS {
                let there = [target("/a", first, access)];
                let wanted = target("/b", second, access);
                for (strictly, allowed) in [(false, loose), (true, strict)] {
                    let expected = if allowed { Verdict::New } else { Verdict::Conflict(0) };
                    let case = format!("{first:?} then {second:?}, strict {strictly}");
                    assert_eq!(judge(&there, &wanted, strictly), expected, "{case}");
                }
            }
        }
    }

    #[test]
    fn the_same_path_is_a_repeat_in_the_same_mode_or_its_like() {
        for access in [Access::Mount, Access::Block] {
            for first in MODES {
                for second in MODES {
                    for strict in [false, true] {
                        let there = [target("/a", first, access)];
                        let mut wanted = target("/a", second, access);
                        wanted.read_only = there[0].read_only;
                        let alike = first == second
                            || matches!((first, second), (Writer, MultiWriter))
                            || matches!((first, second), (MultiWriter, Writer));
                        let expected = if alike { Verdict::Repeat } else { Verdict::Different };
                        assert_eq!(judge(&there, &wanted, strict), expected);
                    }
                }
            }
        }
    }

    #[test]
    fn the_same_path_with_another_access_or_readonly_is_different() {
        for mode in MODES {
            let there = [target("/a", mode, Access::Mount)];
            let block = Target { access: Access::Block, ..there[0].clone() };
            assert_eq!(judge(&there, &block, false), Verdict::Different);
            let flipped = Target { read_only: !there[0].read_only, ..there[0].clone() };
            assert_eq!(judge(&there, &flipped, false), Verdict::Different);
        }
    }

    #[test]
    fn reading_only_is_still_a_second_workload() {
        let there = [target("/a", SingleWriter, Access::Mount)];
        let wanted = Target { read_only: true, ..target("/b", SingleWriter, Access::Mount) };
        assert_eq!(judge(&there, &wanted, false), Verdict::Conflict(0));
        for mode in [Writer, MultiWriter] {
            let there = [target("/a", mode, Access::Mount)];
            let wanted = Target { read_only: true, ..target("/b", mode, Access::Mount) };
            assert_eq!(judge(&there, &wanted, false), Verdict::New);
        }
    }

    #[test]
    fn a_third_path_is_judged_by_all_that_are_there() {
        let there = [target("/a", MultiWriter, Access::Block), target("/b", Writer, Access::Block)];
        let wanted = target("/c", SingleWriter, Access::Block);
        assert_eq!(judge(&there, &wanted, false), Verdict::Conflict(0));
        let wanted = target("/c", MultiWriter, Access::Block);
        assert_eq!(judge(&there, &wanted, false), Verdict::New);
        assert_eq!(judge(&there, &wanted, true), Verdict::Conflict(1));
        assert_eq!(judge(&[], &wanted, true), Verdict::New);
    }

    #[test]
    fn a_stage_goes_on_across_up_and_downgrade() {
        assert!(stage_alike(MultiWriter, Writer) && stage_alike(Writer, MultiWriter));
        assert!(!stage_alike(Reader, Writer) && !stage_alike(SingleWriter, Reader));
    }
}
