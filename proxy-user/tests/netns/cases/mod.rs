//! The cases, and functions that they share.

mod affinity;
mod algorithm;
mod attach;
mod attack;
mod bad;
mod busy;
mod capabilities;
mod change;
mod check;
mod clock;
mod commands;
mod compare;
mod detect;
mod documents;
mod dsr;
mod eject;
mod eject_policy;
mod exposed;
mod failover;
mod flood;
mod forged;
mod forwarding;
mod growth;
mod health;
mod held;
mod identity;
mod init;
mod inspect;
mod ipsec;
mod latency;
mod live;
mod locks;
mod masquerade;
mod matrix;
mod namespaces;
mod node_port;
mod official;
mod outside;
mod own;
mod packet;
mod page;
mod page_cluster;
mod path_mtu;
mod ping;
mod realtime;
mod rebalance;
mod removal;
mod repair;
mod restart;
mod rollout;
mod routes;
mod sctp;
mod shared_port;
mod smoke;
mod sock_ops;
mod socket;
mod socket_lb;
mod source_ranges;
mod stale_sockets;
mod swap;
mod tagged;
mod takeover;
mod telemetry;
mod tenants;
mod three_nodes;
mod top;
mod tunnel;
mod unconnected;
mod unknown;
mod xdp;

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use anyhow::{Result, ensure};

use crate::fixture::{Fixture, Wish};
use crate::peer::{Attempt, Peer, Seen, SocketKind, Tally};
use proxy_testbed::Family;
use proxy_testbed::manifest::{Port, Service, cluster_ip, pod_ip};

/// A test with a fixture.
#[derive(Clone, Copy)]
pub struct Case {
    pub name: &'static str,
    pub wish: Wish,
    pub run: fn(&Fixture) -> Result<()>,
}

/// A test that builds its own environment, such as three nodes: `nodes/`.
#[derive(Clone, Copy)]
pub struct NodesCase {
    pub name: &'static str,
    pub run: fn() -> Result<()>,
}

/// Returns the cases on three nodes beside the official kube-proxy.
pub fn official_on_three_nodes() -> Vec<NodesCase> {
    compare::CASES.to_vec()
}

/// Returns the cases on three nodes.
pub fn on_three_nodes() -> Vec<NodesCase> {
    [dsr::CASES, identity::CASES, three_nodes::CASES, xdp::CASES].concat()
}

/// Returns the cases with a fixture, the slowest first, since they run in parallel.
pub fn all() -> Vec<Case> {
    [
        page::CASES,
        page_cluster::CASES,
        attack::CASES,
        forged::CASES,
        forwarding::CASES,
        growth::CASES,
        masquerade::CASES,
        busy::CASES,
        rollout::CASES,
        rebalance::CASES,
        socket_lb::CASES,
        shared_port::CASES,
        removal::CASES,
        repair::CASES,
        restart::CASES,
        swap::CASES,
        takeover::CASES,
        algorithm::CASES,
        change::CASES,
        check::CASES,
        commands::CASES,
        detect::CASES,
        documents::CASES,
        eject::CASES,
        eject_policy::CASES,
        latency::CASES,
        outside::CASES,
        own::CASES,
        packet::CASES,
        attach::CASES,
        capabilities::CASES,
        bad::CASES,
        socket::CASES,
        namespaces::CASES,
        sock_ops::CASES,
        unconnected::CASES,
        inspect::CASES,
        ipsec::CASES,
        telemetry::CASES,
        flood::CASES,
        health::CASES,
        init::CASES,
        live::CASES,
        locks::CASES,
        matrix::CASES,
        failover::CASES,
        path_mtu::CASES,
        ping::CASES,
        routes::CASES,
        sctp::CASES,
        tagged::CASES,
        top::CASES,
        tunnel::CASES,
        affinity::CASES,
        node_port::CASES,
        source_ranges::CASES,
        tenants::CASES,
        stale_sockets::CASES,
        unknown::CASES,
        smoke::CASES,
    ]
    .concat()
}

/// Returns the cases beside other projects' programs: the official kube-proxy, the receiver of the OpenTelemetry Collector.
pub fn official() -> Vec<Case> {
    [official::CASES, telemetry::OFFICIAL].concat()
}

/// Returns the cases for a kernel that was not tested before; none if the agent does not start on it.
pub fn smoke() -> Vec<Case> {
    if smoke::is_too_old() || !realtime::refused().is_empty() {
        return Vec::new();
    }
    let sctp = if sctp::has_sockets() { sctp::BY_SOCKETS } else { &[] };
    [smoke::CASES, restart::BY_KERNEL, clock::cases(), realtime::safe(), sctp].concat()
}

