//! ICMP answers to packets of every length: how much they quote, and their checksums.

use super::*;
use crate::context::QUOTE;

/// Bytes of the longest packet that is quoted whole (RFC 1812, 4.3.2.3; RFC 4443, 2.4).
fn whole<F: Net>() -> usize {
    if F::HEADER == 20 { 576 - 28 } else { 1280 - 48 }
}

/// An IP packet with an answer; `rest`: the second word of its ICMP header.
fn answer<F: Net>(kind: [u8; 2], rest: u32, src: F::Words, dst: F::Words, quote: &[u8]) -> Vec<u8> {
    build::icmp::<F>((kind, rest), src, dst, (64, 0xc0), quote)
}

fn datagram<F: Net>(length: usize) -> Vec<u8> {
    let payload: &'static [u8] = Vec::leak((0..length - F::HEADER - 8).map(|at| at as u8).collect());
    ip_packet::<F>(client::<F>(), frontend::<F>(), Shape { payload, ..UDP })
}

/// The answer to a datagram to a Service without endpoints.
fn refused<F: Net>(datagram: &[u8]) -> Vec<u8> {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend) = (client::<F>(), frontend::<F>());
    let entry = ServiceEntry { id: 1, kind: KIND_CLUSTER_IP, ..ServiceEntry::NONE };
    for proto in [PROTO_UDP, PROTO_SCTP] {
        maps.add_service(ServiceKey::internal(frontend.0, frontend.1, proto), entry);
    }
    let (verdict, skb) = run_over(Hook::Ingress, maps, POD, &build::ethernet::<F>(datagram));
    assert_eq!((verdict, skb.redirect), (REDIRECT, Some(Redirect::Out(POD))));
    let error = ip(&skb);
    let quoted = error.len() - F::HEADER - 8;
    assert_eq!(error, answer::<F>(F::UNREACHABLE, 0, frontend.0, client.0, &datagram[..quoted]));
    error[F::HEADER + 8..].to_vec()
}

fn how_much_is_quoted<F: Net>() {
    let all = whole::<F>();
    for length in [F::HEADER + 8, QUOTE - 1, QUOTE, QUOTE + 1, 300, all - 1, all] {
        assert_eq!(refused::<F>(&datagram::<F>(length)).len(), length);
    }
    for length in [all + 1, 1400] {
        assert_eq!(refused::<F>(&datagram::<F>(length)).len(), QUOTE);
    }
    // Without a checksum the sum over the packet is not known: it is read as far as it is quoted.
    for (length, quoted) in [(F::HEADER + 9, F::HEADER + 9), (QUOTE, QUOTE), (QUOTE + 1, QUOTE), (300, QUOTE)]
    {
        let mut unchecked = datagram::<F>(length);
        unchecked[F::HEADER + 6..F::HEADER + 8].fill(0);
        assert_eq!(refused::<F>(&unchecked).len(), quoted);
    }
    let init = ip_packet::<F>(client::<F>(), frontend::<F>(), INIT);
    assert_eq!(refused::<F>(&init).len(), init.len());
}

families!(an_answer_quotes_the_packet_or_its_beginning = how_much_is_quoted());

/// The device is to complete the packet's checksum.
fn incomplete<F: Net>() {
    let (client, frontend) = (client::<F>(), frontend::<F>());
    for (length, quoted) in [(300, 300), (1400, QUOTE)] {
        let maps = maps::<F>(BACKEND_LOCAL);
        let entry = ServiceEntry { id: 1, kind: KIND_CLUSTER_IP, ..ServiceEntry::NONE };
        maps.add_service(ServiceKey::internal(frontend.0, frontend.1, PROTO_UDP), entry);
        let whole = datagram::<F>(length);
        let pseudo = F::pseudo(&client.0, &frontend.0, PROTO_UDP, length - F::HEADER);
        let mut sent = whole.clone();
        let check = !build::checksum(&[&pseudo]);
        sent[F::HEADER + 6..F::HEADER + 8].copy_from_slice(&check.to_be_bytes());
        let start = build::ETHERNET + F::HEADER;
        let (verdict, skb) = run_edited(Hook::Ingress, maps, POD, &build::ethernet::<F>(&sent), |skb| {
            skb.checksum = ChecksumState::Partial { start, offset: 6 };
        });
        assert_eq!(verdict, REDIRECT);
        // The kernel completes the checksum in a whole quote, and no other one.
        let quote = if quoted == length { &whole } else { &sent[..quoted] };
        assert_eq!(ip(&skb), answer::<F>(F::UNREACHABLE, 0, frontend.0, client.0, quote));
    }
}

families!(answer_to_a_packet_without_checksum_is_complete = incomplete());

/// The checksum of a first fragment covers bytes that are not in it.
fn a_first_fragment() {
    let mut first = datagram::<V4>(300);
    first[6..8].copy_from_slice(&[0x20, 0]);
    first[10..12].fill(0);
    let check = build::checksum(&[&first[..20]]);
    first[10..12].copy_from_slice(&check.to_be_bytes());
    first[40] ^= 0x55;
    assert_eq!(refused::<V4>(&first).len(), QUOTE);
    // "Don't fragment" is no fragment.
    let mut whole = datagram::<V4>(300);
    whole[6..8].copy_from_slice(&[0x40, 0]);
    assert_eq!(refused::<V4>(&whole).len(), 300);
}

#[test]
fn a_first_fragment_is_quoted_in_part() {
    a_first_fragment();
}

fn too_big<F: Net>() {
    let (client, frontend) = (client::<F>(), frontend::<F>());
    for (length, quoted) in [(300, 300), (1400, QUOTE)] {
        for mtu in [length as u32 - 1, 100] {
            let maps = maps::<F>(0);
            let sent = datagram::<F>(length);
            let (verdict, skb) =
                run_edited(Hook::Ingress, maps, UPLINK, &build::ethernet::<F>(&sent), |skb| {
                    skb.routes.set_default(Some(Route { mtu, ..route() }));
                });
            assert_eq!(verdict, REDIRECT);
            let kind = if F::HEADER == 20 { [3, 4] } else { [2, 0] };
            assert_eq!(ip(&skb), answer::<F>(kind, mtu, frontend.0, client.0, &sent[..quoted]));
            assert_eq!(maps.count_of(Reason::PacketTooBig), 1);
        }
    }
}

families!(client_gets_packet_too_big_with_the_mtu = too_big());
