//! The plan of the node: its desired state in the maps.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use proxy_common::config::POD_CGROUPS;
use proxy_common::map_names::OWN_ADDR_COUNT;
use proxy_common::node::{DEVICE_SOURCES, DEVICE_UPLINK, Device, SERVICE_CIDRS};

use crate::model::net::IpFamily;
use crate::model::settings::{DetectLocal, NodePortAddresses, NodeSettings, UnallocatedAddresses};
use crate::model::{DeviceKind, HostView, IPVS_DEVICE, IpsecPolicy, NodeView, Problem};

use super::devices::devices;
use super::{ipsec, ports};

const FAMILIES: [IpFamily; 2] = [IpFamily::V4, IpFamily::V6];

/// The desired state of the node in the maps.
#[expect(clippy::struct_excessive_bools, reason = "each is a setting of the programs, in every combination")]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodePlan {
    /// The source address for SNAT, by family.
    pub sources: BTreeMap<IpFamily, IpAddr>,
    /// The devices whose packets have another source address for SNAT than [`NodePlan::sources`], by family, at most
    /// [`DEVICE_SOURCES`] of each.
    pub device_sources: BTreeMap<IpFamily, Vec<(u32, IpAddr)>>,
    /// Addresses that only uplinks that are switched off have: flows may have them as source for SNAT.
    pub down: BTreeSet<IpAddr>,
    /// Range of pods by family, if local pods are recognized by their addresses.
    pub pods: BTreeMap<IpFamily, IpNet>,
    /// Ranges of Service addresses, at most [`SERVICE_CIDRS`] of each family.
    pub service_cidrs: BTreeMap<IpFamily, Vec<IpNet>>,
    /// All addresses of the node, including loopback addresses, as far as the maps have room.
    pub addresses: BTreeMap<IpAddr, AddressFacts>,
    /// The entries of the map `devices`, by index.
    pub devices: BTreeMap<u32, Device>,
    /// Clients are recognized as pods by their addresses alone, on any device.
    pub detect_local: bool,
    /// Packets of connected UDP sockets of pods are translated instead of their calls.
    pub pod_udp_by_packets: bool,
    /// There are rules for routes (`ip rule`).
    pub policy_routes: bool,
    /// Connections that another proxy began are left to netfilter.
    pub other_proxy: bool,
    /// The IPsec policies of the kernel by family, at most [`IPSEC_POLICIES`](proxy_common::node::IPSEC_POLICIES) of each: the
    /// kernel's stack routes packets to which one applies.
    pub ipsec: BTreeMap<IpFamily, Vec<IpsecPolicy>>,
    /// The families in which the route of packets with SNAT may depend on a mark that only netfilter knows: the stack routes them.
    pub routes_by_mark: BTreeSet<IpFamily>,
    /// The operator's settings; `masquerade_mark` is 0 if netfilter cannot masquerade.
    pub settings: NodeSettings,
    /// Ids of the cgroups of pods; all 0: not known.
    pub pod_cgroups: [u64; POD_CGROUPS],
    /// The ranges of this node's pods, the first of each family.
    pub pod_ranges: PodRanges,
    /// Cookie of the node's network namespace; 0: not known.
    pub host_netns: u64,
    /// The addresses on which the agent answers health checks of Services; an unspecified address stands for all addresses
    /// of its family.
    pub listen: BTreeSet<IpAddr>,
    /// Other nodes send encapsulated packets to this node (DSR), or did so.
    pub dsr: bool,
    /// The addresses to which nodes of the cluster send encapsulated packets, each with the address of this node that is
    /// the source of its packets; this node's own addresses are included. `None`: the addresses are not known.
    pub tunnels: Option<BTreeMap<IpAddr, IpAddr>>,
    /// Problems of the node, or of its objects and settings.
    pub problems: Vec<Problem>,
}

/// The first range of pods of each family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PodRanges {
    /// IPv4.
    pub v4: Option<Ipv4Net>,
    /// IPv6.
    pub v6: Option<Ipv6Net>,
}

impl PodRanges {
    /// Returns the first range of each family.
    fn of<'a>(ranges: impl Iterator<Item = &'a IpNet>) -> Self {
        let mut first = Self::default();
        for range in ranges {
            match range {
                IpNet::V4(range) => _ = first.v4.get_or_insert(range.trunc()),
                IpNet::V6(range) => _ = first.v6.get_or_insert(range.trunc()),
            }
        }
        first
    }
}

