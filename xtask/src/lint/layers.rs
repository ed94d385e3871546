//! Checks that dependencies go one way: between our crates, and between the modules of `proxy-user`.
//!
//! The compiler does not check this inside a crate; the tables here do. A new module needs a line, which decides its layer.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde::Deserialize;

use super::finding::Finding;
use super::paths::Unit;
use crate::exec::Cmd;
use crate::workspace::Workspace;

/// Our crates, and which of them each may depend on.
const CRATES: [(&str, &[&str]); 4] = [
    ("proxy-common", &[]),
    ("proxy-ebpf", &["proxy-common"]),
    ("proxy-user", &["proxy-common"]),
    ("xtask", &["proxy-common"]),
];

/// The modules of `proxy-user`, and which of them each may use.
const MODULES: [(&str, &[&str]); 24] = [
    ("model", &[]),
    ("spans", &[]),
    ("otlp", &["spans"]),
    ("api", &["model", "spans"]),
    ("source", &["api", "model"]),
    ("plan", &["model"]),
    ("maps", &["model"]),
    ("rates", &["maps"]),
    ("sync", &["maps", "model", "plan", "spans"]),
    ("audit", &["api", "maps", "model", "spans", "sync"]),
    ("host", &["model"]),
    ("programs", &["host", "maps"]),
    ("connections", &["maps", "programs", "sync"]),
    ("sockets", &["host", "maps", "model", "programs", "sync"]),
    ("metrics", &["audit", "maps", "model", "otlp", "plan", "programs", "sync"]),
    ("page", &["cli", "config", "maps", "rates"]),
    ("http", &["metrics", "model", "page", "plan", "sync"]),
    ("config", &["host", "model", "otlp", "programs"]),
    ("cli", &["config", "host", "maps", "model", "otlp", "programs"]),
    ("kubectl", &["cli", "model", "page"]),
    ("telemetry", &["config", "otlp", "spans"]),
    ("top", &["cli", "config", "maps", "rates"]),
    (
        "app",
        &[
            "api",
            "audit",
            "cli",
            "config",
            "connections",
            "host",
            "http",
            "maps",
            "metrics",
            "model",
            "otlp",
            "page",
            "plan",
            "programs",
            "sockets",
            "source",
            "spans",
            "sync",
            "telemetry",
        ],
    ),
    ("main", &["app", "cli", "config", "host", "kubectl", "otlp", "programs", "telemetry", "top"]),
];

/// Crates that only some modules may use, so that the others stay testable without them.
const RESTRICTED: [(&str, &[&str]); 14] = [
    ("anyhow", &["app", "main"]),
    ("aya", &["maps", "programs"]),
    ("aya_log", &["programs"]),
    ("aya_obj", &["maps", "programs"]),
    ("axum", &["http", "kubectl", "page"]),
    ("clap", &["cli", "kubectl", "main"]),
    ("hyper", &["api", "http", "kubectl", "otlp"]),
    ("k8s_openapi", &["api", "kubectl", "source"]),
    ("kube", &["api", "app", "kubectl", "otlp", "source"]),
    ("notify", &["source"]),
    ("netlink_packet_sock_diag", &["host"]),
    ("ratatui", &["top"]),
    ("rtnetlink", &["host", "programs"]),
    (
        "tokio",
        &[
            "api",
            "app",
            "audit",
            "connections",
            "host",
            "http",
            "kubectl",
            "main",
            "metrics",
            "otlp",
            "page",
            "programs",
            "sockets",
            "source",
            "sync",
        ],
    ),
];

/// Checks the dependencies that each of our crates declares; dependencies of tests do not count.
pub(super) fn crates(workspace: &Workspace) -> Result<Vec<Finding>> {
    let metadata =
        Cmd::cargo().args(["metadata", "--no-deps", "--format-version=1"]).dir(workspace.root()).read()?;
    crate_findings(&metadata)
}

fn crate_findings(metadata: &str) -> Result<Vec<Finding>> {
    #[derive(Deserialize)]
    struct Metadata {
        packages: Vec<Package>,
    }
    #[derive(Deserialize)]
    struct Package {
        name: String,
        dependencies: Vec<Dependency>,
    }
    #[derive(Deserialize)]
    struct Dependency {
        name: String,
        kind: Option<String>,
    }
    let metadata: Metadata =
        serde_json::from_str(metadata).context("cargo metadata printed something unexpected")?;
    let table = BTreeMap::from(CRATES);
    let mut findings = Vec::new();
    for package in metadata.packages {
        let mut find = |what| {
            findings.push(Finding { file: Path::new(&package.name).join("Cargo.toml"), line: 0, what });
        };
        let Some(allowed) = table.get(package.name.as_str()) else {
            find("this crate has no line in the table of layers".to_owned());
            continue;
        };
        for dependency in package.dependencies {
            let name = dependency.name.as_str();
            if dependency.kind.as_deref() != Some("dev")
                && table.contains_key(name)
                && !allowed.contains(&name)
            {
                find(format!("{} may not depend on {name}", package.name));
            }
        }
    }
    Ok(findings)
}

/// Checks the modules and crates that a file of `proxy-user` uses.
pub(super) fn modules(unit: &Unit<'_>) -> Vec<Finding> {
    let Some(top) = unit.module.first().filter(|_| unit.package == "proxy-user") else { return Vec::new() };
    let find = |line, what| Finding { file: unit.path.to_owned(), line, what };
    let Some((_, allowed)) = MODULES.iter().find(|(name, _)| name == top) else {
        return vec![find(0, format!("module `{top}` has no line in the table of layers"))];
    };
    let mut findings = Vec::new();
    for used in &unit.code.used {
        if let Some(path) = used.absolute(&unit.module, "proxy_user") {
            let Some(name) = path.first().filter(|name| *name != top) else { continue };
            let known = MODULES.iter().any(|(module, _)| module == name);
            if known && !allowed.contains(&name.as_str()) {
                findings.push(find(used.line, format!("`{top}` may not use `{name}`")));
            }
        } else {
            let name = &used.names[0];
            let rule = RESTRICTED.iter().find(|(krate, _)| krate == name);
            if rule.is_some_and(|(_, modules)| !modules.contains(&top.as_str())) {
                findings.push(find(used.line, format!("`{top}` may not use the crate {name}")));
            }
        }
    }
    // A `use` group may name a module twice.
    findings.dedup();
    findings
}

#[cfg(test)]
mod tests;
