//! Routes: the source of SNAT behind overlays and isolated networks, replies that policy routes send to another uplink,
//! endpoints with a default route of their own, and packets that are longer than the next link allows.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd as _;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::exposed::{is_sent_on, node_ip, node_port, open_up, put, reach};
use super::{Case, client_ip, held};
use crate::fixture::{Fixture, SMALL, SMALL_XDP, SOON, Wish, eventually, nft};
use crate::peer::{Attempt, Peer, SocketKind};
use proxy_common::config::CONFIG_POLICY_ROUTES;
use proxy_testbed::Family;
use proxy_testbed::manifest::pod_ip;
use proxy_testbed::space::Space;
use proxy_user::maps::view::View;

const WISH: Wish = Wish { pods: 1, services: &[], flags: SMALL };
#[rustfmt::skip]
pub const MASQUERADE: &[&str] = &[
    "--masquerade-external", "--iptables-masquerade-bit", "20",
    "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "16384", "--max-sockets", "4096",
];

pub const CASES: &[Case] = &[
    Case { name: "routes::rule_for_the_nodes_address_moves_no_packet_with_snat", wish: WISH, run: own_rule },
    Case { name: "routes::an_endpoint_behind_an_isolated_nic_answers", wish: WISH, run: isolated },
    Case {
        name: "routes::an_endpoint_behind_an_isolated_nic_answers_by_xdp",
        wish: Wish { flags: SMALL_XDP, ..WISH },
        run: isolated,
    },
    Case { name: "routes::an_endpoint_on_an_overlay_answers_by_it", wish: WISH, run: overlay },
    Case { name: "routes::a_reply_leaves_by_the_uplink_of_its_frontend", wish: WISH, run: second_uplink },
    Case {
        name: "routes::udp_flow_continues_when_the_uplink_of_its_source_goes_down",
        wish: WISH,
        run: failover,
    },
    Case {
        name: "routes::an_endpoint_with_a_route_of_its_own_is_masqueraded",
        wish: Wish { flags: MASQUERADE, ..WISH },
        run: own_route,
    },
    Case {
        name: "routes::rules_that_set_the_whole_mark_do_not_prevent_masquerading",
        wish: Wish { flags: MASQUERADE, ..WISH },
        run: mark_set,
    },
    Case {
        name: "routes::masqueraded_connections_survive_the_deletion_of_all_rules",
        wish: Wish { flags: MASQUERADE, ..WISH },
        run: all_rules_deleted,
    },
    Case {
        name: "routes::masqueraded_connections_survive_a_restart_without_the_flag",
        wish: Wish { flags: MASQUERADE, ..WISH },
        run: flag_removed,
    },
    Case { name: "routes::a_long_datagram_is_fragmented", wish: WISH, run: fragmented },
    Case { name: "routes::a_device_that_does_not_forward_alone_forwards_ipv6", wish: WISH, run: host_device },
];

/// The number of the endpoint that is not one of the fixture's pods.
const FAR: u8 = 9;
const SIZES: [usize; 2] = [10, 1200];

/// Serves as the pod [`FAR`] in a namespace.
fn serve(space: &Space) -> Result<Peer> {
    let peer = Peer::start(space, None)?;
    for family in Family::BOTH {
        for (is_tcp, port) in [(true, 8080), (false, 5353)] {
            peer.serve(is_tcp, (pod_ip(family, FAR), port).into(), "far")?;
        }
    }
    Ok(peer)
}

/// Connects to the node port with all kinds of sockets; the endpoint has to see `source`.
fn all_see(fixture: &Fixture, source: impl Fn(Family) -> IpAddr) -> Result<()> {
    for family in Family::BOTH {
        for kind in SocketKind::ALL {
            let attempt = Attempt { patience: 5, ..Attempt::new(kind, node_port(family, kind)) };
            eventually(SOON, || {
                let seen = reach(fixture, attempt)?;
                ensure!(seen.client.ip() == source(family), "the endpoint saw {}", seen.client);
                Ok(())
            })?;
            for size in SIZES {
                reach(fixture, attempt.size(size))?;
            }
        }
        reach(fixture, Attempt::new(SocketKind::Tcp, node_port(family, SocketKind::Tcp)).size(300_000))?;
    }
    Ok(())
}

