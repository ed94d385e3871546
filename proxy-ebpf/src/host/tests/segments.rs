//! Packets that the kernel splits into segments after the programs (GSO).

use proxy_common::{PROTO_SCTP, PROTO_UDP};

use super::*;
use crate::context::{Packet, PacketCtx};
use crate::stage::established::longest;

/// The length of the packets that leave, by the metadata of the socket buffer.
#[test]
fn the_longest_packet_is_a_segment_with_its_headers() {
    fn with_length<F: Net>(
        proto: u8,
        gso_size: u32,
        has_link_header: bool,
        options: usize,
        length: u32,
    ) -> u32 {
        let link = if has_link_header { build::ETHERNET } else { 0 };
        let l4 = link + F::HEADER + options;
        let mut bytes = std::vec![0u8; l4 + 40];
        // TCP with twelve bytes of options.
        bytes[l4 + 12] = 0x8f;
        let packet = if has_link_header {
            HostPacket::new(&bytes)
        } else {
            HostPacket::without_link_header(&bytes, u32::from(F::ETHERTYPE))
        };
        let packet = packet.edit(|skb| skb.gso_size = gso_size);
        let key = FlowKey { proto, ..Packet::<F::Words>::EMPTY.key };
        let mut ctx = PacketCtx::<F::Words>::EMPTY;
        ctx.packet = Packet { key, l4: l4 as u32, length, ..Packet::EMPTY };
        longest(packet.frame(), &ctx)
    }
    fn of<F: Net>(proto: u8, gso_size: u32, has_link_header: bool, options: usize) -> u32 {
        with_length::<F>(proto, gso_size, has_link_header, options, 40_000)
    }
    for has_link_header in [true, false] {
        assert_eq!(of::<V4>(PROTO_TCP, 0, has_link_header, 0), 40_000);
        assert_eq!(of::<V4>(PROTO_TCP, 1400, has_link_header, 0), 20 + 32 + 1400);
        assert_eq!(of::<V4>(PROTO_TCP, 1400, has_link_header, 8), 28 + 32 + 1400);
        assert_eq!(of::<V4>(PROTO_UDP, 1400, has_link_header, 0), 20 + 8 + 1400);
        assert_eq!(of::<V6>(PROTO_TCP, 1400, has_link_header, 0), 40 + 32 + 1400);
        assert_eq!(of::<V6>(PROTO_UDP, 1400, has_link_header, 24), 64 + 8 + 1400);
        // BIG TCP: the kernel removes the extension header that states the length.
        let jumbo = |options, length| with_length::<V6>(PROTO_TCP, 1400, has_link_header, options, length);
        assert_eq!(jumbo(8, 40 + 65_536), 40 + 32 + 1400);
        assert_eq!(jumbo(8, 40 + 65_535), 48 + 32 + 1400);
        assert_eq!(jumbo(0, 40 + 65_536), 40 + 32 + 1400, "newer kernels add no header");
        let v4 = with_length::<V4>(PROTO_TCP, 1400, has_link_header, 24, 40 + 65_536);
        assert_eq!(v4, 44 + 32 + 1400);
    }
    // The length of SCTP segments is not known: they are assumed to fit.
    assert_eq!(of::<V4>(PROTO_SCTP, 1400, true, 0), build::ETHERNET as u32 + 20);
}

/// A GSO packet whose length in the pseudo header is too large for the IP header (BIG TCP).
fn more_than_a_header_tells<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    run_over(Hook::Ingress, maps, POD, &packet::<F>(client, frontend, SYN));
    let check_at = build::ETHERNET + F::HEADER + 16;
    let sum = |from: End<F>, to: End<F>| !build::checksum(&[&F::pseudo(&from.0, &to.0, PROTO_TCP, 90_000)]);
    let with = |mut bytes: Vec<u8>, sum: u16| {
        bytes[check_at..check_at + 2].copy_from_slice(&sum.to_be_bytes());
        bytes
    };
    let sent = with(packet::<F>(client, frontend, DATA), sum(client, frontend));
    let (verdict, skb) = run_edited(Hook::Ingress, maps, POD, &sent, |skb| {
        skb.checksum = ChecksumState::Partial { start: build::ETHERNET + F::HEADER, offset: 16 };
        skb.gso_size = 1400;
    });
    let expected = with(packet::<F>(client, backend, DATA), sum(client, backend));
    assert_eq!((verdict, skb.as_slice().to_vec()), (NEXT, expected));
}

families!(an_unfinished_checksum_of_segments_stays_one = more_than_a_header_tells());
