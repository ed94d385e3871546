//! Programs of other projects that `cargo install` builds once, for releases and documents. This file pins their versions,
//! and the lock file of each program pins its dependencies.

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use fs_err::{self as fs, File};

use crate::exec::Cmd;
use crate::{log, workspace};

/// A program, by its crate's name.
#[derive(Clone, Copy, Debug)]
pub struct Tool {
    name: &'static str,
    version: &'static str,
    /// The features to build with, if the default ones include more than is used.
    features: Option<&'static str>,
}

impl Tool {
    const fn new(name: &'static str, version: &'static str) -> Self {
        Self { name, version, features: None }
    }
}

/// Writes the bill of materials.
pub const CYCLONEDX: Tool = Tool::new("cargo-cyclonedx", "0.5.9");
/// Puts the list of crates into the binary.
pub const AUDITABLE: Tool = Tool::new("cargo-auditable", "0.7.7");
/// Checks licences, sources and known vulnerabilities of crates.
pub const DENY: Tool = Tool::new("cargo-deny", "0.20.2");
/// Makes a Debian package.
pub const DEB: Tool = Tool::new("cargo-deb", "3.8.0");
/// Makes an RPM package, without rpmbuild.
pub const RPM: Tool = Tool::new("cargo-generate-rpm", "0.21.1");
/// Makes a book of pages; built without mdBook's web server.
pub const MDBOOK: Tool = Tool { features: Some("search"), ..Tool::new("mdbook", "0.5.4") };

/// Returns the path of a tool; builds the tool first if needed.
pub fn program(tool: Tool) -> Result<PathBuf> {
    Ok(install(tool)?.join("bin").join(tool.name))
}

/// Returns a call of cargo with the tool's subcommand; builds the tool first if needed.
pub fn cargo(tool: Tool) -> Result<Cmd> {
    let bin = install(tool)?.join("bin");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths(std::iter::once(bin).chain(std::env::split_paths(&path)));
    let subcommand = tool.name.trim_start_matches("cargo-");
    Ok(Cmd::cargo().env("PATH", path.context("PATH cannot be extended")?).arg(subcommand))
}

/// Finds or builds a tool, and returns the folder above its `bin`; a second caller waits for the first.
fn install(tool: Tool) -> Result<PathBuf> {
    let Tool { name, version, features, .. } = tool;
    let tools = workspace::cache()?.join("cargo-tools");
    fs::create_dir_all(&tools)?;
    let lock = File::create(tools.join("lock"))?;
    lock.lock().context("cannot take the lock of cargo's tools")?;
    let root = tools.join(format!("{name}-{version}"));
    let program = root.join("bin").join(name);
    if !program.exists() {
        log::timed(&format!("cargo install {name} {version}, once (minutes)"), || {
            let features = features.map(|features| ["--no-default-features", "--features", features]);
            Cmd::cargo()
                .args(["install", name, "--quiet", "--locked", "--version", version, "--root"])
                .arg(&root)
                .args(features.iter().flatten())
                .without_env("CARGO_TARGET_DIR")
                .run()
        })?;
        ensure!(program.exists(), "cargo install did not make {}", program.display());
    }
    Ok(root)
}
