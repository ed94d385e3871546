//! The first packet of a flow: what the client dialled, whether it may, where it goes, and under which address.

use proxy_common::config::CONFIG_LEAVE_OLD;
use proxy_common::flow::{FLOW_OWN, FLOW_SNAT, FlowKey};
use proxy_common::node::{NODE_ADDR_PORTS, NodeEntry};
use proxy_common::reason::{Reason, Verdict};
use proxy_common::service::ServiceEntry;
use proxy_common::{Address, PROTO_TCP, decide};

use super::acts::Acts;
use super::tc::{BEGUN, DROP, NEXT, NO_HASH, REFUSED, TAKEN, drop_because, left, rewrite};
use crate::balance::{self, Choice};
use crate::flow::{self, Time};
use crate::header::same;
use crate::maps;
use crate::nat::Tuple;
use crate::net::tcp;
use crate::packet::{Aim, Left, Packet};
use crate::skb::Skb;
use crate::{affinity, lookup, report};

/// 2^64 by the golden ratio, odd: the upper half of a product with it depends on all bits below.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// The first packet of a flow.
///
/// What a new flow needs lies in lines that are in no cache: two buckets and an entry. All are asked for before the
/// first of them is looked at, and the Service is looked up meanwhile. So a segment that opens a connection comes here
/// before it is known whether its flow exists (see [`opens`]); if it does, the new one finds its key taken.
#[inline(always)]
pub(super) fn begin<F: Acts>(skb: Skb) -> i32 {
    let Some(scratch) = F::scratch() else { return NEXT };
    // SAFETY: a map value that is this CPU's own.
    let (left, aim) = unsafe { (&mut (*scratch).left, &mut (*scratch).aim) };
    let packet = &left.packet;
    if packet.is_later() {
        // What became of the first fragment becomes of all.
        return drop_because(Reason::FragmentWithoutFirst);
    }
    let key = &packet.key;
    let (Some(time), Some(node)) = (Time::now(), F::node()) else { return NEXT };
    aim.state = if skb.is_own() { u32::from(FLOW_OWN) } else { 0 };
    let outside = aim.state == 0
        && decide::is_outside(|| time.config.is_uplink(skb.ifindex(), maps::device), node, &key.src);
    let service = lookup::frontend::<F>(key.dst, key.dst_port, key.proto, outside, NODE_ADDR_PORTS);
    if left.hash == NO_HASH {
        left.hash = time.hash(key);
    }
    aim.backend_id = 0;
    if let Some(service) = &service {
        // As good as the helper's number, at a fifth of its price: the seed is secret, and the time moves on.
        let random = ((left.hash ^ u64::from(time.now)).wrapping_mul(SPREAD) >> 32) as u32;
        if let Some(choice) = balance::choose::<F>(service, random) {
            take_aim(aim, key, service, &choice, node, outside, time);
            flow::expect_key::<F>(left.hash, time.config);
            flow::expect_key::<F>(aim.reply_hash, time.config);
            flow::expect_entry::<F>(time);
        }
    }
    if is_old(key.proto, packet.tcp_flags, time.config.flags) {
        return NEXT;
    }
    let Some(service) = service else {
        if has_flow::<F>(packet) {
            return BEGUN;
        }
        if !lookup::is_service_address::<F>(&key.dst) {
            return NEXT;
        }
        let why = lookup::why_nothing::<F>(key.dst);
        report::refused::<F>(skb, 0, why);
        return refuse(why, packet.tcp_flags);
    };
    match open::<F>(skb, left, &service, aim, node, outside, time) {
        Ok(false) => {
            if F::goes_on() != 0 {
                BEGUN
            } else {
                TAKEN
            }
        }
        Ok(true) if aim.state != 0 => BEGUN,
        Ok(true) => {
            let reply = &aim.reply;
            let to =
                Tuple { src: reply.dst, dst: reply.src, src_port: reply.dst_port, dst_port: reply.src_port };
            report::forwarded(service.id, packet.length);
            rewrite::<F>(skb, packet, &to)
        }
        Err(_) if has_flow::<F>(packet) => BEGUN,
        Err(reason) => {
            report::refused::<F>(skb, service.id, reason);
            refuse(reason, packet.tcp_flags)
        }
    }
}

/// Whether a segment asks for a connection. Most such have no flow yet.
#[inline(always)]
pub(super) fn opens(tcp_flags: u16) -> bool {
    tcp_flags & (tcp::SYN | tcp::ACK) == tcp::SYN
}

/// Whether a segment that [`opens`] a connection belongs to a flow that goes on; of other packets it is known by now.
#[inline(always)]
fn has_flow<F: Acts>(packet: &Packet<F::Words>) -> bool {
    opens(packet.tcp_flags) && F::goes_on() != 0
}

/// Whether the flow of the packet in `scratch` exists, and goes on, with both its keys; if it does not go on, it ends.
#[inline(always)]
pub(super) fn goes_on<F: Acts>() -> u32 {
    let (Some(left), Some(time)) = (left::<F>(), Time::now()) else { return 0 };
    let Some(known) = flow::find::<F>(&left.packet.key, left.hash, time) else { return 0 };
    if known.continues(left.packet.tcp_flags) {
        if known.has_lost_reply_key(time) {
            known.mend(time);
        }
        return 1;
    }
    known.retire(time);
    0
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

#[inline(always)]
fn take_aim<A: Address>(
    aim: &mut Aim<A>,
    key: &FlowKey<A>,
    service: &ServiceEntry,
    choice: &Choice<A>,
    node: &NodeEntry<A>,
    outside: bool,
    time: Time,
) {
    let own = aim.state & u32::from(FLOW_OWN);
    let snat = own != 0
        || decide::source(service, &key.src, outside, &choice.addr, choice.flags, time.config.flags)
            .is_nodes();
    aim.reply = flow::reply_key(key, choice, time.config, if snat { Some(&node.source) } else { None });
    aim.reply_hash = time.hash(&aim.reply);
    aim.backend_id = choice.backend_id;
    aim.state = own | if snat { u32::from(FLOW_SNAT) } else { 0 };
}

/// Begins a flow to the backend that was chosen, or to the one that the client stays with; not, if the packet has a flow
/// already.
#[inline(always)]
fn open<F: Acts>(
    skb: Skb,
    left: &Left<F::Words>,
    service: &ServiceEntry,
    aim: &mut Aim<F::Words>,
    node: &NodeEntry<F::Words>,
    outside: bool,
    time: Time,
) -> Result<bool, Reason> {
    let key = &left.packet.key;
    if decide::asks_source(service) && !F::lets_in(service.id, &key.src) {
        return Err(Reason::SourceNotAllowed);
    }
    if service.affinity_secs != 0 && service.slot_count != 0 {
        // What a client stays with is not changed by a segment that comes again.
        if has_flow::<F>(&left.packet) {
            return Ok(false);
        }
        if let Some(choice) = affinity::stay::<F>(&key.src, service, time) {
            take_aim(aim, key, service, &choice, node, outside, time);
        } else if aim.backend_id != 0 {
            affinity::note::<F>(&key.src, service, aim.backend_id, time);
        }
    }
    if aim.backend_id == 0 {
        return Err(balance::why_nobody(service));
    }
    if aim.state != 0 && same(&node.source, &F::Words::ZERO) {
        return Err(Reason::NoRoute);
    }
    let begins = flow::open::<F>(key, left.hash, service.id, aim, time)?;
    if begins {
        report::opened::<F>(skb, service.id, aim.backend_id);
    }
    Ok(begins)
}
