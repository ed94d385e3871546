//! Packets that go straight to an endpoint, while a flow to that endpoint has the same source port: their answers would be
//! taken for the flow's. As in netfilter, where the second of two connections with one reply tuple gets another source port, they
//! get a flow of their own (`STATE_DIRECT`), whose only translation is the source port.
//!
//! On the way in, the port is a client's ([`Way::In`]). On the way out, it is one under which packets are forwarded from here, and
//! netfilter has given it to a connection that it masquerades ([`Way::Out`]). These flows begin whether the port is taken or not:
//! so it is not given to a flow with SNAT later.
//!
//! It may also be that of a frontend ([`Way::Own`]): the other end's packets look like a client's. Such a flow has the other end as
//! its client, and translates nothing.
//!
//! A direct TCP connection that was there first has no entry: it is found when its endpoint answers the SYN of a flow
//! with one of its segments ([`Way::Back`]).

use proxy_common::config::CONFIG_OTHER_PROXY;
use proxy_common::conntrack::{SEEN_REPLY, is_closed, may_begin, tcp};
use proxy_common::flow::{
    DIRECTION_FORWARD, DIRECTION_REPLY, FlowKey, STATE_DIRECT, STATE_LOCAL, STATE_SNAT,
};
use proxy_common::node::NODE_ADDR_OWN;
use proxy_common::{Address, PROTO_TCP, PROTO_UDP};

use super::established::is_of_another_connection;
use crate::context::{NatPlan, PacketCtx};
use crate::env::{Counters, FlowTable, Time, Words};
use crate::flow::memory::EntryRef as _;
use crate::flow::track::{self, is_syn};
use crate::frame::Frame;
use crate::shared::Shared as _;
use crate::step::Step;

/// Where a packet that goes straight to an endpoint was met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// It comes in from its client.
    In = 0,
    /// It leaves from here, under the node's own address.
    Out = 1,
    /// It is the endpoint's, and goes back to its client.
    Back = 2,
    /// It leaves from here, under an address and port of a frontend.
    Own = 3,
}

impl Way {
    /// The one of that number, as it comes through a BPF-to-BPF call.
    #[inline(always)]
    pub fn decode(number: u32) -> Self {
        match number {
            0 => Self::In,
            1 => Self::Out,
            2 => Self::Back,
            _ => Self::Own,
        }
    }
}

/// A packet that goes straight to an endpoint.
#[inline(always)]
pub fn direct<M, F>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>, way: Way) -> Step
where
    M: FlowTable + Counters,
    F: Frame,
{
    let Some(time) = maps.time() else { return Step::Pass };
    if frame.has_vlan_tag() || ctx.packet.is_later_fragment() {
        return Step::Pass;
    }
    if way == Way::Back {
        return begun_before(maps, ctx, time);
    }
    if way == Way::Own {
        return from_frontend(maps, ctx, time);
    }
    let key = ctx.packet.key;
    if let Some(flow) = track::find_called(maps, &key, time) {
        if way == Way::In && flow.bits() & STATE_SNAT != 0 {
            // Nothing of this node comes in.
            return Step::Pass;
        }
        if flow.continues(ctx.packet.tcp_flags, flow.service(), time) {
            if way == Way::In {
                note(maps, key.proto, time);
            }
            flow.touch(&ctx.packet, key.direction, time);
            return match flow.to_backend() {
                // On the way out, most keep their port.
                Some(to) if to.src_port == key.src_port => Step::Pass,
                Some(to) => {
                    frame.set_translated();
                    let reply = &mut ctx.plan.reply;
                    (reply.src, reply.dst) = (to.dst, to.src);
                    (reply.src_port, reply.dst_port) = (to.dst_port, to.src_port);
                    ctx.plan.bits = STATE_DIRECT;
                    Step::Translate
                }
                None => Step::Pass,
            };
        }
        flow.expire(time);
    }
    let opens = key.proto == PROTO_UDP || is_syn(ctx.packet.tcp_flags);
    // On the way out, connections that are older than the agent are noted, too.
    if !opens && (way == Way::In || !may_begin(ctx.packet.tcp_flags)) {
        forget(maps, key.proto, time);
        return Step::Pass;
    }
    let reply = FlowKey {
        src: key.dst,
        dst: key.src,
        src_port: key.dst_port,
        dst_port: key.src_port,
        proto: key.proto,
        direction: DIRECTION_REPLY,
        reserved: 0,
    };
    let other = track::find_called(maps, &reply, time);
    ctx.hash = time.hash(&key);
    ctx.plan = NatPlan { reply, backend_id: 0, bits: STATE_DIRECT, reply_hash: time.hash(&reply) };
    ctx.service = 0;
    if way == Way::Out {
        // The port of a connection cannot change in its middle.
        if !opens && other.is_some() {
            return Step::Pass;
        }
        ctx.plan.bits = STATE_DIRECT | STATE_SNAT | STATE_LOCAL;
        return Step::OpenFlow;
    }
    let Some(other) = other else { return Step::Pass };
    if other.bits() & (STATE_SNAT | STATE_DIRECT) != 0 {
        return Step::Pass;
    }
    if is_closed(other.bits()) {
        // Its ports are free for a connection of the client's own.
        other.remove();
        return Step::Pass;
    }
    (ctx.plan.backend_id, ..) = other.entry.backend();
    ctx.service = other.service();
    Step::OpenFlow
}

