//! SCTP of processes of the node itself: with hand-made packets, and with sockets on kernels that have them.

use std::io::{ErrorKind, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use socket2::{Domain, Protocol, Socket, Type};

use super::exposed::{node_ip, open_up};
use super::{Case, client_ip, is_snat_port, tcp};
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually};
use proxy_testbed::Family;
use proxy_testbed::manifest::{Service, cluster_ip, pod_ip, text};
use proxy_testbed::space::Space;

const WISH: Wish = Wish { pods: 1, services: &[], flags: SMALL };

pub const CASES: &[Case] =
    &[Case { name: "sctp::the_node_itself_there_and_back", wish: WISH, run: there_and_back }];

/// Whether this kernel has SCTP sockets.
pub fn has_sockets() -> bool {
    Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::from(libc::IPPROTO_SCTP))).is_ok()
}

/// For kernels that have SCTP sockets: those that the tests boot.
pub const BY_SOCKETS: &[Case] =
    &[Case { name: "sctp::the_node_itself_by_sockets", wish: WISH, run: by_sockets }];

/// Pod 0 serves the first Service; the second one has no endpoint; the third one is served at the client's place,
/// behind the uplink.
const HERE: Service = Service { name: "here", number: 20, ports: &[tcp(80, 8080, &[0])] };
const EMPTY: Service = Service { name: "empty", number: 21, ports: &[tcp(80, 8080, &[])] };
const AWAY: Service = Service { name: "away", number: 22, ports: &[tcp(80, 8080, &[9])] };

const INIT: u8 = 1;
const INIT_ACK: u8 = 2;
const CLIENT_PORT: u16 = 40_001;

/// Writes the Service, with SCTP as its protocol.
fn put(fixture: &Fixture, service: Service) -> Result<()> {
    let mut text = text(service).replace("\"TCP\"", "\"SCTP\"");
    for family in Family::BOTH {
        text = text.replace(&pod_ip(family, 9).to_string(), &client_ip(family).to_string());
    }
    fixture.folder.put_text(service.name, &text)
}

/// Returns the checksum of RFC 9260, computed bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = !0u32;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
        }
    }
    !crc
}

/// Returns a packet with one chunk.
fn packet(from: u16, to: u16, chunk: u8) -> Vec<u8> {
    let mut packet = [from.to_be_bytes(), to.to_be_bytes()].concat();
    packet.extend([0xde, 0xad, 0xbe, 0xef, 0, 0, 0, 0, chunk, 0, 0, 20]);
    packet.extend([0x5a; 16]);
    let check = crc32c(&packet);
    packet[8..12].copy_from_slice(&check.to_le_bytes());
    packet
}

/// Opens a raw socket, which receives the namespace's SCTP packets.
fn raw(space: &Space, family: Family) -> Result<Socket> {
    let domain = if family == Family::V4 { Domain::IPV4 } else { Domain::IPV6 };
    let socket =
        space.inside(|| Ok(Socket::new(domain, Type::RAW, Some(Protocol::from(libc::IPPROTO_SCTP)))?))?;
    socket.set_read_timeout(Some(Duration::from_millis(500)))?;
    Ok(socket)
}

/// Returns the next packet's source address, ports and chunk. Its checksum has to be right.
fn receive(socket: &Socket, family: Family) -> Result<(IpAddr, [u16; 2], u8)> {
    let mut buffer = [MaybeUninit::new(0u8); 2048];
    let (length, from) = socket.recv_from(&mut buffer)?;
    // SAFETY: every byte was initialized above.
    let bytes: Vec<u8> = buffer[..length].iter().map(|byte| unsafe { byte.assume_init() }).collect();
    let header = if family == Family::V4 { usize::from(bytes[0] & 0xf) * 4 } else { 0 };
    let mut packet = bytes[header..].to_vec();
    let [ports @ .., _, _, _, _] = *packet.first_chunk::<8>().context("no ports")?;
    let [a, b, c, d] = ports;
    let check = u32::from_le_bytes(*packet[8..].first_chunk().context("no checksum")?);
    packet[8..12].fill(0);
    ensure!(crc32c(&packet) == check, "the checksum is wrong");
    let from = from.as_socket().context("from nowhere")?.ip();
    Ok((from, [u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])], packet[12]))
}

