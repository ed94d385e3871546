//! A case: a node with Services, and the steps that follow.

use std::net::{IpAddr, SocketAddr};

use crate::bytes::{Bytes, Random};
use crate::forge::{ACK, Check, ETHERNET, FIN, Forge, RST, SYN, icmp};
use crate::model::parse::{Parsed, header_at, is_v6, parse};
use crate::scenario::{
    Kind, Location, SCTP, SERVICE_BYTES, SERVICE_PORTS, Scenario, Service, TCP, UDP, WORLD_BYTES, address,
};
use crate::target::{Context, Device, Hook, Outcome, Seen};
use crate::tunnel::{Outer, number_of, taken_out};

/// Number of bytes of a step.
pub const STEP_BYTES: usize = 16;
/// Maximum number of steps of a random case.
pub const STEPS: usize = 14;

/// A packet that was sent through a hook, with its result.
#[derive(Clone, Debug)]
pub struct Sent {
    pub hook: Hook,
    pub context: Context,
    pub packet: Vec<u8>,
    pub seen: Seen,
}

/// A step of a case.
#[derive(Clone, Debug)]
pub enum Step {
    Packet(Hook, Context, Vec<u8>),
    /// Time passes, in milliseconds.
    Pause(u32),
    /// An endpoint leaves its Service, or comes back: the index of the Service, and of the endpoint.
    Endpoint(usize, usize),
    /// The Service with this index is removed, and another one gets its address.
    Service(usize),
    /// The Service with this index and the next one swap their addresses.
    Swap(usize),
    Nothing,
}

/// Returns the bytes of a random case of any size.
pub fn random_bytes(random: &mut Random) -> Vec<u8> {
    let mut bytes = vec![0; WORLD_BYTES];
    random.fill(&mut bytes);
    let steps = 1 + random.below(STEPS).max(random.below(STEPS));
    let length = WORLD_BYTES + Scenario::count(&bytes) * SERVICE_BYTES + steps * STEP_BYTES;
    bytes.resize(length, 0);
    random.fill(&mut bytes[WORLD_BYTES..]);
    bytes
}

/// Returns the ranges of the records of a case: the Services, then the steps.
pub fn records(bytes: &[u8]) -> Vec<std::ops::Range<usize>> {
    let services = (0..Scenario::count(bytes)).map(|n| WORLD_BYTES + n * SERVICE_BYTES);
    let first = WORLD_BYTES + Scenario::count(bytes) * SERVICE_BYTES;
    let steps = (first..bytes.len()).step_by(STEP_BYTES).map(|at| at..(at + STEP_BYTES).min(bytes.len()));
    let services = services.map(|at| at.min(bytes.len())..(at + SERVICE_BYTES).min(bytes.len()));
    services.chain(steps).filter(|range| !range.is_empty()).collect()
}

