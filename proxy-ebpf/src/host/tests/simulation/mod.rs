//! Passive ejection in time: clients that retransmit their SYNs like Linux, and endpoints that accept, refuse or are silent,
//! on the stages of the packet path. `properties` checks the invariants of `docs/operations.md` ("Endpoints that fail").

mod properties;

use std::collections::BTreeMap;
use std::vec::Vec;

use proxy_common::conntrack::is_closed;
use proxy_common::health;
use proxy_common::select::Algorithm;
use proxy_common::service::SERVICE_EJECTS;

use super::*;

/// Refusal of a SYN by a closed port.
const REFUSAL: Shape = Shape { flags: 0x14, ..SYN };
const ACK: Shape = Shape { flags: 0x10, ..SYN };
const RST: Shape = Shape { flags: 0x04, ..SYN };
/// Number of SYNs that a client sends (`net.ipv4.tcp_syn_retries` and one).
const SYNS: u32 = 7;
/// First slot of the Service.
const SLOTS: u32 = 40;

/// What an endpoint does with a SYN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Accepts,
    Refuses,
    IsSilent,
    /// It accepts the connection, and its answer takes this many jiffies.
    IsSlow(u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Connected(u32),
    /// With the id of the endpoint.
    Refused(u32),
    TimedOut,
}

/// A finished connection attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Attempt {
    client: u8,
    begun: u32,
    /// Jiffies until the end.
    took: u32,
    end: End,
    /// The endpoints that got its SYNs, in order.
    tried: Vec<u32>,
    /// Number of refusals that did not reach the client.
    hidden: u32,
}

type Flow = FlowEntry<[u32; 1]>;

/// A Service of one node, its endpoints and its clients, which are outside.
struct World {
    maps: HostMaps<V4>,
    service: ServiceEntry,
    /// Whether the endpoints are on this node; otherwise their answers arrive at the uplink (SNAT).
    are_local: bool,
    endpoints: BTreeMap<u32, Mode>,
    /// Clients whose packets to an endpoint are dropped, by a NetworkPolicy or on the way.
    dropped: Vec<(u8, u32)>,
    /// SYNs that are lost before the endpoint, by number of the SYN in the simulation.
    lost: Vec<u32>,
    syns: u32,
    /// The last source port of each client.
    ports: BTreeMap<u8, u16>,
    /// By time and order: the client's port, and the attempt so far.
    waiting: BTreeMap<(u32, u32), (u16, Attempt)>,
    order: u32,
    /// Whether clients retransmit each second, without a backoff (Linux 6.5, `tcp_syn_linear_timeouts`).
    is_linear: bool,
    /// Answers on their way, by time and order: the client's port, and the flow.
    late: BTreeMap<(u32, u32), (u16, Flow)>,
    done: Vec<Attempt>,
}

/// Entries of the flow table.
const FLOWS: u32 = 8_192;

impl World {
    /// Creates a Service with `count` endpoints, ids from 1 on, which accept connections.
    fn new(count: u32, algorithm: Algorithm, are_local: bool, affinity_secs: u32) -> Self {
        let maps = maps::<V4>(0);
        // Room for a flow of each retransmission: a full table evicts flows of clients that wait, and forgets what they tried.
        let mut config = NodeConfig::new(HZ, FLOWS, buckets_for(FLOWS), 77);
        config.snat = [PortRange::new(2000, 9999), PortRange::default()];
        config.uplinks = [UPLINK, 0, 0];
        maps.set_config(config);
        let service = ServiceEntry {
            id: 1,
            slot_base: SLOTS,
            slot_count: count,
            kind: KIND_CLUSTER_IP,
            flags: SERVICE_EJECTS,
            algorithm: algorithm as u8,
            affinity_secs,
            ..ServiceEntry::NONE
        };
        let mut world = Self {
            maps,
            service,
            are_local,
            endpoints: BTreeMap::new(),
            dropped: Vec::new(),
            lost: Vec::new(),
            syns: 0,
            ports: BTreeMap::new(),
            waiting: BTreeMap::new(),
            order: 0,
            is_linear: false,
            late: BTreeMap::new(),
            done: Vec::new(),
        };
        (1..=count).for_each(|id| world.add(id, Mode::Accepts));
        world.serve(&(1..=count).collect::<Vec<_>>());
        world
    }

