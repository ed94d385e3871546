//! Ballast's data path, as a library that also builds for the host, so that lints and unit tests reach it.
//!
//! A packet or a call goes through small stages, each in a file of its own:
//!
//! ```text
//! hook::tc      packet -> (maps: filter) -> flow -> lookup -> affinity, balance -> nat -> route -> report
//!                  \-> icmp                            \-> reject
//! hook::socket  sockaddr -> (maps: filter) -> lookup -> affinity, balance -> (maps: sockets) -> report
//! hook::bind    sockaddr -> lookup -> report
//! ```
//!
//! Stages return `Result<_, Reason>`; the hook turns the [`Reason`](proxy_common::reason::Reason) into the
//! verdict of its kind, and `report` counts it. "Not ours" is never an error and always passes.
#![no_std]
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch))]
#![cfg_attr(target_arch = "bpf", expect(unstable_features, reason = "inline assembly for BPF is unstable"))]

pub mod affinity;
pub mod atomic;
pub mod balance;
pub mod flow;
pub mod hook {
    //! The order of the stages at each kind of hook.
    mod acts;
    mod begin;
    mod beyond;
    pub mod bind;
    pub mod clock;
    pub mod socket;
    pub mod tc;
}
pub mod fragment;
pub mod header;
pub mod icmp;
pub mod lookup;
pub mod maps;
pub mod nat;
pub mod net;
pub mod packet;
pub mod reject;
pub mod report;
pub mod route;
pub mod sctp;
pub mod skb;
pub mod sockaddr;
