//! Random Services under Ballast and under the official kube-proxy, with one API server and one configuration: clients
//! at six places connect to every address of every Service under both proxies, and must find the same.
//!
//! `BALLAST_COMPARE_SEED` selects other Services, settings and networks. Intended differences are in [`probe::meant`], and in
//! `docs/compatibility.md`.

mod probe;
mod services;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};
use k8s_openapi::api::core::v1::Service;
use serde_json::{Value, json};

use self::probe::{Behind, Found, Target, VantagePoint, meant, probe};
use self::services::{Made, Random, external, service, zone};
use super::NodesCase;
use crate::kube::control::ControlPlane;
use crate::kube::kube_proxy::{self, Mode};
use crate::kube::process::Process;
use crate::kube::{self, PATIENCE, eventually};
use crate::manifest::Family;
use crate::nodes::{Node, Nodes, node_ip, pod_ip};
use crate::peer::{Attempt, SocketKind};
use crate::space::Space;

pub const CASES: &[NodesCase] =
    &[NodesCase { name: "compare::random_services_behave_as_under_kube_proxy", run: compare }];

const SERVICES: u8 = 12;
const SEED: u64 = 1;
/// Number of attempts before a difference counts: a busy machine answers late.
const AGAIN: usize = 3;
/// Time for the rest of kube-proxy's sync, after the last Service is served.
const SYNC_TIME: Duration = Duration::from_secs(2);

/// What was found, by the place of the client and the target.
type Table = BTreeMap<(VantagePoint, String), Found>;

fn compare() -> Result<()> {
    // SAFETY: the call moves this thread alone; everything else of a case happens in namespaces that are named.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
        return Err(io::Error::last_os_error()).context("cannot unshare the network");
    }
    let seed = std::env::var("BALLAST_COMPARE_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(SEED);
    let control = kube::start()?;
    let mut ballast = world(1, seed)?;
    let mut official = world(4, seed)?;
    create(&control, seed)?;
    let targets = targets(&control, seed)?;
    ballast.follow_api_server(|node| {
        let file = control.folder().join(format!("ballast-{node}.json"));
        std::fs::write(&file, config(node, &control, seed).to_string())?;
        Ok(vec!["--config".to_owned(), file.display().to_string()])
    })?;
    let result = ballast.begin(&[]).and_then(|()| {
        let _running = start(&official, &control, seed)?;
        for nodes in [&ballast, &official] {
            serves(nodes, &targets)?;
        }
        thread::sleep(SYNC_TIME);
        differences(&mut ballast, &mut official, &targets)
    });
    let found = result.with_context(|| ballast.all.iter().map(Node::told).collect::<Vec<_>>().join("\n"))?;
    let (lines, reasons) = found;
    let all = targets.len() * VantagePoint::ALL.len();
    ensure!(
        lines.is_empty(),
        "seed {seed}: {} of {all} differ:\n{}\nof {}",
        lines.len(),
        lines.join("\n"),
        described(seed, &lines)
    );
    // A comparison without any answer would find no difference either.
    ensure!(reasons.values().sum::<usize>() > 0 && all > 500, "too little was compared: {all}, {reasons:?}");
    Ok(())
}

/// Returns the configuration of both proxies.
fn config(node: u8, control: &ControlPlane, seed: u64) -> Value {
    let mut config = kube_proxy::config(Mode::Nftables, &format!("node{node}"), control);
    if seed % 4 == 2 {
        config["nftables"]["masqueradeAll"] = true.into();
    }
    if seed % 4 == 3 {
        config["nodePortAddresses"] = json!(["primary"]);
    }
    config["detectLocalMode"] = "ClusterCIDR".into();
    config["clusterCIDR"] = "10.244.0.0/16,fd44::/16".into();
    config
}

/// Builds three nodes with a route to the API server, and a client outside that reaches every address through node 1.
fn world(first: u8, seed: u64) -> Result<Nodes> {
    let nodes = Nodes::new()?;
    for (node, number) in nodes.all.iter().zip(first..) {
        node.space.ip(&kube::connect_namespace(number, &node.space.path())?)?;
        // A refusal is an ICMP error: the rate limit must not drop any.
        for switch in ["net/ipv4/icmp_ratelimit", "net/ipv6/icmp/ratelimit"] {
            node.space.sysctl(switch, "0")?;
        }
        node.hairpin()?;
    }
    let [v4, v6] = Family::BOTH.map(|family| node_ip(family, 1));
    for range in ["203.0.113.0/24", "203.0.114.0/24", "10.96.0.0/16"] {
        nodes.clients[0].ip(&format!("route add {range} via {v4}\n"))?;
    }
    for range in ["fdee::/16", "fd96::/108"] {
        nodes.clients[0].ip(&format!("route add {range} via {v6}\n"))?;
    }
    if seed.is_multiple_of(2) {
        flood(&nodes.fabric)?;
    }
    if seed % 3 == 2 {
        by_policy_routes(&nodes.all[0].space)?;
    }
    Ok(nodes)
}

