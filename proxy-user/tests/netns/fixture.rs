//! A node, a client and pods, in namespaces of their own, and the agent on the node.
//!
//! ```text
//! client eth0 10.98.0.2 --- c0 10.98.0.1  node  p0 10.99.0.1 --- eth0 10.99.0.2 pod 0
//!                                               p1 10.99.1.1 --- eth0 10.99.1.2 pod 1
//! ```
//!
//! The same with fd98: and fd99:. The node has no route to any ClusterIP: who reaches one was translated.

use std::cell::{Ref, RefCell, RefMut};
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use proxy_user::host::cgroup;
use proxy_user::maps::view::View;
use rustix::mount::{UnmountFlags, unmount};

use crate::agent::{self, Agent, Setup};
use crate::manifest::{Family, Folder, Service, pod_ip};
use crate::peer::{Attempt, Kind, Peer};
use crate::space::Space;

/// Names of all that outlives a process; the process's number follows.
const PREFIX: &str = "ballast-netns-";
/// Ports that every pod answers on; its servers are called `POD/PORT`.
const TCP_PORTS: [u16; 2] = [8080, 9090];
const UDP_PORTS: [u16; 2] = [5353, 9090];
/// Maps for a few Services: memory for a whole cluster takes the kernel longer than the rest of a case.
#[rustfmt::skip]
pub const SMALL: &[&str] = &[
    "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "16384", "--max-sockets", "4096",
];
/// [`SMALL`], and a call that may have no answer fails at once, instead of after its timeout.
#[rustfmt::skip]
pub const FAILS: &[&str] = &[
    "--socket-drop", "fail",
    "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "16384", "--max-sockets", "4096",
];
/// Until a change of the manifests is programmed; it takes some 20 ms on an idle machine, and much longer where a CPU
/// has a dozen other things to do.
pub const SOON: Duration = Duration::from_mins(1);

static NUMBER: AtomicU32 = AtomicU32::new(0);

/// Tries again until it works or time is up.
pub fn eventually<T>(limit: Duration, mut action: impl FnMut() -> Result<T>) -> Result<T> {
    let end = Instant::now() + limit;
    loop {
        match action() {
            Err(_) if Instant::now() < end => std::thread::sleep(Duration::from_millis(5)),
            result => return result.with_context(|| format!("still so after {limit:?}")),
        }
    }
}

/// Runs a tool in a namespace, and feeds it.
pub fn feed(space: &Space, tool: &[&str], text: &str) -> Result<()> {
    let (program, arguments) = tool.split_first().context("no tool")?;
    let mut child = space.command(program).args(arguments).stdin(Stdio::piped()).spawn()?;
    child.stdin.take().context("no input")?.write_all(text.as_bytes())?;
    let status = child.wait()?;
    ensure!(status.success(), "{tool:?}: {status}\n{text}");
    Ok(())
}

/// Puts rules into a namespace's netfilter.
pub fn nft(space: &Space, rules: &str) -> Result<()> {
    feed(space, &["nft", "-f", "-"], rules)
}

/// What a case wants.
#[derive(Clone, Copy, Debug)]
pub struct Wish {
    pub pods: u8,
    pub services: &'static [Service],
    /// Flags for the agent: [`SMALL`], or more.
    pub flags: &'static [&'static str],
}

/// All of it. The order of the fields is the order in which it goes.
pub struct Fixture {
    agent: RefCell<Option<Agent>>,
    setup: RefCell<Setup>,
    /// A process on the node, served by the socket programs.
    pub local: Peer,
    /// A process on the node outside the cgroup.
    pub outside: Peer,
    /// A client that is served packet by packet: it is in a namespace, and not in the cgroup.
    pub client: Peer,
    pods: RefCell<Vec<(Space, Peer)>>,
    pub folder: Folder,
    _dir: Dir,
    cgroup: Cgroup,
    pub node: Space,
    pub client_space: Space,
    devices: RefCell<Vec<String>>,
}

/// A folder that goes with its mount.
pub struct Dir(pub PathBuf);
/// A cgroup that goes with its last process.
pub struct Cgroup(pub PathBuf);

