//! Making and opening pools: the mapper's steps, with IO.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use blockd_mapper::create::{CreateOptions, Creating, NewDevice};
use blockd_mapper::error::MapperError;
use blockd_mapper::format::superblock::Superblock;
use blockd_mapper::io::{IoCommand, IoError, IoOp};
use blockd_mapper::open::{OpenMode, OpenOptions, OpenReport, Opened, Opening};
use blockd_mapper::pool::Tuning;
use blockd_mapper::ring::RingMemory;
use blockd_mapper::units::DeviceIndex;
use blockd_media::clock::Clock;
use blockd_media::pmem::Pmem;
use blockd_media::pool::newest::{present, superblock};
use blockd_media::pool::ownership::{LIVING_WAIT, Ownership, add_gate};
use blockd_media::pool::ring_file::{RingFile, ring_path};
use blockd_media::pool::{MAX_WORKERS, PoolError, PoolSpec, boot_id, holds_pool, storage};
use blockd_media::{Device, DeviceKind, DeviceSpec, Gate, io_error};

use super::handle::PoolHandle;
use super::thread;
use crate::backing::{Ended, FileSlot, Ring, RingOptions};

/// Operations of a pool's thread that can be out at once: the engine has fewer.
const OPERATIONS: u32 = 256;
/// How often a lock that another process holds is tried.
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// How long a claim of another program on a block device is waited for. A process that died gives
/// its claim back moments after its lock.
const CLAIM_WAIT: Duration = Duration::from_secs(2);
/// How often the log says that a lock is waited for.
const LOCK_REPORT: Duration = Duration::from_secs(5);

/// A pool that was made. Its devices stay locked and claimed until it is opened, or dropped.
#[derive(Debug)]
pub struct Created {
    /// Its identity.
    pub pool_id: [u8; 16],
    devices: Vec<Arc<Device>>,
}

impl Drop for Created {
    fn drop(&mut self) {
        // No IO is under way: the pool is made when all of it has ended.
        self.devices.iter().for_each(|device| device.unlock());
    }
}

/// A device and its place in a ring.
#[derive(Debug)]
pub(super) struct Served {
    pub(super) device: Arc<Device>,
    pub(super) slot: FileSlot,
}

/// Makes a pool on its devices. Files that are not there are made, and removed again if that fails;
/// a pool that is there already is never written over.
pub fn create(spec: &PoolSpec) -> Result<Created, PoolError> {
    refuse_pools(spec)?;
    let mut devices = Vec::new();
    let opened = open_each(&spec.devices, true, &mut devices);
    let created =
        opened.map_err(|error| (error, true)).and_then(|()| lock_and_make(spec, &devices));
    match created {
        Ok(pool_id) => Ok(Created { pool_id, devices }),
        Err((error, is_idle)) => {
            if !error.is_of_another_opener() {
                remove_without_pool(spec, &devices);
            }
            if is_idle {
                devices.iter().for_each(|device| device.unlock());
            }
            Err(error)
        }
    }
}

/// Returns the new pool's identity, or the error and whether no IO is left under way.
fn lock_and_make(spec: &PoolSpec, devices: &[Arc<Device>]) -> Result<[u8; 16], (PoolError, bool)> {
    let idle = |error| (error, true);
    devices.iter().try_for_each(|device| lock(device, spec.lock_wait)).map_err(idle)?;
    // Another process may have made one while the lock was waited for, or removed its file.
    refuse_pools(spec).map_err(idle)?;
    refuse_removed(devices).map_err(idle)?;
    let (pool_id, gate) = (random_id(), add_gate(devices));
    let none = || (MapperError::Internal("a pool has no device").into(), true);
    let first = devices.first().ok_or_else(none)?;
    let open_id = fastrand::u64(1..);
    let mut ownership =
        Ownership::take(spec, first, pool_id, open_id, gate.as_ref()).map_err(idle)?;
    // Another host may have made one while it was watched.
    let made = refuse_pools(spec).map_err(idle).and_then(|()| {
        make(spec, devices, pool_id).inspect_err(|_| {
            // They hold a part of this pool, and are locked since they were empty.
            devices.iter().for_each(|device| device.remove_if_new());
        })
    });
    // With IO under way the claim stays as it is, and the next opener waits.
    if !matches!(made, Err((_, false))) {
        ownership.release();
    }
    made.map(|()| pool_id)
}

