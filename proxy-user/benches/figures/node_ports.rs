//! Connections from outside through node ports, translated by Ballast and by the official kube-proxy in nftables mode.
//!
//! ```text
//! client eth0 10.98.0.2 --- c0 10.98.0.1 node p0 10.99.0.1 --- eth0 10.99.0.2 pod of this node
//!                                             r0 10.97.0.1 --- eth0 10.97.0.2 another node, with pods 10.99.1.x
//! ```
//!
//! There are three such worlds, alike but for the proxy: none, Ballast, kube-proxy. One API server tells both proxies
//! of the same Services. All are measured in turn, and what counts is what a proxy adds to a connection that goes
//! straight to the pod in the world without one.

use std::fs;
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use anyhow::Result;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use serde_json::json;

use crate::kube::control::ControlPlane;
use crate::kube::kube_proxy::{self, Mode};
use crate::kube::process::Process;
use crate::kube::{self, PATIENCE, eventually};
use crate::report::Row;
use crate::sockets::{accept_all, alternate, connects};
use crate::space::Space;

const NODE: Ipv4Addr = Ipv4Addr::new(10, 98, 0, 1);
const LOCAL_POD: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 2);
/// Many, as one endpoint would soon have every source port resting that Ballast takes for such connections.
const REMOTE_PODS: u8 = 16;
const TARGET: u16 = 8080;
const FIRST_NODE_PORT: u16 = 30_000;
/// The Services' numbers: the first leads to the pod here, the second to those on the other node.
const LOCAL: u16 = 0;
const REMOTE: u16 = 1;
/// How many Services there are, in turn.
const SIZES: [u16; 2] = [2, 1000];
/// After the last Service is served, so that no agent is busy with it any more.
const REST: Duration = Duration::from_secs(3);

/// A client, a node, and what lies behind it.
struct Topology {
    client: Space,
    node: Space,
    _pods: [Space; 2],
}

fn remote_pod(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 99, 1, 1 + number)
}

impl Topology {
    fn new(number: u8) -> Result<Self> {
        let [client, node, pod, other] =
            [Space::new("client")?, Space::new("node")?, Space::new("pod")?, Space::new("other")?];
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
        node.ip(&kube::way_from(number, &node.path())?)?;
        Ok(Self { client, node, _pods: [pod, other] })
    }

    fn connects(&self, to: SocketAddrV4) -> Vec<f64> {
        self.client.inside(|| Ok(connects(to))).unwrap()
    }

    /// Waits until a Service is served.
    fn serves(&self, number: u16) -> Result<()> {
        let try_it = || Ok(TcpStream::connect_timeout(&node_port(number).into(), Duration::from_secs(1))?);
        eventually(PATIENCE, || self.client.inside(try_it)).map(drop)
    }
}

fn node_port(number: u16) -> SocketAddrV4 {
    SocketAddrV4::new(NODE, FIRST_NODE_PORT + number)
}

fn service(number: u16) -> Result<Service> {
    Ok(serde_json::from_value(json!({
        "metadata": { "name": format!("service-{number}") },
        "spec": {
            "type": "NodePort",
            "ports": [{ "name": "http", "port": 80, "nodePort": FIRST_NODE_PORT + number }],
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

/// Ballast on its node, and the cgroup that it is given.
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

impl Drop for Ballast {
    fn drop(&mut self) {
        self.process = None;
        let _ = fs::remove_dir(&self.cgroup);
    }
}

/// Measures all of it.
pub fn measure() -> Vec<Row> {
    let control = kube::start().unwrap();
    let object = json!({
        "metadata": { "name": "node" },
        "status": { "addresses": [{ "type": "InternalIP", "address": NODE }] },
    });
    control.api.create_raw("/api/v1/nodes", &object).unwrap();
    let worlds = [0, 1, 2].map(|number| Topology::new(number).unwrap());
    let [_, ballasts, kube_proxys] = &worlds;
    let _ballast = Ballast::start(ballasts, &control).unwrap();
    let command = kube_proxys.node.command(kube_proxy::program(&control).unwrap());
    let _kube_proxy = kube_proxy::start(command, Mode::Nftables, "node", &control).unwrap();
    let mut rows = Vec::new();
    let mut made = 0;
    for size in SIZES {
        let services: Vec<_> = (made..size).map(|number| service(number).unwrap()).collect();
        let slices: Vec<_> = (made..size).map(|number| slice(number).unwrap()).collect();
        control.api.create_all(&services).unwrap();
        control.api.create_all(&slices).unwrap();
        made = size;
        for topology in [ballasts, kube_proxys] {
            [LOCAL, REMOTE, size - 1].into_iter().try_for_each(|number| topology.serves(number)).unwrap();
        }
        thread::sleep(REST);
        rows.extend(compare(&worlds, size));
    }
    rows
}

fn compare([bare, ballasts, kube_proxys]: &[Topology; 3], services: u16) -> Vec<Row> {
    let local = SocketAddrV4::new(LOCAL_POD, TARGET);
    let remote = SocketAddrV4::new(remote_pod(0), TARGET);
    let sides = [
        (bare, local),
        (bare, remote),
        (ballasts, local),
        (kube_proxys, local),
        (ballasts, node_port(LOCAL)),
        (kube_proxys, node_port(LOCAL)),
        (ballasts, node_port(REMOTE)),
        (kube_proxys, node_port(REMOTE)),
    ];
    let [here, there, foreign, foreign_old, here_new, here_old, there_new, there_old] = alternate(|side| {
        let (topology, to) = sides[side];
        topology.connects(to)
    });
    let group = "Node ports, IPv4";
    let row = |what: &str, value, unit, target| {
        Row::new(group, format!("{what}, {services} Services"), value, unit, target)
    };
    vec![
        row("TCP connect to the pod, no proxy", here, "us", None),
        row("TCP connect to the other node's pod, no proxy", there, "us", None),
        row("added to a pod's own address: Ballast", foreign - here, "us", None),
        row("added to a pod's own address: kube-proxy", foreign_old - here, "us", None),
        row("added by a node port: Ballast", here_new - here, "us", None),
        row("added by a node port: kube-proxy", here_old - here, "us", None),
        row("node port, Ballast to kube-proxy", (here_new - here) / (here_old - here), "x", Some(0.5)),
        row("added by a node port, other node: Ballast", there_new - there, "us", None),
        row("added by a node port, other node: kube-proxy", there_old - there, "us", None),
        row(
            "node port, other node, Ballast to kube-proxy",
            (there_new - there) / (there_old - there),
            "x",
            Some(0.5),
        ),
    ]
}
