//! The rules of a path, in the order in which its programs ask them.

use std::cell::RefCell;
use std::net::{IpAddr, SocketAddr};

use proxy_common::affinity::{AffinityEntry, AffinityKey, NetnsAffinityKey};
use proxy_common::decide::{self, SocketSource, Source};
use proxy_common::filter::{Role, position};
use proxy_common::node::{NODE_ADDR_LOOPBACK, NODE_ADDR_PORTS, NodeAddr};
use proxy_common::reason::Reason;
use proxy_common::service::{SCOPE_INTERNAL, SERVICE_LOCAL, ServiceEntry, ServiceKey};
use proxy_common::source_range::SourceRangeKey;
use proxy_common::{Address, PROTO_SCTP};

use super::{Candidate, Outcome, Path, Step, flags};
use crate::cli::question::Client;
use crate::maps::view::{Kind, Rules, Scope, Transport};

/// The way through the rules.
pub(super) struct Walk<'a, A: Address> {
    rules: &'a Rules<A>,
    key: ServiceKey<A>,
    path: Path,
}

impl<'a, A: Address + Into<IpAddr>> Walk<'a, A> {
    pub(super) fn new(rules: &'a Rules<A>, key: ServiceKey<A>) -> Self {
        let path =
            Path { steps: Vec::new(), service: None, candidates: Vec::new(), outcome: Outcome::Untouched };
        Self { rules, key, path }
    }

    fn step(&mut self, rule: &'static str, found: impl Into<String>) {
        self.path.steps.push(Step { rule, found: found.into() });
    }

    fn end(mut self, outcome: Outcome) -> Path {
        self.path.outcome = outcome;
        self.path
    }

    fn dialled(&self) -> String {
        let ServiceKey { addr, port, proto, .. } = self.key;
        format!("{}/{}", SocketAddr::new(addr.into(), port), Transport(proto))
    }

    fn is_local_pod(&self, client: A) -> bool {
        self.rules.backends.values().any(|backend| backend.addr == client && flags(backend.flags).0)
    }

    fn is_of_node(&self, client: Client, from: Option<A>) -> bool {
        client == Client::Host || from.is_some_and(|from| self.rules.node_addrs.contains_key(&from))
    }

    /// What connect(2) and sendmsg(2) do.
    pub(super) fn socket(mut self, client: Client, from: Option<A>) -> Path {
        if self.key.proto == PROTO_SCTP {
            self.step("hook", "the kernel asks no hook about SCTP sockets");
            return self.end(Outcome::Untouched);
        }
        if let Some(from) = from
            && !self.rules.node_addrs.contains_key(&from)
            && !self.is_local_pod(from)
        {
            self.step(
                "hook",
                "the address is none of this node's, and of no endpoint here: if no pod of this node has it, no \
                 socket hook sees the call",
            );
        }
        let of_node = self.is_of_node(client, from);
        if !self.filter() {
            return self.end(Outcome::Untouched);
        }
        let on = if of_node { NODE_ADDR_PORTS | NODE_ADDR_LOOPBACK } else { NODE_ADDR_PORTS };
        let Some(service) = self.frontend(false, on) else { return self.nothing() };
        match decide::socket_source(&service, of_node) {
            SocketSource::Allowed if decide::asks_source(&service) => {
                self.step("source ranges", "an address of this node is in the list");
            }
            SocketSource::Allowed => self.step("source ranges", "the Service has none"),
            SocketSource::LeftToPackets => {
                self.step("source ranges", "a pod's socket has no address yet: the packet hooks decide");
                return self.end(Outcome::Untouched);
            }
            SocketSource::Refused => {
                self.step("source ranges", "no address of this node is in the list");
                return self.end(Outcome::Refused(Reason::SourceNotAllowed));
            }
        }
        if service.affinity_secs != 0 {
            if of_node {
                let netns = self.rules.common.config.host_netns;
                let key = NetnsAffinityKey { netns, service: service.id, reserved: 0 };
                let entry = self.rules.common.netns_affinity.get(&key).copied();
                self.affinity(&service, entry);
            } else {
                self.step("affinity", "by the pod's network namespace, which is not named here");
            }
        }
        if let Err(reason) = self.endpoints(&service, |_, _| None) {
            return self.end(Outcome::Refused(reason));
        }
        let dialled = self.dialled();
        self.step("reply", format!("nothing is translated: packets go straight to the endpoint; getpeername(2), and the source of UDP answers, show {dialled}"));
        self.end(Outcome::Forward)
    }

