//! The uplinks of this node: devices on which packets of other machines arrive (`DEVICE_UPLINK`). Behind all other devices
//! are pods, containers and virtual machines of this node: replies to them certainly return through this node.
//!
//! An uplink that is taken for a local device breaks connections: an endpoint on another node answers the client directly.
//! A local device that is taken for an uplink hides the client's address from such endpoints, and its clients are outside
//! for `externalTrafficPolicy: Local`. `docs/datapath.md` has the table of rules.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use proxy_common::node::{DEVICE_GUEST, DEVICE_LAN_PORT, DEVICE_NO_HEADER, DEVICE_UPLINK, Device};

use crate::model::net::IpFamily;
use crate::model::settings::DetectLocal;
use crate::model::{DeviceKind, DeviceRole, HostDevice, HostView, NodeView};

/// Returns the devices that are uplinks, ports of uplinks, containers' devices, or have no link-layer header, as the map
/// `devices` holds them.
pub fn devices(node: &NodeView, host: &HostView, detect: &DetectLocal) -> BTreeMap<u32, Device> {
    let guessed = guess(node, host, detect);
    let is_port_of = |device: &HostDevice, name: &str| {
        let master = device.master.and_then(|index| host.devices.get(&index));
        master.is_some_and(|master| master.name == name)
    };
    let is_uplink = |index: u32, device: &HostDevice| match (device.role, detect) {
        (DeviceRole::Local, _) => false,
        _ if device.kind == DeviceKind::Loopback => false,
        (DeviceRole::Uplink, _) => true,
        (DeviceRole::Guessed, DetectLocal::Bridge(name)) if is_port_of(device, name) => {
            // A NIC may be a port of the bridge, too.
            !device.kind.is_virtual() && guessed.contains(&index)
        }
        (DeviceRole::Guessed, DetectLocal::Bridge(name)) => device.name != *name,
        (DeviceRole::Guessed, DetectLocal::InterfaceNamePrefix(prefix)) => {
            !device.name.starts_with(prefix.as_str())
        }
        (DeviceRole::Guessed, DetectLocal::Devices | DetectLocal::ClusterCidr(_) | DetectLocal::NodeCidr) => {
            guessed.contains(&index)
        }
    };
    let bridge_of = |device: &HostDevice| {
        let master = device.master.and_then(|index| Some((index, host.devices.get(&index)?)));
        master.filter(|(_, master)| master.kind == DeviceKind::Bridge)
    };
    let has_nic = |bridge: u32| {
        let is_nic = |port: &HostDevice| port.master == Some(bridge) && !port.kind.is_virtual();
        host.devices.iter().any(|(index, port)| is_nic(port) && is_uplink(*index, port))
    };
    // One veth of the node leads to all pods (Cilium): the route to a pod does not tell its device.
    let has_own_routes = !host.devices.values().any(is_between);
    let facts = |(index, device): (&u32, &HostDevice)| {
        let (uplink, bridge) = (is_uplink(*index, device), bridge_of(device));
        // A guest on a bridge with a NIC is on the LAN, also if the node has no address there: its router may be another machine.
        let lan_port =
            !uplink && bridge.is_some_and(|(index, bridge)| is_uplink(index, bridge) || has_nic(index));
        let is_pair = device.kind == DeviceKind::Veth && !device.both_ends;
        let is_routed = device.master.is_none() || bridge.is_some() && !lan_port;
        let guest = is_pair && is_routed && !uplink && has_own_routes;
        let bits = bits([
            (uplink, DEVICE_UPLINK),
            (device.no_header, DEVICE_NO_HEADER),
            (lan_port, DEVICE_LAN_PORT),
            (guest, DEVICE_GUEST),
        ]);
        // A bridge of containers receives frames for any address.
        let mac = if guest { 0 } else { bridge.map_or(device.mac, |(_, bridge)| bridge.mac) };
        (bits != 0).then_some((*index, bits | mac))
    };
    host.devices.iter().filter_map(facts).collect()
}

/// Returns the bits whose flag is `true`, combined.
pub(crate) fn bits<T: Default + std::ops::BitOr<Output = T>>(all: impl IntoIterator<Item = (bool, T)>) -> T {
    all.into_iter().filter(|(is_set, _)| *is_set).fold(T::default(), |bits, (_, bit)| bits | bit)
}

