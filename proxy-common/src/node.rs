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
