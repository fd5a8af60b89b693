//! Counters of the situations that a run covered. A long run in which one of them stays zero fails,
//! since it lacks that coverage.

macro_rules! marks {
    ($($name:ident $what:literal;)*) => {
        /// A fault or a situation that a history can contain.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
        #[repr(u8)]
        pub enum Mark {
            $(#[doc = $what] $name,)*
        }

        impl Mark {
            /// Every mark there is.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// Describes the mark.
            #[must_use]
            pub const fn what(self) -> &'static str {
                match self { $(Self::$name => $what,)* }
            }
        }
    };
}

marks! {
    Read "reads answered";
    Write "writes answered";
    WriteFua "FUA writes answered";
    Discard "discards answered";
    ZeroesUnmap "write zeroes with unmap answered";
    ZeroesKeep "write zeroes without unmap answered";
    Flush "flushes answered";
    Create "volumes created";
    Delete "volumes deleted";
    Grow "volumes grown";
    Shrink "volumes shrunk";
    Snapshot "snapshots taken";
    Group "groups of snapshots taken";
    Clone "clones made";
    Rollback "rollbacks";
    Rename "volumes and snapshots renamed";
    Placed "volumes spread over devices or pinned to one";
    Label "volumes and snapshots given other labels";
    LabelsLost "openings that could not read some labels";
    RepeatedControl "control commands repeated that had been carried out";
    CommitAsked "commits asked for";
    CheckpointAsked "checkpoints asked for";
    CheckpointDuringIo "checkpoints asked for while requests were in flight";
    CompositeOn "composite entries turned on";
    CompositeOff "composite entries turned off";
    Close "pools closed in order";
    AddDevice "devices added";
    GrowDevice "devices grown";
    DeviceLeaves "devices that began to leave";
    DeviceStays "devices that stayed after all";
    DeviceShrinks "devices that began to shrink";
    DeviceShrunk "devices that have shrunk";
    DeviceGone "devices that left";
    RebalanceBegun "rebalances asked for";
    RebalanceStopped "rebalances stopped";
    Kill "process deaths";
    KillRecovery "process deaths while opening";
    Power "losses of power";
    PowerRecovery "losses of power while opening";
    PowerTorn "losses of power with torn writes";
    PowerAfterKill "losses of power before a killed pool was open again";
    DeadWriteLanded "writes of a dead owner that landed";
    DeadWriteWhileOpening "writes of a dead owner that landed while the next one was opening";
    FenceWaited "fences that had to wait for a dead owner's IO";
    RingTorn "process deaths in the middle of a ring record";
    RingAccepted "rings replayed";
    RingMissing "openings with the ring missing";
    RingStale "openings with an older ring";
    RingForeign "openings with another pool's ring";
    RingRefused "openings refused for the ring";
    LossAccepted "openings that accepted the loss of the ring";
    ReadError "media errors on read";
    WriteError "media errors on write";
    WriteNoSpace "writes refused by the media for lack of space";
    FlushError "media errors on flush";
    MetadataReadError "media errors on metadata reads";
    MetadataWriteError "media errors on metadata writes";
    Rot "metadata units rotted";
    DroppedWrite "metadata writes answered and not stored";
    Misdirected "metadata writes stored elsewhere";
    DamageNamed "damage refused by name";
    DamageHarmless "damage that did no harm";
    PoolFailed "pools that stopped after an error";
    SlowIo "IO answered long after it was done";
    FlushJoined "flushes that waited for another one of the same device";
    ParkSpace "requests parked for space";
    ParkSlowed "requests slowed down";
    ParkMetadata "requests parked for metadata pages";
    ParkRing "requests parked for a full ring";
    ParkInFlight "requests parked for a write in flight";
    ParkGated "requests parked for a structure change";
    SpaceResumed "parked requests that went on after space was freed";
    GaveUpFull "requests given up in a full pool";
    CopyOnWrite "writes that copied from a shared extent";
    PartialFill "writes that filled up a sub-block with zeroes";
    ConcurrentFirst "first writes of one extent under way together";
    DiscardUnderWrite "discards of the range of a write in flight";
    FuaShort "FUA writes by the data's FUA alone";
    FuaLong "FUA writes that waited for a commit";
    FlushShort "flushes without a commit";
    FlushLong "flushes that waited for a commit";
    SplitRequest "requests planned in several parts";
    CheckpointWritten "superblocks written";
    ReadOnlyOpen "pools opened read-only";
    Verified "pools read back completely after opening";
    Difference "differences between volumes compared with their contents";
    GivenBack "deletions that freed the predicted space";
    Drained "histories drained to rest";
}

/// How often each [`Mark`] was met.
#[derive(Clone, Debug)]
pub struct Marks {
    counts: Vec<u64>,
}

impl Default for Marks {
    fn default() -> Self {
        Self { counts: vec![0; Mark::ALL.len()] }
    }
}

impl Marks {
    /// Counts one.
    pub fn hit(&mut self, mark: Mark) {
        self.counts[mark as usize] += 1;
    }

    /// How often it was met.
    #[must_use]
    pub fn count(&self, mark: Mark) -> u64 {
        self.counts[mark as usize]
    }

    /// Adds another run's counts.
    pub fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
    }

    /// Marks that were never met.
    #[must_use]
    pub fn missing(&self) -> Vec<Mark> {
        Mark::ALL.iter().copied().filter(|mark| self.count(*mark) == 0).collect()
    }

    /// Client requests answered.
    #[must_use]
    pub fn operations(&self) -> u64 {
        let kinds = [
            Mark::Read,
            Mark::Write,
            Mark::WriteFua,
            Mark::Discard,
            Mark::ZeroesUnmap,
            Mark::ZeroesKeep,
            Mark::Flush,
        ];
        kinds.iter().map(|mark| self.count(*mark)).sum()
    }

    /// Crashes of either kind.
    #[must_use]
    pub fn crashes(&self) -> u64 {
        self.count(Mark::Kill) + self.count(Mark::Power) + self.crashes_in_recovery()
    }

    /// Crashes while a pool was being opened.
    #[must_use]
    pub fn crashes_in_recovery(&self) -> u64 {
        self.count(Mark::KillRecovery) + self.count(Mark::PowerRecovery)
    }
}
