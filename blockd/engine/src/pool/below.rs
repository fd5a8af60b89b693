//! The space below a pool's sparse files. A file system that does not answer holds the thread that
//! looks there, so that one look serves all who wait, and the last result is kept.

use std::collections::BTreeMap;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt as _;

use futures_channel::oneshot;
use parking_lot::Mutex;

use super::handle::{Policy, PoolHandle};

/// The last look below a pool, and the one that is under way.
#[derive(Debug, Default)]
pub(super) struct Below(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    last: Option<u64>,
    /// Whether the file system of the first device has no more than its files have holes.
    is_first_full: bool,
    /// Numbers of the devices with holes whose file system has less than an extent.
    full: Vec<u8>,
    /// Receivers of the result of the look that is under way; `None` while none is.
    waiting: Option<Vec<oneshot::Sender<Option<u64>>>>,
}

impl Below {
    /// The devices on which a first write finds no space, by the last look.
    pub(super) fn full(&self) -> Vec<u8> {
        self.0.lock().full.clone()
    }
}

/// A look that is under way until it is dropped. It may block.
#[derive(Debug)]
pub struct BelowLook(PoolHandle);

impl BelowLook {
    /// Looks.
    pub fn run(self) {
        let _ = self.0.free_below();
    }
}

impl Drop for BelowLook {
    fn drop(&mut self) {
        let mut state = self.0.shared.below.0.lock();
        let last = state.last;
        for waiting in state.waiting.take().into_iter().flatten() {
            // A receiver that is gone waits no more.
            let _ = waiting.send(last);
        }
    }
}

/// A file system's free bytes, and those of the free extents of all devices in it.
#[derive(Clone, Copy, Debug, Default)]
struct Part {
    below: u64,
    /// Without those that need nothing from below.
    own: u64,
}

impl PoolHandle {
    /// Bytes that can be written for the first time as far as the file systems below sparse files
    /// allow it, with the free extents that have their space already; `None` where nothing is
    /// sparse. Blocks.
    #[must_use]
    pub fn free_below(&self) -> Option<u64> {
        let mut parts: BTreeMap<u64, Part> = BTreeMap::new();
        let (mut others, mut sparse) = (0_u64, Vec::new());
        for (at, device) in self.shared.joined() {
            let Ok(at) = u8::try_from(at) else { continue };
            let own = self.shared.pool.free_on(at);
            // One that is allocated already, by the daemon or not, needs nothing from below.
            let metadata = device.file().metadata().ok();
            let system = metadata.filter(has_holes).map(|file| (file.dev(), holes(&file)));
            match device.free_below().zip(system) {
                // Files of one file system share its space.
                Some((below, (system, holes))) => {
                    // At the worst all holes are in free extents.
                    let needy = holes.next_multiple_of(self.extent_size().max(1)).min(own);
                    others += own - needy;
                    let own = needy;
                    let part = parts.entry(system).or_insert(Part { below, own: 0 });
                    part.below = part.below.min(below);
                    part.own += own;
                    sparse.push((at, system));
                }
                None => others += own,
            }
        }
        let of = |system| parts.get(system).copied().unwrap_or_default();
        let first = sparse.iter().find(|(at, _)| *at == 0);
        let is_first_full = first.is_some_and(|(_, system)| of(system).below <= of(system).own);
        let extent = self.extent_size();
        let full = sparse.iter().filter(|(_, system)| of(system).below < extent);
        let full: Vec<u8> = full.map(|(at, _)| *at).collect();
        let free = sum(others, &parts.into_values().collect::<Vec<_>>(), extent);
        let former = {
            let mut state = self.shared.below.0.lock();
            (state.last, state.is_first_full) = (free, is_first_full);
            std::mem::replace(&mut state.full, full.clone())
        };
        if former != full && self.set_policy(Policy::FullBelow).is_err() {
            // Too much is queued, or the pool is closed: the next look tries it again.
            self.shared.below.0.lock().full = former;
        }
        free
    }

