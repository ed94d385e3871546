use std::collections::BTreeMap;

use insta::assert_snapshot;
use proxy_common::PROTO_SCTP;
use proxy_common::affinity::{AffinityEntry, AffinityKey, NetnsAffinityKey};
use proxy_common::backend::{
    BACKEND_ACTIVE, BACKEND_GONE, BACKEND_IN_CLUSTER, BACKEND_LOCAL, BACKEND_TERMINATING, BackendEntry,
};
use proxy_common::config::{
    CONFIG_DETECT_LOCAL, CONFIG_MASQUERADE_EXTERNAL, CONFIG_SOCKET_DROP_FAIL, CONFIG_SOCKET_LB_HOST_ONLY,
    CONFIG_SOCKET_LB_OFF, NodeConfig,
};
use proxy_common::node::{Cidr, DeviceSource, NODE_ADDR_LOOPBACK, NODE_ADDR_OWN, NODE_ADDR_PORTS, NodeEntry};
use proxy_common::prefilter::{PREFILTER_WORDS, Role, position};
use proxy_common::reason::Reason;
use proxy_common::service::{
    KIND_ADDRESS, KIND_CLUSTER_IP, KIND_LOAD_BALANCER, KIND_NODE_PORT, KIND_UNMANAGED, SCOPE_EXTERNAL,
    SERVICE_DROP_WHEN_EMPTY, SERVICE_LOCAL, SERVICE_SCOPED, SERVICE_SOURCE_RANGES, ServiceEntry,
};
use proxy_common::source_range::SourceRangeKey;
use rstest::rstest;

use super::*;
use crate::maps::view::{Common, NameRow, Transport};
use proxy_cli::args::list::Output;
use proxy_cli::question::DestinationArg;
use proxy_core::model::net::IpFamily;

type A4 = [u8; 4];
const HZ: u32 = 100;
const NOW: u32 = 1_000_000;

