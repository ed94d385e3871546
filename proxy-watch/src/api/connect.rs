//! Builds the client of one API server.

use std::error::Error;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use http::HeaderValue;
use hyper_rustls::{FixedServerNameResolver, HttpsConnectorBuilder};
use hyper_timeout::TimeoutConnector;
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::proxy::matcher::Intercept;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use kube::client::{Body, ConfigExt};
use kube::{Client, Config};
use secrecy::ExposeSecret as _;
use tokio_rustls::rustls;
use tower::{BoxError, ServiceBuilder};
use tower_http::decompression::DecompressionLayer;

use super::authority;
use super::client::ConnectError;
use super::proxy::{self, Route};

/// A connection by HTTP/2 on which nothing arrives for this time gets a ping, as in client-go. TCP keepalive is answered
/// by the next relay, which may have lost the API server behind it.
const PING: Duration = Duration::from_secs(30);
/// A connection on which a ping is not answered within this time is dead.
const PING_TIMEOUT: Duration = Duration::from_secs(15);
/// A server that does not accept a connection within this time is away. If its name has several addresses, they share the time.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A connection that is silent for this time gets TCP keepalive probes, because a host that lost its power sends nothing.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// The interval of the keepalive probes.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// A connection on which the server acknowledges nothing for this time is dead (`TCP_USER_TIMEOUT`).
#[cfg(target_os = "linux")]
const DEAD: Duration = Duration::from_secs(20);

/// The address of an API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// Its URL.
    pub url: http::Uri,
    /// The name that its certificate must be valid for, if the configuration does not set one and this is not the URL's.
    pub name: Option<String>,
}

impl Address {
    /// Returns its IP address and port, if it is known without a resolver.
    pub fn socket(&self) -> Option<SocketAddr> {
        let host = self.url.host()?.trim_start_matches('[').trim_end_matches(']').parse().ok()?;
        let default = if self.url.scheme_str() == Some("http") { 80 } else { 443 };
        Some(SocketAddr::new(host, self.url.port_u16().unwrap_or(default)))
    }

    /// Creates a client that connects to this server only, with the credentials of `config`.
    pub fn client(&self, config: &Config) -> kube::Result<Client> {
        let mut config = config.clone();
        config.cluster_url = self.url.clone();
        config.tls_server_name = config.tls_server_name.or_else(|| self.name.clone());
        client(config, true)
    }
}

/// Creates the client of a command of kubectl. It speaks HTTP/1.1 only, so that a request can become a websocket.
pub fn command_client(config: Config) -> kube::Result<Client> {
    let unusable = |error: ConnectError| kube::Error::Service(Box::new(error));
    let mut config = checked(config).map_err(unusable)?;
    let url = config.cluster_url.to_string();
    config.cluster_url =
        server_url(&url, uses_tls(&config)).ok_or_else(|| unusable(ConnectError::Server { url }))?;
    client(config, false)
}

/// Removes white space around the token, and CA certificates that cannot be decoded. Returns an error if a credential
/// cannot be a header: the client library would panic.
pub(super) fn checked(mut config: Config) -> Result<Config, ConnectError> {
    authority::skip_undecodable(&mut config);
    let auth = &mut config.auth_info;
    let token = match (&auth.token, &auth.token_file) {
        (Some(token), _) => Some(token.expose_secret().to_owned()),
        (None, Some(path)) => std::fs::read_to_string(path).ok(),
        (None, None) => None,
    };
    if let Some(token) = token.as_deref().filter(|token| token.trim() != *token) {
        auth.token = Some(token.trim().into());
    }
    let mut id_token = auth.auth_provider.as_mut().and_then(|provider| provider.config.get_mut("id-token"));
    if let Some(token) = &mut id_token {
        **token = token.trim().into();
    }
    let extra = auth.impersonate_user_extra.iter().flatten().flat_map(|(_, values)| values);
    let headers = token.as_deref().map(|token| ("token", token.trim())).into_iter();
    let headers = headers
        .chain(id_token.map(|token| ("id-token", token.as_str())))
        .chain(auth.impersonate.as_deref().map(|user| ("as", user)))
        .chain(auth.impersonate_uid.as_deref().map(|uid| ("as-uid", uid)))
        .chain(auth.impersonate_groups.iter().flatten().map(|group| ("as-groups", group.as_str())))
        .chain(extra.map(|value| ("as-user-extra", value.as_str())));
    for (name, value) in headers {
        HeaderValue::from_str(value).map_err(|_| ConnectError::Header { name })?;
    }
    Ok(config)
}

