//! Metrics of the agent's parts, of which each counts for itself.

use std::fmt;

use prometheus_client::encoding::DescriptorEncoder;

use super::sample::{counter, gauge};
use crate::audit::Audits;
use crate::otlp::{Counts, Loss, Signal};
use crate::programs::{AttachedXdp, Repairs, XdpDevices};
use proxy_core::model::{ApiServers, Watches};

/// Writes the results of the audits.
pub(super) fn audits(encoder: &mut DescriptorEncoder<'_>, audits: &Audits) -> fmt::Result {
    let counts = audits.counts();
    let results = [("clean", counts.clean), ("repaired", counts.repaired), ("failed", counts.failed)]
        .map(|(result, count)| (vec![("result", result.to_owned())], count));
    let help = "Audits: comparisons of what is programmed with new lists from the API server";
    counter(encoder, "ballast_api_audits", help, results)?;
    let differences = ["Service", "EndpointSlice", "frontend"].map(|what| {
        let count = counts.differences.get(what).copied().unwrap_or_default();
        (vec![("what", what.to_owned())], count)
    });
    let help = "Persistent differences that audits found and repaired: objects that the agent knew differently from the API \
                server, and frontends that were different in the maps";
    counter(encoder, "ballast_api_audit_repairs", help, differences)
}

/// Writes which programs and pins the agent has restored.
pub(super) fn repairs(encoder: &mut DescriptorEncoder<'_>, repairs: &Repairs) -> fmt::Result {
    let samples = repairs.counts().map(|(what, count)| (vec![("what", what.to_owned())], count));
    let help = "Programs and pins that were detached or removed externally and that the agent restored; packet programs by device";
    counter(encoder, "ballast_repairs", help, samples)
}

/// Writes the XDP modes of the uplinks.
pub(super) fn xdp(encoder: &mut DescriptorEncoder<'_>, devices: &XdpDevices) -> fmt::Result {
    let rows = devices.list().into_iter().flat_map(|row| {
        [AttachedXdp::Native, AttachedXdp::Generic, AttachedXdp::None].map(|mode| {
            let labels = vec![("device", row.device.clone()), ("mode", mode.label().to_owned())];
            (labels, u64::from(row.mode == mode))
        })
    });
    gauge(encoder, "ballast_xdp", "XDP mode of an uplink: 1 for the mode in use", rows)
}

/// Writes how much telemetry was exported and lost (`--otlp-endpoint`).
pub(super) fn telemetry(encoder: &mut DescriptorEncoder<'_>, counts: &Counts) -> fmt::Result {
    let signal = |signal: Signal| vec![("signal", signal.label().to_owned())];
    let exported = Signal::ALL.map(|one| (signal(one), counts.exported(one)));
    let help = "Log records and spans that the OpenTelemetry collector accepted";
    counter(encoder, "ballast_otlp_exported", help, exported)?;
    let lost = Signal::ALL.into_iter().flat_map(|one| {
        Loss::ALL.map(|loss| {
            let mut labels = signal(one);
            labels.push(("reason", loss.label().to_owned()));
            (labels, counts.lost(one, loss))
        })
    });
    let help = "Log records and spans that could not be exported";
    counter(encoder, "ballast_otlp_lost", help, lost)
}

/// Writes the state of the API servers and of the watches.
pub(super) fn api_servers(
    encoder: &mut DescriptorEncoder<'_>,
    servers: ApiServers,
    watches: Watches,
) -> fmt::Result {
    let ApiServers { servers, active, failovers } = servers;
    let rows = servers.into_iter().map(|server| {
        let is_asked = active.as_ref() == Some(&server);
        (vec![("server", server)], u64::from(is_asked))
    });
    let help = "Configured API servers: 1 for the server in use, 0 for the others";
    gauge(encoder, "ballast_api_server", help, rows)?;
    let help = "Changes to another API server because the previous one did not answer";
    counter(encoder, "ballast_api_server_failovers", help, [(Vec::new(), failovers)])?;
    let rows = watches
        .into_iter()
        .map(|(resource, failure)| (vec![("resource", resource.to_owned())], u32::from(failure.is_some())));
    let help = "1 if the watch of the resource fails: its changes do not arrive";
    gauge(encoder, "ballast_watch_failing", help, rows)
}
