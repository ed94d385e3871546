//! Packets of flows that exist: translated by the flow's entry, in both directions.

use core::mem::swap;

use proxy_common::conntrack::{SEEN_REPLY, is_closed, is_watched, tcp};
use proxy_common::flow::{
    DIRECTION_FORWARD, DIRECTION_REPLY, FlowKey, STATE_DIRECT, STATE_LOCAL, STATE_SNAT, STATE_SYN, tunnel_of,
};
use proxy_common::reason::Reason;
use proxy_common::{PROTO_SCTP, PROTO_TCP};

use super::classify;
use super::eject;
use super::forward::{self, Routing};
use super::translate::{self, Hop, Rewrite};
use crate::context::{NO_HASH, Packet, PacketCtx, TUNNELLED_AGAIN, Tuple};
use crate::env::{Counters, FlowTable, Time, Transition, Words};
use crate::flow::track::{self, Tracked, is_syn};
use crate::frame::{Fib, Frame};
use crate::header::same;
use crate::net::{tcp as tcp_header, udp};
use crate::report;
use crate::step::Step;

/// Which look at the flow it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// The first one.
    First,
    /// The flow exists: it has just begun, or its reply key was repaired.
    Again,
}

/// A client's packet that may belong to a flow.
///
/// A segment that asks for a connection mostly has no flow yet: it is looked for only if the new one finds its key taken.
#[inline(always)]
pub fn established<M, F>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>, look: Look) -> Step
where
    M: FlowTable + Counters + Routing<F>,
    M::Family: Rewrite,
    F: Frame,
{
    let Some(time) = maps.time() else { return Step::Pass };
    // Packets of others do not pay for the VLAN.
    if frame.has_vlan_tag() {
        return Step::Pass;
    }
    if look == Look::First && is_syn(ctx.packet.tcp_flags) && maps.transition() != Transition::LooksUp {
        ctx.hash = NO_HASH;
        return without_flow(maps, ctx);
    }
    ctx.hash = time.hash(&ctx.packet.key);
    let found = if F::EARLY {
        track::find_untouched(maps, &ctx.packet.key, ctx.hash, time)
    } else {
        track::find(maps, &ctx.packet.key, ctx.hash, time)
    };
    let Some(flow) = found else { return without_flow(maps, ctx) };
    // A SYN was compared with the Service that it is for.
    // What was encapsulated twice is not encapsulated again: nodes that differ would send it to and fro.
    let goes_back = !F::EARLY && tunnel_of(flow.bits()) != 0 && ctx.tunnelled & TUNNELLED_AGAIN != 0;
    let continues = !goes_back && flow.continues(ctx.packet.tcp_flags, flow.service(), time);
    if !continues || flow.is_looked_at(time) && !is_frontend_of(maps, ctx, flow.service()) {
        if F::EARLY {
            return Step::Pass;
        }
        if !goes_back && flow.is_to_be_reset(ctx.packet.tcp_flags) {
            ctx.service = flow.service();
            return Step::Reset;
        }
        flow.expire(time);
        return without_flow(maps, ctx);
    }
    if look == Look::First && flow.has_lost_reply_key(time) {
        return Step::RepairReplyKey;
    }
    if F::EARLY && !can_forward(maps, frame, ctx, flow.bits(), flow.to_backend()) {
        return Step::Pass;
    }
    touch(maps, &flow, ctx, DIRECTION_FORWARD, time);
    // A connection of this node's own has Service 0, which no one is shown, and stays as it is: a branch here is one for each packet.
    report::forwarded(maps, flow.service(), ctx.packet.length);
    match flow.to_backend() {
        Some(to) if F::EARLY || flow.bits() & STATE_SNAT != 0 => forward_to(maps, frame, ctx, &to),
        Some(to) if tunnel_of(flow.bits()) != 0 => {
            ctx.plan.reply.src = to.dst;
            ctx.plan.reply.src_port = to.dst_port;
            ctx.plan.bits = flow.bits();
            Step::Encapsulate
        }
        Some(to) => deliver::<F, M::Family>(frame, ctx, &to),
        // Evicted since it was found.
        None => without_flow(maps, ctx),
    }
}

/// Whether the Service still has the frontend that the packet goes to. Its two scopes are of one Service.
#[inline(always)]
fn is_frontend_of<M: FlowTable>(maps: M, ctx: &mut PacketCtx<Words<M>>, service: u32) -> bool {
    maps.packet_frontend(ctx, false);
    ctx.frontend.id == service
}

/// A packet to a frontend that belongs to no flow of a client. A set bit of the prefilter may be another tuple's: it says
/// nothing against a reply.
#[inline(always)]
fn without_flow<M: FlowTable>(maps: M, ctx: &PacketCtx<Words<M>>) -> Step {
    if classify::may_be_snat_reply(maps, &ctx.packet) { Step::SnatReply } else { Step::NewFlow }
}

