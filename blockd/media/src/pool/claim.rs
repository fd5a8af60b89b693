//! Takes the claim of a pool on storage that several hosts reach, and renews it. The rules are
//! those of [`blockd_mapper::claim`]; here are its IO and its thread.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use blockd_mapper::claim::{Action, ClaimTiming, Claimant, Standing};
use blockd_mapper::format::claim::{CLAIM_OFFSET, Claim, ClaimPage, ClaimState};
use blockd_mapper::io::{IoBuffer, Page};
use crossbeam_channel::{Receiver, Sender, bounded};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use nix::sys::statfs::fstatfs;

use super::PoolError;
use crate::Gate;
use crate::clock::{Clock, boot_ns};
use crate::pool::boot_id;

/// File systems that several hosts mount, by the kernel's `include/uapi/linux/magic.h` and the file
/// systems' own sources: NFS, SMB (both numbers) and CIFS, Ceph, AFS (both), 9P, GFS2, OCFS2,
/// Lustre, BeeGFS, GPFS, FUSE (which may be anything), OrangeFS, Coda, VxFS, PanFS, StorNext, ACFS,
/// and the shared folders of VirtualBox, VMware and Parallels.
const NETWORK: [i64; 23] = [
    0x6969,
    0x517b,
    0xfe53_4d42,
    0xff53_4d42,
    0x00c3_6400,
    0x5346_414f,
    0x6b41_4653,
    0x0102_1997,
    0x0116_1970,
    0x7461_636f,
    0x0bd0_0bd0,
    0x1983_0326,
    0x4750_4653,
    0x6573_5546,
    0x2003_0528,
    0x7375_7245,
    0xa501_fcf5,
    0xaad7_aaea,
    0xbeef_dead,
    0x6163_6673,
    0x786f_4256,
    0xbacb_acbc,
    0x7c7c_6673,
];

/// How often a claim is read that is watched without an own one.
const WATCH_PAUSE: Duration = Duration::from_millis(250);

/// A claim that can't be read for so long, as its device answers with errors, ends the pool: its
/// writes would else wait for ever, where a write that reaches the device fails at once. Longer
/// than a path takes to fail over, and shorter than a kernel's 30 s for a request.
const GIVEN_UP_AFTER: Duration = Duration::from_secs(20);

/// Whether other hosts may write to this file or device.
pub(super) fn is_shared(file: &File) -> bool {
    let is_disk = file.metadata().is_ok_and(|data| data.file_type().is_block_device());
    let is_network = |file: &File| {
        // Magic numbers are of 32 bits.
        let kind = fstatfs(file).map(|fs| fs.filesystem_type().0 & 0xffff_ffff);
        kind.is_ok_and(|kind| NETWORK.contains(&kind))
    };
    is_disk || is_network(file)
}

/// The process that will have the claim.
#[derive(Clone, Copy, Debug)]
pub(super) struct Opener {
    pub(super) pool_id: [u8; 16],
    pub(super) open_id: u64,
    pub(super) node: u32,
    pub(super) boot_id: [u8; 16],
    /// Of the host's lock, 0 without.
    pub(super) lock_space: u64,
    /// W.
    pub(super) wait: Duration,
    /// As of [`super::PoolSpec`].
    pub(super) leased_until_ns: u64,
    pub(super) fenced: Option<u32>,
}

/// A claim that is renewed.
#[derive(Debug)]
pub(super) struct Held {
    gate: Arc<Gate>,
    stop: Sender<()>,
    thread: Option<JoinHandle<()>>,
}