/// Returns the node's address in the network of the endpoint [`FAR`].
fn near(family: Family) -> IpAddr {
    match family {
        Family::V4 => [10, 99, FAR, 1].into(),
        Family::V6 => [0xfd99, u16::from(FAR), 0, 0, 0, 0, 0, 1].into(),
    }
}

/// The endpoint knows its own network only, without a default route.
fn isolated(fixture: &Fixture) -> Result<()> {
    let output = fixture.client_space.command("ethtool").args(["-K", "eth0", "tx", "off"]).output()?;
    ensure!(output.status.success(), "ethtool: {}", String::from_utf8_lossy(&output.stderr));
    open_up(fixture)?;
    let far = Space::new("far")?;
    fixture.node.ip(&format!(
        "link add e1 type veth peer name eth0 netns {}\nlink set e1 up\n\
         addr add {}/24 dev e1\naddr add {}/64 dev e1 nodad\n",
        far.path(),
        near(Family::V4),
        near(Family::V6)
    ))?;
    let [v4, v6] = Family::BOTH.map(|family| pod_ip(family, FAR));
    far.ip(&format!("addr add {v4}/24 dev eth0\naddr add {v6}/64 dev eth0 nodad\nlink set eth0 up\n"))?;
    let _peer = serve(&far)?;
    fixture.agent_mut()?.is_attached(&["e1".to_owned()])?;
    put(fixture, &[(FAR, false)], &json!({}), &[])?;
    all_see(fixture, near)?;
    // The others keep the node's own address.
    put(fixture, &[(0, false)], &json!({}), &[])?;
    all_see(fixture, node_ip)
}

/// The endpoint is reached by a VXLAN; the network below drops packets with its address.
fn overlay(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    let far = Space::new("far")?;
    fixture.node.join(&far, "u1", "10.97.6", "fd97:6:")?;
    for (space, device, local, remote, own) in [
        (&fixture.node, "u1", "10.97.6.1", "10.97.6.2", Family::BOTH.map(near)),
        (&far, "eth0", "10.97.6.2", "10.97.6.1", Family::BOTH.map(|family| pod_ip(family, FAR))),
    ] {
        space.ip(&format!(
            "link add vx0 type vxlan id 42 dstport 4789 local {local} remote {remote} dev {device}\nlink set vx0 up\n\
             addr add {}/24 dev vx0\naddr add {}/64 dev vx0 nodad\n",
            own[0], own[1]
        ))?;
    }
    nft(
        &far,
        &format!(
            "table inet check {{\nchain out {{\ntype filter hook output priority 0;\n\
             oifname \"eth0\" ip saddr {} drop;\noifname \"eth0\" ip6 saddr {} drop;\n}}\n}}\n",
            pod_ip(Family::V4, FAR),
            pod_ip(Family::V6, FAR)
        ),
    )?;
    let _peer = serve(&far)?;
    fixture.agent_mut()?.is_attached(&["vx0".to_owned()])?;
    put(fixture, &[(FAR, false)], &json!({}), &[])?;
    all_see(fixture, near)
}

/// The address that the pod's second uplink has.
const SECOND: [&str; 2] = ["10.96.9.1", "fd96:9::1"];

