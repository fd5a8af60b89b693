//! The fields of volumes in persistent memory in the output of `--json`.

use blockd_api::v1;
use serde::Serialize;

use super::amount;

/// The fields of a volume in persistent memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct VolumeMemory {
    pub usage: &'static str,
    pub state: &'static str,
    pub charged_bytes: u64,
    pub erase_after: bool,
    pub scrubbed_bytes: u64,
    pub dax: bool,
}

/// How a pool gives space to volumes, in a word.
pub(crate) fn pool_kind(pool: &v1::Pool) -> &'static str {
    match pool.kind() {
        v1::PoolKind::PmemDirect => "pmem-direct",
        v1::PoolKind::Mapped | v1::PoolKind::Unspecified => "mapped",
    }
}

/// How far a volume is, in a word; nothing where it is just there.
pub(crate) fn volume_state(volume: &v1::Volume) -> Option<&'static str> {
    match volume.state() {
        v1::VolumeState::Unspecified | v1::VolumeState::Ready => None,
        v1::VolumeState::Creating => Some("creating"),
        v1::VolumeState::Scrubbing => Some("scrubbing"),
        v1::VolumeState::Deleting => Some("deleting"),
    }
}

/// Whether it is a namespace, with a device that is not ours.
pub(crate) fn is_namespace(volume: &v1::Volume) -> bool {
    volume.usage() != v1::PmemUsage::Unspecified
        && volume.front_end() == v1::FrontEnd::Unspecified
        && (volume.dax || !volume.device_path.is_empty())
}

impl VolumeMemory {
    /// Nothing of volumes elsewhere.
    pub(crate) fn of(volume: &v1::Volume) -> Option<Self> {
        let usage = match volume.usage() {
            v1::PmemUsage::Unspecified => return None,
            v1::PmemUsage::AppDirect => "app-direct",
            v1::PmemUsage::FileIo => "file-io",
        };
        Some(Self {
            usage,
            state: volume_state(volume).unwrap_or("ready"),
            charged_bytes: amount(volume.charged_bytes),
            erase_after: volume.erase_after,
            scrubbed_bytes: amount(volume.scrubbed_bytes),
            dax: volume.dax,
        })
    }
}
