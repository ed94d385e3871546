//! `/metrics`: kube-proxy's names where the meaning is the same, `ballast_` where it is ours.
//!
//! What the agent does is counted as it happens, in the handles of [`Metrics`]. What the programs count lies in
//! the maps, and is read from there at each scrape ([`datapath`]), so a restart of the agent loses nothing.
//!
//! Source of the `kubeproxy_` names and buckets: pkg/proxy/metrics/metrics.go of Kubernetes 1.36.

pub mod datapath;
mod process;

use std::fmt;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use std::sync::atomic::AtomicU64;

use crate::model::net::IpFamily;

/// What [`Metrics::encode`] writes.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

type Seconds = Gauge<f64, AtomicU64>;
type PerFamily<M> = Family<FamilyLabel, M, fn() -> M>;

/// How much of the maps a sync compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// All of them.
    Full,
    /// What had changed.
    Partial,
}

/// Which traffic policy left a Service without endpoint on this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// `internalTrafficPolicy: Local`.
    Internal,
    /// `externalTrafficPolicy: Local`.
    External,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FamilyLabel {
    ip_family: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CodeLabel {
    code: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PolicyLabels {
    traffic_policy: &'static str,
    ip_family: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MapLabels {
    map: &'static str,
    operation: &'static str,
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
    sync_duration: PerFamily<Histogram>,
    full_duration: PerFamily<Histogram>,
    partial_duration: PerFamily<Histogram>,
    last_synced: Family<FamilyLabel, Seconds>,
    last_queued: Family<FamilyLabel, Seconds>,
    endpoint_pending: Gauge,
    endpoint_changes: Counter,
    service_pending: Gauge,
    service_changes: Counter,
    healthz: Family<CodeLabel, Counter>,
    livez: Family<CodeLabel, Counter>,
    programming: PerFamily<Histogram>,
    no_local: Family<PolicyLabels, Gauge>,
    map_operations: Family<MapLabels, Counter>,
    map_failures: Family<MapLabels, Counter>,
    repairs: Counter,
    problems: Gauge,
}

impl Metrics {
    /// Metrics of an agent whose maps are pinned below `bpffs`.
    pub fn new(bpffs: &Path) -> Self {
        let metrics = Self {
            registry: Registry::default(),
            sync_duration: Family::new_with_constructor(sync_histogram),
            full_duration: Family::new_with_constructor(sync_histogram),
            partial_duration: Family::new_with_constructor(sync_histogram),
            last_synced: Family::default(),
            last_queued: Family::default(),
            endpoint_pending: Gauge::default(),
            endpoint_changes: Counter::default(),
            service_pending: Gauge::default(),
            service_changes: Counter::default(),
            healthz: Family::default(),
            livez: Family::default(),
            programming: Family::new_with_constructor(programming_histogram),
            no_local: Family::default(),
            map_operations: Family::default(),
            map_failures: Family::default(),
            repairs: Counter::default(),
            problems: Gauge::default(),
        };
        metrics.registered(bpffs)
    }

    /// Names them all. A counter's `_total` is added when it is written.
    fn registered(mut self, bpffs: &Path) -> Self {
        let mut registry = Registry::default();
        let r = &mut registry;
        let kube = r.sub_registry_with_prefix("kubeproxy");
        kube.register(
            "sync_proxy_rules_duration_seconds",
            "How long it took to make the maps say what they should",
            self.sync_duration.clone(),
        );
        kube.register(
            "sync_full_proxy_rules_duration_seconds",
            "The same, when all of the maps were compared",
            self.full_duration.clone(),
        );
        kube.register(
            "sync_partial_proxy_rules_duration_seconds",
            "The same, when only changes were written",
            self.partial_duration.clone(),
        );
        kube.register(
            "sync_proxy_rules_last_timestamp_seconds",
            "When the maps were last made right",
            self.last_synced.clone(),
        );
        kube.register(
            "sync_proxy_rules_last_queued_timestamp_seconds",
            "When a change was last queued",
            self.last_queued.clone(),
        );
        kube.register(
            "sync_proxy_rules_endpoint_changes_pending",
            "Changes of endpoints that are not in the maps yet",
            self.endpoint_pending.clone(),
        );
        kube.register(
            "sync_proxy_rules_endpoint_changes",
            "Changes of endpoints seen",
            self.endpoint_changes.clone(),
        );
        kube.register(
            "sync_proxy_rules_service_changes_pending",
            "Changes of Services that are not in the maps yet",
            self.service_pending.clone(),
        );
        kube.register(
            "sync_proxy_rules_service_changes",
            "Changes of Services seen",
            self.service_changes.clone(),
        );
        kube.register("proxy_healthz", "Answers of /healthz, by HTTP status", self.healthz.clone());
        kube.register("proxy_livez", "Answers of /livez, by HTTP status", self.livez.clone());
        kube.register(
            "network_programming_duration_seconds",
            "From the change that an endpoint went through to the maps",
            self.programming.clone(),
        );
        // A gauge, in spite of its name: kube-proxy called it so.
        kube.register(
            "sync_proxy_rules_no_local_endpoints_total",
            "Service ports whose policy is Local and that have no endpoint on this node",
            self.no_local.clone(),
        );
        let ours = r.sub_registry_with_prefix("ballast");
        ours.register(
            "map_operations",
            "Entries written or removed by the agent",
            self.map_operations.clone(),
        );
        ours.register(
            "map_operation_failures",
            "Entries that could not be written or removed",
            self.map_failures.clone(),
        );
        ours.register(
            "drift_repairs",
            "Entries that were not as the agent had left them, and were set right",
            self.repairs.clone(),
        );
        ours.register(
            "problems",
            "Parts of Services and EndpointSlices that cannot be used, and Services that are not fully programmed",
            self.problems.clone(),
        );
        let build = BuildLabels { version: env!("CARGO_PKG_VERSION"), abi: proxy_common::abi::ABI_VERSION };
        ours.register("build", "What runs here", Info::new(build));
        r.register_collector(Box::new(datapath::DataPath::new(bpffs)));
        r.register_collector(Box::new(process::Process));
        self.registry = registry;
        self
    }

    /// Everything as text, of type [`CONTENT_TYPE`]. Reads the maps: this blocks for some milliseconds.
    pub fn encode(&self) -> Result<String, fmt::Error> {
        let mut output = String::new();
        text::encode(&mut output, &self.registry)?;
        Ok(output)
    }

    /// A change of this family was queued.
    pub fn queued(&self, family: IpFamily, at: SystemTime) {
        self.last_queued.get_or_create(&label(family)).set(unix(at));
    }

    /// The maps of this family were made right, at `at` and in `duration`.
    pub fn synced(&self, family: IpFamily, extent: Extent, at: SystemTime, duration: Duration) {
        let label = label(family);
        let by_extent = match extent {
            Extent::Full => &self.full_duration,
            Extent::Partial => &self.partial_duration,
        };
        self.last_synced.get_or_create(&label).set(unix(at));
        self.sync_duration.get_or_create(&label).observe(duration.as_secs_f64());
        by_extent.get_or_create(&label).observe(duration.as_secs_f64());
    }

    /// An endpoint's change reached the maps so long after its trigger.
    pub fn programmed(&self, family: IpFamily, latency: Duration) {
        self.programming.get_or_create(&label(family)).observe(latency.as_secs_f64());
    }

    /// So many changes of Services and of endpoints were seen.
    pub fn changed(&self, services: u64, endpoints: u64) {
        self.service_changes.inc_by(services);
        self.endpoint_changes.inc_by(endpoints);
    }

    /// So many of them are not in the maps yet.
    pub fn pending(&self, services: usize, endpoints: usize) {
        self.service_pending.set(services.try_into().unwrap_or(i64::MAX));
        self.endpoint_pending.set(endpoints.try_into().unwrap_or(i64::MAX));
    }

    /// So many Service ports have a Local policy and no endpoint here.
    pub fn no_local_endpoints(&self, policy: Policy, family: IpFamily, count: usize) {
        let traffic_policy = match policy {
            Policy::Internal => "internal",
            Policy::External => "external",
        };
        let labels = PolicyLabels { traffic_policy, ip_family: label(family).ip_family };
        self.no_local.get_or_create(&labels).set(count.try_into().unwrap_or(i64::MAX));
    }

    /// `/healthz` answered with this HTTP status.
    pub fn answered_healthz(&self, code: u16) {
        self.healthz.get_or_create(&CodeLabel { code }).inc();
    }

    /// `/livez` did.
    pub fn answered_livez(&self, code: u16) {
        self.livez.get_or_create(&CodeLabel { code }).inc();
    }

    /// The agent did `done` operations (`write`, `remove`, `read`) on a map, and `failed` of the same kind failed.
    pub fn map_operations(&self, map: &'static str, operation: &'static str, done: u64, failed: u64) {
        let labels = MapLabels { map, operation };
        self.map_operations.get_or_create(&labels).inc_by(done);
        self.map_failures.get_or_create(&labels).inc_by(failed);
    }

    /// So many entries had been changed by another hand.
    pub fn repaired(&self, entries: u64) {
        self.repairs.inc_by(entries);
    }

    /// So many things are wrong now.
    pub fn problems(&self, count: usize) {
        self.problems.set(count.try_into().unwrap_or(i64::MAX));
    }
}

fn label(family: IpFamily) -> FamilyLabel {
    FamilyLabel {
        ip_family: match family {
            IpFamily::V4 => "IPv4",
            IpFamily::V6 => "IPv6",
        },
    }
}

fn unix(at: SystemTime) -> f64 {
    at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// From 1 ms to 16 s, each twice the one before.
fn sync_histogram() -> Histogram {
    Histogram::new((0..15u32).map(|n| 0.001 * f64::from(1u32 << n)))
}

/// From 0.25 s to 5 min, finer where the usual values are.
fn programming_histogram() -> Histogram {
    let seconds = (1..60u32).chain((60..120).step_by(5)).chain((120..=300).step_by(30));
    Histogram::new([0.25, 0.5].into_iter().chain(seconds.map(f64::from)))
}

#[cfg(test)]
mod tests;
