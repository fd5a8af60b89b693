//! One mutation for each rule, and each form of a rule, that the commit protocol needs.
//!
//! A mutation removes just that form. A model that stays silent under a mutation proves nothing
//! about the rule, so the test suite demands that every one of them is caught.

macro_rules! mutations {
    ($($name:ident, $rule:literal, $what:literal;)*) => {
        /// A rule that is removed from the protocol.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum Mutation {
            /// No mutation: all rules in place.
            Nothing,
            $(#[doc = $what] $name,)*
        }

        impl Mutation {
            /// Every mutation, in the order of the rules.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// The rule, and the letter of the form where it has several.
            pub fn rule(self) -> &'static str {
                match self { Self::Nothing => "-", $(Self::$name => $rule,)* }
            }

            /// Describes an implementation with this mistake.
            pub fn what(self) -> &'static str {
                match self { Self::Nothing => "all rules in place", $(Self::$name => $what,)* }
            }
        }
    };
}
pub(crate) use mutations;

impl Mutation {
    /// True if the rule is about composite entries.
    pub fn is_composite(self) -> bool {
        self.rule().starts_with('K')
    }
}

mutations! {
    WalBeforeFlush, "R1", "WAL written before the data flush";
    CaptureLate, "R2a", "records captured after the data flush";
    OwnQueueOnly, "R2b", "commit takes the records of one queue only";
    CutOverUnpublished, "R2c", "cut does not wait for a lower LSN that is not published";
    FlushAnsweredEarly, "R3a", "FLUSH answered before its WAL blocks are durable";
    ShortFlushInCommit, "R3b", "FLUSH takes the short form while a commit is in flight";
    ReuseAtOnce, "R4a", "freed extent reused at once";
    ReuseWhenCaptured, "R4b", "freed extent reused when its unmap is captured";
    ReuseUndrained, "R4c", "freed extent reused under IO that started before the unmap";
    ClearBitReads, "R5a", "a clear bit reads the extent's content";
    BitsAtSubmit, "R5b", "bits set when the data write is submitted";
    NoCancel, "R5c", "discard leaves the bits of slow writes in flight alone";
    NoReRead, "R5d", "completion publishes the entry as it was at submission";
    UnmapUnderWrite, "R5e", "discard unmaps an extent under a slow write";
    LsnIgnored, "R6a", "replay applies records at or below its starting LSN";
    RingPerQueue, "R6b", "rings replayed one after the other, not in LSN order";
    MergeOverStructure, "R6c", "map records merged across a structure record";
    NoChainNoEpoch, "R6d", "WAL blocks carry a sequence only: no chain, no epoch";
    ChainNoEpoch, "R6e", "WAL blocks are chained without the open epoch";
    GroupInPieces, "R6f", "a group of snapshots has a record for each of them";
    FuaNoCommit, "R7a", "FUA answered when its data is durable, mapping or not";
    FuaPartialCommit, "R7b", "FUA commits its own entry alone";
    FuaJoinsCommit, "R7c", "FUA joins a commit that is past its capture";
    FlushErrorRetried, "R8a", "failed flush retried and taken as a success";
    FailedRingReplayed, "R8b", "ring replayed after a flush error";
    FailedReadsServed, "R8c", "reads served after a flush error";
    AnswerFirst, "R9a", "answer given before the record is in the ring";
    TrimAtCapture, "R9b", "ring trimmed when records are captured";
    OverwriteFull, "R9c", "a full ring overwrites its oldest record";
    NoDiscardRecords, "R9d", "discards leave no record in the ring";
    NoStructureRecords, "R9e", "structure changes leave no record in the ring";
    PendingIgnored, "R10a", "sole owner overwrites while another's leaving is not durable";
    ExclusiveUndrained, "R10b", "sole owner overwrites under the leaver's older IO";
    FastUnderCopy, "R10c", "fast write in place while a copy-on-write of the entry is in flight";
    NoFence, "R11", "pool opened before the dead owner's IO has ended";
    NoOpenFlush, "R12", "no device flush before the pool is read";
    RingEmptied, "R13a", "ring emptied when it is replayed";
    ReplayIsCommitted, "R13b", "replayed records taken as committed";
    ReplayNoPending, "R13c", "references dropped in replay are free at once";
    ReplayDiffOnly, "R13d", "only references of the durable map are pending after replay";
    NoStamp, "R14a", "any ring that is there is accepted";
    NextLeftOut, "R14b", "ring not stamped with the next id before the superblock";
    NoRestamp, "R14c", "ring accepted by its next id is not restamped";
    CounterId, "R14d", "open id is a counter, not drawn anew";
    EpochNotAwaited, "R15", "WAL written before the new epoch is durable";
    SnapshotUndrained, "R16a", "snapshot or clone taken under writes in flight";
    ChangeUndrained, "R16b", "rollback, delete or resize under writes in flight";
    StructureEarly, "R16c", "structure change answered before it is durable";
    IdempotentEarly, "R16d", "repeated request answered from a state that is not durable";
    GroupOneByOne, "R16e", "the snapshots of a group are cut one after the other";
    FuzzyCheckpoint, "R17a", "checkpoint copies the map at two moments";
    CheckpointNoFlush, "R17b", "no flush between checkpoint pages and superblock";
    TruncateEarly, "R17c", "WAL truncated before the superblock is durable";
    DurableEarly, "R17d", "checkpoint counted durable before the superblock is";
    CheckpointInPlace, "R17e", "checkpoint written over the pages in use";
    CheckpointOnlyIfNew, "R17f", "no checkpoint unless an LSN was assigned since the last";
    ShrinkWholeExtents, "R18", "shrink clears whole extents only";
    RedirectPendingTarget, "K1a", "overlay is an extent whose drop does not count yet";
    BaseWritten, "K1b", "write of a composite entry goes to the base if that has the sub-blocks";
    RedirectNoReRead, "K2a", "redirect publishes above the entry as it was at submission";
    FoldNoReRead, "K2b", "fold publishes the bitmaps as they were when it copied";
    RedirectForgetsOthers, "K2c", "redirect above its own overlay, mapped, publishes its bits only";
    RedirectOwnTarget, "K3a", "each redirect in flight has an overlay of its own";
    WriteUnderRedirect, "K3b", "write in place in the base while a redirect is in flight above it";
    OverlapWhole, "K3c", "overlapping slow writes in flight where blocks have to stay whole";
    BaseReadUncounted, "K4", "base reused under a read that may reach it";
    FoldPendingBase, "K5a", "fold down while another's leaving of the base is not durable";
    FoldUndrainedBase, "K5b", "fold down under the older IO of a leaver of the base";
    FoldEntryNotDurable, "K5c", "fold down while the present entry is not durable";
    FoldLsnBeforeDrain, "K5d", "fold down looks at the entry's LSN before writes have ended";
    FoldUndrained, "K6a", "fold copies while writes from before it are in flight";
    FoldUnpublished, "K6b", "fold waits for the IO of older writes, not for their entry";
    FoldUnderWrites, "K6c", "new writes of an entry go on while it is folded";
    StructureUnderFold, "K6d", "structure change does not wait for a fold";
    FoldRecordEarly, "K7", "fold published before its data has landed";
    DropBoth, "K8", "discard lets overlay and base go by one record, which has place for one";
    OverlayWrittenShared, "K9a", "overwrite in place in an overlay that a snapshot shares";
    OverlayGrowsShared, "K9b", "shared overlay takes new sub-blocks";
    OverlayPendingIgnored, "K9c", "overlay overwritten while another's leaving is not durable";
    FuaOnOverlay, "K10", "FUA in place in an overlay answered before the entry is durable";
    DiscardTopFirst, "K12a", "discard clears the overlay's bitmap before the base's";
    DiscardKeepsUnder, "K12b", "discard of a composite entry clears the overlay's bitmap only";
    LookUnderFirst, "K12c", "reader looks at the base's bitmap before the overlay's";
    NoSecondLook, "K12d", "reader does not look at the top of the entry again";
    UnderAfterTop, "K12e", "composite entry visible before the base's bitmap is";
    UnderClearedFirst, "K12f", "base's bitmap cleared before the entry stops being composite";
}
