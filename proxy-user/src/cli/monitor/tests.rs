use std::net::IpAddr;

use insta::assert_snapshot;
use rstest::rstest;
use serde_json::json;

use super::*;
use crate::maps::view::NameRow;
use proxy_core::model::net::IpFamily;

fn words(ip: IpAddr) -> [u32; 4] {
    match ip {
        IpAddr::V4(ip) => [u32::from_ne_bytes(ip.octets()), 0, 0, 0],
        IpAddr::V6(ip) => {
            let octets = ip.octets();
            [0, 4, 8, 12].map(|at| u32::from_ne_bytes(*octets[at..].first_chunk().unwrap()))
        }
    }
}

fn comm(name: &[u8]) -> [u32; 4] {
    let mut bytes = [0; 16];
    bytes[..name.len()].copy_from_slice(name);
    [0, 4, 8, 12].map(|at| u32::from_ne_bytes(*bytes[at..].first_chunk().unwrap()))
}

fn refused() -> Event {
    Event {
        time: 1_500_000_000,
        client: words("192.0.2.9".parse().unwrap()),
        client_port: 40_000,
        frontend: words("10.96.0.11".parse().unwrap()),
        frontend_port: 80,
        service: 7,
        reason: Reason::NoEndpoint as u32,
        device: 3,
        kind: EVENT_REJECT,
        hook: HOOK_PACKET,
        family: 4,
        proto: 6,
        ..Event::default()
    }
}

fn began() -> Event {
    Event {
        time: 2_250_000_000,
        netns: 99,
        pid: 1234,
        client: comm(b"dig"),
        frontend: words("fd00::10".parse().unwrap()),
        frontend_port: 53,
        backend: words("fd00:99::2".parse().unwrap()),
        backend_port: 5353,
        backend_id: 5,
        service: 8,
        kind: EVENT_NEW_FLOW,
        hook: HOOK_SOCKET,
        family: 6,
        proto: 17,
        ..Event::default()
    }
}

fn bare() -> Event {
    Event { kind: EVENT_PASS, reason: Reason::Fragment as u32, ..Event::default() }
}

fn names() -> Snapshot {
    let name = |name: &str, port: &str, protocol| NameRow {
        namespace: "default".into(),
        name: name.into(),
        port: port.into(),
        protocol: Transport(protocol),
        family: IpFamily::V4,
    };
    Snapshot {
        names: [(7, name("empty", "http", 6)), (8, name("dns", "dns", 17))].into(),
        ..Snapshot::default()
    }
}

fn context() -> MonitorContext {
    MonitorContext { zero: Some(SystemTime::UNIX_EPOCH), devices: Some([(3, "eth0".to_owned())].into()) }
}

fn text(event: &Event) -> String {
    MonitorLine::new(event, &names(), &context()).text()
}

#[test]
fn lines_for_people() {
    assert_snapshot!(text(&refused()), @"00:00:01.500Z reject 192.0.2.9:40000 (eth0) -> 10.96.0.11:80/TCP default/empty:http no_endpoint: The Service has no usable endpoint on any node.");
    assert_snapshot!(text(&began()), @"00:00:02.250Z new    dig[1234] -> [fd00::10]:53/UDP default/dns:dns -> [fd00:99::2]:5353");
    let why = Reason::Fragment.explanation();
    assert_eq!(text(&bare()), format!("00:00:00.000Z pass   packet fragment:{why}"));
    let stranger = Event { service: 9, pid: 77, client: comm(b""), ..began() };
    assert_snapshot!(text(&stranger), @"00:00:02.250Z new    [77] -> [fd00::10]:53/UDP id 9 -> [fd00:99::2]:5353");
}

