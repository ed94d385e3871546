//! Why a command of the plugin ends early.

use std::net::SocketAddr;

/// Why it ended.
#[derive(Debug, thiserror::Error)]
pub enum KubectlError {
    /// There is no way to the API server.
    #[error("cannot use the kubeconfig: {0}; give a file with --kubeconfig, or a context with --context")]
    Kubeconfig(#[source] Box<kube::config::KubeconfigError>),
    /// The API server does not do what it was asked.
    #[error("cannot {what}: {source}")]
    Api {
        /// What was asked.
        what: &'static str,
        /// Why not.
        source: Box<kube::Error>,
    },
    /// No agent can be asked.
    #[error(
        "no running pod of an agent found (labels {labels}): check that Ballast is installed with its chart or manifests, or give its namespace with --agents-namespace"
    )]
    NoAgents {
        /// What was looked for.
        labels: &'static str,
    },
    /// A node has no agent.
    #[error("no agent runs on node {node}{meant}")]
    NoNode {
        /// The node that was named.
        node: String,
        /// Those that may be meant, in words.
        meant: String,
    },
    /// A name of an object is none.
    #[error("{0}")]
    Name(String),
    /// A command fails on a node.
    #[error("node {node}: {message}")]
    Node {
        /// The node.
        node: String,
        /// What it says.
        message: String,
    },
    /// The answer cannot be written as JSON.
    #[error("cannot write the output as JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// The address of the page is not free.
    #[error("cannot listen on {address}: {source}; give another port with --port, or 0 for any free port")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Why not.
        source: std::io::Error,
    },
    /// The answer cannot be written.
    #[error("cannot write to standard output: {0}")]
    Write(#[from] std::io::Error),
}

impl KubectlError {
    pub(super) fn api(what: &'static str) -> impl Fn(kube::Error) -> Self {
        move |source| Self::Api { what, source: Box::new(source) }
    }
}