/// Returns the uplinks that routes, addresses and kinds indicate, with their parents, the devices on top of them, and their
/// ports.
fn guess(node: &NodeView, host: &HostView, detect: &DetectLocal) -> BTreeSet<u32> {
    let mut uplinks = BTreeSet::new();
    let mut open: Vec<u32> = host.defaults.iter().map(|route| route.device).collect();
    let pods = pod_ranges(node, detect);
    let begins = |(index, device): (&u32, &HostDevice)| {
        let is_uplink = device.role == DeviceRole::Uplink
            || device.addresses.iter().any(|address| node.internal_ips.contains(address))
            || by_kind(device, host, &pods);
        is_uplink.then_some(*index)
    };
    open.extend(host.devices.iter().filter_map(begins));
    while let Some(index) = open.pop() {
        let Some(device) = host.devices.get(&index).filter(|device| device.role != DeviceRole::Local) else {
            continue;
        };
        if !uplinks.insert(index) {
            continue;
        }
        open.extend(device.parent);
        // A bridge port with a container behind it carries the container's packets, not those of other machines. If all ports are
        // virtual, one of a bridge's veths is the NIC of a node that is a container itself.
        let is_bridge = device.kind == DeviceKind::Bridge;
        let has_nic =
            host.devices.values().any(|device| device.master == Some(index) && !device.kind.is_virtual());
        let is_port = |device: &HostDevice| match device.kind {
            DeviceKind::Tun => false,
            DeviceKind::Veth => is_bridge && !has_nic && !device.both_ends,
            _ => true,
        };
        let belongs = |device: &HostDevice| {
            device.parent == Some(index) || device.master == Some(index) && is_port(device)
        };
        open.extend(host.devices.iter().filter(|(_, device)| belongs(device)).map(|(index, _)| *index));
    }
    uplinks
}

/// Whether the device is an uplink by its kind, or by its addresses if the kind does not determine it: a veth may be that
/// of a pod, or the NIC of a node that is a container itself. A veth with an address and with both ends on the node leads to
/// pods of other nodes, too (Cilium's `cilium_host`).
fn by_kind(device: &HostDevice, host: &HostView, pods: &[IpNet]) -> bool {
    let is_bridge_port = || {
        let master = device.master.and_then(|index| host.devices.get(&index));
        master.is_some_and(|master| master.kind == DeviceKind::Bridge)
    };
    match device.kind {
        DeviceKind::Physical | DeviceKind::Bond | DeviceKind::Tunnel => true,
        // The device of a VPN has an address of full prefix length, too, and that of a virtual machine on a bridge has none.
        DeviceKind::Tun => {
            !is_bridge_port() && device.addresses.iter().any(|address| !is_pods(address, pods))
        }
        DeviceKind::Bridge | DeviceKind::Loopback | DeviceKind::Dummy => false,
        DeviceKind::Stacked | DeviceKind::Veth | DeviceKind::Other => {
            !is_bridge_port() && (is_between(device) || has_network(device, pods))
        }
    }
}

/// Whether both ends of the device are on the node, one with an address.
fn is_between(device: &HostDevice) -> bool {
    device.both_ends && !device.addresses.is_empty()
}

/// Whether the device has an address in a subnet that is not in a range of pods.
fn has_network(device: &HostDevice, pods: &[IpNet]) -> bool {
    device.subnets.iter().map(IpNet::addr).any(|address| !address.is_loopback() && !is_pods(&address, pods))
}

/// Whether the address is in a range of pods.
fn is_pods(address: &IpAddr, pods: &[IpNet]) -> bool {
    pods.iter().any(|range| range.contains(address))
}

/// Returns the ranges of this node's pods; for a family without such a range, the operator's ranges for all pods.
fn pod_ranges(node: &NodeView, detect: &DetectLocal) -> Vec<IpNet> {
    let mut ranges = node.pod_cidrs.clone();
    if let DetectLocal::ClusterCidr(all) = detect {
        let has_family = |range: &&IpNet| node.pod_cidrs.iter().any(|known| family(known) == family(range));
        ranges.extend(all.iter().filter(|range| !has_family(range)));
    }
    ranges
}

fn family(range: &IpNet) -> IpFamily {
    IpFamily::of(range.addr())
}

#[cfg(test)]
mod tests;
