//! Decides what a parsed packet may be. Foreign packets leave after this stage, so it only reads, and as little as
//! possible.

use proxy_common::PROTO_TCP;
use proxy_common::config::{CONFIG_SNAT_MOVED, CONFIG_SOURCES};
use proxy_common::conntrack::tcp;
use proxy_common::flow::FlowKey;
use proxy_common::node::NODE_ADDR_OWN;
use proxy_common::prefilter::Role;

use super::seen::clear_direct_seen;
use crate::context::{Packet, PacketCtx};
use crate::env::{FlowTable, Words};
use crate::flow::index::{self, NO_FLOW_GENERATION};
use crate::flow::track;
use crate::frame::Frame;
use crate::header::same;
use crate::step::{Lookup, Step};

/// Classifies a packet at ingress.
#[inline(always)]
pub fn incoming<M: FlowTable>(maps: M, packet: &Packet<Words<M>>) -> Step {
    match client_or_snat_reply(maps, packet) {
        Some(lookup) => lookup.into(),
        None if maps.is_service_address(&packet.key.dst) => Step::NewFlow,
        None => find_direct(maps, packet).map_or(Step::Pass, Step::from),
    }
}

/// Classifies a packet at an early hook: only packets that this hook may forward or drop.
#[inline(always)]
pub fn early<M: FlowTable>(maps: M, packet: &Packet<Words<M>>) -> Step {
    client_or_snat_reply(maps, packet).map_or(Step::Pass, Step::from)
}

#[inline(always)]
fn client_or_snat_reply<M: FlowTable>(maps: M, packet: &Packet<Words<M>>) -> Option<Lookup> {
    let lookup = to_frontend(maps, packet);
    if lookup.is_some() { lookup } else { may_be_snat_reply(maps, packet) }
}

#[inline(always)]
fn to_frontend<M: FlowTable>(maps: M, packet: &Packet<Words<M>>) -> Option<Lookup> {
    let key = &packet.key;
    maps.may_be(Role::Frontend, &key.dst, key.dst_port, key.proto).leads_to(Lookup::Established)
}

/// Classifies a packet that did not arrive on a device: a process of this node sends it, or a container or guest on the LAN
/// behind a device on top of this one (macvlan, ipvlan, macvtap), whose address is not one of the node.
#[inline(always)]
pub fn local_origin<M: FlowTable, F: Frame>(maps: M, frame: F, packet: &Packet<Words<M>>) -> Step {
    if frame.is_translated() {
        // A translated packet passes the hook of a lower device. It must not be translated again if its endpoint is also the
        // frontend of another Service.
        return Step::Pass;
    }
    let (key, lookup) = (&packet.key, to_frontend(maps, packet));
    let passes = match lookup {
        // The socket programs have translated the call to a Service, and the endpoint is also the frontend of a Service. The last
        // segments of such a connection have no socket.
        Some(_) => {
            frame.is_for_backend_of_socket(&key.dst, key.dst_port)
                || !begins(packet)
                    && !frame.has_socket(key.src_port)
                    && track::find_called(maps, key).is_none()
        }
        None => !maps.is_service_address(&key.dst),
    };
    if passes || maps.node_addr(&key.src) & NODE_ADDR_OWN == 0 {
        return leaving(maps, frame, packet);
    }
    lookup.map_or(Step::NewFlow, Step::from)
}

/// Classifies a packet at egress that is neither a reply nor to a frontend. It passes, unless its replies could be
/// mistaken. netfilter (MASQUERADE) may choose any source port, and a process may bind any: replies to a SNAT port would be
/// taken for those to a packet with SNAT, and replies to a frontend's port for a client's packets.
#[inline(always)]
pub fn leaving<M: FlowTable, F: Frame>(maps: M, frame: F, packet: &Packet<Words<M>>) -> Step {
    let key = &packet.key;
    if frame.is_translated() {
        return Step::Pass;
    }
    let Some(config) = maps.config() else { return Step::Pass };
    let is_snat_port = config.is_snat_port(key.src_port);
    if (is_snat_port || config.flags & CONFIG_SNAT_MOVED != 0)
        && may_be_source(maps, &key.src)
        && let Some(lookup) =
            maps.may_be(Role::Backend, &key.dst, key.dst_port, key.proto).leads_to(Lookup::DirectEgress)
        && (is_snat_port || has_flow(maps, key))
    {
        return lookup.into();
    }
    let from_frontend = maps.may_be(Role::Frontend, &key.src, key.src_port, key.proto);
    from_frontend.leads_to(Lookup::DirectFrontendSource).map_or(Step::Pass, Step::from)
}

