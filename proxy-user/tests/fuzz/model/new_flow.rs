//! The first packet of a flow: the original destination, whether the client may use it, the endpoint, and the source address.

use std::net::{IpAddr, SocketAddr};

use proxy_common::health::Failure;
use proxy_common::reason::Reason;

use super::flow::{self, Flow, State};
use super::parse::{Parsed, Segment, parse};
use super::rewrite::translated;
use super::route::route;
use super::rules::timeout;
use super::tunnel::Came;
use super::{Met, Model, Must};
use crate::forge::SYN;
use crate::scenario::{Endpoint, Kind, Scenario, Service, TCP, UDP};
use crate::target::{Device, Outcome};

/// Lowest source port that a flow gets after a collision.
const FIRST_PORT: u16 = 1024;

/// Where a packet comes from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Origin {
    /// Whether a process of the node is the sender.
    pub(super) from_node: bool,
    pub(super) by_uplink: bool,
}

/// Whether the kernel drops packets with this source, whatever the routes.
fn is_kernels(source: IpAddr) -> bool {
    match source {
        IpAddr::V4(ip) => ip.is_multicast() || ip.is_loopback() || ip.is_unspecified() || ip.is_broadcast(),
        IpAddr::V6(ip) => {
            ip.is_multicast() || ip.is_loopback() || ip.is_unspecified() || ip.to_ipv4_mapped().is_some()
        }
    }
}

impl Origin {
    /// Returns the origin of a packet that arrived on a device.
    pub(super) fn of(device: Device) -> Self {
        Self { from_node: false, by_uplink: device == Device::Uplink }
    }
}

/// Which flows keep their source ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keeps {
    /// Flows that continue, and flows in quarantine; other ports are free.
    All,
    /// Flows from which a new flow must not take a port.
    Assured,
}

