//! The packet and socket programs on the host, for tests and fuzzing: the same code as in the kernel, with packets, sockets and
//! maps in ordinary memory.
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
pub mod sock;

use proxy_common::{PROTO_IPIP, PROTO_IPV6, V4, V6};

pub use frame::HostFrame;
pub use maps::HostMaps;
pub use skb::{ChecksumState, HostPacket, Redirect, RouteTo, Routes, Skb};

use crate::context::PacketCtx;
use crate::early;
use crate::frame::Frame as _;
use crate::net::{ETHERTYPE_IPV4, ETHERTYPE_IPV6};
use crate::pipeline::{self, Ip};
use crate::stage::tunnel::{self, Arrived};
use crate::step::{NEXT, Step};

/// `TC_ACT_REDIRECT`.
pub const REDIRECT: i32 = 7;

/// A tc hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// The packet arrives on the device.
    Ingress,
    /// The packet leaves by the device.
    Egress,
}

/// Runs the program of a hook with a packet of the maps' family. Returns the program's verdict. Encapsulated packets pass,
/// since the inner packet may be of the other family (see [`run_any`]).
pub fn run<F: Ip>(hook: Hook, maps: HostMaps<F>, frame: HostFrame<'_>) -> i32 {
    maps.with_scratch(|ctx| {
        let step = first(hook, maps, frame, ctx);
        go_on(maps, frame, ctx, step)
    })
}

/// Runs the first stage of the hook.
fn first<F: Ip>(hook: Hook, maps: HostMaps<F>, frame: HostFrame<'_>, ctx: &mut PacketCtx<F::Words>) -> Step {
    match hook {
        Hook::Ingress => pipeline::incoming(maps, frame, ctx),
        Hook::Egress => pipeline::outgoing(maps, frame, ctx),
    }
}

/// Runs all stages after the first. In the kernel, these are two programs.
fn go_on<F: Ip>(maps: HostMaps<F>, frame: HostFrame<'_>, ctx: &mut PacketCtx<F::Words>, step: Step) -> i32 {
    let step = pipeline::known(maps, frame, ctx, step);
    pipeline::dispatch(maps, frame, ctx, step.into())
}

/// Does the same for a packet of either family, as the kernel's programs do; packets of other protocols pass.
pub fn run_any(hook: Hook, v4: HostMaps<V4>, v6: HostMaps<V6>, frame: HostFrame<'_>) -> i32 {
    match frame.ethertype() {
        ETHERTYPE_IPV4 => run_either(hook, v4, (v4, v6), frame),
        ETHERTYPE_IPV6 => run_either(hook, v6, (v4, v6), frame),
        _ => NEXT,
    }
}

/// The maps of both families.
type Both = (HostMaps<V4>, HostMaps<V6>);

fn run_either<F: Ip>(hook: Hook, maps: HostMaps<F>, both: Both, frame: HostFrame<'_>) -> i32 {
    match maps.with_scratch(|ctx| first(hook, maps, frame, ctx)) {
        Step::Tunnel => take_out(maps, both, frame),
        step => maps.with_scratch(|ctx| go_on(maps, frame, ctx, step)),
    }
}

/// Runs the program for encapsulated packets.
fn take_out<F: Ip>(outer_maps: HostMaps<F>, (v4, v6): Both, frame: HostFrame<'_>) -> i32 {
    let outer = match tunnel::outer(outer_maps, frame) {
        Ok(outer) => outer,
        Err(step) => return pipeline::finish::<_, HostFrame<'_>>(outer_maps, step),
    };
    match outer.header.proto {
        PROTO_IPIP => inner(outer_maps, v4, frame, &outer),
        PROTO_IPV6 => inner(outer_maps, v6, frame, &outer),
        _ => NEXT,
    }
}

fn inner<F: Ip, I: Ip>(
    outer_maps: HostMaps<F>,
    maps: HostMaps<I>,
    frame: HostFrame<'_>,
    outer: &Arrived<F::Words>,
) -> i32 {
    maps.with_scratch(|ctx| match tunnel::decapsulate(outer_maps, maps, frame, outer, ctx) {
        Step::Tunnelled => pipeline::dispatch(maps, frame, ctx, Step::Tunnelled.into()),
        step => pipeline::finish::<_, HostFrame<'_>>(maps, step),
    })
}

/// Runs the program of the early hook with a packet of the maps' family. Returns the program's verdict; [`NEXT`]: the packet
/// continues to tc. Encapsulated packets continue unchanged (see [`run_any_early`]).
pub fn run_early<F: Ip>(maps: HostMaps<F>, frame: HostFrame<'_, true>) -> i32 {
    let step = maps.with_scratch(|ctx| early::ingress(maps, frame, ctx));
    early_verdict(maps, step)
}

/// Does the same for a packet of either family; packets of other protocols pass.
pub fn run_any_early(v4: HostMaps<V4>, v6: HostMaps<V6>, frame: HostFrame<'_, true>) -> i32 {
    match frame.ethertype() {
        ETHERTYPE_IPV4 => run_either_early(v4, (v4, v6), frame),
        ETHERTYPE_IPV6 => run_either_early(v6, (v4, v6), frame),
        _ => NEXT,
    }
}

fn run_either_early<F: Ip>(maps: HostMaps<F>, (v4, v6): Both, frame: HostFrame<'_, true>) -> i32 {
    let step = match maps.with_scratch(|ctx| early::ingress(maps, frame, ctx)) {
        Step::Tunnel => match tunnel::outer(maps, frame) {
            Ok(outer) => match outer.header.proto {
                PROTO_IPIP => tunnel::decapsulate_early(maps, v4, frame, &outer),
                PROTO_IPV6 => tunnel::decapsulate_early(maps, v6, frame, &outer),
                _ => Step::Pass,
            },
            Err(step) => step,
        },
        step => step,
    };
    frame.after_early_hook();
    early_verdict(maps, step)
}

fn early_verdict<F: Ip>(maps: HostMaps<F>, step: Step) -> i32 {
    match step {
        Step::Sent(_) | Step::Drop | Step::DropFor(_) => pipeline::finish::<_, HostFrame<'_>>(maps, step),
        _ => NEXT,
    }
}

#[cfg(test)]
mod tests;
