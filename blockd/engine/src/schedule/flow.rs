//! The scheduler's state of a volume and of its connections and queues.

use std::collections::VecDeque;
use std::sync::Arc;

use super::window::VolumeShare;
use super::{DEFAULT_WEIGHT, Demand, Hold, MAX_WAITING, MAX_WAITING_BYTES, Media, Owner};
use crate::stats::{Stage, VolumeStats};

/// A volume as one worker serves it.
#[derive(Debug)]
pub(super) struct Tenant {
    pub(super) weight: u64,
    pub(super) media: usize,
    pub(super) share: Arc<VolumeShare>,
    pub(super) stats: Arc<VolumeStats>,
    /// Whether the flow is active, of the default weight, without limits, in a pool with room, and
    /// not closing.
    pub(super) is_plain: bool,
    /// Whether it has requested something lately.
    pub(super) is_active: bool,
    pub(super) asked_at: u64,
    /// Cost that it may still take, in the turn that it was counted for.
    pub(super) deficit: i64,
    pub(super) turn: u64,
    /// Cost in flight, payload memory and requests of all its flows.
    pub(super) in_flight: u64,
    pub(super) memory: u64,
    pub(super) requests: u64,
    /// The flow that holds a piece beyond the volume's limit: see [`super::awaited`].
    pub(super) awaited: Option<usize>,
    /// Its part of the pool's window, as of a generation of that; `None` for all of it.
    media_share: Option<u64>,
    generation: u64,
    pub(super) has_limits: bool,
    /// When its limits let the next request through; 0 when nothing is held back by them.
    pub(super) limited_until: u64,
    /// Some of its writes have found no space.
    pub(super) is_full: bool,
    /// Whether it is closing, so that nothing holds it back.
    pub(super) is_free: bool,
    /// Its flows that are held back, but for those that wait for space.
    pub(super) queue: VecDeque<usize>,
    pub(super) is_in_ring: bool,
    /// The turn in which its first flow could not go on after all.
    pub(super) stuck_in: u64,
}

impl Tenant {
    pub(super) fn new(
        media: usize,
        share: Arc<VolumeShare>,
        weight: u64,
        stats: Arc<VolumeStats>,
    ) -> Self {
        Self {
            weight,
            media,
            share,
            stats,
            is_plain: false,
            is_active: false,
            asked_at: 0,
            deficit: 0,
            turn: 0,
            in_flight: 0,
            memory: 0,
            requests: 0,
            awaited: None,
            media_share: None,
            generation: 0,
            has_limits: false,
            limited_until: 0,
            is_full: false,
            is_free: false,
            queue: VecDeque::new(),
            is_in_ring: false,
            stuck_in: 0,
        }
    }

    /// To be called after each change of what [`Self::is_plain`] is about.
    pub(super) const fn note_plain(&mut self) {
        let is_special = self.has_limits || self.is_full || self.is_free;
        self.is_plain = self.is_active && !is_special && self.weight == DEFAULT_WEIGHT;
    }

    /// Whether other volumes of the pool are active, or may have become so.
    #[inline]
    pub(super) fn knows_others(&self, media: &Media) -> bool {
        self.media_share.is_some() || self.generation != media.window.generation()
    }

    /// Adds what the tenant may take in a new turn. It keeps what it had left only while it is
    /// held back, and keeps owing what it took too much.
    pub(super) fn begin_turn(&mut self, turn: u64, quantum: u64) {
        let quantum = i64::try_from(quantum.max(1)).unwrap_or(i64::MAX);
        let turns = i64::try_from(turn.saturating_sub(self.turn)).unwrap_or(i64::MAX);
        self.turn = turn;
        let earned = quantum.saturating_mul(turns);
        self.deficit = self.deficit.saturating_add(earned).min(quantum);
    }

    /// Whether a request is within the tenant's own share of the media queue.
    pub(super) fn is_within_share(&mut self, media: &Media, cost: u64) -> bool {
        let generation = media.window.generation();
        if self.generation != generation {
            self.generation = generation;
            self.media_share = media.window.share(&self.share, self.weight);
        }
        let Some(share) = self.media_share else { return true };
        // Rounded to whole requests, up as often as down, and one always goes on.
        self.in_flight + cost / 2 <= share || self.in_flight == 0
    }

    /// Counts that a flow is held back from now on.
    pub(super) fn begin_hold(&self, hold: Hold) {
        self.stats.held[hold as usize].add(1);
        self.stats.held_now[hold as usize].add(1);
    }

    /// Counts the part of a hold that is not counted yet.
    pub(super) fn count_hold(&self, flow: &mut Flow, now: u64) {
        let Some((hold, _)) = flow.hold else { return };
        let from = std::mem::replace(&mut flow.hold_counted, now);
        self.stats.held_ns[hold as usize].add(now.saturating_sub(from));
    }

    /// Ends the hold of a flow. Returns whether there was one.
    pub(super) fn end_hold(&self, flow: &mut Flow, now: u64) -> bool {
        self.count_hold(flow, now);
        flow.in_pieces = None;
        let Some((hold, since)) = flow.hold.take() else { return false };
        self.stats.held_now[hold as usize].lower(1);
        if hold == Hold::Limit {
            self.stats.limited.add(1);
            self.stats.stage(Stage::Limit).record(now.saturating_sub(since));
        }
        true
    }
}

/// A connection or queue of a volume.
#[derive(Debug)]
pub(super) struct Flow {
    pub(super) tenant: usize,
    pub(super) owner: Owner,
    pub(super) memory: u64,
    /// Requests that wait for the pool, and bytes of their payload.
    pub(super) waiting: u32,
    pub(super) waiting_bytes: u64,
    /// Why it is held back, and since when.
    pub(super) hold: Option<(Hold, u64)>,
    /// The time up to which that is counted.
    pub(super) hold_counted: u64,
    /// The demand of that request.
    pub(super) demand: Demand,
    /// The memory released until its last try, if that found free memory only in pieces.
    pub(super) in_pieces: Option<u64>,
    /// Its client sends no more requests, and those that would wait for space fail.
    pub(super) has_left: bool,
}

impl Flow {
    pub(super) fn new(tenant: usize, owner: Owner) -> Self {
        Self {
            tenant,
            owner,
            memory: 0,
            waiting: 0,
            waiting_bytes: 0,
            hold: None,
            hold_counted: 0,
            demand: Demand::default(),
            in_pieces: None,
            has_left: false,
        }
    }

    /// Whether so much of it waits for space that it takes no more writes. The requests of a queue
    /// have their own memory.
    pub(super) fn waits_enough(&self, is_full: bool) -> bool {
        let many = self.waiting >= MAX_WAITING || self.waiting_bytes >= MAX_WAITING_BYTES;
        is_full && many && matches!(self.owner, Owner::Connection(_))
    }
}
