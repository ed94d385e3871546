//! First packets: which ones begin a flow, which ones are refused and why, and which ones are left to others.

use proxy_common::Address as _;
use proxy_common::config::{CONFIG_DETECT_LOCAL, CONFIG_MASQUERADE_ALL, CONFIG_OTHER_PROXY};
use proxy_common::conntrack::is_watched;
use proxy_common::flow::{STATE_LOCAL, STATE_SNAT, STATE_WATCH, WATCH_OUTSIDE};
use proxy_common::node::{Cidr, DEVICE_GUEST};
use proxy_common::service::{
    KIND_ADDRESS, SCOPE_EXTERNAL, SERVICE_EJECTS, SERVICE_SCOPED, SERVICE_SOURCE_RANGES,
};

use super::*;
use crate::host::maps::at;

const ACK: Shape = Shape { flags: 0x10, ..SYN };

fn service() -> ServiceEntry {
    ServiceEntry { id: 1, slot_base: 7, slot_count: 1, kind: KIND_CLUSTER_IP, ..ServiceEntry::NONE }
}

fn set<F: Net>(maps: HostMaps<F>, entry: ServiceEntry) {
    let (addr, port) = frontend::<F>();
    maps.add_service(ServiceKey::internal(addr, port, PROTO_TCP), entry);
}

fn flow<F: Net>(maps: HostMaps<F>) -> Option<FlowEntry<F::Words>> {
    let flows = live(maps);
    assert!(flows.len() <= 1);
    flows.first().copied()
}

/// Sends a client's packet to the frontend. Returns the verdict, and whether the packet is unchanged.
fn send<F: Net>(maps: HostMaps<F>, device: u32, client: End<F>, shape: Shape) -> (i32, bool) {
    let bytes = packet::<F>(client, frontend::<F>(), shape);
    let (verdict, skb) = run_over(Hook::Ingress, maps, device, &bytes);
    (verdict, skb.wire() == bytes)
}

fn everything_of_pods<F: Net>() -> Cidr<F::Words> {
    Cidr { addr: F::Words::ZERO, mask: F::Words::ZERO }
}

/// Where the client and the endpoint are decides on SNAT.
fn snat_or_not<F: Net>() {
    let bits = |backend_flags, device, client, config| {
        let maps = maps::<F>(backend_flags);
        maps.edit_config(|entry| entry.flags |= config);
        let hook = if device == 0 { Hook::Egress } else { Hook::Ingress };
        run_over(hook, maps, device, &packet::<F>(client, frontend::<F>(), SYN));
        flow(maps).unwrap().bits() & (STATE_SNAT | STATE_LOCAL)
    };
    let client = client::<F>();
    assert_eq!(bits(0, UPLINK, client, 0), STATE_SNAT);
    assert_eq!(bits(BACKEND_LOCAL, UPLINK, client, 0), 0);
    assert_eq!(bits(0, POD, client, 0), 0);
    assert_eq!(bits(0, POD, client, CONFIG_MASQUERADE_ALL), STATE_SNAT);
    assert_eq!(bits(BACKEND_LOCAL, POD, client, CONFIG_MASQUERADE_ALL), 0, "through the FORWARD chain");
    assert_eq!(bits(BACKEND_LOCAL, POD, (backend::<F>().0, 4000), 0), STATE_SNAT, "hairpin");
    assert_eq!(bits(0, 0, (node::<F>(), 4000), CONFIG_MASQUERADE_ALL), STATE_SNAT | STATE_LOCAL);
}

families!(snat_is_used_where_the_reply_would_not_come_back = snat_or_not());

/// Without an address of this node there is no SNAT.
fn no_source<F: Net>() {
    let maps = maps::<F>(0);
    maps.set_node(NodeEntry::UNKNOWN);
    assert_eq!(send(maps, UPLINK, client::<F>(), SYN), (DROP, true));
    assert_eq!(maps.count_of(Reason::NoRoute), 1);
    assert_eq!(send(maps, POD, client::<F>(), SYN).0, NEXT);
    assert!(flow(maps).is_some());
}