/// Takes the claim of a pool on its first device, as [`Claimant`] has it: other opens are watched,
/// and waited for, while nothing else of the pool is written. Opens the gate.
pub(super) fn take(
    file: &File,
    path: &Path,
    opener: &Opener,
    gate: &Arc<Gate>,
) -> Result<Held, PoolError> {
    let failed = |what| PoolError::io(what, path);
    let page = PageIo::new(file).map_err(failed("open for its claim"))?;
    let device = number_of(file).map_err(failed("read the device number of"))?;
    let own = Claim {
        pool_id: opener.pool_id,
        state: ClaimState::Pending,
        open_id: opener.open_id,
        counter: 0,
        node: opener.node,
        boot_id: opener.boot_id,
        lock_space: opener.lock_space,
        device,
    };
    let wait = u64::try_from(opener.wait.as_nanos()).unwrap_or(u64::MAX);
    let timing = ClaimTiming::new(wait.max(ClaimTiming::LEAST_WAIT_NS));
    let claimant = Claimant::new(own, timing).leased(opener.leased_until_ns);
    let claimant = claimant.after_fence(opener.fenced);
    let mut keeper = Keeper {
        claimant,
        page,
        gate: Arc::clone(gate),
        path: path.to_owned(),
        is_late: false,
        failing: None,
        given_up_after: GIVEN_UP_AFTER,
    };
    keeper.open()?;
    let (stop, stopped) = bounded(1);
    let thread = std::thread::Builder::new().name("claim".to_owned());
    let thread = thread.spawn(move || keeper.keep(&stopped));
    let thread = thread.map_err(PoolError::io("start a thread for the claim on", path))?;
    Ok(Held { gate: Arc::clone(gate), stop, thread: Some(thread) })
}

/// Watches the claim of a pool as an opener does, and writes nothing: an error where another open
/// has it.
pub(super) fn watch(
    file: &File,
    path: &Path,
    pool_id: &[u8; 16],
    lock_space: u64,
    wait: Duration,
) -> Result<(), PoolError> {
    let failed = |what| PoolError::io(what, path);
    let mut io = PageIo::reader(file).map_err(failed("open for its claim"))?;
    let first = io.read().map_err(failed("read claim of"))?;
    let wait = wait.max(Duration::from_nanos(ClaimTiming::LEAST_WAIT_NS));
    let wait = match first {
        ClaimPage::Absent => return Ok(()),
        ClaimPage::Claim(Claim { state: ClaimState::Free, .. }) => return Ok(()),
        ClaimPage::Claim(claim) => {
            let own = Claim {
                pool_id: *pool_id,
                boot_id: boot_id()?,
                lock_space,
                device: number_of(file).map_err(failed("read the device number of"))?,
                ..claim
            };
            match claim.state {
                ClaimState::Pending => wait * 2,
                _ if own.is_of_same_host(&claim) => return Ok(()),
                _ => wait,
            }
        }
        ClaimPage::Unreadable(_) => wait,
    };
    let until = boot_ns() + u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX / 2);
    while boot_ns() <= until {
        std::thread::sleep(WATCH_PAUSE);
        let page = io.read().map_err(failed("read claim of"))?;
        if page != first {
            return Err(PoolError::OpenElsewhere { path: path.to_owned(), node: node_of(&page) });
        }
    }
    Ok(())
}

/// The device as the host knows it.
fn number_of(file: &File) -> std::io::Result<u64> {
    let found = file.metadata()?;
    Ok(if found.rdev() == 0 { found.ino() } else { found.rdev() })
}

impl Held {
    /// Gives the pool up, all of whose IO has ended. The next opener need not watch.
    pub(super) fn release(mut self) {
        let _ = self.stop.send(());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }

    /// Ends the renewals and leaves the claim as it is: openers on other hosts watch it, as after a
    /// crash.
    pub(super) fn abandon(mut self) {
        self.gate.open_until(0);
        // Without its sender the thread ends, after a write of its own that is under way.
        self.stop = bounded(0).0;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Held {
    /// Without [`Self::release`] the claim stays as it is, and is not renewed.
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.gate.open_until(0);
        }
    }
}

/// Drives a claimant.
struct Keeper {
    claimant: Claimant,
    page: PageIo,
    gate: Arc<Gate>,
    path: PathBuf,
    is_late: bool,
    /// Since when each read has failed.
    failing: Option<Clock>,
    given_up_after: Duration,
}

