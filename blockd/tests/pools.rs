//! Pools on real files: made, opened, locked, killed by forgetting, closed.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::time::Duration;

use blockd_control::pool::{extents, space};
use blockd_engine::pool::{Control, Outcome, PoolHandle, VolumeId, create, open, open_created};
use blockd_inspect::Media;
use blockd_mapper::format::Place;
use blockd_mapper::format::superblock::Superblock;
use blockd_mapper::io::Page;
use blockd_mapper::units::DeviceIndex;
use blockd_media::clock::Clock;
use blockd_media::pool::{Access, Offline, PoolError, PoolSpec, exists, identity};
use blockd_media::{DeviceKind, DeviceSpec};
use blockd_nbd::codec::request::Header;
use blockd_nbd::{ExportInfo, Negotiated};
use blockd_serve::nbd::{Origin, Session, Sessions};
use blockd_serve::worker::{Target, WorkerOptions, Workers};

/// A directory of its own, gone afterwards.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("blockd-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a directory for the test");
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn file_spec(path: &Path, size: u64) -> PoolSpec {
    let kind = DeviceKind::File;
    let path = path.to_owned();
    let device = DeviceSpec { path, kind, size: Some(size), preallocate: false, direct: true };
    let mut spec = PoolSpec::new("test", device, PathBuf::from("/dev/shm"));
    spec.lock_wait = Duration::from_secs(3);
    spec
}

fn wait<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("a runtime")
        .block_on(future)
}

fn add(pool: &PoolHandle, name: &str, size: u64) -> Outcome {
    let control = Control::Create { name: name.to_owned(), size, block_size: 4096 };
    wait(pool.control(control)).expect("a volume")
}

#[test]
fn a_pool_in_a_file_is_made_once_and_found_again() {
    let scratch = Scratch::new("pool-file");
    let spec = file_spec(&scratch.0.join("pool"), 256 << 20);
    assert!(!exists(&spec).unwrap());
    create(&spec).unwrap();
    assert!(exists(&spec).unwrap());
    assert!(matches!(create(&spec), Err(PoolError::Exists { .. })));
    let (pool, report) = open(&spec).unwrap();
    assert!(report.was_clean);
    assert!(matches!(add(&pool, "one", 1 << 30), Outcome::Created(_)));
    assert!(matches!(add(&pool, "one", 1 << 30), Outcome::Existing(_)));
    let space = wait(space(&pool)).unwrap();
    assert!(space.pool.total > 250 << 20 && space.free() > 200 << 20);
    assert!(matches!(open(&spec), Err(PoolError::Locked { .. })));
    let ring = pool.id().iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let ring = Path::new("/dev/shm").join(format!("ring-{ring}"));
    assert!(ring.exists());
    wait(pool.close()).unwrap();
    assert!(matches!(wait(pool.volumes()), Err(PoolError::Gone)));
    // A pool that was closed in order leaves no memory behind; its thread may take a moment.
    let gone = (0..6000).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        !ring.exists()
    });
    assert!(gone);
    drop(pool);
    let (pool, report) = open(&spec).unwrap();
    assert!(report.was_clean);
    let volumes = wait(pool.volumes()).unwrap();
    assert_eq!(volumes.len(), 1);
    assert_eq!((volumes[0].name.as_str(), volumes[0].size), ("one", 1 << 30));
    wait(pool.close()).unwrap();
}

#[test]
fn every_extent_of_a_pool_has_one_use() {
    let scratch = Scratch::new("pool-extents");
    let spec = file_spec(&scratch.0.join("pool"), 128 << 20);
    create(&spec).unwrap();
    let (pool, _) = open(&spec).unwrap();
    add(&pool, "one", 1 << 30);
    let runs = wait(extents(&pool)).unwrap();
    let mut next = 0;
    for run in &runs {
        assert_eq!((run.device, run.first), (0, next), "{runs:?}");
        next += run.count;
    }
    assert_eq!(next, (128 << 20) / pool.extent_size());
    wait(pool.close()).unwrap();
}

#[test]
fn a_pool_in_memory_needs_no_file() {
    let kind = DeviceKind::Memory;
    let path = PathBuf::from("memory");
    let size = Some(64 << 20);
    let device = DeviceSpec { path, kind, size, preallocate: false, direct: false };
    let (pool, _) = open(&PoolSpec::new("test", device, PathBuf::from("/dev/shm"))).unwrap();
    assert!(matches!(add(&pool, "one", 37 << 20), Outcome::Created(_)));
    assert_eq!(wait(pool.volumes()).unwrap()[0].size, 38_797_312);
    wait(pool.close()).unwrap();
}

