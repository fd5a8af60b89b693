//! No silence for ever: bounded time after everything is repaired, each request has ended.

use super::attachment::{Kind, Phase, Progress};
use super::oracle::FaultKind;
use super::parts::{CELLS, HOSTS, PATHS};
use super::state::{World, number};
use super::step::Event;

/// Rounds until all requests have ended: a fence with the expiry of a lease, three hosts that take
/// turns, and growth take less than half of them.
const ROUNDS: u8 = 160;
/// Rounds until requests of cells that are open have ended.
const AWAY_ROUNDS: u8 = 8;

impl World {
    /// Everything is repaired, each client without a request reads, and everything runs until all
    /// requests have ended. Two bits of `blocks` choose the block for each cell.
    pub(super) fn settle(&mut self, blocks: u8) {
        (self.is_away, self.is_silent, self.is_switch_broken) = (false, false, false);
        for h in 0..HOSTS {
            self.hosts[h].paths = (1 << PATHS) - 1;
            self.wake(h);
            self.boot(h);
            self.start(h);
            for c in 0..CELLS {
                self.submit_request(h, c, Kind::Read, blocks >> (2 * c) & 3);
            }
        }
        for round in 0..ROUNDS {
            for h in 0..HOSTS {
                self.run_host(h);
            }
            self.move_commands(|_, _| true);
            if round % 2 == 1 {
                self.tick();
            }
            if self.fault.is_some() || self.is_quiet() {
                break;
            }
        }
        let waits = |h: usize, c: usize| self.hosts[h].cells[c].request.progress != Progress::Idle;
        let mut all = (0..HOSTS).flat_map(|h| (0..CELLS).map(move |c| (h, c)));
        if let Some((h, c)) = all.find(|(h, c)| waits(*h, *c)) {
            self.fail(FaultKind::Stuck, h, c, number(h));
        }
        self.note(Event::Settled);
    }

    // A host that lost its power boots, one that is fenced comes back, and cells go on. Openings
    // and closings come first: they may not starve requests.
    fn run_host(&mut self, h: usize) {
        self.boot(h);
        self.start(h);
        self.rejoin(h);
        while self.register(h) {}
        for c in 0..CELLS {
            for _ in 0..3 {
                self.advance(h, c);
            }
            for _ in 0..2 {
                self.serve(h, c);
                self.grow(h, c);
            }
        }
    }

    fn is_quiet(&self) -> bool {
        let mut cells = self.hosts.iter().flat_map(|host| &host.cells);
        cells.all(|cell| cell.request.progress == Progress::Idle)
    }

    /// The coordinator is away, and nothing is repaired: hosts that have cells open and can reach
    /// the array serve them (H12).
    pub(super) fn settle_away(&mut self) {
        self.is_away = true;
        let serves = |world: &Self, h: usize, c: usize| {
            let cell = &world.hosts[h].cells[c];
            let has_paths = (0..super::parts::DEVICES).all(|d| world.path(h, d).is_some());
            world.works(h) && has_paths && cell.phase == Phase::Serve
        };
        let all = || (0..HOSTS).flat_map(|h| (0..CELLS).map(move |c| (h, c)));
        for (h, c) in all() {
            if serves(self, h, c) {
                self.submit_request(h, c, Kind::Flush, 0);
            }
        }
        for _ in 0..AWAY_ROUNDS {
            for (h, c) in all() {
                self.serve(h, c);
            }
            self.move_commands(|_, _| true);
        }
        let waits = |h: usize, c: usize| {
            let progress = self.hosts[h].cells[c].request.progress;
            progress != Progress::Idle && progress != Progress::NoSpace
        };
        if let Some((h, c)) = all().find(|(h, c)| serves(self, *h, *c) && waits(*h, *c)) {
            self.fail(FaultKind::Stuck, h, c, number(c));
        }
        self.note(Event::SettledAway);
    }
}
