use super::*;
use crate::node::{Cidr, NODE_ADDR_LOOPBACK, NODE_ADDR_PORTS};
use crate::service::{SCOPE_INTERNAL, SERVICE_EJECTS};

type A4 = [u8; 4];
const CLIENT: A4 = [192, 0, 2, 9];
const POD: A4 = [10, 244, 0, 7];
const NODE: A4 = [192, 0, 2, 1];

fn entry(id: u32, kind: u8, flags: u16) -> ServiceEntry {
    ServiceEntry { id, flags, kind, slot_count: 1, ..ServiceEntry::default() }
}

fn backend(state: u8, service: u32, flags: u32) -> BackendEntry<A4> {
    BackendEntry { addr: POD, port: 80, proto: 6, state, service, flags }
}

#[test]
fn client_at_an_uplink_without_pod_address_is_outside() {
    let pods = Cidr { addr: [10, 244, 0, 0], mask: [255, 255, 0, 0] };
    let node = NodeEntry { pods, ..NodeEntry::UNKNOWN };
    assert!(is_outside(true, 0, &node, &CLIENT));
    assert!(!is_outside(true, 0, &node, &POD));
    assert!(!is_outside(false, 0, &node, &CLIENT));
    assert!(is_outside(true, 0, &NodeEntry::UNKNOWN, &POD));
    // Pods are recognized by their addresses alone.
    assert!(is_outside(false, CONFIG_DETECT_LOCAL, &node, &CLIENT));
    assert!(!is_outside(true, CONFIG_DETECT_LOCAL, &node, &POD));
}

#[test]
fn frontend_lookup_with_several_matches_prefers_address_and_own_scope() {
    let on = |node: NodeAddr| move |addr: &A4| if *addr == NODE { node } else { 0 };
    let services = |key: &ServiceKey<A4>| match (key.addr, key.port, key.scope) {
        ([0, 0, 0, 0], 30080 | 30081, SCOPE_INTERNAL) => Some(entry(1, KIND_NODE_PORT, SERVICE_SCOPED)),
        ([0, 0, 0, 0], 30080, SCOPE_EXTERNAL) => Some(entry(2, KIND_NODE_PORT, SERVICE_LOCAL)),
        (NODE, 30081, SCOPE_INTERNAL) => Some(entry(3, KIND_CLUSTER_IP, 0)),
        _ => None,
    };
    let find = |port, outside, node: NodeAddr, asked| {
        let key = ServiceKey::internal(NODE, port, 6);
        frontend(key, outside, asked, services, on(node)).map(|entry| entry.id)
    };
    assert_eq!(find(30080, false, NODE_ADDR_PORTS, NODE_ADDR_PORTS), Some(1));
    assert_eq!(find(30080, true, NODE_ADDR_PORTS, NODE_ADDR_PORTS), Some(2));
    assert_eq!(find(30080, true, NODE_ADDR_LOOPBACK, NODE_ADDR_PORTS), None);
    assert_eq!(find(30080, false, 0, NODE_ADDR_PORTS), None);
    let loopback = NODE_ADDR_PORTS | NODE_ADDR_LOOPBACK;
    assert_eq!(find(30080, false, loopback, NODE_ADDR_PORTS), None);
    assert_eq!(find(30080, false, loopback, loopback), Some(1));
    assert_eq!(find(30081, true, NODE_ADDR_PORTS, NODE_ADDR_PORTS), Some(3));
    assert_eq!(find(30082, true, NODE_ADDR_PORTS, NODE_ADDR_PORTS), None);
    for outside in [false, true] {
        let zero = ServiceKey::internal([0; 4], 30080, 6);
        assert_eq!(
            frontend(zero, outside, loopback, services, on(loopback)),
            None,
            "the client's own loopback"
        );
    }
}

#[test]
fn socket_with_source_ranges_is_checked_on_the_node_and_left_to_packets_in_pods() {
    let open = entry(1, KIND_NODE_PORT, 0);
    let closed = entry(1, KIND_NODE_PORT, SERVICE_SOURCE_RANGES);
    let node = entry(1, KIND_NODE_PORT, SERVICE_SOURCE_RANGES | SERVICE_NODE_ALLOWED);
    assert!(!has_source_ranges(&open) && has_source_ranges(&closed) && has_source_ranges(&node));
    for of_node in [false, true] {
        assert_eq!(socket_source(&open, of_node, || true), SocketSource::Allowed);
    }
    assert_eq!(socket_source(&closed, true, || true), SocketSource::Refused);
    assert_eq!(socket_source(&node, true, || true), SocketSource::Allowed);
    assert_eq!(socket_source(&closed, false, || true), SocketSource::LeftToPackets);
    assert_eq!(socket_source(&node, false, || true), SocketSource::LeftToPackets);
}