#[test]
fn a_ring_outside_memory_is_refused() {
    let scratch = Scratch::new("pool-ring");
    let mut spec = file_spec(&scratch.0.join("pool"), 64 << 20);
    create(&spec).unwrap();
    spec.ring_dir = scratch.0.clone();
    let error = open(&spec).unwrap_err();
    assert!(error.to_string().contains("ring directory is"), "{error}");
}

/// A client can write what looks like a superblock, newer than all, wherever its data may lie.
#[test]
fn data_that_a_client_writes_does_not_identify_the_pool() {
    use std::os::unix::fs::FileExt;
    let scratch = Scratch::new("pool-planted");
    let (size, path) = (64 << 20, scratch.0.join("pool"));
    let spec = file_spec(&path, size);
    let id = create(&spec).unwrap().pool_id;
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let mut page = Page([0; 4096]);
    file.read_exact_at(&mut page.0, 0).unwrap();
    let place = Place::Device { device: DeviceIndex(0), offset: 0 };
    let mut planted = Superblock::decode(&page.0, place).unwrap();
    let extent = u64::from(planted.extent_size);
    (planted.pool_id, planted.generation) = ([0xee; 16], planted.generation + 1000);
    planted.encode(&mut page);
    for extents in [2, 4, 8] {
        file.write_all_at(&page.0, size - extents * extent).unwrap();
        file.write_all_at(&page.0, size - extents * extent + 4096).unwrap();
    }
    assert_eq!(identity(&spec).unwrap(), Some(id));
    // Without its front the pool's own end is asked.
    let front = vec![0; 8192];
    file.write_all_at(&front, 0).unwrap();
    assert_eq!(identity(&spec).unwrap(), Some(id));
    let (pool, _) = open(&spec).unwrap();
    assert_eq!(pool.id(), id);
    wait(pool.close()).unwrap();
}

/// A loop device over a file, gone afterwards.
struct Loop(PathBuf);

impl Loop {
    fn attach(file: &Path) -> Self {
        let output = std::process::Command::new("losetup")
            .args(["--find", "--show", "--sector-size=4096", "--direct-io=on"])
            .arg(file)
            .output()
            .expect("losetup");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Self(PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = std::process::Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

/// Bytes that a file takes.
fn taken(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).expect("a file").blocks() * 512
}

#[test]
fn freed_space_is_discarded_on_a_block_device() {
    if !nix::unistd::geteuid().is_root() {
        println!("not run: loop devices need root");
        return;
    }
    let scratch = Scratch::new("pool-loop");
    let file = scratch.0.join("disk");
    std::fs::File::create(&file).unwrap().set_len(256 << 20).unwrap();
    let disk = Loop::attach(&file);
    let (path, kind) = (disk.0.clone(), DeviceKind::Disk);
    let device = DeviceSpec { path, kind, size: None, preallocate: false, direct: true };
    let spec = PoolSpec::new("test", device, PathBuf::from("/dev/shm"));
    create(&spec).unwrap();
    let (pool, _) = open(&spec).unwrap();
    assert_eq!(pool.block_size(), 4096);
    let Outcome::Created(volume) = add(&pool, "one", 64 << 20) else { panic!("it is there") };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let workers = Workers::start(WorkerOptions::default()).unwrap();
    runtime.block_on(workers.add_pool(&pool)).unwrap();
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    workers.connect(theirs.into(), session(&pool, volume));
    let mut client = ours;
    let data = vec![7; 16 << 20];
    for (cookie, piece) in data.chunks(1 << 20).enumerate() {
        request(&mut client, 1, cookie as u64, piece);
    }
    let written = taken(&file);
    drop(client);
    runtime.block_on(workers.close_volume(pool.id(), volume));
    runtime.block_on(pool.control(Control::Delete { volume })).unwrap();
    runtime.block_on(pool.control(Control::Checkpoint)).unwrap();
    let freed = (0..6000).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        taken(&file) + (12 << 20) < written
    });
    assert!(freed, "{written} bytes before, {} after", taken(&file));
    runtime.block_on(workers.drain(Duration::from_secs(5)));
    runtime.block_on(pool.close()).unwrap();
}