/// A rule sends all packets of the endpoint to a second uplink, whose network drops what is not from there.
fn second_uplink(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    let other = Space::new("other")?;
    fixture.node.ip(&format!(
        "link add e2 type veth peer name eth0 netns {}\nlink set e2 up\n\
         addr add {}/24 dev e2\naddr add {}/64 dev e2 nodad\n",
        other.path(),
        SECOND[0],
        SECOND[1]
    ))?;
    other.ip("link set eth0 up\naddr add 10.96.9.2/24 dev eth0\naddr add fd96:9::2/64 dev eth0 nodad\n")?;
    nft(
        &other,
        "table inet check {\nchain pre {\ntype filter hook prerouting priority 0;\n\
         ip saddr 10.98.0.0/24 drop;\nip6 saddr fd98::/64 drop;\n}\n}\n",
    )?;
    fixture.agent_mut()?.is_attached(&["e2".to_owned()])?;
    for (flag, family, via) in [("-4", Family::V4, "10.96.9.2"), ("-6", Family::V6, "fd96:9::2")] {
        fixture.node.ip(&format!("route add default via {via} dev e2 table 200\n"))?;
        let rule = format!("{flag} rule add from {} lookup 200", pod_ip(family, 0));
        let output = fixture.node.command("ip").args(rule.split(' ')).output()?;
        ensure!(output.status.success(), "ip: {}", String::from_utf8_lossy(&output.stderr));
    }
    for policy in [json!({}), json!({"externalTrafficPolicy": "Local"})] {
        put(fixture, &[(0, true)], &policy, &[])?;
        all_see(fixture, client_ip)?;
    }
    Ok(())
}

/// A rule sends what the node itself sends from its address to a table that does not know pods, as `routing-policy` of netplan.
fn own_rule(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    put(fixture, &[(0, false)], &json!({}), &[])?;
    all_see(fixture, node_ip)?;
    fixture
        .node
        .ip("route add default via 10.98.0.2 table 204\nroute add default via fd98::2 table 204\n")?;
    for (flag, family) in [("-4", Family::V4), ("-6", Family::V6)] {
        let rule = format!("{flag} rule add from {} lookup 204", node_ip(family));
        let output = fixture.node.command("ip").args(rule.split(' ')).output()?;
        ensure!(output.status.success(), "ip: {}", String::from_utf8_lossy(&output.stderr));
    }
    eventually(SOON, || {
        let config = View::open(&fixture.bpffs())?.node_config()?;
        ensure!(config.flags & CONFIG_POLICY_ROUTES != 0, "the programs do not know of rules");
        Ok(())
    })?;
    all_see(fixture, node_ip)
}

/// Two uplinks lead to the endpoint, and the routes move to the second one when the first one goes down.
fn failover(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    let far = Space::new("far")?;
    let first = Family::BOTH.map(|family| near(family).to_string());
    let there = [["10.99.9.2", "fd99:9::2"], ["10.96.9.2", "fd96:9::2"]];
    for (device, end, own, other) in
        [("e1", "eth0", [&*first[0], &*first[1]], there[0]), ("e2", "eth1", SECOND, there[1])]
    {
        let addresses = |device: &str, [v4, v6]: [&str; 2]| {
            format!(
                "link set {device} up\naddr add {v4}/24 dev {device}\naddr add {v6}/64 dev {device} nodad\n"
            )
        };
        let link = format!("link add {device} type veth peer name {end} netns {}\n", far.path());
        fixture.node.ip(&[link, addresses(device, own)].concat())?;
        far.ip(&addresses(end, other))?;
    }
    let pods = Family::BOTH.map(|family| pod_ip(family, FAR));
    far.ip(&format!("addr add {} dev lo\naddr add {} dev lo nodad\n", pods[0], pods[1]))?;
    let lead = |via: [&str; 2]| {
        let routes = pods.iter().zip(via).map(|(pod, via)| format!("route replace {pod} via {via}\n"));
        fixture.node.ip(&routes.collect::<String>())
    };
    lead(there[0])?;
    let _peer = serve(&far)?;
    fixture.agent_mut()?.is_attached(&["e1".to_owned(), "e2".to_owned()])?;
    put(fixture, &[(FAR, false)], &json!({}), &[])?;
    all_see(fixture, near)?;
    let sockets = fixture.client_space.inside(|| {
        Family::BOTH
            .into_iter()
            .map(|family| {
                let any = if family == Family::V4 { "0.0.0.0:0" } else { "[::]:0" };
                let socket = UdpSocket::bind(any)?;
                exchange(&socket, node_port(family, SocketKind::Udp), SIZES[0])?;
                Ok((family, socket))
            })
            .collect::<Result<Vec<_>>>()
    })?;
    fixture.node.ip("link set e1 down\n")?;
    lead(there[1])?;
    for (family, socket) in sockets {
        exchange(&socket, node_port(family, SocketKind::Udp), SIZES[0])
            .with_context(|| format!("{family:?}"))?;
    }
    Ok(())
}

