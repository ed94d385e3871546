//! Translated packets of every form, byte by byte, and the checksum of the whole packet that a device has computed.

use proxy_common::Address as _;
use proxy_common::csum::fold;
use proxy_common::fragment::FRAGMENT_SECS;

use super::*;
use crate::host::maps::at;

/// A UDP packet without a checksum.
const UNCHECKED: Shape = Shape { payload: b"without a checksum", ..UDP };

/// How the packet lies in the buffer, and what its header looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Plain,
    /// IPv4 options, or an IPv6 extension header.
    Options,
    /// Many segments.
    Gso,
    /// The program can read no byte behind the Ethernet header until it pulls them in.
    Paged,
}

/// What is known of the transport checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    Nothing,
    /// The sum over the whole packet.
    Complete,
    /// The device is to compute the checksum.
    Partial,
}

/// Where the endpoint is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path {
    /// On this node.
    Local,
    /// On another node: the packet gets this node's address, and is forwarded.
    Forward,
}

/// An IP packet of this form.
fn formed<F: Net>(src: End<F>, dst: End<F>, shape: Shape, form: Form) -> Vec<u8> {
    let mut ip = ip_packet::<F>(src, dst, shape);
    if shape.payload == UNCHECKED.payload {
        ip[F::HEADER + 6..F::HEADER + 8].fill(0);
    }
    if form == Form::Options {
        insert_options::<F>(&mut ip);
    }
    ip
}

fn options_length<F: Net>(form: Form) -> usize {
    if form != Form::Options {
        0
    } else if F::HEADER == 20 {
        4
    } else {
        8
    }
}

fn insert_options<F: Net>(ip: &mut Vec<u8>) {
    let at = if F::HEADER == 20 { 2 } else { 4 };
    let added = options_length::<F>(Form::Options);
    let length = u16::from_be_bytes([ip[at], ip[at + 1]]) + added as u16;
    ip[at..at + 2].copy_from_slice(&length.to_be_bytes());
    if F::HEADER == 20 {
        ip[0] = 0x46;
        ip[10..12].fill(0);
        ip.splice(20..20, [1, 1, 1, 0]);
        let check = build::checksum(&[&ip[..24]]);
        ip[10..12].copy_from_slice(&check.to_be_bytes());
    } else {
        // Destination options, which have only padding.
        let next = std::mem::replace(&mut ip[6], 60);
        ip.splice(40..40, [next, 0, 1, 4, 0, 0, 0, 0]);
    }
}

/// Sends a packet of this form, and compares what leaves.
fn check<F: Net>(maps: HostMaps<F>, path: Path, shape: Shape, form: Form, known: Known) {
    let case = std::format!("{path:?} {shape:?} {form:?} {known:?}", shape = shape.proto);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    let mut bytes = build::ethernet::<F>(&formed::<F>(client, frontend, shape, form));
    let start = build::ETHERNET + F::HEADER + options_length::<F>(form);
    let offset = if shape.proto == PROTO_UDP { 6 } else { 16 };
    let sum = skb::sum_at(&bytes[build::ETHERNET..], 0);
    if known == Known::Partial {
        let pseudo = F::pseudo(&client.0, &frontend.0, shape.proto, bytes.len() - start);
        let pseudo = !build::checksum(&[&pseudo]);
        bytes[start + offset..start + offset + 2].copy_from_slice(&pseudo.to_be_bytes());
    }
    let (verdict, skb) = run_edited(Hook::Ingress, maps, UPLINK, &bytes, |skb| {
        skb.checksum = match known {
            Known::Nothing => ChecksumState::None,
            Known::Complete => ChecksumState::Complete(sum),
            Known::Partial => ChecksumState::Partial { start, offset },
        };
        skb.gso_size = u32::from(form == Form::Gso);
        if form == Form::Paged {
            skb.linear = build::ETHERNET;
        }
    });
    let (src, ttl) = match path {
        Path::Local => (client, shape.ttl),
        Path::Forward => {
            let flow = maps.flows().into_iter().find(|flow| flow.bits() != 0 && flow.proto == shape.proto);
            ((node::<F>(), flow.unwrap().source_port), shape.ttl - 1)
        }
    };
    assert_eq!(verdict, if path == Path::Local { NEXT } else { REDIRECT }, "{case}");
    assert_eq!(ip(&skb), formed::<F>(src, backend, Shape { ttl, ..shape }, form), "{case}");
    if known == Known::Complete {
        let ChecksumState::Complete(sum) = skb.checksum else { panic!("{case}: the sum is gone") };
        assert_eq!(fold(u64::from(sum)), fold(u64::from(skb::sum_at(&ip(&skb), 0))), "{case}");
    }
}

