//! The settings for the export of telemetry.
//!
//! Settings that only Ballast has are flags. The others are OpenTelemetry's variables, as operators and charts set them
//! for every program: `OTEL_EXPORTER_OTLP_ENDPOINT`, `_HEADERS`, `_TIMEOUT`, `_CERTIFICATE`, `OTEL_SERVICE_NAME`,
//! `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_SDK_DISABLED`. An empty variable counts as one that is not set.

use std::time::Duration;

use http::Uri;
use serde::Serialize;

use super::choices::{choice, choices};
use super::error::ConfigError;
use crate::otlp::resource::pairs;
use crate::otlp::{Resource, Target};

/// The timeout of a request if `OTEL_EXPORTER_OTLP_TIMEOUT` is not set: OpenTelemetry's default.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A kind of telemetry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Telemetry {
    /// Spans of the agent's work.
    Traces,
    /// Lines of the agent's log.
    Logs,
    /// Events of the programs: refusals, drops, passes, and new flows.
    Events,
}

choices! {
    Telemetry {
        Traces = "traces": "Spans of the agent's work: lists, syncs (plan and apply), audits",
        Logs = "logs": "The agent's log lines",
        Events = "events": "The events of `ballast monitor`: refusals, drops, passes, and new flows (--otlp-sample)",
    }
}

/// The given options. The fields are the flags with these names.
#[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args)]
#[command(next_help_heading = "Health, metrics, logs")]
pub struct OtlpOptions {
    /// URL of an OpenTelemetry collector (OTLP over HTTP with JSON) for traces, log lines and events, like
    /// `http://127.0.0.1:4318`. Default: `$OTEL_EXPORTER_OTLP_ENDPOINT`; without both, the agent exports nothing.
    #[arg(long, env = "BALLAST_OTLP_ENDPOINT", value_name = "URL")]
    pub otlp_endpoint: Option<String>,
    /// What the agent exports to the collector.
    #[arg(
        long,
        env = "BALLAST_OTLP_SIGNALS",
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "traces,logs,events",
        value_parser = choice::<Telemetry>(),
    )]
    pub otlp_signals: Vec<Telemetry>,
    /// Export one of every N new flows as an event; 0: none. Refusals, drops and passes are always exported.
    #[arg(long, env = "BALLAST_OTLP_SAMPLE", value_name = "N", default_value_t = 0)]
    pub otlp_sample: u32,
}

/// Where telemetry is exported to, and which kinds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct OtlpSettings {
    /// The collector's URL. Its headers are secrets, and are not shown.
    #[serde(serialize_with = "url")]
    pub otlp_endpoint: Target,
    /// The kinds of telemetry that are exported.
    pub otlp_signals: Vec<Telemetry>,
    /// One of this many new flows is exported; 0: none.
    pub otlp_sample: u32,
    /// The value of `OTEL_SERVICE_NAME`.
    #[serde(skip)]
    service_name: Option<String>,
    /// The value of `OTEL_RESOURCE_ATTRIBUTES`.
    #[serde(skip)]
    attributes: Vec<(String, String)>,
}

fn url<S: serde::Serializer>(target: &Target, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&target.endpoint)
}

/// Returns a variable of the environment, unless it is empty.
fn given(variable: &impl Fn(&str) -> Option<String>, name: &str) -> Option<String> {
    variable(name).filter(|value| !value.trim().is_empty())
}

fn list(
    variable: &impl Fn(&str) -> Option<String>,
    name: &'static str,
) -> Result<Vec<(String, String)>, ConfigError> {
    let text = given(variable, name).unwrap_or_default();
    pairs(&text).ok_or(ConfigError::OtlpPairs { variable: name })
}

impl OtlpSettings {
    /// Checks the options and the variables; `None`: nothing is exported.
    pub fn new(
        options: OtlpOptions,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>, ConfigError> {
        let OtlpOptions { otlp_endpoint, mut otlp_signals, otlp_sample } = options;
        let endpoint = otlp_endpoint.filter(|url| !url.trim().is_empty());
        let Some(text) = endpoint.or_else(|| given(&variable, "OTEL_EXPORTER_OTLP_ENDPOINT")) else {
            return Ok(None);
        };
        if given(&variable, "OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true")) {
            return Ok(None);
        }
        if text
            .split("://")
            .nth(1)
            .and_then(|rest| rest.split('/').next())
            .is_some_and(|host| host.contains('@'))
        {
            return Err(ConfigError::OtlpCredentials);
        }
        let is_usable =
            |uri: &Uri| matches!(uri.scheme_str(), Some("http" | "https")) && uri.authority().is_some();
        let endpoint = text.trim().parse().ok().filter(is_usable).ok_or(ConfigError::OtlpEndpoint(text))?;
        let timeout = match given(&variable, "OTEL_EXPORTER_OTLP_TIMEOUT") {
            Some(text) => {
                let milliseconds = text.trim().parse().ok().filter(|number| *number > 0);
                Duration::from_millis(milliseconds.ok_or(ConfigError::OtlpTimeout(text))?)
            }
            None => TIMEOUT,
        };
        otlp_signals.sort_unstable();
        otlp_signals.dedup();
        Ok(Some(Self {
            otlp_endpoint: Target {
                endpoint,
                headers: list(&variable, "OTEL_EXPORTER_OTLP_HEADERS")?,
                certificate: given(&variable, "OTEL_EXPORTER_OTLP_CERTIFICATE").map(Into::into),
                timeout,
            },
            otlp_signals,
            otlp_sample,
            service_name: given(&variable, "OTEL_SERVICE_NAME"),
            attributes: list(&variable, "OTEL_RESOURCE_ATTRIBUTES")?,
        }))
    }

