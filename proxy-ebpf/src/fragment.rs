//! Packets that come in pieces. Only the first fragment has ports; what it says is kept, and those that follow are
//! translated as it was. Nothing is kept back: a later fragment whose first did not pass before it has no ports.

use aya_ebpf::bindings::__sk_buff;
use proxy_common::filter::Role;
use proxy_common::fragment::{FRAGMENT_SECS, FragmentEntry, FragmentKey};
use proxy_common::reason::Reason;
use proxy_common::{Family, PROTO_SCTP, V4, V6};

use crate::flow::Time;
use crate::header::{Header, Read};
use crate::lookup;
use crate::maps::{self, Tables};
use crate::net::link_header;
use crate::packet::{Packet, Stop};
use crate::skb::Skb;

/// A family whose fragments are put in relation.
pub trait Fragments: Tables + Read {
    /// Whether the protocol is part of what identifies a packet.
    const BY_PROTO: bool;
    /// Notes the ports of a first fragment that was parsed into `packet`.
    fn first(skb: Skb, packet: &mut Packet<Self::Words>) -> Result<(), Stop>;
    /// Fills in `packet` what is known of a later one.
    fn later(skb: Skb, packet: &mut Packet<Self::Words>) -> Result<(), Stop>;
}

#[inline(always)]
fn key_of<F: Fragments>(header: &Header<F::Words>) -> FragmentKey<F::Words> {
    let proto = if F::BY_PROTO { u32::from(header.proto) } else { 0 };
    FragmentKey { src: header.src, dst: header.dst, id: header.id, proto }
}

/// [`Fragments::first`].
#[inline(always)]
fn first<F: Fragments>(skb: Skb, packet: &Packet<F::Words>) -> Result<(), Stop> {
    let key = &packet.key;
    // Those of others would push ours out.
    if !maps::may_be(Role::Frontend, &key.dst, key.dst_port, key.proto)
        && !maps::may_be(Role::Backend, &key.src, key.src_port, key.proto)
    {
        return Ok(());
    }
    if key.proto == PROTO_SCTP {
        // Its checksum can be changed only by who knows how long the whole packet is.
        return Err(Stop::Because(Reason::Fragment));
    }
    let Some(header) = F::read(skb, link_header() as u32) else {
        return Err(Stop::Because(Reason::Malformed));
    };
    let Some(time) = Time::now() else { return Ok(()) };
    let entry = FragmentEntry {
        src_port: key.src_port,
        dst_port: key.dst_port,
        proto: u32::from(key.proto),
        seen: time.now,
    };
    // If it cannot be kept, those that follow are dropped and counted.
    let _ = F::put_fragment(&key_of::<F>(&header), &entry);
    Ok(())
}

/// [`Fragments::later`].
#[inline(always)]
fn later<F: Fragments>(skb: Skb, packet: &mut Packet<F::Words>) -> Result<(), Stop> {
    let Some(header) = F::read(skb, link_header() as u32) else {
        return Err(Stop::Because(Reason::Malformed));
    };
    let Some(time) = Time::now() else { return Err(Stop::Because(Reason::Fragment)) };
    let alone = if lookup::is_service_address::<F>(&header.dst) {
        Reason::FragmentWithoutFirst
    } else {
        Reason::Fragment
    };
    let Some(entry) = F::fragment(&key_of::<F>(&header)) else { return Err(Stop::Because(alone)) };
    if time.now.wrapping_sub(entry.seen) > time.config.hz * FRAGMENT_SECS {
        return Err(Stop::Because(alone));
    }
    packet.key.src = header.src;
    packet.key.dst = header.dst;
    packet.key.src_port = entry.src_port;
    packet.key.dst_port = entry.dst_port;
    packet.key.proto = entry.proto as u8;
    packet.l4 = 0;
    packet.length = header.end - link_header() as u32;
    packet.ip_check = header.check;
    packet.tcp_flags = 0;
    Ok(())
}

const DONE: i32 = 0;
const ALONE: i32 = 1;
const FOREIGN: i32 = 2;
const MALFORMED: i32 = 3;

fn number(result: Result<(), Stop>) -> i32 {
    match result {
        Ok(()) => DONE,
        Err(Stop::Because(Reason::FragmentWithoutFirst)) => ALONE,
        Err(Stop::Because(Reason::Fragment)) => FOREIGN,
        Err(_) => MALFORMED,
    }
}

fn result(number: i32) -> Result<(), Stop> {
    match number {
        DONE => Ok(()),
        ALONE => Err(Stop::Because(Reason::FragmentWithoutFirst)),
        FOREIGN => Err(Stop::Because(Reason::Fragment)),
        _ => Err(Stop::Because(Reason::Malformed)),
    }
}

/// As a function that the verifier checks once, on its own ("global").
macro_rules! fragments {
    ($family:ty, $fragment:ident, $by_proto:literal) => {
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $fragment(
            skb: *mut __sk_buff,
            packet: *mut Packet<<$family as Family>::Words>,
            is_first: u32,
        ) -> i32 {
            // SAFETY: the verifier lets callers pass memory of that size, or null.
            let Some(packet) = (unsafe { packet.as_mut() }) else { return MALFORMED };
            let skb = Skb::from_raw(skb);
            number(if is_first != 0 { first::<$family>(skb, packet) } else { later::<$family>(skb, packet) })
        }

        impl Fragments for $family {
            const BY_PROTO: bool = $by_proto;

            #[inline(always)]
            fn first(skb: Skb, packet: &mut Packet<Self::Words>) -> Result<(), Stop> {
                result($fragment(skb.raw(), packet, 1))
            }

            #[inline(always)]
            fn later(skb: Skb, packet: &mut Packet<Self::Words>) -> Result<(), Stop> {
                result($fragment(skb.raw(), packet, 0))
            }
        }
    };
}

fragments!(V4, fragment4, true);
fragments!(V6, fragment6, false);
