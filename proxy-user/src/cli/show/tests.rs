mod lists;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::Duration;

use clap::Parser as _;
use insta::assert_snapshot;
use proxy_cli::output::{List, write_list};
use proxy_cli::selector::{ServiceFilter, ServiceSelector};
use proxy_common::latency::LatencyEntry;
use proxy_common::reason::Reason;
use proxy_common::stats::ServiceStats;
use rstest::rstest;
use serde::Serialize;

use super::facts::Counts;
use super::*;
use crate::cli::args::{Args, Command};
use crate::cli::check;
use crate::cli::check::facts::{Installed, Others};
use crate::cli::selector::{SelectInMaps as _, matches};
use crate::maps::view::{
    BackendRow, BackendState, FlowRow, Forwarding, FrontendRow, FrontendRowKind, NameRow, Snapshot,
    Transport, UnmanagedRow, UsageRow, ViewError,
};
use crate::programs::hooks::SOCKET_HOOKS;
use crate::programs::{Attachment, MissingFeature};
use proxy_cli::args::bpffs::BpffsArgs;
use proxy_cli::args::common::{AgentArgs, ReaderArgs};
use proxy_cli::args::inspect::StatusArgs;
use proxy_cli::args::list::{NamespaceArgs, Output, OutputArgs};
use proxy_cli::value::Listen;
use proxy_core::model::lookup::{Place, Places};
use proxy_core::model::net::{IpFamily, Protocol};
use proxy_core::model::{ApiServers, FlowState};
use proxy_core::plan::Scope as Clients;
use proxy_core::testing::free_port;

fn name(namespace: &str, name: &str, port: &str, protocol: u8, family: IpFamily) -> NameRow {
    NameRow {
        namespace: namespace.into(),
        name: name.into(),
        port: port.into(),
        protocol: Transport(protocol),
        family,
    }
}

fn frontend(
    service: u32,
    address: &str,
    protocol: u8,
    kind: FrontendRowKind,
    backends: &[u32],
) -> FrontendRow {
    let socket: SocketAddr = address.parse().unwrap();
    FrontendRow {
        service,
        address: socket.ip(),
        port: socket.port(),
        protocol: Transport(protocol),
        scope: Clients::Internal,
        kind,
        backends: backends.to_vec(),
        slots: backends.len() as u32,
        affinity_secs: 0,
        algorithm: "random",
        by_load: false,
        outside: (kind == FrontendRowKind::NodePort).then_some("mh"),
        dsr: false,
        when_empty: "reject",
        local: false,
        restricted: false,
    }
}

fn backend(socket: &str, service: u32) -> BackendRow {
    BackendRow {
        socket: socket.parse().unwrap(),
        protocol: Transport(6),
        service,
        state: BackendState::Active,
        local: false,
        terminating: false,
        weight: 1,
    }
}

fn render<T: Serialize>(list: &List<T>, output: Output) -> String {
    list.render(output, true).unwrap()
}

fn all() -> ServiceSelector {
    ServiceSelector::default()
}

fn named(text: &str) -> ServiceSelector {
    ServiceSelector { services: vec![text.parse().unwrap()], ..all() }
}

fn shown(snapshot: &Snapshot, text: &str, output: Output) -> String {
    service_show(snapshot, &named(text), &ReportedState::default(), output).unwrap()
}

/// Returns a cluster: redis with five endpoints and a node port, DNS without endpoints, a load balancer with policy Local and
/// no local endpoint, and a frontend whose slots are being reused.
pub(in crate::cli) fn cluster() -> Snapshot {
    let mut backends: BTreeMap<u32, BackendRow> =
        (1..=5u32).map(|id| (id, backend(&format!("10.244.{id}.7:6379"), 1))).collect();
    backends.insert(1, BackendRow { local: true, ..backends[&1].clone() });
    backends.insert(2, BackendRow { terminating: true, ..backends[&2].clone() });
    backends.insert(6, BackendRow { state: BackendState::Gone, ..backend("10.244.9.9:6379", 1) });
    backends.insert(7, backend("[fd00:1::7]:6379", 4));
    Snapshot {
        names: BTreeMap::from([
            (1, name("default", "redis", "resp", 6, IpFamily::V4)),
            (2, name("kube-system", "kube-dns", "dns", 17, IpFamily::V4)),
            (3, name("web", "shop", "", 6, IpFamily::V4)),
            (4, name("default", "redis", "resp", 6, IpFamily::V6)),
        ]),
        frontends: vec![
            frontend(2, "10.96.0.10:53", 17, FrontendRowKind::ClusterIp, &[]),
            FrontendRow {
                affinity_secs: 10_800,
                ..frontend(1, "10.96.0.10:6379", 6, FrontendRowKind::ClusterIp, &[1, 2, 3, 4, 5])
            },
            frontend(1, "0.0.0.0:30079", 6, FrontendRowKind::NodePort, &[1, 2]),
            frontend(4, "[fd00:96::a]:6379", 6, FrontendRowKind::ClusterIp, &[7]),
            FrontendRow {
                scope: Clients::External,
                when_empty: "drop",
                local: true,
                restricted: true,
                ..frontend(3, "203.0.113.5:443", 6, FrontendRowKind::LoadBalancer, &[])
            },
            frontend(9, "10.96.0.99:80", 6, FrontendRowKind::ExternalIp, &[3]),
        ],
        addresses: [2, 1],
        left: BTreeMap::from([(6, 2)]),
        unmanaged: Vec::new(),
        backends,
        service_stats: BTreeMap::from([(
            1,
            ServiceStats {
                connections: 12,
                packets: 340,
                bytes: 20_480,
                reply_packets: 338,
                reply_bytes: 1_572_864,
            },
        )]),
        backend_stats: BTreeMap::from([(1, 7), (2, 5)]),
        ejected: BTreeMap::new(),
        open_connections: BTreeMap::from([(1, 3), (2, 0)]),
        by_load: BTreeSet::from([1]),
        refusals: BTreeMap::from([((2, Reason::NoEndpoint), 3), ((1, Reason::FlowTableFull), 2)]),
        latency: BTreeMap::new(),
    }
}