impl Keeper {
    /// Until the pool is owned.
    fn open(&mut self) -> Result<(), PoolError> {
        let mut said = None;
        loop {
            match self.claimant.standing() {
                Standing::Owner => return Ok(()),
                Standing::Refused(page) | Standing::Lost(page) => {
                    let (path, node) = (self.path.clone(), node_of(&page));
                    return Err(PoolError::OpenElsewhere { path, node });
                }
                Standing::Opening | Standing::Released => {}
            }
            let wait = self.turn().map_err(PoolError::io("claim", &self.path))?;
            if let Some(wait) = wait {
                let is_watching = self.claimant.is_watching();
                if said.replace(is_watching) != Some(is_watching) {
                    let path = self.path.display();
                    if is_watching {
                        tracing::info!(%path, "watching for other hosts that have the pool open");
                    } else {
                        tracing::info!(%path, "waiting for the last writes of other hosts");
                    }
                }
                std::thread::sleep(wait);
            }
        }
    }

    /// Renews the claim until the pool is given up or lost.
    fn keep(&mut self, stopped: &Receiver<()>) {
        crate::hardening::protect_thread("claim");
        loop {
            match self.claimant.standing() {
                Standing::Lost(page) | Standing::Refused(page) => {
                    let node = node_of(&page);
                    let path = self.path.display();
                    tracing::error!(%path, node = format!("{node:08x}"), "claim lost: pool stops");
                    self.gate.lose(node);
                    return;
                }
                Standing::Released => return,
                Standing::Opening | Standing::Owner => {}
            }
            match self.turn() {
                Ok(None) => {}
                Ok(Some(wait)) => match stopped.recv_timeout(wait) {
                    Ok(()) => self.claimant.release(),
                    Err(error) if error.is_timeout() => {}
                    // The pool was dropped: nothing is renewed, and nothing written any more.
                    Err(_) => return,
                },
                Err(error) => {
                    let path = self.path.display();
                    tracing::warn!(%path, %error, "cannot renew claim");
                    if error.raw_os_error() == Some(libc::EBADE) {
                        self.gate.exclude();
                        return;
                    }
                    let failing = self.failing.get_or_insert_with(Clock::start);
                    if failing.elapsed() >= self.given_up_after {
                        self.gate.shut(format!(
                            "is on storage on which its claim could not be renewed for {} s: \
                             {error}",
                            self.given_up_after.as_secs()
                        ));
                        return;
                    }
                    self.claimant.failed(boot_ns());
                }
            }
            self.note_lateness();
        }
    }

    /// One step. Gives how long there is nothing to do.
    fn turn(&mut self) -> std::io::Result<Option<Duration>> {
        let now = boot_ns();
        match self.claimant.poll(now) {
            Action::Read => {
                let page = self.page.read()?;
                self.failing = None;
                self.claimant.read(now, boot_ns(), page);
                // Also before the claim is renewed: the read alone allows writes.
                self.gate.open_until(self.claimant.writes_until());
            }
            Action::Write(claim) => {
                self.page.fill(&claim);
                // A renewal changes the counter only: if a power loss reverts it, others see that
                // as one more change. And a flush here would take the error of one that the pool's
                // own next flush has to fail with (R8).
                let is_renewal =
                    claim.state == ClaimState::Held && self.claimant.standing() == Standing::Owner;
                if boot_ns() < self.claimant.submit_by() {
                    self.page.write(!is_renewal)?;
                    self.claimant.wrote(boot_ns());
                    self.gate.open_until(self.claimant.writes_until());
                } else {
                    self.claimant.late();
                }
            }
            Action::Wait(until) => {
                return Ok(Some(Duration::from_nanos(until.saturating_sub(now))));
            }
            Action::End => {}
        }
        Ok(None)
    }

    /// Says once that writes had to wait, when they may go on.
    fn note_lateness(&mut self) {
        if self.claimant.standing() != Standing::Owner {
            return;
        }
        let late = !self.gate.is_open();
        if late != self.is_late {
            self.is_late = late;
            let path = self.path.display();
            match late {
                true => tracing::warn!(%path, "claim not renewed in time: writes wait"),
                false => tracing::warn!(%path, "claim renewed: writes go on"),
            }
        }
    }
}

fn node_of(page: &ClaimPage) -> u32 {
    match page {
        ClaimPage::Claim(claim) => claim.node,
        ClaimPage::Absent | ClaimPage::Unreadable(_) => 0,
    }
}

/// The page on the device, past this host's cache: it has what another host wrote.
struct PageIo {
    file: File,
    is_direct: bool,
    buffer: IoBuffer,
}

