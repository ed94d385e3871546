//! `ballast takeover`: replaces kube-proxy by Ballast on a live node.
//!
//! Ballast serves new connections as soon as its agent runs. Connections that kube-proxy has translated stay in netfilter's
//! conntrack, which needs no rules for them. So the rules are removed at once, and the last table after these connections have
//! ended.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant};

use proxy_common::PROTO_TCP;
use proxy_core::model::plural::plural;

use super::args::takeover::TakeoverArgs;
use super::show::{AgentState, probe};
use crate::host::netfilter::kube_proxy_rules::KubeProxyRules;
use crate::host::netfilter::{connections, rules};
use crate::maps::view::{Transport, View, ViewError};
use crate::programs::attachments;
use crate::programs::hooks::SOCKET_HOOKS;
use proxy_cli::value::Listen;

/// Pause between two reads of the connections.
const PAUSE: Duration = Duration::from_secs(1);

/// Longer than the agent waits before it tries to listen again.
const UNTIL_IT_LISTENS: Duration = Duration::from_secs(7);

/// Why the takeover failed, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum TakeoverError {
    /// netfilter cannot be read or changed.
    #[error(
        "cannot {what}: {source}; run as root in the node's network namespace, on a kernel with nftables"
    )]
    Netfilter {
        /// The failed action.
        what: &'static str,
        /// Cause of the failure.
        source: io::Error,
    },
    /// kube-proxy still runs, and would write its rules again.
    #[error(
        "kube-proxy is still running on this node (process {0}), and would write its rules again; stop it first, and keep its \
         objects: `kubectl -n kube-system patch daemonset kube-proxy -p \
         '{{\"spec\":{{\"template\":{{\"spec\":{{\"nodeSelector\":{{\"ballast.io/kube-proxy\":\"true\"}}}}}}}}}}'` \
         (docs/migration.md)"
    )]
    StillRuns(u32),
    /// Without kube-proxy, no proxy would serve the Services.
    #[error("Ballast is not ready on this node ({0}): start `ballast run`, and check `ballast status`")]
    NotServing(String),
    /// IPVS of kube-proxy translates without these rules.
    #[error(
        "this node has IPVS services of kube-proxy: remove them with `kube-proxy --cleanup` in kube-proxy's own image, which breaks \
         their open connections; docs/migration.md#ipvs-and-iptables-legacy has the command"
    )]
    Ipvs,
    /// nftables does not show these rules, and only `iptables-legacy` can remove them.
    #[error(
        "kube-proxy wrote its rules with iptables-legacy ({0}), which `ballast takeover` cannot remove: run `kube-proxy \
         --cleanup` in kube-proxy's own image; docs/migration.md#ipvs-and-iptables-legacy has the command. New connections already \
         use Ballast; open connections of kube-proxy may break"
    )]
    Legacy(KubeProxyRules),
    /// The maps cannot be read.
    #[error(transparent)]
    View(#[from] ViewError),
}

fn netfilter(what: &'static str) -> impl FnOnce(io::Error) -> TakeoverError {
    move |source| TakeoverError::Netfilter { what, source }
}

/// Takes over as far as possible at this time. Returns what was done, in words.
pub fn run(args: &TakeoverArgs) -> Result<String, TakeoverError> {
    let found = KubeProxyRules::read().map_err(netfilter("read the netfilter rules"))?;
    if !found.may_have_connections() {
        return Ok("this node has no kube-proxy rules\n".to_owned());
    }
    let mut text = String::new();
    if found.has_rules() {
        if found.ipvs {
            return Err(TakeoverError::Ipvs);
        }
        if !found.legacy.is_empty() {
            return Err(TakeoverError::Legacy(found));
        }
        // What is read after the rules were removed has to be there before.
        View::open(&args.maps.bpffs)?;
        if !args.force && !args.dry_run {
            // This check comes first, because kube-proxy itself may answer at the agent's address.
            if let Some(pid) = kube_proxy_pid() {
                return Err(TakeoverError::StillRuns(pid));
            }
            require_serving(args)?;
        }
        let removal = rules::remove(args.dry_run).map_err(netfilter("remove the rules"))?;
        let verb = if args.dry_run { "would remove" } else { "removed" };
        for line in removal.removed {
            let _ = writeln!(text, "{verb} {line}");
        }
        for line in removal.left {
            let _ = writeln!(text, "kept {line}: other rules refer to it");
        }
    }
    if args.dry_run {
        let _ = writeln!(
            text,
            "{} that kube-proxy began still in nf_conntrack",
            plural(old_connections(&args.maps.bpffs)?, "connection")
        );
        return Ok(text);
    }
    let end = Instant::now() + args.wait;
    let mut left = old_connections(&args.maps.bpffs)?;
    while left > 0 && !args.now && Instant::now() < end {
        std::thread::sleep(PAUSE);
        left = old_connections(&args.maps.bpffs)?;
    }
    if left == 0 || args.now {
        rules::finish().map_err(netfilter("remove the last table"))?;
        text.push_str("done: all kube-proxy rules are removed\n");
    } else {
        let _ = writeln!(
            text,
            "{} that kube-proxy began still in nf_conntrack; run `ballast takeover` again when they have ended",
            plural(left, "connection")
        );
    }
    Ok(text)
}

