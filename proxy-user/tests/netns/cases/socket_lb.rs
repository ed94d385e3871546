//! Socket load balancing: many connects, several Services, endpoints that come late, addresses that the node owns, and
//! redirection in a pod.
//!
//! Cases about one hook's table are in `socket.rs`, cases about a removed endpoint in `stale_sockets.rs`. The cases
//! here are about the settings of socket load balancing, and about state that must outlive other sockets.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd as _;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use proxy_user::maps::view::View;
use serde_json::json;

use super::exposed::{self, NUMBER, State, open_up, put};
use super::{Case, WEB, ensure_sees_orig_dst, tcp, udp, vip};
use crate::agent;
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually, nft};
use crate::peer::{Attempt, Failure, Load, Peer, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::{Service, cluster_ip};

const NAMES: Service = Service { name: "names", number: 61, ports: &[udp(53, 5353, &[0])] };
const MOVED: Service = Service { ports: &[udp(53, 5353, &[1])], ..NAMES };
/// A Service with the same endpoint.
const OTHER: Service = Service { name: "other", number: 62, ports: &[udp(53, 5353, &[0])] };
/// A Service without endpoints.
const NOWHERE: Service = Service { name: "nowhere", number: 65, ports: &[tcp(80, 8080, &[])] };
/// Two Services with the same TCP endpoint.
const PAGE: Service = Service { name: "page", number: 63, ports: &[tcp(80, 8080, &[0])] };
const SAME: Service = Service { name: "same", number: 64, ports: &[tcp(80, 8080, &[0])] };
const WISH: Wish = Wish { pods: 2, services: &[NAMES, OTHER, WEB], flags: SMALL };

/// A wish with [`SMALL`] and additional flags.
macro_rules! with {
    ($($flag:literal),+) => {
        Wish {
            flags: &[
                $($flag,)+
                "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
                "--max-flows", "16384", "--max-sockets", "4096",
            ],
            ..WISH
        }
    };
}

pub const CASES: &[Case] = &[
    Case { name: "socket_lb::a_udp_socket_outlives_ten_thousand_connects", wish: WISH, run: churn },
    Case {
        name: "socket_lb::one_udp_socket_and_two_services_of_one_endpoint",
        wish: WISH,
        run: two_services,
    },
    Case {
        name: "socket_lb::one_bound_port_in_a_pod_reaches_two_services_of_one_endpoint",
        wish: Wish { services: &[PAGE, SAME], ..WISH },
        run: one_port,
    },
    Case { name: "socket_lb::a_connect_waits_for_the_first_endpoint", wish: WISH, run: late_endpoint },
    Case {
        name: "socket_lb::connect_without_endpoints_fails_at_once_with_the_flag",
        wish: with!("--socket-drop", "fail"),
        run: fails_at_once,
    },
    Case { name: "socket_lb::address_of_the_node_is_not_translated", wish: WISH, run: owned },
    Case {
        name: "socket_lb::host_only_keeps_redirection_in_a_pod",
        wish: with!("--socket-lb", "host-only"),
        run: |fixture| redirected(fixture, true),
    },
    Case {
        name: "socket_lb::proxy_of_a_mesh_in_a_pod_gets_the_original_destination",
        wish: Wish { services: &[NAMES, OTHER, WEB, NOWHERE], ..WISH },
        run: meshed,
    },
    Case {
        name: "socket_lb::off_serves_sockets_by_packets",
        wish: with!("--socket-lb", "off"),
        run: |fixture| redirected(fixture, false),
    },
];

fn churn(fixture: &Fixture) -> Result<()> {
    const CONNECTS: usize = 10_000;
    let sockets: Vec<_> = (1..).zip(Family::BOTH.map(|family| vip(family, NAMES, SocketKind::Udp))).collect();
    for (id, to) in &sockets {
        fixture.local.open(*id, Attempt::new(SocketKind::Udp, *to))?;
        fixture.local.hears(*id, None)?;
    }
    for family in Family::BOTH {
        let tally =
            fixture.local.many(Attempt::new(SocketKind::Tcp, vip(family, WEB, SocketKind::Tcp)), CONNECTS)?;
        ensure!(tally.failed == 0, "{family:?}: {:?}", tally.failures);
    }
    for (id, to) in &sockets {
        let seen = fixture.local.hears(*id, None)?;
        ensure!(
            seen.peer == Some(*to),
            "getpeername is {:?}, and the original destination is {to}",
            seen.peer
        );
    }
    fixture.folder.put(MOVED)?;
    for (id, to) in &sockets {
        eventually(SOON / 3, || match fixture.local.talk(*id, None)? {
            Err(Failure { errno: Some(libc::ECONNABORTED | libc::EDESTADDRREQ), .. }) => Ok(()),
            other => bail!("{to}: the socket was not ended: {other:?}"),
        })?;
    }
    Ok(())
}

fn two_services(fixture: &Fixture) -> Result<()> {
    let pod = fixture.pod(1)?;
    for (who, client) in [("a process of the node", &fixture.local), ("a pod", &*pod)] {
        for (id, family) in (1..).zip(Family::BOTH) {
            let [a, b] = [NAMES, OTHER].map(|service| vip(family, service, SocketKind::Udp));
            client.open(id, Attempt { patience: 5, ..Attempt::new(SocketKind::Datagram, a) })?;
            for (round, to) in [a, b, a, a, b, b, a, b].into_iter().enumerate() {
                let from = client.hears(id, Some(to))?.from;
                ensure!(from == Some(to), "{who}, message {round}: {to} answers from {from:?}");
            }
        }
    }
    Ok(())
}

/// Waits until the agent has attached programs to all devices.
pub fn attends(fixture: &Fixture) -> Result<()> {
    eventually(SOON, || {
        let config = View::open(&fixture.bpffs())?.node_config()?;
        ensure!(config.attended_until != 0, "the agent does not attend to devices");
        Ok(())
    })
}

/// With the default settings, sockets of a pod in which a mesh proxy listens are not translated, and none of its calls is refused.
fn meshed(fixture: &Fixture) -> Result<()> {
    attends(fixture)?;
    redirected(fixture, true)?;
    for family in Family::BOTH {
        let attempt = Attempt::new(SocketKind::Tcp, vip(family, NOWHERE, SocketKind::Tcp));
        let seen = fixture.pod(1)?.reach(attempt)?;
        ensure!(seen.server == "sidecar", "{family:?}: {} and not the sidecar", seen.server);
        fixture.pod(0)?.fails(attempt, libc::ECONNREFUSED)?;
        fixture.local.fails(attempt, libc::ECONNREFUSED)?;
    }
    Ok(())
}

/// Two TCP sockets of a pod are bound to one port, and connect to two Services with the same endpoint.
fn one_port(fixture: &Fixture) -> Result<()> {
    attends(fixture)?;
    let pod = fixture.pod(1)?;
    for (port, family) in [(25_000, Family::V4), (25_001, Family::V6)] {
        let to = [PAGE, SAME].map(|service| vip(family, service, SocketKind::Tcp));
        for (id, to) in (1..).zip(to) {
            pod.open(id, Attempt::new(SocketKind::Tcp, to).at_port(port))?;
        }
        for (id, to) in (1..).zip(to) {
            let seen = pod.hears(id, None)?;
            ensure!(seen.server == "0/8080" && seen.peer == Some(to), "{to}: {seen:?}");
        }
    }
    Ok(())
}

/// Writes a Service with the policy Local and an endpoint on another node only: kube-proxy drops.
fn without_local_endpoint(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    put(fixture, &[(0, false)], &json!({"internalTrafficPolicy": "Local"}), &[])?;
    let attempt = Attempt::new(SocketKind::Tcp, (cluster_ip(Family::V6, NUMBER), 80).into()).in_vain();
    eventually(SOON, || {
        let list = agent::ask(&fixture.node, &["service", "list"], &fixture.bpffs())?.to_string();
        ensure!(list.contains("default/open"), "not programmed yet");
        // The endpoint of the previous round may still be there.
        ensure!(fixture.local.once(attempt)?.is_err(), "a server answers");
        Ok(())
    })
}

fn late_endpoint(fixture: &Fixture) -> Result<()> {
    let mut wrong = Vec::new();
    let pod = fixture.pod(1)?;
    let there = exposed::text(&[(0, true, State::Ready)], &json!({"internalTrafficPolicy": "Local"}), &[]);
    for (who, client) in
        [("a process of the node", &fixture.local), ("a pod", &*pod), ("packets", &fixture.client)]
    {
        for family in Family::BOTH {
            without_local_endpoint(fixture)?;
            let to = (cluster_ip(family, NUMBER), 80).into();
            let folder = &fixture.folder;
            let start = Instant::now();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(500));
                    folder.put_text(exposed::FILE, &there)
                });
                let attempt = Attempt::new(SocketKind::Tcp, to);
                let outcome = client.once(attempt)?;
                let is_shown =
                    outcome.as_ref().is_ok_and(|seen| ensure_sees_orig_dst(seen, attempt, to).is_ok());
                if !is_shown || start.elapsed() < Duration::from_millis(500) {
                    wrong.push(format!("{who} to {to}: after {:?} {outcome:?}", start.elapsed()));
                }
                Ok::<_, anyhow::Error>(())
            })?;
            // On one connected socket, a datagram before the change is lost, and the next one after it is answered.
            without_local_endpoint(fixture)?;
            let to = (cluster_ip(family, NUMBER), 53).into();
            let id = u32::from(family == Family::V6);
            let udp = client.open(id, Attempt::new(SocketKind::Udp, to).in_vain()).and_then(|()| {
                ensure!(client.talk(id, None)?.is_err(), "a server answers");
                folder.put_text(exposed::FILE, &there)?;
                eventually(SOON / 6, || client.hears(id, None))
            });
            if let Err(error) = udp {
                wrong.push(format!("{who} to {to}, UDP: {error:#}"));
            }
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