impl Model {
    pub(super) fn new_flow(
        &mut self,
        met: &mut Met<'_>,
        segment: &Segment,
        from_node: bool,
    ) -> Result<Must, String> {
        if segment.l4.is_none() {
            if !self.is_frontend(segment.dst, segment.proto) && !self.scenario.is_in_range(segment.dst.ip()) {
                return self.direct(met, segment);
            }
            self.count(Reason::FragmentWithoutFirst, 0);
            return Ok(Must::Drop);
        }
        if self.scenario.other_proxy && segment.proto == TCP && segment.flags & SYN == 0 {
            self.reach("left to another proxy");
            return Ok(Must::Pass);
        }
        let client = segment.src.ip();
        let by_uplink = !from_node && met.context.device == Device::Uplink;
        let outside = !from_node && self.is_outside(client, by_uplink);
        let service = self.service(segment.dst, segment.proto).cloned();
        let id = service.as_ref().map_or(0, |service| service.id);
        if let Some(must) = self.syn_of_flow(met, segment, id, outside, None) {
            return Ok(must);
        }
        let Some(service) = service else { return self.nothing_there(met, segment, from_node) };
        let origin = Origin { from_node, by_uplink };
        let is_local = service.is_local(outside);
        if self.is_martian(met, segment, &service, is_local, origin) {
            return Ok(self.refuse(met, segment, service.id, Reason::MartianSource));
        }
        if service.allowed.as_ref().is_some_and(|allowed| !allowed.contains(&client)) {
            return Ok(self.refuse(met, segment, service.id, Reason::SourceNotAllowed));
        }
        let extent: Vec<Endpoint> = service.extent(is_local).cloned().collect();
        let (mut candidates, stays) = self.candidates(&service, segment, is_local, &extent);
        let is_stale = extent.iter().any(|endpoint| !endpoint.serves);
        let previous = self
            .previous(&service, segment, is_local, outside)
            .filter(|previous| !stays && !extent.is_empty() && (previous.is_local || previous.has_tunnel));
        let mut is_second = false;
        if let Some(previous) = &previous {
            // An endpoint of this node that the current table selects gets the connection only if the previous table
            // selects it, too.
            let leads_here = candidates.iter().any(|endpoint| endpoint.is_local);
            is_second = candidates.iter().all(|endpoint| endpoint.id != previous.id);
            let may_lead_here = leads_here || candidates.is_empty() || is_stale;
            candidates.retain(|endpoint| !endpoint.is_local);
            if may_lead_here && candidates.iter().all(|endpoint| endpoint.id != previous.id) {
                candidates.push(previous.clone());
            }
        }
        if candidates.is_empty() {
            let reason = if !extent.is_empty() {
                Reason::MapInconsistent
            } else if service.drops_when_empty(is_local) {
                Reason::NoLocalEndpoint
            } else {
                Reason::NoEndpoint
            };
            return Ok(self.refuse(met, segment, service.id, reason));
        }
        let may_bypass = self.may_bypass(&service, outside);
        if self.has_counted(met, Reason::FlowBypassed) {
            if !may_bypass {
                return Err(format!("a connection to {service:?} needs an entry"));
            }
            return self.bypassed(met, segment, &service, &extent, origin, outside);
        }
        if segment.proto != UDP && !segment.may_begin() {
            let is_others = |one| self.is_encapsulated_to(&service, one, segment, origin, outside);
            if may_bypass
                && previous.is_none()
                && segment.flags & SYN == 0
                && candidates.iter().all(is_others)
            {
                return Err("the endpoint's node knows whether the connection exists".into());
            }
            // The picks may have met only endpoints that do not serve any more.
            let is_missed = is_stale && self.has_counted(met, Reason::MapInconsistent);
            let reason = if is_missed { Reason::MapInconsistent } else { Reason::InvalidState };
            return Ok(self.refuse(met, segment, service.id, reason));
        }
        let Some((backend, _)) = choice(met, segment) else {
            candidates.retain(|one| !self.is_encapsulated_to(&service, one, segment, origin, outside));
            return self.failed(met, segment, &service, &candidates, origin, is_stale);
        };
        let Some(endpoint) = candidates.iter().find(|endpoint| endpoint.addr == backend).cloned() else {
            return Err(format!("it went to {backend}, none of {candidates:?}"));
        };
        if let Some(previous) = previous.filter(|previous| previous.id == endpoint.id) {
            // The current table may lead to the same endpoint.
            let is_counted = self.has_counted(met, Reason::SecondChance);
            is_second = is_second || extent.iter().any(|e| e.id == previous.id) && is_counted;
        } else {
            is_second = false;
        }
        if segment.opens() && service.ejects() && !stays {
            self.check_health(&endpoint, client, &extent)?;
        }
        self.note(&service, client, Some(endpoint.id));
        self.begin_at(met, segment, &service, &endpoint, origin, outside, None, is_second)
    }

    /// Checks that a new connection may go to an endpoint, by the failures of all endpoints in the extent.
    fn check_health(
        &mut self,
        endpoint: &Endpoint,
        client: IpAddr,
        extent: &[Endpoint],
    ) -> Result<(), String> {
        let mut serving = extent.iter().filter(|e| e.serves);
        if self.is_retried && !self.works(endpoint.id, client) {
            self.reach("a connection after a hidden refusal, where no endpoint has answered lately");
            if let Some(other) = serving.clone().find(|e| self.works(e.id, client)) {
                return Err(format!("it went to {endpoint:?}, and not to {other:?}, which has answered"));
            }
        }
        if self.is_ejected(endpoint.id, client) {
            self.reach("an endpoint that is skipped, where no other is left");
            if let Some(other) = serving.find(|e| !self.is_ejected(e.id, client)) {
                return Err(format!("it went to {endpoint:?}, which is ejected, and not to {other:?}"));
            }
        }
        Ok(())
    }

