//! Gathers the facts: reads files, and queries the kernel and the agent. Unreadable data are a fact as well, not an error.

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use proxy_common::reason::Reason;
use serde_json::Value;

use super::facts::{
    AgentMetrics, ApiAccess, CheckFacts, Device, Environment, Installed, Kernel, Network, Others,
};
use super::{metrics, options};
use crate::cli::show::{AgentState, AskError, ask, probe, report};
use crate::cli::takeover;
use crate::host::follow::Follower;
use crate::host::netfilter::firewall;
use crate::host::netfilter::kube_proxy_rules::KubeProxyRules;
use crate::host::{cgroup, devices, facts as host, ports};
use crate::maps::view::{View, ViewError};
use crate::programs;
use proxy_cli::args::check::CheckArgs;
use proxy_cli::value::Listen;
use proxy_core::model::ports::LOCAL_PORTS;
use proxy_core::model::{DeviceKind, HostDevice, HostView, IPVS_DEVICE, PROXY_DEVICES};

const BTF: &str = "/sys/kernel/btf/vmlinux";

/// Gathers all facts.
pub fn facts(args: &CheckArgs, api: ApiAccess) -> CheckFacts {
    // If this process may not query the network, nothing is reported here; the check of the capabilities reports the cause.
    let view =
        Follower::start(host::HostFacts::default()).map(|machine| machine.view().clone()).unwrap_or_default();
    CheckFacts {
        kernel: kernel(),
        environment: environment(args),
        network: network(args, &view),
        others: others(&args.cni_conf_dir, &view),
        api,
        installed: (!args.pre).then(|| installed(&args.maps.bpffs, args.agent.metrics_bind_address)),
    }
}

/// Reads a number below `/proc/sys`.
fn sysctl(name: &str) -> Option<u32> {
    fs::read_to_string(Path::new("/proc/sys").join(name)).ok()?.trim().parse().ok()
}

fn kernel() -> Kernel {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned();
    Kernel {
        missing_programs: programs::missing_programs(),
        missing_maps: programs::missing_maps(),
        missing_features: programs::known_missing_features(),
        interleaves_packets: programs::interleaves_packets(),
        has_btf: Path::new(BTF).exists(),
        missing_options: options::missing(&release),
        jit: sysctl("net/core/bpf_jit_enable"),
        jit_harden: sysctl("net/core/bpf_jit_harden"),
        release,
    }
}

fn environment(args: &CheckArgs) -> Environment {
    let root = cgroup::find(args.cgroup_root.as_deref());
    let missing = programs::missing_capabilities();
    let has_all = missing.as_ref().is_ok_and(Vec::is_empty);
    Environment {
        cgroup: root.map(|root| (root.path, root.whole)).map_err(|error| error.to_string()),
        cgroup_is_named: args.cgroup_root.is_some(),
        bpffs: args.maps.bpffs.clone(),
        has_bpffs: programs::is_bpffs(&args.maps.bpffs),
        missing_capabilities: missing.map_err(|error| error.to_string()),
        forbidden: has_all.then(programs::forbidden).flatten(),
    }
}

fn network(args: &CheckArgs, view: &HostView) -> Network {
    let is_on = |name| sysctl(name).map(|value| value != 0);
    Network {
        forwards4: is_on("net/ipv4/ip_forward"),
        forwards6: is_on("net/ipv6/conf/all/forwarding"),
        has_ipv4: view.addresses().any(std::net::IpAddr::is_ipv4),
        has_ipv6: view.addresses().any(std::net::IpAddr::is_ipv6),
        local_ports: ports::local().unwrap_or_else(|| vec![LOCAL_PORTS]),
        node_ports: args.service_node_port_range.0,
        devices: up(view),
    }
}

