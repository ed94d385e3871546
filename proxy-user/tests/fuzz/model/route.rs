//! The kernel's routes, as `kernel.rs` creates them.

use std::net::IpAddr;

use super::rules;
use crate::forge::ETHERNET;
use crate::scenario::{Location, address};
use crate::target::{Device, Outcome, Seen};

/// Link-layer addresses of the node's devices, and of their neighbours.
pub const UPLINK_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x11];
pub const GATEWAY_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x99];
pub const PODS_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x22];
pub const POD_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x77];

/// The route of a packet that leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    pub device: Device,
    /// Link-layer addresses of the destination and the source.
    pub macs: [[u8; 6]; 2],
    pub mtu: usize,
}

/// Returns the route to an address, if the kernel has one. If only the kernel knows the route, it is taken from the result.
pub fn route(to: IpAddr, seen: &Seen) -> Option<Route> {
    let is = |location| address(to.is_ipv6(), location) == to;
    let uplink = Route { device: Device::Uplink, macs: [GATEWAY_MAC, UPLINK_MAC], mtu: rules::UPLINK_MTU };
    let pods = Route { device: Device::Pods, macs: [POD_MAC, PODS_MAC], mtu: rules::PODS_MTU };
    if is(Location::Node) || is(Location::NodeToo) || is_nowhere(to) {
        return None;
    }
    if (0..3).any(|n| is(Location::LocalPod(n))) {
        return Some(pods);
    }
    if !is_strange(to) {
        return Some(uplink);
    }
    let head = seen.packet.first_chunk::<12>()?;
    let macs = [head[..6].try_into().ok()?, head[6..].try_into().ok()?];
    (seen.outcome == Outcome::Redirect).then_some(Route { macs, ..if is_pods(to) { pods } else { uplink } })
}

/// Returns the code of the node's answer to a packet without a route. Whether the kernel has none, or drops the packet, is taken from
/// the result for the node's own and for strange addresses.
pub fn unreachable(to: IpAddr, node: IpAddr, seen: &Seen) -> Option<u8> {
    let is_own = [Location::Node, Location::NodeToo].iter().any(|own| address(to.is_ipv6(), *own) == to);
    let (source, kind): (Vec<u8>, [u8; 2]) = match node {
        IpAddr::V4(node) => (node.octets().to_vec(), [*seen.packet.get(ETHERNET + 9)?, 3]),
        IpAddr::V6(node) => (node.octets().to_vec(), [*seen.packet.get(ETHERNET + 6)?, 1]),
    };
    let (at, end) =
        if node.is_ipv4() { (ETHERNET + 12, ETHERNET + 20) } else { (ETHERNET + 8, ETHERNET + 40) };
    let is_from_node = seen.packet.get(at..at + source.len()) == Some(&source[..]);
    let is_icmp = kind[0] == if node.is_ipv4() { 1 } else { 58 };
    let [found, code] = seen.packet.get(end..end + 2)?.try_into().ok()?;
    let is_answer = seen.outcome == Outcome::Redirect && is_from_node && is_icmp && found == kind[1];
    ((is_own || is_strange(to)) && is_answer).then_some(code)
}

fn is_nowhere(to: IpAddr) -> bool {
    match to {
        IpAddr::V4(to) => to.octets().starts_with(&[10, 3]),
        IpAddr::V6(to) => to.segments().starts_with(&[0xfd00, 3]),
    }
}

/// Whether the address is in the range of the local pods.
fn is_pods(to: IpAddr) -> bool {
    match to {
        IpAddr::V4(to) => to.octets().starts_with(&[10, 244, 0]),
        IpAddr::V6(to) => to.segments().starts_with(&[0xfd00, 0x244, 0]),
    }
}

/// Whether the address has no known neighbour, or is of a kind that the kernel treats specially.
pub fn is_strange(to: IpAddr) -> bool {
    let is_kernels = match to {
        IpAddr::V4(to) => {
            let [first, ..] = to.octets();
            first == 0 || first == 127 || first >= 224 || to.octets().starts_with(&[192, 168, 77])
        }
        IpAddr::V6(to) => {
            let [first, ..] = to.segments();
            first == 0 || first >= 0xfe00 || first == 0xfd77
        }
    };
    is_kernels || is_pods(to)
}
