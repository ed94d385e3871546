//! Packets between nodes (DSR): packets from another node are decapsulated, and packets to another node's endpoint are
//! encapsulated. A packet without a flow may belong to a connection that began before the endpoints changed (second chance).

use std::net::{IpAddr, SocketAddr};

use proxy_common::reason::Reason;

use super::answer::{Message, answer};
use super::new_flow::{Origin, choice, is_link_local};
use super::parse::{Header, Parsed, Segment, header_in, parse};
use super::rewrite::{Expected, sent};
use super::route::route;
use super::{Met, Model, Must};
use crate::forge::{ETHERNET, SYN};
use crate::scenario::{Endpoint, Kind, Location, SCTP, Service, TCP, UDP, address};
use crate::target::{Counters, Device, Hook};
use crate::tunnel::{MAX_HOPS, Outer, hops_of, is_encapsulated, number_of, taken_out, time_to_live};

/// How an encapsulated packet arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Came {
    /// The number of its endpoint.
    pub number: u16,
    /// How often the packet was encapsulated.
    pub hops: u8,
    /// Whether the first node knows the connection from its first packet.
    pub is_sure: bool,
}

impl Came {
    fn new(number: u16, time_to_live: u8) -> Self {
        let hops = hops_of(time_to_live);
        Self { number, hops: hops.max(1), is_sure: hops == 0 }
    }

    /// Whether the packet goes to no further node.
    fn is_settled(self) -> bool {
        self.is_sure || self.hops >= MAX_HOPS
    }
}

impl Model {
    /// Processes a packet that is encapsulated to this node and is for a Service. Returns `None` for any other packet,
    /// which is processed as usual.
    pub(super) fn tunnelled(&mut self, met: &mut Met<'_>) -> Option<Result<Must, String>> {
        self.scenario.dsr?;
        if met.hook != Hook::Ingress || !is_encapsulated(met.input) {
            return None;
        }
        let outer = header_in(met.input, ETHERNET, met.input[12] == 0x86)?;
        let is_own = own_everywhere().contains(&outer.dst);
        if met.context.device != Device::Uplink && (is_own || others_everywhere().contains(&outer.dst)) {
            self.count(Reason::LocalTunnel, 0);
            return Some(Ok(Must::Drop));
        }
        let inner = header_in(met.input, outer.l4, outer.proto == 41)?;
        // Nodes send to an InternalIP.
        let is_internal = [false, true].map(|is_v6| address(is_v6, Location::Node)).contains(&outer.dst);
        if outer.is_later || !is_internal || !self.is_for_service(met.input, &inner) {
            return None;
        }
        if !others_everywhere().contains(&outer.src) {
            self.count(Reason::ForeignTunnel, 0);
            return Some(Ok(Must::Pass));
        }
        let mut frame = met.input[..12].to_vec();
        frame.extend(if outer.proto == 41 { [0x86, 0xdd] } else { [0x08, 0x00] });
        frame.extend(&met.input[outer.l4..]);
        let (number, hops) = Outer::read(met.input);
        let came = Came::new(number, hops);
        Some(self.taken_out(met, &frame, came))
    }

    /// Whether an encapsulated packet is a client's to a Service: to an address that is not a cluster IP, or to a node port
    /// of a node.
    fn is_for_service(&self, input: &[u8], inner: &Header) -> bool {
        if inner.is_later {
            return self.has_first_fragment(inner);
        }
        let Some(ports) = input.get(inner.l4..inner.l4 + 4) else { return false };
        let dst = SocketAddr::new(inner.dst, u16::from_be_bytes([ports[2], ports[3]]));
        matches!(inner.proto, TCP | UDP)
            && self
                .service_of_any_node(dst, inner.proto)
                .is_some_and(|service| service.kind != Kind::ClusterIp)
    }

    /// Returns the Service of a frontend; a node port may be that of any node.
    fn service_of_any_node(&self, dst: SocketAddr, proto: u8) -> Option<&Service> {
        let of = |service: &&Service| service.proto == proto;
        let mut services = self.scenario.services.iter().filter(of);
        let exact = services.clone().find(|s| s.kind != Kind::NodePort && s.frontend == dst);
        let is_nodes =
            [Location::Node, Location::OtherNode].map(|location| address(self.scenario.is_v6, location));
        let is_node_port = |s: &&Service| s.kind == Kind::NodePort && s.frontend.port() == dst.port();
        exact.or_else(|| services.find(is_node_port).filter(|_| is_nodes.contains(&dst.ip())))
    }

