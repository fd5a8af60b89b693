//! The claim page of pools on loop devices: when it is written, made durable, and left alone. Tests
//! look at the file below the device, as another host would.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "test code")]

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blockd_engine::pool::{Control, Outcome, PoolHandle, create, open, open_created};
use blockd_inspect::MediaMut;
use blockd_mapper::claim::Claimant;
use blockd_mapper::format::Place;
use blockd_mapper::format::claim::{CLAIM_OFFSET, Claim, ClaimPage, ClaimState};
use blockd_mapper::format::superblock::Superblock;
use blockd_mapper::io::{IoError, Page};
use blockd_mapper::units::DeviceIndex;
use blockd_media::clock::Clock;
use blockd_media::pool::{Access, Erasing, Offline, PoolError, PoolSpec};
use blockd_media::{DeviceKind, DeviceSpec};
use blockd_nbd::codec::cmd;
use blockd_nbd::codec::request::Header;
use blockd_nbd::{ExportInfo, Negotiated};
use blockd_serve::nbd::{Origin, Session, Sessions};
use blockd_serve::worker::{Target, WorkerOptions, Workers};

const SIZE: u64 = 128 << 20;
/// Longer than a busy machine takes.
const LIMIT: Duration = Duration::from_secs(60);
const WAIT: Duration = Duration::from_secs(2);

/// Has the tests run one after the other: a process is traced as a whole, and once.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A loop device over a sparse file, gone with its owner.
struct Disk {
    device: PathBuf,
    path: PathBuf,
    /// The file below: other hosts see the same.
    file: File,
}

impl Disk {
    fn new(name: &str) -> Self {
        assert!(nix::unistd::geteuid().is_root(), "not run: loop devices need root");
        let name = format!("blockd-claim-{name}-{}", std::process::id());
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let options = File::options().read(true).write(true).create(true).truncate(true).clone();
        let file = options.open(&path).unwrap();
        file.set_len(SIZE).unwrap();
        let mut losetup = Command::new("losetup");
        let output = losetup.args(["--find", "--show", "--direct-io=on"]).arg(&path).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let device = PathBuf::from(String::from_utf8(output.stdout).unwrap().trim());
        Self { device, path, file }
    }

    fn page(&self, offset: u64) -> Page {
        let mut page = Page::zeroed();
        self.file.read_exact_at(&mut page.0, offset).unwrap();
        page
    }

    fn claim(&self) -> ClaimPage {
        ClaimPage::decode(&self.page(CLAIM_OFFSET).0)
    }

    fn held(&self) -> Option<Claim> {
        match self.claim() {
            ClaimPage::Claim(claim) if claim.state == ClaimState::Held => Some(claim),
            _ => None,
        }
    }

    /// The node whose claim is pending.
    fn pending(&self) -> Option<u32> {
        match self.claim() {
            ClaimPage::Claim(claim) if claim.state == ClaimState::Pending => Some(claim.node),
            _ => None,
        }
    }

    fn is_free(&self) -> bool {
        matches!(self.claim(), ClaimPage::Claim(claim) if claim.state == ClaimState::Free)
    }

    fn write_claim(&self, claim: &Claim) {
        let mut page = Page::zeroed();
        claim.encode(&mut page);
        self.file.write_all_at(&page.0, CLAIM_OFFSET).unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.device).status();
        let _ = std::fs::remove_file(&self.path);
    }
}

fn spec(disks: &[&Disk]) -> PoolSpec {
    let device = |disk: &&Disk| DeviceSpec {
        path: disk.device.clone(),
        kind: DeviceKind::Disk,
        size: None,
        preallocate: false,
        direct: true,
    };
    let mut spec = PoolSpec::new("test", device(&disks[0]), PathBuf::from("/dev/shm"));
    spec.devices = disks.iter().map(device).collect();
    spec.lock_wait = Duration::from_secs(3);
    spec
}

