//! The cases, and what they have in common.

mod affinity;
mod attach;
mod bad;
mod capabilities;
mod change;
mod detect;
mod exposed;
mod eyes;
mod flood;
mod init;
mod live;
mod matrix;
mod node_port;
mod official;
mod outside;
mod packet;
mod path_mtu;
mod repair;
mod restart;
mod sctp;
mod smoke;
mod socket;
mod source_ranges;
mod stranded;
mod swap;
mod tagged;
mod takeover;
mod tunnel;
mod unknown;

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use anyhow::{Result, ensure};

use crate::lab::{Lab, Wish};
use crate::manifest::{Family, Port, Service, cluster_ip, pod_ip};
use crate::peer::{Attempt, Kind, Peer, Seen, Tally};

/// A test.
#[derive(Clone, Copy)]
pub struct Case {
    pub name: &'static str,
    pub wish: Wish,
    pub run: fn(&Lab) -> Result<()>,
}

/// All, the slowest first: they run beside each other.
pub fn all() -> Vec<Case> {
    [
        repair::CASES,
        restart::CASES,
        swap::CASES,
        takeover::CASES,
        change::CASES,
        detect::CASES,
        outside::CASES,
        packet::CASES,
        attach::CASES,
        capabilities::CASES,
        bad::CASES,
        socket::CASES,
        eyes::CASES,
        flood::CASES,
        init::CASES,
        live::CASES,
        matrix::CASES,
        path_mtu::CASES,
        sctp::CASES,
        tagged::CASES,
        tunnel::CASES,
        affinity::CASES,
        node_port::CASES,
        source_ranges::CASES,
        stranded::CASES,
        unknown::CASES,
        smoke::CASES,
    ]
    .concat()
}

/// Those beside the official kube-proxy.
pub fn official() -> Vec<Case> {
    official::CASES.to_vec()
}

/// Those for a kernel that we have not seen yet.
pub fn smoke() -> Vec<Case> {
    [smoke::CASES, sctp::BY_SOCKETS].concat()
}

/// `tcp` 80 to 8080, `udp` 53 to 5353, both at pod 0; `same-tcp` and `same-udp` on port 7, at pods 0 and 1.
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
/// Nobody serves it.
pub const EMPTY: Service =
    Service { name: "empty", number: 11, ports: &[tcp(80, 8080, &[]), udp(53, 5353, &[])] };

pub const fn tcp(number: u16, target: u16, pods: &'static [u8]) -> Port {
    Port { name: "tcp", is_tcp: true, number, target, pods }
}

pub const fn udp(number: u16, target: u16, pods: &'static [u8]) -> Port {
    Port { name: "udp", is_tcp: false, number, target, pods }
}

/// A Service's address; port 80 or 53 by the kind of socket.
pub fn vip(family: Family, service: Service, kind: Kind) -> SocketAddr {
    (cluster_ip(family, service.number), if kind.is_tcp() { 80 } else { 53 }).into()
}

/// A pod's address; port 8080 or 5353 by the kind of socket.
pub fn pod(family: Family, number: u8, kind: Kind) -> SocketAddr {
    (pod_ip(family, number), if kind.is_tcp() { 8080 } else { 5353 }).into()
}

/// Address of the client of the packet path.
pub fn client_ip(family: Family) -> IpAddr {
    match family {
        Family::V4 => [10, 98, 0, 2].into(),
        Family::V6 => [0xfd98, 0, 0, 0, 0, 0, 0, 2].into(),
    }
}

/// The servers that so many attempts reach; all have to work.
pub fn spread(client: &Peer, attempt: Attempt, attempts: usize) -> Result<BTreeSet<String>> {
    (0..attempts).map(|_| Ok(client.reach(attempt)?.server)).collect()
}

/// The client has to believe that it talks to `dialled`.
pub fn shows(seen: &Seen, attempt: Attempt, dialled: SocketAddr) -> Result<()> {
    let peer = (attempt.kind != Kind::Datagram).then_some(dialled);
    ensure!(seen.peer == peer, "{attempt:?}: getpeername is {:?}", seen.peer);
    let from = (!attempt.kind.is_tcp()).then_some(dialled);
    ensure!(seen.from == from, "{attempt:?}: the answer is from {:?}", seen.from);
    Ok(())
}

/// Whether a load never failed, did something, and reached nobody but `servers`.
pub fn is_clean(tally: &Tally, what: &str, servers: &[&str]) -> Result<()> {
    let answers: u64 = tally.servers.values().sum();
    ensure!(tally.failed == 0, "{what}: {} of {answers} failed: {:?}", tally.failed, tally.failures);
    ensure!(answers > 10, "{what}: only {answers} answers");
    let known = tally.servers.keys().all(|server| servers.contains(&server.as_str()));
    ensure!(known, "{what}: answers from {:?}, not only from {servers:?}", tally.servers);
    Ok(())
}