/// Returns the rules of a ClusterIP with affinity and two endpoints, one of them local; of a node port with policy Local and no
/// local endpoint; and of a load balancer with source ranges.
fn rules() -> Rules<A4> {
    let mut prefilter = vec![0; PREFILTER_WORDS as usize];
    let mut services = BTreeMap::new();
    let mut serve = |addr: A4, port, scope, entry: ServiceEntry| {
        let (word, mask) = position(Role::Frontend, &addr, port, 6);
        prefilter[word as usize] |= mask;
        services.insert(ServiceKey { addr, port, proto: 6, scope }, entry);
    };
    let entry = |id, kind, flags, slot_base, slot_count| ServiceEntry {
        id,
        kind,
        flags,
        slot_base,
        slot_count,
        ..ServiceEntry::default()
    };
    let cluster = ServiceEntry { affinity_secs: 60, ..entry(1, KIND_CLUSTER_IP, 0, 0, 2) };
    serve([10, 96, 0, 10], 80, 0, cluster);
    serve([0; 4], 30080, 0, entry(2, KIND_NODE_PORT, SERVICE_SCOPED, 2, 1));
    let local = SERVICE_LOCAL | SERVICE_DROP_WHEN_EMPTY;
    serve([0; 4], 30080, SCOPE_EXTERNAL, entry(2, KIND_NODE_PORT, local, 0, 0));
    let restricted = entry(3, KIND_LOAD_BALANCER, SERVICE_SOURCE_RANGES, 2, 1);
    serve([203, 0, 113, 1], 443, 0, ServiceEntry { ranges: 7, ..restricted });
    serve([10, 96, 0, 11], 80, 0, entry(4, KIND_CLUSTER_IP, 0, 0, 0));
    let sctp = ServiceKey { addr: [10, 96, 0, 10], port: 9, proto: PROTO_SCTP, scope: 0 };
    let (word, mask) = position(Role::Frontend, &sctp.addr, sctp.port, sctp.proto);
    prefilter[word as usize] |= mask;
    services.insert(sctp, entry(2, KIND_CLUSTER_IP, 0, 2, 1));
    // The node port sets the prefilter bit of the node's address.
    let (word, mask) = position(Role::Frontend, &[192u8, 0, 2, 1], 30080, 6);
    prefilter[word as usize] |= mask;
    let address = ServiceKey { addr: [10, 96, 0, 10], port: 0, proto: 0, scope: 0 };
    services.insert(address, entry(0, KIND_ADDRESS, 0, 0, 0));
    let backend =
        |addr, service, state, flags| BackendEntry { addr, port: 8080, proto: 6, state, service, flags };
    let both = BACKEND_IN_CLUSTER | BACKEND_LOCAL;
    let mut service_cidrs = [Cidr::NONE; 8];
    service_cidrs[0] = Cidr { addr: [10, 96, 0, 0], mask: [255, 240, 0, 0] };
    let name = |name: &str| NameRow {
        namespace: "default".into(),
        name: name.into(),
        port: String::new(),
        protocol: Transport(6),
        family: IpFamily::V4,
    };
    let netns = NetnsAffinityKey { netns: 1, service: 1, reserved: 0 };
    Rules {
        common: Common {
            config: NodeConfig { host_netns: 1, ..NodeConfig::new(HZ, 16, 16, 1) },
            has_uplink: true,
            now: NOW,
            health: BTreeMap::new(),
            skips: BTreeMap::new(),
            slots: vec![5, 6, 7],
            prefilter,
            names: [(1, name("web")), (2, name("port")), (3, name("lb")), (4, name("empty"))].into(),
            netns_affinity: [(netns, AffinityEntry { backend_id: 5, last_used: NOW - 61 * HZ })].into(),
        },
        services,
        backends: [
            (5, backend([10, 244, 0, 5], 1, BACKEND_ACTIVE, both)),
            (6, backend([10, 244, 1, 6], 1, BACKEND_GONE, BACKEND_IN_CLUSTER)),
            (7, backend([10, 244, 1, 7], 2, BACKEND_ACTIVE, BACKEND_IN_CLUSTER | BACKEND_TERMINATING)),
        ]
        .into(),
        node: NodeEntry {
            source: [192, 0, 2, 1],
            service_cidrs,
            service_cidr_count: 1,
            ..NodeEntry::UNKNOWN
        },
        node_addrs: [([192, 0, 2, 1], NODE_ADDR_OWN | NODE_ADDR_PORTS)].into(),
        others: BTreeMap::new(),
        affinity: [(
            AffinityKey { client: [10, 244, 0, 5], service: 1 },
            AffinityEntry { backend_id: 5, last_used: NOW - 59 * HZ },
        )]
        .into(),
        ranges: vec![
            (8, SourceRangeKey { set: 3, addr: [198, 0, 0, 0] }),
            (16, SourceRangeKey { set: 7, addr: [198, 51, 0, 0] }),
            (24, SourceRangeKey { set: 7, addr: [198, 51, 100, 0] }),
        ],
    }
}

fn ask(rules: &Rules<A4>, client: &str, destination: &str) -> Explanation {
    let Ok(ClientArg::Known(client)) = client.parse() else { panic!("{client}") };
    let Ok(DestinationArg::Address(destination)) = destination.parse() else { panic!("{destination}") };
    let octets = |ip| if let IpAddr::V4(ip) = ip { ip.octets() } else { panic!("IPv4 only") };
    let from = if let Client::Address(ip) = client { Some(octets(ip)) } else { None };
    explain(rules, client, from, octets(destination.to.ip()), destination)
}

