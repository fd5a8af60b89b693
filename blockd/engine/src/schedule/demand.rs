//! Requests to the scheduler, and its answers.

use super::{PAGE, REQUEST_COST};

/// Why a flow is held back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hold {
    /// Others have their turn, on the worker or on the media.
    Turn,
    /// The limits of the volume.
    Limit,
    /// Its writes wait for space already.
    Space,
    /// Payload memory or requests.
    Memory,
}

impl Hold {
    /// All of them, in the order of their counters.
    pub const ALL: [Self; 4] = [Self::Turn, Self::Limit, Self::Space, Self::Memory];

    /// Its name in metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Turn => "turn",
            Self::Limit => "limit",
            Self::Space => "space",
            Self::Memory => "memory",
        }
    }
}

/// A volume as one worker serves it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TenantId(pub(super) usize);

/// A connection or queue of a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FlowId {
    pub(super) at: usize,
    pub(super) tenant: usize,
    /// Its requests take memory and places of the worker.
    pub(super) is_connection: bool,
}

/// The owner of a flow, by its place among the worker's connections or queues.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Owner {
    /// A connection. Its requests take memory and places of the worker.
    Connection(usize),
    /// A queue of a block device. Its requests have their own memory and places.
    Queue(usize),
}

/// The resources that a request needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Demand {
    /// Bytes that are moved.
    pub bytes: u64,
    /// Bytes of payload memory, 0 for none.
    pub memory: u64,
    /// The least of them that is of use.
    pub least_memory: u64,
    /// Counts against the volume's limits.
    pub counted: bool,
    /// May come to wait for space.
    pub allocates: bool,
    /// The flow's answers wait until this is done, and keep their memory until then: see
    /// `awaited.rs`.
    pub is_awaited: bool,
}

impl Demand {
    /// A request without payload memory.
    #[must_use]
    pub const fn new(bytes: u64, counted: bool, allocates: bool) -> Self {
        Self { bytes, memory: 0, least_memory: 0, counted, allocates, is_awaited: false }
    }

    /// The bytes that are moved with so much payload memory.
    pub(super) const fn part(&self, memory: u64) -> u64 {
        if self.memory > 0 && memory < self.bytes { memory } else { self.bytes }
    }

    /// The same with payload memory, of which a part is enough to begin with.
    #[must_use]
    #[inline]
    pub fn with_memory(self, memory: u64, whole: bool) -> Self {
        let least = if whole { memory } else { memory.min(PAGE) };
        Self { memory, least_memory: least, ..self }
    }

    /// The same where answers of its flow wait until it is done: see [`Self::is_awaited`].
    #[must_use]
    pub const fn awaited(self) -> Self {
        Self { is_awaited: true, ..self }
    }
}

/// The cost of a request that moves `bytes` bytes.
#[must_use]
#[inline]
pub const fn cost(bytes: u64) -> u64 {
    bytes + REQUEST_COST
}

/// Defences that a test can switch off to see that it notices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Defences {
    /// The worker's turn is divided.
    pub turns: bool,
    /// Memory is divided.
    pub memory: bool,
    /// The media queue is divided.
    pub media: bool,
    /// Limits hold back before memory is taken.
    pub limits: bool,
    /// A full pool holds back its writers.
    pub space: bool,
    /// The media queue is short while volumes with little in flight use it.
    pub latency: bool,
}

impl Defences {
    /// As the daemon has them.
    pub const ALL: Self =
        Self { turns: true, memory: true, media: true, limits: true, space: true, latency: true };
}

/// How much a worker has to divide.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Capacity {
    /// Bytes of payload memory.
    pub memory: u64,
    /// Requests of connections.
    pub requests: u64,
}