fn every_form<F: Net>() {
    for path in [Path::Local, Path::Forward] {
        let maps = maps::<F>(if path == Path::Local { BACKEND_LOCAL } else { 0 });
        for form in [Form::Plain, Form::Options, Form::Gso, Form::Paged] {
            for known in [Known::Nothing, Known::Complete, Known::Partial] {
                for shape in [SYN, DATA, UDP] {
                    check(maps, path, shape, form, known);
                }
            }
            for shape in [UNCHECKED, INIT] {
                check(maps, path, shape, form, Known::Nothing);
                check(maps, path, shape, form, Known::Complete);
            }
        }
    }
}

families!(every_form_of_a_packet_is_translated = every_form());

/// Both fragments of a packet that is cut behind 16 bytes of its transport header.
pub(super) fn fragments<F: Net>(src: End<F>, dst: End<F>, shape: Shape) -> [Vec<u8>; 2] {
    let l4 = build::segment::<F>(src, dst, shape);
    [(0, &l4[..16]), (16, &l4[16..])].map(|(at, part)| {
        let more = u16::from(at == 0);
        if F::HEADER == 20 {
            let mut ip = F::ip(&src.0, &dst.0, shape.proto, shape.ttl, part.len(), 0);
            ip[4..6].copy_from_slice(&[0x12, 0x34]);
            ip[6..8].copy_from_slice(&(more << 13 | at >> 3).to_be_bytes());
            ip[10..12].fill(0);
            let check = build::checksum(&[&ip]);
            ip[10..12].copy_from_slice(&check.to_be_bytes());
            [ip, part.to_vec()].concat()
        } else {
            let [a, b] = (at | more).to_be_bytes();
            let ip = F::ip(&src.0, &dst.0, 44, shape.ttl, 8 + part.len(), 0);
            [ip, std::vec![shape.proto, 0, a, b, 0, 0, 0x12, 0x34], part.to_vec()].concat()
        }
    })
}

