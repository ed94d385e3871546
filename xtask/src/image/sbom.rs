//! The bills of materials, in the format `CycloneDX` (cargo-cyclonedx): every crate whose code is in the agent, or in the BPF
//! programs that it embeds.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::commit::source_date;
use crate::cargotools;
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
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
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
        fs::remove_file(&file).with_context(|| format!("cannot remove {}", file.display()))?;
    }
    read
}

fn file(workspace: &Workspace, folder: &str) -> PathBuf {
    workspace.root().join(folder).join(FILE).with_extension("json")
}
