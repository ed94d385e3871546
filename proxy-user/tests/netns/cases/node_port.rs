//! Node ports: sockets of the node and of pods that connect to them, and processes that listen on one.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context as _, Result, bail, ensure};
use proxy_common::reason::Reason;
use proxy_user::maps::view::View;
use serde_json::json;

use super::{Case, ensure_sees_orig_dst, tcp, udp};
use crate::agent::command;
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually};
use crate::peer::{Attempt, Peer, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::{Service, service_object, slices, text_with, yaml};

const PORTS: Service =
    Service { name: "ports", number: 50, ports: &[tcp(80, 8080, &[0]), udp(53, 5353, &[0])] };
const TCP_PORT: u16 = 30080;
const UDP_PORT: u16 = 30053;
const WISH: Wish = Wish { pods: 2, services: &[], flags: SMALL };
/// [`SMALL`], with node ports on loopback addresses.
#[rustfmt::skip]
const LOCALHOST: &[&str] = &[
    "--nodeport-addresses", "all,localhost",
    "--max-services", "64", "--max-frontends", "512", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "16384", "--max-sockets", "4096",
];

/// [`SMALL`], and processes of the node cannot bind node ports.
#[rustfmt::skip]
const REFUSE: &[&str] = &[
    "--node-port-bind", "refuse",
    "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "16384", "--max-sockets", "4096",
];
/// The port of the case with an endpoint on the node: node port and port of the endpoint.
const HOST_PORT: u16 = 30_539;

pub const CASES: &[Case] = &[
    Case { name: "node_port::sockets_of_node_and_pods_reach_it", wish: WISH, run: reaches },
    Case {
        name: "node_port::localhost_reaches_it_only_with_the_flag",
        wish: Wish { flags: LOCALHOST, ..WISH },
        run: localhost,
    },
    Case {
        name: "node_port::refuse_keeps_processes_off_node_ports",
        wish: Wish { flags: REFUSE, ..WISH },
        run: binds,
    },
    Case { name: "node_port::a_process_of_the_node_may_bind_one", wish: WISH, run: shares },
    Case { name: "node_port::an_endpoint_listens_on_its_own_node_port", wish: WISH, run: own_port },
    Case { name: "node_port::probe_of_unready_endpoint_on_its_node_port_succeeds", wish: WISH, run: probed },
];

fn port(kind: SocketKind) -> u16 {
    if kind.is_tcp() { TCP_PORT } else { UDP_PORT }
}

/// Returns addresses of the node, towards the client and towards the pods.
fn node_ips() -> [IpAddr; 6] {
    [
        [10, 98, 0, 1].into(),
        [10, 99, 1, 1].into(),
        [0xfd98, 0, 0, 0, 0, 0, 0, 1].into(),
        [0xfd99, 1, 0, 0, 0, 0, 0, 1].into(),
        Ipv4Addr::new(10, 98, 0, 1).to_ipv6_mapped().into(),
        Ipv4Addr::new(10, 99, 0, 1).to_ipv6_mapped().into(),
    ]
}

fn localhosts() -> [IpAddr; 3] {
    [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into(), Ipv4Addr::LOCALHOST.to_ipv6_mapped().into()]
}

/// Creates the Service, and waits until a socket of the node reaches it.
fn begin(fixture: &Fixture) -> Result<()> {
    let ports = json!([{"nodePort": TCP_PORT}, {"nodePort": UDP_PORT}]);
    let more = json!({"spec": {"type": "NodePort", "ports": ports}});
    fixture.folder.put_text("ports", &text_with(PORTS, &more)?)?;
    for ip in node_ips() {
        eventually(SOON, || fixture.local.reach(Attempt::new(SocketKind::Udp, (ip, UDP_PORT).into())))?;
    }
    Ok(())
}

fn reach_all(client: &Peer, ips: &[IpAddr]) -> Result<()> {
    for ip in ips {
        for kind in SocketKind::ALL {
            let attempt = Attempt::new(kind, (*ip, port(kind)).into());
            let seen = client.reach(attempt)?;
            let server = if kind.is_tcp() { "0/8080" } else { "0/5353" };
            ensure!(seen.server == server, "{attempt:?}: served by {}", seen.server);
            ensure_sees_orig_dst(&seen, attempt, attempt.to)?;
        }
    }
    Ok(())
}

/// Checks that clients are refused: no server listens there, and no program translates.
fn refused(client: &Peer, ips: &[IpAddr]) -> Result<()> {
    for ip in ips {
        for kind in [SocketKind::Tcp, SocketKind::Udp] {
            client.fails(Attempt::new(kind, (*ip, port(kind)).into()), libc::ECONNREFUSED)?;
        }
    }
    Ok(())
}

fn reaches(fixture: &Fixture) -> Result<()> {
    begin(fixture)?;
    reach_all(&fixture.local, &node_ips())?;
    // From the endpoint itself, and from another pod.
    for pod in [0, 1] {
        reach_all(&*fixture.pod(pod)?, &node_ips())?;
        refused(&*fixture.pod(pod)?, &localhosts())?;
    }
    refused(&fixture.local, &localhosts())?;
    // A port that no Service has, and an address that is not one of the node's.
    fixture.local.fails(Attempt::new(SocketKind::Tcp, (node_ips()[0], 30081).into()), libc::ECONNREFUSED)?;
    let pod: SocketAddr = (proxy_testbed::manifest::pod_ip(Family::V4, 1), TCP_PORT).into();
    fixture.local.fails(Attempt::new(SocketKind::Tcp, pod), libc::ECONNREFUSED)?;
    Ok(())
}

fn localhost(fixture: &Fixture) -> Result<()> {
    begin(fixture)?;
    reach_all(&fixture.local, &localhosts())?;
    reach_all(&fixture.local, &node_ips())?;
    // The localhost of a pod is the pod itself.
    refused(&*fixture.pod(1)?, &localhosts())
}

/// Whether a process gets the port. Any other error than that of the programs (`EADDRINUSE`) fails the case.
fn gets(peer: &Peer, is_tcp: bool, addr: SocketAddr) -> Result<bool> {
    match peer.listen(is_tcp, addr, "mine")? {
        Ok(()) => Ok(true),
        Err(failure) if failure.errno == Some(libc::EADDRINUSE) => Ok(false),
        Err(failure) => bail!("{addr}: {failure:?}"),
    }
}

fn taken(fixture: &Fixture) -> Result<u64> {
    let reasons = View::open(&fixture.bpffs())?.reasons()?;
    reasons.get(&Reason::NodePortTaken).copied().context("no such reason")
}

fn binds(fixture: &Fixture) -> Result<()> {
    begin(fixture)?;
    let any: [IpAddr; 2] = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
    let mut refusals = 0;
    for ip in any.into_iter().chain(node_ips().into_iter().take(4)) {
        for (is_tcp, number) in [(true, TCP_PORT), (false, UDP_PORT)] {
            ensure!(
                !gets(&fixture.local, is_tcp, (ip, number).into())?,
                "{ip} port {number}: a process got it"
            );
            refusals += 1;
            ensure!(taken(fixture)? == refusals, "{} counted, not {refusals}", taken(fixture)?);
        }
    }
    let services = View::open(&fixture.bpffs())?.refusals()?;
    let counted: u64 = services
        .iter()
        .filter(|((_, reason), _)| *reason == Reason::NodePortTaken)
        .map(|(_, count)| count)
        .sum();
    ensure!(counted == refusals, "{counted} counted by Service, not {refusals}");
    // Another protocol, another port, and an address without node ports are free; a pod may use all of these.
    let free = [
        (false, any[0], TCP_PORT),
        (true, any[0], UDP_PORT),
        (true, any[1], TCP_PORT + 1),
        (true, localhosts()[0], TCP_PORT),
    ];
    for (is_tcp, ip, number) in free {
        ensure!(gets(&fixture.local, is_tcp, (ip, number).into())?, "{ip} port {number} has no Service");
    }
    ensure!(gets(&*fixture.pod(1)?, true, (any[0], TCP_PORT).into())?, "a pod has its own ports");
    ensure!(taken(fixture)? == refusals, "counted what was allowed");
    // The port is free again after its Service is deleted.
    fixture.folder.remove("ports")?;
    eventually(SOON, || {
        ensure!(gets(&fixture.local, false, (any[0], UDP_PORT).into())?, "still taken");
        Ok(())
    })
}

/// Returns what `ballast status` prints.
fn status(fixture: &Fixture) -> Result<String> {
    let output = command(&fixture.node, &["status"], &fixture.bpffs())?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns the addresses of the node towards the client outside.
fn outer_ips() -> impl Iterator<Item = IpAddr> {
    node_ips().into_iter().filter(|ip| [node_ips()[0], node_ips()[2]].contains(ip))
}

/// A process of the node binds a node port, and the Service still receives what clients send to it.
fn shares(fixture: &Fixture) -> Result<()> {
    begin(fixture)?;
    ensure!(!status(fixture)?.contains("Shared:"), "before: {}", status(fixture)?);
    for (is_tcp, number) in [(true, TCP_PORT), (false, UDP_PORT)] {
        ensure!(gets(&fixture.local, is_tcp, (Ipv4Addr::UNSPECIFIED, number).into())?, "{number} is refused");
        ensure!(
            gets(&fixture.local, is_tcp, (node_ips()[2], number).into())?,
            "{number} is refused for IPv6"
        );
    }
    ensure!(taken(fixture)? == 0, "counted what was allowed");
    reach_all(&fixture.local, &node_ips())?;
    reach_all(&*fixture.pod(1)?, &node_ips())?;
    for ip in outer_ips() {
        for kind in SocketKind::ALL {
            let seen = fixture.client.reach(Attempt::new(kind, (ip, port(kind)).into()))?;
            ensure!(seen.server.starts_with("0/"), "{ip} {kind:?}: served by {}", seen.server);
        }
    }
    let own = fixture.local.reach(Attempt::new(SocketKind::Tcp, (Ipv4Addr::LOCALHOST, TCP_PORT).into()))?;
    ensure!(own.server == "mine", "127.0.0.1 is served by {}", own.server);
    let shown = status(fixture)?;
    for line in [
        "Shared:     30053/UDP is a node port of default/ports:udp, and a process of this node has bound 0.0.0.0:30053",
        "30080/TCP is a node port of default/ports:tcp, and a process of this node has bound 0.0.0.0:30080",
        "has bound [fd98::1]:30080: clients reach the Service; the process receives nothing",
    ] {
        ensure!(shown.contains(line), "no {line:?} in\n{shown}");
    }
    ensure!(shown.contains("Problems:   none"), "{shown}");
    Ok(())
}

/// Returns the Service `same`, whose node port and endpoint in the node's network namespace have one number.
fn same(ready: bool) -> String {
    let ports = |extra: &str| {
        let port = |name: &str, protocol: &str| json!({"name": name, "port": HOST_PORT, "protocol": protocol, extra: HOST_PORT});
        json!([port("tcp", "TCP"), port("udp", "UDP")])
    };
    let service = service_object("same", 51, &json!({"type": "NodePort", "ports": ports("nodePort")}));
    let slices = slices("same", "same", &ports("port"), |family| {
        let address = node_ips()[if family == Family::V4 { 0 } else { 2 }];
        vec![json!({"addresses": [address], "conditions": {"ready": ready}, "nodeName": "node"})]
    });
    yaml([service].into_iter().chain(slices))
}

/// Begins to listen as an endpoint of the Service `same` does.
fn listen(fixture: &Fixture) -> Result<()> {
    let any: [IpAddr; 2] = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
    // A UDP server on the wildcard address answers from the address of the route to its client.
    let [udp4, udp6] = [node_ips()[0], node_ips()[2]];
    for (is_tcp, ip) in [(true, any[0]), (true, any[1]), (false, udp4), (false, udp6)] {
        fixture.local.serve(is_tcp, (ip, HOST_PORT).into(), "host")?;
    }
    Ok(())
}

fn is_there(fixture: &Fixture) -> Result<()> {
    // TCP and UDP of both families: a cluster address and a node port each. Its names are there before.
    let frontends = View::open(&fixture.bpffs())?.services()?;
    ensure!(frontends.iter().filter(|row| row.port == HOST_PORT).count() == 8, "{frontends:?}");
    Ok(())
}

/// A readiness probe comes from the node, and must reach an endpoint that its Service does not send clients to yet.
fn probed(fixture: &Fixture) -> Result<()> {
    fixture.folder.put_text("same", &same(false))?;
    eventually(SOON, || is_there(fixture))?;
    for ip in outer_ips() {
        for kind in [SocketKind::Tcp, SocketKind::Udp] {
            for client in [&fixture.client, &fixture.local, &*fixture.pod(0)?] {
                client.fails(Attempt::new(kind, (ip, HOST_PORT).into()), libc::ECONNREFUSED)?;
            }
        }
    }
    listen(fixture)?;
    for ip in outer_ips() {
        for kind in [SocketKind::Tcp, SocketKind::Udp] {
            let to = Attempt::new(kind, (ip, HOST_PORT).into());
            let seen = fixture.local.reach(to)?;
            ensure!(seen.server == "host", "{to:?}: served by {}", seen.server);
            for client in [&fixture.client, &*fixture.pod(0)?] {
                client.fails(to, libc::ECONNREFUSED)?;
            }
        }
    }
    let at = format!("{}:{HOST_PORT}", node_ips()[0]);
    let explain = command(&fixture.node, &["explain", "host", &at], &fixture.bpffs())?;
    let explanation = String::from_utf8_lossy(&explain.stdout);
    ensure!(explanation.contains("for the process that listens on this port"), "{explanation}");
    fixture.folder.put_text("same", &same(true))?;
    let to = Attempt::new(SocketKind::Tcp, (node_ips()[0], HOST_PORT).into());
    eventually(SOON, || fixture.client.reach(to))?;
    Ok(())
}

/// An endpoint in the node's network namespace has one number for everything, and begins to listen after its Service exists,
/// as each time when its pod is started again.
fn own_port(fixture: &Fixture) -> Result<()> {
    fixture.folder.put_text("same", &same(true))?;
    eventually(SOON, || is_there(fixture))?;
    listen(fixture)?;
    for ip in outer_ips() {
        let to = (ip, HOST_PORT).into();
        for client in [&fixture.client, &fixture.local, &*fixture.pod(0)?] {
            for kind in SocketKind::ALL {
                let seen = client.reach(Attempt::new(kind, to))?;
                ensure!(seen.server == "host", "{to} {kind:?}: served by {}", seen.server);
                ensure_sees_orig_dst(&seen, Attempt::new(kind, to), to)?;
            }
        }
    }
    let shown = status(fixture)?;
    let line = "30539/TCP is a node port of default/same:tcp, and a process of this node has bound [::]:30539: clients reach the \
                Service; the process receives what the Service sends to it as its endpoint";
    ensure!(shown.contains(line), "no {line:?} in\n{shown}");
    Ok(())
}