families!(without_a_source_address_nothing_is_forwarded = no_source());

/// Clients inside and outside have their own endpoints, and a flow notes who its client is.
fn scopes<F: Net>() {
    for (device, pods, config, is_outside) in [
        (UPLINK, Cidr::NONE, 0, true),
        (UPLINK, everything_of_pods::<F>(), 0, false),
        (POD, Cidr::NONE, 0, false),
        (POD, Cidr::NONE, CONFIG_DETECT_LOCAL, true),
        (POD, everything_of_pods::<F>(), CONFIG_DETECT_LOCAL, false),
    ] {
        let maps = maps::<F>(BACKEND_LOCAL);
        maps.edit_config(|entry| entry.flags |= config);
        maps.set_node(NodeEntry { source: node::<F>(), pods, ..NodeEntry::UNKNOWN });
        let (addr, port) = frontend::<F>();
        let key = ServiceKey { scope: SCOPE_EXTERNAL, ..ServiceKey::internal(addr, port, PROTO_TCP) };
        maps.add_service(key, ServiceEntry { flags: SERVICE_EJECTS, ..service() });
        let flags = SERVICE_EJECTS | SERVICE_SCOPED;
        set(maps, ServiceEntry { slot_base: 30, flags, ..service() });
        add_endpoint(maps, 20, (F::addr(3), 8080), PROTO_TCP);
        maps.set_slots(30, &[20]);
        // A pod's source at an uplink has to have its route there.
        run_edited(Hook::Ingress, maps, device, &packet::<F>(client::<F>(), frontend::<F>(), SYN), |skb| {
            skb.routes.set_default(Some(Route { ifindex: device, ..route() }));
        });
        let flow = flow(maps).unwrap();
        assert_eq!(flow.backend_id, if is_outside { 7 } else { 20 }, "{device} {config:#x}");
        assert_eq!(flow.bits() & STATE_WATCH == WATCH_OUTSIDE, is_outside);
        assert!(is_watched(flow.bits()));
    }
}

families!(each_scope_has_its_endpoints = scopes());

/// Segments in the middle of a connection begin a flow; those that end one do not. Beside another proxy, only SYNs begin one.
fn which_segments_begin<F: Net>() {
    let fin = Shape { flags: 0x11, ..SYN };
    let reset = Shape { flags: 4, ..SYN };
    for (config, shape, verdict, begins) in [
        (0, SYN, NEXT, true),
        (0, ACK, NEXT, true),
        (0, fin, DROP, false),
        (0, reset, DROP, false),
        (0, SYN_ACK, DROP, false),
        (CONFIG_OTHER_PROXY, SYN, NEXT, true),
        (CONFIG_OTHER_PROXY, ACK, NEXT, false),
        (CONFIG_OTHER_PROXY, fin, NEXT, false),
        (CONFIG_OTHER_PROXY, UDP, NEXT, true),
        (0, UDP, NEXT, true),
    ] {
        let maps = maps::<F>(BACKEND_LOCAL);
        maps.edit_config(|entry| entry.flags |= config);
        assert_eq!(send(maps, POD, client::<F>(), shape), (verdict, !begins), "{config} {:#x}", shape.flags);
        assert_eq!(flow(maps).is_some(), begins);
        assert_eq!(maps.count_of(Reason::InvalidState), u64::from(verdict == DROP));
    }
    // Without an endpoint, the reason is another one.
    let maps = maps::<F>(BACKEND_LOCAL);
    set(maps, ServiceEntry { slot_count: 0, ..service() });
    send(maps, POD, client::<F>(), fin);
    assert_eq!((maps.count_of(Reason::InvalidState), maps.count_of(Reason::NoEndpoint)), (0, 1));
}

families!(a_connection_begins_with_a_syn_or_in_its_middle = which_segments_begin());

/// Another uplink.
const SECOND: u32 = 77;

