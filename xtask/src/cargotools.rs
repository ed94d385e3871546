//! Programs of other projects that `cargo install` builds once, for releases: their versions are pinned here, and their
//! dependencies by the lock file that each comes with.

use std::fs::{self, File};
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};

use crate::exec::Cmd;
use crate::{say, workspace};

/// A program, by its crate's name.
#[derive(Clone, Copy, Debug)]
pub struct Tool {
    name: &'static str,
    version: &'static str,
}

/// Writes the bill of materials.
pub const CYCLONEDX: Tool = Tool { name: "cargo-cyclonedx", version: "0.5.9" };
/// Puts the list of crates into the binary.
pub const AUDITABLE: Tool = Tool { name: "cargo-auditable", version: "0.7.7" };
/// Checks licences, sources and known faults of crates.
pub const DENY: Tool = Tool { name: "cargo-deny", version: "0.20.2" };

/// A cargo that knows the subcommand of this tool, which is built unless it is there.
pub fn cargo(tool: Tool) -> Result<Cmd> {
    let bin = install(tool)?.join("bin");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths(std::iter::once(bin).chain(std::env::split_paths(&path)));
    let subcommand = tool.name.trim_start_matches("cargo-");
    Ok(Cmd::cargo().env("PATH", path.context("PATH cannot be extended")?).arg(subcommand))
}

/// Finds or builds a tool, and returns the folder above its `bin`; a second caller waits for the first.
fn install(tool: Tool) -> Result<PathBuf> {
    let Tool { name, version } = tool;
    let tools = workspace::cache()?.join("cargo-tools");
    fs::create_dir_all(&tools).with_context(|| format!("cannot make {}", tools.display()))?;
    let lock = File::create(tools.join("lock")).context("cannot make the lock file of cargo's tools")?;
    lock.lock().context("cannot take the lock of cargo's tools")?;
    let root = tools.join(format!("{name}-{version}"));
    let program = root.join("bin").join(name);
    if !program.exists() {
        say::timed(&format!("cargo install {name} {version}, once (minutes)"), || {
            Cmd::cargo()
                .args(["install", name, "--quiet", "--locked", "--version", version, "--root"])
                .arg(&root)
                .without_env("CARGO_TARGET_DIR")
                .run()
        })?;
        ensure!(program.exists(), "cargo install did not make {}", program.display());
    }
    Ok(root)
}
