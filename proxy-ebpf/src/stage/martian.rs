//! Sources that no client can have. A packet that is forwarded under an address of this node bypasses the stack, and with
//! it the kernel's own check (`fib_validate_source`): without this stage, SNAT would hide a spoofed source.

use proxy_common::config::{CONFIG_IPSEC, CONFIG_POLICY_ROUTES, NodeConfig};
use proxy_common::flow::{STATE_DSR, STATE_LOCAL, STATE_SNAT};
use proxy_common::node::{DEVICE_GUEST, NODE_ADDR_OWN};
use proxy_common::{Address as _, decide};

use super::forward::Routing;
use crate::context::PacketCtx;
use crate::env::Words;
use crate::frame::Frame;

/// Whether the source of a packet that arrived on a device cannot be a client's: a martian address, an address of this
/// node, an address of another device ([`is_of_another_device`]), or a link-local one that is about to leave its link.
#[inline(always)]
pub fn is_martian<M, F>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>, by_uplink: bool) -> bool
where
    M: Routing<F>,
    F: Frame,
{
    let source = &ctx.packet.key.src;
    let leaves = ctx.plan.bits & (STATE_SNAT | STATE_DSR) != 0;
    if decide::is_martian(source)
        || maps.node_addr(source) & NODE_ADDR_OWN != 0
        || leaves && decide::is_link_local(source)
    {
        return true;
    }
    // At an early hook, packets of pods have passed before this check.
    if F::EARLY || by_uplink && !maps.node().is_some_and(|node| node.pods.contains(source)) {
        return false;
    }
    maps.is_of_another_device(frame, ctx, by_uplink)
}

/// Whether a packet of a flow with these bits is forwarded under an address of this node, and was sent by a container with an
/// address that is not its own.
#[inline(always)]
pub fn is_forged<M: Routing<F>, F: Frame>(
    maps: M,
    frame: F,
    ctx: &mut PacketCtx<Words<M>>,
    bits: u32,
    config: &NodeConfig,
) -> bool {
    !F::EARLY
        && bits & (STATE_SNAT | STATE_LOCAL) == STATE_SNAT
        && !config.is_uplink(frame.ifindex(), |ifindex| maps.device(ifindex))
        && maps.is_of_another_device(frame, ctx, false)
}

/// Whether the route to the packet's source tells that another device should have received it.
///
/// On an uplink, the route has to lead to an uplink: the way back may be another one, with routes of several next hops. On a
/// container's device, it may lead to neither an uplink nor another container's device; all other devices may have several
/// ways back. It does not distinguish pods behind one bridge, nor does `rp_filter`.
#[inline(always)]
pub fn is_of_another_device<M, F>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>, by_uplink: bool) -> bool
where
    M: Routing<F>,
    F: Frame,
{
    let Some(config) = maps.config() else { return false };
    if !by_uplink && maps.device(frame.arrival()) & DEVICE_GUEST == 0 {
        return false;
    }
    // One field after the other: the compiler would build a tuple on the BPF stack, which has no room for it.
    ctx.other.src = ctx.packet.key.dst;
    if config.flags & (CONFIG_POLICY_ROUTES | CONFIG_IPSEC) == CONFIG_POLICY_ROUTES {
        // The stack would compare the rules for routes with the translated address, never with this one.
        ctx.other.src = Words::<M>::ZERO;
    }
    ctx.other.dst = ctx.packet.key.src;
    // `TooBig` is a route, too: only the device of the way back matters.
    if !maps.find_route(frame, &ctx.other, 0, &mut ctx.route).is_route() {
        return true;
    }
    let by = ctx.route.ifindex;
    // The kernel does not check the source of a packet that arrived encrypted, either.
    if by == frame.arrival() || ctx.route.is_by_stack() {
        return false;
    }
    let device = maps.device(by);
    let leads_to_uplink = config.is_uplink(by, |_| device);
    if by_uplink { !leads_to_uplink } else { leads_to_uplink || device & DEVICE_GUEST != 0 }
}
