//! Connections from outside through node ports and from a pod through a ClusterIP, translated by Ballast and by the official
//! kube-proxy in nftables and in iptables mode.
//!
//! ```text
//! client eth0 10.98.0.2 --- c0 10.98.0.1 node p0 10.99.0.1 --- eth0 10.99.0.2 pod of this node
//!                                             p1 10.99.2.1 --- eth0 10.99.2.2 another one, with clients
//!                                             r0 10.97.0.1 --- eth0 10.97.0.2 another node, with pods 10.99.1.x
//! ```
//!
//! There are four such topologies, which differ only in the proxy: none, Ballast, kube-proxy twice. Each node has the rule that
//! network plugins add for pods whose packets leave the cluster, so each of them tracks connections. One API server gives
//! all proxies the same Services. All topologies are measured in turn. A result is the time that a proxy adds to a
//! connection, compared with a direct connection to the pod in the topology without a proxy.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream};
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use serde_json::json;

use crate::sockets::{accept_all, alternate, connects};
use proxy_testbed::kube::control::ControlPlane;
use proxy_testbed::kube::kube_proxy::{self, Mode};
use proxy_testbed::kube::process::Process;
use proxy_testbed::kube::{self, eventually};
use proxy_testbed::report::{Row, Sample};
use proxy_testbed::space::Space;

const NODE: Ipv4Addr = Ipv4Addr::new(10, 98, 0, 1);
const LOCAL_POD: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 2);
/// Many pods: with one endpoint, all SNAT ports of Ballast for such connections would soon be in quarantine.
const REMOTE_PODS: u8 = 16;
const TARGET: u16 = 8080;
const FIRST_NODE_PORT: u16 = 30_000;
/// Numbers of two Services: the first leads to the pod on this node, the second to those on the other node.
const LOCAL: u16 = 0;
const REMOTE: u16 = 1;
/// Numbers of Services, one after the other.
const SIZES: [u16; 3] = [2, 1000, 10_000];
/// Services from this number on have no node port: there are only 2,768 node ports.
const NODE_PORTS: u16 = 1000;
/// Time limit for kube-proxy to program 10,000 Services, on a machine that also has other load.
const SYNC: Duration = Duration::from_mins(6);
/// Pause after the last Service works, so that no agent is busy with it any more.
const PAUSE: Duration = Duration::from_secs(3);

/// A network plugin's rule: pods that leave the cluster are masqueraded.
const PLUGIN: &str = "table ip plugin { chain postrouting { type nat hook postrouting priority srcnat; \
                      ip saddr 10.99.0.0/16 ip daddr != 10.96.0.0/14 masquerade; }; }";

/// A client, a node, and the pods behind the node.
struct Topology {
    client: Space,
    /// A pod whose processes are clients.
    caller: Space,
    node: Space,
    _pods: [Space; 2],
}

fn remote_pod(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 99, 1, 1 + number)
}

impl Topology {
    fn new(number: u8) -> Result<Self> {
        let space = |name| Space::new(name);
        let [client, caller, node, pod, other] =
            [space("client")?, space("caller")?, space("node")?, space("pod")?, space("other")?];
        node.join(&caller, "p1", "10.99.2", "fd99:2:")?;
        node.join(&client, "c0", "10.98.0", "fd98:")?;
        node.join(&pod, "p0", "10.99.0", "fd99:0:")?;
        node.join(&other, "r0", "10.97.0", "fd97:")?;
        node.ip("route add 10.99.1.0/24 via 10.97.0.2\nroute add default via 10.98.0.2\n")?;
        for pod in (0..REMOTE_PODS).map(remote_pod) {
            other.ip(&format!("addr add {pod}/32 dev lo"))?;
        }
        for space in [&pod, &other] {
            accept_all(space.inside(|| Ok(TcpListener::bind((Ipv4Addr::UNSPECIFIED, TARGET))?))?);
        }
        node.ip(&kube::connect_namespace(number, &node.path())?)?;
        let status = node.command("nft").arg(PLUGIN).status()?;
        ensure!(status.success(), "nft refused the rule of a network plugin");
        Ok(Self { client, caller, node, _pods: [pod, other] })
    }

    /// Waits until a Service works.
    fn serves(&self, number: u16) -> Result<()> {
        let to = SocketAddr::from(cluster_ip(number));
        let try_it = || Ok(TcpStream::connect_timeout(&to, Duration::from_secs(1))?);
        eventually(SYNC, || self.caller.inside(try_it)).map(drop)
    }
}

