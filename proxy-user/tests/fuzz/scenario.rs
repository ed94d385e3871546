//! The start of a case: a node and its Services, described independently of the maps.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use crate::bytes::Bytes;

pub const TCP: u8 = 6;
pub const UDP: u8 = 17;
pub const SCTP: u8 = 132;
pub const ICMP: u8 = 1;
pub const ICMPV6: u8 = 58;

/// Number of bytes of the node in a case.
pub const WORLD_BYTES: usize = 8;
/// Number of bytes of a Service in a case.
pub const SERVICE_BYTES: usize = 10;

/// Maximum number of endpoints of a Service; the ids of the next Service's endpoints begin after as many.
pub const ENDPOINTS: u32 = 4;

/// The role of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Location {
    /// A client beyond the uplink.
    Client(u8),
    /// A pod of this node.
    LocalPod(u8),
    /// A pod of another node.
    RemotePod(u8),
    /// A Service's cluster address.
    Service(u8),
    /// A Service address outside of the range of cluster addresses.
    External,
    /// The node's own address, which SNAT uses.
    Node,
    /// Another address of the node.
    NodeToo,
    /// The address of another node of the cluster.
    OtherNode,
    /// An address to which the kernel has no route.
    Nowhere,
    /// An address that no client can have.
    Martian(u8),
}

/// Returns the address with this role.
pub fn address(is_v6: bool, location: Location) -> IpAddr {
    use Location as P;
    if is_v6 {
        let of = |net: u16, subnet: u16, host: u8| {
            Ipv6Addr::new(0xfd00, net, subnet, 0, 0xabcd, 0, 0x77, host.into()).into()
        };
        match location {
            P::Client(n) => of(1, 0, n + 1),
            P::LocalPod(n) => of(0x244, 0, n + 1),
            P::RemotePod(n) => of(0x244, 5, n + 1),
            P::Service(n) => of(0x96, 0, n + 1),
            P::External => "2001:db8::7".parse().unwrap(),
            P::Node => "fd77::1".parse().unwrap(),
            P::NodeToo => "fd78::1".parse().unwrap(),
            P::OtherNode => of(9, 0, 2),
            P::Nowhere => of(3, 0, 1),
            P::Martian(n) => ["::1", "ff02::1", "::", "fe80::1"][usize::from(n % 4)].parse().unwrap(),
        }
    } else {
        match location {
            P::Client(n) => [10, 1, 0, n + 1].into(),
            P::LocalPod(n) => [10, 244, 0, n + 1].into(),
            P::RemotePod(n) => [10, 244, 5, n + 1].into(),
            P::Service(n) => [10, 96, 0, n + 1].into(),
            P::External => [198, 51, 100, 7].into(),
            P::Node => [192, 168, 77, 1].into(),
            P::NodeToo => [172, 20, 0, 1].into(),
            P::OtherNode => [10, 9, 0, 2].into(),
            P::Nowhere => [10, 3, 0, 1].into(),
            P::Martian(n) => {
                ["127.0.0.1", "224.0.0.1", "0.0.0.0", "255.255.255.255"][usize::from(n % 4)].parse().unwrap()
            }
        }
    }
}

/// The kind of a frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    ClusterIp,
    NodePort,
    LoadBalancer,
    ExternalIp,
}

/// An endpoint of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    pub id: u32,
    pub addr: SocketAddr,
    /// Whether the endpoint runs on this node.
    pub is_local: bool,
    /// Whether the endpoint is in the Service.
    pub serves: bool,
    /// Whether the endpoint's node is [`Location::OtherNode`].
    pub has_tunnel: bool,
}

/// A Service port with one frontend.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "settings of a Service")]
pub struct Service {
    pub id: u32,
    pub proto: u8,
    pub kind: Kind,
    /// The address is unspecified for a node port.
    pub frontend: SocketAddr,
    /// Session affinity in seconds; 0: none.
    pub affinity: u32,
    /// The only clients that may use the Service; `None`: all.
    pub allowed: Option<Vec<IpAddr>>,
    /// Whether the policy is Local (only endpoints of this node), for clients inside and for clients outside.
    pub is_local_inside: bool,
    pub is_local_outside: bool,
    pub endpoints: Vec<Endpoint>,
    /// Whether removed endpoints are still in the slots, as for a moment while the agent writes.
    pub is_stale: bool,
    /// Whether endpoints on other nodes answer clients directly, if the nodes send each other encapsulated packets.
    pub wants_dsr: bool,
    /// Index of the endpoint that all clients had before the endpoints changed.
    pub previous: Option<usize>,
}

/// A node and its Services.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "settings of a node")]
pub struct Scenario {
    pub is_v6: bool,
    pub masquerade_all: bool,
    pub other_proxy: bool,
    /// Whether clients with an address of the pods' range are inside.
    pub knows_pods: bool,
    /// Whether the node knows the range of cluster addresses.
    pub knows_range: bool,
    /// An unmanaged cluster address.
    pub unmanaged: Option<IpAddr>,
    /// Ranges of SNAT ports: the first and the last port. A range that ends with 0 is empty.
    pub snat: [(u16, u16); 2],
    /// Whether the node has an address for SNAT.
    pub has_source: bool,
    pub services: Vec<Service>,
    /// Whether nodes send each other encapsulated packets (DSR): `Some(true)` with IPv6 outer headers, `Some(false)` with IPv4.
    pub dsr: Option<bool>,
    /// Whether few flows to other nodes may begin in a second; packets of others are sent without one.
    pub limits_flows: bool,
    /// Whether there are few clients and mostly valid packets, so that flows reach late states.
    pub is_calm: bool,
}

