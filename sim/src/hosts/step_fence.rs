//! Leases of the coordinator, and the fence that comes before one is taken from another host.

use super::array::NO_KEY;
use super::attachment::{FenceProgress, NO_FENCE, Progress};
use super::mutation::Mutation;
use super::oracle::FaultKind;
use super::parts::{
    ALL_DEVICES, Command, DEVICES, FREE, FenceKind, HOSTS, Lease, NONE, PATHS, Stage,
};
use super::state::{EXPIRY, World, number};
use super::step::Event;

impl World {
    /// Takes a lease: one that is free or the host's own, or that of a holder that this host has
    /// fenced before (H3). False if it cannot be taken now.
    pub(super) fn acquire(&mut self, h: usize, c: usize, object: usize) -> bool {
        if self.is_away {
            return false;
        }
        let lease = self.leases[object];
        let is_mine = self.holds(h, object);
        let is_expired = lease.holder != NONE && self.is_expired(h, &lease);
        let is_recovered = match self.without {
            Mutation::TimeOnly | Mutation::AcquireThenFence => is_expired,
            _ => self.has_fenced(h, c, &lease) && (self.cfg.recovery || is_expired),
        };
        if is_mine {
            return true;
        }
        // A lease of the host's own former membership: it has dropped everything since (H2).
        let is_former = usize::from(lease.holder) == h && lease.boot == self.hosts[h].boot;
        if lease.holder == NONE || is_former {
            self.take(h, object);
            return true;
        }
        let is_last = self.without == Mutation::FenceLast && self.hosts[h].cells[c].is_declared;
        if !is_recovered && !is_last {
            return false;
        }
        self.note(Event::Recovered);
        self.lose_to(object, &lease);
        self.take(h, object);
        true
    }

    fn take(&mut self, h: usize, object: usize) {
        let host = &self.hosts[h];
        let (key, boot, membership) = (host.key, host.boot, host.membership);
        self.leases[object] = Lease { holder: number(h), key, boot, membership };
    }

    // The takeover of a cell is a loss of power for it (H7). A write that its last owner has begun
    // will never take effect.
    fn lose_to(&mut self, object: usize, lease: &Lease) {
        let Some(registers) = self.registers.get_mut(object) else { return };
        registers.iter_mut().for_each(super::oracle::Register::lose);
        let victim = &self.hosts[usize::from(lease.holder)];
        let request = victim.cells[object].request;
        if request.progress == Progress::Data && victim.boot == lease.boot {
            registers[usize::from(request.block)].end(request.version);
        }
    }

    /// Gives a lease back.
    pub(super) fn release(&mut self, h: usize, object: usize) -> bool {
        let can = !self.is_away;
        if can && self.holds(h, object) {
            self.leases[object] = FREE;
        }
        can
    }

    /// The coordinator counts the holder as dead: it has seen no renewal for long enough, or
    /// another membership.
    pub(super) fn is_expired(&self, h: usize, lease: &Lease) -> bool {
        let Some(holder) = self.hosts.get(usize::from(lease.holder)) else { return false };
        self.is_silent_host(h, lease.holder) || holder.membership != lease.membership
    }

    // No renewal of the other host was seen for long enough, nor is there one to see.
    fn is_silent_host(&self, h: usize, other: u8) -> bool {
        let host = &self.hosts[h];
        host.seen[usize::from(other)] >= EXPIRY && host.renewals & 1 << other == 0
    }

    /// True if the host has fenced this holder on all devices.
    pub(super) fn has_fenced(&self, h: usize, c: usize, lease: &Lease) -> bool {
        let fence = &self.hosts[h].cells[c].fence;
        let is_later = self.without == Mutation::FenceOutlived
            && (fence.target.holder, fence.target.boot) == (lease.holder, lease.boot);
        (fence.target == *lease || is_later) && fence.devices == ALL_DEVICES
    }

    /// A fence of this holder begins, unless it has begun before.
    pub(super) fn begin_fence(&mut self, h: usize, c: usize, lease: &Lease) {
        let fence = &mut self.hosts[h].cells[c].fence;
        if fence.target != *lease {
            *fence = FenceProgress { target: *lease, ..NO_FENCE };
        }
    }

