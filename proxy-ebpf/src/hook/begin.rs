//! The first packet of a flow: what the client dialled, whether it may, where it goes, and under which address.

use proxy_common::config::CONFIG_LEAVE_OLD;
use proxy_common::node::{NODE_ADDR_PORTS, NodeEntry};
use proxy_common::reason::{Reason, Verdict};
use proxy_common::service::ServiceEntry;
use proxy_common::{Address, PROTO_TCP, decide};

use super::acts::Acts;
use super::tc::{BEGUN, DROP, NEXT, REFUSED, drop_because, left, rewrite};
use crate::flow::{self, Time};
use crate::header::same;
use crate::maps;
use crate::nat::Tuple;
use crate::net::tcp;
use crate::packet::Scratch;
use crate::skb::Skb;
use crate::{affinity, balance, lookup, report};

/// 2^64 by the golden ratio, odd: the upper half of a product with it depends on all bits below.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// The first packet of a flow.
#[inline(always)]
pub(super) fn begin<F: Acts>(skb: Skb) -> i32 {
    let Some(left) = left::<F>() else { return NEXT };
    let packet = &left.packet;
    if packet.is_later() {
        // What became of the first fragment becomes of all.
        return drop_because(Reason::FragmentWithoutFirst);
    }
    let key = &packet.key;
    let (Some(time), Some(node)) = (Time::now(), F::node()) else { return NEXT };
    if is_old(key.proto, packet.tcp_flags, time.config.flags) {
        return NEXT;
    }
    let outside = decide::is_outside(|| maps::device(skb.ifindex()), node, &key.src);
    let Some(service) = lookup::frontend::<F>(key.dst, key.dst_port, key.proto, outside, NODE_ADDR_PORTS)
    else {
        if !lookup::is_service_address::<F>(&key.dst) {
            return NEXT;
        }
        let why = lookup::why_nothing::<F>(key.dst);
        report::refused::<F>(skb, 0, why);
        return refuse(why, packet.tcp_flags);
    };
    match open::<F>(skb, left, &service, node, outside, time) {
        Ok((_, true)) => BEGUN,
        Ok((to, false)) => {
            report::forwarded(service.id, packet.length);
            rewrite::<F>(skb, packet, &to)
        }
        Err(reason) => {
            report::refused::<F>(skb, service.id, reason);
            refuse(reason, packet.tcp_flags)
        }
    }
}

/// Whether the packet may be of a connection that another proxy translates, by netfilter's memory of it.
#[inline(always)]
fn is_old(proto: u8, tcp_flags: u16, flags: u32) -> bool {
    flags & CONFIG_LEAVE_OLD != 0 && proto == PROTO_TCP && tcp_flags & tcp::SYN == 0
}

/// An answer to a reset would begin a conversation of errors (RFC 9293, 3.10.7.1).
#[inline(always)]
fn refuse(reason: Reason, tcp_flags: u16) -> i32 {
    if reason.verdict() == Verdict::Reject && tcp_flags & tcp::RST == 0 { REFUSED } else { DROP }
}

/// Chooses a backend, and begins a flow to it. Gives what the packet becomes, and whether it goes on from here.
#[inline(always)]
fn open<F: Acts>(
    skb: Skb,
    left: &Scratch<F::Words>,
    service: &ServiceEntry,
    node: &NodeEntry<F::Words>,
    outside: bool,
    time: Time,
) -> Result<(Tuple<F::Words>, bool), Reason> {
    let key = &left.packet.key;
    if decide::asks_source(service) && !F::lets_in(service.id, &key.src) {
        return Err(Reason::SourceNotAllowed);
    }
    let sticks = service.affinity_secs != 0 && service.slot_count != 0;
    let stays = if sticks { affinity::stay::<F>(&key.src, service, time) } else { None };
    let choice = if let Some(choice) = stays {
        choice
    } else {
        // As good as the helper's number, at a fifth of its price: the seed is secret, and the time moves on.
        let random = ((left.hash ^ u64::from(time.now)).wrapping_mul(SPREAD) >> 32) as u32;
        let choice = balance::choose::<F>(service, random)?;
        if sticks {
            affinity::note::<F>(&key.src, service, choice.backend_id, time);
        }
        choice
    };
    let source = decide::source(service, &key.src, outside, &choice.addr, choice.flags, time.config.flags);
    let snat = source.is_nodes();
    if snat && same(&node.source, &F::Words::ZERO) {
        return Err(Reason::NoRoute);
    }
    let to = flow::open::<F>(
        key,
        left.hash,
        service.id,
        &choice,
        time,
        if snat { Some(&node.source) } else { None },
    )?;
    report::opened::<F>(skb, service.id, choice.backend_id);
    Ok((to, snat))
}
