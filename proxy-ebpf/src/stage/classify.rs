//! Decides what a parsed packet may be. Foreign packets leave after this stage, so it only reads, and as little as
//! possible.

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

/// Classifies a packet at ingress.
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

/// Classifies a packet at an early hook: only packets that this hook may forward or drop.
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

/// Classifies a packet that did not arrive on a device: a process of this node sends it, or a container or guest on the LAN
/// behind a device on top of this one (macvlan, ipvlan, macvtap), whose address is not one of the node.
#[inline(always)]
pub fn local_origin<M: FlowTable, F: Frame>(maps: M, frame: F, packet: &Packet<Words<M>>) -> Step {
    let key = &packet.key;
    let may_be_frontend = maps.may_be(Role::Frontend, &key.dst, key.dst_port, key.proto);
    if !may_be_frontend && !maps.is_service_address(&key.dst) || maps.node_addr(&key.src) & NODE_ADDR_OWN == 0
    {
        return leaving(maps, frame, packet);
    }
    if !may_be_frontend {
        return Step::NewFlow;
    }
    // A packet that this node has forwarded passes the hook of its egress device. It must not be translated again if its
    // endpoint is also the frontend of another Service.
    if is_forwarded(maps, packet) { leaving(maps, frame, packet) } else { Step::Established }
}

/// Classifies a packet at egress that is neither a reply nor to a frontend. It passes, unless its replies could be
/// mistaken. netfilter (MASQUERADE) may choose any source port, and a process may bind any: replies to a SNAT port would be
/// taken for those to a packet with SNAT, and replies to a frontend's port for a client's packets.
#[inline(always)]
pub fn leaving<M: FlowTable, F: Frame>(maps: M, frame: F, packet: &Packet<Words<M>>) -> Step {
    let key = &packet.key;
    let may_share_port = maps.config().is_some_and(|config| config.is_snat_port(key.src_port))
        && !frame.is_translated()
        && maps.may_be(Role::Backend, &key.dst, key.dst_port, key.proto)
        && maps.node().is_some_and(|node| same(&node.source, &key.src));
    if may_share_port {
        Step::DirectEgress
    } else if maps.may_be(Role::Frontend, &key.src, key.src_port, key.proto) && !frame.is_translated() {
        Step::DirectFrontendSource
    } else {
        Step::Pass
    }
}

/// Whether this node may have forwarded the packet: it goes to an endpoint, from a SNAT port.
#[inline(always)]
fn is_forwarded<M: FlowTable>(maps: M, packet: &Packet<Words<M>>) -> bool {
    let key = &packet.key;
    may_be_snat(maps, key.src_port)
        && maps.may_be(Role::Backend, &key.dst, key.dst_port, key.proto)
        && is_snat(maps, key.src_port, &key.src)
}

/// Whether the port is a SNAT port by the current settings, or may have been one by earlier settings.
#[inline(always)]
fn may_be_snat<M: FlowTable>(maps: M, port: u16) -> bool {
    maps.config().is_some_and(|config| config.flags & CONFIG_SNAT_MOVED != 0 || config.is_snat_port(port))
}

/// Whether the port is a SNAT port, or may have been one by earlier settings because the address is one of this node.
#[inline(always)]
fn is_snat<M: FlowTable>(maps: M, port: u16, addr: &Words<M>) -> bool {
    maps.config().is_some_and(|config| config.is_snat_port(port)) || maps.node_addr(addr) & NODE_ADDR_OWN != 0
}

/// Whether the packet may be the reply to a packet that was forwarded under an address of this node (SNAT).
#[inline(always)]
pub fn may_be_snat_reply<M: FlowTable>(maps: M, packet: &Packet<Words<M>>) -> bool {
    let key = &packet.key;
    may_be_snat(maps, key.dst_port)
        && maps.may_be(Role::Backend, &key.src, key.src_port, key.proto)
        && is_snat(maps, key.dst_port, &key.dst)
}

/// Returns [`Step::Direct`] if the packet goes directly to an endpoint and could be mistaken for a packet of a flow. Of
/// TCP, only the first segment is checked, unless direct connections exist already.
#[inline(always)]
pub fn may_be_direct<M: FlowTable>(maps: M, packet: &Packet<Words<M>>) -> Step {
    let key = &packet.key;
    let begins = key.proto != PROTO_TCP || packet.tcp_flags & (tcp::SYN | tcp::ACK) == tcp::SYN;
    if !begins && maps.direct_seen().is_none_or(|seen| seen.load() == 0) {
        return Step::Pass;
    }
    if maps.may_be(Role::Backend, &key.dst, key.dst_port, key.proto) { Step::Direct } else { Step::Pass }
}

/// Whether the source of a packet at egress may be a backend.
#[inline(always)]
pub fn may_be_reply<M: FlowTable>(maps: M, packet: &Packet<Words<M>>) -> bool {
    let key = &packet.key;
    maps.may_be(Role::Backend, &key.src, key.src_port, key.proto)
}
