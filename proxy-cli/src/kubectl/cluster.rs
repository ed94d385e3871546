//! Finds the agents' pods, and runs `ballast` in them.

use std::collections::BTreeSet;
use std::future::Future;
use std::time::Duration;

use futures::{Stream, StreamExt as _, stream};
use k8s_openapi::api::core::v1 as whole;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;
use kube::api::{AttachParams, AttachedProcess, ListParams};
use kube::config::KubeConfigOptions;
use kube::{Api, Client};
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::time::timeout;

use super::answers::{Outcome, PerNode};
use super::error::{KubectlError, cause};
use crate::args::kubectl::{ClusterArgs, NamedIn};
use crate::args::list::{NamespaceArgs, SelectorArgs};
use crate::selector::{SelectorError, ServiceFilter};
use proxy_core::model::nearest::{did_you_mean, nearest};
use proxy_watch::api::pod::{Pod, pods};
use proxy_watch::api::{connect, kubeconfig};

/// Labels that the chart gives to the agents' pods.
const AGENTS: &str = "app.kubernetes.io/name=ballast,app.kubernetes.io/component=agent";
/// The container of the agent.
const CONTAINER: &str = "ballast";
/// Name that the chart gives to the port of the metrics server, and the port that is used if a pod does not declare one.
const METRICS: &str = "metrics";
const METRICS_PORT: u16 = 10_249;
/// Maximum number of nodes that are asked at the same time.
const AT_ONCE: usize = 32;
/// Maximum number of nodes that are asked for an archive at the same time.
const FEW_AT_ONCE: usize = 4;
/// Maximum number of bytes that are read of an answer.
const MOST: u64 = 64 << 20;

/// A client of the API server, and the arguments that select the agents.
#[derive(Clone)]
pub struct Cluster {
    pub(super) client: Client,
    pub(super) namespace: String,
    /// URL of the API server.
    server: String,
    /// How long a command on a node may take; zero: without limit.
    limit: Duration,
    args: ClusterArgs,
}

/// The input of a process in a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stdin {
    /// The process has no input.
    None,
    /// The input ends when the process is dropped or this program ends.
    Open,
}

/// The agent of a node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Agent {
    /// Node of the agent.
    pub node: String,
    /// What the pod is, if it does not run, like `Pending (ImagePullBackOff)`.
    pub absent: Option<String>,
    /// Namespace of the agent's pod.
    pub namespace: String,
    /// Name of the agent's pod.
    pub pod: String,
    /// Port of the agent's metrics server.
    pub metrics_port: u16,
}

impl Cluster {
    /// Connects with a kubeconfig, which is found in the same way as kubectl finds it.
    pub async fn connect(args: &ClusterArgs) -> Result<Self, KubectlError> {
        let options = KubeConfigOptions { context: args.context.clone(), ..KubeConfigOptions::default() };
        let config = kubeconfig::read(args.kubeconfig.as_deref(), &options).await;
        let config = config.map_err(|source| KubectlError::Kubeconfig(Box::new(source)))?;
        let namespace = config.default_namespace.clone();
        let server = config.cluster_url.to_string().trim_end_matches('/').to_owned();
        let client = connect::command_client(config)
            .map_err(|error| KubectlError::api(&server, "create a client for the API server", &error))?;
        Ok(Self { client, namespace, server, limit: args.request_timeout, args: args.clone() })
    }