    /// Takes the fence of a lease's holder one step further; true if something was done.
    pub(super) fn advance_fence(&mut self, h: usize, c: usize, lease: &Lease) -> bool {
        self.begin_fence(h, c, lease);
        let fence = self.hosts[h].cells[c].fence;
        if self.cfg.fence != FenceKind::Reservations && !fence.is_stopped {
            return self.stop_host(h, c, lease);
        }
        let Some(device) = (0..DEVICES).find(|d| fence.devices & 1 << d == 0) else {
            return false;
        };
        let is_done = match self.cfg.fence {
            FenceKind::Reservations => self.preempt(h, c, device, lease),
            _ => self.reset_device(h, device),
        };
        if !is_done && self.without != Mutation::FailedFence {
            return false;
        }
        let is_enough = self.without == Mutation::OneDeviceFenced;
        let devices = if is_enough { ALL_DEVICES } else { 1 << device };
        self.hosts[h].cells[c].fence.devices |= devices;
        self.note(Event::DeviceFenced);
        true
    }

    // The machine is off, by the switch or by its watchdog. A host with another membership has
    // dropped everything by itself.
    fn stop_host(&mut self, h: usize, c: usize, lease: &Lease) -> bool {
        let target = usize::from(lease.holder);
        let is_stopped = self.hosts[target].membership != lease.membership
            || match self.cfg.fence {
                FenceKind::PowerSwitch if self.is_switch_broken => false,
                FenceKind::PowerSwitch => !self.hosts[target].is_on || self.power_off(target),
                _ => self.is_silent_host(h, lease.holder),
            };
        if !is_stopped && self.without != Mutation::FailedFence {
            return false;
        }
        let is_all = self.without == Mutation::StopNoReset;
        let fence = &mut self.hosts[h].cells[c].fence;
        fence.is_stopped = true;
        fence.devices = if is_all { ALL_DEVICES } else { 0 };
        self.note(Event::HostStopped);
        true
    }

    // PREEMPT AND ABORT: the key is removed from every path, and its commands end. A key that is
    // not there was removed before, or replaced by that of a later boot.
    fn preempt(&mut self, h: usize, c: usize, device: usize, lease: &Lease) -> bool {
        let Some(path) = self.path(h, device) else { return false };
        if self.conflicts(h, device, path) {
            self.conflict(h, c);
            return false;
        }
        let mut removed = [false; HOSTS];
        for (other, is_removed) in removed.iter_mut().enumerate() {
            for path in 0..PATHS {
                let key = &mut self.array.keys[device][other][path];
                if *key != lease.key {
                    continue;
                }
                *key = NO_KEY;
                *is_removed = true;
                let host = &mut self.hosts[other];
                if host.key == lease.key && host.boot != lease.boot {
                    self.fail(FaultKind::InnocentFenced, other, c, lease.key);
                } else if host.key == lease.key {
                    host.is_preempted = true;
                }
            }
        }
        if self.without != Mutation::PreemptNoAbort {
            self.abort(device, |x| x.key == lease.key && removed[usize::from(x.host)]);
        }
        true
    }

    // LOGICAL UNIT RESET: all commands in the target end.
    fn reset_device(&mut self, h: usize, device: usize) -> bool {
        if self.path(h, device).is_none() {
            return false;
        }
        self.abort(device, |_| true);
        true
    }

    // Commands in the target end without effect. A kernel that still runs sends them again.
    pub(super) fn abort(&mut self, device: usize, is_ended: impl Fn(&Command) -> bool) {
        let hosts = &self.hosts;
        for command in self.commands.all_mut() {
            let is_there = command.stage == Stage::Target && command.payload.device() == device;
            if is_there && is_ended(command) {
                command.stage = Stage::Kernel;
            }
        }
        self.commands.retain(|x| {
            let host = &hosts[usize::from(x.host)];
            x.stage == Stage::Target || (host.is_on && host.boot == x.boot)
        });
    }
}