#[test]
fn connect_to_changing_service_is_untranslated() {
    for (flags, left) in [
        (SERVICE_CHANGING, [true, false]),
        (SERVICE_CHANGING | SERVICE_CHANGING_NODE, [true, true]),
        (0, [false, false]),
    ] {
        let changing = entry(1, KIND_CLUSTER_IP, SERVICE_EJECTS | flags);
        for (of_node, is_left) in [false, true].into_iter().zip(left) {
            let source = if is_left { SocketSource::LeftToPackets } else { SocketSource::Allowed };
            assert_eq!(socket_source(&changing, of_node, || true), source, "{flags:#x} {of_node}");
            assert_eq!(socket_source(&changing, of_node, || false), SocketSource::Allowed);
        }
    }
}

#[test]
fn node_port_without_endpoints_for_node_socket_is_not_translated() {
    let empty = ServiceEntry { slot_count: 0, ..entry(1, KIND_NODE_PORT, 0) };
    assert_eq!(socket_source(&empty, true, || true), SocketSource::LeftToPackets);
    assert_eq!(socket_source(&empty, false, || true), SocketSource::Allowed);
    let cluster_ip = ServiceEntry { slot_count: 0, ..entry(1, KIND_CLUSTER_IP, 0) };
    assert_eq!(socket_source(&cluster_ip, true, || true), SocketSource::Allowed);
}

#[test]
fn a_client_stays_for_so_many_seconds_with_a_backend_of_the_policy() {
    let service = ServiceEntry { affinity_secs: 10, ..entry(1, KIND_CLUSTER_IP, 0) };
    let used = AffinityEntry { backend_id: 5, last_used: u32::MAX - 100 };
    let at = |later: u32| is_in_time(&used, &service, used.last_used.wrapping_add(later), 100);
    assert!(at(0) && at(1000) && !at(1001) && at(0u32.wrapping_sub(1)) && !at(0u32.wrapping_sub(101)));
    let local = entry(1, KIND_CLUSTER_IP, SERVICE_LOCAL);
    assert!(may_stay(&backend(BACKEND_ACTIVE, 1, BACKEND_IN_CLUSTER), &service));
    assert!(!may_stay(&backend(BACKEND_ACTIVE, 1, BACKEND_IN_CLUSTER), &local));
    assert!(may_stay(&backend(BACKEND_ACTIVE, 1, BACKEND_IN_LOCAL), &local));
    assert!(!may_stay(&backend(BACKEND_ACTIVE, 2, BACKEND_IN_CLUSTER), &service));
    assert!(!may_stay(&backend(crate::backend::BACKEND_GONE, 1, BACKEND_IN_CLUSTER), &service));
}

#[test]
fn the_clients_address_is_kept_where_the_reply_surely_returns() {
    let (cluster, port) = (entry(1, KIND_CLUSTER_IP, 0), entry(1, KIND_NODE_PORT, 0));
    let all = CONFIG_MASQUERADE_ALL;
    let of = |service: &ServiceEntry, client, by_uplink, backend_is_local, config| {
        let path = Path { from_node: false, by_uplink, backend_is_local };
        source(service, &client, &POD, path, config)
    };
    assert_eq!(of(&port, CLIENT, true, true, all), Source::Kept);
    assert_eq!(of(&port, CLIENT, true, false, 0), Source::Remote);
    assert_eq!(of(&port, CLIENT, false, false, 0), Source::Kept);
    assert_eq!(of(&port, POD, false, true, 0), Source::Hairpin);
    assert_eq!(of(&cluster, CLIENT, false, false, 0), Source::Kept);
    assert_eq!(of(&cluster, CLIENT, true, false, 0), Source::Remote);
    assert_eq!(of(&cluster, CLIENT, false, false, all), Source::All);
    // The FORWARD chain, with the policies of both pods, is in the stack.
    assert_eq!(of(&cluster, CLIENT, false, true, all), Source::Kept);
    assert_eq!(of(&cluster, CLIENT, true, true, all), Source::Kept);
    assert_eq!(of(&cluster, CLIENT, true, true, 0), Source::Kept);
    assert!(Source::Remote.is_nodes() && !Source::Kept.is_nodes());
    let path = Path { from_node: true, by_uplink: false, backend_is_local: true };
    assert_eq!(source(&cluster, &NODE, &POD, path, 0), Source::Local);
}