fn fragments_of_packets<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    let shape = Shape { payload: b"more than eight bytes", ..UDP };
    for known in [Known::Nothing, Known::Complete] {
        let came = fragments::<F>(client, frontend, shape);
        for (came, expected) in came.iter().zip(fragments::<F>(client, backend, shape)) {
            let (verdict, skb) = run_edited(Hook::Ingress, maps, POD, &build::ethernet::<F>(came), |skb| {
                if known == Known::Complete {
                    skb.checksum = ChecksumState::Complete(skb::sum_at(came, 0));
                }
            });
            assert_eq!((verdict, ip(&skb)), (NEXT, expected));
            if let ChecksumState::Complete(sum) = skb.checksum {
                assert_eq!(fold(u64::from(sum)), fold(u64::from(skb::sum_at(&ip(&skb), 0))));
            }
        }
    }
    let all = fragments::<F>(client, frontend, shape).map(|part| part.len() as u64);
    assert_eq!(maps.stats_of(1).bytes, 2 * all.iter().sum::<u64>());
    // The first fragment is known for some time.
    let [first, later] = fragments::<F>(client, frontend, shape);
    let translated = || ip(&run_over(Hook::Ingress, maps, POD, &build::ethernet::<F>(&later)).1) != later;
    run_over(Hook::Ingress, maps, POD, &build::ethernet::<F>(&first));
    maps.advance(FRAGMENT_SECS * HZ);
    assert!(translated());
    maps.advance(1);
    assert!(!translated());
    assert_eq!(maps.count_of(Reason::Fragment), 1);
    // It arrived at a CPU that was a tick ahead.
    run_over(Hook::Ingress, maps, POD, &build::ethernet::<F>(&first));
    maps.advance(1u32.wrapping_neg());
    assert!(translated());
    maps.advance(1);
    // The flow is gone before the later fragment arrives.
    run_over(Hook::Ingress, maps, POD, &build::ethernet::<F>(&first));
    at!(maps, flows).iter_mut().for_each(|flow| flow.state = 0);
    assert_eq!(run_over(Hook::Ingress, maps, POD, &build::ethernet::<F>(&later)).0, DROP);
    assert_eq!(maps.count_of(Reason::FragmentWithoutFirst), 1);
    // Fragments of other packets are not remembered.
    for part in fragments::<F>(client, (F::addr(77), 443), shape) {
        let (verdict, skb) = run_over(Hook::Ingress, maps, POD, &build::ethernet::<F>(&part));
        assert_eq!((verdict, ip(&skb)), (NEXT, part));
    }
    assert_eq!(maps.count_of(Reason::Fragment), 2);
    // Fragments of an endpoint, to a port that SNAT may use, and without a flow.
    for part in fragments::<F>(backend, (client.0, 2500), shape) {
        let (verdict, skb) = run_over(Hook::Ingress, maps, UPLINK, &build::ethernet::<F>(&part));
        assert_eq!((verdict, ip(&skb)), (NEXT, part));
    }
    // SCTP's checksum covers the whole packet.
    let [first, _] = fragments::<F>(client, frontend, INIT);
    let (verdict, skb) = run_over(Hook::Ingress, maps, POD, &build::ethernet::<F>(&first));
    assert_eq!((verdict, ip(&skb)), (NEXT, first));
    assert_eq!(maps.count_of(Reason::Fragment), 3);
}

families!(fragments_are_translated = fragments_of_packets());

/// The sum of the pseudo header may be "minus zero", which a device may also write as zero.
fn a_pseudo_header_of_minus_zero<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (frontend, backend) = (frontend::<F>(), backend::<F>());
    let start = build::ETHERNET + F::HEADER;
    let length = packet::<F>(frontend, frontend, DATA).len() - start;
    // The last 16 bits of the client's address make up for the rest.
    let [a, b, c, d] = client::<F>().0.words();
    let with = |last: u16| {
        let [l0, l1] = last.to_be_bytes();
        let ending = |word: u32| {
            let [w0, w1, ..] = word.to_ne_bytes();
            u32::from_ne_bytes([w0, w1, l0, l1])
        };
        let words = if F::HEADER == 20 { [ending(a), b, c, d] } else { [a, b, c, ending(d)] };
        (F::Words::from_words(words), 4000)
    };
    let pseudo = |client: &End<F>| build::checksum(&[&F::pseudo(&client.0, &frontend.0, PROTO_TCP, length)]);
    let client = (1..=u16::MAX).map(with).find(|client| pseudo(client) == 0).unwrap();
    run_over(Hook::Ingress, maps, POD, &packet::<F>(client, frontend, SYN));
    for field in [0, 0xffff_u16] {
        let mut bytes = packet::<F>(client, frontend, DATA);
        bytes[start + 16..start + 18].copy_from_slice(&field.to_be_bytes());
        let (_, skb) = run_edited(Hook::Ingress, maps, POD, &bytes, |skb| {
            skb.checksum = ChecksumState::Partial { start, offset: 16 };
        });
        assert_eq!(skb.wire(), packet::<F>(client, backend, DATA), "{field:#x}");
    }
}

families!(a_pseudo_header_may_have_the_sum_zero = a_pseudo_header_of_minus_zero());

/// The packet that looked up the route is sent by the kernel's neighbour code; the next ones of the same tick are not.
fn the_next_hop<F: Net>() {
    let maps = maps::<F>(0);
    let bytes = packet::<F>(client::<F>(), frontend::<F>(), SYN);
    for _ in 0..2 {
        maps.advance(1);
        let redirects = [0; 3].map(|_| run_over(Hook::Ingress, maps, UPLINK, &bytes).1.redirect);
        let out = Some(Redirect::Out(route().ifindex));
        assert!(matches!(redirects[0], Some(Redirect::Neighbour(_))));
        assert_eq!(redirects[1..], [out, out]);
    }
}

