//! Files, devices and sockets that a ring knows by a number of its own.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use blockd_media::Device;
use io_uring::IoUring;

use super::Ring;
use crate::backing::operation::FileSlot;

/// Most files of a ring that serves no clients: devices, of which there are few.
const MAX_FILES: u32 = 4096;
/// Most files and sockets of a ring that serves clients. Each connection waits for its next request
/// with one of the ring's operations: of a worker's 16,384, the rest is for media and replies.
const MAX_SOCKETS: u32 = 12 << 10;
/// A ring with fewer is of no use.
const MIN_FILES: u32 = 64;

/// Makes a ring's table of files, and returns how many entries it has: fewer where the process may
/// have fewer open files, which is the kernel's limit.
pub(super) fn register(ring: &IoUring, serves: bool) -> std::io::Result<u32> {
    let mut entries = if serves { MAX_SOCKETS } else { MAX_FILES };
    loop {
        match ring.submitter().register_files_sparse(entries) {
            Ok(()) => return Ok(entries),
            Err(error) if error.raw_os_error() == Some(libc::EMFILE) && entries > MIN_FILES => {
                entries = (entries / 2).max(MIN_FILES);
            }
            Err(error) => return Err(error),
        }
    }
}

impl Ring {
    /// Makes a file known. The ring keeps it open.
    pub fn add_file(&mut self, file: &Arc<File>) -> std::io::Result<FileSlot> {
        self.add(file.as_raw_fd(), Arc::clone(file) as _)
    }

    /// Makes a device known. The ring keeps it open, and starts no write to it while its gate is
    /// closed.
    pub fn add_device(&mut self, device: &Device) -> std::io::Result<FileSlot> {
        let slot = self.add_file(device.file())?;
        self.gates[slot.0 as usize] = device.gate().cloned();
        Ok(slot)
    }

    /// Makes a socket known. The ring keeps it open.
    pub fn add_socket(&mut self, socket: &Arc<OwnedFd>) -> std::io::Result<FileSlot> {
        self.add(socket.as_raw_fd(), Arc::clone(socket) as _)
    }

    fn add(&mut self, fd: i32, keep: Arc<dyn Send + Sync>) -> std::io::Result<FileSlot> {
        let free = self.files.iter().position(Option::is_none);
        let most = self.files.len();
        let full = || std::io::Error::other(format!("a ring has at most {most} files and sockets"));
        let at = free.ok_or_else(full)?;
        let slot = u32::try_from(at).map_err(std::io::Error::other)?;
        self.ring.submitter().register_files_update(slot, &[fd])?;
        self.files[at] = Some(keep);
        Ok(FileSlot(slot))
    }

    /// Forgets a file, and closes a socket. Operations that are out keep it open in the kernel.
    pub fn remove(&mut self, slot: FileSlot) {
        // It can't fail for a slot in use; if it did, the slot would stay taken.
        if self.ring.submitter().register_files_update(slot.0, &[-1]).is_ok() {
            self.files[slot.0 as usize] = None;
            self.gates[slot.0 as usize] = None;
        }
    }
}
