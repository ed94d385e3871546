//! Writes the entries that describe the node, in a safe order.
//!
//! They are written before the Services that need them. The filter bits of an address, one for each node port, are set
//! before its entry is written; the bits of a removed address stay in quarantine.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use proxy_common::config::{
    CONFIG_DETECT_LOCAL, CONFIG_DSR, CONFIG_IPSEC, CONFIG_LAN_PORTS, CONFIG_MASQUERADE_ALL,
    CONFIG_MASQUERADE_EXTERNAL, CONFIG_NODE_PORT_BIND_REFUSE, CONFIG_OTHER_PROXY, CONFIG_POD_UDP_BY_PACKETS,
    CONFIG_POLICY_ROUTES, CONFIG_SNAT_MOVED, CONFIG_SOCKET_DROP_FAIL, CONFIG_SOCKET_LB_HOST_ONLY,
    CONFIG_SOCKET_LB_OFF, CONFIG_SOURCES, CONFIG_VIP_ECHO, NodeConfig, PortRange, SNAT_RANGES, UPLINKS,
};
use proxy_common::map_names::{OWN_ADDR_COUNT, TUNNEL_COUNT};
use proxy_common::node::{
    DEVICE_LAN_PORT, DEVICE_MAC, DEVICE_UPLINK, Device, NODE_ADDR_INTERNAL, NODE_ADDR_LOOPBACK,
    NODE_ADDR_OWN, NODE_ADDR_PORTS, NodeAddr,
};

use super::applied::Applied;
use super::job::{Failure, Job, Owner, Steps};
use super::writer::Writer;
use crate::model::Problem;
use crate::model::net::IpFamily;
use crate::model::problem::chain;
use crate::model::settings::{NodePortBind, SocketDrop, SocketLb};
use crate::plan::NodePlan;
use crate::plan::devices::bits;
use crate::store::{
    ConfigRow, Ends, FlowUse, NodeContents, NodeFamily, NodeRow, Store, TunnelRow, Write, range_words,
};

/// The desired entries of the node, and the failure of the last write.
#[derive(Debug, Default)]
pub(super) struct NodeState {
    /// `None` until the node was planned: the entries of an earlier agent stay until then.
    desired: Option<NodeContents>,
    due: bool,
    plan_problems: Vec<Problem>,
    failure: Option<Failure>,
    /// Time of the next search for connections with source ports outside of the current SNAT ranges.
    next_snat_check: Option<Instant>,
    /// Addresses whose flows with SNAT are still to be ended: those that the node has lost, and those of uplinks that were switched off,
    /// with the time.
    lost: BTreeMap<IpAddr, (Ends, Instant)>,
    /// The addresses of uplinks that are switched off.
    down: BTreeSet<IpAddr>,
    /// The same at the last write.
    known_down: Option<BTreeSet<IpAddr>>,
    /// Time of the next search for these flows.
    next_lost_check: Option<Instant>,
}

/// Delay of the second search after the ranges or the sources changed: programs on other CPUs may have read the old ones before
/// the write.
const SNAT_SETTLES: Duration = Duration::from_secs(1);
/// Delay of the next search for flows with lost addresses after an error.
const LOST_RETRY: Duration = Duration::from_secs(10);
/// Period of the searches for connections with source ports outside of the current SNAT ranges.
const SNAT_PERIOD: Duration = Duration::from_mins(10);

impl NodeState {
    /// Returns the problems of the node's plan, and the failure of the last write.
    pub(super) fn problems(&self) -> impl Iterator<Item = Problem> {
        self.plan_problems.iter().chain(self.failure.as_ref().map(|failure| &failure.problem)).cloned()
    }

    /// Returns the time of the retry after a failure.
    pub(super) fn retry(&self) -> Option<Instant> {
        self.failure.as_ref().map(|failure| failure.retry)
    }

    /// Returns the time of the next search for flows with ports outside of the current SNAT ranges, or with lost addresses.
    pub(super) fn next_flow_check(&self) -> Option<Instant> {
        self.next_snat_check.into_iter().chain(self.next_lost_check).min()
    }
}

impl NodeState {
    /// Sets the desired entries for the next sync.
    pub(super) fn set(&mut self, plan: &NodePlan, known: &NodeContents) {
        let desired = Some(contents(plan, known));
        self.due |= self.desired != desired || self.down != plan.down;
        self.down.clone_from(&plan.down);
        self.desired = desired;
        self.plan_problems.clone_from(&plan.problems);
        self.plan_problems.extend(self.desired.as_ref().and_then(|desired| unnumbered(plan, desired)));
    }

