//! Reads the agent's metrics that `ballast check` needs.

use std::collections::BTreeSet;
use std::time::Duration;

use super::facts::AgentMetrics;

/// Parses Prometheus' text format; `now` is in seconds since 1970, and `sync_period` is the agent's setting.
pub fn read(text: &str, now: f64, sync_period: Duration) -> AgentMetrics {
    let count = |name: &str, label: &str| {
        // The values are whole numbers, in any notation.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "counts")]
        let sum = values(text, name, label).sum::<f64>() as u64;
        sum
    };
    let audits = |result: &str| count("ballast_api_audits_total", &format!("result=\"{result}\""));
    let last = values(text, "kubeproxy_sync_proxy_rules_last_timestamp_seconds", "").reduce(f64::min);
    AgentMetrics {
        version: label(text, "ballast_build_info", "version"),
        sync_period,
        synced: count("ballast_synced", "") > 0,
        sync_age: last.and_then(|last| Duration::try_from_secs_f64((now - last).max(0.0)).ok()),
        pending: count("kubeproxy_sync_proxy_rules_service_changes_pending", "")
            + count("kubeproxy_sync_proxy_rules_endpoint_changes_pending", ""),
        audits_clean: audits("clean"),
        audits_repaired: audits("repaired"),
        audits_failed: audits("failed"),
        detached: detached(text),
    }
}

/// Returns the devices on which a program is not attached.
fn detached(text: &str) -> BTreeSet<String> {
    let none = samples(text, "ballast_program_attached").filter(|(_, value)| *value == "0");
    none.filter_map(|(labels, _)| label_in(labels, "device")).filter(|device| !device.is_empty()).collect()
}

/// Returns labels and value of each sample of a metric.
fn samples<'a>(text: &'a str, name: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
    text.lines().filter_map(move |line| {
        let rest = line.strip_prefix(name)?;
        let (labels, value) = rest.rsplit_once(' ')?;
        (labels.is_empty() || labels.starts_with('{')).then_some((labels, value))
    })
}

fn values<'a>(text: &'a str, name: &'a str, label: &'a str) -> impl Iterator<Item = f64> {
    samples(text, name)
        .filter(move |(labels, _)| labels.contains(label))
        .filter_map(|(_, value)| value.parse().ok())
}

fn label(text: &str, name: &str, label: &str) -> Option<String> {
    let (labels, _) = samples(text, name).next()?;
    label_in(labels, label)
}

fn label_in(labels: &str, label: &str) -> Option<String> {
    let (_, rest) = labels.split_once(&format!("{label}=\""))?;
    rest.split_once('"').map(|(value, _)| value.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_read_by_their_exact_name() {
        let text = "\
# HELP ballast_synced Whether\n\
ballast_synced 1\n\
ballast_synced_other 7\n\
ballast_build_info{version=\"1.2.3\",abi=\"3\"} 1\n\
kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family=\"IPv4\"} 1000.5\n\
kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family=\"IPv6\"} 1005.5\n\
kubeproxy_sync_proxy_rules_service_changes_pending 2\n\
kubeproxy_sync_proxy_rules_endpoint_changes_pending 3\n\
ballast_program_attached{hook=\"tcx_ingress_2\",program=\"tc_ingress\",device=\"eth0\"} 1\n\
ballast_program_attached{hook=\"ingress_3\",program=\"tc_ingress\",device=\"eth1\"} 0\n\
ballast_program_attached{hook=\"sock_connect4\",program=\"sock_connect4\",device=\"\"} 0\n\
ballast_api_audits_total{result=\"clean\"} 5\n\
ballast_api_audits_total{result=\"failed\"} 1\n";
        let metrics = read(text, 1010.5, Duration::from_secs(30));
        assert_eq!(
            metrics,
            AgentMetrics {
                version: Some("1.2.3".to_owned()),
                sync_period: Duration::from_secs(30),
                synced: true,
                sync_age: Some(Duration::from_secs(10)),
                pending: 5,
                audits_clean: 5,
                audits_repaired: 0,
                audits_failed: 1,
                detached: ["eth1".to_owned()].into(),
            }
        );
        assert_eq!(read("", 0.0, Duration::ZERO), AgentMetrics::default());
    }
}
