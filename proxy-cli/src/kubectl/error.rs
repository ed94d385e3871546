//! Errors of the plugin's commands.

use std::net::SocketAddr;

use axum::http::StatusCode;
use kube::client::UpgradeConnectionError;

use crate::archive::SysdumpError;
use crate::output::ListError;
use crate::selector::SelectorError;
use proxy_core::docs;
use proxy_core::model::problem::chain;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum KubectlError {
    /// The kubeconfig cannot be used.
    #[error("cannot use the kubeconfig: {0}; give a file with --kubeconfig, or a context with --context")]
    Kubeconfig(#[source] Box<kube::config::KubeconfigError>),
    /// The API server does not answer.
    #[error("the API server {server} does not answer ({cause}); check --kubeconfig and --context")]
    Silent {
        /// URL of the server.
        server: String,
        /// Why there is no answer.
        cause: String,
    },
    /// The API server refused a request, or sent an unusable answer.
    #[error("cannot {what}: {cause}")]
    Api {
        /// The request, in words.
        what: &'static str,
        /// Cause of the failure.
        cause: String,
    },
    /// No agent was found.
    #[error(
        "no pod of an agent found (labels {labels}): check that Ballast is installed with its chart or manifests, or give its namespace with --agents-namespace"
    )]
    NoAgents {
        /// Labels of the agents' pods.
        labels: &'static str,
    },
    /// Pods that look like agents run in several namespaces.
    #[error(
        "pods with the labels of an agent run in several namespaces ({namespaces}), and any tenant can set the labels ({labels}): give the namespace of Ballast with --agents-namespace"
    )]
    SeveralNamespaces {
        /// Labels of the agents' pods.
        labels: &'static str,
        /// Names of the namespaces.
        namespaces: String,
    },
    /// A named node has no agent.
    #[error("no agent runs on node {node}{meant} (`kubectl ballast status` lists the nodes)")]
    NoNode {
        /// The named node.
        node: String,
        /// Text that suggests similar names.
        meant: String,
    },
    /// A name does not lead to a usable object.
    #[error("{0}")]
    Name(String),
    /// The arguments select nothing.
    #[error(transparent)]
    Selector(#[from] SelectorError),
    /// The list cannot be sorted, or written as JSON or YAML.
    #[error(transparent)]
    List(#[from] ListError),
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
    /// Returns the error of a failed request to this server.
    pub(super) fn api(server: &str, what: &'static str, error: &kube::Error) -> Self {
        let cause = cause(error);
        match error {
            kube::Error::Service(_) | kube::Error::HyperError(_) | kube::Error::SerdeError(_) => {
                Self::Silent { server: server.to_owned(), cause }
            }
            kube::Error::Api(status) if status.code >= 500 => {
                Self::Api { what, cause: format!("the API server {server} answers {}: {cause}", status.code) }
            }
            _ => Self::Api { what, cause },
        }
    }
}

/// Returns why a request failed, and what a user without rights needs.
pub(super) fn cause(error: &kube::Error) -> String {
    let (text, is_forbidden) = match error {
        kube::Error::Api(status) if status.code == StatusCode::UNAUTHORIZED.as_u16() => {
            let text = "the API server does not accept the credentials (401); log in again, or check --kubeconfig and --context";
            (text.to_owned(), false)
        }
        kube::Error::Api(status) => (status.message.clone(), status.code == StatusCode::FORBIDDEN.as_u16()),
        kube::Error::Service(cause) => (chain(&**cause), false),
        kube::Error::UpgradeConnection(cause) => {
            let is_forbidden = matches!(cause, UpgradeConnectionError::ProtocolSwitch(status) if *status == StatusCode::FORBIDDEN);
            (cause.to_string(), is_forbidden)
        }
        other => (chain(other), false),
    };
    if is_forbidden {
        format!("{text}; the user needs the rights in {}", docs::page("kubectl.md"))
    } else {
        text
    }
}
