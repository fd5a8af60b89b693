//! The values of enumerations as people and programs read them: in tables, messages and JSON.

use crate::v1;

macro_rules! words {
    ($($list:ident -> $answer:ty { $($($value:ident)|+ => $word:expr,)+ })+) => {$(
        impl v1::$list {
            /// The value in a word.
            #[must_use]
            pub const fn word(self) -> $answer {
                match self {
                    $($(Self::$value)|+ => $word,)+
                }
            }
        }
    )+};
}

words! {
    Atomicity -> &'static str {
        Unspecified => "unknown",
        None => "none",
        Block => "block",
    }
    DeviceKind -> &'static str {
        Unspecified => "unknown",
        File => "file",
        Disk => "disk",
        Memory => "memory",
        Pmem => "pmem",
    }
    Durability -> Option<&'static str> {
        Unspecified => None,
        PowerSafe => Some("power-safe"),
        RestartSafe => Some("restart-safe"),
        Volatile => Some("volatile"),
    }
    FrontEnd -> Option<&'static str> {
        Unspecified => None,
        Ublk => Some("ublk"),
        Nbd => Some("nbd"),
    }
    HostCellOutcome -> &'static str {
        Unspecified => "unknown",
        Released => "released",
        Kept => "kept",
        Elsewhere => "elsewhere",
        Failed => "failed",
    }
    NodeObjectKind -> &'static str {
        Unspecified => "unknown",
        Free => "free",
        Journal => "journal",
    }
    NodeState -> &'static str {
        Unspecified | Unknown => "unknown",
        This => "this",
        Dead => "dead",
    }
    OnFull -> &'static str {
        Unspecified | Block => "block",
        Timeout => "timeout",
        Error => "error",
    }
    Placement -> &'static str {
        Unspecified | Fill => "fill",
        Spread => "spread",
        Pin => "pin",
    }
    PmemMedium -> &'static str {
        Unspecified => "unknown",
        Devdax => "devdax",
        DaxFile => "dax file",
        File => "mapped file",
    }
    PmemUsage -> Option<&'static str> {
        Unspecified => None,
        AppDirect => Some("app-direct"),
        FileIo => Some("file-io"),
    }
    PoolKind -> &'static str {
        Unspecified | Mapped => "mapped",
        PmemDirect => "pmem-direct",
    }
    PoolState -> &'static str {
        Unspecified => "unknown",
        Open => "open",
        Failed => "failed",
        Closed => "closed",
    }
    RebalanceState -> Option<&'static str> {
        Unspecified => None,
        Running => Some("running"),
        Even => Some("even"),
        Rest => Some("rest"),
        Aborted => Some("aborted"),
        Displaced => Some("displaced"),
    }
    Severity -> Option<&'static str> {
        Unspecified => None,
        Unknown => Some("unknown"),
        Warning => Some("warning"),
        Failure => Some("failure"),
    }
    SpaceState -> Option<&'static str> {
        Unspecified => None,
        Normal => Some("normal"),
        Low => Some("low"),
        VeryLow => Some("very low"),
        Full => Some("full"),
    }
    CellState -> &'static str {
        Unspecified | Unknown => "unknown",
        Free => "free",
        Open => "open",
        Held => "held",
        Elsewhere => "elsewhere",
    }
    VolumeKind -> &'static str {
        Unspecified | Volume => "volume",
        Snapshot => "snapshot",
    }
    VolumeState -> &'static str {
        Unspecified | Ready => "ready",
        Creating => "creating",
        Scrubbing => "scrubbing",
        Deleting => "deleting",
    }
}

// Where there are many values, each is read as the protocol names it.

impl v1::EventKind {
    /// The kind in a word.
    #[must_use]
    pub fn word(self) -> String {
        match self {
            Self::Unspecified => "unknown".to_owned(),
            named => named.as_str_name().trim_start_matches("EVENT_KIND_").to_lowercase(),
        }
    }
}

impl v1::HealthCode {
    /// The code in a word. A code that only a newer daemon has is `other`.
    #[must_use]
    pub fn word(self) -> String {
        match self {
            Self::Unspecified => "other".to_owned(),
            named => {
                let name = named.as_str_name().trim_start_matches("HEALTH_CODE_");
                name.to_lowercase().replace('_', "-")
            }
        }
    }
}
