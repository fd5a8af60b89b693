//! The files and sockets that a ring knows.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use blockd_media::Gate;
use io_uring::IoUring;

use crate::backing::operation::{FileSlot, Socket};

/// Most files of a ring that serves no clients: devices, of which there are few.
const MAX_FILES: u32 = 4096;
/// Most files and sockets of a ring that serves clients. Each connection waits for its next request
/// with one of the ring's operations: of a worker's 16,384, the rest is for media and replies.
const MAX_SOCKETS: u32 = 12 << 10;
/// A ring with fewer is of no use.
const MIN_FILES: u32 = 64;

/// The files of a ring, up to the last place that was ever in use.
pub(super) struct Files {
    kept: Vec<Option<Arc<dyn Send + Sync>>>,
    /// Of the files that are devices with a gate.
    gates: Vec<Option<Arc<Gate>>>,
    /// Sockets, which have no place in the kernel's table: see [`Socket`].
    sockets: Vec<Option<Arc<OwnedFd>>>,
    most: usize,
}

impl Files {
    /// Asks the kernel for places: fewer where the process may have fewer open files.
    pub(super) fn register(ring: &IoUring, serves: bool) -> std::io::Result<Self> {
        let mut entries = if serves { MAX_SOCKETS } else { MAX_FILES };
        loop {
            match ring.submitter().register_files_sparse(entries) {
                Ok(()) => break,
                Err(error) if error.raw_os_error() == Some(libc::EMFILE) && entries > MIN_FILES => {
                    entries = (entries / 2).max(MIN_FILES);
                }
                Err(error) => return Err(error),
            }
        }
        let (kept, gates, sockets) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Self { kept, gates, sockets, most: entries as usize })
    }

    /// The first free place of a list of files or sockets.
    fn place<T>(&self, list: &[Option<T>]) -> std::io::Result<usize> {
        let most = self.most;
        let at = list.iter().position(Option::is_none).unwrap_or(list.len());
        if at == most {
            let full = format!("a ring has at most {most} files and sockets");
            return Err(std::io::Error::other(full));
        }
        Ok(at)
    }

    /// Keeps a socket open.
    pub(super) fn add_socket(&mut self, socket: &Arc<OwnedFd>) -> std::io::Result<Socket> {
        let at = self.place(&self.sockets)?;
        if at == self.sockets.len() {
            self.sockets.push(None);
        }
        self.sockets[at] = Some(Arc::clone(socket));
        Ok(Socket { fd: socket.as_raw_fd(), at })
    }

    /// Keeps a socket open no longer.
    pub(super) fn remove_socket(&mut self, socket: Socket) {
        self.sockets[socket.at] = None;
    }

    /// Makes a file known to the kernel, and keeps it open.
    pub(super) fn add(
        &mut self,
        ring: &IoUring,
        fd: i32,
        keep: Arc<dyn Send + Sync>,
    ) -> std::io::Result<FileSlot> {
        let at = self.place(&self.kept)?;
        let slot = u32::try_from(at).map_err(std::io::Error::other)?;
        ring.submitter().register_files_update(slot, &[fd])?;
        if at == self.kept.len() {
            self.kept.push(None);
        }
        self.kept[at] = Some(keep);
        Ok(FileSlot(slot))
    }

    /// Lets no write to a file begin while its gate is closed.
    pub(super) fn guard(&mut self, slot: FileSlot, gate: Option<Arc<Gate>>) {
        let at = slot.0 as usize;
        self.gates.resize(self.gates.len().max(at + 1), None);
        self.gates[at] = gate;
    }

    /// The gate of a device, if it has one.
    #[inline]
    pub(super) fn gate(&self, slot: FileSlot) -> Option<&Arc<Gate>> {
        self.gates.get(slot.0 as usize).and_then(Option::as_ref)
    }

    /// Forgets a file. Operations that are out keep it open in the kernel.
    pub(super) fn remove(&mut self, ring: &IoUring, slot: FileSlot) {
        // It can't fail for a slot in use; if it did, the slot would stay taken.
        if ring.submitter().register_files_update(slot.0, &[-1]).is_ok() {
            let at = slot.0 as usize;
            self.kept[at] = None;
            if let Some(gate) = self.gates.get_mut(at) {
                *gate = None;
            }
        }
    }
}
