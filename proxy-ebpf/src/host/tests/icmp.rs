//! ICMP errors about translated packets, with quotes of every kind and length.

use proxy_common::config::CONFIG_VIP_ECHO;
use proxy_common::service::{KIND_ADDRESS, SERVICE_EJECTS};

use super::*;

/// Bytes of a transport header that every quote has (RFC 792).
const LEAST: usize = 8;

/// What the tests need of a family's errors.
trait Errors: Net {
    const TIME_EXCEEDED: [u8; 2];
    const HOST_UNREACHABLE: [u8; 2];
    /// An echo request, which is no error.
    const ECHO: [u8; 2];
    const ECHO_REPLY: [u8; 2];
}

impl Errors for V4 {
    const TIME_EXCEEDED: [u8; 2] = [11, 0];
    const HOST_UNREACHABLE: [u8; 2] = [3, 1];
    const ECHO: [u8; 2] = [8, 0];
    const ECHO_REPLY: [u8; 2] = [0, 0];
}

impl Errors for V6 {
    const TIME_EXCEEDED: [u8; 2] = [3, 0];
    const HOST_UNREACHABLE: [u8; 2] = [1, 3];
    const ECHO: [u8; 2] = [128, 0];
    const ECHO_REPLY: [u8; 2] = [129, 0];
}

/// An IP packet with an error that quotes `quote`.
fn error<F: Net>(kind: [u8; 2], src: F::Words, dst: F::Words, quote: &[u8]) -> Vec<u8> {
    build::icmp::<F>((kind, 0), src, dst, (64, 0), quote)
}

fn translated<F: Net>(maps: HostMaps<F>, hook: Hook, device: u32, packet: &[u8]) -> Vec<u8> {
    let (verdict, skb) = run_over(hook, maps, device, &build::ethernet::<F>(packet));
    assert_eq!((verdict, skb.redirect), (NEXT, None));
    ip(&skb)
}

/// A flow of a client to an endpoint of this node.
fn with_flow<F: Net>(shape: Shape) -> HostMaps<F> {
    let maps = maps::<F>(BACKEND_LOCAL);
    run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client::<F>(), frontend::<F>(), shape));
    maps
}

/// Errors about the client's packets, from the endpoint and from a router, and errors about replies.
fn both_directions<F: Errors>(shape: Shape) {
    let maps = with_flow::<F>(shape);
    let (client, frontend, backend, router) = (client::<F>(), frontend::<F>(), backend::<F>(), F::addr(5));
    for kind in [F::UNREACHABLE, F::TIME_EXCEEDED, F::HOST_UNREACHABLE] {
        // None of these cuts a checksum in two: half a checksum stays as it is.
        for left in [LEAST, 12, 16, 18, usize::MAX] {
            let quote = |src, dst| {
                let mut quote = ip_packet::<F>(src, dst, shape);
                quote.truncate(left.saturating_add(F::HEADER).min(quote.len()));
                quote
            };
            // Some with padding behind the IP packet.
            let padded = |ip: Vec<u8>, bytes: usize| [ip, std::vec![0xaa; bytes]].concat();
            for (from, becomes, padding) in
                [(backend.0, frontend.0, 0), (router, router, 0), (router, router, 12)]
            {
                let came = padded(error::<F>(kind, from, client.0, &quote(client, backend)), padding);
                let expected = error::<F>(kind, becomes, client.0, &quote(client, frontend));
                let expected = padded(expected, padding);
                assert_eq!(translated(maps, Hook::Egress, UPLINK, &came), expected, "{kind:?} {left}");
                // At the pod's own device, it is not translated yet.
                assert_eq!(translated(maps, Hook::Ingress, POD, &came), came);
            }
            let came = error::<F>(kind, client.0, frontend.0, &quote(frontend, client));
            let expected = error::<F>(kind, client.0, backend.0, &quote(backend, client));
            assert_eq!(translated(maps, Hook::Ingress, UPLINK, &came), expected, "{kind:?} {left}");
        }
    }
}

#[test]
fn errors_are_translated_in_both_directions() {
    for shape in [SYN, UDP, INIT] {
        both_directions::<V4>(shape);
        both_directions::<V6>(shape);
    }
}

/// An error about a packet that this node has forwarded is forwarded to the client, if its route can carry it.
fn a_forwarded_error<F: Errors>() {
    let maps = maps::<F>(0);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, frontend, UDP));
    let source = (node::<F>(), maps.flows().iter().find(|flow| flow.bits() != 0).unwrap().source_port);
    let came = error::<F>(F::UNREACHABLE, backend.0, source.0, &ip_packet::<F>(source, backend, UDP));
    let quote = ip_packet::<F>(client, frontend, UDP);
    let expected = build::icmp::<F>((F::UNREACHABLE, 0), frontend.0, client.0, (63, 0), &quote);
    for (mtu, is_forwarded) in [(came.len() as u32, true), (came.len() as u32 - 1, false)] {
        maps.advance(1);
        let (verdict, skb) = run_edited(Hook::Ingress, maps, UPLINK, &build::ethernet::<F>(&came), |skb| {
            skb.routes.set_default(Some(Route { mtu, ..route() }));
        });
        assert_eq!(verdict, if is_forwarded { REDIRECT } else { DROP });
        if is_forwarded {
            assert_eq!(ip(&skb), expected);
        }
    }
    assert_eq!(maps.count_of(Reason::NoRoute), 1);
}

