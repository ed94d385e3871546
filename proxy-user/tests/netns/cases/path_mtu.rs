//! Path MTU discovery across the node: a link behind the node has a smaller MTU than those of the client and the endpoint.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::exposed::{NUMBER, node_port, open_up, put};
use super::{Case, is_snat_port, pod};
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually, nft};
use crate::peer::{Attempt, Peer, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::{cluster_ip, pod_ip};
use proxy_testbed::space::Space;

const WISH: Wish = Wish { pods: 1, services: &[], flags: SMALL };

pub const CASES: &[Case] = &[
    Case { name: "path_mtu::client_learns_the_mtu_of_the_link_to_the_endpoint", wish: WISH, run: next_link },
    Case {
        name: "path_mtu::client_learns_the_mtu_of_a_link_behind_a_router",
        wish: WISH,
        run: behind_a_router,
    },
    Case {
        name: "path_mtu::client_learns_the_mtu_of_a_link_to_which_the_stack_routes",
        wish: WISH,
        run: by_the_stack,
    },
];

const MTU: i32 = 1300;
/// Size of a message that is too long for that link, and short enough for the others.
const LONG: usize = 1440;

/// Forbids fragmentation of the packets that the socket sends (`IP_PMTUDISC_DO`).
pub fn never_cut(socket: &impl AsRawFd, family: Family) -> Result<()> {
    let (level, option) = match family {
        Family::V4 => (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER),
        Family::V6 => (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER),
    };
    let value: libc::c_int = libc::IP_PMTUDISC_DO;
    let size = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel reads the value, which outlives the call.
    let result =
        unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const value).cast(), size) };
    ensure!(result == 0, "IP_MTU_DISCOVER: {}", std::io::Error::last_os_error());
    Ok(())
}

/// Returns the path MTU that the kernel assumes for the socket.
pub fn path_mtu(socket: &impl AsRawFd, family: Family) -> Result<i32> {
    let (level, option) = match family {
        Family::V4 => (libc::IPPROTO_IP, libc::IP_MTU),
        Family::V6 => (libc::IPPROTO_IPV6, libc::IPV6_MTU),
    };
    let mut value: libc::c_int = 0;
    let mut size = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `size` bytes to the value, which has that size.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), level, option, (&raw mut value).cast(), &raw mut size)
    };
    ensure!(result == 0, "IP_MTU: {}", std::io::Error::last_os_error());
    Ok(value)
}

