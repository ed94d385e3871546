//! The agent, and the process beside it that ends UDP sockets, with the capabilities that their `DaemonSet`s give them,
//! and without each of these.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use super::{Case, stale_sockets};
use crate::agent::{self, Agent};
use crate::fixture::Fixture;

pub const CASES: &[Case] = &[
    Case {
        name: "capabilities::agent_works_with_those_of_the_daemon_set",
        wish: stale_sockets::WISH,
        run: enough,
    },
    Case {
        name: "capabilities::without_one_of_them_the_agent_fails",
        wish: stale_sockets::WISH,
        run: needed,
    },
    Case {
        name: "capabilities::pod_that_starts_while_no_agent_runs_has_connected_udp",
        wish: stale_sockets::WISH,
        run: unattended,
    },
    Case {
        name: "capabilities::agent_works_under_the_seccomp_profile",
        wish: stale_sockets::WISH,
        run: confined,
    },
    Case {
        name: "capabilities::helper_ends_if_the_maps_are_replaced",
        wish: stale_sockets::WISH,
        run: replaced,
    },
];

/// Returns the number of a capability (`include/uapi/linux/capability.h`).
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

/// Returns the capabilities that a `DaemonSet` gives its container, by name.
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

/// The agent's manifest.
const AGENT: &str = "ballast.yaml";
/// The manifest of the process that ends UDP sockets (chart: `endUdpSockets`).
const END_UDP_SOCKETS: &str = "end-udp-sockets/end-udp-sockets.yaml";

/// The capabilities that the chart gives the agent.
pub const AGENT_CAPABILITIES: [&str; 3] = ["BPF", "NET_ADMIN", "PERFMON"];

/// Limits the next agent to these capabilities. The mount of the bpffs takes more: an earlier agent has made it, as the
/// init container does.
pub fn restrict<'a>(fixture: &Fixture, names: impl Iterator<Item = &'a str>) -> Result<()> {
    let numbers = names.map(number).collect::<Result<_>>()?;
    fixture.setup().capabilities = Some(numbers);
    Ok(())
}

fn without<'a>(all: &'a [&'a str], missing: &'a str) -> impl Iterator<Item = &'a str> {
    all.iter().copied().filter(move |name| *name != missing)
}

/// Removes everything of an earlier agent, so that all is loaded and attached anew.
fn clean(fixture: &Fixture) -> Result<()> {
    let cgroup = fixture.cgroup().display().to_string();
    let cleaned = agent::command(&fixture.node, &["cleanup", "--cgroup-root", &cgroup], &fixture.bpffs())?;
    ensure!(cleaned.status.success(), "{cleaned:?}");
    Ok(())
}

fn enough(fixture: &Fixture) -> Result<()> {
    fixture.kill()?;
    let (agent, beside) = (granted(AGENT)?, granted(END_UDP_SOCKETS)?);
    // The first round is a takeover, the second round begins from nothing.
    for from_nothing in [false, true] {
        if from_nothing {
            clean(fixture)?;
        }
        restrict(fixture, agent.iter().map(String::as_str))?;
        fixture.begin()?;
        stale_sockets::follow(fixture)?;
        restrict(fixture, beside.iter().map(String::as_str))?;
        let mut beside = Agent::start_beside(&fixture.node, &fixture.setup())?;
        beside.says(&["closing connected sockets whose endpoint is removed"])?;
        stale_sockets::are_left_to_packets(fixture, false)?;
        fixture.change(stale_sockets::NAMES, &["0/5353"])?;
        stale_sockets::moves(fixture)?;
        beside.kill()?;
        fixture.kill()?;
    }
    Ok(())
}

fn unattended(fixture: &Fixture) -> Result<()> {
    fixture.kill()?;
    restrict(fixture, AGENT_CAPABILITIES.into_iter())?;
    fixture.begin()?;
    stale_sockets::unattended(fixture)
}

fn needed(fixture: &Fixture) -> Result<()> {
    let beside = granted(END_UDP_SOCKETS)?;
    ensure!(beside == ["NET_ADMIN", "SYS_ADMIN", "SYS_PTRACE"], "{beside:?}");
    let beside: Vec<_> = beside.iter().map(String::as_str).collect();
    // Without one of these two, the process does not reach the sockets of pods.
    for missing in ["SYS_ADMIN", "SYS_PTRACE"] {
        restrict(fixture, without(&beside, missing).chain(["BPF", "PERFMON"]))?;
        fixture.kill()?;
        fixture.begin()?;
        let mut beside = Agent::start_beside(&fixture.node, &fixture.setup())?;
        beside.says(&[&format!("grant CAP_{missing}")])?;
        stale_sockets::follow(fixture)?;
        beside.kill()?;
    }
    fixture.kill()?;
    let mut granted = granted(AGENT)?;
    granted.sort();
    ensure!(granted == AGENT_CAPABILITIES, "{granted:?}");
    for missing in AGENT_CAPABILITIES {
        restrict(fixture, without(&AGENT_CAPABILITIES, missing))?;
        fixture.start()?;
        let said = fixture.take_agent()?.fails()?;
        ensure!(said.contains(&format!("CAP_{missing}")), "without {missing}:\n{said}");
    }
    Ok(())
}

/// Checks that the process beside the agent ends when the maps are replaced, so that it is started again instead of
/// using the old maps.
fn replaced(fixture: &Fixture) -> Result<()> {
    let mut beside = Agent::start_beside(&fixture.node, &fixture.setup())?;
    beside.says(&["closing connected sockets whose endpoint is removed"])?;
    fixture.kill()?;
    clean(fixture)?;
    let said = beside.fails()?;
    ensure!(said.contains("the maps were replaced"), "{said}");
    // The new process waits for an agent.
    let mut beside = Agent::start_beside(&fixture.node, &fixture.setup())?;
    beside.says(&["waiting for an agent of this version"])?;
    fixture.begin()?;
    beside.says(&["closing connected sockets whose endpoint is removed"])
}

/// Runs the agent from nothing, a takeover, and the reading commands, behind the profile that the project ships.
fn confined(fixture: &Fixture) -> Result<()> {
    fixture.kill()?;
    clean(fixture)?;
    let filter = agent::shipped_profile()?;
    restrict(fixture, AGENT_CAPABILITIES.into_iter())?;
    fixture.setup().seccomp = Some(filter.clone());
    for _ in 0..2 {
        fixture.begin()?;
        fixture.change(stale_sockets::NAMES, &["0/5353"])?;
        for words in [&["service", "list"][..], &["backend", "list"], &["flow", "list"], &["map", "list"]] {
            let output = agent::confined(&fixture.node, words, &fixture.bpffs(), &filter)?;
            ensure!(output.status.success(), "{words:?}: {output:?}");
        }
        for words in [&["status"][..], &["monitor", "--timeout", "1s"]] {
            // The command may find a problem, but it has to exit by itself.
            let output = agent::confined(&fixture.node, words, &fixture.bpffs(), &filter)?;
            ensure!(output.status.code().is_some(), "{words:?}: {output:?}");
        }
        fixture.kill()?;
    }
    // A system call that is not in the profile ends the program: mount(2).
    let elsewhere = fixture.bpffs().with_file_name("elsewhere");
    let output = agent::confined(&fixture.node, &["run", "--init-only"], &elsewhere, &filter)?;
    ensure!(output.status.code().is_none(), "{output:?}");
    Ok(())
}
