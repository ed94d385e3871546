//! `/metrics`: kube-proxy's names for metrics with the same meaning, names with `ballast_` for all others.
//!
//! Nothing is counted twice. What the owner of the maps does is in the snapshots that it publishes ([`sync`]); the
//! counters of the programs are in the maps ([`datapath`]), so that a restart of the agent does not reset them. Both
//! are read at each scrape. Only answers of the HTTP servers and sweeps for sockets are counted here.
//!
//! Source of the `kubeproxy_` names: pkg/proxy/metrics/metrics.go of Kubernetes 1.36.

mod agent;
pub mod bare;
pub mod datapath;
mod exemplars;
mod latency;
mod plain;
mod process;
pub mod recent;
mod sample;
mod sync;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

use crate::audit::Audits;
use crate::driver::Status;
use crate::otlp::Counts;
use crate::programs::{Repairs, XdpDevice, XdpDevices};
use bare::BareDevices;
use proxy_core::model::net::IpFamily;
use proxy_core::model::{ApiServers, Watches};
use recent::Recent;
use sample::Scraped;

/// The format of the answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// The text format of Prometheus, 0.0.4, which every reader supports.
    #[default]
    Plain,
    /// `OpenMetrics` 1.0.0, for clients that request it.
    OpenMetrics,
}

