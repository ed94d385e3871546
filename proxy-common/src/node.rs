//! `node`, `node6`, `node_addrs`, `node_addrs6`, `devices`: the facts about this node that the programs use.

use crate::Address;

/// A range of addresses.
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cidr<A> {
    /// The lowest address in the range.
    pub addr: A,
    /// The netmask: the bits of an address that are compared.
    pub mask: A,
}

impl<A: Address> Cidr<A> {
    /// Stands for no range: it contains only the all-zero address, for which no lookup asks.
    pub const NONE: Self = Self { addr: A::ZERO, mask: A::ONES };

    /// Whether this is a range.
    #[inline(always)]
    pub fn is_some(&self) -> bool {
        let [a, b, c, d] = self.addr.words();
        a | b | c | d != 0
    }

    /// Returns the address of the range with this number; of a range of more than 2^64 addresses, one of the first ones.
    #[inline(always)]
    pub fn address(&self, number: u64) -> A {
        let ([a, b, c, d], [e, _, g, h]) = (self.addr.words(), self.mask.words());
        let (low, high) = (number as u32, (number >> 32) as u32);
        if size_of::<A>() == size_of::<u32>() {
            A::from_words([a | low & !e, 0, 0, 0])
        } else {
            A::from_words([a, b, c | high & !g, d | low & !h])
        }
    }

    /// Whether `addr` is in the range.
    #[inline(always)]
    pub fn contains(&self, addr: &A) -> bool {
        let ([a, b, c, d], mask, from) = (addr.words(), self.mask.words(), self.addr.words());
        a & mask[0] == from[0] && b & mask[1] == from[1] && c & mask[2] == from[2] && d & mask[3] == from[3]
    }
}

impl<A: Address> Default for Cidr<A> {
    fn default() -> Self {
        Self::NONE
    }
}

/// Maximum number of ranges of Service addresses in each family.
pub const SERVICE_CIDRS: usize = 8;

/// Maximum number of `IPsec` policies in each family. The agent combines policies if there are more.
pub const IPSEC_POLICIES: usize = 16;

/// A pair of ranges: the addresses of packets to which an `IPsec` policy of the kernel applies (xfrm, direction `out`).
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpsecPolicy<A> {
    /// Source addresses.
    pub src: Cidr<A>,
    /// Destination addresses.
    pub dst: Cidr<A>,
}

/// Maximum number of devices with a source address of their own, in each family.
pub const DEVICE_SOURCES: usize = 8;

/// The source address of packets that are forwarded with SNAT and leave by a device.
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSource<A> {
    /// Index of the device.
    pub ifindex: u32,
    /// The source address.
    pub addr: A,
}

/// The only value of `node` and of `node6`.
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeEntry<A> {
    /// The source address of packets that are forwarded with SNAT, unless [`NodeEntry::sources`] has another one; zero: there
    /// is none, and such packets are dropped.
    pub source: A,
    /// The range of pods. With the modes `ClusterCIDR` and `NodeCIDR`, a client with an address in this range is inside.
    pub pods: Cidr<A>,
    /// Ranges of Service addresses (`ServiceCIDR` objects); a packet to an address or port in them that no Service has is
    /// dropped or refused.
    pub service_cidrs: [Cidr<A>; SERVICE_CIDRS],
    /// Number of used elements of [`NodeEntry::service_cidrs`].
    pub service_cidr_count: u32,
    /// The policies of the kernel: programs leave the routing of packets to which one applies to the kernel.
    pub ipsec: [IpsecPolicy<A>; IPSEC_POLICIES],
    /// Number of used elements of [`NodeEntry::ipsec`].
    pub ipsec_count: u32,
    /// Not 0: the kernel has routes for packets with a mark that only netfilter knows, so it routes what is forwarded with SNAT.
    pub routes_by_mark: u32,
    /// The devices whose packets have another source than [`NodeEntry::source`]: netfilter's MASQUERADE chooses an address of
    /// the device, too.
    pub sources: [DeviceSource<A>; DEVICE_SOURCES],
    /// Number of used elements of [`NodeEntry::sources`].
    pub source_count: u32,
}