/// Reads the next step from the bytes of a case. The step may depend on the results of earlier packets.
pub fn next(bytes: &mut Bytes<'_>, scenario: &Scenario, before: &[Sent]) -> Option<Step> {
    if bytes.is_over() {
        return None;
    }
    let mut record = bytes.record(STEP_BYTES);
    let kind = record.byte() % 32;
    let location = record.byte();
    let device = [Device::Uplink, Device::Pods, Device::Uplink, Device::Loopback][usize::from(location & 3)];
    let mut context =
        Context { device, is_local_origin: location & 0x0c == 0x0c, is_complete: location & 0x30 == 0x30 };
    let about = record.byte();
    let earlier = (!before.is_empty()).then(|| &before[before.len() - 1 - usize::from(about) % before.len()]);
    let mut hook = if location & 0x40 == 0 { Hook::Ingress } else { Hook::Egress };
    let mut packet = match (kind, earlier) {
        (27 | 28, _) => return Some(Step::Pause(pause(about))),
        // Most of the time that a client keeps its affinity.
        (31, _) => return Some(Step::Pause(7_300)),
        (29, _) => return Some(endpoint(scenario, about)),
        (6..=14, Some(sent)) => {
            let Some(forge) = reply(&mut record, sent, about) else { return Some(Step::Nothing) };
            if location & 0x80 == 0 {
                // At the hook that the reply would pass.
                (hook, context) = way_back(sent, context);
            }
            shaped(&mut record, forge, scenario.is_calm).bytes()
        }
        (20..=22 | 30, Some(sent)) if kind == 30 || scenario.is_calm => {
            let leaves = location & 0x80 != 0 && sent.seen.outcome == Outcome::Redirect;
            // Also with the source that the endpoint has seen.
            let as_seen = leaves || location & 0x40 != 0;
            let Some(forge) = straight(&mut record, sent, as_seen, about) else { return Some(Step::Nothing) };
            hook = if leaves { Hook::Egress } else { Hook::Ingress };
            shaped(&mut record, forge, scenario.is_calm).bytes()
        }
        (15..=22, Some(sent)) => {
            let Some(forge) = again(&mut record, sent, about) else { return Some(Step::Nothing) };
            (hook, context) = (sent.hook, Context { is_complete: context.is_complete, ..sent.context });
            match piece(&innermost(&sent.packet)) {
                // A later fragment of the same packet.
                Some(id) if about & 0x80 == 0 => {
                    let fragment = Some((u16::from(record.byte() % 4) + 1, about & 0x40 != 0, id));
                    let proto = match forge.proto {
                        TCP if about & 0x30 == 0x30 => UDP,
                        UDP if about & 0x30 == 0x30 => TCP,
                        proto => proto,
                    };
                    Forge { fragment, proto, payload: 24, ..forge }.bytes()
                }
                _ => {
                    let aim = if location & 0x80 == 0 { None } else { ends(&sent.seen.packet) };
                    let aim = aim.map(|(src, dst, ..)| (src, dst));
                    Forge { aim, ..shaped(&mut record, forge, scenario.is_calm) }.bytes()
                }
            }
        }
        (23..=26, Some(sent)) => {
            if location & 0x80 == 0 {
                (hook, context) = way_back(sent, context);
            }
            let Some(packet) = error(&mut record, scenario, sent) else { return Some(Step::Nothing) };
            packet
        }
        _ => {
            if location & 0x80 == 0 {
                hook = Hook::Ingress;
            }
            fresh(&mut record, scenario)
        }
    };
    if !scenario.is_calm {
        spoil(&mut record, &mut packet);
    }
    let is_again = matches!(kind, 15..=22);
    let outer = match earlier {
        _ if scenario.dsr.is_none() => None,
        // The outer header of the earlier packet, or the same as from another node that got the packet from a third one.
        Some(sent) if is_again => taken_out(&sent.packet)
            .map(|(outer, _)| if location & 0xc0 == 0xc0 { Outer { hops: 224, ..outer } } else { outer }),
        Some(_) if kind >= 6 => None,
        _ => (kind % 2 == 1).then(|| outer(scenario, &packet, location, about)),
    };
    if let Some(outer) = outer
        && is_v6(&packet).is_some()
    {
        hook = Hook::Ingress;
        packet = outer.around(&packet, packet.len() - ETHERNET);
    }
    if location & 0xb0 == 0xb0 && about & 0x0f == 0x0f {
        // A frame for another machine.
        packet[5] ^= 0x11;
    }
    Some(Step::Packet(hook, context, packet))
}

/// Returns the outer header with which another node sends a packet. Rarely, the sender is no node, or the destination is
/// another address.
fn outer(scenario: &Scenario, packet: &[u8], location: u8, about: u8) -> Outer {
    let of = |location| address(scenario.dsr.unwrap_or_default(), location);
    let src = match about & 7 {
        0..=5 => Location::OtherNode,
        6 => Location::Client(5),
        _ => Location::Node,
    };
    let dst = match about >> 3 & 7 {
        0..=5 => Location::Node,
        6 => Location::NodeToo,
        _ => Location::External,
    };
    let orig_dst = ends(packet).map(|(_, dst, proto, _)| (dst.port(), proto));
    let service = scenario.services.iter().find(|s| orig_dst == Some((s.frontend.port(), s.proto)));
    let endpoints = service.map_or(&[][..], |service| &service.endpoints);
    let wanted = endpoints.get(usize::from(location >> 2) % endpoints.len().max(1));
    let number = wanted.map_or(7, |endpoint| number_of(endpoint.addr));
    let is_wrong = location & 0xc0 == 0xc0;
    Outer {
        src: of(src),
        dst: of(dst),
        number: if is_wrong { !number } else { number },
        hops: [60, 128, 190, 224][usize::from(about >> 6)],
    }
}

/// Returns a pause in milliseconds. No sum of up to nine pauses is a whole number of seconds, so that the speed of the
/// machine never decides whether a timeout is over.
fn pause(byte: u8) -> u32 {
    [300, 7_300, 2_300, 11_300, 31_300, 61_300, 67_300, 121_300, 130_300, 432_000_300][usize::from(byte) % 10]
}