    /// Begins a flow to a known endpoint. `came`: the packet was encapsulated. `is_second`: the current table selects
    /// another endpoint.
    #[expect(clippy::too_many_arguments, reason = "all that is known of it")]
    pub(super) fn begin_at(
        &mut self,
        met: &mut Met<'_>,
        segment: &Segment,
        service: &Service,
        endpoint: &Endpoint,
        origin: Origin,
        outside: bool,
        came: Option<Came>,
        is_second: bool,
    ) -> Result<Must, String> {
        let Some((backend, source)) = choice(met, segment) else {
            return self.failed(met, segment, service, std::slice::from_ref(endpoint), origin, false);
        };
        if backend != endpoint.addr {
            return Err(format!("it went to {backend}, not to {endpoint:?}"));
        }
        if self.is_own(endpoint, origin) {
            return Err(format!("a flow from the node to {endpoint:?}, which is its own"));
        }
        let client = segment.src.ip();
        let is_tunnel = self.is_encapsulated_to(service, endpoint, segment, origin, outside);
        let is_snat = !is_tunnel && self.is_snat(service, endpoint, client, origin);
        if !is_tunnel {
            self.may_be_source(segment, endpoint.addr, source, is_snat)?;
        } else if source != segment.src {
            return Err(format!("the source {source} of a flow to another node is not the client's"));
        }
        let kind = match (is_snat, origin.from_node) {
            (false, _) => flow::Kind::Plain,
            (true, false) => flow::Kind::Snat,
            (true, true) => flow::Kind::Local,
        };
        let hops =
            if is_tunnel { self.hops_before(met, segment, service, endpoint, outside, came) } else { 0 };
        self.open(segment, service, endpoint, source, kind, outside);
        if let Some(flow) = self.flows.last_mut() {
            (flow.is_tunnel, flow.hops) = (is_tunnel, hops);
            flow.is_watched &= !is_tunnel && came.is_none();
        }
        if is_second {
            self.count(Reason::SecondChance, service.id);
        }
        if met.seen.is_sum_wrong {
            // The target has run the program twice.
            self.make_room(met, segment);
        }
        let at = self.flows.len() - 1;
        if is_snat || is_tunnel {
            self.reach(if is_snat {
                "a flow under an address of the node"
            } else {
                "a flow to another node"
            });
            return Ok(self.goes_on(met, segment, at, came));
        }
        self.reach("a flow under the client's address");
        let traffic = self.counters.traffic.entry(service.id).or_default();
        traffic.packet(false, segment.length());
        Ok(Must::Become(translated(met.input, segment, source, backend)))
    }

    /// Processes a SYN of a flow. Returns `None` if there is no flow, or if the flow does not continue and was ended.
    pub(super) fn syn_of_flow(
        &mut self,
        met: &mut Met<'_>,
        segment: &Segment,
        service: u32,
        outside: bool,
        came: Option<Came>,
    ) -> Option<Must> {
        self.is_retried = false;
        if !segment.opens() {
            return None;
        }
        let at = self.of_client(segment)?;
        let flow = &self.flows[at];
        self.is_retried = flow.is_hidden() || flow.is_watched && flow.is_last;
        let is_kept = self.service(segment.dst, segment.proto).is_some_and(|service| {
            service.affinity != 0 || service.is_only(flow.backend_id, service.is_local(outside))
        });
        if !is_kept && flow.waits() && self.now - flow.last_seen > timeout::SYN_ANSWER {
            self.reach("an unanswered SYN goes elsewhere");
            self.has_failed(at, Failure::Silence);
            self.expire(at);
            return None;
        }
        if self.flows[at].is_hidden() {
            self.reach("a SYN whose refusal was hidden");
            self.expire(at);
            return None;
        }
        if !self.flows[at].continues(segment.flags, service, &self.scenario, self.now) {
            self.reach("a SYN that begins anew");
            self.expire(at);
            return None;
        }
        if came.is_some_and(|came| self.flows[at].has_returned(came.hops)) {
            self.reach("a SYN that is not sent on again");
            self.expire(at);
            return None;
        }
        self.reach("a SYN of a flow that goes on");
        let must = self.goes_on(met, segment, at, came);
        self.make_room(met, segment);
        Some(must)
    }

