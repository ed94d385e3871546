//! Packet headers, and the differences between the two address families in them.
//!
//! Fields wider than a byte are in network byte order. Addresses are 32-bit words, so that a word is one load; after an
//! Ethernet header of 14 bytes they are aligned on machines that need it (`NET_IP_ALIGN`).

/// Length of an Ethernet header without tags.
pub const ETHERNET: usize = 14;

/// `ETH_P_IP`, as `__sk_buff.protocol` holds it.
pub const ETHERTYPE_IPV4: u32 = (0x0800u16).to_be() as u32;
/// `ETH_P_IPV6`, as `__sk_buff.protocol` holds it.
pub const ETHERTYPE_IPV6: u32 = (0x86ddu16).to_be() as u32;

/// `ETH_P_8021Q` and `ETH_P_8021AD`, as `__sk_buff.protocol` holds them: below a first VLAN tag is another one.
pub const ETHERTYPES_VLAN: [u32; 2] = [(0x8100u16).to_be() as u32, (0x88a8u16).to_be() as u32];
/// The bits of a VLAN tag that hold the VLAN's number; the other bits hold a priority.
pub const VLAN_ID: u32 = 0xfff;

/// IPv4 header without options (RFC 791).
#[repr(C)]
pub struct Ipv4 {
    /// Version, and header length in words of 32 bits.
    pub version_length: u8,
    /// Type of service.
    pub tos: u8,
    /// Length of header and payload, in bytes.
    pub total_length: u16,
    /// Identification.
    pub id: u16,
    /// Three flags, and the fragment offset in words of 64 bits.
    pub fragment: u16,
    /// Time to live.
    pub ttl: u8,
    /// Protocol of the payload.
    pub protocol: u8,
    /// Checksum of the header.
    pub check: u16,
    /// Source.
    pub src: u32,
    /// Destination.
    pub dst: u32,
}

impl Ipv4 {
    /// An empty header, as a buffer.
    pub const ZERO: Self = Self {
        version_length: 0,
        tos: 0,
        total_length: 0,
        id: 0,
        fragment: 0,
        ttl: 0,
        protocol: 0,
        check: 0,
        src: 0,
        dst: 0,
    };
}

/// IPv6 header without extension headers (RFC 8200).
#[repr(C)]
pub struct Ipv6 {
    /// Version, traffic class, flow label.
    pub version_class_label: u32,
    /// Length of the payload after this header, in bytes.
    pub payload_length: u16,
    /// Protocol or extension header after this header.
    pub next_header: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Source.
    pub src: [u32; 4],
    /// Destination.
    pub dst: [u32; 4],
}

impl Ipv6 {
    /// An empty header, as a buffer.
    pub const ZERO: Self = Self {
        version_class_label: 0,
        payload_length: 0,
        next_header: 0,
        hop_limit: 0,
        src: [0; 4],
        dst: [0; 4],
    };
}

/// "More fragments" flag in [`Ipv4::fragment`].
pub const IPV4_MORE: u16 = 0x2000;
/// Fragment offset in [`Ipv4::fragment`].
pub const IPV4_OFFSET: u16 = 0x1fff;
/// "More fragments" flag in the third and fourth byte of an IPv6 fragment header.
pub const IPV6_MORE: u16 = 1;
/// Fragment offset in the same two bytes.
pub const IPV6_OFFSET: u16 = 0xfff8;

/// A TCP header without options (RFC 9293).
#[repr(C)]
pub struct TcpHeader {
    /// Source and destination port.
    pub ports: u32,
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgement number.
    pub ack: u32,
    /// Length of the header, flags, window.
    pub offset_flags_window: u32,
    /// Checksum, and the urgent pointer.
    pub check_urgent: u32,
}

/// Offsets in a TCP header.
pub mod tcp {
    /// Offset of the byte whose upper half is the header's length in words of 32 bits.
    pub const OFFSET: u32 = 12;
    /// Offset of the checksum.
    pub const CHECK: u32 = 16;
}

/// Length and offsets of a UDP header.
pub mod udp {
    /// Length of the header.
    pub const HEADER: usize = 8;
    /// Offset of the checksum.
    pub const CHECK: u32 = 6;
}

/// Lengths and offsets of SCTP (RFC 9260).
pub mod sctp {
    use proxy_common::conntrack::tcp;

    /// Length of the common header and of the header of the first chunk.
    pub const HEADER: usize = 16;
    /// Offset of the checksum, a CRC-32C.
    pub const CHECK: u32 = 8;
    /// Offset of the type of the first chunk.
    pub const CHUNK: u32 = 12;

    /// Returns the TCP flags that correspond to a chunk type.
    #[inline(always)]
    pub fn flags(chunk: u8) -> u16 {
        match chunk {
            // INIT, and INIT ACK.
            1 => tcp::SYN,
            2 => tcp::SYN | tcp::ACK,
            // ABORT.
            6 => tcp::RST,
            // SHUTDOWN, SHUTDOWN ACK, SHUTDOWN COMPLETE: each side sends at least one of them.
            7 | 8 | 14 => tcp::FIN,
            _ => tcp::ACK,
        }
    }
}

/// Maximum number of IPv6 extension headers that the parser walks over. RFC 8200 allows each header once, destination options
/// twice.
pub const EXTENSION_HEADERS: usize = 6;

/// IPv6 next-header numbers of extension headers.
pub mod extension {
    /// Hop-by-hop options.
    pub const HOP_BY_HOP: u8 = 0;
    /// Routing.
    pub const ROUTING: u8 = 43;
    /// Fragment.
    pub const FRAGMENT: u8 = 44;
    /// Authentication (RFC 4302).
    pub const AUTHENTICATION: u8 = 51;
    /// Destination options.
    pub const DESTINATION: u8 = 60;

    /// Returns the length in bytes of the header of type `number` whose second byte is `length` (RFC 8200, 4; RFC 4302, 2.2).
    #[inline(always)]
    pub fn length(number: u8, length: u8) -> u32 {
        match number {
            FRAGMENT => 8,
            AUTHENTICATION => (u32::from(length) + 2) * 4,
            _ => (u32::from(length) + 1) * 8,
        }
    }

    /// Whether a next-header number is that of an extension header.
    #[inline(always)]
    pub fn is(number: u8) -> bool {
        matches!(number, HOP_BY_HOP | ROUTING | FRAGMENT | AUTHENTICATION | DESTINATION)
    }
}
