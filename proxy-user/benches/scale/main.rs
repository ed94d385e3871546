//! The agent with many Services, against a real API server: `cargo xtask test scale`. It needs root.
//!
//! One kube-apiserver with its etcd holds the Services and `EndpointSlices`. First, the real agent runs beside it and is
//! measured: cold start, restart, memory, CPU. Then hollow agents are measured: the same watch, model, plan and sync with maps
//! in memory, many in one process, behind a device pair that counts their bytes. No figure fails because a machine is slow.
#![expect(clippy::unwrap_used, reason = "a benchmark that cannot measure ends by panicking")]
#![expect(clippy::panic, reason = "as above")]
#![expect(clippy::print_stdout, reason = "it prints a table")]
#![expect(clippy::cast_precision_loss, reason = "no count here comes near 2^52")]

mod agent;
mod cluster;
mod hollow;
mod proc;
mod slope;
mod store;

use std::path::{Path, PathBuf};
use std::time::Duration;

use proxy_testbed::report::Row;
use proxy_testbed::{kube, report};

/// Options of the command line.
#[derive(Clone, Debug)]
struct Options {
    /// Number of Services.
    services: u32,
    /// Number of endpoints of each Service.
    endpoints: u32,
    /// Number of hollow agents; 0: none are measured.
    agents: u32,
    /// Whether the real agent is measured.
    real: bool,
    /// For how long 20 changes per second are made.
    churn: Duration,
    json: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        let churn = Duration::from_secs(20);
        Self { services: 1000, endpoints: 10, agents: 20, real: true, churn, json: None }
    }
}

impl Options {
    /// Returns the size of the cluster, for the names of figures.
    fn size(&self) -> String {
        format!("{} x {}", self.services, self.endpoints)
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let (mut is_bench, mut options) = (false, Options::default());
    while let Some(argument) = arguments.next() {
        let mut number = || arguments.next().unwrap().parse::<u32>().unwrap();
        match argument.as_str() {
            "--bench" => is_bench = true,
            "--services" => options.services = number(),
            "--endpoints" => options.endpoints = number(),
            "--agents" => options.agents = number(),
            "--churn" => options.churn = Duration::from_secs(number().into()),
            "--hollow-only" => options.real = false,
            "--json" => options.json = arguments.next().map(PathBuf::from),
            hollow::CHILD => {
                let count = number();
                hollow::run(count, Path::new(&arguments.next().unwrap()));
                return;
            }
            other => panic!("{other} is no option"),
        }
    }
    // `cargo test --benches` also starts this program, but is not to measure.
    if !is_bench {
        return;
    }
    let rows = measure(&options);
    report::print(&rows);
    if let Some(path) = &options.json {
        report::write(&rows, path);
    }
}

fn measure(options: &Options) -> Vec<Row> {
    let control = kube::begin().unwrap();
    control.api.create_node(agent::NODE).unwrap();
    let mut rows = Vec::new();
    if options.real {
        rows.extend(agent::empty(&control));
    }
    let cluster = cluster::Cluster::fill(&control, options.services, options.endpoints);
    if options.real {
        rows.extend(agent::full(&control, &cluster, options));
    }
    if options.agents > 0 {
        rows.extend(hollow::measure(&control, &cluster, options));
    }
    rows
}
