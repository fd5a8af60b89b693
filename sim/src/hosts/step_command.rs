//! Commands: from the kernel of a host to the target, and from there to the media.

use super::attachment::Io;
use super::mutation::Mutation;
use super::oracle::FaultKind;
use super::parts::{NONE, Payload, Stage, Waiter};
use super::state::World;

impl World {
    /// The kernel sends a queued command to the target.
    pub(super) fn send(&mut self, at: usize) -> bool {
        let Some(command) = self.commands.all().get(at).copied() else { return false };
        let (h, c) = (usize::from(command.host), usize::from(command.cell));
        let device = command.payload.device();
        if command.stage != Stage::Kernel || !self.runs(h) {
            return false;
        }
        let Some(path) = self.path(h, device) else { return false };
        // A restart of the array is noticed by the daemon; the kernel only sends again.
        if self.hosts[h].has_daemon && self.hosts[h].restarted & 1 << device != 0 {
            return !self.access(h, c, 1 << device, true);
        }
        if self.conflicts(h, device, path) {
            if self.without != Mutation::ConflictRetried {
                self.commands.remove(at);
            }
            if self.hosts[h].has_daemon {
                self.conflict(h, c);
            }
            return true;
        }
        self.commands.all_mut()[at].stage = Stage::Target;
        true
    }

    /// The target carries a command out.
    pub(super) fn land(&mut self, at: usize) -> bool {
        let Some(command) = self.commands.all().get(at).copied() else { return false };
        if command.stage != Stage::Target {
            return false;
        }
        self.commands.remove(at);
        let (h, c) = (usize::from(command.host), usize::from(command.cell));
        if command.reign != self.reigns[usize::from(command.object)] {
            self.fail(FaultKind::ForeignWrite, h, usize::from(command.object), command.reign);
        }
        if let Payload::Data(unit, ..) = command.payload {
            let tenant = &mut self.tenants[usize::from(unit)];
            if *tenant != NONE && *tenant != command.cell {
                self.fail(FaultKind::DoubleUse, h, c, unit);
            } else {
                *tenant = command.cell;
            }
        }
        self.array.land(command.payload);
        let host = &mut self.hosts[h];
        if host.is_on && host.process == command.process && host.boot == command.boot {
            let cell = &mut host.cells[c];
            match command.waiter {
                Waiter::Move => cell.io = Io::Done,
                Waiter::Request => cell.request_io = Io::Done,
                Waiter::Growth => cell.growth_io = Io::Done,
            }
        }
        true
    }
}
