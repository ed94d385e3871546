//! Packets at the early hook (XDP): it forwards what this node forwards, and leaves all other packets to tc.

use proxy_common::service::SERVICE_EJECTS;

use super::*;

const ACK: Shape = Shape { flags: 0x10, ..SYN };

/// What a test changes of a packet.
type Edit = fn(&mut Skb);

/// Runs the early hook over a frame that came in by a device.
pub(super) fn run_at<F: Net>(
    maps: HostMaps<F>,
    device: u32,
    bytes: &[u8],
    edit: impl FnOnce(&mut Skb),
) -> (i32, Skb) {
    let packet = HostPacket::new(bytes).edit(|skb| {
        (skb.ifindex, skb.ingress_ifindex) = (device, device);
        skb.routes.set_default(Some(route()));
        edit(skb);
    });
    let verdict = run_early(maps, packet.early_frame());
    (verdict, packet.into_skb())
}

/// Whether the early hook leaves a packet to tc, unchanged.
fn is_left<F: Net>(maps: HostMaps<F>, bytes: &[u8], edit: impl FnOnce(&mut Skb)) -> bool {
    let (verdict, skb) = run_at(maps, UPLINK, bytes, edit);
    assert_eq!(verdict == NEXT, skb.wire() == bytes);
    verdict == NEXT
}

/// Sends a packet that this node forwards. `src`, `dst`: what it becomes.
fn forwards<F: Net>(maps: HostMaps<F>, bytes: &[u8], src: End<F>, dst: End<F>, shape: Shape) {
    let (verdict, skb) = run_at(maps, UPLINK, bytes, |_| {});
    assert_eq!(verdict, REDIRECT);
    assert_eq!(ip(&skb), ip_packet::<F>(src, dst, Shape { ttl: shape.ttl - 1, ..shape }));
    let macs: Vec<u8> = route().macs.iter().flat_map(|word| word.to_ne_bytes()).collect();
    assert_eq!(skb.as_slice()[..12], macs);
}

fn only_flow<F: Net>(maps: HostMaps<F>) -> FlowEntry<F::Words> {
    let flows = live(maps);
    assert_eq!(flows.len(), 1);
    flows[0]
}

fn a_connection<F: Net>(opens: Shape, answers: Shape, goes_on: Shape) {
    let maps = maps::<F>(0);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    // The port that SNAT will assign is known only when the flow exists.
    let (verdict, skb) = run_at(maps, UPLINK, &packet::<F>(client, frontend, opens), |_| {});
    let source = (node::<F>(), only_flow(maps).source_port);
    assert_eq!(verdict, REDIRECT);
    assert_eq!(ip(&skb), ip_packet::<F>(source, backend, Shape { ttl: opens.ttl - 1, ..opens }));
    for _ in 0..2 {
        forwards(maps, &packet::<F>(backend, source, answers), frontend, client, answers);
        forwards(maps, &packet::<F>(client, frontend, goes_on), source, backend, goes_on);
    }
    let stats = maps.stats_of(1);
    assert_eq!((stats.connections, stats.packets, stats.reply_packets), (1, 3, 2));
    // tc finds the same flow.
    let (_, skb) = run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, frontend, goes_on));
    assert_eq!(ip(&skb), ip_packet::<F>(source, backend, Shape { ttl: goes_on.ttl - 1, ..goes_on }));
    assert_eq!(maps.stats_of(1).connections, 1);
    // A datagram without a checksum.
    if opens.proto == PROTO_UDP {
        let without_checksum = |src, dst, ttl| {
            let mut bytes = packet::<F>(src, dst, Shape { ttl, ..UDP });
            let at = build::ETHERNET + F::HEADER + 6;
            bytes[at..at + 2].fill(0);
            bytes
        };
        let (verdict, skb) = run_at(maps, UPLINK, &without_checksum(client, frontend, 64), |_| {});
        assert_eq!(verdict, REDIRECT);
        assert_eq!(ip(&skb), without_checksum(source, backend, 63)[build::ETHERNET..]);
    }
    // A SYN that is sent again.
    assert!(opens.proto == PROTO_UDP || is_left(maps, &packet::<F>(client, frontend, opens), |_| {}));
}

families!(
    xdp_forwards_packets_and_replies_of_remote_endpoints = a_connection(SYN, SYN_ACK, DATA),
    a_connection(UDP, UDP, UDP)
);

