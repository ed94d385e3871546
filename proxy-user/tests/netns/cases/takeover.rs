//! From kube-proxy to Ballast on a live node, and back, with rules like kube-proxy's, made by its own tools.
//!
//! kube-proxy's rules lead to pod 1, and Ballast's Service leads to pod 0, so the server shows which proxy translates a
//! connection.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use proxy_common::config::CONFIG_OTHER_PROXY;
use proxy_user::maps::view::View;
use serde_json::json;

use super::exposed::{node_port, open_up, put};
use super::{Case, WEB, ensure_no_syn_lost, vip};
use crate::agent;
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually, feed, nft};
use crate::peer::{Attempt, Load, SocketKind, Tally};
use proxy_testbed::Family;

const WISH: Wish = Wish { pods: 2, services: &[WEB], flags: SMALL };

pub const CASES: &[Case] = &[
    Case { name: "takeover::from_nftables_and_back", wish: WISH, run: from_nftables },
    Case { name: "takeover::from_iptables_and_back", wish: WISH, run: from_iptables },
    Case { name: "takeover::legacy_iptables_is_reported", wish: WISH, run: legacy },
    Case { name: "takeover::obstacles_are_reported", wish: WISH, run: in_its_way },
];

/// Template of the nftables mode's rules for both families: `pkg/proxy/nftables/proxier_test.go`, without counters and comments.
const NFTABLES: &str = "
table FAMILY kube-proxy {
  chain service-ULMVA6XW-default/web/tcp/tcp { meta l4proto tcp dnat to POD; }
  map service-ips {
    type ADDRESS . inet_proto . inet_service : verdict
    elements = { VIP . tcp . 80 : goto service-ULMVA6XW-default/web/tcp/tcp }
  }
  chain services { FAMILY daddr . meta l4proto . th dport vmap @service-ips; }
  chain nat-prerouting { type nat hook prerouting priority dstnat; jump services; }
  chain nat-output { type nat hook output priority -100; jump services; }
  chain masquerading { meta mark & 0x4000 != 0 masquerade fully-random; }
  chain nat-postrouting { type nat hook postrouting priority srcnat; jump masquerading; }
  chain filter-forward { type filter hook forward priority -110; ct state new accept; }
}
";

/// Template of the iptables mode's rules, as `iptables-restore` reads them, with a foreign chain and rule.
const IPTABLES: &str = "*filter
:KUBE-FORWARD - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-FIREWALL - [0:0]
-A FORWARD -m conntrack --ctstate NEW -j KUBE-PROXY-FIREWALL
-A FORWARD -m comment --comment \"kubernetes forwarding rules\" -j KUBE-FORWARD
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
-A INPUT -j KUBE-FIREWALL
COMMIT
*nat
:KUBE-SERVICES - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-SVC-ULMVA6XWBM2CHRJL - [0:0]
:KUBE-SEP-6E5UQQA4PW2LJTVI - [0:0]
:CNI-HOSTPORT - [0:0]
-A PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES
-A OUTPUT -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment \"kubernetes postrouting rules\" -j KUBE-POSTROUTING
-A PREROUTING -j CNI-HOSTPORT
-A CNI-HOSTPORT -s 192.0.2.0/24 -j KUBE-MARK-MASQ
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MASQUERADE
-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000
-A KUBE-SERVICES -d VIP -p tcp -m tcp --dport 80 -j KUBE-SVC-ULMVA6XWBM2CHRJL
-A KUBE-SVC-ULMVA6XWBM2CHRJL -j KUBE-SEP-6E5UQQA4PW2LJTVI
-A KUBE-SEP-6E5UQQA4PW2LJTVI -p tcp -m tcp -j DNAT --to-destination POD
COMMIT
";

