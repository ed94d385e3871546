//! `--connect-latency`: the agent measures and shows connections of sockets and of packets.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail, ensure};
use proxy_common::latency::LatencyEntry;
use proxy_user::maps::view::View;

use super::{Case, tcp};
use crate::agent::{self, ask};
use crate::fixture::{Fixture, SOON, Wish, eventually};
use crate::peer::{Attempt, Peer, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::{Service, cluster_ip};

const WEB: Service = Service { name: "web", number: 1, ports: &[tcp(80, 8080, &[0, 1])] };
/// Its one endpoint does not listen on the target port.
const CLOSED: Service = Service { name: "closed", number: 2, ports: &[tcp(80, 7070, &[0])] };
#[rustfmt::skip]
const FLAGS: &[&str] = &[
    "--connect-latency",
    "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "16384", "--max-sockets", "4096",
];
const MANY: usize = 20;

pub const CASES: &[Case] = &[Case {
    name: "latency::connections_of_both_paths_are_measured",
    wish: Wish { pods: 2, services: &[WEB, CLOSED], flags: FLAGS },
    run: measures,
}];

fn attempt_to(family: Family, service: &Service) -> Attempt {
    Attempt::new(SocketKind::Tcp, (cluster_ip(family, service.number), 80).into())
}

/// Returns what was measured of a Service: as a whole, and the sum over its endpoints.
fn measured(view: &View, service: &str, family: Family) -> Result<[LatencyEntry; 2]> {
    let is_wanted = |family_of: &str| family_of == if family == Family::V4 { "IPv4" } else { "IPv6" };
    let names = view.names()?;
    let id = names.iter().find(|(_, name)| name.name == service && is_wanted(&name.family.to_string()));
    let (id, _) = id.context("no such Service")?;
    let mut found = [LatencyEntry::default(); 2];
    for ((service, backend), entry) in view.latency()? {
        if service == *id {
            let sum = &mut found[usize::from(backend != 0)];
            sum.buckets.iter_mut().zip(entry.buckets).for_each(|(sum, count)| *sum += count);
            sum.sum_us += entry.sum_us;
            sum.refused += entry.refused;
            sum.retransmits += entry.retransmits;
        }
    }
    Ok(found)
}

fn measures(fixture: &Fixture) -> Result<()> {
    let view = View::open(&fixture.bpffs())?;
    for family in Family::BOTH {
        for client in [&fixture.local, &fixture.client] {
            let [before, _] = measured(&view, "web", family)?;
            measures_one(client, &view, family, before.answered())?;
        }
        let refused = |client: &Peer| client.fails(attempt_to(family, &CLOSED), libc::ECONNREFUSED);
        eventually(SOON, || refused(&fixture.local))?;
        eventually(SOON, || refused(&fixture.client))?;
        let [all, endpoints] = measured(&view, "closed", family)?;
        ensure!(all == endpoints && all.answered() == 0, "{all:?}, {endpoints:?}");
        ensure!(all.refused >= 2, "a socket and a packet were refused: {all:?}");
    }
    shows(fixture)
}

/// Checks that each connection of the client is measured once.
fn measures_one(client: &Peer, view: &View, family: Family, before: u64) -> Result<()> {
    eventually(SOON, || client.reach(attempt_to(family, &WEB)))?;
    let seen = client.many(attempt_to(family, &WEB), MANY)?;
    ensure!(seen.failed == 0, "{seen:?}");
    let [all, endpoints] = measured(view, "web", family)?;
    ensure!(all == endpoints, "{family:?}: {all:?} of the Service, {endpoints:?} of its endpoints");
    let more = all.answered() - before;
    // Attempts from before the Service was programmed, if there were any, belong to no Service.
    ensure!(more == MANY as u64 + 1, "{family:?}: {more} more instead of {}", MANY + 1);
    ensure!(all.sum_us > 0, "{family:?}: it took no time: {all:?}");
    Ok(())
}

fn shows(fixture: &Fixture) -> Result<()> {
    let shown = ask(&fixture.node, &["service", "show", "web"], &fixture.bpffs())?;
    let latency = shown["ports"][0]["latency"].as_array().context("no latency")?;
    ensure!(latency.len() == 3 && latency[0]["answered"].as_u64() >= Some(2 * MANY as u64), "{shown}");
    let (_, metrics) = agent::get(&fixture.node, 10_249, "/metrics")?;
    for start in [
        "ballast_connect_latency_seconds_count{",
        "ballast_connect_latency_seconds_bucket{le=\"+Inf\"",
        "ballast_connects_refused_total{",
        "ballast_connect_retransmits_total{",
    ] {
        ensure!(metrics.lines().any(|line| line.starts_with(start)), "no `{start}` in /metrics");
    }
    shows_examples(fixture, &metrics)
}

/// Checks that a reader that asks for `OpenMetrics` gets exemplars beside the buckets, of packets and of sockets, and
/// that other readers get none.
fn shows_examples(fixture: &Fixture, plain: &str) -> Result<()> {
    ensure!(!plain.contains(" # {"), "the plain format has no exemplars");
    for client in [&fixture.client, &fixture.local] {
        for family in Family::BOTH {
            // The start of a flow is known to within a jiffy: another connection may seem to be newer.
            eventually(SOON, || is_an_example(fixture, client, family))?;
        }
    }
    Ok(())
}

/// Checks that the newest connection is the exemplar of its bucket.
fn is_an_example(fixture: &Fixture, client: &Peer, family: Family) -> Result<()> {
    let seen = client.reach(attempt_to(family, &WEB))?;
    let (_, text) =
        agent::get_as(&fixture.node, 10_249, "/metrics", "application/openmetrics-text; version=1.0.0")?;
    let start = format!("client=\"{}\",endpoint=\"", seen.client);
    let examples: Vec<_> = text.lines().filter_map(|line| line.split_once(" # {")).collect();
    let found = examples.iter().find(|(_, example)| example.starts_with(&start));
    let (sample, example) = found.with_context(|| format!("no exemplar of {start} in {examples:#?}"))?;
    ensure!(
        sample.starts_with("ballast_connect_latency_seconds_bucket{le=") && sample.contains("name=\"web\""),
        "{sample}"
    );
    let (_, numbers) = example.split_once("} ").context("no value")?;
    let [took, time] = numbers.split(' ').collect::<Vec<_>>()[..] else { bail!("{numbers}") };
    let (took, time): (f64, f64) = (took.parse()?, time.parse()?);
    ensure!(took > 0.0 && took < 60.0, "{example}");
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64();
    ensure!((now - time).abs() < 120.0, "{example} at {now}");
    Ok(())
}
