//! Packets that come in pieces. Only the first fragment has ports; what it says is kept, and those that follow are
//! translated as it was. Nothing is kept back: a later fragment whose first did not pass before it has no ports.

use proxy_common::fragment::{FRAGMENT_SECS, FragmentEntry, FragmentKey};
use proxy_common::prefilter::Role;
use proxy_common::reason::Reason;
use proxy_common::{PROTO_SCTP, V4, V6};

use crate::context::{Packet, PacketCtx};
use crate::env::{Fragments, Services, Words};
use crate::frame::Frame;
use crate::header::{Header, Read};
use crate::parse::Stop;

/// A family whose fragments are put together.
pub trait Fragmented: Read {
    /// Whether the protocol is part of what identifies a packet.
    const BY_PROTO: bool;
}

impl Fragmented for V4 {
    const BY_PROTO: bool = true;
}

impl Fragmented for V6 {
    const BY_PROTO: bool = false;
}

/// The key of the packet that a fragment belongs to.
#[inline(always)]
pub fn key_of<Fam: Fragmented>(header: &Header<Fam::Words>) -> FragmentKey<Fam::Words> {
    let proto = if Fam::BY_PROTO { u32::from(header.proto) } else { 0 };
    FragmentKey { src: header.src, dst: header.dst, id: header.id, proto }
}

/// Notes the ports of a first fragment that was parsed into `ctx`.
#[inline(always)]
pub fn first<M, F>(maps: M, frame: F, ctx: &PacketCtx<Words<M>>) -> Result<(), Stop>
where
    M: Fragments + Services,
    M::Family: Fragmented,
    F: Frame,
{
    let key = &ctx.packet.key;
    // Those of others would push ours out. What came encapsulated is ours.
    if ctx.tunnelled == 0
        && !maps.may_be(Role::Frontend, &key.dst, key.dst_port, key.proto)
        && !maps.may_be(Role::Backend, &key.src, key.src_port, key.proto)
    {
        return Ok(());
    }
    if key.proto == PROTO_SCTP {
        // Its checksum can be changed only by who knows how long the whole packet is.
        return Err(Stop::Because(Reason::Fragment));
    }
    let Some(header) = <M::Family as Read>::read(frame, frame.link_header() as u32) else {
        return Err(Stop::Because(Reason::Malformed));
    };
    let Some(time) = maps.time() else { return Ok(()) };
    let entry = FragmentEntry {
        src_port: key.src_port,
        dst_port: key.dst_port,
        proto: u32::from(key.proto),
        seen: time.now,
    };
    // If it cannot be kept, those that follow are dropped and counted.
    let _ = maps.put_fragment(&key_of::<M::Family>(&header), &entry);
    Ok(())
}

/// Fills in `packet` what is known of a later fragment.
#[inline(always)]
pub fn later<M, F>(maps: M, frame: F, packet: &mut Packet<Words<M>>) -> Result<(), Stop>
where
    M: Fragments + Services,
    M::Family: Fragmented,
    F: Frame,
{
    let Some(header) = <M::Family as Read>::read(frame, frame.link_header() as u32) else {
        return Err(Stop::Because(Reason::Malformed));
    };
    let Some(time) = maps.time() else { return Err(Stop::Because(Reason::Fragment)) };
    let alone =
        if maps.is_service_address(&header.dst) { Reason::FragmentWithoutFirst } else { Reason::Fragment };
    let Some(entry) = maps.fragment(&key_of::<M::Family>(&header)) else { return Err(Stop::Because(alone)) };
    if time.now.wrapping_sub(entry.seen) > time.config.hz * FRAGMENT_SECS {
        return Err(Stop::Because(alone));
    }
    packet.key.src = header.src;
    packet.key.dst = header.dst;
    packet.key.src_port = entry.src_port;
    packet.key.dst_port = entry.dst_port;
    packet.key.proto = entry.proto as u8;
    packet.l4 = 0;
    packet.length = header.end - frame.link_header() as u32;
    packet.ip_check = header.check;
    packet.tcp_flags = 0;
    packet.seq = 0;
    packet.ack = 0;
    Ok(())
}
