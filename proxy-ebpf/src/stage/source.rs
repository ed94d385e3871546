//! What the routes of a new flow decide.
//!
//! With SNAT, the source is an address of the device by which the packets leave, as netfilter's MASQUERADE chooses it. An
//! endpoint behind an overlay or an isolated network may have no way back to any other address of the node.
//!
//! Without SNAT, the stack routes the replies by the endpoint's address. If the rules for routes send them to another device
//! than the request arrived on (a second uplink with routes for some pods), they would leave it with an address of the wrong
//! network, and its source check would drop them.

use proxy_common::flow::{STATE_REROUTE, STATE_SNAT};

use super::forward::Routing;
use crate::context::{PacketCtx, Tuple};
use crate::env::Words;
use crate::frame::{Fib, Frame};

/// Sets the source address in the plan, or [`STATE_REROUTE`]. The route is that of the client's packet, as with netfilter,
/// which routes before it translates the source.
#[inline(always)]
pub fn choose<M, F>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>)
where
    M: Routing<F>,
    F: Frame,
{
    let Some(node) = maps.node() else { return };
    let (client, backend) = (ctx.packet.key.src, ctx.plan.reply.src);
    let is_snat = ctx.plan.bits & STATE_SNAT != 0;
    let (src, dst) = if is_snat { (client, backend) } else { (backend, client) };
    let of = Tuple { src, dst, src_port: 0, dst_port: 0 };
    if maps.find_route(frame, &of, 0, &mut ctx.route) == Fib::NoRoute {
        return;
    }
    if is_snat {
        ctx.plan.reply.dst = node.source_of(ctx.route.ifindex);
    } else if ctx.route.ifindex != frame.ifindex() {
        ctx.plan.bits |= STATE_REROUTE;
    }
}