/// Returns the devices that are up, without loopback.
fn up(view: &HostView) -> Vec<Device> {
    let file = |name: &str, file: &str| fs::read_to_string(format!("/sys/class/net/{name}/{file}")).ok();
    let is_up = |name: &str| {
        let flags = file(name, "flags")?;
        let flags = u32::from_str_radix(flags.trim().trim_start_matches("0x"), 16).ok()?;
        Some(flags & libc::IFF_UP.cast_unsigned() != 0)
    };
    let device = |(ifindex, device): (&u32, &HostDevice)| {
        let known = device.kind != DeviceKind::Loopback && is_up(&device.name)?;
        known.then_some(Device {
            mtu: file(&device.name, "mtu")?.trim().parse().ok()?,
            kind: device.kind,
            is_uplink: view.defaults.iter().any(|route| route.device == *ifindex),
            name: device.name.clone(),
        })
    };
    view.devices.iter().filter_map(device).collect()
}

/// Gathers what kube-proxy does on this node.
pub(super) fn kube_proxy() -> Others {
    Others {
        kube_proxy: KubeProxyRules::read().map_err(|error| error.to_string()),
        kube_proxy_process: takeover::kube_proxy_pid(),
        ..Others::default()
    }
}

/// Returns the devices of other proxies that hold addresses, and dummy devices with so many that they are hardly the node's.
fn leftovers(view: &HostView) -> Vec<(String, usize)> {
    /// A DNS cache holds a handful.
    const MANY: usize = 8;
    let is_left = |device: &&HostDevice| {
        let is_known = PROXY_DEVICES.contains(&&*device.name) && device.name != IPVS_DEVICE;
        is_known && !device.addresses.is_empty()
            || device.kind == DeviceKind::Dummy
                && device.name != IPVS_DEVICE
                && device.addresses.len() >= MANY + device.subnets.len()
    };
    let found = view.devices.values().filter(is_left);
    found.map(|device| (device.name.clone(), device.addresses.len())).collect()
}

fn others(cni_folder: &Path, view: &HostView) -> Others {
    Others {
        cni_folder: cni_folder.to_owned(),
        cni: cni(cni_folder),
        leftovers: leftovers(view),
        firewall: firewall::dropping().map_err(|error| error.to_string()),
        bypassed: firewall::bypassed().map_err(|error| error.to_string()),
        ipvs_servers: fs::read_to_string("/proc/net/ip_vs").map_or(0, |text| ipvs_servers(&text)),
        programs: programs::loaded_names(),
        ..kube_proxy()
    }
}

/// Counts the virtual servers in `/proc/net/ip_vs`; the lines of real servers begin with an arrow.
fn ipvs_servers(text: &str) -> usize {
    let kinds = ["TCP ", "UDP ", "SCTP ", "FWM "];
    text.lines().filter(|line| kinds.iter().any(|kind| line.starts_with(kind))).count()
}

/// Returns the networks that the files of a folder define; `None` if the folder does not exist.
fn cni(folder: &Path) -> Option<Vec<String>> {
    let mut files: Vec<_> = fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path()).collect();
    files.sort();
    let is_config = |path: &&std::path::PathBuf| {
        path.extension()
            .is_some_and(|extension| ["conf", "conflist", "json"].iter().any(|kind| extension == *kind))
    };
    let name = |path: &std::path::PathBuf| {
        let text = fs::read_to_string(path).ok()?;
        let file = path.file_name()?.to_string_lossy().into_owned();
        Some(cni_network(&text).unwrap_or_else(|| format!("{file} (not valid JSON)")))
    };
    Some(files.iter().filter(is_config).filter_map(name).collect())
}

/// Returns name and main plugin of a CNI configuration, like `cbr0 (flannel)`.
fn cni_network(text: &str) -> Option<String> {
    let value: Value = serde_json::from_str(text).ok()?;
    let name = value["name"].as_str().unwrap_or("without a name");
    let plugin = value["plugins"][0]["type"].as_str().or_else(|| value["type"].as_str());
    Some(format!("{name} ({})", plugin.unwrap_or("without a plugin")))
}

