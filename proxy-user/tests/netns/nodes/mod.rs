//! Three nodes on one link, each with its own agent and pods, and a client at every place that a node distinguishes.
//!
//! ```text
//!                 fabric: a bridge, 172.30.0.254, the nodes' default gateway
//!   outside .100 ----+------+-------------+-------------+---- vlan .101, tag 7: 172.32.0.101
//!                    |      |             |             |
//!                  eth0 .1 (.7: 172.32.0.1)  eth0 .2    eth0 .3
//!   second ---- eth1 node1 ==== vxlan ==== node2        node3
//!   172.31.0.2     cni0 10.244.1.1         cni0 .2.1    cni0 .3.1
//!                  2: near, 3: local       2: plain     2: far
//!                                          3: masqueraded, 4: by the tunnel
//! ```
//!
//! The IPv6 addresses are in fd30: to fd33: and `fd44:N::`. To add a kind of client, add a field to [`Nodes`] and a row
//! in `cases/three_nodes/`.

pub mod api;

use std::cell::RefCell;
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use aya::maps::{Array, Map, MapData};
use proxy_common::flow::{Bucket, FlowEntry};
use proxy_common::map_names as names;
use proxy_user::maps::segments::first_segment;

use crate::agent::{self, Agent, Setup};
use crate::fixture::{Cgroup, Dir, nft, places};
use crate::peer::Peer;
use proxy_testbed::Family;
use proxy_testbed::manifest::Folder;
use proxy_testbed::space::Space;

/// Flags for maps that hold one Service for each policy and place.
#[rustfmt::skip]
const SIZES: &[&str] = &[
    "--max-services", "256", "--max-frontends", "1024", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "16384", "--max-sockets", "4096",
];
/// The bridge of a node's pods, and the prefix of the names of their devices.
pub const BRIDGE: &str = "cni0";
pub const PREFIX: &str = "pod";
/// The device of node 1 towards the client behind its second NIC.
const SECOND: &str = "eth1";

/// Returns an address on the common link (`network` 30), or on another network of the nodes.
pub fn link_ip(family: Family, network: u8, host: u16) -> IpAddr {
    match family {
        Family::V4 => [172, network, 0, host as u8].into(),
        Family::V6 => [0xfd00 + u16::from(network / 10 * 16 + network % 10), 0, 0, 0, 0, 0, 0, host].into(),
    }
}

/// Returns the address of a node.
pub fn node_ip(family: Family, node: u8) -> IpAddr {
    link_ip(family, 30, node.into())
}

/// Returns the address of a pod; pod 1 is the node's end of the bridge.
pub fn pod_ip(family: Family, node: u8, pod: u8) -> IpAddr {
    match family {
        Family::V4 => [10, 244, node, pod].into(),
        Family::V6 => [0xfd44, node.into(), 0, 0, 0, 0, 0, pod.into()].into(),
    }
}

/// A node, its agent and its pods.
pub struct Node {
    agent: RefCell<Option<Agent>>,
    setup: Setup,
    pods: Vec<(Space, Peer)>,
    /// A process of the node, whose sockets the socket programs translate.
    pub host: Peer,
    _dir: Dir,
    _cgroup: Cgroup,
    pub space: Space,
    number: u8,
}

/// The three nodes and their clients. The fields are dropped in the order of their declaration.
pub struct Nodes {
    pub all: Vec<Node>,
    pub fabric: Space,
    pub outside: Peer,
    pub second: Peer,
    /// `None` if the kernel has no VLAN devices, or none are wanted.
    pub vlan: Option<Peer>,
    /// The clients' namespaces: outside, behind the second NIC, behind the VLAN.
    pub clients: [Space; 3],
    pub folder: Folder,
    dir: Dir,
    _cgroup: Cgroup,
}

