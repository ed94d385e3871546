//! Properties of the model itself, tested without a kernel: translation there and back restores the packet, and a right
//! checksum stays right.

use std::net::SocketAddr;

use etherparse::{NetSlice, SlicedPacket, TransportSlice};
use libtest_mimic::Failed;

use crate::bytes::{Bytes, Random};
use crate::case;
use crate::model::parse::{Parsed, parse};
use crate::model::rewrite::{Expected, translated};
use crate::report::hex;
use crate::scenario::{SCTP, Scenario};

const CASES: u32 = 3_000;

/// Whether `etherparse` finds all checksums of an unfragmented packet right; `None` if it cannot tell.
fn is_right(bytes: &[u8]) -> Option<bool> {
    let sliced = SlicedPacket::from_ethernet(bytes).ok()?;
    let header = match sliced.net? {
        NetSlice::Ipv4(ip) if !ip.header().more_fragments() => {
            if ip.header().header_checksum() != ip.header().to_header().calc_header_checksum() {
                return Some(false);
            }
            Ok(ip.header().to_header())
        }
        NetSlice::Ipv6(ip) => Err(ip.header().to_header()),
        _ => return None,
    };
    match sliced.transport? {
        TransportSlice::Tcp(tcp) => {
            let wanted = match &header {
                Ok(ip) => tcp.to_header().calc_checksum_ipv4(ip, tcp.payload()).ok()?,
                Err(ip) => tcp.to_header().calc_checksum_ipv6(ip, tcp.payload()).ok()?,
            };
            Some(wanted == tcp.checksum())
        }
        TransportSlice::Udp(udp) if udp.checksum() != 0 => {
            let wanted = match &header {
                Ok(ip) => udp.to_header().calc_checksum_ipv4(ip, udp.payload()).ok()?,
                Err(ip) => udp.to_header().calc_checksum_ipv6(ip, udp.payload()).ok()?,
            };
            Some(wanted == udp.checksum())
        }
        _ => None,
    }
}

/// Translates each packet of random cases to random addresses and ports, and back.
pub fn there_and_back() -> Result<(), Failed> {
    let (mut random, mut right) = (Random::new(7), 0);
    for _ in 0..CASES {
        let bytes = case::random_bytes(&mut random);
        let mut rest = Bytes::new(&bytes);
        let scenario = Scenario::decode(&mut rest);
        while let Some(step) = case::next(&mut rest, &scenario, &[]) {
            let case::Step::Packet(_, _, packet) = step else { continue };
            right += u32::from(one(&mut random, &packet)?);
        }
    }
    if right < CASES / 2 {
        Err(format!("only {right} packets had checksums that can be checked").into())
    } else {
        Ok(())
    }
}

fn one(random: &mut Random, packet: &[u8]) -> Result<bool, Failed> {
    let Parsed::Segment(segment) = parse(packet) else { return Ok(false) };
    let mut other = |addr: SocketAddr| {
        let mut octets = [0; 16];
        random.fill(&mut octets);
        let port = u16::from_be_bytes([octets[0], octets[1]]);
        let ip =
            if addr.is_ipv4() { <[u8; 4]>::try_from(&octets[..4]).unwrap().into() } else { octets.into() };
        SocketAddr::new(ip, port)
    };
    let (src, dst) = (other(segment.src), other(segment.dst));
    let there = translated(packet, &segment, src, dst).bytes;
    let Parsed::Segment(changed) = parse(&there) else {
        return Err(format!("it cannot be read any more:\n{}", hex(packet)).into());
    };
    if (changed.src, changed.dst, changed.length()) != (src, dst, segment.length()) {
        return Err(format!("it has other ends:\n{}", hex(&there)).into());
    }
    let back = translated(&there, &changed, segment.src, segment.dst);
    // In a checksum that was wrong, all zeros and all ones count as the same.
    let loose = translated(packet, &segment, segment.src, segment.dst).loose;
    if !(Expected { loose, ..back }).is(packet) {
        return Err(format!("there and back is not the same:\n{}\n{}", hex(packet), hex(&there)).into());
    }
    let before = is_right(packet);
    if segment.proto != SCTP && before != is_right(&there) {
        return Err(
            format!("it was right ({before:?}), or became so:\n{}\n{}", hex(packet), hex(&there)).into()
        );
    }
    Ok(before == Some(true))
}
