use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use proxy_common::latency::LatencyEntry;
use proxy_common::reason::Reason;
use proxy_common::stats::ServiceStats;
use proxy_core::model::FlowState;
use rstest::rstest;

use super::*;
use crate::driver::{Changes, Histogram, Operations};
use crate::maps::view::{BackendRow, BackendState, FlowCounts, NameRow, Overview, Transport, UsageRow};
use crate::programs::Attachment;
use datapath::Reading;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use proxy_core::model::net::IpFamily;
use proxy_core::plan::Scope;
use proxy_core::store::Table;
use proxy_core::sync::{Count, Operation};

mod documented;
mod monitoring;

/// A parsed exposition: (sample name with labels, value), and (family, type).
#[derive(Default, Debug)]
struct Parsed {
    samples: Vec<(String, f64)>,
    families: Vec<(String, String)>,
}

impl Parsed {
    fn value(&self, sample: &str) -> Option<f64> {
        self.samples.iter().find(|(name, _)| name == sample).map(|(_, value)| *value)
    }
}

/// Parses the text by the rules of `OpenMetrics` 1.0: each family is declared once and before its samples, the samples
/// have the suffixes of its type, no sample occurs twice, and the text has an end mark.
fn parse(text: &str) -> Parsed {
    let body = text.strip_suffix("# EOF\n").expect("the end is marked");
    let mut parsed = Parsed::default();
    let mut seen = BTreeSet::new();
    for line in body.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert!(parsed.families.iter().all(|(known, _)| known != name), "{name} is declared twice");
            parsed.families.push((name.to_owned(), kind.to_owned()));
        } else if !line.starts_with("# ") {
            let (sample, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("no value: {line}"));
            let (family, kind) = parsed.families.last().expect("a family comes first");
            let name = sample.split('{').next().unwrap();
            let suffix = name.strip_prefix(family.as_str()).unwrap_or_else(|| panic!("{name} in {family}"));
            let legal: &[&str] = match kind.as_str() {
                "counter" => &["_total"],
                "gauge" => &[""],
                "histogram" => &["_bucket", "_sum", "_count"],
                "info" => &["_info"],
                other => panic!("{family} is a {other}"),
            };
            assert!(legal.contains(&suffix), "{name} is a {kind}");
            assert!(seen.insert(sample.to_owned()), "{sample} comes twice");
            parsed.samples.push((sample.to_owned(), value.parse().unwrap()));
        }
    }
    parsed
}

#[derive(Debug)]
struct Fixed(Reading);

impl Collector for Fixed {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        self.0.encode(&mut encoder)
    }
}

fn reading() -> Reading {
    let name = NameRow {
        namespace: "default".into(),
        name: "redis".into(),
        port: "resp".into(),
        protocol: Transport(6),
        family: IpFamily::V4,
    };
    let backend = BackendRow {
        socket: SocketAddr::from(([10, 0, 0, 1], 6379)),
        protocol: Transport(6),
        service: 3,
        state: BackendState::Active,
        local: true,
        terminating: false,
        weight: 1,
    };
    let stats = ServiceStats { connections: 5, packets: 6, bytes: 7, reply_packets: 8, reply_bytes: 9 };
    let link = |ifindex: u32, place: Option<&str>| Attachment {
        hook: format!("tcx_ingress_{ifindex}"),
        program_id: 7,
        program: "tc_ingress",
        ifindex: Some(ifindex),
        place: place.map(str::to_owned),
        runs: 10,
        run_time: Duration::from_micros(3),
    };
    let map = UsageRow {
        name: "services",
        id: 1,
        pin: PathBuf::new(),
        kind: "hash".into(),
        capacity: 100,
        used: Some(2),
        memory: Some(4096),
        setting: "",
    };
    let overview = Overview {
        snapshot: crate::maps::view::Snapshot {
            names: [(3, name)].into(),
            backends: [(1, backend.clone()), (2, BackendRow { state: BackendState::Gone, ..backend })].into(),
            service_stats: [(3, stats)].into(),
            refusals: [((3, Reason::NoEndpoint), 4), ((99, Reason::NoEndpoint), 1)].into(),
            latency: [((3, 0), LatencyEntry::default()), ((3, 1), LatencyEntry::default())].into(),
            ..Default::default()
        },
        maps: vec![map.clone(), UsageRow { name: "config", used: None, memory: None, ..map }],
        flows: FlowCounts { v4: 11, v6: 0, states: [(FlowState::Established, 11)].into() },
        reasons: Reason::ALL.iter().map(|reason| (*reason, *reason as u64)).collect(),
    };
    let attachments = vec![
        link(2, None),
        link(3, Some("eth0")),
        link(4, Some("veth1")),
        link(5, Some("veth2")),
        link(6, None),
    ];
    let bare = [(3, "eth0"), (4, "veth1"), (8, "eth1")].map(|(ifindex, name)| (ifindex, name.to_owned()));
    Reading { overview, attachments, uplinks: [2, 3, 8].into(), bare: bare.into() }
}

