//! Random tests: the selection of backends, and packets that no client would send.

use std::collections::BTreeMap;

use crate::Scenario;
use proxy_testbed::Family;
use proxy_testbed::harness::{DROP, Harness, Hook, NEXT, REDIRECT, Service};
use proxy_testbed::packet::{ACK, ETHERNET, Packet, SYN, TCP, UDP, verify};

pub const SCENARIOS: [Scenario; 3] = [
    Scenario { name: "the choice is uniform and never leaves the extent", flows: 256, test: uniform },
    Scenario { name: "foreign packets pass unchanged, also malformed ones", flows: 64, test: foreign },
    Scenario { name: "malformed packets of a Service end in a verdict", flows: 64, test: broken },
];

/// Number of packets of each kind; there are four kinds.
const PACKETS: u32 = 5_000;

/// A xorshift generator: each run has the same packets, so that a failure can be repeated.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Returns a number below `end`.
    fn below(&mut self, end: usize) -> usize {
        (self.next() >> 20) as usize % end
    }

    fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())].clone()
    }
}

fn uniform(family: Family, harness: &mut Harness) {
    const PICKS: u32 = 14_000;
    let pods: Vec<_> = (1..=7).map(|n| family.pod(n, 8080)).collect();
    let others: Vec<_> = (21..=36).map(|n| family.pod(n, 8080)).collect();
    let frontend = family.frontend(1, 80);
    harness.serve(&[
        Service::new(6, UDP, family.frontend(2, 80), &others),
        Service::new(7, UDP, frontend, &pods),
        Service::new(8, UDP, family.frontend(3, 80), &others),
    ]);
    let packet = Packet::udp(family.client(1, 1), frontend);
    let outs: BTreeMap<_, _> = pods.iter().map(|pod| (pod.ip(), pod)).collect();
    let mut counts = BTreeMap::new();
    for n in 0..PICKS {
        let packet = packet.from(family.client(n as u16, 20_000));
        let seen = harness.run(Hook::Ingress, &packet.bytes());
        let pod = outs.values().find(|pod| packet.to(***pod).bytes() == seen.packet);
        let Some(pod) = pod else {
            panic!("client {n} went to none of the endpoints: {seen:?}, {:?}", harness.reasons());
        };
        *counts.entry(**pod).or_insert(0) += 1;
    }
    let expected = f64::from(PICKS) / 7.0;
    let chi_square: f64 = counts.values().map(|n| (f64::from(*n) - expected).powi(2) / expected).sum();
    println!("{family:?}: chi-square {chi_square:.1} with 6 degrees of freedom");
    assert_eq!(counts.len(), 7);
    // A uniform selection exceeds this value once in more than a million runs.
    assert!(chi_square < 38.3, "{chi_square}: {counts:?}");
}

/// Returns a packet of any shape between two sockets.
fn any_packet(random: &mut Random, family: Family, to: &[u16]) -> Packet {
    let client = family.client(random.below(8) as u16, random.pick(&[80, 8080, 40_000, 53]));
    let dst = family.frontend(random.pick(to), random.pick(&[80, 53]));
    let flags = random.next() as u8;
    let mut packet = Packet { flags, ..Packet::new(random.pick(&[TCP, UDP]), client, dst) };
    packet = packet.payload(random.below(64));
    packet.is_unchecked = packet.proto == UDP && random.below(4) == 0;
    if random.below(3) == 0 {
        let length = 4 * (1 + random.below(10));
        packet = packet.options(&vec![1; length]);
    }
    for _ in 0..random.below(3).saturating_mul(random.below(4)) {
        let number = random.pick(&[0, 43, 44, 51, 60, 135]);
        packet = packet.extension(number, &[0, 0, 0, 0, 0, 0, 0, 0]);
    }
    packet
}

