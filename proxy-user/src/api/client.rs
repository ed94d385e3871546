//! The connection to the API server.

use std::path::PathBuf;
use std::time::Duration;

use kube::config::{InferConfigError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};
use thiserror::Error;

/// A server that does not take a connection within this time is away.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A watch is silent for at most 290 s (the API server ends it then), so longer silence is a dead connection.
const READ_TIMEOUT: Duration = Duration::from_mins(5);

/// Where the API server is, and who we are to it.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// A kubeconfig file. Without one: `$KUBECONFIG`, `~/.kube/config`, then the service account of the pod.
    pub kubeconfig: Option<PathBuf>,
    /// The URL of the API server, instead of the one found otherwise. A pod is told the address of the Service
    /// `kubernetes`, which does not work before we made it work: a node without any proxy needs this.
    pub server: Option<String>,
}

/// Why there is no client.
#[derive(Debug, Error)]
pub enum ConnectError {
    /// The kubeconfig file that was asked for cannot be used.
    #[error("cannot use the kubeconfig {path}; check --kubeconfig", path = path.display())]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<KubeconfigError>,
    },
    /// There is no hint of an API server anywhere.
    #[error(
        "no API server found: this is not a pod with a service account, and there is no kubeconfig in \
         $KUBECONFIG or ~/.kube/config; give --kubeconfig FILE, or --manifests DIR to run without a cluster"
    )]
    NotFound {
        /// What was tried.
        source: Box<InferConfigError>,
    },
    /// The URL that was asked for is none.
    #[error("`{url}` is not the URL of an API server; write it as https://HOST:6443")]
    Server {
        /// What was given.
        url: String,
    },
    /// Certificates, keys or tokens cannot be used.
    #[error("cannot set up the connection to {server}; check the certificates and credentials it names")]
    Setup {
        /// The API server's URL.
        server: String,
        /// What is wrong.
        source: Box<kube::Error>,
    },
}

/// Makes a client. It does not connect yet: an API server that is away is not an error.
pub async fn connect(options: &Options) -> Result<Client, ConnectError> {
    let mut config = match &options.kubeconfig {
        Some(path) => from_file(path)
            .await
            .map_err(|source| ConnectError::Kubeconfig { path: path.clone(), source: Box::new(source) })?,
        None => {
            Config::infer().await.map_err(|source| ConnectError::NotFound { source: Box::new(source) })?
        }
    };
    if let Some(url) = &options.server {
        config.cluster_url = url
            .parse()
            .ok()
            .filter(|uri: &http::Uri| {
                matches!(uri.scheme_str(), Some("https" | "http")) && uri.authority().is_some()
            })
            .ok_or_else(|| ConnectError::Server { url: url.clone() })?;
    }
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config.read_timeout = Some(READ_TIMEOUT);
    config.headers.push((
        http::header::USER_AGENT,
        http::HeaderValue::from_static(concat!("ballast/", env!("CARGO_PKG_VERSION"))),
    ));
    let server = config.cluster_url.to_string();
    Client::try_from(config).map_err(|source| ConnectError::Setup { server, source: Box::new(source) })
}

async fn from_file(path: &std::path::Path) -> Result<Config, KubeconfigError> {
    Config::from_custom_kubeconfig(Kubeconfig::read_from(path)?, &KubeConfigOptions::default()).await
}

#[cfg(test)]
mod tests;
