//! The small cluster: two nodes, their pods, and a machine whose sockets no hook sees.

use std::fs::{self, File};
use std::io::Write as _;
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::workdir::Workdir;
use crate::host::kill;
use crate::signal::wait_for;

/// Picture of the cluster.
pub(super) const PICTURE: &str = "
  vm 192.168.9.2            node1 172.30.0.1               node2 172.30.0.2
  (its sockets are   ----   ballast             --------   ballast
   seen by no hook)         |- app     10.1.0.9            |- redis-1 10.2.0.11
                            `- redis-0 10.1.0.10           `- redis-2 10.2.0.12
  each of them has an IPv6 address, too: fd09::2, fd01::9, fd01::10, fd02::11, fd02::12";

/// The redis pods.
pub(super) const PODS: [&str; 3] = ["redis-0", "redis-1", "redis-2"];
/// The nodes.
pub(super) const NODES: [&str; 2] = ["node1", "node2"];
/// Time limit for anything to come up.
const PATIENCE: Duration = Duration::from_secs(20);

/// A pod, or the machine beside the cluster: a netns behind a device of a node.
struct Guest {
    name: &'static str,
    node: &'static str,
    v4: &'static str,
    v6: &'static str,
    /// Whether its processes are in the node's cgroup.
    is_pod: bool,
}

const GUESTS: [Guest; 5] = [
    Guest { name: "vm", node: "node1", v4: "192.168.9.2", v6: "fd09::2", is_pod: false },
    Guest { name: "app", node: "node1", v4: "10.1.0.9", v6: "fd01::9", is_pod: true },
    Guest { name: "redis-0", node: "node1", v4: "10.1.0.10", v6: "fd01::10", is_pod: true },
    Guest { name: "redis-1", node: "node2", v4: "10.2.0.11", v6: "fd02::11", is_pod: true },
    Guest { name: "redis-2", node: "node2", v4: "10.2.0.12", v6: "fd02::12", is_pod: true },
];

/// Runs before any device is created: enables forwarding, and lets addresses be used at once.
const SYSCTLS: &str = "cd /proc/sys/net
echo 1 > ipv4/ip_forward
for family in ipv4 ipv6; do echo 1 > $family/conf/all/forwarding; done
for which in all default; do
  echo 0 > ipv4/conf/$which/rp_filter
  echo 0 > ipv6/conf/$which/disable_ipv6
  echo 0 > ipv6/conf/$which/accept_dad
done";

/// The cluster.
#[derive(Debug)]
pub(super) struct Topology {
    /// Place of the cluster on this machine.
    pub workdir: Workdir,
    ballast: PathBuf,
    agents: [Option<Child>; 2],
    pods: Vec<Child>,
}

impl Topology {
    /// Returns a cluster without machines; `ballast` is the file of the agent.
    pub(super) fn new(workdir: Workdir, ballast: PathBuf) -> Self {
        Self { workdir, ballast, agents: [None, None], pods: Vec::new() }
    }

    /// Creates namespaces, cgroups and mounts, and a script for each machine.
    pub(super) fn build(&self) -> Result<()> {
        fs::create_dir(self.manifests()).context("cannot make the folder of the manifests")?;
        // Use a copy: a build during the demo must not replace the program that created the maps.
        fs::create_dir(self.programs())
            .and_then(|()| fs::copy(&self.ballast, self.programs().join("ballast")))
            .with_context(|| format!("cannot copy {}", self.ballast.display()))?;
        for node in NODES {
            self.machine(node, Some(node))?;
            let bpffs = self.workdir.bpffs(node);
            fs::create_dir(&bpffs).context("cannot make a mount point")?;
            done(Command::new("mount").args(["-t", "bpf", "bpf"]).arg(bpffs))?;
        }
        for guest in &GUESTS {
            self.machine(guest.name, guest.is_pod.then_some(guest.node))?;
        }
        let between = self.workdir.namespace("node2");
        self.ip("node1", &format!("link add eth0 type veth peer name eth0 netns {between}\n"))?;
        for (node, own, own6, other, other6, there) in [
            ("node1", "172.30.0.1", "fd30::1", "172.30.0.2", "fd30::2", &["10.2.0.0/24", "fd02::/64"][..]),
            (
                "node2",
                "172.30.0.2",
                "fd30::2",
                "172.30.0.1",
                "fd30::1",
                &["10.1.0.0/24", "192.168.9.0/24", "fd01::/64", "fd09::/64"],
            ),
        ] {
            let routes = there.iter().map(|net| {
                let via = if net.contains(':') { other6 } else { other };
                format!("route add {net} via {via}\n")
            });
            let lines = format!(
                "link set eth0 up\naddress add {own}/24 dev eth0\naddress add {own6}/64 dev eth0 nodad\n{}",
                routes.collect::<String>()
            );
            self.ip(node, &lines)?;
        }
        GUESTS.iter().try_for_each(|guest| self.plug(guest))
    }