#[rstest]
#[case("host", "10.96.0.10:80", "forward", "untouched")]
#[case("pod", "10.96.0.10:80", "forward", "forward")]
#[case("198.51.100.9", "10.96.0.10:80", "forward", "forward")]
#[case("pod", "10.96.0.11:80", "reject no_endpoint", "reject no_endpoint")]
#[case("pod", "10.96.0.10:81", "reject undefined_port", "reject undefined_port")]
#[case("pod", "10.96.0.12:80", "untouched", "drop unallocated_address")]
#[case("host", "10.96.0.12:80", "untouched", "drop unallocated_address")]
#[case("pod", "192.0.2.77:80", "untouched", "untouched")]
#[case("pod", "192.0.2.1:30080", "forward", "forward")]
#[case("198.51.100.9", "192.0.2.1:30080", "forward", "drop no_local_endpoint")]
#[case("host", "203.0.113.1:443", "untouched", "drop source_not_allowed")]
#[case("pod", "10.96.0.10:9/SCTP", "untouched", "forward")]
#[case("host", "10.96.0.10:9/SCTP", "untouched", "forward")]
#[case("host", "10.96.0.10:8/SCTP", "untouched", "reject undefined_port")]
#[case("192.0.2.1", "10.96.0.10:9/SCTP", "untouched", "forward")]
#[case("host", "192.0.2.1:30080/SCTP", "untouched", "untouched")]
#[case("198.51.100.9", "10.96.0.10:8/SCTP", "untouched", "reject undefined_port")]
#[case("pod", "203.0.113.1:443", "untouched", "drop map_inconsistent")]
#[case("198.52.0.1", "203.0.113.1:443", "untouched", "drop source_not_allowed")]
fn verdicts(#[case] client: &str, #[case] destination: &str, #[case] socket: &str, #[case] packet: &str) {
    let said = ask(&rules(), client, destination);
    let text = |path: &Path| match path.outcome {
        PathOutcome::Refused(reason) => format!("{} {}", path.outcome.label(), reason.label()),
        other => other.label().to_owned(),
    };
    assert_eq!([text(&said.socket), text(&said.packet)], [socket, packet], "{said:?}");
}

#[test]
fn an_address_that_is_left_alone() {
    let mut rules = rules();
    let mut leave = |addr: A4| {
        let key = ServiceKey { addr, port: 0, proto: 0, scope: 0 };
        rules.services.insert(key, ServiceEntry { kind: KIND_UNMANAGED, ..ServiceEntry::default() });
    };
    leave([10, 96, 0, 12]);
    leave([10, 96, 0, 13]);
    rules.node_addrs.insert([10, 96, 0, 13], NODE_ADDR_OWN);
    for (destination, why) in [("10.96.0.12:80", "another proxy"), ("10.96.0.13:53/UDP", "this node has it")]
    {
        let said = ask(&rules, "pod", destination);
        for path in [&said.socket, &said.packet] {
            assert_eq!(path.outcome, PathOutcome::Refused(Reason::UnmanagedAddress), "{said:?}");
            assert_eq!(path.outcome.label(), "pass");
            assert!(path.steps.iter().any(|step| step.found.contains(why)), "{said:?}");
        }
    }
}

#[test]
fn unmanaged_address_and_undefined_port_do_not_fail_udp_connect() {
    let mut rules = rules();
    let key = ServiceKey { addr: [10, 96, 0, 12], port: 0, proto: 0, scope: 0 };
    rules.services.insert(key, ServiceEntry { kind: KIND_UNMANAGED, ..ServiceEntry::default() });
    let dropped = |rules: &Rules<A4>, client: &str, to: &str| {
        let socket = ask(rules, client, to).socket;
        let step = socket.steps.iter().find(|step| step.rule == "socket drop");
        (socket.outcome, step.map(|step| step.found.clone()).unwrap_or_default())
    };
    let attended = |rules: &mut Rules<A4>| rules.common.config.attended_until = NOW + 1;
    attended(&mut rules);
    let unmanaged = (PathOutcome::Refused(Reason::UnmanagedAddress), String::new());
    assert_eq!(dropped(&rules, "pod", "10.96.0.12:53/udp"), unmanaged);
    let (outcome, found) = dropped(&rules, "pod", "10.96.0.10:81/udp");
    assert!(outcome == PathOutcome::Untouched && found.starts_with("connect(2) succeeds"), "{found}");
    let (outcome, found) = dropped(&rules, "host", "10.96.0.10:81/udp");
    assert_eq!(outcome, PathOutcome::Refused(Reason::UndefinedPort));
    assert!(found.starts_with("connect(2) succeeds"), "{found}");
}

