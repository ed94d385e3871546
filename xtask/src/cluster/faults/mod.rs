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
    // Connections fail meanwhile, so nobody counts.
    let damages: [(&'static str, Fault); 2] =
        [("deleted map entries come back", entries_deleted), ("lost programs come back", programs_lost)];
    for (what, damage) in damages.into_iter().filter(|(what, _)| is_wanted(what)) {
        say::step(what);
        lines.push(Line { what, tally: Tally::default(), outcome: damage(&world) });
        signal::check()?;
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
fn entries_deleted(world: &World<'_>) -> Result<()> {
    const MAP: &str = "/sys/fs/bpf/ballast/services";
    let node = world.place.node(Node(1));
    let dump = node.command(&["bpftool", "-j", "map", "dump", "pinned", MAP]).read()?;
    let keys = world::keys(&dump)?;
    ensure!(!keys.is_empty(), "the map of Services is empty");
    for key in &keys {
        let mut words = vec!["bpftool", "map", "delete", "pinned", MAP, "key"];
        words.extend(key.iter().map(String::as_str));
        node.command(&words).read()?;
    }
    await_repair(world, "ballast_drift_repairs_total")
}

/// Detaches one program of a node's sockets, and unpins the other; for both, and for those of its device.
fn programs_lost(world: &World<'_>) -> Result<()> {
    const LINKS: &str = "/sys/fs/bpf/ballast/links";
    let node = world.place.node(Node(1));
    node.command(&["bpftool", "link", "detach", "pinned", &format!("{LINKS}/sock_connect4")]).read()?;
    let devices = format!("rm {LINKS}/sock_connect6 {LINKS}/tcx_ingress_*");
    node.command(&["sh", "-c", &devices]).read()?;
    await_repair(world, "ballast_repairs_total")
}

/// Sees that the Service does not work on the first node, that it comes back, and that the agent counts it.
fn await_repair(world: &World<'_>, metric: &str) -> Result<()> {
    let node = world.place.node(Node(1));
    let call = || {
        let url = format!("http://{}/hostname", world::ADDRESS);
        node.command(&["curl", "-sf", "-m", "2", &url]).try_read()
    };
    let value = || {
        let metrics = node.command(&["curl", "-sf", "http://127.0.0.1:10249/metrics"]).read()?;
        Ok::<_, anyhow::Error>(world::total(&metrics, metric))
    };
    let before = value()?;
    ensure!(call().is_none(), "the Service works without it");
    signal::wait_for("the agent to repair it", PERIOD, || Ok(call()))?;
    let count = || Ok((value()? > before).then_some(()));
    signal::wait_for(&format!("{metric} to count it"), SOON, count)
}