    /// The result of the last look below the pool.
    #[must_use]
    pub fn last_below(&self) -> Option<u64> {
        self.shared.below.0.lock().last
    }

    /// Whether, by the last look, more holes in the pool's first device would be of no use.
    #[must_use]
    pub fn is_first_full_below(&self) -> bool {
        self.shared.below.0.lock().is_first_full
    }

    /// Joins the look below the pool that is under way, or begins one. Returns `None` where one is
    /// under way that a former caller has given up waiting for.
    pub fn look_below(
        &self,
        begin: impl FnOnce(BelowLook),
    ) -> Option<oneshot::Receiver<Option<u64>>> {
        let (send, receive) = oneshot::channel();
        {
            let mut state = self.shared.below.0.lock();
            if let Some(waiting) = &mut state.waiting {
                if waiting.iter().any(oneshot::Sender::is_canceled) {
                    return None;
                }
                waiting.push(send);
                return Some(receive);
            }
            state.waiting = Some(vec![send]);
        }
        begin(BelowLook(self.clone()));
        Some(receive)
    }
}

/// Whether a first write to a file may need space of its file system.
fn has_holes(metadata: &Metadata) -> bool {
    holes(metadata) > 0
}

/// Bytes of a file that its file system has not allocated.
fn holes(metadata: &Metadata) -> u64 {
    metadata.len().saturating_sub(metadata.blocks().saturating_mul(512))
}

/// The sum over file systems, and the free extents that need none of their space. Where a file
/// system has less than its files have holes, another's surplus does not make up for it, and less
/// than an extent is none.
fn sum(others: u64, parts: &[Part], extent: u64) -> Option<u64> {
    let lacks = parts.iter().any(|part| part.below < part.own);
    let counted = |part: &Part| match lacks {
        true => (part.below / extent.max(1) * extent).min(part.own),
        false => part.below,
    };
    let free = parts.iter().map(counted).fold(others, u64::saturating_add);
    (!parts.is_empty()).then_some(free)
}

#[cfg(test)]
mod tests {
    use blockd_media::{Device, DeviceKind, DeviceSpec};

    use super::*;

    #[test]
    fn a_file_that_was_allocated_in_advance_has_no_holes_until_some_of_it_is_discarded() {
        let path = std::env::temp_dir().join(format!("blockd-below-{}", std::process::id()));
        let spec = |preallocate| DeviceSpec {
            path: path.clone(),
            kind: DeviceKind::File,
            size: Some(1 << 20),
            preallocate,
            direct: false,
        };
        let has_holes = |device: &Device| has_holes(&device.file().metadata().unwrap());
        let sparse = has_holes(&Device::create(&spec(false)).unwrap());
        std::fs::remove_file(&path).unwrap();
        drop(Device::create(&spec(true)).unwrap());
        // The configuration does not say so.
        let device = Device::open(&spec(false)).unwrap();
        let whole = has_holes(&device);
        device.discard(0, 1 << 19).unwrap();
        let discarded = has_holes(&device);
        std::fs::remove_file(&path).unwrap();
        assert_eq!((sparse, whole, discarded), (true, false, true));
    }

    #[test]
    fn a_file_system_counts_for_no_more_than_its_own_files_can_take() {
        let of = |others, parts: &[(u64, u64)]| {
            let parts: Vec<_> = parts.iter().map(|&(below, own)| Part { below, own }).collect();
            sum(others, &parts, 10)
        };
        assert_eq!(of(70, &[]), None);
        assert_eq!(of(0, &[(95, 200)]), Some(90));
        assert_eq!(of(0, &[(305, 200)]), Some(305));
        // A spare device beside a file whose file system is full, or has room.
        assert_eq!(of(70, &[(5, 200)]), Some(70));
        assert_eq!(of(70, &[(305, 200)]), Some(375));
        // The room of one file system is of no use to a file in another one.
        assert_eq!(of(0, &[(0, 50), (900, 0)]), Some(0));
        assert_eq!(of(20, &[(0, 50), (900, 30)]), Some(50));
    }
}
