//! Checks other software: CNI plugins, other proxies, the API server.

use super::{CheckLine, some};
use crate::cli::check::facts::{ApiAccess, Others};
use proxy_core::model::plural::plural;

/// Prefixes of the names of Cilium's programs that translate Services for sockets; they differ by version.
const CILIUM_SOCKETS: [&str; 3] = ["cil_sock4_conn", "cil_sock6_conn", "sock4_connect"];
/// Prefix of the names of Cilium's programs.
const CILIUM: &str = "cil_";
/// Prefixes of the names of the programs of Calico's eBPF data plane.
const CALICO: [&str; 2] = ["cali_", "calico_"];

pub(super) fn judge(others: &Others, pre: bool) -> Vec<CheckLine> {
    vec![
        cni(others),
        kube_proxy(others, pre),
        ipvs(others),
        leftovers(others),
        firewall(others),
        bypassed(others),
        cilium(others),
        calico(others),
    ]
}

fn cni(others: &Others) -> CheckLine {
    const CHECK: &str = "cni";
    let folder = others.cni_folder.display();
    match &others.cni {
        Some(networks) if !networks.is_empty() => CheckLine::pass(CHECK, some(networks)),
        Some(_) => CheckLine::warn(
            CHECK,
            format!("{folder} has no CNI configuration: pods get no network"),
            "install a CNI plugin; Ballast does not contain one",
        ),
        None => CheckLine::warn(
            CHECK,
            format!("{folder} does not exist, so the CNI plugin is not known"),
            "give the folder with --cni-conf-dir; in a container, mount the host's folder",
        ),
    }
}

pub(super) fn kube_proxy(others: &Others, pre: bool) -> CheckLine {
    const CHECK: &str = "kube-proxy";
    let rules = match &others.kube_proxy {
        Err(why) => {
            return CheckLine::warn(
                CHECK,
                format!("cannot read the netfilter rules: {why}"),
                "run as root, with CAP_NET_ADMIN",
            );
        }
        Ok(rules) => rules,
    };
    let process = others.kube_proxy_process.map(|pid| format!("kube-proxy is running (process {pid})"));
    let found = rules.has_rules().then(|| format!("the node has kube-proxy rules: {rules}"));
    let seen: Vec<_> = process.into_iter().chain(found).collect();
    if seen.is_empty() {
        return CheckLine::pass(CHECK, "kube-proxy is not running, and the node has none of its rules");
    }
    let seen = seen.join("; ");
    if pre {
        let advice = "install Ballast, check that `ballast service list` shows all Services, stop kube-proxy, then run `ballast \
                      takeover` (docs/migration.md)";
        return CheckLine::warn(CHECK, seen, advice);
    }
    CheckLine::fail(CHECK, seen, "stop kube-proxy, then run `ballast takeover`")
}

fn ipvs(others: &Others) -> CheckLine {
    const CHECK: &str = "ipvs";
    match others.ipvs_servers {
        0 => CheckLine::pass(CHECK, "IPVS has no virtual servers"),
        count => CheckLine::warn(
            CHECK,
            format!("IPVS has {}", plural(count, "virtual server")),
            "if they are from kube-proxy, remove them with `kube-proxy --cleanup` in kube-proxy's own image \
             (docs/migration.md#ipvs-and-iptables-legacy has the command); others (keepalived) can stay if they use no address of \
             a Service",
        ),
    }
}

fn leftovers(others: &Others) -> CheckLine {
    const CHECK: &str = "leftovers";
    let found: Vec<_> = others
        .leftovers
        .iter()
        .map(|(device, count)| format!("{device} has {}", plural(count, "address")))
        .collect();
    if found.is_empty() {
        return CheckLine::pass(CHECK, "no device holds addresses of another service proxy");
    }
    CheckLine::warn(
        CHECK,
        found.join("; "),
        "if these are addresses of Services and no other proxy runs, remove the device with `ip link delete DEVICE` \
         (kube-router: `kube-router --cleanup-config`)",
    )
}

fn firewall(others: &Others) -> CheckLine {
    const CHECK: &str = "firewall";
    match &others.firewall {
        Err(why) => CheckLine::warn(
            CHECK,
            format!("cannot read the chains of netfilter: {why}"),
            "run as root, with CAP_NET_ADMIN",
        ),
        Ok(found) if found.is_empty() => {
            CheckLine::pass(CHECK, "no chain of netfilter drops what no rule accepts")
        }
        Ok(found) => CheckLine::warn(
            CHECK,
            format!("these chains drop or reject what no rule accepts: {}", some(found)),
            "rules that accept translated connections (kube-proxy's, `ct status dnat`) do not accept Ballast's: accept packets to \
             the pods' ranges in FORWARD, and to ports of hostNetwork endpoints in INPUT (firewalld: a zone for the \
             pods and a policy to it; docs/coexistence.md#connection-tracking-and-firewalls-of-the-node has the commands). If load balancers ask Services with policy Local for \
             their health, accept each `spec.healthCheckNodePort` in INPUT, too: kube-proxy's rules did; the ports are usually \
             in the node port range (30000-32767/tcp)",
        ),
    }
}

