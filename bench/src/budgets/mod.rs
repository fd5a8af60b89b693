//! The mapper's figures beside their budgets.

pub mod counts;
pub mod lookup;
pub mod machine;
pub mod rig;
pub mod scale;
