//! Hollow agents: agents without programs and maps in the kernel, like kubemark's hollow proxies.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use proxy_core::model::NodeView;
use proxy_core::store::{Capacity, MemoryStore};
use proxy_user::driver::{Driver, DriverSettings};
use proxy_watch::api::{client, watch};
use tokio::sync::mpsc;

use crate::Options;
use crate::agent::NODE;
use crate::cluster::Cluster;
use crate::proc;
use proxy_testbed::kube::control::ControlPlane;
use proxy_testbed::kube::{self};
use proxy_testbed::report::Row;
use proxy_testbed::space::Space;

/// Option that starts this program as a process of hollow agents.
pub const CHILD: &str = "--hollow-agents";
/// Capacities for 50,000 Services.
const CAPACITY: Capacity = Capacity {
    frontends: 131_072,
    slots: 1 << 20,
    backends: 1 << 19,
    services: 131_072,
    maglev: 1 << 22,
    ranges: 1 << 16,
};
/// Number of the device pair that leads to the API server.
const WAY: u8 = 7;
/// Pause after a start.
const PAUSE: Duration = Duration::from_secs(5);

/// Runs `count` agents until the process is killed; prints a line when all have synced.
pub fn run(count: u32, kubeconfig: &Path) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let options = client::Options { kubeconfig: Some(kubeconfig.to_owned()), servers: Vec::new() };
        let mut all = Vec::new();
        for _ in 0..count {
            // Each agent has its own connection, and all have the same node.
            let client =
                client::connect(&options, tokio::sync::watch::Sender::default()).await.unwrap().client;
            let store = MemoryStore::new(CAPACITY);
            let driver = Driver::new(store, NodeView::new(NODE), DriverSettings::default()).unwrap();
            let (sender, events) = mpsc::channel(1024);
            all.push(driver.status());
            tokio::spawn(driver.run(events));
            let needs_nodes = tokio::sync::watch::channel(None).1;
            let watches = tokio::sync::watch::Sender::default();
            tokio::spawn(watch::run(client, NODE.to_owned(), sender, needs_nodes, watches, |_| ()));
        }
        for status in &mut all {
            status.wait_for(|status| status.synced).await.unwrap();
        }
        let endpoints = all.iter().map(|status| status.borrow().endpoints).min().unwrap_or_default();
        println!("{endpoints}");
        std::future::pending::<()>().await;
    });
}

/// The process with the agents; it is killed when this is dropped.
struct Agents(Child);

impl Agents {
    /// Starts the agents, and waits until all have synced; returns how long this took.
    fn start(space: &Space, control: &ControlPlane, count: u32, endpoints: u32) -> (Self, Duration) {
        let begun = Instant::now();
        let mut command = space.command(std::env::current_exe().unwrap());
        command.arg(CHILD).arg(count.to_string()).arg(control.agent_kubeconfig());
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let this = Self(child);
        // The API server's own Service also has an endpoint.
        assert_eq!(line.trim(), (endpoints + 1).to_string(), "endpoints of the hollow agent that has fewest");
        (this, begun.elapsed())
    }
}

impl Drop for Agents {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What the API server has used and served so far.
#[derive(Clone, Copy, Debug)]
struct Served {
    cpu: Duration,
    bytes: u64,
    lists: f64,
    watches: f64,
}

impl Served {
    fn now(control: &ControlPlane) -> Self {
        let text = control.api.get_raw("/metrics").unwrap();
        let requests = |verb: &str| -> f64 {
            let ours = text.lines().filter(|line| {
                line.starts_with("apiserver_request_total{")
                    && line.contains(&format!("verb=\"{verb}\""))
                    && ["services", "endpointslices", "nodes", "servicecidrs"]
                        .iter()
                        .any(|resource| line.contains(&format!("resource=\"{resource}\"")))
            });
            ours.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
        };
        let (lists, watches) = (requests("LIST"), requests("WATCH"));
        let bytes = proc::sent(&format!("m{WAY}"));
        Self { cpu: proc::cpu(control.server_id().unwrap()), bytes, lists, watches }
    }

    /// Returns what was used and served since `before`, for each of the agents.
    fn since(&self, before: &Self, agents: u32, what: &str) -> Vec<Row> {
        let each = |sum: f64| sum / f64::from(agents);
        let row =
            |name: &str, value, unit| Row::new("API server", format!("{what}: {name}"), value, unit, None);
        let cpu = self.cpu.saturating_sub(before.cpu).as_secs_f64();
        vec![
            row("CPU for each agent", each(cpu) * 1e3, "ms"),
            row("sent to each agent", each((self.bytes - before.bytes) as f64) / 1e3, "kB"),
            row("list requests of each agent", each(self.lists - before.lists), ""),
            row("watch requests that ended, of each agent", each(self.watches - before.watches), ""),
        ]
    }
}

/// Measures the start of all agents, a restart of all at once, and churn.
pub fn measure(control: &ControlPlane, cluster: &Cluster, options: &Options) -> Vec<Row> {
    let space = Space::new("hollow").unwrap();
    space.ip(&kube::connect_namespace(WAY, &space.path()).unwrap()).unwrap();
    let (count, endpoints) = (options.agents, cluster.all_endpoints());
    let group = "Hollow agents";
    let mut rows = Vec::new();
    for what in ["start", "restart of all at once"] {
        let before = Served::now(control);
        let (agents, time) = Agents::start(&space, control, count, endpoints);
        let after = Served::now(control);
        let what = format!("{}, {count} agents, {what}", options.size());
        rows.push(Row::new(group, format!("{what}: until all have synced"), time.as_secs_f64(), "s", None));
        rows.extend(after.since(&before, count, &what));
        let each = proc::memory(agents.0.id(), "VmRSS") / f64::from(count);
        rows.push(Row::new(group, format!("{what}: memory of each, with its tables"), each, "MB", None));
        sleep(PAUSE);
        if rows.len() > 6 {
            let (before, begun) = (Served::now(control), proc::cpu(agents.0.id()));
            let changes = cluster.churn(control, options.churn);
            sleep(Duration::from_millis(500));
            let what = format!("{}, {changes} changes", options.size());
            rows.extend(Served::now(control).since(&before, count, &what));
            let cpu = proc::cpu(agents.0.id()).saturating_sub(begun).as_secs_f64();
            let each = cpu / f64::from(count) / f64::from(changes) * 1e6;
            rows.push(Row::new(group, "CPU of an agent for one change", each, "us", None));
        }
    }
    rows
}
