//! Whatever the plans, whatever fails.

use std::time::Duration;

use proptest::prelude::*;

use super::universe::history;
use super::{ROOMY, World};
use crate::maps::Faults;

proptest! {
    #![proptest_config(super::config())]

    /// The guard of `World` looks at every state in between.
    #[test]
    fn the_tables_follow_the_plans_and_a_second_pass_writes_nothing(history in history(12)) {
        let mut world = World::new(ROOMY);
        for moment in history {
            world.moment(moment);
            world.assert_right();
            prop_assert_eq!(world.reconciler.failing(), 0);
            prop_assert_eq!(world.again(), 0);
            prop_assert_eq!(world.tell_all(), 0);
            prop_assert_eq!(world.reconciler.audit(world.now).unwrap(), 0);
        }
        // Everything that left is freed in the end.
        let gone: Vec<_> = world.plans.keys().cloned().map(|name| (name, None)).collect();
        world.change(gone);
        for _ in 0..3 {
            world.wait(Duration::from_hours(25));
            world.again();
        }
        let contents = world.contents();
        prop_assert!(contents.services.is_empty() && contents.backends.is_empty() && contents.backends6.is_empty());
        prop_assert!(contents.names.is_empty() && contents.source_ranges.is_empty());
        prop_assert!(contents.filter.iter().all(|word| *word == 0));
        prop_assert_eq!(world.reconciler.applied().extents.slots_used(), 0);
        prop_assert_eq!(world.reconciler.wake(), None);
    }

    #[test]
    fn with_one_write_in_ten_failing_it_gets_there(history in history(8), seed: u64) {
        let mut world = World::new(ROOMY);
        for moment in history {
            world.faults(Faults { per_mille: 100, seed: seed ^ moment.2, ..Faults::default() });
            world.moment(moment);
        }
        let mut rounds = 0;
        while !world.reconciler.problems().iter().all(|problem| problem.field == "spec") {
            world.wait(Duration::from_secs(31));
            world.again();
            rounds += 1;
            prop_assert!(rounds < 100, "{:?}", world.reconciler.problems());
        }
        world.assert_right();
    }

    #[test]
    fn the_order_of_events_does_not_matter(history in history(8), swap in any::<prop::sample::Index>()) {
        let mut one = World::new(ROOMY);
        for (changes, ..) in &history {
            one.change(changes.clone());
        }
        let mut services: Vec<_> = one.plans.clone().into_iter().collect();
        if !services.is_empty() {
            let middle = swap.index(services.len());
            services.rotate_left(middle);
        }
        let mut other = World::new(ROOMY);
        for (name, plan) in services {
            other.change([(name, Some(plan))]);
        }
        prop_assert_eq!(super::oracle::resolve_all(one.contents()), super::oracle::resolve_all(other.contents()));
        prop_assert_eq!(one.reconciler.problems(), other.reconciler.problems());
    }
}
