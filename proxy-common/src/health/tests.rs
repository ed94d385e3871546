extern crate std;

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

const HZ: u32 = 100;
const ONE: u32 = 17;
const OTHER: u32 = 4_095;
const ID: u32 = 9;

/// A backend, and the clients that skip it.
#[derive(Default)]
struct Backend {
    word: u64,
    skips: BTreeMap<u32, u64>,
}

impl Backend {
    /// Records a failure at `now`; returns whether it ejected the backend.
    fn fail(&mut self, client: u32, failure: Failure, now: u32) -> bool {
        let (index, tag) = skip_slot(client, ID);
        let skip = self.skips.entry(index).or_default();
        *skip = after_failure(*skip, tag, failure, now, HZ);
        let word = current(self.word, now, HZ);
        let (next, ejected) =
            if failure == Failure::Refusal { after_refusal(word, client, now, HZ) } else { (word, false) };
        self.word = with_skip(next, now);
        ejected
    }

    fn refuse(&mut self, client: u32, now: u32) -> bool {
        self.fail(client, Failure::Refusal, now)
    }

    fn answer(&mut self, now: u32) {
        self.word = after_answer(self.word, now, HZ);
    }

    /// Records an answer to a client.
    fn answer_to(&mut self, client: u32, now: u32) {
        let (index, tag) = skip_slot(client, ID);
        let skip = self.skips.entry(index).or_default();
        *skip = after_success(*skip, tag, now, HZ);
    }

    fn stands(&self, now: u32) -> Standing {
        standing(current(self.word, now, HZ), now, HZ)
    }

    /// Jiffies for which a client skips the backend.
    fn skips(&self, client: u32, now: u32) -> u32 {
        let (index, tag) = skip_slot(client, ID);
        let word = current(self.word, now, HZ);
        let skip = self.skips.get(&index).copied().unwrap_or_default();
        if word & HEALTH_SKIPPED == 0 { 0 } else { skipped_for(skip, tag, word, client, now, HZ) }
    }
}

#[test]
fn one_client_skips_alone_and_two_eject_for_all() {
    let (mut backend, now) = (Backend::default(), u32::MAX - 20);
    assert!(!backend.refuse(ONE, now) && !backend.refuse(ONE, now.wrapping_add(30)));
    assert_eq!(backend.skips(ONE, now.wrapping_add(199)), 1);
    assert_eq!(backend.skips(ONE, now.wrapping_add(200)), 0);
    assert_eq!((backend.skips(OTHER, now), backend.stands(now)), (0, Standing::Good));
    let now = now.wrapping_add(50);
    assert!(backend.refuse(OTHER, now));
    assert_eq!(ejected_for(backend.word, now.wrapping_add(60), HZ), Some(40));
    assert_eq!(backend.stands(now.wrapping_add(99)), Standing::Ejected);
    assert_eq!(backend.stands(now.wrapping_add(100)), Standing::Trial);
    assert_eq!(backend.stands(now.wrapping_add(100 + 30 * HZ)), Standing::Good);
    assert_eq!(current(backend.word, now.wrapping_add(200 * HZ), HZ), 0);
}

#[test]
fn each_ejection_in_a_row_is_twice_as_long_and_takes_two_clients() {
    let (mut backend, mut now) = (Backend::default(), 5);
    for seconds in [1, 2, 4, 8, 16, 32, 32] {
        assert!(!backend.refuse(ONE, now));
        assert_eq!(ejected_for(backend.word, now, HZ), None, "one client has ejected it");
        let before = if seconds == 1 { Standing::Good } else { Standing::Trial };
        assert_eq!(backend.stands(now), before);
        assert!(backend.refuse(OTHER, now));
        assert_eq!(ejected_for(backend.word, now, HZ), Some(seconds * HZ));
        // A connection that is refused during the ejection began before it.
        assert!(!backend.refuse(99, now + 1));
        assert_eq!(ejected_for(backend.word, now, HZ), Some(seconds * HZ));
        now += seconds * HZ + 1;
    }
    // Long after the last ejection, the level is 0 again.
    now += 70 * HZ;
    assert!(!backend.refuse(ONE, now) && backend.refuse(OTHER, now));
    assert_eq!(ejected_for(backend.word, now, HZ), Some(HZ));
}

