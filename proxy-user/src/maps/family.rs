//! The maps that each address family has of its own.

use std::net::IpAddr;

use aya::Pod;
use proxy_common::Address;
use proxy_common::abi::Plain;
use proxy_common::map_names as map;

/// An address as it is in the maps, with the names of its family's maps.
pub trait MapFamily: Address + Plain + Pod + Into<IpAddr> {
    /// Frontends.
    const SERVICES: &'static str;
    /// Endpoints.
    const BACKENDS: &'static str;
    /// Flows.
    const FLOWS: &'static str;
    /// The index of flows.
    const FLOW_INDEX: &'static str;
    /// Sockets and their peers.
    const SOCKETS: &'static str;
    /// The row of this node.
    const NODE: &'static str;
    /// Addresses of nodes.
    const NODE_ADDRS: &'static str;
    /// Session affinity.
    const AFFINITY: &'static str;
    /// Allowed source ranges.
    const SRC_RANGES: &'static str;

    /// Returns the address if it is of this family.
    fn of_ip(address: IpAddr) -> Option<Self>;
}

impl MapFamily for [u8; 4] {
    const SERVICES: &'static str = map::SERVICES;
    const BACKENDS: &'static str = map::BACKENDS;
    const FLOWS: &'static str = map::FLOWS;
    const FLOW_INDEX: &'static str = map::FLOW_INDEX;
    const SOCKETS: &'static str = map::SOCKETS;
    const NODE: &'static str = map::NODE;
    const NODE_ADDRS: &'static str = map::NODE_ADDRS;
    const AFFINITY: &'static str = map::AFFINITY;
    const SRC_RANGES: &'static str = map::SRC_RANGES;

    fn of_ip(address: IpAddr) -> Option<Self> {
        if let IpAddr::V4(address) = address { Some(address.octets()) } else { None }
    }
}

impl MapFamily for [u8; 16] {
    const SERVICES: &'static str = map::SERVICES6;
    const BACKENDS: &'static str = map::BACKENDS6;
    const FLOWS: &'static str = map::FLOWS6;
    const FLOW_INDEX: &'static str = map::FLOW_INDEX6;
    const SOCKETS: &'static str = map::SOCKETS6;
    const NODE: &'static str = map::NODE6;
    const NODE_ADDRS: &'static str = map::NODE_ADDRS6;
    const AFFINITY: &'static str = map::AFFINITY6;
    const SRC_RANGES: &'static str = map::SRC_RANGES6;

    fn of_ip(address: IpAddr) -> Option<Self> {
        if let IpAddr::V6(address) = address { Some(address.octets()) } else { None }
    }
}