    /// Whether a change of the node waits for a sync.
    pub(super) fn is_due(&self) -> bool {
        self.due
    }

    /// Writes the entries of devices only, and removes none: all that an agent may do before it knows the cluster.
    /// Otherwise the programs would take clients behind a new uplink for pods. A device that `exists` stays an uplink: the
    /// Node object may say so, which is not known yet.
    pub(super) fn write_devices<S: Store>(
        &self,
        writer: &mut Writer<S>,
        exists: impl Fn(u32) -> bool,
        now: Instant,
    ) {
        let Some(desired) = &self.desired else { return };
        let known = &writer.applied.node;
        let mut devices: BTreeMap<u32, Device> = known
            .devices
            .iter()
            .filter(|(index, _)| exists(**index))
            .map(|(index, bits)| (*index, *bits))
            .collect();
        for (index, bits) in &desired.devices {
            let device = devices.entry(*index).or_default();
            *device = bits | *device & DEVICE_UPLINK;
        }
        let mut steps = Steps::default();
        for (index, facts) in differing(&devices, &known.devices) {
            steps.push(0, Write::Device(*index, *facts));
        }
        let uplinks = uplinks(&devices);
        let config = ConfigRow(NodeConfig { uplinks, macs: macs(&devices, uplinks), ..known.config.0 });
        if config != known.config {
            steps.push(0, Write::Config(Box::new(config)));
        }
        // The next `reconcile` retries failed writes.
        writer.write_without_port(&steps, now);
    }

    /// Writes the entries that differ. `full`: also if no change is due. `freed`: space was freed, so a failure is retried
    /// at once.
    pub(super) fn reconcile<S: Store>(
        &mut self,
        writer: &mut Writer<S>,
        flows: &mut dyn FlowUse,
        now: Instant,
        full: bool,
        freed: bool,
    ) {
        let retries = self.failure.as_ref().is_some_and(|failure| freed || failure.retry <= now);
        let checks = self.next_flow_check().is_some_and(|at| at <= now);
        if !(self.due || retries || checks || full) {
            return;
        }
        self.due = false;
        let Some(mut desired) = self.desired.clone() else { return };
        let known = writer.applied.node.config;
        if self.has_old_snat_ports(&known, flows, desired.config.0.snat, now) {
            desired.config.0.flags |= CONFIG_SNAT_MOVED;
        }
        let written = writer.write_without_port(&facts(&writer.applied.node, &desired), now);
        let before = own(&writer.applied.node);
        // Stop at the first failure: an address must not be written without its filter bits.
        let mut all_right = [Job::new(Owner::NoPort)];
        writer.execute(&addresses(&writer.applied, &desired), &mut all_right, false, now);
        let own = own(&writer.applied.node);
        let lost = before.difference(&own).filter(|address| !is_full(&own, address.is_ipv6()));
        let known_down = self.known_down.replace(self.down.clone()).unwrap_or_else(|| self.down.clone());
        self.lost.extend(self.down.difference(&known_down).map(|address| (*address, (Ends::Udp, now))));
        self.lost.extend(lost.map(|address| (*address, (Ends::All, now))));
        self.lost.retain(|address, (ends, _)| match ends {
            Ends::All => !own.contains(address),
            Ends::Udp => self.down.contains(address),
        });
        if written.cause.is_some() {
            // The programs may still have the old sources.
            self.lost.values_mut().for_each(|(_, at)| *at = now);
        }
        self.end_lost_sources(flows, now);
        let before = self.failure.take();
        let cause = [written].into_iter().chain(all_right).find_map(|job| job.cause);
        self.failure = cause.map(|cause| {
            let problem = Problem {
                object: "Node".to_owned(),
                field: "status".to_owned(),
                message: format!("not all settings of this node are programmed: {}", chain(&cause)),
            };
            Failure::after(before.as_ref(), problem, now)
        });
    }

