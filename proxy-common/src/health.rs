//! `health`: the results of connections to each backend, and whether new connections skip it (passive ejection).
//!
//! A connection fails if the backend refuses it (a RST, or ICMP "unreachable") or does not answer. A client whose
//! connection failed skips the backend for a while, each time for four times as long. If connections of two clients in a
//! row failed, all clients skip the backend: it is ejected, each time for twice as long.
//! After that, and when it joins a Service that works, a backend gets a small share of the connections until it answers a
//! client.

use crate::Address;
use crate::flow::mix;
use crate::select::next_random;

/// Low half of a word: jiffies of the last failure, or when a program first examined a newcomer; valid only with
/// [`HEALTH_SINCE`].
pub const HEALTH_TIME: u64 = 0xffff_ffff;
/// The client of the first failure in a row, a [`client`] number; 0: none.
pub const HEALTH_FIRST: u64 = CLIENTS << FIRST_SHIFT;
/// Number of another client whose connection failed after that: the backend is ejected. 0: none.
pub const HEALTH_SECOND: u64 = CLIENTS << SECOND_SHIFT;
/// How often the backend was ejected in a row before: each ejection lasts twice as long as the previous one.
pub const HEALTH_LEVEL: u64 = 0x7 << LEVEL_SHIFT;
/// [`HEALTH_TIME`] is valid.
pub const HEALTH_SINCE: u64 = 1 << 60;
/// The backend is a newcomer: it joined a Service in which another backend has answered, and has not answered yet.
pub const HEALTH_NEWCOMER: u64 = 1 << 61;
/// The backend has answered.
pub const HEALTH_ANSWERED: u64 = 1 << 62;
/// How often connections of the first client alone have failed again: each time, this client skips the backend for four
/// times as long. Two bits.
pub const HEALTH_REPEATS: u64 = 1 << AGAIN_LOW | 1 << AGAIN_HIGH;

const CLIENT_BITS: u32 = 12;
const CLIENTS: u64 = (1 << CLIENT_BITS) - 1;
const FIRST_SHIFT: u32 = 32;
const SECOND_SHIFT: u32 = FIRST_SHIFT + CLIENT_BITS;
const LEVEL_SHIFT: u32 = SECOND_SHIFT + CLIENT_BITS;
const AGAIN_LOW: u32 = 59;
const AGAIN_HIGH: u32 = 63;

/// The highest level: an ejection lasts 32 seconds.
const MOST_LEVEL: u32 = 5;
/// The highest count in [`HEALTH_REPEATS`]: the client skips the backend for 64 seconds.
const MOST_AGAIN: u32 = 3;
/// Maximum time for which a backend gets a small share, in seconds.
pub const TRIAL_SECS: u32 = 30;
/// The small share: one in this many of the connections that would select the backend. A power of two.
pub const TRIAL_SHARE: u32 = 8;

/// Client number of a connection that skips no backend.
pub const NO_CLIENT: u32 = 0;

/// Whether a new connection may use a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Standing {
    /// The backend gets its whole share.
    Good = 0,
    /// The backend gets a small share.
    Trial = 1,
    /// The backend is used only if no other one is left.
    Ejected = 2,
}

/// Seed of the hash of client numbers.
const SEED: u64 = 0x686f_7773_6865_2121;

#[inline(always)]
const fn number(hash: u64) -> u32 {
    let upper = (hash.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - CLIENT_BITS)) as u32;
    if upper == NO_CLIENT { 1 } else { upper }
}

/// Returns the number of a client of the packet path: a hash of its address with twelve bits, so that two clients rarely
/// count as one.
#[inline(always)]
pub fn client<A: Address>(address: &A) -> u32 {
    let [a, b, c, d] = address.words();
    let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    number(mix(mix(SEED, pair(a, b)), pair(c, d)))
}

/// As [`client`], for a socket: its client is the network namespace.
#[inline(always)]
pub fn socket_client(netns: u64) -> u32 {
    number(mix(SEED, netns))
}