    /// Whether no client can have sent this packet: by its address, because the address is the node's, or because the route
    /// to it does not lead back to the device on which the packet arrived. Checked only where the kernel does not check.
    fn is_martian(
        &mut self,
        met: &mut Met<'_>,
        segment: &Segment,
        service: &Service,
        is_local: bool,
        origin: Origin,
    ) -> bool {
        let client = segment.src.ip();
        let is_no_client = self.is_no_client(met, client, origin);
        if origin.from_node || !is_no_client && !is_link_local(client) {
            return false;
        }
        if is_no_client && origin.by_uplink {
            return true;
        }
        // The kernel checks packets of local devices that go up the stack, and may receive one with a link-local source; chance
        // decides whether this packet does.
        let outside = self.is_outside(client, origin.by_uplink);
        let mut leaves = service.extent(is_local).filter(|endpoint| endpoint.serves).map(|endpoint| {
            self.is_snat(service, endpoint, client, origin)
                || self.is_encapsulated_to(service, endpoint, segment, origin, outside)
        });
        let reason = Reason::MartianSource;
        leaves.any(|is| is)
            && met.target.counters().reasons.get(&reason) != self.counters.reasons.get(&reason)
    }

    /// Whether no client that sends by such a device can have this address.
    pub(super) fn is_no_client(&self, met: &Met<'_>, client: IpAddr, origin: Origin) -> bool {
        let is_pods = self.scenario.knows_pods && Scenario::is_pods(client);
        let leads_back = || route(client, met.seen).is_some_and(|way| way.device == Device::Uplink);
        is_kernels(client)
            || self.scenario.node_addresses().contains(&client)
            || origin.by_uplink && is_pods && !leads_back()
    }

    /// Ends the closed flows that the target has ended: a SYN claims an entry before the program knows that its flow
    /// continues, and may then remove a closed flow that would look the same to the endpoint.
    fn make_room(&mut self, met: &mut Met<'_>, segment: &Segment) {
        let before = self.flows.len();
        self.flows.retain(|flow| {
            let is_like = flow.proto == segment.proto && (flow.kind.is_snat() || flow.source == segment.src);
            !(flow.state.is_closed()
                && is_like
                && met.target.hidden(flow.proto, flow.client, flow.frontend).is_none())
        });
        if self.flows.len() < before {
            self.reach("a closed flow that made room");
        }
    }

    /// Processes a packet to an address and port without a Service.
    fn nothing_there(
        &mut self,
        met: &mut Met<'_>,
        segment: &Segment,
        from_node: bool,
    ) -> Result<Must, String> {
        let addr = segment.dst.ip();
        if !self.scenario.is_in_range(addr) {
            return if from_node { Ok(Must::Pass) } else { self.direct(met, segment) };
        }
        if self.scenario.unmanaged == Some(addr) {
            self.count(Reason::UnmanagedAddress, 0);
            return Ok(Must::Pass);
        }
        let mut services = self.scenario.services.iter();
        let is_services = services.any(|s| s.kind == Kind::ClusterIp && s.frontend.ip() == addr);
        let reason = if !from_node && is_kernels(segment.src.ip()) {
            Reason::MartianSource
        } else if is_services {
            Reason::UndefinedPort
        } else {
            Reason::UnallocatedAddress
        };
        Ok(self.refuse(met, segment, 0, reason))
    }