/// The facts about an address of the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AddressFacts {
    /// Node ports answer on it.
    pub node_ports: bool,
    /// The address is a loopback address.
    pub loopback: bool,
}

/// Plans the node. `service_cidrs` are the ranges that the cluster reports; `left_alone` are the node's own addresses that
/// are also cluster addresses of Services, which is not reported as a problem.
pub fn plan_node(
    node: &NodeView,
    host: &HostView,
    service_cidrs: &BTreeSet<IpNet>,
    left_alone: &BTreeSet<IpAddr>,
    settings: &NodeSettings,
) -> NodePlan {
    let mut problems = Vec::new();
    let mut sources: BTreeMap<_, _> = FAMILIES
        .into_iter()
        .filter_map(|family| Some((family, source(node, host, settings.address, family)?)))
        .collect();
    let addresses = addresses(node, host, settings, &sources, &mut problems);
    let wanted = &settings.node_port_addresses;
    let is_single = |address: &IpAddr| !matches_all(wanted, IpFamily::of(*address));
    // As kube-proxy's health checks, which listen on addresses of devices.
    let has: BTreeSet<&IpAddr> = host.devices.values().flat_map(|device| &device.addresses).collect();
    let single = addresses
        .iter()
        .filter(|(address, facts)| facts.node_ports && is_single(address) && has.contains(address));
    let any: [IpAddr; 2] = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
    // A kernel without IPv6 (`ipv6.disable=1`) has no such socket; with IPv6, each device has an address.
    let has_family = |any: &IpAddr| any.is_ipv4() || has.iter().any(|address| address.is_ipv6());
    let any = any.into_iter().filter(|any| !is_single(any) && has_family(any));
    let listen = single.map(|(address, _)| *address).chain(any).collect();
    let pods = pods(node, &settings.detect_local, &mut problems);
    let devices = devices(node, host, &settings.detect_local);
    let mut ranges: BTreeSet<IpNet> = match settings.unallocated {
        UnallocatedAddresses::Drop => service_cidrs.iter().chain(&settings.service_cidrs).copied().collect(),
        // The programs use the ranges only to drop and to refuse.
        UnallocatedAddresses::Pass => BTreeSet::new(),
    };
    ranges.retain(|range| !is_shared(*range, node, host, &pods, left_alone, &mut problems));
    problems.extend(leftovers(node, host));
    problems.extend(ports::problems(&node.name, &host.local_ports, settings));
    problems.extend(loopback(node, host));
    problems.extend(unserved(node, host, &devices));
    let is_missing = |family: &&IpFamily| settings.masquerade_mark != 0 && !host.masquerades.contains(family);
    problems.extend(sources.keys().filter(is_missing).map(|family| Problem {
        object: format!("Node {}", node.name),
        field: "--masquerade-external".to_owned(),
        message: format!(
            "the rule of netfilter for {family} could not be created (does the kernel have nf_tables and nft_masq?): endpoints \
             of this node see the addresses of clients outside. --masquerade-external=false accepts that"
        ),
    }));
    let device_sources = device_sources(node, host, &devices, &sources, &mut problems);
    // A node without both, like one that has lost its network, uses the address of any device: its pods still reach themselves by
    // Services.
    for address in
        host.devices.values().flat_map(|device| &device.masquerade).filter(|one| !one.is_loopback())
    {
        sources.entry(IpFamily::of(*address)).or_insert(*address);
    }
    let uplinks = devices.iter().filter(|(_, bits)| **bits & DEVICE_UPLINK != 0);
    let uplinks = uplinks.filter_map(|(index, _)| host.devices.get(index));
    let mut down: BTreeSet<_> =
        uplinks.filter(|device| device.is_down).flat_map(|device| &device.addresses).copied().collect();
    let is_up = |address: &IpAddr| {
        host.devices.values().any(|device| !device.is_down && device.addresses.contains(address))
    };
    down.retain(|address| !is_up(address));
    let pod_ranges = PodRanges::of(node.pod_cidrs.iter().chain(pods.values()));
    NodePlan {
        ipsec: ipsec::combine(host.ipsec.keys()),
        routes_by_mark: host.mark_routes.clone(),
        device_sources,
        sources,
        down,
        pods,
        service_cidrs: by_family(&ranges, &mut problems),
        addresses,
        devices,
        detect_local: matches!(settings.detect_local, DetectLocal::ClusterCidr(_) | DetectLocal::NodeCidr),
        pod_udp_by_packets: host.pod_sockets_stay,
        policy_routes: host.has_policy_routes,
        other_proxy: host.has_kube_proxy_rules,
        settings: NodeSettings {
            masquerade_mark: if host.masquerades.is_empty() { 0 } else { settings.masquerade_mark },
            ..settings.clone()
        },
        pod_cgroups: host.pod_cgroups,
        pod_ranges,
        host_netns: host.netns_cookie,
        dsr: false,
        tunnels: None,
        listen,
        problems,
    }
}

