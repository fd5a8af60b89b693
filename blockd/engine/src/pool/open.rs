//! Making and opening pools: the mapper's steps, with IO.

use std::path::PathBuf;
use std::sync::Arc;

use blockd_mapper::error::MapperError;
use blockd_mapper::open::{OpenMode, OpenOptions, OpenReport, Opened};
use blockd_mapper::pool::Tuning;
use blockd_media::clock::Clock;
use blockd_media::pmem::Pmem;
use blockd_media::pool::newest::present;
use blockd_media::pool::ownership::{Ownership, add_gate};
use blockd_media::pool::{MAX_WORKERS, PoolError, PoolSpec, boot_id};
use blockd_media::{Device, DeviceKind, Gate};

use super::create::{Created, make};
use super::devices::{open_each, open_spares, random_id};
use super::driver::{Driver, Served, new_ring, opened, serve};
use super::handle::PoolHandle;
use super::own::own_ring;
use super::thread;
use crate::backing::Ring;

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
    let (thread, handle) = thread::PoolThread::new(
        spec,
        pool,
        engine,
        ring,
        (served, devices.len()),
        (ring_file, ownership),
        clock,
    )?;
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
    let defaults = if spec.sparing { Tuning::sparing() } else { Tuning::default() };
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
            fold_rate: spec.fold_rate,
            read_cache: spec.read_cache,
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

fn has_whole_blocks(device: &Device) -> bool {
    device.pmem().is_some_and(|pmem| pmem.info().options.whole_blocks)
}
