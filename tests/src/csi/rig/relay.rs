//! A relay between the plugin and the daemon that stops at a chosen message: the bytes that one of
//! them wrote at once. The other one does not receive the message at which it stops.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use blockd_testkit::folder::Folder;

/// More than one side writes at once.
const LARGEST: usize = 64 << 10;

/// Listens in the daemon's place until it is dropped.
#[derive(Debug)]
pub struct Relay {
    folder: Folder,
    state: Arc<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Messages relayed since it was last armed.
    passed: AtomicU64,
    /// Messages to let pass; beyond it nothing does.
    allowed: AtomicU64,
    stopped: Mutex<bool>,
    changed: Condvar,
    ended: AtomicBool,
}

impl Relay {
    /// A relay to the daemon with this socket.
    ///
    /// # Errors
    /// When its socket or thread can't be made.
    pub fn start(daemon: &Path) -> Result<Self> {
        let folder = Folder::below(Path::new("/dev/shm"), "relay")?;
        let listener =
            UnixListener::bind(folder.path().join("sock")).context("a relay's socket")?;
        let state = Arc::new(State::default());
        state.allowed.store(u64::MAX, Ordering::SeqCst);
        let (shared, daemon) = (Arc::clone(&state), daemon.to_path_buf());
        thread::Builder::new().name("relay".to_owned()).spawn(move || {
            for client in listener.incoming().flatten() {
                if shared.ended.load(Ordering::SeqCst) {
                    return;
                }
                // Without a daemon the client is hung up on.
                if let Ok(server) = UnixStream::connect(&daemon) {
                    connect(&client, &server, &shared);
                }
            }
        })?;
        Ok(Self { folder, state })
    }

    /// Where it listens.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("sock")
    }

    /// Counts from 0 again, and lets `allowed` messages pass.
    pub fn arm(&self, allowed: u64) {
        if let Ok(mut stopped) = self.state.stopped.lock() {
            *stopped = false;
        }
        self.state.passed.store(0, Ordering::SeqCst);
        self.state.allowed.store(allowed, Ordering::SeqCst);
    }

    /// Lets everything pass again.
    pub fn open(&self) {
        self.state.allowed.store(u64::MAX, Ordering::SeqCst);
    }

    /// Messages that passed, or would have, since it was armed.
    #[must_use]
    pub fn passed(&self) -> u64 {
        self.state.passed.load(Ordering::SeqCst)
    }

    /// Whether a message was stopped before this much time has gone, or the caller is content.
    #[must_use]
    pub fn wait(&self, step: Duration, mut content: impl FnMut() -> bool) -> bool {
        let Ok(mut stopped) = self.state.stopped.lock() else { return false };
        loop {
            if *stopped {
                return true;
            }
            if content() {
                return false;
            }
            match self.state.changed.wait_timeout(stopped, step) {
                Ok((guard, _)) => stopped = guard,
                Err(_) => return false,
            }
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.state.ended.store(true, Ordering::SeqCst);
        let _ = UnixStream::connect(self.socket());
    }
}

fn connect(client: &UnixStream, server: &UnixStream, state: &Arc<State>) {
    for (from, to) in [(client, server), (server, client)] {
        let (Ok(from), Ok(to)) = (from.try_clone(), to.try_clone()) else { return };
        let state = Arc::clone(state);
        let copying = thread::Builder::new().name("relaying".to_owned());
        let _ = copying.spawn(move || copy(from, to, &state));
    }
}

/// Until one of them hangs up, or a message is stopped: the connection goes no further then.
fn copy(mut from: UnixStream, mut to: UnixStream, state: &State) {
    let mut buffer = vec![0; LARGEST];
    while let Ok(length @ 1..) = from.read(&mut buffer) {
        let number = state.passed.fetch_add(1, Ordering::SeqCst);
        if number >= state.allowed.load(Ordering::SeqCst) {
            if let Ok(mut stopped) = state.stopped.lock() {
                *stopped = true;
            }
            state.changed.notify_all();
            // Until everything may pass again: then both ends learn that this connection is dead.
            while state.allowed.load(Ordering::SeqCst) != u64::MAX {
                thread::sleep(Duration::from_millis(1));
            }
            break;
        }
        if to.write_all(&buffer[..length]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
