//! A small cluster test: sequences of calls as the kubelet and the sidecars make them, in the form
//! of `blockd-csi record`, are replayed against the real plugin and daemon. Order, parallelism,
//! repeats and deadlines are those of the file; answers are compared, and the node is looked at.
//!
//! ```no_run
//! use blockd_tests::cluster::{Replay, Sequence};
//! use blockd_tests::csi::rig::{Rig, Settings};
//! let mut rig = Rig::start("example", &Settings::default()).unwrap();
//! for sequence in Sequence::all().unwrap() {
//!     if !sequence.needs_devices() {
//!         Replay::new(&mut rig).unwrap().run(&sequence).unwrap();
//!     }
//! }
//! ```

mod bindings;
mod calls;
mod kubelet;
mod recorder;
mod replay;
mod sequence;
mod step;

pub use bindings::Bindings;
pub use recorder::Recorder;
pub use replay::{Progress, Replay};
pub use sequence::Sequence;
