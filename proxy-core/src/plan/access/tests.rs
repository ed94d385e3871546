use rstest::rstest;

use crate::model::{ServiceKind, ServiceName};

use super::*;

/// Returns a load balancer with an address of each family and these source ranges.
fn service(ranges: Option<&[&str]>) -> Service {
    Service {
        kind: ServiceKind::LoadBalancer,
        load_balancer_ips: vec!["198.51.100.9".parse().unwrap(), "2001:db8::9".parse().unwrap()],
        source_ranges: ranges.map(|ranges| ranges.iter().map(|text| text.parse().unwrap()).collect()),
        ..Service::new(ServiceName::new("default", "web"))
    }
}

fn ask(ranges: Option<&[&str]>, family: IpFamily, strict: bool) -> Allowed {
    let node = match family {
        IpFamily::V4 => "192.0.2.1",
        IpFamily::V6 => "2001:db8:1::1",
    };
    allowed(&service(ranges), family, strict, Some(node.parse().unwrap()))
}

#[rstest]
#[case::no_list(None)]
#[case::every_address(Some(&["10.0.0.0/8", "0.0.0.0/0"][..]))]
#[case::every_address_of_the_other_family(Some(&["::/0"][..]))]
fn every_client_is_admitted(#[case] ranges: Option<&[&str]>, #[values(true, false)] strict: bool) {
    assert_eq!(ask(ranges, IpFamily::V4, strict), Allowed::default());
}

#[test]
fn only_ranges_of_the_family_count() {
    let found = ask(Some(&["10.0.0.0/8", "2001:db8:9::/48"]), IpFamily::V6, false);
    assert_eq!(found.access, Access::Ranges { node: false });
    assert_eq!(
        found.ranges.iter().copied().collect::<BTreeSet<_>>(),
        BTreeSet::from(["2001:db8:9::/48".parse().unwrap()])
    );
    assert_eq!(found.problem, None);
}

#[test]
fn a_node_in_a_range_lets_the_addresses_themselves_in() {
    let found = ask(Some(&["192.0.2.0/24"]), IpFamily::V4, false);
    assert_eq!(found.access, Access::Ranges { node: true });
    let expected = ["192.0.2.0/24", "198.51.100.9/32"].map(|text| text.parse().unwrap());
    assert_eq!(found.ranges.iter().copied().collect::<BTreeSet<_>>(), BTreeSet::from(expected));
}

#[test]
fn a_family_that_is_not_named_is_open_with_a_warning_or_closed() {
    let open = ask(Some(&["10.0.0.0/8"]), IpFamily::V6, false);
    assert_eq!((open.access, open.ranges.len()), (Access::Unrestricted, 0));
    let problem = open.problem.unwrap();
    assert_eq!(problem.object, "Service default/web");
    assert!(
        problem.message.contains("IPv6") && problem.message.contains("--source-ranges-strict"),
        "{problem}"
    );
    let closed = ask(Some(&["10.0.0.0/8"]), IpFamily::V6, true);
    assert_eq!(closed, Allowed { access: Access::Ranges { node: false }, ..Allowed::default() });
}

#[rstest]
fn unusable_source_ranges_admit_no_client(
    #[values(IpFamily::V4, IpFamily::V6)] family: IpFamily,
    #[values(true, false)] strict: bool,
) {
    let found = ask(Some(&[]), family, strict);
    assert_eq!((found.access, found.ranges.len()), (Access::Ranges { node: false }, 0));
    let message = found.problem.unwrap().message;
    assert!(
        message.contains(&format!("no client may use the load balancer's {family} address")),
        "{message}"
    );
}

#[test]
fn a_family_without_address_has_nothing_to_close() {
    let mut service = service(Some(&["10.0.0.0/8"]));
    service.load_balancer_ips.pop();
    assert_eq!(allowed(&service, IpFamily::V6, true, None), Allowed::default());
}