    /// Returns the endpoints that a new connection may get: the one of the client's affinity, or any; and whether it is by
    /// affinity.
    fn candidates(
        &mut self,
        service: &Service,
        segment: &Segment,
        is_local: bool,
        extent: &[Endpoint],
    ) -> (Vec<Endpoint>, bool) {
        let client = segment.src.ip();
        let known = self.affinity.get(&(client, service.id));
        let goes_by_health = segment.opens() && service.ejects();
        if service.affinity != 0
            && !extent.is_empty()
            && let Some((Some(id), used)) = known
            && self.now - used <= u64::from(service.affinity) * 1000
        {
            let may_stay = |e: &&Endpoint| e.id == *id && e.serves && (e.is_local || !is_local);
            if let Some(endpoint) = service.endpoints.iter().find(may_stay) {
                let mut found = vec![endpoint.clone()];
                if goes_by_health && self.refuses(endpoint.id, client) {
                    // Chance decides whether the selection finds an endpoint that has answered lately.
                    let is_other =
                        |e: &&Endpoint| e.serves && e.id != endpoint.id && self.works(e.id, client);
                    found.extend(extent.iter().filter(is_other).cloned());
                    if self.is_retried && found.len() > 1 {
                        found.remove(0);
                    }
                    self.reach("a client whose endpoint refuses it");
                }
                self.reach("a client that stays");
                return (found, true);
            }
        }
        (extent.iter().filter(|endpoint| endpoint.serves).cloned().collect(), false)
    }

    /// Stores the endpoint of a client.
    fn note(&mut self, service: &Service, client: IpAddr, endpoint: Option<u32>) {
        if service.affinity != 0 {
            self.affinity.insert((client, service.id), (endpoint, self.now));
        }
    }

    /// Whether the endpoint sees an address of the node (SNAT): always, unless the reply certainly passes this node,
    /// because the endpoint is local or the client is behind a local device.
    pub(super) fn is_snat(
        &self,
        service: &Service,
        endpoint: &Endpoint,
        client: IpAddr,
        origin: Origin,
    ) -> bool {
        let is_all = service.kind == Kind::ClusterIp && self.scenario.masquerade_all;
        origin.from_node || endpoint.addr.ip() == client || !endpoint.is_local && (origin.by_uplink || is_all)
    }

    /// Whether the client is a process of the node, and the endpoint has an address of the node.
    fn is_own(&self, endpoint: &Endpoint, origin: Origin) -> bool {
        origin.from_node && self.scenario.node_addresses().contains(&endpoint.addr.ip())
    }

    /// Whether the target has counted this reason for the packet.
    fn has_counted(&self, met: &mut Met<'_>, reason: Reason) -> bool {
        met.target.counters().reasons.get(&reason) != self.counters.reasons.get(&reason)
    }

    /// Returns the refusal if the flow could not begin; an error if there was no reason for that.
    fn failed(
        &mut self,
        met: &mut Met<'_>,
        segment: &Segment,
        service: &Service,
        candidates: &[Endpoint],
        origin: Origin,
        is_stale: bool,
    ) -> Result<Must, String> {
        let client = segment.src.ip();
        let mut reasons = Vec::new();
        for endpoint in candidates {
            if self.is_own(endpoint, origin) {
                reasons.push(Reason::OwnEndpoint);
            } else if self.is_snat(service, endpoint, client, origin) {
                if self.scenario.source().is_none() {
                    reasons.push(Reason::NoRoute);
                } else if self.is_exhausted(segment.proto, endpoint.addr, Keeps::Assured) {
                    reasons.push(Reason::SnatPortsExhausted);
                }
            }
        }
        if is_stale {
            reasons.push(Reason::MapInconsistent);
        }
        reasons.dedup();
        let counted = met.target.counters();
        let is_counted = |reason: &&Reason| counted.reasons.get(reason) != self.counters.reasons.get(reason);
        let Some(reason) = reasons.iter().find(is_counted).copied() else {
            let new: Vec<_> = counted.reasons.keys().filter(is_counted).collect();
            return Err(format!(
                "no flow has begun, for none of the reasons {reasons:?}: counted is {new:?}"
            ));
        };
        if reason != Reason::MapInconsistent {
            let only = if let [endpoint] = candidates { Some(endpoint.id) } else { None };
            self.note(service, client, only);
        }
        Ok(self.refuse(met, segment, service.id, reason))
    }

