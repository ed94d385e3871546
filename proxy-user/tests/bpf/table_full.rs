//! A full table of flows: which flows stay, which are evicted, and which are refused.

use std::net::SocketAddr;

use proxy_common::conntrack::{ASSURED, SEEN_REPLY};
use proxy_common::reason::Reason;

use crate::Scenario;
use crate::race::{allowed, stay_on};
use proxy_testbed::Family;
use proxy_testbed::harness::{DROP, HZ, Harness, Hook, NEXT, Service};
use proxy_testbed::one_cpu::OneCpu;
use proxy_testbed::packet::{ACK, Packet, RST, SYN, TCP, UDP};

pub const SCENARIOS: [Scenario; 13] = [
    Scenario {
        name: "full of established flows: they stay, new ones are refused",
        flows: 256,
        test: all_established,
    },
    Scenario {
        name: "mostly established flows: they stay, new ones find a place",
        flows: 256,
        test: mostly_established,
    },
    Scenario {
        name: "established flows side by side: new ones find a place behind them",
        flows: 1024,
        test: side_by_side,
    },
    Scenario { name: "half-open flows are evicted", flows: 256, test: half_open },
    Scenario { name: "a closed flow is evicted before a half-open one", flows: 8, test: over_first },
    Scenario { name: "expired flows are replaced", flows: 64, test: expired },
    Scenario { name: "answered half-open flows are evicted", flows: 256, test: answered_half_open },
    Scenario {
        name: "UDP that was answered a moment ago is not evicted for an older unreplied flow",
        flows: 64,
        test: answered_udp,
    },
    Scenario {
        name: "one exchange of UDP is evicted after a second, a stream is not",
        flows: 64,
        test: exchanges,
    },
    Scenario { name: "an unreplied flow stays while others have waited longer", flows: 64, test: waiting },
    Scenario {
        name: "active unreplied flows side by side: they stay, new ones evict silent ones",
        flows: 1024,
        test: active_side_by_side,
    },
    Scenario { name: "an unreplied flow stays among streams", flows: 64, test: among_streams },
    Scenario {
        name: "an unreplied flow stays if another CPU has taken the entries behind it",
        flows: 64,
        test: two_cpus,
    },
];

const ID: u32 = 7;

struct Scene {
    family: Family,
    proto: u8,
    /// Each CPU has its own window of entries, which it examines next.
    _cpu: OneCpu,
}

impl Scene {
    fn new(family: Family, proto: u8, harness: &mut Harness) -> Self {
        let cpu = OneCpu::pin();
        harness.serve(&[Service::new(ID, proto, family.frontend(1, 80), &[family.pod(1, 8080)])]);
        Self { family, proto, _cpu: cpu }
    }

    /// Returns a packet of the n-th client.
    fn packet(&self, n: u32, flags: u8) -> Packet {
        let client = self.family.client((n / 1000) as u16 + 1, (n % 1000) as u16 + 20_000);
        Packet { flags, ..Packet::new(self.proto, client, self.family.frontend(1, 80)) }
    }

    /// Sends the n-th client's packet; returns whether it is translated. Otherwise it must be dropped unchanged.
    fn sends(&self, harness: &mut Harness, n: u32, flags: u8) -> bool {
        let packet = self.packet(n, flags);
        let seen = harness.run(Hook::Ingress, &packet.bytes());
        let expected = match seen.verdict {
            NEXT => packet.to(self.family.pod(1, 8080)),
            other => {
                assert_eq!(other, DROP);
                packet
            }
        };
        assert_eq!(seen.packet, expected.bytes());
        seen.verdict == NEXT
    }

    /// Sends an answer to the n-th client; returns whether it is translated.
    fn answers(&self, harness: &mut Harness, n: u32, flags: u8) -> bool {
        let reply = Packet { flags, ..self.packet(n, 0).to(self.family.pod(1, 8080)).back() };
        let seen = harness.run(Hook::Egress, &reply.bytes());
        assert_eq!(seen.verdict, NEXT);
        seen.packet == reply.from(self.family.frontend(1, 80)).bytes()
    }

    fn establish(&self, harness: &mut Harness, n: u32) {
        assert!(self.sends(harness, n, SYN) && self.answers(harness, n, SYN | ACK), "{n}");
        if self.proto == TCP {
            assert!(self.sends(harness, n, ACK), "{n}");
        }
    }
}

/// More established flows in a row than a new flow examines near the clock hand.
fn side_by_side(family: Family, harness: &mut Harness) {
    let scene = Scene::new(family, TCP, harness);
    (0..768).for_each(|n| scene.establish(harness, n));
    for n in 1000..5000 {
        assert!(scene.sends(harness, n, SYN), "{n}");
    }
    assert_eq!(harness.reasons(), []);
    assert!((0..768).all(|n| scene.sends(harness, n, ACK) && scene.answers(harness, n, ACK)));
}

