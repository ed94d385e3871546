//! Devices whose packets begin with their IP header: clients and endpoints behind a tun device.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::exposed::{NUMBER, node_ip, node_port, open_up, put};
use super::{Case, EMPTY, ensure_sees_orig_dst, is_snat_port};
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually};
use crate::peer::{Attempt, Peer, Seen, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::{cluster_ip, pod_ip};
use proxy_testbed::space::Space;

const WISH: Wish = Wish { pods: 1, services: &[EMPTY], flags: SMALL };
/// [`SMALL`]; the namespaces behind the devices are virtual machines or pods of this node.
#[rustfmt::skip]
const LOCAL: &[&str] = &[
    "--local-devices", "t*",
    "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "16384", "--max-sockets", "4096",
];

pub const CASES: &[Case] = &[
    Case {
        name: "tunnel::a_client_behind_one_reaches_services",
        wish: Wish { flags: LOCAL, ..WISH },
        run: client,
    },
    Case { name: "tunnel::client_of_a_vpn_reaches_services_by_the_nodes_address", wish: WISH, run: vpn },
    Case { name: "tunnel::an_endpoint_behind_one_is_reached", wish: WISH, run: endpoint },
    Case { name: "tunnel::from_one_to_another", wish: WISH, run: both },
];

/// A namespace behind a device of the node that has no link-layer header, and a process in it.
pub struct Tunnel {
    pub peer: Peer,
    _space: Space,
    is_over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

/// Opens one end of a tun device, in this thread's namespace.
fn open(name: &str) -> Result<File> {
    // SAFETY: all fields are plain integers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI) as libc::c_short;
    let file = File::options().read(true).write(true).open("/dev/net/tun").context("cannot open a tun")?;
    // SAFETY: the kernel reads and writes the request, which outlives the call.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    ensure!(result == 0, "TUNSETIFF: {}", std::io::Error::last_os_error());
    Ok(file)
}

/// Forwards packets until `is_over` is set.
fn carry(mut from: File, mut to: File, is_over: &AtomicBool) {
    let mut packet = vec![0; 65_536];
    while !is_over.load(Ordering::Relaxed) {
        let mut ready = libc::pollfd { fd: from.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: the call gets one element, which outlives it.
        if unsafe { libc::poll(&raw mut ready, 1, 100) } != 1 {
            continue;
        }
        let Ok(length) = from.read(&mut packet) else { return };
        // A packet that the other end does not accept is lost, as on a wire.
        let _ = to.write(&packet[..length]);
    }
}

impl Tunnel {
    /// Builds a tunnel; its addresses are those that the pod with this number would have.
    pub fn new(fixture: &Fixture, number: u8) -> Result<Self> {
        let device = format!("t{number}");
        let space = Space::new("tunnel")?;
        let (near, far) = (fixture.node.inside(|| open(&device))?, space.inside(|| open("tun0"))?);
        let own = |end| [format!("10.99.{number}.{end}/24"), format!("fd99:{number}::{end}/64")];
        for (space, device, [v4, v6]) in [(&fixture.node, device.as_str(), own(1)), (&space, "tun0", own(2))]
        {
            space.ip(&format!(
                "addr add {v4} dev {device}\naddr add {v6} dev {device} nodad\nlink set {device} up\n"
            ))?;
        }
        space.ip("route add default dev tun0\nroute add ::/0 dev tun0\n")?;
        let is_over = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::new();
        let ends = [(near.try_clone()?, far.try_clone()?), (far, near)];
        for (from, to) in ends {
            let is_over = Arc::clone(&is_over);
            threads.push(std::thread::spawn(move || carry(from, to, &is_over)));
        }
        let peer = Peer::start(&space, None)?;
        for family in Family::BOTH {
            for (is_tcp, port) in [(true, 8080), (false, 5353)] {
                peer.serve(is_tcp, (pod_ip(family, number), port).into(), "tunnel")?;
            }
        }
        fixture.agent_mut()?.is_attached(&[device])?;
        Ok(Self { peer, _space: space, is_over, threads })
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

const SIZES: [usize; 3] = [10, 500, 1400];

/// Connects with every kind of socket until the endpoint sees the expected client, then with messages of each size, and
/// then with one connection that is cut into many segments.
fn all_sizes(
    client: &Peer,
    to: impl Fn(SocketKind) -> SocketAddr,
    is_right: impl Fn(&Seen) -> bool,
) -> Result<()> {
    for kind in SocketKind::ALL {
        let to = to(kind);
        eventually(SOON, || {
            let seen = client.reach(Attempt::new(kind, to))?;
            ensure!(is_right(&seen), "{to}: {seen:?}");
            Ok(())
        })?;
        for size in SIZES {
            let attempt = Attempt::new(kind, to).size(size);
            let seen = client.reach(attempt)?;
            ensure_sees_orig_dst(&seen, attempt, to)?;
            ensure!(is_right(&seen), "{attempt:?}: {seen:?}");
        }
    }
    client.reach(Attempt::new(SocketKind::Tcp, to(SocketKind::Tcp)).size(300_000))?;
    Ok(())
}

fn cluster(family: Family) -> impl Fn(SocketKind) -> SocketAddr {
    move |kind| (cluster_ip(family, NUMBER), if kind.is_tcp() { 80 } else { 53 }).into()
}

fn client(fixture: &Fixture) -> Result<()> {
    let tunnel = Tunnel::new(fixture, 9)?;
    // The client is inside, like a pod: its address is kept wherever the endpoint is.
    put(fixture, &[(0, false)], &json!({}), &[])?;
    for family in Family::BOTH {
        let is_kept = |seen: &Seen| seen.client.ip() == pod_ip(family, 9);
        all_sizes(&tunnel.peer, cluster(family), is_kept)?;
        all_sizes(&tunnel.peer, |kind| node_port(family, kind), is_kept)?;
        for kind in [SocketKind::Tcp, SocketKind::Udp] {
            for size in [10, 1400] {
                let empty = super::vip(family, EMPTY, kind);
                tunnel.peer.fails(Attempt::new(kind, empty).size(size), libc::ECONNREFUSED)?;
            }
        }
    }
    Ok(())
}

/// The client is outside: its packets to an endpoint on another node have the node's address as source.
fn vpn(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    let tunnel = Tunnel::new(fixture, 9)?;
    put(fixture, &[(0, false)], &json!({}), &[])?;
    for family in Family::BOTH {
        let is_nodes = |seen: &Seen| is_snat_port(seen.client.port()) && seen.client.ip() == node_ip(family);
        all_sizes(&tunnel.peer, cluster(family), is_nodes)?;
        all_sizes(&tunnel.peer, |kind| node_port(family, kind), is_nodes)?;
    }
    Ok(())
}

fn endpoint(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    let _tunnel = Tunnel::new(fixture, 9)?;
    for here in [true, false] {
        put(fixture, &[(9, here)], &json!({}), &[])?;
        for family in Family::BOTH {
            let of_the_device = match family {
                Family::V4 => IpAddr::from([10, 99, 9, 1]),
                Family::V6 => IpAddr::from([0xfd99, 9, 0, 0, 0, 0, 0, 1]),
            };
            let expected = if here { super::client_ip(family) } else { of_the_device };
            let is_right = |seen: &Seen| seen.server == "tunnel" && seen.client.ip() == expected;
            all_sizes(&fixture.client, |kind| node_port(family, kind), is_right)?;
            for kind in SocketKind::ALL {
                fixture.local.reach(Attempt::new(kind, cluster(family)(kind)))?;
            }
        }
    }
    Ok(())
}

fn both(fixture: &Fixture) -> Result<()> {
    let (from, _to) = (Tunnel::new(fixture, 9)?, Tunnel::new(fixture, 8)?);
    fixture.node.ip("route add default dev t9\nroute add ::/0 dev t9\n")?;
    put(fixture, &[(8, false)], &json!({}), &[])?;
    for family in Family::BOTH {
        all_sizes(&from.peer, |kind| node_port(family, kind), |seen| is_snat_port(seen.client.port()))?;
    }
    Ok(())
}
