//! What is wrong with pools and volumes, by what is known already: nothing here does IO on a
//! pool's devices, or changes how IO is done.

mod finding;

pub use finding::{Code, Finding, MAX_MESSAGE, Severity};