    /// What the packet hooks do.
    pub(super) fn packet(mut self, client: Client, from: Option<A>) -> Path {
        let own = self.key.proto == PROTO_SCTP && self.is_of_node(client, from);
        if own && self.rules.node_addrs.contains_key(&self.key.addr) {
            self.step("hook", "the address is this node's own: what it sends there leaves by no device");
            return self.end(Outcome::Untouched);
        } else if own {
            self.step(
                "hook",
                "no socket hook sees SCTP of the node itself: its packets are met where they leave",
            );
        } else if client == Client::Host {
            self.step(
                "hook",
                "packets of the node's own sockets come in by no device: the socket hooks serve them",
            );
            return self.end(Outcome::Untouched);
        }
        let whose = if own { "the node's" } else { "the pod's" };
        if !self.filter() {
            return self.end(Outcome::Untouched);
        }
        let outside = if own {
            self.step("client", "inside: a process of this node");
            false
        } else {
            self.outside(from)
        };
        let Some(service) = self.frontend(outside, NODE_ADDR_PORTS) else { return self.nothing() };
        if !decide::asks_source(&service) {
            self.step("source ranges", "the Service has none");
        } else if let Some(from) = from {
            let Some((bits, range)) = self.range(&service, &from) else {
                self.step("source ranges", format!("{} is in none", from.into()));
                return self.end(Outcome::Refused(Reason::SourceNotAllowed));
            };
            self.step("source ranges", format!("{} is in {}/{bits}", from.into(), range.addr.into()));
        } else {
            self.step("source ranges", format!("{whose} address decides: ask again with it"));
        }
        if service.affinity_secs != 0 {
            if let Some(from) = from {
                let key = AffinityKey { client: from, service: service.id };
                let entry = self.rules.affinity.get(&key).copied();
                self.affinity(&service, entry);
            } else {
                self.step("affinity", format!("by {whose} address: ask again with it"));
            }
        }
        let config = self.rules.common.config.flags;
        // Without an address there is no endpoint that is the client itself.
        let client = from.unwrap_or(A::ZERO);
        let source = |addr: &A, flags| {
            Some(if own {
                Source::Own
            } else {
                decide::source(&service, &client, outside, addr, flags, config)
            })
        };
        if let Err(reason) = self.endpoints(&service, source) {
            return self.end(Outcome::Refused(reason));
        }
        let serving: Vec<_> = self.path.candidates.iter().filter(|one| one.serves).collect();
        let count = serving.len();
        let nodes = serving.into_iter().filter(|one| one.source != Some(word(Source::Kept))).count();
        let dialled = self.dialled();
        if nodes > 0 && self.rules.node.source == A::ZERO {
            self.step("source address", "has to be this node's, which has none of this family");
            if nodes == count {
                return self.end(Outcome::Refused(Reason::NoRoute));
            }
        } else if nodes > 0 {
            let addr: IpAddr = self.rules.node.source.into();
            let ports = self.rules.common.config;
            self.step(
                "source address",
                format!(
                    "{addr} for {nodes} of {} endpoints (see SOURCE), from a port of {} to {}",
                    count, ports.snat_first, ports.snat_last
                ),
            );
            let then = if own { "goes up to the process" } else { "is sent on to the client" };
            self.step(
                "reply",
                format!(
                    "comes back to {addr}; where it comes in, its source becomes {dialled}, and it {then}"
                ),
            );
        }
        if nodes < count {
            self.step("source address", "the client's own is kept");
            self.step(
                "reply",
                format!(
                    "on its way out of the device by which the client came, its source becomes {dialled}"
                ),
            );
        }
        self.end(Outcome::Forward)
    }

    /// Whether the tables are asked at all.
    fn filter(&mut self) -> bool {
        let (word, mask) = position(Role::Frontend, &self.key.addr, self.key.port, self.key.proto);
        let is_set = self.rules.common.filter.get(word as usize).is_some_and(|bits| bits & mask != 0);
        let in_range = self.rules.node.is_service_address(&self.key.addr);
        self.step(
            "filter",
            match (is_set, in_range) {
                (true, _) => "the bit is set: the tables are asked",
                (false, true) => "the bit is clear, but the address is in a range of Service addresses",
                (false, false) => "the bit is clear: nothing of ours",
            },
        );
        is_set || in_range
    }