impl Node {
    fn new(number: u8, fabric: &Space, folder: &Folder, pods: u8) -> Result<Self> {
        let (dir, cgroup) = places()?;
        let space = Space::new("node")?;
        connect(fabric, &space, &format!("n{number}"), number.into())?;
        let gateway = Family::BOTH.map(|family| link_ip(family, 30, 254));
        let own = Family::BOTH.map(|family| pod_ip(family, number, 1));
        space.ip(&format!(
            "route add default via {}\nroute add default via {}\n\
             link add {BRIDGE} type bridge mcast_snooping 0\nlink set {BRIDGE} up\n\
             addr add {}/24 dev {BRIDGE}\naddr add {}/64 dev {BRIDGE} nodad\n",
            gateway[0], gateway[1], own[0], own[1]
        ))?;
        for other in (1..=3).filter(|other| *other != number) {
            for (family, length) in Family::BOTH.into_iter().zip([24, 64]) {
                let (range, via) = (pod_ip(family, other, 0), node_ip(family, other));
                space.ip(&format!("route add {range}/{length} via {via}\n"))?;
            }
        }
        let bpffs = dir.0.join("bpf");
        fs::create_dir(&bpffs)?;
        let setup = Setup {
            binary: agent::binary(),
            bpffs,
            cgroup: cgroup.0.clone(),
            name: format!("node{number}"),
            manifests: Some(folder.dir().to_owned()),
            log: dir.0.join("log"),
            flags: SIZES.iter().map(|&flag| flag.to_owned()).collect(),
            capabilities: None,
            seccomp: None,
        };
        let host = Peer::start(&space, Some(&cgroup.0))?;
        let agent = RefCell::default();
        let mut node =
            Self { agent, setup, pods: Vec::new(), host, _dir: dir, _cgroup: cgroup, space, number };
        (0..pods).try_for_each(|_| node.add_pod())?;
        for family in Family::BOTH {
            serve(&node.host, node_ip(family, number), &format!("node{number}"))?;
        }
        Ok(node)
    }

    /// Adds a pod on the bridge. Its process is outside every cgroup, since its packets are tested.
    fn add_pod(&mut self) -> Result<()> {
        let (number, node) = (self.pods.len() as u8 + 2, self.number);
        let (space, device) = (Space::new("pod")?, format!("{PREFIX}{number}"));
        self.space.ip(&format!(
            "link add {device} type veth peer name eth0 netns {}\n\
             link set {device} master {BRIDGE}\nlink set {device} up\n",
            space.path()
        ))?;
        let peer = Peer::start(&space, None)?;
        space.ip("link set eth0 up\n")?;
        for (family, length) in Family::BOTH.into_iter().zip([24, 64]) {
            let (own, gateway) = (pod_ip(family, node, number), pod_ip(family, node, 1));
            let nodad = if family == Family::V6 { "nodad" } else { "" };
            space.ip(&format!(
                "addr add {own}/{length} dev eth0 {nodad}\nroute add default via {gateway}\n"
            ))?;
            serve(&peer, own, &format!("{node}/{number}"))?;
        }
        self.pods.push((space, peer));
        Ok(())
    }

    /// Returns the process of the node itself, and the process in each pod.
    pub fn peers(&mut self) -> (&mut Peer, Vec<&mut Peer>) {
        (&mut self.host, self.pods.iter_mut().map(|(_, peer)| peer).collect())
    }

    /// Returns the cgroup of the node's processes.
    pub fn cgroup(&self) -> &Path {
        &self.setup.cgroup
    }

    /// Lets the bridge send packets back to the port they came from (hairpin), as CNI plugins configure it for kube-proxy.
    pub fn hairpin(&self) -> Result<()> {
        (2..).take(self.pods.len()).try_for_each(|pod| {
            self.space.ip(&format!("link set {PREFIX}{pod} type bridge_slave hairpin on\n"))
        })
    }

    fn start(&self) -> Result<()> {
        *self.agent.borrow_mut() = Some(Agent::start(&self.space, &self.setup)?);
        Ok(())
    }

    /// Ends the agent, and starts it with these flags and those that all nodes have, without any others.
    pub fn restart(&mut self, flags: &[&str]) -> Result<()> {
        drop(self.agent.borrow_mut().take());
        let known = self.setup.flags.clone();
        self.setup.flags.truncate(SIZES.len());
        self.setup.flags.extend(flags.iter().map(|&flag| flag.to_owned()));
        let started = self.start();
        self.setup.flags = known;
        started
    }

    /// Waits until one line of the agent's log contains all of these words.
    pub fn says(&self, words: &[&str]) -> Result<()> {
        self.agent.borrow_mut().as_mut().context("no agent")?.says(words)
    }

    /// Runs `ballast` with these arguments, and returns the document that it prints.
    pub fn ask(&self, words: &[&str]) -> Result<serde_json::Value> {
        agent::ask(&self.space, words, &self.setup.bpffs)
    }

    /// Returns the process in a pod; `number` is an index, which is 0 for pod 2.
    pub fn pod(&self, number: usize) -> &Peer {
        &self.pods[number].1
    }

    /// Removes every flow from the tables, as if all of them had been evicted.
    pub fn forget_flows(&self) -> Result<()> {
        let maps = self.setup.bpffs.join("ballast").join(format!("v{}", proxy_common::version::ABI_VERSION));
        forget::<[u8; 4]>(&maps, names::FLOW_INDEX, names::FLOWS)?;
        forget::<[u8; 16]>(&maps, names::FLOW_INDEX6, names::FLOWS6)
    }

    /// Returns the network namespace of a pod; `number` is an index, which is 0 for pod 2.
    pub fn pod_space(&self, number: usize) -> &Space {
        &self.pods[number].0
    }

