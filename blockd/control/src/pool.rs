//! Calls about an open pool that take more than its thread: those that block on the files below it,
//! and walks through the whole map.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blockd_engine::pool::{
    BelowLook, Control, ExtentRun, Outcome, PoolHandle, SpaceNow, new_device,
};
use blockd_mapper::error::MapperError;
use blockd_mapper::pool::Space;
use blockd_media::Device;
use blockd_media::pool::PoolError;
use tokio::time::timeout;

/// How long the file systems below a pool may take to answer before the last result counts. Queries
/// ask pools one after the other, and their clients wait for ten seconds.
const BELOW_LIMIT: Duration = Duration::from_secs(1);

/// Space of a pool, and of what is below it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PoolSpace {
    /// The space as the pool itself counts it.
    pub pool: Space,
    /// Bytes free in the file systems below sparse files, and on other devices beside them; `None`
    /// where nothing is sparse.
    pub backing_free: Option<u64>,
    /// The state of the space policy.
    pub now: SpaceNow,
    /// Volumes that are gone and whose extents are still being let go.
    pub releasing_volumes: u64,
    /// Bytes of these extents.
    pub releasing: u64,
}

impl PoolSpace {
    /// Bytes that can still be written for the first time: the pool's free space, or what is left
    /// below it if that is less.
    #[must_use]
    pub fn free(&self) -> u64 {
        self.pool.free.min(self.backing_free.unwrap_or(u64::MAX))
    }

    /// The same without what is set aside for single volumes.
    #[must_use]
    pub fn available(&self) -> u64 {
        self.now.available.min(self.free())
    }
}

/// Runs a call that blocks on a thread where that does no harm.
async fn blocking<T: Send + 'static>(
    call: impl FnOnce() -> T + Send + 'static,
) -> Result<T, PoolError> {
    tokio::task::spawn_blocking(call).await.map_err(|_| PoolError::Gone)
}

/// Bytes free below a pool: the last result where a file system below it does not answer, in which
/// case one thread waits for it, however many callers there are.
pub(crate) async fn free_below(handle: &PoolHandle) -> Option<u64> {
    let begin = |look: BelowLook| drop(tokio::task::spawn_blocking(move || look.run()));
    let Some(look) = handle.look_below(begin) else { return handle.last_below() };
    match timeout(BELOW_LIMIT, look).await {
        Ok(Ok(free)) => free,
        _ => handle.last_below(),
    }
}

/// Space of a pool. Its thread has to answer; a file system below it need not.
///
/// # Errors
/// If the pool does not serve.
pub async fn space(handle: &PoolHandle) -> Result<PoolSpace, PoolError> {
    let (pool, now) = handle.own_space().await?;
    let below = free_below(handle).await;
    let releasing = handle.releasing().await?;
    let left: u64 = releasing.iter().map(|one| one.left).sum();
    Ok(PoolSpace {
        pool,
        now,
        backing_free: below,
        releasing_volumes: releasing.len() as u64,
        releasing: left * handle.extent_size(),
    })
}

/// The uses of a pool's extents, in order, without gaps.
///
/// # Errors
/// If the pool does not serve.
pub async fn extents(handle: &PoolHandle) -> Result<Vec<ExtentRun>, PoolError> {
    let metadata = handle.metadata_extents().await?;
    let walked = handle.clone();
    blocking(move || walked.extents(metadata)).await
}

/// Extends a device, or takes up space by which it was extended. Returns the bytes gained. Two
/// calls at once would each compute its gain from the size that the other one started with.
///
/// # Errors
/// If the pool or its device refuses; then nothing has changed.
pub(crate) async fn grow(
    handle: &PoolHandle,
    device: usize,
    size: Option<u64>,
) -> Result<u64, PoolError> {
    let (found, position) = handle.growable(device, size)?;
    let path = found.info().path.clone();
    let refuse = |problem| {
        let name = path.display().to_string();
        Err(PoolError::from(MapperError::Device { name, problem }))
    };
    // Before the file is made longer.
    if handle.evacuation(None).await?.device == Some(position) {
        return refuse("it leaves the pool or shrinks: end that first, with --abort".to_owned());
    }
    if found.memory().is_some() {
        return refuse("it is in memory, and stays as long as it is".to_owned());
    }
    let growing = Arc::clone(&found);
    let grown =
        blocking(move || growing.grow(size)).await?.map_err(PoolError::io("grow", &path))?;
    let wanted = size.unwrap_or(0);
    if grown < wanted {
        return refuse(format!("it has {grown} bytes, and can't be made {wanted}"));
    }
    let done = handle.control(Control::GrowDevice { device: position, size: grown }).await?;
    found.note_size(grown);
    // The pool may not know by how much the file was extended: so the bytes that it gains count.
    Ok(gained(handle, &done))
}

/// Takes the first spare device into a pool that can join it. Gives its path and the bytes gained;
/// `None` where there is none. `refused` has the errors of those before it, which are tried again
/// next time. Not to be called while the pool is extended otherwise.
pub(crate) async fn add_spare(
    handle: &PoolHandle,
    mut refused: impl FnMut(PoolError),
) -> Option<(PathBuf, u64)> {
    for (at, spare) in handle.spares() {
        match join(handle, at, &spare).await {
            Ok(Some(gained)) => return Some((spare.info().path.clone(), gained)),
            Ok(None) => {}
            Err(error) => refused(error),
        }
    }
    None
}

/// Takes a device into a pool that is open with this number and all rings know. Gives the bytes
/// gained; `None` where the pool has it. Not to be called while the pool is extended otherwise.
///
/// # Errors
/// If the device holds anything at its ends, or the pool refuses.
pub(crate) async fn join(
    handle: &PoolHandle,
    number: u8,
    device: &Arc<Device>,
) -> Result<Option<u64>, PoolError> {
    let (path, looked_at) = (device.info().path.clone(), Arc::clone(device));
    let empty = blocking(move || looked_at.is_empty_at_ends()).await?;
    if !empty.map_err(PoolError::io("read", &path))? {
        let problem = "it holds something in its first or last 2 MiB, and joins no pool like that";
        let (name, problem) = (path.display().to_string(), problem.to_owned());
        return Err(MapperError::Device { name, problem }.into());
    }
    let (new, pool, joining) = (new_device(device), handle.clone(), Arc::clone(device));
    // Before it is remembered: a spare device that is refused is tried again and again.
    pool.mapper().check_new_device(0, &new)?;
    blocking(move || pool.remember_disk(new.uuid, &joining)).await??;
    let done = handle.control(Control::AddDevice { handle: number, device: new }).await?;
    Ok(matches!(done, Outcome::Grown { .. }).then(|| gained(handle, &done)))
}

fn gained(handle: &PoolHandle, done: &Outcome) -> u64 {
    match done {
        Outcome::Grown { extents } => extents * handle.extent_size(),
        _ => 0,
    }
}
