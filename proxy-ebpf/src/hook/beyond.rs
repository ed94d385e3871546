//! Packets that go on from here under an address of this node, and the replies to them.

use core::mem::swap;

use proxy_common::flow::{DIRECTION_REPLY, FLOW_OWN, FLOW_SNAT, FlowKey};
use proxy_common::reason::Reason;
use proxy_common::{PROTO_SCTP, PROTO_TCP};

use super::acts::Acts;
use super::tc::{NEXT, SEND, TOO_BIG, drop_because, left, rewrite};
use crate::flow::{self, Time};
use crate::nat::Tuple;
use crate::net::{link_header, tcp, udp};
use crate::packet::Packet;
use crate::skb::Skb;
use crate::{report, route};

/// Rewrites a packet that goes on from here. Its way is asked for first: of one that is too big, the client gets to
/// see what it sent.
#[inline(always)]
pub(super) fn send_on<F: Acts>(skb: Skb, packet: &Packet<F::Words>, to: &Tuple<F::Words>) -> i32 {
    match F::route(skb, to, longest::<F>(skb, packet)) {
        route::FOUND => match rewrite::<F>(skb, packet, to) {
            NEXT => SEND,
            verdict => verdict,
        },
        route::TOO_BIG => TOO_BIG,
        _ => drop_because(Reason::NoRoute),
    }
}

/// The length of the longest IP packet that it leaves as: the kernel cuts it into segments only behind us.
#[inline(always)]
fn longest<F: Acts>(skb: Skb, packet: &Packet<F::Words>) -> u32 {
    let segment = skb.gso_size();
    if segment == 0 {
        return packet.length;
    }
    if packet.key.proto == PROTO_SCTP {
        // Nobody tells how long each is. They were made to fit the way to the Service's address.
        return packet.l4;
    }
    let mut header = udp::HEADER as u32;
    if packet.key.proto == PROTO_TCP {
        let mut offset = 0u8;
        // If it is not all there, it is not cut either.
        let _ = skb.load(packet.l4 + tcp::OFFSET, &mut offset, 1);
        header = u32::from(offset >> 4) * 4;
    }
    packet.l4 - link_header() as u32 + header + segment
}

/// A packet to a port of this node, perhaps the reply to one that was sent on under its address.
#[inline(always)]
pub(super) fn back<F: Acts>(skb: Skb) -> i32 {
    let (Some(packet), Some(time)) = (left::<F>(), Time::now()) else { return NEXT };
    let packet = &packet.packet;
    let key = FlowKey { direction: DIRECTION_REPLY, ..packet.key };
    let Some(known) = flow::find::<F>(&key, time.hash(&key), time) else { return NEXT };
    if known.state() & FLOW_SNAT == 0 {
        return NEXT;
    }
    known.touch(DIRECTION_REPLY, packet.tcp_flags, time);
    report::replied(known.service(), packet.length);
    let Some(mut to) = known.to_client() else { return drop_because(Reason::MapInconsistent) };
    if known.state() & FLOW_OWN == 0 {
        send_on::<F>(skb, packet, &to)
    } else {
        bring_home::<F>(skb, packet, &mut to)
    }
}

/// Rewrites the answer to a process of this node, which goes up the stack: by the device that leads to its new source,
/// since at another one the kernel may take it for a martian (`rp_filter`).
#[inline(always)]
fn bring_home<F: Acts>(skb: Skb, packet: &Packet<F::Words>, to: &mut Tuple<F::Words>) -> i32 {
    // The way back, in the same place: a tuple more would be too much for the stack.
    swap(&mut to.src, &mut to.dst);
    let found = F::route(skb, to, packet.l4);
    swap(&mut to.src, &mut to.dst);
    match rewrite::<F>(skb, packet, to) {
        NEXT if found == route::FOUND && route::turn_inward(skb.ifindex()) => SEND,
        verdict => verdict,
    }
}
