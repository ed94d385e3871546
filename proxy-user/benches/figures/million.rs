//! A million established flows: the time of new flows, of known flows in random order, and of a list of all; and the memory
//! of their maps. By tc to endpoints on this node, and by XDP to endpoints on another node.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::Path;
use std::time::Instant;

use proxy_common::config::{NodeConfig, PortRange, SNAT_RANGES};
use proxy_common::flow::{Bucket, FlowEntry, buckets_for};
use proxy_common::select::source_port;
use proxy_core::model::FlowState;
use proxy_user::programs::Capacities;

use crate::packets::{Bench, CHAIN, CHAIN_START, SEQ, frontend};
use crate::snat_forward::{HOPS, attach_early};
use proxy_testbed::Family;
use proxy_testbed::harness::Hook;
use proxy_testbed::node::{know, send_on_as};
use proxy_testbed::packet::{ACK, Packet, SYN, TCP, ends};
use proxy_testbed::report::{Row, Sample};

const FLOWS: u32 = 1_000_000;
/// Number of clients, each of which has one flow to each Service of the chain.
const CLIENTS: u32 = FLOWS / CHAIN;
/// Walks of each client by XDP: the TTL of a packet does not suffice for the whole chain.
const WALKS: u32 = CHAIN / HOPS;
/// Number of walks by XDP after which tc again sends a packet to each next hop.
const TC_EVERY: usize = 50;
/// SNAT ports. The SNAT port of a hop is a function of the port before. With these ranges, the function is one-to-one for
/// more than [`CLIENTS`] ports; with the default ones, two walks could get the same port, and would share the flows of all
/// further hops.
const SOURCE_PORTS: [PortRange; SNAT_RANGES] =
    [PortRange::new(1_024, 51_023), PortRange { first: 0, count: 0 }];

fn client(family: Family, number: u32) -> SocketAddr {
    family.client(7 + (number / 500) as u16, 1024 + (number % 500) as u16)
}

/// Measures all figures of this file.
pub fn measure(bpffs: &Path) -> Vec<Row> {
    [(Family::V4, "IPv4 flows"), (Family::V6, "IPv6 flows")]
        .into_iter()
        .flat_map(|(family, group)| {
            let mut rows = measure_family(bpffs, family, group);
            rows.extend(measure_early(bpffs, family, group));
            rows
        })
        .collect()
}

fn capacities() -> Capacities {
    Capacities { flows: FLOWS.next_power_of_two(), ..Capacities::default() }
}

/// Returns the client's SYN, the endpoint's SYN-ACK, and the client's ACK.
fn handshake(from: SocketAddr, to: SocketAddr) -> [Packet; 3] {
    let syn = Packet { seq: SEQ[0], ..Packet::tcp(SYN, from, to) };
    let answer = Packet { flags: SYN | ACK, seq: SEQ[1], ack: SEQ[0] + 1, ..syn.back() };
    let acknowledges = Packet { flags: ACK, seq: SEQ[0] + 1, ack: SEQ[1] + 1, ..syn.clone() };
    [syn, answer, acknowledges]
}

fn measure_family(bpffs: &Path, family: Family, group: &'static str) -> Vec<Row> {
    let capacities = capacities();
    let bench = Bench::with_capacities(bpffs, family, CHAIN + CHAIN_START - 1, &capacities);
    let first = frontend(family, CHAIN_START);
    let [ingress, egress] = [Hook::Ingress, Hook::Egress].map(Hook::program);
    let mut begun = Vec::new();
    for number in 0..CLIENTS {
        let [syn, answer, acknowledges] = handshake(client(family, number), first);
        begun.push(bench.round(ingress, &syn, CHAIN));
        bench.time(egress, &answer, CHAIN);
        bench.time(ingress, &acknowledges, CHAIN);
    }
    let last = begun.split_off(begun.len() * 3 / 4);
    // Each client once, far from the one before, so that its flows are not in a cache.
    let again = |at: u32| {
        let [_, _, segment] = handshake(client(family, at * 619 % CLIENTS), first);
        bench.round(ingress, &segment, CHAIN)
    };
    let found = Sample::median((0..CLIENTS).map(again).collect());
    let clock = Instant::now();
    let rows = bench.harness.view().flows().unwrap();
    let listed = clock.elapsed();
    let established = rows.iter().filter(|row| row.state == FlowState::Established).count();
    let memory = capacities.flows as usize * entry_size(family)
        + buckets_for(capacities.flows) as usize * size_of::<Bucket>();
    assert_eq!(rows.iter().filter(|row| row.protocol.0 == TCP).count(), rows.len(), "TCP alone");
    vec![
        Row::new(group, "a million flows: established", established as f64, "", None),
        Row::new(group, "a million flows: new flow, last quarter", Sample::median(last), "ns", None),
        Row::new(group, "a million flows: known flow, none in a cache", found, "ns", None),
        Row::new(group, "a million flows: read and listed", listed.as_secs_f64(), "s", None),
        Row::new(
            group,
            "a million flows: memory of the maps",
            memory as f64 / f64::from(1 << 20),
            "MiB",
            None,
        ),
    ]
}