/// Packets of a flow, and new ones, which tc has to process. The flow is not changed.
fn what_tc_has_to_do<F: Net>() {
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    let known = maps::<F>(0);
    run_at(known, UPLINK, &packet::<F>(client, frontend, SYN), |_| {});
    let source = (node::<F>(), only_flow(known).source_port);
    run_at(known, UPLINK, &packet::<F>(backend, source, SYN_ACK), |_| {});
    run_at(known, UPLINK, &packet::<F>(client, frontend, ACK), |_| {});
    known.advance(10);
    let before = only_flow(known);
    let edits: [(&str, Edit); 4] = [
        ("no route", |skb| skb.routes.set_default(None)),
        ("an unknown neighbour", |skb| skb.routes.set_default(Some(Route { resolved: 0, ..route() }))),
        ("too long", |skb| skb.routes.set_default(Some(Route { mtu: 30, ..route() }))),
        ("many segments", |skb| skb.gso_size = 1),
    ];
    for (what, edit) in edits {
        for bytes in [packet::<F>(client, frontend, DATA), packet::<F>(backend, source, DATA)] {
            assert!(is_left(known, &bytes, edit), "{what}");
        }
    }
    let after = only_flow(known);
    assert_eq!((after.state, after.last_seen), (before.state, before.last_seen));

    // To an endpoint of this node.
    let local = maps::<F>(BACKEND_LOCAL);
    for shape in [SYN, UDP] {
        assert!(is_left(local, &packet::<F>(client, frontend, shape), |_| {}));
    }
    assert!(local.flows().iter().all(|flow| flow.bits() == 0));
    run_over(Hook::Ingress, local, UPLINK, &packet::<F>(client, frontend, UDP));
    assert!(is_left(local, &packet::<F>(client, frontend, UDP), |_| {}));

    // To a connection of this node itself, which netfilter masquerades.
    let own = maps::<F>(0);
    run_over(Hook::Egress, own, UPLINK, &packet::<F>((node::<F>(), 2500), backend, SYN));
    assert_eq!(only_flow(own).source_port, 2500);
    assert!(is_left(own, &packet::<F>(backend, (node::<F>(), 2500), SYN_ACK), |_| {}));

    // With session affinity.
    let maps = maps::<F>(0);
    let entry = ServiceEntry { affinity_secs: 60, ..known_service() };
    maps.add_service(ServiceKey::internal(frontend.0, frontend.1, PROTO_TCP), entry);
    assert!(is_left(maps, &packet::<F>(client, frontend, SYN), |_| {}));
    // To a port without a Service.
    assert!(is_left(local, &packet::<F>(client, (frontend.0, 81), SYN), |_| {}));
}

fn known_service() -> ServiceEntry {
    ServiceEntry { id: 1, slot_base: 7, slot_count: 1, kind: KIND_CLUSTER_IP, ..ServiceEntry::NONE }
}

families!(packet_that_xdp_cannot_forward_passes_to_tc = what_tc_has_to_do());

/// The first reply tells whether the endpoint accepts connections: tc notes that.
fn the_first_reply<F: Net>() {
    let maps = maps::<F>(0);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    let entry = ServiceEntry { flags: SERVICE_EJECTS, ..known_service() };
    maps.add_service(ServiceKey::internal(frontend.0, frontend.1, PROTO_TCP), entry);
    run_at(maps, UPLINK, &packet::<F>(client, frontend, SYN), |_| {});
    let source = (node::<F>(), only_flow(maps).source_port);
    let reply = packet::<F>(backend, source, SYN_ACK);
    assert!(is_left(maps, &reply, |_| {}));
    assert_eq!(run_over(Hook::Ingress, maps, UPLINK, &reply).0, REDIRECT);
    forwards(maps, &reply, frontend, client, SYN_ACK);
}

families!(first_reply_of_a_watched_flow_passes_to_tc = the_first_reply());

/// Refusals without an answer are done at once; those with an answer are left to tc.
fn refusals<F: Net>() {
    let (client, frontend) = (client::<F>(), frontend::<F>());
    let syn = packet::<F>(client, frontend, SYN);
    let refused = |entry: ServiceEntry| {
        let maps = maps::<F>(0);
        maps.add_service(ServiceKey::internal(frontend.0, frontend.1, PROTO_TCP), entry);
        let (verdict, skb) = run_at(maps, UPLINK, &syn, |_| {});
        assert_eq!(skb.wire(), syn);
        (verdict, maps)
    };
    let (verdict, maps) = refused(ServiceEntry { slot_count: 0, ..known_service() });
    assert_eq!((verdict, maps.count_of(Reason::NoEndpoint)), (NEXT, 0));
    let ranges = ServiceEntry { flags: proxy_common::service::SERVICE_SOURCE_RANGES, ..known_service() };
    let (verdict, maps) = refused(ranges);
    assert_eq!((verdict, maps.count_of(Reason::SourceNotAllowed)), (DROP, 1));
    // A packet of a flow that exists is not dropped here.
    let maps = super::maps::<F>(0);
    run_at(maps, UPLINK, &syn, |_| {});
    maps.add_service(ServiceKey::internal(frontend.0, frontend.1, PROTO_TCP), ranges);
    assert!(is_left(maps, &syn, |_| {}));
}

families!(refusal_that_needs_no_answer_is_done_in_xdp = refusals());

/// A next hop is probed by the kernel only if the kernel sends to it now and then.
fn a_probe<F: Net>() {
    let maps = maps::<F>(0);
    let (client, frontend) = (client::<F>(), frontend::<F>());
    let bytes = packet::<F>(client, frontend, DATA);
    maps.advance(10_000);
    run_at(maps, UPLINK, &packet::<F>(client, frontend, SYN), |_| {});
    for _ in 0..2 {
        let mut left = 0;
        for _ in 0..251 {
            maps.advance(1);
            left += u32::from(is_left(maps, &bytes, |_| {}));
        }
        assert!(left <= 1, "{left}");
        maps.advance(1_000);
        assert!(is_left(maps, &bytes, |_| {}), "after a long silence");
        if left == 0 {
            maps.advance(1);
            assert!(is_left(maps, &bytes, |_| {}), "after more than 250 jiffies");
        }
        // tc sends the packet; then the early hook forwards packets again.
        for _ in 0..2 {
            assert_eq!(run_over(Hook::Ingress, maps, UPLINK, &bytes).0, REDIRECT);
            assert!(!is_left(maps, &bytes, |_| {}));
            maps.advance(3);
            assert!(!is_left(maps, &bytes, |_| {}), "tc has just sent to the next hop");
            maps.advance(2);
        }
        assert_eq!(run_over(Hook::Ingress, maps, UPLINK, &bytes).0, REDIRECT);
    }
}

families!(xdp_regularly_passes_a_packet_so_that_the_kernel_probes_the_neighbour = a_probe());
