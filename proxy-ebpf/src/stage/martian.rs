//! Sources that no client can have. A packet that is forwarded under an address of this node passes the stack by, and with
//! it the kernel's own check (`fib_validate_source`): without this stage, a spoofed source would be laundered.

use proxy_common::decide;
use proxy_common::node::NODE_ADDR_OWN;

use super::forward::Routing;
use crate::context::{PacketCtx, Tuple};
use crate::env::Words;
use crate::frame::{Fib, Frame};

/// Whether the source of a packet that came in by a device cannot be a client's: a martian address, one of this node's own, or
/// a pod's where the route to it does not lead back over the uplink that the packet came in by.
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
    // An early hook gets here with no pod's.
    if F::EARLY || !by_uplink || !maps.node().is_some_and(|node| node.pods.contains(source)) {
        return false;
    }
    let back = Tuple { src: ctx.packet.key.dst, dst: *source, src_port: 0, dst_port: 0 };
    // A packet that is too big for the way back has one.
    let found = maps.find_route(frame, &back, 0, &mut ctx.route);
    found == Fib::NoRoute || ctx.route.ifindex != frame.ifindex()
}
