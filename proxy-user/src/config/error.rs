//! Errors of the settings.

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
    /// `--sync-period` is zero or shorter than its lower bound.
    #[error("--sync-period {0:?} is too short: give at least 1s (the default is 30s)")]
    SyncPeriod(Duration),
    /// `--min-sync-period` is longer than `--sync-period`.
    #[error(
        "--min-sync-period {min:?} is longer than --sync-period {max:?}: shorten the first or lengthen the second"
    )]
    Periods {
        /// `--min-sync-period`.
        min: Duration,
        /// `--sync-period`.
        max: Duration,
    },
    /// The maps need more memory than `--max-memory` allows.
    #[error(
        "--max-memory {} is too little: with the sizes that are given, the maps need {}; raise it, or give smaller sizes",
        mebibytes(*limit), mebibytes(*needed)
    )]
    MaxMemory {
        /// `--max-memory` in bytes.
        limit: u64,
        /// The bytes that the smallest possible sizes need.
        needed: u64,
    },
    /// A word is twice in `--nodeport-addresses`.
    #[error("--nodeport-addresses has {0} twice: remove one")]
    Twice(String),
    /// The two servers have the same port, and an address in common.
    #[error(
        "healthzBindAddress (--healthz-bind-address) {healthz} and metricsBindAddress (--metrics-bind-address) {metrics} have one \
         port, so only one server can listen: give them different ports, or switch off one of them with an empty value"
    )]
    SameAddress {
        /// The address of the health server.
        healthz: SocketAddr,
        /// The address of the metrics server.
        metrics: SocketAddr,
    },
    /// The page needs the metrics server, which is off.
    #[error(
        "--page needs the metrics server, which metricsBindAddress (--metrics-bind-address) switches off: give it an address, or \
         remove --page"
    )]
    PageWithoutServer,
    /// The endpoint is not the URL of a collector.
    #[error(
        "--otlp-endpoint (or OTEL_EXPORTER_OTLP_ENDPOINT) {0:?} is not the URL of an OpenTelemetry collector: write it like \
         http://HOST:4318, or remove it to export nothing"
    )]
    OtlpEndpoint(String),
    /// The URL contains a name and a password; the message does not repeat it.
    #[error(
        "--otlp-endpoint (or OTEL_EXPORTER_OTLP_ENDPOINT) contains credentials: put them into \
         OTEL_EXPORTER_OTLP_HEADERS, like authorization=Basic%20..."
    )]
    OtlpCredentials,
    /// The timeout is not a number.
    #[error("OTEL_EXPORTER_OTLP_TIMEOUT {0:?} is not a number of milliseconds, like 10000")]
    OtlpTimeout(String),
    /// The variable is not a list of pairs. Its value may be a secret, so the message does not contain it.
    #[error("{variable} is not a comma-separated list of KEY=VALUE with percent-encoded values")]
    OtlpPairs {
        /// The name of the variable.
        variable: &'static str,
    },
    /// `--devices` has only patterns that exclude devices.
    #[error("--devices {0} only excludes devices: put a * in front, like *,{0}")]
    OnlyExcludes(Selection),
    /// A pattern is in both lists.
    #[error("--uplinks and --local-devices both contain {0}: remove it from one of them")]
    BothSides(String),
    /// The mode in which pods are recognized lacks the value that it needs.
    #[error("--detect-local-mode {mode} needs {flag}")]
    DetectLocal {
        /// The mode.
        mode: &'static str,
        /// The flag that is missing.
        flag: &'static str,
    },
    /// The name cannot be the name of a node.
    #[error(
        "--hostname-override {0:?} is not a node name: use lower-case letters, digits, - and ., at most 253 characters"
    )]
    NodeName(String),
    /// The host's name cannot be read.
    #[error("cannot read the host name from {path}: {source}; give --hostname-override")]
    HostName {
        /// The file that was read.
        path: &'static str,
        /// The cause.
        source: io::Error,
    },
}

fn mebibytes(bytes: u64) -> String {
    format!("{}Mi", bytes.div_ceil(1 << 20))
}
