//! kube-apiserver, etcd, kube-proxy and the receiver of the OpenTelemetry Collector for tests and figures, found or built in the
//! background.

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};

use crate::workspace::Workspace;
use crate::{gotools, log};

/// Environment variables that name ready binaries; also how the tests are told.
pub const VARIABLES: [&str; 4] =
    ["BALLAST_KUBE_APISERVER", "BALLAST_ETCD", "BALLAST_KUBE_PROXY", "BALLAST_OTLP_RECEIVER"];

/// How often a long build says that it is still alive.
const HEARTBEAT: Duration = Duration::from_secs(30);

/// The programs.
#[derive(Clone, Debug)]
pub struct Binaries {
    /// kube-apiserver.
    pub kube_apiserver: PathBuf,
    /// etcd.
    pub etcd: PathBuf,
    /// kube-proxy, to compare with and to take over from.
    pub kube_proxy: PathBuf,
    /// The receiver of OTLP, to export to.
    pub otlp_receiver: PathBuf,
}

impl Binaries {
    /// The environment that tells the tests where they are.
    pub fn environment(&self) -> [(&'static str, &Path); 4] {
        let files: [&Path; 4] = [&self.kube_apiserver, &self.etcd, &self.kube_proxy, &self.otlp_receiver];
        std::array::from_fn(|at| (VARIABLES[at], files[at]))
    }
}

/// A build on its way, in the background.
#[derive(Debug)]
pub struct Pending {
    result: mpsc::Receiver<Result<Binaries>>,
    start: Instant,
}

/// Starts the build: it takes minutes the first time, so callers do other work meanwhile.
pub fn start(workspace: &Workspace) -> Pending {
    let (sender, result) = mpsc::channel();
    let workspace = workspace.clone();
    std::thread::spawn(move || {
        // The receiver is gone when the command ended early.
        let _ = sender.send(build(&workspace));
    });
    Pending { result, start: Instant::now() }
}

impl Pending {
    /// Waits for it, and says so now and then.
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

/// Finds or builds all of them; a second caller waits for the first.
pub fn build(workspace: &Workspace) -> Result<Binaries> {
    let given =
        VARIABLES.map(|name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from));
    if let [Some(kube_apiserver), Some(etcd), Some(kube_proxy), Some(otlp_receiver)] = given {
        return Ok(Binaries { kube_apiserver, etcd, kube_proxy, otlp_receiver });
    }
    // etcd first: it is small, and a Go that does not work shows soon.
    let wanted = [gotools::ETCD, gotools::API_SERVER, gotools::KUBE_PROXY, gotools::OTLP_RECEIVER];
    let mut made = gotools::build(workspace, &wanted)?.into_iter();
    let mut next = || made.next().context("a tool was not built");
    Ok(Binaries { etcd: next()?, kube_apiserver: next()?, kube_proxy: next()?, otlp_receiver: next()? })
}
