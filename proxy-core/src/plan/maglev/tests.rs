use std::collections::BTreeMap;
use std::net::{Ipv4Addr, Ipv6Addr};

use proptest::prelude::*;
use proxy_common::maglev;

use super::*;

fn member(number: u32, weight: u32) -> Member {
    let address = Ipv4Addr::from_bits(0x0af4_0000 + number * 257).into();
    Member { at: BackendAddress { address, port: 8080 }, weight, id: number + 1 }
}

fn members(count: u32) -> Vec<Member> {
    (0..count).map(|number| member(number, 1)).collect()
}

/// Returns the shares of the endpoints, by id.
fn shares(members: &[Member]) -> BTreeMap<u32, u32> {
    let mut shares = BTreeMap::new();
    for entry in entries(members) {
        *shares.entry(members[usize::from(entry)].id).or_default() += 1;
    }
    shares
}

/// Returns the percentage of flows that move from one remaining endpoint to another one when `gone` is removed.
fn moved(members: &[Member], gone: usize) -> f64 {
    let rest: Vec<Member> =
        members.iter().enumerate().filter(|(n, _)| *n != gone).map(|(_, one)| *one).collect();
    let (before, after) = (packed(members), packed(&rest));
    let to = |table: &[u64], hash| maglev::backend(0, hash, |at| table.get(at as usize).copied());
    let hashes = (0..50_000_u32).map(|n| n.wrapping_mul(0x9e37_79b1));
    let (mut stay, mut lost) = (0_u32, 0_u32);
    for hash in hashes {
        let was = to(&before, hash);
        if was != members[gone].id {
            stay += 1;
            lost += u32::from(to(&after, hash) != was);
        }
    }
    100.0 * f64::from(lost) / f64::from(stay)
}

#[test]
fn shares_differ_by_a_percent_at_most_and_few_flows_move() {
    for count in [2, 3, 5, 10, 20, 50, 100, 257, 300] {
        let members = members(count);
        let shares = shares(&members);
        let (least, most) = (shares.values().min().unwrap(), shares.values().max().unwrap());
        let mean = size(count) / count;
        assert!(shares.len() as u32 == count && (most - least) * 100 <= mean, "{count}: {least} to {most}");
        let leaving = count.min(20);
        let losses = (0..leaving).map(|gone| moved(&members, gone as usize));
        let mean = losses.sum::<f64>() / f64::from(leaving);
        assert!(mean <= 2.0, "{count} endpoints: {mean:.2} % of the flows move");
    }
}

#[test]
fn the_map_says_what_the_entries_say() {
    for count in [1, 2, 5, 256, 257, 700] {
        let members = members(count);
        let (entries, packed) = (entries(&members), packed(&members));
        assert_eq!(packed.len() as u32, length(members.len()));
        let size = entries.len() as u64;
        for (number, entry) in entries.iter().enumerate() {
            // The lowest hash of that entry.
            let hash = ((number as u64) << 32).div_ceil(size) as u32;
            let found = maglev::backend(7, hash, |at| packed.get(at as usize - 7).copied());
            assert_eq!(found, members[usize::from(*entry)].id, "{count}: entry {number}");
        }
    }
}

/// A flow goes to the same endpoint on every node, whatever the node's version: other values here would move flows during
/// an upgrade.
#[test]
fn tables_are_those_of_earlier_versions() {
    let v6 = |number: u32| {
        let address =
            Ipv6Addr::from_bits(0xfd00_0000_0000_0001_0000_0000_0000_0000 + u128::from(number)).into();
        Member { at: BackendAddress { address, port: 8080 }, weight: 1, id: number + 1 }
    };
    let weighted = (0..5).map(|number| member(number, number + 1)).collect();
    let tables: [Vec<Member>; 3] = [members(5), weighted, (0..5).map(v6).collect()];
    let checksums = [10_167_737_462_648_774_659, 5_041_603_259_960_625_078, 906_552_109_358_211_930];
    assert_eq!(tables.each_ref().map(|table| packed(table)[2]), checksums);
}

/// An id may belong to another endpoint by the time its table is used again.
#[test]
fn signature_covers_id_weight_address_and_port() {
    let one = member(1, 1);
    let mut others = [one, one, one, one];
    others[0].id += 1;
    others[1].weight += 1;
    others[2].at.address = [10, 9, 9, 9].into();
    others[3].at.port += 1;
    assert!(others.iter().all(|other| signature(&[*other]) != signature(&[one])));
}

#[test]
fn rounding_remainder_of_shares_goes_to_the_largest_fractions() {
    // 1.4, 1.4 and 4.2 of 7 entries.
    assert_eq!(super::shares(&[member(0, 1), member(1, 1), member(2, 3)], 7), [2, 1, 4]);
}

#[test]
fn the_most_endpoints_have_a_table() {
    let members: Vec<Member> = (0..maglev::MAX_BACKENDS).map(|number| member(number, 1)).collect();
    assert_eq!(shares(&members).len(), members.len());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn ids_and_the_order_of_events_change_nothing(
        numbers in prop::collection::btree_map(0..2_000_u32, (1..=100_u32, 1..1_000_000_u32), 1..40),
    ) {
        let one: Vec<Member> = numbers.iter().map(|(n, (weight, _))| member(*n, *weight)).collect();
        let other: Vec<Member> =
            numbers.iter().map(|(n, (weight, id))| Member { id: *id, ..member(*n, *weight) }).collect();
        prop_assert_eq!(entries(&one), entries(&other));
    }

    #[test]
    fn shares_go_by_weight(weights in prop::collection::vec(1..=100_u32, 2..40)) {
        let members: Vec<Member> =
            weights.iter().enumerate().map(|(n, weight)| member(n as u32, *weight)).collect();
        let (shares, total) = (shares(&members), weights.iter().sum::<u32>());
        let size = f64::from(size(members.len() as u32));
        for member in &members {
            let due = size * f64::from(member.weight) / f64::from(total);
            let has = f64::from(shares.get(&member.id).copied().unwrap_or(0));
            // The share is rounded up or down.
            prop_assert!((has - due).abs() < 1.0, "{} of {due}", has);
        }
    }
}