/// Sources that no client can have. Packets that go up the stack are left to the kernel's own check.
fn sources_that_cannot_be<F: Net>() {
    let multicast = if F::HEADER == 20 {
        F::Words::from_words([u32::from_ne_bytes([224, 0, 0, 5]), 0, 0, 0])
    } else {
        F::Words::from_words([u32::from_ne_bytes([0xff, 2, 0, 0]), 0, 0, u32::from_ne_bytes([0, 0, 0, 5])])
    };
    for source in [multicast, node::<F>()] {
        for (backend_flags, device, is_refused) in
            [(0, UPLINK, true), (BACKEND_LOCAL, UPLINK, true), (BACKEND_LOCAL, POD, false), (0, POD, false)]
        {
            let maps = maps::<F>(backend_flags);
            let (verdict, _) = send(maps, device, (source, 4000), SYN);
            assert_eq!(verdict == DROP, is_refused);
            assert_eq!(maps.count_of(Reason::MartianSource), u64::from(is_refused));
        }
        // With SNAT, the packet passes the kernel's check by.
        let maps = maps::<F>(0);
        maps.edit_config(|entry| entry.flags |= CONFIG_MASQUERADE_ALL);
        assert_eq!(send(maps, POD, (source, 4000), SYN).0, DROP);
    }
    // A pod's address at an uplink: its route has to lead to an uplink.
    for (ifindex, is_refused) in
        [(Some(UPLINK), false), (Some(SECOND), false), (Some(POD), true), (None, true)]
    {
        let maps = maps::<F>(BACKEND_LOCAL);
        maps.edit_config(|config| config.uplinks = [UPLINK, SECOND, 0]);
        let pods = everything_of_pods::<F>();
        maps.set_node(NodeEntry { source: node::<F>(), pods, ..NodeEntry::UNKNOWN });
        let bytes = packet::<F>(client::<F>(), frontend::<F>(), SYN);
        let (verdict, _) = run_edited(Hook::Ingress, maps, UPLINK, &bytes, |skb| {
            // Whatever the length: the packet itself is delivered here.
            skb.routes.set_default(ifindex.map(|ifindex| Route { ifindex, mtu: 20, ..route() }));
        });
        assert_eq!(verdict == DROP, is_refused, "{ifindex:?}");
        assert_eq!(maps.count_of(Reason::MartianSource), u64::from(is_refused));
    }
}

/// The device of another container.
const OTHER_POD: u32 = 78;

/// A container sends with an address that is another device's. With SNAT, the endpoint would see the node.
fn forged_sources<F: Net>() {
    const BRIDGE: u32 = 79;
    let hairpin = (backend::<F>().0, 4000);
    for (by, is_forged) in [
        (Some(POD), false),
        (Some(BRIDGE), false),
        (Some(OTHER_POD), true),
        (Some(UPLINK), true),
        (None, true),
    ] {
        for is_guest in [true, false] {
            let maps = maps::<F>(BACKEND_LOCAL);
            maps.add_device(OTHER_POD, DEVICE_GUEST);
            maps.add_device(POD, if is_guest { DEVICE_GUEST } else { 0 });
            let back = by.map(|ifindex| Route { ifindex, ..route() });
            let bytes = packet::<F>(hairpin, frontend::<F>(), SYN);
            // The route to the endpoint is that to the source.
            let (verdict, _) =
                run_edited(Hook::Ingress, maps, POD, &bytes, |skb| skb.routes.set_default(back));
            let is_refused = is_guest && is_forged;
            assert_eq!(maps.count_of(Reason::MartianSource), u64::from(is_refused), "{by:?}");
            assert_eq!(verdict == DROP, is_refused || by.is_none(), "{by:?}");
        }
    }
}

families!(container_with_address_of_another_gets_no_snat = forged_sources());