#[test]
fn client_outside_with_policy_cluster_is_masqueraded_by_netfilter() {
    let (cluster, local) = (entry(1, KIND_NODE_PORT, 0), entry(1, KIND_NODE_PORT, SERVICE_LOCAL));
    let on = CONFIG_MASQUERADE_EXTERNAL;
    assert!(netfilter_masquerades(&cluster, true, true, on));
    assert!(!netfilter_masquerades(&local, true, true, on));
    let internal = entry(1, KIND_CLUSTER_IP, SERVICE_LOCAL);
    assert!(netfilter_masquerades(&internal, true, true, on), "internalTrafficPolicy does not matter");
    let dsr = entry(1, KIND_NODE_PORT, SERVICE_DSR);
    assert!(!netfilter_masquerades(&dsr, true, true, on), "endpoints on other nodes see the client");
    assert!(!netfilter_masquerades(&cluster, false, true, on), "the client is behind a local device");
    assert!(!netfilter_masquerades(&cluster, true, false, on), "a pod");
    assert!(!netfilter_masquerades(&cluster, true, true, 0));
}

#[test]
fn only_packets_that_would_take_snat_are_encapsulated() {
    let key = FlowKey {
        src: CLIENT,
        dst: NODE,
        src_port: 1,
        dst_port: 2,
        proto: crate::PROTO_TCP,
        direction: 0,
        reserved: 0,
    };
    let service = entry(1, KIND_NODE_PORT, SERVICE_DSR);
    let addrs = |own: NodeAddr| move |addr: &A4| if *addr == NODE { own } else { 0 };
    let known = NODE_ADDR_OWN | NODE_ADDR_INTERNAL;
    let flags = 5 << crate::backend::BACKEND_TUNNEL_SHIFT;
    assert_eq!(tunnel(&service, Source::Remote, flags, &key, true, addrs(known)), 5);
    for source in [Source::Kept, Source::Hairpin, Source::All, Source::Local] {
        assert_eq!(tunnel(&service, source, flags, &key, true, addrs(known)), 0);
    }
    let remote = Source::Remote;
    assert_eq!(tunnel(&entry(1, KIND_NODE_PORT, 0), remote, flags, &key, true, addrs(known)), 0);
    assert_eq!(tunnel(&service, remote, 0, &key, true, addrs(known)), 0, "its node has no number");
    assert_eq!(tunnel(&service, remote, flags, &key, false, addrs(known)), 0, "a client inside");
    let sctp = FlowKey { proto: PROTO_SCTP, ..key };
    assert_eq!(tunnel(&service, remote, flags, &sctp, true, addrs(known)), 0);
    assert_eq!(
        tunnel(&service, remote, flags, &key, true, addrs(NODE_ADDR_OWN)),
        0,
        "no node names the address"
    );
    let external = entry(1, crate::service::KIND_EXTERNAL_IP, SERVICE_DSR);
    assert_eq!(tunnel(&external, remote, flags, &key, true, addrs(0)), 5);
    let of_node = FlowKey { src: NODE, ..key };
    assert_eq!(tunnel(&external, remote, flags, &of_node, true, addrs(NODE_ADDR_INTERNAL)), 0);
}

