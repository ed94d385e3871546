//! The connection to the API servers.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kube::config::{KubeConfigOptions, KubeconfigError};
use kube::{Client, Config};
use thiserror::Error;
use tokio::sync::watch;
use tower::service_fn;
use tracing::info;

use super::connect::{self, Address};
use super::files::{Files, has_service_account};
use super::servers::{Servers, SetupError};
use super::{kubeconfig, proxy};
use proxy_core::model::ApiServers;
use proxy_core::model::problem::chain;

/// The time for everything until requests can be sent: a resolver waits 5 s before it asks its second name server.
const READY_TIMEOUT: Duration = Duration::from_secs(15);
/// How to find the API servers and the credentials for them.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The kubeconfig file. If `None`: `$KUBECONFIG` or `~/.kube/config`, then the service account of the pod, then none if
    /// there are [`Self::servers`].
    pub kubeconfig: Option<PathBuf>,
    /// URLs of the API servers of one cluster, the first of which is the first to be tried, instead of the URL that is found
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
    /// What the client was made from.
    pub options: Options,
    /// The URL in the kubeconfig, or that of the pod's service account.
    pub url: http::Uri,
    /// The files of the credentials.
    pub files: Files,
}

/// Why the client could not be created.
#[derive(Debug, Error)]
pub enum ConnectError {
    /// The kubeconfig file cannot be used.
    #[error("cannot use the kubeconfig {path}: {why}; correct it, or give another with --kubeconfig", path = path.display())]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, without lines of the file, which may have a token.
        why: String,
    },
    /// The server's certificate could not be checked, so every connection would fail.
    #[error(
        "the CA of the API server (certificate-authority of the kubeconfig, ca.crt of the service account) contains no \
         certificate in PEM format (BEGIN CERTIFICATE)"
    )]
    EmptyAuthority,
    /// A credential cannot be sent.
    #[error(
        "the {name} of the API server's user cannot be sent to it: it contains a line break or another control \
         character; correct it in the kubeconfig or its token file"
    )]
    Header {
        /// Its name in the kubeconfig.
        name: &'static str,
    },
    /// No API server was found.
    #[error(
        "no API server found: $KUBECONFIG is not set, there is no ~/.kube/config, and this is not a pod with a service \
         account; give --kubeconfig FILE (`ballast run` without a cluster: --manifests DIR)"
    )]
    NotFound,
    /// The given URL is not valid.
    #[error("`{url}` is not the URL of an API server; write it like https://HOST:6443 or HOST:6443")]
    Server {
        /// The given text.
        url: String,
    },
    /// The kubeconfig names another server: its credentials may be those of another cluster.
    #[error("the kubeconfig names another API server now ({url}): restart the agent to use it")]
    OtherServer {
        /// The URL of that server.
        url: http::Uri,
    },
    /// Certificates, keys or tokens cannot be used.
    #[error(transparent)]
    Setup(#[from] SetupError),
}

impl ConnectError {
    fn kubeconfig(path: PathBuf, error: &KubeconfigError) -> Self {
        let text = match error {
            // Its text names the file, too.
            KubeconfigError::ReadConfig(source, _) => source.to_string(),
            error => chain(error),
        };
        // The parser appends the lines around the fault.
        Self::Kubeconfig { path, why: text.lines().next().unwrap_or_default().to_owned() }
    }
}

/// Creates a client, and sends its active server to `server_status`. It does not connect yet: an API server that is away is not an error.
pub async fn connect(
    options: &Options,
    server_status: watch::Sender<ApiServers>,
) -> Result<Connection, ConnectError> {
    // Files that change while they are read are read again.
    let files = Files::of(options.kubeconfig.as_deref());
    let config = match load(options).await {
        // Only here: while a kubeconfig is replaced, its credentials stay in use.
        Err(ConnectError::NotFound) if !has_service_account() => without_credentials(&options.servers)?,
        config => config?,
    };
    let is_tls = connect::uses_tls(&config);
    let mut urls = options.servers.iter().map(|url| parse(url, is_tls)).collect::<Result<Vec<_>, _>>()?;
    if urls.is_empty() {
        urls.push(config.cluster_url.clone());
    }
    let (namespace, url) = (config.default_namespace.clone(), config.cluster_url.clone());
    let addresses = urls.into_iter().map(|url| Address { url, name: None }).collect();
    let servers = Arc::new(Servers::new(config, addresses, server_status)?);
    let asked = Arc::clone(&servers);
    let service = service_fn(move |request| {
        let servers = Arc::clone(&asked);
        async move { servers.send(request).await }
    });
    let client = Client::new(service, namespace);
    Ok(Connection { client, servers, options: options.clone(), url, files })
}

/// Reads the kubeconfig and the credentials.
pub(super) async fn load(options: &Options) -> Result<Config, ConnectError> {
    let path = options.kubeconfig.as_deref();
    let found = kubeconfig::read(path, &KubeConfigOptions::default()).await.or_else(|error| match path {
        Some(path) => Err(ConnectError::kubeconfig(path.to_owned(), &error)),
        None => Config::incluster().map_err(|_| unusable(default_kubeconfig(), &error)),
    });
    let mut config = connect::checked(found?)?;
    if config.root_cert.as_ref().is_some_and(Vec::is_empty) && !config.accept_invalid_certs {
        return Err(ConnectError::EmptyAuthority);
    }
    // Other servers replace that of the file, as with client-go.
    if options.servers.is_empty() {
        config.cluster_url = parse(&config.cluster_url.to_string(), connect::uses_tls(&config))?;
    }
    Ok(with_own_settings(config))
}

/// Returns what client-go uses for given servers without a kubeconfig: the first of them, and no credentials.
fn without_credentials(servers: &[String]) -> Result<Config, ConnectError> {
    let first = servers.first().ok_or(ConnectError::NotFound)?;
    info!("there is no kubeconfig; connecting to the API servers without credentials");
    let mut config = Config::new(parse(first, false)?);
    config.proxy_url = proxy::of_environment().and_then(|url| url.parse().ok());
    Ok(with_own_settings(config))
}

fn with_own_settings(mut config: Config) -> Config {
    config.connect_timeout = Some(READY_TIMEOUT);
    config.read_timeout = None;
    config.headers.push((
        http::header::USER_AGENT,
        http::HeaderValue::from_static(concat!("ballast/", env!("CARGO_PKG_VERSION"))),
    ));
    config
}

/// Returns the files that are read without `--kubeconfig`, as `$KUBECONFIG` lists them; `None`: there are none.
fn default_kubeconfig() -> Option<PathBuf> {
    let of_home = || std::env::home_dir().map(|home| home.join(".kube/config"));
    std::env::var_os("KUBECONFIG")
        .filter(|paths| !paths.is_empty())
        .map(PathBuf::from)
        .or_else(|| of_home().filter(|path| path.exists()))
}

/// Returns the error that neither the default kubeconfig nor a service account can be used.
fn unusable(kubeconfig: Option<PathBuf>, error: &KubeconfigError) -> ConnectError {
    match kubeconfig {
        Some(path) => ConnectError::kubeconfig(path, error),
        None => ConnectError::NotFound,
    }
}

fn parse(url: &str, is_tls: bool) -> Result<http::Uri, ConnectError> {
    connect::server_url(url, is_tls).ok_or_else(|| ConnectError::Server { url: url.to_owned() })
}

#[cfg(test)]
mod tests;
