//! Events that listeners get, and that nothing is recorded without listeners.

use std::net::{IpAddr, SocketAddr};

use proxy_common::event::{
    EVENT_DROP, EVENT_NEW_FLOW, EVENT_PASS, EVENT_REJECT, Event, HOOK_PACKET, LEASE_NANOSECONDS, LEASES,
    Monitor,
};
use proxy_common::reason::Reason;
use proxy_common::service::SERVICE_DROP_WHEN_EMPTY;
use proxy_user::maps::view::ViewError;

use crate::Scenario;
use proxy_testbed::Family;
use proxy_testbed::harness::{Harness, Hook, NEXT, Service};
use proxy_testbed::packet::{Packet, SYN, TCP};

#[rustfmt::skip]
pub const SCENARIOS: [Scenario; 5] = [
    Scenario { name: "an event has all fields", flows: 64, test: has_all_fields },
    Scenario { name: "every listener gets all refusals, and a sample of new flows", flows: 64, test: several },
    Scenario { name: "a full ring loses events and counts them", flows: 64, test: full },
    Scenario { name: "the history keeps the last refusals, and a flood ends until it is renewed", flows: 64, test: history },
    Scenario { name: "the lease of a killed listener expires", flows: 64, test: killed },
];

fn words(ip: IpAddr) -> [u32; 4] {
    let mut octets = [0; 16];
    match ip {
        IpAddr::V4(ip) => octets[..4].copy_from_slice(&ip.octets()),
        IpAddr::V6(ip) => octets = ip.octets(),
    }
    [0, 4, 8, 12].map(|at| u32::from_ne_bytes(*octets[at..].first_chunk().unwrap()))
}

fn event(family: Family, client: SocketAddr, service: &Service) -> Event {
    Event {
        client: words(client.ip()),
        client_port: client.port(),
        frontend: words(service.frontend.ip()),
        frontend_port: service.frontend.port(),
        service: service.id,
        // Test runs use the loopback device.
        device: 1,
        hook: HOOK_PACKET,
        family: if family == Family::V4 { 4 } else { 6 },
        proto: TCP,
        ..Event::default()
    }
}

fn syn(family: Family, port: u16, service: &Service) -> Vec<u8> {
    Packet::tcp(SYN, family.client(9, port), service.frontend).bytes()
}

fn services(family: Family) -> [Service; 3] {
    let pod = family.pod(1, 8080);
    let local = Service::new(3, TCP, family.frontend(3, 80), &[]);
    [
        Service::new(1, TCP, family.frontend(1, 80), &[pod]),
        Service::new(2, TCP, family.frontend(2, 80), &[]),
        Service { flags: SERVICE_DROP_WHEN_EMPTY, ..local },
    ]
}

fn has_all_fields(family: Family, harness: &mut Harness) {
    let [web, empty, local] = services(family);
    harness.serve(&[web.clone(), empty.clone(), local.clone()]);
    // Without a listener, nothing is recorded.
    harness.run(Hook::Ingress, &syn(family, 999, &empty));
    let mut listener = harness.view().listen(1).unwrap();
    assert_eq!(listener.next_event().unwrap(), None);
    let client = family.client(9, 1000);
    for service in [&web, &empty, &local] {
        harness.run(Hook::Ingress, &syn(family, 1000, service));
    }
    // A packet of a known flow causes no event.
    harness.run(Hook::Ingress, &syn(family, 1000, &web));
    let whole = syn(family, 1000, &web);
    assert_eq!(harness.run(Hook::Ingress, &whole[..whole.len() - 4]).verdict, NEXT);
    let pod = family.pod(1, 8080);
    let expected = [
        Event {
            kind: EVENT_NEW_FLOW,
            backend: words(pod.ip()),
            backend_port: pod.port(),
            backend_id: 16,
            ..event(family, client, &web)
        },
        Event { kind: EVENT_REJECT, reason: Reason::NoEndpoint as u32, ..event(family, client, &empty) },
        Event { kind: EVENT_DROP, reason: Reason::NoLocalEndpoint as u32, ..event(family, client, &local) },
        Event { kind: EVENT_PASS, reason: Reason::Malformed as u32, ..Event::default() },
    ];
    let mut last = 0;
    for expected in expected {
        let found = listener.next_event().unwrap().unwrap();
        assert!(found.time > last, "in order: {found:?}");
        last = found.time;
        assert_eq!(Event { time: 0, ..found }, expected);
    }
    assert_eq!(listener.next_event().unwrap(), None);
    assert_eq!(listener.lost(), 0);
}