impl Format {
    /// Returns the value of `Content-Type`.
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::Plain => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }

    /// Returns the format for an `Accept` header: `OpenMetrics` if it is named, and its quality is not below that of plain text.
    pub fn negotiate(accept: &str) -> Self {
        let (mut open_metrics, mut plain) = (0.0, 0.0);
        for range in accept.split(',') {
            let mut parts = range.split(';').map(str::trim);
            let kind = parts.next().unwrap_or_default();
            let (mut quality, mut version) = (1.0, None);
            for (name, value) in parts.filter_map(|part| part.split_once('=')) {
                match name.trim().to_ascii_lowercase().as_str() {
                    // A quality that cannot be parsed means that the format is not accepted.
                    "q" => quality = value.trim().parse::<f32>().unwrap_or_default(),
                    "version" => version = Some(value.trim().trim_matches('"')),
                    _ => {}
                }
            }
            let is = |name: &str| kind.eq_ignore_ascii_case(name);
            if is("application/openmetrics-text") && version.is_none_or(|version| version == "1.0.0") {
                open_metrics = f32::max(open_metrics, quality);
            } else if is("text/plain") {
                plain = f32::max(plain, quality);
            }
        }
        if open_metrics > 0.0 && open_metrics >= plain { Self::OpenMetrics } else { Self::Plain }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CodeLabel {
    code: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FamilyLabel {
    ip_family: String,
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
    bpffs: PathBuf,
    zero: exemplars::Zero,
    healthz: Family<CodeLabel, Counter>,
    livez: Family<CodeLabel, Counter>,
    ended_sockets: Family<FamilyLabel, Counter>,
    reset_sockets: Family<FamilyLabel, Counter>,
    marked_flows: Counter,
    moved_sockets: Family<FamilyLabel, Counter>,
    moved_flows: Counter,
    failed_sweeps: Counter,
    /// Failures to let a flow table grow.
    pub failed_growths: Counter,
    xdp: Arc<XdpDevices>,
    /// Recent faults of the programs.
    pub recent: Recent,
    /// Selected devices without packet programs.
    pub bare: Arc<BareDevices>,
    servers: Option<watch::Receiver<ApiServers>>,
}

impl Metrics {
    /// Creates the metrics of an agent whose maps are pinned below `bpffs`, and whose driver publishes to `status`.
    pub fn new(bpffs: &Path, status: watch::Receiver<Status>, of_services: bool) -> Self {
        let mut registry = Registry::default();
        let (healthz, livez) = (Family::default(), Family::default());
        // The encoder adds `_total` to the name of a counter.
        let kube = registry.sub_registry_with_prefix("kubeproxy");
        kube.register("proxy_healthz", "Responses of /healthz, by HTTP status", Family::clone(&healthz));
        kube.register("proxy_livez", "Responses of /livez, by HTTP status", Family::clone(&livez));
        let build =
            BuildLabels { version: env!("CARGO_PKG_VERSION"), abi: proxy_common::version::ABI_VERSION };
        registry.register("ballast_build", "Version of the agent", Info::new(build));
        let mut by_family = |name, help| {
            let counters = Family::<FamilyLabel, Counter>::default();
            for family in [IpFamily::V4, IpFamily::V6] {
                // The counters exist from the start with zero, so that the first event is a change.
                drop(counters.get_or_create(&FamilyLabel { ip_family: family.to_string() }));
            }
            registry.register(name, help, Family::clone(&counters));
            counters
        };
        let ended_sockets = by_family(
            "ballast_udp_sockets_ended",
            "Connected UDP sockets that were closed because their endpoint was removed",
        );
        let reset_sockets = by_family(
            "ballast_tcp_sockets_reset",
            "Connected TCP sockets that were closed because their endpoint was removed (removal policy `reset`)",
        );
        let moved_sockets = by_family(
            "ballast_tcp_sockets_rebalanced",
            "Idle TCP sockets that were closed so that they connect to endpoints that joined (annotation `ballast.io/rebalance`)",
        );
        let mut counter = |name, help| {
            let counter = Counter::default();
            registry.register(name, help, counter.clone());
            counter
        };
        let marked_flows = counter(
            "ballast_flows_reset",
            "Flows marked to be reset at their next segment because their endpoint was removed (removal policy `reset`)",
        );
        let moved_flows = counter(
            "ballast_flows_rebalanced",
            "Idle flows marked to be reset at their next request, so that they connect to endpoints that joined (annotation `ballast.io/rebalance`)",
        );
        let failed_sweeps = counter(
            "ballast_udp_socket_sweep_failures",
            "Failed sweeps for sockets of removed endpoints; failed sweeps are retried",
        );
        let failed_growths = counter(
            "ballast_flow_growth_failures",
            "Failed attempts to let a flow table grow; they are repeated",
        );
        let bare = Arc::<BareDevices>::default();
        registry.register_collector(Box::new(datapath::DataPath::new(bpffs, of_services, Arc::clone(&bare))));
        let (xdp, recent) = (Arc::default(), Recent::default());
        let metrics = Self {
            registry,
            bpffs: bpffs.to_owned(),
            zero: exemplars::Zero::default(),
            healthz,
            livez,
            ended_sockets,
            reset_sockets,
            marked_flows,
            moved_sockets,
            moved_flows,
            failed_sweeps,
            failed_growths,
            xdp,
            recent,
            bare,
            servers: None,
        };
        // A copy, so that the driver does not wait until the metrics are written.
        let status = move || status.borrow().clone();
        metrics.with(move |encoder| sync::encode(encoder, &status())).with(process::encode)
    }

    /// Adds metrics that this function writes at each scrape.
    fn with(
        mut self,
        write: impl Fn(&mut DescriptorEncoder<'_>) -> fmt::Result + Send + Sync + 'static,
    ) -> Self {
        self.registry.register_collector(Box::new(Scraped(write)));
        self
    }

    /// Adds the counters of repairs.
    #[must_use]
    pub fn with_repairs(self, repairs: Arc<Repairs>) -> Self {
        self.with(move |encoder| agent::repairs(encoder, &repairs))
    }

    /// Adds the counters of audits.
    #[must_use]
    pub fn with_audits(self, audits: Arc<Audits>) -> Self {
        self.with(move |encoder| agent::audits(encoder, &audits))
    }

    /// Adds the XDP modes of uplinks.
    #[must_use]
    pub fn with_xdp(mut self, devices: Arc<XdpDevices>) -> Self {
        self.xdp = Arc::clone(&devices);
        self.with(move |encoder| agent::xdp(encoder, &devices))
    }

    /// Adds the counters of exported and lost telemetry.
    #[must_use]
    pub fn with_telemetry(self, counts: Arc<Counts>) -> Self {
        self.with(move |encoder| agent::telemetry(encoder, &counts))
    }

    /// Adds the metrics of the API servers.
    #[must_use]
    pub fn with_api_servers(
        mut self,
        servers: watch::Receiver<ApiServers>,
        watches: watch::Receiver<Watches>,
    ) -> Self {
        self.servers = Some(servers.clone());
        self.with(move |encoder| {
            agent::api_servers(encoder, servers.borrow().clone(), watches.borrow().clone())
        })
    }

    /// Returns the API servers, and which of them is active.
    pub fn api_servers(&self) -> ApiServers {
        self.servers.as_ref().map(|servers| servers.borrow().clone()).unwrap_or_default()
    }

    /// Returns the uplinks with their XDP modes.
    pub fn xdp(&self) -> Vec<XdpDevice> {
        self.xdp.list()
    }

    /// Returns the resident memory of the agent in bytes; the memory of the maps is not part of it.
    pub fn resident(&self) -> Option<u64> {
        process::resident()
    }

    /// Returns all metrics as text. Reads the maps, which blocks for some milliseconds.
    pub fn encode(&self, format: Format) -> Result<String, fmt::Error> {
        let mut output = String::new();
        text::encode(&mut output, &self.registry)?;
        Ok(match format {
            Format::Plain => plain::from_open_metrics(&output),
            Format::OpenMetrics => exemplars::add(output, &self.bpffs, &self.zero),
        })
    }

    /// Counts an answer of `/healthz` with this HTTP status.
    pub fn answered_healthz(&self, code: u16) {
        self.healthz.get_or_create(&CodeLabel { code }).inc();
    }

    /// Counts connected UDP sockets of the family that were closed.
    pub fn ended_sockets(&self, family: IpFamily, count: u64) {
        self.ended_sockets.get_or_create(&FamilyLabel { ip_family: family.to_string() }).inc_by(count);
    }

    /// Counts TCP sockets of the family whose connections were reset.
    pub fn reset_sockets(&self, family: IpFamily, count: u64) {
        self.reset_sockets.get_or_create(&FamilyLabel { ip_family: family.to_string() }).inc_by(count);
    }

    /// Counts connections that were reset to move to endpoints that joined.
    pub fn moved(&self, sockets: &BTreeMap<IpFamily, u64>, flows: u64) {
        for (family, count) in sockets {
            self.moved_sockets.get_or_create(&FamilyLabel { ip_family: family.to_string() }).inc_by(*count);
        }
        self.moved_flows.inc_by(flows);
    }

    /// Counts flows that will be reset at their next segment.
    pub fn marked_flows(&self, count: u64) {
        self.marked_flows.inc_by(count);
    }

    /// Counts a failed sweep for sockets of removed endpoints.
    pub fn failed_socket_sweep(&self) {
        self.failed_sweeps.inc();
    }

    /// Counts an answer of `/livez` with this HTTP status.
    pub fn answered_livez(&self, code: u16) {
        self.livez.get_or_create(&CodeLabel { code }).inc();
    }
}

#[cfg(test)]
mod tests;