#[test]
fn service_show_prints_the_measured_latency() {
    let mut snapshot = cluster();
    let mut entry = LatencyEntry { sum_us: 9_000, refused: 1, retransmits: 2, ..LatencyEntry::default() };
    (entry.buckets[1], entry.buckets[7]) = (98, 2);
    snapshot.latency = BTreeMap::from([((1, 0), entry), ((1, 1), entry)]);
    let text = shown(&snapshot, "default/redis:resp", Output::Text);
    let lines: Vec<_> = text.lines().collect();
    let title = lines.iter().position(|line| line.starts_with("CONNECTS TO")).unwrap();
    assert_eq!(
        lines[title..title + 3],
        [
            "CONNECTS TO      ANSWERED  P50       P99        REFUSED  SYN RETRANSMITS",
            "all              100       <= 64 us  <= 4.1 ms  1        2",
            "10.244.1.7:6379  100       <= 64 us  <= 4.1 ms  1        2",
        ]
    );
    let json: serde_json::Value =
        serde_json::from_str(&shown(&snapshot, "default/redis:resp", Output::Json)).unwrap();
    assert_eq!(json["ports"][0]["latency"][1]["endpoint"], "10.244.1.7:6379");
    assert_eq!(json["ports"][0]["latency"][0]["p99Us"], 4096);
}

fn flows() -> Vec<FlowRow> {
    let one = FlowRow {
        protocol: Transport(6),
        client: "192.0.2.9:40000".parse().unwrap(),
        frontend: "10.96.0.10:6379".parse().unwrap(),
        backend: "10.244.1.7:6379".parse().unwrap(),
        source: "192.0.2.9:40001".parse().unwrap(),
        service: 1,
        backend_id: 1,
        state: FlowState::Established,
        forwarding: Forwarding::Snat,
        age: Duration::from_secs(3_725),
        idle: Duration::from_millis(1_500),
        timeout: Duration::from_secs(86_398),
    };
    let other = FlowRow {
        protocol: Transport(17),
        client: "192.0.2.10:5353".parse().unwrap(),
        frontend: "10.96.0.10:53".parse().unwrap(),
        backend: "10.244.2.8:53".parse().unwrap(),
        source: "192.0.2.10:5353".parse().unwrap(),
        service: 2,
        backend_id: 8,
        state: FlowState::Unreplied,
        forwarding: Forwarding::Dnat,
        age: Duration::from_secs(4),
        idle: Duration::from_secs(4),
        timeout: Duration::from_secs(26),
    };
    let expired = FlowRow {
        state: FlowState::Expired,
        idle: Duration::from_hours(25),
        timeout: Duration::ZERO,
        ..one.clone()
    };
    vec![one, other, expired]
}

fn maps() -> Vec<UsageRow> {
    let row = |name, kind: &str, used, capacity, setting| UsageRow {
        name,
        id: 11,
        pin: PathBuf::from("/sys/fs/bpf/ballast/v1").join(name),
        kind: kind.into(),
        capacity,
        used,
        memory: Some(u64::from(capacity) * 24),
        setting,
    };
    vec![
        row("services", "hash", Some(6), 65_536, "--max-frontends"),
        row("backends", "array", Some(6), 262_144, "--max-backends"),
        row("slots", "array", Some(500_000), 524_288, "--max-slots"),
        row("flows", "array", Some(131_072), 131_072, "--max-flows"),
        UsageRow { memory: None, ..row("config", "array", None, 1, "") },
    ]
}

fn attachment(hook: &str, program: &'static str, ifindex: Option<u32>, place: Option<&str>) -> Attachment {
    Attachment {
        hook: hook.into(),
        program_id: 42,
        program,
        ifindex,
        place: place.map(str::to_owned),
        runs: 9,
        run_time: Duration::from_micros(4),
    }
}

/// Returns the programs of the socket hooks and of two devices, and one of a device that is gone.
fn attachments() -> Vec<Attachment> {
    let sockets = SOCKET_HOOKS.iter().map(|(name, _)| attachment(name, name, None, Some("cgroup 1")));
    let devices = [
        attachment("clsact_ingress_9", "tc_ingress", Some(9), Some("eth1")),
        attachment("clsact_egress_9", "tc_egress", Some(9), Some("eth1")),
        attachment("tcx_ingress_7", "tc_ingress", Some(7), Some("eth0")),
        attachment("tcx_egress_7", "tc_egress", Some(7), Some("eth0")),
        attachment("tcx_ingress_8", "tc_ingress", Some(8), None),
    ];
    sockets.chain(devices).collect()
}

fn installed(agent: AgentState, facts: &Result<StatusFacts, ViewError>) -> Installed {
    let of = |facts: &StatusFacts| (facts.maps.clone(), facts.abi);
    Installed {
        agent,
        report: AgentReport::default(),
        metrics: None,
        maps: facts.as_ref().map(of).map_err(ToString::to_string),
        owner: Some(Ok(())),
        is_denied: false,
        attachments: facts.as_ref().map(|facts| facts.attachments.clone()).unwrap_or_default(),
        devices: [(7, "eth0".to_owned()), (9, "eth1".to_owned())].into(),
    }
}

fn status_of(agent: AgentState, facts: Result<StatusFacts, ViewError>) -> Status {
    Status::new(installed(agent, &facts), Others::default(), facts)
}

fn facts() -> StatusFacts {
    StatusFacts {
        folder: "/sys/fs/bpf/ballast/v1".into(),
        abi: proxy_common::version::ABI_VERSION,
        snat_ports: "1024-29999,61000-65535".into(),
        node_ports: ["127.0.0.1", "192.0.2.1"].map(|address| address.parse().unwrap()).into(),
        service_cidrs: ["10.96.0.0/16", "fd96::/112"].map(|range| range.parse().unwrap()).into(),
        attachments: attachments(),
        missing_features: vec![MissingFeature::SocketErrors],
        maps: maps(),
        counts: Counts { ports: 4, frontends: 6, empty: 2, unmanaged: 0, backends: 6, flows: 2 },
        shared_ports: Vec::new(),
        reasons: Reason::ALL.iter().map(|r| (*r, u64::from(*r == Reason::NoEndpoint) * 3)).collect(),
    }
}

fn well() -> AgentState {
    AgentState::Answered { address: "127.0.0.1:10249".parse().unwrap(), status: 200 }
}

