//! Packets: the destination is translated where they come in, the source of the replies where they go out, so
//! that netfilter in between sees one plain flow between client and backend.

use aya_ebpf::programs::TcContext;
use proxy_common::filter::Role;
use proxy_common::flow::{DIRECTION_FORWARD, DIRECTION_REPLY, FLOW_SNAT, FlowKey, is_over};
use proxy_common::reason::{Reason, Verdict};
use proxy_common::{PROTO_SCTP, V4, V6};

use super::acts::Acts;
use super::begin::opens;
use super::beyond::send_on;
use crate::flow::{self, Time};
use crate::icmp;
use crate::maps::{self, Tables};
use crate::nat::{self, Rewrite, Tuple};
use crate::net::{ETHERTYPE_IPV4, ETHERTYPE_IPV6, sctp, tcp};
use crate::packet::{Left, Packet, Stop};
use crate::reject;
use crate::route;
use crate::skb::Skb;
use crate::{lookup, report};

/// `TCX_NEXT`, which is also `TC_ACT_UNSPEC`: on to the next program.
pub const NEXT: i32 = -1;
/// `TCX_DROP`, `TC_ACT_SHOT`.
pub const DROP: i32 = 2;

/// Headers that have to be readable: Ethernet, the longest IPv4 header or IPv6 with a few extensions, TCP.
const PULL: u32 = 128;

/// What an act says that is no verdict yet; all are above the verdicts.
const UNDECIDED: i32 = 100;
/// The packet belongs to no flow yet.
const UNKNOWN: i32 = 100;
/// Its client is to be told that nobody serves it.
pub(super) const REFUSED: i32 = 101;
/// Its flow has begun, and now it is a packet of a known flow.
pub(super) const BEGUN: i32 = 102;
/// It is rewritten, and goes on from here.
pub(crate) const SEND: i32 = 103;
/// Its client is to be told that it is too big.
pub(super) const TOO_BIG: i32 = 104;
/// It may be the reply to a packet that was sent on under an address of this node.
const RETURNS: i32 = 105;
/// It is an ICMP packet.
const CONTROL: i32 = 106;
/// Its flow has lost the key of its replies.
const LOST: i32 = 107;
/// It lies parsed in `scratch`.
const PARSED: i32 = 108;
/// Its flow was over, and has ended: now another may begin.
pub(super) const TAKEN: i32 = 109;

/// A packet that comes in from a client.
#[inline(always)]
pub fn ingress(context: &TcContext) -> i32 {
    let skb = Skb::new(context);
    match skb.ethertype() {
        ETHERTYPE_IPV4 => forward::<V4>(skb),
        ETHERTYPE_IPV6 => forward::<V6>(skb),
        _ => NEXT,
    }
}

/// A packet that goes out towards a client.
#[inline(always)]
pub fn egress(context: &TcContext) -> i32 {
    let skb = Skb::new(context);
    match skb.ethertype() {
        ETHERTYPE_IPV4 => backward::<V4>(skb),
        ETHERTYPE_IPV6 => backward::<V6>(skb),
        _ => NEXT,
    }
}

/// The acts of a client's packet, each in a stack frame of its own: together they would not fit into a program's
/// 512 bytes. They find the packet in `scratch`. What is not ours leaves before the first of them, since a call costs as
/// much as all that is asked here.
#[inline(always)]
fn forward<F: Acts>(skb: Skb) -> i32 {
    let verdict = match arrive::<F>(skb, DIRECTION_FORWARD) {
        Ok(key) => meet::<F>(skb, key),
        Err(verdict) => verdict,
    };
    act::<F>(skb, verdict)
}

/// The first act of a client's packet.
#[inline(always)]
fn meet<F: Acts>(skb: Skb, key: &FlowKey<F::Words>) -> i32 {
    if maps::may_be(Role::Frontend, &key.dst, key.dst_port, key.proto) {
        F::known(skb, FIRST)
    } else {
        stray::<F>(skb, key)
    }
}

