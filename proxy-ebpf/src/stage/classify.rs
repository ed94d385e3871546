//! What a parsed packet may be: the stage that foreign packets leave after, so it reads only, and as little as it can.

use proxy_common::PROTO_TCP;
use proxy_common::config::CONFIG_SNAT_MOVED;
use proxy_common::conntrack::tcp;
use proxy_common::node::NODE_ADDR_OWN;
use proxy_common::prefilter::Role;

use crate::context::Packet;
use crate::env::{FlowTable, Words};
use crate::frame::Frame;
use crate::header::same;
use crate::shared::Shared as _;
use crate::step::Step;

/// A packet on its way in.
#[inline(always)]
pub fn incoming<M: FlowTable>(maps: M, packet: &Packet<Words<M>>) -> Step {
    let key = &packet.key;
    if maps.may_be(Role::Frontend, &key.dst, key.dst_port, key.proto) {
        return Step::Established;
    }
    if may_be_snat_reply(maps, packet) {
        return Step::SnatReply;
    }
    if maps.is_service_address(&key.dst) {
        return Step::NewFlow;
    }
    may_be_direct(maps, packet)
}

/// A packet at an early hook: only what it may forward or drop.
#[inline(always)]
pub fn early<M: FlowTable>(maps: M, packet: &Packet<Words<M>>) -> Step {
    let key = &packet.key;
    if maps.may_be(Role::Frontend, &key.dst, key.dst_port, key.proto) {
        Step::Established
    } else if may_be_snat_reply(maps, packet) {
        Step::SnatReply
    } else {
        Step::Pass
    }
}

/// A packet that a process of this node sends: no hook met it before.
#[inline(always)]
pub fn local_origin<M: FlowTable, F: Frame>(maps: M, frame: F, packet: &Packet<Words<M>>) -> Step {
    let key = &packet.key;
    if maps.may_be(Role::Frontend, &key.dst, key.dst_port, key.proto) {
        // What was forwarded from here passes another device's hook, and is not to be translated once more where one
        // Service's endpoint is another one's frontend.
        if is_forwarded(maps, packet) { leaving(maps, frame, packet) } else { Step::Established }
    } else if maps.is_service_address(&key.dst) {
        Step::NewFlow
    } else {
        leaving(maps, frame, packet)
    }
}

/// A packet on its way out that is no reply and to no frontend: it passes, unless its answers could be taken for something else.
/// netfilter (MASQUERADE) may give any source port, or a process may have bound it: one under which packets are forwarded from here,
/// whose answers would be taken for those to such a packet; or that of a frontend, whose answers would be taken for a client's packets.
#[inline(always)]
pub fn leaving<M: FlowTable, F: Frame>(maps: M, frame: F, packet: &Packet<Words<M>>) -> Step {
    let key = &packet.key;
    let may_share_port = maps.config().is_some_and(|config| config.is_snat_port(key.src_port))
        && !frame.is_translated()
        && maps.may_be(Role::Backend, &key.dst, key.dst_port, key.proto)
        && maps.node().is_some_and(|node| same(&node.source, &key.src));
    if may_share_port {
        Step::DirectOut
    } else if maps.may_be(Role::Frontend, &key.src, key.src_port, key.proto) && !frame.is_translated() {
        Step::DirectOwn
    } else {
        Step::Pass
    }
}

/// Whether the packet may have been forwarded from here: it goes to an endpoint, from a port that is for that.
#[inline(always)]
fn is_forwarded<M: FlowTable>(maps: M, packet: &Packet<Words<M>>) -> bool {
    let key = &packet.key;
    may_be_snat(maps, key.src_port)
        && maps.may_be(Role::Backend, &key.dst, key.dst_port, key.proto)
        && is_snat(maps, key.src_port, &key.src)
}

/// Whether packets may be forwarded from here under this port, by the settings of now or of before.
#[inline(always)]
fn may_be_snat<M: FlowTable>(maps: M, port: u16) -> bool {
    maps.config().is_some_and(|config| config.flags & CONFIG_SNAT_MOVED != 0 || config.is_snat_port(port))
}

/// Whether packets are forwarded from here under this port, or may have been under a port of before and this address.
#[inline(always)]
fn is_snat<M: FlowTable>(maps: M, port: u16, addr: &Words<M>) -> bool {
    maps.config().is_some_and(|config| config.is_snat_port(port)) || maps.node_addr(addr) & NODE_ADDR_OWN != 0
}

/// Whether the packet may be the reply to one that was forwarded under an address of this node.
#[inline(always)]
pub fn may_be_snat_reply<M: FlowTable>(maps: M, packet: &Packet<Words<M>>) -> bool {
    let key = &packet.key;
    may_be_snat(maps, key.dst_port)
        && maps.may_be(Role::Backend, &key.src, key.src_port, key.proto)
        && is_snat(maps, key.dst_port, &key.dst)
}

/// Whether the packet goes straight to an endpoint, and could be mistaken for one of a flow: a connection can only at its
/// start, unless there are such connections already.
#[inline(always)]
pub fn may_be_direct<M: FlowTable>(maps: M, packet: &Packet<Words<M>>) -> Step {
    let key = &packet.key;
    let begins = key.proto != PROTO_TCP || packet.tcp_flags & (tcp::SYN | tcp::ACK) == tcp::SYN;
    if !begins && maps.direct_seen().is_none_or(|seen| seen.load() == 0) {
        return Step::Pass;
    }
    if maps.may_be(Role::Backend, &key.dst, key.dst_port, key.proto) { Step::Direct } else { Step::Pass }
}

/// Whether the source of a packet on its way out may be a backend.
#[inline(always)]
pub fn may_be_reply<M: FlowTable>(maps: M, packet: &Packet<Words<M>>) -> bool {
    let key = &packet.key;
    maps.may_be(Role::Backend, &key.src, key.src_port, key.proto)
}