/// Removes new files, unless another process has made a pool in them meanwhile.
fn remove_without_pool(spec: &PoolSpec, devices: &[Arc<Device>]) {
    for (one, device) in spec.devices.iter().zip(devices) {
        let is_locked = device.try_lock().unwrap_or(false);
        if is_locked && holds_pool(one).is_ok_and(|holds| !holds) {
            device.remove_if_new();
        }
    }
}

/// Refuses files that were removed or replaced while their lock was waited for.
fn refuse_removed(devices: &[Arc<Device>]) -> Result<(), PoolError> {
    for device in devices {
        let info = device.info();
        if info.kind == DeviceKind::File && !device.is_at(&info.path) {
            let gone = std::io::Error::from(std::io::ErrorKind::NotFound);
            return Err(PoolError::io("make a pool on", &info.path)(gone));
        }
    }
    Ok(())
}

fn refuse_pools(spec: &PoolSpec) -> Result<(), PoolError> {
    for device in &spec.devices {
        if holds_pool(device)? {
            return Err(PoolError::Exists { path: device.path.clone() });
        }
    }
    Ok(())
}

fn make(
    spec: &PoolSpec,
    devices: &[Arc<Device>],
    pool_id: [u8; 16],
) -> Result<(), (PoolError, bool)> {
    let mut ring = new_ring().map_err(|error| (error, true))?;
    make_on(&mut ring, spec, devices, pool_id).map_err(|error| (error, ring.in_flight() == 0))
}

fn make_on(
    ring: &mut Ring,
    spec: &PoolSpec,
    devices: &[Arc<Device>],
    pool_id: [u8; 16],
) -> Result<(), PoolError> {
    for device in devices {
        device.format(random_id()).map_err(PoolError::io("format", &device.info().path))?;
    }
    let options = CreateOptions {
        pool_id,
        extent_size: spec.extent_size,
        devices: devices.iter().map(|device| new_device(device)).collect(),
        wal_size: None,
        reserve_size: None,
        node: spec.node,
    };
    let mut creating = Creating::new(&options)?;
    let served = serve(ring, devices)?;
    let mut driver = Driver { ring, served: &served, lock_wait: spec.lock_wait };
    loop {
        while let Some(command) = creating.poll() {
            driver.begin(command)?.into_iter().for_each(|(c, r)| creating.complete(c, r));
        }
        if creating.is_done() {
            break;
        }
        driver.wait()?.into_iter().for_each(|(c, r)| creating.complete(c, r));
    }
    creating.finish()?;
    Ok(())
}

/// Opens a pool and starts its thread. A pool in memory is made first.
pub fn open(spec: &PoolSpec) -> Result<(PoolHandle, OpenReport), PoolError> {
    open_with(spec, None)
}

/// Opens a pool that was just made, on the devices that are locked since.
pub fn open_created(
    spec: &PoolSpec,
    created: Created,
) -> Result<(PoolHandle, OpenReport), PoolError> {
    open_with(spec, Some(created))
}

fn open_with(
    spec: &PoolSpec,
    created: Option<Created>,
) -> Result<(PoolHandle, OpenReport), PoolError> {
    let spec = spec.clone();
    let (send, receive) = crossbeam_channel::bounded(1);
    let name = thread::thread_name(&spec.name);
    let run = move || match prepare(&spec, created) {
        Ok((thread, handle, report)) => {
            let _ = send.send(Ok((handle, report)));
            drop(send);
            thread.run();
        }
        Err(error) => {
            let _ = send.send(Err(error));
        }
    };
    std::thread::Builder::new()
        .name(name)
        .spawn(run)
        .map_err(PoolError::io("start a thread for", "the pool"))?;
    receive.recv().unwrap_or(Err(PoolError::Gone))
}

