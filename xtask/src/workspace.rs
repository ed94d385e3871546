//! Paths: the project's root, its target folder, and the cache that all checkouts share.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow};
use serde::Deserialize;

use crate::exec::Cmd;

/// The folders of this checkout.
#[derive(Clone, Debug, Deserialize)]
pub struct Workspace {
    #[serde(rename = "workspace_root")]
    root: PathBuf,
    #[serde(rename = "target_directory")]
    target: PathBuf,
}

impl Workspace {
    /// Reads the folders from `cargo metadata`, which knows every way to set a target folder.
    pub fn find() -> Result<Self> {
        let metadata = Cmd::cargo()
            .args(["metadata", "--no-deps", "--format-version=1", "--manifest-path"])
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
            .read()?;
        serde_json::from_str(&metadata).context("cargo metadata printed something unexpected")
    }

    /// Returns the folder with the workspace's `Cargo.toml`.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns cargo's target folder.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Returns a call of `cargo test` for the whole workspace: another selection would unify features differently and build half
    /// of the dependencies again. For an integration test, cargo also builds the binary.
    pub fn cargo_test(&self) -> Cmd {
        Cmd::cargo().args(["test", "--workspace"]).dir(&self.root)
    }

    /// Returns the path of the BPF object that the agent embeds; `proxy-user/build.rs` looks for it there.
    pub fn bpf_object(&self) -> PathBuf {
        self.target.join("bpf/ballast.bpf.o")
    }

    /// Returns the path of the same object with the source lines of its instructions, for the verifier's log.
    pub fn bpf_object_with_lines(&self) -> PathBuf {
        self.target.join("bpf/ballast-lines.bpf.o")
    }

    /// Returns the path of the agent that cargo builds.
    pub fn binary(&self, release: bool) -> PathBuf {
        self.target.join(if release { "release" } else { "debug" }).join("ballast")
    }
}

/// Returns the folder for tools that take long to build: `$BALLAST_CACHE`, or `ballast` in the user's cache folder.
pub fn cache() -> Result<PathBuf> {
    let var = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let dir = var("BALLAST_CACHE")
        .or_else(|| var("XDG_CACHE_HOME").map(|dir| dir.join("ballast")))
        .or_else(|| var("HOME").map(|dir| dir.join(".cache/ballast")))
        .ok_or_else(|| anyhow!("neither BALLAST_CACHE nor HOME is set: no place for tools"))?;
    fs_err::create_dir_all(&dir)?;
    Ok(dir)
}

/// Returns the repository on GitHub that publishes the release, `OWNER/NAME`; `None`: none does.
pub fn repository() -> Option<String> {
    std::env::var("GITHUB_REPOSITORY").ok().filter(|name| !name.is_empty())
}

/// Returns the address of the folder `docs` in this version, for links; `None`: it has no address.
pub fn docs() -> Option<String> {
    repository().map(|name| docs_of(&name))
}

/// Returns the same for a repository on GitHub.
pub fn docs_of(repository: &str) -> String {
    format!("https://github.com/{repository}/blob/v{}/docs", env!("CARGO_PKG_VERSION"))
}
