use rstest::rstest;

use crate::model::{EndpointPort, ServiceName, SliceName};

use super::*;

fn endpoint(address: &str) -> Endpoint {
    Endpoint::new(address.parse().unwrap())
}

fn slice(ports: &[(&str, Protocol, u16)], endpoints: &[Endpoint]) -> EndpointSlice {
    let port = |(name, protocol, port): &(&str, _, _)| EndpointPort {
        name: (*name).into(),
        protocol: *protocol,
        port: *port,
    };
    let (name, service) = (SliceName::new("default", "s"), ServiceName::new("default", "web"));
    EndpointSlice {
        ports: ports.iter().map(port).collect(),
        endpoints: endpoints.to_vec(),
        ..EndpointSlice::new(name, service, IpFamily::of(endpoints[0].address))
    }
}

fn merged<'a>(slices: &'a [EndpointSlice], name: &str, protocol: Protocol) -> MergedEndpoints<'a> {
    merge(slices.iter(), name, protocol, IpFamily::V4, "n1")
}

fn texts(merged: &MergedEndpoints<'_>) -> Vec<String> {
    merged.keys().map(|b| format!("{}:{}", b.address, b.port)).collect()
}

#[test]
fn a_named_port_may_differ_from_slice_to_slice() {
    let slices = [
        slice(&[("http", Protocol::Tcp, 8080)], &[endpoint("10.0.0.1")]),
        slice(&[("http", Protocol::Tcp, 9090)], &[endpoint("10.0.0.2"), endpoint("10.0.0.1")]),
    ];
    let found = merged(&slices, "http", Protocol::Tcp);
    assert_eq!(texts(&found), ["10.0.0.1:8080", "10.0.0.1:9090", "10.0.0.2:9090"]);
}

#[test]
fn ports_differ_by_name_and_protocol() {
    let ports = [("dns", Protocol::Tcp, 53), ("dns", Protocol::Udp, 5353), ("web", Protocol::Tcp, 80)];
    let slices = [slice(&ports, &[endpoint("10.0.0.1")])];
    assert_eq!(texts(&merged(&slices, "dns", Protocol::Tcp)), ["10.0.0.1:53"]);
    assert_eq!(texts(&merged(&slices, "dns", Protocol::Udp)), ["10.0.0.1:5353"]);
    assert!(merged(&slices, "", Protocol::Tcp).is_empty());
}

#[test]
fn the_other_family_is_left_out() {
    let port = [("", Protocol::Tcp, 80)];
    let slices = [slice(&port, &[endpoint("10.0.0.1")]), slice(&port, &[endpoint("fd00::1")])];
    assert_eq!(texts(&merged(&slices, "", Protocol::Tcp)), ["10.0.0.1:80"]);
}

#[rstest]
#[case::not_terminating_wins((true, true, true), (false, false, false), (false, false, false))]
#[case::ready_in_either((false, true, false), (true, true, false), (true, true, false))]
#[case::serving_in_either((false, false, true), (false, true, true), (false, true, true))]
fn of_two_records_of_one_endpoint_one_counts(
    #[case] first: (bool, bool, bool),
    #[case] second: (bool, bool, bool),
    #[case] expected: (bool, bool, bool),
) {
    let record = |(ready, serving, terminating)| {
        let endpoint = Endpoint { ready, serving, terminating, ..endpoint("10.0.0.1") };
        slice(&[("", Protocol::Tcp, 80)], &[endpoint])
    };
    for slices in [[record(first), record(second)], [record(second), record(first)]] {
        let found = merged(&slices, "", Protocol::Tcp);
        let conditions: Vec<_> = found.values().map(|e| (e.ready, e.serving, e.terminating)).collect();
        assert_eq!(conditions, [expected], "in either order");
    }
}