/// The acts that follow.
#[inline(always)]
fn act<F: Acts>(skb: Skb, mut verdict: i32) -> i32 {
    if verdict < UNDECIDED {
        return verdict;
    }
    if verdict == LOST {
        F::mend();
        verdict = F::known(skb, MENDED);
    }
    if verdict == RETURNS {
        verdict = F::back(skb);
        if verdict == NEXT {
            verdict = UNKNOWN;
        }
    }
    if verdict == UNKNOWN {
        verdict = F::begin(skb);
        if verdict == TAKEN {
            verdict = F::begin(skb);
        }
        if verdict == BEGUN {
            verdict = F::known(skb, MENDED);
        }
    } else if verdict == CONTROL {
        verdict = if skb.is_of_vlan() { NEXT } else { icmp::incoming::<F>(skb) };
    }
    if verdict == SEND {
        verdict = F::send(skb);
        return match verdict {
            route::EXPIRED => drop_because(Reason::TtlExceeded),
            route::FAILED => drop_because(Reason::RewriteFailed),
            verdict => verdict,
        };
    }
    if verdict == REFUSED || verdict == TOO_BIG {
        return F::reject(skb, verdict);
    }
    // Others were faster each time.
    if verdict < UNDECIDED { verdict } else { drop_because(Reason::FlowCollision) }
}

/// The same for a packet that goes out: towards a client, or from one that is a process of this node.
#[inline(always)]
fn backward<F: Acts>(skb: Skb) -> i32 {
    let key = match arrive::<F>(skb, DIRECTION_REPLY) {
        Ok(key) => key,
        Err(CONTROL) => return icmp::outgoing::<F>(skb),
        Err(_) => return NEXT,
    };
    let mut verdict = UNKNOWN;
    if maps::may_be(Role::Backend, &key.src, key.src_port, key.proto) {
        verdict = F::reply(skb);
    }
    if verdict != UNKNOWN {
        return verdict;
    }
    if key.proto == PROTO_SCTP { own::<F>(skb) } else { NEXT }
}

/// A packet of SCTP that is no reply. No socket hook sees those of the node's own processes: they are met where they
/// leave for a Service's address, and go where its endpoint is. Other packets were met where they came in.
#[inline(always)]
fn own<F: Acts>(skb: Skb) -> i32 {
    let Some(scratch) = F::scratch() else { return NEXT };
    // SAFETY: a map value that is this CPU's own.
    let key = unsafe { &mut (*scratch).left.packet.key };
    // What went on from here passes another device's hook, and is not to be translated once more.
    if !skb.is_own() || is_snat_port(key.src_port) {
        return NEXT;
    }
    key.direction = DIRECTION_FORWARD;
    let verdict = meet::<F>(skb, key);
    act::<F>(skb, verdict)
}

/// `F::known` is asked about a packet for the first time.
const FIRST: i32 = 0;
/// It has been asked; the flow has begun since, or been mended: it has its keys, or cannot have them.
const MENDED: i32 = 1;

/// The hash of the packet's key is yet to be made.
pub(super) const NO_HASH: u64 = 0;

/// Parses a packet into `scratch`. If that cannot be done, gives the verdict, or [`CONTROL`].
#[inline(always)]
fn arrive<F: Acts>(skb: Skb, direction: u8) -> Result<&'static FlowKey<F::Words>, i32> {
    let scratch = F::scratch().ok_or(NEXT)?;
    // SAFETY: a map value that is this CPU's own.
    let packet = unsafe { &mut (*scratch).left.packet };
    packet.key.direction = direction;
    packet.key.reserved = 0;
    match F::parse(skb.bounds(), packet, false) {
        Ok(()) => Ok(&packet.key),
        Err(Stop::NotOurs) => Err(NEXT),
        Err(Stop::Control) => Err(CONTROL),
        Err(_) => match F::parse_pulled(skb, i32::from(direction)) {
            PARSED => Ok(&packet.key),
            verdict => Err(verdict),
        },
    }
}