impl<A: Address> NodeEntry<A> {
    /// The entry of a node about which nothing is known.
    pub const UNKNOWN: Self = Self {
        source: A::ZERO,
        pods: Cidr::NONE,
        service_cidrs: [Cidr::NONE; SERVICE_CIDRS],
        service_cidr_count: 0,
        ipsec: [IpsecPolicy { src: Cidr::NONE, dst: Cidr::NONE }; IPSEC_POLICIES],
        ipsec_count: 0,
        routes_by_mark: 0,
        sources: [DeviceSource { ifindex: 0, addr: A::ZERO }; DEVICE_SOURCES],
        source_count: 0,
    };

    /// Whether the address is in a range of Service addresses.
    #[inline(always)]
    pub fn is_service_address(&self, addr: &A) -> bool {
        let mut number = 0;
        while number < SERVICE_CIDRS {
            if number as u32 >= self.service_cidr_count {
                return false;
            }
            if self.service_cidrs[number].contains(addr) {
                return true;
            }
            number += 1;
        }
        false
    }

    /// Returns the source address of packets with SNAT that leave by a device.
    #[inline(always)]
    pub fn source_of(&self, ifindex: u32) -> A {
        let mut number = 0;
        while number < DEVICE_SOURCES {
            if number as u32 >= self.source_count {
                break;
            }
            if self.sources[number].ifindex == ifindex {
                return self.sources[number].addr;
            }
            number += 1;
        }
        self.source
    }

    /// Whether an `IPsec` policy applies to packets with these addresses.
    #[inline(always)]
    pub fn has_ipsec_policy(&self, src: &A, dst: &A) -> bool {
        let mut number = 0;
        while number < IPSEC_POLICIES {
            if number as u32 >= self.ipsec_count {
                return false;
            }
            let policy = &self.ipsec[number];
            if policy.dst.contains(dst) && policy.src.contains(src) {
                return true;
            }
            number += 1;
        }
        false
    }
}

/// Value of `tunnels` (array): another node of the cluster, to which packets are encapsulated (DSR).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tunnel {
    /// The `InternalIP` of the other node, as words ([`Address::words`]).
    pub addr: [u32; 4],
    /// The source address of the outer header, an address of this node, as words.
    pub source: [u32; 4],
    /// The family of both addresses: [`TUNNEL_V4`] or [`TUNNEL_V6`]; 0: the number is free.
    pub family: u32,
}

/// The outer header is an IPv4 header.
pub const TUNNEL_V4: u32 = 4;
/// The outer header is an IPv6 header.
pub const TUNNEL_V6: u32 = 6;

/// Value of `node_addrs` and `node_addrs6` (hash by address, as octets): `NODE_ADDR_*` bits.
pub type NodeAddr = u32;

/// Node ports answer on this address.
pub const NODE_ADDR_PORTS: NodeAddr = 1 << 0;
/// The address is a loopback address: node ports answer on it for sockets of the node itself only.
pub const NODE_ADDR_LOOPBACK: NodeAddr = 1 << 1;
/// The address is an address of this node, on any device.
pub const NODE_ADDR_OWN: NodeAddr = 1 << 2;

/// The address is an `InternalIP` of a node of the cluster, of this one if [`NODE_ADDR_OWN`] is set too. Nodes send each
/// other encapsulated packets (DSR) from and to such addresses only.
pub const NODE_ADDR_INTERNAL: NodeAddr = 1 << 3;

/// Value of `devices` (hash by interface index): `DEVICE_*` bits, and in [`DEVICE_MAC`] the MAC address ([`mac`]) at which
/// this node receives the device's frames: the device's own, or that of the bridge whose port it is. 0: not known.
pub type Device = u64;

/// The bits of a MAC address in a [`Device`].
pub const DEVICE_MAC: Device = (1 << 48) - 1;

/// Returns a MAC address as a number: its octets in memory order on a little-endian machine.
pub const fn mac([a, b, c, d, e, f]: [u8; 6]) -> u64 {
    u64::from_le_bytes([a, b, c, d, e, f, 0, 0])
}

