//! The rules of the claim page, which decide which host may write to a pool on shared storage.
//!
//! A [`Claimant`] does no IO and reads no clock. It is polled for the next [`Action`] and gets the
//! results. First it is an opener, which ends as owner or refused; then it renews its claim until
//! it is released, or lost to another open.
//!
//! The rules, with T, D and W of [`ClaimTiming`], and the bound on IO B = W - D:
//!
//! - **C1 Watch.** An opener that finds the claim of another host watches it for more than W and is
//!   refused if it changes. A claim that is pending is watched for twice as long.
//! - **C2 Write once.** The opener writes its own claim, durably, and nothing else before it owns.
//! - **C3 Read back.** After more than W it reads the page, and owns if its own claim is still
//!   there.
//! - **C4 Gate.** An owner submits a write only until D after the beginning of the last read that
//!   showed its own claim.
//! - **C5 Read before renewal.** A renewal is written only after such a read and under its gate.
//!   So is an opener's claim, after the read that ended its watch.
//! - **C6 Lost is lost.** An owner that reads another claim never writes again.
//! - **C7 No wait at home.** C1 to C3 are left out where the page has a claim of the same host,
//!   boot and device and the opener has the host's lock: its owner has ended. Of a pool with
//!   leases, only where that claim is not free: another host may be at C8.
//! - **C8 No wait under a lease.** C2 and C3 are left out where the page has no claim or a free
//!   one, and the read began while the opener's lease of the pool counted ([`Claimant::leased`]).
//! - **C9 No watch after a fence.** C1 is left out where the page has the claim of a node that was
//!   fenced ([`Claimant::after_fence`]).
//!
//! An owner that is late only waits: it writes again after a read that shows its own claim. An
//! opener that wrote its claim after this read waits for W from its own write. One that does not
//! wait as it has a lease (C8) is alone among those that do not: another host gets the lease after
//! a fence of this opener, or more than W after it has ceased to count. By then this opener's claim
//! has landed, and is not a free one.

use crate::format::claim::{Claim, ClaimPage, ClaimState};

/// Times in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ClaimTiming {
    /// T: a claim is renewed so often.
    pub renew_ns: u64,
    /// D: how long a read that showed the own claim allows writes.
    pub valid_ns: u64,
    /// W: how long an opener waits.
    pub wait_ns: u64,
}

impl ClaimTiming {
    /// T = 0.5 s and D = 2T for every pool, as each host must know those of all others. W is the
    /// opener's own choice and at least [`Self::LEAST_WAIT_NS`].
    #[must_use]
    pub const fn new(wait_ns: u64) -> Self {
        Self { renew_ns: 500_000_000, valid_ns: 1_000_000_000, wait_ns }
    }

    /// The least W: D and a second for IO to end.
    pub const LEAST_WAIT_NS: u64 = 2_000_000_000;
}

/// The next step of a claimant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// Read the page past all caches; then [`Claimant::read`].
    Read,
    /// Write the page and make it durable; then [`Claimant::wrote`]. It has to be submitted before
    /// [`Claimant::submit_by`], else [`Claimant::late`].
    Write(Claim),
    /// Wait until this time.
    Wait(u64),
    /// The claimant has finished.
    End,
}

/// How far a claimant is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Standing {
    /// The claimant may not access the pool yet.
    Opening,
    /// The claimant may read the pool, and write until [`Claimant::writes_until`].
    Owner,
    /// Another open has the pool, or takes it.
    Refused(ClaimPage),
    /// Another open has taken the pool.
    Lost(ClaimPage),
    /// The claimant has released the pool.
    Released,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// The page is read for the first time.
    Look,
    /// The page has to stay as it is until then; it is read next at `next`.
    Watch { seen: ClaimPage, until: u64, next: u64 },
    /// The claim is to be written.
    Claim,
    /// The claim was written, and is read back then.
    Hold { next: u64 },
    /// Owner: the page is read next at this time.
    Own { next: u64 },
    /// Owner: the claim is to be renewed; the read before began at this time.
    Renew { begun: u64 },
    /// The claim is to be released, after a read.
    Release { is_read: bool },
    /// The end.
    End(Standing),
}