families!(an_error_about_a_forwarded_packet_is_forwarded = a_forwarded_error());

/// The stack tells this node, the source of packets with SNAT, what it cannot route; the error arrives on the loopback device.
fn stacks_error<F: Errors>(kind: [u8; 2], is_limited: bool) {
    let maps = maps::<F>(0);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, frontend, UDP));
    let source = (node::<F>(), live(maps)[0].source_port);
    let came = error::<F>(kind, source.0, source.0, &ip_packet::<F>(source, backend, UDP));
    let quote = ip_packet::<F>(client, frontend, UDP);
    let expected = build::icmp::<F>((kind, 0), source.0, client.0, (63, 0), &quote);
    let run = |hook, bytes: &[u8]| {
        run_edited(hook, maps, 1, &build::ethernet::<F>(bytes), |skb| skb.is_loopback = true)
    };
    let (verdict, skb) = run(Hook::Ingress, &came);
    assert_eq!((verdict, ip(&skb)), (REDIRECT, expected));
    let sent = (0..100).filter(|_| run(Hook::Ingress, &came).0 == REDIRECT).count();
    assert_eq!(sent < 100, is_limited, "{kind:?}: {sent}");
    for (hook, other) in [
        (Hook::Egress, came),
        (Hook::Ingress, ip_packet::<F>(client, frontend, UDP)),
        (Hook::Ingress, error::<F>(F::ECHO, client.0, frontend.0, &[0; 8])),
        (Hook::Ingress, error::<F>(kind, source.0, source.0, &ip_packet::<F>(source, client, UDP))),
    ] {
        let (verdict, skb) = run(hook, &other);
        assert_eq!((verdict, ip(&skb)), (NEXT, other), "nothing else on this device concerns the programs");
    }
}

#[test]
fn stack_error_after_snat_reaches_client() {
    stacks_error::<V4>(V4::UNREACHABLE, true);
    stacks_error::<V4>([3, 4], false);
    stacks_error::<V6>(V6::UNREACHABLE, true);
    stacks_error::<V6>([2, 0], false);
}

/// An error about a packet of a process of this node, from the endpoint or from a router.
fn error_for_the_node<F: Errors>() {
    let maps = maps::<F>(0);
    let (own, frontend, backend) = ((node::<F>(), 4000), frontend::<F>(), backend::<F>());
    run_over(Hook::Egress, maps, 0, &packet::<F>(own, frontend, UDP));
    let source = (own.0, live(maps)[0].source_port);
    assert_ne!(source, own);
    for from in [backend.0, F::addr(5)] {
        let came = error::<F>(F::UNREACHABLE, from, own.0, &ip_packet::<F>(source, backend, UDP));
        let expected = error::<F>(F::UNREACHABLE, from, own.0, &ip_packet::<F>(own, frontend, UDP));
        assert_eq!(translated(maps, Hook::Ingress, POD, &came), expected);
    }
}

families!(error_for_a_process_of_the_node_keeps_its_source = error_for_the_node());

/// Packets that look like errors about a packet of a flow, and are none.
fn no_errors<F: Errors>() {
    let maps = with_flow::<F>(UDP);
    let (client, backend) = (client::<F>(), backend::<F>());
    let quote = ip_packet::<F>(client, backend, UDP);
    let about = |quote: &[u8]| error::<F>(F::UNREACHABLE, backend.0, client.0, quote);
    assert_ne!(translated(maps, Hook::Egress, UPLINK, &about(&quote)), about(&quote));
    let mut later = quote.clone();
    let mut ping = quote.clone();
    if F::HEADER == 20 {
        later[6..8].copy_from_slice(&[0, 8]);
        ping[9] = F::ICMP;
    } else {
        let next = std::mem::replace(&mut later[6], 44);
        later.splice(40..40, [next, 0, 0, 64, 0, 0, 0, 1]);
        ping[6] = F::ICMP;
    }
    let short = &quote[..F::HEADER + LEAST - 1];
    let came = [
        ("a later fragment is quoted", about(&later)),
        ("another protocol is quoted", about(&ping)),
        ("seven bytes are quoted", about(short)),
        ("seven bytes are quoted, with padding behind them", [about(short), std::vec![0xaa; 12]].concat()),
        ("no error", error::<F>(F::ECHO, backend.0, client.0, &quote)),
        ("not to the source of what is quoted", error::<F>(F::UNREACHABLE, backend.0, F::addr(6), &quote)),
        ("a later fragment", as_later_fragment::<F>(about(&quote))),
    ];
    for (what, bytes) in came {
        assert_eq!(translated(maps, Hook::Egress, UPLINK, &bytes), bytes, "{what}");
    }
}