/// Gives the flow of the packet the key of its replies again.
#[inline(always)]
pub fn repair_reply_key<M: FlowTable>(maps: M, ctx: &PacketCtx<Words<M>>) {
    if let Some(time) = maps.time()
        && let Some(flow) = track::find_called(maps, &ctx.packet.key, time)
    {
        flow.repair_reply_key(time);
    }
}

/// A packet on its way out, perhaps a backend's to a client. [`Step::NewFlow`]: it belongs to no flow.
#[inline(always)]
pub fn reply<M, F>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>) -> Step
where
    M: FlowTable + Counters,
    M::Family: Rewrite,
    F: Frame,
{
    let Some(time) = maps.time() else { return Step::Pass };
    let hash = time.hash(&ctx.packet.key);
    let Some(flow) = track::find(maps, &ctx.packet.key, hash, time) else { return Step::NewFlow };
    if has_successor(maps, &flow, time) {
        return Step::NewFlow;
    }
    if ctx.packet.tcp_flags & tcp::SYN != 0 && is_closed(flow.bits()) {
        // Both ends were done: this answers a connection that the client made to the backend itself.
        return Step::Pass;
    }
    if is_of_another_connection(&ctx.packet, flow.bits()) {
        return Step::DirectReply;
    }
    if eject::refuses(maps, &flow, &ctx.packet) {
        return Step::Refused;
    }
    touch(maps, &flow, ctx, DIRECTION_REPLY, time);
    if flow.bits() & STATE_DIRECT == 0 {
        report::replied(maps, flow.service(), ctx.packet.length);
    }
    match flow.to_client() {
        // A direct flow may keep its port.
        Some(to) if flow.bits() & STATE_DIRECT != 0 && to.dst_port == ctx.packet.key.dst_port => Step::Pass,
        Some(to) => {
            // It has the address and port of a frontend from now on: a device below this one sees that, too.
            frame.set_translated();
            deliver::<F, M::Family>(frame, ctx, &to)
        }
        None => Step::NewFlow,
    }
}

/// Whether a reply to a flow may be one to another flow by now: programs of another version open flows, and do not know that the
/// ports of this one are in quarantine. The last segments of a connection come within a second: were they left to programs that do
/// not know the flow yet, the node would answer with a reset.
#[inline(always)]
fn has_successor<M: FlowTable>(maps: M, flow: &Tracked<M>, time: Time) -> bool {
    matches!(maps.transition(), Transition::LooksUp | Transition::Yields)
        && is_closed(flow.bits())
        && flow.is_silent(time)
}

/// Whether a reply cannot be the answer to the SYN that began its flow: the client has a connection of its own to the backend,
/// from the same port, and this belongs to it.
#[inline(always)]
pub fn is_of_another_connection<A>(packet: &Packet<A>, bits: u32) -> bool {
    bits & (STATE_SYN | SEEN_REPLY) == STATE_SYN && packet.tcp_flags & (tcp::SYN | tcp::RST) == 0
}

/// A packet to a port of this node, perhaps the reply to one that was forwarded under its address. [`Step::NewFlow`]: it is
/// none.
#[inline(always)]
pub fn snat_reply<M, F>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>) -> Step
where
    M: FlowTable + Counters + Routing<F>,
    M::Family: Rewrite,
    F: Frame,
{
    let Some(time) = maps.time() else { return Step::Pass };
    if frame.has_vlan_tag() {
        return Step::Pass;
    }
    let key = FlowKey { direction: DIRECTION_REPLY, ..ctx.packet.key };
    let found = if F::EARLY {
        track::find_untouched(maps, &key, time.hash(&key), time)
    } else {
        track::find_called(maps, &key, time)
    };
    let Some(flow) = found else { return Step::NewFlow };
    if flow.bits() & STATE_SNAT == 0 || has_successor(maps, &flow, time) {
        return Step::NewFlow;
    }
    if F::EARLY && !can_forward(maps, frame, ctx, flow.bits(), flow.to_client()) {
        return Step::Pass;
    }
    if F::EARLY {
        // One packet of a connection, which the next hook looks at.
        if is_watched(flow.bits()) {
            return Step::Pass;
        }
    } else if eject::refuses(maps, &flow, &ctx.packet) {
        return Step::Refused;
    }
    touch(maps, &flow, ctx, DIRECTION_REPLY, time);
    if flow.bits() & STATE_DIRECT == 0 {
        report::replied(maps, flow.service(), ctx.packet.length);
    }
    let Some(mut to) = flow.to_client() else { return Step::NewFlow };
    if F::EARLY || flow.bits() & STATE_LOCAL == 0 {
        forward_to(maps, frame, ctx, &to)
    } else {
        deliver_local(maps, frame, ctx, &mut to)
    }
}

/// Notes the packet, and counts a reset or FIN that did not count.
#[inline(always)]
fn touch<M: FlowTable + Counters>(
    maps: M,
    flow: &Tracked<M>,
    ctx: &PacketCtx<Words<M>>,
    direction: u8,
    time: Time,
) {
    if !flow.touch(&ctx.packet, direction, time) {
        report::refusal(maps, flow.service(), Reason::OutOfWindow);
    }
}

