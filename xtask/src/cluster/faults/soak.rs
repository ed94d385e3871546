//! `cargo xtask test cluster soak`: the same clients ask for the whole time while faults, rollouts and many Services come in
//! random order; the resources of each agent are sampled and drawn.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use anyhow::Result;
use fs_err as fs;

use super::chaos::{self, Args, RandomOrder};
use super::table::{self, Case, Line, case};
use super::testbed::{NAME, Testbed, total};
use super::{clients, objects, page, rolling};
use crate::bench::lines;
use crate::cluster::plan::Node;
use crate::cluster::{Workdir, apply, kubectl};
use crate::workspace::Workspace;
use crate::{log, signal};

/// Time between two samples.
const INTERVAL: Duration = Duration::from_secs(5);
/// Number of Services that come and go at once.
const MANY: u64 = 400;

/// What happens besides the faults of `chaos`.
const CHANGES: [Case; 2] = [
    case("50 deployments roll at once", |testbed, _| rolling::all_at_once(testbed)),
    case("many Services come and go", |testbed, _| many(testbed)),
];

/// A resource of an agent, as a metric.
struct Resource {
    /// Name of the file and title of the plot.
    name: &'static str,
    unit: &'static str,
    metric: &'static str,
    /// Factor from the metric to the unit.
    factor: f64,
    /// Whether the metric counts up, so that its increase by second is of interest.
    is_rate: bool,
}

const MIB: f64 = 1.0 / (1024.0 * 1024.0);

const RESOURCES: [Resource; 6] = [
    Resource {
        name: "resident memory",
        unit: "MiB",
        metric: "process_resident_memory_bytes",
        factor: MIB,
        is_rate: false,
    },
    Resource {
        name: "memory of maps",
        unit: "MiB",
        metric: "ballast_map_memory_bytes",
        factor: MIB,
        is_rate: false,
    },
    Resource { name: "flows", unit: "", metric: "ballast_flows", factor: 1.0, is_rate: false },
    Resource { name: "ids of endpoints", unit: "", metric: "ballast_backends", factor: 1.0, is_rate: false },
    Resource { name: "open files", unit: "", metric: "process_open_fds", factor: 1.0, is_rate: false },
    Resource { name: "CPU", unit: "%", metric: "process_cpu_seconds_total", factor: 100.0, is_rate: true },
];

/// Samples of one resource: seconds since the start and value, of each node.
type Series = BTreeMap<Node, Vec<(f64, f64)>>;

/// Injects random faults and changes for a while under one continuous load, and prints what its clients saw.
pub fn run(workdir: &Workdir, args: &Args) -> Result<()> {
    let testbed = Testbed::make(workdir)?;
    let mut order = RandomOrder::begin(args, 60);
    let (ended, start) = (AtomicBool::new(false), Instant::now());
    let mut lines = Vec::new();
    let done = scope(|scope| {
        let samples = scope.spawn(|| sample(&testbed, start, &ended));
        let done = clients::under_traffic(&testbed, || faults(&testbed, &mut order, &mut lines));
        ended.store(true, Ordering::Relaxed);
        samples
            .join()
            .map_err(|_| anyhow::anyhow!("the sampling thread panicked"))
            .and_then(|all| Ok((done?, all)))
    });
    let ((tally, outcome), samples) = match done {
        Ok(done) => done,
        Err(error) => return testbed.clear().and(Err(error)),
    };
    lines.push(Line {
        what: "the whole run".to_owned(),
        tally: Some(tally),
        accepted_loss: None,
        took: start.elapsed(),
        remarks: Vec::new(),
        outcome,
    });
    let finished = super::finish(&testbed, Ok(()), &lines, None);
    let ranges = ranges(&samples);
    log::line(format_args!("{ranges}"));
    if args.page {
        write(&testbed, &order.words, &format!("{}\n{ranges}", table::markdown(&lines)), &samples)?;
    }
    finished
}

fn faults(testbed: &Testbed<'_>, order: &mut RandomOrder, lines: &mut Vec<Line>) -> Result<()> {
    let faults: Vec<_> =
        chaos::FAULTS.iter().chain(&CHANGES).filter(|case| case.accepted_loss.is_none()).collect();
    while let Some((case, parameters)) = order.next(testbed, &faults)? {
        lines.push(super::at_rest(case.what, || (case.fault)(testbed, &parameters)));
        signal::pause(INTERVAL)?;
    }
    Ok(())
}

