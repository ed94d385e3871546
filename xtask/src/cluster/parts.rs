//! Parts of every cluster: packages, programs, and the network between its machines.

use std::path::Path;

use anyhow::{Context as _, Result};

use super::workdir::Workdir;
use crate::exec::Cmd;
use crate::setup::{self, Need};
use crate::workspace::Workspace;
use crate::{apiserver, gotools, log, signal};

/// A CNI plugin at Debian's path.
const PLUGINS: &str = "/usr/lib/cni/host-local";

/// Installs the packages and builds the programs, once.
pub(super) fn prepare(workspace: &Workspace) -> Result<()> {
    setup::tools(Need::Cluster)?;
    if !Path::new(PLUGINS).exists() {
        crate::apt::install(&["containernetworking-plugins"])?;
    }
    apiserver::build(workspace)?;
    gotools::build(workspace, &gotools::CLUSTER)?;
    Ok(())
}

/// Runs a batch of ip(8) commands in the netns of a process.
pub(super) fn batch(process: u32, lines: &str) -> Result<()> {
    let network = format!("--net=/proc/{process}/ns/net");
    let ip = Cmd::new("nsenter").args([&network, "ip", "-batch", "-"]);
    ip.read_with_input(lines).map(|_| ()).with_context(|| lines.to_owned())
}

/// Copies the agent for the cluster's machines: a build during the cluster's life must not replace the program that created the
/// maps.
pub(super) fn copy_ballast(workdir: &Workdir, ballast: &Path) -> Result<()> {
    let (file, unfinished) =
        (workdir.programs().join("ballast"), workdir.programs().join("ballast.unfinished"));
    // A rename also replaces a program that still runs.
    fs_err::copy(ballast, &unfinished)?;
    Ok(fs_err::rename(&unfinished, file)?)
}

/// Links the programs of the cluster's machines into its directory.
pub(super) fn link_programs(workspace: &Workspace, workdir: &Workdir, ballast: &Path) -> Result<()> {
    copy_ballast(workdir, ballast)?;
    let server = apiserver::build(workspace)?;
    workdir.link("etcd", &server.etcd)?;
    workdir.link("kube-apiserver", &server.kube_apiserver)?;
    workdir.link("kube-proxy", &server.kube_proxy)?;
    let files = gotools::build(workspace, &gotools::CLUSTER)?;
    gotools::CLUSTER.iter().zip(files).try_for_each(|(tool, file)| workdir.link(tool.name, file))
}

/// Ends a cluster and removes all of it.
pub fn down(workdir: &Workdir) -> Result<()> {
    if workdir.remains()?.is_empty() {
        log::line(format_args!("no cluster `{}` is running", workdir.name()));
        return Ok(());
    }
    workdir.take_down()?;
    log::line(format_args!("the cluster `{}` is gone", workdir.name()));
    Ok(())
}

/// Finishes a new cluster. An incomplete cluster is kept for a look at its logs, unless Ctrl-C was the reason.
pub fn or_leave<T>(workdir: &Workdir, finish: impl FnOnce() -> Result<T>) -> Result<T> {
    finish().inspect_err(|_| {
        if signal::check().is_err() {
            if let Err(error) = down(workdir) {
                log::line(format_args!("warning: {error:#}"));
            }
        } else {
            log::line(format_args!(
                "the cluster is left as it is, with its logs in {}; `cargo xtask test cluster down --name {}` removes it",
                workdir.logs().display(),
                workdir.name()
            ));
        }
    })
}
