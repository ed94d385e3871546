//! A packet in memory, with the metadata of a socket buffer.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::vec::Vec;

use proxy_common::csum::fold;
use proxy_common::{Address, PROTO_TCP};

use crate::frame::{Fib, HelperFailed, PACKET_HOST, Route};
use crate::net::ETHERNET;

/// The state of the transport checksum (`skb->ip_summed`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ChecksumState {
    /// Unknown, or known to be correct.
    #[default]
    None,
    /// The unfolded sum from the network header to the end is known.
    Complete(u32),
    /// The checksum is still to be computed from `start` to the end, and to be written at `start + offset`, where the sum of
    /// the pseudo header is.
    Partial {
        /// Offset from the first byte of the packet.
        start: usize,
        /// Offset from `start`.
        offset: usize,
    },
}

/// Redirection of a packet by a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Redirect {
    /// Out of a device.
    Out(u32),
    /// To the ingress of a device.
    In(u32),
    /// Out of a device, through the kernel's neighbour code.
    Neighbour(Route),
}

/// Computes the route to an address, from its words and its length in bytes.
pub type RouteTo = fn([u32; 4], usize) -> Option<Route>;

/// The kernel's routes, by destination.
#[derive(Clone, Debug, Default)]
pub struct Routes {
    to: BTreeMap<[u32; 4], Route>,
    others: Option<RouteTo>,
    default: Option<Route>,
}

impl Routes {
    /// Returns routes that a function computes.
    pub fn by(route: RouteTo) -> Self {
        Self { others: Some(route), ..Self::default() }
    }

    /// Adds the route to an address.
    pub fn add<A: Address>(&mut self, dst: &A, route: Route) {
        self.to.insert(dst.words(), route);
    }

    /// Sets the route to all other addresses.
    pub fn set_default(&mut self, route: Option<Route>) {
        self.default = route;
    }

    /// Looks up a route, as `bpf_fib_lookup` does. A route by the device 0 is of type unreachable, with the code in its MTU.
    pub(super) fn find<A: Address>(&self, dst: &A, length: u32, route: &mut Route) -> Fib {
        let words = dst.words();
        let computed = || self.others.and_then(|others| others(words, size_of::<A>())).or(self.default);
        let Some(found) = self.to.get(&words).copied().or_else(computed) else { return Fib::NoRoute };
        *route = Route { fresh: 0, ..found };
        if route.ifindex == 0 {
            return Fib::Unreachable;
        }
        if length > found.mtu { Fib::TooBig } else { Fib::Found }
    }
}

/// The bytes of a packet, in memory where the IP header is aligned to words.
#[derive(Clone, Debug)]
struct Bytes {
    words: Vec<u32>,
    start: usize,
    length: usize,
}

impl Bytes {
    fn new(bytes: &[u8], network: usize) -> Self {
        let start = network.wrapping_neg() % 4;
        let mut new =
            Self { words: std::vec![0; (start + bytes.len()).div_ceil(4)], start, length: bytes.len() };
        new.as_mut_slice().copy_from_slice(bytes);
        new
    }

    fn as_slice(&self) -> &[u8] {
        // SAFETY: there are as many words as `start + length` bytes need.
        unsafe { core::slice::from_raw_parts(self.words.as_ptr().cast::<u8>().add(self.start), self.length) }
    }

    fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`.
        unsafe {
            core::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast::<u8>().add(self.start), self.length)
        }
    }
}

/// A packet, with the metadata of a socket buffer.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "facts that go with each other in every combination")]
pub struct Skb {
    bytes: Bytes,
    /// Offset of the IP header.
    network: usize,
    /// Number of bytes from the start that can be read directly.
    pub linear: usize,
    /// The Ethernet type, in network byte order.
    pub ethertype: u32,
    /// Bytes before the IP header, as configured when the program was loaded.
    pub link_header: usize,
    /// The packet type (`PACKET_*`).
    pub packet_type: u32,
    /// `vlan_tci`, if there is a tag.
    pub vlan_tag: Option<u16>,
    /// Payload of each segment in bytes; 0: no GSO packet.
    pub gso_size: u32,
    /// Index of the device that the hook is on.
    pub ifindex: u32,
    /// Whether this is the loopback device.
    pub is_loopback: bool,
    /// Index of the device on which the packet arrived; 0: a process of this node sent it.
    pub ingress_ifindex: u32,
    /// State of the transport checksum.
    pub checksum: ChecksumState,
    /// The kernel's routes.
    pub routes: Routes,
    /// Whether a TCP socket of the node has a connection for this packet.
    pub has_connection: bool,
    /// Whether the socket programs have given the packet's socket this destination.
    pub is_for_backend_of_socket: bool,
    /// Whether a socket sends the packet.
    pub has_socket: bool,
    /// Whether a program has marked the packet as translated (`tc_index`).
    pub is_translated: bool,
    /// The mark, which netfilter and the routing rules see.
    pub mark: u32,
    /// Where a program has redirected the packet.
    pub redirect: Option<Redirect>,
    /// Number of bytes by which an early hook can extend the packet at its start.
    pub headroom: usize,
    /// Whether the driver has room for a note (`bpf_xdp_adjust_meta`).
    pub takes_notes: bool,
    /// The note in front of the packet.
    pub note: Option<[u32; 2]>,
}

/// `XDP_PACKET_HEADROOM`.
const HEADROOM: usize = 256;

/// Maximum length to which a program may extend a packet (about `BPF_SKB_MAX_LEN`).
const MAX_LENGTH: usize = 65_535 + ETHERNET;

impl Skb {
    /// Returns the bytes.
    pub fn as_slice(&self) -> &[u8] {
        self.bytes.as_slice()
    }

    pub(super) fn as_mut_slice(&mut self) -> &mut [u8] {
        self.bytes.as_mut_slice()
    }

    /// `bpf_try_make_writable`.
    pub(super) fn make_writable(&mut self, length: usize) -> Result<(), HelperFailed> {
        if length > self.bytes.length {
            return Err(HelperFailed);
        }
        self.linear = self.linear.max(length);
        Ok(())
    }

    /// Inserts zero bytes. The packet is in new memory afterwards.
    fn insert(&mut self, at: usize, count: usize) -> Result<(), HelperFailed> {
        if self.gso_size == 0 && self.bytes.length + count > MAX_LENGTH {
            return Err(HelperFailed);
        }
        let mut bytes = self.as_slice().to_vec();
        bytes.splice(at..at, core::iter::repeat_n(0, count));
        self.network += count;
        self.linear += count;
        if let ChecksumState::Partial { start, .. } = &mut self.checksum {
            *start += count;
        }
        self.bytes = Bytes::new(&bytes, self.network);
        Ok(())
    }

    /// `bpf_skb_change_head`.
    pub(super) fn change_head(&mut self, count: usize) -> Result<(), HelperFailed> {
        self.insert(0, count)
    }

    /// `bpf_skb_adjust_room` with `BPF_ADJ_ROOM_MAC` and without `BPF_F_ADJ_ROOM_FIXED_GSO`, growing: only TCP packets may be GSO
    /// packets.
    pub(super) fn make_room(&mut self, count: usize) -> Result<(), HelperFailed> {
        let at = self.network + if self.ethertype == crate::net::ETHERTYPE_IPV4 { 9 } else { 6 };
        if self.gso_size != 0 && self.as_slice().get(at) != Some(&PROTO_TCP) {
            return Err(HelperFailed);
        }
        self.adjust_room(count)
    }

    /// `bpf_skb_adjust_room` with `BPF_ADJ_ROOM_MAC`, growing.
    pub(super) fn adjust_room(&mut self, count: usize) -> Result<(), HelperFailed> {
        let is_ip =
            self.ethertype == crate::net::ETHERTYPE_IPV4 || self.ethertype == crate::net::ETHERTYPE_IPV6;
        if count > 0xfff || !is_ip || self.network > self.bytes.length {
            return Err(HelperFailed);
        }
        // `skb_decrease_gso_size` does not check for an underflow.
        let network = self.network;
        self.insert(network, count)?;
        self.network = network;
        self.bytes = Bytes::new(self.as_slice(), network);
        if self.gso_size != 0 {
            self.gso_size = self.gso_size.wrapping_sub(count as u32) & 0xffff;
        }
        if matches!(self.checksum, ChecksumState::Complete(_)) {
            self.checksum = ChecksumState::None;
        }
        Ok(())
    }

    /// `bpf_skb_adjust_room` with `BPF_F_ADJ_ROOM_ENCAP_L3_*` and `BPF_F_ADJ_ROOM_FIXED_GSO`, growing.
    pub(super) fn encapsulate(&mut self, count: usize, v6: bool) -> Result<(), HelperFailed> {
        let network = self.network;
        self.insert(network, count)?;
        self.network = network;
        self.bytes = Bytes::new(self.as_slice(), network);
        self.ethertype = if v6 { crate::net::ETHERTYPE_IPV6 } else { crate::net::ETHERTYPE_IPV4 };
        Ok(())
    }

    /// Does the same, shrinking.
    pub(super) fn decapsulate(&mut self, count: usize, v6: bool) -> Result<(), HelperFailed> {
        let (network, mut bytes) = (self.network, self.as_slice().to_vec());
        if network + count > bytes.len() {
            return Err(HelperFailed);
        }
        let gone: Vec<u8> = bytes.drain(network..network + count).collect();
        match &mut self.checksum {
            ChecksumState::Partial { start, .. } => match start.checked_sub(count) {
                Some(left) => *start = left,
                None => self.checksum = ChecksumState::None,
            },
            ChecksumState::Complete(sum) => *sum = subtract(*sum, sum_at(&gone, 0)),
            ChecksumState::None => {}
        }
        self.linear = self.linear.saturating_sub(count);
        self.bytes = Bytes::new(&bytes, network);
        self.ethertype = if v6 { crate::net::ETHERTYPE_IPV6 } else { crate::net::ETHERTYPE_IPV4 };
        Ok(())
    }

    /// `bpf_xdp_adjust_head`, growing: the new bytes are undefined, and so is the link-layer header.
    pub(super) fn adjust_head(&mut self, count: usize) -> Result<(), HelperFailed> {
        if count > self.headroom {
            return Err(HelperFailed);
        }
        let network = self.network;
        self.insert(0, count)?;
        self.network = network;
        self.bytes = Bytes::new(self.as_slice(), network);
        self.as_mut_slice()[..count].fill(0xee);
        self.headroom -= count;
        Ok(())
    }

    /// `bpf_xdp_adjust_head`, shrinking.
    pub(super) fn cut_head(&mut self, count: usize) -> Result<(), HelperFailed> {
        let mut bytes = self.as_slice().to_vec();
        if count + ETHERNET > bytes.len() {
            return Err(HelperFailed);
        }
        bytes.drain(..count);
        self.linear = self.linear.saturating_sub(count);
        self.bytes = Bytes::new(&bytes, self.network);
        Ok(())
    }

    /// Sets the Ethernet type by the frame, as the driver does after XDP (`eth_type_trans`).
    pub(super) fn set_ethertype(&mut self) {
        self.ethertype = ethertype(self.as_slice());
    }

    /// `bpf_skb_change_tail`.
    pub(super) fn change_tail(&mut self, length: usize) -> Result<(), HelperFailed> {
        let mut least = self.network;
        if let ChecksumState::Partial { start, offset } = self.checksum {
            least = start + offset + size_of::<u16>();
        }
        if length < least || length > MAX_LENGTH {
            return Err(HelperFailed);
        }
        let mut bytes = self.as_slice().to_vec();
        if let ChecksumState::Complete(sum) = self.checksum {
            self.checksum = match bytes.get(length..) {
                Some(tail) => ChecksumState::Complete(subtract(sum, sum_at(tail, length - self.network))),
                None => ChecksumState::None,
            };
        }
        bytes.resize(length, 0);
        self.linear = if length > self.bytes.length { length } else { self.linear.min(length) };
        self.bytes = Bytes::new(&bytes, self.network);
        self.gso_size = 0;
        Ok(())
    }

    /// Returns the packet as it is sent on a wire, with the checksum computed (`skb_checksum_help`).
    pub fn wire(&self) -> Vec<u8> {
        let mut bytes = self.as_slice().to_vec();
        if let ChecksumState::Partial { start, offset } = self.checksum
            && let Some(tail) = bytes.get(start..)
        {
            let sum = !fold(u64::from(sum_at(tail, 0)));
            let sum = if sum == 0 { 0xffff } else { sum };
            if let Some(check) = bytes.get_mut(start + offset..start + offset + 2) {
                check.copy_from_slice(&sum.to_ne_bytes());
            }
        }
        bytes
    }
}

/// Returns the Ethernet type of a frame, in network byte order.
fn ethertype(bytes: &[u8]) -> u32 {
    match bytes.get(12..14) {
        Some(&[high, low]) => u32::from(u16::from_ne_bytes([high, low])),
        _ => 0,
    }
}

/// `csum_add`.
pub(super) fn add(a: u32, b: u32) -> u32 {
    let (sum, carry) = a.overflowing_add(b);
    sum.wrapping_add(u32::from(carry))
}

/// `csum_sub`.
pub(super) fn subtract(a: u32, b: u32) -> u32 {
    add(a, !b)
}

/// Returns the ones' complement sum of bytes that begin at this offset.
pub(super) fn sum_at(bytes: &[u8], offset: usize) -> u32 {
    let mut sum = 0;
    for (number, byte) in bytes.iter().enumerate() {
        let mut word = [0; 2];
        word[(offset + number) % 2] = *byte;
        sum = add(sum, u32::from(u16::from_ne_bytes(word)));
    }
    sum
}

/// A packet with which programs can run.
#[derive(Debug)]
pub struct HostPacket(pub(super) RefCell<Skb>);

impl HostPacket {
    /// Returns an Ethernet frame that arrived on device 1 and is completely readable. [`HostPacket::edit`] changes other
    /// metadata.
    pub fn new(bytes: &[u8]) -> Self {
        Self::with_link_header(bytes, ETHERNET, ethertype(bytes))
    }

    /// Returns a packet of a device without a link-layer header.
    pub fn without_link_header(bytes: &[u8], ethertype: u32) -> Self {
        Self::with_link_header(bytes, 0, ethertype)
    }

    fn with_link_header(bytes: &[u8], link_header: usize, ethertype: u32) -> Self {
        Self(RefCell::new(Skb {
            bytes: Bytes::new(bytes, link_header),
            network: link_header,
            linear: bytes.len(),
            ethertype,
            link_header,
            packet_type: PACKET_HOST,
            vlan_tag: None,
            gso_size: 0,
            ifindex: 1,
            is_loopback: false,
            ingress_ifindex: 1,
            checksum: ChecksumState::None,
            routes: Routes::default(),
            has_connection: false,
            is_for_backend_of_socket: false,
            has_socket: true,
            is_translated: false,
            mark: 0,
            redirect: None,
            headroom: HEADROOM,
            takes_notes: true,
            note: None,
        }))
    }

    /// Changes the metadata of the packet.
    #[must_use]
    pub fn edit(mut self, edit: impl FnOnce(&mut Skb)) -> Self {
        let skb = self.0.get_mut();
        edit(skb);
        skb.linear = skb.linear.min(skb.bytes.length);
        self
    }

    /// Returns the packet in its current state.
    pub fn into_skb(self) -> Skb {
        self.0.into_inner()
    }
}
