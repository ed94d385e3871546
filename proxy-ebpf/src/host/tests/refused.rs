//! Packets that are refused, by this node or by an endpoint.

use proxy_common::service::SERVICE_EJECTS;

use super::*;

/// Returns an IPv4 packet with four bytes of options added.
fn with_options(mut bytes: Vec<u8>) -> Vec<u8> {
    let at = build::ETHERNET;
    let length = u16::from_be_bytes([bytes[at + 2], bytes[at + 3]]) + 4;
    bytes[at] = 0x46;
    bytes[at + 2..at + 4].copy_from_slice(&length.to_be_bytes());
    bytes.splice(at + 20..at + 20, [1; 4]);
    with_checksum(bytes, 24)
}

/// Returns an IPv4 packet as a fragment. `field`: flags, and the offset in units of eight bytes.
fn fragment(mut bytes: Vec<u8>, field: u16) -> Vec<u8> {
    let at = build::ETHERNET + 6;
    bytes[at..at + 2].copy_from_slice(&field.to_be_bytes());
    with_checksum(bytes, 20)
}

fn with_checksum(mut bytes: Vec<u8>, header: usize) -> Vec<u8> {
    let at = build::ETHERNET;
    bytes[at + 10..at + 12].fill(0);
    let check = build::checksum(&[&bytes[at..at + header]]);
    bytes[at + 10..at + 12].copy_from_slice(&check.to_be_bytes());
    bytes
}

#[test]
fn a_cpu_answers_fifty_at_once() {
    let maps = maps::<V4>(BACKEND_LOCAL);
    let (client, frontend) = (client::<V4>(), frontend::<V4>());
    let entry = ServiceEntry { id: 1, kind: KIND_CLUSTER_IP, ..ServiceEntry::NONE };
    maps.add_service(ServiceKey::internal(frontend.0, frontend.1, PROTO_TCP), entry);
    let answered = || {
        let sent = (0..60).filter(|port| {
            let bytes = packet::<V4>((client.0, 4000 + port), frontend, SYN);
            run_over(Hook::Ingress, maps, POD, &bytes).0 == REDIRECT
        });
        sent.count()
    };
    assert_eq!((answered(), maps.count_of(Reason::RejectLimited)), (50, 10));
    // A thousand answers per second: four in each of 250 jiffies.
    maps.advance(1);
    assert_eq!((answered(), maps.count_of(Reason::RejectLimited)), (4, 66));
    // A RST is not answered, and does not count for the limit.
    maps.advance(HZ);
    let reset = packet::<V4>(client, frontend, Shape { flags: 4, ..SYN });
    assert_eq!(run_over(Hook::Ingress, maps, POD, &reset).0, DROP);
    assert_eq!(answered(), 50);
    // Answers that were not used are not kept for later.
    maps.advance(HZ);
    for _ in 0..10 {
        run_over(Hook::Ingress, maps, POD, &packet::<V4>(client, frontend, SYN));
    }
    maps.advance(HZ);
    assert_eq!(answered(), 50);
}

/// The kernel splits the packet after the hook.
fn short_gso_datagrams<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend) = (client::<F>(), frontend::<F>());
    let entry = ServiceEntry { id: 1, kind: KIND_CLUSTER_IP, ..ServiceEntry::NONE };
    maps.add_service(ServiceKey::internal(frontend.0, frontend.1, PROTO_UDP), entry);
    let refused = packet::<F>(client, frontend, UDP);
    let (verdict, skb) = run_edited(Hook::Ingress, maps, POD, &refused, |skb| skb.gso_size = 4);
    assert_eq!((verdict, skb.gso_size, maps.count_of(Reason::RejectFailed)), (REDIRECT, 0, 0));
    let quote = &refused[build::ETHERNET..];
    let expected = unreachable::<F>(frontend.0, client.0, (64, 0xc0), quote);
    assert_eq!(ip(&skb), expected[build::ETHERNET..]);
}

families!(gso_datagram_without_endpoints_is_refused = short_gso_datagrams());

#[test]
fn segment_that_acknowledges_nothing_is_dropped() {
    let maps = maps::<V4>(BACKEND_LOCAL);
    let (client, frontend, backend) = (client::<V4>(), frontend::<V4>(), backend::<V4>());
    for (hook, from, to, shape) in
        [(Hook::Ingress, client, frontend, SYN), (Hook::Egress, backend, client, SYN_ACK)]
    {
        run_over(hook, maps, POD, &packet::<V4>(from, to, shape));
    }
    let (addr, port) = backend;
    let row = BackendEntry { addr, port, proto: PROTO_TCP, state: BACKEND_RESET, service: 1, flags: 0 };
    maps.set_backend(7, row);
    maps.mark_flows();
    let acknowledges_nothing = packet::<V4>(client, frontend, Shape { flags: 8, ..DATA });
    assert_eq!(run_over(Hook::Ingress, maps, POD, &acknowledges_nothing).0, DROP);
    // The answer has no options.
    let behind_options = with_options(packet::<V4>(client, frontend, DATA));
    let (verdict, skb) = run_over(Hook::Ingress, maps, POD, &behind_options);
    assert_eq!((verdict, ip(&skb)[0], ip(&skb).len()), (REDIRECT, 0x45, 40));
    assert_eq!((maps.count_of(Reason::EndpointLeft), maps.count_of(Reason::RejectFailed)), (2, 0));
}

