//! ICMP and ICMPv6 errors about translated packets, byte by byte.

use proxy_common::reason::Reason;

use crate::Scenario;
use crate::fixture::Fixture;
use crate::tables::{FRAGMENT, MORE, proto_name, shapes};
use proxy_testbed::Family;
use proxy_testbed::harness::{DROP, Harness, Hook, REDIRECT, Service};
use proxy_testbed::packet::{ACK, ETHERNET, Packet, SCTP, SYN, TCP, UDP};

pub const SCENARIOS: [Scenario; 1] =
    [Scenario { name: "refusals are not answered without end", flows: 64, test: limited }];

/// Name, type and code, and the second half of the header.
type Kind = (&'static str, [u8; 2], [u8; 4]);

fn kinds(family: Family) -> Vec<Kind> {
    let mtu = [0, 0, 5, 0x78];
    match family {
        Family::V4 => vec![
            ("port unreachable", [3, 3], [0; 4]),
            ("host unreachable", [3, 1], [0; 4]),
            ("fragmentation needed", [3, 4], mtu),
            ("time exceeded", [11, 0], [0; 4]),
            ("parameter problem", [12, 0], [20, 0, 0, 0]),
        ],
        Family::V6 => vec![
            ("port unreachable", [1, 4], [0; 4]),
            ("no route", [1, 0], [0; 4]),
            ("packet too big", [2, 0], mtu),
            ("time exceeded", [3, 0], [0; 4]),
            ("parameter problem", [4, 1], [0, 0, 0, 40]),
        ],
    }
}

pub fn fixtures() -> Vec<Fixture> {
    let mut all = Vec::new();
    for family in Family::BOTH {
        for proto in [TCP, UDP, SCTP] {
            for (ports, port) in [("another port", 8080), ("the same port", 80)] {
                translated(family, proto, ports, port, &mut all);
            }
        }
        no_checksum(family, &mut all);
        passed(family, &mut all);
    }
    all
}

/// A flow, and packets of it that errors quote.
struct Flow {
    service: Service,
    first: Packet,
    /// A packet of the client as the backend receives it, and as the client sent it.
    forward: [Packet; 2],
    /// A packet of the backend as the client receives it, and as the backend sent it.
    reply: [Packet; 2],
}

fn flow(family: Family, proto: u8, port: u16) -> Flow {
    let (client, frontend, pod) = (family.client(1, 40_001), family.frontend(1, 80), family.pod(1, port));
    let first = Packet { flags: SYN, ..Packet::new(proto, client, frontend) };
    let sent = Packet { flags: ACK, ..first.clone() }.payload(33);
    let answer = sent.back();
    Flow {
        service: Service::new(7, proto, frontend, &[pod]),
        forward: [sent.to(pod), sent],
        reply: [answer.clone(), answer.from(pod)],
        first,
    }
}

fn translated(family: Family, proto: u8, ports: &str, port: u16, all: &mut Vec<Fixture>) {
    let flow = flow(family, proto, port);
    let router = family.client(200, 0).ip();
    let table = [
        (
            "a client's packet",
            Hook::Egress,
            &flow.forward,
            flow.service.backends[0].1.ip(),
            flow.service.frontend.ip(),
        ),
        ("a reply", Hook::Ingress, &flow.reply, flow.first.src.ip(), flow.first.src.ip()),
    ];
    for (about, hook, [seen, sent], end, end_becomes) in table {
        let mut row = Vec::new();
        for ((shape, seen), (_, sent)) in shapes(seen).into_iter().zip(shapes(sent)) {
            let headers = seen.segment_at() - ETHERNET;
            // Eight bytes, up to the checksum, just past it, and more.
            let quotes: &[usize] = match proto {
                TCP => &[8, 16, 18, 20, 1000],
                UDP => &[8, 9, 1000],
                _ => &[8, 12, 13, 1000],
            };
            for (kind, code, rest) in kinds(family) {
                for quoted in quotes {
                    for (by, from, becomes) in
                        [("its receiver", end, end_becomes), ("a router", router, router)]
                    {
                        let what = format!("{kind} by {by}, {shape}, {quoted} bytes");
                        let error = |packet: &Packet, from| packet.error(from, code, rest, headers + quoted);
                        row.push((what, error(&seen, from), error(&sent, becomes)));
                    }
                }
            }
        }
        let what = format!("{family:?}: errors about {about}, {} to {ports}", proto_name(proto));
        let (_, packet, out) = row.pop().unwrap();
        all.push(
            Fixture::new(what, &[&flow.service], hook, packet)
                .with_row(row)
                .after(&[(Hook::Ingress, &flow.first)])
                .becomes_bytes(out)
                .with_traffic_before(1),
        );
    }
}

fn no_checksum(family: Family, all: &mut Vec<Fixture>) {
    let Flow { service, first, forward, .. } = flow(family, UDP, 8080);
    let [seen, sent] = forward.map(|packet| Packet { is_unchecked: true, ..packet });
    let router = family.client(200, 0).ip();
    let (_, code, rest) = kinds(family)[0];
    all.push(
        Fixture::new(
            format!("{family:?}: an error about a UDP packet without a checksum"),
            &[&service],
            Hook::Egress,
            seen.error(router, code, rest, 1000),
        )
        .after(&[(Hook::Ingress, &first)])
        .becomes_bytes(sent.error(router, code, rest, 1000))
        .with_traffic_before(1),
    );
}

fn passed(family: Family, all: &mut Vec<Fixture>) {
    let Flow { service, first, forward: [seen, sent], .. } = flow(family, TCP, 8080);
    let router = family.client(200, 0).ip();
    let header = if family == Family::V4 { 20 } else { 40 };
    let (_, code, rest) = kinds(family)[0];
    let error = |packet: &Packet, quoted: usize| packet.error(router, code, rest, header + quoted);
    let not_errors: &[(&str, u8)] = match family {
        Family::V4 => {
            &[("echo", 8), ("echo reply", 0), ("redirect", 5), ("timestamp", 13), ("source quench", 4)]
        }
        Family::V6 => {
            &[("echo", 128), ("echo reply", 129), ("neighbour", 135), ("redirect", 137), ("type 0", 0)]
        }
    };
    let mut table: Vec<(String, Vec<u8>)> = not_errors
        .iter()
        .map(|(name, kind)| {
            (format!("{name}, whatever it holds,"), seen.error(router, [*kind, 0], rest, 1000))
        })
        .collect();
    let other = family.client(9, 9);
    let mut truncated = error(&seen, 1000);
    truncated.truncate(ETHERNET + header + 8 + header + 7);
    let mut wrong_version = error(&seen, 1000);
    wrong_version[ETHERNET + header + 8] = 0x55;
    let later = match family {
        Family::V4 => Packet { fragment: 9 | MORE, ..seen.clone() },
        Family::V6 => seen.clone().extension(FRAGMENT, &[0, 0, 0, 9 << 3 | 1, 0, 0, 0, 9]),
    };
    let mut elsewhere = error(&seen, 1000);
    elsewhere[ETHERNET + header - 1] ^= 1;
    table.extend([
        ("an error about another flow".into(), error(&seen.from(other), 1000)),
        ("an error about another backend".into(), error(&seen.to(other), 1000)),
        ("an error about another protocol".into(), error(&Packet { proto: UDP, ..seen.clone() }, 1000)),
        ("an error about what was never translated".into(), error(&sent, 1000)),
        ("an error that quotes seven bytes of TCP".into(), error(&seen, 7)),
        ("an error that quotes no IP header".into(), error(&seen, 0)[..ETHERNET + header + 8 + 4].to_vec()),
        ("an error that is cut".into(), truncated),
        ("an error that quotes another IP version".into(), wrong_version),
        ("an error about a later fragment".into(), error(&later, 1000)),
        ("an error to another host".into(), elsewhere),
    ]);
    for (what, bytes) in table {
        for hook in [Hook::Ingress, Hook::Egress] {
            all.push(
                Fixture::new(format!("{family:?}: {what} passes {hook:?}"), &[&service], hook, bytes.clone())
                    .after(&[(Hook::Ingress, &first)])
                    .with_traffic_before(1),
            );
        }
    }
}

fn limited(family: Family, harness: &mut Harness) {
    const FLOOD: u64 = 3000;
    let frontend = family.frontend(1, 80);
    harness.serve(&[Service::new(7, UDP, frontend, &[])]);
    let packet = Packet::udp(family.client(1, 40_001), frontend).bytes();
    let started = std::time::Instant::now();
    let mut answered = 0;
    for _ in 0..FLOOD {
        match harness.run(Hook::Ingress, &packet).verdict {
            REDIRECT => answered += 1,
            verdict => assert_eq!(verdict, DROP),
        }
    }
    // Each CPU that runs the test may send 50 answers at once, and 1,000 in a second.
    let cpus = std::thread::available_parallelism().unwrap().get() as u128;
    let most = cpus * (50 + started.elapsed().as_millis() + 1);
    assert!(answered >= 50, "{answered}");
    assert!(u128::from(answered) <= most, "{answered} of at most {most}");
    let limited = FLOOD - answered;
    let mut expected = vec![(Reason::NoEndpoint, FLOOD)];
    if limited > 0 {
        expected.push((Reason::RejectLimited, limited));
    }
    assert_eq!(harness.reasons(), expected);
}