/// Makes both, under a unique name.
pub fn places() -> Result<(Dir, Cgroup)> {
    let name = format!("{PREFIX}{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
    let dir = Dir(std::env::temp_dir().join(&name));
    fs::create_dir(&dir.0).with_context(|| format!("cannot make {}", dir.0.display()))?;
    let cgroup = Cgroup(cgroup::find(None)?.path.join(&name));
    fs::create_dir(&cgroup.0).with_context(|| format!("cannot make {}", cgroup.0.display()))?;
    Ok((dir, cgroup))
}

impl Fixture {
    /// Builds all but the agent.
    pub fn new(wish: Wish) -> Result<Self> {
        let (dir, cgroup) = places()?;
        let bpffs = dir.0.join("bpf");
        fs::create_dir(&bpffs)?;
        let folder = Folder::new(dir.0.join("manifests"))?;
        wish.services.iter().try_for_each(|service| folder.put(*service))?;
        let setup = Setup {
            binary: agent::binary(),
            bpffs,
            cgroup: cgroup.0.clone(),
            name: "node".to_owned(),
            manifests: Some(folder.dir().to_owned()),
            log: dir.0.join("log"),
            flags: wish.flags.iter().map(|&flag| flag.to_owned()).collect(),
            capabilities: None,
            seccomp: None,
        };
        let (node, client_space) = (Space::new("node")?, Space::new("client")?);
        node.join(&client_space, "c0", "10.98.0", "fd98:")?;
        let fixture = Self {
            agent: RefCell::default(),
            setup: RefCell::new(setup),
            local: Peer::start(&node, Some(&cgroup.0))?,
            outside: Peer::start(&node, None)?,
            client: Peer::start(&client_space, None)?,
            pods: RefCell::default(),
            folder,
            _dir: dir,
            cgroup,
            node,
            client_space,
            devices: RefCell::new(vec!["c0".to_owned()]),
        };
        (0..wish.pods).try_for_each(|_| fixture.add_pod().map(drop))?;
        Ok(fixture)
    }

    /// One more pod, with its servers; returns its number.
    pub fn add_pod(&self) -> Result<u8> {
        let pod = self.pods.borrow().len() as u8;
        let space = Space::new("pod")?;
        self.node.join(&space, &format!("p{pod}"), &format!("10.99.{pod}"), &format!("fd99:{pod}:"))?;
        // As on a real node, the pod's sockets are served too.
        let peer = Peer::start(&space, Some(&self.cgroup.0))?;
        for family in Family::BOTH {
            let ports =
                TCP_PORTS.map(|port| (true, port)).into_iter().chain(UDP_PORTS.map(|port| (false, port)));
            for (is_tcp, port) in ports {
                peer.serve(is_tcp, (pod_ip(family, pod), port).into(), &format!("{pod}/{port}"))?;
            }
        }
        self.pods.borrow_mut().push((space, peer));
        self.devices.borrow_mut().push(format!("p{pod}"));
        Ok(pod)
    }

    /// Another namespace behind the node, as a client of the packet path; the agent has never seen its device.
    pub fn add_client(&self) -> Result<(Space, Peer)> {
        let space = Space::new("late")?;
        self.node.join(&space, "c1", "10.97.0", "fd97:")?;
        let peer = Peer::start(&space, None)?;
        Ok((space, peer))
    }

    /// A process in a pod, served by the socket programs.
    pub fn pod(&self, number: u8) -> Result<Ref<'_, Peer>> {
        let pods = self.pods.borrow();
        Ref::filter_map(pods, |pods| pods.get(usize::from(number)).map(|(_, peer)| peer))
            .map_err(|_| anyhow!("no pod {number}"))
    }

    /// Does something on a thread in a pod's namespace.
    pub fn in_pod<T: Send>(&self, number: u8, action: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let pods = self.pods.borrow();
        pods.get(usize::from(number)).with_context(|| format!("no pod {number}"))?.0.inside(action)
    }

    /// Does something with a pod's namespace.
    pub fn in_pod_space<T>(&self, number: u8, action: impl FnOnce(&Space) -> Result<T>) -> Result<T> {
        let pods = self.pods.borrow();
        action(&pods.get(usize::from(number)).with_context(|| format!("no pod {number}"))?.0)
    }

    /// Both ways to a Service: by sockets and by packets.
    pub fn clients(&self) -> [(&'static str, &Peer); 2] {
        [("socket", &self.local), ("packet", &self.client)]
    }

    pub fn bpffs(&self) -> PathBuf {
        self.setup.borrow().bpffs.clone()
    }

    pub fn cgroup(&self) -> &Path {
        &self.cgroup.0
    }

    /// Names of the node's devices.
    pub fn devices(&self) -> Ref<'_, Vec<String>> {
        self.devices.borrow()
    }

    /// How the next agent will be started.
    pub fn setup(&self) -> RefMut<'_, Setup> {
        self.setup.borrow_mut()
    }

    /// The agent.
    pub fn agent_mut(&self) -> Result<RefMut<'_, Agent>> {
        RefMut::filter_map(self.agent.borrow_mut(), Option::as_mut).map_err(|_| anyhow!("no agent runs"))
    }

    /// Starts an agent, and waits until it is ready.
    pub fn begin(&self) -> Result<()> {
        self.start()?;
        self.agent_mut()?.is_ready(&self.devices.borrow())
    }

    /// Starts an agent.
    pub fn start(&self) -> Result<()> {
        let agent = Agent::start(&self.node, &self.setup.borrow())?;
        *self.agent.borrow_mut() = Some(agent);
        Ok(())
    }

    /// The agent, for a case that sees it end.
    pub fn take_agent(&self) -> Result<Agent> {
        self.agent.borrow_mut().take().context("no agent runs")
    }

    /// Kills the agent.
    pub fn kill(&self) -> Result<()> {
        self.agent.borrow_mut().take().context("no agent runs")?.kill()
    }

    /// Kills the agent, starts another, waits until that is ready.
    pub fn restart(&self) -> Result<()> {
        self.kill()?;
        self.begin()
    }

    /// Replaces a Service, and waits until both clients reach exactly `servers` by its first port.
    pub fn change(&self, service: Service, servers: &[&str]) -> Result<()> {
        self.folder.put(service)?;
        self.reaches(service, servers)
    }

    /// Waits until both clients reach exactly `servers` by the first port of a Service. Several connections of each show that: one
    /// may reach the right server by chance.
    pub fn reaches(&self, service: Service, servers: &[&str]) -> Result<()> {
        let first = service.ports.first().context("a Service without ports")?;
        let kind = if first.is_tcp { Kind::Tcp } else { Kind::Datagram };
        for family in Family::BOTH {
            let to = (crate::manifest::cluster_ip(family, service.number), first.number).into();
            for (path, client) in self.clients() {
                eventually(SOON, || {
                    let seen = crate::cases::spread(client, Attempt::new(kind, to), servers.len() * 12)?;
                    let expected = servers.iter().map(|&name| name.to_owned()).collect();
                    ensure!(seen == expected, "{path}: {to} leads to {seen:?}, not to {servers:?}");
                    Ok(())
                })?;
            }
        }
        Ok(())
    }

    /// What the packet programs refused or passed by so far, and why.
    pub fn reasons(&self) -> String {
        let met = View::open(&self.bpffs()).and_then(|view| view.overview());
        match met {
            Ok(overview) => format!("{:?}", overview.reasons),
            Err(error) => error.to_string(),
        }
    }

    /// Whether the agent runs, and what it does.
    pub fn state(&self) -> String {
        self.agent_mut().map_or_else(|error| error.to_string(), |mut agent| agent.state())
    }

    /// All that the agents have logged.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.setup.borrow().log).unwrap_or_default()
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        // What cannot be removed now, the next run removes.
        while unmount(self.0.join("bpf"), UnmountFlags::DETACH).is_ok() {}
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A process that has just ended may still count.
        let _ = eventually(Duration::from_secs(1), || Ok(fs::remove_dir(&self.0)?));
    }
}

/// Removes what runs that were killed have left.
pub fn remove_leftovers() {
    let Ok(root) = cgroup::find(None) else { return };
    for parent in [root.path, std::env::temp_dir()] {
        for entry in fs::read_dir(parent).into_iter().flatten().filter_map(Result::ok) {
            let name = entry.file_name();
            let Some(rest) = name.to_str().and_then(|name| name.strip_prefix(PREFIX)) else { continue };
            let pid = rest.split('-').next().unwrap_or_default();
            if !Path::new("/proc").join(pid).exists() {
                // A cgroup's files cannot be removed, only the cgroup; its own mounts went with the run.
                let _ = fs::remove_dir(entry.path()).or_else(|_| fs::remove_dir_all(entry.path()));
            }
        }
    }
}