    /// Processes the inner packet; `frame` begins with the same Ethernet addresses.
    fn taken_out(&mut self, met: &mut Met<'_>, frame: &[u8], came: Came) -> Result<Must, String> {
        self.reach("a packet from another node");
        let parsed = match parse(frame) {
            Parsed::Segment(segment) if segment.is_first => self.note_first_fragment(frame, segment),
            Parsed::Segment(segment) => Ok(segment),
            Parsed::Later(header) => self.later_fragment(frame, header),
            Parsed::Malformed => Err(Reason::Malformed),
            Parsed::Hidden(dst) if self.is_nodes_or_services(dst) => Err(Reason::HiddenPorts),
            Parsed::Control | Parsed::Foreign | Parsed::Hidden(_) => return Ok(Must::Drop),
        };
        let segment = match parsed {
            Ok(segment) => segment,
            Err(reason) => {
                // The packet is not for an address of this node, so it does not pass.
                self.count(reason, 0);
                return Ok(Must::Drop);
            }
        };
        let Met { hook, context, seen, .. } = *met;
        let mut met = Met { hook, context, input: frame, seen, target: &mut *met.target };
        if !segment.opens()
            && let Some(at) = self.of_client(&segment)
        {
            let flow = &self.flows[at];
            let goes_back = flow.has_returned(came.hops);
            let service =
                self.service_of_any_node(segment.dst, segment.proto).map_or(0, |service| service.id);
            if !goes_back
                && flow.continues(segment.flags, flow.service, &self.scenario, self.now)
                && !self.is_led_elsewhere(&mut met, at, service)
            {
                return Ok(self.goes_on(&mut met, &segment, at, Some(came)));
            }
            self.reach("a flow of a packet from another node that does not go on");
            self.expire(at);
        }
        let Some(service) = self.service_of_any_node(segment.dst, segment.proto).cloned() else {
            return Err("a Service is gone".into());
        };
        self.new_flow_of(&mut met, &segment, &service, came)
    }

    /// Processes the first packet of a flow from another node, which has already checked policy and affinity.
    fn new_flow_of(
        &mut self,
        met: &mut Met<'_>,
        segment: &Segment,
        service: &Service,
        came: Came,
    ) -> Result<Must, String> {
        if segment.l4.is_none() {
            self.count(Reason::FragmentWithoutFirst, 0);
            return Ok(Must::Drop);
        }
        let origin = Origin::of(met.context.device);
        let client = segment.src.ip();
        let outside = self.is_outside(client, origin.by_uplink);
        if let Some(must) = self.syn_of_flow(met, segment, service.id, outside, Some(came)) {
            return Ok(must);
        }
        let is_local = service.is_local_inside;
        let choice = self.of_number(met, service, segment, is_local, came);
        let is_snat = |model: &Self, endpoint: &Endpoint| {
            model.is_snat(service, endpoint, client, origin)
                && !model.is_encapsulated_to(service, endpoint, segment, origin, outside)
        };
        let is_checked = choice.as_ref().is_some_and(|(endpoint, _)| is_snat(self, endpoint));
        let is_impossible =
            self.is_no_client(met, client, origin) || choice.is_some() && is_link_local(client);
        if (origin.by_uplink || is_checked) && is_impossible {
            return Ok(self.refuse_quietly(service.id, Reason::MartianSource));
        }
        if service.allowed.as_ref().is_some_and(|allowed| !allowed.contains(&client)) {
            return Ok(self.refuse_quietly(service.id, Reason::SourceNotAllowed));
        }
        let Some((endpoint, is_second)) = choice else {
            // Only the counters show that a packet was dropped after the table had selected an endpoint of a third node.
            let invalid = |counters: &Counters| {
                counters.refusals.get(&(service.id, Reason::InvalidState)).copied().unwrap_or_default()
            };
            let is_invalid = !segment.may_begin()
                && self.of_third_nodes(service, segment, is_local, came).next().is_some()
                && invalid(&met.target.counters()) > invalid(&self.counters);
            let reason = if is_invalid { Reason::InvalidState } else { Reason::TunnelNoEndpoint };
            return Ok(self.refuse_quietly(service.id, reason));
        };
        if segment.proto != UDP && !segment.may_begin() {
            return Ok(self.refuse_quietly(service.id, Reason::InvalidState));
        }
        self.begin_at(met, segment, service, &endpoint, origin, outside, Some(came), is_second)
    }

