//! Random Services under Ballast and under the official kube-proxy, with one API server and one configuration: clients
//! at six places connect to every address of every Service under both proxies, and must find the same.
//!
//! `BALLAST_COMPARE_SEED` selects other Services, settings and networks. Intended differences are in [`probe::meant`], and in
//! `docs/compatibility.md`.

mod probe;
mod services;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
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
use crate::fixture::nft;
use crate::nodes::{Node, Nodes, link_ip, node_ip, pod_ip};
use crate::peer::{Attempt, Peer, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::kube::control::ControlPlane;
use proxy_testbed::kube::kube_proxy::{self, Mode};
use proxy_testbed::kube::process::Process;
use proxy_testbed::kube::{self, PATIENCE, eventually};
use proxy_testbed::space::Space;

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
    ballast.nodes.follow_api_server(|node| {
        let file = control.folder().join(format!("ballast-{node}.json"));
        std::fs::write(&file, config(node, &control, seed).to_string())?;
        Ok(vec!["--config".to_owned(), file.display().to_string()])
    })?;
    let result = ballast.nodes.begin(&[]).and_then(|()| {
        let _running = start(&official.nodes, &control, seed)?;
        for world in [&ballast, &official] {
            serves(&world.nodes, &targets)?;
        }
        thread::sleep(SYNC_TIME);
        differences(&mut ballast, &mut official, &targets)
    });
    let found =
        result.with_context(|| ballast.nodes.all.iter().map(Node::log).collect::<Vec<_>>().join("\n"))?;
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

/// Three nodes, and a container on node 2 that is no pod.
pub struct World {
    nodes: Nodes,
    container: Peer,
    _space: Space,
}

/// Builds three nodes with a route to the API server, and a client outside that reaches every address through node 1.
fn world(first: u8, seed: u64) -> Result<World> {
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
    } else if !seed.is_multiple_of(4) {
        by_overlay(&nodes)?;
    }
    if is_blocked(seed) {
        blocked(&nodes.all[0].space)?;
    }
    // Pods that are no clients: a client with two addresses would use the other one.
    for ((node, pod), of) in services::SILENT.into_iter().zip([1, 2]) {
        let [v4, v6] = Family::BOTH.map(|family| pod_ip(family, node, pod));
        let space = nodes.all[usize::from(node) - 1].pod_space(of);
        space.ip(&format!("addr add {v4}/32 dev eth0\naddr add {v6}/128 dev eth0 nodad\n"))?;
    }
    let (container, space) = container(&nodes.all[1])?;
    Ok(World { nodes, container, _space: space })
}

/// Adds a container on a network of its own, whose addresses its runtime masquerades.
fn container(node: &Node) -> Result<(Peer, Space)> {
    let space = Space::new("container")?;
    node.space.join(&space, "g0", "10.97.6", "fd97:6:")?;
    nft(
        &node.space,
        "table inet runtime {\nchain post {\ntype nat hook postrouting priority srcnat;\n\
         ip saddr 10.97.6.0/24 oifname != \"g0\" masquerade;\n\
         ip6 saddr fd97:6::/64 oifname != \"g0\" masquerade;\n}\n}\n",
    )?;
    Ok((Peer::start(&space, Some(node.cgroup()))?, space))
}

/// Makes the switch learn no address: it sends each frame to every machine.
fn flood(fabric: &Space) -> Result<()> {
    for port in ["n1", "n2", "n3", "c0"] {
        fabric.ip(&format!("link set {port} type bridge_slave learning off flood on\n"))?;
    }
    fabric.ip("link set br0 type bridge fdb_flush\n")
}

