//! The proxy through which an API server is reached: `proxy-url` of the kubeconfig, or `HTTPS_PROXY`, as in client-go.
//!
//! A proxy from the environment is not used for loopback addresses and for the hosts of `NO_PROXY`. kube-rs does not tell
//! where its proxy comes from, and compares `NO_PROXY` with the proxy's own host, so this is done here.

use std::env;
use std::net::IpAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::FutureExt as _;
use http::Uri;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::proxy::Tunnel;
use hyper_util::client::proxy::matcher::{Intercept, Matcher};
use hyper_util::rt::TokioIo;
use ipnet::IpNet;
use kube::Config;
use tokio::net::TcpStream;
use tower::{BoxError, Service};

/// The proxy cannot be used.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot use the proxy {proxy} (HTTPS_PROXY, or proxy-url in the kubeconfig): Ballast connects through proxies with \
     http:// only; give such a proxy, or connect without one: add {host} to NO_PROXY, or remove proxy-url"
)]
pub struct UnusableProxy {
    /// The proxy, without its credentials.
    proxy: String,
    /// The host of the API server.
    host: String,
}

/// Returns the proxy for the server of `config`; `None`: there is none, or the server is excepted.
pub fn of(config: &Config) -> Result<Option<Intercept>, UnusableProxy> {
    let excepted = variable(["NO_PROXY", "no_proxy"]).unwrap_or_default();
    select(config.proxy_url.as_ref(), &config.cluster_url, of_environment().as_deref(), &excepted)
}

/// Returns the proxy that the environment names for https.
pub fn of_environment() -> Option<String> {
    variable(["HTTPS_PROXY", "https_proxy"])
}

fn variable(names: [&str; 2]) -> Option<String> {
    names.iter().find_map(|name| env::var(name).ok().filter(|value| !value.is_empty()))
}

fn select(
    proxy: Option<&Uri>,
    server: &Uri,
    from_environment: Option<&str>,
    excepted: &str,
) -> Result<Option<Intercept>, UnusableProxy> {
    let Some(proxy) = proxy else { return Ok(None) };
    let host = server.host().unwrap_or_default();
    let is_from_environment = from_environment.and_then(|text| text.parse().ok()).as_ref() == Some(proxy);
    let is_https = server.scheme_str() == Some("https");
    if is_from_environment && (!is_https || is_direct(host, server.port_u16().unwrap_or(443), excepted)) {
        return Ok(None);
    }
    // The matcher only separates the credentials from the URL.
    match Matcher::builder().all(proxy.to_string()).build().intercept(server) {
        Some(found) if found.uri().scheme_str() == Some("http") => Ok(Some(found)),
        _ => {
            let scheme = proxy.scheme_str().unwrap_or("http");
            let place = proxy.host().unwrap_or("?");
            Err(UnusableProxy { proxy: format!("{scheme}://{place}"), host: host.to_owned() })
        }
    }
}

/// Whether `NO_PROXY` excepts a host, by the rules of Go's `golang.org/x/net/http/httpproxy`.
fn is_direct(host: &str, port: u16, excepted: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']').to_ascii_lowercase();
    let address = host.parse::<IpAddr>().ok();
    if host == "localhost" || address.is_some_and(|address| address.is_loopback()) {
        return true;
    }
    excepted.split(',').any(|entry| covers(&entry.trim().to_ascii_lowercase(), &host, address, port))
}

/// Whether one entry of `NO_PROXY` excepts a host: `*`, a CIDR, an address, a domain with its subdomains, or with a leading
/// dot only these; all but the first two may have a port.
fn covers(entry: &str, host: &str, address: Option<IpAddr>, port: u16) -> bool {
    if entry == "*" {
        return true;
    }
    if let Ok(range) = entry.parse::<IpNet>() {
        return address.is_some_and(|address| range.contains(&address.to_canonical()));
    }
    let (name, wanted) = split_port(entry);
    if !wanted.is_empty() && wanted.parse() != Ok(port) {
        return false;
    }
    if let Ok(excepted) = name.parse::<IpAddr>() {
        return address.is_some_and(|address| address.to_canonical() == excepted.to_canonical());
    }
    let name = name.strip_prefix('*').filter(|rest| rest.starts_with('.')).unwrap_or(name);
    match name.strip_prefix('.') {
        Some(domain) => !domain.is_empty() && host.strip_suffix(domain).is_some_and(|sub| sub.ends_with('.')),
        None => {
            !name.is_empty()
                && host.strip_suffix(name).is_some_and(|sub| sub.is_empty() || sub.ends_with('.'))
        }
    }
}

/// Splits `host:port`, as Go's `net.SplitHostPort`; an IPv6 address with a port is in brackets.
fn split_port(entry: &str) -> (&str, &str) {
    if let Some((host, port)) = entry.strip_prefix('[').and_then(|rest| rest.split_once("]:")) {
        return (host, port);
    }
    match entry.split_once(':') {
        Some((host, port)) if !port.contains(':') => (host, port),
        _ => (entry, ""),
    }
}

/// Connects to a server, directly or through a proxy. One type for both: the HTTP client is compiled once.
#[derive(Clone)]
pub enum Route {
    /// To the server itself.
    Direct(HttpConnector),
    /// To the proxy, which connects to the server.
    Tunnel(Tunnel<HttpConnector>),
}

impl Route {
    /// Creates the connector for this proxy.
    pub fn new(proxy: Option<&Intercept>, tcp: HttpConnector) -> Self {
        let Some(proxy) = proxy else { return Self::Direct(tcp) };
        let tunnel = Tunnel::new(proxy.uri().clone(), tcp);
        Self::Tunnel(match proxy.basic_auth() {
            Some(credentials) => tunnel.with_auth(credentials.clone()),
            None => tunnel,
        })
    }
}

impl Service<Uri> for Route {
    type Response = TokioIo<TcpStream>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        match self {
            Self::Direct(tcp) => tcp.poll_ready(context).map_err(Into::into),
            Self::Tunnel(tunnel) => tunnel.poll_ready(context).map_err(Into::into),
        }
    }

    fn call(&mut self, server: Uri) -> Self::Future {
        match self {
            Self::Direct(tcp) => tcp.call(server).map(|done| done.map_err(Into::into)).boxed(),
            Self::Tunnel(tunnel) => tunnel.call(server).map(|done| done.map_err(Into::into)).boxed(),
        }
    }
}

#[cfg(test)]
mod tests;
