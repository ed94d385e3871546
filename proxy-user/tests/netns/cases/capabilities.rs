//! The agent, and what ends UDP sockets beside it, with the capabilities that their `DaemonSet`s give them, and without each.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use super::{Case, stale_sockets};
use crate::agent::{self, Agent};
use crate::fixture::Fixture;

pub const CASES: &[Case] = &[
    Case { name: "capabilities::those_of_the_daemon_set_are_enough", wish: stale_sockets::WISH, run: enough },
    Case { name: "capabilities::each_of_them_is_needed", wish: stale_sockets::WISH, run: needed },
    Case {
        name: "capabilities::the_seccomp_profile_allows_all_that_it_does",
        wish: stale_sockets::WISH,
        run: confined,
    },
    Case {
        name: "capabilities::maps_that_are_replaced_are_not_gone_by",
        wish: stale_sockets::WISH,
        run: replaced,
    },
];

/// Numbers of `include/uapi/linux/capability.h`.
fn number(name: &str) -> Result<u32> {
    Ok(match name {
        "NET_ADMIN" => 12,
        "SYS_PTRACE" => 19,
        "SYS_ADMIN" => 21,
        "PERFMON" => 38,
        "BPF" => 39,
        other => bail!("{other}: say here what needs it"),
    })
}

/// What the container of a `DaemonSet` may do, by name.
fn granted(manifest: &str) -> Result<Vec<String>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/manifests").join(manifest);
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    for document in text.split("\n---\n") {
        let object: Value = serde_saphyr::from_str(document)?;
        if object["kind"] == "DaemonSet" {
            let pod = &object["spec"]["template"]["spec"];
            let context = &pod["containers"][0]["securityContext"];
            ensure!(
                context["capabilities"]["drop"] == serde_json::json!(["ALL"])
                    && context["privileged"] == false
            );
            let names = context["capabilities"]["add"].as_array().context("no capabilities")?;
            return Ok(names.iter().filter_map(Value::as_str).map(str::to_owned).collect());
        }
    }
    bail!("no DaemonSet in {manifest}")
}

/// The agent's.
const AGENT: &str = "ballast.yaml";
/// Those of `endUdpSockets`.
const BESIDE: &str = "end-udp-sockets/end-udp-sockets.yaml";

/// What the chart gives the agent.
pub const LEAN: [&str; 3] = ["BPF", "NET_ADMIN", "PERFMON"];

/// The next agent has these alone. What takes more, the mount of the bpffs, an agent before has done, as the init
/// container does.
pub fn restrict<'a>(fixture: &Fixture, names: impl Iterator<Item = &'a str>) -> Result<()> {
    let numbers = names.map(number).collect::<Result<_>>()?;
    fixture.setup().capabilities = Some(numbers);
    Ok(())
}

fn without<'a>(all: &'a [&'a str], missing: &'a str) -> impl Iterator<Item = &'a str> {
    all.iter().copied().filter(move |name| *name != missing)
}

/// Nothing of an earlier agent is there: all is loaded and attached anew.
fn clean(fixture: &Fixture) -> Result<()> {
    let cgroup = fixture.cgroup().display().to_string();
    let cleaned = agent::command(&fixture.node, &["cleanup", "--cgroup-root", &cgroup], &fixture.bpffs())?;
    ensure!(cleaned.status.success(), "{cleaned:?}");
    Ok(())
}

fn enough(fixture: &Fixture) -> Result<()> {
    fixture.kill()?;
    let (agent, beside) = (granted(AGENT)?, granted(BESIDE)?);
    // To take over, and to begin from nothing.
    for from_nothing in [false, true] {
        if from_nothing {
            clean(fixture)?;
        }
        restrict(fixture, agent.iter().map(String::as_str))?;
        fixture.begin()?;
        stale_sockets::stay(fixture)?;
        restrict(fixture, beside.iter().map(String::as_str))?;
        let mut beside = Agent::start_beside(&fixture.node, &fixture.setup())?;
        beside.says(&["closing connected sockets whose endpoint is removed"])?;
        fixture.change(stale_sockets::NAMES, &["0/5353"])?;
        stale_sockets::moves(fixture)?;
        beside.kill()?;
        fixture.kill()?;
    }
    Ok(())
}

fn needed(fixture: &Fixture) -> Result<()> {
    let beside = granted(BESIDE)?;
    ensure!(beside == ["NET_ADMIN", "SYS_ADMIN", "SYS_PTRACE"], "{beside:?}");
    let beside: Vec<_> = beside.iter().map(String::as_str).collect();
    // Without one of these two it does not reach the sockets of pods.
    for missing in ["SYS_ADMIN", "SYS_PTRACE"] {
        restrict(fixture, without(&beside, missing).chain(["BPF", "PERFMON"]))?;
        fixture.kill()?;
        fixture.begin()?;
        let mut beside = Agent::start_beside(&fixture.node, &fixture.setup())?;
        beside.says(&[&format!("grant CAP_{missing}")])?;
        stale_sockets::stay(fixture)?;
        beside.kill()?;
    }
    fixture.kill()?;
    let mut granted = granted(AGENT)?;
    granted.sort();
    ensure!(granted == LEAN, "{granted:?}");
    for missing in LEAN {
        restrict(fixture, without(&LEAN, missing))?;
        fixture.start()?;
        let said = fixture.take_agent()?.fails()?;
        ensure!(said.contains(&format!("CAP_{missing}")), "without {missing}:\n{said}");
    }
    Ok(())
}

/// Where maps are made anew, the process beside the agent ends, to be started again, instead of going by the old ones.
fn replaced(fixture: &Fixture) -> Result<()> {
    let mut beside = Agent::start_beside(&fixture.node, &fixture.setup())?;
    beside.says(&["closing connected sockets whose endpoint is removed"])?;
    fixture.kill()?;
    clean(fixture)?;
    let said = beside.fails()?;
    ensure!(said.contains("the maps were replaced"), "{said}");
    // It waits for an agent.
    let mut beside = Agent::start_beside(&fixture.node, &fixture.setup())?;
    beside.says(&["waiting for an agent of this version"])?;
    fixture.begin()?;
    beside.says(&["closing connected sockets whose endpoint is removed"])
}

/// The agent from nothing, a takeover, and the reading commands, behind the profile that the project ships.
fn confined(fixture: &Fixture) -> Result<()> {
    fixture.kill()?;
    clean(fixture)?;
    let filter = agent::shipped_profile()?;
    restrict(fixture, LEAN.into_iter())?;
    fixture.setup().seccomp = Some(filter.clone());
    for _ in 0..2 {
        fixture.begin()?;
        fixture.change(stale_sockets::NAMES, &["0/5353"])?;
        for words in [&["service", "list"][..], &["backend", "list"], &["flow", "list"], &["map", "list"]] {
            let output = agent::confined(&fixture.node, words, &fixture.bpffs(), &filter)?;
            ensure!(output.status.success(), "{words:?}: {output:?}");
        }
        for words in [&["status"][..], &["monitor", "--timeout", "1s"]] {
            // It may find something amiss, and it has to come to an end by itself.
            let output = agent::confined(&fixture.node, words, &fixture.bpffs(), &filter)?;
            ensure!(output.status.code().is_some(), "{words:?}: {output:?}");
        }
        fixture.kill()?;
    }
    // A call that is not on the list ends the program: mount(2).
    let elsewhere = fixture.bpffs().with_file_name("elsewhere");
    let output = agent::confined(&fixture.node, &["run", "--init-only"], &elsewhere, &filter)?;
    ensure!(output.status.code().is_none(), "{output:?}");
    Ok(())
}
