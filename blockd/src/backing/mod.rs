//! The media: files, disks and memory, and the ring that does their IO.

mod arena;
mod device;
mod doorbell;
mod gate;
mod guard;
#[expect(unsafe_code, reason = "ioctls of block devices")]
mod ioctl;
#[expect(unsafe_code, reason = "copies to and from a mapping that others may write")]
mod mapped;
mod memory;
mod message;
mod operation;
pub mod pmem;
#[expect(unsafe_code, reason = "shares a ring of buffers with the kernel")]
mod receive;
#[expect(unsafe_code, reason = "hands memory to the kernel through io_uring")]
mod ring;

pub use blockd_pmem::media::Durability;
pub use device::{
    Device, DeviceInfo, DeviceKind, DeviceSpec, claim_disk, disk_sequence, io_error, lock_below,
};
pub use doorbell::Doorbell;
pub use gate::Gate;
pub use mapped::Mapped;
pub use memory::Memory;
pub use message::Message;
pub use operation::{Ended, FileSlot, IoDirection, RingOptions};
pub use receive::Chunk;
pub use ring::{AreaId, QueueTag, Ring};

/// Bytes of a page of IO memory.
pub const PAGE: usize = 4096;
