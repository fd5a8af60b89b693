//! Deadlines of a client: for reading replies, for sending the rest of a request, and for the next
//! request where that is limited.

use super::{Connection, Phase};

/// How long a connection that the server closes may take for the replies that are left, so that a
/// client that reads none does not keep a volume from being detached.
const CLOSING_NS: u64 = 2_000_000_000;

/// Limits on time, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Deadlines {
    /// How long a client may leave its replies unread.
    pub send: u64,
    /// How long a client may send nothing in the middle of a request.
    pub receive: u64,
    /// How long a client may stay connected without a request; `None` for ever.
    pub idle: Option<u64>,
}

/// Which limit a client has passed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Overdue {
    /// The client reads no replies.
    Send,
    /// The client stopped in the middle of a request.
    Receive,
    /// The client has sent no request.
    Idle,
    /// The client does not read the remaining replies, while the connection is being closed.
    Closing,
}

impl Overdue {
    /// The reason, as it is logged.
    #[must_use]
    pub const fn reason(self) -> &'static str {
        match self {
            Self::Send => "client does not read its replies (nbd.send_timeout)",
            Self::Receive => "client stopped in the middle of a request (nbd.receive_timeout)",
            Self::Idle => "client sent no request (nbd.idle_timeout)",
            Self::Closing => "client does not read its last replies",
        }
    }
}

impl Connection {
    /// Closes the connection if its client has passed a limit, and says which.
    pub fn enforce(&mut self, now: u64, deadlines: &Deadlines) -> Option<Overdue> {
        if self.phase == Phase::Dead {
            return None;
        }
        if self.sending && now.saturating_sub(self.sending_since) > deadlines.send {
            self.die();
            return Some(Overdue::Send);
        }
        let has_ended = |since: u64| now.saturating_sub(since) > CLOSING_NS;
        if self.phase == Phase::Closing && self.closing_since.is_some_and(has_ended) {
            self.die();
            return Some(Overdue::Closing);
        }
        // Only where the server waits for the client: without a receive, it is the other way round.
        if self.receiving
            && self.is_half_received()
            && now.saturating_sub(self.progress_at) > deadlines.receive
        {
            self.die();
            return Some(Overdue::Receive);
        }
        if let Some(idle) = deadlines.idle
            && self.is_idle()
            && now.saturating_sub(self.received_at) >= idle
        {
            self.hang_up();
            return Some(Overdue::Idle);
        }
        None
    }

    /// Closes the connection if its client has sent no request for `idle` nanoseconds, and none is
    /// being worked on.
    pub fn close_idle(&mut self, now: u64, idle: u64) -> bool {
        let is_idle = self.is_idle() && now.saturating_sub(self.received_at) >= idle;
        if is_idle {
            self.hang_up();
        }
        is_idle
    }

    pub(super) fn is_half_received(&self) -> bool {
        self.phase == Phase::Open
            && (self.payload.is_some() || self.skip > 0 || self.input.available() > 0)
    }

    /// Whether the client has nothing to wait for.
    fn is_idle(&self) -> bool {
        self.phase == Phase::Open
            && self.in_flight == 0
            && !self.sending
            && !self.is_half_received()
            && self.backlog.is_empty()
            && self.waiting_reads.is_empty()
            && self.message.as_ref().is_none_or(|message| message.is_empty())
    }
}
