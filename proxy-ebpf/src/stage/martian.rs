//! Sources that no client can have. A packet that is forwarded under an address of this node bypasses the stack, and with
//! it the kernel's own check (`fib_validate_source`): without this stage, SNAT would hide a spoofed source.

use proxy_common::decide;
use proxy_common::node::NODE_ADDR_OWN;

use super::forward::Routing;
use crate::context::{PacketCtx, Tuple};
use crate::env::Words;
use crate::frame::{Fib, Frame};

/// Whether the source of a packet that arrived on a device cannot be a client's: a martian address, an address of this
/// node, or, on an uplink, a pod's address whose route leads to no uplink. The way back may be another uplink, with routes of
/// several next hops.
#[inline(always)]
pub fn is_martian<M, F>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>, by_uplink: bool) -> bool
where
    M: Routing<F>,
    F: Frame,
{
    let source = &ctx.packet.key.src;
    if decide::is_martian(source) || maps.node_addr(source) & NODE_ADDR_OWN != 0 {
        return true;
    }
    // At an early hook, packets of pods have passed before this check.
    if F::EARLY || !by_uplink || !maps.node().is_some_and(|node| node.pods.contains(source)) {
        return false;
    }
    ctx.other = Tuple { src: ctx.packet.key.dst, dst: *source, src_port: 0, dst_port: 0 };
    // `TooBig` is a route, too: only the device of the way back matters.
    let found = maps.find_route(frame, &ctx.other, 0, &mut ctx.route);
    let by = ctx.route.ifindex;
    let is_uplink =
        || maps.config().is_some_and(|config| config.is_uplink(by, |ifindex| maps.device(ifindex)));
    // The kernel does not check the source of a packet that arrived encrypted, either.
    found == Fib::NoRoute || by != frame.ifindex() && !ctx.route.is_by_stack() && !is_uplink()
}
