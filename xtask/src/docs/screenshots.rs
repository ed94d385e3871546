//! The pictures of docs/page.md, which the browser test takes of a node with traffic.

use std::fs;

use anyhow::{Context as _, Result, bail};

use crate::setup::{self, Need};
use crate::test::cargo::cargo_test;
use crate::workspace::Workspace;
use crate::{build, exec, log};

/// Environment variable with the folder of the pictures, which the test reads.
const VARIABLE: &str = "BALLAST_SCREENSHOTS";
const TEST: &str = "page::works_in_a_browser";

/// Takes the pictures.
pub(super) fn take(workspace: &Workspace) -> Result<()> {
    if !exec::is_root() {
        bail!("the pictures are of a node in network namespaces: run this as root");
    }
    setup::tools(Need::Netns)?;
    build::bpf(workspace, &build::Args::default())?;
    let folder = workspace.root().join("docs/page");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let cargo = cargo_test(workspace).args(["--test", "netns", "--", TEST, "--include-ignored"]);
    cargo.env(VARIABLE, folder.as_os_str()).run()?;
    log::line(folder.display());
    Ok(())
}
