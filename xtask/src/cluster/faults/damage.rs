//! What other tools may do to a node's maps, programs and pins, and that the agent finds it, repairs it, counts it and
//! says so.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::world::{self, SOON, World};
use crate::cluster::plan::Node;
use crate::signal;

/// How long the agents may take to notice what they look for periodically, with some room.
const PERIOD: Duration = Duration::from_secs(75);

const SERVICES: &str = "/sys/fs/bpf/ballast/services";
const LINKS: &str = "/sys/fs/bpf/ballast/links";
/// What the agent says when it finds entries that are not its own.
const DRIFT: &str = "the maps were changed externally";
/// The same of programs and pins.
const TAKEN: &str = "detached or removed externally";

/// One kind of damage, done to the first node.
pub(super) struct Damage {
    pub what: &'static str,
    /// Makes it.
    make: fn(&World<'_>) -> Result<()>,
    /// Whether the Service fails on that node until it is repaired; if not, it has to work.
    hurts: bool,
    /// What counts the repair.
    metric: &'static str,
    /// What the log says of it.
    says: &'static str,
}

/// All kinds.
pub(super) const DAMAGES: [Damage; 6] = [
    Damage {
        what: "all entries of a map are deleted",
        make: entries_deleted,
        hurts: true,
        metric: "ballast_drift_repairs_total",
        says: DRIFT,
    },
    Damage {
        what: "entries of a map are changed",
        make: entry_changed,
        hurts: true,
        metric: "ballast_drift_repairs_total",
        says: DRIFT,
    },
    Damage {
        what: "a map loses its pin",
        make: |world| on_node(world, "rm /sys/fs/bpf/ballast/v*/services"),
        hurts: false,
        metric: "ballast_repairs_total{what=\"map_pin\"}",
        says: TAKEN,
    },
    Damage {
        what: "a socket program is detached",
        make: |world| on_node(world, &format!("bpftool link detach pinned {LINKS}/sock_connect4")),
        // The packet programs have what a socket program has not translated.
        hurts: false,
        metric: "ballast_repairs_total{what=\"socket_program\"}",
        says: TAKEN,
    },
    Damage {
        what: "a socket program loses its pin",
        make: |world| on_node(world, &format!("rm {LINKS}/sock_connect4")),
        hurts: false,
        metric: "ballast_repairs_total{what=\"socket_program\"}",
        says: TAKEN,
    },
    Damage {
        what: "packet programs are detached",
        make: |world| {
            on_node(world, &format!("for link in {LINKS}/tcx_*; do bpftool link detach pinned $link; done"))
        },
        hurts: false,
        metric: "ballast_repairs_total{what=\"packet_program\"}",
        says: "packet programs attached again",
    },
];

impl Damage {
    /// Does it, and sees that it is repaired, counted and told.
    pub(super) fn bring(&self, world: &World<'_>) -> Result<()> {
        let count = || Ok::<_, anyhow::Error>(world::total(&metrics(world)?, self.metric));
        let told =
            || Ok::<_, anyhow::Error>(world.agents.log(world.place, Node(1))?.matches(self.says).count());
        let (counted, said) = (count()?, told()?);
        let programs = hooks(world)?;
        (self.make)(world)?;
        let answers = world.answers_on(Node(1));
        ensure!(answers != self.hurts, if answers { "the Service works without it" } else { "the Service fails" });
        // What is shared would show here: another node's agent and programs have nothing to do with it.
        ensure!(world.answers_on(Node(2)), "the Service fails on another node");
        signal::wait_for("the agent to repair and count it", PERIOD, || {
            Ok((count()? > counted).then_some(()))
        })?;
        signal::wait_for("all programs to be there", PERIOD, || {
            Ok((hooks(world)? == programs).then_some(()))
        })?;
        signal::wait_for("the Service to work again", SOON, || Ok(world.answers_on(Node(1)).then_some(())))?;
        ensure!(told()? > said, "the agent repaired it and did not say so");
        Ok(())
    }
}

fn metrics(world: &World<'_>) -> Result<String> {
    world.place.node(Node(1)).command(&["curl", "-sf", "http://127.0.0.1:10249/metrics"]).read()
}

/// The hooks that run a program of ours, and the pins of maps.
fn hooks(world: &World<'_>) -> Result<String> {
    let script =
        format!("ls {LINKS} /sys/fs/bpf/ballast/v*; ballast status -o wide | grep -c -E '^(sock|tcx|tc)_'");
    world.place.node(Node(1)).command(&["sh", "-c", &script]).read()
}

fn on_node(world: &World<'_>, script: &str) -> Result<()> {
    world.place.node(Node(1)).command(&["sh", "-c", script]).read().map(|_| ())
}

/// The keys of all Services of the first node.
fn keys(world: &World<'_>) -> Result<Vec<Vec<String>>> {
    let dump =
        world.place.node(Node(1)).command(&["bpftool", "-j", "map", "dump", "pinned", SERVICES]).read()?;
    world::keys(&dump)
}

fn entries_deleted(world: &World<'_>) -> Result<()> {
    let keys = keys(world)?;
    ensure!(!keys.is_empty(), "the map of Services is empty");
    keys.iter().try_for_each(|key| {
        on_node(world, &format!("bpftool map delete pinned {SERVICES} key {}", key.join(" ")))
    })
}

/// The entries of the clients' Service are of zeros then: one for its port, one for its address.
fn entry_changed(world: &World<'_>) -> Result<()> {
    let address: Vec<String> = world::ADDRESS
        .split([':', '.'])
        .take(4)
        .filter_map(|part| Some(format!("0x{:02x}", part.parse::<u8>().ok()?)))
        .collect();
    let shown =
        world.place.node(Node(1)).command(&["bpftool", "-j", "map", "show", "pinned", SERVICES]).read()?;
    let shown: serde_json::Value =
        serde_json::from_str(&shown).context("bpftool printed something unexpected")?;
    let size =
        shown.get("bytes_value").and_then(serde_json::Value::as_u64).context("a map without a size")?;
    let zeros = vec!["0x00"; usize::try_from(size).context("a map's size")?].join(" ");
    let keys: Vec<_> = keys(world)?.into_iter().filter(|key| key.starts_with(&address)).collect();
    ensure!(!keys.is_empty(), "the Service has no entry");
    keys.iter().try_for_each(|key| {
        on_node(world, &format!("bpftool map update pinned {SERVICES} key {} value {zeros}", key.join(" ")))
    })
}