fn prepare(
    spec: &PoolSpec,
    created: Option<Created>,
) -> Result<(thread::PoolThread, PoolHandle, OpenReport), PoolError> {
    let mut devices = match created {
        Some(mut created) => std::mem::take(&mut created.devices),
        None => {
            let mut devices = Vec::new();
            open_each(&spec.devices, false, &mut devices)?;
            devices
        }
    };
    let spares = open_spares(spec, &mut devices)?;
    let clock = Clock::start();
    let mut ring = new_ring()?;
    // The spares come last: a device that joins the pool later has the next number, and all rings
    // know it.
    let all: Vec<_> = devices.iter().chain(&spares).cloned().collect();
    let gate = add_gate(&all);
    let served = serve(&mut ring, &all)?;
    let opened = open_on(spec, &mut ring, &served, devices.len(), gate.as_ref());
    if opened.is_err() && ring.in_flight() == 0 {
        // The ring keeps the files for a while: without this, the next attempt would wait for us.
        all.iter().for_each(|device| device.unlock());
    }
    let (Opened { pool, mut engine, report }, ring_file, ownership) = opened?;
    spares.iter().filter_map(|spare| spare.pmem()).for_each(Pmem::note_spare);
    if devices.iter().filter_map(|device| device.pmem()).any(Pmem::is_to_be_erased) {
        tracing::info!(pool = spec.name, "free space is overwritten, as it may not have been");
        engine.scrub();
    }
    // Closing takes the ring away; where nothing may be written, what it holds is still needed.
    let ring_file = ring_file.filter(|_| !pool.is_read_only());
    let (thread, handle) =
        thread::PoolThread::new(spec, pool, engine, ring, served, (ring_file, ownership), clock)?;
    Ok((thread, handle, report))
}

/// Opens the pool that lies on the first `members` devices; the others are spares. Returns the
/// delta ring's file as well, where there is one, and what keeps others from the pool.
fn open_on(
    spec: &PoolSpec,
    ring: &mut Ring,
    served: &[Served],
    members: usize,
    gate: Option<&Arc<Gate>>,
) -> Result<(Opened, Option<PathBuf>, Ownership), PoolError> {
    let all: Vec<_> = served.iter().map(|one| Arc::clone(&one.device)).collect();
    let devices = all.get(..members).unwrap_or(&all);
    let volatile = spec.devices.iter().all(|device| device.kind == DeviceKind::Memory);
    if volatile {
        make(spec, devices, random_id()).map_err(|(error, _)| error)?;
    }
    let open_id = fastrand::u64(1..);
    let (own_ring, ownership) = match volatile {
        true => (None, Ownership::default()),
        false => {
            let (ring, ownership) = own_ring(spec, served, open_id, gate)?;
            (Some(ring), ownership)
        }
    };
    let ring_file = own_ring.as_ref().map(|ring| ring.path.clone());
    let ring_problem = own_ring.as_ref().and_then(|ring| ring.problem.clone());
    let defaults = Tuning::default();
    let options = OpenOptions {
        devices: devices.iter().map(|device| present(device)).collect(),
        mode: OpenMode::ReadWrite,
        ring: own_ring.map(|ring| ring.memory),
        boot_id: boot_id()?,
        open_id,
        accept_loss: spec.accept_loss || volatile,
        node: spec.node,
        tuning: Tuning {
            workers: MAX_WORKERS,
            commit_interval_ns: u64::try_from(spec.commit_interval.as_nanos())
                .unwrap_or(defaults.commit_interval_ns),
            quantum: spec.quantum.div_ceil(u64::from(spec.extent_size).max(1)).max(1),
            marks: spec.marks,
            write_through: all.iter().all(|device| device.ends_its_writes()),
            passdown: all.iter().any(|device| device.takes_discards()),
            synchronous: all.iter().all(|device| device.pmem().is_some()),
            whole_blocks: all.iter().any(|device| has_whole_blocks(device)),
            claimed: gate.is_some(),
            ..defaults
        },
    };
    let mut driver = Driver { ring, served, lock_wait: spec.lock_wait };
    let opened = match opened(&mut driver, options.clone()) {
        Err(PoolError::Mapper(MapperError::Unsupported { features })) => {
            let pool = &spec.name;
            tracing::warn!(%pool, "features {features:#x} are not known here: only read from");
            opened(&mut driver, OpenOptions { mode: OpenMode::ReadOnly, ..options })
        }
        other => other,
    };
    let mut opened = opened?;
    opened.report.ring_problem = ring_problem.or(opened.report.ring_problem);
    Ok((opened, ring_file, ownership))
}

fn opened(driver: &mut Driver<'_>, options: OpenOptions) -> Result<Opened, PoolError> {
    let mut opening = Opening::new(options)?;
    loop {
        while let Some(command) = opening.poll() {
            driver.begin(command)?.into_iter().for_each(|(c, r)| opening.complete(c, r));
        }
        if opening.is_done() {
            return Ok(opening.finish()?);
        }
        driver.wait()?.into_iter().for_each(|(c, r)| opening.complete(c, r));
    }
}

