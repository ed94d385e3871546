//! `ballast gate`: a pod waits for all nodes, at both ends of its life.
//!
//! Kubernetes sends connections to a pod when it is ready, and the readiness gate is a part of that. So the gate must not wait for
//! nodes to *select* the pod: none would before the gate opens. It waits until every node *knows* the pod, as an endpoint that is not
//! ready, with everything programmed that the node knows. A node whose agent is stuck, cut off from the API server or unable to
//! write its maps keeps the gate closed, and the rollout stops before it ends another pod.
//!
//! The gate cannot show that a node has seen the pod become ready, just afterwards; the other end makes up for that. A rollout
//! loses connections because a node still sends them to the pod that ends. So the preStop hook of the pod's containers asks here,
//! and the answer comes once no node selects the pod. Nodes learn of the successor before or with the end of its predecessor.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::routing::get;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{sleep, timeout};

use crate::cli::args::gate::GateArgs;
use crate::http::gate::{self, OfNodes, Until};
use proxy_core::model::ServiceName;
use proxy_core::model::plural::plural;

/// Pause between two questions.
const PAUSE: Duration = Duration::from_millis(500);
/// How long the agent may take to answer: it asks all others.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long the API server may take to answer.
const API_PATIENCE: Duration = Duration::from_secs(10);

/// The command cannot work.
#[derive(Debug, thiserror::Error)]
pub enum GateError {
    /// The async runtime cannot be started.
    #[error("cannot start: {0}")]
    Start(#[from] std::io::Error),
    /// The pod has no credentials.
    #[error(
        "cannot use the pod's service account: {0}; the pod needs one that may patch pods/status in its namespace"
    )]
    Account(#[source] kube::Error),
    /// The address is in use.
    #[error("cannot listen on {address}: {source}; give another address with --listen")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The cause.
        source: std::io::Error,
    },
}

/// The agent of the node, and about which pod it is asked.
#[derive(Clone, Debug)]
struct Asker {
    agent: SocketAddr,
    services: Vec<ServiceName>,
    addresses: Vec<IpAddr>,
}

/// Runs until SIGTERM or SIGINT; with `--once`, until the condition is set.
pub fn run(args: &GateArgs) -> Result<(), GateError> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let (mut terminate, mut interrupt) =
            (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        tokio::select! {
            result = work(args) => result,
            _ = terminate.recv() => Ok(()),
            _ = interrupt.recv() => Ok(()),
        }
    })
}

async fn work(args: &GateArgs) -> Result<(), GateError> {
    let asker = Asker {
        agent: SocketAddr::new(args.host, args.agent_port),
        services: args
            .service
            .iter()
            .map(|name| ServiceName::new(args.namespace.as_str(), name.as_str()))
            .collect(),
        addresses: args.addresses.clone(),
    };
    let open = async {
        let client = Client::try_default().await.map_err(GateError::Account)?;
        asker.wait(Until::Known).await;
        set_condition(&client, args).await;
        Ok(())
    };
    if args.once {
        return open.await;
    }
    let address = args.listen;
    let listener =
        TcpListener::bind(address).await.map_err(|source| GateError::Listen { address, source })?;
    let router = Router::new().route("/removed", get(removed)).with_state(asker.clone());
    let serve = async { Ok(axum::serve(listener, router).await?) };
    tokio::try_join!(open, serve).map(|_| ())
}

/// Answers a preStop hook once no node sends new connections to the pod. The kubelet waits as long as the pod's grace period.
async fn removed(State(asker): State<Asker>) -> &'static str {
    asker.wait(Until::Removed).await;
    "no node sends new connections to this pod\n"
}

impl Asker {
    /// Asks repeatedly, until all nodes have reached the state for each Service. Logs each new reason to wait.
    async fn wait(&self, until: Until) {
        let mut logged = BTreeSet::new();
        for service in &self.services {
            while let Err(why) = self.ask(service, until).await {
                if logged.insert(why.clone()) {
                    tracing::info!(%service, until = until.label(), why, "waiting for all nodes");
                }
                sleep(PAUSE).await;
            }
        }
        tracing::info!(until = until.label(), "all nodes have programmed it");
    }

    async fn ask(&self, service: &ServiceName, until: Until) -> Result<(), String> {
        let path = gate::path(service, &self.addresses, until, false);
        let failed = |why: String| format!("the agent at {}: {why}", self.agent);
        let answer =
            gate::get(self.agent, &path, PATIENCE).await.map_err(|error| failed(error.to_string()))?;
        let body = match answer {
            (200, body) => body,
            (status, body) => return Err(failed(format!("HTTP status {status}: {}", body.trim()))),
        };
        let OfNodes { nodes, behind, named } = serde_json::from_str(&body)
            .map_err(|error| failed(format!("cannot parse the answer: {error}")))?;
        if behind == 0 {
            Ok(())
        } else {
            Err(format!("{behind} of {}: {}", plural(nodes, "node"), named.join("; ")))
        }
    }
}

/// Sets the pod's condition; tries again until the API server has taken it.
async fn set_condition(client: &Client, args: &GateArgs) {
    let pods: Api<Pod> = Api::namespaced(client.clone(), &args.namespace);
    let condition = json!({
        "type": args.condition,
        "status": "True",
        "reason": "Programmed",
        "message": "every node knows this pod as an endpoint",
        "lastTransitionTime": jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
    });
    let patch = Patch::Strategic(json!({ "status": { "conditions": [condition] } }));
    let (parameters, mut logged) = (PatchParams::default(), String::new());
    loop {
        let patched = pods.patch_status(&args.pod, &parameters, &patch);
        let why = match timeout(API_PATIENCE, patched).await {
            Ok(Ok(_)) => break,
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {API_PATIENCE:?}"),
        };
        if why != logged {
            tracing::warn!(
                pod = args.pod,
                why,
                "cannot set the condition; its service account must be allowed to patch pods/status"
            );
            logged = why;
        }
        sleep(PAUSE).await;
    }
    tracing::info!(pod = args.pod, condition = args.condition, "the condition is set");
}

#[cfg(test)]
mod tests;
