//! The previous Maglev tables of a Service port, which give connections another chance.

use std::time::Duration;

use proxy_common::select::Algorithm;

use super::capacity::within;
use super::{Fixture, QuarantinePeriods, ROOMY};
use crate::model::{ServiceName, TrafficPolicy};
use crate::plan::maglev::length;
use crate::plan::{Frontend, FrontendKind, FrontendPlan, Scope, ServicePlan};
use crate::store::{Capacity, Faults, MaglevRow, PREVIOUS};
use crate::testing::generator::{frontend, service};

/// Two tables are more than half of the words.
const SCARCE: Capacity = Capacity { maglev: 500, ..ROOMY };

/// Returns a Service with algorithm Maglev and this number of endpoints.
fn by_maglev(of: &str, address: u8, endpoints: u8) -> (ServiceName, Option<ServicePlan>) {
    let (name, mut plan) = service(of, address, 1..=endpoints);
    for port in plan.iter_mut().flat_map(|plan| plan.ports.values_mut()) {
        port.algorithm = Algorithm::Maglev;
    }
    (name, plan)
}

/// Returns the row of the only Service port with a table.
fn row(fixture: &Fixture) -> MaglevRow {
    assert_eq!(fixture.contents().maglev.len(), 1);
    fixture.contents().maglev.values().next().unwrap().clone()
}

fn serve(fixture: &mut Fixture, endpoints: u8) -> MaglevRow {
    fixture.change([by_maglev("a", 1, endpoints)]);
    fixture.assert_right();
    row(fixture)
}

#[test]
fn the_last_tables_stay_in_order_newest_first() {
    let mut fixture = Fixture::new(ROOMY);
    let mut before = serve(&mut fixture, 2);
    assert_eq!(before.previous, []);
    for endpoints in 3..15 {
        fixture.wait(QuarantinePeriods::default().table);
        let row = serve(&mut fixture, endpoints);
        let tables: Vec<_> = before.tables().take(PREVIOUS).copied().collect();
        assert_eq!(row.previous, tables, "{endpoints}");
        assert_eq!(fixture.again(), 0);
        before = row;
    }
    assert_eq!(before.previous.len(), PREVIOUS);
    // The same endpoints again: no table is there twice.
    let again = serve(&mut fixture, 13);
    assert_eq!(again.current, before.previous[0]);
    assert_eq!(again.previous.len(), PREVIOUS);
    assert!(!again.previous.contains(&again.current));
    // The space of the others is free after the quarantine.
    fixture.wait(Duration::from_secs(2));
    fixture.again();
    let used: u32 = again.tables().map(|table| table.words).sum();
    assert_eq!(fixture.reconciler.applied().tables.slots_used(), 1 + used);
}

#[test]
fn drain_period_ends_if_room_is_scarce() {
    let period = QuarantinePeriods::default().table;
    let words = length(2) + length(3) + length(4);
    for (maglev, is_scarce) in [(2 * words + 2, false), (2 * words, true)] {
        let mut fixture = Fixture::new(Capacity { maglev, ..ROOMY });
        serve(&mut fixture, 2);
        let second = serve(&mut fixture, 3);
        fixture.wait(period / 2);
        let third = serve(&mut fixture, 4);
        assert_eq!(third.previous, [second.current, second.previous[0]]);
        fixture.wait(period / 2);
        assert!(!is_scarce || fixture.reconciler.wake().is_some_and(|at| at <= fixture.now));
        fixture.again();
        let left = if is_scarce { vec![second.current] } else { third.previous };
        assert_eq!(row(&fixture), MaglevRow { current: third.current, previous: left });
    }
}

#[test]
fn previous_table_stays_a_day_while_there_is_room() {
    let mut fixture = Fixture::new(ROOMY);
    serve(&mut fixture, 2);
    let before = serve(&mut fixture, 3);
    fixture.wait(Duration::from_hours(23));
    fixture.again();
    assert_eq!(row(&fixture), before);
    fixture.wait(Duration::from_hours(1));
    assert!(fixture.reconciler.wake().is_some_and(|at| at <= fixture.now));
    fixture.again();
    assert_eq!(row(&fixture), before.current.into());
}

#[test]
fn current_table_stays_under_churn() {
    // Eight of nine tables are planned, and two are needed.
    let mut fixture = Fixture::new(Capacity { maglev: 9 * length(4) + 20, ..ROOMY });
    fixture.trust_nothing();
    fixture.change([within("shop", by_maglev("b", 2, 4))]);
    for first in 1..20 {
        let (name, mut plan) = service("a", 1, first..first + 4);
        plan.iter_mut()
            .flat_map(|plan| plan.ports.values_mut())
            .for_each(|port| port.algorithm = Algorithm::Maglev);
        fixture.change([(name, plan)]);
        for _ in 0..3 {
            fixture.wait(Duration::from_secs(2));
            fixture.again();
        }
        assert_eq!(fixture.reconciler.problems(), [], "{first}");
        assert!(fixture.contents().maglev.values().all(|row| row.current.words != 0), "{first}");
    }
}

