//! Other software: CNI plugins, other proxies, the API server.

use super::{Line, some};
use crate::cli::check::facts::{ApiAccess, Others};

/// Beginnings of the names of Cilium's programs that translate Services for sockets, by version.
const CILIUM_SOCKETS: [&str; 3] = ["cil_sock4_conn", "cil_sock6_conn", "sock4_connect"];
/// How the names of Cilium's programs begin.
const CILIUM: &str = "cil_";
/// How the names of the programs of Calico's eBPF data plane begin.
const CALICO: [&str; 2] = ["cali_", "calico_"];

pub(super) fn judge(others: &Others, pre: bool) -> Vec<Line> {
    vec![cni(others), kube_proxy(others, pre), ipvs(others), cilium(others), calico(others)]
}

fn cni(others: &Others) -> Line {
    const CHECK: &str = "cni";
    let folder = others.cni_folder.display();
    match &others.cni {
        Some(networks) if !networks.is_empty() => Line::pass(CHECK, some(networks)),
        Some(_) => Line::warn(
            CHECK,
            format!("{folder} has no configuration: pods get no network"),
            "install a CNI plugin; Ballast serves Services, and brings none",
        ),
        None => Line::warn(
            CHECK,
            format!("{folder} is not here, so the CNI plugin is not known"),
            "name the folder with --cni-conf-dir; in a container, mount the host's",
        ),
    }
}

fn kube_proxy(others: &Others, pre: bool) -> Line {
    const CHECK: &str = "kube-proxy";
    let rules = match &others.kube_proxy {
        Err(why) => {
            return Line::warn(
                CHECK,
                format!("the rules of netfilter cannot be read: {why}"),
                "run as root, with CAP_NET_ADMIN",
            );
        }
        Ok(rules) => rules,
    };
    let process = others.kube_proxy_process.map(|pid| format!("kube-proxy runs (process {pid})"));
    let found = rules.has_rules().then(|| format!("its rules are here: {rules}"));
    let seen: Vec<_> = process.into_iter().chain(found).collect();
    if seen.is_empty() {
        return Line::pass(CHECK, "neither kube-proxy nor its rules are here");
    }
    let seen = seen.join("; ");
    if pre {
        let advice = "install Ballast, stop kube-proxy when Ballast serves, then run `ballast takeover`";
        return Line::warn(CHECK, seen, advice);
    }
    Line::fail(CHECK, seen, "stop kube-proxy, then run `ballast takeover`")
}

fn ipvs(others: &Others) -> Line {
    const CHECK: &str = "ipvs";
    match others.ipvs_servers {
        0 => Line::pass(CHECK, "IPVS has no virtual servers"),
        count => Line::warn(
            CHECK,
            format!("IPVS has {count} virtual servers"),
            "if they are kube-proxy's, `kube-proxy --cleanup` removes them; others (keepalived) may stay where they share no \
             address with a Service",
        ),
    }
}

fn begins<'a>(others: &'a Others, starts: &[&str]) -> Vec<&'a str> {
    let names = others.programs.iter().map(String::as_str);
    names.filter(|name| starts.iter().any(|start| name.starts_with(start))).collect()
}

fn cilium(others: &Others) -> Line {
    const CHECK: &str = "cilium";
    let sockets = begins(others, &CILIUM_SOCKETS);
    if !sockets.is_empty() {
        return Line::fail(
            CHECK,
            format!("Cilium's replacement of kube-proxy is loaded: {}", some(sockets)),
            "set kubeProxyReplacement to false in Cilium's values, and restart its agents",
        );
    }
    if begins(others, &[CILIUM]).is_empty() {
        return Line::pass(CHECK, "no program of Cilium is loaded");
    }
    Line::pass(CHECK, "Cilium is the network, without its replacement of kube-proxy")
}

fn calico(others: &Others) -> Line {
    const CHECK: &str = "calico";
    let programs = begins(others, &CALICO);
    if programs.is_empty() {
        return Line::pass(CHECK, "Calico's eBPF data plane is not loaded");
    }
    Line::fail(
        CHECK,
        format!("Calico's eBPF data plane, which replaces kube-proxy, is loaded: {}", some(programs)),
        "set linuxDataplane to Iptables or Nftables in Calico's Installation",
    )
}

/// The API server.
pub(super) fn api(access: &ApiAccess) -> Line {
    const CHECK: &str = "api-server";
    match access {
        ApiAccess::NotAsked => Line::pass(CHECK, "not asked"),
        ApiAccess::Well { version } => {
            Line::pass(CHECK, format!("{version} answers, and lists what is needed"))
        }
        ApiAccess::NoCredentials(why) => Line::warn(
            CHECK,
            format!("not asked: {why}"),
            "name credentials with --kubeconfig, or leave this check out with --no-api",
        ),
        ApiAccess::Unreachable(why) => Line::fail(
            CHECK,
            why.clone(),
            "give the address of a control plane node or of the load balancer in front of it (--master, apiServer.host of the \
             chart), not that of a Service",
        ),
        ApiAccess::Refused { version, kinds } => Line::fail(
            CHECK,
            format!("{version} answers, but does not list {}", kinds.join("; ")),
            "apply the ClusterRole and the ClusterRoleBinding `ballast`; for a kubeconfig, bind its user to that role",
        ),
    }
}
