//! Why a command of the plugin ends early.

use std::net::SocketAddr;

/// Why it ended.
#[derive(Debug, thiserror::Error)]
pub enum KubectlError {
    /// There is no way to the API server.
    #[error("no kubeconfig can be used: {0}; --kubeconfig names a file, --context one of its contexts")]
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
        "no agent's pod runs (labels {labels}): is Ballast installed by its chart or manifests? --agents-namespace says where to look"
    )]
    NoAgents {
        /// What was looked for.
        labels: &'static str,
    },
    /// A node has no agent.
    #[error("no agent runs on a node {node}{meant}")]
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
    #[error("the answer cannot be written as JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// The address of the page is not free.
    #[error("cannot listen on {address}: {source}; --port takes another port, or 0 for any that is free")]
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
