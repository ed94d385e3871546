//! Errors of the plugin's commands.

use std::net::SocketAddr;

use crate::cli::sysdump::SysdumpError;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum KubectlError {
    /// The kubeconfig cannot be used.
    #[error("cannot use the kubeconfig: {0}; give a file with --kubeconfig, or a context with --context")]
    Kubeconfig(#[source] Box<kube::config::KubeconfigError>),
    /// A request to the API server failed.
    #[error("cannot {what}: {source}")]
    Api {
        /// The request, in words.
        what: &'static str,
        /// Cause of the failure.
        source: Box<kube::Error>,
    },
    /// No agent was found.
    #[error(
        "no running pod of an agent found (labels {labels}): check that Ballast is installed with its chart or manifests, or give its namespace with --agents-namespace"
    )]
    NoAgents {
        /// Labels of the agents' pods.
        labels: &'static str,
    },
    /// A named node has no agent.
    #[error("no agent runs on node {node}{meant}")]
    NoNode {
        /// The named node.
        node: String,
        /// Text that suggests similar names.
        meant: String,
    },
    /// A name does not lead to a usable object.
    #[error("{0}")]
    Name(String),
    /// A command failed on a node.
    #[error("node {node}: {message}")]
    Node {
        /// Name of the node.
        node: String,
        /// Message of the node.
        message: String,
    },
    /// The output cannot be written as JSON.
    #[error("cannot write the output as JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// The archive cannot be written.
    #[error(transparent)]
    Sysdump(#[from] SysdumpError),
    /// The page cannot be served at the address.
    #[error("cannot listen on {address}: {source}; give another port with --port, or 0 for any free port")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Cause of the failure.
        source: std::io::Error,
    },
    /// The output cannot be written.
    #[error("cannot write to standard output: {0}")]
    Write(#[from] std::io::Error),
}

impl KubectlError {
    pub(super) fn api(what: &'static str) -> impl Fn(kube::Error) -> Self {
        move |source| Self::Api { what, source: Box::new(source) }
    }
}
