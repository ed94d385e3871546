//! `cargo xtask cluster faults`: what may go wrong on a cluster, while clients on every path make new connections; what
//! other tools may do to a node; and what has to be so because nodes share a kernel.

mod agents;
mod damage;
mod device;
mod facts;
mod knock;
mod rolling;
mod world;

use std::io::Write as _;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::control;
use super::place::Place;
use super::plan::Node;
use crate::{say, signal};
use knock::Tally;
pub use knock::{Target, knock};
use world::{SOON, World};

/// How long the API server is away: longer than a liveness probe needs to kill a container.
const AWAY: Duration = Duration::from_secs(90);
/// Traffic before and after each fault.
const AROUND: Duration = Duration::from_secs(1);
/// How long an agent is gone.
const GONE: Duration = Duration::from_secs(2);
/// Brings a fault about, and checks what it is to lead to beside zero failed connections.
type Fault = fn(&World<'_>) -> Result<()>;

/// What one case came to.
struct Line {
    what: &'static str,
    tally: Tally,
    outcome: Result<()>,
}

/// No new connection may fail meanwhile.
const FAULTS: [(&str, Fault); 7] = [
    ("every agent is killed, twice, and started again", killed),
    ("every agent is replaced, node by node", |world| world.agents.replace(world.place)),
    ("the API server is away; then pods change", api_away),
    ("a node gets another address", address_added),
    ("endpoints come and go", endpoints_change),
    ("a pod's device comes and goes, again and again", device::comes_and_goes),
    ("50 deployments roll at once", rolling::all_at_once),
];

/// What has to be so in a cluster at rest.
const FACTS: [(&str, Fault); 2] = [
    ("nodes share nothing", facts::nothing_is_shared),
    ("pods of before and after the agent, of every kind, are served", facts::all_pods_are_served),
];

/// Brings faults upon a cluster, one after the other, and shows what its clients saw; `only` those with these words.
pub fn run(place: &Place, only: Option<&str>) -> Result<()> {
    let is_wanted = |what: &str| only.is_none_or(|part| what.contains(part));
    let world = World::make(place)?;
    let mut lines = Vec::new();
    for (what, fault) in FAULTS.into_iter().filter(|(what, _)| is_wanted(what)) {
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
    // Connections may fail meanwhile, so nobody counts.
    for damage in damage::DAMAGES.iter().filter(|damage| is_wanted(damage.what)) {
        say::step(damage.what);
        lines.push(Line { what: damage.what, tally: Tally::default(), outcome: damage.bring(&world) });
        signal::check()?;
    }
    for (what, fact) in FACTS.into_iter().filter(|(what, _)| is_wanted(what)) {
        say::step(what);
        lines.push(Line { what, tally: Tally::default(), outcome: fact(&world) });
        signal::check()?;
    }
    ensure!(!lines.is_empty(), "no case has these words");
    world.clear()?;
    show(&lines)
}

fn show(lines: &[Line]) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let mut put = |text: String| writeln!(out, "{text}").context("cannot write the results");
    put(format!("{:<62}{:>12}{:>8}", "CASE", "CONNECTIONS", "FAILED"))?;
    let mut bad = 0;
    for Line { what, tally, outcome } in lines {
        let counts = match tally.answered + tally.failed {
            0 => format!("{:>12}{:>8}", "-", "-"),
            all => format!("{all:>12}{:>8}", tally.failed),
        };
        put(format!("{what:<62}{counts}"))?;
        for failure in &tally.failures {
            put(format!("    {failure}"))?;
        }
        if let Err(error) = outcome {
            put(format!("    FAILED: {error:#}"))?;
        }
        bad += usize::from(tally.failed > 0 || outcome.is_err());
    }
    put(format!("{} passed, {bad} failed", lines.len() - bad))?;
    ensure!(bad == 0, "{bad} cases failed");
    Ok(())
}

fn killed(world: &World<'_>) -> Result<()> {
    for _ in 0..2 {
        for node in world.nodes() {
            signal::check()?;
            world.agents.kill(world.place, node, GONE)?;
        }
    }
    Ok(())
}

fn api_away(world: &World<'_>) -> Result<()> {
    let before = agents::processes(world.place)?;
    let machine = world.place.control();
    // It takes its time to end otherwise.
    machine.stop("kube-apiserver", libc::SIGKILL)?;
    let start = Instant::now();
    let mut result = Ok(());
    while start.elapsed() < AWAY && result.is_ok() {
        signal::check()?;
        for node in world.nodes() {
            let livez = ["curl", "-sf", "http://127.0.0.1:10256/livez"];
            if !world.place.node(node).command(&livez).succeeds() {
                result = Err(anyhow::anyhow!("/livez of {node} fails without an API server"));
            }
        }
        sleep(Duration::from_secs(1));
    }
    control::start_one(world.place, "kube-apiserver")?;
    control::await_api(world.place)?;
    result?;
    ensure!(agents::processes(world.place)? == before, "an agent was started again meanwhile");
    world.scale(world::PODS + 2)?;
    rolling::await_equal(world)
}

fn endpoints_change(world: &World<'_>) -> Result<()> {
    for pods in [world::PODS + 4, world::PODS, 1, world::PODS] {
        world.scale(pods)?;
        rolling::await_equal(world)?;
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