/// A packet to what is no frontend: the reply to one that was sent on under an address of this node, or one to an address
/// in a range of Services that nobody serves. All others are not ours.
#[inline(always)]
fn stray<F: Acts>(skb: Skb, key: &FlowKey<F::Words>) -> i32 {
    if !is_snat_port(key.dst_port) && !lookup::is_service_address::<F>(&key.dst) {
        return NEXT;
    }
    if skb.is_of_vlan() { NEXT } else { leave::<F>(key.dst_port, NO_HASH) }
}

/// Makes more of the packet readable, and parses it into `scratch`: packets whose headers are not readable at once are
/// few, and need more room on the stack. Gives [`PARSED`], [`CONTROL`] or a verdict.
#[inline(always)]
pub(super) fn parse_pulled<F: Acts>(skb: Skb, direction: i32) -> i32 {
    match pull::<F>(skb) {
        Ok(()) => PARSED,
        Err(Stop::Control) => CONTROL,
        // What cannot be parsed was counted where it came in; what this node sends itself is nobody's fault.
        Err(Stop::Because(reason)) if direction == i32::from(DIRECTION_FORWARD) => {
            report::reason(reason);
            if reason.verdict() == Verdict::Drop { DROP } else { NEXT }
        }
        Err(_) => NEXT,
    }
}

#[inline(always)]
fn pull<F: Acts>(skb: Skb) -> Result<(), Stop> {
    let scratch = F::scratch().ok_or(Stop::NotOurs)?;
    // SAFETY: a map value that is this CPU's own.
    let packet = unsafe { &mut (*scratch).left.packet };
    let bounds = skb.bounds();
    let wanted = if skb.length() < PULL { skb.length() } else { PULL };
    if bounds.end - bounds.data < wanted as usize {
        // Nothing out of a list: its headers are readable.
        let pulled = skb.pull(if skb.is_list() { 0 } else { wanted });
        pulled.map_err(|_| Stop::Because(Reason::Malformed))?;
    }
    let parsed = F::parse(skb.bounds(), packet, true);
    if parsed.is_ok() && packet.key.proto == PROTO_SCTP {
        let mut chunk = 0u8;
        // Not by a pointer: in a list of packets, chunks lie elsewhere.
        skb.load(packet.l4 + sctp::CHUNK, &mut chunk, 1).map_err(|_| Stop::Because(Reason::Malformed))?;
        packet.tcp_flags = sctp::flags(chunk);
    }
    match parsed {
        Err(Stop::Short) => Err(Stop::Because(Reason::Malformed)),
        Err(Stop::First) => F::first(skb, packet),
        Err(Stop::Because(Reason::Fragment)) => F::later(skb, packet),
        result => result,
    }
}

/// A packet of a flow that is known.
#[inline(always)]
pub(super) fn known<F: Acts>(skb: Skb, from: i32) -> i32 {
    // Packets of others do not pay for the VLAN.
    let (Some(left), Some(time), false) = (left::<F>(), Time::now(), skb.is_of_vlan()) else { return NEXT };
    let (packet, key) = (&left.packet, &left.packet.key);
    let hash = time.hash(key);
    let unknown = || leave::<F>(key.dst_port, hash);
    if from == FIRST && opens(packet.tcp_flags) {
        return unknown();
    }
    let Some(known) = flow::find::<F>(key, hash, time) else { return unknown() };
    if !known.continues(packet.tcp_flags) {
        known.retire(time);
        return unknown();
    }
    if from != MENDED && known.has_lost_reply_key(time) {
        unknown();
        return LOST;
    }
    known.touch(DIRECTION_FORWARD, packet.tcp_flags, time);
    report::forwarded(known.service(), packet.length);
    match known.to_backend() {
        Some(to) if known.state() & FLOW_SNAT != 0 => send_on::<F>(skb, packet, &to),
        Some(to) => rewrite::<F>(skb, packet, &to),
        None => drop_because(Reason::MapInconsistent),
    }
}