/// Returns the uplinks without the node's source address, and the addresses that MASQUERADE chooses for them.
fn device_sources(
    node: &NodeView,
    host: &HostView,
    devices: &BTreeMap<u32, Device>,
    sources: &BTreeMap<IpFamily, IpAddr>,
    problems: &mut Vec<Problem>,
) -> BTreeMap<IpFamily, Vec<(u32, IpAddr)>> {
    let mut families: BTreeMap<IpFamily, Vec<_>> = BTreeMap::new();
    for index in devices.iter().filter(|(_, bits)| **bits & DEVICE_UPLINK != 0).map(|(index, _)| index) {
        let Some(device) = host.devices.get(index) else { continue };
        for address in &device.masquerade {
            let family = IpFamily::of(*address);
            if !sources.get(&family).is_some_and(|source| device.addresses.contains(source)) {
                families.entry(family).or_default().push((*index, *address));
            }
        }
    }
    for (family, found) in &mut families {
        if found.len() > DEVICE_SOURCES {
            problems.push(Problem {
                object: format!("Node {}", node.name),
                field: "status.addresses".to_owned(),
                message: format!(
                    "{} uplinks have {family} addresses besides the node's own, and Ballast knows the first \
                     {DEVICE_SOURCES}: endpoints behind the others see the node's own address",
                    found.len()
                ),
            });
            found.truncate(DEVICE_SOURCES);
        }
    }
    families
}

/// Reports uplinks with addresses that get no programs.
fn unserved<'a>(
    node: &'a NodeView,
    host: &'a HostView,
    devices: &'a BTreeMap<u32, Device>,
) -> impl Iterator<Item = Problem> + 'a {
    let uplinks = devices
        .iter()
        .filter(|(_, bits)| **bits & DEVICE_UPLINK != 0)
        .filter_map(|(index, _)| host.devices.get(index));
    let unserved = uplinks.filter(|device| device.unknown_header && !device.addresses.is_empty());
    unserved.map(|device| Problem {
        object: format!("Node {}", node.name),
        field: format!("device {}", device.name),
        message: "Ballast does not know the link-layer header of this device (IP over InfiniBand?) and serves no clients on it: \
                  their packets to node ports, load balancers and external addresses are not translated, and endpoints behind \
                  it get no packets of clients outside; use an Ethernet device for them"
            .to_owned(),
    })
}

/// Reports that packets to which an IPsec policy applies do not reach the stack.
fn loopback(node: &NodeView, host: &HostView) -> Option<Problem> {
    host.loopback_is_closed.then(|| Problem {
        object: format!("Node {}", node.name),
        field: "net.ipv4.conf.lo.accept_local".to_owned(),
        message: "the agent could not set this sysctl to 1, and rp_filter of lo to 2: IPv4 packets with SNAT to which an IPsec \
                  policy applies, or which have to be fragmented, are dropped"
            .to_owned(),
    })
}

impl NodePlan {
    /// Sets the nodes with which this node exchanges encapsulated packets. `own`: this node's internal addresses; the first
    /// of each family is the source of its packets. `nodes`: the internal addresses of all nodes; `None`: they have not
    /// been listed yet.
    pub fn set_tunnels<'a>(&mut self, own: &'a [IpAddr], nodes: Option<impl Iterator<Item = &'a IpAddr>>) {
        self.dsr = true;
        let source = |family| own.iter().find(|address| IpFamily::of(**address) == family);
        let from = |address: &IpAddr| Some((*address, *source(IpFamily::of(*address))?));
        self.tunnels = nodes.map(|nodes| nodes.chain(own).filter_map(from).collect());
    }
}

