//! A block device as an application uses it that trusts no cache: aligned memory and `O_DIRECT`.

use std::fs::{self, File};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use blockd_testkit::nbd::{FUA, Kind, NO_HOLE, Request};
use blockd_testkit::tools;
use nix::fcntl::{FallocateFlags, OFlag, fallocate};

/// The largest alignment of memory that `O_DIRECT` may require.
const ALIGNMENT: usize = 4096;

/// Memory that the kernel can do IO with directly.
#[derive(Debug, Default)]
pub struct Buffer {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    /// Its bytes, as many as asked for, of whatever content.
    pub fn of(&mut self, len: usize) -> &mut [u8] {
        if self.memory.len() < len + ALIGNMENT {
            self.memory.resize(len + ALIGNMENT, 0);
            self.start = self.memory.as_ptr().align_offset(ALIGNMENT);
        }
        self.len = len;
        &mut self.memory[self.start..self.start + len]
    }

    /// The bytes that were asked for last.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.len]
    }
}

/// An open block device.
#[derive(Debug)]
pub struct Device {
    path: PathBuf,
    file: File,
    /// The same with `O_DSYNC`: what is written here is durable when answered.
    durable: File,
    /// Bytes.
    pub size: u64,
}

impl Device {
    /// Opens it for reading and writing.
    ///
    /// # Errors
    /// When it can't be opened.
    pub fn open(path: &Path) -> Result<Self> {
        let open = |flags: OFlag| {
            let mut options = File::options();
            options.read(true).write(true).custom_flags((OFlag::O_DIRECT | flags).bits());
            options.open(path).with_context(|| format!("opening {}", path.display()))
        };
        let mut file = open(OFlag::empty())?;
        let size = file.seek(SeekFrom::End(0))?;
        let path = fs::canonicalize(path)?;
        Ok(Self { path, file, durable: open(OFlag::O_DSYNC)?, size })
    }

    /// Writes the buffer's bytes.
    ///
    /// # Errors
    /// With the kernel's error.
    pub fn write(&self, offset: u64, buffer: &Buffer) -> Result<()> {
        Ok(self.file.write_all_at(buffer.bytes(), offset)?)
    }

    /// Reads into the buffer.
    ///
    /// # Errors
    /// With the kernel's error.
    pub fn read(&self, offset: u64, len: usize, buffer: &mut Buffer) -> Result<()> {
        Ok(self.file.read_exact_at(buffer.of(len), offset)?)
    }

    /// Makes durable what was written.
    ///
    /// # Errors
    /// With the kernel's error.
    pub fn flush(&self) -> Result<()> {
        Ok(self.file.sync_data()?)
    }

    /// Does a request; the buffer has a write's data and takes a read's.
    ///
    /// # Errors
    /// With the kernel's error, and the request.
    pub fn ask(&self, request: &Request, buffer: &mut Buffer) -> Result<()> {
        let Request { kind, flags, offset, len, .. } = *request;
        let file = if flags & FUA == 0 { &self.file } else { &self.durable };
        let size = usize::try_from(len)?;
        let done: Result<()> = match kind {
            Kind::Read => self.file.read_exact_at(buffer.of(size), offset).map_err(Into::into),
            Kind::Write => file.write_all_at(buffer.bytes(), offset).map_err(Into::into),
            Kind::Flush => self.file.sync_data().map_err(Into::into),
            // A hole is punched, and the other keeps its space.
            Kind::WriteZeroes if flags & NO_HOLE == 0 => {
                let hole =
                    FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
                self.allocate(hole, offset, len)
            }
            Kind::WriteZeroes => self.allocate(FallocateFlags::FALLOC_FL_ZERO_RANGE, offset, len),
            Kind::Trim => self.discard(offset, len),
        };
        done.with_context(|| format!("{kind:?} of {len} at {offset} on {}", self.path.display()))
    }

    fn allocate(&self, how: FallocateFlags, offset: u64, len: u32) -> Result<()> {
        Ok(fallocate(&self.file, how, i64::try_from(offset)?, i64::from(len))?)
    }

    fn discard(&self, offset: u64, len: u32) -> Result<()> {
        let (offset, len) = (offset.to_string(), len.to_string());
        // Without force it opens the device exclusively.
        let mut command = Command::new("blkdiscard");
        command.args(["--force", "--offset", &offset, "--length", &len]).arg(&self.path);
        tools::output(&mut command).map(|_| ())
    }
}