/// Creates Services of all pods and deletes them, so that tables grow.
fn many(testbed: &Testbed<'_>) -> Result<()> {
    let made =
        apply(testbed.workdir, &objects::many(NAME, MANY)).and_then(|()| rolling::await_equal(testbed));
    kubectl(testbed.workdir, &["delete", "services", "-l", objects::MANY]).read()?;
    made?;
    rolling::await_equal(testbed)
}

/// Reads the metrics of each node's agent until the run has ended. A sample is missing while an agent is gone.
fn sample(testbed: &Testbed<'_>, start: Instant, ended: &AtomicBool) -> Vec<Series> {
    let mut all: Vec<Series> = RESOURCES.iter().map(|_| Series::new()).collect();
    let mut before: BTreeMap<(Node, &str), (f64, f64)> = BTreeMap::new();
    while !ended.load(Ordering::Relaxed) {
        for node in testbed.nodes() {
            let read = ["curl", "-sf", "-m", "2", "http://127.0.0.1:10249/metrics"];
            let Ok(metrics) = testbed.workdir.node(node).command(&read).read() else { continue };
            let now = start.elapsed().as_secs_f64();
            for (resource, series) in RESOURCES.iter().zip(&mut all) {
                let value = total(&metrics, resource.metric) * resource.factor;
                let shown = if resource.is_rate {
                    // A new process counts from 0.
                    let old = before.insert((node, resource.metric), (now, value));
                    old.filter(|(_, old)| *old <= value)
                        .map(|(then, old)| (value - old) / (now - then).max(0.1))
                } else {
                    Some(value)
                };
                series.entry(node).or_default().extend(shown.map(|shown| (now, shown)));
            }
        }
        sleep(INTERVAL);
    }
    all
}

/// Returns a table with the mean of the first and of the last tenth of the samples, and the highest, of all nodes.
fn ranges(samples: &[Series]) -> String {
    let mut text = String::from("| of an agent | at first | at the end | at most |\n|---|---:|---:|---:|\n");
    for (resource, series) in RESOURCES.iter().zip(samples) {
        let tenth = |values: &Vec<(f64, f64)>| (values.len() / 10).max(1);
        let first = mean(series.values().flat_map(|values| values.iter().take(tenth(values))));
        let last = mean(series.values().flat_map(|values| values.iter().rev().take(tenth(values))));
        let most = series.values().flatten().map(|(_, value)| *value).fold(0.0, f64::max);
        let unit = if resource.unit.is_empty() { String::new() } else { format!(", {}", resource.unit) };
        let _ = writeln!(text, "| {}{unit} | {first:.1} | {last:.1} | {most:.1} |", resource.name);
    }
    text
}

fn mean<'a>(values: impl Iterator<Item = &'a (f64, f64)>) -> f64 {
    let (sum, count) = values.fold((0.0, 0.0), |(sum, count), (_, value)| (sum + value, count + 1.0));
    if count > 0.0 { sum / count } else { 0.0 }
}

fn write(testbed: &Testbed<'_>, words: &str, body: &str, samples: &[Series]) -> Result<()> {
    let folder = Workspace::find()?.root().join("docs/benchmarks");
    fs::create_dir_all(folder.join("soak"))?;
    let nodes = testbed.nodes().len();
    let mut text = format!(
        "# Soak\n\n`{} --nodes {nodes}`, then `cargo xtask test cluster soak {words}`, {}. \
         The clients of [faults.md](faults.md) ask for the whole time, while the cases come in random order; in the last \
         line, every request is counted.\n\n{body}",
        super::up(testbed.agents.proxy(), &testbed.workdir.settings()),
        page::machine(),
    );
    for (resource, series) in RESOURCES.iter().zip(samples) {
        let file = format!("soak/{}.svg", resource.name.replace(' ', "-").to_lowercase());
        let named =
            series.iter().map(|(node, values)| (node.to_string(), values.as_slice())).collect::<Vec<_>>();
        fs::write(folder.join(&file), lines(&named, resource.unit)?)?;
        let _ = write!(text, "\n## Of each agent: {}\n\n![{}]({file})\n", resource.name, resource.name);
    }
    fs::write(folder.join("soak.md"), text)?;
    log::line(format_args!("written: docs/benchmarks/soak.md"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_has_first_last_and_highest_of_all_nodes() {
        let values =
            |from: u32| (0..20).map(|second| (f64::from(second), f64::from(from + second))).collect();
        let mut samples = vec![Series::new(); RESOURCES.len()];
        samples[2] = [(Node(1), values(0)), (Node(2), values(100))].into();
        let text = ranges(&samples);
        assert!(text.contains("| flows | 50.5 | 68.5 | 119.0 |"), "{text}");
        assert!(text.contains("| CPU, % | 0.0 | 0.0 | 0.0 |"), "{text}");
    }
}
