//! `hosts`: a laboratory for several hosts that share one disk. Three machines on a network of
//! their own: an array with persistent reservations, and two hosts with LVM and its lock manager.

mod away;
mod blocks;
mod fence;
mod freeze;
mod handover;
mod hooks;
mod lab;
mod link;
mod lost_lease;
mod machine;
mod many;
mod migrate;
mod natively;
mod race;
#[expect(unsafe_code, reason = "ioctls of persistent reservations")]
mod reservation;
mod reset;
mod rounds;
mod script;
mod standby;
mod target_reset;

pub use away::coordinator_away;
pub use blocks::blocks;
pub use fence::fence;
pub use freeze::freeze;
pub use handover::handover;
pub use hooks::hooks;
pub use link::link;
pub use lost_lease::lost_lease;
pub use many::many;
pub use migrate::{migrate, records};
pub use race::race;
pub use reservation::reservation;
pub use reset::reset;
pub use rounds::Part;
pub use script::run as script;
pub use standby::standby;
pub use target_reset::target_reset;
