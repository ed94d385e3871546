//! Datagrams that stay in one packet until a device or a socket splits them (`UDP_SEGMENT`; GRO makes such packets
//! too), on their path to the endpoint's node, and on to a third node.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd as _;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::{change, is_direct, lead, orig_dst};
use crate::nodes::Nodes;
use crate::peer::SocketKind;
use proxy_testbed::Family;

/// Number of sockets in each family, each with its own port.
const SOCKETS: usize = 64;
/// Size of a datagram in bytes, and number of datagrams that are sent in one packet.
const DATAGRAM: usize = 700;
const AT_ONCE: usize = 5;
/// The server of the connections that are tested.
const SERVER: &str = "3/2";

/// Sends `count` datagrams in one packet.
fn send(socket: &UdpSocket, count: usize) -> Result<()> {
    let size = libc::c_int::try_from(DATAGRAM)?;
    // SAFETY: the kernel reads the number, which outlives the call.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_UDP,
            libc::UDP_SEGMENT,
            (&raw const size).cast(),
            size_of_val(&size) as libc::socklen_t,
        )
    };
    ensure!(set == 0, "UDP_SEGMENT: {}", std::io::Error::last_os_error());
    socket.send(&vec![7; DATAGRAM * count])?;
    Ok(())
}

/// Returns the servers that answered `count` datagrams; each answer has to report the length of its datagram.
fn answers(socket: &UdpSocket, count: usize) -> Result<Vec<String>> {
    let one = |number| {
        let mut text = [0; 256];
        let length = socket.recv(&mut text).with_context(|| format!("answer {number} of {count}"))?;
        let text = String::from_utf8_lossy(&text[..length]).into_owned();
        let mut words = text.split('|');
        let (server, length) = (words.next().unwrap_or_default(), words.nth(1).unwrap_or_default());
        ensure!(length == DATAGRAM.to_string(), "an answer to {length} bytes");
        Ok(server.to_owned())
    };
    (1..=count).map(one).collect()
}

/// Checks that [`SERVER`] answers all datagrams of each socket.
fn exchange(sockets: &[UdpSocket]) -> Result<()> {
    for socket in sockets {
        send(socket, AT_ONCE)?;
        let servers = answers(socket, AT_ONCE).with_context(|| format!("from {:?}", socket.local_addr()))?;
        ensure!(servers.iter().all(|server| server == SERVER), "served by {servers:?}");
    }
    Ok(())
}

fn open(to: SocketAddr) -> Result<UdpSocket> {
    let any: SocketAddr = if to.is_ipv4() { "0.0.0.0:0".parse()? } else { "[::]:0".parse()? };
    let socket = UdpSocket::bind(any)?;
    socket.connect(to)?;
    socket.set_read_timeout(Some(Duration::from_secs(5)))?;
    Ok(socket)
}

/// Tests flows of node 2 that lead to node 3. After one more endpoint is added, node 1 sends a third of these flows to
/// node 2, which forwards them to node 3.
pub fn on_to_a_third_node(nodes: &mut Nodes) -> Result<()> {
    lead(nodes, 2)?;
    let mut kept = Vec::new();
    for family in Family::BOTH {
        let to = orig_dst(family, SocketKind::Udp)[0];
        is_direct(nodes, SocketKind::Udp, to)?;
        let sockets =
            nodes.clients[0].inside(|| (0..SOCKETS).map(|_| open(to)).collect::<Result<Vec<_>>>())?;
        for socket in sockets {
            send(&socket, 1)?;
            if answers(&socket, 1)? == [SERVER] {
                kept.push(socket);
            }
        }
    }
    ensure!(kept.len() > SOCKETS / 2, "{SERVER} serves only {} of {}", kept.len(), 2 * SOCKETS);
    exchange(&kept).context("to the node of the endpoint")?;
    change(nodes, &[(2, 3)], 3)?;
    lead(nodes, 1)?;
    exchange(&kept).context("by a node whose flow leads on")
}
