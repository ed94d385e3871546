//! Exemplars of `ballast_connect_latency_seconds`: a connection beside the count of its bucket (`OpenMetrics` 1.0).
//!
//! Connections of the packet path are in the flow table, with the time until they were answered beside them
//! (`syn_times`), so a scrape finds the newest one of each bucket there. Translated sockets are not in the flow table:
//! the programs keep their newest connections (`socket_examples`). `prometheus-client` writes exemplars of its own
//! histograms only, so the exemplars are inserted into its text.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use proxy_common::latency::{LATENCY_BUCKETS, limit_us};

use super::datapath::port;
use crate::maps::view::{Example, NameRow, View, ViewError, monotonic};

/// The beginning of a bucket's sample.
const SAMPLE: &str = "ballast_connect_latency_seconds_bucket{le=\"";
/// The maximum length of an exemplar's label names and values together, in characters.
const MOST: usize = 128;

/// The time at which the monotonic clock was zero, in nanoseconds since 1970. It is kept, since an exemplar must have
/// the same time in each scrape.
#[derive(Debug, Default)]
pub(super) struct Zero(AtomicU64);

impl Zero {
    /// Returns the kept time; computes it again if it differs from the current clocks by more than a second, because
    /// the clock was set.
    fn now(&self) -> Duration {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = since.saturating_sub(monotonic());
        let kept = Duration::from_nanos(self.0.load(Ordering::Relaxed));
        if now.abs_diff(kept) < Duration::from_secs(1) {
            return kept;
        }
        self.0.store(u64::try_from(now.as_nanos()).unwrap_or_default(), Ordering::Relaxed);
        now
    }
}

/// Adds the exemplars to the text of a scrape. Reads the flow table, if connections are measured.
pub(super) fn add(text: String, bpffs: &Path, zero: &Zero) -> String {
    if !text.contains(SAMPLE) {
        return text;
    }
    let read = || -> Result<_, ViewError> {
        let view = View::open(bpffs)?;
        Ok((view.names()?, view.latency_examples()?))
    };
    match read() {
        Ok((names, examples)) => with(&text, &names, &examples, zero.now()),
        Err(error) => {
            tracing::debug!(%error, "cannot read the flow table for exemplars");
            text
        }
    }
}

/// Returns the text with an exemplar after each bucket that has one.
fn with(
    text: &str,
    names: &BTreeMap<u32, NameRow>,
    examples: &BTreeMap<(u32, usize), Example>,
    zero: Duration,
) -> String {
    let labels = |id: &u32| {
        let labels = port(names.get(id)?).into_iter().map(|(name, value)| format!(",{name}=\"{value}\""));
        Some(labels.collect::<String>())
    };
    let known: BTreeMap<(String, usize), &Example> = examples
        .iter()
        .filter_map(|((id, bucket), example)| Some(((labels(id)?, *bucket), example)))
        .collect();
    let mut output = String::with_capacity(text.len() + known.len() * MOST);
    for line in text.lines() {
        output.push_str(line);
        let example = series(line).and_then(|(bucket, labels)| known.get(&(labels.to_owned(), bucket)));
        if let Some(exemplar) = example.and_then(|example| exemplar(example, zero)) {
            output.push_str(&exemplar);
        }
        output.push('\n');
    }
    output
}

/// Returns the number of the bucket and the other labels of a sample.
#[expect(clippy::cast_precision_loss, reason = "limits of buckets are small")]
fn series(line: &str) -> Option<(usize, &str)> {
    let (le, rest) = line.strip_prefix(SAMPLE)?.split_once('"')?;
    let (labels, _) = rest.split_once("} ")?;
    let bucket = if le == "+Inf" {
        LATENCY_BUCKETS - 1
    } else {
        let microseconds = le.parse::<f64>().ok()? * 1e6;
        (0..LATENCY_BUCKETS)
            .find(|bucket| limit_us(*bucket).is_some_and(|limit| (limit as f64 - microseconds).abs() < 0.5))?
    };
    Some((bucket, labels))
}

