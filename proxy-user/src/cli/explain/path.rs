//! Applies the rules of a path, in the order in which its programs apply them.

use std::cell::RefCell;
use std::net::IpAddr;

use proxy_common::affinity::{AffinityKey, NetnsAffinityKey};
use proxy_common::backend::BACKEND_LOCAL;
use proxy_common::config::{
    CONFIG_POD_UDP_BY_PACKETS, CONFIG_SOCKET_DROP_FAIL, CONFIG_SOCKET_LB_HOST_ONLY, CONFIG_SOCKET_LB_OFF,
};
use proxy_common::decide::{self, SocketSource, Source};
use proxy_common::flow::FlowKey;
use proxy_common::health::{self, NO_CLIENT};
use proxy_common::node::{NODE_ADDR_LOOPBACK, NODE_ADDR_OWN, NODE_ADDR_PORTS, NodeAddr};
use proxy_common::prefilter::{Role, position};
use proxy_common::reason::{Reason, Verdict};
use proxy_common::service::{
    KIND_UNMANAGED, SCOPE_INTERNAL, SERVICE_LOCAL, SERVICE_NO_SOCKETS, ServiceEntry, ServiceKey,
};
use proxy_common::{Address, PROTO_SCTP, PROTO_UDP};
use proxy_core::model::plural::plural;
use proxy_core::model::settings::MeshPorts;
use proxy_core::plan::Scope;

use super::choice::{DSR, NETFILTER, OWN, word};
use super::outcome::{Path, PathOutcome, Step};
use super::walk::Walk;
use crate::maps::view::{FrontendRowKind, Transport};
use proxy_cli::question::Client;

/// Bits of a node's address that serves node ports to every client.
const SERVES_NODE_PORTS: NodeAddr = NODE_ADDR_OWN | NODE_ADDR_PORTS;

