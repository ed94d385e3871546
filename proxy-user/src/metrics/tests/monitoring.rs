//! Checks that the alerts and the dashboard use only metrics and labels that are exported.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;

use serde_json::Value;

use super::*;

/// Labels that Prometheus, or the `PodMonitor` of the chart, adds to each sample.
const OF_THE_SCRAPE: [&str; 3] = ["instance", "job", "node"];
/// Words of `PromQL` without parentheses.
const KEYWORDS: [&str; 4] = ["and", "or", "unless", "bool"];
/// Words that are followed by a list of labels.
const OF_LABELS: [&str; 6] = ["by", "without", "on", "ignoring", "group_left", "group_right"];

/// The names in an expression.
#[derive(Debug, Default, PartialEq, Eq)]
struct NamesUsed {
    /// Metrics, each with the labels that select from it.
    metrics: Vec<(String, Vec<String>)>,
    /// Labels by which results are grouped.
    labels: Vec<String>,
}

/// Returns every metric of a busy agent, with the labels of its samples.
pub(super) fn exported() -> BTreeMap<String, BTreeSet<String>> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Fixed(reading())));
    let mut of_maps = String::new();
    text::encode(&mut of_maps, &registry).unwrap();
    let (_, servers) = watch::channel(ApiServers {
        servers: vec!["https://192.0.2.1:6443".to_owned()],
        ..ApiServers::default()
    });
    let metrics = metrics(eventful())
        .with_repairs(Arc::default())
        .with_audits(Arc::default())
        .with_telemetry(Arc::default())
        .with_api_servers(servers, watch::channel([("services", None)].into()).1);
    metrics.answered_healthz(200);
    metrics.answered_livez(200);
    metrics.ended_sockets(IpFamily::V4, 1);
    // Prometheus itself makes `up` for each target; a PodMonitor's targets have the container's name.
    let mut all = BTreeMap::from([("up".to_owned(), BTreeSet::from(["container".to_owned()]))]);
    for text in [of_maps, metrics.encode(Format::OpenMetrics).unwrap()] {
        for (sample, _) in parse(&text).samples {
            let (name, labels) = sample.split_once('{').unwrap_or((&sample, ""));
            let keys =
                labels.split("\",").filter_map(|label| label.split_once('=')).map(|(key, _)| key.to_owned());
            all.entry(name.to_owned()).or_default().extend(keys);
        }
    }
    all
}

/// Parses the names in an expression.
fn names_in(expression: &str) -> NamesUsed {
    let mut names = NamesUsed::default();
    let mut rest = expression;
    while let Some(first) = rest.chars().next() {
        let word_end = |text: &str| {
            text.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':')).unwrap_or(text.len())
        };
        if first == '"' {
            rest = &rest[1 + rest[1..].find('"').expect("strings end") + 1..];
        } else if first.is_ascii_digit() {
            // Numbers and durations.
            rest = &rest[word_end(rest)..];
        } else if first.is_ascii_alphabetic() {
            let (word, behind) = rest.split_at(word_end(rest));
            rest = behind.trim_start();
            if OF_LABELS.contains(&word) {
                let (labels, behind) = rest[1..].split_once(')').expect("parentheses close");
                names.labels.extend(labels.split(',').map(|label| label.trim().to_owned()));
                rest = behind;
            } else if let Some(matchers) = rest.strip_prefix('{') {
                let (matchers, behind) = matchers.split_once('}').expect("braces close");
                let keys = matchers.split("\",").map(|one| one[..word_end(one)].trim().to_owned());
                names.metrics.push((word.to_owned(), keys.collect()));
                rest = behind;
            } else if !["(", "by ", "without "].iter().any(|next| rest.starts_with(next))
                && !KEYWORDS.contains(&word)
            {
                names.metrics.push((word.to_owned(), Vec::new()));
            }
        } else {
            rest = &rest[first.len_utf8()..];
        }
    }
    names
}