/// A rule that a test takes away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ClaimMutation {
    /// C1: the claim of another host is not watched.
    NoWatch,
    /// C1: the claim is watched for T only.
    ShortWatch,
    /// C1: a claim that is pending is watched no longer than another.
    PendingAsHeld,
    /// C2: a claim that waits is renewed as an owner's is.
    RenewedPending,
    /// C3: an opener does not read its claim back.
    NoReadBack,
    /// C3: the claim is read back at once: no bound on IO is kept.
    NoBound,
    /// C4: an owner's writes are submitted whenever it likes.
    NoGate,
    /// C4: the gate counts from the end of the read.
    GateFromEnd,
    /// C4: a renewal that was only written opens the gate.
    GateFromWrite,
    /// C5: the owner renews without reading.
    UnreadRenewal,
    /// C5: a renewal or claim is submitted however late it is.
    LateClaim,
    /// C6: an owner takes its claim back from another.
    TakenBack,
    /// C7: the claim of any host counts as one of its own.
    AlwaysHome,
    /// C7: a claim that is free counts as one at home, whatever leases there are.
    HomeIfFree,
    /// C8: a lease counts for ever.
    OldLease,
    /// C9: after a fence the claim of any node counts as that of the fenced one.
    AnyFenced,
}

impl ClaimMutation {
    /// Every one of them.
    pub const ALL: &'static [Self] = &[
        Self::NoWatch,
        Self::ShortWatch,
        Self::PendingAsHeld,
        Self::RenewedPending,
        Self::NoReadBack,
        Self::NoBound,
        Self::NoGate,
        Self::GateFromEnd,
        Self::GateFromWrite,
        Self::UnreadRenewal,
        Self::LateClaim,
        Self::TakenBack,
        Self::AlwaysHome,
        Self::HomeIfFree,
        Self::OldLease,
        Self::AnyFenced,
    ];
}

/// An opener or owner of a pool.
#[derive(Debug)]
pub struct Claimant {
    own: Claim,
    timing: ClaimTiming,
    /// 0 of a pool without leases.
    leased_until: u64,
    fenced: Option<u32>,
    stage: Stage,
    /// Whether it has owned the pool, or written its claim where no wait was needed.
    is_owner: bool,
    hold_until: u64,
    writes_until: u64,
    submit_by: u64,
    without: Option<ClaimMutation>,
}

impl Claimant {
    /// The end of the lease of an opener that has none, of a pool with leases.
    pub const UNLEASED: u64 = 1;

    /// An opener. `own` is the claim that it will write: its state and counter don't matter. A
    /// `lock_space` that is not 0 says that it has the host's lock.
    #[must_use]
    pub const fn new(own: Claim, timing: ClaimTiming) -> Self {
        Self {
            own,
            timing,
            leased_until: 0,
            fenced: None,
            stage: Stage::Look,
            is_owner: false,
            hold_until: 0,
            writes_until: 0,
            submit_by: 0,
            without: None,
        }
    }

    /// The same with the lease of the pool, which a lock manager gives to one host at a time (C8).
    /// Unless this one is fenced, no other host gets it before `until` and W have passed; 0 of a
    /// pool without leases, and [`Self::UNLEASED`] where others may have one.
    #[must_use]
    pub const fn leased(mut self, until: u64) -> Self {
        self.leased_until = until;
        self
    }

    /// The same after a fence of a node, none of whose writes lands any more (C9).
    #[must_use]
    pub const fn after_fence(mut self, node: Option<u32>) -> Self {
        self.fenced = node;
        self
    }

    /// Whether it watches the claim of another.
    #[must_use]
    pub const fn is_watching(&self) -> bool {
        matches!(self.stage, Stage::Watch { .. })
    }

    /// The same without a rule, for a test.
    #[cfg(feature = "mutations")]
    #[must_use]
    pub const fn without(mut self, rule: Option<ClaimMutation>) -> Self {
        self.without = rule;
        self
    }

    fn lacks(&self, rule: ClaimMutation) -> bool {
        cfg!(feature = "mutations") && self.without == Some(rule)
    }

    /// How far it is.
    #[must_use]
    pub const fn standing(&self) -> Standing {
        match self.stage {
            Stage::End(standing) => standing,
            _ if self.is_owner => Standing::Owner,
            _ => Standing::Opening,
        }
    }

    /// Writes to the pool may be submitted before this time.
    #[must_use]
    pub fn writes_until(&self) -> u64 {
        match self.standing() {
            Standing::Owner if self.lacks(ClaimMutation::NoGate) => u64::MAX,
            Standing::Owner => self.writes_until,
            _ => 0,
        }
    }