fn all_established(family: Family, harness: &mut Harness) {
    let scene = Scene::new(family, TCP, harness);
    (0..256).for_each(|n| scene.establish(harness, n));
    for n in 1000..1000 + 2560 {
        assert!(!scene.sends(harness, n, SYN), "{n}");
    }
    assert_eq!(harness.reasons(), [(Reason::FlowTableFull, 2560)]);
    assert_eq!(harness.refusals(), [(ID, Reason::FlowTableFull, 2560)]);
    for n in 0..256 {
        assert!(scene.sends(harness, n, ACK) && scene.answers(harness, n, ACK), "{n} was pushed out");
    }
    assert_eq!(harness.stats(ID).connections, 256);
    assert_eq!(harness.key_count(family), 512);
}

fn mostly_established(family: Family, harness: &mut Harness) {
    let scene = Scene::new(family, TCP, harness);
    // Every fourth entry has an unreplied flow.
    for n in 0..256 {
        if n % 4 == 0 { assert!(scene.sends(harness, n, SYN)) } else { scene.establish(harness, n) }
    }
    for n in 1000..1000 + 2560 {
        assert!(scene.sends(harness, n, SYN), "{n} found no place");
    }
    for n in (0..256).filter(|n| n % 4 != 0) {
        assert!(scene.sends(harness, n, ACK) && scene.answers(harness, n, ACK), "{n} was pushed out");
    }
    assert_eq!(harness.stats(ID).connections, 256 + 2560, "no established flow began anew");
    assert_eq!((harness.reasons(), harness.key_count(family)), (vec![], 512));
}

fn half_open(family: Family, harness: &mut Harness) {
    let scene = Scene::new(family, TCP, harness);
    for n in 0..2560 {
        assert!(scene.sends(harness, n, SYN), "{n}");
        let keys = harness.key_count(family);
        assert_eq!(keys, 2 * (n as usize + 1).min(256), "the keys of those that gave way are gone");
    }
    assert!(scene.answers(harness, 2559, SYN | ACK), "the last one is there");
    assert!(!scene.answers(harness, 0, SYN | ACK), "the first one is not");
}

fn over_first(family: Family, harness: &mut Harness) {
    let scene = Scene::new(family, TCP, harness);
    (0..8).for_each(|n| assert!(scene.sends(harness, n, SYN)));
    assert!(scene.answers(harness, 5, RST | ACK));
    assert!(scene.sends(harness, 100, SYN));
    for n in 0..8 {
        assert_eq!(scene.answers(harness, n, SYN | ACK), n != 5, "{n}");
    }
}

fn expired(family: Family, harness: &mut Harness) {
    let scene = Scene::new(family, TCP, harness);
    (0..64).for_each(|n| scene.establish(harness, n));
    assert!(!scene.sends(harness, 100, SYN));
    let now = harness.now();
    for mut flow in harness.flows(family) {
        flow.last_seen = now.wrapping_sub(86_401 * HZ);
        harness.change(&flow);
    }
    (200..264).for_each(|n| scene.establish(harness, n));
    assert!(!scene.sends(harness, 300, SYN));
    assert_eq!(harness.key_count(family), 128);
}

fn answered_udp(family: Family, harness: &mut Harness) {
    let scene = Scene::new(family, UDP, harness);
    (0..64).for_each(|n| scene.establish(harness, n));
    // Half of the flows were answered a moment ago; the others have waited for an answer for more than a second.
    let now = harness.now();
    for (number, mut flow) in harness.flows(family).into_iter().enumerate() {
        if number % 2 == 1 {
            flow.state &= !SEEN_REPLY;
            flow.last_seen = now.wrapping_sub(2 * HZ);
            harness.change(&flow);
        }
    }
    let before = clients(harness, family);
    (100..132).for_each(|n| assert!(scene.sends(harness, n, 0)));
    for (number, (before, after)) in before.into_iter().zip(clients(harness, family)).enumerate() {
        assert_eq!(before == after, number % 2 == 0, "{number}: {before}, then {after}");
    }
    assert_eq!(harness.reasons(), []);
}

/// A flood of SYNs that an endpoint answers, and whose sources never acknowledge the answer, does not keep entries for long.
fn answered_half_open(family: Family, harness: &mut Harness) {
    let scene = Scene::new(family, TCP, harness);
    // Fewer flows than a new flow examines before the table counts as full.
    (0..48).for_each(|n| scene.establish(harness, n));
    for n in 1000..1000 + 2560 {
        assert!(scene.sends(harness, n, SYN) && scene.answers(harness, n, SYN | ACK), "{n} found no place");
    }
    (4000..4048).for_each(|n| scene.establish(harness, n));
    for n in (0..48).chain(4000..4048) {
        assert!(scene.sends(harness, n, ACK) && scene.answers(harness, n, ACK), "{n} was evicted");
    }
    assert_eq!(harness.reasons(), []);
}

