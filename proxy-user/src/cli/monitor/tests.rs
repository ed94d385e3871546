use insta::assert_snapshot;
use rstest::rstest;

use super::*;
use crate::maps::view::NameRow;
use crate::model::net::IpFamily;

fn words(ip: IpAddr) -> [u32; 4] {
    match ip {
        IpAddr::V4(ip) => [u32::from_ne_bytes(ip.octets()), 0, 0, 0],
        IpAddr::V6(ip) => {
            let octets = ip.octets();
            [0, 4, 8, 12].map(|at| u32::from_ne_bytes(*octets[at..].first_chunk().unwrap()))
        }
    }
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

fn world() -> World {
    World {
        zero: Some(SystemTime::UNIX_EPOCH),
        devices: Some([(3, "eth0".to_owned())].into()),
        processes: Some([(1234, "dig".to_owned())].into()),
    }
}

fn text(event: &Event) -> String {
    Line::new(event, &names(), &world()).render(Output::Text).unwrap()
}

#[test]
fn lines_for_people() {
    assert_snapshot!(text(&refused()), @"00:00:01.500Z reject 192.0.2.9:40000 (eth0) -> 10.96.0.11:80/TCP default/empty:http no_endpoint: The Service has no usable endpoint anywhere.");
    assert_snapshot!(text(&began()), @"00:00:02.250Z new    dig[1234] -> [fd00::10]:53/UDP default/dns:dns -> [fd00:99::2]:5353");
    let why = Reason::Fragment.explanation();
    assert_eq!(text(&bare()), format!("00:00:00.000Z pass   packet fragment:{why}"));
    let stranger = Event { service: 9, pid: 77, ..began() };
    assert_snapshot!(text(&stranger), @"00:00:02.250Z new    [77] -> [fd00::10]:53/UDP id 9 -> [fd00:99::2]:5353");
}

#[test]
fn a_line_for_machines() {
    let json = Line::new(&refused(), &names(), &world()).render(Output::Json).unwrap();
    assert_snapshot!(json, @r#"{"time":"1970-01-01T00:00:01.500Z","kind":"reject","hook":"packet","client":"192.0.2.9:40000","device":"eth0","deviceIndex":3,"pid":null,"process":null,"netns":null,"protocol":"TCP","frontend":"10.96.0.11:80","backend":null,"backendId":null,"service":"default/empty:http","serviceId":7,"reason":"no_endpoint"}"#);
}

#[rstest]
#[case::all(Selection::default(), [true, true, true])]
#[case::service(Selection { service: Some("default/empty".parse().unwrap()), ..Selection::default() }, [true, false, false])]
#[case::client(Selection { client: Some("192.0.2.9".parse().unwrap()), ..Selection::default() }, [true, false, false])]
#[case::other_client(Selection { client: Some("192.0.2.8".parse().unwrap()), ..Selection::default() }, [false, false, false])]
#[case::no_address(Selection { client: Some("::".parse().unwrap()), ..Selection::default() }, [false, false, false])]
#[case::pid(Selection { pid: Some(1234), ..Selection::default() }, [false, true, false])]
#[case::no_pid(Selection { pid: Some(0), ..Selection::default() }, [false, false, false])]
#[case::reason(Selection { reasons: vec![Reason::Fragment], ..Selection::default() }, [false, false, true])]
// A new flow has no reason, though its field is that of `NoEndpoint`.
#[case::first_reason(Selection { reasons: vec![Reason::NoEndpoint], ..Selection::default() }, [true, false, false])]
#[case::kinds(Selection { kinds: vec![EventKind::New, EventKind::Pass], ..Selection::default() }, [false, true, true])]
fn filters(#[case] selection: Selection, #[case] taken: [bool; 3]) {
    assert_eq!([refused(), began(), bare()].map(|event| selection.takes(&event, &names())), taken);
}
