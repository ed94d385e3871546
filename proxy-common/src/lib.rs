//! Definitions that Ballast's BPF programs and its agent share: the layout of every map, the names of the maps, the list of
//! [reasons](reason::Reason), and the pure rules that both sides apply (checksums, selection, the prefilter, connection
//! tracking).
//!
//! # The contract
//! * Types are `repr(C)`, have no padding (`abi` checks this at compile time), and every bit pattern is valid.
//! * Addresses are octets as on the wire, so that `bpftool map dump` prints `[10,96,0,1]`.
//! * Ports are `u16` in **host** byte order, so that it prints `80`; programs swap once when they parse.
//! * IPv4 and IPv6 have separate maps, with one generic definition over [`Address`]: `services` and
//!   `services6`, as the kernel has `/proc/net/tcp` and `/proc/net/tcp6`.
//! * Zero means "none" in every id, state and flag.
//!
//! A change of any layout or meaning raises [`version::ABI_VERSION`], which is part of the pin path.
#![no_std]

/// Defines the flags of a word, and the constant of all of them. Two flags that share a bit do not compile.
macro_rules! flags {
    ($(#[$all_doc:meta])* $all:ident { $($(#[$doc:meta])* pub const $name:ident: u32 = $value:expr;)* }) => {
        $($(#[$doc])* pub const $name: u32 = $value;)*
        $(#[$all_doc])*
        pub const $all: u32 = {
            let mut all = 0;
            $(
                assert!($name != 0 && all & $name == 0, "two flags share a bit");
                all |= $name;
            )*
            all
        };
    };
}

pub mod abi;
pub mod affinity;
pub mod backend;
pub mod config;
pub mod connections;
pub mod conntrack;
pub mod crc32c;
pub mod csum;
pub mod decide;
pub mod event;
pub mod family;
pub mod flow;
pub mod fragment;
pub mod health;
pub mod latency;
pub mod maglev;
pub mod map_names;
pub mod name;
pub mod node;
pub mod prefilter;
pub mod reason;
pub mod select;
pub mod service;
pub mod socket;
pub mod source_range;
pub mod stats;
pub mod version;

pub use family::{Address, Family, V4, V6};

/// IP protocol number of ICMP.
pub const PROTO_ICMP: u8 = 1;
/// IP protocol number of IPv4 in IP (RFC 2003).
pub const PROTO_IPIP: u8 = 4;
/// IP protocol number of TCP.
pub const PROTO_TCP: u8 = 6;
/// IP protocol number of UDP.
pub const PROTO_UDP: u8 = 17;
/// IP protocol number of IPv6 in IP (RFC 2473).
pub const PROTO_IPV6: u8 = 41;
/// IP protocol number of ICMPv6.
pub const PROTO_ICMPV6: u8 = 58;
/// IP protocol number of SCTP.
pub const PROTO_SCTP: u8 = 132;
