//! The calls of the program: their words, their input, and the meaning of how they end.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Seek as _, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::fs::{MemfdFlags, memfd_create};

use crate::{HEADER_BYTES, Key, PROGRAM};

/// The derivation of a key slot's key from the volume's key: Argon2id with 64 MiB of memory, the
/// second choice of RFC 9106, for machines without 2 GiB to spare. The program's own choice takes
/// up to 1 GiB, which ends a container with a limit, and measures for two seconds what this machine
/// can do, which says nothing of the one that opens the volume. Four passes are the fewest that
/// LUKS2 has, and one thread needs no more memory than it says. A key of random bytes needs no
/// derivation at all; a short one is made expensive to guess.
const DERIVATION: [&str; 8] = [
    "--pbkdf",
    "argon2id",
    "--pbkdf-memory",
    "65536",
    "--pbkdf-parallel",
    "1",
    "--pbkdf-force-iterations",
    "4",
];

/// For every call: no questions. The locks of the program lie in `/run`, where a container may not
/// write; the callers run one call for a volume at a time.
const ALWAYS: [&str; 2] = ["--batch-mode", "--disable-locks"];

/// A key from the standard input, up to its end.
const FROM_INPUT: &str = "--key-file=-";

/// Bytes of a sector, in which the program counts.
const SECTOR_BYTES: u64 = 512;

/// A call of the program.
pub struct Call<'a> {
    words: Vec<OsString>,
    keys: Vec<&'a Key>,
}

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Done,
    /// The key opens no slot.
    WrongKey,
    /// The derivation of the key got no memory.
    OutOfMemory,
    /// The device or mapping is in use.
    Busy,
    /// Anything else, which the program's output explains.
    Failed,
}

impl Outcome {
    /// By the exit code, as the program's manual lists them; `None`: it was killed.
    #[must_use]
    pub const fn of(code: Option<i32>) -> Self {
        match code {
            Some(0) => Self::Done,
            Some(2) => Self::WrongKey,
            Some(3) => Self::OutOfMemory,
            Some(5) => Self::Busy,
            _ => Self::Failed,
        }
    }
}

impl<'a> Call<'a> {
    /// Writes a new header, with one slot for this key. All data of the device is lost.
    #[must_use]
    pub fn format(device: &Path, key: &'a Key) -> Self {
        let offset = (HEADER_BYTES / SECTOR_BYTES).to_string();
        let mut call = Self::new(&["luksFormat", "--type", "luks2", "--offset", &offset]);
        call.add(&DERIVATION);
        call.on(device).key(key)
    }

    /// Whether the key opens a device; nothing is mapped.
    #[must_use]
    pub fn test(device: &Path, key: &'a Key) -> Self {
        Self::new(&["open", "--type", "luks2", "--test-passphrase"]).on(device).key(key)
    }

    /// Opens a device as the mapping of this name. Discards pass through to the device.
    #[must_use]
    pub fn open(device: &Path, name: &str, key: &'a Key, read_only: bool) -> Self {
        let mut call = Self::new(&["open", "--type", "luks2", "--allow-discards"]);
        if read_only {
            call.add(&["--readonly"]);
        }
        let mut call = call.on(device).key(key);
        call.add(&[name]);
        call
    }

    /// Closes a mapping.
    #[must_use]
    pub fn close(name: &str) -> Self {
        Self::new(&["close", name])
    }

    /// Makes a mapping as large as its device.
    #[must_use]
    pub fn resize(name: &str, key: &'a Key) -> Self {
        Self::new(&["resize", name]).key(key)
    }

    /// Adds a slot for a new key, by one that opens the device.
    #[must_use]
    pub fn add_key(device: &Path, existing: &'a Key, new: &'a Key) -> Self {
        // Both are read from the input, one after the other, so that their lengths are needed.
        let (one, other) = (existing.bytes().len().to_string(), new.bytes().len().to_string());
        let mut call = Self::new(&["luksAddKey", "--type", "luks2"]);
        call.add(&DERIVATION);
        call.add(&["--keyfile-size", &one, "--new-keyfile-size", &other]);
        let mut call = call.on(device).key(existing);
        call.keys.push(new);
        call.add(&["-"]);
        call
    }

    /// Removes the slot of a key. The caller has made sure that another key opens the device: the
    /// program would remove the last slot as well.
    #[must_use]
    pub fn remove_key(device: &Path, key: &'a Key) -> Self {
        Self::new(&["luksRemoveKey", "--type", "luks2"]).on(device).key(key)
    }

    fn new(words: &[&str]) -> Self {
        let mut call = Self { words: Vec::new(), keys: Vec::new() };
        call.add(words);
        call.add(&ALWAYS);
        call
    }

    fn add(&mut self, words: &[&str]) {
        self.words.extend(words.iter().map(OsString::from));
    }

    fn on(mut self, device: &Path) -> Self {
        self.words.push(device.into());
        self
    }

    fn key(mut self, key: &'a Key) -> Self {
        self.add(&[FROM_INPUT]);
        self.keys.push(key);
        self
    }

    /// Whether a key is derived, which takes memory.
    #[must_use]
    pub fn derives(&self) -> bool {
        !self.keys.is_empty()
    }