/// Changes a few bytes; may truncate or extend the packet.
fn break_it(random: &mut Random, bytes: &mut Vec<u8>) {
    for _ in 0..random.below(4) {
        let at = ETHERNET + random.below(bytes.len() - ETHERNET);
        let any = random.next() as u8;
        bytes[at] = random.pick(&[0, 1, 0x0f, 0x44, 0x45, 0x4f, 0x60, 0x7f, 0x80, 0xff, any]);
    }
    // The kernel requires an IP header behind the Ethernet header, and nothing more.
    let least = ETHERNET + 40;
    match random.below(4) {
        0 => bytes.truncate(least.max(random.below(bytes.len()))),
        1 => bytes.resize(bytes.len() + random.below(40), 0xa5),
        _ => {}
    }
    if bytes.len() < least {
        bytes.resize(least, 0);
    }
}

fn served(family: Family) -> Vec<Service> {
    let pods = [family.pod(1, 8080), family.pod(2, 80)];
    let mut services = Vec::new();
    for (id, (proto, port)) in (7..).zip([(TCP, 80), (UDP, 80), (TCP, 53), (UDP, 53)]) {
        services.push(Service::new(id, proto, family.frontend(1, port), &pods));
        services.push(Service::new(id + 10, proto, family.frontend(2, port), &[]));
    }
    services
}

fn foreign(family: Family, harness: &mut Harness) {
    harness.serve(&served(family));
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for n in 0..PACKETS {
        let mut bytes = any_packet(&mut random, family, &[0x7001, 0x7002]).bytes();
        break_it(&mut random, &mut bytes);
        // Sets a bit of the source and of the destination, so that neither becomes an address of a Service or endpoint.
        for at in if family == Family::V4 { [12, 16] } else { [22, 38] } {
            bytes[ETHERNET + at + 1] |= 0x80;
        }
        for hook in [Hook::Ingress, Hook::Egress] {
            let seen = harness.run(hook, &bytes);
            assert_eq!((seen.verdict, &seen.packet), (NEXT, &bytes), "{n} {hook:?}");
        }
    }
    assert_eq!((harness.flows(family).len(), harness.refusals().len()), (0, 0));
}

fn broken(family: Family, harness: &mut Harness) {
    harness.serve(&served(family));
    let mut random = Random(0xd1b5_4a32_d192_ed03);
    let mut seen_verdicts = BTreeMap::<i32, u32>::new();
    for n in 0..PACKETS {
        let packet = any_packet(&mut random, family, &[1, 1, 2]);
        let whole = packet.bytes();
        let mut bytes = whole.clone();
        break_it(&mut random, &mut bytes);
        for hook in [Hook::Ingress, Hook::Egress] {
            let seen = harness.run(hook, &bytes);
            *seen_verdicts.entry(seen.verdict).or_default() += 1;
            match seen.verdict {
                NEXT | DROP => assert_eq!(seen.packet.len(), bytes.len(), "{n} {hook:?}"),
                // The packet was refused: this harness sends only packets that the node itself has built.
                REDIRECT => assert!(seen.packet.len() >= ETHERNET + 28, "{n}"),
                other => panic!("{n}: verdict {other}"),
            }
            if seen.verdict == DROP {
                assert_eq!(seen.packet, bytes, "{n}: a dropped packet is not worth a write");
            }
            if bytes == whole && packet.options.is_empty() && packet.extensions.is_empty() {
                verify(&seen.packet).unwrap_or_else(|error| panic!("{n} {hook:?}: {error}"));
            }
        }
    }
    for verdict in [NEXT, DROP, REDIRECT] {
        assert!(seen_verdicts.contains_key(&verdict), "{seen_verdicts:?} do not cover {verdict}");
    }
    // A new flow can still be created and used.
    let packet = Packet::tcp(SYN, family.client(9, 9), family.frontend(1, 80));
    assert_ne!(harness.run(Hook::Ingress, &packet.bytes()).packet, packet.bytes());
    assert_eq!(harness.run(Hook::Ingress, &Packet { flags: ACK, ..packet }.bytes()).verdict, NEXT);
}
