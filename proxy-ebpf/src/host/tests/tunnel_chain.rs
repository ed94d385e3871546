//! Connections by DSR over several nodes, while the Service's address moves, its endpoints change, and nodes lose their flows.

use std::collections::BTreeSet;

use proptest::prelude::*;
use proptest::sample::Index;
use proxy_common::backend::BACKEND_TUNNEL_SHIFT;
use proxy_common::config::CONFIG_DSR;
use proxy_common::maglev;
use proxy_common::node::{NODE_ADDR_INTERNAL, TUNNEL_V4, Tunnel};
use proxy_common::select::{Algorithm, random_slot, selector, tunnel_tag};

use super::tunnel::dsr_service;
use super::*;
use crate::context::{MAX_HOPS, Packet};

/// Each node has one endpoint.
pub(super) const NODES: usize = 6;
/// Entries of a table.
pub(super) const ENTRIES: usize = 64;
/// Id of the first node's endpoint.
const FIRST_ID: u32 = 20;
/// First word of the newest table.
const BASE: u32 = 100;

fn node_addr(node: usize) -> [u32; 1] {
    V4::addr(100 + node as u8)
}

fn endpoint(node: usize) -> End<V4> {
    (V4::addr(200 + node as u8), 8080)
}

/// An endpoint, by the number of its node, for each entry.
pub(super) type Table = [u8; ENTRIES];

pub(super) struct Cluster {
    nodes: [HostMaps<V4>; NODES],
    v6: HostMaps<V6>,
    /// The newest first.
    tables: Vec<Table>,
}

impl Cluster {
    pub(super) fn new(table: Table) -> Self {
        let cluster =
            Self { nodes: std::array::from_fn(node_of), v6: HostMaps::<V6>::leak(), tables: Vec::new() };
        cluster.changed_to(table)
    }

    /// Writes a new table on all nodes.
    pub(super) fn changed_to(mut self, table: Table) -> Self {
        // A table that becomes the current one again is no previous one.
        self.tables.retain(|before| *before != table);
        self.tables.insert(0, table);
        self.tables.truncate(maglev::TABLES as usize);
        for maps in self.nodes {
            let mut bases = Vec::new();
            for (table, base) in self.tables.iter().zip((BASE..).step_by(32)) {
                let ids = (0..NODES as u64).step_by(2).map(|node| {
                    let id = u64::from(FIRST_ID) + node;
                    id | (id + 1) << 32
                });
                let entries = table.chunks(8).map(|entries| u64::from_le_bytes(entries.try_into().unwrap()));
                let header = [maglev::shape(ENTRIES as u32, NODES as u32), 0, 0];
                maps.set_maglev(base, &header.into_iter().chain(ids).chain(entries).collect::<Vec<_>>());
                bases.push(base);
            }
            maps.set_maglev_index(maglev::index(1, false), &bases);
        }
        self
    }

    /// Removes all flows of a node.
    pub(super) fn wipe(&self, node: usize) {
        self.nodes[node].set_config(*self.nodes[node].config().unwrap());
    }

    /// Sends a client's packet to this node; returns the node whose endpoint gets it, and how often it was encapsulated.
    pub(super) fn send(&self, first: usize, client: End<V4>, shape: Shape) -> (Option<usize>, u32) {
        let (mut node, mut bytes) = (first, packet::<V4>(client, frontend::<V4>(), shape));
        for hops in 0.. {
            let frame = HostPacket::new(&bytes).edit(|skb| {
                (skb.ifindex, skb.ingress_ifindex) = (UPLINK, UPLINK);
                skb.routes.set_default(Some(route()));
            });
            let verdict = run_any(Hook::Ingress, self.nodes[node], self.v6, frame.frame());
            let skb = frame.into_skb();
            let packet = ip(&skb);
            let dst = &packet[16..20];
            let is_at = |addr: [u32; 1]| addr[0].to_ne_bytes() == dst;
            if verdict == NEXT && is_at(endpoint(node).0) {
                return (Some(node), hops);
            }
            let Some(next) = (0..NODES).find(|node| is_at(node_addr(*node))) else { return (None, hops) };
            assert!(verdict == REDIRECT && hops < MAX_HOPS, "{verdict} {hops}");
            (node, bytes) = (next, build::ethernet::<V4>(&packet));
        }
        unreachable!()
    }

    /// Whether the endpoint of a node belongs to the Service.
    pub(super) fn set_serving(&self, node: usize, serves: bool) {
        for maps in self.nodes {
            maps.set_backend_state(
                FIRST_ID + node as u32,
                if serves { BACKEND_ACTIVE } else { BACKEND_GONE },
            );
        }
    }

    /// Begins again, with this table, and without flows.
    pub(super) fn begin(mut self, table: Table) -> Self {
        self.tables.clear();
        (0..NODES).for_each(|node| {
            self.wipe(node);
            self.set_serving(node, true);
        });
        self.changed_to(table)
    }