impl<A: Address + Into<IpAddr>> Walk<'_, A> {
    /// Applies the rules of connect(2) and sendmsg(2).
    pub(super) fn socket(self, client: Client, from: Option<A>) -> Path {
        let fails = self.rules.common.config.flags & CONFIG_SOCKET_DROP_FAIL != 0;
        let is_udp = self.key.proto == PROTO_UDP;
        let is_left = is_udp && !self.is_of_node(client, from) && self.is_attended();
        let mut path = self.socket_rules(client, from);
        let found = match path.outcome {
            PathOutcome::Refused(reason) if reason.verdict() == Verdict::Reject && is_left && !fails => {
                path.outcome = PathOutcome::Untouched;
                "connect(2) succeeds, since it sends nothing; a message of a pod continues untranslated, and the packet hooks \
                 refuse it"
            }
            PathOutcome::Refused(Reason::UndefinedPort) if is_udp && !fails => {
                "connect(2) succeeds, since it sends nothing; a message of an unconnected socket fails immediately"
            }
            PathOutcome::Refused(reason) if reason.verdict() != Verdict::Drop => return path,
            PathOutcome::Refused(_) if fails => "fail: the call fails immediately with ETIMEDOUT",
            PathOutcome::Refused(_) => {
                path.outcome = PathOutcome::Untouched;
                "silent: the call continues untranslated; the packet hooks decide about each packet, and currently drop it"
            }
            PathOutcome::Forward | PathOutcome::Untouched => return path,
        };
        path.steps.push(Step { rule: "socket drop", found: found.to_owned() });
        path
    }

    fn socket_rules(mut self, client: Client, from: Option<A>) -> Path {
        if self.key.proto == PROTO_SCTP {
            return self.untouched("hook", "the kernel calls no socket hook for SCTP");
        }
        if let Some(from) = from
            && !self.rules.node_addrs.contains_key(&from)
            && !self.is_local_pod(from)
        {
            self.step(
                "hook",
                "neither this node nor an endpoint on it has the address: unless a pod of this node has it, no socket hook \
                 sees the call",
            );
        }
        let of_node = self.is_of_node(client, from);
        let flags = self.rules.common.config.flags;
        if flags & CONFIG_SOCKET_LB_OFF != 0 {
            return self.untouched("socket lb", "off: packets are translated, not sockets");
        } else if flags & CONFIG_SOCKET_LB_HOST_ONLY != 0 && !of_node {
            return self.untouched("socket lb", "host-only: for pods, packets are translated, not sockets");
        } else if flags & CONFIG_POD_UDP_BY_PACKETS != 0
            && self.key.proto == PROTO_UDP
            && !of_node
            && self.is_attended()
        {
            return self.untouched(
                "socket lb",
                "without `ballast end-udp-sockets`, packets of connected UDP sockets of pods are translated, not the sockets; \
                 sendto(2) on other sockets is translated",
            );
        }
        if !self.passes_prefilter(&decide::host_address(&self.key.addr)) {
            return self.end(PathOutcome::Untouched);
        }
        let on = if of_node { SERVES_NODE_PORTS | NODE_ADDR_LOOPBACK } else { SERVES_NODE_PORTS };
        let Some(service) = self.frontend(false, on) else { return self.no_frontend() };
        match decide::socket_source(&service, of_node, || self.is_attended()) {
            SocketSource::Allowed if decide::has_source_ranges(&service) => {
                self.step("source ranges", "this node's own address is in the list");
            }
            SocketSource::Allowed => self.step("source ranges", "the Service has no source ranges"),
            SocketSource::LeftToPackets => {
                let (rule, why) = if of_node && service.slot_count != 0 {
                    (
                        "socket lb",
                        "endpoints joined or left lately: new connections of the node itself are left to the packet hooks, which hide \
                         the refusal of an endpoint that has just ended",
                    )
                } else if of_node {
                    (
                        "endpoints",
                        "none: the call of the node itself is for the process that listens on this port, if there is one",
                    )
                } else if service.flags & SERVICE_NO_SOCKETS != 0 {
                    ("socket lb", "the Service's annotation leaves the sockets of pods to the packet hooks")
                } else if !decide::has_source_ranges(&service) {
                    (
                        "socket lb",
                        "endpoints joined or left lately: new connections of pods are left to the packet hooks, which hide the \
                         refusal of an endpoint that has just ended",
                    )
                } else {
                    (
                        "source ranges",
                        "the socket of a pod has no source address yet: the packet hooks decide",
                    )
                };
                return self.untouched(rule, why);
            }
            SocketSource::Refused => {
                self.step("source ranges", "this node's own address is not in the list");
                return self.end(PathOutcome::Refused(Reason::SourceNotAllowed));
            }
        }
        if service.affinity_secs != 0 {
            if of_node {
                let netns = self.rules.common.config.host_netns;
                let key = NetnsAffinityKey { netns, service: service.id, reserved: 0 };
                let entry = self.rules.common.netns_affinity.get(&key).copied();
                self.affinity(&service, entry);
            } else {
                self.step("affinity", "by the network namespace of the pod, which `explain` does not know");
            }
        }
        let netns = self.rules.common.config.host_netns;
        let number = if of_node {
            health::socket_client(netns, self.rules.common.config.flow_seed)
        } else {
            NO_CLIENT
        };
        if let Err(reason) = self.endpoints(&service, number, |_, _| None) {
            return self.end(PathOutcome::Refused(reason));
        }
        let mesh_ports = MeshPorts(self.rules.common.config.mesh_ports);
        if !of_node && mesh_ports != MeshPorts::NONE {
            let found = format!(
                "the packet hooks decide instead if a process of the pod listens at a mesh port ({mesh_ports})"
            );
            self.step("socket lb", found);
        }
        let destination = self.destination();
        self.step("reply", format!("not translated: packets are sent directly to the endpoint; getpeername(2) and the source of UDP replies show {destination}"));
        self.end(PathOutcome::Forward)
    }

    /// Applies the rules of the packet hooks; `is_left`: the socket hooks left the call unchanged.
    pub(super) fn packet(mut self, client: Client, from: Option<A>, is_left: bool) -> Path {
        let is_sctp = self.key.proto == PROTO_SCTP;
        let own = (is_sctp || is_left) && self.is_of_node(client, from);
        let from = if own { from.or(self.own_address()) } else { from };
        if own && self.rules.node_addrs.contains_key(&self.key.addr) {
            return self.untouched(
                "hook",
                "the address belongs to this node: its own packets to it leave through no device",
            );
        } else if own {
            let sctp = "no socket hook sees SCTP of this node";
            let why = if is_sctp { sctp } else { "the call is not translated" };
            self.step("hook", format!("{why}: the egress hooks see its packets"));
        } else if client == Client::Host {
            return self.untouched(
                "hook",
                "packets of this node's sockets arrive on no device: the socket hooks translate them",
            );
        }
        let whose = if own { "the node's" } else { "the pod's" };
        if !self.passes_prefilter(&{ self.key.addr }) {
            return self.end(PathOutcome::Untouched);
        }
        let outside = if own {
            self.step("client", "inside: a process of this node");
            false
        } else {
            self.outside(from)
        };
        let Some(service) = self.frontend(outside, SERVES_NODE_PORTS) else { return self.no_frontend() };
        if !decide::has_source_ranges(&service) {
            self.step("source ranges", "the Service has no source ranges");
        } else if let Some(from) = from {
            let Some((bits, range)) = self.range(&service, &from) else {
                self.step("source ranges", format!("{} is in no source range", from.into()));
                return self.end(PathOutcome::Refused(Reason::SourceNotAllowed));
            };
            self.step("source ranges", format!("{} is in {}/{bits}", from.into(), range.addr.into()));
        } else {
            self.step(
                "source ranges",
                format!("depends on {whose} address; run the command with that address"),
            );
        }
        if service.affinity_secs != 0 {
            if let Some(from) = from {
                let key = AffinityKey { client: from, service: service.id };
                let entry = self.rules.affinity.get(&key).copied();
                self.affinity(&service, entry);
            } else {
                self.step(
                    "affinity",
                    format!("depends on {whose} address; run the command with that address"),
                );
            }
        }
        let config = self.rules.common.config.flags;
        // No endpoint has the zero address, so a client without a known address is never its own endpoint.
        let client = from.unwrap_or(A::ZERO);
        let by_uplink = outside || from.is_some_and(|from| self.may_come_by_uplink(from));
        let node_addrs = &self.rules.node_addrs;
        let others = &self.rules.others;
        let node_addr = |addr: &A| node_addrs.get(addr).or_else(|| others.get(addr)).copied().unwrap_or(0);
        let proto = self.key.proto;
        let key = FlowKey {
            src: client,
            dst: self.key.addr,
            src_port: 0,
            dst_port: 0,
            proto,
            direction: 0,
            reserved: 0,
        };
        let source = |addr: &A, flags: u32| {
            let path =
                decide::Path { from_node: own, by_uplink, backend_is_local: flags & BACKEND_LOCAL != 0 };
            let source = decide::source(&service, &client, addr, path, config);
            let number = decide::tunnel(&service, source, flags, &key, outside, node_addr);
            Some(match source {
                _ if own && node_addr(addr) & NODE_ADDR_OWN != 0 => OWN,
                _ if number != 0 => DSR,
                // Packets to processes of the node pass no POSTROUTING.
                Source::Kept
                    if node_addr(addr) & NODE_ADDR_OWN == 0
                        && decide::netfilter_masquerades(&service, by_uplink, outside, config) =>
                {
                    NETFILTER
                }
                source => word(source),
            })
        };
        let seed = self.rules.common.config.flow_seed;
        let number = from.map_or(NO_CLIENT, |from| health::client(&from, seed));
        if let Err(reason) = self.endpoints(&service, number, source) {
            return self.end(PathOutcome::Refused(reason));
        }
        let serving = self.path.candidates.iter().filter(|one| one.serves);
        let (all, refused) = (serving.clone().count(), serving.filter(|one| one.source == Some(OWN)).count());
        if refused > 0 {
            let found = format!(
                "{refused} of {all} are processes of this node, too: nothing would translate their replies, so connections to \
                 them are refused"
            );
            self.step("endpoints", found);
        }
        if refused == all {
            return self.end(PathOutcome::Refused(Reason::OwnEndpoint));
        }
        self.sources(own)
    }

    /// Describes the source addresses that the endpoints see, and how their replies return.
    fn sources(mut self, own: bool) -> Path {
        let serving: Vec<_> = self.path.candidates.iter().filter(|one| one.serves).collect();
        let direct = serving.iter().filter(|one| one.source == Some(DSR)).count();
        if direct > 0 {
            let all = serving.len();
            let found = format!(
                "dsr for {direct} of {} (see SOURCE): packets are encapsulated and sent to their nodes, which \
                 answer the client directly",
                plural(all, "endpoint")
            );
            self.path.steps.push(Step { rule: "forwarding", found });
        }
        let serving: Vec<_> = self
            .path
            .candidates
            .iter()
            .filter(|one| one.serves && ![Some(DSR), Some(OWN)].contains(&one.source))
            .collect();
        let count = serving.len();
        let with = |word: &str| serving.iter().filter(|one| one.source == Some(word)).count();
        let (kept, netfilter) = (with(word(Source::Kept)), with(NETFILTER));
        let nodes = count - kept - netfilter;
        let without_snat = [Some(word(Source::Kept)), Some(NETFILTER)];
        let elsewhere = serving.iter().any(|one| !one.local && !without_snat.contains(&one.source));
        let destination = self.destination();
        // Only if endpoints differ, a step says how many it is about.
        let of = |some: usize| match some {
            some if some == count => String::new(),
            some => format!(" for {some} of {} (see SOURCE)", plural(count, "endpoint")),
        };
        if nodes > 0 && self.rules.node.source == A::ZERO && self.rules.node.source_count == 0 {
            self.step("source address", "SNAT is needed, but this node has no address of this family");
            if nodes == count {
                return self.end(PathOutcome::Refused(Reason::NoRoute));
            }
        } else if nodes > 0 {
            let (addrs, decides) = self.snat_addresses(elsewhere);
            let ports = self.rules.common.config;
            self.step(
                "source address",
                format!(
                    "SNAT to {addrs}{decides}, with one of {}{}",
                    plural(ports.snat_count(), "port"),
                    of(nodes)
                ),
            );
            let then = if own { "delivered to the process" } else { "forwarded to the client" };
            self.step(
                "reply",
                format!(
                    "arrives at {addrs}; at ingress its source is changed to {destination}, and it is {then}"
                ),
            );
        }
        if netfilter > 0 {
            self.step(
                "source address",
                format!("netfilter masquerades the client (--masquerade-external){}", of(netfilter)),
            );
        }
        if kept > 0 {
            self.step("source address", format!("the client's address is kept{}", of(kept)));
        }
        if kept + netfilter > 0 {
            self.step(
                "reply",
                format!("at egress of the device of the client, its source is changed to {destination}"),
            );
        }
        self.end(PathOutcome::Forward)
    }

    /// Names the addresses of this node of which endpoints see one, and says what decides between several: endpoints on
    /// other nodes may be behind a device with its own address.
    fn snat_addresses(&self, elsewhere: bool) -> (String, &'static str) {
        let node = &self.rules.node;
        let own = Some(node.source).filter(|source| *source != A::ZERO);
        let of_devices = if elsewhere || own.is_none() { node.source_count as usize } else { 0 };
        let addrs = own.into_iter().chain(node.sources.iter().take(of_devices).map(|one| one.addr));
        let names: Vec<_> = addrs.map(|addr| Into::<IpAddr>::into(addr).to_string()).collect();
        (names.join(" or "), if of_devices > 0 { " (the route to the endpoint decides)" } else { "" })
    }

    /// Returns the source address of the node's own packets, unless a process selects another one.
    fn own_address(&self) -> Option<A> {
        Some(self.rules.node.source).filter(|source| *source != A::ZERO)
    }

    /// Whether the programs look up the tables at all; `addr` is what they look for in the prefilter.
    fn passes_prefilter(&mut self, addr: &A) -> bool {
        let (word, mask) = position(Role::Frontend, addr, self.key.port, self.key.proto);
        let is_set = self.rules.common.prefilter.get(word as usize).is_some_and(|bits| bits & mask != 0);
        let in_range = self.rules.node.is_service_address(&self.key.addr);
        self.step(
            "prefilter",
            match (is_set, in_range) {
                (true, _) => "address and port may belong to a Service: the maps are looked up",
                (false, true) => "no Service has this port, but the address is in a range of ClusterIPs",
                (false, false) => "address and port belong to no Service: passes unchanged",
            },
        );
        is_set || in_range
    }

    /// Whether a client with this address may be behind an uplink.
    fn may_come_by_uplink(&self, from: A) -> bool {
        self.rules.common.has_uplink && !self.is_local_pod(from)
    }

    fn frontend(&mut self, outside: bool, on: NodeAddr) -> Option<ServiceEntry> {
        let asked = RefCell::new(Vec::new());
        let found = decide::frontend(
            self.key,
            outside,
            on,
            |key| {
                let entry = self.rules.services.get(key).copied();
                asked.borrow_mut().push((*key, entry));
                entry
            },
            |addr| self.rules.node_addrs.get(addr).copied().unwrap_or_default(),
        );
        for (key, entry) in asked.into_inner() {
            let scope = if key.scope == SCOPE_INTERNAL { Scope::Internal } else { Scope::External };
            let what = if key.addr == A::ZERO {
                format!("node port {}/{}", key.port, Transport(key.proto))
            } else {
                self.destination()
            };
            let said = entry.map_or_else(|| "nothing".to_owned(), |entry| self.described(&entry));
            self.step("frontend", format!("{what}, {scope}: {said}"));
        }
        if let Some(service) = &found {
            self.path.service = Some(self.name(service.id));
        }
        found.map(|entry| ServiceEntry { algorithm: decide::algorithm(&entry, outside), ..entry })
    }

    fn name(&self, id: u32) -> String {
        self.rules.common.names.get(&id).map_or_else(|| format!("id {id}"), ToString::to_string)
    }

    fn described(&self, entry: &ServiceEntry) -> String {
        let policy = if entry.flags & SERVICE_LOCAL != 0 { ", policy Local" } else { "" };
        format!(
            "{} (id {}), {}{policy}",
            self.name(entry.id),
            entry.id,
            FrontendRowKind::from(entry.kind).label()
        )
    }

    /// Returns the result if no frontend was found.
    fn no_frontend(mut self) -> Path {
        if !self.rules.node.is_service_address(&self.key.addr) {
            return self.untouched(
                "service ranges",
                "the address is in no range of ClusterIPs: it belongs to no Service",
            );
        }
        let address = ServiceKey { port: 0, proto: 0, scope: SCOPE_INTERNAL, ..self.key };
        let entry = self.rules.services.get(&address);
        let is_own = self.rules.node_addrs.contains_key(&self.key.addr);
        let (found, reason) = match entry.map(|entry| entry.kind) {
            Some(KIND_UNMANAGED) if is_own => (
                "a Service has the address, but it is unmanaged: a device of this node has it, too",
                Reason::UnmanagedAddress,
            ),
            Some(KIND_UNMANAGED) => {
                ("the address is unmanaged: another proxy serves its Service", Reason::UnmanagedAddress)
            }
            Some(_) => ("a Service has the address, but not this port", Reason::UndefinedPort),
            None => ("the address is in a range, and no Service has it", Reason::UnallocatedAddress),
        };
        self.step("service ranges", found);
        self.end(PathOutcome::Refused(reason))
    }
}
