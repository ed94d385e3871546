//! IP fragments. Only the first fragment has ports: the programs store them, and translate the later fragments with them.
//! Fragments are not queued: a later fragment that arrives before its first one has no ports.

use proxy_common::fragment::{FRAGMENT_SECS, FragmentEntry, FragmentKey};
use proxy_common::prefilter::Role;
use proxy_common::reason::Reason;
use proxy_common::{PROTO_SCTP, V4, V6};

use crate::context::PacketCtx;
use crate::env::{Fragments, Services, Words};
use crate::frame::Frame;
use crate::header::{Header, Read};
use crate::parse::Stop;
use crate::select::lookup;

/// A family whose later fragments are matched to the first one.
pub trait Fragmented: Read {
    /// Whether the protocol is part of the key that identifies a packet's fragments.
    const BY_PROTO: bool;
}

impl Fragmented for V4 {
    const BY_PROTO: bool = true;
}

impl Fragmented for V6 {
    const BY_PROTO: bool = false;
}

/// Returns the key of the packet that a fragment belongs to.
#[inline(always)]
pub fn key_of<Fam: Fragmented>(header: &Header<Fam::Words>) -> FragmentKey<Fam::Words> {
    let proto = if Fam::BY_PROTO { u32::from(header.proto) } else { 0 };
    FragmentKey { src: header.src, dst: header.dst, id: header.id, proto }
}

/// Stores the ports of a first fragment that was parsed into `ctx`.
#[inline(always)]
pub fn first<M: Fragments + Services<Family: Fragmented>, F: Frame>(
    maps: M,
    frame: F,
    ctx: &PacketCtx<Words<M>>,
) -> Result<(), Stop> {
    let key = &ctx.packet.key;
    if key.proto == PROTO_SCTP {
        // The SCTP checksum can be corrected only with the length of the whole packet, which a fragment does not tell.
        return Err(Stop::Refused(Reason::Fragment));
    }
    // Entries of foreign packets would evict those of Services' packets. A packet that arrived encapsulated is a Service's.
    if ctx.tunnelled == 0
        && maps.may_be(Role::Frontend, &key.dst, key.dst_port, key.proto).is_no()
        && maps.may_be(Role::Backend, &key.src, key.src_port, key.proto).is_no()
    {
        return Ok(());
    }
    let Some(header) = <M::Family as Read>::read(frame, frame.link_header() as u32) else {
        return Err(Stop::Refused(Reason::Malformed));
    };
    let Some(time) = maps.time() else { return Ok(()) };
    let entry = FragmentEntry {
        src_port: key.src_port,
        dst_port: key.dst_port,
        proto: u16::from(key.proto),
        length: ctx.packet.length as u16,
        seen: time.now,
    };
    // If the update fails, the later fragments are dropped and counted.
    let _ = maps.put_fragment(&key_of::<M::Family>(&header), &entry);
    Ok(())
}

/// Fills the context for a later fragment: its addresses, and the ports and the length that its first fragment had.
#[inline(always)]
pub fn later<M: Fragments + Services<Family: Fragmented>, F: Frame>(
    maps: M,
    frame: F,
    ctx: &mut PacketCtx<Words<M>>,
) -> Result<(), Stop> {
    let Some(header) = <M::Family as Read>::read(frame, frame.link_header() as u32) else {
        return Err(Stop::Refused(Reason::Malformed));
    };
    let Some(time) = maps.time() else { return Err(Stop::Refused(Reason::Fragment)) };
    let entry = maps.fragment(&key_of::<M::Family>(&header));
    // Another CPU may be a tick ahead.
    let age = |entry: &FragmentEntry| time.now.wrapping_sub(entry.seen).wrapping_add(time.config.hz);
    let is_valid = |entry: &FragmentEntry| age(entry) <= time.config.hz * (FRAGMENT_SECS + 1);
    let Some(entry) = entry.filter(is_valid) else {
        // First fragments to unmanaged addresses pass, too.
        let is_ours = maps.is_service_address(&header.dst)
            && lookup::why_nothing(maps, header.dst) != Reason::UnmanagedAddress;
        return Err(Stop::Refused(if is_ours { Reason::FragmentWithoutFirst } else { Reason::Fragment }));
    };
    ctx.first_length = u32::from(entry.length);
    let packet = &mut ctx.packet;
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
