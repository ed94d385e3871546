//! Ballast deployed to a cluster as users do it: the image on every node, and the chart installed with Helm.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

use super::control::kubectl;
use super::node;
use super::plan::{CONTROL_V4, Node, each};
use super::workdir::Workdir;
use crate::chart::Helm;
use crate::host::names_in;
use crate::workspace::Workspace;

/// Name of the release, of the `DaemonSet`, and of the container in it.
pub const NAME: &str = "ballast";
/// Namespace of the release.
pub const SPACE: &str = "kube-system";
/// Time limit of a rollout on a busy machine, as an argument of kubectl and Helm.
const PATIENCE: &str = "180s";

/// Imports the image on every node, installs the chart, and waits until each agent is healthy. `None`: the nodes already
/// have the image.
pub fn install(workspace: &Workspace, workdir: &Workdir, image: Option<&Path>) -> Result<()> {
    let nodes = workdir.nodes();
    if let Some(image) = image {
        each(&nodes, |node| node::load(workdir, node, image))?;
    }
    upgrade(workspace, workdir, &[])
}

/// Installs or upgrades the chart with these arguments for Helm, and waits until each agent is healthy.
pub fn upgrade(workspace: &Workspace, workdir: &Workdir, words: &[&str]) -> Result<()> {
    let chart = Helm::find(workspace)?.chart().to_owned();
    upgrade_to(workspace, workdir, &chart, words)?;
    rolled_out(workdir, NAME)?;
    workdir.nodes().into_iter().try_for_each(|node| status(workdir, node).map(|_| ()))
}

/// Installs a chart or upgrades to it, with these arguments for Helm, and does not wait.
pub fn upgrade_to(workspace: &Workspace, workdir: &Workdir, chart: &Path, words: &[&str]) -> Result<()> {
    // The control plane's address: the Service `kubernetes` works only after the agent has started.
    let address = format!("apiServer.host={CONTROL_V4}");
    let chart = chart.display().to_string();
    let install = ["upgrade", "--install", NAME, &chart, "--set", &address];
    let settings: Vec<_> =
        workdir.settings().iter().map(|one| format!("--set-string=settings.{one}")).collect();
    let settings: Vec<_> = settings.iter().map(String::as_str).collect();
    run(workdir, &Helm::find(workspace)?, &[&install, &settings[..], words].concat())
}

/// Uninstalls Ballast, and removes everything that it left on the nodes.
pub fn uninstall(workspace: &Workspace, workdir: &Workdir) -> Result<()> {
    let helm = Helm::find(workspace)?;
    let chart = helm.chart().display().to_string();
    run(workdir, &helm, &["upgrade", NAME, &chart, "--reuse-values", "--set", "cleanup=true"])?;
    rolled_out(workdir, "ballast-cleanup")?;
    run(workdir, &helm, &["uninstall", NAME, "--wait", "--timeout", PATIENCE])
}

fn run(workdir: &Workdir, helm: &Helm, words: &[&str]) -> Result<()> {
    let on_control = workdir.control().command(&[]);
    helm.on_cluster(on_control, &[words, &["--namespace", SPACE]].concat()).read().map(|_| ())
}

/// Waits until every node has the newest pod of a `DaemonSet`, and the pod is ready.
pub fn rolled_out(workdir: &Workdir, name: &str) -> Result<()> {
    let words = ["rollout", "status", &format!("daemonset/{name}"), "-n", SPACE, "--timeout", PATIENCE];
    kubectl(workdir, &words).read().map(|_| ())
}

/// Returns the output of `ballast status` in the agent's pod of a node; an error if the agent is not healthy.
pub fn status(workdir: &Workdir, node: Node) -> Result<String> {
    let pod = pod(workdir, node)?;
    kubectl(workdir, &["exec", "-n", SPACE, &pod, "-c", NAME, "--", "ballast", "status"]).read()
}

/// Returns the name of the agent's pod on a node.
pub fn pod(workdir: &Workdir, node: Node) -> Result<String> {
    let on_node = format!("--field-selector=spec.nodeName={node}");
    let label = "app.kubernetes.io/name=ballast,app.kubernetes.io/component=agent";
    let path = "jsonpath={range .items[*]}{.metadata.name} {.metadata.deletionTimestamp}{\"\\n\"}{end}";
    let output = kubectl(workdir, &["get", "pods", "-n", SPACE, "-l", label, &on_node, "-o", path]).read()?;
    let mut staying = output.lines().filter_map(|line| line.strip_suffix(' '));
    let pod = staying.next().with_context(|| format!("no pod of the agent on {node}"))?;
    ensure!(staying.next().is_none(), "two agents on {node}");
    Ok(pod.to_owned())
}

/// Returns how many agents are ready, as text.
pub fn summary(workdir: &Workdir) -> Result<String> {
    let path = "jsonpath={.status.numberReady} of {.status.desiredNumberScheduled} pods ready";
    kubectl(workdir, &["get", "daemonset", NAME, "-n", SPACE, "-o", path]).read()
}

/// Returns the log files of agents in pods, each with a unique name.
pub fn logs(workdir: &Workdir) -> Vec<(PathBuf, String)> {
    let mut logs = Vec::new();
    for node in workdir.nodes() {
        let pods = workdir.node(node).dir().join("log/pods");
        let agents = names_in(&pods).into_iter().filter(|name| name.starts_with(&format!("{SPACE}_{NAME}-")));
        for pod in agents {
            let folder = pods.join(pod).join(NAME);
            for file in names_in(&folder) {
                logs.push((folder.join(&file), format!("{node}-{NAME}-pod-{}-{file}", logs.len())));
            }
        }
    }
    logs
}
