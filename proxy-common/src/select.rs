//! Which slot of a Service a new connection takes.

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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_slot_is_always_inside_the_extent(random: u32, count in 1u32..) {
            prop_assert!(random_slot(random, count) < count);
        }
    }

    #[test]
    fn every_slot_is_reached_at_both_ends_of_the_range() {
        assert_eq!(random_slot(0, 3), 0);
        assert_eq!(random_slot(u32::MAX, 3), 2);
    }
}
