//! Metrics of the owner of the maps, read from its last snapshot at each scrape.
//!
//! One sync serves both address families, while kube-proxy has one proxier for each: most values are written under both
//! `ip_family` labels, so that dashboards that select one keep working.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

use super::sample::{Labels, counter, gauge};
use crate::driver::{Histogram, Scale, Status};
use proxy_core::model::net::IpFamily;
use proxy_core::plan::Scope;

/// Writes the metrics of a snapshot that the driver has published.
pub(super) fn encode(e: &mut DescriptorEncoder<'_>, status: &Status) -> fmt::Result {
    kube(e, status)?;
    programming(e, status)?;
    ours(e, status)
}

fn programming(e: &mut DescriptorEncoder<'_>, status: &Status) -> Result<(), fmt::Error> {
    let by_family = |family: IpFamily| vec![("ip_family", family.to_string())];
    let families = [IpFamily::V4, IpFamily::V6];
    histogram(
        e,
        "kubeproxy_network_programming_duration_seconds",
        "Time from the change of an endpoint (annotation of its EndpointSlice) to the end of the sync that programmed it",
        status.network_programming.iter().map(|(family, histogram)| (by_family(*family), histogram)),
    )?;
    let scopes = [(Scope::Internal, "internal"), (Scope::External, "external")];
    let silent = scopes.into_iter().flat_map(|(scope, policy)| {
        families.map(|family| {
            let mut labels = by_family(family);
            labels.insert(0, ("traffic_policy", policy.to_owned()));
            (labels, status.no_local.get(&(scope, family)).copied().unwrap_or_default())
        })
    });
    let help = "Service ports with policy Local that have endpoints, but none on this node";
    gauge(e, "kubeproxy_sync_proxy_rules_no_local_endpoints_total", help, silent)
}

fn kube(e: &mut DescriptorEncoder<'_>, status: &Status) -> Result<(), fmt::Error> {
    let both = || ["IPv4", "IPv6"].map(|family| vec![("ip_family", family.to_owned())]);
    let times = |time: Option<SystemTime>| {
        let time = time.map(unix);
        both().into_iter().filter_map(move |labels| Some((labels, time?)))
    };
    histogram(
        e,
        "kubeproxy_sync_proxy_rules_duration_seconds",
        "Duration of syncs of the maps",
        both().map(|labels| (labels, &status.sync_duration)),
    )?;
    histogram(
        e,
        "kubeproxy_sync_full_proxy_rules_duration_seconds",
        "Duration of full syncs of the maps",
        both().map(|labels| (labels, &status.full_sync_duration)),
    )?;
    histogram(
        e,
        "kubeproxy_sync_partial_proxy_rules_duration_seconds",
        "Duration of partial syncs of the maps: only what had changed",
        both().map(|labels| (labels, &status.partial_sync_duration)),
    )?;
    gauge(
        e,
        "kubeproxy_sync_proxy_rules_last_timestamp_seconds",
        "Time at which the maps were last known to be up to date",
        status.up_to_date.iter().map(|(family, time)| (vec![("ip_family", family.to_string())], unix(*time))),
    )?;
    gauge(
        e,
        "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds",
        "Time at which the last change was queued",
        times(status.last_queued),
    )?;
    let none = Labels::new;
    let (services, slices) = (status.service_changes, status.slice_changes);
    gauge(
        e,
        "kubeproxy_sync_proxy_rules_service_changes_pending",
        "Changes of Services that are not programmed yet",
        [(none(), services.pending)],
    )?;
    counter(
        e,
        "kubeproxy_sync_proxy_rules_service_changes",
        "Changes of Services received",
        [(none(), services.total)],
    )?;
    gauge(
        e,
        "kubeproxy_sync_proxy_rules_endpoint_changes_pending",
        "Changes of EndpointSlices that are not programmed yet",
        [(none(), slices.pending)],
    )?;
    counter(
        e,
        "kubeproxy_sync_proxy_rules_endpoint_changes",
        "Changes of EndpointSlices received",
        [(none(), slices.total)],
    )
}

fn ours(e: &mut DescriptorEncoder<'_>, status: &Status) -> Result<(), fmt::Error> {
    let none = Labels::new;
    let listed = [("Service", status.services_listed), ("EndpointSlice", status.slices_listed)]
        .map(|(kind, listed)| (vec![("kind", kind.to_owned())], u32::from(listed)));
    gauge(
        e,
        "ballast_listed",
        "1 if the agent has received a complete list of the objects of a kind",
        listed,
    )?;
    gauge(
        e,
        "ballast_synced",
        "1 if all listed objects have been programmed",
        [(none(), u32::from(status.complete))],
    )?;
    histogram(
        e,
        "ballast_event_to_map_duration_seconds",
        "Time from receiving a change to the end of the sync that programmed it",
        [(none(), &status.event_to_map)],
    )?;
    let operations = |count: fn(&proxy_core::sync::Count) -> u64| {
        status.operations.iter().map(move |row| {
            let operation = row.operation.label().to_owned();
            (vec![("map", row.table.name().to_owned()), ("operation", operation)], count(&row.count))
        })
    };
    let help = "Map entries that the agent wrote or removed; a run of slots counts as one";
    counter(e, "ballast_map_operations", help, operations(|count| count.done))?;
    let help = "Map entries that the agent could not write or remove";
    counter(e, "ballast_map_operation_failures", help, operations(|count| count.failed))?;
    let help = "Map entries that were changed externally and that the agent repaired";
    counter(e, "ballast_drift_repairs", help, [(none(), status.drift)])?;
    let help = "Comparisons of the maps with what was written to them";
    counter(e, "ballast_audits", help, [(none(), status.audits)])?;
    let help = "Failed comparisons of the maps with what was written to them";
    counter(e, "ballast_audit_failures", help, [(none(), status.audit_failures)])?;
    let help = "Invalid parts of Services and EndpointSlices";
    gauge(e, "ballast_problems", help, [(none(), status.problems.len() as u64)])?;
    let help = "Service ports that are not programmed correctly; the agent retries them";
    gauge(e, "ballast_failing_ports", help, [(none(), status.failing as u64)])?;
    gauge(e, "ballast_services", "Programmed Services", [(none(), status.services as u64)])
}

fn unix(at: SystemTime) -> f64 {
    at.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs_f64()
}

fn histogram<'a, S: Scale + 'a>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    samples: impl IntoIterator<Item = (Labels, &'a Histogram<S>)>,
) -> Result<(), fmt::Error> {
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
    let bounds = S::BOUNDS.iter().copied().chain([f64::INFINITY]);
    for (labels, histogram) in samples {
        let buckets: Vec<_> = bounds.clone().zip(histogram.buckets.iter().copied()).collect();
        let (sum, count) = (histogram.sum.as_secs_f64(), histogram.count());
        if labels.is_empty() {
            metric.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)?;
        } else {
            metric.encode_family(&labels)?.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)?;
        }
    }
    Ok(())
}