/// A container sends a packet that looks like one of a flow with SNAT between other machines.
fn forged_segments<F: Net>() {
    let maps = maps::<F>(0);
    maps.add_device(POD, DEVICE_GUEST);
    run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client::<F>(), frontend::<F>(), SYN));
    let known = flow(maps).unwrap();
    let source = (known.source, known.source_port);
    let reply = packet::<F>(backend::<F>(), source, SYN_ACK);
    let segment = packet::<F>(client::<F>(), frontend::<F>(), ACK);
    for (count, forged) in [(1, &reply), (2, &segment)] {
        let by_uplink = Some(Route { ifindex: UPLINK, ..route() });
        let (verdict, _) =
            run_edited(Hook::Ingress, maps, POD, forged, |skb| skb.routes.set_default(by_uplink));
        assert_eq!((verdict, maps.count_of(Reason::MartianSource)), (DROP, count));
        assert_eq!(flow(maps).unwrap().bits(), known.bits());
    }
    for genuine in [reply, segment] {
        assert_eq!(run_over(Hook::Ingress, maps, UPLINK, &genuine).0, REDIRECT);
    }
}

families!(container_cannot_send_into_the_flow_of_others = forged_segments());

/// The kernel forwards no packet with a link-local source.
#[test]
fn link_local_client_reaches_local_endpoints_only() {
    let source = <[u32; 4]>::from_words([u32::from_ne_bytes([0xfe, 0x80, 0, 0]), 0, 0, 9]);
    for (backend_flags, verdict) in [(0, DROP), (BACKEND_LOCAL, NEXT)] {
        let maps = maps::<V6>(backend_flags);
        assert_eq!(send(maps, UPLINK, (source, 4000), SYN).0, verdict);
        assert_eq!(maps.count_of(Reason::MartianSource), u64::from(verdict == DROP));
    }
}

/// RFC 1122, 3.2.2: no ICMP error is sent to such a source.
fn martian_to_an_undefined_port<F: Net>() {
    let (addr, port) = frontend::<F>();
    let martian = <F::Words>::from_words([u32::from_ne_bytes([0xff; 4]); 4]);
    for (source, verdict, reason) in
        [(martian, DROP, Reason::MartianSource), (client::<F>().0, REDIRECT, Reason::UndefinedPort)]
    {
        let maps = maps::<F>(BACKEND_LOCAL);
        let mut entry = NodeEntry { source: node::<F>(), service_cidr_count: 1, ..NodeEntry::UNKNOWN };
        entry.service_cidrs[0] = Cidr { addr, mask: F::Words::ONES };
        maps.set_node(entry);
        let service = ServiceEntry { kind: KIND_ADDRESS, ..ServiceEntry::NONE };
        maps.add_service(ServiceKey::internal(addr, 0, 0), service);
        let bytes = packet::<F>((source, 4000), (addr, port + 1), UDP);
        assert_eq!(run_over(Hook::Ingress, maps, UPLINK, &bytes).0, verdict);
        assert_eq!(maps.count_of(reason), 1);
    }
}

families!(martian_source_gets_no_answer_from_an_undefined_port = martian_to_an_undefined_port());

families!(martian_sources_begin_no_flow = sources_that_cannot_be());

fn source_ranges<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    set(maps, ServiceEntry { flags: SERVICE_SOURCE_RANGES, ranges: 9, ..service() });
    assert_eq!(send(maps, POD, client::<F>(), SYN).0, DROP);
    assert_eq!((maps.count_of(Reason::SourceNotAllowed), flow(maps).is_some()), (1, false));
    maps.add_source_range(9, Cidr { addr: client::<F>().0, mask: F::Words::ONES });
    assert_eq!(send(maps, POD, client::<F>(), SYN).0, NEXT);
    // An existing flow continues after its range was removed.
    maps.remove_source_range(9, Cidr { addr: client::<F>().0, mask: F::Words::ONES });
    assert_eq!(send(maps, POD, client::<F>(), SYN), (NEXT, false));
    assert_eq!(maps.count_of(Reason::SourceNotAllowed), 1);
}

families!(only_clients_of_the_source_ranges_begin_a_flow = source_ranges());

