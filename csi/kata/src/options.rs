//! `blockd-csi kata-image`: an image by hand, for a machine that is started by hand, and for tests.

use std::fmt::Display;
use std::fs::File;
use std::io::{self, Write as _};
use std::path::PathBuf;

use blockd_csi_base::error::Invalid;
use blockd_csi_base::quantity;
use clap::Parser;

use super::{FRONT, Image, SMALLEST};

/// Why no image was made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No image has this size, or the file has another one.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// The operating system refused.
    #[error("{what}: {source}")]
    Io {
        /// The file, or the output.
        what: String,
        /// The answer.
        source: io::Error,
    },
}

impl Error {
    fn io(what: impl Display, source: io::Error) -> Self {
        Self::Io { what: what.to_string(), source }
    }
}

/// Makes a sparse file that a virtual machine sees as a device of persistent memory. It prints
/// where in the file its file system is to be made, and how many bytes that may have.
#[derive(Parser, Clone, Debug)]
#[command(name = "blockd-csi kata-image")]
pub struct Options {
    /// Bytes of the file, or a quantity as 256Mi; rounded up to 2 MiB.
    #[arg(long, value_name = "SIZE")]
    pub size: String,
    /// A partition table on the machine's device: the file system is then on `/dev/pmem0p1`, and on
    /// `/dev/pmem0` without.
    #[arg(long)]
    pub partition: bool,
    /// The file; an existing image must have this size, and keeps the content of its file system.
    pub file: PathBuf,
}

impl Options {
    /// Makes it.
    ///
    /// # Errors
    /// The size is none of an image, something else is there, or it can't be written.
    pub fn run(&self) -> Result<(), Error> {
        let size = quantity::size("--size", &self.size)?;
        let bytes = u64::try_from(size.get()).unwrap_or_default();
        let image = bytes.checked_next_multiple_of(FRONT);
        let image = image.and_then(|bytes| Image::within(bytes, self.partition));
        let image = image.ok_or_else(|| {
            let allowed = format!("{SMALLEST} bytes or more");
            Invalid::new("--size", size, allowed)
        })?;
        let shown = self.file.display();
        let failed = |error| Error::io(&shown, error);
        let mut options = File::options();
        let options = options.read(true).write(true).create(true).truncate(false);
        let file = options.open(&self.file).map_err(failed)?;
        let len = file.metadata().map_err(failed)?.len();
        if len != 0 && len != image.size() {
            return Err(Invalid::new("FILE", format_args!("{len} bytes long"), image.size()).into());
        }
        image.write(&file).map_err(failed)?;
        let (at, bytes) = (image.file_system(), image.file_system_bytes());
        writeln!(std::io::stdout(), "{at} {bytes}").map_err(|error| Error::io("output", error))
    }
}