fn bypassed(others: &Others) -> CheckLine {
    const CHECK: &str = "firewall-services";
    match &others.bypassed {
        Err(why) => CheckLine::warn(
            CHECK,
            format!("cannot read the rules of netfilter: {why}"),
            "run as root, with CAP_NET_ADMIN",
        ),
        Ok(found) if found.is_empty() => CheckLine::pass(
            CHECK,
            "no rule of netfilter drops packets before routing, drops forwarded packets by their source, or reads the destination \
             before NAT",
        ),
        Ok(found) => CheckLine::warn(
            CHECK,
            format!(
                "Ballast translates before the rules of these chains, or forwards without them: {}",
                some(found)
            ),
            "rules there that match the address or the port of a Service match nothing, and rules that match an endpoint's address \
             match the Service's packets, too. Rules that match a client's address (blocklists, limits) see only connections to \
             endpoints of this node, unless the Service has DSR. Instead: loadBalancerSourceRanges, externalTrafficPolicy Local, \
             or a firewall in front of the nodes \
             (docs/coexistence.md#rules-that-match-the-addresses-of-clients)",
        ),
    }
}

fn begins<'a>(others: &'a Others, starts: &[&str]) -> Vec<&'a str> {
    let names = others.programs.iter().map(String::as_str);
    names.filter(|name| starts.iter().any(|start| name.starts_with(start))).collect()
}

fn cilium(others: &Others) -> CheckLine {
    const CHECK: &str = "cilium";
    let sockets = begins(others, &CILIUM_SOCKETS);
    if !sockets.is_empty() {
        return CheckLine::fail(
            CHECK,
            format!("Cilium's kube-proxy replacement is loaded: {}", some(sockets)),
            "set kubeProxyReplacement to false in Cilium's values, and restart its agents",
        );
    }
    if begins(others, &[CILIUM]).is_empty() {
        return CheckLine::pass(CHECK, "no program of Cilium is loaded");
    }
    CheckLine::pass(CHECK, "Cilium runs without its kube-proxy replacement")
}

fn calico(others: &Others) -> CheckLine {
    const CHECK: &str = "calico";
    let programs = begins(others, &CALICO);
    if programs.is_empty() {
        return CheckLine::pass(CHECK, "Calico's eBPF data plane is not loaded");
    }
    CheckLine::fail(
        CHECK,
        format!("Calico's eBPF data plane, which replaces kube-proxy, is loaded: {}", some(programs)),
        "set linuxDataplane to Iptables or Nftables in Calico's Installation",
    )
}

/// Checks the access to the API server.
pub(super) fn api(access: &ApiAccess) -> CheckLine {
    const CHECK: &str = "api-server";
    match access {
        ApiAccess::NotAsked => CheckLine::pass(CHECK, "not checked"),
        ApiAccess::Well { version } => {
            CheckLine::pass(CHECK, format!("{version} answers, and lists all needed objects"))
        }
        ApiAccess::NoCredentials(why) => CheckLine::warn(
            CHECK,
            format!("not checked: {why}"),
            "without a cluster, --no-api skips this check",
        ),
        ApiAccess::BrokenKubeconfig(why) => {
            CheckLine::fail(CHECK, why.clone(), "correct the file, or name another with --kubeconfig")
        }
        ApiAccess::Unreachable(why) => CheckLine::fail(
            CHECK,
            why.clone(),
            "use the address of a control plane node or of its load balancer (--master, apiServer.host of the chart), not the \
             address of a Service",
        ),
        ApiAccess::Certificates(why) => CheckLine::fail(
            CHECK,
            why.clone(),
            "check the certificates: the kubeconfig's CA has to be that of the server, the server's certificate has to contain the \
             address, and all have to be valid today. Keys may be RSA from 2048 bits, ECDSA P-256 or P-384, or Ed25519; P-521 does \
             not work. InvalidContentType: no server at this port speaks TLS",
        ),
        ApiAccess::Refused { version, kinds } => CheckLine::fail(
            CHECK,
            format!("{version} answers, but denies listing {}", kinds.join("; ")),
            "apply the ClusterRole and the ClusterRoleBinding `ballast`; for a kubeconfig, bind its user to that role",
        ),
    }
}