/// Returns the node's address in a family: the operator's address or an internal address, if the host really has it; else
/// the source address of the default route.
pub(super) fn source(
    node: &NodeView,
    host: &HostView,
    address: Option<IpAddr>,
    family: IpFamily,
) -> Option<IpAddr> {
    let of_family = |address: &IpAddr| IpFamily::of(*address) == family;
    let has = |address: &IpAddr| host.addresses().any(|own| own == address);
    let named = address.iter().chain(node.addresses()).copied();
    let mut ours = named.filter(|address| of_family(address) && has(address));
    ours.next().or_else(|| host.defaults.iter().filter_map(|route| route.source).find(of_family))
}

/// Whether node ports answer on all addresses of a family, except loopback addresses: the setting says all, or a range
/// contains all, or the ranges are of the other family alone (`pkg/proxy/util/nodeport_addresses.go`).
fn matches_all(wanted: &NodePortAddresses, family: IpFamily) -> bool {
    let mut own = wanted.ranges.iter().filter(|range| IpFamily::of(range.addr()) == family).peekable();
    let is_left_out =
        own.peek().is_none() && !wanted.ranges.is_empty() && !wanted.primary && !wanted.localhost;
    wanted.all || is_left_out || own.any(|range| range.prefix_len() == 0)
}

/// Returns the facts about each address of the node. If a family has more addresses than the maps can hold, those of node
/// ports come first.
fn addresses(
    node: &NodeView,
    host: &HostView,
    settings: &NodeSettings,
    sources: &BTreeMap<IpFamily, IpAddr>,
    problems: &mut Vec<Problem>,
) -> BTreeMap<IpAddr, AddressFacts> {
    let wanted = &settings.node_port_addresses;
    // One of each family, as in kube-proxy (`cmd/kube-proxy/app/server.go`, `getNodeIPs`), whether the host has it or not. Until
    // the cluster has reported the addresses, it is the node's source address for SNAT.
    let is_primary = |address: &IpAddr| {
        let family = IpFamily::of(*address);
        let mut named = settings.address.iter().chain(node.addresses());
        let primary = named.find(|named| IpFamily::of(**named) == family);
        primary.or_else(|| sources.get(&family)) == Some(address)
    };
    let facts = |address: &IpAddr| {
        let loopback = address.is_loopback();
        // A range that also contains loopback addresses does not select them.
        let is_meant = |range: &IpNet| !loopback || range.addr().is_loopback();
        let is_selected = wanted.ranges.iter().any(|range| range.contains(address) && is_meant(range))
            || if loopback {
                wanted.localhost
            } else {
                matches_all(wanted, IpFamily::of(*address)) || wanted.primary && is_primary(address)
            };
        let node_ports = is_selected && !(loopback && wanted.no_loopback);
        AddressFacts { node_ports, loopback }
    };
    let all = host.devices.values().flat_map(|device| &device.addresses).copied();
    let by_route = by_route(&node.name, &host.local_routes, problems);
    let mut addresses: BTreeMap<_, _> =
        all.chain(by_route).map(|address| (address, facts(&address))).collect();
    for family in FAMILIES {
        let of_family = |(address, _): &(&IpAddr, &AddressFacts)| IpFamily::of(**address) == family;
        let mut order: Vec<_> = addresses
            .iter()
            .filter(of_family)
            .map(|(address, facts)| (!facts.node_ports, !node.internal_ips.contains(address), *address))
            .collect();
        let room = OWN_ADDR_COUNT as usize;
        if order.len() <= room {
            continue;
        }
        problems.push(Problem {
            object: format!("Node {}", node.name),
            field: "status.addresses".to_owned(),
            message: format!(
                "this machine has {} {family} addresses, and {room} fit into the map: the others accept no NodePort traffic, and \
                 their packets are not recognized as the node's own",
                order.len()
            ),
        });
        order.sort_unstable();
        for (.., address) in order.split_off(room) {
            addresses.remove(&address);
        }
    }
    addresses
}

/// The most addresses of a range that are looked up one by one: each node port has a bit of the prefilter for each of them.
const ROUTE_ADDRESSES: usize = 64;

