//! Idle connections move to endpoints that join, on both paths, and their clients lose no request.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::json;

use super::held::{self, TARGETS};
use super::{Case, tcp, vip};
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually};
use crate::peer::{Attempt, Held, Peer, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::{Service, text_with};

const WISH: Wish = Wish { pods: 6, services: &[], flags: SMALL };
const THREE: Service = Service { name: "moves", number: 43, ports: &[tcp(80, TARGETS[0], &[0, 1, 2])] };
const SIX: Service =
    Service { name: "moves", number: 43, ports: &[tcp(80, TARGETS[0], &[0, 1, 2, 3, 4, 5])] };
/// Connections of each client in each family.
const EACH: usize = 750;
/// Time between two requests of each client: less than a second is idle on a machine with nothing else to do.
const PAUSE: Duration = Duration::from_secs(2);
/// The highest accepted number of connections of an endpoint in relation to the mean.
const EVEN: f64 = 1.15;
/// The time in which shares are even on an idle machine, and how much longer a busy one may take.
const LIMIT: Duration = Duration::from_mins(1);
const BUSY: u32 = 3;
/// Timeout for the requests of a client, in seconds.
const PATIENCE: u64 = 60;

pub const CASES: &[Case] = &[
    Case { name: "rebalance::idle_connections_move_and_no_request_fails", wish: WISH, run: moves },
    Case { name: "rebalance::connections_stay_without_the_annotation", wish: WISH, run: stays },
];

fn put(fixture: &Fixture, service: Service, value: &str) -> Result<()> {
    let annotations = json!({"ballast.io/rebalance": value});
    let text = text_with(service, &json!({"metadata": {"annotations": annotations}}))?;
    fixture.folder.put_text(service.name, &text)
}

fn to(family: Family) -> Attempt {
    Attempt { patience: PATIENCE, ..Attempt::new(SocketKind::Tcp, vip(family, THREE, SocketKind::Tcp)) }
}

/// Opens the connections of both clients.
fn open(fixture: &Fixture, value: &str) -> Result<()> {
    (0..6).try_for_each(|pod| held::serve(fixture, pod))?;
    put(fixture, THREE, value)?;
    for (path, client) in fixture.clients() {
        for family in Family::BOTH {
            eventually(SOON, || client.reach(to(family)))?;
            let held = client.hold(to(family), EACH)?;
            ensure!(held.lost == 0, "{path} {family:?}: {held:?}");
        }
    }
    Ok(())
}

/// Sends a request on each connection. As a client that retries on an idle close, connects again for each that was reset, and
/// sends the requests again, until none is lost. Returns the number of resets and the connections of each server.
fn requests(path: &str, client: &Peer) -> Result<(u64, BTreeMap<String, u64>)> {
    let (mut resets, begun) = (0, Instant::now());
    loop {
        let Held { lost, failures, servers, .. } = client.pulse(PATIENCE)?;
        for failure in &failures {
            let is_reset = failure.call == "write"
                || failure.errno.is_some_and(|errno| [libc::ECONNRESET, libc::ECONNABORTED].contains(&errno));
            ensure!(is_reset, "{path}: {failure:?}");
        }
        if lost == 0 {
            return Ok((resets, servers));
        }
        resets += lost;
        // The families of those that were lost do not matter.
        let again = client.hold(to(Family::BOTH[(lost % 2) as usize]), lost as usize)?;
        ensure!(again.lost == 0, "{path}: a client cannot connect again: {again:?}");
        ensure!(begun.elapsed() < LIMIT * BUSY, "{path}: connections are reset all the time: {resets}");
    }
}

fn moves(fixture: &Fixture) -> Result<()> {
    open(fixture, "on")?;
    for (path, client) in fixture.clients() {
        let (resets, servers) = requests(path, client)?;
        ensure!(resets == 0 && servers.len() == 3, "{path}: {resets} resets, {servers:?}");
    }
    put(fixture, SIX, "on")?;
    let (begun, mut resets) = (Instant::now(), BTreeMap::new());
    loop {
        std::thread::sleep(PAUSE);
        let mut sums: BTreeMap<String, u64> = BTreeMap::new();
        for (path, client) in fixture.clients() {
            let (lost, servers) = requests(path, client)?;
            *resets.entry(path).or_insert(0) += lost;
            servers.into_iter().for_each(|(server, count)| *sums.entry(server).or_default() += count);
        }
        let number = |count: u64| f64::from(u32::try_from(count).unwrap_or(u32::MAX));
        let most = number(sums.values().copied().max().unwrap_or_default());
        let mean = number(sums.values().sum()) / 6.0;
        let (imbalance, passed) = (most / mean, begun.elapsed());
        if imbalance <= EVEN {
            break;
        }
        ensure!(
            passed < LIMIT * BUSY,
            "imbalance {imbalance:.3} after {passed:?}: {sums:?}, resets {resets:?}"
        );
    }
    ensure!(resets.values().all(|count| *count > 0), "connections of each path move: {resets:?}");
    let log = fixture.log();
    ensure!(!log.contains("idle connections stay"), "{log}");
    Ok(())
}

fn stays(fixture: &Fixture) -> Result<()> {
    open(fixture, "off")?;
    put(fixture, SIX, "off")?;
    // Longer than the pause before connections would move.
    std::thread::sleep(Duration::from_secs(10));
    for (path, client) in fixture.clients() {
        let (resets, servers) = requests(path, client)?;
        ensure!(resets == 0 && servers.len() == 3, "{path}: {resets} resets, {servers:?}");
    }
    Ok(())
}