/// Lets nodes reach each other's pods by a VXLAN; the network below drops packets with the address of a pod.
fn by_overlay(nodes: &Nodes) -> Result<()> {
    for (node, number) in nodes.all.iter().zip(1..) {
        let own = Family::BOTH.map(|family| link_ip(family, 34, number));
        let mut lines = format!(
            "link add overlay type vxlan id 77 dstport 4790 local {} dev eth0\nlink set overlay up\n\
             addr add {}/24 dev overlay\naddr add {}/64 dev overlay nodad\n",
            node_ip(Family::V4, number as u8),
            own[0],
            own[1]
        );
        for other in (1..=3).filter(|other| *other != number) {
            for (family, length) in Family::BOTH.into_iter().zip([24, 64]) {
                let (range, via) = (pod_ip(family, other as u8, 0), link_ip(family, 34, other));
                let _ = writeln!(lines, "route replace {range}/{length} via {via} dev overlay");
            }
        }
        node.space.ip(&lines)?;
        // What a network plugin does for packets of pods to all others.
        nft(
            &node.space,
            "table inet plugin {\nchain post {\ntype nat hook postrouting priority srcnat;\n\
             ip saddr 10.244.0.0/16 ip daddr != 10.244.0.0/16 oifname \"eth0\" masquerade;\n\
             ip6 saddr fd44::/16 ip6 daddr != fd44::/16 oifname \"eth0\" masquerade;\n}\n}\n",
        )?;
        for other in (1..=3).filter(|other| *other != number) {
            let to = node_ip(Family::V4, other as u8).to_string();
            let all = ["fdb", "append", "00:00:00:00:00:00", "dev", "overlay", "dst", &to];
            let status = node.space.command("bridge").args(all).status()?;
            ensure!(status.success(), "bridge fdb: {status}");
        }
    }
    nft(
        &nodes.fabric,
        "table bridge check {\nchain forward {\ntype filter hook forward priority 0;\n\
         ip saddr 10.244.0.0/16 drop;\nip6 saddr fd44::/16 drop;\n}\n}\n",
    )
}

/// Whether a policy of IPsec keeps node 1 from sending to the pods of node 3.
const fn is_blocked(seed: u64) -> bool {
    matches!(seed % 5, 0 | 1)
}

fn blocked(node: &Space) -> Result<()> {
    for (family, length) in Family::BOTH.into_iter().zip([24, 64]) {
        node.ip(&format!("xfrm policy add dir out dst {}/{length} action block\n", pod_ip(family, 3, 0)))?;
    }
    Ok(())
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
                .into_iter()
                // A policy of IPsec may block what node 1 sends there.
                .chain(["10.244.3.", "172.30.0.3"])
                .all(|part| !text.contains(part))
                && !made.has_silent();
        if is_open && made.service["spec"]["type"] == "NodePort" && text.contains("\"ready\":true") {
            return made;
        }
    }
}

/// Returns every address of every Service, and some without a Service.
fn targets(control: &ControlPlane, seed: u64) -> Result<Vec<Target>> {
    let mut random = Random(seed);
    let made = (1..=SERVICES).map(|number| service(number, &mut random));
    let made: Vec<_> = made.collect();
    let of = |has: fn(&Made) -> bool| -> BTreeSet<_> {
        made.iter().filter(|made| has(made)).map(|made| made.name.clone()).collect()
    };
    let (nameless, silent) = (of(Made::has_nameless), of(Made::has_silent));
    let mut targets = Vec::new();
    for service in control.api.services()? {
        let name = service.metadata.name.clone().unwrap_or_default();
        // A client with session affinity stays with an endpoint that may be blocked, or with another one.
        let is_sticky =
            service.spec.as_ref().is_some_and(|spec| spec.session_affinity.as_deref() == Some("ClientIP"));
        if name != "kubernetes" && !(is_sticky && is_blocked(seed)) {
            of_service(&service, &nameless, &silent, &mut targets)?;
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

/// Adds the addresses of a Service; `nameless` and `silent` are the Services with such endpoints.
fn of_service(
    service: &Service,
    nameless: &BTreeSet<String>,
    silent: &BTreeSet<String>,
    targets: &mut Vec<Target>,
) -> Result<()> {
    let name = service.metadata.name.as_deref().unwrap_or_default();
    let spec = service.spec.as_ref().context("no spec")?;
    let labels = service.metadata.labels.iter().flatten();
    let is_foreign = labels.into_iter().any(|(name, _)| name.ends_with("/service-proxy-name"));
    let is_sticky = spec.session_affinity.as_deref() == Some("ClientIP");
    let behind = Behind {
        is_foreign,
        has_nameless: nameless.contains(name),
        is_silent: silent.contains(name),
        is_sticky,
    };
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
fn look(world: &mut World, wanted: &[(VantagePoint, &Target)]) -> Result<Table> {
    let run = |vantage_point: VantagePoint, peer: &mut Peer| {
        let mine = wanted.iter().filter(|(from, _)| *from == vantage_point);
        mine.map(|(_, target)| {
            Ok(((vantage_point, target.what.clone()), probe(peer, vantage_point, target)?))
        })
        .collect::<Result<Vec<_>>>()
    };
    let tables = thread::scope(|scope| {
        let threads: Vec<_> = VantagePoint::peers(world)
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
    ballast: &mut World,
    official: &mut World,
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