    /// Refuses a packet from another node, without an answer.
    fn refuse_quietly(&mut self, service: u32, reason: Reason) -> Must {
        self.count(reason, service);
        Must::Drop
    }

    /// Returns the endpoint with another node's number, and whether it was selected by the second chance.
    fn of_number(
        &mut self,
        met: &mut Met<'_>,
        service: &Service,
        segment: &Segment,
        is_local: bool,
        came: Came,
    ) -> Option<(Endpoint, bool)> {
        service.extent(is_local).next()?;
        let is_it = |endpoint: &&Endpoint| endpoint.is_local && number_of(endpoint.addr) == came.number;
        let previous = self.previous(service, segment, is_local, true);
        let current = previous
            .clone()
            .filter(|endpoint| is_it(&endpoint))
            .or_else(|| service.extent(is_local).filter(|endpoint| endpoint.serves).find(is_it).cloned());
        if let Some((chosen, _)) = choice(met, segment)
            && let Some(endpoint) =
                self.of_third_nodes(service, segment, is_local, came).find(|endpoint| endpoint.addr == chosen)
        {
            return Some((endpoint.clone(), true));
        }
        if came.is_settled() {
            return current.map(|endpoint| (endpoint, false));
        }
        match (previous, current) {
            (Some(previous), current) if previous.is_local || previous.has_tunnel => {
                let is_second = current.is_none_or(|current| current.id != previous.id);
                Some((previous, is_second))
            }
            (_, current) => current.map(|endpoint| (endpoint, false)),
        }
    }

