//! Tests each line with all its outcomes.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use proxy_common::config::PortRange;
use rstest::rstest;

use super::{CHECKS, CheckLine, CheckResult, judge, some};
use crate::cli::check::facts::{AgentMetrics, ApiAccess, CheckFacts, Device, Installed};
use crate::cli::show::{AgentReport, AgentState};
use crate::host::netfilter::kube_proxy_rules::KubeProxyRules;
use crate::maps::view::UsageRow;
use crate::programs::hooks::SOCKET_HOOKS;
use crate::programs::{Attachment, Forbidden, MissingFeature};
use proxy_core::model::DeviceKind;

use CheckResult::{Fail, Pass, Warn};

fn device(name: &str, kind: DeviceKind, mtu: u32, is_uplink: bool) -> Device {
    Device { name: name.to_owned(), kind, mtu, is_uplink }
}

fn address() -> SocketAddr {
    ([127, 0, 0, 1], 10_249).into()
}

fn attachment(hook: &str, program: &'static str, ifindex: Option<u32>) -> Attachment {
    Attachment {
        hook: hook.to_owned(),
        program_id: 7,
        program,
        ifindex,
        place: Some("somewhere".to_owned()),
        runs: 0,
        run_time: Duration::ZERO,
    }
}

fn row(name: &'static str, used: u32) -> UsageRow {
    UsageRow {
        name,
        id: 1,
        pin: PathBuf::from(name),
        kind: "hash".to_owned(),
        capacity: 100,
        used: Some(used),
        memory: None,
        setting: "--max-services",
    }
}

/// Returns the facts of a node without problems.
fn well() -> CheckFacts {
    let mut facts = CheckFacts::default();
    facts.kernel.release = "6.12.43-amd64".to_owned();
    facts.kernel.missing_programs = Some(Vec::new());
    facts.kernel.missing_maps = Some(Vec::new());
    facts.kernel.missing_features = Some(Vec::new());
    facts.kernel.has_btf = true;
    facts.kernel.missing_options = Some(Vec::new());
    facts.kernel.jit = Some(1);
    facts.network.devices = vec![
        device("eth0", DeviceKind::Physical, 1500, true),
        device("veth1", DeviceKind::Veth, 1450, false),
        device("flannel.1", DeviceKind::Tunnel, 1450, false),
    ];
    facts.others.cni = Some(vec!["cbr0 (flannel)".to_owned()]);
    facts.api = ApiAccess::Well { version: "v1.36.1".to_owned() };
    let mut attachments: Vec<_> = SOCKET_HOOKS.iter().map(|(name, _)| attachment(name, name, None)).collect();
    attachments.push(attachment("tcx_ingress_7", "tc_ingress", Some(7)));
    attachments.push(attachment("tcx_egress_7", "tc_egress", Some(7)));
    facts.installed = Some(Installed {
        agent: AgentState::Answered { address: address(), status: 200 },
        report: AgentReport::default(),
        metrics: Some(AgentMetrics {
            version: Some(env!("CARGO_PKG_VERSION").to_owned()),
            synced: true,
            sync_age: Some(Duration::from_secs(10)),
            audits_clean: 3,
            ..AgentMetrics::default()
        }),
        maps: Ok((vec![row("services", 1)], 3)),
        owner: Some(Ok(())),
        is_denied: false,
        attachments,
        devices: BTreeMap::from([(7, "eth0".to_owned())]),
    });
    facts
}

fn line(facts: &CheckFacts, check: &str) -> CheckLine {
    let lines = judge(facts);
    lines.into_iter().find(|line| line.check == check).unwrap_or_else(|| panic!("no line {check}"))
}

#[test]
fn every_check_passes_on_a_healthy_node() {
    let facts = well();
    let lines = judge(&facts);
    let others: Vec<_> = lines.iter().filter(|line| line.outcome != Pass).collect();
    assert!(others.is_empty(), "{others:#?}");
    assert!(lines.iter().all(|line| line.advice.is_empty() && !line.seen.is_empty()));
    let pre = judge(&CheckFacts { installed: None, ..facts });
    assert!(pre.len() < lines.len() && pre.iter().all(|line| line.group != "agent"));
}

#[test]
fn every_check_is_in_the_list_of_names() {
    let names: Vec<_> = judge(&well()).into_iter().map(|line| line.check).collect();
    assert_eq!(names, CHECKS);
}

