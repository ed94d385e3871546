//! By which devices packets of other machines come in (`DEVICE_UPLINK`). Behind all others are pods, containers and
//! virtual machines of this node: what they send returns through here for certain.
//!
//! A device that is taken for local and is none breaks connections: an endpoint on another node answers the client
//! directly. One that is taken for an uplink and is none hides the client's address from such endpoints, and its
//! clients are outside for `externalTrafficPolicy: Local`. `docs/datapath.md` has the table of rules.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;

use crate::model::net::IpFamily;
use crate::model::settings::DetectLocal;
use crate::model::{DeviceKind, DeviceRole, HostDevice, HostView, NodeView};

/// What matters of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Packets of other machines come in by it.
    pub uplink: bool,
    /// Its packets have no link-layer header.
    pub no_header: bool,
}

/// The devices that there is something to say of, by index.
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
    let facts = |(index, device): (&u32, &HostDevice)| {
        let facts = DeviceFacts { uplink: is_uplink(*index, device), no_header: device.no_header };
        (facts != DeviceFacts::default()).then_some((*index, facts))
    };
    host.devices.iter().filter_map(facts).collect()
}

/// Uplinks by their routes, addresses and kinds; and what these lie on, or what lies on them.
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
        // A port of a bridge that a container is behind carries the container's packets, not other machines'.
        let belongs = |device: &HostDevice| {
            device.parent == Some(index) || device.master == Some(index) && !device.kind.is_virtual()
        };
        open.extend(host.devices.iter().filter(|(_, device)| belongs(device)).map(|(index, _)| *index));
    }
    uplinks
}

/// What the kind of a device says, and its addresses where the kind says nothing: a veth may be a pod's, or the NIC
/// of a node that is a container itself.
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

/// Whether it has an address in a subnet that is none of pods.
fn has_network(device: &HostDevice, pods: &[IpNet]) -> bool {
    let is_pods = |address: &IpAddr| pods.iter().any(|range| range.contains(address));
    device.in_subnets.iter().any(|address| !address.is_loopback() && !is_pods(address))
}

/// The ranges of this node's pods; in a family of which the cluster tells none, those that the operator gives for all
/// pods.
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
