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

/// A server that does not accept a connection within this time is away.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A watch is silent for at most 290 s (the API server ends it then), so a longer silence means that the connection is dead.
const READ_TIMEOUT: Duration = Duration::from_mins(5);
/// A connection that is silent for this time gets TCP keepalive probes, because a host that lost its power sends nothing.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// The interval of the keepalive probes.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// A connection on which the server acknowledges nothing for this time is dead (`TCP_USER_TIMEOUT`).
const DEAD: Duration = Duration::from_secs(20);

/// How to find the API servers and the credentials for them.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The kubeconfig file. If `None`: `$KUBECONFIG`, `~/.kube/config`, then the service account of the pod.
    pub kubeconfig: Option<PathBuf>,
    /// URLs of the API servers of one cluster, in the order in which they are tried, instead of the URL that is found
    /// otherwise. A pod gets the address of the Service `kubernetes`, which does not work until this agent has
    /// programmed it: a node without any other proxy needs this option.
    pub servers: Vec<String>,
}

/// The connection to the API servers.
pub struct Connection {
    /// Sends each request to the active server.
    pub client: Client,
    /// All servers.
    pub servers: Arc<Servers>,
    /// The configuration for the first server; the other servers differ only by their addresses.
    pub config: Config,
}

/// Why the client could not be created.
#[derive(Debug, Error)]
pub enum ConnectError {
    /// The given kubeconfig file cannot be used.
    #[error("cannot use the kubeconfig {path}; check --kubeconfig", path = path.display())]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<KubeconfigError>,
    },
    /// No API server was found.
    #[error(
        "no API server found: this is not a pod with a service account, and there is no kubeconfig in \
         $KUBECONFIG or ~/.kube/config; give --kubeconfig FILE, or --manifests DIR to run without a cluster"
    )]
    NotFound {
        /// Why none of the sources that were tried gives one.
        source: Box<InferConfigError>,
    },
    /// The given URL is not valid.
    #[error("`{url}` is not the URL of an API server; write it like https://HOST:6443")]
    Server {
        /// The given text.
        url: String,
    },
    /// Certificates, keys or tokens cannot be used.
    #[error(
        "cannot set up the connection to {server}; check the certificates and credentials in the kubeconfig"
    )]
    Setup {
        /// The API server's URL.
        server: String,
        /// The cause.
        source: Box<kube::Error>,
    },
}

/// Creates a client, and sends its active server to `told`. It does not connect yet: an API server that is away is not an error.
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

/// Creates a server with its own client. `name`: the name that its certificate must be valid for, if `config` does not set one.
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

/// Builds the same client as kube-rs, with two differences: TCP keepalive is on, and a failed request is not retried
/// here, since another server may answer it.
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
