//! A Service with node ports whose endpoints are served by the case itself: thousands of TCP connections, and a UDP sink.
//!
//! A case that needs marked connections, or counts datagrams at the endpoint, begins with [`put`].

use std::fmt::Write as _;
use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::json;

use super::exposed::node_ip;
use crate::fixture::{Fixture, SOON, eventually};
use crate::manifest::{Family, cluster_ip, pod_ip};
use crate::peer::{Attempt, Held, SocketKind};

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
    let ips = Family::BOTH.map(|family| cluster_ip(family, NUMBER));
    let service = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "held", "namespace": "default"},
        "spec": {
            "type": "NodePort",
            "clusterIP": ips[0],
            "clusterIPs": ips,
            "ipFamilies": ["IPv4", "IPv6"],
            "ports": [
                {"name": "tcp", "port": 80, "nodePort": NODE_PORTS[0], "protocol": "TCP"},
                {"name": "udp", "port": 53, "nodePort": NODE_PORTS[1], "protocol": "UDP"},
            ],
        },
    });
    let mut text = format!("---\n{service}\n");
    for (family, label) in Family::BOTH.into_iter().zip(["IPv4", "IPv6"]) {
        let endpoint = |(pod, here): &(u8, bool)| {
            let node = if *here { "node" } else { "another" };
            json!({"addresses": [pod_ip(family, *pod)], "conditions": {"ready": true}, "nodeName": node})
        };
        let slice = json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": format!("held-{}", label.to_lowercase()),
                "namespace": "default",
                "labels": {"kubernetes.io/service-name": "held"},
            },
            "addressType": label,
            "endpoints": pods.iter().map(endpoint).collect::<Vec<_>>(),
            "ports": [
                {"name": "tcp", "port": TARGETS[0], "protocol": "TCP"},
                {"name": "udp", "port": TARGETS[1], "protocol": "UDP"},
            ],
        });
        // Writing to a String cannot fail.
        let _ = writeln!(text, "---\n{slice}");
    }
    fixture.folder.put_text("held", &text)
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
