//! Settings that cannot be.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use super::kube_proxy::FileError;
use crate::host::selection::Selection;

/// Settings that contradict each other or this machine.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// Zero or shorter than its lower bound.
    #[error("--sync-period {0:?} is too short: give at least 1s (the default is 30s)")]
    SyncPeriod(Duration),
    /// The smaller period is the larger one.
    #[error(
        "--min-sync-period {min:?} is longer than --sync-period {max:?}: shorten the first or lengthen the second"
    )]
    Periods {
        /// `--min-sync-period`.
        min: Duration,
        /// `--sync-period`.
        max: Duration,
    },
    /// The two servers cannot share one address.
    #[error(
        "healthzBindAddress and metricsBindAddress (--healthz-bind-address, --metrics-bind-address) are both {0}: give them different ports, or switch \
         off one of them with an empty value"
    )]
    SameAddress(SocketAddr),
    /// The page has no server.
    #[error(
        "--page needs the metrics server, which metricsBindAddress (--metrics-bind-address) switches off: give it an address, or \
         remove --page"
    )]
    PageWithoutServer,
    /// Not the URL of a collector.
    #[error(
        "--otlp-endpoint (or OTEL_EXPORTER_OTLP_ENDPOINT) {0:?} is not the URL of an OpenTelemetry collector: write it like \
         http://HOST:4318, or remove it to export nothing"
    )]
    OtlpEndpoint(String),
    /// A URL with a name and a password, which is not told again.
    #[error(
        "--otlp-endpoint (or OTEL_EXPORTER_OTLP_ENDPOINT) contains credentials: put them into \
         OTEL_EXPORTER_OTLP_HEADERS, like authorization=Basic%20..."
    )]
    OtlpCredentials,
    /// Not a number.
    #[error("OTEL_EXPORTER_OTLP_TIMEOUT {0:?} is not a number of milliseconds, like 10000")]
    OtlpTimeout(String),
    /// Not a list of pairs. Its value may be a secret.
    #[error("{variable} is not a comma-separated list of KEY=VALUE with percent-encoded values")]
    OtlpPairs {
        /// The variable.
        variable: &'static str,
    },
    /// Only patterns that leave devices out.
    #[error("--devices {0} only excludes devices: put a * in front, like *,{0}")]
    OnlyExcludes(Selection),
    /// Both cannot be.
    #[error("--uplinks and --local-devices both contain {0}: remove it from one of them")]
    BothSides(String),
    /// A way to know pods that lacks what it goes by.
    #[error("--detect-local-mode {mode} needs {flag}")]
    DetectLocal {
        /// The mode.
        mode: &'static str,
        /// The flag that is missing.
        flag: &'static str,
    },
    /// Not a usable node name.
    #[error(
        "--hostname-override {0:?} is not a node name: use lower-case letters, digits, - and ., at most 253 characters"
    )]
    NodeName(String),
    /// The host does not tell its name.
    #[error("cannot read the host name from {path}: {source}; give --hostname-override")]
    HostName {
        /// Where it was looked for.
        path: &'static str,
        /// Why not.
        source: io::Error,
    },
}
