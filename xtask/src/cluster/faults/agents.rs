//! The agents of a cluster, as what happens to them needs them: a process of each node, or a pod there.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use crate::cluster::plan::Node;
use crate::cluster::{Proxy, Workdir, current_proxy, deployed, kubectl};
use crate::signal;

/// How long an agent may take to be there again; the kubelet lets a container that ended twice wait.
const PATIENCE: Duration = Duration::from_secs(90);

/// Who runs the agents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Agents {
    /// We do, as a process of each node.
    Host,
    /// The `DaemonSet`.
    Pods,
}

impl Agents {
    /// Those of a cluster.
    pub(super) fn of(workdir: &Workdir) -> Result<Self> {
        match current_proxy(workdir)? {
            Proxy::BallastHost => Ok(Self::Host),
            Proxy::Ballast => Ok(Self::Pods),
            other => bail!("the faults are made for Ballast, not for {other}"),
        }
    }

    /// The proxy that they are.
    pub(super) fn proxy(self) -> Proxy {
        match self {
            Self::Host => Proxy::BallastHost,
            Self::Pods => Proxy::Ballast,
        }
    }

    /// Kills one without warning, and waits until the node has an agent again; ours is `gone` for so long.
    pub(super) fn kill(self, workdir: &Workdir, node: Node, gone: Duration) -> Result<()> {
        if self == Self::Host {
            workdir.node(node).stop("ballast", libc::SIGKILL)?;
            sleep(gone);
            return Proxy::BallastHost.start_on(workdir, node);
        }
        let old = process(workdir, node)?;
        workdir.node(node).command(&["kill", "-KILL", &old.to_string()]).read()?;
        signal::wait_for(&format!("the next agent on {node}"), PATIENCE, || {
            let is_new = process(workdir, node).is_ok_and(|new| new != old);
            let ready = ["curl", "-sf", "http://127.0.0.1:10256/readyz"];
            Ok((is_new && workdir.node(node).command(&ready).succeeds()).then_some(()))
        })
    }

    /// Replaces all of them, node by node.
    pub(super) fn replace(self, workdir: &Workdir) -> Result<()> {
        if self == Self::Pods {
            let name = format!("daemonset/{}", deployed::NAME);
            kubectl(workdir, &["rollout", "restart", &name, "-n", deployed::SPACE]).read()?;
            return deployed::rolled_out(workdir, deployed::NAME);
        }
        for node in workdir.nodes() {
            signal::check()?;
            workdir.node(node).stop("ballast", libc::SIGTERM)?;
            Proxy::BallastHost.start_on(workdir, node)?;
        }
        Ok(())
    }

    /// All that an agent has said.
    pub(super) fn log(self, workdir: &Workdir, node: Node) -> Result<String> {
        if self == Self::Pods {
            let pod = deployed::pod(workdir, node)?;
            return kubectl(workdir, &["logs", "-n", deployed::SPACE, &pod, "-c", deployed::NAME]).read();
        }
        let file = workdir.node(node).log("ballast");
        std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))
    }
}

/// The processes of all agents: a container that was started again has another.
pub(super) fn processes(workdir: &Workdir) -> Result<Vec<u32>> {
    workdir.nodes().into_iter().map(|node| process(workdir, node)).collect()
}

/// The agent's process, as its node counts.
pub(super) fn process(workdir: &Workdir, node: Node) -> Result<u32> {
    let told = workdir.node(node).command(&["pidof", "ballast"]).read()?;
    let mut numbers = told.split_whitespace().map(str::parse);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(number)), None) => Ok(number),
        _ => bail!("on {node} `ballast` runs as `{}`", told.trim()),
    }
}
