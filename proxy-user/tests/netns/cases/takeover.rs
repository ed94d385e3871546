//! From kube-proxy to Ballast on a live node, and back: rules shaped as kube-proxy's, made by its own tools.
//!
//! kube-proxy's rules lead to pod 1, and Ballast's Service to pod 0: who serves a connection shows who translates it.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use proxy_common::config::CONFIG_OTHER_PROXY;
use proxy_user::maps::view::View;
use serde_json::json;

use super::exposed::{node_port, open_up, put};
use super::{Case, WEB, lost_no_syn, vip};
use crate::agent;
use crate::lab::{Lab, SMALL, SOON, Wish, eventually, feed, nft};
use crate::manifest::Family;
use crate::peer::{Attempt, Kind, Load, Tally};

const WISH: Wish = Wish { pods: 2, services: &[WEB], flags: SMALL };

pub const CASES: &[Case] = &[
    Case { name: "takeover::from_nftables_and_back", wish: WISH, run: from_nftables },
    Case { name: "takeover::from_iptables_and_back", wish: WISH, run: from_iptables },
    Case { name: "takeover::legacy_iptables_is_told", wish: WISH, run: legacy },
    Case { name: "takeover::what_stands_in_its_way", wish: WISH, run: in_its_way },
];

/// The nftables mode, for both families: `pkg/proxy/nftables/proxier_test.go`, without counters and comments.
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

/// The iptables mode, as `iptables-restore` reads it, with a foreign chain and rule.
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