/// Makes the switch learn no address: it sends each frame to every machine.
fn flood(fabric: &Space) -> Result<()> {
    for port in ["n1", "n2", "n3", "c0"] {
        fabric.ip(&format!("link set {port} type bridge_slave learning off flood on\n"))?;
    }
    fabric.ip("link set br0 type bridge fdb_flush\n")
}

/// Sends what pods of node 1 send to pods of node 3 through node 2, by a rule.
fn by_policy_routes(node: &Space) -> Result<()> {
    for (family, (length, option)) in Family::BOTH.into_iter().zip([(24, "-4"), (64, "-6")]) {
        let [own, far] = [1, 3].map(|number| pod_ip(family, number, 0));
        node.ip(&format!("route add {far}/{length} via {} table 100\n", node_ip(family, 2)))?;
        let rule = ["rule", "add", "from", &format!("{own}/{length}"), "lookup", "100"].map(str::to_owned);
        let status = node.command("ip").arg(option).args(rule).status()?;
        ensure!(status.success(), "ip rule: {status}");
    }
    Ok(())
}

fn create(control: &ControlPlane, seed: u64) -> Result<()> {
    for node in 1..=3 {
        let addresses: Vec<_> = Family::BOTH
            .map(|family| json!({ "type": "InternalIP", "address": node_ip(family, node) }))
            .into();
        let object = json!({
            "metadata": {
                "name": format!("node{node}"),
                "labels": { "topology.kubernetes.io/zone": zone(node) },
            },
            "status": { "addresses": addresses },
        });
        control.api.create_raw("/api/v1/nodes", &object)?;
    }
    let mut random = Random(seed);
    let made = (1..=SERVICES).map(|number| service(number, &mut random));
    for Made { name, service, status, slices } in made.chain([sentinel()]) {
        control.api.create_raw("/api/v1/namespaces/default/services", &service)?;
        for slice in slices {
            control.api.create_raw("/apis/discovery.k8s.io/v1/namespaces/default/endpointslices", &slice)?;
        }
        if let Some(status) = status {
            control.api.patch_raw(&format!("/api/v1/namespaces/default/services/{name}/status"), &status)?;
        }
    }
    Ok(())
}

/// Returns the objects of the Services that these lines name.
fn described(seed: u64, lines: &[String]) -> String {
    let mut random = Random(seed);
    let made = (1..=SERVICES).map(|number| service(number, &mut random));
    let is_named = |made: &Made| lines.iter().any(|line| line.contains(&format!(" {} ", made.name)));
    let shown = |made: Made| json!([made.service, made.slices]).to_string();
    made.filter(is_named).map(shown).collect::<Vec<_>>().join("\n")
}

/// Returns the last Service: once it is served, the others are served too.
fn sentinel() -> Made {
    let mut random = Random(0);
    loop {
        let made = service(SERVICES + 1, &mut random);
        let text = json!([made.service, made.slices]).to_string();
        let is_open =
            ["Local", "ClientIP", "SourceRanges", "\"ready\":false", "Prefer", "another", "headless"]
                .iter()
                .all(|part| !text.contains(part));
        if is_open && made.service["spec"]["type"] == "NodePort" && text.contains("\"ready\":true") {
            return made;
        }
    }
}

/// Returns every address of every Service, and some without a Service.
fn targets(control: &ControlPlane, seed: u64) -> Result<Vec<Target>> {
    let mut random = Random(seed);
    let made = (1..=SERVICES).map(|number| service(number, &mut random));
    let nameless: BTreeSet<_> = made.filter(Made::has_nameless).map(|made| made.name).collect();
    let mut targets = Vec::new();
    for service in control.api.services()? {
        let name = service.metadata.name.clone().unwrap_or_default();
        if name != "kubernetes" {
            of_service(&name, &service, nameless.contains(&name), &mut targets)?;
        }
    }
    for family in Family::BOTH {
        let unused: IpAddr = if family == Family::V4 { "10.96.255.77" } else { "fd96::f:ff77" }.parse()?;
        for (what, ip) in [("unused cluster address", unused), ("unused node port", node_ip(family, 1))] {
            for kind in [SocketKind::Tcp, SocketKind::Udp] {
                targets.push(Target {
                    what: what.to_owned(),
                    to: (ip, 32_767).into(),
                    kind,
                    is_node_port: false,
                    service: Behind::default(),
                });
            }
        }
    }
    Ok(targets)
}

