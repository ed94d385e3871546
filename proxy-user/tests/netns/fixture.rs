//! The fixture of a case: a node, a client and pods, each in its own network namespace, and the agent on the node.
//!
//! ```text
//! client eth0 10.98.0.2 --- c0 10.98.0.1  node  p0 10.99.0.1 --- eth0 10.99.0.2 pod 0
//!                                               p1 10.99.1.1 --- eth0 10.99.1.2 pod 1
//! ```
//!
//! The IPv6 addresses are in fd98: and fd99:. The node has no route to any ClusterIP, so a client that reaches a
//! ClusterIP was translated.

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
use crate::peer::{Attempt, Peer, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::{Folder, Service, pod_ip};
use proxy_testbed::space::Space;

/// Prefix of the names of everything that can outlive this process; the process id follows.
const PREFIX: &str = "ballast-netns-";
/// TCP and UDP ports on which every pod has a server; the server's name is `POD/PORT`.
const TCP_PORTS: [u16; 2] = [8080, 9090];
const UDP_PORTS: [u16; 2] = [5353, 9090];
/// Flags for maps of a few Services: the kernel takes longer to allocate maps for a whole cluster than the rest of a case takes.
#[rustfmt::skip]
pub const SMALL: &[&str] = &[
    "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "16384", "--max-sockets", "4096",
];
/// [`SMALL`], with XDP on all devices.
#[rustfmt::skip]
pub const SMALL_XDP: &[&str] = &[
    "--xdp", "generic",
    "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "16384", "--max-sockets", "4096",
];
/// [`SMALL`], and a socket call that may get no answer fails at once instead of after its timeout.
#[rustfmt::skip]
pub const FAILS: &[&str] = &[
    "--socket-drop", "fail",
    "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "16384", "--max-sockets", "4096",
];
/// Timeout of a change of the manifests. Programming it takes about 20 ms on an idle machine, and much longer if a CPU
/// has a dozen other tasks.
pub const SOON: Duration = Duration::from_mins(1);

static NUMBER: AtomicU32 = AtomicU32::new(0);

/// Repeats the action until it succeeds; returns its last error after `limit`.
pub fn eventually<T>(limit: Duration, mut action: impl FnMut() -> Result<T>) -> Result<T> {
    let end = Instant::now() + limit;
    loop {
        match action() {
            Err(_) if Instant::now() < end => std::thread::sleep(Duration::from_millis(5)),
            result => return result.with_context(|| format!("still so after {limit:?}")),
        }
    }
}

/// Runs a tool in a namespace, with `text` as its standard input.
pub fn feed(space: &Space, tool: &[&str], text: &str) -> Result<()> {
    let (program, arguments) = tool.split_first().context("no tool")?;
    let mut child = space.command(program).args(arguments).stdin(Stdio::piped()).spawn()?;
    child.stdin.take().context("no input")?.write_all(text.as_bytes())?;
    let status = child.wait()?;
    ensure!(status.success(), "{tool:?}: {status}\n{text}");
    Ok(())
}

/// Loads nftables rules in a namespace.
pub fn nft(space: &Space, rules: &str) -> Result<()> {
    feed(space, &["nft", "-f", "-"], rules)
}

/// What a case needs from its fixture.
#[derive(Clone, Copy, Debug)]
pub struct Wish {
    pub pods: u8,
    pub services: &'static [Service],
    /// Flags for the agent, usually [`SMALL`] or an extension of it.
    pub flags: &'static [&'static str],
}

/// The fixture of a case. The fields are dropped in the order of their declaration.
pub struct Fixture {
    agent: RefCell<Option<Agent>>,
    setup: RefCell<Setup>,
    /// A process on the node, whose sockets the socket programs translate.
    pub local: Peer,
    /// A process on the node outside the cgroup.
    pub outside: Peer,
    /// A client of the packet path: it is in a namespace of its own, and outside the cgroup.
    pub client: Peer,
    pods: RefCell<Vec<(Space, Peer)>>,
    pub folder: Folder,
    _dir: Dir,
    cgroup: Cgroup,
    pub node: Space,
    pub client_space: Space,
    devices: RefCell<Vec<String>>,
}

/// A folder; dropping it unmounts the bpffs in it, and deletes it.
pub struct Dir(pub PathBuf);
/// A cgroup; dropping it deletes it, once its last process has ended.
pub struct Cgroup(pub PathBuf);

