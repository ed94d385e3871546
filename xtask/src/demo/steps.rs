//! The steps of the demo. Each prints what it shows, shows it, and fails if the result is not as printed.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::manifest::Manifest;
use super::screen::Screen;
use super::topology::{self, NODES, PICTURE, PODS, Topology};
use super::traffic::{Tally, Traffic, stop, sum};
use crate::signal::{check, pause, wait_for};

const SERVICE: &str = "10.96.0.10";
const SERVICE6: &str = "fd96::10";
/// Addresses of the endpoint that is removed and added again; the next constant is its pod.
const GOING: [&str; 2] = ["10.2.0.12", "fd02::12"];
const GOING_POD: &str = "redis-2";
/// Port of the Service, as bpftool prints it.
const PORT: &str = "\"port\": 6379";
/// Number of new connections in the step that shows the spread.
const CONNECTIONS: u32 = 300;
/// A pod must get at least 1/5 of the connections: its fair share is a third, and a fifth is almost five standard deviations below.
const MIN_SHARE_INVERSE: u64 = 5;
/// Time limit of anything that the agent does.
const PATIENCE: Duration = Duration::from_secs(15);
/// How long traffic is measured in each state.
const WHILE: Duration = Duration::from_millis(1500);

/// The state that the steps share.
pub(super) struct Demo<'a> {
    /// Where the steps print.
    pub screen: Screen,
    /// The cluster.
    pub topology: &'a mut Topology,
    /// The manifest that the agents read.
    pub manifest: Manifest,
}

/// A step of the demo.
type Step<'a> = fn(&mut Demo<'a>) -> Result<()>;

