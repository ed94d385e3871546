//! The packet programs on the host: the stages as they run in the kernel, over packets and maps in memory of our own. For
//! tests and fuzzing.
//!
//! ```ignore
//! let maps = HostMaps::<V4>::leak();          // once for a process; `clear` before each case
//! let packet = HostPacket::new(&bytes);       // an Ethernet frame; fields say the rest
//! let verdict = run(Hook::Ingress, maps, packet.frame());
//! ```

pub mod frame;
pub mod maps;
mod setup;
mod skb;

use proxy_common::{V4, V6};

pub use frame::HostFrame;
pub use maps::HostMaps;
pub use skb::{ChecksumState, HostPacket, Redirect, RouteTo, Routes, Skb};

use crate::frame::Frame as _;
use crate::net::{ETHERTYPE_IPV4, ETHERTYPE_IPV6};
use crate::pipeline::{self, Ip};
use crate::step::NEXT;

/// `TC_ACT_REDIRECT`.
pub const REDIRECT: i32 = 7;

/// A tc hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// The packet comes in by the device.
    Ingress,
    /// It goes out of it.
    Egress,
}

/// Runs the program of a hook over a packet of the maps' family. Gives its verdict.
pub fn run<F: Ip>(hook: Hook, maps: HostMaps<F>, frame: HostFrame<'_>) -> i32 {
    maps.with_scratch(|ctx| match hook {
        Hook::Ingress => pipeline::ingress(maps, frame, ctx),
        Hook::Egress => pipeline::egress(maps, frame, ctx),
    })
}

/// The same for a packet of either family, as the kernel's programs do it; others pass.
pub fn run_any(hook: Hook, v4: HostMaps<V4>, v6: HostMaps<V6>, frame: HostFrame<'_>) -> i32 {
    match frame.ethertype() {
        ETHERTYPE_IPV4 => run(hook, v4, frame),
        ETHERTYPE_IPV6 => run(hook, v6, frame),
        _ => NEXT,
    }
}

#[cfg(test)]
mod tests;
