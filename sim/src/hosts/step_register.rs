//! Registration of a host's key on the paths to each device (H1).

use super::array::NO_KEY;
use super::mutation::Mutation;
use super::parts::{DEVICES, NONE, PATHS};
use super::state::{World, number};
use super::step::Event;

impl World {
    /// Registers the next path (H1). The first path of a device is registered as it is; each
    /// further one is verified afterwards: a key that is gone from the others was removed by a
    /// fence.
    pub(super) fn register(&mut self, h: usize) -> bool {
        if !self.has_reservations() || !self.runs(h) || self.hosts[h].is_fenced {
            return false;
        }
        if self.hosts[h].probing.0 != NONE {
            return self.verify(h);
        }
        let host = &self.hosts[h];
        let is_open = |(device, path): &(usize, usize)| {
            host.paths & !host.registered[*device] & 1 << path != 0
        };
        let mut all = (0..DEVICES).flat_map(|device| (0..PATHS).map(move |path| (device, path)));
        let Some((device, path)) = all.find(is_open) else { return false };
        let (key, is_first) = (host.key, host.registered[device] == 0);
        if is_first && self.without != Mutation::OldCommandsKept {
            self.end_old_commands(h, device);
        }
        let is_left_out = match self.without {
            Mutation::OnePath => !is_first,
            Mutation::OneDevice => device > 0,
            _ => false,
        };
        if !is_left_out {
            self.array.keys[device][h][path] = key;
            self.array.reserved[device] = true;
        }
        if is_first || is_left_out || self.without == Mutation::PathBack {
            self.hosts[h].registered[device] |= 1 << path;
        } else {
            self.hosts[h].probing = (number(device), number(path));
        }
        self.note(Event::Registered);
        true
    }

    // Once the key is replaced, no fence reaches the commands of the last incarnation.
    fn end_old_commands(&mut self, h: usize, device: usize) {
        let boot = self.hosts[h].boot;
        self.commands.retain(|x| {
            let is_of = usize::from(x.host) == h && x.payload.device() == device;
            !is_of || x.boot == boot
        });
    }

    // Looks whether the other paths of the device have the key still.
    fn verify(&mut self, h: usize) -> bool {
        let host = &mut self.hosts[h];
        let (device, path) = (usize::from(host.probing.0), usize::from(host.probing.1));
        if host.paths & 1 << path == 0 {
            return false;
        }
        host.probing = (NONE, NONE);
        let keys = &mut self.array.keys[device][h];
        let others = (0..PATHS).filter(|p| host.registered[device] & 1 << p != 0);
        if { others }.any(|p| keys[p] == host.key) {
            host.registered[device] |= 1 << path;
            self.note(Event::PathVerified);
        } else {
            keys[path] = NO_KEY;
            self.note(Event::PathRefused);
            self.conflict(h, 0);
        }
        true
    }

    /// True if the host may take leases: its key is registered on each device (H1).
    pub(super) fn is_ready(&self, h: usize) -> bool {
        let late = self.without == Mutation::RegisterLate;
        late || !self.has_reservations() || self.hosts[h].registered.iter().all(|paths| *paths != 0)
    }
}