/// Rewrites a packet that goes up the stack, or out as it was going.
#[inline(always)]
pub fn deliver<F: Frame, Fam: Rewrite>(
    frame: F,
    ctx: &PacketCtx<Fam::Words>,
    to: &Tuple<Fam::Words>,
) -> Step {
    match translate::rewrite::<F, Fam>(frame, &ctx.packet, to, Hop::Keep) {
        Ok(()) => Step::Pass,
        Err(reason) => Step::DropFor(reason),
    }
}

/// Whether an early hook can send a packet of a flow with these bits, which becomes `to`. Its route is in the context then.
#[inline(always)]
fn can_forward<M, F>(
    maps: M,
    frame: F,
    ctx: &mut PacketCtx<Words<M>>,
    bits: u32,
    to: Option<Tuple<Words<M>>>,
) -> bool
where
    M: Routing<F>,
    F: Frame,
{
    let Some(to) = to else { return false };
    bits & (STATE_SNAT | STATE_LOCAL) == STATE_SNAT
        && maps.find_route(frame, &to, ctx.packet.length, &mut ctx.route) == Fib::Found
        && frame.can_send(&ctx.route)
}

/// Rewrites a packet that is forwarded from here. Its route is asked for first: of one that is too big, the client gets to
/// see what it sent.
#[inline(always)]
pub fn forward_to<M, F>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>, to: &Tuple<Words<M>>) -> Step
where
    M: Routing<F>,
    M::Family: Rewrite,
    F: Frame,
{
    // An early hook has it already.
    let found = if F::EARLY { Fib::Found } else { find_route(maps, frame, ctx, to) };
    match found {
        Fib::Found => match translate::rewrite::<F, M::Family>(frame, &ctx.packet, to, Hop::Decrement) {
            Ok(()) => Step::Forward,
            Err(reason) => Step::DropFor(reason),
        },
        Fib::TooBig => Step::TooBig,
        Fib::NoRoute => Step::DropFor(Reason::NoRoute),
    }
}

/// Finds the route of a packet that becomes `to`; that of the packet before it needs no call.
#[inline(always)]
fn find_route<M, F>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>, to: &Tuple<Words<M>>) -> Fib
where
    M: Routing<F>,
    F: Frame,
{
    let length = longest(frame, ctx);
    match forward::known_route(maps, frame, to, length, maps.jiffies()) {
        Some(route) => {
            ctx.route = *route;
            Fib::Found
        }
        None => maps.find_route(frame, to, length, &mut ctx.route),
    }
}

/// Rewrites the answer to a process of this node, which goes up the stack: by the device that leads to its new source, since
/// at another one the kernel may take it for a martian (`rp_filter`).
#[inline(always)]
fn deliver_local<M, F>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>, to: &mut Tuple<Words<M>>) -> Step
where
    M: Routing<F>,
    M::Family: Rewrite,
    F: Frame,
{
    let key = &ctx.packet.key;
    if to.dst_port == key.dst_port && to.src_port == key.src_port && same(&to.src, &key.src) {
        // A direct flow that keeps its port.
        return Step::Pass;
    }
    // The way back, in the same place: a tuple more would be too much for the stack.
    swap(&mut to.src, &mut to.dst);
    let found = maps.find_route(frame, to, ctx.packet.l4, &mut ctx.route);
    swap(&mut to.src, &mut to.dst);
    match deliver::<F, M::Family>(frame, ctx, to) {
        Step::Pass
            if found == Fib::Found && ctx.route.ifindex != frame.ifindex() && ctx.route.resolved != 0 =>
        {
            Step::DeliverLocal
        }
        step => step,
    }
}

/// The length of the longest IP packet that it leaves as: the kernel cuts it into segments only behind us.
#[inline(always)]
pub fn longest<F: Frame, A>(frame: F, ctx: &PacketCtx<A>) -> u32 {
    let (packet, segment) = (&ctx.packet, frame.gso_size());
    if segment == 0 {
        return packet.length;
    }
    if packet.key.proto == PROTO_SCTP {
        // The packet does not tell how long each segment is. They were made to fit the route to the Service's address.
        return packet.l4;
    }
    let mut header = udp::HEADER as u32;
    if packet.key.proto == PROTO_TCP {
        let mut offset = 0u8;
        // If it is not all there, it is not cut either.
        let _ = frame.load(packet.l4 + tcp_header::OFFSET, &mut offset, 1);
        header = u32::from(offset >> 4) * 4;
    }
    packet.l4 - frame.link_header() as u32 + header + segment
}

impl<M: FlowTable> Tracked<M> {
    /// Id of the Service port.
    #[inline(always)]
    pub fn service(&self) -> u32 {
        use crate::flow::memory::EntryRef as _;
        self.entry.service()
    }
}
