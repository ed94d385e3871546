//! The connection to the API servers.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hyper_timeout::TimeoutConnector;
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kube::client::{Body, ConfigExt};
use kube::config::{InferConfigError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};
use thiserror::Error;
use tokio::sync::watch;
use tower::{BoxError, ServiceBuilder, service_fn};
use tower_http::decompression::DecompressionLayer;

use super::servers::{Server, Servers};
use crate::model::ApiServers;

/// A server that does not take a connection within this time is away.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A watch is silent for at most 290 s (the API server ends it then), so longer silence is a dead connection.
const READ_TIMEOUT: Duration = Duration::from_mins(5);
/// A watch that is silent for so long is asked whether its server lives, by TCP and again and again: a host that lost its
/// power says nothing.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// Between two such questions.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// A connection on which nothing is acknowledged for so long is dead.
const DEAD: Duration = Duration::from_secs(20);

/// Where the API servers are, and who we are to them.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// A kubeconfig file. Without one: `$KUBECONFIG`, `~/.kube/config`, then the service account of the pod.
    pub kubeconfig: Option<PathBuf>,
    /// The URLs of API servers of one cluster, in the order in which they are tried, instead of the one found otherwise.
    /// A pod is told the address of the Service `kubernetes`, which does not work before we made it work: a node without
    /// any proxy needs this.
    pub servers: Vec<String>,
}

/// What talks to the API servers.
pub struct Connection {
    /// What sends requests, each to the active server.
    pub client: Client,
    /// All servers.
    pub servers: Arc<Servers>,
    /// How the first of them is reached; the others differ by their addresses.
    pub config: Config,
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
    #[error("`{url}` is not the URL of an API server; write it like https://HOST:6443")]
    Server {
        /// What was given.
        url: String,
    },
    /// Certificates, keys or tokens cannot be used.
    #[error(
        "cannot set up the connection to {server}; check the certificates and credentials in the kubeconfig"
    )]
    Setup {
        /// The API server's URL.
        server: String,
        /// What is wrong.
        source: Box<kube::Error>,
    },
}

/// Makes a client, and tells `told` which server it uses. It does not connect yet: an API server that is away is not an
/// error.
pub async fn connect(options: &Options, told: watch::Sender<ApiServers>) -> Result<Connection, ConnectError> {
    let mut config = match &options.kubeconfig {
        Some(path) => from_file(path)
            .await
            .map_err(|source| ConnectError::Kubeconfig { path: path.clone(), source: Box::new(source) })?,
        None => {
            Config::infer().await.map_err(|source| ConnectError::NotFound { source: Box::new(source) })?
        }
    };
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config.read_timeout = Some(READ_TIMEOUT);
    config.headers.push((
        http::header::USER_AGENT,
        http::HeaderValue::from_static(concat!("ballast/", env!("CARGO_PKG_VERSION"))),
    ));
    let mut urls = options.servers.iter().map(|url| parse(url)).collect::<Result<Vec<_>, _>>()?;
    if urls.is_empty() {
        urls.push(config.cluster_url.clone());
    }
    config.cluster_url.clone_from(&urls[0]);
    let servers = urls.into_iter().map(|url| server(&config, url, None));
    let servers = Arc::new(Servers::new(servers.collect::<Result<_, _>>()?, told));
    let asked = Arc::clone(&servers);
    let service = service_fn(move |request| {
        let servers = Arc::clone(&asked);
        async move { servers.send(request).await }
    });
    let client = Client::new(service, config.default_namespace.clone());
    Ok(Connection { client, servers, config })
}

fn parse(url: &str) -> Result<http::Uri, ConnectError> {
    let is_usable =
        |uri: &http::Uri| matches!(uri.scheme_str(), Some("https" | "http")) && uri.authority().is_some();
    url.parse().ok().filter(is_usable).ok_or_else(|| ConnectError::Server { url: url.to_owned() })
}

/// One server, with a client of its own. `name` is what its certificate has to be valid for, if not what `config` says.
pub(super) fn server(
    config: &Config,
    cluster_url: http::Uri,
    name: Option<&str>,
) -> Result<Server, ConnectError> {
    let mut config = config.clone();
    config.cluster_url = cluster_url;
    config.tls_server_name = config.tls_server_name.or_else(|| name.map(str::to_owned));
    let url = config.cluster_url.to_string();
    match client(config) {
        Ok(client) => Ok(Server { url, client }),
        Err(source) => Err(ConnectError::Setup { server: url, source: Box::new(source) }),
    }
}

/// kube-rs' own stack, but for two things: TCP asks whether the server lives, and what a server cannot answer is not
/// asked again here, since another server may.
fn client(config: Config) -> kube::Result<Client> {
    if config.proxy_url.is_some() {
        return Client::try_from(config);
    }
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_keepalive(Some(KEEPALIVE));
    tcp.set_keepalive_interval(Some(KEEPALIVE_INTERVAL));
    tcp.set_tcp_user_timeout(Some(DEAD));
    let mut connector = TimeoutConnector::new(config.rustls_https_connector_with_connector(tcp)?);
    connector.set_connect_timeout(config.connect_timeout);
    connector.set_read_timeout(config.read_timeout);
    connector.set_write_timeout(config.write_timeout);
    let http: HttpClient<_, Body> = HttpClient::builder(TokioExecutor::new()).build(connector);
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .layer(DecompressionLayer::new().gzip(!config.disable_compression))
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        .service(http);
    Ok(Client::new(service, config.default_namespace))
}

async fn from_file(path: &std::path::Path) -> Result<Config, KubeconfigError> {
    Config::from_custom_kubeconfig(Kubeconfig::read_from(path)?, &KubeConfigOptions::default()).await
}

#[cfg(test)]
mod tests;
