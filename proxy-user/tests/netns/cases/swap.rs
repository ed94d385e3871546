//! Changes under load: no client ever sees a Service that is only half changed.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::{Case, is_clean, tcp, udp, vip};
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually};
use crate::peer::{Attempt, Load, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::{Service, text};

const LEFT: Service =
    Service { name: "left", number: 40, ports: &[tcp(80, 8080, &[0]), udp(53, 5353, &[0])] };
const RIGHT: Service =
    Service { name: "right", number: 41, ports: &[tcp(80, 9090, &[1]), udp(53, 9090, &[1])] };
/// The endpoints change places, so that each Service gets the ids that the other one gives up.
const LEFT_SWAPPED: Service = Service { ports: &[tcp(80, 8080, &[1]), udp(53, 5353, &[1])], ..LEFT };
const RIGHT_SWAPPED: Service = Service { ports: &[tcp(80, 9090, &[0]), udp(53, 9090, &[0])], ..RIGHT };

const CHANGES: usize = 200;
/// Once this time is over, [`ENOUGH`] changes are sufficient, since a busy machine makes fewer.
const LIMIT: Duration = Duration::from_secs(15);
const ENOUGH: usize = 20;

pub const CASES: &[Case] = &[Case {
    name: "swap::connections_reach_an_endpoint_of_the_service_while_endpoints_are_swapped",
    wish: Wish { pods: 2, services: &[LEFT, RIGHT], flags: SMALL },
    run: swap,
}];

fn swap(fixture: &Fixture) -> Result<()> {
    let mut loads = Vec::new();
    let mut expected = Vec::new();
    for (service, port) in [(LEFT, [8080, 5353]), (RIGHT, [9090, 9090])] {
        for kind in [SocketKind::Tcp, SocketKind::Datagram] {
            for family in Family::BOTH {
                loads.push(Load::new(Attempt::new(kind, vip(family, service, kind)), false));
                let port = port[usize::from(!kind.is_tcp())];
                expected.push([format!("0/{port}"), format!("1/{port}")]);
            }
        }
    }
    fixture.folder.put_text("left", &format!("{}{}", text(LEFT), text(RIGHT)))?;
    fixture.folder.remove("right")?;
    for (_, client) in fixture.clients() {
        client.load(&loads)?;
    }
    let passes = || fixture.log().matches("manifests read").count();
    let start = Instant::now();
    let mut changes = 0;
    while changes < ENOUGH || (changes < CHANGES && start.elapsed() < LIMIT) {
        let before = passes();
        let services = if changes % 2 == 0 { [LEFT_SWAPPED, RIGHT_SWAPPED] } else { [LEFT, RIGHT] };
        // One file, so that both Services change in one pass; with a number, so that each write is a change, whatever
        // was read before.
        let text: String = services.into_iter().map(text).collect();
        fixture.folder.put_text("left", &format!("# {changes}\n{text}"))?;
        eventually(SOON, || {
            ensure!(passes() > before, "the agent has not read the change");
            Ok(())
        })?;
        changes += 1;
    }
    for (path, client) in fixture.clients() {
        for ((tally, load), servers) in client.stop()?.iter().zip(&loads).zip(&expected) {
            let what = format!("{path}, {:?} to {}", load.attempt.kind, load.attempt.to);
            is_clean(tally, &what, &[&servers[0], &servers[1]])?;
            ensure!(tally.servers.len() == 2, "{what}: one side only, {:?}", tally.servers);
        }
    }
    Ok(())
}
