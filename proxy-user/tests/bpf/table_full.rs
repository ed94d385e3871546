//! A table of flows that is full: who stays, who goes, who is turned away.

use std::net::SocketAddr;

use proxy_common::conntrack::{ASSURED, SEEN_REPLY};
use proxy_common::reason::Reason;

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

use crate::Scenario;
use crate::packet::{ACK, Packet, RST, SYN, TCP, UDP};
use crate::rig::{DROP, Family, HZ, Hook, NEXT, Rig, Service};

pub const SCENARIOS: [Scenario; 12] = [
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
    Scenario { name: "half-open flows give way", flows: 256, test: half_open },
    Scenario { name: "a flow that is over gives way before a half-open one", flows: 8, test: over_first },
    Scenario { name: "expired flows give way", flows: 64, test: expired },
    Scenario { name: "half-open flows that were answered give way", flows: 256, test: answered_half_open },
    Scenario {
        name: "UDP that was answered a moment ago gives way to no less",
        flows: 64,
        test: answered_udp,
    },
    Scenario {
        name: "one exchange of UDP gives way after a second, a stream does not",
        flows: 64,
        test: exchanges,
    },
    Scenario {
        name: "who waits for an answer stays while others have waited longer",
        flows: 64,
        test: waiting,
    },
    Scenario { name: "who waits stays among streams", flows: 64, test: among_streams },
    Scenario {
        name: "who waits stays, though another CPU finds nothing else close by",
        flows: 64,
        test: two_cpus,
    },
];

const ID: u32 = 7;

struct Scene {
    family: Family,
    proto: u8,
}

/// Keeps this thread on its CPU: what is left of the entries that a CPU looks at next is no other CPU's.
fn stay() {
    stay_on(sched_getcpu());
}

fn stay_on(cpu: usize) {
    let mut cpus = CpuSet::new();
    cpus.set(cpu);
    sched_setaffinity(None, &cpus).unwrap();
}

impl Scene {
    fn new(family: Family, proto: u8, rig: &mut Rig) -> Self {
        stay();
        rig.serve(&[Service::new(ID, proto, family.frontend(1, 80), &[family.pod(1, 8080)])]);
        Self { family, proto }
    }

    /// A packet of the n-th client.
    fn packet(&self, n: u32, flags: u8) -> Packet {
        let client = self.family.client((n / 1000) as u16 + 1, (n % 1000) as u16 + 20_000);
        Packet { flags, ..Packet::new(self.proto, client, self.family.frontend(1, 80)) }
    }