/// Ports of Services; one may also be an SNAT port.
pub const SERVICE_PORTS: [u16; 4] = [80, 53, 61_001, 30_080];

impl Scenario {
    /// Reads the node and its Services from the first bytes of a case.
    pub fn decode(bytes: &mut Bytes<'_>) -> Self {
        let mut node = bytes.record(WORLD_BYTES);
        let flags = node.byte();
        let count = services(node.byte());
        let snat = node.pick(&[
            [(61_000, 65_535), (0, 0)],
            [(1024, 29_999), (61_000, 65_535)],
            [(61_000, 61_001), (0, 0)],
            [(2000, 2001), (61_000, 61_000)],
        ]);
        let (rare, nodes) = (node.byte(), node.byte());
        let is_v6 = flags & 1 != 0;
        let mut scenario = Self {
            is_v6,
            masquerade_all: flags & 0x06 == 0x06,
            other_proxy: flags & 0x98 == 0x98,
            knows_pods: flags & 0x20 != 0,
            knows_range: flags & 0x40 != 0,
            unmanaged: (rare & 0x07 == 0x07).then(|| address(is_v6, Location::Service(3))),
            snat,
            has_source: rare & 0xf0 != 0xf0,
            services: Vec::new(),
            dsr: (nodes & 0x03 == 0x03).then_some(is_v6 ^ (nodes & 0x1c == 0x1c)),
            limits_flows: nodes & 0x60 == 0x60,
            is_calm: rare & 0x08 != 0,
        };
        for id in 1..=u32::from(count) {
            let service = scenario.service(id, &mut bytes.record(SERVICE_BYTES));
            let is_like =
                |other: &Service| other.frontend == service.frontend && other.proto == service.proto;
            if !scenario.services.iter().any(is_like) {
                scenario.services.push(service);
            }
        }
        scenario
    }

    /// Returns the number of Services that [`Scenario::decode`] reads, by the second byte of a case.
    pub fn count(bytes: &[u8]) -> usize {
        bytes.get(1).map_or(0, |count| usize::from(services(*count)))
    }

    fn service(&self, id: u32, bytes: &mut Bytes<'_>) -> Service {
        let proto = bytes.pick(&[TCP, UDP, TCP, UDP, SCTP]);
        let kind = bytes.pick(&[Kind::ClusterIp, Kind::NodePort, Kind::LoadBalancer, Kind::ExternalIp]);
        let location = bytes.byte();
        let flags = bytes.byte();
        let count = [1u8, 1, 2, 2, 3, 4, 1, 0][usize::from(bytes.byte() % 8)];
        let port = SERVICE_PORTS[usize::from(location >> 2) % SERVICE_PORTS.len()];
        let frontend = match kind {
            Kind::ClusterIp => address(self.is_v6, Location::Service(location & 1)),
            Kind::NodePort if self.is_v6 => Ipv6Addr::UNSPECIFIED.into(),
            Kind::NodePort => [0; 4].into(),
            Kind::LoadBalancer | Kind::ExternalIp => address(self.is_v6, Location::External),
        };
        let port = if kind == Kind::NodePort { 30_080 } else { port };
        let mask = bytes.byte();
        let clients = [
            Location::Client(0),
            Location::Client(1),
            Location::LocalPod(0),
            Location::RemotePod(0),
            Location::Node,
        ];
        let allowed = clients.into_iter().enumerate().filter(|(at, _)| mask >> at & 1 != 0);
        let endpoints: Vec<Endpoint> =
            (0..u32::from(count)).map(|n| self.endpoint(id * ENDPOINTS + n, bytes.byte())).collect();
        Service {
            id,
            proto,
            kind,
            frontend: SocketAddr::new(frontend, port),
            affinity: if flags & 0x03 == 0x03 { 10 } else { 0 },
            allowed: (flags & 0x8c == 0x8c)
                .then(|| allowed.map(|(_, location)| address(self.is_v6, location)).collect()),
            is_local_inside: flags & 0x30 == 0x30,
            is_local_outside: kind != Kind::ClusterIp && flags & 0x40 != 0 || flags & 0x30 == 0x30,
            wants_dsr: kind != Kind::ClusterIp && flags & 0x0c != 0x0c,
            previous: (mask & 0x06 != 0x06 && count != 0)
                .then(|| usize::from(mask >> 3) % usize::from(count)),
            endpoints: distinct(endpoints),
            is_stale: flags & 0x80 == 0 && mask & 0xe0 == 0,
        }
    }

