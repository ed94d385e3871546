//! The packet hooks: each calls the pipeline of the packet's family with the program's context.

use aya_ebpf::bindings::xdp_md;
use aya_ebpf::programs::{TcContext, XdpContext};
use proxy_common::reason::Reason;
use proxy_common::{PROTO_IPIP, PROTO_IPV6, V4, V6};

use super::handle::{Kernel, Scratch};
use super::maps::CALLS;
use super::skb::Skb;
use super::xdp::Xdp;
use crate::context::PacketCtx;
use crate::early;
use crate::env::{Node, Words};
use crate::frame::Frame as _;
use crate::net::{ETHERNET, ETHERTYPE_IPV4, ETHERTYPE_IPV6, ETHERTYPES_VLAN, VLAN_ID};
use crate::pipeline::{self, Ip, Stages};
use crate::report;
use crate::stage::tunnel::{self, Arrived};
use crate::step::{NEXT, Step, StepCode, XDP_DROP, XDP_PASS};

/// Whether the programs begin flows. To hand a node over to other rules, the agent loads the packet programs a second time,
/// with 0. 64 bits wide for the reason given at `LINK_HEADER`.
#[cfg(target_arch = "bpf")]
#[unsafe(no_mangle)]
static OPENS_FLOWS: aya_ebpf::Global<u64> = aya_ebpf::Global::new(1);

/// Whether these programs begin flows.
#[inline(always)]
pub fn opens_flows() -> bool {
    #[cfg(target_arch = "bpf")]
    {
        OPENS_FLOWS.load() != 0
    }
    #[cfg(not(target_arch = "bpf"))]
    {
        true
    }
}

/// Index in `calls` of the program that processes packets of existing flows. The index of the family is added, here and
/// below.
const KNOWN: u32 = 0;
/// Index in `calls` of the program that runs all other stages.
const STAGES: u32 = 2;
/// Index in `calls` of the program that removes outer headers.
const TUNNEL: u32 = 4;

/// Returns the verdict on a packet, or tail-calls the next program, which finds the step in the context. A tail call is a
/// jump: it costs a third of a BPF-to-BPF call.
#[inline(always)]
fn go_on<F: Ip>(context: &TcContext, ctx: &mut PacketCtx<Words<Kernel<F>>>, program: u32, step: Step) -> i32
where
    Kernel<F>: Stages<Skb, Family = F>,
{
    match step {
        Step::Pass | Step::Drop | Step::DropFor(_) | Step::Sent(_) => {
            pipeline::finish::<_, Skb>(Kernel::<F>::new(), step)
        }
        Step::Tunnel => call::<F>(context, ctx, TUNNEL, step),
        step => call::<F>(context, ctx, program, step),
    }
}

/// Tail-calls a program for the packet.
#[inline(always)]
fn call<F: Ip>(context: &TcContext, ctx: &mut PacketCtx<Words<Kernel<F>>>, program: u32, step: Step) -> i32
where
    Kernel<F>: Stages<Skb, Family = F>,
{
    ctx.step = step.encode();
    // SAFETY: no local value needs to be dropped.
    unsafe { CALLS.tail_call(context, program + F::INDEX) };
    // The tail call failed: the program is missing from `calls`. ICMPv6 has neighbour discovery, without which the node is cut off.
    let step = if step == Step::Icmp { Step::Pass } else { Step::DropFor(Reason::MapInconsistent) };
    pipeline::finish::<_, Skb>(Kernel::<F>::new(), step)
}

macro_rules! run {
    ($part:ident, $family:ty, $context:expr, $frame:expr) => {{
        let maps = Kernel::<$family>::new();
        match maps.scratch() {
            Some(ctx) => {
                let step = pipeline::$part(maps, $frame, ctx);
                go_on::<$family>($context, ctx, KNOWN, step)
            }
            None => NEXT,
        }
    }};
}

/// Processes a packet that arrives on a device.
#[inline(always)]
pub fn ingress(context: &TcContext) -> i32 {
    let frame = Skb::new(context);
    match frame.ethertype() {
        ETHERTYPE_IPV4 => run!(incoming, V4, context, frame),
        ETHERTYPE_IPV6 => run!(incoming, V6, context, frame),
        _ if has_hidden_packet(frame) => {
            pipeline::finish::<_, Skb>(Kernel::<V4>::new(), Step::DropFor(Reason::HiddenPorts))
        }
        _ => NEXT,
    }
}

/// Whether a frame has two VLAN tags, both of VLAN 0. The kernel has removed the first one, and removes the second one after this
/// hook (`__netif_receive_skb_core`): it would receive a packet that no program has seen.
#[inline(always)]
fn has_hidden_packet(frame: Skb) -> bool {
    let [first, second] = ETHERTYPES_VLAN;
    let mut tag = 0u16;
    (frame.ethertype() == first || frame.ethertype() == second)
        && frame.has_priority_tag()
        && frame.load(ETHERNET as u32, &mut tag, size_of::<u16>() as u32).is_ok()
        && u32::from(u16::from_be(tag)) & VLAN_ID == 0
}