/// Measures known flows by XDP, to endpoints on another node. tc starts them; each walk of a client is over [`HOPS`] Services.
fn measure_early(bpffs: &Path, family: Family, group: &'static str) -> [Row; 2] {
    let mut bench = Bench::with_capacities(bpffs, family, CHAIN + CHAIN_START - 1, &capacities());
    know(family, &bench.harness);
    // An address to which there is a route, unlike the node's own: the replies of all hops but the first go there.
    send_on_as(family.client(3, 0).ip(), &bench.harness);
    bench.harness.configure(|config| config.snat = SOURCE_PORTS);
    let attached = attach_early(&mut bench.harness);
    let walks: Vec<_> = one_to_one_ports()
        .into_iter()
        .take(CLIENTS as usize)
        .flat_map(|port| (0..WALKS).map(move |walk| (port, CHAIN_START + walk * HOPS)))
        .map(|(port, service)| handshake(family.client(7, port), frontend(family, service)))
        .collect();
    let mut last_hops = BTreeMap::new();
    for [syn, answer, acknowledges] in &walks {
        let far = ends(&bench.tc_round(syn, HOPS).1);
        last_hops.insert(syn.dst, far.1);
        let back = bench.tc_round(&answer.from(far.1).to(far.0), HOPS).1;
        assert_eq!(ends(&back), (syn.dst, syn.src), "each hop translates the answer");
        bench.tc_round(acknowledges, HOPS);
    }
    let mut found = Vec::new();
    for at in 0..walks.len() {
        if at % TC_EVERY == 0 {
            // XDP passes a packet for a next hop to tc if tc has recently sent none, so that the kernel probes the neighbour.
            for [_, _, segment] in &walks[..WALKS as usize] {
                bench.tc_round(segment, HOPS);
            }
        }
        // Each walk once, far from the one before, so that its flows are not in a cache.
        let [_, _, segment] = &walks[at * 6_197 % walks.len()];
        let (time, sent) = bench.xdp_round(segment, HOPS);
        let arrived = last_hops.get(&segment.dst) == Some(&ends(&sent).1);
        found.extend(arrived.then_some(time));
    }
    assert!(found.len() > walks.len() / 2, "only {} of {} walks end", found.len(), walks.len());
    drop(attached);
    let rows = bench.harness.view().flows().unwrap();
    let established = rows.iter().filter(|row| row.state == FlowState::Established).count();
    assert_eq!(bench.harness.reasons(), [], "nothing was refused");
    [
        Row::new(group, "a million flows by XDP: established", established as f64, "", None),
        Row::new(
            group,
            "a million flows by XDP: known flow, none in a cache",
            Sample::median(found),
            "ns",
            Some(450.0),
        ),
    ]
}

/// Returns the client ports whose SNAT ports differ after any number of hops.
fn one_to_one_ports() -> BTreeSet<u16> {
    let config = NodeConfig { snat: SOURCE_PORTS, ..NodeConfig::default() };
    let next = |port: &u16| config.snat_port(source_port(*port, config.snat_count()));
    let mut ports: BTreeSet<u16> = (0..config.snat_count()).map(|number| config.snat_port(number)).collect();
    loop {
        let mapped: BTreeSet<u16> = ports.iter().map(next).collect();
        if mapped.len() == ports.len() {
            return ports;
        }
        ports = mapped;
    }
}

const fn entry_size(family: Family) -> usize {
    match family {
        Family::V4 => size_of::<FlowEntry<[u8; 4]>>(),
        Family::V6 => size_of::<FlowEntry<[u8; 16]>>(),
    }
}
