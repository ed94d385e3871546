//! The comparison of the maps with the mirror in pieces.

use std::net::IpAddr;

use ipnet::IpNet;
use proptest::prelude::*;

use super::{Fixture, ROOMY};
use crate::plan::Access;
use crate::store::{Backend, Contents, Faults, MaglevRow, MaglevTable};
use crate::sync::Step;
use crate::testing::generator::{history, service};

/// Runs a comparison to its end; returns its result and the number of pieces.
fn finish(fixture: &mut Fixture, piece: u32) -> (Step, usize) {
    let mut steps = (1..).map(|count| (fixture.reconciler.audit_step(piece).unwrap(), count));
    steps.find(|(step, _)| *step != Step::More).unwrap()
}

fn fixture() -> Fixture {
    let mut fixture = Fixture::new(ROOMY);
    fixture.change([service("a", 1, 1..9), service("b", 2, 3..5), service("c", 3, [])]);
    fixture
}

#[test]
fn unchanged_maps_are_clean_in_pieces_of_any_size() {
    for piece in [0, 1, 3, 64, u32::MAX] {
        assert_eq!(finish(&mut fixture(), piece).0, Step::Clean, "by {piece}");
    }
    let (_, pieces) = finish(&mut fixture(), 3);
    assert!(pieces > 10, "{pieces}");
}

#[test]
fn each_kind_of_damage_is_found_in_pieces_of_any_size() {
    type Damage = fn(&mut Contents);
    let damages: [(&str, Damage); 11] = [
        ("a frontend is gone", |c| assert!(c.services.pop_first().is_some())),
        ("a frontend is another", |c| c.services.values_mut().next().unwrap().slot_count -= 1),
        ("a foreign frontend", |c| {
            let (mut key, entry) = c.services.pop_first().unwrap();
            c.services.insert(key, entry);
            key.port += 1;
            c.services.insert(key, entry);
        }),
        ("a name is gone", |c| assert!(c.names.pop_last().is_some())),
        ("a foreign name", |c| {
            let name = c.names[&1];
            c.names.insert(60, name);
        }),
        ("a backend is gone", |c| assert!(c.backends.pop_last().is_some())),
        ("a backend is another", |c| c.backends.values_mut().last().unwrap().port += 1),
        ("a foreign backend", |c| {
            let addr = "fd00::1".parse().unwrap();
            c.backends6.insert(2, Backend { addr, ..c.backends[&2] });
        }),
        ("a slot is another", |c| c.slots[9] ^= 1),
        ("a bit is gone", |c| *c.prefilter.iter_mut().rfind(|word| **word != 0).unwrap() = 0),
        ("a foreign bit", |c| c.prefilter[77] |= 1 << 63),
    ];
    for (what, damage) in damages {
        for piece in [1, 5, u32::MAX] {
            let mut fixture = fixture();
            fixture.trust_nothing();
            damage(fixture.contents_mut());
            assert_eq!(finish(&mut fixture, piece).0, Step::Differs, "{what}, by {piece}");
            assert_eq!(fixture.reconciler.audit(fixture.now).unwrap(), 1, "{what}");
            fixture.again();
            fixture.assert_right();
            assert_eq!(finish(&mut fixture, piece).0, Step::Clean, "{what}, repaired, by {piece}");
        }
    }
}

