//! Benchmarks of blockd: the mapper's figures beside their budgets, and the pump, which drives the
//! mapper on a real file and is compared with fio on the same file.
#![deny(unsafe_code)]

#[allow(unsafe_code, reason = "a global allocator is an unsafe trait")]
pub mod alloc_count;

pub mod after_snapshot;
pub mod before;
pub mod block;
pub mod budgets;
pub mod chart;
pub mod clones;
pub mod control;
pub mod counts;
pub mod cpu;
pub mod device;
pub mod facts;
pub mod fio;
pub mod isolation;
pub mod load;
pub mod nbd;
pub mod pmem;
pub mod pool_options;
pub mod pump;
pub mod report;
pub mod results;
#[allow(unsafe_code, reason = "hands buffers to the kernel through io_uring")]
pub mod ring;
pub mod snapshot;
pub mod stats;
pub mod syscalls;
pub mod tools;
pub mod ublk;
