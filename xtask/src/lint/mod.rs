//! `cargo xtask lint`: checks the format, clippy on the host and on the BPF target, and the project's own rules.

mod commands;
pub(crate) mod links;
mod scripts;
mod source;
mod words;

use std::path::Path;
#[cfg(test)]
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};
use clap::Command;

use source::Finding;

use crate::exec::{self, Cmd};
use crate::host::names_in;
use crate::setup::{self, Need};
use crate::toolchain::{Compiler, Toolchain};
use crate::workspace::Workspace;
use crate::{apt, chart, docs, go, gotools, log};

/// The clippy driver of the distribution's rustc, and its package.
const DISTRIBUTION_CLIPPY: (&str, &str) = ("/usr/bin/clippy-driver", "rust-web-clippy");

/// How much to check.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Args {
    /// Check only the project's own rules; needs no compiler, takes seconds
    #[arg(long)]
    pub rules_only: bool,
}

/// Runs all checks; the command fails if any check fails. `xtask` is the parser of `cargo xtask`.
pub fn run(args: &Args, xtask: Command) -> Result<()> {
    let workspace = Workspace::find()?;
    let mut failed = Vec::new();
    let mut check = |name: &'static str, done: Result<()>| {
        if let Err(error) = done {
            log::line(format_args!("    {error:#}"));
            failed.push(name);
        }
    };
    check("rules", log::timed("words, links, commands", || rules(&workspace, xtask)));
    check("docs", docs::check(&workspace));
    if !args.rules_only {
        check("fmt", log::timed("cargo fmt --check", || fmt(&workspace)));
        check("clippy", log::timed("cargo clippy", || clippy(&workspace)));
        check("clippy on BPF", log::timed("clippy on the BPF target", || bpf(&workspace)));
        check("deployment", deployment(&workspace));
        check(
            "scripts",
            log::timed("scripts and units", || scripts::check(&workspace, &source::files(workspace.root())?)),
        );
    }
    if !failed.is_empty() {
        bail!("lint: {}", failed.join(", "));
    }
    log::line("lint: clean");
    Ok(())
}

fn fmt(workspace: &Workspace) -> Result<()> {
    component("rustfmt", "fmt")?;
    Cmd::cargo().args(["fmt", "--all", "--check"]).dir(workspace.root()).run()
}

fn clippy(workspace: &Workspace) -> Result<()> {
    component("clippy", "clippy")?;
    Cmd::cargo()
        .args(["clippy", "--workspace", "--all-targets", "--", "-Dwarnings"])
        .dir(workspace.root())
        .run()
}

/// Installs a component of rustup if cargo lacks its subcommand, as in a minimal toolchain.
fn component(name: &str, subcommand: &str) -> Result<()> {
    if Cmd::cargo().args([subcommand, "--version"]).succeeds() {
        return Ok(());
    }
    Cmd::new("rustup").args(["component", "add", name]).run()
}

fn bpf(workspace: &Workspace) -> Result<()> {
    let toolchain = setup::toolchain(Need::Bpf)?;
    let target_dir = workspace.target().join("bpf-lint");
    let packages = ["-p", "proxy-ebpf", "-p", "proxy-common", "--lib", "--bins"];
    let cargo = |subcommand| toolchain.cargo(subcommand, &target_dir, &["-Dwarnings"]).dir(workspace.root());
    if !has_clippy(&toolchain) {
        log::line("    no clippy for this compiler: its own warnings instead");
        return cargo("check").args(packages).run();
    }
    match toolchain.compiler() {
        Compiler::Nightly(_) => cargo("clippy").args(packages).run(),
        // The same as `cargo clippy`, but with the clippy driver of this rustc.
        Compiler::Distribution(_) => {
            cargo("check").args(packages).env("RUSTC_WORKSPACE_WRAPPER", DISTRIBUTION_CLIPPY.0).run()
        }
    }
}