    /// Ends the flows with SNAT whose source the node does not have any more: no reply would arrive; and those of UDP whose source is
    /// that of an uplink that was switched off. Netfilter's masquerading does the same, for each protocol (`net/netfilter/nf_nat_masquerade.c`,
    /// `masq_inet_event`, `masq_device_event`); a TCP connection would be reset by that.
    fn end_lost_sources(&mut self, flows: &mut dyn FlowUse, now: Instant) {
        self.next_lost_check = None;
        if self.lost.is_empty() {
            return;
        }
        let lost = self.lost.iter().map(|(address, (ends, _))| (*address, *ends)).collect();
        match flows.end_sources(&lost) {
            Ok(count) => {
                if count > 0 {
                    tracing::info!(
                        addresses = ?lost,
                        count,
                        "flows ended: the node has lost their source address, or its device was switched off"
                    );
                }
                self.lost.retain(|_, (_, at)| now < *at + SNAT_SETTLES);
                self.next_lost_check = self.lost.values().map(|(_, at)| *at + SNAT_SETTLES).min();
            }
            Err(error) => {
                tracing::warn!(%error, "cannot end the flows whose source address the node has lost");
                self.next_lost_check = Some(now + LOST_RETRY);
            }
        }
    }

    /// Whether flows with source ports outside of `ports`, the new ranges, may still exist.
    fn has_old_snat_ports(
        &mut self,
        known: &ConfigRow,
        flows: &mut dyn FlowUse,
        ports: [PortRange; SNAT_RANGES],
        now: Instant,
    ) -> bool {
        let changes = known.0.snat != ports;
        let is_due = self.next_snat_check.map_or(known.has(CONFIG_SNAT_MOVED), |at| at <= now);
        if !changes && !is_due {
            return known.has(CONFIG_SNAT_MOVED);
        }
        // A program may have read the old ranges before the write: the flag stands until the next search.
        let moved = changes
            || flows.has_snat_outside(ports).unwrap_or_else(|error| {
                tracing::warn!(%error, "cannot read connections: the programs look up replies to all ports of the node");
                true
            });
        let next = if moved { Some(now + SNAT_PERIOD) } else { None };
        self.next_snat_check = if changes { Some(now + SNAT_SETTLES) } else { next };
        moved
    }
}

/// Returns the node's own addresses.
fn own(node: &NodeContents) -> BTreeSet<IpAddr> {
    let own = |(address, bits): (&IpAddr, &NodeAddr)| (bits & NODE_ADDR_OWN != 0).then_some(*address);
    node.addresses.iter().filter_map(own).collect()
}

/// Whether the node may have more addresses of the family than fit into the map.
fn is_full(own: &BTreeSet<IpAddr>, is_ipv6: bool) -> bool {
    own.iter().filter(|address| address.is_ipv6() == is_ipv6).count() >= OWN_ADDR_COUNT as usize
}

fn facts(known: &NodeContents, desired: &NodeContents) -> Steps {
    let mut steps = Steps::default();
    for (index, facts) in differing(&desired.devices, &known.devices) {
        steps.push(0, Write::Device(*index, *facts));
    }
    for index in known.devices.keys().filter(|index| !desired.devices.contains_key(index)) {
        steps.push(0, Write::NoDevice(*index));
    }
    for (number, row) in differing(&desired.tunnels, &known.tunnels) {
        steps.push(0, Write::Tunnel(*number, Some(*row)));
    }
    for number in known.tunnels.keys().filter(|number| !desired.tunnels.contains_key(number)) {
        steps.push(0, Write::Tunnel(*number, None));
    }
    for (_, row) in differing(&desired.rows, &known.rows) {
        steps.push(0, Write::Node(Box::new(row.clone())));
    }
    if desired.config != known.config {
        steps.push(0, Write::Config(Box::new(desired.config)));
    }
    steps
}

fn addresses(applied: &Applied, desired: &NodeContents) -> Steps {
    let known = &applied.node.addresses;
    let mut steps = Steps::default();
    // Remove entries first, because the map may be full.
    for address in known.keys().filter(|address| !desired.addresses.contains_key(address)) {
        steps.push(0, Write::NoNodeAddr(*address));
    }
    for (address, facts) in differing(&desired.addresses, known) {
        if *facts & NODE_ADDR_PORTS != 0 {
            let needed: BTreeSet<_> = applied.address_bits(*address).collect();
            for (word, mask) in needed.into_iter().filter(|bit| !applied.prefilter.is_set(*bit)) {
                steps.push(0, Write::PrefilterSet(word, mask));
            }
        }
        steps.push(0, Write::NodeAddr(*address, *facts));
    }
    steps
}