fn endpoint(scenario: &Scenario, byte: u8) -> Step {
    let service = usize::from(byte & 3) % scenario.services.len().max(1);
    match byte {
        0xc0.. => return Step::Service(service),
        0xa0.. => return Step::Swap(service),
        _ => {}
    }
    let count = scenario.services.get(service).map_or(1, |service| service.endpoints.len().max(1));
    Step::Endpoint(service, usize::from(byte >> 2) % count)
}

/// Returns a hook that the answer to a packet passes.
fn way_back(sent: &Sent, context: Context) -> (Hook, Context) {
    match sent.seen.outcome {
        Outcome::Redirect => (Hook::Ingress, Context { device: Device::Uplink, ..context }),
        _ if sent.hook == Hook::Egress => (Hook::Ingress, Context { device: sent.context.device, ..context }),
        _ => (Hook::Egress, Context { device: sent.context.device, ..context }),
    }
}

fn flags(byte: u8) -> u8 {
    match byte % 16 {
        0..=4 => SYN,
        5..=7 => ACK,
        8 => SYN | ACK,
        9 | 10 => FIN | ACK,
        11 => RST,
        12 => RST | ACK,
        13 => FIN,
        _ => byte.rotate_left(3),
    }
}

/// Returns a sequence number in the window, at its edges, or far from it.
fn seq(byte: u8) -> u32 {
    [1000, 1001, 1021, 3000, 1000, 60_000, 70_000, 0x8000_0000, 0xffff_f000, 999][usize::from(byte) % 10]
}

/// Returns a packet that does not depend on earlier ones.
fn fresh(record: &mut Bytes<'_>, scenario: &Scenario) -> Vec<u8> {
    let (mut who, mut what, port) = (record.byte(), record.byte(), record.byte());
    if scenario.is_calm {
        (who, what) = (who & 0x31, what & 0x07);
    }
    let of = |location| address(scenario.is_v6, location);
    let last = if scenario.dsr.is_some() { Location::OtherNode } else { Location::Client(0) };
    let client = match who % 16 {
        0..=4 => Location::Client(who % 16 % 3),
        5..=8 => Location::LocalPod(who % 16 % 2),
        9..=11 => Location::RemotePod(who % 16 % 3),
        12 => Location::Node,
        13 => Location::NodeToo,
        14 => Location::Martian(who >> 4),
        _ => last,
    };
    let src_port = [40_000, 40_000, 40_001, 40_000, 61_000, 1024, 8080, 40_000, 80, 61_001, 65_535, 30_080]
        [usize::from(who >> 4) % 12];
    let src = SocketAddr::new(of(client), src_port);
    let service = scenario.services.get(usize::from(what) % scenario.services.len().max(1));
    let (proto, dst) = match (what >> 3, service) {
        (0..=19, Some(service)) => (service.proto, orig_dst(scenario, service, port)),
        (20, Some(service)) => (record.pick(&[TCP, UDP, SCTP]), orig_dst(scenario, service, port)),
        (21..=23, Some(Service { proto, endpoints, .. })) if !endpoints.is_empty() => {
            (*proto, endpoints[usize::from(port) % endpoints.len()].addr)
        }
        (24 | 25, _) => {
            let any = SERVICE_PORTS[usize::from(port) % 4];
            let location =
                [Location::Service(0), Location::Service(1), Location::Service(3), Location::Service(9)];
            (record.pick(&[TCP, UDP, SCTP]), SocketAddr::new(of(record.pick(&location)), any))
        }
        (26, _) => {
            let port = [30_080, 30_081, 61_000, 61_001, 22][usize::from(port) % 5];
            (
                record.pick(&[TCP, UDP, SCTP]),
                SocketAddr::new(of(record.pick(&[Location::Node, Location::NodeToo])), port),
            )
        }
        (27, _) => return other(record, src.ip(), of(Location::Service(0)), port),
        _ => {
            let location = [
                Location::Client(5),
                Location::RemotePod(0),
                Location::LocalPod(1),
                Location::Nowhere,
                Location::External,
            ];
            (record.pick(&[TCP, UDP, SCTP]), SocketAddr::new(of(record.pick(&location)), port.into()))
        }
    };
    let forge = Forge { flags: flags(record.byte()), seq: seq(record.byte()), ..Forge::new(proto, src, dst) };
    shaped(record, forge, scenario.is_calm).bytes()
}

