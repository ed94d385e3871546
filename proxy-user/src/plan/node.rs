//! What the programs are told of the node.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use proxy_common::node::SERVICE_CIDRS;

use crate::model::net::IpFamily;
use crate::model::settings::{DetectLocal, NodePortAddresses, NodeSettings};
use crate::model::{HostDevice, HostView, NodeView};

use super::Problem;

const FAMILIES: [IpFamily; 2] = [IpFamily::V4, IpFamily::V6];

/// The node as its programs should see it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodePlan {
    /// Under which address of each family packets are sent on to other nodes.
    pub sources: BTreeMap<IpFamily, IpAddr>,
    /// Addresses of pods, where local pods are known by them.
    pub pods: BTreeMap<IpFamily, IpNet>,
    /// Ranges of Service addresses, at most [`SERVICE_CIDRS`] of each family.
    pub service_cidrs: BTreeMap<IpFamily, Vec<IpNet>>,
    /// Every address of the node that anything is said about.
    pub addresses: BTreeMap<IpAddr, AddressFacts>,
    /// Every device that anything is said about, by index.
    pub devices: BTreeMap<u32, DeviceFacts>,
    /// The operator said how local pods are known.
    pub detect_local: bool,
    /// Packets to cluster addresses are sent on under the node's own address.
    pub masquerade_all: bool,
    /// Connections that another proxy began are left to netfilter.
    pub leave_old: bool,
    /// First and last source port of packets that are sent on under the node's own address.
    pub snat_ports: (u16, u16),
    /// Cookie of the node's network namespace; 0: not known.
    pub host_netns: u64,
    /// Where health checks of Services are answered; unspecified stands for all addresses of its family.
    pub listen: BTreeSet<IpAddr>,
    /// What is wrong with the node, or with what is said of it.
    pub problems: Vec<Problem>,
}

/// What an address of the node is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AddressFacts {
    /// Node ports answer on it.
    pub node_ports: bool,
    /// It is a loopback address.
    pub loopback: bool,
}

/// What matters of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Clients that come in by it are outside.
    pub uplink: bool,
    /// Its packets have no link-layer header.
    pub no_header: bool,
}

/// Plans the node; `service_cidrs` are the ranges that the cluster tells.
pub fn plan_node(
    node: &NodeView,
    host: &HostView,
    service_cidrs: &BTreeSet<IpNet>,
    settings: &NodeSettings,
) -> NodePlan {
    let mut problems = Vec::new();
    let sources: BTreeMap<_, _> = FAMILIES
        .into_iter()
        .filter_map(|family| Some((family, source(node, host, settings, family)?)))
        .collect();
    let addresses = addresses(node, host, settings, &sources);
    let wanted = &settings.node_port_addresses;
    let is_single = |address: &IpAddr| !matches_all(wanted, IpFamily::of(*address));
    let single = addresses.iter().filter(|(address, facts)| facts.node_ports && is_single(address));
    let any: [IpAddr; 2] = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
    let listen =
        single.map(|(address, _)| *address).chain(any.into_iter().filter(|any| !is_single(any))).collect();
    let pods = pods(node, &settings.detect_local, &mut problems);
    let ranges: BTreeSet<IpNet> = service_cidrs.iter().chain(&settings.service_cidrs).copied().collect();
    overlaps(node, host, &pods, &ranges, &mut problems);
    NodePlan {
        sources,
        pods,
        service_cidrs: by_family(&ranges, &mut problems),
        addresses,
        devices: devices(node, host, &settings.detect_local),
        detect_local: settings.detect_local != DetectLocal::Devices,
        masquerade_all: settings.masquerade_all,
        leave_old: host.has_old_proxy,
        snat_ports: settings.snat_ports,
        host_netns: host.netns_cookie,
        listen,
        problems,
    }
}

