//! What the routes of a new flow, and the node's settings, decide about its source and its replies.
//!
//! With SNAT, the source is an address of the device by which the packets leave, as netfilter's MASQUERADE chooses it. An
//! endpoint behind an overlay or an isolated network may have no way back to any other address of the node.
//!
//! Without SNAT, the stack routes the replies by the endpoint's address. If the rules for routes send them to another device
//! than the request arrived on (a second uplink with routes for some pods), they would leave it with an address of the wrong
//! network, and its source check would drop them.
//!
//! Nodes without such devices, rules and settings never run this stage.

use proxy_common::backend::BACKEND_LOCAL;
use proxy_common::config::{CONFIG_MASQUERADE_EXTERNAL, CONFIG_POLICY_ROUTES, CONFIG_SOURCES};
use proxy_common::decide;
use proxy_common::flow::{STATE_DSR, STATE_MASQUERADE, STATE_SNAT, rerouted};

use super::forward::Routing;
use crate::context::{PacketCtx, Tuple};
use crate::env::Words;
use crate::frame::Frame;

/// The flags of which one is set if this stage has anything to do.
pub const NEEDED: u32 = CONFIG_SOURCES | CONFIG_POLICY_ROUTES | CONFIG_MASQUERADE_EXTERNAL;

/// The client's packet arrived on an uplink. This and [`OUTSIDE`] are combined with [`BACKEND_LOCAL`].
pub const BY_UPLINK: u32 = 1 << 30;
/// The client is outside.
pub const OUTSIDE: u32 = 1 << 31;

const _: () = assert!(BACKEND_LOCAL & (BY_UPLINK | OUTSIDE) == 0);

/// Completes the plan of a new flow: the source address of a flow with SNAT,
/// [`STATE_REROUTE`](proxy_common::flow::STATE_REROUTE) and [`STATE_MASQUERADE`].
/// `ends` tells where client and endpoint are ([`BY_UPLINK`], [`OUTSIDE`], [`BACKEND_LOCAL`]).
#[inline(always)]
pub fn choose<M: Routing<F>, F: Frame>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>, ends: u32) {
    let (Some(node), Some(config)) = (maps.node(), maps.config()) else { return };
    let (client, backend) = (ctx.packet.key.src, ctx.plan.reply.src);
    let is_snat = ctx.plan.bits & STATE_SNAT != 0;
    // The route of a packet with SNAT is that of the client's packet, as with netfilter, which routes before it translates
    // the source.
    let (src, dst) = if is_snat { (client, backend) } else { (backend, client) };
    if is_snat {
        if config.flags & CONFIG_SOURCES == 0 {
            return;
        }
    } else if ctx.plan.bits & STATE_DSR != 0 || ends & BY_UPLINK == 0 {
        return;
    } else {
        if decide::netfilter_masquerades(&ctx.frontend, true, ends & OUTSIDE != 0, config.flags) {
            ctx.plan.bits |= STATE_MASQUERADE;
        }
        if config.flags & CONFIG_POLICY_ROUTES == 0 || ends & BACKEND_LOCAL == 0 {
            return;
        }
    }
    ctx.other = Tuple { src, dst, src_port: 0, dst_port: 0 };
    if !maps.find_route(frame, &ctx.other, 0, &mut ctx.route).is_route() {
        return;
    }
    if is_snat {
        ctx.plan.reply.dst = node.source_of(ctx.route.ifindex);
    } else if ctx.route.ifindex != frame.ifindex() {
        ctx.plan.bits |= rerouted(frame.ifindex());
    }
}
