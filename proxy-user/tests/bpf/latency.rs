//! How long endpoints take to answer, with `--connect-latency`.

use std::thread::sleep;
use std::time::Duration;

use proxy_common::latency::{LatencyEntry, bucket};

use crate::Scenario;
use crate::packet::{ACK, Packet, RST, SYN, TCP, UDP};
use crate::rig::{Family, Hook, NEXT, Rig, Service};

pub const SCENARIOS: [Scenario; 3] = [
    scenario("the time from a SYN to its answer is measured once", answered),
    scenario("a refusal and a SYN that comes again are counted, and not timed", refused),
    scenario("only connections that begin with a SYN are measured", others),
];

const fn scenario(name: &'static str, test: fn(Family, &mut Rig)) -> Scenario {
    Scenario { name, flows: 1024, test }
}

const ID: u32 = 9;

fn serve(family: Family, rig: &mut Rig, proto: u8) -> Service {
    let service = Service::new(ID, proto, family.frontend(1, 80), &[family.pod(1, 8080)]);
    rig.serve(std::slice::from_ref(&service));
    service
}

fn passes(rig: &mut Rig, hook: Hook, packet: &Packet) {
    let seen = rig.run(hook, &packet.bytes());
    assert_eq!(seen.verdict, NEXT, "{:?}", rig.reasons());
}

/// What was measured: of the Service, and of its one endpoint, which has all of it.
fn measured(rig: &Rig, service: &Service) -> LatencyEntry {
    let mut all = rig.view().latency().unwrap();
    let of_service = all.remove(&(ID, 0)).unwrap_or_default();
    let of_endpoint = all.remove(&(ID, service.backends[0].0)).unwrap_or_default();
    assert_eq!(of_service, of_endpoint);
    of_service
}

fn answered(family: Family, rig: &mut Rig) {
    let service = serve(family, rig, TCP);
    let pod = family.pod(1, 8080);
    let syn = Packet::tcp(SYN, family.client(1, 40_000), service.frontend);
    passes(rig, Hook::Ingress, &syn);
    assert_eq!(measured(rig, &service), LatencyEntry::default(), "not before the answer");
    let pause = Duration::from_millis(20);
    sleep(pause);
    let answer = Packet { flags: SYN | ACK, seq: 7, ack: syn.seq.wrapping_add(1), ..syn.to(pod).back() };
    passes(rig, Hook::Egress, &answer);
    let entry = measured(rig, &service);
    let shortest = pause.as_micros() as u64;
    assert!(entry.sum_us >= shortest, "{entry:?}");
    assert_eq!(entry.answered(), 1);
    assert!(entry.buckets[bucket(entry.sum_us)] == 1 && (entry.refused, entry.retransmits) == (0, 0));
    // The answer again, and what follows, belong to the same connection.
    passes(rig, Hook::Egress, &answer);
    passes(rig, Hook::Ingress, &Packet { flags: ACK, seq: syn.seq.wrapping_add(1), ack: 8, ..syn });
    assert_eq!(measured(rig, &service), entry);
}

fn refused(family: Family, rig: &mut Rig) {
    let service = serve(family, rig, TCP);
    let pod = family.pod(1, 8080);
    let syn = Packet::tcp(SYN, family.client(1, 40_001), service.frontend);
    passes(rig, Hook::Ingress, &syn);
    passes(rig, Hook::Ingress, &syn);
    let entry = measured(rig, &service);
    assert_eq!((entry.retransmits, entry.refused, entry.answered()), (1, 0, 0));
    let reset = Packet { flags: RST | ACK, seq: 0, ack: syn.seq.wrapping_add(1), ..syn.to(pod).back() };
    passes(rig, Hook::Egress, &reset);
    passes(rig, Hook::Egress, &reset);
    let entry = measured(rig, &service);
    assert_eq!((entry.retransmits, entry.refused, entry.answered()), (1, 1, 0));
}

fn others(family: Family, rig: &mut Rig) {
    let service = serve(family, rig, UDP);
    let ask = Packet::udp(family.client(1, 40_002), service.frontend);
    passes(rig, Hook::Ingress, &ask);
    passes(rig, Hook::Ingress, &ask);
    passes(rig, Hook::Egress, &ask.to(family.pod(1, 8080)).back());
    assert_eq!(measured(rig, &service), LatencyEntry::default());
}
