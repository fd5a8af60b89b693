//! The owner lock of a device, and the claim on a disk: waited for within limits.

use std::time::Duration;

use blockd_media::Device;
use blockd_media::clock::Clock;
use blockd_media::pool::PoolError;
use blockd_media::pool::ownership::LIVING_WAIT;

/// How often a lock that another process holds is tried.
pub(super) const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// How long a claim of another program on a block device is waited for. A process that died gives
/// its claim back moments after its lock.
const CLAIM_WAIT: Duration = Duration::from_secs(2);

/// How often the log says that a lock is waited for.
const LOCK_REPORT: Duration = Duration::from_secs(5);

/// Waits for the owner lock: while a former owner lives, or IO of a dead one is on its way. Then
/// claims the device, where it is a block device.
pub(super) fn lock(device: &Device, limit: Duration) -> Result<(), PoolError> {
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
