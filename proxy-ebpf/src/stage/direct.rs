//! Packets that are sent directly to an endpoint while a flow to that endpoint has the same reply tuple: the answers would
//! be taken for replies of that flow. netfilter gives the second of two such connections another source port. Likewise,
//! these packets get a direct flow (`STATE_DIRECT`), whose only translation is the source port.
//!
//! At ingress, the source port is a client's ([`DirectCase::Ingress`]). At egress, it is a SNAT port that netfilter has given to a
//! connection which it masquerades ([`DirectCase::Egress`]). Egress flows are created even if no other flow has the port, so that no
//! flow with SNAT gets the port later.
//!
//! At egress, the source may also be the address and port of a frontend ([`DirectCase::FrontendSource`]): packets of the remote end then look
//! like a client's. The remote end is the client of such a flow, which translates nothing.
//!
//! A direct TCP connection that existed first has no entry. It is detected when its endpoint answers the SYN of a flow with
//! a segment of the older connection ([`DirectCase::EndpointReply`]).

use proxy_common::config::CONFIG_OTHER_PROXY;
use proxy_common::conntrack::{SEEN_REPLY, is_closed, is_half_closed, keeps_ports, may_begin, tcp};
use proxy_common::flow::{DIRECTION_REPLY, FlowKey, STATE_DIRECT, STATE_LOCAL, STATE_SNAT};
use proxy_common::node::NODE_ADDR_OWN;
use proxy_common::{Address, PROTO_UDP};

use super::established::is_of_another_connection;
use super::seen::mark_direct_seen;
use crate::context::{NatPlan, Packet, PacketCtx, Tuple};
use crate::env::{Counters, FlowTable, Time, Words};
use crate::flow::memory::EntryRef as _;
use crate::flow::track::{self, is_syn};
use crate::frame::Frame;
use crate::shared::Shared as _;
use crate::step::Step;

/// Where a packet of a direct connection was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectCase {
    /// At ingress, from the client.
    Ingress = 0,
    /// At egress, with the node's own address as its source.
    Egress = 1,
    /// From the endpoint, on the way back to the client.
    EndpointReply = 2,
    /// At egress, with the address and port of a frontend as its source.
    FrontendSource = 3,
}

impl DirectCase {
    /// Returns the variant with this number, which was passed in a BPF-to-BPF call.
    #[inline(always)]
    pub fn decode(number: u32) -> Self {
        match number {
            0 => Self::Ingress,
            1 => Self::Egress,
            2 => Self::EndpointReply,
            _ => Self::FrontendSource,
        }
    }
}

/// Processes a packet of a direct connection.
#[inline(always)]
pub fn direct<M, F>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>, case: DirectCase) -> Step
where
    M: FlowTable + Counters,
    F: Frame,
{
    let Some(time) = maps.time() else { return Step::Pass };
    if frame.has_vlan_tag() || ctx.packet.is_later_fragment() {
        return Step::Pass;
    }
    if case == DirectCase::EndpointReply {
        return plan_older_connection(maps, frame, ctx);
    }
    if case == DirectCase::FrontendSource {
        return from_frontend(maps, ctx, time);
    }
    let key = ctx.packet.key;
    if let Some(flow) = track::find_called(maps, &key) {
        if case == DirectCase::Ingress && flow.bits() & STATE_SNAT != 0 {
            // The source of a flow with SNAT is this node, whose packets do not arrive on a device.
            return Step::Pass;
        }
        if flow.continues(ctx.packet.tcp_flags, flow.service(), time) {
            if case == DirectCase::Ingress {
                mark_direct_seen(maps, &key, time);
            }
            flow.touch_called(&ctx.packet, key.direction);
            return match flow.to_backend() {
                // At egress, most flows keep their source port.
                Some(to) if to.src_port == key.src_port => Step::Pass,
                Some(to) => plan_translation(frame, ctx, &to),
                None => Step::Pass,
            };
        }
        flow.expire();
    }
    let opens = key.proto == PROTO_UDP || is_syn(ctx.packet.tcp_flags);
    // At egress, connections that are older than the agent are tracked, too.
    if !opens && (case == DirectCase::Ingress || !may_begin(ctx.packet.tcp_flags)) {
        return Step::Pass;
    }
    let reply = key.reversed();
    let other = track::find_called(maps, &reply);
    ctx.hash = maps.hash_key(&key);
    ctx.plan = NatPlan { reply, backend_id: 0, bits: STATE_DIRECT, reply_hash: maps.hash_key(&reply) };
    ctx.service = 0;
    if case == DirectCase::Egress {
        // The source port of an existing connection cannot change.
        if !opens && other.is_some() {
            return Step::Pass;
        }
        ctx.plan.bits = STATE_DIRECT | STATE_SNAT | STATE_LOCAL;
        return Step::OpenFlow;
    }
    let Some(other) = other else { return Step::Pass };
    if other.bits() & STATE_SNAT != 0 {
        return Step::Pass;
    }
    // The flow may be direct itself: the client connects from the port that another of its connections has at the endpoint.
    let last_seen = other.entry.last_seen().load();
    let waits = keeps_ports(key.proto, other.bits(), last_seen, time.now, time.config.hz);
    if is_closed(other.bits()) && !waits {
        // The ports of the closed flow are free for a direct connection of the client.
        other.remove();
        return Step::Pass;
    }
    (ctx.plan.backend_id, ..) = other.entry.backend();
    ctx.service = other.service();
    Step::OpenFlow
}