/// The same bytes, as a later fragment.
fn as_later_fragment<F: Net>(mut ip: Vec<u8>) -> Vec<u8> {
    if F::HEADER == 20 {
        ip[6..8].copy_from_slice(&[0, 8]);
        ip[10..12].fill(0);
        let check = build::checksum(&[&ip[..20]]);
        ip[10..12].copy_from_slice(&check.to_be_bytes());
    } else {
        let length = u16::from_be_bytes([ip[4], ip[5]]) + 8;
        ip[4..6].copy_from_slice(&length.to_be_bytes());
        let next = std::mem::replace(&mut ip[6], 44);
        ip.splice(40..40, [next, 0, 0, 64, 0, 0, 0, 1]);
    }
    ip
}

families!(other_icmp_packets_pass_unchanged = no_errors());

/// Only "unreachable" about a SYN is a refusal.
fn refusals_by_icmp<F: Errors>() {
    for (kind, shape, is_refusal) in [
        (F::UNREACHABLE, SYN, true),
        (F::HOST_UNREACHABLE, SYN, true),
        (F::TIME_EXCEEDED, SYN, false),
        (F::UNREACHABLE, UDP, false),
    ] {
        let maps = maps::<F>(BACKEND_LOCAL);
        let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
        add_endpoint(maps, 20, (F::addr(3), 8080), shape.proto);
        crate::select::health::answered(maps, 20, proxy_common::health::NO_CLIENT);
        // The first endpoint is selected for certain while it is the only one.
        let entry = |slot_count| ServiceEntry {
            id: 1,
            slot_base: 30,
            slot_count,
            kind: KIND_CLUSTER_IP,
            flags: SERVICE_EJECTS,
            ..ServiceEntry::NONE
        };
        let first = if shape.proto == PROTO_UDP { 8 } else { 7 };
        maps.set_slots(30, &[first, 20]);
        let key = ServiceKey::internal(frontend.0, frontend.1, shape.proto);
        maps.add_service(key, entry(1));
        run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, frontend, shape));
        maps.add_service(ServiceKey::internal(frontend.0, frontend.1, shape.proto), entry(2));
        let came = error::<F>(kind, backend.0, client.0, &ip_packet::<F>(client, backend, shape));
        let (verdict, skb) = run_over(Hook::Egress, maps, UPLINK, &build::ethernet::<F>(&came));
        assert_eq!(verdict == DROP, is_refusal, "{kind:?}");
        assert_eq!(maps.refusals_of(1, Reason::RefusalDropped), u64::from(is_refusal));
        if !is_refusal {
            let quote = ip_packet::<F>(client, frontend, shape);
            assert_eq!(ip(&skb), error::<F>(kind, frontend.0, client.0, &quote));
        }
    }
}

families!(only_unreachable_about_a_syn_is_a_refusal = refusals_by_icmp());

/// Pings an address. Returns the reply, and the device on which it leaves, or `None` if the request passes.
fn ping<F: Errors>(
    maps: HostMaps<F>,
    hook: Hook,
    src: F::Words,
    dst: F::Words,
) -> Option<(Vec<u8>, Redirect)> {
    let request = build::icmp::<F>((F::ECHO, 0x0001_0002), src, dst, (3, 0), &[7; 56]);
    let device = if hook == Hook::Ingress { POD } else { UPLINK };
    let (verdict, skb) = run_over(hook, maps, device, &build::ethernet::<F>(&request));
    if verdict == NEXT {
        assert_eq!(ip(&skb), request);
        return None;
    }
    Some((ip(&skb), skb.redirect.expect("the verdict is a redirect")))
}

fn echo<F: Errors>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (pod, node, vip) = (backend::<F>().0, node::<F>(), frontend::<F>().0);
    maps.add_service(
        ServiceKey::internal(vip, 0, 0),
        ServiceEntry { kind: KIND_ADDRESS, ..ServiceEntry::NONE },
    );
    assert_eq!(ping(maps, Hook::Ingress, pod, vip), None, "the flag is off");
    maps.edit_config(|config| config.flags |= CONFIG_VIP_ECHO);
    let reply = |to| build::icmp::<F>((F::ECHO_REPLY, 0x0001_0002), vip, to, (64, 0), &[7; 56]);
    assert_eq!(ping(maps, Hook::Ingress, pod, vip), Some((reply(pod), Redirect::Out(POD))));
    assert_eq!(maps.count_of(Reason::EchoAnswered), 1);
    assert_eq!(ping(maps, Hook::Ingress, pod, F::addr(77)), None, "an address of no Service");
    assert_eq!(ping(maps, Hook::Ingress, pod, node), None, "the stack answers");
    assert_eq!(ping(maps, Hook::Egress, pod, vip), None, "the node only forwards it");
    // More than a burst: the limit counts, and errors are not affected.
    let request = build::icmp::<F>((F::ECHO, 0), pod, vip, (64, 0), &[]);
    for _ in 0..60 {
        run_over(Hook::Ingress, maps, POD, &build::ethernet::<F>(&request));
    }
    assert!(maps.count_of(Reason::RejectLimited) > 0);
}

families!(an_echo_request_to_an_address_of_a_service_is_answered_if_the_flag_is_set = echo());