    /// The command, with the keys as its input: bytes in memory that no other program finds by a
    /// path.
    ///
    /// # Errors
    /// The kernel has no memory for the input.
    pub fn command(&self) -> io::Result<Command> {
        let mut command = Command::new(PROGRAM);
        command.args(&self.words);
        if self.keys.is_empty() {
            command.stdin(Stdio::null());
            return Ok(command);
        }
        let mut input = File::from(memfd_create(c"key", MemfdFlags::CLOEXEC)?);
        for key in &self.keys {
            input.write_all(key.bytes())?;
        }
        input.rewind()?;
        command.stdin(input);
        Ok(command)
    }
}

impl std::fmt::Debug for Call<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Call").field("words", &self.words).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: &str = "the-old-secret";
    const NEW: &str = "a-newer-and-longer-secret";

    fn key(text: &str) -> Key {
        Key::new(text.as_bytes().to_vec()).unwrap()
    }

    /// A file that stands for a device: header, key slots and all.
    struct Image(std::path::PathBuf);

    impl Image {
        fn new(name: &str) -> Self {
            let name = format!("luks-{name}-{}", std::process::id());
            let path = std::env::temp_dir().join(name);
            File::create(&path).unwrap().set_len(HEADER_BYTES + (1 << 20)).unwrap();
            Self(path)
        }

        fn opens(&self, key: &Key) -> bool {
            match ended(&Call::test(&self.0, key)) {
                Outcome::Done => true,
                Outcome::WrongKey => false,
                other => panic!("{other:?}"),
            }
        }
    }

    impl Drop for Image {
        fn drop(&mut self) {
            std::fs::remove_file(&self.0).unwrap();
        }
    }

    fn ended(call: &Call<'_>) -> Outcome {
        let path = std::env::var("PATH").unwrap() + ":/usr/sbin:/sbin";
        let output = call.command().unwrap().env("PATH", path).output().unwrap();
        println!("{call:?}: {output:?}");
        Outcome::of(output.status.code())
    }

    #[test]
    fn no_key_is_in_the_words_or_the_environment_of_a_call() {
        let (device, old, new) = (Path::new("/dev/ublkb0"), key(OLD), key(NEW));
        let calls = [
            Call::format(device, &old),
            Call::open(device, "name", &old, false),
            Call::open(device, "name", &old, true),
            Call::test(device, &old),
            Call::resize("name", &old),
            Call::add_key(device, &old, &new),
            Call::remove_key(device, &old),
            Call::close("name"),
        ];
        for call in &calls {
            let command = call.command().unwrap();
            let words: Vec<_> = command.get_args().collect();
            let shown = format!("{words:?} {:?} {call:?} {command:?}", command.get_envs());
            assert!(!shown.contains(OLD) && !shown.contains(NEW), "{shown}");
            assert_eq!(call.derives(), shown.contains(FROM_INPUT), "{shown}");
        }
        let words = |call: &Call<'_>| {
            let words: Vec<_> = call.words.iter().map(|word| word.to_str().unwrap()).collect();
            words.join(" ")
        };
        assert_eq!(
            words(&calls[0]),
            "luksFormat --type luks2 --offset 32768 --batch-mode --disable-locks --pbkdf argon2id \
             --pbkdf-memory 65536 --pbkdf-parallel 1 --pbkdf-force-iterations 4 /dev/ublkb0 \
             --key-file=-"
        );
        assert_eq!(
            words(&calls[1]),
            "open --type luks2 --allow-discards --batch-mode --disable-locks /dev/ublkb0 \
             --key-file=- name"
        );
    }

    #[test]
    fn a_header_opens_with_its_key_alone() {
        let (image, one, other) = (Image::new("open"), key(OLD), key(NEW));
        assert_eq!(ended(&Call::format(&image.0, &one)), Outcome::Done);
        assert!(image.opens(&one) && !image.opens(&other));
        let header = std::fs::read(&image.0).unwrap();
        assert!(!header.windows(OLD.len()).any(|bytes| bytes == OLD.as_bytes()));
    }

    #[test]
    fn a_key_takes_the_place_of_another_one() {
        let (image, old, new) = (Image::new("rotate"), key(OLD), key(NEW));
        assert_eq!(ended(&Call::format(&image.0, &old)), Outcome::Done);
        assert_eq!(ended(&Call::add_key(&image.0, &new, &old)), Outcome::WrongKey);
        assert_eq!(ended(&Call::add_key(&image.0, &old, &new)), Outcome::Done);
        assert!(image.opens(&old) && image.opens(&new));
        assert_eq!(ended(&Call::remove_key(&image.0, &old)), Outcome::Done);
        assert!(!image.opens(&old) && image.opens(&new));
        // The slot is gone already, as after an interruption.
        assert_eq!(ended(&Call::remove_key(&image.0, &old)), Outcome::WrongKey);
        assert!(image.opens(&new));
    }

    #[test]
    fn what_is_no_header_is_not_opened() {
        let image = Image::new("none");
        let one = key(OLD);
        assert_eq!(ended(&Call::open(&image.0, "none", &one, false)), Outcome::Failed);
    }
}
