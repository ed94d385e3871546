//! `cargo xtask cluster faults`: what may go wrong on a cluster, while clients on every path make new connections.

mod knock;
mod world;

use std::io::Write as _;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::place::Place;
use super::plan::Node;
use super::{Proxy, control, current_proxy};
use crate::{say, signal};
use knock::Tally;
pub use knock::knock;
use world::World;

/// How long the API server is away.
const AWAY: Duration = Duration::from_mins(1);
/// Traffic before and after each fault.
const AROUND: Duration = Duration::from_secs(1);
/// How long an agent is gone.
const GONE: Duration = Duration::from_secs(2);
/// How long the agents may take to notice what they look for periodically, with some room.
const PERIOD: Duration = Duration::from_secs(75);
/// How long pods may take to end.
const ENDING: Duration = Duration::from_secs(90);
/// How long a change may take to arrive everywhere, on a busy machine.
const SOON: Duration = Duration::from_secs(30);

/// Brings a fault about, and checks what it is to lead to beside zero failed connections.
type Fault = fn(&World<'_>) -> Result<()>;

/// What one fault came to.
struct Line {
    what: &'static str,
    tally: Tally,
    outcome: Result<()>,
}

/// Brings faults upon a cluster, one after the other, and shows what its clients saw; `only` those with these words.
pub fn run(place: &Place, only: Option<&str>) -> Result<()> {
    let is_wanted = |what: &str| only.is_none_or(|part| what.contains(part));
    ensure!(current_proxy(place)? == Proxy::BallastHost, "the faults are made for the proxy ballast-host");
    let world = World::make(place)?;
    let faults: [(&'static str, Fault); 5] = [
        ("every agent is killed, twice, and started again", killed),
        ("every agent is replaced, node by node", replaced),
        ("the API server is away for a minute; then pods change", api_away),
        ("a node gets another address", address_added),
        ("endpoints come and go", endpoints_change),
    ];
    let mut lines = Vec::new();
    for (what, fault) in faults.into_iter().filter(|(what, _)| is_wanted(what)) {
        say::step(what);
        let (tally, outcome) = world.under_traffic(|| {
            sleep(AROUND);
            let outcome = fault(&world);
            sleep(AROUND);
            outcome
        })?;
        signal::check()?;
        lines.push(Line { what, tally, outcome });
    }
    let what = "deleted map entries come back";
    if is_wanted(what) {
        // Nothing works meanwhile, so nobody counts.
        say::step(what);
        lines.push(Line { what, tally: Tally::default(), outcome: entry_deleted(&world) });
    }
    world.clear()?;
    show(&lines)
}

fn show(lines: &[Line]) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let mut put = |text: String| writeln!(out, "{text}").context("cannot write the results");
    put(format!("{:<56}{:>12}{:>8}", "FAULT", "CONNECTIONS", "FAILED"))?;
    let mut bad = 0;
    for Line { what, tally, outcome } in lines {
        put(format!("{what:<56}{:>12}{:>8}", tally.answered + tally.failed, tally.failed))?;
        if let Some(first) = &tally.first {
            put(format!("    the first failure: {first}"))?;
        }
        if let Err(error) = outcome {
            put(format!("    FAILED: {error:#}"))?;
        }
        bad += usize::from(tally.failed > 0 || outcome.is_err());
    }
    put(format!("{} passed, {bad} failed", lines.len() - bad))?;
    ensure!(bad == 0, "{bad} faults had consequences");
    Ok(())
}

fn killed(world: &World<'_>) -> Result<()> {
    for _ in 0..2 {
        for node in world.nodes() {
            restart(world, node, libc::SIGKILL, GONE)?;
        }
    }
    Ok(())
}

fn replaced(world: &World<'_>) -> Result<()> {
    world.nodes().into_iter().try_for_each(|node| restart(world, node, libc::SIGTERM, Duration::ZERO))
}

fn restart(world: &World<'_>, node: Node, with: libc::c_int, gone: Duration) -> Result<()> {
    signal::check()?;
    world.place.node(node).stop("ballast", with)?;
    sleep(gone);
    Proxy::BallastHost.start(world.place, node)
}

fn api_away(world: &World<'_>) -> Result<()> {
    let machine = world.place.control();
    // It takes its time to end otherwise.
    machine.stop("kube-apiserver", libc::SIGKILL)?;
    let start = Instant::now();
    let mut result = Ok(());
    while start.elapsed() < AWAY && result.is_ok() {
        signal::check()?;
        for node in world.nodes() {
            let alive =
                world.place.node(node).command(&["curl", "-sf", "http://127.0.0.1:10256/livez"]).try_read();
            if alive.is_none() {
                result = Err(anyhow::anyhow!("/livez of {node} fails without an API server"));
            }
        }
        sleep(Duration::from_secs(1));
    }
    control::start_one(world.place, "kube-apiserver")?;
    control::await_api(world.place)?;
    result?;
    world.scale(world::PODS + 2)?;
    world.await_endpoints()
}

fn endpoints_change(world: &World<'_>) -> Result<()> {
    for pods in [world::PODS + 4, world::PODS, 1, world::PODS] {
        world.scale(pods)?;
        world.await_endpoints()?;
    }
    Ok(())
}

fn address_added(world: &World<'_>) -> Result<()> {
    const NEW: &str = "172.30.0.99";
    let node = world.place.node(Node(1));
    node.command(&["ip", "address", "add", &format!("{NEW}/24"), "dev", "eth0"]).read()?;
    let url = format!("http://{NEW}:{}/hostname", world::NODE_PORT);
    let outside = world.place.control();
    let answered = signal::wait_for("the node port at the new address", SOON, || {
        Ok(outside.command(&["curl", "-sf", "-m", "1", &url]).try_read())
    });
    node.command(&["ip", "address", "del", &format!("{NEW}/24"), "dev", "eth0"]).read()?;
    answered.map(|_| ())
}

/// Deletes all Services of one node from their map.
fn entry_deleted(world: &World<'_>) -> Result<()> {
    const MAP: &str = "/sys/fs/bpf/ballast/services";
    let node = world.place.node(Node(1));
    let client = |limit: &str| {
        node.command(&["curl", "-sf", "-m", limit, &format!("http://{}/hostname", world::ADDRESS)])
    };
    let dump = node.command(&["bpftool", "-j", "map", "dump", "pinned", MAP]).read()?;
    let keys = world::keys(&dump)?;
    ensure!(!keys.is_empty(), "the map of Services is empty");
    for key in &keys {
        let mut words = vec!["bpftool", "map", "delete", "pinned", MAP, "key"];
        words.extend(key.iter().map(String::as_str));
        node.command(&words).read()?;
    }
    ensure!(client("2").try_read().is_none(), "the Service works without its entries");
    signal::wait_for("the entries to come back", PERIOD, || Ok(client("2").try_read()))?;
    let metrics = node.command(&["curl", "-sf", "http://127.0.0.1:10249/metrics"]).read()?;
    ensure!(world::repairs(&metrics) >= 1.0, "the repair was not counted");
    Ok(())
}
