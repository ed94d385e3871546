//! From weights to slots: an endpoint has as many slots in an extent as its weight.

/// Maximum number of slots of an extent, per endpoint; small extents may have [`FEW`] slots.
const EACH: u64 = 8;
/// Number of slots that every extent may have.
const FEW: u64 = 1_024;

/// Returns the slots of endpoints with these weights: each endpoint's position as often as its weight, evenly spread, so
/// that round robin selects no endpoint twice in a row if this can be avoided. Weights are divided by their common factor.
/// If there is not enough room for them, they are scaled down and rounded, to 1 at least.
pub fn slots(weights: &[u32]) -> Vec<usize> {
    let factor = weights.iter().fold(0, |factor, weight| gcd(factor, u64::from(*weight).max(1))).max(1);
    let mut shares: Vec<u64> = weights.iter().map(|weight| u64::from(*weight).max(1) / factor).collect();
    let (total, room) = (shares.iter().sum::<u64>(), FEW.max(EACH * weights.len() as u64));
    if total > room {
        for share in &mut shares {
            *share = (*share * room / total).max(1);
        }
    }
    // Each slot of an endpoint is at the middle of its part of the whole round.
    let places = |(position, share): (usize, &u64)| {
        let share = *share;
        (0..share).map(move |turn| (((2 * turn + 1) << 32) / (2 * share), position))
    };
    let mut all: Vec<(u64, usize)> = shares.iter().enumerate().flat_map(places).collect();
    all.sort_unstable();
    all.into_iter().map(|(_, position)| position).collect()
}

const fn gcd(mut one: u64, mut other: u64) -> u64 {
    while other != 0 {
        (one, other) = (other, one % other);
    }
    one
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn turns_are_evenly_spread() {
        assert_eq!(slots(&[1, 1, 1]), [0, 1, 2]);
        assert_eq!(slots(&[4, 4]), [0, 1]);
        assert_eq!(slots(&[3, 1]), [0, 0, 1, 0]);
        assert_eq!(slots(&[100]), [0]);
        assert_eq!(slots(&[]), [0; 0]);
    }

    #[test]
    fn high_weights_of_many_endpoints_fill_the_room() {
        let weights: Vec<u32> = (0..300).map(|number| if number % 2 == 0 { 100 } else { 1 }).collect();
        assert_eq!(slots(&weights).len() as u64, EACH * 300);
    }

    proptest! {
        #[test]
        fn shares_are_the_weights_and_room_is_kept(weights in prop::collection::vec(1..=100_u32, 1..300)) {
            let all = slots(&weights);
            let (count, total) = (weights.len() as u64, weights.iter().map(|w| u64::from(*w)).sum::<u64>());
            // Shares below one are rounded up, so each endpoint may add one slot.
            prop_assert!(all.len() as u64 <= FEW.max(EACH * count) + count);
            for (position, weight) in weights.iter().enumerate() {
                let has = all.iter().filter(|one| **one == position).count() as u64;
                let due = u64::from(*weight) * all.len() as u64 / total;
                prop_assert!(has >= 1 && has.abs_diff(due) <= 1 + due / 4, "{} of {}", has, due);
            }
        }
    }
}
