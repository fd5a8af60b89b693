//! Locks out other daemons and other hosts from an open pool.

use std::sync::Arc;
use std::time::Duration;

use super::claim::{self, Held, Opener};
use super::host_lock::{self, HostLock};
use super::{PoolError, PoolSpec};
use crate::pool::boot_id;
use crate::{Device, Gate};

/// How long a process that lives is waited for. It may be about to end; the IO of a dead one may
/// take as long as [`PoolSpec::lock_wait`].
pub const LIVING_WAIT: Duration = Duration::from_secs(30);

/// The locks of an open pool, beside the owner locks of its devices.
#[derive(Debug, Default)]
pub struct Ownership {
    lock: Option<HostLock>,
    claim: Option<Held>,
}

impl Ownership {
    /// Takes the pool for this host, then for this open: the first keeps off other daemons of the
    /// host that reach the devices by another path, the second other hosts. The first device has
    /// the claim.
    pub fn take(
        spec: &PoolSpec,
        first: &Device,
        pool_id: [u8; 16],
        open_id: u64,
        gate: Option<&Arc<Gate>>,
    ) -> Result<Self, PoolError> {
        let path = &first.info().path;
        let lock = host_lock::take(&pool_id, path, spec.lock_wait.min(LIVING_WAIT))?;
        let opener = Opener {
            pool_id,
            open_id,
            node: spec.node,
            boot_id: boot_id()?,
            lock_space: lock.as_ref().map_or(0, HostLock::space),
            wait: spec.claim_wait,
            leased_until_ns: spec.leased_until_ns,
            fenced: spec.fenced,
        };
        let claim = gate.map(|gate| claim::take(first.file(), path, &opener, gate)).transpose()?;
        Ok(Self { lock, claim })
    }

    /// Gives the pool up, all of whose IO has ended.
    pub fn release(&mut self) {
        if let Some(claim) = self.claim.take() {
            claim.release();
        }
        self.lock = None;
    }

    /// Gives a failed pool up, all of whose IO has ended. Its claim stays on the media, as after a
    /// crash.
    pub fn abandon(&mut self) {
        if let Some(claim) = self.claim.take() {
            claim.abandon();
        }
        self.lock = None;
    }
}

/// Whether other hosts may write to a device, so that a pool on it needs a claim.
#[must_use]
pub fn is_shared(device: &Device) -> bool {
    device.memory().is_none() && claim::is_shared(device.file())
}

/// Has writes to these devices wait for a claim, if other hosts may reach one of them.
pub fn add_gate(devices: &[Arc<Device>]) -> Option<Arc<Gate>> {
    let is_shared = devices.iter().any(|device| is_shared(device));
    // Devices that a pool was just made on have one.
    let present = devices.iter().find_map(|device| device.gate()).cloned();
    let gate = present.or_else(|| is_shared.then(Arc::default));
    for device in devices {
        gate.iter().for_each(|gate| device.set_gate(gate));
    }
    gate
}