fn fails_at_once(fixture: &Fixture) -> Result<()> {
    without_local_endpoint(fixture)?;
    for client in [&fixture.local, &*fixture.pod(1)?] {
        for family in Family::BOTH {
            let start = Instant::now();
            client.fails(
                Attempt::new(SocketKind::Tcp, (cluster_ip(family, NUMBER), 80).into()),
                libc::ETIMEDOUT,
            )?;
            // A connect that waits would retransmit its first SYN after a second.
            ensure!(start.elapsed() < Duration::from_secs(1), "{family:?}: after {:?}", start.elapsed());
        }
    }
    Ok(())
}

fn status(fixture: &Fixture) -> Result<()> {
    let output = agent::command(&fixture.node, &["status"], &fixture.bpffs())?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "status exits with {}:\n{text}", output.status);
    Ok(())
}

/// Tests an address as with `NodeLocal` `DNSCache`: a device has the address of the DNS Service, and a process of the
/// node listens there.
fn owned(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    status(fixture).context("before")?;
    let ips = Family::BOTH.map(|family| cluster_ip(family, WEB.number));
    fixture.node.ip(&format!(
        "link add nodelocaldns type bridge\nlink set nodelocaldns up\n\
         addr add {}/32 dev nodelocaldns\naddr add {}/128 dev nodelocaldns nodad\n",
        ips[0], ips[1]
    ))?;
    for family in Family::BOTH {
        for kind in [SocketKind::Tcp, SocketKind::Udp] {
            fixture.outside.serve(kind.is_tcp(), vip(family, WEB, kind), "cache")?;
        }
    }
    let pod = fixture.pod(1)?;
    let clients = [("a process of the node", &fixture.local), ("a pod", &*pod), ("packets", &fixture.client)];
    let reach = |server: &str| {
        for (who, client) in clients {
            for family in Family::BOTH {
                for kind in SocketKind::ALL {
                    let attempt = Attempt { patience: 2, ..Attempt::new(kind, vip(family, WEB, kind)) };
                    eventually(SOON / 12, || {
                        let seen = client.reach(attempt)?;
                        ensure!(
                            seen.server.starts_with(server),
                            "{who}, {kind:?}: served by {}",
                            seen.server
                        );
                        ensure_sees_orig_dst(&seen, attempt, attempt.to)
                    })?;
                }
            }
        }
        Ok::<_, anyhow::Error>(())
    };
    reach("cache")?;
    // This is not a problem, and other Services work as before.
    status(fixture).context("with the device")?;
    fixture.local.reach(Attempt::new(SocketKind::Udp, vip(Family::V4, NAMES, SocketKind::Udp)))?;
    fixture.node.ip("link del nodelocaldns\n")?;
    reach("0/").context("without the device")
}

