use super::*;
use crate::host::devices;
use crate::host::seen::Seen;

fn host() -> Host {
    let devices = Seen::start(devices::list).unwrap().present();
    Host { devices, addresses: Seen::start(addresses).unwrap().present() }
}

fn address(attributes: Vec<AddressAttribute>, flags: AddressHeaderFlags) -> Option<Own> {
    let mut message = AddressMessage::default();
    message.header.prefix_len = 32;
    message.header.flags = flags;
    message.attributes = attributes;
    read_address(&message)
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

#[test]
fn our_end_of_a_point_to_point_device_counts() {
    let both = vec![AddressAttribute::Address(ip("10.0.0.2")), AddressAttribute::Local(ip("10.0.0.1"))];
    let own = address(both, AddressHeaderFlags::empty());
    assert_eq!(own, Some(Own { address: ip("10.0.0.1"), secondary: false, deprecated: false, prefix: 32 }));
}

#[test]
fn addresses_that_cannot_be_reached_do_not_count() {
    let one = |text, flags| address(vec![AddressAttribute::Address(ip(text))], flags);
    assert_eq!(one("169.254.0.1", AddressHeaderFlags::empty()), None);
    assert_eq!(one("fe80::1", AddressHeaderFlags::empty()), None);
    assert_eq!(one("2001:db8::1", AddressHeaderFlags::Dadfailed), None);
    assert_eq!(one("2001:db8::1", AddressHeaderFlags::Tentative), None);
    assert!(one("2001:db8::1", AddressHeaderFlags::empty()).is_some());
    assert!(one("127.0.0.1", AddressHeaderFlags::empty()).is_some(), "node ports may answer there");
}

#[test]
fn an_address_with_a_prefix_is_in_a_subnet() {
    let in_subnet = |text, prefix_len| {
        let mut message = AddressMessage::default();
        message.header.prefix_len = prefix_len;
        message.attributes = vec![AddressAttribute::Local(ip(text))];
        read_address(&message).unwrap().subnet().is_some()
    };
    assert_eq!([24, 31, 32].map(|bits| in_subnet("10.0.0.1", bits)), [true, true, false]);
    assert_eq!([64, 127, 128].map(|bits| in_subnet("fd00::1", bits)), [true, true, false]);
}

#[test]
fn what_the_operator_says_of_a_device_is_kept() {
    let patterns = |list: &[&str]| list.iter().map(|&text| text.parse().unwrap()).collect();
    let facts = HostFacts {
        uplinks: patterns(&["eth*", "p1"]),
        local_devices: patterns(&["p*"]),
        ..HostFacts::default()
    };
    let role = |name: &str| {
        let device = Device { name: name.to_owned(), ..Device::default() };
        facts.device(&device, &Addresses::new()).1.role
    };
    assert_eq!(
        ["eth1", "p1", "veth1"].map(role),
        [DeviceRole::Uplink, DeviceRole::Local, DeviceRole::Guessed],
        "local wins"
    );
}

fn route(kind: RouteType, attributes: Vec<RouteAttribute>) -> Vec<(u32, DefaultRoute)> {
    let mut message = RouteMessage::default();
    message.header.table = RouteHeader::RT_TABLE_MAIN;
    message.header.kind = kind;
    message.header.address_family = AddressFamily::Inet;
    message.attributes = attributes;
    let own = |address, secondary| Own { address: ip(address), secondary, deprecated: false, prefix: 24 };
    let addresses = BTreeMap::from([(
        2,
        vec![own("2001:db8::1", false), own("192.0.2.9", true), own("192.0.2.1", false)],
    )]);
    read_route(&message, &addresses)
}

#[test]
fn a_default_route_says_where_packets_come_from_or_its_device_does() {
    let plain = route(RouteType::Unicast, vec![RouteAttribute::Oif(2), RouteAttribute::Priority(100)]);
    assert_eq!(plain, [(100, DefaultRoute { device: 2, source: Some(ip("192.0.2.1")) })]);
    let source = RouteAttribute::PrefSource(RouteAddress::Inet([192, 0, 2, 9].into()));
    let said = route(RouteType::Unicast, vec![RouteAttribute::Oif(2), source]);
    assert_eq!(said[0].1.source, Some(ip("192.0.2.9")));
    let elsewhere = route(RouteType::Unicast, vec![RouteAttribute::Oif(3)]);
    assert_eq!(elsewhere[0].1.source, None);
    assert!(route(RouteType::Unreachable, vec![RouteAttribute::Oif(2)]).is_empty());
}

#[test]
fn the_source_of_a_device_is_a_lasting_address_of_a_subnet() {
    let own =
        |address, prefix, deprecated| Own { address: ip(address), secondary: false, deprecated, prefix };
    let (vip, old) = (own("2001:db8::100", 128, false), own("2001:db8::200", 64, true));
    let (first, second) = (own("2001:db8::1", 64, false), own("2001:db8::2", 64, false));
    let of = |all: &[Own]| source(all.iter(), true);
    assert_eq!(of(&[vip, old, first, second]), Some(first.address));
    assert_eq!(of(&[old, vip]), Some(vip.address));
    assert_eq!(of(&[old]), Some(old.address));
    assert_eq!(of(&[own("192.0.2.1", 24, false)]), None);
    // As the kernel reports it.
    let local = vec![AddressAttribute::Local(old.address)];
    assert!(address(local, AddressHeaderFlags::Deprecated).is_some_and(|own| own.deprecated));
}

#[test]
fn local_routes_are_those_that_no_device_explains() {
    let own = BTreeSet::from([ip("192.0.2.1")]);
    let local = |kind, table, address: [u8; 4], length| {
        let mut message = RouteMessage::default();
        (message.header.table, message.header.kind) = (table, kind);
        message.header.destination_prefix_length = length;
        message.attributes = vec![RouteAttribute::Destination(RouteAddress::Inet(address.into()))];
        read_local(&message, &own).map(|range| range.to_string())
    };
    let route = |address, length| local(RouteType::Local, 255, address, length);
    assert_eq!(route([10, 7, 0, 0], 24).as_deref(), Some("10.7.0.0/24"));
    assert_eq!(route([10, 7, 0, 1], 32).as_deref(), Some("10.7.0.1/32"));
    let others = [route([192, 0, 2, 1], 32), route([127, 0, 0, 0], 8), route([169, 254, 0, 1], 32)];
    assert_eq!(others, [None, None, None]);
    assert_eq!(local(RouteType::Broadcast, 255, [10, 7, 0, 255], 32), None);
    assert_eq!(local(RouteType::Local, 100, [10, 7, 0, 0], 24), None);
}

#[test]
fn facts_that_are_not_read_are_copied_from_the_previous_view() {
    let route = DefaultRoute { device: 77, source: None };
    let known = HostView { defaults: vec![route], has_kube_proxy_rules: true, ..HostView::default() };
    let facts = HostFacts::default();
    let host = host();
    let view = facts.read(&host, &known, FactsToRead::default()).unwrap();
    assert_eq!((&view.defaults, view.has_kube_proxy_rules), (&known.defaults, true));
    assert!(!view.devices.is_empty());
    assert_ne!(facts.read(&host, &known, FactsToRead::ALL).unwrap().defaults, known.defaults);
}

#[test]
fn this_machine_can_be_looked_at() {
    let read = || HostFacts::default().read(&host(), &HostView::default(), FactsToRead::ALL).unwrap();
    let view = read();
    let lo = view.devices.values().find(|device| device.name == "lo").expect("every namespace has it");
    assert!(!lo.no_header && lo.kind == DeviceKind::Loopback);
    // Linux has it since 5.14, and Ballast needs a newer kernel.
    assert_ne!(view.netns_cookie, 0);
    assert_eq!(view.netns_cookie, read().netns_cookie);
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn cookie_of_a_namespace_without_a_free_port_is_read() {
    let read = std::thread::spawn(|| {
        // SAFETY: only this thread moves to the new namespace, in which it takes the only port.
        unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }.unwrap();
        std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", "40000 40000").unwrap();
        let _held = std::net::UdpSocket::bind("[::]:40000").unwrap();
        assert!(["127.0.0.1:0", "[::1]:0"].iter().all(|any| std::net::UdpSocket::bind(any).is_err()));
        netns_cookie()
    });
    assert_ne!(read.join().unwrap().unwrap(), netns_cookie().unwrap());
}

#[test]
fn what_cannot_be_read_stays_known() {
    use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
    let (allow, fail) = (SeccompAction::Allow, SeccompAction::Errno(libc::EMFILE as u32));
    // Only in this thread: the cookie and all files.
    let calls = [libc::SYS_getsockopt, libc::SYS_openat].map(|call| (call, Vec::new())).into();
    let filter = SeccompFilter::new(calls, allow, fail, std::env::consts::ARCH.try_into().unwrap()).unwrap();
    let (facts, host) = (HostFacts::default(), host());
    let known = facts.read(&host, &HostView::default(), FactsToRead::ALL).unwrap();
    seccompiler::apply_filter(&BpfProgram::try_from(filter).unwrap()).unwrap();
    let view = facts.read(&host, &known, FactsToRead::default()).unwrap();
    assert_eq!((view.netns_cookie, &view.local_ports), (known.netns_cookie, &known.local_ports));
    assert!(facts.read(&host, &HostView::default(), FactsToRead::default()).is_err(), "nothing is known");
}

#[test]
fn large_tables_are_not_read_while_another_proxy_is_known() {
    assert!(are_rules_cheap(true, || LARGE) && !are_rules_cheap(true, || LARGE + 1));
    assert!(are_rules_cheap(false, || LARGE + 1), "a new proxy is noticed soon");
}

#[test]
fn rule_of_a_mark_names_a_table_of_its_own() {
    let rule = |mark: u32, table: u32, flags: RuleFlags| {
        let mut rule = RuleMessage::default();
        rule.header.family = AddressFamily::Inet;
        rule.header.action = RuleAction::ToTable;
        rule.header.flags = flags;
        rule.attributes = vec![RuleAttribute::FwMark(mark), RuleAttribute::Table(table)];
        rule
    };
    let none = RuleFlags::empty();
    assert_eq!(of_mark(&rule(0x40, 180, none)), Some((IpFamily::V4, 180)), "KubeSpan");
    assert_eq!(of_mark(&rule(0x80, 254, none)), None, "AWS VPC CNI");
    assert_eq!(of_mark(&rule(0xca6c, 51_820, RuleFlags::Invert)), None, "wg-quick");
    assert_eq!(of_mark(&rule(0, 100, none)), None);
    let mut without_mark = rule(0, 100, none);
    without_mark.attributes = vec![RuleAttribute::Table(100)];
    assert_eq!(of_mark(&without_mark), None);
}

#[test]
fn table_with_routes_to_machines_is_found() {
    assert!(!routes_packets(IpFamily::V4, 4_000_000_017).unwrap(), "no such table");
    assert!(!routes_packets(IpFamily::V4, 255).unwrap(), "the table local");
}
