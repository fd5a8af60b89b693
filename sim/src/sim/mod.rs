//! A deterministic simulator of the real mapper: devices that lose and tear unflushed writes,
//! processes that die with IO in flight, clients of every kind, and an oracle that knows the
//! promises to them. Everything follows from a seed.

mod bend;
mod bend_moves;
pub mod content;
pub mod core;
pub mod directed;
pub mod disk;
pub mod enumerate;
pub mod marks;
pub mod oracle;
pub mod profile;
pub mod runner;
pub mod up;
pub mod world;