    fn is_ready(&self, devices: &[String]) -> Result<()> {
        self.agent.borrow_mut().as_mut().context("no agent")?.is_ready(devices)
    }

    /// Returns what the node has refused or passed unchanged, by reason, and the agent's log.
    pub fn log(&self) -> String {
        let reasons = proxy_user::maps::view::View::open(&self.setup.bpffs).and_then(|view| view.reasons());
        let reasons = reasons.unwrap_or_default().into_iter().filter(|(_, count)| *count > 0);
        let log = fs::read_to_string(&self.setup.log).unwrap_or_default();
        format!("node{}: {:?}\n{log}", self.number, reasons.collect::<Vec<_>>())
    }
}

/// Empties the flow tables of one family.
fn forget<A: proxy_common::Address>(maps: &Path, index: &str, flows: &str) -> Result<()> {
    // No case has more flows than one segment.
    let open = |name: &str| Ok::<_, anyhow::Error>(Map::Array(MapData::from_pin(first_segment(maps, name))?));
    let mut buckets: Array<_, Bucket> = open(index)?.try_into()?;
    for number in 0..buckets.len() {
        buckets.set(number, Bucket::EMPTY, 0)?;
    }
    let mut flows: Array<_, FlowEntry<A>> = open(flows)?.try_into()?;
    for number in 0..flows.len() {
        let flow = flows.get(&number, 0)?;
        if flow.state != 0 {
            flows.set(number, FlowEntry { state: 0, ..flow }, 0)?;
        }
    }
    Ok(())
}

fn serve(peer: &Peer, ip: IpAddr, name: &str) -> Result<()> {
    peer.serve(true, (ip, 8080).into(), name)?;
    peer.serve(false, (ip, 5353).into(), name)
}

/// Connects a namespace to the common link.
fn connect(fabric: &Space, space: &Space, device: &str, host: u16) -> Result<()> {
    let own = Family::BOTH.map(|family| link_ip(family, 30, host));
    fabric.ip(&format!(
        "link add {device} type veth peer name eth0 netns {}\nlink set {device} master br0\nlink set {device} up\n",
        space.path()
    ))?;
    space.ip(&format!(
        "addr add {}/24 dev eth0\naddr add {}/64 dev eth0 nodad\nlink set eth0 up\n",
        own[0], own[1]
    ))
}

impl Nodes {
    /// Builds everything except the agents.
    pub fn new() -> Result<Self> {
        Self::build(true)
    }

    /// Like [`Nodes::new`], without VLANs: XDP is only for devices without a VLAN device on top.
    pub fn without_vlan() -> Result<Self> {
        Self::build(false)
    }

    fn build(with_vlan: bool) -> Result<Self> {
        let (dir, cgroup) = places()?;
        let folder = Folder::new(dir.0.join("manifests"))?;
        let fabric = Space::new("fabric")?;
        fabric.ip("link add br0 type bridge mcast_snooping 0\nlink set br0 up\n\
             addr add 172.30.0.254/24 dev br0\naddr add fd30::fe/64 dev br0 nodad\n")?;
        // The fabric answers every packet that it has no route for; the rate limit must not drop these answers.
        for switch in ["net/ipv4/icmp_ratelimit", "net/ipv6/icmp/ratelimit"] {
            fabric.sysctl(switch, "0")?;
        }
        let nodes = [(1, 2), (2, 3), (3, 1)];
        let nodes = nodes.into_iter().map(|(number, pods)| Node::new(number, &fabric, &folder, pods));
        let nodes: Vec<_> = nodes.collect::<Result<_>>()?;
        let clients = [Space::new("outside")?, Space::new("second")?, Space::new("vlan")?];
        let [outside, second, vlan] = &clients;
        connect(&fabric, outside, "c0", 100)?;
        connect(&fabric, vlan, "c1", 101)?;
        // A NIC of its own: without a default route, and with addresses that the cluster does not know.
        nodes[0].space.ip(&format!(
            "link add {SECOND} type veth peer name eth0 netns {}\nlink set {SECOND} up\n\
             addr add 172.31.0.1/24 dev {SECOND}\naddr add fd31::1/64 dev {SECOND} nodad\n",
            second.path()
        ))?;
        second
            .ip("link set eth0 up\naddr add 172.31.0.2/24 dev eth0\naddr add fd31::2/64 dev eth0 nodad\n\
             route add default via 172.31.0.1\nroute add default via fd31::1\n")?;
        // Not every kernel has VLAN devices.
        let tagged = "link add link eth0 name eth0.7 type vlan id 7\n";
        let has_vlan = with_vlan && vlan.ip(tagged).and_then(|()| nodes[0].space.ip(tagged)).is_ok();
        for (space, host) in [(&nodes[0].space, 1), (vlan, 101)].into_iter().filter(|_| has_vlan) {
            let own = Family::BOTH.map(|family| link_ip(family, 32, host));
            space.ip(&format!(
                "addr add {}/24 dev eth0.7\naddr add {}/64 dev eth0.7 nodad\nlink set eth0.7 up\n",
                own[0], own[1]
            ))?;
        }
        tunnel(&nodes[0], &nodes[1])?;
        masquerade(&nodes[1].space)?;
        let [outside, second] = [Peer::start(outside, None)?, Peer::start(second, None)?];
        let vlan = has_vlan.then(|| Peer::start(vlan, None)).transpose()?;
        Ok(Self { all: nodes, outside, second, vlan, clients, fabric, folder, dir, _cgroup: cgroup })
    }