    fn outside(&mut self, from: Option<A>) -> bool {
        let Some(from) = from else {
            self.step("client", "inside: a pod of this node");
            return false;
        };
        if self.is_local_pod(from) {
            self.step("client", "inside: an endpoint on this node has the address");
            return false;
        }
        let outside = decide::is_outside(|| self.rules.common.has_uplink, &self.rules.node, &from);
        self.step(
            "client",
            if outside {
                "outside, if it comes in by an uplink; inside by any other device"
            } else if !self.rules.common.has_uplink {
                "inside: no device of this node is known to lead outside"
            } else {
                "inside: the address is in the pods' range"
            },
        );
        outside
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
                self.dialled()
            };
            let said = entry.map_or_else(|| "nothing".to_owned(), |entry| self.described(&entry));
            self.step("frontend", format!("{what}, {}: {said}", scope.label()));
        }
        if let Some(service) = &found {
            self.path.service = Some(self.name(service.id));
        }
        found
    }

    fn name(&self, id: u32) -> String {
        self.rules.common.names.get(&id).map_or_else(|| format!("id {id}"), ToString::to_string)
    }

    fn described(&self, entry: &ServiceEntry) -> String {
        let policy = if entry.flags & SERVICE_LOCAL != 0 { ", policy Local" } else { "" };
        format!("{} (id {}), {}{policy}", self.name(entry.id), entry.id, Kind::from(entry.kind).label())
    }

    /// No frontend was found.
    fn nothing(mut self) -> Path {
        if !self.rules.node.is_service_address(&self.key.addr) {
            self.step("service ranges", "the address is in none: not Ballast's");
            return self.end(Outcome::Untouched);
        }
        let address = ServiceKey { port: 0, proto: 0, scope: SCOPE_INTERNAL, ..self.key };
        let is_known = self.rules.services.contains_key(&address);
        self.step(
            "service ranges",
            if is_known {
                "the address is a Service's, which has no such port"
            } else {
                "the address is in one, and no Service has it"
            },
        );
        self.end(Outcome::Refused(decide::why_nothing(is_known)))
    }

    /// The longest range that holds the client.
    fn range(&self, service: &ServiceEntry, client: &A) -> Option<(u32, SourceRangeKey<A>)> {
        let ranges = self.rules.ranges.iter().filter(|(_, range)| range.service == service.id);
        ranges
            .filter(|(bits, range)| begins_alike(client, &range.addr, *bits))
            .max_by_key(|(bits, _)| *bits)
            .copied()
    }

    fn affinity(&mut self, service: &ServiceEntry, entry: Option<AffinityEntry>) {
        let common = &self.rules.common;
        let secs = service.affinity_secs;
        let found = match entry {
            None => format!("for {secs} s; this client is new"),
            Some(entry) => {
                let id = entry.backend_id;
                let backend = self.rules.backends.get(&id);
                if !decide::is_in_time(&entry, service, common.now, common.config.hz) {
                    format!("the client was with endpoint {id}, longer than {secs} s ago")
                } else if backend.is_some_and(|backend| decide::may_stay(backend, service)) {
                    format!("the client stays with endpoint {id}")
                } else {
                    format!("the client was with endpoint {id}, which may not be chosen any more")
                }
            }
        };
        self.step("affinity", found);
    }

    fn endpoints(
        &mut self,
        service: &ServiceEntry,
        source: impl Fn(&A, u32) -> Option<Source>,
    ) -> Result<(), Reason> {
        if service.slot_count == 0 {
            self.step("endpoints", "none");
            return Err(decide::nobody(service));
        }
        let slots = &self.rules.common.slots;
        let first = (service.slot_base as usize).min(slots.len());
        let end = first.saturating_add(service.slot_count as usize).min(slots.len());
        let found = slots[first..end].iter().filter_map(|id| {
            let backend = self.rules.backends.get(id)?;
            let (local, terminating) = flags(backend.flags);
            Some(Candidate {
                id: *id,
                address: SocketAddr::new(backend.addr.into(), backend.port).to_string(),
                local,
                terminating,
                serves: decide::serves(backend, service),
                source: source(&backend.addr, backend.flags).map(word),
            })
        });
        self.path.candidates = found.collect();
        let count = self.path.candidates.iter().filter(|one| one.serves).count();
        self.step("endpoints", format!("one of {count}, at random"));
        if count == 0 { Err(Reason::MapInconsistent) } else { Ok(()) }
    }
}

/// The word in tables and JSON.
const fn word(source: Source) -> &'static str {
    match source {
        Source::Kept => "kept",
        Source::Hairpin => "hairpin",
        Source::Remote => "remote",
        Source::All => "masquerade-all",
        Source::Own => "node",
    }
}

fn begins_alike<A: Address>(a: &A, b: &A, bits: u32) -> bool {
    let wide = |addr: &A| {
        addr.words().into_iter().fold(0u128, |sum, word| sum << 32 | u128::from(u32::from_be(word)))
    };
    let different = (wide(a) ^ wide(b)).leading_zeros();
    different >= bits
}