#[test]
fn node_process_with_itself_as_endpoint_is_refused_by_packets() {
    let mut rules = rules();
    rules.common.config.flags |= CONFIG_SOCKET_LB_OFF;
    let outcome = |rules: &Rules<A4>, client| ask(rules, client, "10.96.0.10:80").packet;
    assert_eq!(outcome(&rules, "host").outcome, PathOutcome::Forward);
    rules.node_addrs.insert([10, 244, 0, 5], NODE_ADDR_OWN);
    assert_eq!(outcome(&rules, "host").outcome, PathOutcome::Refused(Reason::OwnEndpoint));
    assert_eq!(outcome(&rules, "198.51.100.9").outcome, PathOutcome::Forward, "another client");
    rules.backends.get_mut(&6).unwrap().state = BACKEND_ACTIVE;
    let said = outcome(&rules, "host");
    assert_eq!(said.outcome, PathOutcome::Forward, "the other endpoint");
    assert!(said.steps.iter().any(|step| step.found.starts_with("1 of 2 are processes")), "{said:?}");
}

#[test]
fn any_loopback_address_is_translated_by_sockets_like_the_first() {
    let mut rules = rules();
    rules.node_addrs.insert([127, 0, 0, 1], NODE_ADDR_OWN | NODE_ADDR_PORTS | NODE_ADDR_LOOPBACK);
    let (word, mask) = position(Role::Frontend, &[127u8, 0, 0, 1], 30080, 6);
    rules.common.prefilter[word as usize] |= mask;
    for destination in ["127.0.0.1:30080", "127.0.0.2:30080"] {
        assert_eq!(ask(&rules, "host", destination).socket.outcome, PathOutcome::Forward, "{destination}");
    }
    assert_eq!(ask(&rules, "host", "127.0.0.2:30081").socket.outcome, PathOutcome::Untouched);
}

#[test]
fn where_pods_are_known_by_their_addresses_devices_say_nothing() {
    let mut rules = rules();
    rules.common.has_uplink = false;
    rules.node.pods = Cidr { addr: [10, 244, 0, 0], mask: [255, 255, 0, 0] };
    let client = |rules: &Rules<A4>, from: &str| {
        let said = ask(rules, from, "192.0.2.1:30080");
        said.packet.steps.iter().find(|step| step.rule == "client").unwrap().found.clone()
    };
    assert!(client(&rules, "198.51.100.9").starts_with("inside: no device"));
    rules.common.config.flags |= CONFIG_DETECT_LOCAL;
    assert_eq!(client(&rules, "198.51.100.9"), "outside: the address is in no pod range");
    assert!(client(&rules, "10.244.3.9").starts_with("inside"));
}