fn metrics(status: Status) -> Metrics {
    Metrics::new(Path::new("/nonexistent"), watch::Sender::new(status).subscribe(), true)
}

/// Returns a status in which everything has happened.
fn eventful() -> Status {
    let at = Some(UNIX_EPOCH + Duration::from_millis(1_500));
    let mut sync_duration = Histogram::default();
    let mut event_to_map = Histogram::default();
    for microseconds in [100, 99, 20_000_000] {
        sync_duration.observe(Duration::from_micros(microseconds));
        event_to_map.observe(Duration::from_micros(microseconds));
    }
    let mut programming = Histogram::default();
    programming.observe(Duration::from_millis(1_500));
    let count = Count { done: 9, failed: 1 };
    Status {
        up_to_date: at.iter().map(|at| (IpFamily::V6, *at)).collect(),
        last_queued: at,
        synced: true,
        services_listed: true,
        partial_sync_duration: sync_duration.clone(),
        sync_duration,
        event_to_map,
        network_programming: [(IpFamily::V6, programming)].into(),
        no_local: [((Scope::Internal, IpFamily::V4), 3), ((Scope::External, IpFamily::V6), 2)].into(),
        service_changes: Changes { total: 2, pending: 1 },
        slice_changes: Changes { total: 3, pending: 4 },
        operations: vec![Operations { table: Table::Services, operation: Operation::Write, count }],
        failing: 5,
        complete: true,
        drift: 6,
        ..Status::default()
    }
}

#[test]
fn everything_is_valid_and_kube_proxys_names_are_there() {
    let metrics = metrics(eventful());
    metrics.answered_healthz(200);
    metrics.answered_livez(503);
    let parsed = parse(&metrics.encode(Format::OpenMetrics).unwrap());
    for (sample, value) in [
        ("kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{ip_family=\"IPv4\"}", 1.5),
        ("kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family=\"IPv6\"}", 1.5),
        ("kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family=\"IPv4\"}", 3.0),
        ("kubeproxy_sync_proxy_rules_duration_seconds_sum{ip_family=\"IPv6\"}", 20.000_199),
        ("kubeproxy_sync_proxy_rules_duration_seconds_bucket{le=\"0.001\",ip_family=\"IPv4\"}", 2.0),
        ("kubeproxy_sync_proxy_rules_duration_seconds_bucket{le=\"16.384\",ip_family=\"IPv4\"}", 2.0),
        ("kubeproxy_sync_full_proxy_rules_duration_seconds_count{ip_family=\"IPv4\"}", 0.0),
        ("kubeproxy_sync_partial_proxy_rules_duration_seconds_count{ip_family=\"IPv6\"}", 3.0),
        ("kubeproxy_network_programming_duration_seconds_bucket{le=\"1.0\",ip_family=\"IPv6\"}", 0.0),
        ("kubeproxy_network_programming_duration_seconds_bucket{le=\"2.0\",ip_family=\"IPv6\"}", 1.0),
        (
            "kubeproxy_sync_proxy_rules_no_local_endpoints_total{traffic_policy=\"internal\",ip_family=\"IPv4\"}",
            3.0,
        ),
        (
            "kubeproxy_sync_proxy_rules_no_local_endpoints_total{traffic_policy=\"internal\",ip_family=\"IPv6\"}",
            0.0,
        ),
        (
            "kubeproxy_sync_proxy_rules_no_local_endpoints_total{traffic_policy=\"external\",ip_family=\"IPv6\"}",
            2.0,
        ),
        ("kubeproxy_sync_proxy_rules_duration_seconds_bucket{le=\"+Inf\",ip_family=\"IPv4\"}", 3.0),
        ("kubeproxy_sync_proxy_rules_service_changes_total", 2.0),
        ("kubeproxy_sync_proxy_rules_service_changes_pending", 1.0),
        ("kubeproxy_sync_proxy_rules_endpoint_changes_total", 3.0),
        ("kubeproxy_sync_proxy_rules_endpoint_changes_pending", 4.0),
        ("kubeproxy_proxy_healthz_total{code=\"200\"}", 1.0),
        ("kubeproxy_proxy_livez_total{code=\"503\"}", 1.0),
        ("ballast_event_to_map_duration_seconds_bucket{le=\"0.0001\"}", 2.0),
        ("ballast_map_operations_total{map=\"services\",operation=\"write\"}", 9.0),
        ("ballast_map_operation_failures_total{map=\"services\",operation=\"write\"}", 1.0),
        ("ballast_listed{kind=\"Service\"}", 1.0),
        ("ballast_listed{kind=\"EndpointSlice\"}", 0.0),
        ("ballast_synced", 1.0),
        ("ballast_failing_ports", 5.0),
        ("ballast_drift_repairs_total", 6.0),
        ("ballast_problems", 0.0),
        ("ballast_maps_readable", 0.0),
    ] {
        assert_eq!(parsed.value(sample), Some(value), "{sample} in {parsed:#?}");
    }
    let abi = proxy_common::version::ABI_VERSION;
    let build = format!("ballast_build_info{{version=\"{}\",abi=\"{abi}\"}}", env!("CARGO_PKG_VERSION"));
    assert_eq!(parsed.value(&build), Some(1.0), "{parsed:#?}");
}