    /// Starts the agents with these additional flags, and waits until they serve.
    pub fn begin(&mut self, flags: &[String]) -> Result<()> {
        for node in &mut self.all {
            node.setup.flags.extend(flags.iter().cloned());
            node.start()?;
        }
        for node in &self.all {
            let pods = (2..).take(node.pods.len()).map(|number| format!("{PREFIX}{number}"));
            let more: &[&str] = if node.number == 1 { &["eth0", SECOND, "vx0"] } else { &["eth0"] };
            let vlan = self.vlan.iter().filter(|_| node.number == 1).map(|_| "eth0.7");
            let devices: Vec<_> = pods.chain(more.iter().copied().chain(vlan).map(str::to_owned)).collect();
            node.is_ready(&devices)?;
        }
        Ok(())
    }

    /// Makes node 1 get its objects from an API server instead of the folder.
    pub fn ask_api_server(&mut self, objects: Vec<serde_json::Value>) -> Result<()> {
        let kubeconfig = self.dir.0.join("kubeconfig");
        let node = self.all.first_mut().context("no nodes")?;
        api::start(&node.space, objects, &kubeconfig)?;
        node.setup.manifests = None;
        node.setup.flags.extend(["--kubeconfig".to_owned(), kubeconfig.display().to_string()]);
        Ok(())
    }

    /// Makes every node get its objects from where its flags say instead of the folder; `flags` gets the node's number.
    pub fn follow_api_server(&mut self, flags: impl Fn(u8) -> Result<Vec<String>>) -> Result<()> {
        for node in &mut self.all {
            node.setup.manifests = None;
            node.setup.flags.extend(flags(node.number)?);
        }
        Ok(())
    }

    /// Writes a file that a flag can name; returns its path.
    pub fn file(&self, name: &str, text: &str) -> Result<PathBuf> {
        let path = self.dir.0.join(name);
        fs::write(&path, text)?;
        Ok(path)
    }
}

/// Routes pod 4 of node 2 to all others through node 1, by a VXLAN between the two nodes.
fn tunnel(one: &Node, two: &Node) -> Result<()> {
    for (node, other) in [(one, 2), (two, 1)] {
        let number = node.number;
        let own = Family::BOTH.map(|family| link_ip(family, 33, number.into()));
        let (local, remote) = (node_ip(Family::V4, number), node_ip(Family::V4, other));
        node.space.ip(&format!(
            "link add vx0 type vxlan id 42 dstport 4789 local {local} remote {remote} dev eth0\nlink set vx0 up\n\
             addr add {}/24 dev vx0\naddr add {}/64 dev vx0 nodad\n",
            own[0], own[1]
        ))?;
    }
    for family in Family::BOTH {
        let (pod, via) = (pod_ip(family, 2, 4), link_ip(family, 33, 2));
        one.space.ip(&format!("route add {pod} via {via} dev vx0\n"))?;
        let via = link_ip(family, 33, 1);
        two.space.ip(&format!("route add default via {via} dev vx0 table 100\n"))?;
        let flag = if family == Family::V4 { "-4" } else { "-6" };
        let rule = format!("{flag} rule add from {pod} lookup 100");
        let output = two.space.command("ip").args(rule.split(' ')).output()?;
        anyhow::ensure!(output.status.success(), "ip: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

/// Rewrites the source of packets from pod 3 that leave the node to the node's address, like the masquerading of a CNI plugin.
fn masquerade(space: &Space) -> Result<()> {
    let pods = Family::BOTH.map(|family| pod_ip(family, 2, 3));
    nft(
        space,
        &format!(
            "table inet cni {{\nchain post {{\ntype nat hook postrouting priority srcnat;\n\
         ip saddr {} oifname \"eth0\" masquerade;\nip6 saddr {} oifname \"eth0\" masquerade;\n}}\n}}\n",
            pods[0], pods[1]
        ),
    )
}