/// Returns the address and port that a client of the Service sends to.
fn orig_dst(scenario: &Scenario, service: &Service, byte: u8) -> SocketAddr {
    match service.kind {
        Kind::NodePort => {
            // A packet to the address of another node arrives encapsulated from there.
            let is_others = scenario.dsr.is_some() && byte % 3 == 2;
            let others = address(scenario.is_v6, Location::OtherNode);
            let own = scenario.node_addresses()[usize::from(byte & 1)];
            SocketAddr::new(if is_others { others } else { own }, service.frontend.port())
        }
        _ => service.frontend,
    }
}

/// Returns a packet that is neither TCP nor UDP nor SCTP.
fn other(record: &mut Bytes<'_>, src: IpAddr, dst: IpAddr, byte: u8) -> Vec<u8> {
    let proto = [47, 50, 4, 41, 1, 58, 59, 135][usize::from(byte) % 8];
    let ends = (SocketAddr::new(src, 0), SocketAddr::new(dst, 0));
    let forge = Forge { payload: 40, ..Forge::new(proto, ends.0, ends.1) };
    match record.byte() % 4 {
        0 => icmp(src, dst, [record.pick(&[0, 8, 5, 13, 128, 129, 135]), 0], 7, &[7; 40], 64),
        1 => {
            let mut bytes = forge.bytes();
            bytes[12..14].copy_from_slice(&[0x08, 0x06]);
            bytes
        }
        _ => shaped(record, forge, false).bytes(),
    }
}

/// Returns source and destination as the packet contains them, its protocol, and the sequence number of a segment.
fn ends(packet: &[u8]) -> Option<(SocketAddr, SocketAddr, u8, Option<u32>)> {
    match parse(packet) {
        Parsed::Segment(segment) => Some((segment.src, segment.dst, segment.proto, Some(segment.seq))),
        Parsed::Later(Some(header)) => {
            Some((SocketAddr::new(header.src, 0), SocketAddr::new(header.dst, 0), header.proto, None))
        }
        _ => None,
    }
}

fn reply(record: &mut Bytes<'_>, sent: &Sent, about: u8) -> Option<Forge> {
    let (src, dst, proto, _) = ends(&sent.seen.packet)?;
    let byte = record.byte();
    if byte >= 0xe0
        && let Parsed::Segment(asked) = parse(&sent.packet)
    {
        // The RST of a host without a listener.
        let ack = asked.seq.wrapping_add(1);
        return Some(Forge { flags: RST | ACK, seq: 0, ack, ..Forge::new(proto, dst, src) });
    }
    let flags = if byte <= 0x7f && byte & 1 == 0 { SYN | ACK } else { flags(byte) };
    Some(Forge { flags, seq: seq(record.byte()), ack: seq(about), ..Forge::new(proto, dst, src) })
}

/// Returns a packet of the same client directly to the endpoint of an earlier packet. `as_seen`: with the source that the
/// endpoint has seen, which is not the client's after SNAT or a collision.
fn straight(record: &mut Bytes<'_>, sent: &Sent, as_seen: bool, about: u8) -> Option<Forge> {
    let (client, _, proto, _) = ends(&sent.packet)?;
    let (source, dst, ..) = ends(&sent.seen.packet)?;
    let src = if as_seen { source } else { client };
    Some(Forge {
        flags: flags(record.byte()),
        seq: seq(record.byte()),
        ack: seq(about),
        ..Forge::new(proto, src, dst)
    })
}

/// Returns the identification of a first fragment.
fn piece(packet: &[u8]) -> Option<u16> {
    match parse(packet) {
        Parsed::Segment(segment) if segment.is_first => Some(header_at(packet, ETHERNET)?.id as u16),
        _ => None,
    }
}

/// Returns the inner packet of an encapsulated packet; any other packet unchanged.
fn innermost(packet: &[u8]) -> Vec<u8> {
    taken_out(packet).map_or_else(|| packet.to_vec(), |(_, inner)| inner)
}

/// Returns another packet with source and destination of an earlier one.
fn again(record: &mut Bytes<'_>, sent: &Sent, about: u8) -> Option<Forge> {
    let (src, dst, proto, _) = ends(&innermost(&sent.packet))?;
    let flags = flags(record.byte().wrapping_add(5));
    Some(Forge { flags, seq: seq(record.byte()), ack: seq(about), ..Forge::new(proto, src, dst) })
}