/// The address that the operator names, or the internal one, if this machine really has it; else what the default
/// route would use.
fn source(node: &NodeView, host: &HostView, settings: &NodeSettings, family: IpFamily) -> Option<IpAddr> {
    let of_family = |address: &IpAddr| IpFamily::of(*address) == family;
    let has = |address: &IpAddr| host.addresses().any(|own| own == address);
    let named = settings.address.iter().chain(&node.internal_ips).copied();
    let mut ours = named.filter(|address| of_family(address) && has(address));
    ours.next().or_else(|| host.defaults.iter().filter_map(|route| route.source).find(of_family))
}

/// Whether all addresses of a family answer at node ports, but for loopback ones: that is said, or a range holds them
/// all, or the ranges are of the other family alone (`pkg/proxy/util/nodeport_addresses.go`).
fn matches_all(wanted: &NodePortAddresses, family: IpFamily) -> bool {
    let mut own = wanted.ranges.iter().filter(|range| IpFamily::of(range.addr()) == family).peekable();
    let is_left_out = own.peek().is_none() && !wanted.ranges.is_empty() && !wanted.primary;
    wanted.all || is_left_out || own.any(|range| range.prefix_len() == 0)
}

fn addresses(
    node: &NodeView,
    host: &HostView,
    settings: &NodeSettings,
    sources: &BTreeMap<IpFamily, IpAddr>,
) -> BTreeMap<IpAddr, AddressFacts> {
    let wanted = &settings.node_port_addresses;
    let is_primary = |address: &IpAddr| {
        // Until the cluster has told which one it is, the address that the node uses stands for it.
        let known = node.internal_ips.iter().any(|ip| IpFamily::of(*ip) == IpFamily::of(*address));
        if known { node.internal_ips.contains(address) } else { sources.values().any(|ip| ip == address) }
    };
    let all = host.devices.values().flat_map(|device| &device.addresses);
    all.filter_map(|address| {
        let loopback = address.is_loopback();
        // A range that happens to hold loopback addresses does not ask for them.
        let is_meant = |range: &IpNet| !loopback || range.addr().is_loopback();
        let node_ports = wanted.ranges.iter().any(|range| range.contains(address) && is_meant(range))
            || if loopback {
                wanted.localhost
            } else {
                matches_all(wanted, IpFamily::of(*address)) || wanted.primary && is_primary(address)
            };
        (node_ports || !loopback).then_some((*address, AddressFacts { node_ports, loopback }))
    })
    .collect()
}

/// Devices by which clients outside come in, and those without header. Behind all others are pods.
fn devices(node: &NodeView, host: &HostView, detect: &DetectLocal) -> BTreeMap<u32, DeviceFacts> {
    let lead_out = uplinks(node, host);
    let is_called = |index: Option<u32>, name: &str| {
        index.and_then(|index| host.devices.get(&index)).is_some_and(|device| device.name == name)
    };
    let is_uplink = |index: u32, device: &HostDevice| match detect {
        DetectLocal::Devices => lead_out.contains(&index),
        // Pods are known by their addresses, and by nothing else.
        DetectLocal::ClusterCidr(_) | DetectLocal::NodeCidr => true,
        DetectLocal::Bridge(name) => device.name != *name && !is_called(device.master, name),
        DetectLocal::InterfaceNamePrefix(prefix) => !device.name.starts_with(prefix.as_str()),
    };
    let facts = |(index, device): (&u32, &HostDevice)| {
        let facts = DeviceFacts { uplink: is_uplink(*index, device), no_header: device.no_header };
        (facts != DeviceFacts::default()).then_some((*index, facts))
    };
    host.devices.iter().filter_map(facts).collect()
}

