//! What kind of image a file is.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use super::increment;
use crate::error::Error;

/// How an image holds a disk's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// The bytes as they are
    Raw,
    /// qemu's format; needs qemu-img
    Qcow2,
    /// blockd's own, with checksums, for `import --apply`; what --since writes
    Backup,
}

/// The same, or to be found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum WantedFormat {
    /// Look at the file: qcow2 by its first bytes, else raw
    Auto,
    /// The bytes as they are
    Raw,
    /// qemu's format; needs qemu-img
    Qcow2,
}

/// How each qcow2 file begins.
const QCOW2_MAGIC: [u8; 4] = *b"QFI\xfb";

impl WantedFormat {
    /// The format of this file.
    pub(crate) fn of(self, file: &mut File, path: &Path) -> Result<Format, Error> {
        match self {
            Self::Raw => Ok(Format::Raw),
            Self::Qcow2 => Ok(Format::Qcow2),
            Self::Auto => {
                let mut begin = Vec::new();
                let read = file.take(8).read_to_end(&mut begin);
                read.map_err(|source| Error::file("reading", path, source))?;
                if increment::begins(&begin) {
                    let allowed = "an image: this is a backup, which --apply is for";
                    return Err(Error::invalid("FILE", path.display(), allowed));
                }
                Ok(if begin.starts_with(&QCOW2_MAGIC) { Format::Qcow2 } else { Format::Raw })
            }
        }
    }
}
