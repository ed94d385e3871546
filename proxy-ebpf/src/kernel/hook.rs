//! The packet hooks: from a program's context to the pipeline of its family.

use aya_ebpf::programs::{TcContext, XdpContext};
use proxy_common::reason::Reason;
use proxy_common::{PROTO_IPIP, PROTO_IPV6, V4, V6};

use super::handle::{Kernel, Scratch};
use super::maps::CALLS;
use super::skb::Skb;
use super::xdp::Xdp;
use crate::context::PacketCtx;
use crate::early;
use crate::env::{Transition, Words};
use crate::frame::Frame as _;
use crate::net::{ETHERTYPE_IPV4, ETHERTYPE_IPV6};
use crate::pipeline::{self, Ip, Stages};
use crate::report;
use crate::stage::tunnel::{self, Arrived};
use crate::step::{NEXT, Step, StepCode, XDP_DROP, XDP_PASS};

/// What [`transition`] tells: for an upgrade or a downgrade the agent loads the packet programs once more, with another number
/// here. In 64 bits as `LINK_HEADER`.
#[cfg(target_arch = "bpf")]
#[unsafe(no_mangle)]
static TRANSITION: aya_ebpf::Global<u64> = aya_ebpf::Global::new(0);

/// Which part of the work is these programs'.
#[inline(always)]
pub fn transition() -> Transition {
    #[cfg(target_arch = "bpf")]
    {
        match TRANSITION.load() {
            0 => Transition::None,
            1 => Transition::LooksUp,
            2 => Transition::Opens,
            _ => Transition::Yields,
        }
    }
    #[cfg(not(target_arch = "bpf"))]
    {
        Transition::None
    }
}

/// Number of the program of a family in `calls` that works on packets of known flows.
const KNOWN: u32 = 0;
/// The same of the program that has all other stages.
const STAGES: u32 = 2;
/// The same of the program that takes outer headers away.
const TUNNEL: u32 = 4;

/// Ends a packet, or leaves it to the next program, which finds the stage in the context. A tail call is a jump: it costs a third
/// of a call.
#[inline(always)]
fn go_on<F>(context: &TcContext, ctx: &mut PacketCtx<Words<Kernel<F>>>, program: u32, step: Step) -> i32
where
    F: Ip,
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

/// Leaves a packet to a program.
#[inline(always)]
fn call<F>(context: &TcContext, ctx: &mut PacketCtx<Words<Kernel<F>>>, program: u32, step: Step) -> i32
where
    F: Ip,
    Kernel<F>: Stages<Skb, Family = F>,
{
    ctx.step = step.encode();
    // SAFETY: nothing here is to be dropped.
    unsafe { CALLS.tail_call(context, program + F::INDEX) };
    // The program is not there.
    pipeline::finish::<_, Skb>(Kernel::<F>::new(), Step::DropFor(Reason::MapInconsistent))
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

/// A packet that comes in by a device.
#[inline(always)]
pub fn ingress(context: &TcContext) -> i32 {
    let frame = Skb::new(context);
    match frame.ethertype() {
        ETHERTYPE_IPV4 => run!(incoming, V4, context, frame),
        ETHERTYPE_IPV6 => run!(incoming, V6, context, frame),
        _ => NEXT,
    }
}

/// A packet that goes out of a device.
#[inline(always)]
pub fn egress(context: &TcContext) -> i32 {
    let frame = Skb::new(context);
    match frame.ethertype() {
        ETHERTYPE_IPV4 => run!(outgoing, V4, context, frame),
        ETHERTYPE_IPV6 => run!(outgoing, V6, context, frame),
        _ => NEXT,
    }
}

/// A packet that may belong to a flow, from either direction.
#[inline(always)]
pub fn known<F>(context: &TcContext) -> i32
where
    F: Ip,
    Kernel<F>: Stages<Skb, Family = F> + Scratch,
{
    let maps = Kernel::<F>::new();
    let Some(ctx) = maps.scratch() else { return NEXT };
    let step = pipeline::known(maps, Skb::new(context), ctx, Step::decode(ctx.step));
    go_on::<F>(context, ctx, STAGES, step)
}

/// A packet that needs another stage.
#[inline(always)]
pub fn stages<F>(context: &TcContext) -> i32
where
    F: Ip,
    Kernel<F>: Stages<Skb, Family = F> + Scratch,
{
    let maps = Kernel::<F>::new();
    let Some(ctx) = maps.scratch() else { return NEXT };
    pipeline::dispatch(maps, Skb::new(context), ctx, StepCode(ctx.step))
}

/// A packet in a packet, whose outer header is of family `F`.
#[inline(always)]
pub fn tunnel<F>(context: &TcContext) -> i32
where
    F: Ip,
    Kernel<F>: Stages<Skb, Family = F>,
{
    let frame = Skb::new(context);
    let Some(outer) = tunnel::outer(Kernel::<F>::new(), frame) else { return NEXT };
    match outer.header.proto {
        PROTO_IPIP => inner::<F, V4>(context, frame, &outer),
        PROTO_IPV6 => inner::<F, V6>(context, frame, &outer),
        _ => NEXT,
    }
}

/// The same, once the family of the inner header is known.
#[inline(always)]
fn inner<F, I>(context: &TcContext, frame: Skb, outer: &Arrived<F::Words>) -> i32
where
    F: Ip,
    I: Ip,
    Kernel<F>: Stages<Skb, Family = F>,
    Kernel<I>: Stages<Skb, Family = I> + Scratch,
{
    let maps = Kernel::<I>::new();
    let Some(ctx) = maps.scratch() else { return NEXT };
    match tunnel::open(Kernel::<F>::new(), maps, frame, outer, ctx) {
        Step::Tunnelled => call::<I>(context, ctx, STAGES, Step::Tunnelled),
        step => pipeline::finish::<_, Skb>(maps, step),
    }
}

macro_rules! run_early {
    ($family:ty, $frame:expr) => {{
        let maps = Kernel::<$family>::new();
        let step = match maps.scratch() {
            Some(ctx) => early::ingress(maps, $frame, ctx),
            None => Step::Pass,
        };
        match step {
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

/// A frame that the driver of an uplink has received.
#[inline(always)]
pub fn early(context: &XdpContext) -> u32 {
    let frame = Xdp::new(context);
    match frame.ethertype() {
        ETHERTYPE_IPV4 => run_early!(V4, frame),
        ETHERTYPE_IPV6 => run_early!(V6, frame),
        _ => XDP_PASS,
    }
}