/// Plans a flow for a direct connection that is older than the flow which has its replies, and whose segment is the endpoint's answer
/// to the SYN of that flow. The younger flow ends: the SYN that its client sends again gets another source port.
#[inline(always)]
fn begun_before<M: FlowTable>(maps: M, ctx: &mut PacketCtx<Words<M>>, time: Time) -> Step {
    let reply = ctx.packet.key;
    let Some(other) = track::find_called(maps, &reply, time) else { return Step::Pass };
    let is_younger = is_of_another_connection(&ctx.packet, other.bits());
    if !is_younger || other.bits() & (STATE_SNAT | STATE_DIRECT) != 0 {
        return Step::Pass;
    }
    (ctx.plan.backend_id, ..) = other.entry.backend();
    ctx.service = other.service();
    if !other.remove() {
        return Step::Pass;
    }
    plan_by_reply(ctx, &reply, STATE_DIRECT, time)
}

/// Plans a flow without a translation by a packet that is its reply, and that passes.
#[inline(always)]
fn plan_by_reply<A: Address>(ctx: &mut PacketCtx<A>, reply: &FlowKey<A>, bits: u32, time: Time) -> Step {
    ctx.plan.reply = *reply;
    ctx.plan.reply_hash = time.hash(reply);
    ctx.plan.bits = bits;
    // The entry is filled from a packet of the client: this one, the other way round. Its direction stays, by which the next stage
    // knows that it passes.
    let packet = &mut ctx.packet;
    packet.key = FlowKey {
        src: reply.dst,
        dst: reply.src,
        src_port: reply.dst_port,
        dst_port: reply.src_port,
        proto: reply.proto,
        direction: DIRECTION_FORWARD,
        reserved: 0,
    };
    ctx.hash = time.hash(&packet.key);
    packet.key.direction = DIRECTION_REPLY;
    packet.seq = packet.ack;
    Step::OpenFlow
}

/// A packet of a connection of this node's own under an address and port of a frontend: netfilter (MASQUERADE) has given it the port, or
/// a process has bound it. Without a flow, the other end's packets would be a client's to the Service.
///
/// Such a flow has [`STATE_LOCAL`] without [`STATE_SNAT`]. It is found like a client's, so that only where such connections begin they
/// cost anything. Connections that are older than the agent are noted, too.
#[inline(always)]
fn from_frontend<M: FlowTable>(maps: M, ctx: &mut PacketCtx<Words<M>>, time: Time) -> Step {
    let reply = FlowKey { direction: DIRECTION_REPLY, ..ctx.packet.key };
    let tcp_flags = ctx.packet.tcp_flags;
    if let Some(flow) = track::find_called(maps, &reply, time) {
        if flow.bits() & STATE_DIRECT == 0 {
            return Step::Pass;
        }
        if !(is_syn(tcp_flags) && is_closed(flow.bits())) {
            flow.touch(&ctx.packet, DIRECTION_REPLY, time);
            return Step::Pass;
        }
        flow.remove();
    }
    // Replies that another proxy's rules translate look the same: their clients are to move to endpoints of the Service.
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
    // It is no SYN of the flow's client.
    ctx.packet.tcp_flags = tcp::ACK;
    plan_by_reply(ctx, &reply, STATE_DIRECT | STATE_LOCAL | SEEN_REPLY, time)
}

/// Notes that there are direct connections: from now on all segments of the family to endpoints are looked up.
#[inline(always)]
pub fn note<M: FlowTable>(maps: M, proto: u8, time: Time) {
    if proto == PROTO_TCP
        && let Some(seen) = maps.direct_seen()
        && seen.load() != time.now | 1
    {
        seen.store(time.now | 1);
    }
}

/// Ends that when none was seen for as long as one may be silent.
#[inline(always)]
fn forget<M: FlowTable>(maps: M, proto: u8, time: Time) {
    if proto == PROTO_TCP
        && let Some(seen) = maps.direct_seen()
    {
        let at = seen.load();
        if at != 0 && time.now.wrapping_sub(at).cast_signed() > time.config.tcp_established.cast_signed() {
            seen.store(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_is_the_same_behind_a_call() {
        for way in [Way::In, Way::Out, Way::Back, Way::Own] {
            assert_eq!(Way::decode(way as u32), way);
        }
    }
}
