//! The measured latency of a Service's connections (`--connect-latency`), in `ballast service show`.

use std::fmt::Write as _;

use proxy_common::latency::LatencyEntry;
use serde::Serialize;

use crate::maps::view::Snapshot;
use proxy_cli::output::Table;

/// Measurements of the connections to one endpoint, or to all endpoints of a Service port.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct LatencyJson {
    /// Address and port of the endpoint; absent for the Service port.
    #[serde(skip_serializing_if = "Option::is_none")]
    endpoint: Option<String>,
    answered: u64,
    /// Sum of the latencies of all answered connections, in microseconds.
    sum_us: u64,
    /// Latency within which half of the connections were answered, in microseconds; `null` above 8.4 s.
    p50_us: Option<u64>,
    p99_us: Option<u64>,
    refused: u64,
    retransmits: u64,
}

/// Returns the measurements of the Service port first, then those of its endpoints; empty if nothing was measured.
pub(super) fn elements(service: u32, snapshot: &Snapshot) -> Vec<LatencyJson> {
    rows(service, snapshot)
        .map(|(backend, entry)| LatencyJson {
            endpoint: (backend != 0).then(|| endpoint(backend, snapshot)),
            answered: entry.answered(),
            sum_us: entry.sum_us,
            p50_us: entry.quantile_us(500),
            p99_us: entry.quantile_us(990),
            refused: entry.refused,
            retransmits: entry.retransmits,
        })
        .collect()
}

/// Returns the same as a table, with an empty line in front.
pub(super) fn table(service: u32, snapshot: &Snapshot) -> String {
    let mut table = Table::new(["CONNECTS TO", "ANSWERED", "P50", "P99", "REFUSED", "SYN RETRANSMITS"]);
    let mut is_empty = true;
    for (backend, entry) in rows(service, snapshot) {
        is_empty = false;
        table.row([
            if backend == 0 { "all".to_owned() } else { endpoint(backend, snapshot) },
            entry.answered().to_string(),
            quantile(entry, 500),
            quantile(entry, 990),
            entry.refused.to_string(),
            entry.retransmits.to_string(),
        ]);
    }
    let mut text = String::new();
    if !is_empty {
        let _ = write!(text, "\n{}", table.render(""));
    }
    text
}

fn rows(service: u32, snapshot: &Snapshot) -> impl Iterator<Item = (u32, &LatencyEntry)> {
    let of_service = snapshot.latency.range((service, 0)..=(service, u32::MAX));
    of_service.map(|((_, backend), entry)| (*backend, entry))
}

/// Returns address and port of an endpoint, or its id if the endpoint is unknown.
fn endpoint(id: u32, snapshot: &Snapshot) -> String {
    snapshot.backends.get(&id).map_or_else(|| format!("id {id}"), |row| row.socket.to_string())
}

/// Returns the upper limit of the quantile's bucket, like `<= 64 us` or `<= 2.0 ms`.
#[expect(clippy::cast_precision_loss, reason = "one decimal is shown")]
fn quantile(entry: &LatencyEntry, per_mille: u64) -> String {
    match entry.quantile_us(per_mille) {
        _ if entry.answered() == 0 => "-".to_owned(),
        None => "> 8 s".to_owned(),
        Some(us) if us < 1_000 => format!("<= {us} us"),
        Some(us) if us < 1_000_000 => format!("<= {:.1} ms", us as f64 / 1e3),
        Some(us) => format!("<= {:.1} s", us as f64 / 1e6),
    }
}