/// The device is an uplink: packets of other machines arrive on it. Examples are a NIC, a bond, a tunnel, a VLAN. Behind
/// every other device, and behind devices that are not in the map yet, are only pods, containers and virtual machines of
/// this node: a reply to them certainly returns through this node.
pub const DEVICE_UPLINK: Device = 1 << 48;
/// Packets of the device have no link-layer header (tun, `WireGuard`, IP-in-IP).
pub const DEVICE_NO_HEADER: Device = 1 << 49;
/// The device is no uplink, but a port of a bridge that is one or has a NIC: guests behind it exchange frames with other machines.
pub const DEVICE_LAN_PORT: Device = 1 << 50;
/// The device is a container's alone (veth, netkit): the route to the container's addresses leads to it, or to the bridge whose
/// port it is. Its MAC address is not noted.
pub const DEVICE_GUEST: Device = 1 << 51;

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;

    #[test]
    fn a_range_holds_its_addresses_only() {
        let range = Cidr { addr: [10u8, 96, 0, 0], mask: [255, 240, 0, 0] };
        assert!(range.contains(&[10, 96, 0, 0]) && range.contains(&[10, 111, 255, 255]));
        assert!(!range.contains(&[10, 112, 0, 0]) && !range.contains(&[10, 95, 255, 255]));
        let mut addr = [0u8; 16];
        addr[0] = 0xfd;
        let mut mask = [0u8; 16];
        mask[..2].copy_from_slice(&[0xff, 0xff]);
        let range = Cidr { addr, mask };
        addr[15] = 9;
        assert!(range.contains(&addr));
        addr[1] = 1;
        assert!(!range.contains(&addr));
        assert!(!Cidr::NONE.contains(&[10u8, 0, 0, 1]));
    }

    /// The key of receive side scaling in Microsoft's specification, which drivers use by default.
    const RSS_KEY: [u8; 40] = [
        0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0, 0xd0,
        0xca, 0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c, 0x6a, 0x42,
        0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
    ];

    fn toeplitz(input: &[u8]) -> u32 {
        let bit = |bytes: &[u8], at: usize| u32::from(bytes[at / 8] >> (7 - at % 8) & 1);
        let key_at = |at: usize| (at..at + 32).fold(0, |word, at| word << 1 | bit(&RSS_KEY, at));
        (0..input.len() * 8).filter(|at| bit(input, *at) == 1).fold(0, |hash, at| hash ^ key_at(at))
    }

    fn octets<A: Address>(addr: &A) -> std::vec::Vec<u8> {
        let all = addr.words().map(u32::to_ne_bytes).concat();
        all[..size_of::<A>()].to_vec()
    }

    /// Returns the number of queues, of 8, that get packets of 1,000 flows between two nodes.
    fn queues<A: Address>(source: impl Fn(u64) -> A, to: &A) -> usize {
        let mut filled = [false; 8];
        for flow in 0..1000u16 {
            let key = crate::flow::FlowKey {
                src: [u32::from_ne_bytes([192, 0, 2, 7])],
                dst: [u32::from_ne_bytes([198, 51, 100, 1])],
                src_port: 20_000 + flow,
                dst_port: 443,
                proto: crate::PROTO_TCP,
                direction: crate::flow::DIRECTION_FORWARD,
                reserved: 0,
            };
            let input = [octets(&source(key.hash(0x5eed))), octets(to)].concat();
            filled[toeplitz(&input) as usize % 128 % 8] = true;
        }
        filled.iter().filter(|is| **is).count()
    }

    #[test]
    fn the_hash_of_receive_side_scaling_is_microsofts() {
        // From the specification: 66.9.149.187:2794 to 161.142.100.80:1766, addresses only.
        assert_eq!(toeplitz(&[66, 9, 149, 187, 161, 142, 100, 80]), 0x323e_8fc2);
    }

    #[test]
    fn sources_of_a_range_fill_the_queues_of_the_receiver() {
        let v4 = |last| [u32::from_ne_bytes([10, 0, 0, last])];
        assert_eq!(queues(|_| v4(1), &v4(2)), 1, "one pair of addresses is one queue");
        for mask in [[255, 255, 255, 0], [255, 240, 0, 0]] {
            let range = Cidr { addr: [u32::from_ne_bytes([10, 16, 0, 0])], mask: [u32::from_ne_bytes(mask)] };
            assert!(queues(|hash| range.address(hash), &v4(2)) >= 6, "{mask:?}");
        }
        let v6 = |last: u32| [u32::from_ne_bytes([0xfd, 0, 0, 9]), 0, 0, last.to_be()];
        for mask in [[u32::MAX, u32::MAX, 0, 0], [u32::MAX, u32::MAX, u32::MAX, 0xffff_ff00u32.to_be()]] {
            let range = Cidr { addr: v6(0), mask };
            assert!(queues(|hash| range.address(hash), &v6(2)) >= 6, "{mask:x?}");
        }
    }

    #[test]
    fn every_address_of_a_range_has_a_number() {
        let range =
            Cidr { addr: [u32::from_ne_bytes([10, 9, 0, 0])], mask: [u32::from_ne_bytes([255, 255, 0, 0])] };
        let range6 = Cidr { addr: [7, 8, 1 << 31, 0], mask: [u32::MAX, u32::MAX, 1 << 31, 0] };
        for number in [0, 1, u64::MAX, 0x1234_5678_9abc_def0] {
            assert!(range.contains(&range.address(number)) && range6.contains(&range6.address(number)));
        }
        let found: std::collections::BTreeSet<_> =
            (0..1u64 << 16).map(|n| range.address(n << 16 | n)).collect();
        assert_eq!(found.len(), 1 << 16);
    }

    #[test]
    fn every_range_of_service_addresses_is_checked() {
        let mut node = NodeEntry::<[u8; 4]>::UNKNOWN;
        for (range, number) in node.service_cidrs.iter_mut().zip(1..) {
            *range = Cidr { addr: [10, number, 0, 0], mask: [255, 255, 0, 0] };
        }
        let last = SERVICE_CIDRS as u8;
        for count in 0..=last {
            node.service_cidr_count = u32::from(count);
            for number in 1..=last + 1 {
                assert_eq!(
                    node.is_service_address(&[10, number, 1, 1]),
                    number <= count,
                    "{number} of {count}"
                );
            }
        }
    }

    #[test]
    fn a_policy_applies_to_its_addresses_in_one_direction() {
        let mut node = NodeEntry::<[u8; 4]>::UNKNOWN;
        let range = |number| Cidr { addr: [10, number, 0, 0], mask: [255, 255, 0, 0] };
        for (policy, number) in node.ipsec.iter_mut().zip(1..) {
            *policy = IpsecPolicy { src: range(number), dst: range(100 + number) };
        }
        let last = IPSEC_POLICIES as u8;
        for count in 0..=last {
            node.ipsec_count = u32::from(count);
            for number in 1..=last {
                let (src, dst) = ([10, number, 0, 1], [10, 100 + number, 0, 1]);
                assert_eq!(node.has_ipsec_policy(&src, &dst), number <= count);
                assert!(!node.has_ipsec_policy(&dst, &src) && !node.has_ipsec_policy(&src, &[10, 99, 0, 1]));
            }
        }
    }

    #[test]
    fn a_device_has_its_own_source_or_that_of_the_node() {
        let mut node = NodeEntry::<[u8; 4]> { source: [192, 0, 2, 1], ..NodeEntry::UNKNOWN };
        for (source, number) in node.sources.iter_mut().zip(1..) {
            *source = DeviceSource { ifindex: u32::from(number), addr: [10, number, 0, 1] };
        }
        let last = DEVICE_SOURCES as u8;
        for count in 0..=last {
            node.source_count = u32::from(count);
            for number in 0..=last {
                let expected = if (1..=count).contains(&number) { [10, number, 0, 1] } else { node.source };
                assert_eq!(node.source_of(u32::from(number)), expected, "{number} of {count}");
            }
        }
    }
}
