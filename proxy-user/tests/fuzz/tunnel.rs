//! Encapsulated packets, as nodes send them to each other (DSR): `docs/datapath.md`, "Direct server return".

use std::net::{IpAddr, SocketAddr};

use proxy_common::select::tunnel_tag;

use crate::forge::{ETHERNET, octets, sum};
use crate::model::parse::header_at;

/// A packet is encapsulated this often at most.
pub const MAX_HOPS: u8 = 4;

/// Returns the time to live, or hop limit, of an outer header. `hops`: how often the packet was encapsulated, or 0 if the first node
/// knows the connection from its first packet.
pub const fn time_to_live(hops: u8) -> u8 {
    [64, 128, 160, 192, 224][hops as usize]
}

/// Returns what [`time_to_live`] has written; routers may have decremented it by up to 31.
pub const fn hops_of(time_to_live: u8) -> u8 {
    time_to_live.saturating_sub(65) / 32
}

/// Returns the number by which another node knows an endpoint.
pub fn number_of(endpoint: SocketAddr) -> u16 {
    match endpoint.ip() {
        IpAddr::V4(ip) => tunnel_tag(&ip.octets(), endpoint.port()),
        IpAddr::V6(ip) => tunnel_tag(&ip.octets(), endpoint.port()),
    }
}

/// Whether a frame contains an IP packet inside an IP packet.
pub fn is_encapsulated(frame: &[u8]) -> bool {
    let at = match frame.get(12..14) {
        Some([0x08, 0x00]) => ETHERNET + 9,
        Some([0x86, 0xdd]) => ETHERNET + 6,
        _ => return false,
    };
    matches!(frame.get(at), Some(4 | 41))
}

/// Returns the outer header, and the frame of the inner packet. The outer header has no options.
pub fn taken_out(frame: &[u8]) -> Option<(Outer, Vec<u8>)> {
    if !is_encapsulated(frame) {
        return None;
    }
    let header = header_at(frame, ETHERNET)?;
    let (number, hops) = Outer::read(frame);
    let mut inner = frame[..12].to_vec();
    inner.extend(if header.proto == 41 { [0x86, 0xdd] } else { [0x08, 0x00] });
    inner.extend(frame.get(header.l4..)?);
    Some((Outer { src: header.src, dst: header.dst, number, hops }, inner))
}

/// An outer header.
#[derive(Clone, Copy, Debug)]
pub struct Outer {
    pub src: IpAddr,
    pub dst: IpAddr,
    pub number: u16,
    pub hops: u8,
}

impl Outer {
    /// Returns the number and the hop limit of the outer header of a frame.
    pub fn read(frame: &[u8]) -> (u16, u8) {
        let header = &frame[ETHERNET..];
        match header[0] >> 4 {
            4 => (u16::from_be_bytes([header[4], header[5]]), header[8]),
            _ => (u16::from_be_bytes([header[2], header[3]]), header[7]),
        }
    }

    /// Length of the outer header in bytes.
    pub fn length(&self) -> usize {
        if self.src.is_ipv4() { 20 } else { 40 }
    }

    /// Encapsulates the packet of a frame. `length`: length of the packet in bytes; there may be other bytes behind it.
    pub fn around(&self, frame: &[u8], length: usize) -> Vec<u8> {
        let (link, inner) = frame.split_at(ETHERNET);
        let proto = if link[12] == 0x86 { 41 } else { 4 };
        let [n0, n1] = self.number.to_be_bytes();
        let mut bytes = link[..12].to_vec();
        if self.src.is_ipv4() {
            bytes.extend([0x08, 0x00]);
            let [l0, l1] = (length as u16 + 20).to_be_bytes();
            let mut header = vec![0x45, 0, l0, l1, n0, n1, 0x40, 0, self.hops, proto, 0, 0];
            header.extend(octets(self.src));
            header.extend(octets(self.dst));
            let check = (!sum(&[&header])).to_be_bytes();
            header[10..12].copy_from_slice(&check);
            bytes.extend(header);
        } else {
            bytes.extend([0x86, 0xdd]);
            let [l0, l1] = (length as u16).to_be_bytes();
            bytes.extend([0x60, 0, n0, n1, l0, l1, proto, self.hops]);
            bytes.extend(octets(self.src));
            bytes.extend(octets(self.dst));
        }
        bytes.extend(inner);
        bytes
    }
}
