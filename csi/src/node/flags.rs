//! Options of mounts, as a storage class has them: some are flags of the mount, the rest is for the
//! file system. Mount flags may hold secrets, so no error and no log shows one; an error names the
//! flag by its position.

use nix::mount::MsFlags;

/// Refused: they would change the kind of the mount, or mounts above or below it.
const REFUSED: [&str; 17] = [
    "bind",
    "rbind",
    "move",
    "remount",
    "loop",
    "private",
    "rprivate",
    "shared",
    "rshared",
    "slave",
    "rslave",
    "unbindable",
    "runbindable",
    "user",
    "users",
    "owner",
    "group",
];

/// Options without an effect on a mount: they are for tools.
const IGNORED: [&str; 5] = ["defaults", "auto", "noauto", "nofail", "_netdev"];

const SET: [(&str, MsFlags); 13] = [
    ("ro", MsFlags::MS_RDONLY),
    ("nosuid", MsFlags::MS_NOSUID),
    ("nodev", MsFlags::MS_NODEV),
    ("noexec", MsFlags::MS_NOEXEC),
    ("sync", MsFlags::MS_SYNCHRONOUS),
    ("dirsync", MsFlags::MS_DIRSYNC),
    ("mand", MsFlags::MS_MANDLOCK),
    ("noatime", MsFlags::MS_NOATIME),
    ("nodiratime", MsFlags::MS_NODIRATIME),
    ("relatime", MsFlags::MS_RELATIME),
    ("strictatime", MsFlags::MS_STRICTATIME),
    ("lazytime", MsFlags::MS_LAZYTIME),
    ("silent", MsFlags::MS_SILENT),
];

const CLEARED: [(&str, MsFlags); 8] = [
    ("suid", MsFlags::MS_NOSUID),
    ("dev", MsFlags::MS_NODEV),
    ("exec", MsFlags::MS_NOEXEC),
    ("async", MsFlags::MS_SYNCHRONOUS),
    ("atime", MsFlags::MS_NOATIME),
    ("diratime", MsFlags::MS_NODIRATIME),
    ("norelatime", MsFlags::MS_RELATIME),
    ("nolazytime", MsFlags::MS_LAZYTIME),
];

/// The arguments of a mount call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    pub flags: MsFlags,
    /// For the file system, with commas between.
    pub data: String,
}

impl Options {
    /// Parses a capability's list, whose items may be several options with commas between.
    ///
    /// # Errors
    /// The position of the first that is refused.
    pub fn parse(list: &[String]) -> Result<Self, usize> {
        let mut options = Self { flags: MsFlags::empty(), data: String::new() };
        for (position, text) in list.iter().enumerate() {
            if text.bytes().any(|byte| byte == 0) {
                return Err(position);
            }
            for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
                if REFUSED.contains(&word) {
                    return Err(position);
                }
                options.take(word);
            }
        }
        Ok(options)
    }

    /// The same and one more for the file system, if it is not there.
    #[must_use]
    pub fn with(mut self, word: &str) -> Self {
        if !self.data.split(',').any(|there| there == word) {
            self.add(word);
        }
        self
    }

    /// Files are to be mapped as they are.
    #[must_use]
    pub fn has_dax(&self) -> bool {
        self.data.split(',').any(|word| word == "dax" || word == "dax=always")
    }

    /// Whether the mount is read-only.
    #[must_use]
    pub fn read_only(&self) -> bool {
        self.flags.contains(MsFlags::MS_RDONLY)
    }

    fn take(&mut self, word: &str) {
        if let Some((_, flag)) = SET.iter().find(|(name, _)| *name == word) {
            self.flags |= *flag;
        } else if let Some((_, flag)) = CLEARED.iter().find(|(name, _)| *name == word) {
            self.flags &= !*flag;
        } else if word == "rw" {
            // The last word on it counts, as for mount(8).
            self.flags &= !MsFlags::MS_RDONLY;
        } else if !IGNORED.contains(&word) {
            self.add(word);
        }
    }

    fn add(&mut self, word: &str) {
        if !self.data.is_empty() {
            self.data.push(',');
        }
        self.data.push_str(word);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(list: &[&str]) -> Result<Options, usize> {
        Options::parse(&list.iter().map(|&word| word.to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn mount_flags_are_separated_from_file_system_options() {
        let options = parse(&["noatime,discard", "nosuid", "commit=30", "defaults"]).unwrap();
        assert_eq!(options.flags, MsFlags::MS_NOATIME | MsFlags::MS_NOSUID);
        assert_eq!(options.data, "discard,commit=30");
    }

    #[test]
    fn the_last_word_counts() {
        assert!(parse(&["rw", "ro"]).unwrap().read_only());
        assert!(!parse(&["ro", "rw"]).unwrap().read_only());
        assert_eq!(parse(&["noexec", "exec"]).unwrap().flags, MsFlags::empty());
    }

    #[test]
    fn invalid_mount_options_are_refused_by_position() {
        for word in REFUSED {
            assert_eq!(parse(&["noatime", word]), Err(1), "{word}");
        }
        assert_eq!(parse(&["a\0b"]), Err(0));
    }

    #[test]
    fn an_option_is_added_once() {
        let options = parse(&["nouuid,noatime"]).unwrap().with("nouuid");
        assert_eq!(options.data, "nouuid");
        assert_eq!(options.with("discard").data, "nouuid,discard");
    }
}
