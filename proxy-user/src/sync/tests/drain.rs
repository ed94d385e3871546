//! The previous Maglev table of a Service port, by which connections have a second chance.

use std::time::Duration;

use proxy_common::select::Algorithm;

use super::universe::service;
use super::{Holds, ROOMY, World};
use crate::maps::{Capacity, Faults, MaglevRow};
use crate::model::ServiceName;
use crate::plan::ServicePlan;
use crate::plan::maglev::length;

/// A Service by Maglev with so many endpoints.
fn by_maglev(of: &str, address: u8, endpoints: u8) -> (ServiceName, Option<ServicePlan>) {
    let (name, mut plan) = service(of, address, 1..=endpoints);
    for port in plan.iter_mut().flat_map(|plan| plan.ports.values_mut()) {
        port.algorithm = Algorithm::Maglev;
    }
    (name, plan)
}

/// The row of the only Service port with a table.
fn row(world: &World) -> MaglevRow {
    assert_eq!(world.contents().maglev.len(), 1);
    *world.contents().maglev.values().next().unwrap()
}

fn serve(world: &mut World, endpoints: u8) -> MaglevRow {
    world.change([by_maglev("a", 1, endpoints)]);
    world.assert_right();
    row(world)
}

#[test]
fn the_first_of_several_stays_until_its_drain_period_is_over() {
    let mut world = World::new(ROOMY);
    let first = serve(&mut world, 2);
    assert_eq!(first.previous.base, 0);
    let second = serve(&mut world, 3);
    assert_eq!(second.previous, first.current);
    world.wait(Holds::default().table / 2);
    let third = serve(&mut world, 4);
    assert_eq!(third.previous, first.current, "most connections began by it");
    assert_eq!(world.again(), 0);

    world.wait(Holds::default().table / 2);
    assert!(world.reconciler.wake().is_some_and(|at| at <= world.now));
    world.again();
    assert_eq!(row(&world), third.current.into());
    // Their room is free after another pause: only one table is left.
    world.wait(Duration::from_secs(2));
    world.again();
    assert_eq!(world.reconciler.applied().tables.slots_used(), 1 + length(4));
    let fourth = serve(&mut world, 5);
    assert_eq!(fourth.previous, third.current, "a period of its own");
    world.wait(Holds::default().table);
    world.again();
    assert_eq!(row(&world), fourth.current.into());
}

#[test]
fn one_endpoint_had_no_table_and_gets_one_when_another_joins() {
    let mut world = World::new(ROOMY);
    world.change([by_maglev("a", 1, 1)]);
    assert!(world.contents().maglev.is_empty());
    let row = serve(&mut world, 2);
    assert_eq!((row.current.words, row.previous.words), (length(2), length(1)));
    // A Service that is new had none before.
    world.change([by_maglev("b", 2, 2)]);
    let new = world.contents().maglev.values().last().copied().unwrap();
    assert_eq!(new, new.current.into());
}

#[test]
fn another_agent_goes_on_with_it() {
    let mut world = World::new(ROOMY);
    serve(&mut world, 2);
    let before = serve(&mut world, 3);
    let mut world = world.restarted();
    world.tell_all();
    assert_eq!(row(&world), before);
    world.wait(Holds::default().table);
    world.again();
    assert_eq!(row(&world), before.current.into());
}

#[test]
fn a_new_table_that_needs_the_room_has_it() {
    let capacity = Capacity { maglev: 1 + length(2) + length(3) + 10, ..ROOMY };
    let mut world = World::new(capacity);
    serve(&mut world, 2);
    let second = serve(&mut world, 3);
    assert_ne!(second.previous.base, 0);
    world.trust_nothing();
    // There is no room beside both, so there is no table for a moment.
    world.change([by_maglev("a", 1, 2)]);
    for _ in 0..5 {
        world.wait(Duration::from_secs(5));
        world.again();
    }
    assert_eq!(row(&world).current.words, length(2));
}

#[test]
fn it_ends_although_a_write_fails() {
    let mut world = World::new(ROOMY);
    serve(&mut world, 2);
    let row_before = serve(&mut world, 3);
    world.wait(Holds::default().table);
    world.faults(Faults { per_mille: 1000, ..Faults::default() });
    world.again();
    assert_eq!(row(&world), row_before);
    world.faults(Faults::default());
    world.wait(Duration::from_mins(5));
    world.again();
    assert_eq!(row(&world), row_before.current.into());
}