#[test]
fn a_line_for_machines() {
    let json =
        Written::Plain(Output::Json).render(&MonitorLine::new(&refused(), &names(), &context())).unwrap();
    assert_snapshot!(json, @r#"{"time":"1970-01-01T00:00:01.500Z","kind":"reject","hook":"packet","client":"192.0.2.9:40000","device":"eth0","deviceIndex":3,"pid":null,"process":null,"netns":null,"frontend":"10.96.0.11:80","backend":null,"backendId":null,"service":"default/empty:http","namespace":"default","name":"empty","port":"http","protocol":"TCP","family":"IPv4","serviceId":7,"reason":"no_endpoint"}"#);
}

#[rstest]
#[case::all(EventSelection::default(), [true, true, true])]
#[case::service(EventSelection { services: ServiceSelector { services: vec!["default/empty".parse().unwrap()], ..Default::default() }, ..EventSelection::default() }, [true, false, false])]
#[case::client(EventSelection { client: Some("192.0.2.9".parse().unwrap()), ..EventSelection::default() }, [true, false, false])]
#[case::other_client(EventSelection { client: Some("192.0.2.8".parse().unwrap()), ..EventSelection::default() }, [false, false, false])]
#[case::no_address(EventSelection { client: Some("::".parse().unwrap()), ..EventSelection::default() }, [false, false, false])]
#[case::pid(EventSelection { pid: Some(1234), ..EventSelection::default() }, [false, true, false])]
#[case::no_pid(EventSelection { pid: Some(0), ..EventSelection::default() }, [false, false, false])]
#[case::reason(EventSelection { reasons: vec![Reason::Fragment], ..EventSelection::default() }, [false, false, true])]
// A new flow has no reason, although its field has the value of `NoEndpoint`.
#[case::first_reason(EventSelection { reasons: vec![Reason::NoEndpoint], ..EventSelection::default() }, [true, false, false])]
#[case::kinds(EventSelection { kinds: vec![EventKind::New, EventKind::Pass], ..EventSelection::default() }, [false, true, true])]
fn filters(#[case] selection: EventSelection, #[case] taken: [bool; 3]) {
    assert_eq!([refused(), began(), bare()].map(|event| selection.takes(&event, &names())), taken);
}

fn record(event: &Event) -> String {
    let record =
        MonitorLine::new(event, &names(), &context()).record(SystemTime::UNIX_EPOCH + Duration::from_secs(9));
    serde_json::to_string(&record).unwrap()
}

#[test]
fn records_for_opentelemetry() {
    assert_snapshot!(record(&refused()), @r#"{"timeUnixNano":"1500000000","observedTimeUnixNano":"9000000000","severityNumber":13,"severityText":"WARN","body":{"stringValue":"reject 192.0.2.9:40000 (eth0) -> 10.96.0.11:80/TCP default/empty:http no_endpoint: The Service has no usable endpoint on any node."},"attributes":[{"key":"source.address","value":{"stringValue":"192.0.2.9"}},{"key":"source.port","value":{"intValue":"40000"}},{"key":"destination.address","value":{"stringValue":"10.96.0.11"}},{"key":"destination.port","value":{"intValue":"80"}},{"key":"network.type","value":{"stringValue":"ipv4"}},{"key":"network.transport","value":{"stringValue":"tcp"}},{"key":"network.interface.name","value":{"stringValue":"eth0"}},{"key":"k8s.namespace.name","value":{"stringValue":"default"}},{"key":"k8s.service.name","value":{"stringValue":"empty"}},{"key":"ballast.service.port","value":{"stringValue":"http"}},{"key":"ballast.hook","value":{"stringValue":"packet"}},{"key":"ballast.kind","value":{"stringValue":"reject"}},{"key":"ballast.reason","value":{"stringValue":"no_endpoint"}}],"eventName":"ballast.reject"}"#);
    assert_snapshot!(record(&began()), @r#"{"timeUnixNano":"2250000000","observedTimeUnixNano":"9000000000","severityNumber":9,"severityText":"INFO","body":{"stringValue":"new dig[1234] -> [fd00::10]:53/UDP default/dns:dns -> [fd00:99::2]:5353"},"attributes":[{"key":"destination.address","value":{"stringValue":"fd00::10"}},{"key":"destination.port","value":{"intValue":"53"}},{"key":"ballast.endpoint.address","value":{"stringValue":"fd00:99::2"}},{"key":"ballast.endpoint.port","value":{"intValue":"5353"}},{"key":"network.type","value":{"stringValue":"ipv6"}},{"key":"network.transport","value":{"stringValue":"udp"}},{"key":"process.pid","value":{"intValue":"1234"}},{"key":"process.executable.name","value":{"stringValue":"dig"}},{"key":"ballast.netns.cookie","value":{"intValue":"99"}},{"key":"k8s.namespace.name","value":{"stringValue":"default"}},{"key":"k8s.service.name","value":{"stringValue":"dns"}},{"key":"ballast.service.port","value":{"stringValue":"dns"}},{"key":"ballast.hook","value":{"stringValue":"socket"}},{"key":"ballast.kind","value":{"stringValue":"new"}}],"eventName":"ballast.new"}"#);
    let fault = Event { kind: EVENT_DROP, reason: Reason::FlowTableFull as u32, ..Event::default() };
    let line: serde_json::Value = serde_json::from_str(&record(&fault)).unwrap();
    assert_eq!((&line["severityText"], &line["timeUnixNano"]), (&json!("ERROR"), &json!("0")));
    let attribute = |key: &str, value: &str| json!({"key": key, "value": {"stringValue": value}});
    let expected = json!([attribute("ballast.kind", "drop"), attribute("ballast.reason", "flow_table_full")]);
    assert_eq!(line["attributes"], expected);
}

#[test]
fn a_line_for_opentelemetry_is_one_document() {
    let output = Written::Otlp(Resource::new(None, &[], Some("node-1")));
    let line = output.render(&MonitorLine::new(&refused(), &names(), &context())).unwrap();
    assert!(!line.contains('\n'));
    let document: serde_json::Value = serde_json::from_str(&line).unwrap();
    let records = document.pointer("/resourceLogs/0/scopeLogs/0/logRecords").unwrap().as_array().unwrap();
    assert_eq!((records.len(), &records[0]["eventName"]), (1, &serde_json::Value::from("ballast.reject")));
    let resource = document.pointer("/resourceLogs/0/resource/attributes").unwrap().as_array().unwrap();
    assert!(resource.contains(&json!({"key": "k8s.node.name", "value": {"stringValue": "node-1"}})));
}

#[test]
fn names_are_read_again_for_a_new_service_and_when_they_are_old() {
    let name = NameRow {
        namespace: "default".to_owned(),
        name: "web".to_owned(),
        port: String::new(),
        protocol: Transport(6),
        family: IpFamily::V4,
    };
    let snapshot = Snapshot { names: [(7, name)].into(), ..Snapshot::default() };
    let names = Names { snapshot, read: Instant::now() };
    let due = |service, seconds| names.is_due(service, Duration::from_secs(seconds));
    assert_eq!([due(7, 29), due(7, 30)], [false, true], "it may have another name now");
    assert_eq!([due(8, 0), due(8, 1)], [false, true], "it has no name yet");
    assert!(!due(0, 60), "the event has no Service");
}

#[test]
fn name_of_a_process_has_no_control_characters() {
    let name = |name: &[u8]| process(&Event { client: comm(name), ..began() });
    assert_eq!(name(b"\x1b[2J\xff").as_deref(), Some("\\u{1b}[2J\u{fffd}"));
    assert_eq!(name(b"sixteen byte nam").as_deref(), Some("sixteen byte nam"));
    assert_eq!(process(&refused()), None, "a packet has an address there");
}