fn wait<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let clock = Clock::start();
    while !holds() {
        assert!(clock.elapsed() < LIMIT, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// strace, attached to this process.
struct Trace {
    child: Child,
    output: PathBuf,
}

impl Trace {
    fn attach(name: &str, words: &[&str]) -> Self {
        let name = format!("blockd-trace-{name}-{}", std::process::id());
        let output = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        File::create(&output).unwrap();
        let mut strace = Command::new("strace");
        strace.args(["--follow-forks", "--attach", &std::process::id().to_string(), "--output"]);
        // It reports each new thread there.
        let messages = output.with_extension("messages");
        strace.arg(&output).args(words).stderr(File::create(&messages).unwrap());
        let child = strace.spawn().expect("strace");
        let said = || std::fs::read_to_string(&messages).unwrap();
        wait_until("strace to attach", || said().contains("attached"));
        let _ = std::fs::remove_file(&messages);
        Self { child, output }
    }

    fn end(mut self) -> String {
        let pid = nix::unistd::Pid::from_raw(self.child.id().try_into().unwrap());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
        self.child.wait().unwrap();
        let text = std::fs::read_to_string(&self.output).unwrap();
        let _ = std::fs::remove_file(&self.output);
        text
    }
}

#[test]
fn a_claim_is_renewed_without_a_flush_of_its_device() {
    let _alone = alone();
    let disk = Disk::new("renewed");
    let (pool, _) = open_created(&spec(&[&disk]), create(&spec(&[&disk])).unwrap()).unwrap();
    let trace = Trace::attach("renewed", &["--trace=pwrite64,fsync,fdatasync,sync_file_range"]);
    let before = disk.held().unwrap().counter;
    wait_until("renewals", || disk.held().is_some_and(|claim| claim.counter >= before + 4));
    let trace = trace.end();
    assert!(trace.matches("pwrite64").count() >= 4 && !trace.contains("sync"), "{trace}");
    // And not by the flags of the descriptor that it is written through.
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let ours =
        descriptors.filter(|one| std::fs::read_link(one.path()).ok() == Some(disk.device.clone()));
    let mut seen = 0;
    for one in ours {
        let info = Path::new("/proc/self/fdinfo").join(one.file_name());
        let info = std::fs::read_to_string(info).unwrap();
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap().trim();
        let flags = i32::from_str_radix(flags, 8).unwrap();
        assert_eq!(flags & nix::libc::O_DSYNC, 0, "{info}");
        seen += 1;
    }
    assert!(seen >= 2, "the pool's descriptor and the claim's");
    wait(pool.close()).unwrap();
    assert!(disk.is_free());
}

/// A pool with a volume of 16 MiB that was written.
fn write_volume(pool: &blockd_engine::pool::PoolHandle) {
    let create = Control::Create { name: "one".to_owned(), size: 16 << 20, block_size: 4096 };
    let Outcome::Created(volume) = wait(pool.control(create)).unwrap() else { panic!("is there") };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let workers = Workers::start(WorkerOptions::default()).unwrap();
    runtime.block_on(workers.add_pool(pool)).unwrap();
    let (mut client, theirs) = UnixStream::pair().unwrap();
    let info = ExportInfo {
        name: "one".to_owned(),
        description: String::new(),
        size: 16 << 20,
        block_size: 4096,
        preferred_size: 4096,
        read_only: false,
        multi_conn: true,
    };
    let session = Session {
        volume: Target { pool: pool.clone(), volume, name: "one".to_owned() },
        export: "one".to_owned(),
        negotiated: Negotiated::plain(&info),
        peer: "test".to_owned(),
        origin: Origin::default(),
        guard: None,
    };
    workers.connect(theirs.into(), session);
    for piece in 0..16_u64 {
        write(&mut client, piece << 20, &[7; 1 << 20]);
    }
    drop(client);
    runtime.block_on(workers.close_volume(pool.id(), volume));
    runtime.block_on(pool.control(Control::Delete { volume })).unwrap();
    runtime.block_on(pool.control(Control::Checkpoint)).unwrap();
    runtime.block_on(workers.drain(Duration::from_secs(5)));
    let discards = || pool.stats().discards.load(std::sync::atomic::Ordering::Relaxed);
    wait_until("a discard", || discards() > 0);
}

/// A write with a compact header, and its simple reply.
fn write(client: &mut UnixStream, offset: u64, payload: &[u8]) {
    use std::io::{Read, Write};
    let mut bytes = Vec::new();
    let len = payload.len() as u64;
    Header { flags: 0, kind: cmd::WRITE, cookie: offset, offset, len }.encode(false, &mut bytes);
    bytes.extend(payload);
    client.write_all(&bytes).unwrap();
    let mut reply = [0; 16];
    client.read_exact(&mut reply).unwrap();
    assert_eq!(reply[4..8], [0; 4], "an error");
}

#[test]
fn a_closed_pool_is_claimed_until_its_last_discard_has_ended() {
    let _alone = alone();
    let disk = Disk::new("discard");
    let (pool, _) = open_created(&spec(&[&disk]), create(&spec(&[&disk])).unwrap()).unwrap();
    let path = disk.device.to_str().unwrap();
    let slow = "--inject=ioctl:delay_enter=12s";
    let trace = Trace::attach("discard", &["--trace=ioctl", slow, "--trace-path", path]);
    write_volume(&pool);
    wait(pool.close()).unwrap();
    // The close was answered at its limit, while a discard is still under way.
    let closed = disk.held().expect("a claim of a pool whose discard is under way");
    let renewed = || disk.held().is_some_and(|claim| claim.counter > closed.counter + 1);
    wait_until("the claim to be renewed after the close", renewed);
    wait_until("the claim to be given up", || disk.is_free());
    let trace = trace.end();
    assert!(trace.contains("BLKDISCARD"), "{trace}");
}

#[test]
fn a_tools_writes_are_on_the_media_at_once_and_refused_after_its_claim_was_lost() {
    let _alone = alone();
    let disk = Disk::new("tool");
    drop(create(&spec(&[&disk])).unwrap());
    let paths = [disk.device.clone()];
    let mut tool = Offline::open(&paths, Access::Write, WAIT).unwrap();
    let first = DeviceIndex(0);
    let at = 32 << 20;
    tool.write(first, at, &[5; 8192]).unwrap();
    assert!(disk.page(at).0 == [5; 4096], "a write is left in the page cache of the disk");
    tool.flush(first).unwrap();
    let own = disk.held().unwrap();
    let other = Claim { open_id: own.open_id.wrapping_add(1), node: 7, ..own };
    disk.write_claim(&other);
    wait_until("the tool to notice", || tool.write(first, at, &[6; 4096]).is_err());
    assert_eq!(tool.flush(first), Err(IoError::Gone));
    drop(tool);
    assert_eq!(disk.claim(), ClaimPage::Claim(other), "the other's claim is left alone");
}

/// Removes all superblocks of a device.
fn lose_superblocks(disk: &Disk, extent: u64) {
    for offset in [0, 4096, SIZE - extent, SIZE - extent + 4096] {
        disk.file.write_all_at(&[0; 4096], offset).unwrap();
    }
}

#[test]
fn a_tool_claims_the_first_device_also_where_that_has_lost_its_superblock() {
    let _alone = alone();
    let disks = [Disk::new("first"), Disk::new("second")];
    let made = create(&spec(&[&disks[0], &disks[1]])).unwrap();
    let pool_id = made.pool_id;
    drop(made);
    let place = Place::Device { device: DeviceIndex(0), offset: 0 };
    let superblock = Superblock::decode(&disks[0].page(0).0, place).unwrap();
    lose_superblocks(&disks[0], u64::from(superblock.extent_size));
    let paths = [disks[1].device.clone(), disks[0].device.clone()];
    // It may be another disk: that it is the first device has to be said.
    let error = Offline::open(&paths, Access::Write, WAIT).unwrap_err();
    assert!(matches!(error, PoolError::Invalid { .. }), "{error}");
    assert!(disks[0].held().is_none(), "{:?}", disks[0].claim());
    let tool = Offline::open(&paths, Access::Complete, WAIT).unwrap();
    assert!(disks[0].held().is_some(), "{:?}", disks[0].claim());
    assert_eq!(disks[1].claim(), ClaimPage::Absent);
    // The host's lock is that of the pool, whose id the other device has.
    let lock = format!("/run/blockd-locks/{:032x}", u128::from_be_bytes(pool_id));
    assert!(File::open(&lock).unwrap().try_lock().is_err(), "{lock} is not locked");
    drop(tool);
    // Without its first device the pool cannot be claimed.
    let error = Offline::open(&paths[..1], Access::Write, WAIT).unwrap_err();
    assert!(matches!(error, PoolError::Invalid { .. }), "{error}");
}

#[test]
fn a_pool_of_a_later_release_that_is_only_read_keeps_its_claim_page() {
    let _alone = alone();
    let disk = Disk::new("later");
    drop(create(&spec(&[&disk])).unwrap());
    let place = Place::Device { device: DeviceIndex(0), offset: 0 };
    let superblock = Superblock::decode(&disk.page(0).0, place).unwrap();
    let extent = u64::from(superblock.extent_size);
    for offset in [0, 4096, SIZE - extent, SIZE - extent + 4096] {
        let place = Place::Device { device: DeviceIndex(0), offset };
        let mut page = disk.page(offset);
        let Ok(superblock) = Superblock::decode(&page.0, place) else { continue };
        Superblock { ro_compat: 1 << 9, ..superblock }.encode(&mut page);
        disk.file.write_all_at(&page.0, offset).unwrap();
    }
    let before = disk.page(CLAIM_OFFSET);
    let (pool, _) = open(&spec(&[&disk])).unwrap();
    assert!(pool.is_read_only() && !pool.is_claim_late());
    std::thread::sleep(Duration::from_secs(1));
    assert!(disk.page(CLAIM_OFFSET).0 == before.0, "the claim page was written");
    wait(pool.close()).unwrap();
}

/// Opens a pool on a thread of its own, as it may wait for an hour.
fn opening(spec: &PoolSpec, makes: bool) -> Receiver<Result<PoolHandle, PoolError>> {
    let (sender, receiver) = channel();
    let spec = spec.clone();
    std::thread::spawn(move || {
        let opened = match makes {
            true => open_created(&spec, create(&spec).unwrap()),
            false => open(&spec),
        };
        let _ = sender.send(opened.map(|(pool, _)| pool));
    });
    receiver
}

/// The waits are an hour long, so that a pool that opens has not waited.
#[test]
fn an_opener_with_a_lease_does_not_wait_where_the_page_is_free() {
    let _alone = alone();
    let disk = Disk::new("leased");
    let mut leased = spec(&[&disk]);
    leased.claim_wait = Duration::from_secs(3600);
    leased.leased_until_ns = u64::MAX;
    let pool = opening(&leased, true).recv_timeout(LIMIT).expect("not to wait").unwrap();
    let other = Claim { node: 7, boot_id: [9; 16], open_id: 77, ..disk.held().unwrap() };
    wait(pool.close()).unwrap();
    disk.write_claim(&Claim { state: ClaimState::Free, ..other });
    let pool = opening(&leased, false).recv_timeout(LIMIT).expect("not to wait").unwrap();
    assert_eq!(disk.held().unwrap().node, 0);
    wait(pool.close()).unwrap();
    // The claim of another is watched, and one that is renewed refuses the opener.
    disk.write_claim(&other);
    let refused = opening(&leased, false);
    wait_until("a look at the claim", || {
        let held = disk.held().unwrap();
        disk.write_claim(&Claim { counter: held.counter + 1, ..other });
        std::thread::sleep(Duration::from_secs(1));
        matches!(refused.try_recv(), Ok(Err(PoolError::OpenElsewhere { node: 7, .. })))
    });
    assert_eq!(disk.held().unwrap().node, 7);
    // A lease that is over spares nothing: the claim that is written is read back later. The thread
    // waits until this process ends.
    disk.write_claim(&Claim { state: ClaimState::Free, ..other });
    let _waits = opening(&PoolSpec { leased_until_ns: 1, ..leased }, false);
    wait_until("a claim", || disk.pending() == Some(0));
}

/// As above: the claim of a node that was fenced is not watched, and that of another node is.
#[test]
fn the_claim_of_a_node_that_was_fenced_is_not_watched() {
    let _alone = alone();
    let disk = Disk::new("fenced");
    let (pool, _) = open_created(&spec(&[&disk]), create(&spec(&[&disk])).unwrap()).unwrap();
    let other = Claim { node: 7, boot_id: [9; 16], open_id: 77, ..disk.held().unwrap() };
    wait(pool.close()).unwrap();
    let mut after = spec(&[&disk]);
    after.claim_wait = Duration::from_secs(3600);
    disk.write_claim(&other);
    let refused = opening(&PoolSpec { fenced: Some(8), ..after.clone() }, false);
    wait_until("a look at the claim", || {
        let held = disk.held().unwrap();
        disk.write_claim(&Claim { counter: held.counter + 1, ..other });
        std::thread::sleep(Duration::from_secs(1));
        matches!(refused.try_recv(), Ok(Err(PoolError::OpenElsewhere { node: 7, .. })))
    });
    let _waits = opening(&PoolSpec { fenced: Some(7), ..after }, false);
    wait_until("a claim", || disk.pending() == Some(0));
}

/// As above, for a pool that is erased at home.
#[test]
fn a_free_page_is_at_home_to_what_erases_a_pool_only_without_leases() {
    let _alone = alone();
    let disk = Disk::new("erased");
    let made = create(&spec(&[&disk])).unwrap();
    let id = made.pool_id;
    let (pool, _) = open_created(&spec(&[&disk]), made).unwrap();
    wait(pool.close()).unwrap();
    assert!(disk.is_free());
    let erasing = |leased_until_ns| {
        let (sender, receiver) = channel();
        let paths = [disk.device.clone()];
        std::thread::spawn(move || {
            let hour = Duration::from_secs(3600);
            let opened = Erasing::open(&paths, &id, hour, leased_until_ns);
            let _ = sender.send(opened.map(drop));
        });
        receiver
    };
    erasing(0).recv_timeout(LIMIT).expect("not to wait").unwrap();
    assert!(disk.is_free());
    let _waits = erasing(Claimant::UNLEASED);
    wait_until("a claim", || disk.pending() == Some(0));
}