fn exemplar(example: &Example, zero: Duration) -> Option<String> {
    let Example { client, backend, took, begun } = example;
    let (client, endpoint) = (client.to_string(), backend.to_string());
    let length = "client".len() + "endpoint".len() + client.len() + endpoint.len();
    let mut text = String::new();
    let time = (zero + *begun + *took).as_secs_f64();
    // The value is not rounded: readers of the histogram compare it with the limits of the bucket.
    let took = took.as_secs_f64();
    write!(text, " # {{client=\"{client}\",endpoint=\"{endpoint}\"}} {took} {time:.3}").ok()?;
    (length <= MOST).then_some(text)
}

#[cfg(test)]
mod tests {
    use proxy_common::latency::bucket;

    use super::*;
    use crate::maps::view::Transport;
    use proxy_core::model::net::IpFamily;

    fn example(client: &str, backend: &str, took: Duration) -> Example {
        let (client, backend) = (client.parse().unwrap(), backend.parse().unwrap());
        Example { client, backend, took, begun: Duration::from_secs(100) }
    }

    fn names() -> BTreeMap<u32, NameRow> {
        let row = NameRow {
            namespace: "default".into(),
            name: "web".into(),
            port: "http".into(),
            protocol: Transport(6),
            family: IpFamily::V4,
        };
        [(3, row)].into()
    }

    const LABELS: &str = r#"namespace="default",name="web",port="http",protocol="TCP",ip_family="IPv4""#;
    const ZERO: Duration = Duration::from_secs(1_700_000_000);

    #[test]
    fn a_bucket_has_its_connection() {
        let took = Duration::from_nanos(50_500);
        let slow = Duration::from_mins(1);
        let examples = BTreeMap::from([
            ((3, bucket(50)), example("192.0.2.9:40000", "10.0.0.1:80", took)),
            ((3, LATENCY_BUCKETS - 1), example("[fd00::9]:40001", "[fd00::1]:80", slow)),
            ((99, 1), example("192.0.2.9:40000", "10.0.0.1:80", took)),
        ]);
        let sample = |le: &str, rest: &str| format!("{SAMPLE}{le}\",{LABELS}}} {rest}\n");
        let text = [
            "# TYPE x histogram\n".to_owned(),
            sample("0.000032", "1"),
            sample("0.000064", "3"),
            sample("+Inf", "4"),
        ];
        let expected = [
            "# TYPE x histogram\n".to_owned(),
            sample("0.000032", "1"),
            sample(
                "0.000064",
                "3 # {client=\"192.0.2.9:40000\",endpoint=\"10.0.0.1:80\"} 0.0000505 1700000100.000",
            ),
            sample("+Inf", "4 # {client=\"[fd00::9]:40001\",endpoint=\"[fd00::1]:80\"} 60 1700000160.000"),
        ];
        assert_eq!(with(&text.concat(), &names(), &examples, ZERO), expected.concat());
    }

    #[test]
    #[expect(clippy::cast_precision_loss, reason = "limits of buckets are small")]
    fn every_bucket_is_known_by_its_limit() {
        for number in 0..LATENCY_BUCKETS {
            // The limit as prometheus-client writes it.
            let le = limit_us(number).map_or("+Inf".to_owned(), |us| format!("{}", us as f64 / 1e6));
            assert_eq!(series(&format!("{SAMPLE}{le}\",a=\"b\"}} 1")), Some((number, ",a=\"b\"")), "{le}");
        }
        assert_eq!(series("ballast_connect_latency_seconds_sum{a=\"b\"} 1"), None);
    }

    #[test]
    fn the_zero_of_the_clock_is_kept_until_the_clock_is_set() {
        let zero = Zero::default();
        let kept = zero.now();
        assert_eq!(zero.now(), kept);
        zero.0.store(0, Ordering::Relaxed);
        assert!(zero.now().abs_diff(kept) < Duration::from_secs(1));
    }

    #[test]
    fn the_longest_labels_are_short_enough() {
        let longest = "[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:65535";
        let text = exemplar(&example(longest, longest, Duration::from_millis(1)), ZERO).unwrap();
        assert!(text.contains(longest), "{text}");
    }
}