#[test]
fn one_endpoint_had_no_table_and_gets_one_when_another_joins() {
    let mut fixture = Fixture::new(ROOMY);
    fixture.change([by_maglev("a", 1, 1)]);
    assert!(fixture.contents().maglev.is_empty());
    let row = serve(&mut fixture, 2);
    let words: Vec<_> = row.tables().map(|table| table.words).collect();
    assert_eq!(words, [length(2), length(1)]);
    // A new Service has no previous table.
    fixture.change([by_maglev("b", 2, 2)]);
    let new = fixture.contents().maglev.values().last().unwrap();
    assert_eq!(*new, new.current.into());
}

#[test]
fn drain_period_continues_after_a_restart() {
    let mut fixture = Fixture::new(SCARCE);
    serve(&mut fixture, 2);
    let before = serve(&mut fixture, 3);
    let mut fixture = fixture.restarted();
    fixture.tell_all();
    assert_eq!(row(&fixture), before);
    fixture.wait(QuarantinePeriods::default().table);
    fixture.again();
    assert_eq!(row(&fixture), before.current.into());
}

#[test]
fn a_new_table_that_needs_the_room_has_it() {
    let capacity = Capacity { maglev: 1 + length(4) + length(3) + 10, ..ROOMY };
    let mut fixture = Fixture::new(capacity);
    serve(&mut fixture, 4);
    let second = serve(&mut fixture, 3);
    assert_eq!(second.previous.len(), 1);
    fixture.trust_nothing();
    // There is no space beside both tables, so the old table serves for a moment.
    fixture.change([by_maglev("a", 1, 2)]);
    assert_eq!((row(&fixture).current, fixture.reconciler.problems()), (second.current, vec![]));
    for _ in 0..3 {
        fixture.wait(Duration::from_secs(2));
        fixture.again();
    }
    assert_eq!(row(&fixture).current.words, length(2));
}

#[test]
fn outdated_table_without_room_serves_ten_seconds() {
    let mut fixture = Fixture::new(Capacity { maglev: 1 + length(4) + length(8) + 300, ..ROOMY });
    fixture.trust_nothing();
    fixture.change([by_maglev("b", 2, 4)]);
    let before = serve_untrusted(&mut fixture, 8);
    for seconds in [0, 4, 5] {
        fixture.wait(Duration::from_secs(seconds));
        assert_eq!(serve_untrusted(&mut fixture, 9).current, before.current, "{seconds}");
        assert_eq!(fixture.reconciler.problems(), []);
    }
    fixture.wait(Duration::from_secs(2));
    fixture.change([by_maglev("a", 1, 9)]);
    fixture.again();
    assert_eq!(fixture.contents().maglev.len(), 1, "the old table has left");
    for _ in 0..3 {
        fixture.wait(Duration::from_secs(2));
        fixture.again();
    }
    let after = serve_untrusted(&mut fixture, 9).current;
    assert!(after.words == length(9) && after.signature != before.current.signature);
}

/// Like [`serve`], for a Service beside another one, whose row is not checked. Returns the row of the last Service.
fn serve_untrusted(fixture: &mut Fixture, endpoints: u8) -> MaglevRow {
    fixture.change([by_maglev("a", 1, endpoints)]);
    fixture.again();
    fixture.contents().maglev.values().last().unwrap().clone()
}

#[test]
fn drain_period_ends_after_a_failed_write() {
    let mut fixture = Fixture::new(SCARCE);
    serve(&mut fixture, 2);
    let row_before = serve(&mut fixture, 3);
    fixture.wait(QuarantinePeriods::default().table);
    fixture.faults(Faults { per_mille: 1000, ..Faults::default() });
    fixture.again();
    assert_eq!(row(&fixture), row_before);
    fixture.faults(Faults::default());
    fixture.wait(Duration::from_mins(5));
    fixture.again();
    assert_eq!(row(&fixture), row_before.current.into());
}

#[test]
fn scoped_frontends_have_no_table_of_all_endpoints() {
    let (name, mut plan) = service("a", 1, 1..=200);
    for port in plan.iter_mut().flat_map(|plan| plan.ports.values_mut()) {
        port.maglev_outside = true;
        let what = FrontendPlan::new(FrontendKind::LoadBalancer);
        let inside = FrontendPlan { scoped: true, ..what.clone() };
        let local = port.backends.keys().take(3).copied().collect();
        let outside = FrontendPlan { policy: TrafficPolicy::Local, slots: Some(local), ..what };
        let external = Frontend { scope: Scope::External, ..frontend(1) };
        port.frontends = [(frontend(1), inside), (external, outside)].into_iter().collect();
    }
    let mut fixture = Fixture::new(ROOMY);
    fixture.change([(name, plan)]);
    fixture.assert_right();
    assert_eq!(row(&fixture).current.words, length(3), "clients outside use the local endpoints");
}