/// A file below a loop device changes without the device's cache knowing of it, as a disk does that
/// rots.
#[test]
fn a_tool_beside_the_daemon_reads_the_media_and_not_the_cache() {
    if !nix::unistd::geteuid().is_root() {
        println!("not run: loop devices need root");
        return;
    }
    let scratch = Scratch::new("pool-look");
    let file = scratch.0.join("disk");
    let page = |byte| vec![byte; 4096];
    std::fs::write(&file, page(1).repeat(64)).unwrap();
    let disk = Loop::attach(&file);
    // As the serving daemon does: while no process has it open there is no cache.
    let _served = std::fs::File::open(&disk.0).unwrap();
    let mut device =
        Offline::open(std::slice::from_ref(&disk.0), Access::Look, Duration::ZERO).unwrap();
    let mut read = vec![0; 32 * 4096];
    device.read(DeviceIndex(0), 4096, &mut read).unwrap();
    assert!(read == page(1).repeat(32));
    use std::os::unix::fs::FileExt;
    let media = std::fs::OpenOptions::new().write(true).open(&file).unwrap();
    media.write_all_at(&page(2), 5 * 4096).unwrap();
    media.sync_all().unwrap();
    device.read(DeviceIndex(0), 4096, &mut read).unwrap();
    assert!(read[4 * 4096..][..4096] == page(2), "the cache was read");
    assert!(read[..4096] == page(1) && read[5 * 4096..6 * 4096] == page(1));
    // Where there is no way past the cache, it is read all the same.
    let memory = Scratch(PathBuf::from(format!("/dev/shm/blockd-look-{}", std::process::id())));
    std::fs::create_dir_all(&memory.0).unwrap();
    std::fs::write(memory.0.join("disk"), page(3)).unwrap();
    let mut device = Offline::open(&[memory.0.join("disk")], Access::Look, Duration::ZERO).unwrap();
    device.read(DeviceIndex(0), 0, &mut read[..4096]).unwrap();
    assert!(read[..4096] == page(3));
}

/// A session as a negotiation would have resulted in.
fn session(pool: &PoolHandle, volume: VolumeId) -> Session<Target> {
    let (pool, name) = (pool.clone(), "one".to_owned());
    let info = ExportInfo {
        name: name.clone(),
        description: String::new(),
        size: 64 << 20,
        block_size: 4096,
        preferred_size: 4096,
        read_only: false,
        multi_conn: true,
    };
    Session {
        volume: Target { pool, volume, name: name.clone() },
        export: name,
        negotiated: Negotiated::plain(&info),
        peer: "test".to_owned(),
        origin: Origin::default(),
        guard: None,
    }
}

/// A request with a compact header, and its simple reply. Writes go one after the other.
fn request(client: &mut std::os::unix::net::UnixStream, kind: u16, cookie: u64, payload: &[u8]) {
    use std::io::{Read, Write};
    let (mut bytes, len) = (Vec::new(), payload.len() as u64);
    Header { flags: 0, kind, cookie, offset: cookie * len, len }.encode(false, &mut bytes);
    bytes.extend(payload);
    client.write_all(&bytes).expect("a request");
    let mut reply = [0; 16];
    client.read_exact(&mut reply).expect("a reply");
    assert_eq!(reply[4..8], [0; 4], "an error");
}

#[test]
fn of_two_that_make_a_pool_one_does() {
    let scratch = Scratch::new("pool-race");
    let mut spec = file_spec(&scratch.0.join("pool"), 64 << 20);
    spec.lock_wait = Duration::from_secs(20);
    let made = std::thread::scope(|scope| {
        let make = || create(&spec).map(|made| made.pool_id);
        let makers: Vec<_> = (0..4).map(|_| scope.spawn(make)).collect();
        makers.into_iter().map(|maker| maker.join().unwrap()).collect::<Vec<_>>()
    });
    assert_eq!(made.iter().filter(|result| result.is_ok()).count(), 1, "{made:?}");
    let exists = |result: &&Result<_, _>| matches!(result, Err(PoolError::Exists { .. }));
    assert_eq!(made.iter().filter(exists).count(), 3, "{made:?}");
}