fn differing<'a, K: Ord, V: PartialEq>(
    desired: &'a BTreeMap<K, V>,
    known: &'a BTreeMap<K, V>,
) -> impl Iterator<Item = (&'a K, &'a V)> {
    desired.iter().filter(|(key, value)| known.get(key) != Some(value))
}

/// Returns the uplinks for `config`: those with the lowest indexes, then 0.
fn uplinks(devices: &BTreeMap<u32, Device>) -> [u32; UPLINKS] {
    let mut places = [0; UPLINKS];
    let uplinks = devices.iter().filter(|(_, bits)| **bits & DEVICE_UPLINK != 0);
    for (place, (index, _)) in places.iter_mut().zip(uplinks) {
        *place = *index;
    }
    places
}

/// Returns the MAC addresses of these uplinks for `config`.
fn macs(devices: &BTreeMap<u32, Device>, uplinks: [u32; UPLINKS]) -> [u64; UPLINKS] {
    uplinks.map(|index| devices.get(&index).map_or(0, |device| device & DEVICE_MAC))
}

/// Returns the internal addresses of nodes. While the nodes are not listed, the addresses that an earlier agent wrote stay,
/// because its flows continue.
fn internal<'a>(plan: &'a NodePlan, known: &'a NodeContents) -> Box<dyn Iterator<Item = IpAddr> + 'a> {
    match &plan.tunnels {
        Some(tunnels) => Box::new(tunnels.keys().copied()),
        None if plan.dsr => {
            let nodes = known.addresses.iter().filter(|(_, bits)| **bits & NODE_ADDR_INTERNAL != 0);
            Box::new(nodes.map(|(address, _)| *address))
        }
        None => Box::new(std::iter::empty()),
    }
}

/// Returns the addresses of other nodes by their numbers. An address keeps its number, because flows refer to it, also while no
/// node has it: a node may return. Its number is given to another address only if all numbers are in use. If there are more
/// addresses than numbers, packets to the others use SNAT.
fn tunnels(plan: &NodePlan, known: &NodeContents) -> BTreeMap<u32, TunnelRow> {
    let Some(wanted) = &plan.tunnels else {
        return if plan.dsr { known.tunnels.clone() } else { BTreeMap::new() };
    };
    let mut new: BTreeMap<IpAddr, IpAddr> = wanted
        .iter()
        .filter(|(at, _)| !plan.addresses.contains_key(*at))
        .map(|(at, from)| (*at, *from))
        .collect();
    let mut rows = known.tunnels.clone();
    // An address that this node has taken over: nothing is encapsulated to itself.
    rows.retain(|_, row| !plan.addresses.contains_key(&row.addr));
    let mut absent = Vec::new();
    for (number, row) in &mut rows {
        match new.remove(&row.addr) {
            Some(source) => row.source = source,
            None => absent.push(*number),
        }
    }
    let unused = (1..TUNNEL_COUNT).filter(|number| !known.tunnels.contains_key(number));
    let rows_of_new = new.into_iter().map(|(addr, source)| TunnelRow { addr, source });
    rows.extend(unused.chain(absent).zip(rows_of_new));
    rows
}

/// Returns a problem if other nodes have more addresses than `tunnels` has numbers.
fn unnumbered(plan: &NodePlan, desired: &NodeContents) -> Option<Problem> {
    let numbered: BTreeSet<_> = desired.tunnels.values().map(|row| row.addr).collect();
    let others =
        || plan.tunnels.iter().flatten().map(|(at, _)| at).filter(|at| !plan.addresses.contains_key(*at));
    let (addresses, left) = (others().count(), others().filter(|at| !numbered.contains(at)).count());
    (left > 0).then(|| Problem {
        object: "Node".to_owned(),
        field: "status.addresses".to_owned(),
        message: format!(
            "{left} of the {addresses} addresses of other nodes do not fit into the map tunnels, which has {} entries: connections to \
             endpoints on these nodes use snat instead of dsr",
            TUNNEL_COUNT - 1
        ),
    })
}