/// Changes when flows began and were last seen; `ages` returns both in tenths of a second before now.
fn age(harness: &mut Harness, family: Family, ages: impl Fn(usize) -> Option<[u32; 2]>) {
    let now = harness.now();
    for (number, mut flow) in harness.flows(family).into_iter().enumerate() {
        if let Some([created, last_seen]) = ages(number) {
            flow.created = now.wrapping_sub(created * HZ / 10);
            flow.last_seen = now.wrapping_sub(last_seen * HZ / 10);
            if created - last_seen > 20 {
                // There was more than one exchange.
                flow.state |= ASSURED;
            }
            harness.change(&flow);
        }
    }
}

/// Returns the client of each entry.
fn clients(harness: &Harness, family: Family) -> Vec<SocketAddr> {
    harness.flows(family).iter().map(|flow| flow.client).collect()
}

fn exchanges(family: Family, harness: &mut Harness) {
    let scene = Scene::new(family, UDP, harness);
    (0..64).for_each(|n| scene.establish(harness, n));
    // Half of the flows had one exchange 20 seconds ago; the others were in use for 10 seconds until then.
    age(harness, family, |number| Some([if number % 2 == 0 { 201 } else { 300 }, 200]));
    let before = clients(harness, family);
    (100..132).for_each(|n| scene.establish(harness, n));
    assert_eq!(harness.reasons(), []);
    for (number, (before, after)) in before.into_iter().zip(clients(harness, family)).enumerate() {
        assert_eq!(before == after, number % 2 == 1, "{number}: {before}, then {after}");
    }
}

fn waiting(family: Family, harness: &mut Harness) {
    let scene = Scene::new(family, UDP, harness);
    (0..64).for_each(|n| assert!(scene.sends(harness, n, 0)));
    // Every second flow has waited for two seconds.
    age(harness, family, |number| (number % 2 == 1).then_some([20, 20]));
    let before = clients(harness, family);
    (100..132).for_each(|n| assert!(scene.sends(harness, n, 0)));
    for (number, (before, after)) in before.into_iter().zip(clients(harness, family)).enumerate() {
        assert_eq!(before == after, number % 2 == 0, "{number}: {before}, then {after}");
    }
}

/// Senders of datagrams without replies, and more of them in a row than a new flow examines near the clock hand.
fn active_side_by_side(family: Family, harness: &mut Harness) {
    let scene = Scene::new(family, UDP, harness);
    (0..1024).for_each(|n| assert!(scene.sends(harness, n, 0)));
    age(harness, family, |number| (number >= 64).then_some([20, 20]));
    let before = clients(harness, family);
    (2000..2500).for_each(|n| assert!(scene.sends(harness, n, 0)));
    let after = clients(harness, family);
    assert_eq!(before[..64], after[..64]);
    assert_eq!(before.iter().zip(&after).filter(|(before, after)| before != after).count(), 500);
}

fn among_streams(family: Family, harness: &mut Harness) {
    let scene = Scene::new(family, UDP, harness);
    (0..64).for_each(|n| scene.establish(harness, n));
    // Three of four flows had more than one exchange.
    age(harness, family, |number| Some([if number % 4 == 0 { 201 } else { 300 }, 200]));
    (100..116).for_each(|n| assert!(scene.sends(harness, n, 0)));
    (100..116).for_each(|n| assert!(scene.answers(harness, n, 0), "{n} gave way"));
}

/// Each CPU takes windows of 16 entries from the clock hand. At the end of its window, it finds the entries that another
/// CPU has taken since.
fn two_cpus(family: Family, harness: &mut Harness) {
    let &[first, second, ..] = &allowed()[..] else { panic!("this needs two CPUs") };
    let scene = Scene::new(family, UDP, harness);
    stay_on(first);
    (0..64).for_each(|n| scene.establish(harness, n));
    // All flows had one exchange, except the last one of the first window, which had more.
    age(harness, family, |number| Some([if number == 15 { 300 } else { 201 }, 200]));
    (100..115).for_each(|n| scene.establish(harness, n));
    stay_on(second);
    (200..208).for_each(|n| assert!(scene.sends(harness, n, 0)));
    stay_on(first);
    assert!(scene.sends(harness, 300, 0));
    (200..208).for_each(|n| assert!(scene.answers(harness, n, 0), "{n} gave way"));
}
