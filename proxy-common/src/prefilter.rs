//! `prefilter`: one cheap check that lets the programs pass foreign packets.
//!
//! A bitmap of hashed (address, port, protocol): one half for frontends (checked for destinations at ingress) and one for
//! backends (checked for sources at egress, and at ingress for replies to SNAT and for direct connections). A clear bit means that the packet is certainly foreign; a set bit means that
//! the tables have to be looked up. The agent sets a bit before the first entry that needs it, and clears it long after the
//! last such entry was removed, so that draining flows are still translated.

use crate::Address;

/// An odd number near 2^32 divided by the golden ratio: the upper bits of a product with it depend on all lower bits.
pub const SPREAD: u32 = 0x9e37_79b1;

/// Number of bits of each half: 10,000 frontends set 1 % of them.
pub const PREFILTER_BITS: u32 = 1 << 20;
/// Number of 64-bit words in the map: both halves.
pub const PREFILTER_WORDS: u32 = 2 * PREFILTER_BITS / 64;

/// The role for which an address, port and protocol are looked up: the half of the bitmap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// The destination of a client's packet.
    Frontend,
    /// The source of a reply.
    Backend,
}

/// Returns the hash of an address, port and protocol, the same in programs and agent.
#[inline(always)]
pub fn hash<A: Address>(addr: &A, port: u16, proto: u8) -> u32 {
    let [a, b, c, d] = addr.words();
    // Odd multipliers separate neighbouring addresses and ports; a better hash has no benefit here.
    let mut hash = a ^ b.rotate_left(7) ^ c.rotate_left(14) ^ d.rotate_left(21);
    hash = hash.wrapping_mul(SPREAD) ^ (u32::from(port) << 8 | u32::from(proto)).wrapping_mul(0x85eb_ca6b);
    hash ^= hash >> 15;
    hash.wrapping_mul(0xc2b2_ae35)
}

/// Returns the position of the bit of an address, port and protocol: (word of the map, mask).
#[inline(always)]
pub fn position<A: Address>(role: Role, addr: &A, port: u16, proto: u8) -> (u32, u64) {
    let bit = hash(addr, port, proto) >> 12;
    let half = match role {
        Role::Frontend => 0,
        Role::Backend => PREFILTER_BITS / 64,
    };
    (half + (bit >> 6), 1 << (bit & 63))
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;

    #[test]
    fn positions_stay_inside_their_half() {
        for i in 0..100_000u32 {
            let (word, mask) = position(Role::Frontend, &i.to_be_bytes(), i as u16, 6);
            assert!(word < PREFILTER_WORDS / 2 && mask.is_power_of_two());
            let (word, _) = position(Role::Backend, &i.to_be_bytes(), i as u16, 17);
            assert!((PREFILTER_WORDS / 2..PREFILTER_WORDS).contains(&word));
        }
    }

    #[test]
    fn consecutive_cluster_addresses_spread() {
        let mut seen = std::vec![0u64; PREFILTER_WORDS as usize];
        let mut set = 0;
        for i in 0..10_000u32 {
            let (word, mask) = position(Role::Frontend, &(0x0a60_0000 + i).to_be_bytes(), 80, 6);
            set += u32::from(seen[word as usize] & mask == 0);
            seen[word as usize] |= mask;
        }
        assert!(set > 9_800, "{set} bits for 10,000 frontends");
    }
}