/// Returns the rules that `nft` lists on the node.
pub fn ruleset(fixture: &Fixture) -> Result<String> {
    let output = fixture.node.command("nft").args(["list", "ruleset"]).output()?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn nftables(fixture: &Fixture) -> Result<()> {
    for family in Family::BOTH {
        let (name, address, pod) = match family {
            Family::V4 => ("ip", "ipv4_addr", super::pod(family, 1, SocketKind::Tcp).to_string()),
            Family::V6 => ("ip6", "ipv6_addr", super::pod(family, 1, SocketKind::Tcp).to_string()),
        };
        let text = NFTABLES.replace("FAMILY", name).replace("ADDRESS", address).replace("POD", &pod);
        nft(&fixture.node, &text.replace("VIP", &vip(family, WEB, SocketKind::Tcp).ip().to_string()))?;
    }
    Ok(())
}

fn iptables(fixture: &Fixture) -> Result<()> {
    iptables_by(fixture, ["iptables-nft-restore", "ip6tables-nft-restore"])
}

fn iptables_by(fixture: &Fixture, tools: [&str; 2]) -> Result<()> {
    for (family, tool) in Family::BOTH.into_iter().zip(tools) {
        let text = IPTABLES.replace("POD", &super::pod(family, 1, SocketKind::Tcp).to_string());
        let text = text.replace("VIP", &vip(family, WEB, SocketKind::Tcp).ip().to_string());
        let text = if family == Family::V6 { text.replace("192.0.2.0/24", "2001:db8::/32") } else { text };
        feed(&fixture.node, &[tool, "--noflush"], &text)?;
    }
    Ok(())
}

/// Removes Ballast from the node; returns the output of the command.
fn remove_ballast(fixture: &Fixture) -> Result<String> {
    fixture.kill()?;
    let cgroup = fixture.cgroup().display().to_string();
    let output = agent::command(&fixture.node, &["cleanup", "--cgroup-root", &cgroup], &fixture.bpffs())?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn attempts() -> [Attempt; 2] {
    Family::BOTH.map(|family| Attempt::new(SocketKind::Tcp, vip(family, WEB, SocketKind::Tcp)))
}

/// Returns two loads for each attempt: one connection that stays open, and new connections one after the other.
fn loads(attempts: &[Attempt]) -> Vec<Load> {
    let both = |attempt: &Attempt| [true, false].map(|is_one_socket| Load::new(*attempt, is_one_socket));
    attempts.iter().flat_map(both).collect()
}

/// Checks that every client of the Service now reaches this server.
fn all_reach(fixture: &Fixture, server: &str) -> Result<()> {
    for attempt in attempts() {
        for client in [&fixture.client, &*fixture.pod(0)?] {
            let seen = client.reach(attempt)?;
            ensure!(seen.server == server, "{attempt:?} reaches {}", seen.server);
        }
    }
    Ok(())
}

/// Checks that open connections have stayed with their server, and no new one failed.
fn no_client_noticed(tallies: &[Tally], loads: &[Load], stays: &str, who: &str) -> Result<()> {
    for (tally, load) in tallies.iter().zip(loads) {
        let what = format!("{who}, {load:?}: {tally:?}");
        ensure!(tally.failed == 0, "failures: {what}");
        ensure!(tally.servers.values().sum::<u64>() > 10, "few answers: {what}");
        let stayed = tally.servers.keys().eq([stays]);
        ensure!(!load.is_one_socket || stayed, "a connection moved: {what}");
    }
    Ok(())
}

/// Runs `ballast takeover`; returns its output, and whether it succeeded.
pub fn takeover(fixture: &Fixture, flags: &[&str]) -> Result<(String, bool)> {
    let arguments: Vec<_> = ["takeover"].iter().chain(flags).copied().collect();
    let output = agent::command(&fixture.node, &arguments, &fixture.bpffs())?;
    let said = [output.stdout, output.stderr].concat();
    Ok((String::from_utf8_lossy(&said).into_owned(), output.status.success()))
}

fn leaves_old(fixture: &Fixture) -> Result<bool> {
    Ok(View::open(&fixture.bpffs())?.node_config()?.flags & CONFIG_OTHER_PROXY != 0)
}

/// Changes from kube-proxy's rules to Ballast under load, until none of the rules is left. `stop` is called when
/// Ballast serves, and `more` are what the client connects to besides the Service's addresses.
pub fn through(
    fixture: &Fixture,
    install: impl Fn(&Fixture) -> Result<()>,
    stop: impl FnOnce() -> Result<()>,
    more: &[Attempt],
) -> Result<()> {
    remove_ballast(fixture)?;
    install(fixture)?;
    all_reach(fixture, "1/8080").context("kube-proxy's rules do not work")?;
    let of_pod = loads(&attempts());
    let of_client = [of_pod.clone(), loads(more)].concat();
    fixture.client.load(&of_client)?;
    fixture.pod(0)?.load(&of_pod)?;
    std::thread::sleep(Duration::from_millis(300));

    fixture.begin()?;
    fixture.agent_mut()?.says(&["WARN", "this node has kube-proxy rules"])?;
    ensure!(leaves_old(fixture)?, "the programs do not know of old connections");
    all_reach(fixture, "0/8080").context("new connections are not Ballast's")?;
    let status = agent::command(&fixture.node, &["status"], &fixture.bpffs())?;
    let status = String::from_utf8_lossy(&status.stdout).into_owned();
    ensure!(status.contains("the node has kube-proxy rules"), "{status}");

    stop()?;
    // Only the number of lines is compared: the rules' counters change under load.
    let lines = |fixture: &Fixture| Ok::<_, anyhow::Error>(ruleset(fixture)?.lines().count());
    let before = lines(fixture)?;
    let (said, _) = takeover(fixture, &["--dry-run"])?;
    ensure!(said.contains("would remove") && lines(fixture)? == before, "{said}");
    let (said, well) = takeover(fixture, &[])?;
    let stay = of_client.iter().chain(&of_pod).filter(|load| load.is_one_socket).count();
    let began = format!("\n{stay} connections that kube-proxy began");
    ensure!(well && said.contains("removed") && said.contains(&began), "{said}");
    let after = ruleset(fixture)?;
    ensure!(!after.contains("table ip kube-proxy") && !after.contains("KUBE-SVC"), "{after}");
    std::thread::sleep(Duration::from_millis(500));
    no_client_noticed(&fixture.client.stop()?, &of_client, "1/8080", "client")?;
    no_client_noticed(&fixture.pod(0)?.stop()?, &of_pod, "1/8080", "pod")?;

    let (said, well) = takeover(fixture, &["--wait", "60s"])?;
    ensure!(well && said.contains("done"), "{said}");
    ensure!(!ruleset(fixture)?.contains("ballast-takeover"), "{}", ruleset(fixture)?);
    eventually(SOON, || {
        ensure!(!leaves_old(fixture)?, "old connections are still left alone");
        Ok(())
    })?;
    all_reach(fixture, "0/8080")?;
    let (said, well) = takeover(fixture, &[])?;
    ensure!(well && said.contains("no kube-proxy rules"), "{said}");
    Ok(())
}

fn from_nftables(fixture: &Fixture) -> Result<()> {
    through(fixture, nftables, || Ok(()), &[])?;
    ensure!(!ruleset(fixture)?.contains("kube-proxy"), "{}", ruleset(fixture)?);
    back(fixture, nftables)
}

/// Changes from Ballast to rules in netfilter, under load. Connections that Ballast began stay with their endpoint on every path:
/// from a socket, packet by packet, and under the node's address to another node. No connection that begins meanwhile is lost.
pub fn back(fixture: &Fixture, install: impl Fn(&Fixture) -> Result<()>) -> Result<()> {
    open_up(fixture)?;
    put(fixture, &[(0, false)], &json!({}), &[])?;
    let far = Family::BOTH.map(|family| Attempt::new(SocketKind::Tcp, node_port(family, SocketKind::Tcp)));
    for attempt in far {
        eventually(SOON, || fixture.client.reach(attempt))?;
    }
    let stays = |attempt| Load::new(attempt, true);
    let of_client = loads(&attempts());
    fixture.client.load(&[of_client.clone(), far.map(stays).to_vec()].concat())?;
    let pod = fixture.pod(1)?;
    pod.load(&attempts().map(stays))?;
    std::thread::sleep(Duration::from_millis(500));
    install(fixture)?;
    std::thread::sleep(Duration::from_millis(200));
    let said = remove_ballast(fixture)?;
    std::thread::sleep(Duration::from_millis(2500));
    let tallies = fixture.client.stop()?;
    let (near, far) = tallies.split_at(of_client.len());
    no_client_noticed(near, &of_client, "0/8080", "client")?;
    near.iter().try_for_each(|tally| ensure_no_syn_lost(tally, "one proxy or the other serves each SYN"))?;
    for tally in pod.stop()?.iter().chain(far) {
        ensure!(tally.failed == 0 && tally.servers.keys().eq(["0/8080"]), "a connection moved: {tally:?}");
    }
    ensure!(said.contains("connections of the packet path moved to nf_conntrack"), "{said}");
    ensure!(!ruleset(fixture)?.contains("ballast"), "{}", ruleset(fixture)?);
    all_reach(fixture, "1/8080")
}

fn from_iptables(fixture: &Fixture) -> Result<()> {
    through(fixture, iptables, || Ok(()), &[])?;
    let left = ruleset(fixture)?;
    for theirs in ["CNI-HOSTPORT", "KUBE-FIREWALL", "KUBE-MARK-MASQ"] {
        ensure!(left.contains(theirs), "{theirs} is gone: {left}");
    }
    for ours in ["KUBE-SERVICES", "KUBE-SEP", "KUBE-POSTROUTING", "KUBE-FORWARD", "KUBE-PROXY-FIREWALL"] {
        ensure!(!left.contains(ours), "{ours} is still there: {left}");
    }
    back(fixture, iptables)
}

/// Tests rules of legacy iptables, which nftables does not show: Ballast reports them, and leaves them to their owner.
fn legacy(fixture: &Fixture) -> Result<()> {
    remove_ballast(fixture)?;
    iptables_by(fixture, ["iptables-legacy-restore", "ip6tables-legacy-restore"])?;
    ensure!(!ruleset(fixture)?.contains("KUBE-"), "they are not legacy");
    all_reach(fixture, "1/8080").context("kube-proxy's rules do not work")?;
    fixture.begin()?;
    fixture.agent_mut()?.says(&[
        "WARN",
        "this node has kube-proxy rules",
        "chains in ip nat of iptables-legacy",
    ])?;
    ensure!(leaves_old(fixture)?, "the programs do not know of old connections");
    all_reach(fixture, "0/8080").context("new connections are not Ballast's")?;
    let (said, well) = takeover(fixture, &[])?;
    ensure!(!well && said.contains("iptables-legacy") && said.contains("kube-proxy --cleanup"), "{said}");
    // The way back is the same as in the other cases.
    back(fixture, |_| Ok(()))
}

fn in_its_way(fixture: &Fixture) -> Result<()> {
    nftables(fixture)?;
    fixture.kill()?;
    let (said, well) = takeover(fixture, &[])?;
    ensure!(!well && said.contains("is not ready on this node"), "{said}");
    fixture.begin()?;
    // A process with this name is enough: Ballast does not read its program.
    let sleeper = fixture.bpffs().with_file_name("kube-proxy");
    agent::copy_program("/bin/sleep".as_ref(), &sleeper)?;
    let mut running = fixture.node.command(&sleeper).arg("60").spawn()?;
    let refused = eventually(SOON, || {
        let (said, well) = takeover(fixture, &["--dry-run"])?;
        ensure!(well, "{said}");
        let comm = std::fs::read_to_string(format!("/proc/{}/comm", running.id()))?;
        ensure!(comm.trim() == "kube-proxy", "not started yet");
        takeover(fixture, &[])
    });
    running.kill()?;
    running.wait()?;
    let (said, well) = refused?;
    ensure!(!well && said.contains("kube-proxy is still running on this node"), "{said}");
    ensure!(ruleset(fixture)?.contains("table ip kube-proxy"), "removed all the same");
    let (said, well) = takeover(fixture, &[])?;
    ensure!(well && said.contains("done"), "{said}");
    Ok(())
}
