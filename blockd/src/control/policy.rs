//! The space policy of pools as it is configured: checked against the pools, and taken up while
//! they are served.

use std::fs::File;
use std::io::{Seek as _, SeekFrom};

use crate::config::{DeviceConfig, PoolConfig, SizeWish, SpaceConfig};
use crate::error::{Error, shown};
use crate::pool::{Policy, PoolHandle};
use crate::units::exact;

use super::Control;

impl Control {
    /// Takes up what is configured for pools from now on. Those that were made at run time, and are
    /// in no file, go by the first. Where one is refused, nothing is changed. Gives the names of
    /// those for which something is different now.
    pub fn take_up_space(&self, configured: &[PoolConfig]) -> Result<Vec<String>, Error> {
        let Some(first) = configured.first() else { return Ok(Vec::new()) };
        let mut changes = Vec::new();
        for known in self.known_pools() {
            let name = known.config.name;
            let space = &configured.iter().find(|pool| pool.name == name).unwrap_or(first).space;
            if *space == known.config.space {
                continue;
            }
            if let Ok(handle) = &known.state {
                let total = handle.devices().iter().map(|device| device.size).sum();
                check_quantum(&name, space.quantum, total)?;
            }
            changes.push((name, space.clone()));
        }
        *self.0.space_of_new_pools.write() = first.space.clone();
        let mut changed = Vec::new();
        for (name, space) in changes {
            let mut pools = self.0.pools.write();
            let Some(known) = pools.get_mut(&name) else { continue };
            known.config.space = space;
            if let Ok(handle) = &known.state {
                tell(handle, &known.config.space);
            }
            changed.push(name);
        }
        Ok(changed)
    }

    /// What is configured for a pool now.
    pub(super) fn space_of(&self, pool: &str) -> Option<SpaceConfig> {
        self.0.pools.read().get(pool).map(|known| known.config.space.clone())
    }
}

fn tell(handle: &PoolHandle, space: &SpaceConfig) {
    for policy in [Policy::Marks(space.marks), Policy::Quantum(space.quantum)] {
        if let Err(error) = handle.tell(policy) {
            tracing::warn!(pool = handle.name(), %error, "its space policy was not taken up");
        }
    }
}

/// Refuses a quantum that is more than the whole pool. The default is for pools of all sizes: less
/// is granted where many share little.
fn check_quantum(pool: &str, quantum: u64, total: u64) -> Result<(), Error> {
    if quantum <= total || quantum <= SpaceConfig::default().quantum {
        return Ok(());
    }
    let allowed = format!("at most the pool's size, {}", exact(total));
    Err(Error::invalid(format!("space.quantum of pool {}", shown(pool)), quantum, allowed))
}

/// The same for a pool that isn't open yet, as far as its size is known.
pub(super) fn check_before_opening(pool: &PoolConfig) -> Result<(), Error> {
    let sizes: Option<Vec<u64>> = pool.devices.iter().map(size).collect();
    sizes.map_or(Ok(()), |sizes| check_quantum(&pool.name, pool.space.quantum, sizes.iter().sum()))
}

fn size(device: &DeviceConfig) -> Option<u64> {
    match device.size {
        SizeWish::Bytes(bytes) if !device.path.exists() => Some(bytes),
        // The size of a block device is where its end is.
        _ => File::open(&device.path).ok()?.seek(SeekFrom::End(0)).ok(),
    }
}
