//! The key that opens a volume.

use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;
use std::sync::Once;

use rustix::process::{Resource, Rlimit, setrlimit};
use zeroize::Zeroizing;

/// The longest key: the CSI specification limits all secrets of a call together to this, and a key
/// file that is longer could not be the key of a claim.
pub const MAX_KEY_BYTES: usize = 4096;

/// Bytes of a core dump that a process with a key may leave: fewer than any has. With 1 the kernel
/// starts no program that takes dumps either, which it does with 0 (`do_coredump` in its
/// `fs/coredump.c`).
const CORE_BYTES: u64 = 1;

/// The bytes of a key, taken as they are: an end of line belongs to them. The memory is overwritten
/// when it is dropped, and no `Debug` shows it. A process that has had a key, and those that it
/// starts, leave no core dump.
#[derive(Clone, PartialEq, Eq)]
pub struct Key(Zeroizing<Vec<u8>>);

/// Why bytes are no key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadKey {
    #[error("empty")]
    Empty,
    #[error("longer than {MAX_KEY_BYTES} bytes")]
    TooLong,
}

impl Key {
    /// A key of these bytes.
    ///
    /// # Errors
    /// There are none, or more than [`MAX_KEY_BYTES`].
    pub fn new(bytes: Vec<u8>) -> Result<Self, BadKey> {
        let bytes = Zeroizing::new(bytes);
        no_core_dumps();
        match bytes.len() {
            0 => Err(BadKey::Empty),
            1..=MAX_KEY_BYTES => Ok(Self(bytes)),
            _ => Err(BadKey::TooLong),
        }
    }

    /// Reads a key file.
    ///
    /// # Errors
    /// The file can't be read, or its bytes are no key: `InvalidData`.
    pub fn read(path: &Path) -> io::Result<Self> {
        // One byte more than a key has shows that the file is too long. The buffer does not grow,
        // which would leave a copy behind.
        let mut bytes = Zeroizing::new(Vec::with_capacity(MAX_KEY_BYTES + 1));
        let limit = u64::try_from(MAX_KEY_BYTES + 1).unwrap_or(u64::MAX);
        File::open(path)?.take(limit).read_to_end(&mut bytes)?;
        Self::new(std::mem::take(&mut *bytes))
            .map_err(|problem| io::Error::new(io::ErrorKind::InvalidData, problem))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Sets the limit of core dumps, once. A process that may not have one of 1 has 0 for good: then
/// the kernel may still start a program for dumps, if it is set up to.
fn no_core_dumps() {
    static DONE: Once = Once::new();
    DONE.call_once(|| {
        let limit = Rlimit { current: Some(CORE_BYTES), maximum: Some(CORE_BYTES) };
        let _ = setrlimit(Resource::Core, limit);
    });
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(hidden)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_some_bytes_and_not_too_many() {
        assert_eq!(Key::new(Vec::new()), Err(BadKey::Empty));
        assert_eq!(Key::new(vec![1; MAX_KEY_BYTES + 1]), Err(BadKey::TooLong));
        assert_eq!(Key::new(vec![1; MAX_KEY_BYTES]).unwrap().bytes().len(), MAX_KEY_BYTES);
    }

    #[test]
    fn a_key_is_not_shown() {
        let key = Key::new(b"very-secret".to_vec()).unwrap();
        assert_eq!(format!("{key:?} {:?}", Some(&key)), "Key(hidden) Some(Key(hidden))");
    }

    #[test]
    fn programs_of_a_process_with_a_key_leave_no_core_dump() {
        let _key = Key::new(b"very-secret".to_vec()).unwrap();
        let limits = std::process::Command::new("cat").arg("/proc/self/limits").output().unwrap();
        let limits = String::from_utf8(limits.stdout).unwrap();
        let line = limits.lines().find_map(|line| line.strip_prefix("Max core file size")).unwrap();
        let most = line.split_whitespace().next().unwrap().parse::<u64>().unwrap();
        assert!(most <= CORE_BYTES, "{line}");
    }

    #[test]
    fn a_key_file_is_read_as_it_is() {
        let path = std::env::temp_dir().join(format!("luks-key-{}", std::process::id()));
        for (content, is_key) in [
            (b"one\ntwo\n".to_vec(), true),
            (Vec::new(), false),
            (vec![0; MAX_KEY_BYTES + 1], false),
        ] {
            std::fs::write(&path, &content).unwrap();
            match Key::read(&path) {
                Ok(key) => assert_eq!(key.bytes(), content),
                Err(error) => {
                    assert!(!is_key);
                    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
                }
            }
        }
        std::fs::remove_file(&path).unwrap();
        assert_eq!(Key::read(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
