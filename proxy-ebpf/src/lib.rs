//! Ballast's data path, as a library that also builds for the host, so that lints, unit tests and fuzzing reach it.
//!
//! A packet goes through small stages, each in a file of its own ([`pipeline`] has the picture); a call on a socket through
//! [`socket`]. Dependencies go one way, from the top of this list to its bottom:
//!
//! * `host`: the packet programs over maps and packets in memory, for tests and fuzzing (feature `host`)
//! * [`kernel`]: programs' side of the kernel: maps, socket buffers, BPF-to-BPF calls
//! * [`pipeline`], [`early`]: the dispatchers, of tc and of XDP
//! * [`stage`]: what is done to a packet
//! * [`select`], [`flow`], [`report`]: what stages share: backends, connection tracking, counting
//! * [`env`], [`frame`]: what they ask of maps and packets, as traits
//! * [`parse`], [`header`], [`net`], [`context`], [`step`], [`shared`]: formats, values, memory
#![no_std]
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch))]
#![cfg_attr(target_arch = "bpf", expect(unstable_features, reason = "inline assembly for BPF is unstable"))]

#[cfg(all(not(target_arch = "bpf"), any(test, feature = "host")))]
extern crate std;

pub mod context;
#[cfg(all(not(target_arch = "bpf"), any(test, feature = "host")))]
mod direct_calls;
pub mod early;
pub mod env;
pub mod flow;
pub mod frame;
pub mod header;
#[cfg(all(not(target_arch = "bpf"), any(test, feature = "host")))]
pub mod host;
pub mod kernel;
pub mod net;
pub mod parse;
pub mod pipeline;
pub mod report;
pub mod select;
pub mod shared;
pub mod socket;
pub mod stage;
pub mod step;