/// Returns the agent's state. If kube-proxy has just released the address, waits until the agent tries to listen again.
fn answer(at: Option<Listen>) -> AgentState {
    let end = Instant::now() + UNTIL_IT_LISTENS;
    loop {
        match probe(at) {
            AgentState::Silent { .. } if Instant::now() < end => std::thread::sleep(PAUSE),
            state => return state,
        }
    }
}

/// Fails unless the agent is healthy and all its socket programs are attached.
fn require_serving(args: &TakeoverArgs) -> Result<(), TakeoverError> {
    match answer(args.agent.metrics_bind_address) {
        AgentState::Answered { status: 200, .. } | AgentState::NotAsked => {}
        AgentState::Answered { address, status } => {
            return Err(TakeoverError::NotServing(format!("{address} answers with HTTP {status}")));
        }
        AgentState::Silent { address, reason } => {
            return Err(TakeoverError::NotServing(format!("{address}: {reason}")));
        }
    }
    let all = attachments(&args.maps.bpffs);
    let is_attached = |name: &str| all.iter().any(|one| one.hook == name && one.is_attached());
    match SOCKET_HOOKS.iter().find(|(name, _)| !is_attached(name)) {
        Some((name, _)) => Err(TakeoverError::NotServing(format!("{name} is not attached"))),
        None => Ok(()),
    }
}

/// Returns the process id of a kube-proxy in this network namespace.
pub(super) fn kube_proxy_pid() -> Option<u32> {
    let here = std::fs::read_link("/proc/self/ns/net").ok()?;
    let processes = std::fs::read_dir("/proc").ok()?.flatten();
    processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok()).find(|pid| {
        let of = Path::new("/proc").join(pid.to_string());
        let is_named = std::fs::read_to_string(of.join("comm")).is_ok_and(|name| name.trim() == "kube-proxy");
        is_named && std::fs::read_link(of.join("ns/net")).is_ok_and(|namespace| namespace == here)
    })
}

/// Counts the live connections to addresses of Services that netfilter translates.
fn old_connections(bpffs: &Path) -> Result<usize, TakeoverError> {
    let frontends = View::open(bpffs)?.services()?;
    let tcp = frontends.iter().filter(|row| row.protocol == Transport(PROTO_TCP));
    let destination: BTreeSet<(IpAddr, u16)> = tcp.map(|row| (row.address, row.port)).collect();
    let translated = connections::translated().map_err(netfilter("read the conntrack table"))?;
    Ok(translated.iter().filter(|to| is_services(to, &destination)).count())
}

/// Whether the connection was made to a Service, by an address of the Service or by a node port.
fn is_services(to: &SocketAddr, destination: &BTreeSet<(IpAddr, u16)>) -> bool {
    let any: IpAddr = if to.is_ipv4() { [0; 4].into() } else { [0u16; 8].into() };
    destination.contains(&(to.ip(), to.port())) || destination.contains(&(any, to.port()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_kube_proxy_is_stopped_as_the_documentation_says() {
        let error = TakeoverError::StillRuns(7).to_string();
        let command = error.split('`').nth(1).unwrap();
        assert!(command.contains("patch daemonset"), "{error}");
        assert!(include_str!("../../../docs/migration.md").contains(command), "{command}");
    }

    #[test]
    fn services_are_known_by_address_or_node_port() {
        let destination = BTreeSet::from([([10, 96, 0, 1].into(), 443), ([0, 0, 0, 0].into(), 30_080)]);
        let is = |text: &str| is_services(&text.parse().unwrap(), &destination);
        assert!(is("10.96.0.1:443") && is("192.0.2.1:30080"));
        assert!(!is("10.96.0.1:80") && !is("[2001:db8::1]:30080"));
    }
}