fn of_service(name: &str, service: &Service, has_nameless: bool, targets: &mut Vec<Target>) -> Result<()> {
    let spec = service.spec.as_ref().context("no spec")?;
    let labels = service.metadata.labels.iter().flatten();
    let is_foreign = labels.into_iter().any(|(name, _)| name.ends_with("/service-proxy-name"));
    let is_sticky = spec.session_affinity.as_deref() == Some("ClientIP");
    let behind = Behind { is_foreign, has_nameless, is_sticky };
    let number: u8 = name.trim_start_matches('s').parse()?;
    let ips = |texts: &[String]| texts.iter().map(|text| Ok(text.parse()?)).collect::<Result<Vec<IpAddr>>>();
    let mut addresses: Vec<_> = ips(spec.cluster_ips.as_deref().unwrap_or_default())?
        .into_iter()
        .map(|ip| ("cluster address", ip))
        .collect();
    addresses.extend(
        ips(spec.external_ips.as_deref().unwrap_or_default())?.into_iter().map(|ip| ("external address", ip)),
    );
    if spec.type_.as_deref() == Some("LoadBalancer") {
        let vips = Family::BOTH.map(|family| external(family, 113, number));
        addresses.extend(ips(&vips)?.into_iter().map(|ip| ("load balancer", ip)));
    }
    for port in spec.ports.iter().flatten() {
        let kind = if port.protocol.as_deref() == Some("UDP") { SocketKind::Udp } else { SocketKind::Tcp };
        let mut add = |what: &str, ip: IpAddr, port: i32| {
            let is_node_port = what == "node port";
            let what = format!("{name} {what} {ip} port {port} {kind:?}");
            targets.push(Target {
                what,
                to: (ip, port.cast_unsigned() as u16).into(),
                kind,
                is_node_port,
                service: behind,
            });
        };
        for (what, ip) in &addresses {
            add(what, *ip, port.port);
            // A port that the Service does not have.
            add(what, *ip, port.port + 1);
        }
        if let Some(node_port) = port.node_port {
            for (family, node) in Family::BOTH.into_iter().flat_map(|family| [(family, 1), (family, 2)]) {
                add("node port", node_ip(family, node), node_port);
            }
        }
    }
    Ok(())
}

/// Starts kube-proxy on every node.
fn start(nodes: &Nodes, control: &ControlPlane, seed: u64) -> Result<Vec<Process>> {
    let run = |(node, number): (&Node, u8)| {
        let command = node.space.command(kube_proxy::program(control)?);
        kube_proxy::start_with(command, &config(number, control, seed), &format!("node{number}"), control)
    };
    nodes.all.iter().zip(1..).map(run).collect()
}

/// Waits until the last Service is served.
fn serves(nodes: &Nodes, targets: &[Target]) -> Result<()> {
    let last = format!("s{} ", SERVICES + 1);
    let served = |target: &&Target| target.what.starts_with(&last) && target.what.contains("node port");
    for target in targets.iter().filter(served) {
        eventually(PATIENCE, || nodes.outside.reach(Attempt::new(target.kind, target.to).in_vain()))?;
    }
    Ok(())
}

/// Connects from all places in parallel; each place connects to one target after the other.
fn look(nodes: &mut Nodes, wanted: &[(VantagePoint, &Target)]) -> Result<Table> {
    let run = |vantage_point: VantagePoint, peer: &mut crate::peer::Peer| {
        let mine = wanted.iter().filter(|(from, _)| *from == vantage_point);
        mine.map(|(_, target)| {
            Ok(((vantage_point, target.what.clone()), probe(peer, vantage_point, target)?))
        })
        .collect::<Result<Vec<_>>>()
    };
    let tables = thread::scope(|scope| {
        let threads: Vec<_> = VantagePoint::peers(nodes)
            .into_iter()
            .map(|(vantage_point, peer)| scope.spawn(move || run(vantage_point, peer)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| anyhow!("a thread died"))?)
            .collect::<Result<Vec<_>>>()
    })?;
    Ok(tables.into_iter().flatten().collect())
}

/// Returns the differences that are not intended, as lines, and how often each intended difference was found.
fn differences(
    ballast: &mut Nodes,
    official: &mut Nodes,
    targets: &[Target],
) -> Result<(Vec<String>, BTreeMap<&'static str, usize>)> {
    let mut wanted: Vec<_> = VantagePoint::ALL
        .into_iter()
        .flat_map(|vantage_point| targets.iter().map(move |target| (vantage_point, target)))
        .collect();
    let (mut lines, mut reasons) = (Vec::new(), BTreeMap::new());
    for _ in 0..AGAIN {
        let (ours, theirs) = thread::scope(|scope| {
            let ours = scope.spawn(|| look(ballast, &wanted));
            let theirs = look(official, &wanted);
            (ours.join().map_err(|_| anyhow!("a thread died")).flatten(), theirs)
        });
        let (ours, theirs) = (ours?, theirs?);
        lines.clear();
        wanted.retain(|(vantage_point, target)| {
            let key = (*vantage_point, target.what.clone());
            let (Some(one), Some(other)) = (ours.get(&key), theirs.get(&key)) else { return false };
            if one == other {
                return false;
            }
            if let Some(reason) = meant(*vantage_point, target, one, other) {
                *reasons.entry(reason).or_default() += 1;
                return false;
            }
            lines
                .push(format!("{vantage_point:?} to {}: Ballast {one:?}, kube-proxy {other:?}", target.what));
            true
        });
        if lines.is_empty() {
            break;
        }
    }
    Ok((lines, reasons))
}
