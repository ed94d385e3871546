//! The real agent: time to its first sync, memory, CPU.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::mount::{UnmountFlags, unmount};
use tempfile::TempDir;

use crate::Options;
use crate::cluster::Cluster;
use crate::proc;
use crate::slope;
use proxy_testbed::kube::control::ControlPlane;
use proxy_testbed::kube::process::Process;
use proxy_testbed::kube::{PATIENCE, eventually, tail};
use proxy_testbed::report::Row;

/// Pause between the first sync and the measurement of memory: by then, the agent has returned free memory to the kernel.
const PAUSE: Duration = Duration::from_secs(8);
/// How long an idle agent is observed.
const IDLE: Duration = Duration::from_secs(10);

/// The name of the agent's node.
pub const NODE: &str = "node";

/// Directory and cgroup of the agents.
struct Node {
    folder: TempDir,
    cgroup: PathBuf,
    number: u32,
}

impl Node {
    fn new() -> Self {
        let root = proxy_user::host::cgroup::find(None).unwrap().path;
        let cgroup = root.join(format!("ballast-scale-{}", std::process::id()));
        fs::create_dir(&cgroup).unwrap();
        let folder = tempfile::Builder::new().prefix("ballast-scale-").tempdir().unwrap();
        fs::create_dir(folder.path().join("bpf")).unwrap();
        Self { folder, cgroup, number: 0 }
    }

    /// Starts an agent, and waits until it has synced; returns how long this took.
    fn start(&mut self, control: &ControlPlane) -> (Process, Duration) {
        self.number += 1;
        let binary = std::env::var_os("BALLAST_BIN").unwrap_or_else(|| env!("CARGO_BIN_EXE_ballast").into());
        let log = self.folder.path().join(format!("log-{}", self.number));
        let mut command = Command::new(binary);
        command.arg("run").arg("--kubeconfig").arg(control.agent_kubeconfig());
        command.arg("--bpffs").arg(self.folder.path().join("bpf")).arg("--cgroup-root").arg(&self.cgroup);
        command.args(["--hostname-override", NODE, "--max-services", "131072", "--max-frontends", "131072"]);
        command.args(["--max-backends", "524288", "--max-slots", "1048576"]);
        let begun = Instant::now();
        let mut agent = Process::start(&mut command, &log).unwrap();
        loop {
            agent.is_alive().unwrap_or_else(|error| panic!("{error}\n{}", tail(&log)));
            if fs::read_to_string(&log).unwrap().contains("first sync done") {
                return (agent, begun.elapsed());
            }
            assert!(begun.elapsed() < PATIENCE, "no sync\n{}", tail(&log));
            sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        while unmount(self.folder.path().join("bpf"), UnmountFlags::DETACH).is_ok() {}
        let _ = fs::remove_dir(&self.cgroup);
    }
}

/// Measures an agent in a cluster whose only Service is the API server's own.
pub fn empty(control: &ControlPlane) -> Vec<Row> {
    let mut node = Node::new();
    let (agent, started) = node.start(control);
    sleep(PAUSE);
    let row = |what: &str, value, unit, target| Row::new("Agent, no Services", what, value, unit, target);
    let mut rows = vec![row("start to first sync", started.as_secs_f64(), "s", None)];
    rows.extend(memory(&agent, "Agent, no Services", Some(30.0)));
    agent.kill().unwrap();
    rows
}

fn memory(agent: &Process, group: &'static str, target: Option<f64>) -> Vec<Row> {
    let row = |what: &str, name, target| Row::new(group, what, proc::memory(agent.id(), name), "MB", target);
    vec![
        row("resident memory", "VmRSS", target),
        row("of it, its own (not file pages)", "RssAnon", None),
        row("resident memory, at most", "VmHWM", None),
    ]
}

/// Measures an agent in a full cluster.
pub fn full(control: &ControlPlane, cluster: &Cluster, options: &Options) -> Vec<Row> {
    let group = "Agent";
    let size = options.size();
    let mut node = Node::new();
    let (agent, cold) = node.start(control);
    sleep(PAUSE);
    let (time, resident) = targets(cluster, options);
    let mut rows =
        vec![Row::new(group, format!("{size}: start to first sync"), cold.as_secs_f64(), "s", time)];
    rows.extend(memory(&agent, group, resident));
    let share = |begun: Duration, time: Duration| {
        100.0 * (proc::cpu(agent.id()).saturating_sub(begun)).as_secs_f64() / time.as_secs_f64()
    };
    let begun = proc::cpu(agent.id());
    sleep(IDLE);
    rows.push(Row::new(group, "idle, of a core", share(begun, IDLE), "%", None));
    let (before, begun, from) = (changes(), proc::cpu(agent.id()), Instant::now());
    let work = || cluster.churn(control, options.churn);
    let (made, grown) = slope::during(agent.id(), "Agent, churn", work);
    sleep(Duration::from_millis(200));
    let used = share(begun, from.elapsed());
    rows.push(Row::new(group, "20 changes a second, of a core", used, "%", Some(1.0)));
    let after = changes();
    let counted = after.last().map_or(0, |last| last.1) - before.last().map_or(0, |last| last.1);
    // Changes that arrive while the agent writes one to the maps are written together.
    assert!(counted * 2 >= u64::from(made), "{made} changes made, {counted} seen");
    for (percent, target) in [(50, 3.0), (99, 20.0)] {
        let wanted = (counted * percent).div_ceil(100);
        let bound = after.iter().zip(&before).find(|(after, before)| after.1 - before.1 >= wanted);
        let milliseconds = bound.map_or(f64::INFINITY, |(after, _)| after.0 * 1e3);
        let what = format!("event to the map, p{percent}, at most");
        rows.push(Row::new(group, what, milliseconds, "ms", Some(target)));
    }
    rows.extend(grown);
    rows.extend(memory(&agent, "Agent, after churn", None));
    agent.kill().unwrap();
    let (agent, again) = node.start(control);
    rows.push(Row::new(group, "restart to first sync, maps in place", again.as_secs_f64(), "s", None));
    sleep(PAUSE);
    rows.extend(memory(&agent, "Agent, restarted", resident));
    agent.kill().unwrap();
    rows
}

/// Returns the targets at some sizes: seconds to the first sync, and MB of memory.
fn targets(cluster: &Cluster, options: &Options) -> (Option<f64>, Option<f64>) {
    match (options.services, options.endpoints) {
        (2000, 10) => (None, Some(45.0)),
        (10_000, 10) => (Some(1.0), Some(80.0)),
        (5000, 50) => (Some(2.0), Some(180.0)),
        (50_000, 5) => (Some(3.0), Some(180.0)),
        _ if cluster.all_endpoints() == 250_000 => (None, Some(180.0)),
        _ => (None, None),
    }
}

/// Returns the agent's own histogram: upper bounds in seconds, and the number of changes that took at most so long.
fn changes() -> Vec<(f64, u64)> {
    let text = eventually(PATIENCE, || {
        let mut stream = TcpStream::connect("127.0.0.1:10249")?;
        write!(stream, "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    })
    .unwrap();
    let buckets = text
        .lines()
        .filter_map(|line| line.strip_prefix("ballast_event_to_map_duration_seconds_bucket{le=\""));
    buckets
        .filter_map(|line| line.split_once("\"} "))
        .map(|(bound, count)| (bound.parse().unwrap_or(f64::INFINITY), count.trim().parse().unwrap()))
        .collect()
}
