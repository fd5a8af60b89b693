//! Time: memberships are renewed and end, and watchdogs reset (H2).

use super::mutation::Mutation;
use super::parts::{FenceKind, HOSTS, Stage};
use super::state::{EXPIRY, OWN_EXPIRY, WATCHDOG, World};
use super::step::Event;

impl World {
    /// Time passes: leases are renewed, expire, and watchdogs reset.
    pub(super) fn tick(&mut self) {
        for h in 0..HOSTS {
            if self.hosts[h].is_on {
                self.tick_host(h);
            }
        }
        for observer in 0..HOSTS {
            if !self.runs(observer) {
                continue;
            }
            let observer = &mut self.hosts[observer];
            for (other, seen) in observer.seen.iter_mut().enumerate() {
                let is_renewed = observer.renewals & 1 << other != 0;
                *seen = if is_renewed { 0 } else { EXPIRY.min(*seen + 1) };
            }
            observer.renewals = 0;
        }
    }

    /// The clock of one host runs ahead: it gives its cells up too early, and counts others as
    /// dead. Only a watchdog needs clocks that agree.
    pub(super) fn drift(&mut self, h: usize) -> bool {
        if !self.runs(h) || self.cfg.fence == FenceKind::Watchdog {
            return false;
        }
        let host = &mut self.hosts[h];
        host.age = host.age.saturating_add(1);
        for seen in &mut host.seen {
            *seen = EXPIRY.min(*seen + 1);
        }
        if host.age >= OWN_EXPIRY && !host.has_lapsed && self.without != Mutation::LapseIgnored {
            self.lapse(h);
        }
        self.note(Event::Drifted);
        true
    }

    fn tick_host(&mut self, h: usize) {
        let can_renew = self.can_renew(h);
        let is_ignored = self.without == Mutation::LapseIgnored;
        let is_fed_early = self.without == Mutation::FedEarly;
        // What was sent before the lapse may be sent again, below the device that became an error.
        let has_left = self.hosts[h].has_lapsed && self.has_own_commands(h);
        let joins = !has_left || self.without == Mutation::JoinsEarly;
        let renews = can_renew && !self.hosts[h].is_frozen && joins;
        if renews && self.hosts[h].has_lapsed {
            self.join(h);
        }
        for observer in self.hosts.iter_mut().filter(|_| renews) {
            observer.renewals |= 1 << h;
        }
        let host = &mut self.hosts[h];
        host.watchdog = host.watchdog.saturating_add(1);
        if !host.is_frozen {
            host.age = host.age.saturating_add(1);
        }
        if renews {
            (host.age, host.watchdog, host.has_lapsed) = (0, 0, false);
        }
        let (is_frozen, is_old) = (host.is_frozen, host.age >= OWN_EXPIRY && !host.has_lapsed);
        // A host that has dropped its cells, and whose commands have ended, feeds its watchdog.
        let is_fed = is_old || (host.has_lapsed && (!has_left || is_fed_early));
        let is_reset = host.watchdog >= WATCHDOG && !is_fed;
        if is_old && !is_frozen && !is_ignored {
            self.lapse(h);
        } else if is_reset && self.cfg.fence == FenceKind::Watchdog && !is_ignored {
            self.note(Event::WatchdogReset);
            self.power_off(h);
        }
        self.look_for_key(h);
    }

    // A host that cannot renew its lease looks whether its key is still there (H5).
    fn look_for_key(&mut self, h: usize) {
        let host = &self.hosts[h];
        let looks = self.runs(h) && host.has_daemon && host.has_lapsed && !host.is_fenced;
        let is_refused = self.path(h, 0).is_some_and(|path| self.conflicts(h, 0, path));
        if looks && is_refused && self.without != Mutation::KeyNotSought {
            self.conflict(h, 0);
        }
    }

    fn has_own_commands(&self, h: usize) -> bool {
        let boot = self.hosts[h].boot;
        // Without that rule the host does not know of its queue.
        let is_known = |stage| stage == Stage::Target || self.without != Mutation::QueueKept;
        let mut own = self.commands.all().iter().filter(|x| usize::from(x.host) == h);
        own.any(|x| x.boot == boot && is_known(x.stage))
    }

    // The host joins the lockspace: others read its new record before they count it as dead.
    fn join(&mut self, h: usize) {
        self.hosts[h].membership = self.draw();
        for observer in &mut self.hosts {
            observer.seen[h] = 0;
        }
    }

    // The renewal is a write to the array.
    fn can_renew(&self, h: usize) -> bool {
        self.path(h, 0).is_some_and(|path| !self.conflicts(h, 0, path))
    }
}
