//! Changes that other tools may make to a node's maps, programs and pins. The agent has to find, repair, count and report them.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::testbed::{self, SOON, Testbed};
use crate::cluster::plan::Node;
use crate::signal;

/// Time limit for something that the agents check periodically, with some margin.
const PERIOD: Duration = Duration::from_secs(75);

const SERVICES: &str = "/sys/fs/bpf/ballast/services";
const LINKS: &str = "/sys/fs/bpf/ballast/links";
/// Log text of the agent when it finds entries that are not its own.
const DRIFT: &str = "the maps were changed externally";
/// Log text of the agent when it finds missing programs or pins.
const TAKEN: &str = "detached or removed externally";

/// One kind of damage to the first node.
pub(super) struct Damage {
    pub what: &'static str,
    /// Causes the damage.
    make: fn(&Testbed<'_>) -> Result<()>,
    /// Whether the Service fails on that node until the repair; if not, it has to keep working.
    hurts: bool,
    /// Metric that counts the repair.
    metric: &'static str,
    /// Log text about the repair.
    says: &'static str,
}

/// All kinds of damage.
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
        make: |testbed| on_node(testbed, "rm /sys/fs/bpf/ballast/v*/services"),
        hurts: false,
        metric: "ballast_repairs_total{what=\"map_pin\"}",
        says: TAKEN,
    },
    Damage {
        what: "a socket program is detached",
        make: |testbed| on_node(testbed, &format!("bpftool link detach pinned {LINKS}/sock_connect4")),
        // The packet programs translate what a socket program has not translated.
        hurts: false,
        metric: "ballast_repairs_total{what=\"socket_program\"}",
        says: TAKEN,
    },
    Damage {
        what: "a socket program loses its pin",
        make: |testbed| on_node(testbed, &format!("rm {LINKS}/sock_connect4")),
        hurts: false,
        metric: "ballast_repairs_total{what=\"socket_program\"}",
        says: TAKEN,
    },
    Damage {
        what: "packet programs are detached",
        make: |testbed| {
            on_node(testbed, &format!("for link in {LINKS}/tcx_*; do bpftool link detach pinned $link; done"))
        },
        hurts: false,
        metric: "ballast_repairs_total{what=\"packet_program\"}",
        says: "packet programs attached again",
    },
];

impl Damage {
    /// Causes the damage, and checks that the agent repairs, counts and logs it.
    pub(super) fn inject_and_check(&self, testbed: &Testbed<'_>) -> Result<()> {
        let count = || Ok::<_, anyhow::Error>(testbed::total(&metrics(testbed)?, self.metric));
        let logged = || {
            Ok::<_, anyhow::Error>(testbed.agents.log(testbed.workdir, Node(1))?.matches(self.says).count())
        };
        let (counted, said) = (count()?, logged()?);
        let programs = hooks(testbed)?;
        (self.make)(testbed)?;
        let answers = testbed.answers_on(Node(1));
        ensure!(
            answers != self.hurts,
            if answers { "the Service works without it" } else { "the Service fails" }
        );
        // The other node's agent and programs must not be affected; the Service would fail there if the nodes shared anything.
        ensure!(testbed.answers_on(Node(2)), "the Service fails on another node");
        signal::wait_for("the agent to repair and count it", PERIOD, || {
            Ok((count()? > counted).then_some(()))
        })?;
        signal::wait_for("all programs to be there", PERIOD, || {
            Ok((hooks(testbed)? == programs).then_some(()))
        })?;
        signal::wait_for("the Service to work again", SOON, || {
            Ok(testbed.answers_on(Node(1)).then_some(()))
        })?;
        ensure!(logged()? > said, "the agent repaired it and did not say so");
        Ok(())
    }
}

fn metrics(testbed: &Testbed<'_>) -> Result<String> {
    testbed.workdir.node(Node(1)).command(&["curl", "-sf", "http://127.0.0.1:10249/metrics"]).read()
}

/// Returns the pins of links and maps, and the number of hooks that run a program of ours.
fn hooks(testbed: &Testbed<'_>) -> Result<String> {
    let script =
        format!("ls {LINKS} /sys/fs/bpf/ballast/v*; ballast status -o wide | grep -c -E '^(sock|tcx|tc)_'");
    testbed.workdir.node(Node(1)).command(&["sh", "-c", &script]).read()
}

fn on_node(testbed: &Testbed<'_>, script: &str) -> Result<()> {
    testbed.workdir.node(Node(1)).command(&["sh", "-c", script]).read().map(|_| ())
}

/// Returns the keys of all entries in the first node's map `services`.
fn keys(testbed: &Testbed<'_>) -> Result<Vec<Vec<String>>> {
    let dump = testbed
        .workdir
        .node(Node(1))
        .command(&["bpftool", "-j", "map", "dump", "pinned", SERVICES])
        .read()?;
    testbed::keys(&dump)
}

fn entries_deleted(testbed: &Testbed<'_>) -> Result<()> {
    let keys = keys(testbed)?;
    ensure!(!keys.is_empty(), "the map of Services is empty");
    keys.iter().try_for_each(|key| {
        on_node(testbed, &format!("bpftool map delete pinned {SERVICES} key {}", key.join(" ")))
    })
}

/// Overwrites the entries of the clients' Service with zeros: one for its port, one for its address.
fn entry_changed(testbed: &Testbed<'_>) -> Result<()> {
    let address: Vec<String> = testbed::ADDRESS
        .split([':', '.'])
        .take(4)
        .filter_map(|part| Some(format!("0x{:02x}", part.parse::<u8>().ok()?)))
        .collect();
    let shown = testbed
        .workdir
        .node(Node(1))
        .command(&["bpftool", "-j", "map", "show", "pinned", SERVICES])
        .read()?;
    let shown: serde_json::Value =
        serde_json::from_str(&shown).context("bpftool printed something unexpected")?;
    let size =
        shown.get("bytes_value").and_then(serde_json::Value::as_u64).context("a map without a size")?;
    let zeros = vec!["0x00"; usize::try_from(size).context("a map's size")?].join(" ");
    let keys: Vec<_> = keys(testbed)?.into_iter().filter(|key| key.starts_with(&address)).collect();
    ensure!(!keys.is_empty(), "the Service has no entry");
    keys.iter().try_for_each(|key| {
        on_node(testbed, &format!("bpftool map update pinned {SERVICES} key {} value {zeros}", key.join(" ")))
    })
}