    fn endpoint(&self, id: u32, byte: u8) -> Endpoint {
        let (location, is_local) = match byte % 16 {
            0..=4 => (Location::LocalPod(u8::from(byte % 16 == 4)), true),
            5..=12 => (Location::RemotePod(u8::from(byte % 16 > 9)), false),
            13 => (Location::Node, true),
            14 => (Location::Client(0), false),
            _ => (Location::Nowhere, false),
        };
        let port = if byte & 0x30 == 0x30 { 80 } else { 8080 };
        Endpoint {
            id,
            addr: SocketAddr::new(address(self.is_v6, location), port),
            is_local,
            serves: byte & 0xe0 != 0xe0,
            has_tunnel: matches!(location, Location::RemotePod(_)) && byte & 0x40 == 0,
        }
    }

    /// Whether endpoints on other nodes answer the Service's clients outside directly.
    pub fn is_dsr(&self, service: &Service) -> bool {
        self.dsr.is_some() && service.wants_dsr
    }

    /// Returns the node's address for SNAT.
    pub fn source(&self) -> Option<IpAddr> {
        self.has_source.then(|| address(self.is_v6, Location::Node))
    }

    /// Returns the addresses of this node on which node ports answer.
    pub fn node_addresses(&self) -> [IpAddr; 2] {
        [Location::Node, Location::NodeToo].map(|location| address(self.is_v6, location))
    }

    /// Whether the port is an SNAT port.
    pub fn is_snat_port(&self, port: u16) -> bool {
        self.snat.iter().any(|(first, last)| (*first..=*last).contains(&port) && *last != 0)
    }

    /// Whether an address is in the range of pods.
    pub fn is_pods(addr: IpAddr) -> bool {
        match addr {
            IpAddr::V4(addr) => addr.octets().starts_with(&[10, 244]),
            IpAddr::V6(addr) => addr.segments().starts_with(&[0xfd00, 0x244]),
        }
    }

    /// Whether an address is in the range of Service addresses.
    pub fn is_in_range(&self, addr: IpAddr) -> bool {
        self.knows_range
            && match addr {
                IpAddr::V4(addr) => addr.octets().starts_with(&[10, 96]),
                IpAddr::V6(addr) => addr.segments().starts_with(&[0xfd00, 0x96]),
            }
    }
}

/// Returns the number of Services for a byte.
fn services(byte: u8) -> u8 {
    [0, 1, 2, 3, 1, 2, 1, 2][usize::from(byte % 8)]
}

/// Removes the duplicates of an endpoint.
fn distinct(mut endpoints: Vec<Endpoint>) -> Vec<Endpoint> {
    let mut seen = Vec::new();
    endpoints.retain(|endpoint| {
        let is_new = !seen.contains(&endpoint.addr);
        seen.push(endpoint.addr);
        is_new
    });
    endpoints
}

/// Difference between the ids of a Service and of the Service that replaces it.
const LATER: u32 = 4;

impl Service {
    /// Turns it into another Service by a change of its ids; only once.
    pub fn renumber(&mut self) {
        if self.id < LATER {
            self.id += LATER;
            self.endpoints.iter_mut().for_each(|endpoint| endpoint.id += LATER * ENDPOINTS);
        }
    }

    /// Whether a table selects a client's endpoint. The algorithms 3 to 5 use one.
    pub fn is_by_table(&self, outside: bool) -> bool {
        outside && self.id.is_multiple_of(2) || (3..=5).contains(&(self.id % 11))
    }

    /// Returns the only endpoint in the previous table of a policy.
    pub fn previous_endpoint(&self, is_local: bool) -> Option<&Endpoint> {
        let previous = self.previous.and_then(|at| self.endpoints.get(at)).filter(|_| self.has_table());
        previous.filter(|endpoint| endpoint.is_local || !is_local)
    }

    /// Whether the Service has tables, if it has endpoints. Every fourth Service has none.
    pub fn has_table(&self) -> bool {
        self.id % 4 != 3
    }

    /// Whether clients outside have an entry of their own.
    pub fn is_scoped(&self) -> bool {
        self.is_local_inside != self.is_local_outside
    }

    /// Whether the policy for a client is Local.
    pub fn is_local(&self, outside: bool) -> bool {
        if outside { self.is_local_outside } else { self.is_local_inside }
    }

    /// Returns the endpoints in the slots of a policy.
    pub fn extent(&self, is_local: bool) -> impl Iterator<Item = &Endpoint> {
        let stands = move |endpoint: &&Endpoint| {
            (endpoint.serves || self.is_stale) && (endpoint.is_local || !is_local)
        };
        self.endpoints.iter().filter(stands)
    }

    /// Whether new connections skip failing endpoints.
    pub fn ejects(&self) -> bool {
        self.proto == TCP && self.id % 2 == 1
    }

    /// Whether an endpoint is the only one of a policy.
    pub fn is_only(&self, backend_id: u32, is_local: bool) -> bool {
        self.extent(is_local).map(|endpoint| endpoint.id).eq([backend_id])
    }

    /// Whether the policy is Local, and only other nodes have endpoints.
    pub fn drops_when_empty(&self, is_local: bool) -> bool {
        is_local && self.extent(false).next().is_some()
    }
}
