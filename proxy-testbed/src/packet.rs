//! Builds packets from their fields, with each checksum computed over the whole packet, and verifies the checksums of
//! packets that the programs return. No code is shared with the programs.

use std::net::{IpAddr, SocketAddr};

/// TCP flags.
pub const FIN: u8 = 1;
pub const SYN: u8 = 2;
pub const RST: u8 = 4;
pub const ACK: u8 = 16;

pub const ETHERNET: usize = 14;
pub const TCP: u8 = 6;
pub const UDP: u8 = 17;
pub const SCTP: u8 = 132;
const ICMP: u8 = 1;
const ICMPV6: u8 = 58;

/// The device's own address and that of its peer. The kernel expects that the first is zero for a packet to itself.
/// Destination and source MAC address of all frames.
pub const MACS: [[u8; 6]; 2] = [[2, 0, 0, 0, 0, 0xaa], [2, 0, 0, 0, 0, 0xbb]];

/// A TCP, UDP or SCTP packet between two sockets of one family.
#[derive(Clone, Debug)]
pub struct Packet {
    pub src: SocketAddr,
    pub dst: SocketAddr,
    pub proto: u8,
    pub flags: u8,
    /// TCP sequence number.
    pub seq: u32,
    /// TCP acknowledgement number.
    pub ack: u32,
    pub payload: Vec<u8>,
    /// IPv4 options, a multiple of four bytes.
    pub options: Vec<u8>,
    /// IPv6 extension headers: number and bytes; the first byte is replaced by the number of the next header.
    pub extensions: Vec<(u8, Vec<u8>)>,
    /// IPv4 flags and fragment offset, in units of eight bytes.
    pub fragment: u16,
    /// Whether a UDP or SCTP packet has no checksum.
    pub is_unchecked: bool,
}

impl Packet {
    pub fn new(proto: u8, src: SocketAddr, dst: SocketAddr) -> Self {
        assert_eq!(src.is_ipv4(), dst.is_ipv4());
        Self {
            src,
            dst,
            proto,
            flags: 0,
            seq: 7,
            ack: 9,
            payload: b"what does the fox say".to_vec(),
            options: Vec::new(),
            extensions: Vec::new(),
            fragment: 0,
            is_unchecked: false,
        }
    }

    pub fn tcp(flags: u8, src: SocketAddr, dst: SocketAddr) -> Self {
        Self { flags, ..Self::new(TCP, src, dst) }
    }

    pub fn udp(src: SocketAddr, dst: SocketAddr) -> Self {
        Self::new(UDP, src, dst)
    }

    #[must_use]
    pub fn payload(self, length: usize) -> Self {
        Self { payload: (0..length).map(|i| i as u8).collect(), ..self }
    }

    #[must_use]
    pub fn options(self, options: &[u8]) -> Self {
        Self { options: options.to_vec(), ..self }
    }

    #[must_use]
    pub fn extension(mut self, number: u8, bytes: &[u8]) -> Self {
        self.extensions.push((number, bytes.to_vec()));
        self
    }

    /// Returns the same packet with another destination.
    #[must_use]
    pub fn to(&self, dst: SocketAddr) -> Self {
        Self { dst, ..self.clone() }
    }

    /// Returns the same packet with another source.
    #[must_use]
    pub fn from(&self, src: SocketAddr) -> Self {
        Self { src, ..self.clone() }
    }

    /// Returns the packet with source and destination swapped.
    #[must_use]
    pub fn back(&self) -> Self {
        Self { src: self.dst, dst: self.src, ..self.clone() }
    }