    /// Waits for the API server's answer to a request, which is described in words, as long as `--request-timeout` allows.
    pub(super) async fn request<T>(
        &self,
        what: &'static str,
        answer: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, KubectlError> {
        match in_time(self.args.request_timeout, answer).await {
            Ok(answer) => answer.map_err(|error| KubectlError::api(&self.server, what, &error)),
            Err(cause) => Err(KubectlError::Silent { server: self.server.clone(), cause }),
        }
    }

    /// Gives the commands on the nodes this time, in which they measure, besides `--request-timeout`.
    pub fn measuring(&mut self, time: Duration) {
        if !self.limit.is_zero() {
            self.limit += time;
        }
    }

    /// Gives the commands on the nodes at least this time.
    pub fn at_least(&mut self, time: Duration) {
        if !self.limit.is_zero() {
            self.limit = self.limit.max(time);
        }
    }

    /// Sets the namespace of names without one, if the command line gives it.
    pub fn in_namespace(&mut self, args: &NamedIn) {
        if let Some(namespace) = &args.namespace {
            self.namespace.clone_from(namespace);
        }
    }

    /// Returns the named Services. A name without namespace is in the namespace of the context, as in kubectl.
    pub fn filters(&self, args: &SelectorArgs) -> Result<Vec<ServiceFilter>, SelectorError> {
        let parse = |text: &String| ServiceFilter::parse_with_default(text, &args.namespace, &self.namespace);
        args.services.iter().map(parse).collect()
    }

    /// Returns the arguments that select the same Services on a node.
    pub fn selection(&self, args: &SelectorArgs) -> Result<Vec<String>, SelectorError> {
        let NamespaceArgs { namespace, all_namespaces } = &args.namespace;
        let mut words = Vec::new();
        if *all_namespaces {
            words.push("--all-namespaces".to_owned());
        } else {
            words.extend(namespace.iter().map(|namespace| format!("--namespace={namespace}")));
        }
        words.extend(args.selector.iter().map(|labels| format!("--selector={labels}")));
        words.extend(self.filters(args)?.iter().map(ToString::to_string));
        Ok(words)
    }

    /// Waits for an answer of a node as long as `--request-timeout` allows.
    pub async fn within<T>(&self, answer: impl Future<Output = Result<T, String>>) -> Result<T, String> {
        in_time(self.args.request_timeout, answer).await?
    }

    /// Returns the selected agents, sorted by node.
    pub async fn agents(&self) -> Result<Vec<Agent>, KubectlError> {
        let pods = pods(self.client.clone(), self.args.agents_namespace.as_deref());
        let agents = ListParams::default().labels(AGENTS);
        let pods = self.request("list the agents' pods", pods.list(&agents)).await?;
        select(pods.items.into_iter().filter_map(agent).collect(), &self.args.node)
    }

    /// Runs `ballast` with these arguments on a node. Returns its output, or why there is none.
    pub async fn ask(&self, agent: &Agent, arguments: &[String]) -> Result<Outcome, String> {
        let Outcome { stdout, stderr, is_well } = self.ask_bytes(agent, arguments).await?;
        Ok(Outcome { stdout: String::from_utf8_lossy(&stdout).into_owned(), stderr, is_well })
    }

    /// Runs `ballast` on a node like [`Cluster::ask`]. Its standard output need not be text.
    async fn ask_bytes(&self, agent: &Agent, arguments: &[String]) -> Result<Outcome<Vec<u8>>, String> {
        let asked = async {
            let mut process = self.exec(agent, arguments, Stdin::None).await?;
            let status = process.take_status();
            let (out, error) = (process.stdout(), process.stderr());
            let (stdout, stderr) = tokio::join!(read(out), read(error));
            let status = match status {
                Some(status) => status.await,
                None => None,
            };
            let is_well = is_success(status.as_ref());
            let mut stderr = String::from_utf8_lossy(&stderr?).into_owned();
            if !is_well && stderr.is_empty() {
                stderr = failure(status);
            }
            Ok(Outcome { stdout: stdout?, stderr, is_well })
        };
        in_time(self.limit, asked).await?
    }

    /// Runs `ballast` on many nodes. Returns the answers in the order of `agents`.
    pub async fn ask_all(
        &self,
        agents: &[Agent],
        arguments: &[&str],
    ) -> Vec<(String, Result<Outcome, String>)> {
        let arguments: Vec<String> = arguments.iter().map(|text| (*text).to_owned()).collect();
        let ask = |agent: Agent| {
            let arguments = &arguments;
            async move { (agent.node.clone(), self.ask(&agent, arguments).await) }
        };
        stream::iter(agents.to_vec()).map(ask).buffered(AT_ONCE).collect().await
    }

    /// Runs `ballast` on all selected nodes, and returns their JSON.
    pub async fn ask_json<T: DeserializeOwned>(
        &self,
        arguments: &[&str],
    ) -> Result<PerNode<T>, KubectlError> {
        Ok(super::answers::decoded(self.ask_all(&self.agents().await?, arguments).await))
    }

    /// Runs `ballast` on many nodes, a few at a time, since an answer may be large. Returns the answers in the order in which
    /// they arrive.
    pub fn ask_each(
        &self,
        agents: Vec<Agent>,
        arguments: &[&str],
    ) -> impl Stream<Item = (String, Result<Outcome<Vec<u8>>, String>)> {
        let arguments: Vec<String> = arguments.iter().map(|text| (*text).to_owned()).collect();
        let ask = move |agent: Agent| {
            let arguments = arguments.clone();
            async move { (agent.node.clone(), self.ask_bytes(&agent, &arguments).await) }
        };
        stream::iter(agents).map(ask).buffer_unordered(FEW_AT_ONCE)
    }

    /// Starts `ballast` with these arguments in the agent's container.
    pub async fn exec(
        &self,
        agent: &Agent,
        arguments: &[String],
        stdin: Stdin,
    ) -> Result<AttachedProcess, String> {
        agent.check_running()?;
        let pods: Api<whole::Pod> = Api::namespaced(self.client.clone(), &agent.namespace);
        let command = std::iter::once("ballast".to_owned()).chain(arguments.iter().cloned());
        let attach = AttachParams::default().container(CONTAINER);
        let attach = attach.stdin(stdin == Stdin::Open).stdout(true).stderr(true);
        let process = pods.exec(&agent.pod, command.collect::<Vec<_>>(), &attach).await;
        process.map_err(|error| {
            format!("cannot run `ballast` in pod {}/{}: {}", agent.namespace, agent.pod, cause(&error))
        })
    }
}

impl Agent {
    /// Fails if the pod does not run.
    pub(super) fn check_running(&self) -> Result<(), String> {
        let Self { namespace, pod, absent, .. } = self;
        absent.as_ref().map_or(Ok(()), |state| Err(format!("pod {namespace}/{pod} is {state}")))
    }
}

/// Waits for an answer as long as the limit allows; zero: without limit.
async fn in_time<T>(limit: Duration, answer: impl Future<Output = T>) -> Result<T, String> {
    if limit.is_zero() {
        return Ok(answer.await);
    }
    timeout(limit, answer).await.map_err(|_| format!("no answer within {limit:?} (--request-timeout)"))
}

/// Whether a process has ended with exit code 0.
pub(super) fn is_success(status: Option<&Status>) -> bool {
    status.is_some_and(|status| status.status.as_deref() == Some("Success"))
}

/// Returns why a process that printed no message has failed.
pub(super) fn failure(status: Option<Status>) -> String {
    let reason = status.and_then(|status| status.message).filter(|message| !message.is_empty());
    reason.unwrap_or_else(|| "`ballast` failed in the agent's pod".to_owned())
}

/// Reads the output of a process; more than [`MOST`] bytes are an error.
async fn read(from: Option<impl AsyncRead + Unpin>) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let Some(from) = from else { return Ok(bytes) };
    let length = from.take(MOST + 1).read_to_end(&mut bytes).await.map_err(|error| error.to_string())?;
    if length as u64 > MOST { Err(format!("the answer is longer than {MOST} bytes")) } else { Ok(bytes) }
}

