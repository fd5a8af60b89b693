//! The writes of devices, and those of them that survive a loss of power.

use crate::rig::Event;

use super::record::UNIT;

/// Devices and the events since.
#[derive(Clone, Debug)]
pub(super) struct Past {
    base: Vec<Vec<u8>>,
    /// The writes that a loss of power may undo, except those with FUA, in order.
    recent: Vec<Event>,
}

/// The recent writes that survive.
#[derive(Clone)]
pub(super) struct Keep {
    /// The surviving writes without FUA, by number.
    chosen: Vec<bool>,
    /// The surviving units of the very last write.
    last: Option<Vec<bool>>,
}

impl std::fmt::Debug for Keep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let bits = |bits: &[bool]| -> String {
            bits.iter().map(|bit| if *bit { '1' } else { '0' }).collect()
        };
        write!(f, "power lost, kept {:?}", bits(&self.chosen))?;
        self.last.as_ref().map_or(Ok(()), |last| write!(f, ", last torn {:?}", bits(last)))
    }
}

impl Keep {
    pub(super) fn none(total: usize) -> Self {
        Self::chosen(vec![false; total])
    }

    pub(super) const fn chosen(chosen: Vec<bool>) -> Self {
        Self { chosen, last: None }
    }

    pub(super) const fn torn_last(chosen: Vec<bool>, last: Vec<bool>) -> Self {
        Self { chosen, last: Some(last) }
    }

    pub(super) const fn tears_last(&self) -> bool {
        self.last.is_some()
    }
}

impl Past {
    pub(super) fn of(base: &[Vec<u8>], events: &[Event]) -> Self {
        Self { base: base.to_vec(), recent: Vec::new() }.then(events)
    }

    /// Adds events. Writes that become durable by them move into the base.
    pub(super) fn then(&self, events: &[Event]) -> Self {
        let mut past = self.clone();
        for event in events {
            let Event::Flush { device: flushed } = event else {
                past.recent.push(event.clone());
                continue;
            };
            let recent = std::mem::take(&mut past.recent);
            for event in recent {
                match event {
                    Event::Write { device, at, bytes, .. } if device == *flushed => {
                        put(&mut past.base, device, at, &bytes);
                    }
                    event => past.recent.push(event),
                }
            }
        }
        past
    }

    /// Writes that a loss of power may undo.
    pub(super) fn volatile(&self) -> usize {
        self.recent.iter().filter(|event| matches!(event, Event::Write { fua: false, .. })).count()
    }

    pub(super) fn last(&self) -> Option<&Event> {
        self.recent.last()
    }

    /// The devices as they read if nothing is lost.
    pub(super) fn now(&self) -> Vec<Vec<u8>> {
        let mut devices = self.base.clone();
        for event in &self.recent {
            if let Event::Write { device, at, bytes, .. } = event {
                put(&mut devices, *device, *at, bytes);
            }
        }
        devices
    }

    /// After a loss of power: nothing is volatile any more.
    pub(super) fn settled(&self, keep: &Keep) -> Self {
        let mut devices = self.base.clone();
        let mut chosen = keep.chosen.iter();
        let count = self.recent.len();
        for (number, event) in self.recent.iter().enumerate() {
            let Event::Write { device, at, bytes, fua } = event else { continue };
            let kept = *fua || chosen.next().copied().unwrap_or(false);
            match &keep.last {
                Some(units) if number + 1 == count => {
                    for (unit, kept) in bytes.chunks(UNIT).zip(units).enumerate() {
                        if *kept.1 {
                            put(&mut devices, *device, at + unit * UNIT, kept.0);
                        }
                    }
                }
                _ if kept => put(&mut devices, *device, *at, bytes),
                _ => {}
            }
        }
        Self { base: devices, recent: Vec::new() }
    }
}

fn put(devices: &mut [Vec<u8>], device: usize, at: usize, bytes: &[u8]) {
    devices[device][at..at + bytes.len()].copy_from_slice(bytes);
}