    /// Whether the n-th client's packet is translated; otherwise it must be dropped as it is.
    fn sends(&self, rig: &mut Rig, n: u32, flags: u8) -> bool {
        let packet = self.packet(n, flags);
        let seen = rig.run(Hook::Ingress, &packet.bytes());
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

    /// Whether an answer to the n-th client is translated.
    fn answers(&self, rig: &mut Rig, n: u32, flags: u8) -> bool {
        let reply = Packet { flags, ..self.packet(n, 0).to(self.family.pod(1, 8080)).back() };
        let seen = rig.run(Hook::Egress, &reply.bytes());
        assert_eq!(seen.verdict, NEXT);
        seen.packet == reply.from(self.family.frontend(1, 80)).bytes()
    }

    fn establish(&self, rig: &mut Rig, n: u32) {
        assert!(self.sends(rig, n, SYN) && self.answers(rig, n, SYN | ACK), "{n}");
        if self.proto == TCP {
            assert!(self.sends(rig, n, ACK), "{n}");
        }
    }
}

/// More established flows in a row than are looked at near the clock hand.
fn side_by_side(family: Family, rig: &mut Rig) {
    let scene = Scene::new(family, TCP, rig);
    (0..768).for_each(|n| scene.establish(rig, n));
    for n in 1000..5000 {
        assert!(scene.sends(rig, n, SYN), "{n}");
    }
    assert_eq!(rig.reasons(), []);
    assert!((0..768).all(|n| scene.sends(rig, n, ACK) && scene.answers(rig, n, ACK)));
}

fn all_established(family: Family, rig: &mut Rig) {
    let scene = Scene::new(family, TCP, rig);
    (0..256).for_each(|n| scene.establish(rig, n));
    for n in 1000..1000 + 2560 {
        assert!(!scene.sends(rig, n, SYN), "{n}");
    }
    assert_eq!(rig.reasons(), [(Reason::FlowTableFull, 2560)]);
    assert_eq!(rig.refusals(), [(ID, Reason::FlowTableFull, 2560)]);
    for n in 0..256 {
        assert!(scene.sends(rig, n, ACK) && scene.answers(rig, n, ACK), "{n} was pushed out");
    }
    assert_eq!(rig.stats(ID).connections, 256);
    assert_eq!(rig.key_count(family), 512);
}

fn mostly_established(family: Family, rig: &mut Rig) {
    let scene = Scene::new(family, TCP, rig);
    // Every fourth place stays with an unreplied flow.
    for n in 0..256 {
        if n % 4 == 0 { assert!(scene.sends(rig, n, SYN)) } else { scene.establish(rig, n) }
    }
    for n in 1000..1000 + 2560 {
        assert!(scene.sends(rig, n, SYN), "{n} found no place");
    }
    for n in (0..256).filter(|n| n % 4 != 0) {
        assert!(scene.sends(rig, n, ACK) && scene.answers(rig, n, ACK), "{n} was pushed out");
    }
    assert_eq!(rig.stats(ID).connections, 256 + 2560, "no established flow began anew");
    assert_eq!((rig.reasons(), rig.key_count(family)), (vec![], 512));
}

fn half_open(family: Family, rig: &mut Rig) {
    let scene = Scene::new(family, TCP, rig);
    for n in 0..2560 {
        assert!(scene.sends(rig, n, SYN), "{n}");
        let keys = rig.key_count(family);
        assert_eq!(keys, 2 * (n as usize + 1).min(256), "the keys of those that gave way are gone");
    }
    assert!(scene.answers(rig, 2559, SYN | ACK), "the last one is there");
    assert!(!scene.answers(rig, 0, SYN | ACK), "the first one is not");
}

fn over_first(family: Family, rig: &mut Rig) {
    let scene = Scene::new(family, TCP, rig);
    (0..8).for_each(|n| assert!(scene.sends(rig, n, SYN)));
    assert!(scene.answers(rig, 5, RST | ACK));
    assert!(scene.sends(rig, 100, SYN));
    for n in 0..8 {
        assert_eq!(scene.answers(rig, n, SYN | ACK), n != 5, "{n}");
    }
}

fn expired(family: Family, rig: &mut Rig) {
    let scene = Scene::new(family, TCP, rig);
    (0..64).for_each(|n| scene.establish(rig, n));
    assert!(!scene.sends(rig, 100, SYN));
    let now = rig.now();
    for mut flow in rig.flows(family) {
        flow.last_seen = now.wrapping_sub(86_401 * HZ);
        rig.change(&flow);
    }
    (200..264).for_each(|n| scene.establish(rig, n));
    assert!(!scene.sends(rig, 300, SYN));
    assert_eq!(rig.key_count(family), 128);
}

fn answered_udp(family: Family, rig: &mut Rig) {
    let scene = Scene::new(family, UDP, rig);
    (0..64).for_each(|n| scene.establish(rig, n));
    // Half of them were answered a moment ago, the others wait for an answer for longer than a second.
    let now = rig.now();
    for (number, mut flow) in rig.flows(family).into_iter().enumerate() {
        if number % 2 == 1 {
            flow.state &= !SEEN_REPLY;
            flow.last_seen = now.wrapping_sub(2 * HZ);
            rig.change(&flow);
        }
    }
    let before = clients(rig, family);
    (100..132).for_each(|n| assert!(scene.sends(rig, n, 0)));
    for (number, (before, after)) in before.into_iter().zip(clients(rig, family)).enumerate() {
        assert_eq!(before == after, number % 2 == 0, "{number}: {before}, then {after}");
    }
    assert_eq!(rig.reasons(), []);
}

/// A flood whose SYNs an endpoint answers, and whose sources never answer that, takes no place from anybody for long.
fn answered_half_open(family: Family, rig: &mut Rig) {
    let scene = Scene::new(family, TCP, rig);
    // Fewer than a new flow looks at before it calls the table full.
    (0..48).for_each(|n| scene.establish(rig, n));
    for n in 1000..1000 + 2560 {
        assert!(scene.sends(rig, n, SYN) && scene.answers(rig, n, SYN | ACK), "{n} found no place");
    }
    (4000..4048).for_each(|n| scene.establish(rig, n));
    for n in (0..48).chain(4000..4048) {
        assert!(scene.sends(rig, n, ACK) && scene.answers(rig, n, ACK), "{n} was evicted");
    }
    assert_eq!(rig.reasons(), []);
}

/// Lets flows have begun and been seen that many tenths of a second ago.
fn age(rig: &mut Rig, family: Family, ages: impl Fn(usize) -> Option<[u32; 2]>) {
    let now = rig.now();
    for (number, mut flow) in rig.flows(family).into_iter().enumerate() {
        if let Some([created, last_seen]) = ages(number) {
            flow.created = now.wrapping_sub(created * HZ / 10);
            flow.last_seen = now.wrapping_sub(last_seen * HZ / 10);
            if created - last_seen > 20 {
                // More than one exchange.
                flow.state |= ASSURED;
            }
            rig.change(&flow);
        }
    }
}

/// Who has which entry.
fn clients(rig: &Rig, family: Family) -> Vec<SocketAddr> {
    rig.flows(family).iter().map(|flow| flow.client).collect()
}

fn exchanges(family: Family, rig: &mut Rig) {
    let scene = Scene::new(family, UDP, rig);
    (0..64).for_each(|n| scene.establish(rig, n));
    // Half of them had one exchange twenty seconds ago, the others were in use for ten seconds before.
    age(rig, family, |number| Some([if number % 2 == 0 { 201 } else { 300 }, 200]));
    let before = clients(rig, family);
    (100..132).for_each(|n| scene.establish(rig, n));
    assert_eq!(rig.reasons(), []);
    for (number, (before, after)) in before.into_iter().zip(clients(rig, family)).enumerate() {
        assert_eq!(before == after, number % 2 == 1, "{number}: {before}, then {after}");
    }
}

fn waiting(family: Family, rig: &mut Rig) {
    let scene = Scene::new(family, UDP, rig);
    (0..64).for_each(|n| assert!(scene.sends(rig, n, 0)));
    // Every other one has waited for two seconds.
    age(rig, family, |number| (number % 2 == 1).then_some([20, 20]));
    let before = clients(rig, family);
    (100..132).for_each(|n| assert!(scene.sends(rig, n, 0)));
    for (number, (before, after)) in before.into_iter().zip(clients(rig, family)).enumerate() {
        assert_eq!(before == after, number % 2 == 0, "{number}: {before}, then {after}");
    }
}

fn among_streams(family: Family, rig: &mut Rig) {
    let scene = Scene::new(family, UDP, rig);
    (0..64).for_each(|n| scene.establish(rig, n));
    // Three of four go on.
    age(rig, family, |number| Some([if number % 4 == 0 { 201 } else { 300 }, 200]));
    (100..116).for_each(|n| assert!(scene.sends(rig, n, 0)));
    (100..116).for_each(|n| assert!(scene.answers(rig, n, 0), "{n} gave way"));
}

/// CPUs take entries from the clock hand in blocks of 16, and one that comes to the end of its block meets those that
/// another has taken since.
fn two_cpus(family: Family, rig: &mut Rig) {
    let mut all = CpuSet::new();
    (0..CpuSet::MAX_CPU).for_each(|cpu| all.set(cpu));
    sched_setaffinity(None, &all).unwrap();
    let allowed = sched_getaffinity(None).unwrap();
    let cpus: Vec<_> = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect();
    let &[first, second, ..] = &cpus[..] else { panic!("this needs two CPUs") };
    let scene = Scene::new(family, UDP, rig);
    stay_on(first);
    (0..64).for_each(|n| scene.establish(rig, n));
    // All had one exchange; but the last one of the first block goes on.
    age(rig, family, |number| Some([if number == 15 { 300 } else { 201 }, 200]));
    (100..115).for_each(|n| scene.establish(rig, n));
    stay_on(second);
    (200..208).for_each(|n| assert!(scene.sends(rig, n, 0)));
    stay_on(first);
    assert!(scene.sends(rig, 300, 0));
    (200..208).for_each(|n| assert!(scene.answers(rig, n, 0), "{n} gave way"));
    sched_setaffinity(None, &allowed).unwrap();
}
