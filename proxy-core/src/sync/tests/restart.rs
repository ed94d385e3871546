//! A new agent on the tables of an earlier one.

use std::time::Duration;

use proptest::prelude::*;
use proxy_common::backend::BACKEND_GONE;
use proxy_common::select::Algorithm;

use super::{Fixture, ROOMY};
use crate::store::{Capacity, Faults, MaglevTable, MemoryStore};
use crate::testing::generator::{history, service};

#[test]
fn a_restart_with_the_same_cluster_writes_nothing() {
    let mut fixture = Fixture::new(ROOMY);
    fixture.change([service("a", 1, 1..9), service("b", 2, 3..5), service("c", 3, [])]);
    let before = fixture.contents().clone();
    let mut fixture = fixture.restarted();
    assert_eq!(fixture.tell_all(), 0);
    assert_eq!(*fixture.contents(), before);
    fixture.assert_right();
}

#[test]
fn restart_with_fewer_ids_frees_the_rows_above_them() {
    let mut fixture = Fixture::new(ROOMY);
    fixture.change([service("a", 1, 1..9)]);
    fixture.change([service("a", 1, 6..12)]);
    let contents = fixture.contents().clone();
    assert_eq!(contents.backends.keys().copied().max(), Some(11));
    let capacity = Capacity { backends: 7, ..ROOMY };
    let (plans, mut fixture) = (fixture.plans, Fixture::over(MemoryStore::with_contents(capacity, contents)));
    fixture.trust_nothing();
    fixture.plans = plans;
    fixture.tell_all();
    fixture.wait(Duration::from_mins(2));
    fixture.again();
    assert!(fixture.contents().backends.keys().all(|id| *id < 7), "{:?}", fixture.contents().backends);
    fixture.assert_right();
}

#[test]
fn nothing_is_written_before_the_first_sync() {
    let mut fixture = Fixture::new(ROOMY);
    fixture.change([service("a", 1, 1..9)]);
    let mut fixture = fixture.restarted();
    fixture.plans.clear();
    assert_eq!(fixture.steps(), 0);
    fixture.change([service("b", 2, [1])]);
    fixture.assert_right();
}

#[test]
fn quarantine_of_ids_continues_after_a_restart() {
    let mut fixture = Fixture::new(ROOMY);
    fixture.change([service("a", 1, 1..4)]);
    fixture.change([service("a", 1, 2..4)]);
    let mut fixture = fixture.restarted();
    fixture.tell_all();
    assert_eq!(fixture.contents().backends[&1].state, BACKEND_GONE);
    fixture.change([service("a", 1, 2..7)]);
    assert_eq!(fixture.contents().backends[&1].state, BACKEND_GONE);
    fixture.wait(Duration::from_mins(1));
    fixture.again();
    assert!(!fixture.contents().backends.contains_key(&1));
    fixture.assert_right();
}

proptest! {
    #![proptest_config(super::config())]

    /// The guard also rejects a write to a frontend that was right already.
    #[test]
    fn an_agent_that_dies_at_any_write_is_followed_by_one_that_gets_there(
        history in history(6),
        dies in 0u64..40,
        during in any::<prop::sample::Index>(),
    ) {
        let mut fixture = Fixture::new(ROOMY);
        let during = during.index(history.len());
        for (number, moment) in history.into_iter().enumerate() {
            if number == during {
                fixture.faults(Faults { from: Some(dies), ..Faults::default() });
                fixture.moment(moment);
                fixture = fixture.restarted();
                fixture.tell_all();
            } else {
                fixture.moment(moment);
            }
            fixture.assert_right();
            prop_assert_eq!(fixture.again(), 0);
        }
    }

    /// Bits and rows are changed as if by another tool, with and without a restart.
    #[test]
    fn external_changes_of_maps_are_repaired(
        history in history(5),
        damage in prop::collection::vec((0u8..20, any::<prop::sample::Index>(), any::<u32>()), 1..8),
        restart: bool,
    ) {
        let mut fixture = Fixture::new(ROOMY);
        for moment in history {
            fixture.moment(moment);
        }
        fixture.trust_nothing();
        for (kind, which, noise) in damage {
            spoil(&mut fixture, kind, which, noise, restart);
        }
        if restart {
            fixture = fixture.restarted();
            fixture.trust_nothing();
            fixture.tell_all();
        } else {
            fixture.reconciler.audit(fixture.now).unwrap();
            fixture.again();
        }
        fixture.assert_right();
        prop_assert_eq!(fixture.again(), 0);
        prop_assert_eq!(fixture.reconciler.audit(fixture.now).unwrap(), 0);
    }
}