    /// Whether this kind is exported.
    pub fn has(&self, telemetry: Telemetry) -> bool {
        self.otlp_signals.contains(&telemetry)
    }

    /// Returns the resource that the telemetry describes.
    pub fn resource(&self, node: &str) -> Resource {
        Resource::new(self.service_name.as_deref(), &self.attributes, Some(node))
    }
}

/// Returns the resource of a command, from the same variables.
pub fn resource(
    variable: impl Fn(&str) -> Option<String>,
    node: Option<&str>,
) -> Result<Resource, ConfigError> {
    let name = given(&variable, "OTEL_SERVICE_NAME");
    let attributes = list(&variable, "OTEL_RESOURCE_ATTRIBUTES")?;
    Ok(Resource::new(name.as_deref(), &attributes, node))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(endpoint: Option<&str>, variables: &[(&str, &str)]) -> Result<Option<OtlpSettings>, String> {
        let all = vec![Telemetry::Events, Telemetry::Traces, Telemetry::Events];
        let options =
            OtlpOptions { otlp_endpoint: endpoint.map(str::to_owned), otlp_signals: all, otlp_sample: 0 };
        let of = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        OtlpSettings::new(options, of).map_err(|error| error.to_string())
    }

    const ENDPOINT: (&str, &str) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318");

    #[test]
    fn nothing_is_exported_unless_it_is_asked_for() {
        assert_eq!(settings(None, &[]), Ok(None));
        assert_eq!(settings(Some(""), &[("OTEL_EXPORTER_OTLP_ENDPOINT", " ")]), Ok(None));
        assert_eq!(settings(None, &[ENDPOINT, ("OTEL_SDK_DISABLED", "true")]), Ok(None));
        assert!(settings(None, &[ENDPOINT]).unwrap().is_some());
    }

    #[test]
    fn the_flag_wins_over_the_variable() {
        let found = settings(Some("https://other:4318/x"), &[ENDPOINT]).unwrap().unwrap();
        assert_eq!(found.otlp_endpoint.endpoint.to_string(), "https://other:4318/x");
        assert_eq!(found.otlp_endpoint.timeout, TIMEOUT);
        assert_eq!(found.otlp_signals, [Telemetry::Traces, Telemetry::Events]);
        assert!(!found.has(Telemetry::Logs));
    }

    #[test]
    fn what_is_wrong_is_named() {
        assert!(settings(Some("collector:4318"), &[]).unwrap_err().contains("http://HOST:4318"));
        let error = settings(Some("http://me:word@collector:4318"), &[]).unwrap_err();
        assert!(error.contains("OTEL_EXPORTER_OTLP_HEADERS") && !error.contains("word"), "{error}");
        assert!(settings(Some("/v1"), &[]).unwrap_err().contains("/v1"));
        let error = settings(None, &[ENDPOINT, ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s")]).unwrap_err();
        assert!(error.contains("OTEL_EXPORTER_OTLP_TIMEOUT") && error.contains("milliseconds"), "{error}");
        let error = settings(None, &[ENDPOINT, ("OTEL_EXPORTER_OTLP_HEADERS", "secret")]).unwrap_err();
        assert!(error.contains("OTEL_EXPORTER_OTLP_HEADERS") && !error.contains("secret"), "{error}");
    }

    #[test]
    fn headers_are_not_shown() {
        let headers = ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20word");
        let found = settings(None, &[ENDPOINT, headers]).unwrap().unwrap();
        assert_eq!(found.otlp_endpoint.headers, [("authorization".to_owned(), "Bearer word".to_owned())]);
        let shown = serde_json::to_string(&found).unwrap();
        assert_eq!(
            shown,
            r#"{"otlpEndpoint":"http://collector:4318/","otlpSignals":["traces","events"],"otlpSample":0}"#
        );
    }
}