/// Sends everything but its own network into a tunnel, in the pod.
fn lead_away(fixture: &Fixture) -> Result<()> {
    fixture.in_pod_space(0, |pod| {
        pod.ip("link add tun9 type veth peer name tun9p\nlink set tun9 up\nlink set tun9p up\n\
             route replace default dev tun9\nroute del ::/0\nroute add ::/0 dev tun9\n")
    })
}

/// Returns the node's address in the pod's network.
fn gateway(family: Family) -> IpAddr {
    match family {
        Family::V4 => [10, 99, 0, 1].into(),
        Family::V6 => [0xfd99, 0, 0, 0, 0, 0, 0, 1].into(),
    }
}

/// Rules of another program set the mark of all packets before they are routed, as wg-quick's rule and `CONNMARK --restore-mark`
/// do with the mark of the connection, and `MARK --set-mark` with a constant.
fn mark_set(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    lead_away(fixture)?;
    put(fixture, &[(0, true)], &json!({}), &[])?;
    nft(
        &fixture.node,
        "table inet vpn {\nchain pre {\ntype filter hook prerouting priority mangle;\n}\n}\n",
    )?;
    for rule in ["meta mark set ct mark", "meta mark set 2"] {
        nft(&fixture.node, &format!("flush chain inet vpn pre\nadd rule inet vpn pre {rule}\n"))?;
        all_see(fixture, gateway).context(rule)?;
    }
    let parts = [
        "type filter hook prerouting priority -199",
        "meta mark & 0x00100000 != 0x00000000 ct label set 127",
        "ct label 127 masquerade",
        "iif \"lo\" notrack",
    ];
    for (family, table) in
        ["ip", "ip6"].into_iter().flat_map(|family| ["ballast", "ballast-own"].map(|table| (family, table)))
    {
        let output = fixture.node.command("nft").args(["list", "table", family, table]).output()?;
        let rules = String::from_utf8_lossy(&output.stdout).into_owned();
        for part in parts {
            ensure!(rules.contains(part), "{family} {table} lacks `{part}`: {rules}");
        }
    }
    // The pod really sends its answers elsewhere.
    put(fixture, &[(0, true)], &json!({"externalTrafficPolicy": "Local"}), &[])?;
    for family in Family::BOTH {
        let attempt = Attempt::new(SocketKind::Tcp, node_port(family, SocketKind::Tcp)).in_vain();
        eventually(SOON, || {
            ensure!(fixture.client.once(attempt)?.is_err(), "{family:?}: masqueraded with policy Local");
            Ok(())
        })?;
    }
    Ok(())
}

/// The endpoint sends everything but its own network into a tunnel.
fn own_route(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    put(fixture, &[(0, true)], &json!({"externalTrafficPolicy": "Local"}), &[])?;
    all_see(fixture, client_ip)?;
    lead_away(fixture)?;
    // Someone else uses kube-proxy's default bit.
    nft(
        &fixture.node,
        "table inet marks {\nchain forward {\ntype filter hook forward priority 0;\nmeta mark & 0x4000 != 0 drop;\n}\n}\n",
    )?;
    // A packet that conntrack cannot masquerade never reaches the endpoint.
    for family in ["ip", "ip6"] {
        let output = fixture.node.command("nft").args(["list", "table", family, "ballast"]).output()?;
        let rules = String::from_utf8_lossy(&output.stdout).into_owned();
        let drops = |line: &str| line.contains("0x00100000") && line.contains("ct state invalid counter");
        ensure!(rules.lines().any(drops), "{family}: {rules}");
    }
    put(fixture, &[(0, true)], &json!({}), &[])?;
    all_see(fixture, gateway)?;
    // The chain FORWARD sees the client.
    nft(
        &fixture.node,
        &format!(
            "table inet check {{\nchain forward {{\ntype filter hook forward priority 0;\n\
             ip saddr {} drop;\nip6 saddr {} drop;\n}}\n}}\n",
            client_ip(Family::V4),
            client_ip(Family::V6)
        ),
    )?;
    for family in Family::BOTH {
        for kind in SocketKind::ALL {
            let attempt = Attempt::new(kind, node_port(family, kind)).in_vain();
            ensure!(fixture.client.once(attempt)?.is_err(), "{attempt:?}: past the chain FORWARD");
        }
    }
    Ok(())
}