/// Clients of one moment, and connections of one client, are spread over the endpoints.
fn many_endpoints<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    maps.set_config(NodeConfig {
        uplinks: [UPLINK, 0, 0],
        ..NodeConfig::new(HZ, 1024, buckets_for(1024), 1)
    });
    // The time adds to the randomness, and does not replace it.
    maps.advance(0_u32.wrapping_sub(maps.now()));
    let endpoint = |number: u8| (F::addr(110 + number), 8080);
    for number in 0..8 {
        add_endpoint(maps, 20 + u32::from(number), endpoint(number), PROTO_TCP);
    }
    maps.set_slots(30, &core::array::from_fn::<u32, 8, _>(|number| 20 + number as u32));
    set(maps, ServiceEntry { slot_base: 30, slot_count: 8, ..service() });
    let mut connections = [0; 8];
    for port in 1000..1400 {
        let client = (client::<F>().0, port);
        let (_, skb) = run_over(Hook::Ingress, maps, POD, &packet::<F>(client, frontend::<F>(), SYN));
        let is_at = |number: &u8| skb.wire() == packet::<F>(client, endpoint(*number), SYN);
        connections[usize::from((0..8).find(is_at).unwrap())] += 1;
    }
    // 50 are expected, with a standard deviation of 6.6.
    assert!(connections.iter().all(|number| (20..=80).contains(number)), "{connections:?}");
}

families!(connections_are_spread_over_the_endpoints = many_endpoints());

/// A client sends from one port; each time, its last flow has expired.
fn one_port<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let endpoint = |number: u8| (F::addr(110 + number), 8080);
    for number in 0..8 {
        add_endpoint(maps, 20 + u32::from(number), endpoint(number), PROTO_UDP);
    }
    maps.set_slots(30, &core::array::from_fn::<u32, 8, _>(|number| 20 + number as u32));
    let (addr, port) = frontend::<F>();
    let entry = ServiceEntry { slot_base: 30, slot_count: 8, ..service() };
    maps.add_service(ServiceKey::internal(addr, port, PROTO_UDP), entry);
    for _ in 0..60 {
        assert_eq!(send(maps, POD, client::<F>(), UDP), (NEXT, false));
        maps.advance(301 * HZ);
    }
    assert_eq!(maps.stats_of(1).connections, 60);
    let used = (20..28).filter(|id| maps.connections_to(*id) != 0).count();
    assert!(used > 3, "{used}");
}

families!(flows_from_one_port_are_spread_over_the_endpoints = one_port());

/// A client stays with its endpoint for a time; the SYN of a connection that exists changes nothing.
fn session_affinity<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let other = F::addr(3);
    add_endpoint(maps, 20, (other, 8080), PROTO_TCP);
    maps.set_slots(30, &[7, 20]);
    set(maps, ServiceEntry { slot_base: 30, slot_count: 2, affinity_secs: 10, ..service() });
    let endpoint = |port| {
        let client = (client::<F>().0, port);
        let (_, skb) = run_over(Hook::Ingress, maps, POD, &packet::<F>(client, frontend::<F>(), SYN));
        let of = |end| skb.wire() == packet::<F>(client, end, SYN);
        assert!(of(backend::<F>()) != of((other, 8080)));
        of(backend::<F>())
    };
    let first = endpoint(4000);
    for port in 4001..4020 {
        assert_eq!(endpoint(port), first);
    }
    // The time begins again with each new connection, and not with a SYN that is sent again.
    let last_used = || at!(maps, affinity).values().next().unwrap().last_used;
    let begun = maps.now();
    maps.advance(9 * HZ);
    endpoint(4000);
    assert_eq!(last_used(), begun);
    assert_eq!((endpoint(4100), last_used()), (first, maps.now()));
    maps.advance(10 * HZ);
    assert_eq!(endpoint(4101), first);
    let later: Vec<bool> = (5000..5040)
        .map(|port| {
            maps.advance(11 * HZ);
            endpoint(port)
        })
        .collect();
    assert!(later.contains(&true) && later.contains(&false), "the time is over");
}

families!(a_client_stays_with_its_endpoint = session_affinity());