    /// Returns the bytes of the packet on the wire.
    pub fn bytes(&self) -> Vec<u8> {
        let segment = self.segment();
        let mut bytes = MACS.concat();
        match (self.src.ip(), self.dst.ip()) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                bytes.extend([0x08, 0x00]);
                let mut header = vec![0x45 + (self.options.len() / 4) as u8, 0];
                header.extend(((20 + self.options.len() + segment.len()) as u16).to_be_bytes());
                header.extend([0x12, 0x34]);
                header.extend(self.fragment.to_be_bytes());
                header.extend([64, self.proto, 0, 0]);
                header.extend(src.octets());
                header.extend(dst.octets());
                header.extend(&self.options);
                let check = checksum(&[&header]);
                header[10..12].copy_from_slice(&check);
                bytes.extend(header);
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                bytes.extend([0x86, 0xdd]);
                let between: usize = self.extensions.iter().map(|(_, bytes)| bytes.len()).sum();
                let first = self.extensions.first().map_or(self.proto, |(number, _)| *number);
                bytes.extend([0x60, 0, 0, 0]);
                bytes.extend(((between + segment.len()) as u16).to_be_bytes());
                bytes.extend([first, 64]);
                bytes.extend(src.octets());
                bytes.extend(dst.octets());
                for (at, (_, extension)) in self.extensions.iter().enumerate() {
                    let next = self.extensions.get(at + 1).map_or(self.proto, |(number, _)| *number);
                    bytes.push(next);
                    bytes.extend(&extension[1..]);
                }
            }
            _ => unreachable!("`new` takes one family"),
        }
        bytes.extend(segment);
        bytes
    }

    /// Returns the type of the SCTP chunk that corresponds to the TCP flags.
    fn chunk(&self) -> u8 {
        match self.flags {
            SYN => 1,
            flags if flags == SYN | ACK => 2,
            flags if flags & RST != 0 => 6,
            flags if flags == FIN | ACK => 8,
            FIN => 7,
            _ => 0,
        }
    }

    /// Returns the offset of the segment in the frame.
    pub fn segment_at(&self) -> usize {
        self.bytes().len() - self.segment().len()
    }

    fn segment(&self) -> Vec<u8> {
        let mut segment = [self.src.port().to_be_bytes(), self.dst.port().to_be_bytes()].concat();
        let check_at = if self.proto == TCP {
            segment.extend([self.seq.to_be_bytes(), self.ack.to_be_bytes()].concat());
            segment.extend([0x50, self.flags, 0x20, 0, 0, 0, 0, 0]);
            16
        } else if self.proto == SCTP {
            segment.extend([0xde, 0xad, 0xbe, 0xef, 0, 0, 0, 0, self.chunk(), 0]);
            segment.extend(((4 + self.payload.len()) as u16).to_be_bytes());
            segment.extend(&self.payload);
            segment.resize(segment.len().next_multiple_of(4), 0);
            if !self.is_unchecked {
                let check = crc32c(&segment);
                segment[8..12].copy_from_slice(&check.to_le_bytes());
            }
            return segment;
        } else {
            segment.extend(((8 + self.payload.len()) as u16).to_be_bytes());
            segment.extend([0, 0]);
            6
        };
        segment.extend(&self.payload);
        if !self.is_unchecked {
            let pseudo = pseudo_header(self.src.ip(), self.dst.ip(), self.proto, segment.len());
            let mut check = checksum(&[&pseudo, &segment]);
            if self.proto == UDP && check == [0, 0] {
                check = [0xff, 0xff];
            }
            segment[check_at..check_at + 2].copy_from_slice(&check);
        }
        segment
    }

    /// Returns the packet in fragments of `size` bytes, a multiple of eight. The packet must have no options or extensions.
    pub fn fragments(&self, size: usize, id: u32) -> Vec<Vec<u8>> {
        let whole = self.bytes();
        let header = ETHERNET + if self.src.is_ipv4() { 20 } else { 40 };
        let pieces: Vec<_> = whole[header..].chunks(size).collect();
        let fragment = |(at, piece): (usize, &&[u8])| {
            let (offset, more) = ((at * size / 8) as u16, at + 1 < pieces.len());
            let mut bytes = whole[..header].to_vec();
            if self.src.is_ipv4() {
                let length = (20 + piece.len()) as u16;
                bytes[ETHERNET + 2..ETHERNET + 4].copy_from_slice(&length.to_be_bytes());
                bytes[ETHERNET + 4..ETHERNET + 6].copy_from_slice(&(id as u16).to_be_bytes());
                let word = offset | if more { 0x2000 } else { 0 };
                bytes[ETHERNET + 6..ETHERNET + 8].copy_from_slice(&word.to_be_bytes());
                correct(&mut bytes);
            } else {
                let length = (8 + piece.len()) as u16;
                bytes[ETHERNET + 4..ETHERNET + 6].copy_from_slice(&length.to_be_bytes());
                bytes[ETHERNET + 6] = 44;
                bytes.extend([self.proto, 0]);
                bytes.extend((offset << 3 | u16::from(more)).to_be_bytes());
                bytes.extend(id.to_be_bytes());
            }
            bytes.extend(*piece);
            bytes
        };
        pieces.iter().enumerate().map(fragment).collect()
    }

    /// Returns a fragment with another offset, in units of eight bytes.
    pub fn moved(fragment: &[u8], offset: u16) -> Vec<u8> {
        let mut bytes = fragment.to_vec();
        if bytes[ETHERNET] >> 4 == 4 {
            bytes[ETHERNET + 6..ETHERNET + 8].copy_from_slice(&offset.to_be_bytes());
            correct(&mut bytes);
        } else {
            let at = ETHERNET + 40 + 2;
            bytes[at..at + 2].copy_from_slice(&(offset << 3).to_be_bytes());
        }
        bytes
    }

    /// Returns the error "port unreachable" for this packet, as its destination sends it on the device where the packet
    /// arrived. The error quotes the first `quoted` bytes behind the Ethernet header.
    pub fn unreachable(&self, quoted: usize) -> Vec<u8> {
        self.unreachable_for(&self.bytes(), quoted)
    }

    /// Like `unreachable`, for a fragment of this packet.
    pub fn unreachable_for(&self, fragment: &[u8], quoted: usize) -> Vec<u8> {
        let kind = if self.src.is_ipv4() { [3, 3] } else { [1, 4] };
        let mut bytes = self.error_about(fragment, self.dst.ip(), kind, [0; 4], quoted);
        bytes[..12].rotate_left(6);
        bytes
    }

    /// Returns an ICMP error of this type and code about this packet, sent by `from`. `rest` is the second half of the ICMP
    /// header.
    pub fn error(&self, from: IpAddr, kind: [u8; 2], rest: [u8; 4], quoted: usize) -> Vec<u8> {
        self.error_about(&self.bytes(), from, kind, rest, quoted)
    }

    fn error_about(
        &self,
        bytes: &[u8],
        from: IpAddr,
        kind: [u8; 2],
        rest: [u8; 4],
        quoted: usize,
    ) -> Vec<u8> {
        let packet = &bytes[ETHERNET..];
        let quote = &packet[..quoted.min(packet.len())];
        let mut bytes = MACS.concat();
        let mut icmp = [kind[0], kind[1], 0, 0, rest[0], rest[1], rest[2], rest[3]];
        let check = match (from, self.src.ip()) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                bytes.extend([0x08, 0x00]);
                let [high, low] = ((28 + quote.len()) as u16).to_be_bytes();
                let mut header = vec![0x45, 0xc0, high, low, 0, 0, 0x40, 0, 64, ICMP, 0, 0];
                header.extend(src.octets());
                header.extend(dst.octets());
                let check = checksum(&[&header]);
                header[10..12].copy_from_slice(&check);
                bytes.extend(header);
                checksum(&[&icmp, quote])
            }
            (src, dst) => {
                bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
                bytes.extend(((8 + quote.len()) as u16).to_be_bytes());
                bytes.extend([ICMPV6, 64]);
                bytes.extend(octets(src));
                bytes.extend(octets(dst));
                let pseudo = pseudo_header(src, dst, ICMPV6, 8 + quote.len());
                checksum(&[&pseudo, &icmp, quote])
            }
        };
        icmp[2..4].copy_from_slice(&check);
        bytes.extend(icmp);
        bytes.extend(quote);
        bytes
    }
}

