//! One mutation for each rule, and each form of a rule, of several hosts on one array.

use crate::model::mutation::mutations;

mutations! {
    RegisterLate, "H1a", "leases are taken and IO is sent before the key is registered";
    OnePath, "H1b", "the key is registered on one path only";
    OneDevice, "H1c", "the key is registered on the first device only";
    NotPersistent, "H1d", "registrations do not outlive a power loss of the array";
    PathBack, "H1e", "a path that comes back is registered and used, without a look at the others";
    SameKey, "H1f", "the key of a host is the same after each boot";
    OldCommandsKept, "H1g", "a host registers a new key while commands of its last boot are in the target";
    NoLease, "H2a", "a cell that is closed is opened without its lease";
    LapseIgnored, "H2b", "a host that lost its lease goes on, and no watchdog resets it";
    QueueKept, "H2c", "a host that lost its lease leaves commands in its kernel's queue";
    GrowthNoLease, "H2d", "space is granted without the lease of the directory";
    NotJoined, "H2e", "a host that boots takes leases before it has renewed its membership";
    JoinsEarly, "H2f", "a host renews a lapsed membership while its commands are in flight";
    FedEarly, "H2g", "a host whose membership lapsed feeds its watchdog while its commands are in flight";
    TimeOnly, "H3a", "a lease that has expired is enough";
    OneDeviceFenced, "H3b", "the key is removed from the first device only";
    PreemptNoAbort, "H3c", "PREEMPT without ABORT";
    FailedFence, "H3d", "a fence that failed is taken as done";
    AcquireThenFence, "H3e", "an expired lease is taken first, its holder is fenced afterwards";
    StopNoReset, "H3f", "a host that was switched off or reset has no commands in the target";
    FenceOutlived, "H3g", "a fence counts for leases that the host takes after it";
    NoOpenFlush, "H4", "a cell is read without a flush before it";
    ConflictRetried, "H5a", "after a conflict the key is registered again and the command repeated";
    FencedReads, "H5b", "reads go on after a conflict";
    OneCellFenced, "H5c", "a conflict ends the cell that has met it only";
    RestartRegisters, "H5d", "a daemon that is started again registers a key that was removed";
    KeyNotSought, "H5e", "a host that lost its lease does not look for its key";
    ReleaseEarly, "H6a", "the lease is given back before the cell is marked clean";
    CloseUndrained, "H6b", "the cell is closed while requests are in flight";
    CleanNotFlushed, "H6c", "the mark of a clean cell is not flushed";
    CloseNoTree, "H6d", "the cell is marked clean before its tree is written";
    LogIgnored, "H7a", "a takeover does not replay the log";
    LossUnreported, "H7b", "a flush succeeds after answered writes of its client may be lost";
    CounterId, "H8", "the open id is a counter, not drawn anew";
    GrantNotFlushed, "H9a", "space is used before the directory is durable";
    SizeFirst, "H9b", "the superblock has the new size before the directory";
    UseEarly, "H9c", "space is used before the superblock with the new size is durable";
    GrantUnchecked, "H9d", "a grant counts after the flush, though the array has lost it before";
    CachedCell, "H10a", "a cell is opened again from memory";
    CachedDirectory, "H10b", "space is granted from a directory in memory";
    AwayStops, "H12a", "an open cell does not serve while the coordinator is away";
    AwayForgotten, "H12b", "growth that found the coordinator away is not tried again";
    FenceLast, "H13a", "a host that is declared dead is fenced after the replay";
    UnlockedUnreplayed, "H13b", "the cell of a dead host is unlocked without a replay";
    PagesKept, "H14a", "pages stay cached above a standby";
    DirtyKept, "H14b", "dirty pages are not written before the cell is released";
    RestartUnnoticed, "H15a", "a restart of the array counts for nothing";
    RestartOpenOnly, "H15b", "a restart of the array counts for cells that are open only";
    RestartForgotten, "H15c", "a host that comes back without a boot forgets a restart of the array";
    AskedOnce, "H16a", "the holder of a cell is asked for it once only";
    HandedUnserved, "H16b", "a cell is handed on before the requests that waited for it are served";
}