#[test]
fn services_as_a_table() {
    assert_snapshot!(render(&service_list(&cluster(), &all()), Output::Text), @r#"
    SERVICE                   TYPE          ADDRESS                         ENDPOINTS
    id 9                      ExternalIP    10.96.0.99:80/TCP
    default/redis:resp        ClusterIP     10.96.0.10:6379/TCP             10.244.1.7:6379,10.244.2.7:6379,10.244.3.7:6379 +2 more
    default/redis:resp        NodePort      0.0.0.0:30079/TCP               10.244.1.7:6379,10.244.2.7:6379
    default/redis:resp        ClusterIP     [fd00:96::a]:6379/TCP           [fd00:1::7]:6379
    kube-system/kube-dns:dns  ClusterIP     10.96.0.10:53/UDP               <none> (rejects)
    web/shop                  LoadBalancer  203.0.113.5:443/TCP (external)  <none> (drops)
    "#);
}

#[test]
fn services_as_a_wide_table() {
    assert_snapshot!(render(&service_list(&cluster(), &all()), Output::Wide), @r"
    SERVICE                   TYPE          ADDRESS                FOR       POLICY   AFFINITY                ALGORITHM           SERVICE-ID  DRAINING     ENDPOINTS
    id 9                      ExternalIP    10.96.0.99:80/TCP      internal  Cluster  none                    random                       9  -
    default/redis:resp        ClusterIP     10.96.0.10:6379/TCP    internal  Cluster  client address, 10800s  random                       1  1 (2 flows)  10.244.1.7:6379,10.244.2.7:6379,10.244.3.7:6379,10.244.4.7:6379,10.244.5.7:6379
    default/redis:resp        NodePort      0.0.0.0:30079/TCP      internal  Cluster  none                    random, mh outside           1  1 (2 flows)  10.244.1.7:6379,10.244.2.7:6379
    default/redis:resp        ClusterIP     [fd00:96::a]:6379/TCP  internal  Cluster  none                    random                       4  -            [fd00:1::7]:6379
    kube-system/kube-dns:dns  ClusterIP     10.96.0.10:53/UDP      internal  Cluster  none                    random                       2  -            <none> (rejects)
    web/shop                  LoadBalancer  203.0.113.5:443/TCP    external  Local    none                    random                       3  -            <none> (drops)
    ");
}

#[test]
fn services_as_json() {
    let json: serde_json::Value =
        serde_json::from_str(&render(&service_list(&cluster(), &all()), Output::Json)).unwrap();
    assert_snapshot!(json["frontends"][1], @r#"{"address":"10.96.0.10:6379","affinitySeconds":10800,"algorithm":"random","backends":[1,2,3,4,5],"draining":{"endpoints":1,"flows":2},"endpoints":["10.244.1.7:6379","10.244.2.7:6379","10.244.3.7:6379","10.244.4.7:6379","10.244.5.7:6379"],"family":"IPv4","forwarding":"snat","name":"redis","namespace":"default","policy":"Cluster","port":"resp","protocol":"TCP","scope":"internal","service":"default/redis:resp","serviceId":1,"sourceRanges":false,"type":"ClusterIP","verdict":"forward"}"#);
    // A backend id that belongs to another Service now is not shown as an endpoint of this one.
    assert_eq!(json["frontends"][0]["service"], "id 9");
    assert_eq!(json["frontends"][0]["endpoints"], serde_json::json!([]));
}

#[test]
fn one_service() {
    assert_snapshot!(shown(&cluster(), "default/redis:resp", Output::Text), @r#"
    Service:      default/redis:resp (TCP, IPv4)
    Id:           1
    Affinity:     client address, 10800s
    Algorithm:    random, mh outside
    Connections:  12
    Packets:      340 to endpoints (20.0 KiB), 338 replies (1.5 MiB)
    Refused:      2 flow_table_full (drop): The flow table is full: all examined entries hold established flows. Raise --max-flows.

    TYPE       ADDRESS              ENDPOINTS
    ClusterIP  10.96.0.10:6379/TCP  10.244.1.7:6379,10.244.2.7:6379,10.244.3.7:6379 +2 more
    NodePort   0.0.0.0:30079/TCP    10.244.1.7:6379,10.244.2.7:6379

    ID  ENDPOINT             STATE                LOCAL  WEIGHT  CONNECTIONS  OPEN
     1  10.244.1.7:6379/TCP  active               yes         1            7     3
     2  10.244.2.7:6379/TCP  active, terminating  no          1            5     0
     3  10.244.3.7:6379/TCP  active               no          1            0     0
     4  10.244.4.7:6379/TCP  active               no          1            0     0
     5  10.244.5.7:6379/TCP  active               no          1            0     0
     6  10.244.9.9:6379/TCP  gone, 2 flows left   no          1            0     0

    Service:      default/redis:resp (TCP, IPv6)
    Id:           4
    Affinity:     none
    Algorithm:    random
    Connections:  0
    Packets:      0 to endpoints (0 B), 0 replies (0 B)
    Refused:      none

    TYPE       ADDRESS                ENDPOINTS
    ClusterIP  [fd00:96::a]:6379/TCP  [fd00:1::7]:6379

    ID  ENDPOINT              STATE   LOCAL  WEIGHT  CONNECTIONS  OPEN
     7  [fd00:1::7]:6379/TCP  active  no          1            0     -
    "#);
}

#[test]
fn one_service_as_json() {
    assert_snapshot!(shown(&cluster(), "kube-system/kube-dns", Output::Json), @r#"
    {
      "ports": [
        {
          "service": "kube-system/kube-dns:dns",
          "namespace": "kube-system",
          "name": "kube-dns",
          "port": "dns",
          "protocol": "UDP",
          "family": "IPv4",
          "serviceId": 2,
          "connections": 0,
          "packets": 0,
          "bytes": 0,
          "replyPackets": 0,
          "replyBytes": 0,
          "frontends": [
            {
              "service": "kube-system/kube-dns:dns",
              "namespace": "kube-system",
              "name": "kube-dns",
              "port": "dns",
              "protocol": "UDP",
              "family": "IPv4",
              "serviceId": 2,
              "type": "ClusterIP",
              "scope": "internal",
              "address": "10.96.0.10:53",
              "verdict": "reject",
              "policy": "Cluster",
              "sourceRanges": false,
              "affinitySeconds": 0,
              "algorithm": "random",
              "forwarding": "snat",
              "backends": [],
              "endpoints": []
            }
          ],
          "backends": [],
          "refusals": [
            {
              "reason": "no_endpoint",
              "verdict": "reject",
              "count": 3
            }
          ],
          "problems": []
        }
      ]
    }
    "#);
}

#[test]
fn addresses_that_are_left_alone_are_a_fact_and_no_problem() {
    let row = |address: &str, is_own| UnmanagedRow { address: address.parse().unwrap(), is_own };
    let unmanaged = vec![row("10.96.0.10", true), row("10.96.0.77", false)];
    let alone = Snapshot { unmanaged: unmanaged.clone(), ..Snapshot::default() };
    assert_snapshot!(render(&service_list(&alone, &all()), Output::Text), @r"
    SERVICE  TYPE       ADDRESS     ENDPOINTS
    -        Unmanaged  10.96.0.10  <none> (unmanaged: an address of this node)
    -        Unmanaged  10.96.0.77  <none> (unmanaged: another proxy serves it)
    ");
    assert_snapshot!(render(&service_list(&alone, &all()), Output::Wide), @r"
    SERVICE  TYPE       ADDRESS     FOR  POLICY  AFFINITY  ALGORITHM  SERVICE-ID  DRAINING  ENDPOINTS
    -        Unmanaged  10.96.0.10  -    -       -         -                   -  -         <none> (unmanaged: an address of this node)
    -        Unmanaged  10.96.0.77  -    -       -         -                   -  -         <none> (unmanaged: another proxy serves it)
    ");
    let json = render(&service_list(&alone, &all()), Output::Json);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["unmanaged"][0], serde_json::json!({"address": "10.96.0.10", "reason": "own-address"}));
    assert_eq!(json["unmanaged"][1]["reason"], "other-proxy");
    let error = named("kube-system/kube-dns").check(&alone).unwrap_err().to_string();
    assert!(error.contains("10.96.0.10 (an address of this node)"), "{error}");
    let some = Snapshot { unmanaged, ..cluster() };
    let text = shown(&some, "kube-system/kube-dns", Output::Text);
    let last = text.lines().last().unwrap();
    assert!(
        last.starts_with("Unmanaged addresses") && last.contains("10.96.0.77 (another proxy serves it)"),
        "{last}"
    );
    let mut facts = facts();
    let before = status_of(well(), Ok(facts.clone())).problems();
    facts.counts.unmanaged = 2;
    let status = status_of(well(), Ok(facts));
    assert_eq!(status.problems(), before);
    assert!(status.render(Output::Text).unwrap().contains("; 2 unmanaged"));
}

#[test]
fn an_unknown_service_is_an_error_with_a_way_out() {
    let error = named("nowhere").check(&cluster()).unwrap_err().to_string();
    assert!(error.contains("default/nowhere") && error.contains("ballast service list"), "{error}");
}

#[test]
fn backends_as_a_table() {
    assert_snapshot!(render(&backend_list(&cluster(), &all(), &Places::default()), Output::Text), @r#"
    ID  ENDPOINT              STATE                LOCAL  WEIGHT  CONNECTIONS  OPEN  SERVICE
     1  10.244.1.7:6379/TCP   active               yes         1            7     3  default/redis:resp
     2  10.244.2.7:6379/TCP   active, terminating  no          1            5     0  default/redis:resp
     3  10.244.3.7:6379/TCP   active               no          1            0     0  default/redis:resp
     4  10.244.4.7:6379/TCP   active               no          1            0     0  default/redis:resp
     5  10.244.5.7:6379/TCP   active               no          1            0     0  default/redis:resp
     6  10.244.9.9:6379/TCP   gone, 2 flows left   no          1            0     0  default/redis:resp
     7  [fd00:1::7]:6379/TCP  active               no          1            0     -  default/redis:resp
    "#);
}

#[test]
fn backends_of_one_service_as_json() {
    let mut cluster = cluster();
    cluster.backends.retain(|id, _| matches!(id, 2 | 7));
    cluster.names.remove(&4);
    assert_snapshot!(render(&backend_list(&cluster, &named("redis"), &Places::default()), Output::Json), @r#"
    {
      "backends": [
        {
          "id": 2,
          "address": "10.244.2.7:6379",
          "service": "default/redis:resp",
          "namespace": "default",
          "name": "redis",
          "port": "resp",
          "protocol": "TCP",
          "family": "IPv4",
          "serviceId": 1,
          "state": "active",
          "local": false,
          "terminating": true,
          "weight": 1,
          "connections": 5,
          "open": 0
        }
      ]
    }
    "#);
}

#[test]
fn flows_as_a_table() {
    let selection = FlowSelection::default();
    assert_snapshot!(render(&flow_list(&flows(), &cluster(), &selection), Output::Text), @r#"
    PROTO  CLIENT           FRONTEND         BACKEND          STATE         AGE  IDLE
    TCP    192.0.2.9:40000  10.96.0.10:6379  10.244.1.7:6379  established  1h2m    1s
    UDP    192.0.2.10:5353  10.96.0.10:53    10.244.2.8:53    unreplied      4s    4s
    "#);
}

#[test]
fn flows_as_a_wide_table_with_expired_ones() {
    let selection = FlowSelection { with_expired: true, ..FlowSelection::default() };
    assert_snapshot!(render(&flow_list(&flows(), &cluster(), &selection), Output::Wide), @r#"
    PROTO  CLIENT           FRONTEND         BACKEND          STATE         AGE  IDLE  TIMEOUT  SERVICE                   FORWARDING  SOURCE           BACKEND-ID
    TCP    192.0.2.9:40000  10.96.0.10:6379  10.244.1.7:6379  established  1h2m    1s   23h59m  default/redis:resp        snat        192.0.2.9:40001  1
    UDP    192.0.2.10:5353  10.96.0.10:53    10.244.2.8:53    unreplied      4s    4s      26s  kube-system/kube-dns:dns  dnat        192.0.2.10:5353  8
    TCP    192.0.2.9:40000  10.96.0.10:6379  10.244.1.7:6379  expired      1h2m  1d1h       0s  default/redis:resp        snat        192.0.2.9:40001  1
    "#);
}

#[rstest]
#[case(Some("default/redis"), None, false, 1)]
#[case(Some("default/redis"), None, true, 2)]
#[case(Some("kube-system/kube-dns:53"), None, true, 1)]
#[case(None, Some("192.0.2.10"), false, 1)]
#[case(Some("default/redis"), Some("192.0.2.10"), true, 0)]
#[case(None, None, true, 3)]
fn flows_are_selected(
    #[case] service: Option<&str>,
    #[case] client: Option<&str>,
    #[case] with_expired: bool,
    #[case] expected: usize,
) {
    let selection = FlowSelection {
        services: service.map(named).unwrap_or_default(),
        client: client.map(|text| text.parse().unwrap()),
        with_expired,
        ..FlowSelection::default()
    };
    let json = render(&flow_list(&flows(), &cluster(), &selection), Output::Json);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["flows"].as_array().unwrap().len(), expected);
}

#[test]
fn flows_are_selected_by_their_ends_protocol_and_state() {
    let of = |change: fn(&mut FlowSelection)| {
        let mut selection = FlowSelection { with_expired: true, ..FlowSelection::default() };
        change(&mut selection);
        assert!(!selection.is_all());
        flows().iter().filter(|row| selection.takes(row, &cluster())).count()
    };
    assert_eq!(of(|one| one.client = "192.0.2.9:40000".parse().ok()), 2);
    assert_eq!(of(|one| one.frontend = "10.96.0.0/16:53".parse().ok()), 1);
    assert_eq!(of(|one| one.backend = "10.244.2.8".parse().ok()), 1);
    assert_eq!(of(|one| one.protocol = Some(Protocol::Udp)), 1);
    assert_eq!(of(|one| one.state = Some(FlowState::Expired)), 1);
}

#[test]
fn a_flow_as_json() {
    let rows = flows().into_iter().take(1).collect::<Vec<_>>();
    assert_snapshot!(render(&flow_list(&rows, &cluster(), &FlowSelection::default()), Output::Json), @r#"
    {
      "flows": [
        {
          "service": "default/redis:resp",
          "namespace": "default",
          "name": "redis",
          "port": "resp",
          "protocol": "TCP",
          "family": "IPv4",
          "serviceId": 1,
          "client": "192.0.2.9:40000",
          "frontend": "10.96.0.10:6379",
          "backend": "10.244.1.7:6379",
          "source": "192.0.2.9:40001",
          "backendId": 1,
          "state": "established",
          "forwarding": "snat",
          "ageSeconds": 3725.0,
          "idleSeconds": 1.5,
          "timeoutSeconds": 86398.0
        }
      ]
    }
    "#);
}

#[test]
fn maps_as_a_table() {
    assert_snapshot!(render(&map_list(&maps(), &[]).unwrap(), Output::Text), @r#"
    NAME      TYPE     USED  CAPACITY    MEMORY  PIN
    services  hash        6     65536   1.5 MiB  /sys/fs/bpf/ballast/v1/services
    backends  array       6    262144   6.0 MiB  /sys/fs/bpf/ballast/v1/backends
    slots     array  500000    524288  12.0 MiB  /sys/fs/bpf/ballast/v1/slots
    flows     array  131072    131072   3.0 MiB  /sys/fs/bpf/ballast/v1/flows
    config    array       -         1         -  /sys/fs/bpf/ballast/v1/config
    "#);
}

#[test]
fn maps_as_json() {
    assert_snapshot!(render(&map_list(&maps()[4..], &[]).unwrap(), Output::Json), @r#"
    {
      "maps": [
        {
          "name": "config",
          "id": 11,
          "pin": "/sys/fs/bpf/ballast/v1/config",
          "type": "array",
          "used": null,
          "capacity": 1,
          "memory": null,
          "setting": ""
        }
      ]
    }
    "#);
}

#[test]
fn list_of_many_services_searches_only_rows_of_each() {
    const MANY: u32 = 20_000;
    let name = cluster().names[&1].clone();
    let many = Snapshot {
        names: (0..MANY).map(|id| (id, name.clone())).collect(),
        frontends: (0..MANY)
            .map(|id| frontend(id, "10.96.0.10:80", 6, FrontendRowKind::ClusterIp, &[id]))
            .collect(),
        backends: (0..MANY).map(|id| (id, backend("10.244.1.7:80", id))).collect(),
        refusals: (0..MANY).map(|id| ((id, Reason::NoEndpoint), 1)).collect(),
        ..Snapshot::default()
    };
    // The time of this thread only, since other tests run at the same time.
    let used =
        || Duration::try_from(rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime)).unwrap();
    let before = used();
    assert_eq!(service_list(&many, &all()).rows().len(), MANY as usize);
    service_show(&many, &all(), &ReportedState::default(), Output::Json).unwrap();
    assert_eq!(stats::list(&many, &all()).rows().len(), MANY as usize);
    let used = used().saturating_sub(before);
    assert!(used < Duration::from_secs(5), "{used:?}");
}

#[test]
fn empty_list_prints_nothing_and_has_a_note() {
    let nothing = Snapshot::default();
    let list = service_list(&nothing, &all());
    for output in [Output::Text, Output::Wide, Output::Name] {
        assert_eq!(list.render(output, true).unwrap(), "");
        assert_eq!(list.note(output), Some("No Services are programmed."));
    }
    assert_eq!(list.note(Output::Json), None);
    let list = backend_list(&nothing, &all(), &Places::default());
    assert_eq!(list.note(Output::Text), Some("No endpoints are programmed."));
    let flows = flow_list(&[], &nothing, &FlowSelection::default());
    assert!(flows.note(Output::Text).unwrap().starts_with("No connections."));
    assert_eq!(service_list(&cluster(), &all()).note(Output::Text), None);
}

#[test]
fn service_show_with_problems_prints_them_and_nodes_of_endpoints() {
    let place = Place {
        pod: Some("redis-0".to_owned()),
        node: Some("node-a".to_owned()),
        zone: Some("eu-1a".to_owned()),
    };
    let endpoint = ("default".to_owned(), "redis".to_owned(), [10, 244, 1, 7].into());
    let service = ("default".to_owned(), "redis".to_owned());
    let known = ReportedState {
        problems: [(service, vec!["Service default/redis: spec.ports: no room".to_owned()])].into(),
        places: [(endpoint, place)].into(),
    };
    let of = |output| service_show(&cluster(), &named("redis"), &known, output).unwrap();
    let text = of(Output::Text);
    assert!(text.contains("Problems:     Service default/redis: spec.ports: no room\n"), "{text}");
    assert!(!text.contains("redis-0"), "{text}");
    let wide = of(Output::Wide);
    let row = wide.lines().find(|line| line.contains("10.244.1.7:6379/TCP")).unwrap();
    assert!(row.ends_with("redis-0  node-a  eu-1a"), "{row}");
    assert!(
        wide.contains("POLICY") && wide.contains("10.244.5.7:6379"),
        "more than in the plain form: {wide}"
    );
    let json: serde_json::Value = serde_json::from_str(&of(Output::Json)).unwrap();
    assert_eq!(json["ports"][0]["problems"][0], "Service default/redis: spec.ports: no room");
    let backends = render(&backend_list(&cluster(), &named("redis"), &known.places), Output::Json);
    let backends: serde_json::Value = serde_json::from_str(&backends).unwrap();
    assert_eq!(backends["backends"][0]["zone"], "eu-1a");
    assert_eq!(of(Output::Name), "default/redis:resp\n");
}

#[test]
fn service_port_in_json_has_one_identity_in_all_commands() {
    let rows = |text: String, group: &str| {
        serde_json::from_str::<serde_json::Value>(&text).unwrap()[group].as_array().unwrap().clone()
    };
    let selector = named("default/redis");
    let selection = FlowSelection { services: named("default/redis"), ..FlowSelection::default() };
    let lists = [
        rows(render(&service_list(&cluster(), &selector), Output::Json), "frontends"),
        rows(render(&backend_list(&cluster(), &selector, &Places::default()), Output::Json), "backends"),
        rows(render(&stats::list(&cluster(), &selector), Output::Json), "services"),
        rows(render(&flow_list(&flows(), &cluster(), &selection), Output::Json), "flows"),
        rows(shown(&cluster(), "default/redis", Output::Json), "ports"),
    ];
    let fields = ["service", "namespace", "name", "port", "protocol", "family", "serviceId"];
    let identity = |row: &serde_json::Value| fields.map(|field| row[field].clone());
    for rows in lists {
        let one = rows.iter().find(|row| row["serviceId"] == 1).unwrap();
        let expected: [serde_json::Value; 7] = [
            "default/redis:resp".into(),
            "default".into(),
            "redis".into(),
            "resp".into(),
            "TCP".into(),
            "IPv4".into(),
            1.into(),
        ];
        assert_eq!(identity(one), expected, "{one}");
    }
}

#[test]
fn a_status_with_a_map_that_fills_up() {
    assert_snapshot!(status_of(well(), Ok(facts())).render(Output::Wide).unwrap(), @"
    Agent:      ok, at 127.0.0.1:10249
    Programs:   1 at 16 hooks
    Missing:    bpf_set_retval for sockets (Linux 6.1): a call to a Service without endpoints is not refused; its packets are rejected or dropped; --socket-drop fail has no effect; with --node-port-bind refuse, bind fails with EPERM instead of EADDRINUSE
    Maps:       5 in /sys/fs/bpf/ballast/v1 (ABI 1), 22.5 MiB
    Services:   4 ports, 6 frontends, 2 of them without endpoints
    Endpoints:  6 usable, 6 of 262144 ids in use
    Node ports: at 127.0.0.1 (sockets of the node), 192.0.2.1
    Ranges:     10.96.0.0/16, fd96::/112
    Flows:      2; source ports for SNAT 1024-29999,61000-65535
    Rejected:   no_endpoint 3
    Dropped:    none
    Passed:     none

    HOOK              PLACE     PROGRAM        ID  RUNS
    sock_recvmsg4     cgroup 1  sock_recvmsg4  42     9
    sock_recvmsg6     cgroup 1  sock_recvmsg6  42     9
    sock_peer4        cgroup 1  sock_peer4     42     9
    sock_peer6        cgroup 1  sock_peer6     42     9
    sock_release      cgroup 1  sock_release   42     9
    sock_sendmsg4     cgroup 1  sock_sendmsg4  42     9
    sock_sendmsg6     cgroup 1  sock_sendmsg6  42     9
    sock_outcome      cgroup 1  sock_outcome   42     9
    sock_connect4     cgroup 1  sock_connect4  42     9
    sock_connect6     cgroup 1  sock_connect6  42     9
    sock_bind4        cgroup 1  sock_bind4     42     9
    sock_bind6        cgroup 1  sock_bind6     42     9
    clsact_ingress_9  eth1 (9)  tc_ingress     42     9
    clsact_egress_9   eth1 (9)  tc_egress      42     9
    tcx_ingress_7     eth0 (7)  tc_ingress     42     9
    tcx_egress_7      eth0 (7)  tc_egress      42     9
    tcx_ingress_8     gone      tc_ingress     42     9

    Problems:   nearly full: slots (500000 of 524288); raise --max-slots
    ");
}

#[test]
fn a_status_when_all_is_well() {
    let mut facts = facts();
    facts.maps.remove(2);
    facts.service_cidrs.clear();
    let status = status_of(well(), Ok(facts));
    assert_eq!(status.problems(), Vec::<String>::new());
    let text = status.render(Output::Text).unwrap();
    assert!(text.ends_with("Problems:   none\n"), "{text}");
    assert!(text.contains("\nRanges:     none: unused addresses"), "{text}");
}

#[test]
fn status_shows_the_active_api_server() {
    let mut servers = ApiServers {
        servers: vec!["https://a:6443/".to_owned(), "https://b:6443/".to_owned()],
        ..ApiServers::default()
    };
    let rendered = |api_servers: &ApiServers, output| {
        let nothing = Err(ViewError::Nothing { bpffs: "/sys/fs/bpf".into() });
        let report = AgentReport { api_servers: api_servers.clone(), ..AgentReport::default() };
        let installed = Installed { report, ..installed(AgentState::NotAsked, &nothing) };
        Status::new(installed, Others::default(), nothing).render(output).unwrap()
    };
    let text = |servers: &ApiServers| rendered(servers, Output::Text);
    assert!(text(&servers).contains("\nAPI server: none answers, of 2; 0 failovers\n"));
    (servers.active, servers.failovers) = (Some("https://b:6443/".to_owned()), 1);
    assert!(text(&servers).contains("\nAPI server: https://b:6443/, of 2; 1 failover\n"));
    assert!(rendered(&servers, Output::Json).contains("\"active\": \"https://b:6443/\""));
}

#[test]
fn a_status_without_agent_and_maps() {
    let agent = AgentState::Silent {
        address: "127.0.0.1:10249".parse().unwrap(),
        reason: "Connection refused".into(),
    };
    let nothing = || Err(ViewError::Nothing { bpffs: "/sys/fs/bpf".into() });
    assert_snapshot!(status_of(agent.clone(), nothing()).render(Output::Text).unwrap(), @r"
    Agent:      no answer at 127.0.0.1:10249
    Problems:   no agent answers at 127.0.0.1:10249 (Connection refused), and no program is attached: Ballast does not serve this node; start `ballast run`, or give the agent's address with --metrics-bind-address
                no Ballast maps on the bpffs /sys/fs/bpf: start `ballast run`, or give the agent's bpffs with --bpffs
    ");
    assert_snapshot!(status_of(agent, nothing()).render(Output::Json).unwrap(), @r#"
    {
      "ok": false,
      "agent": {
        "state": "down",
        "address": "127.0.0.1:10249"
      },
      "abi": 1,
      "folder": null,
      "attachments": [],
      "kernelLacks": [],
      "apiServers": {
        "servers": [],
        "active": null,
        "failovers": 0
      },
      "xdp": [],
      "resident": null,
      "maps": [],
      "snatPorts": null,
      "nodePorts": [],
      "serviceCidrs": [],
      "counts": null,
      "sharedNodePorts": [],
      "reasons": {},
      "problems": [
        "no agent answers at 127.0.0.1:10249 (Connection refused), and no program is attached: Ballast does not serve this node; start `ballast run`, or give the agent's address with --metrics-bind-address",
        "no Ballast maps on the bpffs /sys/fs/bpf: start `ballast run`, or give the agent's bpffs with --bpffs"
      ]
    }
    "#);
}

#[test]
fn status_shows_attached_and_missing_hooks() {
    let mut facts = facts();
    facts.maps.remove(2);
    let json = status_of(well(), Ok(facts.clone())).render(Output::Json).unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let [cgroup, .., device, gone] = json["attachments"].as_array().unwrap().as_slice() else {
        panic!("{json}")
    };
    assert_eq!((&cgroup["place"], &cgroup["ifindex"]), (&"cgroup 1".into(), &serde_json::Value::Null));
    assert_eq!((&device["place"], &device["ifindex"]), (&"eth0".into(), &7.into()));
    assert_eq!((&gone["place"], &gone["attached"]), (&serde_json::Value::Null, &false.into()));
    assert_eq!(json["ok"], true, "a device that is gone is no problem");
    facts.attachments[0].place = None;
    let egress = facts.attachments.iter_mut().find(|one| one.hook == "clsact_egress_9").unwrap();
    egress.program_id = 0;
    let problems = status_of(well(), Ok(facts)).problems();
    assert_eq!(problems.len(), 2, "{problems:?}");
    assert!(
        problems[0].contains("1 of 12 socket programs") && problems[0].contains("cgroup"),
        "{problems:?}"
    );
    assert!(problems[1].contains("detached externally: eth1 (egress)"), "{problems:?}");
}

#[test]
fn the_exit_code_of_a_status_and_of_a_list_without_maps() {
    let silent = ([127, 0, 0, 1], free_port()).into();
    let folder = tempfile::tempdir().unwrap();
    let reader = || ReaderArgs {
        maps: BpffsArgs { bpffs: folder.path().to_owned() },
        format: OutputArgs { output: Output::Text },
    };
    let agent = AgentArgs { metrics_bind_address: Some(Listen::Socket(silent)) };
    let args = StatusArgs { reader: reader(), agent };
    let status = status(&args).unwrap();
    assert!(!status.well && status.text.contains("no answer at"), "{status:?}");
    let listed = ["ballast", "service", "list", "--bpffs", &folder.path().to_string_lossy()];
    let Command::Service { command } = Args::parse_from(listed).command else { panic!("another command") };
    let ask = AskApi {
        labels: |_, _| Ok(BTreeSet::new()),
        places: |_, _| Ok(Places::new()),
        pod: |_, _, _| Err(String::new()),
    };
    let error = services(&command, ask, &mut Vec::new()).unwrap_err().to_string();
    assert!(error.contains("no BPF file system is mounted at") && error.contains("--bpffs"), "{error}");
}

#[test]
fn empty_answers_are_empty_lists_in_json() {
    let nothing = Snapshot::default();
    let selection = FlowSelection::default();
    for (name, text) in [
        ("frontends", render(&service_list(&nothing, &all()), Output::Json)),
        ("backends", render(&backend_list(&nothing, &all(), &Places::default()), Output::Json)),
        ("flows", render(&flow_list(&[], &nothing, &selection), Output::Json)),
        ("maps", render(&map_list(&[], &[]).unwrap(), Output::Json)),
    ] {
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(json, serde_json::json!({ name: [] }));
    }
}

#[test]
fn a_status_without_programs_names_what_is_not_translated() {
    let mut facts = facts();
    facts.attachments.clear();
    let problems = status_of(well(), Ok(facts.clone())).problems().join("\n");
    for words in [
        "socket programs are not attached",
        "no device has Ballast's programs: packets are not translated",
        "slots (500000 of 524288)",
        "--max-slots",
    ] {
        assert!(problems.contains(words), "{words} is missing in: {problems}");
    }
    assert!(!problems.contains("flows"), "a full flow table is as it should be: {problems}");
    facts.abi = 0;
    let problems = status_of(well(), Ok(facts)).problems().join("\n");
    assert!(problems.contains("the maps are empty"), "{problems}");
}

#[test]
fn a_status_and_a_check_of_the_same_facts_agree() {
    let mut broken = facts();
    broken.attachments.retain(|one| one.ifindex.is_none());
    let kube_proxy = Others { kube_proxy_process: Some(7), ..Others::default() };
    for (facts, others) in [(broken, Others::default()), (facts(), kube_proxy), (facts(), Others::default())]
    {
        let facts = Ok(facts);
        let checked = check::facts::CheckFacts {
            installed: Some(installed(well(), &facts)),
            others: others.clone(),
            ..check::facts::CheckFacts::default()
        };
        let lines = check::judge::judge(&checked).into_iter();
        let of_agent = lines.filter(|line| line.group == "agent" || line.check == "kube-proxy");
        let failed = of_agent.filter(|line| line.outcome != check::judge::CheckResult::Pass).count();
        let status = Status::new(installed(well(), &facts), others, facts);
        assert_eq!(status.problems().len(), failed, "{:?}", status.problems());
    }
}

#[test]
fn status_without_permission_says_cannot_tell() {
    let denied = || Err(ViewError::Denied { path: "/sys/fs/bpf/ballast".into() });
    let installed = Installed { is_denied: true, ..installed(well(), &denied()) };
    let problems = Status::new(installed, Others::default(), denied()).problems();
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert!(
        problems[0].contains("no permission to read") && problems[0].contains("run as root"),
        "{problems:?}"
    );
}

#[rstest]
#[case("default/redis:rsep", "default/redis:resp")]
#[case("shop", "web/shop")]
#[case("default/redsi", "default/redis")]
fn a_mistyped_service_gets_the_nearest_names(#[case] asked: &str, #[case] expected: &str) {
    let error = named(asked).check(&cluster()).unwrap_err().to_string();
    assert!(error.contains(&format!("did you mean {expected}?")), "{error}");
}

#[rstest]
#[case("redis", None, false, 1)]
#[case("shop", None, false, 0)]
#[case("shop", Some("web"), false, 1)]
#[case("shop", None, true, 1)]
#[case("svc/redis", None, false, 1)]
fn a_name_without_namespace(
    #[case] text: &str,
    #[case] namespace: Option<&str>,
    #[case] all_namespaces: bool,
    #[case] expected: usize,
) {
    let flags = NamespaceArgs { namespace: namespace.map(str::to_owned), all_namespaces };
    let filter = ServiceFilter::parse(text, &flags).unwrap();
    let cluster = cluster();
    let found = [1, 3].iter().filter(|id| matches(&filter, **id, &cluster.names[id], &cluster)).count();
    assert_eq!(found, expected);
}

#[test]
fn a_namespace_that_contradicts_is_an_error() {
    let flags = NamespaceArgs { namespace: Some("web".to_owned()), all_namespaces: false };
    let error = ServiceFilter::parse("default/redis", &flags).unwrap_err().to_string();
    assert!(error.contains("not in the namespace web"), "{error}");
}

#[test]
fn a_list_of_one_namespace_or_of_labels() {
    let of = |selector: ServiceSelector| render(&service_list(&cluster(), &selector), Output::Name);
    let namespace = ServiceSelector { namespace: Some("kube-system".to_owned()), ..all() };
    assert_eq!(of(namespace), "kube-system/kube-dns:dns\n");
    let labelled = BTreeSet::from([("web".to_owned(), "shop".to_owned())]);
    assert_eq!(of(ServiceSelector { labelled: Some(labelled), ..all() }), "web/shop\n");
}

#[test]
fn an_unknown_namespace_is_an_error_with_the_nearest() {
    let of = |namespace: &str| ServiceSelector { namespace: Some(namespace.to_owned()), ..all() };
    of("web").check(&cluster()).unwrap();
    let error = of("kube-sytem").check(&cluster()).unwrap_err().to_string();
    assert!(error.contains("kube-sytem") && error.contains("did you mean kube-system?"), "{error}");
}

#[rstest]
#[case("default/redis", true)]
#[case("service/redis", true)]
#[case("services/default/redis", true)]
#[case("svc/redis:6379", true)]
#[case("svc/web/redis", false)]
#[case("redis", true)]
#[case("default/redis:resp", true)]
#[case("default/redis:6379", true)]
#[case("default/redis:30079", true)]
#[case("default/redis:53", false)]
#[case("default/red", false)]
#[case("web/redis", false)]
fn a_service_is_named(#[case] text: &str, #[case] expected: bool) {
    let cluster = cluster();
    let filter: ServiceFilter = text.parse().unwrap();
    assert_eq!(matches(&filter, 1, &cluster.names[&1], &cluster), expected);
}

#[rstest]
#[case("")]
#[case("/redis")]
#[case("default/")]
#[case("default/redis:")]
#[case("a/b/c")]
fn invalid_service_names_are_refused(#[case] text: &str) {
    let error = text.parse::<ServiceFilter>().unwrap_err().to_string();
    assert!(error.contains("svc/NAME"), "{error}");
}

#[rstest]
#[case("HTTP/1.1 200 OK\r\n\r\nok", Some(200))]
#[case("HTTP/1.1 503 Service Unavailable\r\n\r\n", Some(503))]
#[case("SSH-2.0-OpenSSH_9.2\r\n", None)]
#[case("", None)]
fn the_agent_is_asked(#[case] reply: &'static str, #[case] expected: Option<u16>) {
    let (address, thread) = answers_once(reply);
    let state = probe(Some(Listen::Socket(address)));
    assert!(thread.join().unwrap().starts_with("GET /healthz HTTP/1.1\r\n"));
    match (state, expected) {
        (AgentState::Answered { status, .. }, Some(expected)) => assert_eq!(status, expected),
        (AgentState::Silent { .. }, None) => {}
        (state, _) => panic!("{state:?}"),
    }
}

/// Starts a server that sends one answer; the thread returns the request.
fn answers_once(reply: &'static str) -> (SocketAddr, JoinHandle<String>) {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = server.local_addr().unwrap();
    let thread = std::thread::spawn(move || {
        let (mut stream, _) = server.accept().unwrap();
        let mut request = [0; 1024];
        let length = stream.read(&mut request).unwrap();
        stream.write_all(reply.as_bytes()).unwrap();
        String::from_utf8_lossy(&request[..length]).into_owned()
    });
    (address, thread)
}

#[rstest]
#[case::something_is_wrong("HTTP/1.1 200 OK\r\nx: y\r\n\r\n{\"problems\": [\"Service a/b: c\"]}", &["Service a/b: c"])]
#[case::all_is_well("HTTP/1.1 200 OK\r\n\r\n{}", &[])]
#[case::an_older_agent("HTTP/1.1 404 Not Found\r\n\r\n", &[])]
#[case::cut("HTTP/1.1 200 OK\r\n\r\n{\"problems\": [\"Service", &["cannot read /status of the agent at"])]
fn what_is_wrong_with_objects_is_asked(#[case] reply: &'static str, #[case] expected: &[&str]) {
    let (address, thread) = answers_once(reply);
    let report = report(&AgentState::Answered { address, status: 200 });
    let found = &report.problems;
    assert!(thread.join().unwrap().starts_with("GET /status HTTP/1.1\r\n"));
    assert_eq!(found.len(), expected.len());
    assert!(found.iter().zip(expected).all(|(found, expected)| found.starts_with(expected)), "{found:?}");
    let before = status_of(well(), Ok(facts())).problems().len();
    let facts = Ok(facts());
    let installed = Installed { report, ..installed(well(), &facts) };
    let status = Status::new(installed, Others::default(), facts);
    assert_eq!(status.problems().len(), before + expected.len());
}

#[test]
fn agent_without_a_server_is_silent_or_not_asked() {
    let address = ([127, 0, 0, 1], free_port()).into();
    assert!(matches!(probe(Some(Listen::Socket(address))), AgentState::Silent { .. }));
    assert_eq!(probe(Some(Listen::Off)), AgentState::NotAsked);
}