    /// Creates a netns, and the script that runs a command in it.
    fn machine(&self, name: &str, node: Option<&str>) -> Result<()> {
        let namespace = self.workdir.namespace(name);
        done(Command::new("ip").args(["netns", "add", &namespace]))?;
        let enter = node.map(|node| self.workdir.cgroup(node)).map_or_else(String::new, |cgroup| {
            format!("echo $$ > '{}/cgroup.procs' || exit\n", cgroup.display())
        });
        if node == Some(name) {
            fs::create_dir(self.workdir.cgroup(name)).context("cannot make a control group")?;
        }
        self.workdir.write(
            name,
            &format!(
                "#!/bin/sh\n# Runs a command as {name} would.\n{enter}PATH='{}':$PATH:/usr/sbin:/sbin\n\
                 BALLAST_BPFFS='{}'\nexport PATH BALLAST_BPFFS\nexec nsenter --net=/run/netns/{namespace} \"$@\"\n",
                self.programs().display(),
                self.workdir.bpffs(node.unwrap_or("node1")).display()
            ),
        )?;
        let script = self.script(name);
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755))
            .with_context(|| format!("cannot make {} executable", script.display()))?;
        done(&mut self.command(name, &["sh", "-ec", SYSCTLS]))?;
        self.ip(name, "link set lo up\n")
    }

    /// Connects a guest to its node with routes, as most CNI plugins do.
    fn plug(&self, guest: &Guest) -> Result<()> {
        let Guest { name, node, v4, v6, .. } = guest;
        let inside = self.workdir.namespace(name);
        self.ip(
            node,
            &format!(
                "link add {name} type veth peer name eth0 netns {inside}\nlink set {name} up\n\
                 address add 169.254.1.1/32 dev {name}\naddress add fe80::1/64 dev {name} nodad\n\
                 route add {v4}/32 dev {name}\nroute add {v6}/128 dev {name}\n"
            ),
        )?;
        self.ip(
            name,
            &format!(
                "link set eth0 up\naddress add {v4}/32 dev eth0\naddress add {v6}/128 dev eth0 nodad\n\
                 route add 169.254.1.1 dev eth0 scope link\nroute add default via 169.254.1.1 dev eth0\n\
                 route add default via fe80::1 dev eth0\n"
            ),
        )
    }

    /// Runs a batch of ip(8) commands in the netns of a machine.
    fn ip(&self, machine: &str, lines: &str) -> Result<()> {
        let mut child = Command::new("ip")
            .args(["-n", &self.workdir.namespace(machine), "-batch", "-"])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .context("cannot start ip")?;
        if let Some(mut input) = child.stdin.take() {
            input.write_all(lines.as_bytes()).context("ip does not listen")?;
        }
        let output = child.wait_with_output().context("cannot wait for ip")?;
        if !output.status.success() {
            bail!("ip, in {machine}: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(())
    }

    /// Starts the redis pods, and stores in each its own name.
    pub(super) fn start_pods(&mut self) -> Result<()> {
        for pod in PODS {
            let dir = self.workdir.dir().display().to_string();
            let args = ["redis-server", "--port", "6379", "--bind", "0.0.0.0", "::", "--dir", &dir];
            let quiet = ["--save", "", "--appendonly", "no", "--protected-mode", "no"];
            let mut server = self.command(pod, &args);
            server.args(quiet);
            self.pods.push(self.spawn(server, pod)?);
        }
        for guest in GUESTS.iter().filter(|guest| PODS.contains(&guest.name)) {
            wait_for(
                &format!("{} (its log: {})", guest.name, self.log(guest.name).display()),
                PATIENCE,
                || {
                    let set =
                        self.command("app", &["redis-cli", "-h", guest.v4, "SET", "whoami", guest.name]);
                    Ok(read(set).ok().filter(|answer| answer.trim() == "OK"))
                },
            )?;
        }
        Ok(())
    }

    /// Starts the agent of a node.
    pub(super) fn start_agent(&mut self, node: usize) -> Result<()> {
        let child = self.spawn(self.agent(node), &format!("agent-{}", NODES[node]))?;
        self.agents[node] = Some(child);
        Ok(())
    }

    fn agent(&self, node: usize) -> Command {
        let name = NODES[node];
        let (cgroup, manifests) = (self.workdir.cgroup(name), self.manifests());
        let mut agent = self.command(name, &["ballast", "run", "--hostname-override", name]);
        agent.arg("--manifests").arg(manifests).arg("--cgroup-root").arg(cgroup);
        agent.args(["--bind-address", ["172.30.0.1", "172.30.0.2"][node]]);
        // Without an API server, nothing else tells which addresses belong to Services.
        agent.args(["--service-cidrs", "10.96.0.0/16,fd96::/112"]);
        agent
    }

    /// Returns the command line of the agent, as a user would type it.
    pub(super) fn agent_line(&self, node: usize) -> String {
        line(&self.agent(node)).replace(" --", " \\\n         --")
    }

    /// Waits until the agent of a node is healthy. Returns an error at once if the agent has ended.
    pub(super) fn await_agent(&mut self, node: usize) -> Result<()> {
        let log = self.log(&format!("agent-{}", NODES[node]));
        let status = |topology: &Self| topology.command(NODES[node], &["ballast", "status"]);
        let up = wait_for("an agent to be well", PATIENCE, || {
            let ended = self.agents[node].as_mut().map(Child::try_wait).transpose();
            if let Some(Some(code)) = ended.context("cannot wait for an agent")? {
                bail!("the agent ended: {code}");
            }
            Ok(read(status(self)).ok())
        });
        up.map(|_| ()).with_context(|| format!("its log, {}:\n{}", log.display(), tail(&log)))
    }

    /// Returns the PID of a node's agent.
    pub(super) fn agent_pid(&self, node: usize) -> Option<u32> {
        self.agents[node].as_ref().map(Child::id)
    }

    /// Sends a signal to the agent of a node, and waits until the agent has ended.
    pub(super) fn end_agent(&mut self, node: usize, signal: libc::c_int) -> Result<()> {
        let Some(mut agent) = self.agents[node].take() else { return Ok(()) };
        kill(agent.id().cast_signed(), signal);
        agent.wait().context("cannot wait for an agent").map(|_| ())
    }

    /// Returns a command to run on a machine of the cluster.
    pub(super) fn command(&self, machine: &str, words: &[&str]) -> Command {
        let mut command = Command::new(self.script(machine));
        command.args(words).stdin(Stdio::null()).process_group(0);
        command
    }

    fn spawn(&self, mut command: Command, name: &str) -> Result<Child> {
        let file = self.log(name);
        let log = File::options().create(true).append(true).open(&file).context("cannot open a log")?;
        let both = log.try_clone().context("cannot open a log")?;
        command.stdout(log).stderr(both).spawn().with_context(|| format!("cannot start {}", line(&command)))
    }

    fn script(&self, machine: &str) -> PathBuf {
        self.workdir.dir().join(machine)
    }

    fn log(&self, name: &str) -> PathBuf {
        self.workdir.dir().join(format!("{name}.log"))
    }

    /// Directory of the program `ballast`.
    fn programs(&self) -> PathBuf {
        self.workdir.dir().join("bin")
    }

    /// Directory that the agents watch.
    pub(super) fn manifests(&self) -> PathBuf {
        self.workdir.dir().join("manifests")
    }

    /// Removes the cluster, and reaps the processes that this program started.
    pub(super) fn take_down(&mut self) -> Result<()> {
        let down = self.workdir.take_down();
        for child in self.agents.iter_mut().flatten().chain(&mut self.pods) {
            // The process has ended, or `Workdir::take_down` has returned the reason why not.
            let _ = child.try_wait();
        }
        down
    }
}

/// Returns the socket address of redis at the address of a Service or pod.
pub(super) fn redis(address: &str) -> Result<std::net::SocketAddr> {
    let ip: IpAddr = address.parse().with_context(|| format!("{address} is no address"))?;
    Ok((ip, 6379).into())
}

/// Runs a command to its end and returns its standard output. An error contains all of its output.
pub(super) fn read(mut command: Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot start {}", line(&command)))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("`{}`: {}\n{text}{}", line(&command), output.status, said.trim());
    }
    Ok(text)
}

/// Runs a command whose output is not needed.
fn done(command: &mut Command) -> Result<()> {
    let output =
        command.stdin(Stdio::null()).output().with_context(|| format!("cannot start {}", line(command)))?;
    if !output.status.success() {
        bail!("`{}`: {}", line(command), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

/// Returns a command line as a user would type it.
pub(super) fn line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(std::ffi::OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}

fn tail(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<_> = text.lines().collect();
    lines.get(lines.len().saturating_sub(10)..).unwrap_or_default().join("\n")
}
