//! A disk that forgets what was not flushed. A machine that is switched off loses nothing by that
//! alone, since its host goes on; so its disk is served from here, over NBD. Written data
//! stays in memory until a flush, and when the power is cut, a drawn part of it is gone, piece by
//! piece.
//!
//! Requests that are under way together are done in a drawn order: a flush need not cover a write
//! that was not answered before it.

mod cache;
mod serve;

use std::fs::File;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use blockd_testkit::tools;

use super::Drive;
pub use cache::{Cache, Cut};

/// The name under which the disk is exported.
const EXPORT: &str = "disk";

/// A machine that is gone is noticed within this time.
const LEAVING: Duration = Duration::from_secs(20);

/// A disk in a file, until it is dropped. Machines come and go meanwhile.
#[derive(Debug)]
pub struct Disk {
    cache: Arc<Mutex<Cache>>,
    /// Connections that are served.
    clients: Arc<AtomicUsize>,
    socket: PathBuf,
}

impl Disk {
    /// Serves this file, which is there and as large as the disk, on a new socket. The seed is
    /// that of the order of requests and of what gets lost.
    ///
    /// # Errors
    /// When the file can't be opened or the socket not be made.
    pub fn new(file: &Path, socket: &Path, seed: u64) -> Result<Self> {
        let file = File::options()
            .read(true)
            .write(true)
            .open(file)
            .with_context(|| format!("opening {}", file.display()))?;
        let cache = Arc::new(Mutex::new(Cache::new(file, seed)?));
        let listener = UnixListener::bind(socket)
            .with_context(|| format!("listening on {}", socket.display()))?;
        let clients = Arc::new(AtomicUsize::new(0));
        let shared = (Arc::clone(&cache), Arc::clone(&clients));
        // Ends with the process: a thread that waits on a socket can't be stopped.
        std::thread::spawn(move || serve::listen(&listener, &shared.0, &shared.1));
        Ok(Self { cache, clients, socket: socket.to_path_buf() })
    }

    /// How a machine gets it.
    #[must_use]
    pub fn drive(&self) -> Drive {
        Drive::Nbd { socket: self.socket.clone(), export: EXPORT.to_owned(), reconnect_delay: 0 }
    }

    /// The power fails: of what was not flushed, a drawn part is lost. To be called when the
    /// machine is gone: what it had sent is done before.
    ///
    /// # Errors
    /// When the file can't be written, or a machine still uses the disk.
    pub fn cut(&self) -> Result<Cut> {
        let left = || (self.clients.load(Ordering::SeqCst) == 0).then_some(());
        tools::wait_until("the machine to leave its disk", LEAVING, left)?;
        lock(&self.cache).cut()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// A thread that panicked has left a cache that is still one.
fn lock(cache: &Mutex<Cache>) -> MutexGuard<'_, Cache> {
    cache.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockd_testkit::folder::Folder;
    use blockd_testkit::nbd::{Connection, FUA, Kind};

    const MIB: usize = 1 << 20;

    fn disk(folder: &Folder) -> (Disk, PathBuf) {
        let (file, socket) = (folder.path().join("file"), folder.path().join("socket"));
        File::create(&file).unwrap().set_len(MIB as u64).unwrap();
        (Disk::new(&file, &socket, 1).unwrap(), socket)
    }

    #[test]
    fn flushed_data_stays_and_a_part_of_the_rest_is_lost() {
        let folder = Folder::new("forgetful").unwrap();
        let (disk, socket) = disk(&folder);
        let mut client = Connection::open(&socket, EXPORT).unwrap();
        assert_eq!(client.size, MIB as u64);
        client.write(0, &[1; MIB]).unwrap();
        client.flush().unwrap();
        client.write(0, &[2; MIB]).unwrap();
        // Written through, in the middle of what is not.
        client.ask(Kind::Write, 8192, &mut [3; 4096], FUA).unwrap();
        client.ask(Kind::Trim, 65536, &mut [0; 4096], 0).unwrap();
        let seen = client.read(0, MIB).unwrap();
        assert_eq!((seen[0], seen[8192], seen[65536]), (2, 3, 0), "reads see the cache");
        drop(client);

        let cut = disk.cut().unwrap();
        assert!(cut.lost > 0 && cut.kept > 0, "{cut:?}");
        let mut client = Connection::open(&socket, EXPORT).unwrap();
        let left = client.read(0, MIB).unwrap();
        assert!(left[8192..12288].iter().all(|&byte| byte == 3), "a FUA write was lost");
        let old = left.iter().filter(|&&byte| byte == 1).count();
        let new = left.iter().filter(|&&byte| byte == 2).count();
        assert!(old > MIB / 10 && new > MIB / 10, "{old} bytes old, {new} new");
        assert!(left.chunks(512).all(|sector| sector.iter().all(|byte| *byte == sector[0])));
        // It is the same afterwards, and after another cut.
        drop(client);
        disk.cut().unwrap();
        let mut client = Connection::open(&socket, EXPORT).unwrap();
        assert!(client.read(0, MIB).unwrap() == left);
    }

    #[test]
    fn each_of_several_writes_to_a_place_can_be_the_last_that_stays() {
        let folder = Folder::new("forgetful").unwrap();
        let (disk, socket) = disk(&folder);
        let mut client = Connection::open(&socket, EXPORT).unwrap();
        for byte in 1..=3 {
            client.write(0, &[byte; MIB]).unwrap();
        }
        drop(client);
        disk.cut().unwrap();
        let mut client = Connection::open(&socket, EXPORT).unwrap();
        let left = client.read(0, MIB).unwrap();
        for byte in 0..=3 {
            assert!(left.contains(&byte), "none kept write {byte}");
        }
    }

    #[test]
    fn a_request_beyond_the_end_is_refused_and_changes_nothing() {
        let folder = Folder::new("forgetful").unwrap();
        let (_disk, socket) = disk(&folder);
        let mut client = Connection::open(&socket, EXPORT).unwrap();
        assert!(client.write(MIB as u64 - 512, &[1; 1024]).is_err());
        assert_eq!(client.read(MIB as u64 - 512, 512).unwrap(), [0; 512]);
    }
}
