//! A connection that moves to another worker, between two of its requests.

use std::os::fd::OwnedFd;

use super::{Connection, Phase};

impl Connection {
    /// Requests answered since this was asked last.
    pub fn answered_lately(&mut self) -> u64 {
        std::mem::take(&mut self.answered)
    }

    /// Whether the connection can move at all.
    #[must_use]
    pub fn can_move(&self) -> bool {
        self.phase == Phase::Open && self.moves_to.is_none() && !self.held && !self.stands_by()
    }

    /// Moves it to another worker as soon as the client waits for no answer.
    pub const fn move_to(&mut self, worker: usize) {
        self.moves_to = Some(worker);
    }

    /// Whether it is to move and has nothing half received, so that nothing is received before it
    /// has. A client that goes on sending keeps it here.
    pub(super) fn may_move(&mut self) -> bool {
        if self.moves_to.is_none() {
            return false;
        }
        if self.has_unfinished() {
            self.moves_to = None;
            return false;
        }
        true
    }

    /// Whether a part of a request was received, or the connection waits for anything. The bytes
    /// received so far would be lost with a move.
    fn has_unfinished(&self) -> bool {
        let is_half = self.payload.is_some() || self.skip > 0 || self.input.available() > 0;
        let waits = self.stalled || self.blocked || self.held || !self.waiting_reads.is_empty();
        is_half || waits
    }

    /// The worker that the connection can be given to now.
    pub fn moves_now(&mut self) -> Option<usize> {
        self.moves_to?;
        let is_quiet = self.phase == Phase::Open
            && !self.receiving
            && !self.sending
            && !self.has_unfinished()
            && self.in_flight == 0
            && self.backlog.is_empty()
            && self.message.as_ref().is_none_or(|message| message.is_empty());
        self.moves_to.filter(|_| is_quiet).inspect(|_| self.moves_to = None)
    }

    /// Another descriptor of its socket.
    pub fn duplicate(&self) -> std::io::Result<OwnedFd> {
        self.socket.try_clone()
    }

    /// Takes what holds its place among the listener's connections.
    pub fn take_guard(&mut self) -> Option<Box<dyn Send>> {
        self.guard.take()
    }
}