/// Devices that lead outside: those that carry a default route or an internal address of the node, those that the
/// operator names, and what carries the packets of these.
fn uplinks(node: &NodeView, host: &HostView) -> BTreeSet<u32> {
    let mut uplinks: BTreeSet<u32> = host.defaults.iter().map(|route| route.device).collect();
    let leads_out = |device: &HostDevice| {
        device.uplink || device.addresses.iter().any(|address| node.internal_ips.contains(address))
    };
    uplinks.extend(host.devices.iter().filter(|(_, device)| leads_out(device)).map(|(index, _)| *index));
    let mut open: Vec<u32> = uplinks.iter().copied().collect();
    while let Some(index) = open.pop() {
        let parent = host.devices.get(&index).and_then(|device| device.parent);
        // A port of a bridge that a container is behind carries the container's packets, not the outside's.
        let ports = host.devices.iter().filter(|(_, port)| port.master == Some(index) && !port.is_virtual);
        for below in parent.into_iter().chain(ports.map(|(port, _)| *port)) {
            if uplinks.insert(below) {
                open.push(below);
            }
        }
    }
    uplinks
}

fn pods(node: &NodeView, detect: &DetectLocal, problems: &mut Vec<Problem>) -> BTreeMap<IpFamily, IpNet> {
    let ranges = match detect {
        DetectLocal::ClusterCidr(ranges) => ranges,
        DetectLocal::NodeCidr => &node.pod_cidrs,
        DetectLocal::Devices | DetectLocal::Bridge(_) | DetectLocal::InterfaceNamePrefix(_) => {
            return BTreeMap::new();
        }
    };
    if *detect == DetectLocal::NodeCidr && ranges.is_empty() {
        problems.push(Problem {
            object: format!("Node {}", node.name),
            field: "spec.podCIDRs".to_owned(),
            message: "it is empty, so no client is known as a pod; choose another --detect-local-mode"
                .to_owned(),
        });
    }
    let mut first = BTreeMap::new();
    for range in ranges {
        first.entry(IpFamily::of(range.addr())).or_insert(*range);
    }
    first
}

fn by_family(ranges: &BTreeSet<IpNet>, problems: &mut Vec<Problem>) -> BTreeMap<IpFamily, Vec<IpNet>> {
    // One that lies in another says nothing new.
    let outer = |range: &&IpNet| !ranges.iter().any(|other| other != *range && other.contains(*range));
    let mut by_family: BTreeMap<IpFamily, Vec<IpNet>> = BTreeMap::new();
    for range in ranges.iter().filter(outer) {
        by_family.entry(IpFamily::of(range.addr())).or_default().push(*range);
    }
    for (family, ranges) in &mut by_family {
        if ranges.len() > SERVICE_CIDRS {
            problems.push(Problem {
                object: format!("ServiceCIDR {}", ranges[SERVICE_CIDRS]),
                field: "spec.cidrs".to_owned(),
                message: format!(
                    "there are {} {family} ranges and {SERVICE_CIDRS} are looked at: packets to unused addresses of \
                     the others are not dropped",
                    ranges.len()
                ),
            });
            ranges.truncate(SERVICE_CIDRS);
        }
    }
    by_family
}

/// Ranges of Services that hold what is somebody else's: packets to these may be refused or lost.
fn overlaps(
    node: &NodeView,
    host: &HostView,
    pods: &BTreeMap<IpFamily, IpNet>,
    ranges: &BTreeSet<IpNet>,
    problems: &mut Vec<Problem>,
) {
    let pods: BTreeSet<IpNet> = pods.values().chain(&node.pod_cidrs).copied().collect();
    let own: BTreeSet<IpAddr> = host.addresses().chain(&node.internal_ips).copied().collect();
    for range in ranges {
        let mut report = |what: String| {
            problems.push(Problem {
                object: format!("ServiceCIDR {range}"),
                field: "spec.cidrs".to_owned(),
                message: format!(
                    "it overlaps with {what}: packets to addresses in it that no Service has are dropped"
                ),
            });
        };
        for pods in pods.iter().filter(|pods| range.contains(*pods) || pods.contains(range)) {
            report(format!("the pods of {pods}"));
        }
        for address in own.iter().filter(|address| range.contains(*address)) {
            report(format!("{address}, an address of this node"));
        }
    }
}

#[cfg(test)]
mod tests;
