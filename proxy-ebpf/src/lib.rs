//! Ballast's data path, as a library that also builds for the host, so that lints, unit tests and fuzzing cover it.
//!
//! A packet passes through small stages, each in a file of its own ([`pipeline`] shows their order); [`socket`] handles calls
//! on sockets. Dependencies go one way, from the top of this list to its bottom:
//!
//! * `host`: the programs with maps, packets and sockets in ordinary memory, for tests and fuzzing (feature `host`)
//! * [`kernel`]: the interface to the kernel: maps, socket buffers, contexts of socket calls, BPF-to-BPF calls
//! * [`pipeline`], [`early`]: the dispatchers, for tc and for XDP
//! * [`stage`]: the stages of a packet; [`socket`]: the calls on sockets
//! * [`select`], [`flow`], [`report`]: code that they share: selection of backends, connection tracking, counters
//! * [`env`], [`frame`], [`sock`]: the traits by which this code accesses maps, packets and sockets; `calls`: the list of BPF-to-BPF
//!   calls
//! * [`parse`], [`header`], [`net`], [`context`], [`step`], [`shared`]: packet formats, values, shared memory
#![no_std]
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch))]
#![cfg_attr(target_arch = "bpf", expect(unstable_features, reason = "inline assembly for BPF is unstable"))]

#[cfg(all(not(target_arch = "bpf"), any(test, feature = "host")))]
extern crate std;

mod calls;
pub mod context;
pub mod early;
pub mod env;
pub mod flow;
pub mod frame;
pub mod header;
#[cfg(all(not(target_arch = "bpf"), any(test, feature = "host")))]
pub mod host;
// For the host, only with its unit tests: code that runs on the host must not use it.
#[cfg(any(target_arch = "bpf", test))]
pub mod kernel;
pub mod net;
pub mod parse;
pub mod pipeline;
pub mod report;
pub mod select;
pub mod shared;
pub mod sock;
pub mod socket;
pub mod stage;
pub mod step;
