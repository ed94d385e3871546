//! Requests to a collector, by the HTTP and TLS stack of the API server's client.

use std::path::PathBuf;
use std::time::Duration;

use http::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER, USER_AGENT};
use http::{Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kube::client::ConfigExt as _;
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use serde::Deserialize;
use tokio::time::timeout;

use super::counts::Signal;
use proxy_core::model::problem::chain;

/// Longest answer that the agent reads, in bytes; a longer body is treated as empty.
const LONGEST_ANSWER: usize = 1 << 16;
/// Longest excerpt of an error answer in the log, in bytes.
const LONGEST_REASON: usize = 200;

/// A collector, and the parameters of the requests to it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Target {
    /// Base URL of the collector, without `/v1/logs` and `/v1/traces`.
    pub endpoint: Uri,
    /// Headers of each request.
    pub headers: Vec<(String, String)>,
    /// PEM file of the certificates that may sign the collector's certificate; `None`: the certificates of the system.
    pub certificate: Option<PathBuf>,
    /// Timeout of a request.
    pub timeout: Duration,
}

/// Why the agent cannot send any request to a collector.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The file is missing, or holds no certificates.
    #[error("cannot use the certificates of {path} (OTEL_EXPORTER_OTLP_CERTIFICATE): {source}", path = path.display())]
    Certificate {
        /// Path of the file.
        path: PathBuf,
        /// Why the file cannot be used.
        source: Box<KubeconfigError>,
    },
    /// TLS cannot be set up.
    #[error("cannot set up TLS for the collector: {0}")]
    Tls(#[source] Box<kube::Error>),
    /// The name or the value is not allowed in an HTTP header.
    #[error("OTEL_EXPORTER_OTLP_HEADERS: {0:?} is not an HTTP header")]
    Header(String),
}

/// Why a collector did not accept a document.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The collector may accept the document later. Holds the reason and, if the collector sent one, the time to wait.
    Later(String, Option<Duration>),
    /// The collector will never accept the document.
    Refused(String),
}

/// HTTP client of one collector.
pub(super) struct Client {
    http: HttpClient<hyper_rustls::HttpsConnector<HttpConnector>, Full<Bytes>>,
    target: Target,
    headers: HeaderMap,
}

impl Client {
    /// Creates the client; only the first request opens a connection.
    pub(super) async fn new(target: Target) -> Result<Self, ClientError> {
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_connect_timeout(Some(target.timeout));
        let connector = tls(&target).await?.rustls_https_connector_with_connector(tcp);
        let connector = connector.map_err(|source| ClientError::Tls(Box::new(source)))?;
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(USER_AGENT, HeaderValue::from_static(concat!("ballast/", env!("CARGO_PKG_VERSION"))));
        for (name, value) in &target.headers {
            let wrong = || ClientError::Header(name.clone());
            let parsed: HeaderName = name.parse().map_err(|_| wrong())?;
            let mut value = HeaderValue::from_str(value).map_err(|_| wrong())?;
            value.set_sensitive(true);
            headers.insert(parsed, value);
        }
        Ok(Self { http: HttpClient::builder(TokioExecutor::new()).build(connector), target, headers })
    }

    /// URL of the collector, for the log.
    pub(super) fn endpoint(&self) -> &Uri {
        &self.target.endpoint
    }

    /// Sends a document. Returns how many of its records or spans the collector rejected and why; `None` if it accepted all.
    pub(super) async fn post(&self, signal: Signal, document: Bytes) -> Result<Option<Rejected>, Failure> {
        let base = self.target.endpoint.to_string();
        let mut request = Request::post(format!("{}/v1/{}", base.trim_end_matches('/'), signal.label()))
            .body(Full::new(document))
            .map_err(|error| Failure::Refused(error.to_string()))?;
        request.headers_mut().clone_from(&self.headers);
        let asked = async {
            let response =
                self.http.request(request).await.map_err(|error| Failure::Later(chain(&error), None))?;
            answer(response).await
        };
        timeout(self.target.timeout, asked).await.unwrap_or_else(|_| {
            Err(Failure::Later(format!("no answer within {:?}", self.target.timeout), None))
        })
    }
}

