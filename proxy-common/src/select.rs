//! Which slot of a Service a new connection takes, and which source port.

/// How a Service spreads its connections. The number stands in `services`.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Algorithm {
    /// Uniform, for each connection anew, as kube-proxy's iptables and nftables modes do.
    Random = 0,
}

/// The slot, from 0 to `count` - 1, for a uniformly random `random`.
///
/// Multiplies and shifts instead of dividing: the bias is at most `count` / 2^32. `count` must not be 0.
#[inline(always)]
pub fn random_slot(random: u32, count: u32) -> u32 {
    ((u64::from(random) * u64::from(count)) >> 32) as u32
}

/// The odd number next to 2^32 by the golden ratio: the upper bits of a product with it depend on all bits below.
pub const SPREAD: u32 = 0x9e37_79b1;

/// The source port under which a client's flow goes on (SNAT) unless another flow has it: one of the `count` ports from
/// `first` on, which must end at 65535 at the latest.
///
/// The client's port spreads well enough, and needs no random number.
#[inline(always)]
pub fn source_port(client_port: u16, first: u32, count: u32) -> u16 {
    (first + random_slot(u32::from(client_port).wrapping_mul(SPREAD), count)) as u16
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use crate::config::SNAT_PORTS;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_slot_is_always_inside_the_extent(random: u32, count in 1u32..) {
            prop_assert!(random_slot(random, count) < count);
        }

        #[test]
        fn a_source_port_is_always_inside_its_range(client: u16, one: u16, other: u16) {
            let (first, last) = (one.min(other), one.max(other));
            let chosen = source_port(client, first.into(), u32::from(last - first) + 1);
            prop_assert!((first..=last).contains(&chosen));
        }
    }

    #[test]
    fn clients_ports_in_a_row_get_source_ports_of_their_own() {
        let (first, last) = SNAT_PORTS;
        let count = u32::from(last - first) + 1;
        // What the kernel gives to one client's connections: every other port.
        let chosen: std::collections::BTreeSet<_> =
            (0..1000).map(|n| source_port(32_768 + 2 * n, first.into(), count)).collect();
        assert_eq!(chosen.len(), 1000);
    }

    #[test]
    fn every_slot_is_reached_at_both_ends_of_the_range() {
        assert_eq!(random_slot(0, 3), 0);
        assert_eq!(random_slot(u32::MAX, 3), 2);
    }
}
