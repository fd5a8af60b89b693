//! Durability levels of writes, by the memory that they are written to.

/// How memory is mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Medium {
    /// A character device, `/dev/daxX.Y`.
    DevDax,
    /// A file on a file system with DAX, with `MAP_SYNC`: whatever a store needs of
    /// the file system to be found again is durable before the store is done.
    DaxFile,
    /// A file without `MAP_SYNC`, as on tmpfs: stores are durable once they were synced, if ever.
    File,
}

/// How far a store has to get to outlive a loss of power: a region's `persistence_domain` in sysfs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Domain {
    /// Into the caches.
    CpuCache,
    /// Into the memory controller: caches have to be written back.
    MemoryController,
    /// The platform does not say.
    Unknown,
}

/// The durability of answered writes, the best first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Durability {
    /// Writes survive a loss of power: all of them, or with a write cache those that were flushed.
    PowerSafe,
    /// Writes survive the death of the process, and not a loss of power.
    RestartSafe,
    /// Writes are lost with the process.
    Volatile,
}

impl Durability {
    /// Returns the weakest level of all of these.
    pub fn worst(all: impl Iterator<Item = Self>) -> Self {
        all.max().unwrap_or(Self::PowerSafe)
    }

    /// Its name in texts and JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::PowerSafe => "power-safe",
            Self::RestartSafe => "restart-safe",
            Self::Volatile => "volatile",
        }
    }
}