    /// Returns the nodes of the tables' endpoints for this client, in the order in which they get a packet if none has a flow.
    pub(super) fn order(&self, client: End<V4>) -> Vec<usize> {
        let (addr, port) = frontend::<V4>();
        let (src, src_port) = client;
        let key = FlowKey { src, src_port, dst: addr, dst_port: port, proto: PROTO_TCP, ..Packet::EMPTY.key };
        let entry = random_slot(selector(Algorithm::Maglev as u8, &key, 0), ENTRIES as u32) as usize;
        let tag = |node: &usize| tunnel_tag(&endpoint(*node).0, endpoint(*node).1);
        let current = usize::from(self.tables[0][entry]);
        let previous: BTreeSet<_> = self.tables.iter().map(|table| usize::from(table[entry])).collect();
        let mut order: Vec<_> = previous.into_iter().filter(|node| *node != current).collect();
        order.sort_by_key(tag);
        [current].into_iter().chain(order).collect()
    }
}

fn node_of(node: usize) -> HostMaps<V4> {
    let maps = maps::<V4>(0);
    maps.edit_config(|config| config.flags |= CONFIG_DSR);
    let words = |[word]: [u32; 1]| [word, 0, 0, 0];
    for other in 0..NODES {
        let own = if other == node { NODE_ADDR_OWN | NODE_ADDR_PORTS } else { 0 };
        maps.add_node_addr(node_addr(other), own | NODE_ADDR_INTERNAL);
        let tunnel =
            Tunnel { addr: words(node_addr(other)), source: words(node_addr(node)), family: TUNNEL_V4 };
        let number = other as u32 + 1;
        maps.set_tunnel(number, tunnel);
        let place = if other == node { BACKEND_LOCAL } else { number << BACKEND_TUNNEL_SHIFT };
        let (addr, port) = endpoint(other);
        let flags = place | BACKEND_IN_CLUSTER;
        let row = BackendEntry { addr, port, proto: PROTO_TCP, state: BACKEND_ACTIVE, service: 1, flags };
        maps.set_backend(FIRST_ID + other as u32, row);
    }
    // The endpoints of the node have the first slots.
    let ids: Vec<_> = (0..NODES).map(|other| FIRST_ID + ((node + other) % NODES) as u32).collect();
    maps.set_slots(30, &ids);
    let (addr, port) = frontend::<V4>();
    let entry = ServiceEntry {
        algorithm: Algorithm::Maglev as u8,
        slot_base: 30,
        slot_count: NODES as u32,
        ..dsr_service()
    };
    maps.add_service(ServiceKey::internal(addr, port, PROTO_TCP), entry);
    maps
}

#[derive(Clone, Debug)]
enum Event {
    /// Some entries lead to other endpoints: their positions, and the endpoints.
    Change(Vec<(Index, u8)>),
    /// The Service's address moves to this node.
    Move(usize),
    /// A node loses its flows.
    Wipe(usize),
}

fn event() -> impl Strategy<Value = Event> {
    let change = prop::collection::vec((any::<Index>(), 0..NODES as u8), ENTRIES / 4);
    prop_oneof![
        change.prop_map(Event::Change),
        (0..NODES).prop_map(Event::Move),
        (0..NODES).prop_map(Event::Wipe)
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn connection_with_owner_flow_keeps_endpoint(
        table in prop::array::uniform::<_, ENTRIES>(0..NODES as u8),
        first in 0..NODES,
        client_port in 4000_u16..8000,
        events in prop::collection::vec(event(), 1..12),
    ) {
        let mut cluster = Cluster::new(table);
        let client = (client::<V4>().0, client_port);
        let (endpoint, _) = cluster.send(first, client, SYN);
        let endpoint = endpoint.unwrap();
        let mut first = first;
        let mut history = Vec::new();
        for event in events {
            history.push(match &event {
                Event::Change(_) => std::string::String::from("change"),
                other => std::format!("{other:?}"),
            });
            match event {
                Event::Change(changes) => {
                    let mut table = cluster.tables[0];
                    for (at, to) in changes {
                        table[at.index(ENTRIES)] = to;
                    }
                    cluster = cluster.changed_to(table);
                }
                Event::Move(node) => first = node,
                Event::Wipe(node) if node == endpoint => {}
                Event::Wipe(node) => cluster.wipe(node),
            }
            history.push(std::format!("{:?}", cluster.order(client)));
            // Without a flow on the way, three endpoints get the packet after the current one.
            if !cluster.order(client).iter().take(MAX_HOPS as usize).any(|node| *node == endpoint) {
                break;
            }
            for _ in 0..2 {
                let (got, _) = cluster.send(first, client, DATA);
                prop_assert_eq!(got, Some(endpoint), "{:?}", history);
            }
        }
    }
}
