//! The bills of materials, in the format `CycloneDX` (cargo-cyclonedx): every crate whose code is in the agent, or in the BPF
//! programs that it embeds.

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use fs_err as fs;
use serde_json::Value;

use crate::cargotools;
use crate::exec::Cmd;
use crate::host::names_in;
use crate::workspace::Workspace;

/// Name of the files that cargo-cyclonedx writes, one beside each manifest of the workspace.
const FILE: &str = "ballast-bill-of-materials";

/// Returns the documents of the agent and of the BPF programs, each after its name. The same commit gives the same bytes.
pub(super) fn bills(workspace: &Workspace) -> Result<[(&'static str, String); 2]> {
    let made = cargotools::cargo(cargotools::CYCLONEDX)?
        .args(["--format=json", "--spec-version=1.5", "--no-build-deps", "--quiet"])
        .arg(format!("--override-filename={FILE}"))
        .env("SOURCE_DATE_EPOCH", source_date(workspace).to_string())
        .dir(workspace.root())
        .run();
    let read = |folder: &str| -> Result<String> {
        let file = file(workspace, folder);
        let text = fs::read_to_string(&file)?;
        // Without the spaces, which take a quarter of the image's documents.
        let document: Value =
            serde_json::from_str(&text).with_context(|| format!("cannot parse {}", file.display()))?;
        let text = document.to_string();
        // The documents name our own crates by their paths on this machine.
        Ok(text.replace(&workspace.root().display().to_string(), "/ballast"))
    };
    let read = made.and_then(|()| Ok([("agent", read("proxy-user")?), ("bpf", read("proxy-ebpf")?)]));
    for file in
        names_in(workspace.root()).iter().map(|name| file(workspace, name)).filter(|file| file.exists())
    {
        fs::remove_file(&file)?;
    }
    read
}

fn file(workspace: &Workspace, folder: &str) -> PathBuf {
    workspace.root().join(folder).join(FILE).with_extension("json")
}

/// Returns the time stamp of files and documents, in seconds since 1970: `$SOURCE_DATE_EPOCH`, or the last commit's time.
pub(super) fn source_date(workspace: &Workspace) -> u64 {
    let given = std::env::var("SOURCE_DATE_EPOCH").ok();
    let committed = || git(workspace, &["log", "-1", "--format=%ct"]);
    given.or_else(committed).and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// Returns the hash of the commit, or `None` outside of a git checkout.
pub(super) fn revision(workspace: &Workspace) -> Option<String> {
    git(workspace, &["rev-parse", "HEAD"]).map(|text| text.trim().to_owned())
}

fn git(workspace: &Workspace, args: &[&str]) -> Option<String> {
    Cmd::new("git").args(args).dir(workspace.root()).try_read()
}
