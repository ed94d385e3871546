//! Checks that the documents name the exported metrics with their labels, and no others.

use std::collections::BTreeMap;
use std::fs;

use super::monitoring::exported;
use super::*;

type Labels = BTreeSet<String>;

/// Returns the exported metrics by family; the samples of a histogram are one family.
fn families() -> BTreeMap<String, Labels> {
    let mut families: BTreeMap<String, Labels> = BTreeMap::new();
    for (sample, mut labels) in exported() {
        labels.remove("le");
        let base = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| sample.strip_suffix(suffix));
        families.entry(base.unwrap_or(&sample).to_owned()).or_default().extend(labels);
    }
    families
}

/// Returns the rows of the tables below a heading: metrics of the first column with their labels, and the second column.
fn rows(document: &str, heading: &str) -> Vec<(BTreeMap<String, Labels>, String)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(document);
    let text = fs::read_to_string(path).unwrap();
    let (_, section) = text.split_once(&format!("\n## {heading}\n")).unwrap();
    let section = section.split("\n## ").next().unwrap();
    let row = |line: &str| {
        let (metrics, meaning) = line.strip_prefix("| ")?.split_once(" | ")?;
        let spans = metrics.split('`').skip(1).step_by(2).filter(|span| !span.ends_with(['*', '.']));
        let metrics = spans.map(|span| {
            let (name, labels) = span.split_once('{').unwrap_or((span, "}"));
            let labels = labels.trim_end_matches('}').split(',').filter(|label| !label.is_empty());
            (name.to_owned(), labels.map(str::to_owned).collect())
        });
        Some((metrics.collect(), meaning.to_owned()))
    };
    section.lines().filter_map(row).collect()
}

#[test]
fn every_metric_of_ours_is_documented_with_its_labels() {
    let documented: BTreeMap<_, _> =
        rows("observability.md", "Watching").into_iter().flat_map(|(metrics, _)| metrics).collect();
    let mut ours = families();
    // Prometheus makes `up`.
    ours.retain(|name, _| !name.starts_with("kubeproxy_") && name != "up");
    assert_eq!(documented, ours);
}

#[test]
fn kube_proxys_metrics_are_there_as_documented() {
    let rows = rows("compatibility.md", "Metrics");
    let documented = |is_there: bool| -> BTreeMap<_, _> {
        let chosen = rows.iter().filter(|(_, meaning)| meaning.starts_with("the same") == is_there);
        chosen.flat_map(|(metrics, _)| metrics.clone()).collect()
    };
    let exported = families();
    let mut theirs = exported.clone();
    theirs.retain(|name, _| name.starts_with("kubeproxy_"));
    assert_eq!(documented(true), theirs);
    let denied = documented(false);
    assert!(denied.len() > 10 && denied.keys().all(|name| !exported.contains_key(name)), "{denied:?}");
}
