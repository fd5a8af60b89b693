//! The ring that does the media's IO, and its memory.

mod arena;
mod message;
mod operation;
#[expect(unsafe_code, reason = "shares a ring of buffers with the kernel")]
mod receive;
#[expect(unsafe_code, reason = "hands memory to the kernel through io_uring")]
mod ring;

pub use message::Message;
pub use operation::{Ended, FileSlot, IoDirection, RingOptions, Socket};
pub use receive::Chunk;
pub use ring::{AreaId, QueueTag, Ring};
