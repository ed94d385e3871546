//! `/metrics`: kube-proxy's names where the meaning is the same, `ballast_` where it is ours.
//!
//! Nothing is counted twice. What the owner of the maps does is in the snapshots it publishes ([`sync`]); what
//! the programs count lies in the maps ([`datapath`]), so that a restart of the agent loses nothing. Both are
//! read at each scrape. Only the answers of the servers are counted here.
//!
//! Source of the `kubeproxy_` names: pkg/proxy/metrics/metrics.go of Kubernetes 1.36.

pub mod datapath;
mod process;
mod sync;

use std::fmt;
use std::path::Path;

use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

use crate::sync::Status;

/// What [`Metrics::encode`] writes.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CodeLabel {
    code: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BuildLabels {
    version: &'static str,
    abi: u32,
}

/// All metrics of one agent.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    healthz: Family<CodeLabel, Counter>,
    livez: Family<CodeLabel, Counter>,
}

impl Metrics {
    /// Metrics of an agent whose maps are pinned below `bpffs`, and whose driver publishes to `status`.
    pub fn new(bpffs: &Path, status: watch::Receiver<Status>) -> Self {
        let mut registry = Registry::default();
        let (healthz, livez) = (Family::default(), Family::default());
        // A counter's `_total` is added when it is written.
        let kube = registry.sub_registry_with_prefix("kubeproxy");
        kube.register("proxy_healthz", "Answers of /healthz, by HTTP status", Family::clone(&healthz));
        kube.register("proxy_livez", "Answers of /livez, by HTTP status", Family::clone(&livez));
        let build = BuildLabels { version: env!("CARGO_PKG_VERSION"), abi: proxy_common::abi::ABI_VERSION };
        registry.register("ballast_build", "What runs here", Info::new(build));
        registry.register_collector(Box::new(sync::Sync(status)));
        registry.register_collector(Box::new(datapath::DataPath::new(bpffs)));
        registry.register_collector(Box::new(process::Process));
        Self { registry, healthz, livez }
    }

    /// Everything as text, of type [`CONTENT_TYPE`]. Reads the maps: this blocks for some milliseconds.
    pub fn encode(&self) -> Result<String, fmt::Error> {
        let mut output = String::new();
        text::encode(&mut output, &self.registry)?;
        Ok(output)
    }

    /// `/healthz` answered with this HTTP status.
    pub fn answered_healthz(&self, code: u16) {
        self.healthz.get_or_create(&CodeLabel { code }).inc();
    }

    /// `/livez` did.
    pub fn answered_livez(&self, code: u16) {
        self.livez.get_or_create(&CodeLabel { code }).inc();
    }
}

#[cfg(test)]
mod tests;