#[test]
fn a_client_that_fails_again_skips_for_four_times_as_long_and_others_not_at_all() {
    for failure in [Failure::Silence, Failure::Unreachable, Failure::Refusal] {
        let (mut backend, mut now) = (Backend::default(), u32::MAX - 500);
        for seconds in [2, 8, 32, 64, 64] {
            assert!(!backend.fail(ONE, failure, now));
            // A connection that fails while the client skips the backend began before the first failure.
            assert!(!backend.fail(ONE, failure, now.wrapping_add(1)));
            assert_eq!(backend.skips(ONE, now.wrapping_add(1)), seconds * HZ - 1);
            assert_eq!(backend.skips(ONE, now.wrapping_add(seconds * HZ)), 0);
            assert_eq!((backend.skips(OTHER, now), backend.skips(NO_CLIENT, now)), (0, 0));
            now = now.wrapping_add((seconds + 29) * HZ);
        }
        assert!(!backend.fail(ONE, failure, now.wrapping_add(100 * HZ)));
        assert_eq!(
            backend.skips(ONE, now.wrapping_add(100 * HZ)),
            2 * HZ,
            "the failures before are forgotten"
        );
    }
}

#[test]
fn failure_after_an_answer_is_the_first_again() {
    for (client, seconds) in [(ONE, 2), (OTHER, 8)] {
        let mut backend = Backend::default();
        backend.fail(ONE, Failure::Silence, 50);
        backend.answer_to(client, 60);
        assert_eq!(backend.skips(ONE, 60), 2 * HZ - 10, "the connection began before the failure");
        backend.answer_to(client, 60 + 2 * HZ);
        backend.fail(ONE, Failure::Silence, 70 + 2 * HZ);
        assert_eq!(backend.skips(ONE, 70 + 2 * HZ), seconds * HZ);
    }
}

#[test]
fn an_answer_to_any_client_ends_skips_for_refusals_only() {
    for (failure, is_over) in
        [(Failure::Silence, false), (Failure::Unreachable, false), (Failure::Refusal, true)]
    {
        let mut backend = Backend::default();
        backend.fail(ONE, failure, 50);
        backend.answer(60);
        assert_eq!(backend.skips(ONE, 60) == 0, is_over, "{failure:?}");
    }
}

#[test]
fn silent_backend_in_a_selection_that_ignores_silence_is_not_skipped() {
    for (failure, is_left_out) in
        [(Failure::Silence, true), (Failure::Unreachable, false), (Failure::Refusal, false)]
    {
        let mut backend = Backend::default();
        backend.fail(ONE, failure, 50);
        assert_eq!(backend.skips(ONE | IGNORES_SILENCE, 60) == 0, is_left_out, "{failure:?}");
        // A refusal is the stronger reason, whichever comes first.
        backend.fail(ONE, Failure::Refusal, 60);
        backend.fail(ONE, Failure::Silence, 70);
        assert_ne!(backend.skips(ONE | IGNORES_SILENCE, 80), 0);
    }
}

#[test]
fn an_answer_counts_for_a_minute_unless_a_refusal_follows() {
    let (mut backend, now) = (Backend::default(), u32::MAX - 10);
    let works = |backend: &Backend, now| has_answered(current(backend.word, now, HZ), now, HZ);
    assert!(!works(&backend, now));
    backend.answer(now);
    assert!(works(&backend, now.wrapping_add(60 * HZ - 1)) && !works(&backend, now.wrapping_add(60 * HZ)));
    // Silence towards one client and ICMP errors are no refusals.
    backend.fail(ONE, Failure::Silence, now);
    backend.fail(ONE, Failure::Unreachable, now);
    assert!(works(&backend, now));
    backend.refuse(ONE, now);
    assert!(!works(&backend, now));
    backend.answer(now);
    assert!(works(&backend, now) && backend.stands(now) == Standing::Good);
    assert!(!backend.refuse(OTHER, now), "the refusal before the answer does not count");
}

#[test]
fn the_time_of_an_answer_is_written_once_a_second() {
    let word = after_answer(0, 70, HZ);
    assert_eq!(after_answer(word, 169, HZ), word);
    assert_eq!(after_answer(word, 170, HZ), word + 100);
    let skipped = with_skip(word, 70);
    assert_eq!(after_answer(skipped, 169, HZ), skipped);
    assert!(is_plain(word) && !is_plain(skipped));
}