fn several(family: Family, harness: &mut Harness) {
    let [web, empty, _] = services(family);
    harness.serve(&[web.clone(), empty.clone()]);
    let count = |listener: &mut proxy_user::maps::view::Listener| {
        let mut kinds = [0; 5];
        while let Some(event) = listener.next_event().unwrap() {
            kinds[usize::from(event.kind)] += 1;
        }
        kinds
    };
    let mut none = harness.view().listen(0).unwrap();
    harness.run(Hook::Ingress, &syn(family, 1, &web));
    harness.run(Hook::Ingress, &syn(family, 1, &empty));
    assert_eq!(count(&mut none), [0, 0, 1, 0, 0], "no new flow is wanted");
    let mut few = harness.view().listen(1 << 30).unwrap();
    let mut all = harness.view().listen(1).unwrap();
    for port in 2..12 {
        harness.run(Hook::Ingress, &syn(family, port, &web));
        harness.run(Hook::Ingress, &syn(family, port, &empty));
    }
    for listener in [&mut all, &mut none, &mut few] {
        assert_eq!(count(listener), [0, 10, 10, 0, 0], "the closest sample counts for all");
    }
    drop(all);
    for port in 12..22 {
        harness.run(Hook::Ingress, &syn(family, port, &web));
    }
    assert_eq!(count(&mut few), [0; 5], "one in a thousand million");
    drop((few, none));
    assert_eq!(harness.monitor().until, 0, "no listener");
    let listeners: Vec<_> = (0..LEASES).map(|_| harness.view().listen(0).unwrap()).collect();
    assert!(matches!(harness.view().listen(0), Err(ViewError::TooMany)));
    drop(listeners);
    drop(harness.view().listen(0).unwrap());
}

fn full(family: Family, harness: &mut Harness) {
    // The packets are dropped, not answered: the limit of ICMP answers would cause events of its own.
    let [_, _, local] = services(family);
    harness.serve(std::slice::from_ref(&local));
    let mut fast = harness.view().listen(1).unwrap();
    let mut slow = harness.view().listen(1).unwrap();
    // The history takes a quarter of the ring, once it is full.
    let held = fast.earlier_events(harness.view()).unwrap().len() as u64;
    let packet = syn(family, 1, &local);
    let (ring, more) = ((1 << 19) / 104, 1000);
    for number in 0..ring + more {
        if number % 500 == 0 {
            fast.renew().unwrap();
        }
        harness.run(Hook::Ingress, &packet);
    }
    fast.renew().unwrap();
    let lost = fast.lost();
    assert!((held + more..held + more + 10).contains(&lost), "{lost} lost, {held} held");
    let drain = |listener: &mut proxy_user::maps::view::Listener| {
        std::iter::from_fn(|| listener.next_event().unwrap()).count() as u64
    };
    assert_eq!(drain(&mut fast) + lost, ring + more);
    for _ in 0..more {
        harness.run(Hook::Ingress, &packet);
    }
    assert_eq!(drain(&mut fast), more);
    // The kernel has overwritten events that the slow listener had not read.
    let seen = drain(&mut slow);
    assert!(seen < ring, "{seen} seen");
    assert_eq!(seen + slow.lost(), ring + more + more, "each event is seen or counted");
}

fn history(family: Family, harness: &mut Harness) {
    let [web, _, local] = services(family);
    harness.serve(&[web.clone(), local.clone()]);
    let mut history = harness.view().keep_events().unwrap();
    history.renew();
    let earlier = |harness: &Harness| {
        let mut listener = harness.view().listen(0).unwrap();
        assert_eq!(listener.next_event().unwrap(), None, "only new events");
        listener.earlier_events(harness.view()).unwrap()
    };
    for port in 1..=20 {
        harness.run(Hook::Ingress, &syn(family, port, &local));
        harness.run(Hook::Ingress, &syn(family, port, &web));
    }
    for _ in 0..2 {
        let mut events = earlier(harness);
        // Another scenario may have left some.
        let events = events.split_off(events.len() - 20);
        let ports: Vec<_> = events.iter().map(|event| event.client_port).collect();
        assert_eq!(ports, (1..=20).collect::<Vec<_>>(), "without new flows");
        assert!(events.iter().all(|event| event.reason == Reason::NoLocalEndpoint as u32));
        history.renew();
    }
    let (packet, lost_before) = (syn(family, 21, &local), harness.monitor().lost);
    for _ in 0..(1 << 19) / 104 + 100 {
        harness.run(Hook::Ingress, &packet);
    }
    let Monitor { until, lost, .. } = harness.monitor();
    assert_eq!((until, lost - lost_before), (0, 1), "the first event without room ends them");
    history.renew();
    harness.run(Hook::Ingress, &syn(family, 22, &local));
    let events = earlier(harness);
    assert_eq!(events.last().map(|event| event.client_port), Some(22));
    assert!((1200..1300).contains(&events.len()), "a quarter of the ring: {}", events.len());
}

fn killed(family: Family, harness: &mut Harness) {
    let [web, empty, _] = services(family);
    harness.serve(&[web, empty.clone()]);
    let listener = harness.view().listen(1).unwrap();
    let mut monitor = harness.monitor();
    assert!(monitor.until != 0 && monitor.leases[0].until == monitor.until);
    std::mem::forget(listener);
    // As if the lease had ended.
    monitor.until -= LEASE_NANOSECONDS;
    monitor.leases[0].until -= LEASE_NANOSECONDS;
    harness.set_monitor(&monitor);
    harness.run(Hook::Ingress, &syn(family, 1, &empty));
    assert_eq!(harness.monitor().until, 0, "the first that comes later switches it off");
    let mut next = harness.view().listen(1).unwrap();
    assert_eq!(next.next_event().unwrap(), None);
    assert_eq!(harness.monitor().leases[1].until, 0, "its lease is taken over");
    harness.run(Hook::Ingress, &syn(family, 2, &empty));
    assert_eq!(next.next_event().unwrap().map(|event| event.kind), Some(EVENT_REJECT));
}
