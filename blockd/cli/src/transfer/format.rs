//! The format of an image file.

use std::fs::File;
use std::path::Path;

use blockd_media::error::Error;

use super::image::{self, qcow2, vhd, vhdx, vmdk};
use super::increment;

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

/// How an image that is imported holds a disk's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ImageFormat {
    Raw,
    Qcow2,
    Vhd,
    Vhdx,
    Vmdk,
}

/// The same, or to be found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum WantedFormat {
    /// Look at the file, and print what it is: one of the others by its mark, else raw
    Auto,
    /// The bytes as they are
    Raw,
    /// qemu's format; needs qemu-img
    Qcow2,
    /// Format of Virtual PC, Hyper-V and Xen, fixed or dynamic; needs qemu-img
    Vhd,
    /// Format of Hyper-V; needs qemu-img
    Vhdx,
    /// Format of VMware; needs qemu-img
    Vmdk,
}

/// All formats, and qemu's names for them.
const FORMATS: [(ImageFormat, &str, &str); 5] = [
    (ImageFormat::Raw, "raw", "raw"),
    (ImageFormat::Qcow2, "qcow2", "qcow2"),
    (ImageFormat::Vhd, "vhd", "vpc"),
    (ImageFormat::Vhdx, "vhdx", "vhdx"),
    (ImageFormat::Vmdk, "vmdk", "vmdk"),
];

impl ImageFormat {
    fn row(self) -> (Self, &'static str, &'static str) {
        FORMATS.into_iter().find(|(format, ..)| *format == self).unwrap_or(FORMATS[0])
    }

    /// As people write it.
    pub(crate) fn name(self) -> &'static str {
        self.row().1
    }

    /// The driver of qemu that reads it.
    pub(crate) fn driver(self) -> &'static str {
        self.row().2
    }

    /// The format that a driver of qemu reads.
    pub(crate) fn of_driver(driver: &[u8]) -> Option<Self> {
        let row = FORMATS.into_iter().find(|(_, _, name)| name.as_bytes() == driver);
        row.map(|(format, ..)| format)
    }

    /// The format of a file by its mark; raw where it has none.
    pub(crate) fn detect(file: &File, path: &Path) -> Result<Self, Error> {
        let failed = |source| Error::file("reading", path, source);
        let begin = image::read_up_to(file, 0, 512).map_err(failed)?;
        let end = image::size_of(file).map_err(failed)?.saturating_sub(vhd::FOOTER_BYTES);
        let footer = image::read_up_to(file, end, 8).map_err(failed)?;
        if increment::begins(&begin) {
            let allowed = "an image: this is a backup, which --apply is for";
            return Err(Error::invalid("FILE", path.display(), allowed));
        }
        let is_vmdk = [&vmdk::SPARSE_MAGIC[..], &vmdk::COWD_MAGIC, vmdk::DESCRIPTOR_MARK];
        Ok(match () {
            () if begin.starts_with(&qcow2::MAGIC) => Self::Qcow2,
            () if begin.starts_with(&vhdx::SIGNATURE) => Self::Vhdx,
            () if is_vmdk.iter().any(|mark| begin.starts_with(mark)) => Self::Vmdk,
            () if begin.starts_with(&vhd::COOKIE) || footer == vhd::COOKIE => Self::Vhd,
            () => Self::Raw,
        })
    }
}

impl WantedFormat {
    /// The format of this file.
    pub(crate) fn of(self, file: &File, path: &Path) -> Result<ImageFormat, Error> {
        match self {
            Self::Auto => ImageFormat::detect(file, path),
            Self::Raw => Ok(ImageFormat::Raw),
            Self::Qcow2 => Ok(ImageFormat::Qcow2),
            Self::Vhd => Ok(ImageFormat::Vhd),
            Self::Vhdx => Ok(ImageFormat::Vhdx),
            Self::Vmdk => Ok(ImageFormat::Vmdk),
        }
    }
}
