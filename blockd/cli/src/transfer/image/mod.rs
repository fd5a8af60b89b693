//! The files that an image refers to. An image is untrusted: its header is parsed here, and
//! qemu-img opens only allowed files, each with an explicit driver.

pub(super) mod qcow2;
pub(super) mod vhd;
pub(super) mod vhdx;
pub(super) mod vmdk;

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use blockd_media::error::{Error, shown};
use nix::unistd::{Whence, lseek};
use serde_json::{Value, json};

use super::format::ImageFormat;

/// Images behind each other. Chains of snapshots of virtual machines are shorter.
const MAX_CHAIN: usize = 16;
/// Files of one chain, parts included. A disk of 64 TiB in parts of 2 GiB has more, and is refused.
const MAX_FILES: usize = 1024;

/// A file that an image needs beside itself.
#[derive(Debug, PartialEq, Eq)]
enum Outside {
    /// The disk below it, and its format where the image names it.
    Backing { name: Vec<u8>, format: Option<Vec<u8>> },
    /// The bytes of a qcow2 image.
    DataFile(Vec<u8>),
    /// A part of a VMDK.
    Extent(Vec<u8>),
    /// A VHD or VHDX that this one is a difference to, which qemu can't read.
    Parent(Vec<u8>),
    /// A key.
    Key(&'static str),
}

/// Why a backing file is not followed that may be of any format.
const NO_FORMAT: &str =
    "the image does not say in which format; set it with qemu-img rebase -u -F FORMAT";

/// Why a header is refused.
#[derive(Debug)]
enum Fault {
    Io(io::Error),
    /// No image of that format, or one that qemu can't read.
    Header(&'static str),
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// An image that was let through.
#[derive(Debug)]
pub(crate) struct Gated {
    /// For qemu: the image, and what it needs, without anything left to be guessed.
    node: Value,
    /// Files that are read beside the image itself, in the order of the chain.
    pub(crate) others: Vec<PathBuf>,
    /// When the file was last changed, and its size.
    state: (i64, i64, u64),
}

impl Gated {
    /// The image as qemu-img takes it for a file name: nothing in it is probed.
    pub(crate) fn argument(&self) -> String {
        format!("json:{}", self.node)
    }

    /// The same for `qemu-img info`, which opens no backing file and refuses to be given one.
    pub(crate) fn argument_of_top(&self) -> String {
        let mut top = self.node.clone();
        top["backing"] = Value::Null;
        format!("json:{top}")
    }

    /// An error if the image was changed since its header was looked at.
    pub(crate) fn check_unchanged(&self, file: &File, path: &Path) -> Result<(), Error> {
        if state(file, path)? == self.state {
            return Ok(());
        }
        Err(Error::in_use(path.display().to_string(), "was changed while it was imported"))
    }
}

fn state(file: &File, path: &Path) -> Result<(i64, i64, u64), Error> {
    let metadata =
        file.metadata().map_err(|source| Error::file("read the metadata of", path, source))?;
    Ok((metadata.ctime(), metadata.ctime_nsec(), metadata.len()))
}

/// The image at a path, with the file that was opened there.
struct Member<'a> {
    file: &'a File,
    path: &'a Path,
    format: ImageFormat,
}

/// Looks at an image's header. Without `follow` nothing beside the image is opened.
///
/// The file itself is handed to qemu-img as standard input, so what was looked at is what is read.
pub(crate) fn gate(
    file: &File,
    path: &Path,
    format: ImageFormat,
    follow: bool,
) -> Result<Gated, Error> {
    let (mut others, state) = (Vec::new(), state(file, path)?);
    let node = member(&Member { file, path, format }, follow, 1, &mut others)?;
    Ok(Gated { node, others, state })
}

/// Where qemu finds its standard input. The link leads to the file that is open, whatever is at its
/// path by now.
const STANDARD_INPUT: &str = "/proc/self/fd/0";

fn member(
    image: &Member<'_>,
    follow: bool,
    depth: usize,
    others: &mut Vec<PathBuf>,
) -> Result<Value, Error> {
    if depth > MAX_CHAIN || others.len() > MAX_FILES {
        let allowed = format!("an image of at most {MAX_CHAIN} layers and {MAX_FILES} files");
        return Err(Error::invalid("FILE", image.path.display(), allowed));
    }
    let outside = outside(image)?;
    let has_extents = outside.iter().any(|one| matches!(one, Outside::Extent(_)));
    // qemu finds the parts of a VMDK beside it, by its path.
    let by_path = depth > 1 || has_extents;
    let mut node = json!({
        "driver": image.format.driver(),
        "backing": null,
        "file": file_node(image.file, image.path, by_path)?,
    });
    for one in outside {
        let refused = |problem: &str| refuse(image.path, &one, problem);
        if !follow {
            return Err(refused("pass --follow-backing to read that too"));
        }
        let name = match &one {
            Outside::Key(_) | Outside::Parent(_) => {
                return Err(refused("qemu-img can't read it as part of another image"));
            }
            Outside::Backing { name, .. } | Outside::DataFile(name) | Outside::Extent(name) => name,
        };
        let path = local(image.path, name)
            .ok_or_else(|| refused("only files of this host are followed"))?;
        let file = open("backing file", &path)?;
        others.push(path.clone());
        match &one {
            Outside::Backing { format, .. } => {
                let format = match format.as_deref() {
                    Some(name) => ImageFormat::of_driver(name)
                        .ok_or_else(|| refused("its format is not one that import reads"))?,
                    // A raw disk may begin like another format, as its content is up to its user.
                    None => return Err(refused(NO_FORMAT)),
                };
                let below = Member { file: &file, path: &path, format };
                node["backing"] = member(&below, follow, depth + 1, others)?;
            }
            Outside::DataFile(_) => {
                let file = file_node(&file, &path, true)?;
                node["data-file"] = json!({ "driver": "raw", "file": file });
            }
            _ => {}
        }
    }
    Ok(node)
}

fn outside(image: &Member<'_>) -> Result<Vec<Outside>, Error> {
    let found = match image.format {
        ImageFormat::Raw => Ok(Vec::new()),
        ImageFormat::Qcow2 => qcow2::outside(image.file),
        ImageFormat::Vhd => vhd::outside(image.file),
        ImageFormat::Vhdx => vhdx::outside(image.file),
        ImageFormat::Vmdk => vmdk::outside(image.file),
    };
    found.map_err(|fault| match fault {
        Fault::Io(source) => Error::file("read", image.path, source),
        Fault::Header(problem) => {
            let allowed = format!("a sound {} image: {problem}", image.format.name());
            Error::invalid("FILE", image.path.display(), allowed)
        }
    })
}

fn refuse(path: &Path, one: &Outside, problem: &str) -> Error {
    let name = |bytes: &[u8]| shown(String::from_utf8_lossy(bytes));
    let needs = match one {
        Outside::Backing { name: file, .. } => format!("it names the backing file {}", name(file)),
        Outside::DataFile(file) => format!("it names the external data file {}", name(file)),
        Outside::Extent(file) => format!("it names the extent file {}", name(file)),
        Outside::Parent(file) => {
            format!("it is a differencing image and names the parent {}", name(file))
        }
        Outside::Key(method) => format!("it is encrypted ({method})"),
    };
    let problem = if matches!(one, Outside::Key(_) | Outside::Parent(_)) {
        "convert it to a plain image first"
    } else {
        problem
    };
    let allowed = format!("an image that is complete in itself: {needs}; {problem}");
    Error::invalid("FILE", path.display(), allowed)
}

/// The file that a name in an image means, unless qemu would take it for something else: its names
/// of protocols end with a colon before any slash.
fn local(image: &Path, name: &[u8]) -> Option<PathBuf> {
    let name = std::str::from_utf8(name).ok().filter(|name| !name.is_empty())?;
    let first = name.split('/').next().unwrap_or_default();
    if first.contains(':') || name.contains('\0') {
        return None;
    }
    let folder = std::fs::canonicalize(image).ok()?.parent()?.to_owned();
    Some(folder.join(name))
}

/// Opens an image, or a file that an image names. Opening a FIFO does not wait for a writer.
pub(crate) fn open(label: &str, path: &Path) -> Result<File, Error> {
    use std::os::unix::fs::OpenOptionsExt;
    let failed = |source| Error::file("open", path, source);
    let mut options = File::options();
    let file = options.read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(failed)?;
    let kind = file.metadata().map_err(failed)?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err(Error::invalid(label, path.display(), "a file or a block device"));
    }
    Ok(file)
}

fn file_node(file: &File, path: &Path, by_path: bool) -> Result<Value, Error> {
    let metadata =
        file.metadata().map_err(|source| Error::file("read the metadata of", path, source))?;
    let driver = if metadata.file_type().is_block_device() { "host_device" } else { "file" };
    if !by_path {
        return Ok(json!({ "driver": driver, "filename": STANDARD_INPUT }));
    }
    let full = std::fs::canonicalize(path).map_err(|source| Error::file("find", path, source))?;
    let full = full.into_os_string().into_string();
    let full = full.map_err(|path| Error::invalid("FILE", path.display(), "a path in UTF-8"))?;
    Ok(json!({ "driver": driver, "filename": full }))
}

/// Of a file or a block device: the latter's metadata say nothing.
pub(crate) fn size_of(file: &File) -> io::Result<u64> {
    let end = lseek(file, 0, Whence::SeekEnd)?;
    Ok(u64::try_from(end).unwrap_or(0))
}

/// Reads up to `len` bytes: fewer at the file's end.
pub(super) fn read_up_to(file: &File, offset: u64, len: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    let mut filled = 0;
    while filled < len {
        let at = offset.checked_add(filled as u64).ok_or(io::ErrorKind::InvalidInput)?;
        match file.read_at(&mut bytes[filled..], at) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

/// All of `len` bytes.
fn read_exactly(file: &File, offset: u64, len: usize) -> Result<Vec<u8>, Fault> {
    let bytes = read_up_to(file, offset, len)?;
    if bytes.len() < len { Err(Fault::Header("it ends within its header")) } else { Ok(bytes) }
}

/// A field of `N` bytes; zeroes where there is none.
fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let found = bytes.get(at..).and_then(|rest| rest.first_chunk::<N>());
    found.copied().unwrap_or([0; N])
}

/// Text in UTF-16, up to its first zero.
fn utf16(bytes: &[u8], unit: fn([u8; 2]) -> u16) -> Vec<u8> {
    let units = bytes.as_chunks::<2>().0.iter().map(|pair| unit(*pair));
    let text: Vec<u16> = units.take_while(|unit| *unit != 0).collect();
    String::from_utf16_lossy(&text).into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_a_protocol_are_no_files_of_this_host() {
        let image = Path::new("/tmp");
        for name in ["nbd://127.0.0.1/x", "json:{}", "fat:/etc", "nbd:unix:/run/x", "", "a\0b"] {
            assert_eq!(local(image, name.as_bytes()), None, "{name}");
        }
        assert_eq!(local(image, b"/etc/shadow"), Some("/etc/shadow".into()));
        assert_eq!(local(image, b"./a:b"), Some("/./a:b".into()));
    }

    /// Headers are read without trust in any of their bytes: no panic, and no endless loop.
    #[test]
    fn headers_of_any_bytes_are_read_or_refused() {
        let dir = std::env::temp_dir().join(format!("blockd-headers-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("image");
        let mut random = fastrand::Rng::with_seed(7);
        let begins: [(&[u8], usize); 5] = [
            (b"QFI\xfb\0\0\0\x03", 0),
            (b"conectix", 0),
            (b"vhdxfile", 0),
            (b"KDMV", 0),
            (b"regi", 192 << 10),
        ];
        for round in 0..300 {
            let mut bytes = vec![0; 330 << 10];
            for _ in 0..40 {
                let at = random.usize(..if round % 2 == 0 { 600 } else { bytes.len() });
                bytes[at] = random.u8(..);
            }
            let (begin, at) = begins[round % begins.len()];
            bytes[at..at + begin.len()].copy_from_slice(begin);
            std::fs::write(&path, &bytes).unwrap();
            let file = File::open(&path).unwrap();
            for format in
                [ImageFormat::Qcow2, ImageFormat::Vhd, ImageFormat::Vhdx, ImageFormat::Vmdk]
            {
                let _ = gate(&file, &path, format, false);
            }
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
