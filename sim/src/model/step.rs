//! The steps a history is made of, and the kinds the runner counts.

use super::parts::{Fold, Phase};
use super::state::{World, ix};

/// One step; a step that is not possible in a state changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Submit a write: queue, volume, extent, sub-blocks, FUA.
    Write(u8, u8, u8, u8, bool),
    /// Submit a discard, or a write-zeroes that keeps the extent (last field).
    Discard(u8, u8, u8, u8, bool),
    /// Submit a read of one sub-block: volume, extent, sub-block.
    Read(u8, u8, u8),
    /// Submit a FLUSH: queue, volume.
    Flush(u8, u8),
    /// Take the request in this slot one step further.
    Op(u8),
    /// Start a commit, or take it one step further.
    Commit,
    /// WAL block number n of the commit reaches the device's cache.
    Land(u8),
    /// Start a checkpoint, or take it one step further.
    Ckpt,
    /// Put a fold of a composite entry into the table: volume, extent, down (or up).
    Fold(u8, u8, bool),
    /// The fold in this slot fails.
    FailFold(u8),
    /// The reclaimer checks dropped references.
    Reclaim,
    /// Start a snapshot (false) or clone (true) of a volume.
    Copy(u8, bool),
    /// Start snapshots of two volumes in one cut.
    Group(u8, u8),
    /// Start a deletion.
    Delete(u8),
    /// Start a rollback: volume, snapshot.
    Rollback(u8, u8),
    /// Start a resize: volume, sub-blocks.
    Resize(u8, u8),
    /// Repeat a create or delete request.
    Retry(u8),
    /// Take the structure change one step further.
    Structure,
    /// Read everything in one moment.
    Check,
    /// Kill the process.
    Kill,
    /// Power loss; the number chooses the outcomes: 0 all oldest, 1 all newest.
    Power(u16),
    /// The flush of committer 0, checkpointer 1, short form 2 fails; outcomes as for `Power`.
    FlushError(u8, u16),
    /// Open again after a flush error.
    Reopen,
    /// Take the open one step further.
    Open,
    /// Late write number n of a dead owner lands.
    Late(u8),
    /// The ring is set aside.
    Aside,
    /// The ring set aside is brought back.
    Back,
    /// The device writes one cell back on its own.
    Persist(u8),
    /// The device's write-back of one cell, of metadata or unseen data, is torn; power is lost
    /// before it is repaired.
    Tear(u8),
    /// Take all requests, apart from folds, as far as they go.
    Requests,
    /// Take each fold one step further.
    Folds,
    /// Open until requests are served.
    Recover,
    /// End all that was begun and check the pool at rest.
    Drain,
}

/// Chooser for the outcomes of a power loss.
pub fn picker(number: u16) -> impl FnMut(u8) -> u8 {
    let mut state = u32::from(number).wrapping_mul(0x9E37_79B9);
    move |n| match number {
        0 => 0,
        1 => n - 1,
        _ => {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            (state >> 8).to_le_bytes()[0] % n
        }
    }
}

impl World {
    /// Takes a step; false if it is not possible now.
    pub fn apply(&mut self, step: Step) -> bool {
        self.now += 1;
        let done = match step {
            Step::Write(q, v, e, mask, fua) => self.write(q, v, e, mask, fua),
            Step::Discard(q, v, e, mask, keep) => self.discard(q, v, e, mask, keep),
            Step::Read(v, e, s) => self.read(v, e, s),
            Step::Flush(q, v) => self.flush(q, v),
            Step::Op(slot) => self.advance(ix(slot)),
            Step::Commit => self.advance_commit(),
            Step::Land(i) => self.land_wal(i),
            Step::Ckpt => self.advance_ckpt(),
            Step::Fold(v, e, down) => {
                self.start_fold(v, e, if down { Fold::Down } else { Fold::Up })
            }
            Step::FailFold(slot) => self.fail_fold(ix(slot)),
            Step::Reclaim => self.reclaim(),
            Step::Copy(v, writable) => self.start_copy(v, writable),
            Step::Group(v, w) => self.start_group(v, w),
            Step::Delete(v) => self.start_delete(v),
            Step::Rollback(v, s) => self.start_rollback(v, s),
            Step::Resize(v, size) => self.start_resize(v, size),
            Step::Retry(v) => self.retry(v),
            Step::Structure => self.advance_structure(),
            Step::Check => self.check_now(),
            Step::Kill => self.kill(),
            Step::Power(n) => self.power_loss(picker(n)),
            Step::FlushError(sender, n) => self.flush_error(ix(sender), picker(n)),
            Step::Reopen => self.reopen(),
            Step::Open => self.advance_open(),
            Step::Late(i) => self.land_late(i),
            Step::Aside => self.set_aside(),
            Step::Back => self.bring_back(),
            Step::Persist(c) => {
                let dirty = self.dev.is_dirty(c);
                if dirty {
                    self.dev.persist(c);
                }
                dirty
            }
            Step::Tear(c) => {
                self.dev.tear(c);
                true
            }
            Step::Requests => self.finish_requests(),
            Step::Folds => self.advance_folds(),
            Step::Recover => self.recover(),
            Step::Drain => {
                self.drain();
                true
            }
        };
        self.start_service();
        done
    }
}

