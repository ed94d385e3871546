//! Parses a frame into the context.

use proxy_common::PROTO_SCTP;
use proxy_common::flow::DIRECTION_FORWARD;
use proxy_common::node::NODE_ADDR_OWN;
use proxy_common::reason::{Reason, Verdict};

use super::stages::Stages;
use crate::context::PacketCtx;
use crate::env::Words;
use crate::frame::Frame;
use crate::header::{BROKEN, Read};
use crate::net::sctp;
use crate::parse::{Parse as _, Parsed, Stop};
use crate::report;
use crate::stage::receive::is_for_node;

/// Bytes of headers that must be readable: Ethernet, the longest IPv4 header or IPv6 with a few extensions, TCP.
const PULL: u32 = 128;

/// Parses a packet into the context.
#[inline(always)]
pub(super) fn parse<M, F>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>, direction: u8) -> Parsed
where
    M: Stages<F>,
    F: Frame,
{
    ctx.packet.key.direction = direction;
    ctx.packet.key.reserved = 0;
    // Without `walk`, the closure is not called.
    match M::Family::parse(frame.bounds(), frame.link_header(), &mut ctx.packet, false, |_, _| BROKEN) {
        Ok(()) => Parsed::Packet,
        Err(Stop::NotOurs) => Parsed::Foreign,
        Err(Stop::Control) => Parsed::Icmp,
        Err(Stop::Tunnel) => Parsed::Tunnel,
        Err(_) if direction == DIRECTION_FORWARD && !is_for_node(maps, frame) => Parsed::Foreign,
        Err(_) => maps.parse_pulled(frame, ctx),
    }
}

/// Makes more of the packet readable, and parses it. A separate function, since few packets need it, and it needs more room
/// on the stack.
#[inline(always)]
pub fn parse_pulled<M: Stages<F>, F: Frame>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>) -> Parsed {
    match pull(maps, frame, ctx) {
        Ok(()) => Parsed::Packet,
        Err(Stop::Control) => Parsed::Icmp,
        Err(Stop::Tunnel) => Parsed::Tunnel,
        Err(Stop::Refused(reason))
            if ctx.packet.key.direction == DIRECTION_FORWARD
                && (reason != Reason::HiddenPorts || is_to_node_or_service(maps, frame)) =>
        {
            report::reason(maps, reason);
            if reason.verdict() == Verdict::Drop { Parsed::Dropped } else { Parsed::Foreign }
        }
        Err(_) => Parsed::Foreign,
    }
}

/// Whether the packet's destination is an address of this node or of a Service.
#[inline(always)]
fn is_to_node_or_service<M: Stages<F>, F: Frame>(maps: M, frame: F) -> bool {
    let header = <M::Family as Read>::read(frame, frame.link_header() as u32);
    header.is_some_and(|header| {
        maps.is_service_address(&header.dst) || maps.node_addr(&header.dst) & NODE_ADDR_OWN != 0
    })
}

#[inline(always)]
fn pull<M: Stages<F>, F: Frame>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>) -> Result<(), Stop> {
    let bounds = frame.bounds();
    let wanted = if frame.length() < PULL { frame.length() } else { PULL };
    if bounds.end - bounds.data < wanted as usize {
        // Pulls nothing out of the packets of a list, whose headers are readable.
        let pulled = frame.pull(if frame.is_frag_list() { 0 } else { wanted });
        pulled.map_err(|_| Stop::Refused(Reason::Malformed))?;
    }
    let packet = &mut ctx.packet;
    let walk = |proto, offset| frame.walk_extensions(proto, offset);
    let parsed = M::Family::parse(frame.bounds(), frame.link_header(), packet, true, walk);
    if parsed.is_ok() && packet.key.proto == PROTO_SCTP {
        let mut chunk = 0u8;
        // Read by a helper: in a list of packets, the chunks are not in the directly readable part.
        let loaded = frame.load(packet.l4 + sctp::CHUNK, &mut chunk, 1);
        loaded.map_err(|_| Stop::Refused(Reason::Malformed))?;
        packet.tcp_flags = sctp::flags(chunk);
    }
    match parsed {
        Err(Stop::Retry) => Err(Stop::Refused(Reason::Malformed)),
        Err(Stop::First) => maps.first_fragment(frame, ctx),
        Err(Stop::Refused(Reason::Fragment)) => maps.later_fragment(frame, ctx),
        result => result,
    }
}