#[test]
fn every_line_has_a_heading_in_the_manual() {
    let manual = include_str!("../../../../../docs/troubleshooting.md");
    let lines = judge(&well());
    for line in &lines {
        let section = line.section();
        assert!(
            section.len() > 20 && !section.contains("###"),
            "docs/troubleshooting.md about {}: {section}",
            line.check
        );
    }
    let headings = manual.lines().filter_map(|line| line.strip_prefix("### check "));
    for heading in headings {
        assert!(lines.iter().any(|line| line.check == heading), "no check is called {heading}");
    }
}

/// How a case changes the facts of a node without problems.
type Change = fn(&mut CheckFacts);

fn installed(facts: &mut CheckFacts) -> &mut Installed {
    facts.installed.as_mut().expect("it is installed")
}

fn metrics(facts: &mut CheckFacts) -> &mut AgentMetrics {
    installed(facts).metrics.as_mut().expect("it answers")
}

fn rules() -> KubeProxyRules {
    KubeProxyRules { tables: ["ip kube-proxy".to_owned()].into(), ..KubeProxyRules::default() }
}

#[rstest]
#[case::old("kernel-version", Fail, "5.15", |f: &mut CheckFacts| f.kernel.release = "5.10.0-46-amd64".to_owned())]
#[case::red_hat("kernel-version", Warn, "backports", |f: &mut CheckFacts| f.kernel.release = "5.14.0-503.el9.x86_64".to_owned())]
#[case::strange("kernel-version", Warn, "cannot parse", |f: &mut CheckFacts| f.kernel.release = "x".to_owned())]
#[case::no_type("kernel-bpf", Fail, "sock_ops, ringbuf", |f: &mut CheckFacts| {
    f.kernel.missing_programs = Some(vec!["sock_ops"]);
    f.kernel.missing_maps = Some(vec!["ringbuf"]);
})]
#[case::may_not_ask("kernel-bpf", Warn, "may not query", |f: &mut CheckFacts| f.kernel.missing_maps = None)]
#[case::option("kernel-options", Fail, "CONFIG_CGROUP_BPF", |f: &mut CheckFacts| f.kernel.missing_options = Some(vec!["CGROUP_BPF"]))]
#[case::no_list("kernel-options", Pass, "probed instead", |f: &mut CheckFacts| f.kernel.missing_options = None)]
#[case::feature("kernel-features", Warn, "TCX", |f: &mut CheckFacts| f.kernel.missing_features = Some(vec![MissingFeature::Tcx]))]
#[case::features_unknown("kernel-features", Warn, "cannot tell", |f: &mut CheckFacts| f.kernel.missing_features = None)]
#[case::types("kernel-btf", Warn, "btf", |f: &mut CheckFacts| f.kernel.has_btf = false)]
#[case::interpreter("bpf-jit", Fail, "enable is 0", |f: &mut CheckFacts| f.kernel.jit = Some(0))]
#[case::blinded("bpf-jit", Warn, "harden is 2", |f: &mut CheckFacts| f.kernel.jit_harden = Some(2))]
#[case::always("bpf-jit", Pass, "always", |f: &mut CheckFacts| f.kernel.jit = None)]
#[case::part("cgroup2", Warn, "root of the cgroup tree", |f: &mut CheckFacts| f.environment.cgroup = Ok((PathBuf::from("/x"), false)))]
#[case::intended("cgroup2", Pass, "/x", |f: &mut CheckFacts| {
    f.environment.cgroup = Ok((PathBuf::from("/x"), false));
    f.environment.cgroup_is_named = true;
})]
#[case::none("cgroup2", Fail, "no cgroup2", |f: &mut CheckFacts| f.environment.cgroup = Err("no cgroup2 is mounted".to_owned()))]
#[case::no_bpffs("bpffs", Fail, "pinned", |f: &mut CheckFacts| f.environment.has_bpffs = false)]
#[case::no_bpffs_yet("bpffs", Warn, "no BPF file system", |f: &mut CheckFacts| {
    f.environment.has_bpffs = false;
    f.installed = None;
})]
#[case::unprivileged("capabilities", Fail, "CAP_BPF", |f: &mut CheckFacts| f.environment.missing_capabilities = Ok(vec!["CAP_BPF"]))]
#[case::rootless("capabilities", Fail, "user namespace", |f: &mut CheckFacts| f.environment.forbidden = Some(Forbidden::UserNamespace))]
#[case::no_proc("capabilities", Fail, "cannot read", |f: &mut CheckFacts| f.environment.missing_capabilities = Err("no".to_owned()))]
#[case::no_forwarding("ip-forward", Fail, "net.ipv4.ip_forward is 0", |f: &mut CheckFacts| f.network.forwards4 = Some(false))]
#[case::no_forwarding6("ip-forward", Warn, "net.ipv6.conf.all.forwarding is 0", |f: &mut CheckFacts| {
    f.network.forwards6 = Some(false);
    f.network.has_ipv6 = true;
})]
#[case::no_ipv6("ip-forward", Pass, "forwarding is on", |f: &mut CheckFacts| f.network.forwards6 = Some(false))]
#[case::no_ipv4("ip-forward", Pass, "forwarding is on", |f: &mut CheckFacts| {
    f.network.forwards4 = Some(false);
    f.network.has_ipv4 = false;
})]
#[case::overlap("port-ranges", Warn, "overlap in 30000-32767", |f: &mut CheckFacts| {
    f.network.local_ports = vec![PortRange::new(15_000, 60_999)];
})]
#[case::reserved("port-ranges", Pass, "SNAT 1024-14999,61000-65535", |f: &mut CheckFacts| {
    f.network.local_ports = vec![PortRange::new(15_000, 29_999), PortRange::new(32_768, 60_999)];
})]
#[case::reserved_for_snat("port-ranges", Pass, "SNAT 57344-65535", |f: &mut CheckFacts| {
    f.network.local_ports = vec![PortRange::new(1_024, 29_999), PortRange::new(32_768, 57_343)];
})]
#[case::no_room("port-ranges", Warn, "too few ports for SNAT", |f: &mut CheckFacts| {
    f.network.local_ports = vec![PortRange::new(1_024, 29_999), PortRange::new(32_768, 65_535)];
})]
#[case::large("mtu", Warn, "veth1 9000", |f: &mut CheckFacts| f.network.devices[1].mtu = 9000)]
#[case::tunnel("mtu", Warn, "flannel.1 1500", |f: &mut CheckFacts| f.network.devices[2].mtu = 1500)]
#[case::nothing("mtu", Pass, "not compared", |f: &mut CheckFacts| f.network.devices.clear())]
#[case::no_uplink("uplink", Warn, "no default route", |f: &mut CheckFacts| f.network.devices[0].is_uplink = false)]
#[case::no_network("cni", Warn, "no CNI configuration", |f: &mut CheckFacts| f.others.cni = Some(Vec::new()))]
#[case::no_folder("cni", Warn, "not known", |f: &mut CheckFacts| f.others.cni = None)]
#[case::rules_left("kube-proxy", Fail, "table ip kube-proxy", |f: &mut CheckFacts| f.others.kube_proxy = Ok(rules()))]
#[case::runs("kube-proxy", Fail, "process 42", |f: &mut CheckFacts| f.others.kube_proxy_process = Some(42))]
#[case::to_be_replaced("kube-proxy", Warn, "table ip kube-proxy", |f: &mut CheckFacts| {
    f.others.kube_proxy = Ok(rules());
    f.installed = None;
})]
#[case::not_readable("kube-proxy", Warn, "cannot read", |f: &mut CheckFacts| f.others.kube_proxy = Err("denied".to_owned()))]
#[case::preempt_rt("kernel-preemption", Fail, "PREEMPT_RT", |f: &mut CheckFacts| f.kernel.interleaves_packets = true)]
#[case::leftovers("leftovers", Warn, "kube-dummy-if has 9", |f: &mut CheckFacts| f.others.leftovers = vec![("kube-dummy-if".into(), 9)])]
#[case::early("firewall-services", Warn, "PREROUTING of ip raw", |f: &mut CheckFacts| f.others.bypassed = Ok(vec!["PREROUTING of ip raw".into()]))]
#[case::chains("firewall", Warn, "FORWARD of ip filter", |f: &mut CheckFacts| f.others.firewall = Ok(vec!["FORWARD of ip filter".into()]))]
#[case::chains_not_readable("firewall", Warn, "denied", |f: &mut CheckFacts| f.others.firewall = Err("denied".into()))]
#[case::servers("ipvs", Warn, "2 virtual servers", |f: &mut CheckFacts| f.others.ipvs_servers = 2)]
#[case::replacement("cilium", Fail, "cil_sock4_conne", |f: &mut CheckFacts| f.others.programs = ["cil_sock4_conne".to_owned()].into())]
#[case::only_network("cilium", Pass, "without", |f: &mut CheckFacts| f.others.programs = ["cil_from_contai".to_owned()].into())]
#[case::data_plane("calico", Fail, "cali_tc_preambl", |f: &mut CheckFacts| f.others.programs = ["cali_tc_preambl".to_owned()].into())]
#[case::not_asked("api-server", Pass, "not checked", |f: &mut CheckFacts| f.api = ApiAccess::NotAsked)]
#[case::unknown("api-server", Warn, "no kubeconfig", |f: &mut CheckFacts| f.api = ApiAccess::NoCredentials("no kubeconfig".to_owned()))]
#[case::broken("api-server", Fail, "cannot use", |f: &mut CheckFacts| f.api = ApiAccess::BrokenKubeconfig("cannot use".to_owned()))]
#[case::p521("api-server", Fail, "HandshakeFailure", |f: &mut CheckFacts| f.api = ApiAccess::Certificates("received fatal alert: HandshakeFailure".to_owned()))]
#[case::away("api-server", Fail, "timed out", |f: &mut CheckFacts| f.api = ApiAccess::Unreachable("timed out".to_owned()))]
#[case::refused("api-server", Fail, "denies listing Nodes", |f: &mut CheckFacts| {
    f.api = ApiAccess::Refused { version: "v1.36.1".to_owned(), kinds: vec!["Nodes (403)".to_owned()] };
})]
#[case::off("agent", Pass, "switched off", |f: &mut CheckFacts| installed(f).agent = AgentState::NotAsked)]
#[case::sockets_unknown("socket-programs", Warn, "cannot tell", |f: &mut CheckFacts| installed(f).is_denied = true)]
#[case::devices_unknown("device-programs", Warn, "cannot tell", |f: &mut CheckFacts| installed(f).is_denied = true)]
#[case::unwell("agent", Fail, "HTTP 503", |f: &mut CheckFacts| {
    installed(f).agent = AgentState::Answered { address: address(), status: 503 };
})]
#[case::silent("agent", Fail, "refused", |f: &mut CheckFacts| {
    installed(f).agent = AgentState::Silent { address: address(), reason: "refused".to_owned() };
})]
#[case::problems_unknown("problems", Warn, "not known", |f: &mut CheckFacts| {
    installed(f).agent = AgentState::Silent { address: address(), reason: "refused".to_owned() };
})]
#[case::failure("problems", Warn, "no room", |f: &mut CheckFacts| installed(f).report.problems = vec!["no room".to_owned()])]
#[case::lost("socket-programs", Fail, "1 of 12 socket programs are not attached: sock_recvmsg4", |f: &mut CheckFacts| {
    installed(f).attachments.remove(0);
})]
#[case::lost_cgroup("socket-programs", Fail, "1 of 12", |f: &mut CheckFacts| installed(f).attachments[3].place = None)]
#[case::lost_direction("device-programs", Fail, "eth0 (egress)", |f: &mut CheckFacts| {
    installed(f).attachments.pop();
})]
#[case::detached("device-programs", Fail, "eth0 (egress)", |f: &mut CheckFacts| {
    installed(f).attachments.last_mut().unwrap().place = None;
})]
#[case::bare_uplink("device-programs", Fail, "cannot attach them to the uplink eth1", |f: &mut CheckFacts| {
    metrics(f).detached = ["eth0".to_owned(), "eth1".to_owned()].into();
})]
#[case::device_gone("device-programs", Fail, "no device", |f: &mut CheckFacts| installed(f).devices.clear())]
#[case::foreign("pins", Fail, "belongs to user 1000", |f: &mut CheckFacts| installed(f).owner = Some(Err("belongs to user 1000".to_owned())))]
#[case::not_installed("pins", Fail, "not installed", |f: &mut CheckFacts| installed(f).owner = None)]
#[case::not_there("maps", Fail, "no Ballast maps", |f: &mut CheckFacts| installed(f).maps = Err("no Ballast maps on the bpffs".to_owned()))]
#[case::never_filled("maps", Fail, "the maps are empty", |f: &mut CheckFacts| installed(f).maps = Ok((Vec::new(), 0)))]
#[case::nearly_full("map-usage", Warn, "names (90 of 100)", |f: &mut CheckFacts| installed(f).maps = Ok((vec![row("names", 90)], 3)))]
#[case::not_full("map-usage", Pass, "no map is nearly full", |f: &mut CheckFacts| installed(f).maps = Ok((vec![row("names", 89)], 3)))]
#[case::another("agent-version", Warn, "9.9.9", |f: &mut CheckFacts| metrics(f).version = Some("9.9.9".to_owned()))]
#[case::no_version("agent-version", Warn, "not Ballast's agent", |f: &mut CheckFacts| metrics(f).version = None)]
#[case::never("sync", Fail, "not completed a sync", |f: &mut CheckFacts| metrics(f).sync_age = None)]
#[case::incomplete("sync", Warn, "not programmed yet", |f: &mut CheckFacts| metrics(f).synced = false)]
#[case::old_sync("sync", Fail, "600 s ago", |f: &mut CheckFacts| metrics(f).sync_age = Some(Duration::from_mins(10)))]
#[case::long_period("sync", Pass, "600 s ago", |f: &mut CheckFacts| {
    metrics(f).sync_age = Some(Duration::from_mins(10));
    metrics(f).sync_period = Duration::from_mins(5);
})]
#[case::stuck("sync", Fail, "2 changes pending", |f: &mut CheckFacts| {
    metrics(f).sync_age = Some(Duration::from_mins(10));
    metrics(f).pending = 2;
})]
#[case::repaired("audit", Warn, "1 repaired", |f: &mut CheckFacts| metrics(f).audits_repaired = 1)]
#[case::failed("audit", Warn, "2 failed", |f: &mut CheckFacts| {
    metrics(f).audits_clean = 0;
    metrics(f).audits_failed = 2;
})]
#[case::none_yet("audit", Pass, "no audit yet", |f: &mut CheckFacts| metrics(f).audits_clean = 0)]
fn lines(#[case] check: &str, #[case] outcome: CheckResult, #[case] words: &str, #[case] change: Change) {
    let mut facts = well();
    change(&mut facts);
    let line = line(&facts, check);
    assert!(line.outcome == outcome && line.seen.contains(words), "{line:?}");
    assert_eq!(line.advice.is_empty(), outcome == Pass, "{line:?}");
}