#[test]
fn timestamp_is_absent_before_the_first_sync() {
    let parsed = parse(&metrics(Status::default()).encode(Format::OpenMetrics).unwrap());
    let name = "kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family=\"IPv4\"}";
    assert_eq!(parsed.value(name), None);
}

#[test]
fn the_process_is_measured() {
    let parsed = parse(&metrics(Status::default()).encode(Format::OpenMetrics).unwrap());
    let value = |name| parsed.value(name).unwrap_or_else(|| panic!("{name} is missing"));
    assert!(value("process_resident_memory_bytes") > 1_000_000.0);
    assert!(value("process_open_fds") >= 3.0 && value("process_max_fds") >= value("process_open_fds"));
    assert!(value("process_cpu_seconds_total") >= 0.0);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
    assert!((now - 86_400.0..now + 2.0).contains(&value("process_start_time_seconds")));
}

#[test]
fn what_the_programs_counted() {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Fixed(reading())));
    let mut text = String::new();
    text::encode(&mut text, &registry).unwrap();
    let parsed = parse(&text);
    let port = "namespace=\"default\",name=\"redis\",port=\"resp\",protocol=\"TCP\",ip_family=\"IPv4\"";
    for (sample, value) in [
        (format!("ballast_service_connections_total{{{port}}}"), 5.0),
        (format!("ballast_service_packets_total{{{port},direction=\"forward\"}}"), 6.0),
        (format!("ballast_service_bytes_total{{{port},direction=\"reply\"}}"), 9.0),
        (format!("ballast_service_endpoints{{{port}}}"), 1.0),
        (format!("ballast_service_refusals_total{{{port},reason=\"no_endpoint\",verdict=\"reject\"}}"), 4.0),
        ("ballast_reasons_total{reason=\"flow_table_full\",verdict=\"drop\"}".into(), 2.0),
        ("ballast_reasons_total{reason=\"no_endpoint\",verdict=\"reject\"}".into(), 0.0),
        ("ballast_map_entries{map=\"services\"}".into(), 2.0),
        ("ballast_map_capacity{map=\"config\"}".into(), 100.0),
        ("ballast_map_memory_bytes{map=\"services\"}".into(), 4096.0),
        ("ballast_flows{state=\"established\"}".into(), 11.0),
        ("ballast_flows{state=\"unreplied\"}".into(), 0.0),
        ("ballast_flows{state=\"half-open\"}".into(), 0.0),
        ("ballast_backends{state=\"gone\"}".into(), 1.0),
        ("ballast_program_attached{hook=\"egress_3\",program=\"tc_egress\",device=\"eth0\"}".into(), 0.0),
        ("ballast_program_attached{hook=\"ingress_8\",program=\"tc_ingress\",device=\"eth1\"}".into(), 0.0),
        ("ballast_program_attached{hook=\"tcx_ingress_2\",program=\"tc_ingress\",device=\"\"}".into(), 0.0),
        (
            "ballast_program_attached{hook=\"tcx_ingress_3\",program=\"tc_ingress\",device=\"eth0\"}".into(),
            1.0,
        ),
        ("ballast_local_programs{program=\"tc_ingress\",state=\"attached\"}".into(), 2.0),
        ("ballast_local_programs{program=\"tc_ingress\",state=\"detached\"}".into(), 1.0),
        ("ballast_program_runs_total{program=\"tc_ingress\"}".into(), 10.0),
    ] {
        assert_eq!(parsed.value(&sample), Some(value), "{sample} in {parsed:#?}");
    }
    assert_eq!(parsed.value("ballast_map_entries{map=\"config\"}"), None, "nothing is known of it");
    assert!(!text.contains("veth1"), "a pod has no series of its own");
}