    /// The write that [`Self::poll`] gave has to be submitted before this time.
    #[must_use]
    pub const fn submit_by(&self) -> u64 {
        self.submit_by
    }

    /// Returns the next step.
    pub fn poll(&mut self, now: u64) -> Action {
        if let Stage::Own { next } = self.stage
            && now >= next
            && self.lacks(ClaimMutation::UnreadRenewal)
        {
            self.confirm(now, now);
        }
        let waits = |until: u64| if now < until { Action::Wait(until) } else { Action::Read };
        match self.stage {
            Stage::Look => Action::Read,
            Stage::Watch { next, .. } => waits(next),
            Stage::Hold { next } => waits(next),
            Stage::Own { next } => waits(next),
            Stage::Release { is_read: false } => Action::Read,
            Stage::Claim => self.write(ClaimState::Pending, now),
            Stage::Renew { .. } => self.write(ClaimState::Held, now),
            Stage::Release { is_read: true } => self.write(ClaimState::Free, now),
            Stage::End(_) => Action::End,
        }
    }

    fn write(&mut self, state: ClaimState, now: u64) -> Action {
        if now >= self.submit_by {
            self.late();
            return Action::Wait(now);
        }
        self.own.state = state;
        self.own.counter = self.own.counter.wrapping_add(1);
        Action::Write(self.own)
    }

    /// The page was read: the read began at `begun` and has ended at `now`.
    pub fn read(&mut self, begun: u64, now: u64, page: ClaimPage) {
        let is_own = matches!(page, ClaimPage::Claim(claim) if claim.open_id == self.own.open_id);
        match self.stage {
            Stage::Look => self.look(begun, now, page),
            Stage::Watch { seen, .. } if page != seen => self.end(Standing::Refused(page)),
            Stage::Watch { until, .. } if begun >= until => self.claim(begun),
            Stage::Watch { seen, until, .. } => {
                let next = until.min(now.saturating_add(self.timing.renew_ns));
                self.stage = Stage::Watch { seen, until, next };
            }
            // Only without C2.
            Stage::Hold { .. } if is_own && begun < self.hold_until => self.claim(begun),
            Stage::Hold { .. } | Stage::Own { .. } if is_own => self.confirm(begun, now),
            Stage::Hold { .. } => self.end(Standing::Refused(page)),
            Stage::Own { .. } if self.lacks(ClaimMutation::TakenBack) => self.confirm(begun, now),
            Stage::Own { .. } => self.end(Standing::Lost(page)),
            Stage::Release { .. } if is_own => {
                self.allow(begun, now);
                self.stage = Stage::Release { is_read: true };
            }
            Stage::Release { .. } => self.end(Standing::Lost(page)),
            Stage::Claim | Stage::Renew { .. } | Stage::End(_) => {}
        }
    }

    fn look(&mut self, begun: u64, now: u64, page: ClaimPage) {
        let is_home = matches!(page, ClaimPage::Claim(claim) if self.is_home(&claim));
        let is_free = match page {
            ClaimPage::Absent => true,
            ClaimPage::Claim(claim) => claim.state == ClaimState::Free,
            ClaimPage::Unreadable(_) => false,
        };
        let is_left = is_free && self.leased_until > 0 && !self.lacks(ClaimMutation::HomeIfFree);
        let is_home = is_home && !is_left;
        if is_home || (is_free && self.is_leased(begun)) {
            // Not open before the claim is written.
            self.allow(begun, now);
            self.stage = Stage::Renew { begun };
            return;
        }
        let pending = match page {
            _ if is_free => return self.claim(begun),
            ClaimPage::Claim(claim) if self.is_fenced(&claim) => return self.claim(begun),
            ClaimPage::Claim(claim) => claim.state == ClaimState::Pending,
            ClaimPage::Absent | ClaimPage::Unreadable(_) => false,
        };
        if self.lacks(ClaimMutation::NoWatch) {
            return self.claim(begun);
        }
        let wait = match pending {
            _ if self.lacks(ClaimMutation::ShortWatch) => self.timing.renew_ns,
            true if !self.lacks(ClaimMutation::PendingAsHeld) => {
                self.timing.wait_ns.saturating_mul(2)
            }
            _ => self.timing.wait_ns,
        };
        let until = now.saturating_add(wait).saturating_add(1);
        let next = until.min(now.saturating_add(self.timing.renew_ns));
        self.stage = Stage::Watch { seen: page, until, next };
    }