#[test]
fn a_pod_that_is_its_own_endpoint() {
    assert_snapshot!(ask(&rules(), "10.244.0.5", "10.96.0.10:80").render(Output::Wide).unwrap(), @r"
    10.244.0.5 -> default/web (10.96.0.10:80/TCP): forwarded to its only endpoint, 10.244.0.5:8080

    The socket hooks decide (connect, sendmsg of a process on this node)
      prefilter       address and port may belong to a Service: the maps are looked up
      frontend        10.96.0.10:80/TCP, internal: default/web (id 1), ClusterIP
      source ranges   the Service has no source ranges
      affinity        by the network namespace of the pod, which `explain` does not know
      endpoints       selects the only one
      reply           not translated: packets are sent directly to the endpoint; getpeername(2) and the source of UDP replies show 10.96.0.10:80/TCP
      =>              forwarded to an endpoint
        ENDPOINT         ID  WEIGHT  ON            STATE   SOURCE
        10.244.0.5:8080   5       1  this node     serves  -
        10.244.1.6:8080   6       1  another node  gone    -

    The packet hooks do not translate its packets; they would do this
      prefilter       address and port may belong to a Service: the maps are looked up
      client          inside: an endpoint on this node has this address
      frontend        10.96.0.10:80/TCP, internal: default/web (id 1), ClusterIP
      source ranges   the Service has no source ranges
      affinity        the client keeps endpoint 5
      endpoints       selects the only one
      source address  SNAT to 192.0.2.1, with one of 33512 ports
      reply           arrives at 192.0.2.1; at ingress its source is changed to 10.96.0.10:80/TCP, and it is forwarded to the client
      =>              forwarded to an endpoint
        ENDPOINT         ID  WEIGHT  ON            STATE   SOURCE
        10.244.0.5:8080   5       1  this node     serves  hairpin
        10.244.1.6:8080   6       1  another node  gone    kept
    ");
}

#[test]
fn client_outside_of_a_local_endpoint_has_source_netfilter() {
    let mut rules = rules();
    rules.common.config.flags |= CONFIG_MASQUERADE_EXTERNAL;
    let answer = ask(&rules, "203.0.113.9", "10.96.0.10:80").render(Output::Wide).unwrap();
    let step = "source address  netfilter masquerades the client (--masquerade-external)\n";
    assert!(answer.contains(step) && answer.contains("serves  netfilter"), "{answer}");
    rules.node_addrs.insert([10, 244, 0, 5], NODE_ADDR_OWN);
    let answer = ask(&rules, "203.0.113.9", "10.96.0.10:80").render(Output::Wide).unwrap();
    assert!(!answer.contains("netfilter"), "a process of the node: {answer}");
}

/// Returns the rules with a node port (192.0.2.1:30080) that has one scope.
fn node_port_with_policy_cluster() -> Rules<A4> {
    let mut rules = rules();
    let external = ServiceKey { addr: [0; 4], port: 30080, proto: 6, scope: SCOPE_EXTERNAL };
    rules.services.remove(&external);
    for entry in rules.services.values_mut().filter(|entry| entry.id == 2) {
        entry.flags = 0;
    }
    rules
}

#[test]
fn snat_with_an_overlay_names_both_source_addresses() {
    let mut rules = node_port_with_policy_cluster();
    rules.node.sources[0] = DeviceSource { ifindex: 3, addr: [10, 244, 0, 0] };
    rules.node.source_count = 1;
    let text = ask(&rules, "198.51.100.9", "192.0.2.1:30080").render(Output::Text).unwrap();
    let found =
        "SNAT to 192.0.2.1 or 10.244.0.0 (the route to the endpoint decides), with one of 33512 ports";
    assert!(text.contains(found) && text.contains("arrives at 192.0.2.1 or 10.244.0.0;"), "{text}");
    // An endpoint on this node is behind no such device.
    let text = ask(&rules, "10.244.0.5", "10.96.0.10:80").render(Output::Wide).unwrap();
    assert!(text.contains("SNAT to 192.0.2.1, with one of"), "{text}");
}

#[test]
fn a_node_port_from_outside_and_from_the_host() {
    let mut rules = node_port_with_policy_cluster();
    assert_snapshot!(ask(&rules, "198.51.100.9", "192.0.2.1:30080").render(Output::Wide).unwrap(), @r"
    198.51.100.9 -> default/port (192.0.2.1:30080/TCP): forwarded to its only endpoint, 10.244.1.7:8080

    The packet hooks decide (where packets arrive)
      prefilter       address and port may belong to a Service: the maps are looked up
      client          outside if its packets arrive on an uplink (NIC, tunnel); inside on any other device
      frontend        192.0.2.1:30080/TCP, internal: nothing
      frontend        node port 30080/TCP, internal: default/port (id 2), NodePort
      source ranges   the Service has no source ranges
      endpoints       selects the only one
      source address  SNAT to 192.0.2.1, with one of 33512 ports
      reply           arrives at 192.0.2.1; at ingress its source is changed to 192.0.2.1:30080/TCP, and it is forwarded to the client
      =>              forwarded to an endpoint
        ENDPOINT         ID  WEIGHT  ON            STATE        SOURCE
        10.244.1.7:8080   7       1  another node  terminating  remote

    The socket hooks see it only if the client is a pod of this node; they would do this
      hook            neither this node nor an endpoint on it has the address: unless a pod of this node has it, no socket hook sees the call
      prefilter       address and port may belong to a Service: the maps are looked up
      frontend        192.0.2.1:30080/TCP, internal: nothing
      frontend        node port 30080/TCP, internal: default/port (id 2), NodePort
      source ranges   the Service has no source ranges
      endpoints       selects the only one
      reply           not translated: packets are sent directly to the endpoint; getpeername(2) and the source of UDP replies show 192.0.2.1:30080/TCP
      =>              forwarded to an endpoint
        ENDPOINT         ID  WEIGHT  ON            STATE        SOURCE
        10.244.1.7:8080   7       1  another node  terminating  -
    ");
    rules.node.source = [0; 4];
    let said = ask(&rules, "198.51.100.9", "192.0.2.1:30080");
    assert_eq!(said.packet.outcome, PathOutcome::Refused(Reason::NoRoute));
}

#[test]
fn sctp_of_the_node_itself() {
    assert_snapshot!(ask(&rules(), "host", "10.96.0.10:9/SCTP").render(Output::Wide).unwrap(), @r"
    host -> default/port (10.96.0.10:9/SCTP): forwarded to its only endpoint, 10.244.1.7:8080

    The socket hooks leave it to the packet hooks
      hook            the kernel calls no socket hook for SCTP
      =>              not changed by this path

    The packet hooks decide (where packets arrive)
      hook            no socket hook sees SCTP of this node: the egress hooks see its packets
      prefilter       address and port may belong to a Service: the maps are looked up
      client          inside: a process of this node
      frontend        10.96.0.10:9/SCTP, internal: default/port (id 2), ClusterIP
      source ranges   the Service has no source ranges
      endpoints       selects the only one
      source address  SNAT to 192.0.2.1, with one of 33512 ports
      reply           arrives at 192.0.2.1; at ingress its source is changed to 10.96.0.10:9/SCTP, and it is delivered to the process
      =>              forwarded to an endpoint
        ENDPOINT         ID  WEIGHT  ON            STATE        SOURCE
        10.244.1.7:8080   7       1  another node  terminating  node
    ");
}

#[test]
fn the_longest_range_and_json() {
    let mut rules = rules();
    rules.backends.get_mut(&7).unwrap().service = 3;
    let json = ask(&rules, "198.51.100.9", "203.0.113.1:443").render(Output::Json).unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let packet = &json["packet"];
    assert_eq!(
        (packet["verdict"].as_str(), packet["service"].as_str()),
        (Some("forward"), Some("default/lb"))
    );
    assert_eq!(packet["endpoints"][0]["source"], "remote");
    let ranges =
        packet["steps"].as_array().unwrap().iter().find(|step| step["rule"] == "source ranges").unwrap();
    assert_eq!(ranges["found"], "198.51.100.9 is in 198.51.100.0/24");
}

#[test]
fn pods_socket_is_explained_with_mesh_ports() {
    let mut rules = rules();
    rules.common.config.mesh_ports = [15_001, 0, 0, 0];
    let found = |said: &Explanation, rule| {
        let steps = said.socket.steps.iter().filter(|step| step.rule == rule);
        steps.map(|step| step.found.clone()).collect::<Vec<_>>()
    };
    let said = ask(&rules, "pod", "10.96.0.10:80");
    let expected = "the packet hooks decide instead if a process of the pod listens at a mesh port (15001)";
    assert_eq!(found(&said, "socket lb"), [expected]);
    assert_eq!(found(&ask(&rules, "host", "10.96.0.10:80"), "socket lb"), Vec::<String>::new());
    let refused = |rules: &Rules<A4>| ask(rules, "pod", "10.96.0.11:80").socket.outcome;
    assert!(matches!(refused(&rules), PathOutcome::Refused(_)));
    rules.common.config.attended_until = rules.common.now.wrapping_add(1);
    assert!(matches!(refused(&rules), PathOutcome::Refused(_)), "connect(2) of a TCP socket fails");
    let no_port = |rules: &Rules<A4>| ask(rules, "pod", "10.96.0.10:81/udp").socket.outcome;
    assert_eq!(no_port(&rules), PathOutcome::Untouched, "a message of a UDP socket is left to the packets");
    rules.common.config.flags |= CONFIG_SOCKET_DROP_FAIL;
    assert!(matches!(no_port(&rules), PathOutcome::Refused(_)));
    (rules.common.config.flags, rules.common.config.attended_until) = (0, 0);
    assert!(matches!(no_port(&rules), PathOutcome::Refused(_)), "no agent attends to devices");
}

#[rstest]
#[case::silent(0, "host", "10.96.0.12:80", "untouched", "socket drop")]
#[case::fail(CONFIG_SOCKET_DROP_FAIL, "host", "10.96.0.12:80", "drop", "socket drop")]
#[case::fail_is_for_drops(CONFIG_SOCKET_DROP_FAIL, "host", "10.96.0.11:80", "reject", "endpoints")]
#[case::host_only_leaves_pods(CONFIG_SOCKET_LB_HOST_ONLY, "pod", "10.96.0.10:80", "untouched", "socket lb")]
#[case::host_only_serves_the_node(CONFIG_SOCKET_LB_HOST_ONLY, "host", "10.96.0.10:80", "forward", "reply")]
#[case::off_leaves_the_node(CONFIG_SOCKET_LB_OFF, "host", "10.96.0.10:80", "untouched", "socket lb")]
#[case::off_leaves_pods(CONFIG_SOCKET_LB_OFF, "pod", "10.96.0.10:80", "untouched", "socket lb")]
fn what_the_socket_hooks_do_in_each_mode(
    #[case] flags: u32,
    #[case] client: &str,
    #[case] destination: &str,
    #[case] outcome: &str,
    #[case] last: &str,
) {
    let mut rules = rules();
    rules.common.config.flags |= flags;
    let said = ask(&rules, client, destination);
    let rule = said.socket.steps.last().map(|step| step.rule);
    assert_eq!((said.socket.outcome.label(), rule), (outcome, Some(last)));
    if outcome == "untouched" {
        // The packet hooks must handle what the socket hooks leave.
        assert_ne!(said.packet.outcome, PathOutcome::Untouched, "{said:?}");
    }
}

#[rstest]
#[case::forwarded(
    "pod",
    "192.0.2.1:30080",
    "pod -> default/port (192.0.2.1:30080/TCP): forwarded to its only endpoint, 10.244.1.7:8080"
)]
#[case::no_endpoint(
    "host",
    "10.96.0.11:80",
    "host -> default/empty (10.96.0.11:80/TCP): rejected, no_endpoint: The Service has no usable endpoint"
)]
#[case::no_such_port(
    "pod",
    "10.96.0.10:81",
    "pod -> 10.96.0.10: rejected, undefined_port: 10.96.0.10 is default/port, default/web, which has no port 81/TCP; it has 80/TCP, 9/SCTP"
)]
#[case::no_service("pod", "192.0.2.77:80", "pod -> 192.0.2.77:80/TCP: passes unchanged")]
#[case::dropped(
    "198.51.100.9",
    "10.96.0.12:80",
    "198.51.100.9 -> 10.96.0.12:80/TCP: dropped, unallocated_address:"
)]
fn the_first_line_is_the_verdict(#[case] client: &str, #[case] destination: &str, #[case] expected: &str) {
    let text = ask(&rules(), client, destination).render(Output::Text).unwrap();
    let first = text.lines().next().unwrap();
    assert!(first.starts_with(expected), "{first}");
}