/// Returns the agent in a pod; `None` if the pod is not in the node's network namespace as agents are.
pub(super) fn agent(pod: Pod) -> Option<Agent> {
    let status = pod.status.unwrap_or_default();
    let absent = match status.phase.as_deref() {
        _ if pod.metadata.deletion_timestamp.is_some() => Some("Terminating".to_owned()),
        Some("Running") => None,
        _ => Some(status.words()),
    };
    let spec = pod.spec;
    let ports = spec.containers.iter().flat_map(|container| container.ports.iter().flatten());
    let mut named = ports.filter(|port| port.name.as_deref() == Some(METRICS));
    let port = named.next().and_then(|port| u16::try_from(port.container_port).ok());
    (spec.host_network == Some(true)).then_some(Agent {
        node: spec.node()?.to_owned(),
        absent,
        namespace: pod.metadata.namespace.unwrap_or_default(),
        pod: pod.metadata.name.unwrap_or_default(),
        metrics_port: port.unwrap_or(METRICS_PORT),
    })
}

/// Returns the agents on the named nodes, or all agents if no node is named; one for each node, if possible one that runs. Any
/// tenant can set the labels of an agent, so agents of several namespaces are an error.
pub(super) fn select(mut agents: Vec<Agent>, nodes: &[String]) -> Result<Vec<Agent>, KubectlError> {
    agents.sort();
    if agents.is_empty() {
        return Err(KubectlError::NoAgents { labels: AGENTS });
    }
    let namespaces: BTreeSet<&str> = agents.iter().map(|agent| agent.namespace.as_str()).collect();
    if namespaces.len() > 1 {
        let namespaces = Vec::from_iter(namespaces).join(", ");
        return Err(KubectlError::SeveralNamespaces { labels: AGENTS, namespaces });
    }
    agents.dedup_by(|agent, other| agent.node == other.node);
    for node in nodes {
        if !agents.iter().any(|agent| agent.node == *node) {
            let meant = did_you_mean(&nearest(node, agents.iter().map(|agent| agent.node.as_str())));
            return Err(KubectlError::NoNode { node: node.clone(), meant });
        }
    }
    agents.retain(|agent| nodes.is_empty() || nodes.contains(&agent.node));
    Ok(agents)
}