/// Whether packets with this key, or their replies, belong to a flow.
#[inline(always)]
fn has_flow<M: FlowTable>(maps: M, key: &FlowKey<Words<M>>) -> bool {
    track::find_called(maps, key).is_some() || track::find_called(maps, &key.reversed()).is_some()
}

/// Whether SNAT may use an address as source.
#[inline(always)]
fn may_be_source<M: FlowTable>(maps: M, addr: &Words<M>) -> bool {
    maps.node().is_some_and(|node| same(&node.source, addr))
        || maps.config().is_some_and(|config| config.flags & CONFIG_SOURCES != 0)
            && maps.node_addr(addr) & NODE_ADDR_OWN != 0
}

/// Returns [`Lookup::SnatReply`] if the packet may be the reply to a packet that was forwarded under an address of this node
/// (SNAT). The port is a SNAT port by the current settings, or may have been one by earlier settings.
#[inline(always)]
pub fn may_be_snat_reply<M: FlowTable>(maps: M, packet: &Packet<Words<M>>) -> Option<Lookup> {
    let (key, config) = (&packet.key, maps.config()?);
    let is_snat_port = config.is_snat_port(key.dst_port);
    if !is_snat_port && config.flags & CONFIG_SNAT_MOVED == 0 {
        return None;
    }
    let from_backend = maps.may_be(Role::Backend, &key.src, key.src_port, key.proto);
    let is_snat = |_: &Lookup| is_snat_port || maps.node_addr(&key.dst) & NODE_ADDR_OWN != 0;
    from_backend.leads_to(Lookup::SnatReply).filter(is_snat)
}

/// Returns [`Lookup::Direct`] if the packet goes directly to an endpoint and could be mistaken for a packet of a flow. Of
/// TCP, only the first segment is checked, unless the client may have a direct flow.
#[inline(always)]
pub fn may_be_direct<M: FlowTable>(maps: M, packet: &Packet<Words<M>>) -> Option<Lookup> {
    let key = &packet.key;
    if !begins(packet) && maps.may_have_direct_flow(&key.src, key.src_port, key.proto).is_no() {
        return None;
    }
    to_endpoint(maps, packet)
}

/// Returns [`Lookup::Direct`] if the packet's destination may be an endpoint.
#[inline(always)]
pub fn to_endpoint<M: FlowTable>(maps: M, packet: &Packet<Words<M>>) -> Option<Lookup> {
    let key = &packet.key;
    maps.may_be(Role::Backend, &key.dst, key.dst_port, key.proto).leads_to(Lookup::Direct)
}

/// Whether the packet may be the first one of a connection.
#[inline(always)]
fn begins<A>(packet: &Packet<A>) -> bool {
    packet.key.proto != PROTO_TCP || packet.tcp_flags & (tcp::SYN | tcp::ACK) == tcp::SYN
}

/// Returns the same as [`may_be_direct`] if a flow exists to which the packet may belong, or which has the packet's replies.
/// Most packets to endpoints have none, and pass without a program that writes to packets.
#[inline(always)]
fn find_direct<M: FlowTable>(maps: M, packet: &Packet<Words<M>>) -> Option<Lookup> {
    let (key, lookup) = (&packet.key, may_be_direct(maps, packet)?);
    let time = maps.time()?;
    let mark = maps.may_have_direct_flow(&key.src, key.src_port, key.proto);
    if !mark.is_no() {
        if track::find_called(maps, key).is_some() {
            return Some(lookup);
        }
        clear_direct_seen(maps, key, time);
    }
    (begins(packet) && track::find_called(maps, &key.reversed()).is_some()).then_some(lookup)
}

/// Returns [`Lookup::Reply`] if the packet at egress belongs to a flow whose backend has sent it, and notes the flow in the
/// context.
#[inline(always)]
pub fn find_reply<M: FlowTable>(maps: M, ctx: &mut PacketCtx<Words<M>>) -> Option<Lookup> {
    let key = &ctx.packet.key;
    let lookup = maps.may_be(Role::Backend, &key.src, key.src_port, key.proto).leads_to(Lookup::Reply)?;
    ctx.found = index::find(maps, key, key.hash(maps.config()?.flow_seed));
    if ctx.found == NO_FLOW_GENERATION { None } else { Some(lookup) }
}
