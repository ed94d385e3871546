//! Metrics of how long endpoints take to answer, by Service port (`--connect-latency`).

use std::fmt;

use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use proxy_common::latency::{LatencyEntry, limit_us};

use super::sample::{Labels, counter};

/// Writes the measurements of each Service port; writes nothing if there are none.
#[expect(clippy::cast_precision_loss, reason = "Prometheus has no other numbers")]
pub(super) fn encode(
    e: &mut DescriptorEncoder<'_>,
    services: &[(Labels, LatencyEntry)],
) -> Result<(), fmt::Error> {
    if services.is_empty() {
        return Ok(());
    }
    let mut metric = e.encode_descriptor(
        "ballast_connect_latency_seconds",
        "Time from the first SYN of a connection to the answer of the endpoint",
        None,
        MetricType::Histogram,
    )?;
    for (labels, entry) in services {
        let limit = |bucket| limit_us(bucket).map_or(f64::INFINITY, |us| us as f64 / 1e6);
        let buckets: Vec<_> =
            entry.buckets.iter().enumerate().map(|(bucket, count)| (limit(bucket), *count)).collect();
        metric.encode_family(labels)?.encode_histogram::<NoLabelSet>(
            entry.sum_us as f64 / 1e6,
            entry.answered(),
            &buckets,
            None,
        )?;
    }
    let refused = services.iter().map(|(labels, entry)| (labels.clone(), entry.refused));
    counter(e, "ballast_connects_refused", "SYNs that an endpoint answered with a reset", refused)?;
    let again = services.iter().map(|(labels, entry)| (labels.clone(), entry.retransmits));
    counter(e, "ballast_connect_retransmits", "Retransmitted SYNs", again)
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode as encode_text;
    use prometheus_client::registry::Registry;

    use super::super::sample::Scraped;
    use super::*;

    fn text(services: Vec<(Labels, LatencyEntry)>) -> String {
        let mut registry = Registry::default();
        registry
            .register_collector(Box::new(Scraped(move |e: &mut DescriptorEncoder<'_>| encode(e, &services))));
        let mut text = String::new();
        encode_text(&mut text, &registry).unwrap();
        text
    }

    #[test]
    fn a_histogram_counts_up_to_each_limit() {
        let mut entry = LatencyEntry { sum_us: 90, refused: 2, retransmits: 3, ..LatencyEntry::default() };
        (entry.buckets[0], entry.buckets[1]) = (1, 2);
        let text = text(vec![(vec![("name", "web".to_owned())], entry)]);
        for line in [
            "ballast_connect_latency_seconds_sum{name=\"web\"} 0.00009",
            "ballast_connect_latency_seconds_count{name=\"web\"} 3",
            "ballast_connect_latency_seconds_bucket{le=\"0.000032\",name=\"web\"} 1",
            "ballast_connect_latency_seconds_bucket{le=\"0.000064\",name=\"web\"} 3",
            "ballast_connect_latency_seconds_bucket{le=\"+Inf\",name=\"web\"} 3",
            "ballast_connects_refused_total{name=\"web\"} 2",
            "ballast_connect_retransmits_total{name=\"web\"} 3",
        ] {
            assert!(text.lines().any(|other| other == line), "no `{line}` in\n{text}");
        }
    }

    #[test]
    fn nothing_is_written_where_nothing_is_measured() {
        assert_eq!(text(Vec::new()).trim(), "# EOF");
    }
}