#[rstest]
#[case("host", "10.96.0.10:80", Decides::Socket)]
#[case("pod", "10.96.0.10:80", Decides::Socket)]
#[case("10.244.0.5", "10.96.0.10:80", Decides::Socket)]
#[case("198.51.100.9", "10.96.0.10:80", Decides::Packet)]
#[case("host", "10.96.0.10:9/SCTP", Decides::PacketAfterSocket)]
fn a_client_on_this_node_is_decided_by_its_socket(
    #[case] client: &str,
    #[case] destination: &str,
    #[case] expected: Decides,
) {
    let said = ask(&rules(), client, destination);
    assert_eq!(said.decides, expected);
    let text = said.render(Output::Text).unwrap();
    assert_eq!(
        text.matches("-o wide shows what they would do").count(),
        usize::from(expected != Decides::PacketAfterSocket)
    );
    let json: serde_json::Value = serde_json::from_str(&said.render(Output::Json).unwrap()).unwrap();
    assert_eq!(json["decidedBy"], if expected == Decides::Socket { "socket" } else { "packet" });
    assert_eq!(json["summary"], said.summary());
}

#[test]
fn a_pod_with_a_known_address_is_on_this_node() {
    let address: IpAddr = [10, 244, 0, 99].into();
    let destination =
        Destination { to: "10.96.0.10:80".parse().unwrap(), protocol: proxy_core::model::net::Protocol::Tcp };
    let said =
        explain(&rules(), Client::Pod(Some(address)), Some([10, 244, 0, 99]), [10, 96, 0, 10], destination);
    assert_eq!(said.decides, Decides::Socket);
    let client = said.packet.steps.iter().find(|step| step.rule == "client").unwrap();
    assert_eq!(client.found, "inside: a pod of this node");
}

