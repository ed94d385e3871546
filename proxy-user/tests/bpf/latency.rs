//! How long endpoints take to answer, with `--connect-latency`.

use std::thread::sleep;
use std::time::Duration;

use proxy_common::latency::{LatencyEntry, bucket};

use crate::Scenario;
use proxy_testbed::Family;
use proxy_testbed::harness::{HZ, Harness, Hook, NEXT, Service};
use proxy_testbed::packet::{ACK, Packet, RST, SYN, TCP, UDP};

pub const SCENARIOS: [Scenario; 3] = [
    scenario("the time from a SYN to its answer is measured once", answered),
    scenario("a refusal and a SYN that comes again are counted, and not timed", refused),
    scenario("only connections that begin with a SYN are measured", others),
];

const fn scenario(name: &'static str, test: fn(Family, &mut Harness)) -> Scenario {
    Scenario { name, flows: 1024, test }
}

const ID: u32 = 9;

fn serve(family: Family, harness: &mut Harness, proto: u8) -> Service {
    let service = Service::new(ID, proto, family.frontend(1, 80), &[family.pod(1, 8080)]);
    harness.serve(std::slice::from_ref(&service));
    service
}

fn passes(harness: &mut Harness, hook: Hook, packet: &Packet) {
    let seen = harness.run(hook, &packet.bytes());
    assert_eq!(seen.verdict, NEXT, "{:?}", harness.reasons());
}

/// Returns the latencies of the Service, which must be those of its only endpoint.
fn measured(harness: &Harness, service: &Service) -> LatencyEntry {
    let mut all = harness.view().latency().unwrap();
    let of_service = all.remove(&(ID, 0)).unwrap_or_default();
    let of_endpoint = all.remove(&(ID, service.backends[0].0)).unwrap_or_default();
    assert_eq!(of_service, of_endpoint);
    of_service
}

fn answered(family: Family, harness: &mut Harness) {
    let service = serve(family, harness, TCP);
    let pod = family.pod(1, 8080);
    let syn = Packet::tcp(SYN, family.client(1, 40_000), service.frontend);
    passes(harness, Hook::Ingress, &syn);
    assert_eq!(measured(harness, &service), LatencyEntry::default(), "not before the answer");
    let pause = Duration::from_millis(20);
    sleep(pause);
    let answer = Packet { flags: SYN | ACK, seq: 7, ack: syn.seq.wrapping_add(1), ..syn.to(pod).back() };
    passes(harness, Hook::Egress, &answer);
    let entry = measured(harness, &service);
    let shortest = pause.as_micros() as u64;
    assert!(entry.sum_us >= shortest, "{entry:?}");
    assert_eq!(entry.answered(), 1);
    assert!(entry.buckets[bucket(entry.sum_us)] == 1 && (entry.refused, entry.retransmits) == (0, 0));
    // A retransmitted answer and the following segments belong to the same connection.
    passes(harness, Hook::Egress, &answer);
    passes(harness, Hook::Ingress, &Packet { flags: ACK, seq: syn.seq.wrapping_add(1), ack: 8, ..syn });
    assert_eq!(measured(harness, &service), entry);
}

fn refused(family: Family, harness: &mut Harness) {
    let service = serve(family, harness, TCP);
    let pod = family.pod(1, 8080);
    let syn = Packet::tcp(SYN, family.client(1, 40_001), service.frontend);
    passes(harness, Hook::Ingress, &syn);
    // The same packet at the next hook, if XDP has left it to tc.
    passes(harness, Hook::Ingress, &syn);
    assert_eq!(measured(harness, &service).retransmits, 0);
    let mut flow = harness.flow(family);
    flow.last_seen = harness.now().wrapping_sub(HZ);
    harness.change(&flow);
    passes(harness, Hook::Ingress, &syn);
    let entry = measured(harness, &service);
    assert_eq!((entry.retransmits, entry.refused, entry.answered()), (1, 0, 0));
    let reset = Packet { flags: RST | ACK, seq: 0, ack: syn.seq.wrapping_add(1), ..syn.to(pod).back() };
    passes(harness, Hook::Egress, &reset);
    passes(harness, Hook::Egress, &reset);
    let entry = measured(harness, &service);
    assert_eq!((entry.retransmits, entry.refused, entry.answered()), (1, 1, 0));
}

fn others(family: Family, harness: &mut Harness) {
    let service = serve(family, harness, UDP);
    let ask = Packet::udp(family.client(1, 40_002), service.frontend);
    passes(harness, Hook::Ingress, &ask);
    passes(harness, Hook::Ingress, &ask);
    passes(harness, Hook::Egress, &ask.to(family.pod(1, 8080)).back());
    assert_eq!(measured(harness, &service), LatencyEntry::default());
}