/// Returns the original destination of a redirected connection.
fn original(stream: &TcpStream, family: Family) -> Result<SocketAddr> {
    let level = if family == Family::V4 { libc::SOL_IP } else { libc::SOL_IPV6 };
    // SO_ORIGINAL_DST and IP6T_SO_ORIGINAL_DST have the same number.
    // SAFETY: all fields are plain integers.
    let mut address: libc::sockaddr_in6 = unsafe { std::mem::zeroed() };
    let mut size = size_of::<libc::sockaddr_in6>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `size` bytes to the address, which has that size.
    let result = unsafe {
        let address = (&raw mut address).cast();
        libc::getsockopt(stream.as_raw_fd(), level, libc::SO_ORIGINAL_DST, address, &raw mut size)
    };
    ensure!(result == 0, "SO_ORIGINAL_DST: {}", std::io::Error::last_os_error());
    // The port has the same offset in both families; the IPv4 address is where IPv6 has its flow info.
    let ip: IpAddr = match family {
        Family::V4 => Ipv4Addr::from(u32::from_be(address.sin6_flowinfo)).into(),
        Family::V6 => Ipv6Addr::from(address.sin6_addr.s6_addr).into(),
    };
    Ok((ip, u16::from_be(address.sin6_port)).into())
}

/// Starts a sidecar, which answers every connection, and reports the original destination of the connection.
fn sidecar(fixture: &Fixture, pod: u8, family: Family) -> Result<mpsc::Receiver<Result<SocketAddr>>> {
    let any: SocketAddr = if family == Family::V4 { "0.0.0.0:15001" } else { "[::]:15001" }.parse()?;
    let socket = fixture.in_pod(pod, || {
        let socket = socket2::Socket::new(socket2::Domain::for_address(any), socket2::Type::STREAM, None)?;
        if family == Family::V6 {
            socket.set_only_v6(true)?;
        }
        socket.bind(&any.into())?;
        socket.listen(16)?;
        Ok(socket)
    })?;
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let listener = TcpListener::from(socket);
        while let Ok((mut stream, client)) = listener.accept() {
            let original_dst = original(&stream, family);
            let mut line = String::new();
            let length = BufReader::new(&stream).read_line(&mut line).unwrap_or_default();
            let _ = writeln!(stream, "sidecar|{client}|{length}");
            if sender.send(original_dst).is_err() {
                return;
            }
        }
    });
    Ok(receiver)
}