/// Creates a folder and a cgroup, with a unique name.
pub fn places() -> Result<(Dir, Cgroup)> {
    let name = format!("{PREFIX}{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
    let dir = Dir(std::env::temp_dir().join(&name));
    fs::create_dir(&dir.0).with_context(|| format!("cannot make {}", dir.0.display()))?;
    let cgroup = Cgroup(cgroup::find(None)?.path.join(&name));
    fs::create_dir(&cgroup.0).with_context(|| format!("cannot make {}", cgroup.0.display()))?;
    Ok((dir, cgroup))
}

impl Fixture {
    /// Builds everything except the agent.
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

    /// Adds a pod with its servers; returns its number.
    pub fn add_pod(&self) -> Result<u8> {
        let pod = self.pods.borrow().len() as u8;
        let space = Space::new("pod")?;
        self.node.join(&space, &format!("p{pod}"), &format!("10.99.{pod}"), &format!("fd99:{pod}:"))?;
        // As on a real node, the socket programs translate the pod's sockets too.
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

    /// Adds a namespace behind the node, as a client of the packet path; its device is new to the agent.
    pub fn add_client(&self) -> Result<(Space, Peer)> {
        let space = Space::new("late")?;
        self.node.join(&space, "c1", "10.97.0", "fd97:")?;
        let peer = Peer::start(&space, None)?;
        Ok((space, peer))
    }

    /// Returns the process in a pod, whose sockets the socket programs translate.
    pub fn pod(&self, number: u8) -> Result<Ref<'_, Peer>> {
        let pods = self.pods.borrow();
        Ref::filter_map(pods, |pods| pods.get(usize::from(number)).map(|(_, peer)| peer))
            .map_err(|_| anyhow!("no pod {number}"))
    }

    /// Runs the action on a thread in a pod's namespace.
    pub fn in_pod<T: Send>(&self, number: u8, action: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let pods = self.pods.borrow();
        pods.get(usize::from(number)).with_context(|| format!("no pod {number}"))?.0.inside(action)
    }

    /// Runs the action with a pod's namespace.
    pub fn in_pod_space<T>(&self, number: u8, action: impl FnOnce(&Space) -> Result<T>) -> Result<T> {
        let pods = self.pods.borrow();
        action(&pods.get(usize::from(number)).with_context(|| format!("no pod {number}"))?.0)
    }

    /// Returns a client of each path: by sockets and by packets.
    pub fn clients(&self) -> [(&'static str, &Peer); 2] {
        [("socket", &self.local), ("packet", &self.client)]
    }

    pub fn bpffs(&self) -> PathBuf {
        self.setup.borrow().bpffs.clone()
    }

    pub fn cgroup(&self) -> &Path {
        &self.cgroup.0
    }

    /// Returns the names of the node's devices.
    pub fn devices(&self) -> Ref<'_, Vec<String>> {
        self.devices.borrow()
    }

    /// Returns the number of packet hooks with programs: two of each device, and of the loopback device.
    pub fn packet_hooks(&self) -> usize {
        2 * (self.devices().len() + 1)
    }

    /// Returns the settings with which the next agent will be started.
    pub fn setup(&self) -> RefMut<'_, Setup> {
        self.setup.borrow_mut()
    }

    /// Returns the running agent.
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

    /// Takes the agent out of the fixture, for a case that waits for its end.
    pub fn take_agent(&self) -> Result<Agent> {
        self.agent.borrow_mut().take().context("no agent runs")
    }

    /// Kills the agent.
    pub fn kill(&self) -> Result<()> {
        self.agent.borrow_mut().take().context("no agent runs")?.kill()
    }

    /// Kills the agent, starts another one, and waits until that one is ready.
    pub fn restart(&self) -> Result<()> {
        self.kill()?;
        self.begin()
    }

    /// Replaces a Service, and waits until both clients reach exactly `servers` on its first port.
    pub fn change(&self, service: Service, servers: &[&str]) -> Result<()> {
        self.folder.put(service)?;
        self.reaches(service, servers)
    }

    /// Waits until both clients reach exactly `servers` on the first port of a Service. Each check takes several
    /// connections, since one connection may reach the right server by chance.
    pub fn reaches(&self, service: Service, servers: &[&str]) -> Result<()> {
        let first = service.ports.first().context("a Service without ports")?;
        let kind = if first.is_tcp { SocketKind::Tcp } else { SocketKind::Datagram };
        for family in Family::BOTH {
            let to = (proxy_testbed::manifest::cluster_ip(family, service.number), first.number).into();
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

    /// Returns what the packet programs have refused or passed unchanged so far, by reason.
    pub fn reasons(&self) -> String {
        let met = View::open(&self.bpffs()).and_then(|view| view.overview());
        match met {
            Ok(overview) => format!("{:?}", overview.reasons),
            Err(error) => error.to_string(),
        }
    }

    /// Returns whether the agent runs, and what its threads do.
    pub fn state(&self) -> String {
        self.agent_mut().map_or_else(|error| error.to_string(), |mut agent| agent.state())
    }

    /// Returns the log of all agents of this fixture.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.setup.borrow().log).unwrap_or_default()
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        // The next run deletes what cannot be deleted now.
        while unmount(self.0.join("bpf"), UnmountFlags::DETACH).is_ok() {}
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A process that has just ended may still be counted in the cgroup.
        let _ = eventually(Duration::from_secs(1), || Ok(fs::remove_dir(&self.0)?));
    }
}

/// Deletes the folders and cgroups that killed runs have left.
pub fn remove_leftovers() {
    let Ok(root) = cgroup::find(None) else { return };
    for parent in [root.path, std::env::temp_dir()] {
        for entry in fs::read_dir(parent).into_iter().flatten().filter_map(Result::ok) {
            let name = entry.file_name();
            let Some(rest) = name.to_str().and_then(|name| name.strip_prefix(PREFIX)) else { continue };
            let pid = rest.split('-').next().unwrap_or_default();
            if !Path::new("/proc").join(pid).exists() {
                // The files of a cgroup cannot be deleted, only the cgroup itself. The mounts of the killed run
                // disappeared with it.
                let _ = fs::remove_dir(entry.path()).or_else(|_| fs::remove_dir_all(entry.path()));
            }
        }
    }
}