macro_rules! kinds {
    ($type:ident; $($name:ident = $text:literal,)*) => {
        /// Kinds that the runner counts; one that never happened fails the run.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum $type { $(#[doc = $text] $name,)* }

        /// Names of the kinds, in their order.
        pub const KINDS: &[&str] = &[$($text,)*];
    };
}
pub(crate) use kinds;

kinds! {
    Kind;
    Write = "write",
    Fua = "FUA write",
    Discard = "discard",
    Zeroes = "write-zeroes keeping the extent",
    Flush = "flush",
    Read = "read in flight",
    Progress = "request step",
    Commit = "timer commit",
    CommitStep = "commit step",
    Ckpt = "checkpoint",
    CkptStep = "checkpoint step",
    Reclaim = "reclaim",
    Snapshot = "snapshot",
    Clone = "clone",
    Group = "group of snapshots",
    Delete = "delete",
    Rollback = "rollback",
    Resize = "resize",
    Retry = "repeated structure request",
    Structure = "structure step",
    Check = "stable read",
    Kill = "kill",
    Power = "power loss",
    KillOpen = "kill during recovery",
    PowerOpen = "power loss during recovery",
    FlushError = "flush error",
    Reopen = "reopen after flush error",
    Open = "open step",
    Late = "late landing of a dead owner's write",
    Aside = "ring set aside",
    Back = "ring brought back",
    Persist = "write-back by the device",
    Recovered = "recovery checked",
    Drained = "history drained to rest",
    FoldDown = "fold down",
    FoldUp = "fold up",
    FailFold = "failed fold",
    Redirected = "redirect visible",
    RedirectJoined = "redirect joined another's overlay",
    RedirectMapped = "redirect found its overlay mapped without a base",
    RedirectAlone = "redirect whose base was discarded",
    OverlayGrown = "overlay grown in place",
    OverlayCopied = "shared overlay copied",
    BaseDiscarded = "discard of a whole composite entry",
    FoldedDown = "fold down visible",
    FoldedUp = "fold up visible",
    FoldGivenUp = "fold given up",
}

/// The kind of a step that was taken; `before` is the state it was taken in.
pub fn kind_of(step: Step, phase: Phase, commit_idle: bool, ckpt_idle: bool) -> Kind {
    let opening = matches!(phase, Phase::Open(_) | Phase::Recover);
    match step {
        Step::Write(.., fua) if fua => Kind::Fua,
        Step::Write(..) => Kind::Write,
        Step::Discard(.., keep) if keep => Kind::Zeroes,
        Step::Discard(..) => Kind::Discard,
        Step::Read(..) => Kind::Read,
        Step::Flush(..) => Kind::Flush,
        Step::Op(_) | Step::Requests | Step::Folds => Kind::Progress,
        Step::Commit if commit_idle => Kind::Commit,
        Step::Commit => Kind::CommitStep,
        Step::Land(_) => Kind::CommitStep,
        Step::Ckpt if ckpt_idle => Kind::Ckpt,
        Step::Ckpt => Kind::CkptStep,
        Step::Fold(_, _, down) if down => Kind::FoldDown,
        Step::Fold(..) => Kind::FoldUp,
        Step::FailFold(_) => Kind::FailFold,
        Step::Reclaim => Kind::Reclaim,
        Step::Copy(_, writable) if writable => Kind::Clone,
        Step::Copy(..) => Kind::Snapshot,
        Step::Group(..) => Kind::Group,
        Step::Delete(_) => Kind::Delete,
        Step::Rollback(..) => Kind::Rollback,
        Step::Resize(..) => Kind::Resize,
        Step::Retry(_) => Kind::Retry,
        Step::Structure => Kind::Structure,
        Step::Check => Kind::Check,
        Step::Kill if opening => Kind::KillOpen,
        Step::Kill => Kind::Kill,
        Step::Power(_) if opening => Kind::PowerOpen,
        Step::Power(..) => Kind::Power,
        Step::FlushError(..) => Kind::FlushError,
        Step::Reopen => Kind::Reopen,
        Step::Open => Kind::Open,
        Step::Late(_) => Kind::Late,
        Step::Aside => Kind::Aside,
        Step::Back => Kind::Back,
        Step::Persist(_) | Step::Tear(_) => Kind::Persist,
        Step::Recover => Kind::Recovered,
        Step::Drain => Kind::Drained,
    }
}