#[test]
fn addresses_that_no_client_can_have_are_martian() {
    let v4 = |text: &str| text.parse::<core::net::Ipv4Addr>().unwrap().octets();
    for text in ["0.0.0.0", "127.0.0.1", "127.9.9.9", "224.0.0.1", "239.1.1.1", "255.255.255.255"] {
        assert!(is_martian(&v4(text)), "{text}");
    }
    for text in ["1.0.0.1", "10.0.0.1", "126.255.255.255", "128.0.0.1", "169.254.1.1", "223.255.255.255"] {
        assert!(!is_martian(&v4(text)), "{text}");
    }
    for text in ["0.1.2.3", "240.0.0.1", "254.1.2.3", "255.255.255.254"] {
        assert!(!is_martian(&v4(text)), "the kernel accepts {text}");
    }
    let v6 = |text: &str| text.parse::<core::net::Ipv6Addr>().unwrap().octets();
    for text in ["::", "::1", "ff02::1", "ffff::", "::ffff:10.0.0.1"] {
        assert!(is_martian(&v6(text)), "{text}");
    }
    for text in ["fd00::1", "2001:db8::1", "fe80::1", "64:ff9b::a00:1", "::1:0:0:1", "::2"] {
        assert!(!is_martian(&v6(text)), "{text}");
    }
}

#[test]
fn link_local_sources_are_known_by_ten_bits() {
    let v6 = |text: &str| text.parse::<core::net::Ipv6Addr>().unwrap().octets();
    assert!(is_link_local(&v6("fe80::1")) && is_link_local(&v6("febf::1")));
    assert!(!is_link_local(&v6("fec0::1")) && !is_link_local(&v6("fe7f::1")));
    assert!(!is_link_local(&[169u8, 254, 0, 1]), "forwarded by the kernel");
}

#[test]
fn no_endpoint_and_no_service_have_reasons() {
    assert_eq!(no_endpoint_reason(&entry(1, KIND_CLUSTER_IP, 0)), Reason::NoEndpoint);
    assert_eq!(no_endpoint_reason(&entry(1, KIND_NODE_PORT, SERVICE_PASS_WHEN_EMPTY)), Reason::PassedOn);
    assert_eq!(
        no_endpoint_reason(&entry(1, KIND_CLUSTER_IP, SERVICE_DROP_WHEN_EMPTY)),
        Reason::NoLocalEndpoint
    );
    assert_eq!(why_nothing(Some(crate::service::KIND_ADDRESS)), Reason::UndefinedPort);
    assert_eq!(why_nothing(Some(KIND_UNMANAGED)), Reason::UnmanagedAddress);
    assert_eq!(why_nothing(None), Reason::UnallocatedAddress);
}

#[test]
fn clients_outside_are_spread_by_maglev_where_the_service_says_so() {
    let service =
        |flags| ServiceEntry { algorithm: Algorithm::RoundRobin as u8, ..entry(1, KIND_NODE_PORT, flags) };
    let of = |flags, outside| algorithm(&service(flags), outside);
    let (mh, rr) = (Algorithm::Maglev as u8, Algorithm::RoundRobin as u8);
    assert_eq!([of(SERVICE_MAGLEV_OUTSIDE, true), of(SERVICE_MAGLEV_OUTSIDE, false)], [mh, rr]);
    assert_eq!([of(0, true), of(SERVICE_DSR | SERVICE_SCOPED, true)], [rr, rr]);
}

#[test]
fn an_endpoint_belongs_to_its_service_until_its_id_is_free() {
    use crate::backend::{BACKEND_ACTIVE, BACKEND_FREE, BACKEND_GONE, BACKEND_RESET};
    let service = entry(1, KIND_CLUSTER_IP, 0);
    for state in [BACKEND_ACTIVE, BACKEND_GONE, BACKEND_RESET] {
        assert!(is_of(&backend(state, 1, 0), &service), "{state}");
        assert!(!is_of(&backend(state, 2, 0), &service), "{state}");
        assert_eq!(serves(&backend(state, 1, 0), &service), state == BACKEND_ACTIVE, "{state}");
    }
    assert!(!is_of(&backend(BACKEND_FREE, 1, 0), &service));
}

#[test]
fn devices_are_unattended_from_attended_until_on() {
    let attended = |until, now| {
        is_attended(&NodeConfig { attended_until: until, hz: 1000, ..NodeConfig::default() }, now)
    };
    assert!(!attended(0, u32::MAX - 5) && !attended(0, 5), "no agent was there");
    assert!(attended(100, 99) && !attended(100, 100) && !attended(100, 101));
    assert!(attended(3, u32::MAX - 3) && !attended(u32::MAX - 3, 3), "jiffies wrap around");
    assert!(!attended(100, 100u32.wrapping_add((1 << 31) + 10)), "the agent ended weeks ago");
}