    fn add(&mut self, id: u32, mode: Mode) {
        let (addr, port) = at(id);
        let flags = BACKEND_IN_CLUSTER | if self.are_local { BACKEND_LOCAL } else { 0 };
        let row = BackendEntry { addr, port, proto: PROTO_TCP, state: BACKEND_ACTIVE, service: 1, flags };
        self.maps.set_backend(id, row);
        self.endpoints.insert(id, mode);
    }

    /// Writes the endpoints that get new connections.
    fn serve(&mut self, ids: &[u32]) {
        self.maps.set_slots(SLOTS, ids);
        self.service.slot_count = ids.len() as u32;
        let (addr, port) = frontend::<V4>();
        self.maps.add_service(ServiceKey::internal(addr, port, PROTO_TCP), self.service);
    }

    fn set_all(&mut self, mode: Mode) {
        self.endpoints.values_mut().for_each(|known| *known = mode);
    }

    fn now(&self) -> u32 {
        self.maps.now()
    }

    /// Lets a client begin a connection now.
    fn connect(&mut self, client: u8) {
        let port = self.ports.entry(client).or_insert(10_000);
        *port += 1;
        let port = *port;
        let attempt =
            Attempt { client, begun: self.now(), took: 0, end: End::TimedOut, tried: Vec::new(), hidden: 0 };
        self.send(port, attempt);
    }

    /// Lets time pass, with the retransmissions and late answers that are due.
    fn pass(&mut self, jiffies: u32) {
        let until = self.now() + jiffies;
        let first = |world: &Self| {
            let keys = [world.waiting.keys().next(), world.late.keys().next()];
            keys.into_iter().flatten().min().copied().filter(|(time, _)| *time <= until)
        };
        while let Some(next) = first(self) {
            self.maps.advance(next.0 - self.now());
            if let Some((port, flow)) = self.late.remove(&next) {
                self.receive_late(port, &flow);
            } else if let Some((port, attempt)) = self.waiting.remove(&next) {
                self.send(port, attempt);
            }
        }
        self.maps.advance(until - self.now());
    }

    /// Processes an answer that took long: the connection is established if its flow is still the same.
    fn receive_late(&mut self, port: u16, flow: &Flow) {
        let is_its = |(_, (its, attempt)): &(&(u32, u32), &(u16, Attempt))| {
            *its == port && of_client(attempt.client) == flow.client
        };
        let Some(key) = self.waiting.iter().find(is_its).map(|(key, _)| *key) else { return };
        if self.answer(flow, SYN_ACK) != Some(true) {
            return;
        }
        if let Some((_, mut attempt)) = self.waiting.remove(&key) {
            attempt.took = self.now() - attempt.begun;
            self.connected((flow.client, port), attempt, flow.backend_id);
        }
    }

    /// Ends an established connection at once, so that the table does not fill.
    fn connected(
        &mut self,
        client: (<V4 as proxy_common::Family>::Words, u16),
        mut attempt: Attempt,
        backend: u32,
    ) {
        for shape in [ACK, RST] {
            run_over(Hook::Ingress, self.maps, UPLINK, &packet::<V4>(client, frontend::<V4>(), shape));
        }
        attempt.end = End::Connected(backend);
        self.done.push(attempt);
    }

    /// Waits until every attempt has ended.
    fn finish(&mut self) -> Vec<Attempt> {
        while !self.waiting.is_empty() {
            self.pass(HZ);
        }
        core::mem::take(&mut self.done)
    }