/// Makes the kernel forget what it has learned about paths.
fn forget(space: &Space) -> Result<()> {
    for family in ["-4", "-6"] {
        let output = space.command("ip").args([family, "route", "flush", "cache"]).output()?;
        ensure!(output.status.success(), "ip: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

/// Checks that a client of the packet path learns the path MTU, by UDP and by TCP, and gets through.
fn learns(fixture: &Fixture, family: Family, udp: SocketAddr, tcp: SocketAddr) -> Result<()> {
    let patience = Some(Duration::from_secs(30));
    fixture.client_space.inside(|| {
        let any = if family == Family::V4 { "0.0.0.0:0" } else { "[::]:0" };
        let socket = UdpSocket::bind(any)?;
        socket.connect(udp)?;
        socket.set_read_timeout(patience)?;
        never_cut(&socket, family)?;
        ensure!(path_mtu(&socket, family)? == 1500, "knows already");
        let long = [b'x'; LONG];
        socket.send(&long).context("the first long message")?;
        eventually(SOON, || {
            let known = path_mtu(&socket, family)?;
            ensure!(known == MTU, "{udp}: believes in {known}");
            Ok(())
        })?;
        let errno = socket.send(&long).err().and_then(|error| error.raw_os_error());
        ensure!(errno == Some(libc::EMSGSIZE), "{udp}: a long message gave {errno:?}");
        // The kernel has also noted the error for the socket.
        socket.take_error()?;
        let longest = MTU as usize - if family == Family::V4 { 28 } else { 48 };
        socket.send(&long[..longest]).context("a message that fits")?;
        let mut answer = [0; 256];
        let length = socket.recv(&mut answer).context("its answer")?;
        ensure!(answer[..length].ends_with(format!("|{longest}").as_bytes()), "not the whole message");
        Ok(())
    })?;
    // The kernel shares the learned path MTU with the next socket: TCP has to learn it again.
    forget(&fixture.client_space)?;
    fixture.client_space.inside(|| {
        let mut stream = TcpStream::connect_timeout(&tcp, Duration::from_secs(30))?;
        stream.set_read_timeout(patience)?;
        let mut message = vec![b'x'; 300_000];
        message.push(b'\n');
        stream.write_all(&message)?;
        let mut line = String::new();
        BufReader::new(stream.try_clone()?).read_line(&mut line).with_context(|| {
            format!("{tcp}: the answer to 300,001 bytes, with path MTU {:?}", path_mtu(&stream, family))
        })?;
        ensure!(line.trim_end().ends_with("|300001"), "answer {line:?}");
        ensure!(path_mtu(&stream, family)? == MTU, "{tcp}: got through without learning");
        Ok(())
    })?;
    forget(&fixture.client_space)
}

fn cluster(family: Family, kind: SocketKind) -> SocketAddr {
    (cluster_ip(family, NUMBER), if kind.is_tcp() { 80 } else { 53 }).into()
}

/// Returns an exchange that soon fails: a datagram from before the Service is programmed is lost.
fn probe(udp: SocketAddr) -> Attempt {
    Attempt { patience: 2, ..Attempt::new(SocketKind::Udp, udp) }
}

/// Tests both ways to reach the endpoint: without and with SNAT.
fn without_and_with_snat(fixture: &Fixture, number: u8) -> Result<()> {
    // The client's address is kept: the stack sends the error, and the programs translate it.
    put(fixture, &[(number, true)], &json!({}), &[])?;
    for family in Family::BOTH {
        eventually(SOON, || fixture.client.reach(probe(cluster(family, SocketKind::Udp))))?;
        learns(fixture, family, cluster(family, SocketKind::Udp), cluster(family, SocketKind::Tcp))?;
    }
    // The endpoint is on another node: packets are forwarded under the node's address.
    open_up(fixture)?;
    put(fixture, &[(number, false)], &json!({}), &[])?;
    for family in Family::BOTH {
        let (udp, tcp) = (node_port(family, SocketKind::Udp), node_port(family, SocketKind::Tcp));
        eventually(SOON, || {
            let seen = fixture.client.reach(probe(udp))?;
            ensure!(is_snat_port(seen.client.port()), "the pod saw {}", seen.client);
            Ok(())
        })?;
        learns(fixture, family, udp, tcp)?;
    }
    Ok(())
}

fn next_link(fixture: &Fixture) -> Result<()> {
    fixture.node.ip(&format!("link set p0 mtu {MTU}\n"))?;
    without_and_with_snat(fixture, 0)?;
    // Make sure that the link was the cause: the endpoint is reachable directly.
    fixture.client.reach(Attempt::new(SocketKind::Tcp, pod(Family::V4, 0, SocketKind::Tcp)))?;
    Ok(())
}

fn behind_a_router(fixture: &Fixture) -> Result<()> {
    let (router, endpoint) = (Space::new("router")?, Space::new("endpoint")?);
    fixture.node.join(&router, "r0", "10.99.9", "fd99:9:")?;
    router.join(&endpoint, "e0", "10.99.8", "fd99:8:")?;
    router.ip(&format!("link set e0 mtu {MTU}\n"))?;
    fixture.node.ip("route add 10.99.8.0/24 via 10.99.9.2\nroute add fd99:8::/64 via fd99:9::2\n")?;
    let peer = Peer::start(&endpoint, None)?;
    for family in Family::BOTH {
        for (is_tcp, port) in [(true, 8080), (false, 5353)] {
            peer.serve(is_tcp, (pod_ip(family, 8), port).into(), "8")?;
        }
    }
    fixture.agent_mut()?.is_attached(&["r0".to_owned()])?;
    without_and_with_snat(fixture, 8)
}

/// With a route by mark, the stack routes packets with SNAT, and its errors go to their source, the node.
fn by_the_stack(fixture: &Fixture) -> Result<()> {
    fixture.node.ip(&format!(
        "link set p0 mtu {MTU}\nroute add 10.77.0.0/24 dev c0 table 77\nroute add fd77::/64 dev c0 table 77\n"
    ))?;
    for family in ["-4", "-6"] {
        let rule = [family, "rule", "add", "fwmark", "7", "lookup", "77"];
        let output = fixture.node.command("ip").args(rule).output()?;
        ensure!(output.status.success(), "ip: {}", String::from_utf8_lossy(&output.stderr));
    }
    let chain = "table inet seen {\nchain forward {\ntype filter hook forward priority 0;\n}\n}\n";
    let count = "flush chain inet seen forward\nadd rule inet seen forward iif lo counter\n";
    nft(&fixture.node, &[chain, count].concat())?;
    open_up(fixture)?;
    put(fixture, &[(0, false)], &json!({}), &[])?;
    let by_lo = || -> Result<bool> {
        let output = fixture.node.command("nft").args(["-j", "list", "table", "inet", "seen"]).output()?;
        let seen = String::from_utf8_lossy(&output.stdout).into_owned();
        Ok(!seen.contains("\"packets\": 0,"))
    };
    for family in Family::BOTH {
        eventually(SOON, || {
            fixture.client.reach(probe(node_port(family, SocketKind::Udp)))?;
            ensure!(by_lo()?, "{family:?}: the stack does not route");
            Ok(())
        })?;
        nft(&fixture.node, count)?;
    }
    without_and_with_snat(fixture, 0)
}