#[test]
fn endpoint_with_several_slots_is_one_row_in_a_cut_list() {
    let mut rules = rules();
    let count = 15;
    for id in 20..20 + count {
        rules.backends.insert(id, BackendEntry { addr: [10, 244, 2, id as u8], ..rules.backends[&5] });
    }
    rules.common.slots = (20..20 + count).flat_map(|id| [id, id]).collect();
    let key = ServiceKey { addr: [10, 96, 0, 10], port: 80, proto: 6, scope: 0 };
    let entry = rules.services.get_mut(&key).unwrap();
    (entry.slot_base, entry.slot_count) = (0, count * 2);
    let said = ask(&rules, "host", "10.96.0.10:80");
    assert!(said.summary().ends_with("forwarded to one of 15 endpoints"), "{}", said.summary());
    let text = said.render(Output::Text).unwrap();
    assert!(text.contains("selects one of 15,") && text.contains("and 5 more (-o wide shows all)"), "{text}");
    assert_eq!(text.matches(":8080").count(), 10);
    assert!(!said.render(Output::Wide).unwrap().contains("more (-o wide"));
    assert_eq!(said.render(Output::Name).unwrap().lines().count(), 15);
}

#[test]
fn undefined_port_without_service_ranges_is_named() {
    let mut rules = rules();
    rules.node.service_cidr_count = 0;
    let summary = ask(&rules, "pod", "10.96.0.11:81").summary();
    assert_eq!(
        summary,
        "pod -> 10.96.0.11: passes unchanged, since no range in which unused ports are refused has it (--unallocated-addresses, \
         --service-cidrs): \
         10.96.0.11 is default/empty, which has no port 81/TCP; it has 80/TCP"
    );
}
