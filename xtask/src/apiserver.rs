//! Finds kube-apiserver, etcd, kube-proxy and the OpenTelemetry Collector's receiver for tests and benchmarks, or builds them
//! in the background.

use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use anyhow::{Context as _, Result, anyhow};

use crate::gotools;
use crate::workspace::Workspace;

/// Environment variables with the paths of the binaries: if all are set, nothing is built. The tests read the same variables.
pub const VARIABLES: [&str; 4] =
    ["BALLAST_KUBE_APISERVER", "BALLAST_ETCD", "BALLAST_KUBE_PROXY", "BALLAST_OTLP_RECEIVER"];

/// Paths of the programs.
#[derive(Clone, Debug)]
pub struct Binaries {
    /// kube-apiserver.
    pub kube_apiserver: PathBuf,
    /// etcd.
    pub etcd: PathBuf,
    /// kube-proxy, for comparisons and takeovers.
    pub kube_proxy: PathBuf,
    /// The OTLP receiver, to which the agent exports.
    pub otlp_receiver: PathBuf,
}

impl Binaries {
    /// Returns the environment variables that tell the tests the paths.
    pub fn environment(&self) -> [(&'static str, &Path); 4] {
        let files: [&Path; 4] = [&self.kube_apiserver, &self.etcd, &self.kube_proxy, &self.otlp_receiver];
        std::array::from_fn(|at| (VARIABLES[at], files[at]))
    }
}

/// A build that runs in the background.
pub type Pending = JoinHandle<Result<Binaries>>;

/// Starts the build in the background: it takes minutes the first time, and callers do other work meanwhile.
pub fn start(workspace: &Workspace) -> Pending {
    let workspace = workspace.clone();
    std::thread::spawn(move || build(&workspace))
}

/// Waits for the build.
pub fn wait(pending: Pending) -> Result<Binaries> {
    pending.join().unwrap_or_else(|_| Err(anyhow!("the build of the API server died")))
}

/// Finds or builds all programs; a second caller waits for the first.
pub fn build(workspace: &Workspace) -> Result<Binaries> {
    let given =
        VARIABLES.map(|name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from));
    if let [Some(kube_apiserver), Some(etcd), Some(kube_proxy), Some(otlp_receiver)] = given {
        return Ok(Binaries { kube_apiserver, etcd, kube_proxy, otlp_receiver });
    }
    // etcd first: it is small, so that a Go that does not work fails early.
    let wanted = [gotools::ETCD, gotools::API_SERVER, gotools::KUBE_PROXY, gotools::OTLP_RECEIVER];
    let mut made = gotools::build(workspace, &wanted)?.into_iter();
    let mut next = || made.next().context("a tool was not built");
    Ok(Binaries { etcd: next()?, kube_apiserver: next()?, kube_proxy: next()?, otlp_receiver: next()? })
}