impl PageIo {
    /// Opens the device once more, as a descriptor of its own.
    fn new(file: &File) -> std::io::Result<Self> {
        Self::open(file, true)
    }

    /// The same, to read only.
    fn reader(file: &File) -> std::io::Result<Self> {
        Self::open(file, false)
    }

    fn open(file: &File, writes: bool) -> std::io::Result<Self> {
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let mut options = OpenOptions::new();
        options.read(true).write(writes);
        let direct = options.clone().custom_flags(libc::O_DIRECT).open(&path);
        let (file, is_direct) = match direct {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                (options.open(&path)?, false)
            }
            other => (other?, true),
        };
        let buffer = IoBuffer::new(1).ok_or(std::io::ErrorKind::OutOfMemory)?;
        Ok(Self { file, is_direct, buffer })
    }

    fn read(&mut self) -> std::io::Result<ClaimPage> {
        if !self.is_direct {
            let at = i64::try_from(CLAIM_OFFSET).map_err(std::io::Error::other)?;
            posix_fadvise(&self.file, at, 4096, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?;
        }
        self.file.read_exact_at(self.buffer.as_bytes_mut(), CLAIM_OFFSET)?;
        Ok(ClaimPage::decode(&self.buffer.pages()[0].0))
    }

    fn fill(&mut self, claim: &Claim) {
        let mut page = Page::zeroed();
        claim.encode(&mut page);
        self.buffer.as_bytes_mut().copy_from_slice(&page.0);
    }

    /// Writes the page. Through a page cache other hosts see it only once it was synced.
    fn write(&mut self, is_durable: bool) -> std::io::Result<()> {
        self.file.write_all_at(self.buffer.as_bytes(), CLAIM_OFFSET)?;
        if is_durable || !self.is_direct { self.file.sync_data() } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_on_fuse_is_shared_and_one_on_a_local_file_system_is_not() {
        use nix::mount::{MntFlags, MsFlags, mount, umount2};
        assert!(!is_shared(&File::open("/proc/self/exe").unwrap()));
        assert!(nix::unistd::geteuid().is_root(), "not run: a mount needs root");
        let folder = std::env::temp_dir().join(format!("blockd-fuse-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        // Of another user, so that the kernel needs no server: there is none.
        let fuse = OpenOptions::new().read(true).write(true).open("/dev/fuse").unwrap();
        let options =
            format!("fd={},rootmode=40000,user_id=65534,group_id=65534", fuse.as_raw_fd());
        let none = MsFlags::empty();
        mount(Some("test"), &folder, Some("fuse"), none, Some(options.as_str())).unwrap();
        let opened = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(&folder);
        let is_shared = opened.map(|file| is_shared(&file));
        umount2(&folder, MntFlags::MNT_DETACH).unwrap();
        std::fs::remove_dir(&folder).unwrap();
        assert!(is_shared.unwrap());
    }

    #[test]
    fn a_pool_whose_claim_can_not_be_read_for_long_is_given_up() {
        let path = std::env::temp_dir().join(format!("blockd-claim-{}", std::process::id()));
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let own = Claim {
            pool_id: [1; 16],
            state: ClaimState::Pending,
            open_id: 1,
            counter: 0,
            node: 1,
            boot_id: [1; 16],
            lock_space: 0,
            device: number_of(&file).unwrap(),
        };
        let gate = Arc::new(Gate::default());
        let mut keeper = Keeper {
            claimant: Claimant::new(own, ClaimTiming::new(ClaimTiming::LEAST_WAIT_NS)),
            page: PageIo::new(&file).unwrap(),
            gate: Arc::clone(&gate),
            path,
            is_late: false,
            failing: None,
            given_up_after: Duration::from_secs(1),
        };
        keeper.open().unwrap();
        assert!(gate.is_open());
        // Reads fail, and writes would not.
        keeper.page.file = OpenOptions::new().write(true).open(&keeper.path).unwrap();
        std::fs::remove_file(&keeper.path).unwrap();
        let (_stop, stopped) = bounded(1);
        keeper.keep(&stopped);
        assert!(gate.problem().unwrap().contains("could not be renewed for 1 s"));
        assert!(!gate.is_open());
    }
}
