//! `connections`: the number of open connections of a backend, and the time that it takes to answer one.
//!
//! Both are in one word, so that a selection reads one cache line of each backend: the word is the upper half times 2^32, plus the
//! number, which is negative for a moment if the end of a connection is counted before its start.

/// Parts of a jiffy in which times are noted. Packets are timed in jiffies; the mean of many is finer.
pub const PARTS: u32 = 64;
/// Seconds without an answer after which a time counts half. An endpoint that was slow gets connections again, and a time that no
/// connection has confirmed for long means nothing.
const HALF_LIFE_SECS: u32 = 8;
/// An answer changes the smoothed time by the difference, divided by two to this power.
const SMOOTHING: u32 = 3;
/// Time stamps count 16 jiffies, and have 16 bits.
const STAMP_SHIFT: u32 = 4;
const LOW: u32 = 0xffff;
/// By how many time stamps `now` may be behind the last answer.
const AHEAD: u32 = 256;

/// Returns the number of open connections.
#[inline(always)]
pub const fn open(word: u64) -> i32 {
    (word as u32).cast_signed()
}

/// Returns the smoothed time from the start of a connection to its first answer, at jiffies `now`, in parts of a jiffy; 0: unknown, or
/// no connection was answered for long.
#[inline(always)]
pub const fn answer_time(word: u64, now: u32, hz: u32) -> u32 {
    // A negative number has borrowed from the upper half.
    let noted = (word.wrapping_add(1 << 31) >> 32) as u32;
    let age = (now >> STAMP_SHIFT).wrapping_sub(noted >> 16) & LOW;
    // Another CPU may have noted an answer after `now`, and the agent estimates `now`.
    let age = if age > LOW - AHEAD { 0 } else { age };
    match age.checked_div((hz * HALF_LIFE_SECS) >> STAMP_SHIFT) {
        Some(halves) if halves < 16 => (noted & LOW) >> halves,
        _ => 0,
    }
}

/// Returns the word after an answer that took `took` parts of a jiffy.
#[inline(always)]
pub const fn with_answer(word: u64, took: u32, now: u32, hz: u32) -> u64 {
    let limit = longest(hz);
    let took = if took < limit { took } else { limit };
    let smoothed =
        (answer_time(word, now, hz) * ((1 << SMOOTHING) - 1) + took + (1 << (SMOOTHING - 1))) >> SMOOTHING;
    let noted = (now >> STAMP_SHIFT & LOW) << 16 | smoothed;
    ((noted as u64) << 32).wrapping_add((open(word) as i64).cast_unsigned())
}

/// Returns the longest time of an answer that counts, an eighth of a second: a SYN that was lost once takes a second, and should not
/// keep connections away for minutes.
const fn longest(hz: u32) -> u32 {
    hz * PARTS / 8
}

/// Returns jiffies as parts of jiffies.
#[inline(always)]
pub const fn of_jiffies(jiffies: u32, hz: u32) -> u32 {
    if jiffies < hz { jiffies * PARTS } else { longest(hz) }
}

/// Returns microseconds as parts of jiffies, five per cent less: 2^14 instead of a division by 15,625.
#[inline(always)]
pub const fn of_micros(micros: u32, hz: u32) -> u32 {
    let parts = (micros as u64 * hz as u64) >> 14;
    if parts < longest(hz) as u64 { parts as u32 } else { longest(hz) }
}

/// Returns the time that is added to each smoothed time before two are compared, a millisecond: shorter differences are noise, since
/// packets are timed in jiffies.
#[inline(always)]
pub const fn base_time(hz: u32) -> u32 {
    (hz * PARTS) >> 10
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use proptest::prelude::*;

    const HZ: u32 = 250;

    /// Notes answers that took this number of milliseconds, one each 16 jiffies.
    fn after(mut word: u64, millis: u32, answers: u32, now: &mut u32) -> u64 {
        for _ in 0..answers {
            *now = now.wrapping_add(16);
            word = with_answer(word, of_micros(millis * 1000, HZ), *now, HZ);
        }
        word
    }

    fn millis(word: u64, now: u32) -> u32 {
        (answer_time(word, now, HZ) * 1000 + HZ * PARTS / 2) / (HZ * PARTS)
    }

    #[test]
    fn answer_time_follows_answers_and_fades_without_them() {
        // The time stamps overflow meanwhile.
        let mut now = 0xf_fff0;
        let slow = after(0, 20, 40, &mut now);
        assert_eq!(millis(slow, now), 19, "five per cent less");
        assert!(millis(after(0, 20, 1, &mut now), now) >= 2);
        assert_eq!(millis(after(slow, 0, 40, &mut now), now), 0);
        let slow = after(0, 20, 40, &mut now);
        let later = |secs: u32| millis(slow, now.wrapping_add(secs * HZ));
        assert_eq!([later(7), later(9), later(17), later(130)], [19, 9, 5, 0]);
        assert_eq!(millis(slow, now.wrapping_sub(10 * HZ)), 19, "the clock is behind");
    }

    #[test]
    fn longest_answer_counts_as_an_eighth_of_a_second() {
        for hz in [100, 250, 300, 1000] {
            let most = hz * PARTS / 8;
            assert_eq!([of_jiffies(u32::MAX, hz), of_micros(u32::MAX, hz)], [most; 2]);
            assert_eq!(of_jiffies(3, hz), 3 * PARTS);
            assert!(of_micros(20_000, hz).abs_diff(hz * PARTS / 50) <= hz * PARTS / 50 / 16 + 1, "{hz}");
            assert!(base_time(hz).abs_diff(hz * PARTS / 1000) <= 2, "{hz}");
            let word = (0..100).fold(0, |word, n| with_answer(word, u32::MAX, n, hz));
            assert!(answer_time(word, 100, hz) <= most && answer_time(word, 100, hz) > most - 8, "{hz}");
        }
        assert_eq!(answer_time(u64::MAX, 5, 0), 0, "before the agent has written the configuration");
    }

    proptest! {
        #[test]
        fn number_and_time_do_not_disturb_each_other(count in -3i64..100_000, took in 0u32..2000, now: u32) {
            let add = |word: u64, change: i64| word.wrapping_add(change.cast_unsigned());
            let counted = add(0, count);
            let word = with_answer(counted, took, now, HZ);
            prop_assert_eq!(i64::from(open(word)), count);
            prop_assert_eq!(answer_time(word, now, HZ), answer_time(with_answer(0, took, now, HZ), now, HZ));
            let without = add(word, -count);
            prop_assert_eq!((open(without), answer_time(without, now, HZ)), (0, answer_time(word, now, HZ)));
        }
    }
}
