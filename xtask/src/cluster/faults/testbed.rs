//! Testbed for the faults: pods that answer, a Service in front of them, and clients on every path.

use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::agents::Agents;
use super::load::{Client, LoadGenerator, Tally};
use super::objects::{self, served};
use crate::cluster::image::AGNHOST;
use crate::cluster::plan::Node;
use crate::cluster::{Workdir, apply, kubectl};
use crate::exec::Cmd;
use crate::signal;

/// Time limit for pods to end.
const ENDING: Duration = Duration::from_secs(90);
/// Time limit for a change to take effect everywhere, on a busy machine.
pub(super) const SOON: Duration = Duration::from_secs(30);

pub(super) const NAME: &str = "echo";
/// Pod whose netns clients use; it stays while others come and go. [`PLAIN`] has its own netns: in one netns, the same source
/// port could lead to the same endpoint both by the socket programs and past them, and the endpoint would see one connection.
pub(super) const CLIENT: &str = "client";
/// Pod whose client is not translated by socket programs.
pub(super) const PLAIN: &str = "plain";
/// The Service's cluster address and port.
pub(super) const ADDRESS: &str = "10.96.0.80:80";
/// The Service's node port.
pub(super) const NODE_PORT: u16 = 30080;
/// Number of pods at the start.
pub(super) const PODS: u8 = 4;

/// The pods and Services in a cluster.
#[derive(Debug)]
pub(super) struct Testbed<'a> {
    pub workdir: &'a Workdir,
    pub agents: Agents,
}

impl<'a> Testbed<'a> {
    /// Creates the objects, and waits until every client gets an answer.
    pub(super) fn make(workdir: &'a Workdir) -> Result<Self> {
        Self::make_for(workdir, Agents::of(workdir)?)
    }

    /// The same for a cluster whose proxy may be another than Ballast.
    pub(super) fn make_for(workdir: &'a Workdir, agents: Agents) -> Result<Self> {
        let testbed = Self { workdir, agents };
        let last = *workdir.nodes().last().context("a cluster without nodes")?;
        apply(workdir, &objects(last)?)?;
        testbed.scale(PODS)?;
        let stay = format!("deployment/{}", objects::STAY);
        kubectl(workdir, &["rollout", "status", &stay, "--timeout=120s"]).read()?;
        kubectl(workdir, &["wait", "--for=condition=Ready", "pod", CLIENT, PLAIN, "--timeout=60s"]).read()?;
        for address in [ADDRESS.to_owned(), outside(Node(1)), outside(last)] {
            let url = format!("http://{address}/hostname");
            signal::wait_for(&format!("{url} to answer"), SOON, || {
                Ok(workdir.node(Node(1)).command(&["curl", "-sf", "-m", "1", &url]).try_read())
            })?;
        }
        Ok(testbed)
    }

    /// Removes the objects.
    pub(super) fn clear(&self) -> Result<()> {
        kubectl(self.workdir, &["delete", "pod", CLIENT, PLAIN, "--grace-period=1"]).read()?;
        kubectl(self.workdir, &["delete", "deployment,service", NAME]).read()?;
        kubectl(self.workdir, &[&["delete"], &objects::NAMES[..]].concat()).read().map(|_| ())
    }

    /// Returns the nodes.
    pub(super) fn nodes(&self) -> Vec<Node> {
        self.workdir.nodes()
    }

    /// Runs these clients during `work`; returns their results and that of `work`.
    pub(super) fn run_clients_during<T>(
        clients: Vec<Client>,
        work: impl FnOnce() -> T,
    ) -> Result<(Tally, T)> {
        let clients = clients
            .into_iter()
            .map(|client| LoadGenerator::start(client.name, client.workdir, &client.targets))
            .collect::<Result<Vec<_>>>()?;
        let done = work();
        let mut all = Tally::default();
        for client in clients {
            all = all.and(client.stop()?);
        }
        Ok((all, done))
    }

    /// Returns a command that runs its arguments in the netns of a pod on the last node.
    pub(super) fn in_pod(&self) -> Result<Cmd> {
        let last = *self.nodes().last().context("a cluster without nodes")?;
        Ok(self
            .workdir
            .node(last)
            .command(&["nsenter", &format!("--net={}", self.pod_network(last, CLIENT)?)]))
    }