/// Converts the plan to the content of the maps.
fn contents(plan: &NodePlan, known: &NodeContents) -> NodeContents {
    let v4 = NodeRow::V4(family(
        plan,
        IpFamily::V4,
        |ip| if let IpAddr::V4(ip) = ip { Some(ip) } else { None },
        |net| if let IpNet::V4(net) = net { Some(net) } else { None },
    ));
    let v6 = NodeRow::V6(family(
        plan,
        IpFamily::V6,
        |ip| if let IpAddr::V6(ip) = ip { Some(ip) } else { None },
        |net| if let IpNet::V6(net) = net { Some(net) } else { None },
    ));
    let address = |facts: &crate::plan::AddressFacts| -> NodeAddr {
        bits([
            (true, NODE_ADDR_OWN),
            (facts.node_ports, NODE_ADDR_PORTS),
            (facts.loopback, NODE_ADDR_LOOPBACK),
        ])
    };
    let mut addresses: BTreeMap<_, _> =
        plan.addresses.iter().map(|(at, facts)| (*at, address(facts))).collect();
    for at in internal(plan, known) {
        *addresses.entry(at).or_default() |= NODE_ADDR_INTERNAL;
    }
    let (uplinks, settings) = (uplinks(&plan.devices), &plan.settings);
    let mut config = NodeConfig {
        flags: flags(plan),
        snat: settings.snat_ports,
        masquerade_mark: settings.masquerade_mark,
        host_netns: plan.host_netns,
        mesh_ports: settings.mesh_ports.0,
        pod_cgroups: plan.pod_cgroups,
        pods4: range_words(plan.pod_ranges.v4),
        pods6: range_words(plan.pod_ranges.v6),
        dsr_sources4: range_words(settings.dsr.sources.v4),
        dsr_sources6: range_words(settings.dsr.sources.v6),
        dsr_flow_rate: settings.dsr.flow_rate,
        uplinks,
        macs: macs(&plan.devices, uplinks),
        ..ConfigRow::default().0
    };
    settings.timeouts.apply(&mut config);
    NodeContents {
        tunnels: tunnels(plan, known),
        rows: [v4, v6].into_iter().map(|row| (row.table(), row)).collect(),
        addresses,
        config: ConfigRow(config),
        devices: plan.devices.clone(),
    }
}

/// Returns the node in one family; `address` and `net` return those of this family.
fn family<A, N>(
    plan: &NodePlan,
    family: IpFamily,
    address: impl Fn(IpAddr) -> Option<A>,
    net: impl Fn(IpNet) -> Option<N>,
) -> NodeFamily<A, N> {
    let ranges = plan.service_cidrs.get(&family).into_iter().flatten();
    let sources = plan.device_sources.get(&family).into_iter().flatten();
    let policies = plan.ipsec.get(&family).into_iter().flatten();
    NodeFamily {
        source: plan.sources.get(&family).and_then(|source| address(*source)),
        pods: plan.pods.get(&family).and_then(|pods| net(*pods)),
        service_cidrs: ranges.filter_map(|range| net(*range)).collect(),
        sources: sources.filter_map(|(index, source)| Some((*index, address(*source)?))).collect(),
        ipsec: policies.filter_map(|policy| Some((net(policy.src)?, net(policy.dst)?))).collect(),
        routes_by_mark: plan.routes_by_mark.contains(&family),
    }
}

/// Returns the flags for `config`, without [`CONFIG_SNAT_MOVED`], which depends on the flows.
fn flags(plan: &NodePlan) -> u32 {
    let settings = &plan.settings;
    bits([
        (settings.masquerade_all, CONFIG_MASQUERADE_ALL),
        (plan.detect_local, CONFIG_DETECT_LOCAL),
        (plan.other_proxy, CONFIG_OTHER_PROXY),
        (settings.socket_lb == SocketLb::HostOnly, CONFIG_SOCKET_LB_HOST_ONLY),
        (settings.socket_lb == SocketLb::Off, CONFIG_SOCKET_LB_OFF),
        (settings.socket_drop == SocketDrop::Fail, CONFIG_SOCKET_DROP_FAIL),
        (plan.pod_udp_by_packets, CONFIG_POD_UDP_BY_PACKETS),
        (plan.dsr, CONFIG_DSR),
        (!plan.ipsec.is_empty() || !plan.routes_by_mark.is_empty(), CONFIG_IPSEC),
        (plan.devices.values().any(|device| device & DEVICE_LAN_PORT != 0), CONFIG_LAN_PORTS),
        (plan.policy_routes, CONFIG_POLICY_ROUTES),
        (settings.masquerade_mark != 0, CONFIG_MASQUERADE_EXTERNAL),
        (!plan.device_sources.is_empty(), CONFIG_SOURCES),
        (settings.node_port_bind == NodePortBind::Refuse, CONFIG_NODE_PORT_BIND_REFUSE),
        (settings.vip_echo, CONFIG_VIP_ECHO),
    ])
}
