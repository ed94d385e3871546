//! Evaluates the facts: a pure function that returns a line for each check.

mod environment;
mod installed;
mod kernel;
mod line;
mod network;
mod others;

use line::some;
pub use line::{CheckLine, CheckResult};

use super::facts::{CheckFacts, Installed, Others};
use installed::{MAPS, PROBLEMS};

/// The names of all checks, in the order of the lines.
pub const CHECKS: &[&str] = &[
    "kernel-version",
    "kernel-bpf",
    "kernel-options",
    "kernel-preemption",
    "kernel-features",
    "kernel-btf",
    "bpf-jit",
    "cgroup2",
    "bpffs",
    "capabilities",
    "ip-forward",
    "port-ranges",
    "mtu",
    "uplink",
    "cni",
    "kube-proxy",
    "ipvs",
    "leftovers",
    "firewall",
    "firewall-services",
    "cilium",
    "calico",
    "api-server",
    "agent",
    "problems",
    "socket-programs",
    "device-programs",
    "pins",
    "maps",
    "map-usage",
    "agent-version",
    "sync",
    "audit",
];

/// Returns all lines, in groups.
pub fn judge(facts: &CheckFacts) -> Vec<CheckLine> {
    let pre = facts.installed.is_none();
    let mut lines = Vec::new();
    let mut add = |group: &'static str, of_group: Vec<CheckLine>| {
        lines.extend(of_group.into_iter().map(|line| CheckLine { group, ..line }));
    };
    add("kernel", kernel::judge(&facts.kernel));
    add("node", environment::judge(&facts.environment, pre));
    add("network", network::judge(&facts.network));
    add("other software", others::judge(&facts.others, pre));
    add("api server", vec![others::api(&facts.api)]);
    if let Some(installed) = &facts.installed {
        add("agent", installed::judge(installed));
    }
    lines
}

/// Returns what `ballast status` reports of the same facts, in sentences: everything that does not pass.
pub fn problems(installed: &Installed, others: &Others) -> Vec<String> {
    let mut lines = installed::judge(installed);
    if installed.maps.is_err() {
        // Without maps, nothing can be attached: one sentence is enough.
        lines.retain(|line| ["agent", PROBLEMS, MAPS].contains(&line.check));
    }
    lines.push(others::kube_proxy(others, false));
    lines.retain(|line| line.outcome != CheckResult::Pass);
    let sentences = lines.into_iter().flat_map(|line| match line.check {
        PROBLEMS => installed.report.problems.clone(),
        // The error says what to do.
        MAPS if installed.maps.is_err() => vec![line.seen],
        _ => vec![format!("{}; {}", line.seen, line.advice)],
    });
    sentences.collect()
}

#[cfg(test)]
mod tests;
