//! `cargo xtask deny`: checks licences, sources and duplicates of all dependencies (cargo-deny, `deny.toml`).

use anyhow::Result;

use crate::cargotools;
use crate::workspace::Workspace;

/// Check licences, sources and bans of all dependencies (cargo-deny; its first build takes minutes).
#[derive(clap::Args, Clone, Copy, Debug, Default)]
pub struct Args {
    /// Also check for known vulnerabilities: fetches the advisory database from GitHub
    #[arg(long)]
    pub advisories: bool,
}

/// Runs the command.
pub fn run(args: Args) -> Result<()> {
    let workspace = Workspace::find()?;
    let checks = ["bans", "licenses", "sources"].into_iter().chain(args.advisories.then_some("advisories"));
    cargotools::cargo(cargotools::DENY)?
        .args(["--locked", "--all-features", "check"])
        .args(checks)
        .dir(workspace.root())
        .run()
}
