//! Reads the results of a run of the suite from ginkgo's report.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde::Deserialize;

/// Result of a spec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Passed(Duration),
    Failed(String),
    /// The spec itself found that it cannot run here, with the reason.
    Skipped(String),
}

/// Results of the selected specs, by name.
pub(super) type Results = BTreeMap<String, Outcome>;

#[derive(Deserialize)]
struct Suite {
    #[serde(rename = "SpecReports", default)]
    specs: Option<Vec<Spec>>,
}

#[derive(Deserialize)]
struct Spec {
    #[serde(rename = "ContainerHierarchyTexts", default)]
    containers: Option<Vec<String>>,
    #[serde(rename = "LeafNodeText", default)]
    text: String,
    #[serde(rename = "LeafNodeType", default)]
    kind: String,
    #[serde(rename = "State", default)]
    state: String,
    /// Run time in nanoseconds.
    #[serde(rename = "RunTime", default)]
    time: u64,
    #[serde(rename = "Failure", default)]
    failure: Failure,
}

#[derive(Default, Deserialize)]
struct Failure {
    #[serde(rename = "Message", default)]
    message: String,
}

/// Reads ginkgo's report (`--json-report`).
pub(super) fn read(text: &str) -> Result<Results> {
    let suites: Vec<Suite> = serde_json::from_str(text).context("ginkgo's report is not as expected")?;
    let specs = suites.into_iter().flat_map(|suite| suite.specs.unwrap_or_default());
    Ok(specs.filter_map(|spec| Some((spec.name(), spec.outcome()?))).collect())
}

impl Spec {
    fn name(&self) -> String {
        let mut words: Vec<_> = self.containers.iter().flatten().map(String::as_str).collect();
        words.push(if self.text.is_empty() { &self.kind } else { &self.text });
        words.join(" ").trim_start_matches("[sig-network] ").to_owned()
    }

    /// Returns the result; `None` for a spec that was not selected, and for a preparation that succeeded.
    fn outcome(&self) -> Option<Outcome> {
        let is_spec = self.kind == "It";
        match self.state.as_str() {
            "passed" => is_spec.then(|| Outcome::Passed(Duration::from_nanos(self.time))),
            "skipped" if self.failure.message.is_empty() => None,
            "skipped" => Some(Outcome::Skipped(self.failure.message.clone())),
            "pending" => None,
            state => Some(Outcome::Failed(format!("{state}: {}", self.failure.message))),
        }
    }
}

/// Returns how many specs passed, and how many failed.
pub(super) fn count(results: &Results) -> (usize, usize) {
    let of = |wanted: fn(&Outcome) -> bool| results.values().filter(|outcome| wanted(outcome)).count();
    (of(|outcome| matches!(outcome, Outcome::Passed(_))), of(|outcome| matches!(outcome, Outcome::Failed(_))))
}

/// Formats a table of all specs with the result of each proxy; below it, the reasons of specs that failed or were skipped.
pub(super) fn table(runs: &[(String, Results)]) -> String {
    let names: std::collections::BTreeSet<_> = runs.iter().flat_map(|(_, results)| results.keys()).collect();
    let wide = names.iter().map(|name| short(name).chars().count()).max().unwrap_or_default();
    let mut text = format!("{:<wide$}", "SPEC");
    let mut reasons = String::new();
    for (proxy, _) in runs {
        let _ = write!(text, "  {proxy:<20}");
    }
    for name in names {
        let _ = write!(text, "\n{:<wide$}", short(name));
        for (proxy, results) in runs {
            let cell = match results.get(name) {
                None => "-".to_owned(),
                Some(Outcome::Passed(time)) => format!("passed {:>4} s", time.as_secs()),
                Some(Outcome::Failed(why)) => {
                    let _ = writeln!(reasons, "\n{proxy}: {name}\n{}", indented(why));
                    "FAILED".to_owned()
                }
                Some(Outcome::Skipped(why)) => {
                    let _ = writeln!(reasons, "\n{proxy}: {name}\n{}", indented(why));
                    "skipped".to_owned()
                }
            };
            let _ = write!(text, "  {cell:<20}");
        }
    }
    let lines: Vec<_> = text.lines().map(str::trim_end).collect();
    format!("{}\n{reasons}", lines.join("\n"))
}

/// Removes the labels at the end of a name, which say nothing about what is tested.
fn short(name: &str) -> &str {
    let mut name = name;
    while let Some((rest, _)) = name.rsplit_once(" [").filter(|_| name.ends_with(']')) {
        name = rest;
    }
    name
}

fn indented(why: &str) -> String {
    why.lines().take(12).map(|line| format!("    {line}")).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = r#"[{"SpecReports":[
        {"ContainerHierarchyTexts":null,"LeafNodeType":"SynchronizedBeforeSuite","State":"passed"},
        {"ContainerHierarchyTexts":["[sig-network] Services"],"LeafNodeType":"It",
         "LeafNodeText":"should serve [Conformance]","State":"passed","RunTime":2500000000},
        {"ContainerHierarchyTexts":["[sig-network] Services"],"LeafNodeType":"It",
         "LeafNodeText":"should hairpin","State":"timedout","Failure":{"Message":"took\ntoo long"}},
        {"ContainerHierarchyTexts":["[sig-network] Services"],"LeafNodeType":"It",
         "LeafNodeText":"should do what was not selected","State":"skipped"},
        {"ContainerHierarchyTexts":["[sig-network] Services"],"LeafNodeType":"It",
         "LeafNodeText":"should need a cloud","State":"skipped","Failure":{"Message":"no cloud"}}]}]"#;

    #[test]
    fn what_was_chosen_counts_and_a_timeout_is_a_failure() {
        let results = read(REPORT).unwrap();
        assert_eq!(results.len(), 3, "{results:?}");
        assert_eq!(count(&results), (1, 1));
        assert_eq!(results["Services should hairpin"], Outcome::Failed("timedout: took\ntoo long".into()));
        assert_eq!(results["Services should need a cloud"], Outcome::Skipped("no cloud".into()));
    }

    #[test]
    fn a_preparation_that_failed_is_a_failure() {
        let text = r#"[{"SpecReports":[{"LeafNodeType":"SynchronizedBeforeSuite","State":"failed"}]}]"#;
        assert_eq!(count(&read(text).unwrap()), (0, 1));
    }

    #[test]
    fn the_table_has_a_column_for_each_proxy_and_reasons_below() {
        let ours = read(REPORT).unwrap();
        let theirs: Results =
            [("Services should hairpin".to_owned(), Outcome::Passed(Duration::from_secs(3)))].into();
        let table = table(&[("ballast".into(), ours), ("kube-proxy".into(), theirs)]);
        let line = |name: &str| table.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
        assert!(line("Services should hairpin").contains("FAILED"), "{table}");
        assert!(line("Services should hairpin").ends_with("passed    3 s"), "{table}");
        assert!(line("Services should serve").ends_with('-'), "{table}");
        assert!(
            table.contains("ballast: Services should hairpin\n    timedout: took\n    too long"),
            "{table}"
        );
    }
}