/// Gives the flow of the packet in `scratch` the key of its replies again. It is an act of its own for its depth.
#[inline(always)]
pub(super) fn mend<F: Acts>() -> i32 {
    if let (Some(left), Some(time)) = (left::<F>(), Time::now())
        && let Some(known) = flow::find::<F>(&left.packet.key, left.hash, time)
    {
        known.mend(time);
    }
    NEXT
}

/// Leaves the hash of the packet's key to the next act.
#[inline(always)]
fn leave<F: Tables>(dst_port: u16, hash: u64) -> i32 {
    let Some(scratch) = F::scratch() else { return NEXT };
    // SAFETY: a map value that is this CPU's own.
    unsafe { (*scratch).left.hash = hash };
    // A set bit of the filter may be another tuple's: it says nothing against a reply.
    if is_snat_port(dst_port) { RETURNS } else { UNKNOWN }
}

/// Whether packets that went on from here under an address of this node come back to such a port.
#[inline(always)]
fn is_snat_port(port: u16) -> bool {
    maps::config().is_some_and(|config| port >= config.snat_first && port <= config.snat_last)
}

/// The packet in `scratch`.
#[inline(always)]
pub(super) fn left<F: Tables>() -> Option<&'static Left<F::Words>> {
    // SAFETY: a map value that is this CPU's own, and plain integers.
    F::scratch().map(|scratch| unsafe { &(*scratch).left })
}

/// Tells the client that nobody serves what it dialled, or that its packet is too big.
#[inline(always)]
pub(super) fn reject<F: Acts>(skb: Skb, what: i32) -> i32 {
    let Some(Left { packet, .. }) = left::<F>() else { return drop_because(Reason::RejectFailed) };
    let Some(time) = Time::now() else { return drop_because(Reason::RejectFailed) };
    let mut message = F::PORT_UNREACHABLE;
    if what == TOO_BIG {
        report::refused::<F>(skb, 0, Reason::PacketTooBig);
        if packet.is_later() {
            // Its sender hears of the first fragment (RFC 1122, 3.2.2).
            return DROP;
        }
        // SAFETY: a map value that is this CPU's own.
        message = F::too_big(maps::route().map_or(0, |route| unsafe { (*route).mtu }));
    } else if !reject::may_answer(time) {
        return drop_because(Reason::RejectLimited);
    }
    match reject::answer::<F>(skb, packet, message) {
        Ok(verdict) => verdict,
        Err(_) => drop_because(Reason::RejectFailed),
    }
}

/// A packet on its way out, perhaps a backend's to a client.
#[inline(always)]
pub(super) fn reply<F: Acts>(skb: Skb) -> i32 {
    let (Some(left), Some(time)) = (left::<F>(), Time::now()) else { return NEXT };
    let (packet, key) = (&left.packet, &left.packet.key);
    let Some(known) = flow::find::<F>(key, time.hash(key), time) else { return UNKNOWN };
    if packet.tcp_flags & tcp::SYN != 0 && is_over(known.state()) {
        // Both ends were done: this answers a connection that the client made to the backend itself.
        return NEXT;
    }
    known.touch(DIRECTION_REPLY, packet.tcp_flags, time);
    report::replied(known.service(), packet.length);
    match known.to_client() {
        Some(to) => rewrite::<F>(skb, packet, &to),
        None => drop_because(Reason::MapInconsistent),
    }
}

#[inline(always)]
pub(super) fn rewrite<F: Rewrite>(skb: Skb, packet: &Packet<F::Words>, to: &Tuple<F::Words>) -> i32 {
    match nat::rewrite::<F>(skb, packet, to) {
        Ok(()) => NEXT,
        Err(_) => drop_because(Reason::RewriteFailed),
    }
}

#[inline(always)]
pub(crate) fn drop_because(reason: Reason) -> i32 {
    report::reason(reason);
    DROP
}
