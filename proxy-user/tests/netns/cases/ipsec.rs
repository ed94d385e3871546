//! IPsec policies of the kernel (xfrm): what the programs forward obeys them, too. `action block` stands for "encrypt", as
//! it needs no ESP: a packet that reaches its destination has passed the policy by.

use std::collections::BTreeMap;
use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::exposed::{is_sent_on, node_ip, node_port, open_up, put, reach};
use super::routes::MASQUERADE;
use super::{Case, client_ip};
use crate::fixture::{Fixture, SMALL, SMALL_XDP, SOON, Wish, eventually, nft};
use crate::peer::{Attempt, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::pod_ip;

const WISH: Wish = Wish { pods: 1, services: &[], flags: SMALL };

pub const CASES: &[Case] = &[
    Case { name: "ipsec::a_node_port_obeys_a_policy", wish: WISH, run: forwarded },
    Case {
        name: "ipsec::a_node_port_obeys_a_policy_by_xdp",
        wish: Wish { flags: SMALL_XDP, ..WISH },
        run: forwarded,
    },
    Case {
        name: "ipsec::rules_that_drop_invalid_packets_let_those_on_lo_pass",
        wish: Wish { flags: MASQUERADE, ..WISH },
        run: |fixture| {
            // As hardened nodes have it.
            nft(
                &fixture.node,
                "table inet hardened {\nchain forward {\ntype filter hook forward priority 0;\nct state invalid drop\n}\n}\n",
            )?;
            forwarded(fixture)
        },
    },
    Case { name: "ipsec::the_answer_of_a_local_endpoint_obeys", wish: WISH, run: answers },
    Case { name: "ipsec::the_agent_subscribes_to_changes_of_policies", wish: WISH, run: subscribed },
];

/// Returns process id and groups of the subscriptions to IPsec in the node's network namespace (`NETLINK_XFRM` is 6).
fn subscriptions(fixture: &Fixture) -> Result<BTreeMap<u32, u32>> {
    let output = fixture.node.command("cat").arg("/proc/net/netlink").output()?;
    let row = |line: &str| {
        let columns: Vec<_> = line.split_whitespace().collect();
        let [_, "6", process, groups, ..] = columns[..] else { return None };
        Some((process.parse().ok()?, u32::from_str_radix(groups, 16).ok()?))
    };
    let rows = String::from_utf8_lossy(&output.stdout);
    Ok(rows.lines().filter_map(row).filter(|(_, groups)| *groups != 0).collect())
}

/// Without notifications, a policy would take effect with the next periodic read.
fn subscribed(fixture: &Fixture) -> Result<()> {
    let of_agent: Vec<_> = subscriptions(fixture)?.into_values().collect();
    let mut monitor =
        fixture.node.command("ip").args(["xfrm", "monitor", "policy"]).stdout(Stdio::null()).spawn()?;
    let found = eventually(SOON, || {
        let all = subscriptions(fixture)?;
        ensure!(all.len() > of_agent.len(), "{all:?}");
        Ok(all)
    });
    monitor.kill()?;
    monitor.wait()?;
    let wanted = found?.get(&monitor.id()).copied().context("`ip xfrm monitor` has no subscription")?;
    ensure!(of_agent.iter().any(|groups| groups & wanted == wanted), "agent {of_agent:x?}, ip {wanted:x}");
    Ok(())
}

/// Adds, updates or deletes the policies from the node to `to`.
fn policies(fixture: &Fixture, verb: &str, to: fn(Family) -> String, action: &str) -> Result<()> {
    let lines = Family::BOTH.map(|family| {
        format!(
            "xfrm policy {verb} dir out src {}/{} dst {} {action}\n",
            node_ip(family),
            bits(family),
            to(family)
        )
    });
    fixture.node.ip(&lines.concat())
}

fn bits(family: Family) -> u8 {
    if family == Family::V4 { 32 } else { 128 }
}

/// Waits until exchanges by all kinds of sockets fail.
fn is_blocked(fixture: &Fixture) -> Result<()> {
    for family in Family::BOTH {
        for kind in SocketKind::ALL {
            let attempt = Attempt::new(kind, node_port(family, kind)).in_vain();
            eventually(SOON, || {
                let outcome = fixture.client.once(attempt)?;
                ensure!(outcome.is_err(), "{attempt:?} passed the policy by: {outcome:?}");
                Ok(())
            })?;
        }
    }
    Ok(())
}

/// The policy is one for the packets that the node forwards to an endpoint on another node.
fn forwarded(fixture: &Fixture) -> Result<()> {
    let output = fixture.client_space.command("ethtool").args(["-K", "eth0", "tx", "off"]).output()?;
    ensure!(output.status.success(), "ethtool: {}", String::from_utf8_lossy(&output.stderr));
    open_up(fixture)?;
    put(fixture, &[(0, false)], &json!({}), &[])?;
    for (id, family) in (0..).zip(Family::BOTH) {
        is_sent_on(fixture, node_port(family, SocketKind::Tcp), SocketKind::Tcp)?;
        let attempt =
            Attempt { patience: 1, ..Attempt::new(SocketKind::Tcp, node_port(family, SocketKind::Tcp)) };
        eventually(SOON, || fixture.client.open(id, attempt))?;
    }
    let pods = |family| format!("{}/{}", pod_ip(family, 0), bits(family));
    policies(fixture, "add", pods, "action block")?;
    is_blocked(fixture)?;
    for (id, family) in (0..).zip(Family::BOTH) {
        ensure!(
            fixture.client.talk(id, None)?.is_err(),
            "{family:?}: the open connection passes the policy by"
        );
    }
    // The stack forwards what a policy allows, from the same source port as before.
    nft(
        &fixture.node,
        "table inet seen {\nchain forward {\ntype filter hook forward priority 0;\niif lo counter comment \"stack\"\n}\n}\n",
    )?;
    policies(fixture, "update", pods, "action allow")?;
    for (id, family) in (0..).zip(Family::BOTH) {
        eventually(SOON, || fixture.client.hears(id, None))?;
        for kind in SocketKind::ALL {
            is_sent_on(fixture, node_port(family, kind), kind)?;
            reach(fixture, Attempt::new(kind, node_port(family, kind)).size(1400))?;
        }
        reach(fixture, Attempt::new(SocketKind::Tcp, node_port(family, SocketKind::Tcp)).size(300_000))?;
    }
    let seen = fixture.node.command("nft").args(["list", "table", "inet", "seen"]).output()?;
    let seen = String::from_utf8_lossy(&seen.stdout).into_owned();
    ensure!(seen.contains("counter packets") && !seen.contains("packets 0 "), "{seen}");
    policies(fixture, "delete", pods, "")?;
    for family in Family::BOTH {
        is_sent_on(fixture, node_port(family, SocketKind::Tcp), SocketKind::Tcp)?;
    }
    Ok(())
}

/// The policy is one for packets of the node to the client: the answers of an endpoint of this node become such packets only
/// at the hook where they leave.
fn answers(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    put(fixture, &[(0, true)], &json!({}), &[])?;
    let all_work = || {
        for family in Family::BOTH {
            for kind in SocketKind::ALL {
                let attempt = Attempt { patience: 5, ..Attempt::new(kind, node_port(family, kind)) };
                let seen = eventually(SOON, || reach(fixture, attempt))?;
                ensure!(seen.client.ip() == client_ip(family), "the pod saw {}", seen.client);
            }
        }
        Ok(())
    };
    all_work()?;
    let client = |family| format!("{}/{}", client_ip(family), bits(family));
    policies(fixture, "add", client, "action block")?;
    is_blocked(fixture)?;
    policies(fixture, "update", client, "action allow")?;
    all_work()?;
    // Refusals obey, too.
    put(fixture, &[], &json!({}), &[])?;
    for family in Family::BOTH {
        let attempt = Attempt::new(SocketKind::Tcp, node_port(family, SocketKind::Tcp));
        eventually(SOON, || fixture.client.fails(attempt, libc::ECONNREFUSED).map(drop))?;
    }
    policies(fixture, "update", client, "action block")?;
    is_blocked(fixture)?;
    for family in Family::BOTH {
        let attempt = Attempt::new(SocketKind::Tcp, node_port(family, SocketKind::Tcp)).in_vain();
        eventually(SOON, || {
            let errno = fixture.client.once(attempt)?.err().and_then(|failure| failure.errno);
            ensure!(errno != Some(libc::ECONNREFUSED), "the refusal passed the policy by");
            Ok(())
        })?;
    }
    Ok(())
}