fn file(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/chart/monitoring").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns the labels in texts like `{{instance}} and {{ $labels.map }}`.
fn shown(text: &str) -> Vec<String> {
    let pieces = text.split("{{").skip(1).filter_map(|piece| piece.split_once("}}"));
    let words = pieces.map(|(inside, _)| inside.trim().to_owned());
    words
        .filter(|word| !word.starts_with("$value"))
        .map(|word| word.trim_start_matches("$labels.").to_owned())
        .collect()
}

/// Checks one expression and the texts that show its results.
fn check(what: &str, expression: &str, texts: &[&str]) {
    let (exported, used) = (exported(), names_in(expression));
    assert!(!used.metrics.is_empty(), "{what} asks for no metric: {expression}");
    let mut known: BTreeSet<&str> = OF_THE_SCRAPE.into();
    known.insert("le");
    for (name, selected) in &used.metrics {
        let labels = exported.get(name).unwrap_or_else(|| panic!("{what}: no metric is named `{name}`"));
        known.extend(labels.iter().map(String::as_str));
        for label in selected {
            let is_there = labels.contains(label) || OF_THE_SCRAPE.contains(&label.as_str());
            assert!(is_there, "{what}: `{name}` has no label `{label}`");
        }
    }
    let shown = texts.iter().flat_map(|text| shown(text));
    for label in used.labels.into_iter().chain(shown) {
        assert!(known.contains(label.as_str()), "{what}: nothing there has a label `{label}`");
    }
}

#[test]
fn names_are_found_in_expressions() {
    let expression = "sum by (a, b) (rate(x_total{c=\"y{z}\",d=~\"e\"}[5m])) / on (f) group_left () max(w) > 1e3 or vector(0)";
    // This parser does not support a brace in a string; no rule has one.
    let expression = expression.replace("y{z}", "y");
    let metrics =
        vec![("x_total".to_owned(), vec!["c".to_owned(), "d".to_owned()]), ("w".to_owned(), vec![])];
    let labels = ["a", "b", "f", ""].map(str::to_owned).to_vec();
    assert_eq!(names_in(&expression), NamesUsed { metrics, labels });
    assert_eq!(shown("{{ $labels.map }}: {{ $value | humanize }} {{instance}}"), ["map", "instance"]);
}

#[test]
#[should_panic(expected = "no metric is named `ballast_nonsense`")]
fn a_metric_that_is_not_exported_is_found() {
    check("test", "rate(ballast_nonsense[5m])", &[]);
}

#[test]
#[should_panic(expected = "`ballast_synced` has no label `colour`")]
fn a_label_that_is_not_exported_is_found() {
    check("test", "ballast_synced{colour=\"red\"} == 0", &[]);
}

#[test]
fn alerts_ask_for_what_is_exported() {
    const RUNBOOKS: &str = include_str!("../../../../docs/alerts.md");
    let rules: Value = serde_saphyr::from_str(&file("alerts.yaml")).unwrap();
    let rules: Vec<_> = rules["groups"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|group| group["rules"].as_array().unwrap())
        .collect();
    assert!(rules.len() > 5);
    let sections = RUNBOOKS.lines().filter(|line| line.starts_with("## ")).count();
    assert_eq!(sections, rules.len(), "docs/alerts.md has a section about each alert");
    for rule in rules {
        let text =
            |pointer: &str| rule.pointer(pointer).and_then(Value::as_str).unwrap_or_else(|| panic!("{rule}"));
        assert!(["critical", "warning", "info"].contains(&text("/labels/severity")), "{rule}");
        let alert = text("/alert");
        let runbook = format!("docs/alerts.md#{}", alert.to_lowercase());
        assert_eq!(text("/annotations/runbook_url"), runbook);
        assert!(RUNBOOKS.contains(&format!("\n## {alert}\n")), "docs/alerts.md says nothing about {alert}");
        let texts = [text("/annotations/summary"), text("/annotations/description")];
        check(text("/alert"), text("/expr"), &texts);
    }
}

#[test]
fn the_dashboard_asks_for_what_is_exported() {
    let dashboard: Value = serde_json::from_str(&file("dashboard.json")).unwrap();
    let (mut ids, mut expressions) = (BTreeSet::new(), 0);
    for panel in dashboard["panels"].as_array().unwrap() {
        let title = panel["title"].as_str().unwrap();
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{title} has another panel's number");
        for target in panel["targets"].as_array().into_iter().flatten() {
            let text = |key: &str| target[key].as_str().unwrap();
            check(title, text("expr"), &[text("legendFormat")]);
            expressions += 1;
        }
    }
    assert!(expressions > 10);
    for variable in dashboard["templating"]["list"].as_array().unwrap() {
        if let Some(definition) = variable["definition"].as_str() {
            // label_values(METRIC, LABEL)
            let inside = definition.strip_prefix("label_values(").unwrap().strip_suffix(')').unwrap();
            let (metric, label) = inside.split_once(", ").unwrap();
            check(definition, metric, &[&format!("{{{{{label}}}}}")]);
        }
    }
}
