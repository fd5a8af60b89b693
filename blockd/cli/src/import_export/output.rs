//! Where an exported image goes. A file that is to be replaced stays as it is until the new one is
//! whole and durable: the new one is written beside it, and takes its name at the end.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};

use blockd_media::error::Error;

use super::taken;

/// Names that are tried for a file beside another: one that was left by a killed process with our
/// number is rare, and a hundred of them are something else.
const MAX_NAMES: u32 = 100;
/// Bytes that a name may have on every file system of Linux.
const MAX_NAME_BYTES: usize = 255;

/// Where an image goes.
#[derive(Debug)]
pub(super) enum Output {
    Stdout,
    /// A device, a pipe, a terminal: written where it is.
    Special(File),
    Regular(Regular),
}

/// A regular file, which is gone again unless it is [placed](Output::place).
#[derive(Debug)]
pub(super) struct Regular {
    file: File,
    /// Its name until then.
    at: PathBuf,
    /// The name that it is to have.
    path: PathBuf,
    /// There is one of that name.
    replaces: bool,
    placed: bool,
}

impl Output {
    /// Opens the output, empty. An existing file is rejected without `force`, and otherwise
    /// replaced only at the end.
    pub(super) fn open(path: &Path, force: bool) -> Result<Self, Error> {
        if path.as_os_str() == "-" {
            return Ok(Self::Stdout);
        }
        let failed = |source| Error::file("create", path, source);
        let found = match fs::metadata(path) {
            Ok(found) => Some(found),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => return Err(failed(error)),
        };
        match found {
            Some(found) if force && !found.is_file() => {
                OpenOptions::new().write(true).open(path).map(Self::Special).map_err(failed)
            }
            Some(found) if force => {
                // The target of a link is replaced, not the link.
                let path = fs::canonicalize(path).map_err(failed)?;
                Regular::beside(&path, Some(&found)).map(Self::Regular)
            }
            None if force => Regular::beside(path, None).map(Self::Regular),
            _ => Regular::new(path).map(Self::Regular),
        }
    }

    /// The file to be written; none for standard output.
    pub(super) fn file(&self) -> Result<Option<File>, Error> {
        let file = match self {
            Self::Stdout => return Ok(None),
            Self::Special(file) | Self::Regular(Regular { file, .. }) => file,
        };
        file.try_clone().map(Some).map_err(|source| Error::io("opening the output again", source))
    }

    /// Where another program is to write it.
    pub(super) fn written_at<'a>(&'a self, path: &'a Path) -> &'a Path {
        match self {
            Self::Regular(regular) => &regular.at,
            Self::Stdout | Self::Special(_) => path,
        }
    }

    /// The state of the output after a failure, as text for the error: half an image is of no use.
    pub(super) fn given_up(&self) -> String {
        match self {
            Self::Stdout | Self::Special(_) => "the output is incomplete".to_owned(),
            Self::Regular(Regular { path, replaces: true, .. }) => {
                format!("{} is as it was", path.display())
            }
            Self::Regular(Regular { path, .. }) => format!("{} is removed", path.display()),
        }
    }

    /// Gives it its name, durably. Only of what is whole.
    pub(super) fn place(self) -> Result<(), Error> {
        let Self::Regular(mut regular) = self else { return Ok(()) };
        // A name that leads to what a power loss takes away would be worse than the old file.
        let synced = regular.file.sync_all();
        synced.map_err(|source| Error::file("write", &regular.at, source))?;
        let failed = |source| Error::file("replace", &regular.path, source);
        if regular.at != regular.path {
            fs::rename(&regular.at, &regular.path).map_err(failed)?;
        }
        regular.placed = true;
        File::open(folder(&regular.path)).and_then(|folder| folder.sync_all()).map_err(failed)
    }
}

impl Regular {
    /// A file that is not there yet: its name is taken from the beginning.
    fn new(path: &Path) -> Result<Self, Error> {
        let opened = OpenOptions::new().write(true).create_new(true).open(path);
        let file = opened.map_err(|source| match source.kind() {
            ErrorKind::AlreadyExists => taken(
                &path.display().to_string(),
                "exists: choose another name, or --force to replace it",
            ),
            _ => Error::file("create", path, source),
        })?;
        let path = path.to_owned();
        Ok(Self { file, at: path.clone(), path, replaces: false, placed: false })
    }

