//! The uplinks of this node: devices on which packets of other machines arrive (`DEVICE_UPLINK`). Behind all other devices
//! are pods, containers and virtual machines of this node: replies to them certainly return through this node.
//!
//! An uplink that is taken for a local device breaks connections: an endpoint on another node answers the client directly.
//! A local device that is taken for an uplink hides the client's address from such endpoints, and its clients are outside
//! for `externalTrafficPolicy: Local`. `docs/datapath.md` has the table of rules.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;

use crate::model::net::IpFamily;
use crate::model::settings::DetectLocal;
use crate::model::{DeviceKind, DeviceRole, HostDevice, HostView, NodeView};

/// The facts about a device that the programs need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Packets of other machines arrive on it.
    pub uplink: bool,
    /// Its packets have no link-layer header.
    pub no_header: bool,
    /// No uplink, but a port of a bridge that is one: guests behind it exchange frames with other machines.
    pub lan_port: bool,
    /// The MAC address at which this node receives its frames: that of the bridge whose port it is, or its own. 0: none.
    pub mac: u64,
}

/// Returns the devices that are uplinks, ports of uplinks, or have no link-layer header, by index.
pub fn devices(node: &NodeView, host: &HostView, detect: &DetectLocal) -> BTreeMap<u32, DeviceFacts> {
    let guessed = guess(node, host, detect);
    let is_port_of = |device: &HostDevice, name: &str| {
        let master = device.master.and_then(|index| host.devices.get(&index));
        master.is_some_and(|master| master.name == name)
    };
    let is_uplink = |index: u32, device: &HostDevice| match (device.role, detect) {
        (DeviceRole::Local, _) => false,
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
    let facts = |(index, device): (&u32, &HostDevice)| {
        let (uplink, bridge) = (is_uplink(*index, device), bridge_of(device));
        let lan_port = !uplink && bridge.is_some_and(|(index, bridge)| is_uplink(index, bridge));
        let mac = bridge.map_or(device.mac, |(_, bridge)| bridge.mac);
        let no_header = device.no_header;
        (uplink || lan_port || no_header)
            .then_some((*index, DeviceFacts { uplink, no_header, lan_port, mac }))
    };
    host.devices.iter().filter_map(facts).collect()
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
        // A bridge port with a container behind it carries the container's packets, not those of other machines.
        let belongs = |device: &HostDevice| {
            device.parent == Some(index) || device.master == Some(index) && !device.kind.is_virtual()
        };
        open.extend(host.devices.iter().filter(|(_, device)| belongs(device)).map(|(index, _)| *index));
    }
    uplinks
}

/// Whether the device is an uplink by its kind, or by its addresses if the kind does not determine it: a veth may be that
/// of a pod, or the NIC of a node that is a container itself.
fn by_kind(device: &HostDevice, host: &HostView, pods: &[IpNet]) -> bool {
    let is_bridge_port = || {
        let master = device.master.and_then(|index| host.devices.get(&index));
        master.is_some_and(|master| master.kind == DeviceKind::Bridge)
    };
    match device.kind {
        DeviceKind::Physical | DeviceKind::Bond | DeviceKind::Tunnel => true,
        DeviceKind::Bridge | DeviceKind::Tun | DeviceKind::Loopback | DeviceKind::Dummy => false,
        DeviceKind::Stacked | DeviceKind::Veth | DeviceKind::Other => {
            !is_bridge_port() && has_network(device, pods)
        }
    }
}

/// Whether the device has an address in a subnet that is not in a range of pods.
fn has_network(device: &HostDevice, pods: &[IpNet]) -> bool {
    let is_pods = |address: &IpAddr| pods.iter().any(|range| range.contains(address));
    device.subnets.iter().map(IpNet::addr).any(|address| !address.is_loopback() && !is_pods(&address))
}

/// Returns the ranges of this node's pods; for a family without such a range, the operator's ranges for all pods.
fn pod_ranges(node: &NodeView, detect: &DetectLocal) -> Vec<IpNet> {
    let mut ranges = node.pod_cidrs.clone();
    if let DetectLocal::ClusterCidr(all) = detect {
        let is_told = |range: &&IpNet| node.pod_cidrs.iter().any(|told| family(told) == family(range));
        ranges.extend(all.iter().filter(|range| !is_told(range)));
    }
    ranges
}

fn family(range: &IpNet) -> IpFamily {
    IpFamily::of(range.addr())
}

#[cfg(test)]
mod tests;
