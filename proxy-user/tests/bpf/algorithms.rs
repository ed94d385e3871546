//! Selection of endpoints in turn, by hash, and by Maglev tables.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use proxy_common::maglev;
use proxy_common::select::Algorithm;
use proxy_common::service::{SERVICE_MAGLEV_OUTSIDE, ServiceEntry};
use proxy_core::store::{MaglevRow, Write};

use crate::Scenario;
use proxy_testbed::Family;
use proxy_testbed::harness::{Harness, Hook, Service};
use proxy_testbed::packet::{Packet, SYN, TCP};

pub const SCENARIOS: [Scenario; 5] = [
    Scenario { name: "round robin skips no endpoint for a retransmitted segment", flows: 64, test: turns },
    Scenario { name: "a client's address has one endpoint, whatever its port", flows: 1024, test: by_source },
    Scenario {
        name: "Maglev selects the same on nodes with other ids and seeds",
        flows: 1024,
        test: same_everywhere,
    },
    Scenario {
        name: "an endpoint that left is passed over, in a table or in slots",
        flows: 1024,
        test: left,
    },
    Scenario {
        name: "a Service without a Maglev table, or with an unknown algorithm, is served",
        flows: 1024,
        test: bare,
    },
];

const ID: u32 = 9;
const TABLE: u32 = 500;

/// Serves three endpoints, whose ids begin at `first`.
fn serve(family: Family, harness: &mut Harness, algorithm: u8, first: u32) -> Service {
    let pods: Vec<_> = (1..=3).map(|n| family.pod(n, 8080)).collect();
    let mut service = Service::new(ID, TCP, family.frontend(1, 80), &pods);
    for ((id, _), other) in service.backends.iter_mut().zip(first..) {
        *id = other;
    }
    harness.serve(std::slice::from_ref(&service));
    harness.write(&service.writes_with_table(algorithm, TABLE));
    service
}

/// Returns the endpoint that a new connection of this client goes to.
fn ask(harness: &mut Harness, service: &Service, client: SocketAddr) -> SocketAddr {
    let packet = Packet::tcp(SYN, client, service.frontend);
    let seen = harness.run(Hook::Ingress, &packet.bytes());
    let to = |pod: &&(u32, SocketAddr)| packet.to(pod.1).bytes() == seen.packet;
    let found = service.backends.iter().find(to).map(|(_, pod)| *pod);
    found.unwrap_or_else(|| {
        panic!("{client} went to none of the endpoints: {seen:?}, {:?}", harness.reasons())
    })
}

fn turns(family: Family, harness: &mut Harness) {
    for algorithm in [Algorithm::RoundRobin, Algorithm::WeightedRoundRobin] {
        let service = serve(family, harness, algorithm as u8, 100);
        let clients: Vec<_> = (0..9).map(|n| family.client(1, 2_000 + 10 * algorithm as u16 + n)).collect();
        let mut went = Vec::new();
        for client in clients {
            let pod = ask(harness, &service, client);
            assert_eq!(ask(harness, &service, client), pod, "the same connection");
            went.push(pod);
        }
        assert_eq!(went[..3].iter().collect::<BTreeSet<_>>().len(), 3, "{went:?}");
        assert_eq!((&went[3..6], &went[6..]), (&went[..3], &went[..3]));
    }
}

fn by_source(family: Family, harness: &mut Harness) {
    let service = serve(family, harness, Algorithm::SourceHash as u8, 100);
    let mut used = BTreeSet::new();
    for host in 1..20 {
        let pods: BTreeSet<_> =
            (0..5).map(|n| ask(harness, &service, family.client(host, 3_000 + n))).collect();
        assert_eq!(pods.len(), 1, "client {host}");
        used.extend(pods);
    }
    assert_eq!(used.len(), 3);
    let service = serve(family, harness, Algorithm::DestinationHash as u8, 100);
    let pods: BTreeSet<_> = (1..40).map(|host| ask(harness, &service, family.client(host, 9_000))).collect();
    assert_eq!(pods.len(), 1, "there is one original destination");
}

fn same_everywhere(family: Family, harness: &mut Harness) {
    const FLOWS: u16 = 300;
    let mut nodes = Vec::new();
    for (first, seed) in [(100, 1), (700, 0x5eed_0000)] {
        let old = harness.configure(|_| ()).flow_seed;
        harness.configure(|config| config.flow_seed = seed);
        let service = serve(family, harness, Algorithm::Maglev as u8, first);
        harness.forget_flows();
        nodes.push(
            (0..FLOWS).map(|n| ask(harness, &service, family.client(n % 7, 4_000 + n))).collect::<Vec<_>>(),
        );
        harness.configure(|config| config.flow_seed = old);
        harness.forget_flows();
    }
    assert_eq!(nodes[0], nodes[1]);
    let mut shares = BTreeMap::new();
    for pod in &nodes[0] {
        *shares.entry(pod).or_insert(0) += 1;
    }
    assert!(shares.len() == 3 && shares.values().all(|share| (60..=140).contains(share)), "{shares:?}");
}

fn left(family: Family, harness: &mut Harness) {
    for algorithm in Algorithm::ALL {
        let mut service = serve(family, harness, *algorithm as u8, 100);
        let gone = service.backends[1].1;
        let entry = ServiceEntry { algorithm: *algorithm as u8, ..service.entry() };
        let stay = [service.backends[0].1, service.backends[2].1];
        harness.shrink(&mut service, &stay);
        // The slots are still the old ones: a program that began before the change may read them.
        harness.write(&[
            Write::Slots(ID * 16, vec![100, 101, 102]),
            Write::Service(service.frontend_key(), entry),
        ]);
        let pods: BTreeSet<_> = (0..60_u16)
            .map(|n| ask(harness, &service, family.client(n + 1, 5_000 + 100 * *algorithm as u16)))
            .collect();
        assert!(!pods.contains(&gone), "{algorithm:?}");
        let all_go_one_way = *algorithm == Algorithm::DestinationHash;
        assert_eq!(pods.len(), if all_go_one_way { 1 } else { 2 }, "{algorithm:?}");
    }
}

fn bare(family: Family, harness: &mut Harness) {
    for (number, algorithm) in [(1, Algorithm::Maglev as u8), (2, 200)] {
        let service = serve(family, harness, algorithm, 100);
        let flags = SERVICE_MAGLEV_OUTSIDE;
        harness.write(&[
            Write::MaglevIndex(maglev::index(ID, false), MaglevRow::default()),
            Write::Service(service.frontend_key(), ServiceEntry { algorithm, flags, ..service.entry() }),
        ]);
        let pods: BTreeSet<_> =
            (0..60_u16).map(|n| ask(harness, &service, family.client(n + 1, 7_000 + number))).collect();
        assert_eq!(pods.len(), 3, "algorithm {algorithm}");
    }
}
