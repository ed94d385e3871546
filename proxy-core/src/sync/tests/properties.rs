//! Properties for arbitrary plans and failures.

use std::time::Duration;

use proptest::prelude::*;

use super::{Fixture, ROOMY};
use crate::store::{Capacity, Faults};
use crate::testing::generator::{history, service};

proptest! {
    #![proptest_config(super::config())]

    /// The guard of `Fixture` checks every intermediate state.
    #[test]
    fn the_tables_follow_the_plans_and_a_second_pass_writes_nothing(history in history(12)) {
        let mut fixture = Fixture::new(ROOMY);
        for moment in history {
            fixture.moment(moment);
            fixture.assert_right();
            prop_assert_eq!(fixture.reconciler.failing(), 0);
            prop_assert_eq!(fixture.again(), 0);
            prop_assert_eq!(fixture.tell_all(), 0);
            prop_assert_eq!(fixture.reconciler.audit(fixture.now).unwrap(), 0);
        }
        // Everything that was removed is freed in the end.
        let gone: Vec<_> = fixture.plans.keys().cloned().map(|name| (name, None)).collect();
        fixture.change(gone);
        for _ in 0..3 {
            fixture.wait(Duration::from_hours(25));
            fixture.again();
        }
        let contents = fixture.contents();
        prop_assert!(contents.services.is_empty() && contents.backends.is_empty() && contents.backends6.is_empty());
        prop_assert!(contents.names.is_empty() && contents.source_ranges.is_empty());
        prop_assert!(contents.prefilter.iter().all(|word| *word == 0));
        prop_assert_eq!(fixture.reconciler.applied().extents.slots_used(), 0);
        prop_assert_eq!(fixture.reconciler.wake(), None);
    }

    #[test]
    fn with_one_write_in_ten_failing_it_gets_there(history in history(8), seed: u64) {
        let mut fixture = Fixture::new(ROOMY);
        for moment in history {
            fixture.faults(Faults { per_mille: 100, seed: seed ^ moment.2, ..Faults::default() });
            fixture.moment(moment);
        }
        let mut rounds = 0;
        while !fixture.reconciler.problems().iter().all(|problem| problem.field == "spec") {
            fixture.wait(Duration::from_secs(31));
            fixture.again();
            rounds += 1;
            prop_assert!(rounds < 100, "{:?}", fixture.reconciler.problems());
        }
        fixture.assert_right();
    }

    /// Tables that are often too small, flows that need what was removed, and reads of them that fail. Only the final state is
    /// checked: then all Services fit, and the flows have ended.
    #[test]
    fn with_small_tables_and_flows_that_last_it_gets_there(
        history in history(8),
        flows in prop::collection::vec(any::<(bool, u8)>(), 8),
    ) {
        let small = Capacity { slots: 12, frontends: 6, services: 5, ..ROOMY };
        let mut fixture = Fixture::new(small);
        fixture.trust_nothing();
        let connections = fixture.connections();
        for (moment, (fails, chosen)) in history.into_iter().zip(flows) {
            {
                let contents = fixture.contents();
                let is_chosen = |id: &u32| chosen >> (id % 8) & 1 == 1;
                let mut state = connections.state();
                state.fails = fails;
                state.backends = contents.backends.keys().copied().filter(is_chosen).collect();
                state.services = contents.names.keys().copied().filter(is_chosen).collect();
            }
            fixture.moment(moment);
        }
        *connections.state() = super::connections::State::default();
        let gone: Vec<_> = fixture.plans.keys().cloned().map(|name| (name, None)).collect();
        fixture.change(gone);
        let all = [service("a", 1, [1, 2]), service("b", 2, [3])];
        fixture.change(all);
        for _ in 0..4 {
            fixture.wait(Duration::from_hours(25));
            fixture.again();
        }
        prop_assert_eq!(fixture.reconciler.problems(), []);
        prop_assert_eq!(fixture.reconciler.wake(), None);
        fixture.assert_right();
        let contents = fixture.contents();
        prop_assert_eq!((contents.names.len(), contents.backends.len(), contents.backends6.len()), (2, 3, 0));
        let bits: u32 = contents.prefilter.iter().map(|word| word.count_ones()).sum();
        prop_assert_eq!((bits, fixture.reconciler.applied().extents.slots_used()), (5, 3));
    }

    #[test]
    fn the_order_of_events_does_not_matter(history in history(8), swap in any::<prop::sample::Index>()) {
        let mut one = Fixture::new(ROOMY);
        for (changes, ..) in &history {
            one.change(changes.clone());
        }
        let mut services: Vec<_> = one.plans.clone().into_iter().collect();
        if !services.is_empty() {
            let middle = swap.index(services.len());
            services.rotate_left(middle);
        }
        let mut other = Fixture::new(ROOMY);
        for (name, plan) in services {
            other.change([(name, Some(plan))]);
        }
        prop_assert_eq!(crate::testing::oracle::resolve_all(one.contents()), crate::testing::oracle::resolve_all(other.contents()));
        prop_assert_eq!(one.reconciler.problems(), other.reconciler.problems());
    }
}