    /// Returns the endpoints on other nodes to which the second chance may lead a packet. The current table decides, which is
    /// that of the endpoints in the slots; the model does not have its hash.
    fn of_third_nodes<'a>(
        &self,
        service: &'a Service,
        segment: &Segment,
        is_local: bool,
        came: Came,
    ) -> impl Iterator<Item = &'a Endpoint> {
        let may_be = came.hops == 1
            && !came.is_settled()
            && service.has_table()
            && self.has_second_chance(service, segment, true);
        service.extent(is_local).filter(move |endpoint| {
            may_be
                && endpoint.serves
                && endpoint.has_tunnel
                && !endpoint.is_local
                && number_of(endpoint.addr) != came.number
        })
    }

    /// Returns the endpoint that had a connection before the endpoints changed, if the packet may be in mid-connection.
    /// `outside`: whether the endpoint is selected as for clients outside.
    pub(super) fn previous(
        &self,
        service: &Service,
        segment: &Segment,
        is_local: bool,
        outside: bool,
    ) -> Option<Endpoint> {
        let may_have = self.has_second_chance(service, segment, outside);
        may_have.then(|| service.previous_endpoint(is_local)).flatten().cloned()
    }

    /// Whether a segment without a flow may belong to a connection whose flow another node has.
    fn has_second_chance(&self, service: &Service, segment: &Segment, outside: bool) -> bool {
        segment.proto == TCP
            && segment.flags & SYN == 0
            && self.scenario.is_dsr(service)
            && service.is_by_table(outside)
    }

    /// Returns how often the first packet of a flow to another node was encapsulated before. The node of the oldest table's endpoint
    /// keeps the packet, so the number is then the highest.
    pub(super) fn hops_before(
        &self,
        met: &Met<'_>,
        segment: &Segment,
        service: &Service,
        endpoint: &Endpoint,
        outside: bool,
        came: Option<Came>,
    ) -> u8 {
        let before = came.map_or(0, |came| came.hops);
        let is_local = if came.is_some() { service.is_local_inside } else { service.is_local(outside) };
        let previous = self.previous(service, segment, is_local, outside || came.is_some());
        if previous.is_none_or(|previous| previous.id != endpoint.id) {
            return before;
        }
        let last = MAX_HOPS - 1;
        let is_seen = |hops| hops_of(Outer::read(&met.seen.packet).1) == hops + 1;
        // The endpoint of the current table is not asked twice, and from its own node the search begins anew. The table's hash
        // decides which endpoint that is.
        let may_be_current = service.has_table()
            && service.extent(is_local).any(|other| other.id == endpoint.id || other.is_local);
        let is_next = came.is_none_or(|came| came.hops <= 1 || number_of(endpoint.addr) > came.number);
        match endpoint.serves {
            true if may_be_current && is_seen(last) => last,
            true if is_next || may_be_current && is_seen(before) => before,
            _ => last,
        }
    }

    /// Whether a packet to that endpoint is encapsulated to the endpoint's node.
    pub(super) fn is_encapsulated_to(
        &self,
        service: &Service,
        endpoint: &Endpoint,
        segment: &Segment,
        origin: Origin,
        outside: bool,
    ) -> bool {
        let client = segment.src.ip();
        let of = |location| address(self.scenario.is_v6, location);
        let is_nodes = [Location::Node, Location::NodeToo, Location::OtherNode].map(of).contains(&client);
        let at_node = [Location::Node, Location::OtherNode].map(of).contains(&segment.dst.ip());
        self.scenario.is_dsr(service)
            && outside
            && origin.by_uplink
            && !origin.from_node
            && !endpoint.is_local
            && endpoint.has_tunnel
            && endpoint.addr.ip() != client
            && segment.proto != SCTP
            && !is_nodes
            && (service.kind != Kind::NodePort || at_node)
    }

    /// Whether packets of a connection to another node may be sent without a flow: a table always leads to the same endpoint.
    pub(super) fn may_bypass(&self, service: &Service, outside: bool) -> bool {
        self.scenario.limits_flows && service.affinity == 0 && service.is_by_table(outside)
    }

    /// Sends a packet to the node of its endpoint without a flow: too many have begun in this second, or it ends a connection.
    pub(super) fn bypassed(
        &mut self,
        met: &Met<'_>,
        segment: &Segment,
        service: &Service,
        extent: &[Endpoint],
        origin: Origin,
        outside: bool,
    ) -> Result<Must, String> {
        // An answer to the client does not depend on the endpoint.
        let number = taken_out(&met.seen.packet).map(|(outer, _)| outer.number);
        let is_it = |one: &&Endpoint| {
            one.serves
                && self.is_encapsulated_to(service, one, segment, origin, outside)
                && number.is_none_or(|number| number_of(one.addr) == number)
        };
        let Some(endpoint) = extent.iter().find(is_it).map(|one| one.addr) else {
            return Err(format!("sent without a flow, to none of {extent:?}"));
        };
        self.count(Reason::FlowBypassed, service.id);
        let traffic = self.counters.traffic.entry(service.id).or_default();
        traffic.packet(false, segment.length());
        let is_sure = segment.opens() || segment.proto != TCP;
        Ok(self.encapsulate(met, segment, endpoint, u8::from(!is_sure)))
    }

    /// Encapsulates a client's packet to the node of its endpoint.
    pub(super) fn encapsulate(
        &mut self,
        met: &Met<'_>,
        segment: &Segment,
        endpoint: SocketAddr,
        hops: u8,
    ) -> Must {
        let Some(is_v6) = self.scenario.dsr else { return Must::Drop };
        let (src, dst) = (address(is_v6, Location::Node), address(is_v6, Location::OtherNode));
        let Some(route) = route(dst, met.seen) else {
            self.count(Reason::NoRoute, 0);
            return Must::Drop;
        };
        let room = route.mtu - if is_v6 { 40 } else { 20 };
        if segment.longest > room {
            self.count(Reason::PacketTooBig, 0);
            if segment.l4.is_none() {
                return Must::Drop;
            }
            return Must::Leave(answer(met.input, segment, Message::TooBig(room)));
        }
        if met.input[ETHERNET + if segment.src.is_ipv6() { 7 } else { 8 }] <= 1 {
            self.count(Reason::TtlExceeded, 0);
            if segment.l4.is_none() {
                return Must::Drop;
            }
            let node = address(segment.src.is_ipv6(), Location::Node);
            return Must::Leave(answer(met.input, segment, Message::TimeExceeded(node)));
        }
        self.reach(match hops {
            0 => "sent to the endpoint's node",
            MAX_HOPS => "sent to the last node",
            _ => "sent to the node of an earlier endpoint",
        });
        let inner = sent(Expected::new(met.input.to_vec()), route.macs);
        let outer = Outer { src, dst, number: number_of(endpoint), hops: time_to_live(hops) };
        Must::Leave(Expected {
            bytes: outer.around(&inner.bytes, segment.length()),
            ..inner.moved(outer.length())
        })
    }
}

/// Returns the addresses of this node in both families.
fn own_everywhere() -> Vec<IpAddr> {
    let of = |is_v6| [Location::Node, Location::NodeToo].map(|location| address(is_v6, location));
    [of(false), of(true)].concat()
}

/// Returns the `InternalIP`s of other nodes that this node knows.
fn others_everywhere() -> Vec<IpAddr> {
    [false, true].map(|is_v6| address(is_v6, Location::OtherNode)).to_vec()
}