#[rstest]
#[case("", Format::Plain)]
#[case("*/*", Format::Plain)]
#[case("text/html,application/xhtml+xml", Format::Plain)]
#[case("application/openmetrics-text", Format::OpenMetrics)]
#[case("application/openmetrics-text; version=1.0.0; charset=utf-8, */*;q=0.1", Format::OpenMetrics)]
#[case("Application/OpenMetrics-Text;q=0.6,text/plain;q=0.5", Format::OpenMetrics)]
// The headers of Prometheus 3 and 2.
#[case(
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
    Format::OpenMetrics
)]
#[case(
    "application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    Format::Plain
)]
#[case("text/plain,application/openmetrics-text;q=0.9", Format::Plain)]
#[case("application/openmetrics-text;q=0", Format::Plain)]
#[case("application/openmetrics-text;q=much", Format::Plain)]
fn the_format_that_is_asked_for(#[case] accept: &str, #[case] expected: Format) {
    assert_eq!(Format::negotiate(accept), expected);
}

/// Parses the text by the rules of 0.0.4: a family has the name of its samples, and one of five types.
#[test]
fn plain_text_is_valid_and_says_the_same() {
    let metrics = metrics(eventful());
    metrics.answered_healthz(200);
    let mut families = BTreeSet::new();
    let mut current = (String::new(), String::new());
    let mut samples = BTreeSet::new();
    let plain = metrics.encode(Format::Plain).unwrap();
    for line in plain.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert!(["counter", "gauge", "histogram", "summary", "untyped"].contains(&kind), "{line}");
            assert!(families.insert(name.to_owned()), "{name} is declared twice");
            current = (name.to_owned(), kind.to_owned());
        } else if let Some(rest) = line.strip_prefix("# HELP ") {
            assert!(rest.split_once(' ').is_some_and(|(_, help)| !help.is_empty()), "{line}");
        } else {
            assert!(!line.starts_with('#') && !line.is_empty(), "{line}");
            let sample = line.rsplit_once(' ').unwrap().0;
            let suffix = sample.split('{').next().unwrap().strip_prefix(current.0.as_str());
            let legal: &[&str] =
                if current.1 == "histogram" { &["_bucket", "_sum", "_count"] } else { &[""] };
            assert!(suffix.is_some_and(|suffix| legal.contains(&suffix)), "{line} in {current:?}");
            samples.insert(sample.to_owned());
        }
    }
    assert!(families.contains("kubeproxy_proxy_healthz_total") && families.contains("ballast_build_info"));
    let open = parse(&metrics.encode(Format::OpenMetrics).unwrap());
    let plain = |sample: String| {
        if sample.contains("_bucket{le=") { sample.replacen(".0\"", "\"", 1) } else { sample }
    };
    let open = open.samples.into_iter().map(|(sample, _)| plain(sample));
    assert_eq!(samples, open.collect());
    assert!(
        samples
            .contains("kubeproxy_network_programming_duration_seconds_bucket{le=\"1\",ip_family=\"IPv6\"}")
    );
}
