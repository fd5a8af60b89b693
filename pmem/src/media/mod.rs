//! Memory that is read and written by copying, and what has to be done for it to last.

mod level;

pub use level::{Domain, Durability, Medium};
