//! The agents of a cluster, as the faults use them: a process of each node, or a pod there.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Result, bail};

use crate::cluster::plan::Node;
use crate::cluster::{Proxy, Workdir, current_proxy, deployed, kubectl};
use crate::signal;

/// Time limit for an agent to be back; the kubelet delays the restart of a container that ended twice.
const PATIENCE: Duration = Duration::from_secs(90);

/// How the agents run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Agents {
    /// As a process of each node, which this program starts.
    Host,
    /// As pods of the `DaemonSet`.
    Pods,
}

impl Agents {
    /// Returns how the agents of a cluster run; an error if its proxy is not Ballast.
    pub(super) fn of(workdir: &Workdir) -> Result<Self> {
        match current_proxy(workdir)? {
            Proxy::BallastHost => Ok(Self::Host),
            Proxy::Ballast => Ok(Self::Pods),
            other => bail!("the faults are made for Ballast, not for {other}"),
        }
    }

    /// Returns the proxy of these agents.
    pub(super) fn proxy(self) -> Proxy {
        match self {
            Self::Host => Proxy::BallastHost,
            Self::Pods => Proxy::Ballast,
        }
    }

    /// Kills an agent with SIGKILL, and waits until the node has an agent again. An agent that this program starts is gone
    /// for `gone`.
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

    /// Replaces all agents, node by node.
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
}

/// Returns the PIDs of all agents: a container that was restarted has another PID.
pub(super) fn processes(workdir: &Workdir) -> Result<Vec<u32>> {
    workdir.nodes().into_iter().map(|node| process(workdir, node)).collect()
}

/// Returns the agent's PID, as seen on its node.
pub(super) fn process(workdir: &Workdir, node: Node) -> Result<u32> {
    let output = workdir.node(node).command(&["pidof", "ballast"]).read()?;
    let mut numbers = output.split_whitespace().map(str::parse);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(number)), None) => Ok(number),
        _ => bail!("on {node} `ballast` runs as `{}`", output.trim()),
    }
}