impl<'a> Demo<'a> {
    /// Runs all steps but the last.
    pub(super) fn show(&mut self) -> Result<()> {
        let steps: [(&str, Step<'a>); 7] = [
            ("1, the cluster", Self::cluster),
            ("2, two paths", Self::two_paths),
            ("3, spread", Self::spread),
            ("4, an endpoint is removed and added", Self::endpoint_goes_and_comes),
            ("5, maps", Self::maps),
            ("6, the agent killed", Self::agent_killed),
            ("7, counters", Self::counters),
        ];
        for (name, step) in steps {
            check()?;
            step(self).with_context(|| format!("step {name}"))?;
        }
        Ok(())
    }

    fn cluster(&mut self) -> Result<()> {
        self.screen.step(1, "The cluster", "Two nodes with one agent each, a redis Service with three pods.");
        self.screen.text(PICTURE);
        let list = self.run("node1", &["ballast", "service", "list"])?;
        for part in [SERVICE, SERVICE6, "10.1.0.10:6379", "10.2.0.11:6379", "10.2.0.12:6379"] {
            ensure!(list.contains(part), "the list has no {part}");
        }
        self.screen.seen("both addresses of the Service have all three pods as endpoints");
        Ok(())
    }

    fn two_paths(&mut self) -> Result<()> {
        self.screen.step(
            2,
            "Two data paths",
            "The socket of a pod is translated at connect(); for a machine without Ballast's hooks, each packet is translated.",
        );
        for machine in ["app", "vm"] {
            for address in [SERVICE, SERVICE6] {
                let name = self.run(machine, &["redis-cli", "-h", address, "GET", "whoami"])?;
                ensure!(PODS.contains(&name.trim()), "{name:?} is not a pod of the Service");
            }
        }
        let flows = self.run("node1", &["ballast", "flow", "list"])?;
        ensure!(flows.contains("192.168.9.2") && flows.contains("fd09::2"), "no flow of the machine vm");
        ensure!(!flows.contains("10.1.0.9"), "a flow of the pod app, whose sockets need none");
        self.screen.seen("four answers; only the connections of vm are tracked");
        Ok(())
    }

    fn spread(&mut self) -> Result<()> {
        self.screen.step(3, "Spread", "On both paths, each new connection selects a random pod.");
        for machine in ["app", "vm"] {
            let shown = self.topology.command(machine, &["redis-cli", "-h", SERVICE, "GET", "whoami"]);
            self.screen.command(&format!("{}   # {CONNECTIONS} times", topology::line(&shown)));
            let tally = Traffic::start(self.client(machine, CONNECTIONS)?)?.finish()?;
            self.screen.bars(&tally, &PODS);
            tally.check_none_failed()?;
            ensure!(tally.connections() == u64::from(CONNECTIONS), "only {} answers", tally.connections());
            even(&tally)?;
        }
        self.screen.seen(&format!("{} connections, spread over all pods, 0 failed", 2 * CONNECTIONS));
        Ok(())
    }

    fn endpoint_goes_and_comes(&mut self) -> Result<()> {
        self.screen.step(
            4,
            "An endpoint is removed and added again",
            "Both clients connect all the time, while redis-2 is removed from the manifest and added again.",
        );
        let traffic = [self.endless("app")?, self.endless("vm")?];
        let tally = || sum(&traffic);
        let before = self.watch("before", tally)?;
        even(&before)?;

        self.screen.command(&format!("vi {}   # without {GOING_POD}", self.manifest.file().display()));
        self.manifest.take_out(&GOING)?;
        let took = self.await_endpoints(false)?;
        let without = self.watch(&format!("without {GOING_POD}, {} ms later", took.as_millis()), tally)?;
        ensure!(without.of(GOING_POD) == 0, "{GOING_POD} got {} connections", without.of(GOING_POD));
        ensure!(without.connections() > 0, "no connections at all");

        self.screen.command(&format!("vi {}   # as it was", self.manifest.file().display()));
        self.manifest.restore()?;
        let took = self.await_endpoints(true)?;
        let after = self.watch(&format!("with it, {} ms later", took.as_millis()), tally)?;
        even(&after)?;

        let all = stop(traffic);
        all.check_none_failed()?;
        self.screen.seen(&format!(
            "{} new connections and {} requests on open connections, 0 failed",
            all.connections(),
            all.held
        ));
        Ok(())
    }

    fn maps(&mut self) -> Result<()> {
        self.screen.step(
            5,
            "The maps in the kernel",
            "The maps have BTF types, so bpftool prints them with field names (addresses as bytes).",
        );
        for map in ["services", "backends"] {
            let path = format!("{}/ballast/{map}", self.topology.workdir.bpffs("node1").display());
            let words = ["bpftool", "map", "dump", "pinned", &path];
            let command = self.topology.command("node1", &words);
            self.screen.command(&words.join(" "));
            let dump = topology::read(command)?;
            // bpftool also prints the empty elements of an array.
            let elements: Vec<_> =
                dump.split_inclusive("\n    },").filter(|text| text.contains(PORT)).collect();
            let first = elements.first().with_context(|| format!("no element of `{map}` has {PORT}"))?;
            self.screen.head(first.trim_start_matches(['[', '\n', ',']), 24);
            if elements.len() > 1 {
                self.screen.text(&format!("... and {} more like it", elements.len() - 1));
            }
        }
        self.screen.seen("the port of the Service is in the entries of `services` and `backends`");
        Ok(())
    }

    fn agent_killed(&mut self) -> Result<()> {
        self.screen.step(
            6,
            "The agent is killed under traffic",
            "Programs and maps stay in the kernel; traffic continues without the agent.",
        );
        let traffic = [self.endless("app")?, self.endless("vm")?];
        let tally = || sum(&traffic);
        self.watch("before", tally)?;

        let pid = self.topology.agent_pid(0).context("node1 has no agent")?;
        self.screen.command(&format!("kill -9 {pid}"));
        self.topology.end_agent(0, libc::SIGKILL)?;
        let dead = self.watch("without an agent", tally)?;
        even(&dead)?;
        self.run("node1", &["ballast", "service", "list"])?;

        self.screen.command(&self.topology.agent_line(0));
        let start = Instant::now();
        self.topology.start_agent(0)?;
        self.topology.await_agent(0)?;
        let took = start.elapsed().as_millis();
        let anew = self.watch(&format!("with the new agent, ready after {took} ms"), tally)?;
        even(&anew)?;

        let all = stop(traffic);
        all.check_none_failed()?;
        ensure!(all.held > 0, "no request was sent on the open connections");
        self.screen.seen(&format!(
            "{} new connections and {} requests on open connections, 0 failed",
            all.connections(),
            all.held
        ));
        Ok(())
    }

    fn counters(&mut self) -> Result<()> {
        self.screen.step(7, "Counters", "Statistics as text, for scripts (-o json), and for Prometheus.");
        let shown = self.run("node1", &["ballast", "service", "show", "redis"])?;
        let connections = shown.lines().find_map(|line| line.strip_prefix("Connections:"));
        let connections: u64 =
            connections.and_then(|n| n.trim().parse().ok()).context("no count of connections")?;
        ensure!(connections > u64::from(2 * CONNECTIONS), "only {connections} connections were counted");
        self.run("node1", &["ballast", "status"])?;
        let metrics = self.fetch("metrics", "grep ^ballast_service")?;
        let ours: Vec<_> = metrics.lines().filter(|line| line.starts_with("ballast_service")).collect();
        self.screen.head(&ours.join("\n"), 6);
        ensure!(!ours.is_empty(), "no metric starts with ballast_service");
        let mode = self.fetch("proxyMode", "")?;
        self.screen.text(&mode);
        ensure!(mode.trim() == "ebpf", "/proxyMode is {mode:?}");
        self.screen.seen(&format!("{connections} connections counted; /proxyMode returns ebpf"));
        Ok(())
    }

    /// The last step: ends the agents, then removes everything that they put into the kernel, and the cluster.
    pub(super) fn clean(&mut self) -> Result<()> {
        self.screen.step(
            8,
            "Cleanup",
            "`ballast cleanup` removes everything that the agents put into the kernel; then the cluster is removed.",
        );
        for (number, node) in NODES.into_iter().enumerate() {
            self.topology.end_agent(number, libc::SIGTERM)?;
            let words = ["ballast", "cleanup", "--yes"];
            let command = self.topology.command(node, &words);
            self.screen.command(&topology::line(&command));
            let text = topology::read(command)?;
            self.screen.head(&text, 4);
            ensure!(text.contains("removed"), "nothing was removed on {node}");
            let pins = self.topology.workdir.bpffs(node).join("ballast");
            ensure!(!pins.exists(), "{} is still there", pins.display());
            let again = topology::read(self.topology.command(node, &words))?;
            ensure!(!again.contains("removed"), "a second cleanup still removed something:\n{again}");
            let cgroup = self.topology.workdir.cgroup(node).display().to_string();
            let attached =
                topology::read(self.topology.command(node, &["bpftool", "cgroup", "show", &cgroup]))?;
            ensure!(attached.trim().is_empty(), "programs are still attached to {cgroup}:\n{attached}");
        }
        self.topology.take_down()?;
        let remains = self.topology.workdir.remains();
        ensure!(remains.is_empty(), "still there: {}", remains.join(", "));
        self.screen.seen("no pins, programs, namespaces, cgroups or files of the demo are left");
        Ok(())
    }

    /// Replaces the last step: keeps the cluster, and prints how to use it.
    pub(super) fn keep(&self) -> Result<()> {
        self.topology.workdir.keep()?;
        let dir = self.topology.workdir.dir().display();
        self.screen.title("The cluster keeps running. Each machine has a script that runs a command on it:");
        for line in [
            format!("{dir}/app redis-cli -h {SERVICE} GET whoami"),
            format!("{dir}/vm redis-cli -h {SERVICE6} GET whoami"),
            format!("{dir}/node1 ballast service list -o wide"),
            format!("{dir}/node1 ballast flow list"),
            format!("{dir}/node1 ballast status"),
            format!("vi {}", self.manifest.file().display()),
            format!("tail -f {dir}/agent-node1.log"),
            format!("nsenter --net=/run/netns/{} ip route", self.topology.workdir.namespace("node1")),
            "cargo xtask demo --down   # removes the cluster".to_owned(),
        ] {
            self.screen.command(&line);
        }
        Ok(())
    }

    /// Prints a command, runs it, and prints and returns its output.
    fn run(&self, machine: &str, words: &[&str]) -> Result<String> {
        check()?;
        let command = self.topology.command(machine, words);
        self.screen.command(&topology::line(&command));
        let text = topology::read(command)?;
        self.screen.head(&text, 24);
        Ok(text)
    }

    /// Sends an HTTP request to the agent of the first node, and prints the equivalent curl command.
    fn fetch(&self, path: &str, filter: &str) -> Result<String> {
        let url = format!("http://127.0.0.1:10249/{path}");
        let shown = topology::line(&self.topology.command("node1", &["curl", "-s", &url]));
        self.screen.command(&if filter.is_empty() { shown } else { format!("{shown} | {filter}") });
        let mut command = self.topology.command("node1", &[&this_program(), "demo", "--fetch", &url]);
        command.env_remove("BALLAST_BPFFS");
        topology::read(command)
    }

    fn client(&self, machine: &str, count: u32) -> Result<Command> {
        let address = topology::redis(SERVICE)?.to_string();
        let count = count.to_string();
        let words = [&this_program(), "demo", "--ask", &address, "--count", &count];
        Ok(self.topology.command(machine, &words))
    }

    fn endless(&self, machine: &str) -> Result<Traffic> {
        Traffic::start(self.client(machine, 0)?)
    }

    /// Measures the connections of the next [`WHILE`], and prints their spread.
    fn watch(&self, title: &str, tally: impl Fn() -> Tally) -> Result<Tally> {
        let start = tally();
        pause(WHILE)?;
        let seen = tally().since(&start);
        self.screen.text(&format!("{title}:"));
        self.screen.bars(&seen, &PODS);
        seen.check_none_failed()?;
        Ok(seen)
    }

    /// Waits until both nodes list the endpoint of [`GOING`], or with `there` false do not list it. Returns how long this took.
    fn await_endpoints(&self, there: bool) -> Result<Duration> {
        let start = Instant::now();
        wait_for("the agents to follow the manifest", PATIENCE, || {
            for node in NODES {
                let list = topology::read(self.topology.command(node, &["ballast", "service", "list"]))?;
                if GOING.iter().any(|address| list.contains(address) != there) {
                    return Ok(None);
                }
            }
            Ok(Some(start.elapsed()))
        })
    }

    /// Waits until the Service answers on both data paths, on nodes that have just been started.
    pub(super) fn await_service(&self) -> Result<()> {
        for machine in ["app", "vm"] {
            for address in [SERVICE, SERVICE6] {
                wait_for(&format!("an answer to {machine} from {address}"), PATIENCE, || {
                    let ask = ["timeout", "1", "redis-cli", "-h", address, "GET", "whoami"];
                    let answer = topology::read(self.topology.command(machine, &ask)).unwrap_or_default();
                    Ok(PODS.contains(&answer.trim()).then_some(()))
                })?;
            }
        }
        Ok(())
    }
}

/// Path of this task runner that a child process can use, even after a build has replaced the file.
fn this_program() -> String {
    format!("/proc/{}/exe", std::process::id())
}

fn even(tally: &Tally) -> Result<()> {
    let all = tally.connections();
    for pod in PODS {
        let share = tally.of(pod);
        ensure!(share * MIN_SHARE_INVERSE >= all && share > 0, "{pod} got only {share} of {all} connections");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(counts: [u64; 3]) -> Tally {
        Tally { pods: PODS.map(str::to_owned).into_iter().zip(counts).collect(), ..Tally::default() }
    }

    #[test]
    fn a_pod_without_a_fair_share_is_noticed() {
        assert!(even(&tally([100, 90, 110])).is_ok());
        assert!(even(&tally([100, 20, 180])).is_err());
        assert!(even(&tally([0, 0, 0])).is_err());
    }
}