/// Plans the translation of a packet to `to`, by a flow that exists.
#[inline(always)]
fn plan_translation<F: Frame, A: Address>(frame: F, ctx: &mut PacketCtx<A>, to: &Tuple<A>) -> Step {
    frame.set_translated();
    let reply = &mut ctx.plan.reply;
    (reply.src, reply.dst) = (to.dst, to.src);
    (reply.src_port, reply.dst_port) = (to.dst_port, to.src_port);
    ctx.plan.bits = STATE_DIRECT;
    Step::Translate
}

/// Plans a flow for a direct connection that is older than the flow with the same reply key. The packet is the endpoint's
/// answer to the SYN of the younger flow, and belongs to the older connection. The younger flow is removed: the SYN that
/// its client retransmits gets another source port.
///
/// A bare ACK is the endpoint's answer to the SYN itself, also if its socket is in `TIME_WAIT`. The client gets it from the
/// frontend: it sends the SYN again at once (`tcp_rcv_synsent_state_process`), and its RST has no flow, so it does not reach the
/// older connection.
///
/// If the client's direct connection from this port has a flow, it has another port at the endpoint. The older connection is
/// then one of the Service, whose socket at the endpoint is in `TIME_WAIT`: as with `nf_conntrack`, the client gets the answer
/// from the frontend, and its RST ends that socket.
#[inline(always)]
fn plan_older_connection<M: FlowTable, F: Frame>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>) -> Step {
    let reply = ctx.packet.key;
    let Some(other) = track::find_called(maps, &reply) else { return Step::Pass };
    let is_younger = is_of_another_connection(&ctx.packet, other.bits());
    if !is_younger || other.bits() & STATE_SNAT != 0 {
        return Step::Pass;
    }
    let Some(to) = other.to_client() else { return Step::Pass };
    let direct = reply.reversed();
    if track::exists(maps, &direct) {
        return plan_translation(frame, ctx, &to);
    }
    (ctx.plan.backend_id, ..) = other.entry.backend();
    ctx.service = other.service();
    if !other.remove() {
        return Step::Pass;
    }
    let is_answer = other.bits() & STATE_DIRECT == 0 && is_bare_ack(&ctx.packet, frame.link_header() as u32);
    ctx.other = if is_answer { to } else { Tuple::EMPTY };
    plan_by_reply(maps, ctx, &reply, STATE_DIRECT)
}

/// Whether a TCP segment only acknowledges.
#[inline(always)]
fn is_bare_ack<A>(packet: &Packet<A>, link_header: u32) -> bool {
    let end = packet.l4 - link_header + u32::from(packet.tcp_flags >> 12) * 4;
    packet.length == end && packet.tcp_flags & (tcp::FIN | tcp::ACK) == tcp::ACK
}

/// Plans a flow without translation from a packet in reply direction, which then passes unchanged.
#[inline(always)]
fn plan_by_reply<M: FlowTable>(
    maps: M,
    ctx: &mut PacketCtx<Words<M>>,
    reply: &FlowKey<Words<M>>,
    bits: u32,
) -> Step {
    ctx.plan.reply = *reply;
    ctx.plan.reply_hash = maps.hash_key(reply);
    ctx.plan.bits = bits;
    // The entry is filled from a packet of the client, so addresses and ports are swapped. The direction stays
    // `DIRECTION_REPLY`: it tells the next stage that the packet passes.
    let packet = &mut ctx.packet;
    packet.key = reply.reversed();
    ctx.hash = maps.hash_key(&packet.key);
    packet.key.direction = DIRECTION_REPLY;
    packet.seq = packet.ack;
    Step::OpenFlow
}

/// Tracks a connection of this node whose source is the address and port of a frontend: netfilter (MASQUERADE) has chosen
/// the port, or a process has bound it. Without a flow, packets of the remote end would be taken for a client's packets to
/// the Service.
///
/// Such a flow has [`STATE_LOCAL`] without [`STATE_SNAT`]. It is looked up like a client's flow, so such connections add a
/// cost only where they begin. Connections that are older than the agent are tracked, too.
#[inline(always)]
fn from_frontend<M: FlowTable>(maps: M, ctx: &mut PacketCtx<Words<M>>, time: Time) -> Step {
    let reply = FlowKey { direction: DIRECTION_REPLY, ..ctx.packet.key };
    let tcp_flags = ctx.packet.tcp_flags;
    if let Some(flow) = track::find_called(maps, &reply) {
        if flow.bits() & STATE_DIRECT == 0 {
            return Step::Pass;
        }
        if !(is_syn(tcp_flags) && (is_closed(flow.bits()) || is_half_closed(flow.bits()))) {
            flow.touch_called(&ctx.packet, DIRECTION_REPLY);
            return Step::Pass;
        }
        flow.remove();
    }
    // Replies that another proxy's rules translate look the same, and their clients have to move to endpoints of the
    // Service.
    let begins = if reply.proto == PROTO_UDP {
        time.config.flags & CONFIG_OTHER_PROXY == 0
    } else {
        may_begin(tcp_flags)
    };
    if !begins || maps.node_addr(&reply.src) & NODE_ADDR_OWN == 0 {
        return Step::Pass;
    }
    ctx.plan.backend_id = 0;
    ctx.service = 0;
    // The packet is not a SYN of the flow's client.
    ctx.packet.tcp_flags = tcp::ACK;
    plan_by_reply(maps, ctx, &reply, STATE_DIRECT | STATE_LOCAL | SEEN_REPLY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn direct_case_is_decoded_as_it_was_encoded() {
        for case in
            [DirectCase::Ingress, DirectCase::Egress, DirectCase::EndpointReply, DirectCase::FrontendSource]
        {
            assert_eq!(DirectCase::decode(case as u32), case);
        }
    }
}