#[inline(always)]
const fn first(word: u64) -> u32 {
    ((word >> FIRST_SHIFT) & CLIENTS) as u32
}

#[inline(always)]
const fn second(word: u64) -> u32 {
    ((word >> SECOND_SHIFT) & CLIENTS) as u32
}

#[inline(always)]
const fn level(word: u64) -> u32 {
    ((word & HEALTH_LEVEL) >> LEVEL_SHIFT) as u32
}

#[inline(always)]
const fn again(word: u64) -> u32 {
    ((word >> AGAIN_LOW & 1) | (word >> AGAIN_HIGH & 1) << 1) as u32
}

/// Returns for how many jiffies after the time of a word connections skip the backend: all connections, or those of the
/// first client.
#[inline(always)]
const fn span(word: u64, hz: u32) -> u32 {
    let (all, one) = (level(word), 2 * again(word));
    hz << if second(word) == 0 && one > all { one } else { all }
}

/// Returns the jiffies since the time of a word; 0 if another CPU wrote the word a moment after `now` was read.
#[inline(always)]
const fn age(word: u64, now: u32, hz: u32) -> u32 {
    let age = now.wrapping_sub(word as u32);
    if age.wrapping_neg() <= hz { 0 } else { age }
}

/// Whether a word holds no failure and no newcomer: all bits except [`HEALTH_ANSWERED`] are 0.
#[inline(always)]
pub const fn is_plain(word: u64) -> bool {
    word & !HEALTH_ANSWERED == 0
}

/// Returns the word as of `now`: the time is set if no program has examined the newcomer before; failures and the newcomer
/// bit are cleared if their time is over.
#[inline(always)]
pub const fn current(word: u64, now: u32, hz: u32) -> u64 {
    if word & HEALTH_SINCE == 0 {
        return if word & HEALTH_NEWCOMER == 0 { word } else { word | HEALTH_SINCE | now as u64 };
    }
    if age(word, now, hz) >= span(word, hz) + hz * TRIAL_SECS { word & HEALTH_ANSWERED } else { word }
}

/// Returns the standing of a backend with a client; `word` is a result of [`current`].
#[inline(always)]
pub const fn standing(word: u64, client: u32, now: u32, hz: u32) -> Standing {
    let is_ejected = second(word) != 0;
    let concerns = is_ejected || first(word) != 0 && first(word) == client;
    if concerns && age(word, now, hz) < span(word, hz) {
        Standing::Ejected
    } else if concerns || word & HEALTH_NEWCOMER != 0 {
        Standing::Trial
    } else {
        Standing::Good
    }
}

/// Whether a connection uses a backend with this standing; during a trial, `random` decides.
#[inline(always)]
pub const fn taken(standing: Standing, random: u32) -> bool {
    // The upper bits of a linear congruential generator are the random ones.
    let is_picked = next_random(random) >> 16 & (TRIAL_SHARE - 1) == 0;
    matches!(standing, Standing::Good) || matches!(standing, Standing::Trial) && is_picked
}

/// Returns a word with these failures and the time `now`, and with the answered and newcomer bits of `word`.
#[inline(always)]
const fn failing(word: u64, level: u32, first: u32, second: u32, now: u32) -> u64 {
    let kept = word & (HEALTH_ANSWERED | HEALTH_NEWCOMER) | HEALTH_SINCE | now as u64;
    kept | (level as u64) << LEVEL_SHIFT | (first as u64) << FIRST_SHIFT | (second as u64) << SECOND_SHIFT
}