/// Returns the addresses that are local by a route, as far as they are few.
fn by_route(node: &str, routes: &BTreeSet<IpNet>, problems: &mut Vec<Problem>) -> Vec<IpAddr> {
    let mut addresses = Vec::new();
    for range in routes {
        let all: Vec<IpAddr> = match range {
            IpNet::V4(range) => {
                let first = u64::from(range.network().to_bits());
                let end = u64::from(range.broadcast().to_bits()) + 1;
                (first..end)
                    .take(ROUTE_ADDRESSES + 1)
                    .map(|bits| Ipv4Addr::from(bits as u32).into())
                    .collect()
            }
            IpNet::V6(range) => {
                let (first, last) = (range.network().to_bits(), range.broadcast().to_bits());
                (first..=last).take(ROUTE_ADDRESSES + 1).map(|bits| Ipv6Addr::from(bits).into()).collect()
            }
        };
        if addresses.len() + all.len() <= ROUTE_ADDRESSES {
            addresses.extend(all);
        } else {
            problems.push(Problem {
                object: format!("Node {node}"),
                field: "status.addresses".to_owned(),
                message: format!(
                    "the local route to {range} makes more than {ROUTE_ADDRESSES} addresses local: they accept no \
                     NodePort traffic; give the addresses that need it to a device"
                ),
            });
        }
    }
    addresses
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
            message:
                "the field is empty, so no client is recognized as a pod; set another --detect-local-mode"
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
    // A range inside another one is redundant.
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
                    "there are {} {family} ranges, and Ballast uses {SERVICE_CIDRS}: packets to unused addresses of \
                     the others are not dropped",
                    ranges.len()
                ),
            });
            ranges.truncate(SERVICE_CIDRS);
        }
    }
    by_family
}

/// Reports devices on which another proxy has left addresses of Services. kube-proxy's own device is one of its rules, which
/// `ballast status` reports.
fn leftovers(node: &NodeView, host: &HostView) -> impl Iterator<Item = Problem> {
    host.leftovers.iter().filter(|device| **device != IPVS_DEVICE).map(|device| Problem {
        object: format!("Node {}", node.name),
        field: format!("device {device}"),
        message: format!(
            "another service proxy has left addresses of Services on this device; Ballast serves them, but the node answers \
             ping and ARP for them: if no other proxy runs, remove the device with `ip link delete {device}` (kube-router: \
             `kube-router --cleanup-config`)"
        ),
    })
}

/// Whether a range of Services also has addresses of pods, of this node, or of machines in a subnet of this node. The programs
/// then pass packets to addresses that no Service has: to drop them would cut the node off from its neighbours.
fn is_shared(
    range: IpNet,
    node: &NodeView,
    host: &HostView,
    pods: &BTreeMap<IpFamily, IpNet>,
    left_alone: &BTreeSet<IpAddr>,
    problems: &mut Vec<Problem>,
) -> bool {
    let overlaps = |other: &IpNet| range.contains(other) || other.contains(&range);
    let pods: BTreeSet<IpNet> = pods.values().chain(&node.pod_cidrs).copied().collect();
    let own: BTreeSet<&IpAddr> = host.addresses().chain(&node.internal_ips).collect();
    // A dummy device has no neighbours.
    let devices = host.devices.values().filter(|device| device.kind != DeviceKind::Dummy);
    let subnets: BTreeSet<IpNet> = devices.flat_map(|device| &device.subnets).map(IpNet::trunc).collect();
    let pods = pods.iter().filter(|pods| overlaps(pods)).map(|pods| format!("the pod range {pods}"));
    let own = own.into_iter().filter(|address| range.contains(*address) && !left_alone.contains(*address));
    let own = own.map(|address| format!("{address}, an address of this node"));
    let subnets = subnets.iter().filter(|subnet| overlaps(subnet));
    let subnets = subnets.map(|subnet| format!("the subnet {subnet} of this node"));
    let found: Vec<_> = pods.chain(own).chain(subnets).collect();
    problems.extend(found.iter().map(|what| Problem {
        object: format!("ServiceCIDR {range}"),
        field: "spec.cidrs".to_owned(),
        message: format!(
            "the range overlaps with {what}: packets to its addresses and ports that no Service has are passed on instead of \
             dropped or refused; give Services another range"
        ),
    }));
    !found.is_empty()
}

#[cfg(test)]
mod tests;
