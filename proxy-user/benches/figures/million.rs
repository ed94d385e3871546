//! A million established flows: begun, found again in random order, listed; and the memory of their maps.

use std::path::Path;
use std::time::Instant;

use proxy_common::flow::{Bucket, FlowEntry, buckets_for};
use proxy_user::maps::view::FlowState;
use proxy_user::programs::Capacities;

use crate::harness::{Family, Hook};
use crate::packet::{ACK, Packet, SYN, TCP};
use crate::packets::{Bench, CHAIN, CHAIN_START, SEQ, frontend};
use crate::report::{Row, Sample};

const FLOWS: u32 = 1_000_000;
/// Each client has one flow to each Service of the chain.
const CLIENTS: u32 = FLOWS / CHAIN;

fn client(family: Family, number: u32) -> std::net::SocketAddr {
    family.client(7 + (number / 500) as u16, 1024 + (number % 500) as u16)
}

/// Measures all of it.
pub fn measure(bpffs: &Path) -> Vec<Row> {
    [(Family::V4, "IPv4 flows"), (Family::V6, "IPv6 flows")]
        .into_iter()
        .flat_map(|(family, group)| measure_family(bpffs, family, group))
        .collect()
}

fn measure_family(bpffs: &Path, family: Family, group: &'static str) -> Vec<Row> {
    let capacities = Capacities { flows: FLOWS.next_power_of_two(), ..Capacities::default() };
    let bench = Bench::with_capacities(bpffs, family, CHAIN + CHAIN_START - 1, &capacities);
    let first = frontend(family, CHAIN_START);
    let segment =
        |flags, number| Packet { flags, seq: SEQ[0], ..Packet::tcp(ACK, client(family, number), first) };
    let answers =
        |number| Packet { flags: SYN | ACK, seq: SEQ[1], ack: SEQ[0] + 1, ..segment(ACK, number).back() };
    let acknowledges = |number| Packet { seq: SEQ[0] + 1, ack: SEQ[1] + 1, ..segment(ACK, number) };
    let [ingress, egress] = [Hook::Ingress, Hook::Egress].map(Hook::program);
    let mut begun = Vec::new();
    for number in 0..CLIENTS {
        begun.push(bench.round(ingress, &segment(SYN, number), CHAIN));
        bench.time(egress, &answers(number), CHAIN);
        bench.time(ingress, &acknowledges(number), CHAIN);
    }
    let last = begun.split_off(begun.len() * 3 / 4);
    // Every client once, far from the one before: nothing of its flows is in a cache.
    let order = (0..CLIENTS).map(|at| at * 619 % CLIENTS);
    let found =
        Sample::median(order.map(|number| bench.round(ingress, &acknowledges(number), CHAIN)).collect());
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

const fn entry_size(family: Family) -> usize {
    match family {
        Family::V4 => size_of::<FlowEntry<[u8; 4]>>(),
        Family::V6 => size_of::<FlowEntry<[u8; 16]>>(),
    }
}
