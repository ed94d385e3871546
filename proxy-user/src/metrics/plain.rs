//! Converts the text format of `OpenMetrics` to the text format of Prometheus, 0.0.4.
//!
//! The samples are the same, but the metadata are not: in 0.0.4 a counter has the name of its sample, with `_total`,
//! and there are no info metrics, no units and no end mark. A parser of 0.0.4 would read the counters as untyped
//! samples, and reject the whole text because of an unknown type. Bounds of buckets are whole numbers where Go's client
//! writes them so: `1`, which `OpenMetrics` writes as `1.0`.

/// Rewrites the comment lines, and the bounds of buckets.
pub(super) fn from_open_metrics(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    // The help of a family precedes its type, and the type determines the name of the family.
    let mut help = None;
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = rest.split_once(' ');
        } else if let Some((family, kind)) =
            line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
        {
            let (suffix, kind) = match kind {
                "counter" => ("_total", "counter"),
                "info" => ("_info", "gauge"),
                "unknown" => ("", "untyped"),
                other => ("", other),
            };
            if let Some((_, text)) = help.take().filter(|(name, _)| *name == family) {
                plain.extend(["# HELP ", family, suffix, " ", text, "\n"]);
            }
            plain.extend(["# TYPE ", family, suffix, " ", kind, "\n"]);
        } else if !line.starts_with("# ") {
            let bound = line
                .split_once("_bucket{le=\"")
                .and_then(|(name, rest)| Some((name, rest.split_once(".0\"")?)));
            match bound {
                Some((name, (bound, rest))) if !bound.contains('"') => {
                    plain.extend([name, "_bucket{le=\"", bound, "\"", rest, "\n"]);
                }
                _ => plain.extend([line, "\n"]),
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::from_open_metrics;

    #[test]
    fn bounds_of_buckets_are_those_of_kube_proxy() {
        let text = "h_bucket{le=\"1.0\",v=\"2.0\"} 1\nh_bucket{le=\"0.05\",v=\"2.0\"} 1\nh_bucket{le=\"+Inf\"} 1\ng{v=\"1.0\"} 1\n";
        assert_eq!(from_open_metrics(text), text.replace("le=\"1.0\"", "le=\"1\""));
    }

    #[test]
    fn families_are_named_as_their_samples() {
        let text = "# HELP a_b Things seen.\n# TYPE a_b counter\na_b_total{x=\"# 1\"} 5\n\
                    # HELP build What runs.\n# TYPE build info\nbuild_info{v=\"1\"} 1\n\
                    # HELP c_seconds Time.\n# TYPE c_seconds gauge\n# UNIT c_seconds seconds\nc_seconds 1.5\n\
                    # HELP h Sizes.\n# TYPE h histogram\nh_sum 1.0\nh_count 1\nh_bucket{le=\"+Inf\"} 1\n# EOF\n";
        let expected = "# HELP a_b_total Things seen.\n# TYPE a_b_total counter\na_b_total{x=\"# 1\"} 5\n\
                        # HELP build_info What runs.\n# TYPE build_info gauge\nbuild_info{v=\"1\"} 1\n\
                        # HELP c_seconds Time.\n# TYPE c_seconds gauge\nc_seconds 1.5\n\
                        # HELP h Sizes.\n# TYPE h histogram\nh_sum 1.0\nh_count 1\nh_bucket{le=\"+Inf\"} 1\n";
        assert_eq!(from_open_metrics(text), expected);
    }
}