/// Returns the smoke cases that need no running agent.
pub fn smoke_with_own_setup() -> Vec<NodesCase> {
    if smoke::is_too_old() {
        smoke::TOO_OLD.to_vec()
    } else {
        [smoke::PROGRAMS, realtime::refused()].concat()
    }
}

/// Ports: `tcp` 80 to 8080 and `udp` 53 to 5353, both at pod 0; `same-tcp` and `same-udp`, both port 7, at pod 0 and pod 1.
pub const WEB: Service = Service {
    name: "web",
    number: 10,
    ports: &[
        tcp(80, 8080, &[0]),
        udp(53, 5353, &[0]),
        Port { name: "same-tcp", is_tcp: true, number: 7, target: 9090, pods: &[0] },
        Port { name: "same-udp", is_tcp: false, number: 7, target: 9090, pods: &[1] },
    ],
};
/// A Service without endpoints.
pub const EMPTY: Service =
    Service { name: "empty", number: 11, ports: &[tcp(80, 8080, &[]), udp(53, 5353, &[])] };

pub const fn tcp(number: u16, target: u16, pods: &'static [u8]) -> Port {
    Port { name: "tcp", is_tcp: true, number, target, pods }
}

pub const fn udp(number: u16, target: u16, pods: &'static [u8]) -> Port {
    Port { name: "udp", is_tcp: false, number, target, pods }
}

/// Returns a Service's ClusterIP with port 80 or 53, by the kind of socket.
pub fn vip(family: Family, service: Service, kind: SocketKind) -> SocketAddr {
    (cluster_ip(family, service.number), if kind.is_tcp() { 80 } else { 53 }).into()
}

/// Returns a pod's address with port 8080 or 5353, by the kind of socket.
pub fn pod(family: Family, number: u8, kind: SocketKind) -> SocketAddr {
    (pod_ip(family, number), if kind.is_tcp() { 8080 } else { 5353 }).into()
}

/// Returns the address of the client of the packet path.
pub fn client_ip(family: Family) -> IpAddr {
    match family {
        Family::V4 => [10, 98, 0, 2].into(),
        Family::V6 => [0xfd98, 0, 0, 0, 0, 0, 0, 2].into(),
    }
}

/// Whether the port is one of the default SNAT ports.
pub fn is_snat_port(port: u16) -> bool {
    proxy_common::config::SNAT_PORTS.iter().any(|range| range.contains(port))
}

/// Returns the servers that so many attempts reach; each attempt has to succeed.
pub fn spread(client: &Peer, attempt: Attempt, attempts: usize) -> Result<BTreeSet<String>> {
    (0..attempts).map(|_| Ok(client.reach(attempt)?.server)).collect()
}

/// Checks that the client believes that it talks to `orig_dst`.
pub fn ensure_sees_orig_dst(seen: &Seen, attempt: Attempt, orig_dst: SocketAddr) -> Result<()> {
    let peer = (attempt.kind != SocketKind::Datagram).then_some(orig_dst);
    ensure!(seen.peer == peer, "{attempt:?}: getpeername is {:?}", seen.peer);
    let from = (!attempt.kind.is_tcp()).then_some(orig_dst);
    ensure!(seen.from == from, "{attempt:?}: the answer is from {:?}", seen.from);
    Ok(())
}

/// Checks that no connection retransmitted its SYN: after a lost SYN, a client waits for a second, but nothing fails.
pub fn ensure_no_syn_lost(tally: &Tally, what: &str) -> Result<()> {
    let Tally { syn_retransmits, late, .. } = tally;
    ensure!(*syn_retransmits == 0, "{what}: {syn_retransmits} SYNs were sent again: {late:?}");
    Ok(())
}

/// Checks that a load never failed, lost no SYN, had more than ten answers, and reached only `servers`.
pub fn is_clean(tally: &Tally, what: &str, servers: &[&str]) -> Result<()> {
    let answers: u64 = tally.servers.values().sum();
    ensure_no_syn_lost(tally, what)?;
    ensure!(tally.failed == 0, "{what}: {} of {answers} failed: {:?}", tally.failed, tally.failures);
    ensure!(answers > 10, "{what}: only {answers} answers");
    let known = tally.servers.keys().all(|server| servers.contains(&server.as_str()));
    ensure!(known, "{what}: answers from {:?}, not only from {servers:?}", tally.servers);
    Ok(())
}