/// With `forwarding` of one device 0 and that of `all` 1, the kernel forwards IPv6 packets, but its route lookup for programs
/// refuses.
fn host_device(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    put(fixture, &[(0, false)], &json!({}), &[])?;
    for value in ["1", "0"] {
        fixture.node.inside(|| Ok(std::fs::write("/proc/sys/net/ipv6/conf/c0/forwarding", value)?))?;
        for kind in [SocketKind::Tcp, SocketKind::Udp] {
            is_sent_on(fixture, node_port(Family::V6, kind), kind)?;
        }
    }
    Ok(())
}

/// Another program deletes all rules of netfilter (`nft flush ruleset`).
fn all_rules_deleted(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    held::put(fixture, &[(0, true)])?;
    held::serve(fixture, 0)?;
    held::hold(fixture, 100)?;
    nft(&fixture.node, "flush ruleset\n")?;
    held::nothing_is_lost(fixture, "all rules were deleted")?;
    held::hold(fixture, 100)
}

/// The next agent runs without `--masquerade-external`.
fn flag_removed(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    held::put(fixture, &[(0, true)])?;
    held::serve(fixture, 0)?;
    held::hold(fixture, 100)?;
    fixture.kill()?;
    fixture.setup().flags.retain(|flag| flag != "--masquerade-external");
    fixture.begin()?;
    held::nothing_is_lost(fixture, "nothing is masqueraded any more").map(drop)
}

/// A datagram that the sender lets routers cut, to an endpoint behind a narrow link.
fn fragmented(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    put(fixture, &[(0, false)], &json!({}), &[])?;
    let to = node_port(Family::V4, SocketKind::Udp);
    is_sent_on(fixture, to, SocketKind::Udp)?;
    fixture.node.ip("link set p0 mtu 1300\n")?;
    let socket = fixture.client_space.inside(|| Ok(UdpSocket::bind("0.0.0.0:0")?))?;
    may_be_cut(&socket)?;
    // One packet; two fragments, of which the second is short enough; three.
    for size in [1400, 2000, 4000] {
        exchange(&socket, to, size)?;
    }
    Ok(())
}

/// Sends a message of this size until the endpoint answers; the answer ends in the length that arrived.
fn exchange(socket: &UdpSocket, to: SocketAddr, size: usize) -> Result<()> {
    socket.set_read_timeout(Some(Duration::from_secs(1)))?;
    eventually(SOON, || {
        socket.send_to(&vec![b'x'; size], to)?;
        let mut answer = [0; 2048];
        let (length, from) = socket.recv_from(&mut answer).context("no answer")?;
        let answer = String::from_utf8_lossy(&answer[..length]);
        ensure!(from == to && answer.ends_with(&format!("|{size}")), "{answer} from {from}, {size} bytes");
        Ok(())
    })
}

fn may_be_cut(socket: &UdpSocket) -> Result<()> {
    let (never, size) = (libc::IP_PMTUDISC_DONT, size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: the kernel reads one integer.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_IP,
            libc::IP_MTU_DISCOVER,
            (&raw const never).cast(),
            size,
        )
    };
    ensure!(result == 0, "IP_MTU_DISCOVER: {}", std::io::Error::last_os_error());
    Ok(())
}