    fn is_home(&self, claim: &Claim) -> bool {
        // One that was pending has never shown that a former owner has ended.
        let is_home = claim.state != ClaimState::Pending && self.own.is_of_same_host(claim);
        is_home || self.lacks(ClaimMutation::AlwaysHome)
    }

    fn is_leased(&self, begun: u64) -> bool {
        let is_old = self.leased_until > Self::UNLEASED && self.lacks(ClaimMutation::OldLease);
        begun < self.leased_until || is_old
    }

    fn is_fenced(&self, claim: &Claim) -> bool {
        let is_any = self.lacks(ClaimMutation::AnyFenced);
        self.fenced.is_some_and(|node| node == claim.node || is_any)
    }

    /// The claim is written next, unless that is late.
    fn claim(&mut self, begun: u64) {
        self.set_submit_by(begun);
        self.stage = Stage::Claim;
    }

    /// A read has shown the own claim.
    fn confirm(&mut self, begun: u64, now: u64) {
        self.is_owner = true;
        self.allow(begun, now);
        self.stage = Stage::Renew { begun };
    }

    fn allow(&mut self, begun: u64, now: u64) {
        let from = if self.lacks(ClaimMutation::GateFromEnd) { now } else { begun };
        self.writes_until = from.saturating_add(self.timing.valid_ns);
        self.set_submit_by(begun);
    }

    fn set_submit_by(&mut self, begun: u64) {
        self.submit_by = match self.lacks(ClaimMutation::LateClaim) {
            true => u64::MAX,
            false => begun.saturating_add(self.timing.valid_ns),
        };
    }

    /// The write was not submitted in time: reads first.
    pub fn late(&mut self) {
        match self.stage {
            Stage::Claim => self.stage = Stage::Look,
            Stage::Renew { .. } if !self.is_owner => self.stage = Stage::Look,
            Stage::Renew { .. } => self.stage = Stage::Own { next: 0 },
            Stage::Release { .. } => self.stage = Stage::Release { is_read: false },
            _ => {}
        }
    }

    /// The write is durable.
    pub fn wrote(&mut self, now: u64) {
        match self.stage {
            Stage::Claim if self.lacks(ClaimMutation::NoReadBack) => {
                self.is_owner = true;
                self.writes_until = now.saturating_add(self.timing.valid_ns);
                self.stage = Stage::Own { next: now };
            }
            Stage::Claim => {
                let wait = match self.without {
                    Some(ClaimMutation::NoBound) => 0,
                    _ => self.timing.wait_ns,
                };
                if self.hold_until == 0 {
                    self.hold_until = now.saturating_add(wait).saturating_add(1);
                }
                let next = match self.lacks(ClaimMutation::RenewedPending) {
                    true => self.hold_until.min(now.saturating_add(self.timing.renew_ns)),
                    false => self.hold_until,
                };
                self.stage = Stage::Hold { next };
            }
            Stage::Renew { begun } => {
                self.is_owner = true;
                let next = begun.saturating_add(self.timing.renew_ns);
                self.stage = Stage::Own { next };
                if self.lacks(ClaimMutation::GateFromWrite) {
                    self.writes_until = now.saturating_add(self.timing.valid_ns);
                }
            }
            Stage::Release { .. } => self.end(Standing::Released),
            _ => {}
        }
    }

    /// Retries after a failed read or write of an owner. The write may have landed or not; both
    /// states are the owner's own.
    pub fn failed(&mut self, now: u64) {
        match self.stage {
            Stage::Own { .. } | Stage::Renew { .. } => {
                self.stage = Stage::Own { next: now.saturating_add(self.timing.renew_ns) };
            }
            Stage::Release { .. } => self.end(Standing::Released),
            _ => {}
        }
    }

    /// Releases the pool: all IO has ended. The claim is free once the claimant has ended.
    pub fn release(&mut self) {
        if self.standing() == Standing::Owner {
            self.stage = Stage::Release { is_read: false };
        }
    }

    fn end(&mut self, standing: Standing) {
        self.writes_until = 0;
        self.stage = Stage::End(standing);
    }
}