/// Whether the compiler has clippy; tries to install it if needed.
fn has_clippy(toolchain: &Toolchain) -> bool {
    match toolchain.compiler() {
        Compiler::Nightly(name) => {
            Cmd::new("rustup").args(["component", "add", "--toolchain", name, "clippy"]).succeeds()
        }
        Compiler::Distribution(_) => {
            let (driver, package) = DISTRIBUTION_CLIPPY;
            Path::new(driver).exists()
                || (apt::exists() && exec::is_root() && apt::install(&[package]).is_ok())
        }
    }
}

/// Checks the chart and the workflows, with tools that are built from Go modules, once.
fn deployment(workspace: &Workspace) -> Result<()> {
    if let Err(error) = go::find_or_install()
        && !exec::in_ci()
    {
        log::line(format_args!("    the chart and the workflows are not checked: {error:#}"));
        return Ok(());
    }
    // Built here, so that the times below do not include the build.
    let tools = gotools::build(workspace, &[gotools::ACTIONLINT, gotools::HELM])?;
    log::timed("chart and manifests", || chart::check(workspace))?;
    let actionlint = tools.first().context("actionlint was not built")?;
    log::timed("workflows", || {
        // Names all files: without names, actionlint looks for a git checkout, and a source archive is none.
        let workflows = workspace.root().join(".github/workflows");
        let names = names_in(&workflows);
        Cmd::new(actionlint)
            .args(names.iter().map(|name| workflows.join(name)))
            .dir(workspace.root())
            .run()?;
        pinned(&workflows, &names)
    })
}

/// Returns an error unless the workflows name each action by the hash of a commit: a tag may be moved.
fn pinned(folder: &Path, names: &[String]) -> Result<()> {
    for name in names {
        let path = folder.join(name);
        let text = fs_err::read_to_string(&path)?;
        if let Some(line) = unpinned(&text) {
            bail!("{}: not pinned to the hash of a commit: {line}", path.display());
        }
    }
    Ok(())
}

/// Returns the first action of a workflow that is not named by a hash.
fn unpinned(workflow: &str) -> Option<&str> {
    let is_hash = |text: &str| text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let uses = workflow
        .lines()
        .filter_map(|line| Some(line.trim().trim_start_matches("- ").strip_prefix("uses:")?.trim()));
    uses.into_iter().find(|action| {
        let version = action.split_once('@').and_then(|(_, rest)| rest.split_whitespace().next());
        !action.starts_with("./") && !version.is_some_and(is_hash)
    })
}

/// Returns every Rust file of the project: its path from the root, and its text.
#[cfg(test)]
pub(crate) fn rust_files(root: &Path) -> Result<Vec<(PathBuf, String)>> {
    let files =
        source::files(root)?.into_iter().filter(|file| file.path.extension().is_some_and(|ext| ext == "rs"));
    Ok(files.map(|file| (file.path, file.text)).collect())
}

fn rules(workspace: &Workspace, xtask: Command) -> Result<()> {
    let files = source::files(workspace.root())?;
    let mut findings: Vec<_> = files.iter().flat_map(words::check).collect();
    findings.extend(links::check(&files, |path| workspace.root().join(path).is_file()));
    findings.extend(commands::check(&files, &[("cargo xtask", xtask)]));
    findings.sort();
    for Finding { file, line, what } in &findings {
        log::line(format_args!("{}:{line}: {what}", file.display()));
    }
    if findings.is_empty() { Ok(()) } else { bail!("{} places break the project's rules", findings.len()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_action_is_pinned_by_a_hash() {
        let hash = "0123456789abcdef0123456789abcdef01234567";
        let good =
            format!("steps:\n  - uses: a/b@{hash} # v1\n  - name: x\n    uses: c/d@{hash}\n  - uses: ./e\n");
        assert_eq!(unpinned(&good), None);
        assert_eq!(unpinned(&format!("{good}  - uses: f/g@v4\n")), Some("f/g@v4"));
        assert_eq!(unpinned("    uses: f/g # main\n"), Some("f/g # main"));
    }
}