/// Returns a configuration of the `kube` client, of which only the TLS settings are used.
async fn tls(target: &Target) -> Result<kube::Config, ClientError> {
    let Some(path) = &target.certificate else { return Ok(kube::Config::new(target.endpoint.clone())) };
    let wrong = |source| ClientError::Certificate { path: path.clone(), source: Box::new(source) };
    let document = serde_json::json!({
        "clusters": [{"name": "otlp", "cluster": {"server": target.endpoint.to_string(), "certificate-authority": path}}],
        "contexts": [{"name": "otlp", "context": {"cluster": "otlp"}}],
        "current-context": "otlp",
    });
    let document = Kubeconfig::from_yaml(&document.to_string()).map_err(wrong)?;
    kube::Config::from_custom_kubeconfig(document, &KubeConfigOptions::default()).await.map_err(wrong)
}

/// Evaluates the collector's answer. Source: OTLP 1.9, "OTLP/HTTP Response".
async fn answer(response: Response<Incoming>) -> Result<Option<Rejected>, Failure> {
    let (parts, body) = response.into_parts();
    let body = Limited::new(body, LONGEST_ANSWER)
        .collect()
        .await
        .map(http_body_util::Collected::to_bytes)
        .unwrap_or_default();
    if parts.status.is_success() {
        return Ok(Rejected::of(&body));
    }
    let said = String::from_utf8_lossy(&body);
    let said = said.get(..said.floor_char_boundary(LONGEST_REASON)).unwrap_or_default().trim();
    let why = if said.is_empty() { parts.status.to_string() } else { format!("{}: {said}", parts.status) };
    match parts.status {
        StatusCode::TOO_MANY_REQUESTS
        | StatusCode::BAD_GATEWAY
        | StatusCode::SERVICE_UNAVAILABLE
        | StatusCode::GATEWAY_TIMEOUT => {
            let after = parts.headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
            Err(Failure::Later(why, after.map(Duration::from_secs)))
        }
        _ => Err(Failure::Refused(why)),
    }
}

/// `partialSuccess`: the records or spans of a document that the collector rejected.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Rejected {
    pub(super) count: u64,
    pub(super) reason: String,
}

impl Rejected {
    fn of(body: &[u8]) -> Option<Self> {
        #[derive(Default, Deserialize)]
        #[serde(rename_all = "camelCase", default)]
        struct Answer {
            partial_success: Option<Part>,
        }
        // Protobuf's JSON encoding writes 64-bit integers as strings; a reader must accept numbers as well.
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Count {
            Number(u64),
            Text(String),
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Part {
            #[serde(alias = "rejectedLogRecords", alias = "rejectedSpans")]
            rejected: Option<Count>,
            #[serde(default)]
            error_message: String,
        }
        let answer: Answer = serde_json::from_slice(body).ok()?;
        let part = answer.partial_success?;
        let count = match part.rejected? {
            Count::Number(count) => count,
            Count::Text(text) => text.parse().ok()?,
        };
        (count > 0).then_some(Self { count, reason: part.error_message })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partial_success_counts_the_rejected_records() {
        let of = |text: &str| Rejected::of(text.as_bytes()).map(|rejected| (rejected.count, rejected.reason));
        assert_eq!(of("{}"), None);
        assert_eq!(of(""), None);
        assert_eq!(of(r#"{"partialSuccess":{}}"#), None);
        assert_eq!(of(r#"{"partialSuccess":{"rejectedLogRecords":"0","errorMessage":"a warning"}}"#), None);
        let lost = of(r#"{"partialSuccess":{"rejectedLogRecords":"3","errorMessage":"too old"}}"#);
        assert_eq!(lost, Some((3, "too old".to_owned())));
        assert_eq!(of(r#"{"partialSuccess":{"rejectedSpans":2}}"#), Some((2, String::new())));
    }
}