#[test]
fn trial_of_a_newcomer_starts_at_its_first_lookup() {
    let word = current(HEALTH_NEWCOMER, 70, HZ);
    let stands = |now| standing(current(word, now, HZ), now, HZ);
    assert_eq!((standing(word, 70, HZ), stands(70 + 2 * HZ - 1)), (Standing::Joining, Standing::Joining));
    assert_eq!(stands(70 + 2 * HZ), Standing::Trial);
    let (refused, _) = after_refusal(word, ONE, 71, HZ);
    assert_eq!(standing(refused, 71, HZ), Standing::Trial, "a refusal never extends the time");
    assert_eq!(stands(70 + 31 * HZ - 1), Standing::Trial);
    assert_eq!(stands(70 + 31 * HZ), Standing::Good);
    assert_eq!(current(word, 70 + 31 * HZ, HZ), 0);
    assert!(is_plain(after_answer(word, 70, HZ)));
}

#[test]
fn a_trial_takes_one_connection_in_eight() {
    let taken = (0..80_000u32).filter(|n| taken(Standing::Trial, n.wrapping_mul(0x9e37_79b1))).count();
    assert!((9_000..11_000).contains(&taken), "{taken}");
}

proptest! {
    #[test]
    fn one_client_ejects_no_endpoint(
        word in 0u64..2,
        client in 1u32..4_096,
        failures in prop::collection::vec((0u32..12_000, 0u32..3), 1..60),
    ) {
        let (mut backend, mut now) = (Backend { word: word * HEALTH_NEWCOMER, ..Backend::default() }, 7u32);
        for (pause, failure) in failures {
            now = now.wrapping_add(pause);
            prop_assert!(!backend.fail(client, Failure::from_number(failure), now));
            prop_assert!(ejected_for(backend.word, now, HZ).is_none());
            let others = if client == 1 { 2 } else { 1 };
            prop_assert!(backend.stands(now) != Standing::Ejected && backend.skips(others, now) == 0);
        }
    }

    #[test]
    fn no_number_of_clients_ejects_an_endpoint_by_silence(
        failures in prop::collection::vec((0u32..500, 1u32..1 << 30, 0u32..2), 1..60),
    ) {
        let (mut backend, mut now) = (Backend::default(), 7u32);
        for (pause, client, failure) in failures {
            now = now.wrapping_add(pause);
            prop_assert!(!backend.fail(client, Failure::from_number(failure), now));
            prop_assert_eq!(backend.stands(now), Standing::Good);
        }
    }

    /// Nothing keeps a backend out of use for longer than its timeouts.
    #[test]
    fn failures_expire_after_their_timeouts(word: u64, level in 0..=MOST_LEVEL, now: u32) {
        let word = word & !(HEALTH_TIME | HEALTH_LEVEL) | u64::from(now) | u64::from(level) << LEVEL_SHIFT;
        let word = current(with_skip(word, now), now, HZ);
        let later = now.wrapping_add((64 + 30) * HZ + 2 * STAMP_UNIT);
        prop_assert!(is_plain(current(word, later, HZ)));
    }

    #[test]
    fn client_number_is_never_zero(address: [u8; 16], netns: u64, seed: u32) {
        for number in [client(&address, seed), socket_client(netns, seed)] {
            prop_assert!(number & 0xffff != 0 && number < 1 << 30);
        }
    }
}

#[test]
fn refusal_inside_a_namespace_is_void_after_a_later_answer() {
    let (mut backend, now) = (Backend::default(), 7u32);
    backend.answer(now);
    for client in [ONE, OTHER] {
        assert!(!backend.fail(client, Failure::RefusalInside, now + 10));
    }
    assert!(has_answered(backend.word, now + 10, HZ) && backend.stands(now + 10) == Standing::Good);
    assert_eq!(backend.skips(ONE, now + 20), 2 * HZ - 10, "the answer came before");
    backend.answer(now + 10 + HZ);
    assert_eq!([ONE, OTHER].map(|client| backend.skips(client, now + 11 + HZ)), [0, 0]);
}