#[test]
fn unremovable_entry_leaves_the_others_compared() {
    let mut fixture = fixture();
    fixture.trust_nothing();
    let range = "10.0.0.0/8".parse().unwrap();
    let contents = fixture.contents_mut();
    contents.names.insert(60, contents.names[&1]);
    contents.backends6.insert(2, Backend { addr: "fd00::1".parse().unwrap(), ..contents.backends[&2] });
    contents.source_ranges.insert((60, range));
    assert_eq!(fixture.reconciler.audit(fixture.now).unwrap(), 3);
    fixture.faults(Faults { from: Some(0), ..Faults::default() });
    let mut pauses = Vec::new();
    for _ in 0..4 {
        fixture.again();
        let retry = fixture.reconciler.releases.orphans_failure.as_ref().unwrap().retry;
        assert!(fixture.reconciler.wake().is_some_and(|wake| wake <= retry));
        pauses.push(retry.duration_since(fixture.now).as_millis());
        fixture.now = retry;
    }
    assert_eq!(pauses, [100, 200, 400, 800]);
    let [problem] = &fixture.reconciler.problems()[..] else { panic!("one for all entries") };
    assert_eq!((&*problem.object, &*problem.field), ("Node", "maps"));
    for piece in [1, 5, u32::MAX] {
        assert_eq!(finish(&mut fixture, piece).0, Step::Clean, "by {piece}");
        assert_eq!(fixture.reconciler.audit(fixture.now).unwrap(), 0, "they are known");
    }
    fixture.contents_mut().services.pop_first().unwrap();
    for piece in [1, 5, u32::MAX] {
        assert_eq!(finish(&mut fixture, piece).0, Step::Differs, "by {piece}");
    }
    assert_eq!(fixture.reconciler.audit(fixture.now).unwrap(), 1);
    fixture.faults(Faults::default());
    fixture.again();
    fixture.assert_right();
    assert_eq!((fixture.reconciler.problems(), finish(&mut fixture, 5).0), (vec![], Step::Clean));
}

#[test]
fn source_ranges_are_compared_in_pieces() {
    let mut fixture = fixture();
    let (name, mut plan) = service("d", 4, [1]);
    for port in plan.iter_mut().flat_map(|plan| plan.ports.values_mut()) {
        port.source_ranges = (0..40).map(|last| IpNet::from(IpAddr::from([10, 0, 0, last]))).collect();
        port.frontends.values_mut().for_each(|what| what.access = Access::Ranges { node: false });
    }
    let (_, pieces) = finish(&mut fixture, 4);
    fixture.change([(name, plan)]);
    let (step, with_ranges) = finish(&mut fixture, 4);
    assert_eq!(step, Step::Clean);
    assert!(with_ranges >= pieces + 9, "{pieces} {with_ranges}");
    fixture.trust_nothing();
    let first = fixture.contents_mut().source_ranges.pop_first().unwrap();
    for piece in [1, 4, u32::MAX] {
        assert_eq!(finish(&mut fixture, piece).0, Step::Differs, "a range is gone");
    }
    fixture.contents_mut().source_ranges.extend([first, (60, first.1)]);
    for piece in [1, 4, u32::MAX] {
        assert_eq!(finish(&mut fixture, piece).0, Step::Differs, "a foreign range");
    }
}

#[test]
fn one_table_at_a_high_index_takes_few_pieces() {
    let mut fixture = fixture();
    fixture.trust_nothing();
    let row = MaglevRow::from(MaglevTable { base: 1, words: 5, signature: 7 });
    fixture.reconciler.writer.applied.maglev.insert(100_000, row.clone());
    fixture.contents_mut().maglev.insert(100_000, row);
    let (step, pieces) = finish(&mut fixture, 1024);
    assert_eq!(step, Step::Clean);
    assert!(pieces < 100, "{pieces}");
    fixture.contents_mut().maglev.remove(&100_000);
    assert_eq!(finish(&mut fixture, 1024).0, Step::Differs);
}

proptest! {
    #![proptest_config(super::config())]

    /// The agent's own writes between two pieces are no difference, wherever the comparison is; external changes are still
    /// found.
    #[test]
    fn changes_between_two_pieces_do_not_disturb(
        history in history(12),
        steps in prop::collection::vec(0usize..40, 12),
        piece in 1u32..30,
    ) {
        let mut fixture = Fixture::new(ROOMY);
        for (moment, steps) in history.into_iter().zip(steps) {
            fixture.moment(moment);
            for _ in 0..steps {
                prop_assert_ne!(fixture.reconciler.audit_step(piece).unwrap(), Step::Differs);
            }
        }
        prop_assert_eq!(finish(&mut fixture, piece).0, Step::Clean);
        fixture.trust_nothing();
        if fixture.contents_mut().services.pop_first().is_some() {
            prop_assert_eq!(finish(&mut fixture, piece).0, Step::Differs);
        }
    }
}