/// The delta ring of a pool whose devices are owned.
struct OwnRing {
    memory: Arc<dyn RingMemory>,
    path: PathBuf,
    /// Why the ring that was there is not used, where that is known before it is opened.
    problem: Option<String>,
}

/// The ring's file may be grown to the dimensions of this start, so it is opened only by the owner:
/// the locks and the claim come first.
fn own_ring(
    spec: &PoolSpec,
    served: &[Served],
    open_id: u64,
    gate: Option<&Arc<Gate>>,
) -> Result<(OwnRing, Ownership), PoolError> {
    for one in served {
        lock(&one.device, spec.lock_wait)?;
        one.device.start().map_err(PoolError::io("take up", &one.device.info().path))?;
    }
    let newest = || -> Result<Option<Superblock>, PoolError> {
        let copies = served.iter().filter_map(|one| superblock(&one.device));
        let newest = copies.max_by_key(|superblock| superblock.generation);
        newest.iter().try_for_each(|superblock| refuse_foreign(spec, superblock))?;
        Ok(newest)
    };
    let mut found = newest()?;
    let mut ownership = Ownership::default();
    let first = served.iter().find_map(|one| {
        let copy = superblock(&one.device).filter(|copy| copy.this_device == DeviceIndex(0))?;
        Some((&one.device, copy.pool_id))
    });
    // Without its first device the mapper refuses the pool, and the gate stays closed.
    if let Some((first, pool_id)) = first {
        // A pool of a later release is only read: its claim page is not written either.
        let is_written = found.as_ref().is_none_or(|copy| copy.unknown_ro_compat() == 0);
        let gate = gate.filter(|_| is_written);
        ownership = Ownership::take(spec, first, pool_id, open_id, gate)?;
        if gate.is_some() {
            served.iter().try_for_each(|one| pass_cache(spec, &one.device))?;
        }
        // Another host may have had the pool open meanwhile.
        found = newest()?;
    }
    // Without a superblock the mapper says what is wrong; the ring is not asked for.
    let id = found.as_ref().map_or([0; 16], |superblock| superblock.pool_id);
    let path = ring_path(&spec.ring_dir, &id);
    let problem = match &found {
        Some(superblock) => check_storage(spec, served, superblock, &path, open_id)?,
        None => None,
    };
    let file = RingFile::open(&path, MAX_WORKERS, spec.ring_records)?;
    if !file.is_locked() {
        tracing::warn!(path = %path.display(), "delta ring can't be locked in memory");
    }
    Ok((OwnRing { memory: file, path, problem }, ownership))
}

/// Sees that what is read of a device is what other hosts have written.
fn pass_cache(spec: &PoolSpec, device: &Device) -> Result<(), PoolError> {
    let info = device.info();
    if !info.direct && device.memory().is_none() {
        let (pool, path) = (&spec.name, info.path.display());
        tracing::warn!(%pool, %path, "shared storage without O_DIRECT: late writes can follow a \
                       claim that was lost");
    }
    device.forget_cache().map_err(PoolError::io("drop page cache of", &info.path))
}

/// Refuses a ring that would be replayed over disks that were restarted since it was written, or
/// removes it where the loss is accepted; then remembers the disks for this open. Returns the
/// reason why the ring was removed.
fn check_storage(
    spec: &PoolSpec,
    served: &[Served],
    newest: &Superblock,
    ring: &Path,
    open_id: u64,
) -> Result<Option<String>, PoolError> {
    let sequences = served.iter().filter_map(|one| {
        let index = superblock(&one.device)?.this_device;
        one.device.disk_sequence().map(|sequence| (index.0, sequence))
    });
    let sequences: Vec<_> = sequences.collect();
    let problem = storage::check(spec, ring, newest, &boot_id()?, &sequences)?;
    if newest.unknown_ro_compat() != 0 {
        // Such a pool is only read, and its ring stays as it is.
        return Ok(problem);
    }
    if problem.is_some() {
        match std::fs::remove_file(ring) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(PoolError::io("remove delta ring", ring)(error));
            }
            _ => {}
        }
    }
    storage::remember(ring, &[newest.open_id, open_id], &sequences)?;
    Ok(problem)
}