#[test]
fn only_the_first_fragment_is_answered_with_packet_too_big() {
    let maps = maps::<V4>(0);
    let (client, frontend) = (client::<V4>(), frontend::<V4>());
    let whole = packet::<V4>(client, frontend, UDP);
    // With "don't fragment".
    for (field, expected) in [(0x6000, REDIRECT), (0x6001, DROP)] {
        let bytes = fragment(whole.clone(), field);
        let (verdict, _) = run_edited(Hook::Ingress, maps, UPLINK, &bytes, |skb| {
            skb.routes.set_default(Some(Route { mtu: 30, ..route() }));
        });
        assert_eq!(verdict, expected, "{field:x}");
    }
    assert_eq!(maps.count_of(Reason::PacketTooBig), 2);
}

/// The only endpoint of a Service that ejects failing endpoints: its refusals reach the client.
fn the_only_endpoint_refuses<F: Net>(backend_flags: u32, hook: Hook, device: u32) {
    let maps = maps::<F>(backend_flags);
    let (frontend, backend) = (frontend::<F>(), backend::<F>());
    let entry = ServiceEntry {
        id: 1,
        slot_base: 7,
        slot_count: 1,
        kind: KIND_CLUSTER_IP,
        flags: SERVICE_EJECTS,
        ..ServiceEntry::NONE
    };
    maps.add_service(ServiceKey::internal(frontend.0, frontend.1, PROTO_TCP), entry);
    let is_forwarded = backend_flags & BACKEND_LOCAL == 0;
    // The endpoint refuses two clients with a RST, and then one with an ICMP error.
    for number in 1..=3 {
        let client = (F::addr(10 + number), 4000);
        run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, frontend, SYN));
        let flow = maps.flows().into_iter().find(|flow| flow.bits() != 0 && flow.client == client.0).unwrap();
        let seen = (flow.source, flow.source_port);
        assert_eq!(maps.count_of(Reason::EndpointEjected), u64::from(number == 3), "two clients in a row");
        let ttl = if is_forwarded { 63 } else { 64 };
        let (refusal, expected) = if number <= 2 {
            let reset = Shape { flags: 0x14, ..SYN };
            (packet::<F>(backend, seen, reset), packet::<F>(frontend, client, Shape { ttl, ..reset }))
        } else {
            let sent = |src, dst| ip_packet::<F>(src, dst, SYN);
            let error =
                |from: End<F>, to: End<F>, ttl, quote: &[u8]| unreachable::<F>(from.0, to.0, (ttl, 0), quote);
            let quote = sent(client, frontend);
            (error(backend, seen, 64, &sent(seen, backend)), error(frontend, client, ttl, &quote))
        };
        let (verdict, skb) = run_over(hook, maps, device, &refusal);
        assert_eq!(verdict, if is_forwarded { REDIRECT } else { NEXT });
        assert_eq!(ip(&skb), expected[build::ETHERNET..], "{number}");
    }
    assert_eq!(maps.count_of(Reason::RefusalDropped), 0);
    assert_eq!(
        maps.refusals_of(1, Reason::EndpointEjected),
        1,
        "an ICMP error is no refusal of the endpoint"
    );
}

families!(
    the_refusal_of_an_only_endpoint_reaches_its_client =
        the_only_endpoint_refuses(BACKEND_LOCAL, Hook::Egress, POD),
    the_only_endpoint_refuses(0, Hook::Ingress, UPLINK)
);

/// Other rules run behind these programs, which begin no flows any more.
fn what_is_left_to_others<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    let is_translated = |opens, shape| {
        maps.set_opens_flows(opens);
        let bytes = packet::<F>(client, frontend, shape);
        let (verdict, skb) = run_over(Hook::Ingress, maps, POD, &bytes);
        let is_as_it_came = skb.wire() == bytes;
        assert!(is_as_it_came || skb.wire() == packet::<F>(client, backend, shape));
        assert_eq!(verdict, NEXT);
        !is_as_it_came
    };
    for shape in [SYN, DATA, UDP] {
        assert!(!is_translated(false, shape));
    }
    // A direct packet passes: the other rules may have translated it.
    let straight = packet::<F>(client, backend, SYN);
    let (verdict, skb) = run_over(Hook::Ingress, maps, POD, &straight);
    assert_eq!((verdict, skb.wire()), (NEXT, straight));
    assert!(maps.flows().iter().all(|flow| flow.bits() == 0));
    assert_eq!(maps.count_of(Reason::InvalidState), 0);
    for shape in [SYN, UDP] {
        assert!(is_translated(true, shape));
        assert!(is_translated(false, shape), "it has a flow");
    }
}

families!(packet_without_a_flow_passes_to_other_rules = what_is_left_to_others());

/// A process of the node connects to a Service, by packets, whose endpoint is a process of the node, too.
fn own_endpoint<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (own, frontend, backend) = ((node::<F>(), 4000), frontend::<F>(), backend::<F>());
    maps.add_node_addr(backend.0, NODE_ADDR_OWN);
    for (shape, count) in [(SYN, 1), (UDP, 2), (INIT, 3)] {
        let (verdict, skb) = run_over(Hook::Egress, maps, 0, &packet::<F>(own, frontend, shape));
        assert_eq!(verdict, REDIRECT, "the process gets an error");
        assert_eq!(ip(&skb)[F::HEADER..][..2], F::UNREACHABLE);
        assert_eq!(maps.refusals_of(1, Reason::OwnEndpoint), count);
    }
    assert!(live(maps).is_empty());
    // Clients on a device are served.
    let client = client::<F>();
    let (verdict, skb) = run_over(Hook::Ingress, maps, POD, &packet::<F>(client, frontend, SYN));
    assert_eq!((verdict, skb.wire()), (NEXT, packet::<F>(client, backend, SYN)));
}

families!(a_packet_of_the_node_to_its_own_endpoint_is_refused = own_endpoint());