#[test]
fn a_pool_that_was_just_made_is_opened_without_a_wait() {
    let scratch = Scratch::new("pool-held");
    for round in 0..20 {
        let mut spec = file_spec(&scratch.0.join(format!("pool-{round}")), 64 << 20);
        spec.lock_wait = Duration::ZERO;
        let (pool, _) = open_created(&spec, create(&spec).unwrap()).unwrap();
        wait(pool.close()).unwrap();
        // Given up in between, it is free at once as well.
        let spec =
            PoolSpec { lock_wait: Duration::ZERO, ..file_spec(&scratch.0.join("x"), 64 << 20) };
        drop(create(&spec).unwrap());
        let (pool, _) = open(&spec).unwrap();
        wait(pool.close()).unwrap();
        std::fs::remove_file(scratch.0.join("x")).unwrap();
    }
}

#[test]
fn a_pool_whose_front_is_gone_is_not_written_over() {
    use std::os::unix::fs::FileExt;
    let scratch = Scratch::new("pool-front");
    let spec = file_spec(&scratch.0.join("pool"), 64 << 20);
    create(&spec).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&spec.devices[0].path).unwrap();
    file.write_all_at(&[0; 8192], 0).unwrap();
    assert!(matches!(create(&spec), Err(PoolError::Exists { .. })));
}

#[test]
fn a_ring_that_others_can_write_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let scratch = Scratch::new("pool-others");
    let mut spec = file_spec(&scratch.0.join("pool"), 64 << 20);
    let id = create(&spec).unwrap().pool_id;
    spec.ring_dir = PathBuf::from(format!("/dev/shm/blockd-others-{}", std::process::id()));
    std::fs::create_dir_all(&spec.ring_dir).unwrap();
    let ring_dir = Scratch(spec.ring_dir.clone());
    let hex: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
    let ring = ring_dir.0.join(format!("ring-{hex}"));
    std::fs::write(&ring, []).unwrap();
    std::fs::set_permissions(&ring, std::fs::Permissions::from_mode(0o666)).unwrap();
    let error = open(&spec).unwrap_err();
    assert!(error.to_string().contains("delta ring is"), "{error}");
    std::fs::remove_file(&ring).unwrap();
    std::os::unix::fs::symlink(scratch.0.join("pool"), &ring).unwrap();
    assert!(matches!(open(&spec), Err(PoolError::Io { .. })));
}

/// A look below a pool that does not end, as in a file system that does not answer.
#[test]
fn a_file_system_that_does_not_answer_holds_up_no_query() {
    let scratch = Scratch::new("pool-hangs-below");
    let spec = file_spec(&scratch.0.join("pool"), 64 << 20);
    create(&spec).unwrap();
    let (pool, _) = open(&spec).unwrap();
    let below = wait(space(&pool)).unwrap().backing_free;
    assert!(below.is_some_and(|free| free > 0), "{below:?}");
    let mut hung = None;
    let receive = pool.look_below(|look| hung = Some(look));
    assert!(hung.is_some());
    let begun = Clock::start();
    let limited = |seconds| {
        let limit = Duration::from_secs(seconds);
        wait(async { tokio::time::timeout(limit, space(&pool)).await }).expect("it waits").unwrap()
    };
    // The first one waits for a while; those after it know that there is nothing to wait for.
    for _ in 0..100 {
        assert_eq!(limited(5).backing_free, below);
    }
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    // It answers again.
    hung.take().expect("the look").run();
    assert!(wait(receive.expect("a result")).unwrap().is_some());
    let mut looks = 0;
    drop(pool.look_below(|_| looks += 1));
    assert_eq!(looks, 1);
    wait(pool.close()).unwrap();
}

#[test]
fn a_spare_device_of_another_pool_is_left_out_and_unchanged() {
    let scratch = Scratch::new("pool-foreign-spare");
    let mut spec = file_spec(&scratch.0.join("pool"), 64 << 20);
    let other = file_spec(&scratch.0.join("other"), 64 << 20);
    drop((create(&spec).unwrap(), create(&other).unwrap()));
    let before = std::fs::read(&other.devices[0].path).unwrap();
    spec.spares = other.devices.clone();
    let (pool, _) = open(&spec).unwrap();
    assert_eq!((pool.devices().len(), pool.spare_count()), (1, 0));
    assert!(std::fs::read(&other.devices[0].path).unwrap() == before, "it was written to");
    // It is not locked either.
    let (beside, _) = open(&other).unwrap();
    assert_ne!(pool.id(), beside.id());
    wait(beside.close()).unwrap();
    wait(pool.close()).unwrap();
}