/// Checks that sockets of pods are not translated, so that rules in a pod's namespace see the Service's address.
fn redirected(fixture: &Fixture, host_is_translated: bool) -> Result<()> {
    open_up(fixture)?;
    let sidecars = [sidecar(fixture, 1, Family::V4)?, sidecar(fixture, 1, Family::V6)?];
    fixture.in_pod_space(1, |space| {
        for (table, field, range) in [("ip", "ip", "10.96.0.0/16"), ("ip6", "ip6", "fd96::/16")] {
            nft(
                space,
                &format!(
                    "table {table} mesh {{\nchain output {{\ntype nat hook output priority -100;\n\
                 {field} daddr {range} tcp dport 80 redirect to :15001\n}}\n}}\n"
                ),
            )?;
        }
        Ok(())
    })?;
    for (family, sidecar) in Family::BOTH.into_iter().zip(&sidecars) {
        let attempt = Attempt::new(SocketKind::Tcp, vip(family, WEB, SocketKind::Tcp));
        let seen = fixture.pod(1)?.reach(attempt)?;
        ensure!(seen.server == "sidecar", "{family:?}: {} and not the sidecar", seen.server);
        let original_dst = sidecar.recv_timeout(Duration::from_secs(10))??;
        ensure!(original_dst == attempt.to, "{family:?}: SO_ORIGINAL_DST is {original_dst}");
        // The packet programs translate what the pod's rules do not match, and all packets of other pods.
        let others: [(&str, &Peer, SocketKind); 4] = [
            ("the same pod", &*fixture.pod(1)?, SocketKind::Udp),
            ("another pod", &*fixture.pod(0)?, SocketKind::Tcp),
            ("another pod", &*fixture.pod(0)?, SocketKind::Datagram),
            ("a process of the node", &fixture.local, SocketKind::Tcp),
        ];
        for (who, client, kind) in others {
            let attempt = Attempt { patience: 5, ..Attempt::new(kind, vip(family, WEB, kind)) };
            let seen = client.reach(attempt).context(who)?;
            ensure_sees_orig_dst(&seen, attempt, attempt.to).context(who)?;
            ensure!(seen.server.starts_with("0/"), "{who}: served by {}", seen.server);
        }
    }
    // A socket of the node is translated when it connects, or its packets are translated where they leave.
    let load = Load::new(Attempt::new(SocketKind::Tcp, vip(Family::V4, WEB, SocketKind::Tcp)), true);
    fixture.local.load(&[load])?;
    std::thread::sleep(Duration::from_millis(300));
    let is_followed = agent::ask(&fixture.node, &["flow", "list"], &fixture.bpffs())?
        .to_string()
        .contains("\"client\":\"10.98.0.1:");
    let tallies = fixture.local.stop()?;
    ensure!(tallies.iter().all(|tally| tally.failed == 0), "{tallies:?}");
    ensure!(
        is_followed != host_is_translated,
        "translated by the {} path",
        if is_followed { "packet" } else { "socket" }
    );
    Ok(())
}