/// A pool that another node has not closed may be in use there, where no lock of ours is seen. A
/// takeover has to name the former owner.
fn refuse_foreign(spec: &PoolSpec, found: &Superblock) -> Result<(), PoolError> {
    let others = found.node != 0 && spec.node != 0 && found.node != spec.node;
    let refused = match spec.taken_from {
        Some(wanted) => found.node != wanted,
        None => others && !found.clean,
    };
    if !refused {
        return Ok(());
    }
    let path = spec.devices.first().map(|device| device.path.clone()).unwrap_or_default();
    Err(PoolError::Foreign { path, node: found.node, wanted: spec.taken_from })
}

/// Opens devices, or creates those that are files and not there. `devices` has those that were
/// opened, also after an error.
fn open_each(
    specs: &[DeviceSpec],
    create: bool,
    devices: &mut Vec<Arc<Device>>,
) -> Result<(), PoolError> {
    for spec in specs {
        let opened = if create { Device::create(spec) } else { Device::open(spec) };
        devices.push(Arc::new(opened.map_err(PoolError::io("open", &spec.path))?));
    }
    Ok(())
}

/// Opens the spares: a device that has joined the pool before is one of its devices. A device that
/// cannot be opened is left out; the pool reports it if it needs it.
fn open_spares(
    spec: &PoolSpec,
    devices: &mut Vec<Arc<Device>>,
) -> Result<Vec<Arc<Device>>, PoolError> {
    let mut spares = Vec::new();
    for spare in &spec.spares {
        let opened = match open_spare(spec, spare) {
            Ok(opened) => Arc::new(opened),
            Err(error) => {
                let path = spare.path.display();
                tracing::warn!(pool = spec.name, %path, %error, "a spare device can't be opened");
                continue;
            }
        };
        // An unreadable rest of an interrupted join makes it no member.
        match superblock(&opened) {
            Some(_) => devices.push(opened),
            None => spares.push(opened),
        }
    }
    Ok(spares)
}

/// A spare in persistent memory has to have our mark before anything of it is read; its owner makes
/// it, where nothing is.
fn open_spare(spec: &PoolSpec, spare: &DeviceSpec) -> Result<Device, PoolError> {
    let device = Device::open(spare).map_err(PoolError::io("open", &spare.path))?;
    if device.pmem().is_some() {
        lock(&device, spec.lock_wait)?;
        let formatted = device.format_if_new(random_id());
        formatted.map_err(PoolError::io("format", &spare.path))?;
    }
    Ok(device)
}

/// The description of a device for a pool that it joins.
pub(super) fn new_device(device: &Device) -> NewDevice {
    NewDevice {
        name: device.info().path.display().to_string(),
        uuid: random_id(),
        size: device.size(),
        block_size: device.info().block_size,
        class: 0,
    }
}

fn new_ring() -> Result<Ring, PoolError> {
    let options = RingOptions { operations: OPERATIONS, arena_bytes: 0, serves: false };
    Ring::new(options).map_err(PoolError::io("set up io_uring for", "the pool"))
}

fn serve(ring: &mut Ring, devices: &[Arc<Device>]) -> Result<Vec<Served>, PoolError> {
    let mut served = Vec::new();
    for device in devices {
        let slot = ring.add_device(device);
        let slot = slot.map_err(PoolError::io("register", &device.info().path))?;
        served.push(Served { device: Arc::clone(device), slot });
    }
    Ok(served)
}

fn random_id() -> [u8; 16] {
    // Twelve lines of kernel source say it never fails once the host has booted.
    let mut id = [0; 16];
    let read = std::fs::File::open("/dev/urandom")
        .and_then(|mut file| std::io::Read::read_exact(&mut file, &mut id));
    if read.is_err() {
        fastrand::fill(&mut id);
    }
    id
}

type Answered = Vec<(IoCommand, Result<(), IoError>)>;

/// Does the IO of a pool that is being made or opened.
struct Driver<'a> {
    ring: &'a mut Ring,
    served: &'a [Served],
    lock_wait: Duration,
}

