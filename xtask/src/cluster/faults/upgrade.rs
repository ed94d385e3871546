//! Downgrade from this version to the one before, whose maps have another layout, and upgrade back, twice: as a process of
//! each node, or with Helm and the charts of both.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};

use super::agents::Agents;
use super::testbed::Testbed;
use crate::cluster::plan::Node;
use crate::cluster::{Proxy, Workdir, deployed, each, node};
use crate::previous::{self, Previous};
use crate::workspace::Workspace;
use crate::{log, signal};

/// Name of this version's program on the nodes, whichever version runs.
const THIS: &str = "ballast-this";
/// Time limit of each step of a downgrade.
const PATIENCE: Duration = Duration::from_mins(3);
/// Duration of the traffic between two changes.
const BETWEEN: Duration = Duration::from_secs(3);

/// Builds and loads the version before, before clients run: builds take minutes.
pub(super) fn prepare(testbed: &Testbed<'_>) -> Result<Previous> {
    let previous = previous::image(&Workspace::find()?)?;
    if testbed.agents == Agents::Pods {
        let nodes = testbed.workdir.nodes();
        each(&nodes, |on| node::load(testbed.workdir, on, &previous.archive))?;
    }
    let programs = testbed.workdir.programs();
    std::fs::copy(programs.join("ballast"), programs.join(THIS)).context("cannot copy the agent")?;
    Ok(previous)
}

/// Downgrades and upgrades twice; with Helm, the second downgrade is a rollback.
pub(super) fn there_and_back(testbed: &Testbed<'_>, previous: &Previous) -> Result<()> {
    for round in 0..2 {
        downgrade(testbed, previous, round > 0).with_context(|| format!("downgrade {round}"))?;
        signal::pause(BETWEEN)?;
        upgrade(testbed).with_context(|| format!("upgrade {round}"))?;
        signal::pause(BETWEEN)?;
    }
    Ok(())
}

fn downgrade(testbed: &Testbed<'_>, previous: &Previous, roll_back: bool) -> Result<()> {
    let workdir = testbed.workdir;
    let nodes = workdir.nodes();
    if testbed.agents == Agents::Pods {
        each(&nodes, |on| make_ready(workdir, on))?;
        if roll_back {
            deployed::roll_back(&Workspace::find()?, workdir)?;
        } else {
            let tag = format!("image.tag={}", previous::TAG);
            deployed::upgrade_to(&Workspace::find()?, workdir, &previous.chart, &["--set", &tag])?;
            deployed::rolled_out(workdir, deployed::NAME)?;
        }
        each(&nodes, |on| finished(workdir, on))?;
    } else {
        take(workdir, &previous.program)?;
        for on in nodes {
            signal::check()?;
            make_ready(workdir, on)?;
            workdir.node(on).stop("ballast", libc::SIGTERM)?;
            Proxy::BallastHost.start_on(workdir, on)?;
            finished(workdir, on)?;
            told(&format!("the version before runs on {on}"));
        }
    }
    told("the version before runs on every node");
    Ok(())
}

fn upgrade(testbed: &Testbed<'_>) -> Result<()> {
    let workdir = testbed.workdir;
    if testbed.agents == Agents::Pods {
        deployed::upgrade(&Workspace::find()?, workdir, &[])?;
    } else {
        take(workdir, &workdir.programs().join(THIS))?;
        for on in workdir.nodes() {
            signal::check()?;
            workdir.node(on).stop("ballast", libc::SIGTERM)?;
            Proxy::BallastHost.start_on(workdir, on)?;
            told(&format!("this version runs on {on}"));
        }
    }
    for on in workdir.nodes() {
        signal::wait_for(
            &format!("the maps of the version before to go from {on}"),
            super::testbed::SOON,
            || {
                let left = workdir.node(on).command(&["test", "-e", "/sys/fs/bpf/ballast/v2"]);
                Ok((!left.succeeds()).then_some(()))
            },
        )?;
    }
    told("this version runs on every node");
    Ok(())
}

/// Logs an event with the time, which the lines of failures also have.
fn told(what: &str) {
    log::line(format_args!("    {:.3} {what}", jiff::Timestamp::now()));
}

/// Replaces the file of `ballast`; a running process continues with the old one.
fn take(workdir: &Workdir, program: &Path) -> Result<()> {
    let unfinished = workdir.programs().join("ballast-unfinished");
    std::fs::copy(program, &unfinished)
        .and_then(|_| std::fs::rename(&unfinished, workdir.programs().join("ballast")))
        .context("cannot replace the agent's program")
}

/// Starts `ballast downgrade` on a node, and waits until the maps for the version before exist.
fn make_ready(workdir: &Workdir, on: Node) -> Result<()> {
    let machine = workdir.node(on);
    machine.run("downgrade", &[THIS, "downgrade", "--wait", "3m"])?;
    signal::wait_for(&format!("the maps of the version before on {on}"), PATIENCE, || {
        Ok(machine.command(&["test", "-e", "/sys/fs/bpf/ballast/v2/config"]).succeeds().then_some(()))
    })
}

/// Waits until the programs of the version before are attached everywhere, and this version's are gone.
fn finished(workdir: &Workdir, on: Node) -> Result<()> {
    let machine = workdir.node(on);
    let log = machine.log("downgrade");
    signal::wait_for(&format!("the downgrade; its log is {}", log.display()), PATIENCE, || {
        Ok((!machine.is_running("downgrade")).then_some(()))
    })
}