/// What `nft` lists on the node.
pub fn ruleset(lab: &Lab) -> Result<String> {
    let output = lab.node.command("nft").args(["list", "ruleset"]).output()?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn nftables(lab: &Lab) -> Result<()> {
    for family in Family::BOTH {
        let (name, address, pod) = match family {
            Family::V4 => ("ip", "ipv4_addr", super::pod(family, 1, Kind::Tcp).to_string()),
            Family::V6 => ("ip6", "ipv6_addr", super::pod(family, 1, Kind::Tcp).to_string()),
        };
        let text = NFTABLES.replace("FAMILY", name).replace("ADDRESS", address).replace("POD", &pod);
        nft(&lab.node, &text.replace("VIP", &vip(family, WEB, Kind::Tcp).ip().to_string()))?;
    }
    Ok(())
}

fn iptables(lab: &Lab) -> Result<()> {
    iptables_by(lab, ["iptables-nft-restore", "ip6tables-nft-restore"])
}

fn iptables_by(lab: &Lab, tools: [&str; 2]) -> Result<()> {
    for (family, tool) in Family::BOTH.into_iter().zip(tools) {
        let text = IPTABLES.replace("POD", &super::pod(family, 1, Kind::Tcp).to_string());
        let text = text.replace("VIP", &vip(family, WEB, Kind::Tcp).ip().to_string());
        let text = if family == Family::V6 { text.replace("192.0.2.0/24", "2001:db8::/32") } else { text };
        feed(&lab.node, &[tool, "--noflush"], &text)?;
    }
    Ok(())
}

/// Takes Ballast off the node; returns what that says.
fn remove_ballast(lab: &Lab) -> Result<String> {
    lab.kill()?;
    let cgroup = lab.cgroup().display().to_string();
    let output = agent::command(&lab.node, &["cleanup", "--cgroup-root", &cgroup], &lab.bpffs())?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn attempts() -> [Attempt; 2] {
    Family::BOTH.map(|family| Attempt::new(Kind::Tcp, vip(family, WEB, Kind::Tcp)))
}

/// One connection that stays and one after the other, each way.
fn loads(attempts: &[Attempt]) -> Vec<Load> {
    let both = |attempt: &Attempt| [true, false].map(|is_one_socket| Load::new(*attempt, is_one_socket));
    attempts.iter().flat_map(both).collect()
}

/// Every client of the Service now reaches this pod.
fn all_reach(lab: &Lab, server: &str) -> Result<()> {
    for attempt in attempts() {
        for client in [&lab.client, &*lab.pod(0)?] {
            let seen = client.reach(attempt)?;
            ensure!(seen.server == server, "{attempt:?} reaches {}", seen.server);
        }
    }
    Ok(())
}

/// Connections that stay have stayed where they were, and no new one failed.
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

/// `ballast takeover`; what it says, and whether it succeeded.
pub fn takeover(lab: &Lab, flags: &[&str]) -> Result<(String, bool)> {
    let arguments: Vec<_> = ["takeover"].iter().chain(flags).copied().collect();
    let output = agent::command(&lab.node, &arguments, &lab.bpffs())?;
    let said = [output.stdout, output.stderr].concat();
    Ok((String::from_utf8_lossy(&said).into_owned(), output.status.success()))
}

fn leaves_old(lab: &Lab) -> Result<bool> {
    Ok(View::open(&lab.bpffs())?.node_config()?.flags & CONFIG_OTHER_PROXY != 0)
}

/// From kube-proxy's rules, under load, to nothing of them. `stop` is called when Ballast serves, and `more` are what
/// the client dials beside the Service's addresses.
pub fn through(
    lab: &Lab,
    install: impl Fn(&Lab) -> Result<()>,
    stop: impl FnOnce() -> Result<()>,
    more: &[Attempt],
) -> Result<()> {
    remove_ballast(lab)?;
    install(lab)?;
    all_reach(lab, "1/8080").context("kube-proxy's rules do not work")?;
    let of_pod = loads(&attempts());
    let of_client = [of_pod.clone(), loads(more)].concat();
    lab.client.load(&of_client)?;
    lab.pod(0)?.load(&of_pod)?;
    std::thread::sleep(Duration::from_millis(300));

    lab.begin()?;
    lab.agent_mut()?.says(&["WARN", "kube-proxy's rules are here"])?;
    ensure!(leaves_old(lab)?, "the programs do not know of old connections");
    all_reach(lab, "0/8080").context("new connections are not Ballast's")?;
    let status = agent::command(&lab.node, &["status"], &lab.bpffs())?;
    let status = String::from_utf8_lossy(&status.stdout).into_owned();
    ensure!(status.contains("kube-proxy's rules are still here"), "{status}");

    stop()?;
    // Counters change while it runs.
    let lines = |lab: &Lab| Ok::<_, anyhow::Error>(ruleset(lab)?.lines().count());
    let before = lines(lab)?;
    let (said, _) = takeover(lab, &["--dry-run"])?;
    ensure!(said.contains("would remove") && lines(lab)? == before, "{said}");
    let (said, well) = takeover(lab, &[])?;
    let stay = of_client.iter().chain(&of_pod).filter(|load| load.is_one_socket).count();
    let began = format!("\n{stay} connections that kube-proxy began");
    ensure!(well && said.contains("removed") && said.contains(&began), "{said}");
    let after = ruleset(lab)?;
    ensure!(!after.contains("table ip kube-proxy") && !after.contains("KUBE-SVC"), "{after}");
    std::thread::sleep(Duration::from_millis(500));
    no_client_noticed(&lab.client.stop()?, &of_client, "1/8080", "client")?;
    no_client_noticed(&lab.pod(0)?.stop()?, &of_pod, "1/8080", "pod")?;

    let (said, well) = takeover(lab, &["--wait", "60s"])?;
    ensure!(well && said.contains("done"), "{said}");
    ensure!(!ruleset(lab)?.contains("ballast-takeover"), "{}", ruleset(lab)?);
    eventually(
        SOON,
        || if leaves_old(lab)? { bail!("old connections are still left alone") } else { Ok(()) },
    )?;
    all_reach(lab, "0/8080")?;
    let (said, well) = takeover(lab, &[])?;
    ensure!(well && said.contains("no rules of kube-proxy"), "{said}");
    Ok(())
}

fn from_nftables(lab: &Lab) -> Result<()> {
    through(lab, nftables, || Ok(()), &[])?;
    ensure!(!ruleset(lab)?.contains("kube-proxy"), "{}", ruleset(lab)?);
    back(lab, nftables)
}

/// From Ballast to rules in netfilter, under load. What Ballast began stays where it is, whichever way it goes: from a
/// socket, packet by packet, and under the node's address to another node. Nothing that begins meanwhile is lost.
pub fn back(lab: &Lab, install: impl Fn(&Lab) -> Result<()>) -> Result<()> {
    open_up(lab)?;
    put(lab, &[(0, false)], &json!({}), &[])?;
    let far = Family::BOTH.map(|family| Attempt::new(Kind::Tcp, node_port(family, Kind::Tcp)));
    for attempt in far {
        eventually(SOON, || lab.client.reach(attempt))?;
    }
    let stays = |attempt| Load::new(attempt, true);
    let of_client = loads(&attempts());
    lab.client.load(&[of_client.clone(), far.map(stays).to_vec()].concat())?;
    let pod = lab.pod(1)?;
    pod.load(&attempts().map(stays))?;
    std::thread::sleep(Duration::from_millis(500));
    install(lab)?;
    std::thread::sleep(Duration::from_millis(200));
    let said = remove_ballast(lab)?;
    std::thread::sleep(Duration::from_millis(2500));
    let tallies = lab.client.stop()?;
    let (near, far) = tallies.split_at(of_client.len());
    no_client_noticed(near, &of_client, "0/8080", "client")?;
    near.iter().try_for_each(|tally| lost_no_syn(tally, "one proxy or the other serves each SYN"))?;
    for tally in pod.stop()?.iter().chain(far) {
        ensure!(tally.failed == 0 && tally.servers.keys().eq(["0/8080"]), "a connection moved: {tally:?}");
    }
    ensure!(said.contains("connections of the packet path go on"), "{said}");
    ensure!(!ruleset(lab)?.contains("ballast"), "{}", ruleset(lab)?);
    all_reach(lab, "1/8080")
}

fn from_iptables(lab: &Lab) -> Result<()> {
    through(lab, iptables, || Ok(()), &[])?;
    let left = ruleset(lab)?;
    for theirs in ["CNI-HOSTPORT", "KUBE-FIREWALL", "KUBE-MARK-MASQ"] {
        ensure!(left.contains(theirs), "{theirs} is gone: {left}");
    }
    for ours in ["KUBE-SERVICES", "KUBE-SEP", "KUBE-POSTROUTING", "KUBE-FORWARD", "KUBE-PROXY-FIREWALL"] {
        ensure!(!left.contains(ours), "{ours} is still there: {left}");
    }
    back(lab, iptables)
}

/// nftables does not show what this makes; it is told, and left to who made it.
fn legacy(lab: &Lab) -> Result<()> {
    remove_ballast(lab)?;
    iptables_by(lab, ["iptables-legacy-restore", "ip6tables-legacy-restore"])?;
    ensure!(!ruleset(lab)?.contains("KUBE-"), "they are not legacy");
    all_reach(lab, "1/8080").context("kube-proxy's rules do not work")?;
    lab.begin()?;
    lab.agent_mut()?.says(&["WARN", "kube-proxy's rules are here", "chains in ip nat of iptables-legacy"])?;
    ensure!(leaves_old(lab)?, "the programs do not know of old connections");
    all_reach(lab, "0/8080").context("new connections are not Ballast's")?;
    let (said, well) = takeover(lab, &[])?;
    ensure!(!well && said.contains("iptables-legacy") && said.contains("kube-proxy --cleanup"), "{said}");
    // The way back is the same as from the others.
    back(lab, |_| Ok(()))
}

fn in_its_way(lab: &Lab) -> Result<()> {
    nftables(lab)?;
    lab.kill()?;
    let (said, well) = takeover(lab, &[])?;
    ensure!(!well && said.contains("does not serve on this node yet"), "{said}");
    lab.begin()?;
    // A process of that name is enough: it is not read.
    let sleeper = lab.bpffs().with_file_name("kube-proxy");
    agent::copy_program("/bin/sleep".as_ref(), &sleeper)?;
    let mut running = lab.node.command(&sleeper).arg("60").spawn()?;
    let refused = eventually(SOON, || {
        let (said, well) = takeover(lab, &["--dry-run"])?;
        ensure!(well, "{said}");
        let comm = std::fs::read_to_string(format!("/proc/{}/comm", running.id()))?;
        ensure!(comm.trim() == "kube-proxy", "not started yet");
        takeover(lab, &[])
    });
    running.kill()?;
    running.wait()?;
    let (said, well) = refused?;
    ensure!(!well && said.contains("kube-proxy still runs here"), "{said}");
    ensure!(ruleset(lab)?.contains("table ip kube-proxy"), "removed all the same");
    let (said, well) = takeover(lab, &[])?;
    ensure!(well && said.contains("done"), "{said}");
    Ok(())
}
