//! Standby: the pool is open on another host, or about to be. Requests that were begun are
//! answered; later ones wait until the volume is served here again, except for flushes: a pool that
//! was closed in order has made all durable that was answered here.

use blockd_engine::schedule::Owner;
use blockd_engine::volume::VolumeRef;
use blockd_nbd::codec::request::{Command, EXTENDED_HEADER_BYTES, Parsed, check, parse};

use super::{Connection, Context, Phase};
use crate::demands::Flushes;

/// How far a connection is from its volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Standby {
    /// The volume is served.
    #[default]
    No,
    /// No more requests are begun.
    Ending,
    /// The volume was let go.
    Yes,
}

/// So much that a client has sent says what comes next.
pub const FRONT_BYTES: usize = EXTENDED_HEADER_BYTES;

/// The next thing that a client says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// Too little was received.
    Unknown,
    Request,
    /// The client disconnects, or sends no request.
    Leaves,
}

/// Reads the next thing that a client says from the first bytes of it.
#[must_use]
pub fn next_of(front: &[u8], extended: bool) -> Next {
    match parse(front, extended) {
        Parsed::Need(_) => Next::Unknown,
        Parsed::BadMagic(_) => Next::Leaves,
        Parsed::Header(header, _) if header.is_disconnect() => Next::Leaves,
        Parsed::Header(..) => Next::Request,
    }
}

impl Connection {
    /// Begins no more requests.
    pub const fn stand_by(&mut self) {
        if matches!(self.standby, Standby::No) {
            self.standby = Standby::Ending;
            self.flushes = Flushes::Wait;
            self.moves_to = None;
        }
    }

    #[inline]
    pub(super) fn stands_by(&self) -> bool {
        self.standby != Standby::No
    }

    /// Whether it has let go of its volume.
    #[must_use]
    pub fn rests(&self) -> bool {
        matches!(self.standby, Standby::Yes)
    }

    /// Whether nothing is to be received: the rest of a request that was begun is, and so is the
    /// header of the next one, which shows that the client waits.
    #[inline]
    pub(super) fn awaits_volume(&self) -> bool {
        let is_begun = self.payload.is_some() || self.skip > 0;
        self.stands_by() && !is_begun && self.has_next
    }

    /// Whether its client waits for the volume.
    #[must_use]
    pub fn has_demand(&self) -> bool {
        let waits = self.rests() && self.phase == Phase::Open && self.has_next;
        waits && !(self.next_is_flush && self.flushes == Flushes::Wait)
    }

    /// Looks at the front of what was received while requests wait: a client that leaves does not
    /// wait for the volume. True if that was a flush which is answered.
    #[cold]
    pub(super) fn look_at_next(&mut self, front: &[u8], context: &mut Context<'_>) -> bool {
        match next_of(front, self.agreed.extended) {
            Next::Unknown => {}
            Next::Request => return self.look_at_request(front, context),
            Next::Leaves => self.leave(context),
        }
        false
    }

    fn look_at_request(&mut self, front: &[u8], context: &mut Context<'_>) -> bool {
        let Parsed::Header(header, used) = parse(front, self.agreed.extended) else { return false };
        let is_flush = matches!(check(&header, &self.agreed), Ok(Command::Flush));
        if !is_flush || self.flushes != Flushes::Answer {
            (self.has_next, self.next_is_flush) = (true, is_flush);
            return false;
        }
        // Answers that are not sent yet go first.
        self.blocked = !self.has_room(context);
        if !self.blocked {
            self.input.skip(used);
            self.succeed(header.asked(), context);
        }
        !self.blocked
    }

    /// Answers flushes from now on: the pool was closed in order.
    pub fn answer_flushes(&mut self, context: &mut Context<'_>) {
        if self.rests() && self.flushes == Flushes::Wait {
            self.flushes = Flushes::Answer;
            self.has_next = false;
            self.take_requests(context);
        }
    }

    /// Answers no flush any more: the pool is opened here.
    pub const fn hold_flushes(&mut self) {
        self.flushes = Flushes::Ask;
    }

    /// Lets go of the volume once no request is with it. True when it has.
    pub fn rest(&mut self, context: &mut Context<'_>) -> bool {
        if self.rests() {
            return true;
        }
        let is_quiet = self.stands_by()
            && self.phase == Phase::Open
            && self.payload.is_none()
            && self.skip == 0
            && self.in_flight == 0
            && !self.sending
            && self.backlog.is_empty()
            && self.waiting_reads.is_empty()
            && self.message.as_ref().is_none_or(|message| message.is_empty());
        if !is_quiet {
            return false;
        }
        if let Some(message) = self.message.take() {
            context.executor.free_memory(self.flow, message.buffer_bytes());
            context.ring.recycle_message(message);
        }
        self.held = false;
        self.let_go(context);
        self.standby = Standby::Yes;
        // Limits may have held back the next request, which is here and was not looked at.
        self.take_requests(context);
        true
    }

    /// Gives the volume back, unless that was done.
    pub(super) fn let_go(&mut self, context: &mut Context<'_>) {
        if !self.rests() {
            context.executor.remove_flow(self.flow);
            context.executor.detach(self.volume);
        }
    }

    /// Serves its client again, with this volume where it had let go of its own. False if that is
    /// not served.
    pub fn serve(&mut self, volume: Option<VolumeRef>, context: &mut Context<'_>) -> bool {
        if let Some(volume) = volume {
            let owner = Owner::Connection(self.at);
            let Some(flow) = context.executor.add_flow(volume, owner) else { return false };
            (self.volume, self.flow) = (volume, flow);
        }
        self.standby = Standby::No;
        self.has_next = false;
        self.received_at = context.executor.now();
        self.take_requests(context);
        true
    }
}
