//! A packet in memory, with what a socket buffer knows of it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::vec::Vec;

use proxy_common::Address;
use proxy_common::csum::fold;

use crate::frame::{Fib, HelperFailed, Route};
use crate::net::ETHERNET;

/// What is known of the transport checksum (`skb->ip_summed`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ChecksumState {
    /// Nothing, or that it is right.
    #[default]
    None,
    /// The sum over all from the network header on, unfolded.
    Complete(u32),
    /// It is yet to be made, over all from `start`, and to be written at `start + offset`, where the sum of the pseudo
    /// header stands.
    Partial {
        /// From the first byte of the packet.
        start: usize,
        /// From there.
        offset: usize,
    },
}

/// Where a program has sent a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Redirect {
    /// Out of a device.
    Out(u32),
    /// In by a device.
    In(u32),
    /// Out of a device, by the kernel's neighbour code.
    Neighbour(Route),
}

/// Gives the route to an address: its words, and how many bytes it has.
pub type RouteTo = fn([u32; 4], usize) -> Option<Route>;

/// The kernel's routes, by destination.
#[derive(Clone, Debug, Default)]
pub struct Routes {
    to: BTreeMap<[u32; 4], Route>,
    others: Option<RouteTo>,
    default: Option<Route>,
}

impl Routes {
    /// Routes that are computed.
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

    /// What `bpf_fib_lookup` says.
    pub(super) fn find<A: Address>(&self, dst: &A, length: u32, route: &mut Route) -> Fib {
        let words = dst.words();
        let computed = || self.others.and_then(|others| others(words, size_of::<A>())).or(self.default);
        let Some(found) = self.to.get(&words).copied().or_else(computed) else { return Fib::NoRoute };
        *route = Route { fresh: 0, ..found };
        if length > found.mtu { Fib::TooBig } else { Fib::Found }
    }
}

/// The bytes of a packet, so that its IP header is aligned to words.
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

/// A packet, and what a socket buffer says of it.
#[derive(Clone, Debug)]
pub struct Skb {
    bytes: Bytes,
    /// Offset of the IP header.
    network: usize,
    /// What can be read directly: so many of the first bytes.
    pub linear: usize,
    /// The Ethernet type, in network order.
    pub ethertype: u32,
    /// Bytes before the IP header, as the program was told when it was loaded.
    pub link_header: usize,
    /// `vlan_tci`, if there is a tag.
    pub vlan_tag: Option<u16>,
    /// Payload of each segment; 0: it is one packet.
    pub gso_size: u32,
    /// The device that the hook is on.
    pub ifindex: u32,
    /// The device by which it came in; 0: a process of this node has made it.
    pub ingress_ifindex: u32,
    /// What is known of the transport checksum.
    pub checksum: ChecksumState,
    /// The kernel's routes.
    pub routes: Routes,
    /// Whether a program has noted that it is translated (`tc_index`).
    pub is_translated: bool,
    /// Where it was sent.
    pub redirect: Option<Redirect>,
}

/// What a program may make of a packet at most (`BPF_SKB_MAX_LEN`, about).
const MAX_LENGTH: usize = 65_535 + ETHERNET;

impl Skb {
    /// The bytes.
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

    /// Inserts zeros. The memory is another one afterwards.
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

    /// `bpf_skb_adjust_room` with `BPF_ADJ_ROOM_MAC`, growing.
    pub(super) fn adjust_room(&mut self, count: usize) -> Result<(), HelperFailed> {
        let is_ip =
            self.ethertype == crate::net::ETHERTYPE_IPV4 || self.ethertype == crate::net::ETHERTYPE_IPV6;
        if count > 0xfff || !is_ip || self.network > self.bytes.length {
            return Err(HelperFailed);
        }
        // `skb_decrease_gso_size`, which does not look.
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

    /// The same, shrinking.
    pub(super) fn decapsulate(&mut self, count: usize, v6: bool) -> Result<(), HelperFailed> {
        let (network, mut bytes) = (self.network, self.as_slice().to_vec());
        if network + count > bytes.len() {
            return Err(HelperFailed);
        }
        let gone: Vec<u8> = bytes.drain(network..network + count).collect();
        match &mut self.checksum {
            ChecksumState::Partial { start, .. } => *start = start.saturating_sub(count),
            ChecksumState::Complete(sum) => *sum = subtract(*sum, sum_at(&gone, 0)),
            ChecksumState::None => {}
        }
        self.linear = self.linear.saturating_sub(count);
        self.bytes = Bytes::new(&bytes, network);
        self.ethertype = if v6 { crate::net::ETHERTYPE_IPV6 } else { crate::net::ETHERTYPE_IPV4 };
        Ok(())
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

    /// The packet as it goes on a wire: with the checksum that was yet to be made (`skb_checksum_help`).
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

/// `csum_add`.
pub(super) fn add(a: u32, b: u32) -> u32 {
    let (sum, carry) = a.overflowing_add(b);
    sum.wrapping_add(u32::from(carry))
}

/// `csum_sub`.
pub(super) fn subtract(a: u32, b: u32) -> u32 {
    add(a, !b)
}

/// The ones' complement sum of bytes that stand at an offset.
pub(super) fn sum_at(bytes: &[u8], offset: usize) -> u32 {
    let mut sum = 0;
    for (number, byte) in bytes.iter().enumerate() {
        let mut word = [0; 2];
        word[(offset + number) % 2] = *byte;
        sum = add(sum, u32::from(u16::from_ne_bytes(word)));
    }
    sum
}

/// A packet that programs can be run over.
#[derive(Debug)]
pub struct HostPacket(pub(super) RefCell<Skb>);

impl HostPacket {
    /// An Ethernet frame that came in by device 1, all of it readable. What else is to be true of it says
    /// [`HostPacket::edit`].
    pub fn new(bytes: &[u8]) -> Self {
        let ethertype = match bytes.get(12..14) {
            Some(&[high, low]) => u32::from(u16::from_ne_bytes([high, low])),
            _ => 0,
        };
        Self::with_link_header(bytes, ETHERNET, ethertype)
    }

    /// A packet of a device without a link-layer header.
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
            vlan_tag: None,
            gso_size: 0,
            ifindex: 1,
            ingress_ifindex: 1,
            checksum: ChecksumState::None,
            routes: Routes::default(),
            is_translated: false,
            redirect: None,
        }))
    }

    /// Changes what is known of the packet.
    #[must_use]
    pub fn edit(mut self, edit: impl FnOnce(&mut Skb)) -> Self {
        let skb = self.0.get_mut();
        edit(skb);
        skb.linear = skb.linear.min(skb.bytes.length);
        self
    }

    /// The packet as it is now.
    pub fn into_skb(self) -> Skb {
        self.0.into_inner()
    }
}
