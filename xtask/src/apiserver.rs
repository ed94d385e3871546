//! Finds kube-apiserver, etcd, kube-proxy and the OpenTelemetry Collector's receiver for tests and benchmarks, or builds them
//! in the background.

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};

use crate::workspace::Workspace;
use crate::{gotools, log};

/// Environment variables with the paths of the binaries: if all are set, nothing is built. The tests read the same variables.
pub const VARIABLES: [&str; 4] =
    ["BALLAST_KUBE_APISERVER", "BALLAST_ETCD", "BALLAST_KUBE_PROXY", "BALLAST_OTLP_RECEIVER"];

/// Interval of the progress messages of a long build.
const HEARTBEAT: Duration = Duration::from_secs(30);

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
#[derive(Debug)]
pub struct Pending {
    result: mpsc::Receiver<Result<Binaries>>,
    start: Instant,
}

/// Starts the build in the background: it takes minutes the first time, and callers do other work meanwhile.
pub fn start(workspace: &Workspace) -> Pending {
    let (sender, result) = mpsc::channel();
    let workspace = workspace.clone();
    std::thread::spawn(move || {
        // Sending fails if the command ended early and dropped the receiver.
        let _ = sender.send(build(&workspace));
    });
    Pending { result, start: Instant::now() }
}

impl Pending {
    /// Waits for the build, and prints at intervals that it still runs.
    pub fn wait(self) -> Result<Binaries> {
        loop {
            match self.result.recv_timeout(HEARTBEAT) {
                Ok(done) => return done,
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    let time = log::seconds(self.start.elapsed());
                    log::line(format_args!("    the API server is still being built, {time} so far"));
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    return Err(anyhow!("the build of the API server died"));
                }
            }
        }
    }
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