/// The id of a port is not reused while its Maglev table, without a name in `names`, waits to be removed.
#[test]
fn a_table_without_a_name_does_not_take_the_next_table_along() {
    let mut fixture = Fixture::new(ROOMY);
    let (name, mut plan) = service("a", 1, 1..3);
    for port in plan.iter_mut().flat_map(|plan| plan.ports.values_mut()) {
        port.algorithm = Algorithm::SourceHash;
    }
    fixture.change([(name, plan)]);
    assert_eq!(fixture.contents().maglev.len(), 1);
    let contents = fixture.contents_mut();
    contents.services.clear();
    contents.names.clear();
    let mut fixture = fixture.restarted();
    fixture.trust_nothing();
    fixture.tell_all();
    fixture.assert_right();
    assert_eq!(fixture.contents().maglev.len(), 1);
}

#[test]
fn a_repair_keeps_the_ids() {
    let mut fixture = Fixture::new(ROOMY);
    fixture.change([service("a", 1, 1..9), service("b", 2, 3..5)]);
    let before = fixture.contents().clone();
    fixture.trust_nothing();
    let contents = fixture.contents_mut();
    contents.services.clear();
    contents.names.remove(&1);
    contents.backends.remove(&2);
    assert_eq!(fixture.reconciler.audit(fixture.now).unwrap(), 4);
    fixture.again();
    let after = fixture.contents();
    assert_eq!((&after.names, &after.backends), (&before.names, &before.backends));
    fixture.assert_right();
}

/// Changes one entry externally.
fn spoil(fixture: &mut Fixture, kind: u8, which: prop::sample::Index, noise: u32, restart: bool) {
    fn pick<K: Copy, V>(map: &std::collections::BTreeMap<K, V>, which: prop::sample::Index) -> Option<K> {
        (!map.is_empty()).then(|| *map.keys().nth(which.index(map.len())).unwrap())
    }
    // Only the next agent reads ids that were never used.
    let ids = if restart { 256 } else { fixture.reconciler.applied().endpoints.high_water() };
    let contents = fixture.contents_mut();
    let service = pick(&contents.services, which);
    let backend = pick(&contents.backends, which);
    let name = pick(&contents.names, which);
    let slot = which.index(contents.slots.len());
    match (kind, service, backend, name) {
        (0, Some(key), ..) => drop(contents.services.remove(&key)),
        (1, Some(key), ..) => contents.services.get_mut(&key).unwrap().slot_base = noise,
        (2, Some(key), ..) => contents.services.get_mut(&key).unwrap().slot_count = noise % 9,
        (3, Some(key), ..) => contents.services.get_mut(&key).unwrap().id = noise % 70,
        (4, _, Some(id), _) => drop(contents.backends.remove(&id)),
        (5, _, Some(id), _) => contents.backends.get_mut(&id).unwrap().service = noise % 70,
        (6, _, Some(id), _) => contents.backends.get_mut(&id).unwrap().port = noise as u16,
        (7, .., Some(id)) => drop(contents.names.remove(&id)),
        (8, .., Some(id)) => contents.names.get_mut(&id).unwrap().text[0] = noise as u8,
        (9, Some(key), Some(id), Some(of)) => {
            let (entry, row) = (contents.services[&key], contents.backends[&id]);
            let key = crate::store::FrontendKey { port: noise as u16, ..key };
            contents.services.insert(key, entry);
            contents.backends.insert(noise % ids, row);
            let text = contents.names[&of];
            contents.names.insert(noise % 62 + 1, text);
        }
        (10, ..) => drop(contents.source_ranges.pop_first()),
        (11, ..) => {
            let range = if noise.is_multiple_of(2) { "10.7.0.0/16" } else { "fd07::/32" };
            contents.source_ranges.insert((noise % 70, range.parse().unwrap()));
        }
        (12, ..) => drop(contents.node.addresses.pop_first()),
        (13, ..) => drop(contents.node.addresses.insert([10, 9, 0, noise as u8 % 6].into(), noise % 4)),
        (14, ..) => drop(contents.node.devices.insert(noise % 6, u64::from(noise % 4) << 48)),
        (16, ..) => {
            let _ = contents.maglev.pop_first();
        }
        (17, ..) => {
            if let Some(mut table) = contents.maglev.first_entry() {
                let row = table.get_mut();
                let broken = row.previous.first_mut().filter(|_| noise.is_multiple_of(2));
                let broken = broken.unwrap_or(&mut row.current);
                *broken = MaglevTable { words: 0, signature: 0, base: broken.base };
            }
        }
        (18, ..) => {
            let table = MaglevTable { base: noise, words: 0, signature: 0 };
            let _ = contents.maglev.insert(noise % 140, table.into());
        }
        (15, ..) => contents.node.config.0.host_netns ^= u64::from(noise),
        _ => contents.slots[slot] = noise % 300,
    }
}