#[test]
fn an_agent_that_does_not_answer_has_no_lines_about_its_metrics() {
    let mut facts = well();
    installed(&mut facts).metrics = None;
    assert!(judge(&facts).iter().all(|line| !["sync", "audit", "agent-version"].contains(&line.check)));
}

#[test]
fn xdp_alone_serves_no_device() {
    let mut facts = well();
    let all = &mut installed(&mut facts).attachments;
    all.retain(|one| one.ifindex.is_none());
    all.push(attachment("xdp_7", "xdp_ingress", Some(7)));
    assert!(line(&facts, "device-programs").seen.contains("no device"));
}

#[test]
fn long_lists_are_cut() {
    assert_eq!(some(["a", "b", "c"]), "a, b, c");
    assert_eq!(some(["a", "b", "c", "d", "e"]), "a, b, c and 2 more");
}

#[test]
fn port_range_of_the_advice_passes() {
    let mut facts = well();
    facts.network.node_ports = PortRange::new(20_000, 50_000);
    let advice = line(&facts, "port-ranges").advice;
    assert!(
        advice.contains("\"50001 60999\"")
            && advice.contains("add 32768-50000 to net.ipv4.ip_local_reserved_ports"),
        "{advice}"
    );
    facts.network.local_ports = vec![PortRange::new(50_001, 60_999)];
    assert_eq!(line(&facts, "port-ranges").outcome, Pass);
    facts.network.local_ports = vec![PortRange::new(1_024, 65_535)];
    facts.network.node_ports = PortRange::default();
    assert!(line(&facts, "port-ranges").advice.contains("ip_local_reserved_ports, for example 57344-65535"));
    facts.network.local_ports = vec![PortRange::new(1_024, 57_343)];
    assert_eq!(line(&facts, "port-ranges").outcome, Pass);
}