fn node_port(number: u16) -> SocketAddrV4 {
    SocketAddrV4::new(NODE, FIRST_NODE_PORT + number)
}

fn cluster_ip(number: u16) -> SocketAddrV4 {
    let [high, low] = (number + 256).to_be_bytes();
    SocketAddrV4::new(Ipv4Addr::new(10, 96, high, low), 80)
}

fn service(number: u16) -> Result<Service> {
    let is_exposed = number < NODE_PORTS;
    let node_port = if is_exposed { FIRST_NODE_PORT + number } else { 0 };
    Ok(serde_json::from_value(json!({
        "metadata": { "name": format!("service-{number}") },
        "spec": {
            "type": if is_exposed { "NodePort" } else { "ClusterIP" },
            "clusterIP": cluster_ip(number).ip(),
            "ports": [{ "name": "http", "port": 80, "nodePort": node_port }],
        },
    }))?)
}

fn slice(number: u16) -> Result<EndpointSlice> {
    let name = format!("service-{number}");
    let pods = if number == REMOTE { (0..REMOTE_PODS).map(remote_pod).collect() } else { vec![LOCAL_POD] };
    let node = if number == REMOTE { "another" } else { "node" };
    let endpoint = |pod: &Ipv4Addr| json!({ "addresses": [pod], "nodeName": node });
    Ok(serde_json::from_value(json!({
        "metadata": { "name": name, "labels": { "kubernetes.io/service-name": name } },
        "addressType": "IPv4",
        "endpoints": pods.iter().map(endpoint).collect::<Vec<_>>(),
        "ports": [{ "name": "http", "port": TARGET, "protocol": "TCP" }],
    }))?)
}

/// Ballast on its node, and the cgroup for its socket hooks.
struct Ballast {
    process: Option<Process>,
    cgroup: PathBuf,
}

impl Ballast {
    fn start(topology: &Topology, control: &ControlPlane) -> Result<Self> {
        let root = proxy_user::host::cgroup::find(None)?.path;
        let cgroup = root.join(format!("ballast-bench-node-ports-{}", std::process::id()));
        fs::create_dir(&cgroup)?;
        let mut this = Self { process: None, cgroup };
        let bpffs = control.folder().join("bpf");
        fs::create_dir(&bpffs)?;
        let mut command = topology.node.command(env!("CARGO_BIN_EXE_ballast"));
        command.arg("run").arg("--kubeconfig").arg(control.agent_kubeconfig()).arg("--bpffs").arg(&bpffs);
        command.arg("--cgroup-root").arg(&this.cgroup).args(["--hostname-override", "node"]);
        this.process = Some(Process::start(&mut command, &control.folder().join("ballast.log"))?);
        Ok(this)
    }
}

impl Ballast {
    /// Moves this process into the cgroup with the socket hooks, or out of it.
    fn join(&self, hooked: bool) {
        let root = self.cgroup.parent().unwrap_or(&self.cgroup);
        let cgroup = if hooked { &self.cgroup } else { root };
        fs::write(cgroup.join("cgroup.procs"), std::process::id().to_string()).unwrap();
    }
}

impl Drop for Ballast {
    fn drop(&mut self) {
        self.join(false);
        self.process = None;
        let _ = fs::remove_dir(&self.cgroup);
    }
}

/// Measures all figures of this file.
pub fn measure() -> Vec<Row> {
    let control = kube::start().unwrap();
    let object = json!({
        "metadata": { "name": "node" },
        "status": { "addresses": [{ "type": "InternalIP", "address": NODE }] },
    });
    control.api.create_raw("/api/v1/nodes", &object).unwrap();
    let topologies = [0, 1, 2, 3].map(|number| Topology::new(number).unwrap());
    let [_, proxied @ ..] = &topologies;
    let [ballasts, nftables, iptables] = proxied;
    let ballast = Ballast::start(ballasts, &control).unwrap();
    // Each kube-proxy has files of its own name.
    let _kube_proxies = [(nftables, Mode::Nftables), (iptables, Mode::Iptables)].map(|(topology, mode)| {
        let command = topology.node.command(kube_proxy::program(&control).unwrap());
        let config = kube_proxy::config(mode, "node", &control);
        kube_proxy::start_with(command, &config, mode.name(), &control).unwrap()
    });
    let mut rows = Vec::new();
    let mut made = 0;
    for size in SIZES {
        let services: Vec<_> = (made..size).map(|number| service(number).unwrap()).collect();
        let slices: Vec<_> = (made..size).map(|number| slice(number).unwrap()).collect();
        control.api.create_all(&services).unwrap();
        control.api.create_all(&slices).unwrap();
        made = size;
        for topology in proxied {
            [LOCAL, REMOTE, size - 1].into_iter().try_for_each(|number| topology.serves(number)).unwrap();
        }
        thread::sleep(PAUSE);
        rows.extend(through_node_ports(&topologies, size));
        rows.extend(through_cluster_ips(&topologies, &ballast, size));
    }
    rows
}

