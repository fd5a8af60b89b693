//! Clients that send no more requests, and clients that have closed their socket.
//!
//! Requests that were sent whole are carried out and answered as long as the client may read the
//! answers. A Unix socket always shows that its peer has closed it. A TCP socket does so only if
//! the peer had not read everything; otherwise the peer looks like one that has shut down its
//! sending side, until the next answer, which its host rejects with a reset.

use std::os::fd::{AsFd, BorrowedFd};

use super::{Connection, Context, Phase};

impl Connection {
    /// Takes no more requests, after DISC or the end of what the client sends. Requests received
    /// before are carried out and answered, as the client may read on. Those that wait for space
    /// fail.
    pub(super) fn leave(&mut self, context: &mut Context<'_>) {
        self.take_no_more();
        self.end_input(context);
        // Only long reads still request memory, none of the requests behind them does.
        self.forget_hold(context);
        for _ in 0..self.waiting_reads.len() {
            if let Some(job) = self.waiting_reads.pop_front() {
                self.read_on(job, context);
            }
        }
    }

    fn forget_hold(&mut self, context: &mut Context<'_>) {
        if !self.rests() {
            context.executor.forget_hold(self.flow);
        }
        self.held = false;
    }

    /// The client sends no more requests: those that wait for space fail.
    fn end_input(&mut self, context: &mut Context<'_>) {
        if !std::mem::replace(&mut self.input_has_ended, true) && !self.rests() {
            context.executor.cancel_flow(self.flow, false);
        }
    }

    /// Cancels all requests that can be cancelled: no client reads the answers.
    pub(super) fn abandon(&mut self, context: &mut Context<'_>) {
        if std::mem::replace(&mut self.is_abandoned, true) {
            return;
        }
        self.forget_hold(context);
        if !self.rests() {
            context.executor.cancel_flow(self.flow, true);
        }
        self.waiting_reads.clear();
    }

    /// The socket, if it has to be polled to see whether the client has closed it: no receive is
    /// out that would end, as the connection is held back or the client sends no more.
    #[must_use]
    pub fn watched(&self) -> Option<BorrowedFd<'_>> {
        let is_watched = (self.held || self.input_has_ended) && self.phase != Phase::Dead;
        (is_watched && !self.receiving).then(|| self.socket.as_fd())
    }

    /// The client has closed its socket, or the connection is broken.
    pub fn client_is_gone(&mut self, context: &mut Context<'_>) {
        self.die();
        self.abandon(context);
    }

    /// The client has shut down its sending side, and may read on.
    pub fn client_sends_no_more(&mut self, context: &mut Context<'_>) {
        if self.is_closed {
            // The server has shut down its receiving side, which looks the same.
            return;
        }
        self.end_input(context);
        if self.phase == Phase::Open && !self.can_come_whole() {
            self.leave(context);
        }
    }

    /// Whether the rest of the write that is being received is in the socket, now that the client
    /// sends no more. A connection without a half received write has a whole request to carry out.
    fn can_come_whole(&self) -> bool {
        let Some(payload) = &self.payload else { return true };
        let job = &self.jobs[usize::from(payload.job)];
        let missing = (job.len - job.issued)
            .saturating_sub(payload.filled as u64)
            .saturating_sub(self.input.available() as u64);
        // On an error the connection is received from when it is its turn, which shows the end.
        rustix::io::ioctl_fionread(&self.socket).map_or(true, |waiting| missing <= waiting)
    }
}
