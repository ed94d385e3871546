//! Dependencies go one way: between our crates, and between the modules of `proxy-user`.
//!
//! Inside a crate the compiler does not hold us to it; this table does. A new module needs a line here, and the
//! line is where its place is decided.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde::Deserialize;

use super::Finding;
use super::source::SourceFile;
use crate::exec::Cmd;
use crate::workspace::Workspace;

/// Our crates, and those of ours that each may depend on.
const CRATES: [(&str, &[&str]); 4] = [
    ("proxy-common", &[]),
    ("proxy-ebpf", &["proxy-common"]),
    ("proxy-user", &["proxy-common"]),
    ("xtask", &["proxy-common"]),
];

/// The modules of `proxy-user`, and those of ours that each may use.
const MODULES: [(&str, &[&str]); 21] = [
    ("model", &[]),
    ("api", &["model"]),
    ("source", &["api", "model"]),
    ("plan", &["model"]),
    ("maps", &["model"]),
    ("rates", &["maps"]),
    ("sync", &["maps", "model", "plan"]),
    ("audit", &["api", "maps", "model", "sync"]),
    ("host", &["model"]),
    ("programs", &["host", "maps"]),
    ("connections", &["maps", "programs", "sync"]),
    ("sockets", &["host", "maps", "model", "programs", "sync"]),
    ("metrics", &["audit", "maps", "model", "programs", "sync"]),
    ("http", &["metrics", "model", "sync"]),
    ("config", &["host", "model", "programs"]),
    ("cli", &["config", "host", "maps", "model", "programs"]),
    ("kubectl", &["cli", "model"]),
    ("telemetry", &["config"]),
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
            "plan",
            "programs",
            "sockets",
            "source",
            "sync",
            "telemetry",
        ],
    ),
    ("main", &["app", "cli", "config", "host", "kubectl", "programs", "telemetry", "top"]),
];

/// Crates that only some modules may see, so that the others stay testable without them.
const RESTRICTED: [(&str, &[&str]); 13] = [
    ("anyhow", &["app", "main"]),
    ("aya", &["maps", "programs"]),
    ("aya_log", &["programs"]),
    ("aya_obj", &["maps", "programs"]),
    ("axum", &["http"]),
    ("clap", &["cli", "kubectl", "main"]),
    ("k8s_openapi", &["api", "kubectl", "source"]),
    ("kube", &["api", "app", "kubectl", "source"]),
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
            "programs",
            "sockets",
            "source",
            "sync",
        ],
    ),
];

/// Looks at what each of our crates declares; what only its tests need does not count.
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

/// Looks at what a file of `proxy-user` uses.
pub(super) fn modules(file: &SourceFile) -> Vec<Finding> {
    let Some(place) = Place::of(file) else { return Vec::new() };
    let find = |line, what| Finding { file: file.path.clone(), line, what };
    let Some((_, allowed)) = MODULES.iter().find(|(name, _)| *name == place.module) else {
        return vec![find(0, format!("module `{}` has no line in the table of layers", place.module))];
    };
    let mut findings = Vec::new();
    for Use { line, path } in uses(&file.code().join("\n"), place.depth) {
        match path {
            UsePath::Own(name) => {
                let known = MODULES.iter().any(|(module, _)| *module == name);
                if known && name != place.module && !allowed.contains(&name.as_str()) {
                    findings.push(find(line, format!("`{}` may not use `{name}`", place.module)));
                }
            }
            UsePath::Foreign(name) => {
                let rule = RESTRICTED.iter().find(|(krate, _)| *krate == name);
                if rule.is_some_and(|(_, modules)| !modules.contains(&place.module.as_str())) {
                    findings.push(find(line, format!("`{}` may not use the crate {name}", place.module)));
                }
            }
        }
    }
    findings
}

/// Where a file stands in the crate.
struct Place {
    module: String,
    /// How many `super::` lead to the crate's root.
    depth: usize,
}

impl Place {
    /// `None` for what the table is not about: other crates, tests, and `lib.rs`, which only lists modules.
    fn of(file: &SourceFile) -> Option<Self> {
        if !file.is_rust() || file.is_test() {
            return None;
        }
        let inside = file.path.strip_prefix("proxy-user/src").ok()?;
        let mut names: Vec<_> =
            inside.with_extension("").iter().filter_map(|name| name.to_str().map(str::to_owned)).collect();
        names.pop_if(|name| name == "mod");
        let module = names.first().filter(|name| *name != "lib")?.clone();
        Some(Self { module, depth: names.len() })
    }
}

#[derive(Debug, PartialEq, Eq)]
enum UsePath {
    /// A module of our crate.
    Own(String),
    /// The first name of another path: maybe a crate.
    Foreign(String),
}

#[derive(Debug, PartialEq, Eq)]
struct Use {
    line: usize,
    path: UsePath,
}

/// Every path in the code that starts at our crate's root, and every other path's first name.
fn uses(code: &str, depth: usize) -> Vec<Use> {
    let tokens = tokens(code);
    let mut uses = Vec::new();
    let word = |at: usize| tokens.get(at).map_or("", |token| token.1);
    let mut at = 0;
    while at < tokens.len() {
        let (line, token) = tokens[at];
        let starts_path = word(at + 1) == "::" && (at == 0 || word(at - 1) != "::");
        if !starts_path {
            at += 1;
            continue;
        }
        let supers = (0..tokens.len())
            .take_while(|step| word(at + 2 * step) == "super" && word(at + 2 * step + 1) == "::")
            .count();
        let root = match token {
            "crate" | "proxy_user" => Some(at + 2),
            "super" if supers >= depth => Some(at + 2 * supers),
            _ => None,
        };
        match root {
            Some(next) if word(next) == "{" => {
                for name in group(&tokens, next) {
                    uses.push(Use { line, path: UsePath::Own(name) });
                }
                at = next + 1;
            }
            Some(next) => {
                uses.push(Use { line, path: UsePath::Own(word(next).to_owned()) });
                at = next + 1;
            }
            None => {
                uses.push(Use { line, path: UsePath::Foreign(token.to_owned()) });
                at += 2;
            }
        }
    }
    uses
}

/// The first names in `{a::b, c::{d, e}}`, which opens at `open`: `a` and `c`.
fn group(tokens: &[(usize, &str)], open: usize) -> Vec<String> {
    let mut names = Vec::new();
    let mut depth = 0;
    for window in tokens[open..].windows(2) {
        let (here, next) = (window[0].1, window[1].1);
        match here {
            "{" => depth += 1,
            "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            break;
        }
        if depth == 1 && matches!(here, "{" | ",") && next != "}" {
            names.push(next.to_owned());
        }
    }
    names
}

/// Words, `::` and single signs, each with its line from 1.
fn tokens(code: &str) -> Vec<(usize, &str)> {
    let mut tokens = Vec::new();
    for (number, line) in code.lines().enumerate() {
        let mut rest = line;
        while let Some(first) = rest.chars().next() {
            let word = rest.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(rest.len());
            let length = match word {
                0 if rest.starts_with("::") => 2,
                0 => first.len_utf8(),
                word => word,
            };
            if !first.is_whitespace() {
                tokens.push((number + 1, &rest[..length]));
            }
            rest = &rest[length..];
        }
    }
    tokens
}

#[cfg(test)]
mod tests;