/// Proxies, in the order of the topologies.
const PROXIES: [&str; 3] = ["Ballast", "kube-proxy (nftables)", "kube-proxy (iptables)"];

/// Returns the time that each proxy adds to a connection, and the ratio of Ballast's time to those of the others.
fn added(what: &str, base: Sample, through: [Sample; 3], services: u16, target: f64) -> Vec<Row> {
    let name = |text: String| format!("{text}, {services} Services");
    let added = through.map(|through| through.value - base.value);
    let [ours, others @ ..] = added;
    let each = PROXIES.iter().zip(added);
    let mut rows: Vec<_> = each
        .map(|(proxy, added)| Row::new(GROUP, name(format!("added by {what}: {proxy}")), added, "us", None))
        .collect();
    rows.extend(PROXIES[1..].iter().zip(others).map(|(proxy, other)| {
        Row::new(GROUP, name(format!("{what}, Ballast to {proxy}")), ours / other, "x", Some(target))
    }));
    rows
}

const GROUP: &str = "Beside kube-proxy, IPv4";

fn through_node_ports(topologies: &[Topology; 4], services: u16) -> Vec<Row> {
    let [bare, proxied @ ..] = topologies;
    let [local, remote] = [LOCAL_POD, remote_pod(0)].map(|pod| SocketAddrV4::new(pod, TARGET));
    let mut sides = vec![(bare, local), (bare, remote)];
    for to in [local, node_port(LOCAL), node_port(REMOTE)] {
        sides.extend(proxied.iter().map(|topology| (topology, to)));
    }
    let [here, there, f0, f1, f2, l0, l1, l2, r0, r1, r2] = alternate(|side| {
        let (topology, to) = sides[side];
        topology.client.inside(|| Ok(connects(to))).unwrap()
    });
    let row = |what: &str, value| Row::new(GROUP, format!("{what}, {services} Services"), value, "us", None);
    let mut rows = vec![
        row("TCP connect to the pod, no proxy", here),
        row("TCP connect to the other node's pod, no proxy", there),
    ];
    rows.extend(PROXIES.iter().zip([f0, f1, f2]).map(|(proxy, through)| {
        row(&format!("added to a pod's own address: {proxy}"), Sample::from(through.value - here.value))
    }));
    rows.extend(added("a node port", here, [l0, l1, l2], services, 0.5));
    rows.extend(added("a node port, other node", there, [r0, r1, r2], services, 0.25));
    rows
}

/// Measures a pod's connections to another pod of its node, with and without the socket hooks.
fn through_cluster_ips(topologies: &[Topology; 4], ballast: &Ballast, services: u16) -> Vec<Row> {
    let [bare, ballasts, nftables, iptables] = topologies;
    let to = cluster_ip(LOCAL);
    let sides = [
        (bare, SocketAddrV4::new(LOCAL_POD, TARGET), false),
        (ballasts, to, false),
        (ballasts, to, true),
        (nftables, to, false),
        (iptables, to, false),
    ];
    let [direct, packets, sockets, nftables, iptables] = alternate(|side| {
        let (topology, to, hooked) = sides[side];
        ballast.join(hooked);
        topology.caller.inside(|| Ok(connects(to))).unwrap()
    });
    ballast.join(false);
    let row = |what: &str, value| Row::new(GROUP, format!("{what}, {services} Services"), value, "us", None);
    let mut rows = vec![row("TCP connect from pod to pod, no proxy", direct)];
    rows.extend(added("a ClusterIP (packets)", direct, [packets, nftables, iptables], services, 1.0));
    rows.extend(added("a ClusterIP (sockets)", direct, [sockets, nftables, iptables], services, 1.0));
    rows
}
