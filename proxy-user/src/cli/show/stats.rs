//! `ballast stats`: counters of Service ports, or their rates per second.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use proxy_cli::selector::ServiceSelector;
use proxy_common::stats::ServiceStats;
use serde::Serialize;
use serde_json::Number;

use super::by_service::refusals;
use super::error::ShowError;
use super::names::ServiceIdentity;
use crate::cli::selector::SelectInMaps as _;
use crate::maps::view::Snapshot;
use proxy_cli::output::{List, RATES, Row, STATS, bytes};

/// The counters of a Service port.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StatsJson {
    /// The Service port.
    #[serde(flatten)]
    identity: ServiceIdentity,
    /// Counts, or rates per second.
    connections: Number,
    packets: Number,
    bytes: Number,
    reply_packets: Number,
    reply_bytes: Number,
    refused: Number,
}

/// Counters at one moment.
struct Sample {
    at: Instant,
    counts: BTreeMap<u32, [u64; 6]>,
}

/// The previous sample, to compute rates.
#[derive(Default)]
pub struct Meter {
    before: Option<Sample>,
}

impl Meter {
    /// Returns the rates over `period`, or since the previous call. Calls `read` once; twice if there was no previous call.
    pub fn rates(
        &mut self,
        selector: &ServiceSelector,
        period: Duration,
        mut read: impl FnMut() -> Result<Snapshot, ShowError>,
    ) -> Result<List<StatsJson>, ShowError> {
        if self.before.is_none() {
            self.before = Some(Sample::of(&read()?));
            std::thread::sleep(period);
        }
        let snapshot = read()?;
        let now = Sample::of(&snapshot);
        let before = self.before.replace(Sample { at: now.at, counts: now.counts.clone() });
        let list = match before {
            Some(before) => rates(&snapshot, selector, &before, &now),
            None => rates(&snapshot, selector, &now, &now),
        };
        Ok(list)
    }
}

impl Sample {
    fn of(snapshot: &Snapshot) -> Self {
        Self { at: Instant::now(), counts: counts(snapshot) }
    }
}

/// Returns connections, packets, bytes, packets and bytes of replies, and refusals, by the id of the Service port.
fn counts(snapshot: &Snapshot) -> BTreeMap<u32, [u64; 6]> {
    let of = |id: &u32| {
        let stats = snapshot.service_stats.get(id).copied().unwrap_or_default();
        let ServiceStats { connections, packets, bytes, reply_packets, reply_bytes } = stats;
        let refused = refusals(snapshot, *id).map(|(_, count)| count).sum();
        [connections, packets, bytes, reply_packets, reply_bytes, refused]
    };
    snapshot.names.keys().map(|id| (*id, of(id))).collect()
}

/// Returns one row for each Service port.
pub fn list(snapshot: &Snapshot, selector: &ServiceSelector) -> List<StatsJson> {
    let counts = counts(snapshot);
    let of = |id: u32| counts.get(&id).copied().unwrap_or_default();
    lines(snapshot, selector, false, |id| of(id).map(Number::from))
}

fn rates(snapshot: &Snapshot, selector: &ServiceSelector, before: &Sample, now: &Sample) -> List<StatsJson> {
    let seconds = now.at.saturating_duration_since(before.at).as_secs_f64().max(f64::EPSILON);
    lines(snapshot, selector, true, |id| {
        let of = |sample: &Sample| sample.counts.get(&id).copied();
        let now = of(now).unwrap_or_default();
        // A new Service port has no previous sample, so its rate is not known yet.
        let before = of(before).unwrap_or(now);
        let mut pairs = now.into_iter().zip(before);
        std::array::from_fn(|_| {
            let (now, before) = pairs.next().unwrap_or_default();
            #[expect(clippy::cast_precision_loss, reason = "one decimal is shown")]
            let rate = now.saturating_sub(before) as f64 / seconds;
            Number::from_f64(rate).unwrap_or_else(|| 0.into())
        })
    })
}

fn lines(
    snapshot: &Snapshot,
    selector: &ServiceSelector,
    is_rate: bool,
    values: impl Fn(u32) -> [Number; 6],
) -> List<StatsJson> {
    let columns = if is_rate { RATES } else { STATS };
    let mut list = List::new("services", columns, "No Services are programmed.");
    let mut ids: Vec<u32> =
        snapshot.names.keys().copied().filter(|id| selector.takes(*id, snapshot)).collect();
    ids.sort_by_key(|id| snapshot.names.get(id));
    for id in ids {
        let Some(name) = snapshot.names.get(&id) else { continue };
        let [connections, packets, bytes_in, reply_packets, reply_bytes, refused] = values(id);
        let float = |value: &Number| value.as_f64().unwrap_or_default();
        let count = |value: &Number| if is_rate { format!("{:.1}", float(value)) } else { value.to_string() };
        #[expect(clippy::cast_sign_loss, reason = "counts are not negative")]
        let size = |value: &Number| bytes(value.as_u64().unwrap_or_else(|| float(value) as u64));
        let service = name.to_string();
        let cells = vec![
            service.clone(),
            name.protocol.to_string(),
            name.family.to_string(),
            count(&connections),
            count(&packets),
            size(&bytes_in),
            count(&reply_packets),
            size(&reply_bytes),
            count(&refused),
        ];
        let value = StatsJson {
            identity: ServiceIdentity::new(id, Some(name), name.protocol, name.family),
            connections,
            packets,
            bytes: bytes_in,
            reply_packets,
            reply_bytes,
            refused,
        };
        list.push(Row { group: "services", key: format!("{service} {id}"), name: service, cells, value });
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::maps::view::{NameRow, Transport};
    use proxy_cli::args::list::Output;
    use proxy_core::model::net::IpFamily;

    fn snapshot(connections: u64) -> Snapshot {
        let name = NameRow {
            namespace: "default".to_owned(),
            name: "web".to_owned(),
            port: "http".to_owned(),
            protocol: Transport(6),
            family: IpFamily::V4,
        };
        let stats = ServiceStats { connections, bytes: 2_048, ..ServiceStats::default() };
        Snapshot {
            names: BTreeMap::from([(1, name)]),
            service_stats: BTreeMap::from([(1, stats)]),
            ..Snapshot::default()
        }
    }

    #[test]
    fn counts_and_rates() {
        let selector = ServiceSelector::default();
        let text = list(&snapshot(12), &selector).render(Output::Text, false).unwrap();
        assert_eq!(text, "default/web:http  TCP  IPv4  12  0  2.0 KiB  0  0 B  0\n");
        let mut before = Sample::of(&snapshot(2));
        let now = Sample::of(&snapshot(12));
        before.at = now.at.checked_sub(Duration::from_secs(4)).unwrap();
        let rates = rates(&snapshot(12), &selector, &before, &now);
        assert_eq!(
            rates.render(Output::Text, false).unwrap(),
            "default/web:http  TCP  IPv4  2.5  0.0  0 B  0.0  0 B  0.0\n"
        );
    }
}