/// Returns the CRC-32C of RFC 9260, computed bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = !0u32;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
        }
    }
    !crc
}

fn octets(addr: IpAddr) -> Vec<u8> {
    match addr {
        IpAddr::V4(addr) => addr.octets().to_vec(),
        IpAddr::V6(addr) => addr.octets().to_vec(),
    }
}

fn pseudo_header(src: IpAddr, dst: IpAddr, proto: u8, length: usize) -> Vec<u8> {
    let mut header = [octets(src), octets(dst)].concat();
    header.extend((length as u32).to_be_bytes());
    header.extend([0, 0, 0, proto]);
    header
}

/// Returns the ones' complement sum; each part except the last must have an even length.
fn sum(parts: &[&[u8]]) -> u16 {
    let mut sum = 0u32;
    for part in parts {
        for pair in part.chunks(2) {
            sum += u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |low| u32::from(*low));
            sum = (sum & 0xffff) + (sum >> 16);
        }
    }
    sum as u16
}

fn checksum(parts: &[&[u8]]) -> [u8; 2] {
    (!sum(parts)).to_be_bytes()
}

/// Returns the source and the destination of a packet without options.
pub fn ends(bytes: &[u8]) -> (SocketAddr, SocketAddr) {
    let packet = &bytes[ETHERNET..];
    let port = |at: usize| u16::from_be_bytes([packet[at], packet[at + 1]]);
    if packet[0] >> 4 == 4 {
        let addr = |at: usize| IpAddr::from(<[u8; 4]>::try_from(&packet[at..at + 4]).unwrap());
        (SocketAddr::new(addr(12), port(20)), SocketAddr::new(addr(16), port(22)))
    } else {
        let addr = |at: usize| IpAddr::from(<[u8; 16]>::try_from(&packet[at..at + 16]).unwrap());
        (SocketAddr::new(addr(8), port(40)), SocketAddr::new(addr(24), port(42)))
    }
}