/// Returns the word after a connection of the client has failed, and whether that ejects the backend. `word` is a result of
/// [`current`].
///
/// One client counts once, however often its connections fail: further failures only let its own connections skip the
/// backend for longer.
#[inline(always)]
pub const fn after_failure(word: u64, client: u32, now: u32, hz: u32) -> (u64, bool) {
    let (one, other, level) = (first(word), second(word), level(word));
    let is_over = age(word, now, hz) >= span(word, hz);
    if one == 0 {
        (failing(word, level, client, 0, now), false)
    } else if other == 0 && one != client {
        (failing(word, level, one, client, now), true)
    } else if !is_over {
        (word, false)
    } else if other == 0 {
        let again = again(word);
        let again = if again < MOST_AGAIN { again + 1 } else { again } as u64;
        let counted = (again & 1) << AGAIN_LOW | (again >> 1) << AGAIN_HIGH;
        (failing(word, level, client, 0, now) | counted, false)
    } else {
        // The next ejection needs failures of two clients again.
        let level = if level < MOST_LEVEL { level + 1 } else { level };
        (failing(word, level, client, 0, now), false)
    }
}

/// Returns for how many more jiffies connections skip the backend (all, or those of the first client), for display. `word`
/// is a result of [`current`].
pub const fn skipped_for(word: u64, now: u32, hz: u32) -> u32 {
    span(word, hz).saturating_sub(age(word, now, hz))
}

