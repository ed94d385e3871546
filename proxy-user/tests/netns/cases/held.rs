//! A Service with node ports whose endpoints are served by the case itself: thousands of TCP connections, and a UDP sink.
//!
//! A case that needs marked connections, or counts datagrams at the endpoint, begins with [`put`].

use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::json;

use super::exposed::node_ip;
use crate::fixture::{Fixture, SOON, eventually};
use crate::peer::{Attempt, Held, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::{pod_ip, ready_on, service_object, slices, tcp_and_udp, yaml};

pub const NUMBER: u8 = 41;
const NODE_PORTS: [u16; 2] = [30_090, 30_091];
/// Ports on which the endpoints listen, for TCP and UDP.
pub const TARGETS: [u16; 2] = [7070, 7071];
/// Timeout for all connections together, in seconds; the machine is shared.
const PATIENCE: u64 = 60;

/// Returns the Service's node port.
pub fn node_port(family: Family, is_tcp: bool) -> SocketAddr {
    (node_ip(family), NODE_PORTS[usize::from(!is_tcp)]).into()
}

/// Writes the Service; `pods`: number, and whether the slice says that it is on this node.
pub fn put(fixture: &Fixture, pods: &[(u8, bool)]) -> Result<()> {
    let ports = json!([
        {"name": "tcp", "port": 80, "nodePort": NODE_PORTS[0], "protocol": "TCP"},
        {"name": "udp", "port": 53, "nodePort": NODE_PORTS[1], "protocol": "UDP"},
    ]);
    let service = service_object("held", NUMBER, &json!({"type": "NodePort", "ports": ports}));
    let slices = slices("held", "held", &tcp_and_udp(TARGETS), |family| {
        let node = |here: bool| if here { "node" } else { "another" };
        pods.iter().map(|(pod, here)| ready_on(pod_ip(family, *pod), node(*here))).collect()
    });
    fixture.folder.put_text("held", &yaml([service].into_iter().chain(slices)))
}

/// Serves the Service's TCP port in a pod, for thousands of connections; the server's name is the pod's number.
pub fn serve(fixture: &Fixture, pod: u8) -> Result<()> {
    let peer = fixture.pod(pod)?;
    Family::BOTH
        .into_iter()
        .try_for_each(|family| peer.serve_many((pod_ip(family, pod), TARGETS[0]).into(), &pod.to_string()))
}

/// Opens `count` connections of the client outside in each family, as soon as the Service is served.
pub fn hold(fixture: &Fixture, count: usize) -> Result<()> {
    for family in Family::BOTH {
        let attempt =
            Attempt { patience: PATIENCE, ..Attempt::new(SocketKind::Tcp, node_port(family, true)) };
        eventually(SOON, || fixture.client.reach(Attempt::new(SocketKind::Tcp, attempt.to)))?;
        let held = fixture.client.hold(attempt, count)?;
        ensure!(held.lost == 0, "{family:?}: {} of {count} connects failed: {held:?}", held.lost);
        ensure!(held.syn_retransmits == 0, "{family:?}: SYNs were sent again: {held:?}");
    }
    let held = fixture.client.pulse(PATIENCE)?;
    ensure!(held.lost == 0, "before anything happened: {held:?}");
    Ok(())
}

/// Checks that every connection still answers, from the same server.
pub fn nothing_is_lost(fixture: &Fixture, what: &str) -> Result<Held> {
    let held = fixture.client.pulse(PATIENCE)?;
    ensure!(
        held.lost == 0,
        "{what}: {} connections lost, {} left: {:?}",
        held.lost,
        held.alive,
        held.failures
    );
    Ok(held)
}

/// Receives datagrams at the endpoint.
pub struct Sink(UdpSocket);

impl Sink {
    /// Opens the socket in a pod, at the Service's UDP port.
    pub fn new(fixture: &Fixture, family: Family, pod: u8) -> Result<Self> {
        let addr = (pod_ip(family, pod), TARGETS[1]);
        // A process that another case starts keeps the socket of the previous sink until it calls exec.
        let socket = eventually(SOON, || fixture.in_pod(pod, || Ok(UdpSocket::bind(addr)?)))?;
        socket2::SockRef::from(&socket).set_recv_buffer_size(8 << 20)?;
        Ok(Self(socket))
    }

    /// Returns the datagrams received so far, each with its sender. Waits until none has arrived for `quiet`.
    pub fn take(&self, quiet: Duration) -> Result<Vec<(Vec<u8>, SocketAddr)>> {
        self.0.set_read_timeout(Some(quiet))?;
        let (mut all, mut datagram) = (Vec::new(), [0; 2048]);
        while let Ok((length, from)) = self.0.recv_from(&mut datagram) {
            all.push((datagram[..length].to_vec(), from));
        }
        Ok(all)
    }

    /// Sends an answer to the sender of a datagram.
    pub fn answer(&self, to: SocketAddr) -> Result<()> {
        self.0.send_to(b"answer", to)?;
        Ok(())
    }
}