/// Corrects the checksum of an IPv4 header; an IPv6 header has none.
pub fn correct(bytes: &mut [u8]) {
    let packet = &mut bytes[ETHERNET..];
    if packet[0] >> 4 == 4 {
        let header = usize::from(packet[0] & 15) * 4;
        packet[10..12].copy_from_slice(&[0, 0]);
        let check = checksum(&[&packet[..header]]);
        packet[10..12].copy_from_slice(&check);
    }
}

/// Checks every checksum of a whole IPv4 or IPv6 packet without extension headers.
pub fn verify(bytes: &[u8]) -> Result<(), String> {
    let packet = &bytes[ETHERNET..];
    let (src, dst, proto, segment): (IpAddr, IpAddr, u8, &[u8]) = if packet[0] >> 4 == 4 {
        let header = usize::from(packet[0] & 15) * 4;
        if sum(&[&packet[..header]]) != 0xffff {
            return Err("IPv4 header checksum".into());
        }
        let length = usize::from(u16::from_be_bytes([packet[2], packet[3]]));
        if length != packet.len() {
            return Err(format!("{length} bytes stated, {} there", packet.len()));
        }
        let addr = |at: usize| IpAddr::from(<[u8; 4]>::try_from(&packet[at..at + 4]).unwrap());
        (addr(12), addr(16), packet[9], &packet[header..])
    } else {
        let length = usize::from(u16::from_be_bytes([packet[4], packet[5]]));
        if length + 40 != packet.len() {
            return Err(format!("{length} bytes stated, {} there", packet.len() - 40));
        }
        let addr = |at: usize| IpAddr::from(<[u8; 16]>::try_from(&packet[at..at + 16]).unwrap());
        (addr(8), addr(24), packet[6], &packet[40..])
    };
    let pseudo = match proto {
        UDP if segment[6..8] == [0, 0] => return Ok(()),
        SCTP => {
            let mut plain = segment.to_vec();
            plain[8..12].fill(0);
            let right = crc32c(&plain).to_le_bytes();
            return if segment[8..12] == right { Ok(()) } else { Err("SCTP: checksum".into()) };
        }
        TCP | UDP | ICMPV6 => pseudo_header(src, dst, proto, segment.len()),
        ICMP => Vec::new(),
        other => return Err(format!("protocol {other}")),
    };
    let total = sum(&[&pseudo, segment]);
    if total == 0xffff { Ok(()) } else { Err(format!("protocol {proto}: checksum adds up to {total:#x}")) }
}
