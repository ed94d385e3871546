//! Single packets that are translated, refused, or passed.

use proxy_common::reason::Reason;
use proxy_common::service::SERVICE_DROP_WHEN_EMPTY;

use crate::fixture::{Counts, Fixture};
use proxy_testbed::Family;
use proxy_testbed::harness::{Hook, Service};
use proxy_testbed::packet::{ACK, ETHERNET, FIN, Packet, RST, SCTP, SYN, TCP, UDP};

/// Three IPv4 "no operation" options and the end of the list.
const OPTIONS: [u8; 4] = [1, 1, 1, 0];
const HOP_BY_HOP: (u8, [u8; 8]) = (0, [0, 0, 1, 4, 0, 0, 0, 0]);
const DESTINATION: (u8, [u8; 16]) = (60, [0, 1, 1, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
pub const FRAGMENT: u8 = 44;
/// The IPv4 flag "more fragments".
pub const MORE: u16 = 0x2000;

pub fn fixtures() -> Vec<Fixture> {
    let mut all = Vec::new();
    for family in Family::BOTH {
        translated(family, &mut all);
        refused(family, &mut all);
        passed(family, &mut all);
        malformed(family, &mut all);
        fragments(family, &mut all);
    }
    all
}

pub fn proto_name(proto: u8) -> &'static str {
    match proto {
        TCP => "TCP",
        UDP => "UDP",
        _ => "SCTP",
    }
}

/// Returns the packet without and with IPv4 options or IPv6 extension headers.
pub fn shapes(packet: &Packet) -> Vec<(&'static str, Packet)> {
    let plain = packet.clone();
    let more = if packet.src.is_ipv4() {
        vec![
            ("four bytes of options", plain.clone().options(&OPTIONS)),
            ("forty bytes of options", plain.clone().options(&[1; 40])),
        ]
    } else {
        let one = plain.clone().extension(HOP_BY_HOP.0, &HOP_BY_HOP.1);
        vec![
            ("one extension header", one.clone()),
            ("two extension headers", one.extension(DESTINATION.0, &DESTINATION.1)),
        ]
    };
    [("no options", plain)].into_iter().chain(more).collect()
}

fn translated(family: Family, all: &mut Vec<Fixture>) {
    let client = family.client(1, 40_001);
    for proto in [TCP, UDP, SCTP] {
        for (ports, port) in [("another port", 8080), ("the same port", 80)] {
            let (frontend, pod) = (family.frontend(1, 80), family.pod(1, port));
            let service = Service::new(7, proto, frontend, &[pod]);
            let first = Packet { flags: SYN, ..Packet::new(proto, client, frontend) };
            for (shape, first) in shapes(&first) {
                let what = format!("{family:?}: {} to {ports}, {shape}", proto_name(proto));
                let second = Packet { flags: ACK, ..first.clone() };
                let answer = first.to(pod).back();
                all.extend([
                    Fixture::new(format!("{what}: a new flow"), &[&service], Hook::Ingress, first.bytes())
                        .becomes(&first.to(pod))
                        .with_traffic(1),
                    Fixture::new(format!("{what}: a known flow"), &[&service], Hook::Ingress, second.bytes())
                        .after(&[(Hook::Ingress, &first)])
                        .becomes(&second.to(pod))
                        .with_traffic(1),
                    Fixture::new(format!("{what}: a reply"), &[&service], Hook::Egress, answer.bytes())
                        .after(&[(Hook::Ingress, &first)])
                        .becomes(&answer.from(frontend))
                        .with_traffic(1),
                ]);
            }
        }
    }
    udp_checksums(family, all);
}

fn udp_checksums(family: Family, all: &mut Vec<Fixture>) {
    let (client, frontend, pod) = (family.client(1, 40_001), family.frontend(1, 53), family.pod(1, 5353));
    let service = Service::new(7, UDP, frontend, &[pod]);
    let none = Packet { is_unchecked: true, ..Packet::udp(client, frontend) };
    let answer = none.to(pod).back();
    all.extend([
        Fixture::new(
            format!("{family:?}: no UDP checksum stays none"),
            &[&service],
            Hook::Ingress,
            none.bytes(),
        )
        .becomes(&none.to(pod))
        .with_traffic(1),
        Fixture::new(
            format!("{family:?}: no UDP checksum stays none on the way back"),
            &[&service],
            Hook::Egress,
            answer.bytes(),
        )
        .after(&[(Hook::Ingress, &none)])
        .becomes(&answer.from(frontend))
        .with_traffic(1),
    ]);
    // The last word of the payload makes the checksum of the translated packet zero, which is sent as ffff.
    let mut packet = Packet::udp(client, frontend).payload(12);
    packet.payload[10..].fill(0);
    let sum = udp_check(&packet.to(pod));
    packet.payload[10..].copy_from_slice(&sum);
    assert_eq!(udp_check(&packet.to(pod)), [0xff, 0xff]);
    all.push(
        Fixture::new(
            format!("{family:?}: a UDP checksum that becomes zero is sent as ffff"),
            &[&service],
            Hook::Ingress,
            packet.bytes(),
        )
        .becomes(&packet.to(pod))
        .with_traffic(1),
    );
}

fn udp_check(packet: &Packet) -> [u8; 2] {
    let bytes = packet.bytes();
    let at = bytes.len() - packet.payload.len() - 2;
    [bytes[at], bytes[at + 1]]
}

fn refused(family: Family, all: &mut Vec<Fixture>) {
    let (client, frontend) = (family.client(1, 40_001), family.frontend(1, 80));
    // Length of the longest packet that is quoted whole, and how much is quoted of a longer one.
    let (whole, part) = if family == Family::V4 { (548, 128) } else { (1232, 128) };
    for proto in [TCP, UDP] {
        let empty = Service::new(7, proto, frontend, &[]);
        let reason = if proto == TCP { "TCP" } else { "UDP" };
        let refusal = |what: String, packet: &Packet, quoted: usize| {
            Fixture::new(
                format!("{family:?}: {reason} refused: {what}"),
                &[&empty],
                Hook::Ingress,
                packet.bytes(),
            )
            .answered(packet.unreachable(quoted))
            .counted(Counts::refusal(&empty, Reason::NoEndpoint))
        };
        let first = Packet { flags: SYN, ..Packet::new(proto, client, frontend) };
        for (shape, packet) in shapes(&first) {
            for (what, length) in [("", 21), ("an even length, ", 8), ("no payload, ", 0)] {
                let packet = packet.clone().payload(length);
                all.push(refusal(format!("{what}{shape}"), &packet, usize::MAX));
            }
            let headers = packet.bytes().len() - ETHERNET - packet.payload.len();
            for (what, length, quoted) in [
                ("just short enough", whole, if packet.extensions.is_empty() { usize::MAX } else { part }),
                ("one byte too long", whole + 1, part),
                ("long", 1480, part),
            ] {
                let packet = packet.clone().payload(length - headers);
                all.push(refusal(format!("{what}, {shape}"), &packet, quoted));
            }
            if proto == UDP {
                let packet = Packet { is_unchecked: true, ..packet };
                all.push(refusal(format!("no checksum, {shape}"), &packet, part));
                all.push(refusal(format!("no checksum, long, {shape}"), &packet.payload(900), part));
            }
        }
        let local = Service { flags: SERVICE_DROP_WHEN_EMPTY, ..empty.clone() };
        all.push(
            Fixture::new(
                format!("{family:?}: {reason} to a Service with endpoints elsewhere only is dropped"),
                &[&local],
                Hook::Ingress,
                first.bytes(),
            )
            .dropped()
            .counted(Counts::refusal(&local, Reason::NoLocalEndpoint)),
        );
    }
    let empty = Service::new(7, TCP, frontend, &[]);
    for flags in [RST, RST | ACK] {
        let packet = Packet::tcp(flags, client, frontend);
        all.push(
            Fixture::new(
                format!("{family:?}: a reset to an empty Service is dropped without an answer ({flags:#x})"),
                &[&empty],
                Hook::Ingress,
                packet.bytes(),
            )
            .dropped()
            .counted(Counts::refusal(&empty, Reason::NoEndpoint)),
        );
    }
}

fn passed(family: Family, all: &mut Vec<Fixture>) {
    let (client, frontend, pod) = (family.client(1, 40_001), family.frontend(1, 80), family.pod(1, 8080));
    let service = Service::new(7, TCP, frontend, &[pod]);
    let syn = Packet::tcp(SYN, client, frontend);
    let other = |what: &str, bytes: Vec<u8>| (what.to_owned(), bytes);
    let mut arp = syn.bytes();
    arp[12..14].copy_from_slice(&[0x08, 0x06]);
    let mut vlan = syn.bytes();
    vlan[12..14].copy_from_slice(&[0x88, 0x47]);
    let mut table = vec![
        other("another address", syn.to(family.frontend(2, 80)).bytes()),
        other("another port", syn.to(family.frontend(1, 81)).bytes()),
        other("another protocol", Packet::udp(client, frontend).bytes()),
        other("a backend's own address", syn.to(pod).bytes()),
        other("ARP", arp),
        other("MPLS", vlan),
    ];
    let proto_at = ETHERNET + if family == Family::V4 { 9 } else { 6 };
    for (name, proto) in [("ICMP", 1), ("SCTP", 132), ("ICMPv6", 58), ("GRE", 47), ("none", 59), ("ESP", 50)]
    {
        let mut bytes = syn.bytes();
        bytes[proto_at] = proto;
        table.push(other(name, bytes));
    }
    for hook in [Hook::Ingress, Hook::Egress] {
        for (what, bytes) in &table {
            let what = format!("{family:?}: {what} passes {hook:?}");
            all.push(Fixture::new(what, &[&service], hook, bytes.clone()));
        }
    }
    // The prefilter bit is set, but there is no entry: the hash collides, or the Service was just removed.
    let unknown = Packet::tcp(SYN, pod, client);
    let answer = Packet::tcp(SYN | ACK, pod, client);
    all.extend([
        Fixture::new(
            format!("{family:?}: what a backend sends of its own accord passes"),
            &[&service],
            Hook::Egress,
            unknown.bytes(),
        ),
        Fixture::new(
            format!("{family:?}: what a backend answers to its own address passes"),
            &[&service],
            Hook::Egress,
            answer.bytes(),
        ),
        Fixture::new(
            format!("{family:?}: after both FINs the answer to a connection to the backend itself passes"),
            &[&service],
            Hook::Egress,
            // The sequence numbers tell the connections apart.
            Packet { seq: 0x5000_0000, ack: 0x6000_0000, ..answer.clone() }.bytes(),
        )
        .after(&[
            (Hook::Ingress, &syn),
            (Hook::Egress, &answer),
            (Hook::Ingress, &Packet { flags: FIN | ACK, ..syn.clone() }),
            (Hook::Egress, &Packet { flags: FIN | ACK, ..answer.clone() }),
        ])
        .counted(Counts {
            traffic: [
                1,
                2,
                2 * (syn.bytes().len() - ETHERNET) as u64,
                2,
                2 * (syn.bytes().len() - ETHERNET) as u64,
            ],
            ..Counts::default()
        }),
    ]);
}

fn malformed(family: Family, all: &mut Vec<Fixture>) {
    let (client, frontend, pod) = (family.client(1, 40_001), family.frontend(1, 80), family.pod(1, 8080));
    let service = Service::new(7, TCP, frontend, &[pod]);
    let udp = Service::new(8, UDP, frontend, &[pod]);
    let whole = Packet::tcp(SYN, client, frontend).payload(0).bytes();
    let with = |changes: &[(usize, u8)]| {
        let mut bytes = whole.clone();
        for (at, value) in changes {
            bytes[ETHERNET + at] = *value;
        }
        bytes
    };
    let mut table: Vec<(&str, Vec<u8>)> = match family {
        Family::V4 => vec![
            ("a header of 16 bytes", with(&[(0, 0x44)])),
            ("a header of no bytes", with(&[(0, 0x40)])),
            ("another version", with(&[(0, 0x65)])),
            ("one byte more than came", with(&[(3, 41)])),
            ("64 KiB", with(&[(2, 255), (3, 255)])),
            ("fewer bytes than its header", with(&[(3, 19)])),
            ("fewer bytes than a TCP header", with(&[(3, 39)])),
            ("options to the end", with(&[(0, 0x4a)])),
            ("options beyond the end", with(&[(0, 0x4f)])),
        ],
        Family::V6 => vec![
            ("one byte more than came", with(&[(5, 21)])),
            ("64 KiB", with(&[(4, 255), (5, 255)])),
            ("fewer bytes than a TCP header", with(&[(5, 19)])),
            ("an extension header beyond the end", with(&[(6, 0), (40, 6), (41, 200)])),
            ("an authentication header beyond the end", with(&[(6, 51), (40, 6), (41, 255)])),
        ],
    };
    table.push(("a segment cut short", whole[..whole.len() - 1].to_vec()));
    let mut short = Packet::udp(client, frontend).payload(0).bytes();
    short.pop();
    let length_at = ETHERNET + if family == Family::V4 { 3 } else { 5 };
    short[length_at] -= 1;
    table.push(("fewer bytes than a UDP header", short));
    for (what, bytes) in table {
        for (hook, counts) in
            [(Hook::Ingress, Counts::reason(Reason::Malformed)), (Hook::Egress, Counts::default())]
        {
            let what = format!("{family:?}: malformed, {what}: passes {hook:?} as it is");
            all.push(Fixture::new(what, &[&service, &udp], hook, bytes.clone()).counted(counts));
        }
    }
}

fn fragments(family: Family, all: &mut Vec<Fixture>) {
    let (client, frontend, pod) = (family.client(1, 40_001), family.frontend(1, 53), family.pod(1, 5353));
    let service = Service::new(7, UDP, frontend, &[pod]);
    let packet = Packet::udp(client, frontend);
    let (first, later) = if family == Family::V4 {
        (Packet { fragment: MORE, ..packet.clone() }, Packet { fragment: 100, ..packet })
    } else {
        let header = |offset: u8, more: u8| [0, 0, 0, offset << 3 | more, 0, 0, 0, 9];
        (packet.clone().extension(FRAGMENT, &header(0, 1)), packet.extension(FRAGMENT, &header(9, 0)))
    };
    all.extend([
        Fixture::new(
            format!("{family:?}: a first fragment is translated"),
            &[&service],
            Hook::Ingress,
            first.bytes(),
        )
        .becomes(&first.to(pod))
        .with_traffic(1),
        Fixture::new(
            format!("{family:?}: a later fragment passes and is counted"),
            &[&service],
            Hook::Ingress,
            later.bytes(),
        )
        .counted(Counts::reason(Reason::Fragment)),
        Fixture::new(
            format!("{family:?}: a later fragment of a reply passes"),
            &[&service],
            Hook::Egress,
            later.to(pod).back().bytes(),
        ),
    ]);
}