impl Driver<'_> {
    /// Begins a command; gives it back if it has ended at once.
    fn begin(&mut self, mut command: IoCommand) -> Result<Answered, PoolError> {
        let Some(one) = self.served.get(usize::from(command.device.0)) else {
            return Err(MapperError::Internal("a command names no device").into());
        };
        if matches!(command.op, IoOp::Fence) {
            lock(&one.device, self.lock_wait)?;
            return Ok(vec![(command, Ok(()))]);
        }
        let writes = matches!(command.op, IoOp::Write { .. });
        // The claim is renewed meanwhile.
        let clock = Clock::start();
        while writes && !one.device.may_write() && clock.elapsed() < self.lock_wait {
            if one.device.gate().is_some_and(|gate| gate.lost_to().is_some()) {
                break;
            }
            std::thread::sleep(LOCK_PAUSE);
        }
        let started = match at_once(&one.device, &mut command.op) {
            Begun::Ended(result) => return Ok(vec![(command, result)]),
            Begun::Synced => self.ring.sync_command(one.slot, command),
            Begun::NotYet => self.ring.command(one.slot, command),
        };
        match started {
            Ok(()) => Ok(Vec::new()),
            Err(command) => Ok(vec![(command, Err(IoError::Media))]),
        }
    }

    /// Waits until something has ended.
    fn wait(&mut self) -> Result<Answered, PoolError> {
        self.ring.enter(1).map_err(PoolError::io("wait for", "the pool's IO"))?;
        let mut ended = Vec::new();
        while let Some(one) = self.ring.reap() {
            if let Ended::Command(command, result) = one {
                if let Err(error) = &result {
                    tracing::error!(operation = command.op.name(), %error, "IO of the pool failed");
                }
                ended.push((command, result.map_err(|error| io_error(&error))));
            }
        }
        Ok(ended)
    }
}

/// Waits for the owner lock: while a former owner lives, or IO of a dead one is on its way. Then
/// claims the device, where it is a block device.
fn lock(device: &Device, limit: Duration) -> Result<(), PoolError> {
    let path = &device.info().path;
    let (clock, mut reported) = (Clock::start(), Duration::ZERO);
    while !device.try_lock().map_err(PoolError::io("lock", path))? {
        let waited = clock.elapsed();
        let owner = device.owner();
        let limit = if owner.is_some() { limit.min(LIVING_WAIT) } else { limit };
        if waited >= limit {
            return Err(PoolError::Locked { path: path.clone(), waited, owner });
        }
        if waited >= reported + LOCK_REPORT {
            reported = waited;
            let (path, seconds, limit) = (path.display(), waited.as_secs(), limit.as_secs());
            tracing::info!(%path, seconds, limit, owner, "waiting for the owner lock");
        }
        std::thread::sleep(LOCK_PAUSE);
    }
    let waited = clock.elapsed();
    if waited > Duration::from_millis(1) {
        let ms = waited.as_millis();
        tracing::info!(path = %path.display(), ms, "waited for the owner lock");
    }
    claim(device).inspect_err(|_| device.unlock())
}

/// Claims a block device, for the owner of its lock.
fn claim(device: &Device) -> Result<(), PoolError> {
    let path = &device.info().path;
    let clock = Clock::start();
    loop {
        match device.claim() {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                if clock.elapsed() >= CLAIM_WAIT {
                    let by = device.holder();
                    let by = by.unwrap_or_else(|| "another program has opened it".to_owned());
                    return Err(PoolError::Claimed { path: path.clone(), by });
                }
                std::thread::sleep(LOCK_PAUSE);
            }
            other => return other.map_err(PoolError::io("claim", path)),
        }
    }
}

/// How far a command is that was begun without the ring.
pub(super) enum Begun {
    /// The command has ended.
    Ended(Result<(), IoError>),
    /// The data is written, and is durable after a sync.
    Synced,
    /// The ring has to do it, or the thread that waits for discards.
    NotYet,
}

/// Executes operations that need no ring at once: all those on a device in memory. Nothing that is
/// written here needs a lane: a reference to it has its checksum, and is written later or twice.
pub(super) fn at_once(device: &Device, op: &mut IoOp) -> Begun {
    let Some(memory) = device.memory() else { return Begun::NotYet };
    Begun::Ended(match op {
        IoOp::Fence => Ok(()),
        IoOp::Flush if memory.needs_sync() => return Begun::NotYet,
        IoOp::Flush => Ok(()),
        IoOp::Read { offset, buffer } => memory.read(*offset, buffer.as_bytes_mut()),
        IoOp::Write { offset, buffer, fua } => {
            let written = memory.write(0, *offset, buffer.as_bytes(), true);
            memory.fence();
            if written.is_ok() && *fua && memory.needs_sync() {
                return Begun::Synced;
            }
            written
        }
        IoOp::Discard { .. } if device.pmem().is_some() => return Begun::NotYet,
        IoOp::Discard { offset, len } => device.discard(*offset, *len),
    })
}

fn has_whole_blocks(device: &Device) -> bool {
    device.pmem().is_some_and(|pmem| pmem.info().options.whole_blocks)
}