    /// Returns a command that runs its arguments in the netns of another pod there. Its process is outside the node's
    /// cgroup, so no socket program translates its connections.
    pub(super) fn past_sockets(&self) -> Result<Cmd> {
        let last = *self.nodes().last().context("a cluster without nodes")?;
        let node = self.workdir.node(last).pid().context("the node does not run")?;
        // The names of network namespaces are in the node's own /run.
        Ok(Cmd::new("nsenter").arg(format!("--net=/proc/{node}/root{}", self.pod_network(last, PLAIN)?)))
    }

    /// Whether the Service answers a process of this node now.
    pub(super) fn answers_on(&self, node: Node) -> bool {
        let url = format!("http://{ADDRESS}/hostname");
        self.workdir.node(node).command(&["curl", "-sf", "-m", "2", &url]).succeeds()
    }

    /// Returns the address of a pod.
    pub(super) fn address(&self, pod: &str) -> Result<String> {
        kubectl(self.workdir, &["get", "pod", pod, "-o", "jsonpath={.status.podIP}"]).read()
    }

    /// Returns the IPv6 address of a pod.
    pub(super) fn address_v6(&self, pod: &str) -> Result<String> {
        kubectl(self.workdir, &["get", "pod", pod, "-o", "jsonpath={.status.podIPs[1].ip}"]).read()
    }

    /// Returns the netns of a pod, as a path on its node.
    fn pod_network(&self, node: Node, pod: &str) -> Result<String> {
        let address = self.address(pod)?;
        let script = format!(
            "for file in /run/netns/*; do nsenter --net=$file ip -o -4 address | grep -q ' {address}/' && echo $file; done"
        );
        let output = self.workdir.node(node).command(&["sh", "-c", &format!("{script}; true")]).read()?;
        output.lines().next().map(str::to_owned).with_context(|| format!("no namespace of the pod {address}"))
    }

    /// Scales the deployment, and waits until its pods are ready and surplus pods have ended.
    pub(super) fn scale(&self, pods: u8) -> Result<()> {
        let name = format!("deployment/{NAME}");
        kubectl(self.workdir, &["scale", &name, &format!("--replicas={pods}")]).read()?;
        kubectl(self.workdir, &["rollout", "status", &name, "--timeout=120s"]).read()?;
        let get = ["get", "pods", "-l", &format!("app={NAME}"), "-o", "name"];
        signal::wait_for("the pods that are too many to end", ENDING, || {
            Ok((kubectl(self.workdir, &get).read()?.lines().count() <= usize::from(pods)).then_some(()))
        })
    }
}

/// Returns the address and node port of the Service on a node.
fn outside(node: Node) -> String {
    format!("{}:{NODE_PORT}", node.v4())
}

fn objects(client_node: Node) -> Result<Value> {
    let mut items = served(NAME, PODS, None)?;
    if let Some(service) = items.get_mut(1) {
        service["spec"]["type"] = json!("NodePort");
        service["spec"]["clusterIP"] = json!(ADDRESS.trim_end_matches(":80"));
        service["spec"]["ports"][0]["nodePort"] = json!(NODE_PORT);
    }
    items.extend(objects::objects()?);
    items.extend([CLIENT, PLAIN].map(|name| {
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": { "name": name, "namespace": "default" },
            "spec": {
                "nodeName": client_node.to_string(),
                "containers": [{ "name": name, "image": AGNHOST, "args": ["pause"] }],
            },
        })
    }));
    Ok(json!({ "apiVersion": "v1", "kind": "List", "items": items }))
}

/// Returns a metric's value, summed over its labels; 0 if the metric is missing.
pub(super) fn total(metrics: &str, name: &str) -> f64 {
    let is_it = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '{']));
    let values = metrics.lines().filter(is_it);
    values.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_is_summed_over_its_labels() {
        let text = "# TYPE repairs_total counter\nrepairs_total{map=\"a\"} 2\nrepairs_total{map=\"b\"} 1\n\
                    repairs_total_bytes 7\nplain 4\n";
        let is = |name: &str, value: f64| (total(text, name) - value).abs() < f64::EPSILON;
        assert!(is("repairs_total", 3.0) && is("plain", 4.0) && is("none", 0.0));
    }
}
