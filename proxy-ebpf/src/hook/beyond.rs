//! Packets that go on from here under an address of this node, and the replies to them.

use proxy_common::flow::{DIRECTION_REPLY, FLOW_SNAT, FlowKey};
use proxy_common::reason::Reason;

use super::acts::Acts;
use super::tc::{NEXT, SEND, TOO_BIG, drop_because, leave, left, rewrite};
use crate::flow::{self, Time};
use crate::nat::Tuple;
use crate::packet::Packet;
use crate::skb::Skb;
use crate::{report, route};

/// Rewrites a packet that goes on from here. Its way is asked for first: of one that is too big, the client gets to
/// see what it sent.
#[inline(always)]
pub(super) fn send_on<F: Acts>(skb: Skb, packet: &Packet<F::Words>, to: &Tuple<F::Words>) -> i32 {
    match F::route(skb, to) {
        route::FOUND => match rewrite::<F>(skb, packet, to) {
            NEXT => SEND,
            verdict => verdict,
        },
        route::TOO_BIG => {
            // Its client is told, and no flow is looked for.
            leave::<F>(packet, 0);
            TOO_BIG
        }
        _ => drop_because(Reason::NoRoute),
    }
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
    match known.to_client() {
        Some(to) => send_on::<F>(skb, packet, &to),
        None => drop_because(Reason::MapInconsistent),
    }
}