    /// Whether a flow keeps a source port towards an endpoint.
    fn is_taken(&self, proto: u8, backend: SocketAddr, port: u16, keeps: Keeps) -> bool {
        self.flows.iter().any(|flow| {
            let is_over = flow.state.is_closed() || flow.is_expired(self.now);
            let is_free = match keeps {
                Keeps::Assured => is_over || flow.gives_up_port(self.now),
                Keeps::All => is_over && !flow.is_quarantined(self.now),
            };
            !flow.is_tunnel
                && (flow.proto, flow.backend, flow.source.port()) == (proto, backend, port)
                && !is_free
        })
    }

    /// Whether no source port is left for packets to an endpoint.
    pub(super) fn is_exhausted(&self, proto: u8, backend: SocketAddr, keeps: Keeps) -> bool {
        let ranges = self.scenario.snat.iter().filter(|(_, last)| *last != 0);
        let mut ports = ranges.flat_map(|(first, last)| *first..=*last);
        ports.all(|port| self.is_taken(proto, backend, port, keeps))
    }

    /// Checks that the endpoint may see this source as the client.
    pub(super) fn may_be_source(
        &mut self,
        segment: &Segment,
        backend: SocketAddr,
        source: SocketAddr,
        is_snat: bool,
    ) -> Result<(), String> {
        let has = |flow: &Flow, source| flow.has_replies(segment.proto, backend, source);
        let taken = self.flows.iter().position(|flow| has(flow, source));
        let now = self.now;
        if let Some(at) = taken {
            let flow = &self.flows[at];
            let is_last = || self.is_exhausted(segment.proto, backend, Keeps::All);
            if !flow.state.is_closed() && !flow.is_expired(now) {
                if !flow.gives_up_port(now) || !is_last() {
                    return Err(format!("the source {source} is that of another flow: {flow:?}"));
                }
                self.reach("a source of a flow that is not assured");
            } else {
                let is_same = (flow.client, flow.frontend) == (segment.src, segment.dst);
                if flow.is_in_time_wait(now) && (is_snat || !is_same) && !is_last() {
                    return Err(format!("the source {source} is in quarantine: {flow:?}"));
                }
                self.reach("a source that is free again");
            }
            self.flows.remove(at);
        }
        if is_snat {
            if Some(source.ip()) != self.scenario.source() || !self.scenario.is_snat_port(source.port()) {
                return Err(format!("{source} is no source of the node"));
            }
        } else if source != segment.src {
            let in_use = self.flows.iter().any(|flow| has(flow, segment.src));
            if source.ip() != segment.src.ip() || source.port() < FIRST_PORT || !in_use {
                return Err(format!("the source {source} is not the client's"));
            }
            self.reach("another source port");
        }
        Ok(())
    }

    fn open(
        &mut self,
        segment: &Segment,
        service: &Service,
        endpoint: &Endpoint,
        source: SocketAddr,
        kind: flow::Kind,
        outside: bool,
    ) {
        self.counters.traffic.entry(service.id).or_default().connection();
        self.flows.push(Flow {
            proto: segment.proto,
            client: segment.src,
            frontend: segment.dst,
            backend: endpoint.addr,
            source,
            service: service.id,
            backend_id: endpoint.id,
            kind,
            state: State::begin(segment),
            created: self.now,
            last_seen: self.now,
            is_watched: segment.opens() && service.ejects(),
            is_last: self.is_retried,
            outside,
            is_tunnel: false,
            hops: 0,
            has_client: true,
        });
    }
}

/// Returns the endpoint and the source of the packet, as the resulting packet shows them, or the target's flow.
pub fn choice(met: &mut Met<'_>, segment: &Segment) -> Option<(SocketAddr, SocketAddr)> {
    if met.seen.outcome != Outcome::Drop
        && met.seen.packet != met.input
        && let Parsed::Segment(out) = parse(&met.seen.packet)
    {
        return Some((out.dst, out.src));
    }
    let hidden = met.target.hidden(segment.proto, segment.src, segment.dst)?;
    Some((hidden.backend, hidden.source))
}

/// Whether an address is valid on its link only.
pub(super) fn is_link_local(addr: IpAddr) -> bool {
    matches!(addr, IpAddr::V6(addr) if addr.is_unicast_link_local())
}