/// Returns an ICMP error about an earlier packet, which it quotes as the packet came out or as it came in.
fn error(record: &mut Bytes<'_>, scenario: &Scenario, sent: &Sent) -> Option<Vec<u8>> {
    let byte = record.byte();
    let about = if byte & 1 == 0 { &sent.seen.packet } else { &sent.packet };
    let header = header_at(about, ETHERNET)?;
    let from = match byte >> 1 & 3 {
        0 | 1 => header.dst,
        2 => address(scenario.is_v6, Location::Client(200)),
        _ => address(scenario.is_v6, Location::Node),
    };
    let heads: &[[u8; 2]] = if scenario.is_v6 {
        &[[2, 0], [1, 4], [3, 0], [4, 1], [1, 0], [0, 0], [128, 0], [137, 0]]
    } else {
        &[[3, 4], [3, 3], [11, 0], [12, 0], [3, 1], [5, 0], [8, 0], [4, 0]]
    };
    let head = heads[usize::from(byte >> 3) % heads.len()];
    let quote = &about[ETHERNET..];
    let behind = header.l4 - ETHERNET;
    let length = match record.byte() % 12 {
        0..=3 => quote.len(),
        4 | 5 => behind + 8,
        6 => behind + 7,
        7 => behind + 17,
        8 => behind + 18,
        9 => behind + 12,
        10 => 20,
        _ => behind,
    };
    let ttl = record.pick(&[64, 64, 64, 1]);
    Some(icmp(from, header.src, head, 1400, &quote[..length.min(quote.len())], ttl))
}

/// Payload sizes. Some make a packet as long as the longest one that is quoted whole, or as the MTU of the uplink, or one
/// byte longer.
const SIZES: [usize; 28] = [
    0, 21, 1, 8, 64, 21, 500, 21, 600, 1240, 3, 1380, 508, 509, 520, 521, 1172, 1173, 1184, 1185, 1360, 1361,
    1372, 1373, 1340, 1341, 1352, 1353,
];

/// Sets the payload size of a packet, and rarely its tag, options, extension headers, TTL, lengths, fragment offset and checksum.
fn shaped(record: &mut Bytes<'_>, mut forge: Forge, is_calm: bool) -> Forge {
    let (size, shape, fragment, check) = (record.byte(), record.byte(), record.byte(), record.byte());
    forge.payload = SIZES[usize::from(size) % SIZES.len()];
    if size >= if is_calm { 0x08 } else { 0x70 } {
        // Most packets are ordinary.
        return forge;
    }
    match shape % 16 {
        0..=6 => {}
        7 => forge.tcp_words = [4, 6, 8, 15][usize::from(shape / 16) % 4],
        8 => forge.tag = Some(u16::from(shape >> 4) * 5),
        9 | 10 => {
            forge.options = 1 + shape / 16 % 10;
            let number = [0, 60, 43, 51, 60, 135][usize::from(shape / 16) % 6];
            forge.extensions = vec![number; 1 + usize::from(shape / 64)];
        }
        11 => forge.extensions = vec![60; usize::from(shape / 16)],
        12 => forge.ttl = [1, 2, 0][usize::from(shape / 16) % 3],
        13 => forge.trailing = usize::from(shape / 16),
        14 => forge.lie = [-1, 1, -30, 30, -60, -2000, 9, -9][usize::from(shape / 16) % 8],
        _ => forge.ttl = shape,
    }
    forge.fragment = match fragment % 16 {
        12 | 13 => Some((0, true, u16::from(fragment >> 4 & 1))),
        14 => Some((u16::from(fragment >> 5) + 1, fragment & 0x10 != 0, u16::from(fragment >> 4 & 1))),
        15 => Some((0, false, 1)),
        _ => None,
    };
    forge.check = match check % 16 {
        0..=10 => Check::Right,
        11 | 12 => Check::Partial,
        13 => Check::Wrong,
        _ => Check::Zero,
    };
    forge
}

/// Changes a byte or a bit of the packet, or truncates it.
fn spoil(record: &mut Bytes<'_>, packet: &mut Vec<u8>) {
    let how = record.byte();
    let (at, value) = (usize::from(record.byte()), record.byte());
    // The kernel accepts no packet that is shorter than an IP header.
    let least = ETHERNET + 40;
    match how {
        0xe0..=0xf3 => {
            let at = ETHERNET + at % (packet.len() - ETHERNET);
            packet[at] = value;
        }
        0xf4..=0xf9 => {
            // A bit of the headers.
            let at = ETHERNET + at % 48.min(packet.len() - ETHERNET);
            packet[at] ^= 1 << (value % 8);
        }
        0xfa..=0xfd => packet.truncate(least.max(packet.len() - at % (packet.len() - ETHERNET))),
        _ => {}
    }
    if packet.len() < least {
        packet.resize(least, 0);
    }
}
