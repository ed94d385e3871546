//! The agent with the capabilities that the `DaemonSet` gives it, and without each of them.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use super::{Case, stranded};
use crate::agent;
use crate::lab::Lab;

pub const CASES: &[Case] = &[
    Case { name: "capabilities::those_of_the_daemon_set_are_enough", wish: stranded::WISH, run: enough },
    Case { name: "capabilities::each_of_them_is_needed", wish: stranded::WISH, run: needed },
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

/// What the main container of the `DaemonSet` may do, by name.
fn granted() -> Result<Vec<String>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/manifests/ballast.yaml");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    for document in text.split("\n---\n") {
        let object: Value = serde_saphyr::from_str(document)?;
        if object["kind"] == "DaemonSet" {
            let context = &object["spec"]["template"]["spec"]["containers"][0]["securityContext"];
            ensure!(
                context["capabilities"]["drop"] == serde_json::json!(["ALL"])
                    && context["privileged"] == false
            );
            let names = context["capabilities"]["add"].as_array().context("no capabilities")?;
            return Ok(names.iter().filter_map(Value::as_str).map(str::to_owned).collect());
        }
    }
    bail!("no DaemonSet in the manifests")
}

/// What the chart gives an agent that ends no sockets (`endUdpSockets: false`).
pub const LEAN: [&str; 3] = ["BPF", "NET_ADMIN", "PERFMON"];

/// The next agent has these alone. What takes more, the mount of the bpffs, an agent before has done, as the init
/// container does.
pub fn restrict<'a>(lab: &Lab, names: impl Iterator<Item = &'a str>) -> Result<()> {
    let numbers = names.map(number).collect::<Result<_>>()?;
    lab.setup().capabilities = Some(numbers);
    Ok(())
}

fn without<'a>(all: &'a [&'a str], missing: &'a str) -> impl Iterator<Item = &'a str> {
    all.iter().copied().filter(move |name| *name != missing)
}

/// Nothing of an earlier agent is there: all is loaded and attached anew.
fn clean(lab: &Lab) -> Result<()> {
    let cgroup = lab.cgroup().display().to_string();
    let cleaned = agent::command(&lab.node, &["cleanup", "--cgroup-root", &cgroup], &lab.bpffs())?;
    ensure!(cleaned.status.success(), "{cleaned:?}");
    Ok(())
}

fn enough(lab: &Lab) -> Result<()> {
    lab.kill()?;
    let granted = granted()?;
    restrict(lab, granted.iter().map(String::as_str))?;
    // To take over, and to begin from nothing.
    for from_nothing in [false, true] {
        if from_nothing {
            clean(lab)?;
        }
        lab.begin()?;
        lab.change(stranded::NAMES, &["0/5353"])?;
        stranded::moves(lab)?;
        lab.kill()?;
    }
    restrict(lab, LEAN.into_iter())?;
    clean(lab)?;
    lab.begin()?;
    lab.change(stranded::NAMES, &["0/5353"])
}

fn needed(lab: &Lab) -> Result<()> {
    lab.kill()?;
    let granted = granted()?;
    let granted: Vec<_> = granted.iter().map(String::as_str).collect();
    ensure!(granted == ["NET_ADMIN", "SYS_ADMIN", "SYS_PTRACE"], "{granted:?}");
    let fails = |set: &[&str], missing: &str| {
        restrict(lab, without(set, missing))?;
        lab.start()?;
        let said = lab.take_agent()?.fails()?;
        ensure!(said.contains(&format!("CAP_{missing}")), "without {missing}:\n{said}");
        Ok(())
    };
    LEAN.into_iter().try_for_each(|missing| fails(&LEAN, missing))?;
    fails(&granted, "NET_ADMIN")?;
    // Without these two it serves, and does not reach the sockets of pods.
    for set in [["NET_ADMIN", "SYS_ADMIN", "BPF", "PERFMON"], ["NET_ADMIN", "SYS_PTRACE", "BPF", "PERFMON"]] {
        restrict(lab, set.into_iter())?;
        lab.begin()?;
        stranded::stay(lab)?;
        lab.kill()?;
    }
    Ok(())
}