/// Sends a packet from the node to the Service; checks that the answer comes from the original destination.
fn exchange(fixture: &Fixture, server: &Socket, family: Family, service: Service) -> Result<()> {
    let orig_dst = cluster_ip(family, service.number);
    let client = raw(&fixture.node, family)?;
    client.connect(&SocketAddr::new(orig_dst, 0).into())?;
    client.send(&packet(CLIENT_PORT, 80, INIT))?;
    let (from, [source, port], chunk) = receive(server, family).context("at the server")?;
    ensure!(from == node_ip(family) && is_snat_port(source), "the server saw [{from}]:{source}");
    ensure!((port, chunk) == (8080, INIT_ACK - 1), "the server saw port {port}, chunk {chunk}");
    server.send_to(&packet(8080, source, INIT_ACK), &SocketAddr::new(from, 0).into())?;
    let answer = receive(&client, family).context("at the client")?;
    ensure!(answer == (orig_dst, [80, CLIENT_PORT], INIT_ACK), "the client saw {answer:?}");
    Ok(())
}

fn there_and_back(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    // Drop packets that arrive on another device than their source's (strict reverse path filter).
    for device in ["all", "p0", "c0"] {
        fixture.node.sysctl(&format!("net/ipv4/conf/{device}/rp_filter"), "1")?;
    }
    [HERE, EMPTY, AWAY].into_iter().try_for_each(|service| put(fixture, service))?;
    for family in Family::BOTH {
        let pod = fixture.in_pod_space(0, |space| raw(space, family))?;
        let away = raw(&fixture.client_space, family)?;
        for (server, service) in [(&pod, HERE), (&away, AWAY)] {
            eventually(SOON, || exchange(fixture, server, family, service))
                .with_context(|| format!("{family:?}: {}", service.name))?;
            for _ in 0..10 {
                exchange(fixture, server, family, service)?;
            }
        }
        // The Service has no endpoint: the kernel reports the error to the socket.
        let client = raw(&fixture.node, family)?;
        client.connect(&SocketAddr::new(cluster_ip(family, EMPTY.number), 0).into())?;
        client.send(&packet(CLIENT_PORT, 80, INIT))?;
        let errno = receive(&client, family)
            .err()
            .and_then(|error| error.downcast_ref::<std::io::Error>().and_then(std::io::Error::raw_os_error));
        ensure!(errno == Some(libc::ECONNREFUSED), "{family:?}: it has no endpoint, and it gave {errno:?}");
    }
    Ok(())
}

/// Tests an association of real sockets, with more data than one packet holds.
fn by_sockets(fixture: &Fixture) -> Result<()> {
    const LENGTH: usize = 1_000_000;
    open_up(fixture)?;
    put(fixture, HERE)?;
    for family in Family::BOTH {
        let domain = if family == Family::V4 { Domain::IPV4 } else { Domain::IPV6 };
        let new = || Socket::new(domain, Type::STREAM, Some(Protocol::from(libc::IPPROTO_SCTP)));
        let listener = fixture.in_pod_space(0, |space| space.inside(|| Ok(new()?)))?;
        listener.bind(&SocketAddr::new(pod_ip(family, 0), 8080).into())?;
        listener.listen(1)?;
        let orig_dst = SocketAddr::new(cluster_ip(family, HERE.number), 80);
        let mut client = eventually(SOON, || {
            let client = fixture.node.inside(|| Ok(new()?))?;
            // Bind to one address: the other addresses of the node mean nothing behind a translation.
            client.bind(&SocketAddr::new(node_ip(family), 0).into())?;
            client.connect_timeout(&orig_dst.into(), Duration::from_secs(2))?;
            Ok(client)
        })?;
        std::thread::scope(|scope| {
            let echo = scope.spawn(|| -> Result<SocketAddr> {
                let (mut server, from) = listener.accept()?;
                let (mut buffer, mut left) = ([0; 16_384], LENGTH);
                while left > 0 {
                    match server.read(&mut buffer)? {
                        0 => bail!("{left} bytes are missing"),
                        length => left = left.saturating_sub(length),
                    }
                }
                server.write_all(&[b'y'; 16_384])?;
                from.as_socket().context("from nowhere")
            });
            client.set_read_timeout(Some(SOON))?;
            client.set_write_timeout(Some(SOON))?;
            for chunk in vec![b'x'; LENGTH].chunks(50_000) {
                client.write_all(chunk)?;
            }
            let (mut buffer, mut seen) = ([0; 16_384], 0);
            while seen < buffer.len() {
                match client.read(&mut buffer) {
                    Ok(0) => bail!("the answer ends after {seen} bytes"),
                    Ok(length) => seen += length,
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) => return Err(error).context("the answer"),
                }
            }
            let from = echo.join().map_err(|_| anyhow::anyhow!("a thread died"))??;
            ensure!(from.ip() == node_ip(family) && is_snat_port(from.port()), "the server saw {from}");
            Ok(())
        })
        .with_context(|| format!("{family:?}"))?;
        let peer = client.peer_addr()?.as_socket().context("no peer")?;
        ensure!(peer == orig_dst, "the client believes in {peer}");
    }
    Ok(())
}