/// Gathers what the agent reports, and what it has installed in the kernel.
pub(super) fn installed(bpffs: &Path, listen: Option<Listen>) -> Installed {
    let agent = probe(listen);
    let read = || -> Result<_, ViewError> {
        let view = View::open(bpffs)?;
        Ok((view.usage()?, view.node_config()?.abi))
    };
    let maps = read();
    let names = devices::list().unwrap_or_default().into_iter().map(|device| (device.ifindex, device.name));
    let mut report = report(&agent);
    if !matches!(agent, AgentState::Answered { .. }) {
        report.problems = faults(bpffs);
    }
    Installed {
        metrics: metrics(&agent).unwrap_or_else(|error| {
            report.problems.push(error.to_string());
            None
        }),
        report,
        is_denied: matches!(maps, Err(ViewError::Denied { .. })),
        owner: (!matches!(maps, Err(ViewError::Nothing { .. } | ViewError::NoBpffs { .. })))
            .then(|| programs::require_owner_of(bpffs).map_err(|error| error.to_string())),
        maps: maps.map_err(|error| error.to_string()),
        attachments: programs::attachments(bpffs),
        devices: names.collect::<BTreeMap<_, _>>(),
        agent,
    }
}

/// Returns the faults that the maps have counted. A running agent reports only recent ones; without it, their time is unknown.
fn faults(bpffs: &Path) -> Vec<String> {
    let reasons = View::open(bpffs).and_then(|view| view.reasons()).unwrap_or_default().into_iter();
    let faults = reasons.filter(|(reason, count)| reason.is_fault() && *count > 0);
    let sentence = |(reason, count): (Reason, u64)| {
        format!("{count} x {}:{} {}", reason.label(), reason.explanation(), reason.advice())
    };
    faults.map(sentence).collect()
}

/// Returns the agent's metrics; `None` if it does not answer, or has no metrics.
pub(super) fn metrics(agent: &AgentState) -> Result<Option<AgentMetrics>, AskError> {
    let AgentState::Answered { address, .. } = agent else { return Ok(None) };
    let (status, body) = ask(*address, "/metrics")?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let text = String::from_utf8_lossy(&body);
    Ok((status == 200).then(|| metrics::read(&text, now.as_secs_f64(), sync_period(*address))))
}

/// Returns the agent's setting; zero if it cannot be read.
fn sync_period(address: SocketAddr) -> Duration {
    let configz =
        ask(address, "/configz").ok().and_then(|(_, body)| serde_json::from_slice::<Value>(&body).ok());
    let seconds = configz.and_then(|configz| configz["ballast"]["syncPeriod"].as_f64());
    seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_the_kernel_and_of_cni_are_read() {
        let ipvs = "IP Virtual Server version 1.2.1 (size=4096)\nProt LocalAddress:Port Scheduler Flags\n\
                    \x20 -> RemoteAddress:Port Forward Weight ActiveConn InActConn\n\
                    TCP  0A600001:01BB rr\n  -> C0000201:192B Masq 1 0 0\nUDP  0A60000A:0035 rr\n";
        assert_eq!(ipvs_servers(ipvs), 2);
        let list = r#"{"name": "cbr0", "plugins": [{"type": "flannel"}, {"type": "portmap"}]}"#;
        assert_eq!(cni_network(list).unwrap(), "cbr0 (flannel)");
        assert_eq!(cni_network(r#"{"name": "net", "type": "bridge"}"#).unwrap(), "net (bridge)");
        assert_eq!(cni_network("no JSON"), None);
    }

    #[test]
    fn a_folder_without_configuration_is_not_a_missing_one() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(cni(dir.path()), Some(vec![]));
        fs::write(dir.path().join("10-a.conflist"), r#"{"name": "a", "type": "b"}"#).unwrap();
        fs::write(dir.path().join("README"), "nothing").unwrap();
        assert_eq!(cni(dir.path()), Some(vec!["a (b)".to_owned()]));
        fs::write(dir.path().join("20-c.conf"), "{").unwrap();
        assert_eq!(cni(dir.path()).unwrap()[1], "20-c.conf (not valid JSON)");
        assert_eq!(cni(&dir.path().join("none")), None);
    }
}