/// Processes a packet that leaves on a device.
#[inline(always)]
pub fn egress(context: &TcContext) -> i32 {
    let frame = Skb::new(context);
    match frame.ethertype() {
        ETHERTYPE_IPV4 => run!(outgoing, V4, context, frame),
        ETHERTYPE_IPV6 => run!(outgoing, V6, context, frame),
        _ => NEXT,
    }
}

/// Processes a packet that may belong to a flow, in either direction.
#[inline(always)]
pub fn known<F: Ip>(context: &TcContext) -> i32
where
    Kernel<F>: Stages<Skb, Family = F> + Scratch,
{
    let maps = Kernel::<F>::new();
    let Some(ctx) = maps.scratch() else { return NEXT };
    let step = pipeline::known(maps, Skb::new(context), ctx, Step::decode(ctx.step));
    go_on::<F>(context, ctx, STAGES, step)
}

/// Runs the remaining stages for a packet.
#[inline(always)]
pub fn stages<F: Ip>(context: &TcContext) -> i32
where
    Kernel<F>: Stages<Skb, Family = F> + Scratch,
{
    let maps = Kernel::<F>::new();
    let Some(ctx) = maps.scratch() else { return NEXT };
    pipeline::dispatch(maps, Skb::new(context), ctx, StepCode(ctx.step))
}

/// Processes an encapsulated packet whose outer header is of family `F`.
#[inline(always)]
pub fn tunnel<F: Ip>(context: &TcContext) -> i32
where
    Kernel<F>: Stages<Skb, Family = F>,
{
    let frame = Skb::new(context);
    let maps = Kernel::<F>::new();
    let outer = match tunnel::outer(maps, frame) {
        Ok(outer) => outer,
        Err(step) => return pipeline::finish::<_, Skb>(maps, step),
    };
    match outer.header.proto {
        PROTO_IPIP => inner::<F, V4>(context, frame, &outer),
        PROTO_IPV6 => inner::<F, V6>(context, frame, &outer),
        _ => NEXT,
    }
}

/// Processes an encapsulated packet whose inner header is of family `I`.
#[inline(always)]
fn inner<F: Ip, I: Ip>(context: &TcContext, frame: Skb, outer: &Arrived<F::Words>) -> i32
where
    Kernel<F>: Stages<Skb, Family = F>,
    Kernel<I>: Stages<Skb, Family = I> + Scratch,
{
    let maps = Kernel::<I>::new();
    let Some(ctx) = maps.scratch() else { return NEXT };
    match tunnel::decapsulate(Kernel::<F>::new(), maps, frame, outer, ctx) {
        Step::Tunnelled => call::<I>(context, ctx, STAGES, Step::Tunnelled),
        step => pipeline::finish::<_, Skb>(maps, step),
    }
}

/// Removes the outer header, of family `F`, of an encapsulated frame.
#[inline(always)]
fn take_out<F: Ip>(frame: Xdp) -> Step
where
    Kernel<F>: Node<Family = F>,
{
    let maps = Kernel::<F>::new();
    match tunnel::outer(maps, frame) {
        Ok(outer) => match outer.header.proto {
            PROTO_IPIP => tunnel::decapsulate_early(maps, Kernel::<V4>::new(), frame, &outer),
            PROTO_IPV6 => tunnel::decapsulate_early(maps, Kernel::<V6>::new(), frame, &outer),
            _ => Step::Pass,
        },
        Err(step) => step,
    }
}

/// Subprogram for [`take_out`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn xdp_take_out4(frame: *mut xdp_md) -> u32 {
    take_out::<V4>(Xdp::from_raw(frame)).encode()
}

/// Subprogram for [`take_out`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn xdp_take_out6(frame: *mut xdp_md) -> u32 {
    take_out::<V6>(Xdp::from_raw(frame)).encode()
}

macro_rules! run_early {
    ($family:ty, $frame:expr, $take_out:expr) => {{
        let maps = Kernel::<$family>::new();
        let step = match maps.scratch() {
            Some(ctx) => early::ingress(maps, $frame, ctx),
            None => Step::Pass,
        };
        match if step == Step::Tunnel { $take_out } else { step } {
            Step::Sent(verdict) => verdict.cast_unsigned(),
            Step::Drop => XDP_DROP,
            Step::DropFor(reason) => {
                report::reason(maps, reason);
                XDP_DROP
            }
            _ => XDP_PASS,
        }
    }};
}

/// Processes a frame that the driver of an uplink has received (XDP). `generic`: with a socket buffer, whose sum over the packet
/// (`CHECKSUM_COMPLETE`) is not corrected when an outer header is removed. The sum over an IPv4 header is zero.
#[inline(always)]
pub fn early(context: &XdpContext, generic: bool) -> u32 {
    let frame = Xdp::new(context);
    match frame.ethertype() {
        ETHERTYPE_IPV4 => run_early!(V4, frame, Step::decode(xdp_take_out4(frame.raw()))),
        ETHERTYPE_IPV6 if generic => run_early!(V6, frame, Step::Pass),
        ETHERTYPE_IPV6 => run_early!(V6, frame, Step::decode(xdp_take_out6(frame.raw()))),
        _ => XDP_PASS,
    }
}
