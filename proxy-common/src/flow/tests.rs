extern crate std;
use std::vec;

use super::*;

fn key(client: u32, port: u16) -> FlowKey<[u8; 4]> {
    FlowKey {
        src: client.to_be_bytes(),
        dst: [10, 96, 0, 1],
        src_port: port,
        dst_port: 80,
        proto: PROTO_TCP,
        direction: DIRECTION_FORWARD,
        reserved: 0,
    }
}

/// Returns how many keys find no free slot in either of their two buckets.
fn overflows(keys: impl Iterator<Item = u64>, buckets: u32) -> u32 {
    let mut filled = vec![0u8; buckets as usize];
    let mut without = 0;
    for hash in keys {
        let [first, second] = buckets_of(hash, buckets);
        assert_ne!(first, second);
        let free = [first, second].into_iter().find(|at| u32::from(filled[*at as usize]) < BUCKET_SLOTS);
        match free {
            Some(at) => filled[at as usize] += 1,
            None => without += 1,
        }
    }
    without
}

#[test]
fn a_full_table_has_room_in_its_index() {
    let buckets = 1u32 << 15;
    let flows = 1u32 << 16;
    assert_eq!(buckets_for(flows), buckets);
    // The worst patterns of clients: one address with consecutive ports, or consecutive addresses with one port.
    let by_port = (0..2 * flows).map(|i| key(0x0a00_0000 + (i >> 15), i as u16).hash(7));
    assert_eq!(overflows(by_port, buckets), 0);
    let by_address = (0..2 * flows).map(|i| key(0x0a00_0000 + i, 40_000).hash(7));
    assert_eq!(overflows(by_address, buckets), 0);
}

#[test]
fn slot_encodes_its_flow_and_never_equals_a_free_slot() {
    for hash in [0, 1, u64::from(u32::MAX), 1 << 32, 1 << 57, u64::MAX, 0x8000_0000_0000_0000] {
        let tag = tag(hash);
        assert!(tag != 0 && tag & !SLOT_TAG == 0, "{hash:#x}: {tag:#x}");
        for flow in [0, 1, 77, MAX_FLOWS - 1] {
            let slot = slot_of(tag, flow);
            assert_eq!((slot & SLOT_TAG, flow_of(slot), slot & SLOT_PENDING), (tag, flow, 0));
        }
    }
    assert!(flow_of(0) >= MAX_FLOWS);
    assert!([1, 2, 4, 5, MAX_FLOWS].map(buckets_for).iter().all(|n| *n > 1 && n.is_power_of_two()));
}

#[test]
fn every_part_of_a_key_and_the_seed_count() {
    let one = key(0x0a00_0001, 1000);
    let others = [
        key(0x0a00_0002, 1000),
        key(0x0a00_0001, 1001),
        FlowKey { dst: [10, 96, 0, 2], ..one },
        FlowKey { dst_port: 81, ..one },
        FlowKey { proto: crate::PROTO_UDP, ..one },
        FlowKey { direction: DIRECTION_REPLY, ..one },
    ];
    for other in others {
        assert_ne!(one.hash(7), other.hash(7), "{other:?}");
    }
    assert_ne!(one.hash(7), one.hash(8));
    let wide = FlowKey { src: [1; 16], dst: [2; 16], ..key6() };
    for byte in 0..16 {
        let mut other = wide;
        other.src[byte] ^= 1;
        assert_ne!(wide.hash(7), other.hash(7), "byte {byte} of the source");
        let mut other = wide;
        other.dst[byte] ^= 1;
        assert_ne!(wide.hash(7), other.hash(7), "byte {byte} of the destination");
    }
}

fn key6() -> FlowKey<[u8; 16]> {
    let FlowKey { src_port, dst_port, proto, direction, reserved, .. } = key(0, 1000);
    FlowKey { src: [0; 16], dst: [0; 16], src_port, dst_port, proto, direction, reserved }
}

#[test]
fn words_hash_as_octets_do() {
    let octets = key(0x0a01_0203, 9);
    let words = FlowKey {
        src: [u32::from_ne_bytes(octets.src)],
        dst: [u32::from_ne_bytes(octets.dst)],
        src_port: octets.src_port,
        dst_port: octets.dst_port,
        proto: octets.proto,
        direction: octets.direction,
        reserved: 0,
    };
    assert_eq!(octets.hash(3), words.hash(3));
}

#[test]
fn claim_increments_the_generation_and_clears_all_bits() {
    let state = with_bits(7 << 32, STATE_USED | STATE_SNAT);
    assert_eq!((generation_of(state), bits_of(state)), (7, STATE_USED | STATE_SNAT));
    let next = claimed(state);
    assert_eq!((generation_of(next), bits_of(next)), (8, STATE_USED | STATE_CLAIMED));
    assert_eq!(generation_of(claimed(u64::MAX)), 0);
}