/// Returns the URL of an API server. HOST or HOST:PORT without a scheme gets one, as with client-go
/// (`DefaultServerURL` in `k8s.io/client-go/rest/url_utils.go`); `is_tls`: this is https.
pub fn server_url(text: &str, is_tls: bool) -> Option<http::Uri> {
    let has_scheme = text.contains("://");
    let scheme = if is_tls { "https" } else { "http" };
    let url = if has_scheme { text.to_owned() } else { format!("{scheme}://{text}") };
    let is_usable = |url: &http::Uri| {
        let authority = url.authority();
        let has_legal_port = |authority: &http::uri::Authority| {
            authority.as_str().ends_with(authority.host()) || authority.port_u16().is_some()
        };
        matches!(url.scheme_str(), Some("https" | "http"))
            && authority.is_some_and(has_legal_port)
            && (has_scheme || url.path() == "/")
    };
    url.parse().ok().filter(is_usable)
}

/// Whether a server without a scheme in its URL is one with TLS, as client-go decides it.
pub(super) const fn uses_tls(config: &Config) -> bool {
    let auth = &config.auth_info;
    config.root_cert.is_some()
        || config.accept_invalid_certs
        || auth.client_certificate.is_some()
        || auth.client_certificate_data.is_some()
}

/// Whether an error of a request is about certificates or TLS, and not about the way to the server.
pub fn is_tls(error: &(dyn Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        if error.is::<rustls::Error>() {
            return true;
        }
        next = match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
            // The source of an I/O error is that of the error inside.
            Some(inside) => Some(inside),
            None => error.source(),
        };
    }
    false
}

fn proxy(config: &Config) -> kube::Result<Option<Intercept>> {
    proxy::of(config).map_err(|error| kube::Error::Service(Box::new(error)))
}

/// Builds the same client as kube-rs, with these differences: it speaks HTTP/2 if the server does, so that pings notice a
/// dead connection, TCP keepalive is on, a failed request is not retried here, since another server may answer it, a
/// proxy from the environment heeds `NO_PROXY`, and the CA file may contain the server's own certificate.
fn client(config: Config, has_http2: bool) -> kube::Result<Client> {
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
    tcp.set_keepalive(Some(KEEPALIVE));
    tcp.set_keepalive_interval(Some(KEEPALIVE_INTERVAL));
    #[cfg(target_os = "linux")]
    tcp.set_tcp_user_timeout(Some(DEAD));
    let mut tls =
        HttpsConnectorBuilder::new().with_tls_config(authority::tls(config.clone())?).https_or_http();
    if let Some(name) = config.tls_server_name.clone() {
        let name = name.try_into().map_err(|error| kube::Error::Service(Box::new(error)))?;
        tls = tls.with_server_name_resolver(FixedServerNameResolver::new(name));
    }
    let route = Route::new(proxy(&config)?.as_ref(), tcp);
    let https = if has_http2 {
        tls.enable_all_versions().wrap_connector(route)
    } else {
        tls.enable_http1().wrap_connector(route)
    };
    let mut connector = TimeoutConnector::new(https);
    connector.set_connect_timeout(config.connect_timeout);
    let http: HttpClient<_, Body> = HttpClient::builder(TokioExecutor::new())
        .timer(TokioTimer::new())
        .http2_keep_alive_interval(PING)
        .http2_keep_alive_timeout(PING_TIMEOUT)
        .build(connector);
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .layer(DecompressionLayer::new().gzip(!config.disable_compression))
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        .service(http);
    Ok(Client::new(service, config.default_namespace))
}