    /// Begins a connection and waits for its end, while the others continue.
    fn outcome(&mut self, client: u8) -> Attempt {
        let before = self.done.len();
        self.connect(client);
        let begun = self.now();
        loop {
            let is_it = |done: &Attempt| done.client == client && done.begun == begun;
            if let Some(done) = self.done.iter().skip(before).find(|done| is_it(done)) {
                return done.clone();
            }
            self.pass(HZ / 10);
        }
    }

    /// Sends a SYN, and processes what the endpoint does with it.
    fn send(&mut self, port: u16, mut attempt: Attempt) {
        self.syns += 1;
        let sent = attempt.tried.len() as u32;
        let client = (of_client(attempt.client), port);
        attempt.took = self.now() - attempt.begun;
        if sent == SYNS {
            self.done.push(attempt);
            return;
        }
        run_over(Hook::Ingress, self.maps, UPLINK, &packet::<V4>(client, frontend::<V4>(), SYN));
        let is_its = |flow: &Flow| (flow.client, flow.client_port) == client;
        let flow = live(self.maps).into_iter().find(|flow| is_its(flow) && !is_closed(flow.bits()));
        let flow = flow.expect("the SYN has a flow");
        attempt.tried.push(flow.backend_id);
        let is_dropped = self.dropped.contains(&(attempt.client, flow.backend_id));
        let mode = self.endpoints[&flow.backend_id];
        let shape = match mode {
            _ if is_dropped || self.lost.contains(&self.syns) => None,
            Mode::IsSilent => None,
            Mode::IsSlow(jiffies) => {
                self.order += 1;
                self.late.insert((self.now() + jiffies, self.order), (port, flow));
                None
            }
            Mode::Accepts => Some(SYN_ACK),
            Mode::Refuses => Some(REFUSAL),
        };
        let reaches = shape.is_some_and(|shape| {
            self.answer(&flow, shape).inspect(|is_translated| assert!(is_translated)).is_some()
        });
        match mode {
            Mode::Accepts if reaches => self.connected(client, attempt, flow.backend_id),
            Mode::Refuses if reaches => {
                attempt.end = End::Refused(flow.backend_id);
                self.done.push(attempt);
            }
            _ => {
                attempt.hidden += u32::from(shape.is_some());
                self.order += 1;
                let pause = if self.is_linear { HZ } else { HZ << sent };
                self.waiting.insert((self.now() + pause, self.order), (port, attempt));
            }
        }
    }

    /// Sends an endpoint's answer to a flow. Returns whether it is translated if the client gets it.
    fn answer(&self, flow: &Flow, shape: Shape) -> Option<bool> {
        let bytes = packet::<V4>((flow.backend, flow.backend_port), (flow.source, flow.source_port), shape);
        let hook = if self.are_local { (Hook::Egress, POD) } else { (Hook::Ingress, UPLINK) };
        let (verdict, skb) = run_over(hook.0, self.maps, hook.1, &bytes);
        (verdict != DROP).then(|| skb.wire()[build::ETHERNET..] != bytes[build::ETHERNET..])
    }

    /// Whether clients share an element of `skips`: then a failure of one may replace that of the other.
    fn has_collision(&self, clients: impl IntoIterator<Item = u8>) -> bool {
        let mut seen = std::collections::BTreeSet::new();
        let pairs = clients.into_iter().flat_map(|client| self.endpoints.keys().map(move |id| (client, *id)));
        let mut slots =
            pairs.map(|(client, id)| health::skip_slot(health::client(&of_client(client), 77), id).0);
        !slots.all(|slot| seen.insert(slot))
    }
}

/// The address of a client; numbers are below 170.
fn of_client(number: u8) -> [u32; 1] {
    V4::addr(20 + number)
}

/// The address of an endpoint.
fn at(id: u32) -> (<V4 as proxy_common::Family>::Words, u16) {
    (V4::addr(200 + id as u8), 8080)
}
