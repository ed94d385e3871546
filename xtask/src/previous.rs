//! Builds the agent of the previous version, whose maps have another layout, to test upgrades and downgrades.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use crate::exec::Cmd;
use crate::host::names_in;
use crate::image::binary;
use crate::log;
use crate::workspace::Workspace;

/// The last commit whose maps have the previous layout.
const COMMIT: &str = "01e5548";

/// Environment variable with the path of the binary, which the tests read.
pub const VARIABLE: &str = "BALLAST_PREVIOUS_BIN";

/// Returns the path of the binary: the one that [`VARIABLE`] names, or one that is built once and kept in the target folder.
pub fn program(workspace: &Workspace) -> Result<PathBuf> {
    if let Some(named) = std::env::var_os(VARIABLE).filter(|value| !value.is_empty()) {
        return Ok(named.into());
    }
    let checkout = workspace.target().join("previous-abi").join(COMMIT);
    let binary = checkout.join("target/debug/ballast");
    if !checkout.join(DONE).exists() {
        log::timed("build the agent of the previous layout", || build(workspace, &checkout))?;
    }
    Ok(binary)
}

/// The tag of the image.
pub const TAG: &str = "previous";

/// Files of the previous version that a cluster needs.
#[derive(Clone, Debug)]
pub struct Previous {
    /// Path of the program, which needs no library.
    pub program: PathBuf,
    /// Path of the image's archive.
    pub archive: PathBuf,
    /// Path of the chart.
    pub chart: PathBuf,
}

/// Returns program, image and chart, which are built once and kept in the target folder.
pub fn image(workspace: &Workspace) -> Result<Previous> {
    let checkout = workspace.target().join("previous-abi").join(COMMIT);
    let folder = checkout.join("image");
    if !folder.join(DONE).exists() {
        log::timed("build the image of the previous layout's version", || {
            check_out(workspace, &checkout)?;
            let name = format!("localhost/ballast:{TAG}");
            let output = folder.display().to_string();
            run(&checkout, &["image", "--dev", "--name", &name, "--output", &output])?;
            fs::write(folder.join(DONE), []).context("cannot mark the build as done")
        })?;
    }
    let archive = names_in(&folder)
        .into_iter()
        .find(|name| Path::new(name).extension().is_some_and(|ext| ext == "tar"));
    let program = checkout.join("target").join(binary::host_target()?).join("debug/ballast");
    Ok(Previous {
        program,
        archive: folder.join(archive.context("the version before made no image")?),
        chart: checkout.join("deploy/chart"),
    })
}

/// Whether this clone lacks history on purpose (`git clone --depth`).
pub fn is_shallow(workspace: &Workspace) -> bool {
    let git = Cmd::new("git").args(["rev-parse", "--is-shallow-repository"]).dir(workspace.root());
    git.try_read().is_some_and(|text| text.trim() == "true")
}

/// Name of the file that marks a successful build.
const DONE: &str = ".built";

fn build(workspace: &Workspace, checkout: &Path) -> Result<()> {
    check_out(workspace, checkout)?;
    run(checkout, &["build"])?;
    fs::write(checkout.join(DONE), []).context("cannot mark the build as done")
}

/// Runs the task runner of the previous version.
fn run(checkout: &Path, words: &[&str]) -> Result<()> {
    // A target folder of its own, because its crates have the same names as ours.
    Cmd::cargo()
        .args(["run", "--quiet", "--package", "xtask", "--"])
        .args(words)
        .without_env("BALLAST_BPF_OBJECT")
        .env("CARGO_TARGET_DIR", checkout.join("target"))
        .dir(checkout)
        .run()
}

/// Puts the files of the commit into a folder of their own.
fn check_out(workspace: &Workspace, checkout: &Path) -> Result<()> {
    let git = || Cmd::new("git").dir(workspace.root());
    let commit = format!("{COMMIT}^{{commit}}");
    if !git().args(["cat-file", "-e", &commit]).quiet().succeeds() {
        bail!("this clone does not have the commit {COMMIT}: fetch the history (git fetch --unshallow)");
    }
    fs::create_dir_all(checkout).with_context(|| format!("cannot make {}", checkout.display()))?;
    let archive = checkout.with_extension("tar");
    git().args(["archive", "--format=tar", "-o"]).arg(&archive).arg(COMMIT).run()?;
    Cmd::new("tar").arg("-xf").arg(&archive).arg("-C").arg(checkout).run()?;
    fs::remove_file(&archive).with_context(|| format!("cannot remove {}", archive.display()))
}
