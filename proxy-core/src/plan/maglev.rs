//! Maglev tables (Eisenbud et al., "Maglev", NSDI 2016, 3.4): from a hash to an endpoint, so that the endpoints get equal
//! shares, and few flows move when an endpoint is added or removed. A table depends on the endpoints' addresses and weights
//! alone: all nodes have the same table, whatever the ids are and in which order the endpoints were added.

use std::net::IpAddr;

use proxy_common::maglev::{HEADER, checksum, id_words, per_word, shape, size, words};

use super::BackendAddress;

/// An endpoint in a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its address and port, from which the table is computed.
    pub at: BackendAddress,
    /// Its weight, at least 1.
    pub weight: u32,
    /// Its id, to which the table leads.
    pub id: u32,
}

/// An entry without an owner yet.
const FREE: u16 = u16::MAX;

/// Returns the entries of the table of these endpoints: positions in `members`, which is sorted by address, and has at
/// least one element, and at most [`MOST`](proxy_common::maglev::MAX_BACKENDS).
pub fn entries(members: &[Member]) -> Vec<u16> {
    let size = size(members.len() as u32) as usize;
    let mut table = vec![FREE; size];
    let most = members.iter().map(|member| member.weight).max().unwrap_or(1).max(1);
    let mut next: Vec<(usize, usize, u32)> =
        members.iter().map(|member| permutation(&member.at, size)).collect();
    let mut due = shares(members, size);
    let mut left = size;
    while left > 0 {
        for (number, (member, (at, skip, credit))) in members.iter().zip(&mut next).enumerate() {
            // The highest weight gets one turn in each round, the other weights get a part of a turn.
            *credit += member.weight.max(1);
            if *credit < most {
                continue;
            }
            *credit -= most;
            // Turns depend on rounded credits: without this, high weights get all turns that the rounding leaves.
            if due[number] == 0 {
                continue;
            }
            due[number] -= 1;
            while table[*at] != FREE {
                *at = step(*at, *skip, size);
            }
            table[*at] = number as u16;
            *at = step(*at, *skip, size);
            left -= 1;
            if left == 0 {
                break;
            }
        }
    }
    table
}

/// Returns how many of `size` entries each endpoint gets: its part by weight, rounded down, and one more for the endpoints
/// that lose most by the rounding (largest remainder method).
fn shares(members: &[Member], size: usize) -> Vec<usize> {
    let total: u64 = members.iter().map(|member| u64::from(member.weight.max(1))).sum();
    let part = |member: &Member| size as u64 * u64::from(member.weight.max(1));
    let mut shares: Vec<usize> = members.iter().map(|member| (part(member) / total) as usize).collect();
    let mut by_loss: Vec<usize> = (0..members.len()).collect();
    by_loss.sort_by_key(|at| std::cmp::Reverse(part(&members[*at]) % total));
    let rest = size - shares.iter().sum::<usize>();
    by_loss.iter().take(rest).for_each(|at| shares[*at] += 1);
    shares
}

fn step(at: usize, skip: usize, size: usize) -> usize {
    let next = at + skip;
    if next < size { next } else { next - size }
}

/// Returns the first entry of an endpoint's permutation, the step to the next one, and a credit of 0. Entry and step depend
/// on the endpoint's address and port alone.
fn permutation(at: &BackendAddress, size: usize) -> (usize, usize, u32) {
    let (high, low) = match at.address {
        IpAddr::V4(address) => (4, u64::from(address.to_bits())),
        IpAddr::V6(address) => ((address.to_bits() >> 64) as u64, address.to_bits() as u64),
    };
    let hash = mix(mix(mix(high) ^ low) ^ u64::from(at.port));
    let size = size as u64;
    ((hash % size) as usize, (mix(hash) % (size - 1)) as usize + 1, 0)
}

/// The finalizer of splitmix64.
const fn mix(mut hash: u64) -> u64 {
    hash = hash.wrapping_add(0x9e37_79b9_7f4a_7c15);
    hash = (hash ^ hash >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ hash >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ hash >> 31
}

/// Returns a number that distinguishes the table of these endpoints from that of others, without computing the table. Ids
/// alone would not: a previous table may outlive its ids, which then belong to other endpoints.
pub fn signature(members: &[Member]) -> u64 {
    let words = |member: &Member| {
        let address = match member.at.address {
            IpAddr::V4(address) => u128::from(address.to_bits()),
            IpAddr::V6(address) => address.to_bits(),
        };
        let row = u64::from(member.id) | u64::from(member.weight) << 32;
        [row, address as u64, (address >> 64) as u64, member.at.port.into()]
    };
    checksum(members.iter().flat_map(words)).max(1)
}

/// Returns the number of words of the table of this many endpoints.
pub fn length(members: usize) -> u32 {
    let members = members as u32;
    words(size(members), members)
}

/// Returns the table in the format of the map: see [`proxy_common::maglev`].
pub fn packed(members: &[Member]) -> Vec<u64> {
    let count = members.len() as u32;
    let entries = entries(members);
    let mut all = Vec::with_capacity(length(members.len()) as usize);
    all.extend([shape(entries.len() as u32, count), signature(members), 0]);
    let ids = members.chunks(2).map(|pair| {
        pair.iter().enumerate().fold(0, |word, (half, member)| word | u64::from(member.id) << (32 * half))
    });
    all.extend(ids);
    let (each, bits) = (per_word(count) as usize, 64 / per_word(count));
    let word = |part: &[u16]| part.iter().rev().fold(0, |word, entry| word << bits | u64::from(*entry));
    all.extend(entries.chunks(each).map(word));
    debug_assert_eq!(
        all.len() as u32,
        HEADER + id_words(count) + (entries.len() as u32).div_ceil(each as u32)
    );
    all[2] = checksum(all[HEADER as usize..].iter().copied());
    all
}

#[cfg(test)]
mod tests;