    /// A file beside the one that it is to replace, on the same file system.
    fn beside(path: &Path, old: Option<&fs::Metadata>) -> Result<Self, Error> {
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        if old.is_some() {
            // A user who cannot read the old file must not be able to read this one.
            options.mode(0o600);
        }
        let name = path.file_name().unwrap_or_default();
        let mut number = 0;
        let (file, at) = loop {
            let at = folder(path).join(temporary(name, number));
            match options.open(&at) {
                Ok(file) => break (file, at),
                Err(error) if error.kind() == ErrorKind::AlreadyExists && number < MAX_NAMES => {
                    number += 1;
                }
                Err(source) => return Err(Error::file("create", &at, source)),
            }
        };
        let new = Self { file, at, path: path.to_owned(), replaces: old.is_some(), placed: false };
        if let Some(old) = old {
            // A user who may not change owners replaces it by a file of his own.
            let _ = fchown(&new.file, Some(old.uid()), Some(old.gid()));
            let set = new.file.set_permissions(old.permissions());
            set.map_err(|source| Error::file("create", &new.at, source))?;
        }
        Ok(new)
    }
}

impl Drop for Regular {
    fn drop(&mut self) {
        if !self.placed {
            let _ = fs::remove_file(&self.at);
        }
    }
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."))
}

/// The name of a file that is not whole yet.
fn temporary(name: &OsStr, number: u32) -> OsString {
    let end = format!(".{}-{number}.part", std::process::id());
    let mut whole = OsString::from(".");
    let room = MAX_NAME_BYTES - end.len() - whole.len();
    let bytes = name.as_bytes();
    whole.push(OsStr::from_bytes(&bytes[..bytes.len().min(room)]));
    whole.push(end);
    whole
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A folder, gone with the test, and the names in it.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let name = format!("blockd-output-{name}-{}", std::process::id());
            let path = std::env::temp_dir().join(name);
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn names(&self) -> Vec<String> {
            let entries = fs::read_dir(&self.0).unwrap();
            let name = |entry: fs::DirEntry| entry.file_name().into_string().unwrap();
            let mut names: Vec<_> = entries.map(|entry| name(entry.unwrap())).collect();
            names.sort();
            names
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn an_old_file_stays_until_the_new_one_is_whole() {
        let folder = Folder::new("old");
        let path = folder.0.join("image");
        fs::write(&path, "old").unwrap();
        fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
        for place in [false, true] {
            let output = Output::open(&path, true).unwrap();
            output.file().unwrap().unwrap().write_all(b"newer").unwrap();
            assert_eq!(fs::read(&path).unwrap(), b"old");
            assert_eq!(output.given_up(), format!("{} is as it was", path.display()));
            if place {
                output.place().unwrap();
            }
        }
        assert_eq!(fs::read(&path).unwrap(), b"newer");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o640);
        assert_eq!(folder.names(), ["image"]);
    }

    #[test]
    fn the_target_of_a_link_is_replaced() {
        let folder = Folder::new("link");
        fs::create_dir(folder.0.join("there")).unwrap();
        fs::write(folder.0.join("there/image"), "old").unwrap();
        std::os::unix::fs::symlink("there/image", folder.0.join("link")).unwrap();
        let output = Output::open(&folder.0.join("link"), true).unwrap();
        output.file().unwrap().unwrap().write_all(b"new").unwrap();
        output.place().unwrap();
        assert_eq!(fs::read(folder.0.join("there/image")).unwrap(), b"new");
        assert!(fs::symlink_metadata(folder.0.join("link")).unwrap().is_symlink());
    }

    #[test]
    fn a_new_file_has_its_name_at_once_and_goes_again_when_given_up() {
        let folder = Folder::new("new");
        let path = folder.0.join("image");
        let output = Output::open(&path, false).unwrap();
        let second = Output::open(&path, false).unwrap_err();
        assert!(second.to_string().contains("--force"), "{second}");
        assert_eq!(folder.names(), ["image"]);
        drop(output);
        assert!(folder.names().is_empty());
        Output::open(&path, true).unwrap().place().unwrap();
        assert_eq!(folder.names(), ["image"]);
    }

    #[test]
    fn the_longest_name_has_room_beside_it() {
        let folder = Folder::new("long");
        let path = folder.0.join("x".repeat(255));
        fs::write(&path, "old").unwrap();
        Output::open(&path, true).unwrap().place().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"");
    }
}