families!(the_kernel_probes_the_next_hop_once_a_tick = the_next_hop());

/// A tunnel's own address is where an Ethernet device has its MAC address.
fn the_tunnel_with_an_odd_address<F: Net>() {
    for (first, is_tunnel) in [([0xfd, 0x30, 0xfd, 0x30], true), ([0x01, 0, 0x02, 0], false)] {
        let maps = maps::<F>(0);
        let [d0, d1, s0, s1] = first;
        let macs = [u32::from_ne_bytes([d0, d1, 0, 0]), u32::from_ne_bytes([0, 0, s0, s1]), 0];
        let bytes = packet::<F>(client::<F>(), frontend::<F>(), SYN);
        let (_, skb) = run_edited(Hook::Ingress, maps, UPLINK, &bytes, |skb| {
            skb.routes.set_default(Some(Route { macs, ..route() }));
        });
        assert!(matches!(skb.redirect, Some(Redirect::Neighbour(_))));
        assert_eq!(skb.wire()[0], d0 - u8::from(is_tunnel), "the kernel drops frames to a group");
    }
}

families!(frame_into_a_tunnel_has_no_group_address = the_tunnel_with_an_odd_address());

/// A packet that has no hop left is not forwarded, and answered; one for this node is not forwarded, and does not need any.
fn the_last_hop<F: Net>() {
    let last = Shape { ttl: 1, ..SYN };
    for form in [Form::Plain, Form::Options] {
        check(maps::<F>(BACKEND_LOCAL), Path::Local, last, form, Known::Nothing);
        check(maps::<F>(0), Path::Forward, Shape { ttl: 2, ..SYN }, form, Known::Nothing);
        let maps = maps::<F>(0);
        for ttl in [0, 1] {
            let shape = Shape { ttl, ..SYN };
            let bytes = build::ethernet::<F>(&formed::<F>(client::<F>(), frontend::<F>(), shape, form));
            let (verdict, skb) = run_over(Hook::Ingress, maps, UPLINK, &bytes);
            assert_eq!((verdict, skb.redirect), (REDIRECT, Some(Redirect::Out(UPLINK))), "{form:?}");
            let kind = if F::HEADER == 20 { [11, 0] } else { [3, 0] };
            let quote = &bytes[build::ETHERNET..];
            let expected = build::icmp::<F>((kind, 0), node::<F>(), client::<F>().0, (64, 0xc0), quote);
            assert_eq!(ip(&skb), expected, "{form:?}");
        }
        assert_eq!(maps.count_of(Reason::TtlExceeded), 2, "{form:?}");
    }
}

families!(a_packet_without_a_hop_left_is_not_forwarded = the_last_hop());

/// A checksum that becomes zero is sent as its complement, since zero means "none" (RFC 768).
fn a_checksum_of_zero<F: Net>(form: Form) {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    let payloads: Vec<[u8; 2]> = (0..=u16::MAX).map(u16::to_be_bytes).collect();
    let at = F::HEADER + options_length::<F>(form) + 6;
    let mut zeros = 0;
    for payload in payloads {
        let payload: &'static [u8] = Vec::leak(payload.to_vec());
        let shape = Shape { payload, ..UDP };
        let expected = formed::<F>(client, backend, shape, form);
        if expected[at..at + 2] != [0xff, 0xff] {
            continue;
        }
        zeros += 1;
        let bytes = build::ethernet::<F>(&formed::<F>(client, frontend, shape, form));
        let (verdict, skb) = run_over(Hook::Ingress, maps, POD, &bytes);
        assert_eq!((verdict, ip(&skb)), (NEXT, expected));
    }
    assert_ne!(zeros, 0);
}

#[test]
fn a_checksum_that_becomes_zero_is_sent_as_its_complement() {
    for form in [Form::Plain, Form::Options] {
        a_checksum_of_zero::<V4>(form);
        a_checksum_of_zero::<V6>(form);
    }
}