/// Returns for how many more jiffies the backend is ejected, for display; `None` if it is not ejected for all clients.
pub const fn ejected_for(word: u64, now: u32, hz: u32) -> Option<u32> {
    let word = current(word, now, hz);
    let left = skipped_for(word, now, hz);
    if second(word) != 0 && left != 0 { Some(left) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HZ: u32 = 100;
    const ONE: u32 = 17;
    const OTHER: u32 = 4_095;

    /// Records a failure at `now`; returns whether it ejected the backend.
    fn fail(word: &mut u64, client: u32, now: u32) -> bool {
        let (next, ejected) = after_failure(current(*word, now, HZ), client, now, HZ);
        *word = next;
        ejected
    }

    fn stands(word: u64, client: u32, now: u32) -> Standing {
        standing(current(word, now, HZ), client, now, HZ)
    }

    #[test]
    fn one_client_skips_alone_and_two_eject_for_all() {
        let (mut word, now) = (HEALTH_ANSWERED, u32::MAX - 20);
        assert!(!fail(&mut word, ONE, now) && !fail(&mut word, ONE, now.wrapping_add(30)));
        assert_eq!(stands(word, ONE, now.wrapping_add(99)), Standing::Ejected);
        assert_eq!(stands(word, OTHER, now.wrapping_add(99)), Standing::Good);
        assert_eq!(stands(word, NO_CLIENT, now), Standing::Good);
        assert_eq!(stands(word, ONE, now.wrapping_add(100)), Standing::Trial);
        let now = now.wrapping_add(50);
        assert!(fail(&mut word, OTHER, now));
        assert_eq!(ejected_for(word, now.wrapping_add(60), HZ), Some(40));
        assert_eq!(stands(word, 3, now.wrapping_add(99)), Standing::Ejected);
        assert_eq!(stands(word, 3, now.wrapping_add(100)), Standing::Trial);
        assert_eq!(stands(word, 3, now.wrapping_add(100 + 30 * HZ)), Standing::Good);
        assert_eq!(current(word, now.wrapping_add(100 + 30 * HZ), HZ), HEALTH_ANSWERED);
    }

    #[test]
    fn each_ejection_in_a_row_is_twice_as_long_and_takes_two_clients() {
        let (mut word, mut now) = (0, 5);
        for seconds in [1, 2, 4, 8, 16, 32, 32] {
            assert!(!fail(&mut word, ONE, now));
            assert_eq!(ejected_for(word, now, HZ), None, "one client has ejected it");
            assert!(fail(&mut word, OTHER, now));
            assert_eq!(ejected_for(word, now, HZ), Some(seconds * HZ));
            // A connection that fails during the ejection began before it.
            assert!(!fail(&mut word, 99, now + 1));
            assert_eq!(ejected_for(word, now, HZ), Some(seconds * HZ));
            now += seconds * HZ + 1;
        }
        // Long after the last ejection, the level is 0 again.
        now += 70 * HZ;
        assert!(!fail(&mut word, ONE, now) && fail(&mut word, OTHER, now));
        assert_eq!(ejected_for(word, now, HZ), Some(HZ));
    }

    #[test]
    fn a_client_that_fails_again_skips_for_four_times_as_long_and_others_not_at_all() {
        let (mut word, mut now) = (HEALTH_ANSWERED, u32::MAX - 500);
        for seconds in [1, 4, 16, 64, 64] {
            assert!(!fail(&mut word, ONE, now));
            // A connection that fails while the client skips the backend began before the first failure.
            assert!(!fail(&mut word, ONE, now.wrapping_add(1)));
            let end = now.wrapping_add(seconds * HZ);
            assert_eq!(stands(word, ONE, end.wrapping_sub(1)), Standing::Ejected);
            assert_eq!(stands(word, ONE, end), Standing::Trial);
            assert_eq!(skipped_for(word, now.wrapping_add(1), HZ), seconds * HZ - 1);
            assert_eq!(skipped_for(word, end.wrapping_add(1), HZ), 0);
            assert_eq!(stands(word, OTHER, now), Standing::Good);
            assert_eq!((stands(word, NO_CLIENT, now), ejected_for(word, now, HZ)), (Standing::Good, None));
            now = end.wrapping_add(29 * HZ);
        }
        assert_eq!(current(word, now.wrapping_add(HZ), HZ), HEALTH_ANSWERED);
        // The failure of the second client ejects the backend for as long as after a first failure.
        assert!(fail(&mut word, OTHER, now));
        assert_eq!((ejected_for(word, now, HZ), word & HEALTH_REPEATS), (Some(HZ), 0));
    }

    #[test]
    fn a_client_that_fails_after_an_ejection_skips_no_shorter_than_that() {
        let (mut word, mut now) = (0, 5);
        for seconds in [1, 2, 4, 8] {
            assert!(!fail(&mut word, ONE, now) && fail(&mut word, OTHER, now));
            now += seconds * HZ;
        }
        for seconds in [16, 16, 16, 64] {
            assert!(!fail(&mut word, ONE, now));
            assert_eq!(skipped_for(word, now, HZ), seconds * HZ);
            now += seconds * HZ;
        }
    }

    #[test]
    fn a_newcomer_is_on_trial_from_when_it_is_first_looked_at() {
        let word = current(HEALTH_NEWCOMER, 70, HZ);
        assert_eq!(standing(word, ONE, 70, HZ), Standing::Trial);
        assert_eq!(stands(word, ONE, 70 + 31 * HZ - 1), Standing::Trial);
        assert_eq!(stands(word, ONE, 70 + 31 * HZ), Standing::Good);
        assert_eq!(current(word, 70 + 31 * HZ, HZ), 0);
    }

    #[test]
    fn a_trial_takes_one_connection_in_eight() {
        let taken = (0..80_000u32).filter(|n| taken(Standing::Trial, n.wrapping_mul(0x9e37_79b1))).count();
        assert!((9_000..11_000).contains(&taken), "{taken}");
    }

    proptest! {
        #[test]
        fn one_client_ejects_no_endpoint(word in 0u64..2, client in 1u32..4_096, pauses in prop::collection::vec(0u32..12_000, 1..60)) {
            let (mut word, mut now) = (word * HEALTH_NEWCOMER, 7u32);
            for pause in pauses {
                now = now.wrapping_add(pause);
                prop_assert!(!fail(&mut word, client, now));
                prop_assert!(ejected_for(word, now, HZ).is_none());
                let others = if client == 1 { 2 } else { 1 };
                prop_assert!(stands(word, others, now) != Standing::Ejected);
            }
        }

        #[test]
        fn every_client_has_a_number(address: [u8; 16], netns: u64) {
            prop_assert!((1..4_096).contains(&client(&address)) && (1..4_096).contains(&socket_client(netns)));
        }
    }
}
