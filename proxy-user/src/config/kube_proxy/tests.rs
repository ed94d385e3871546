use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use clap::{CommandFactory, Parser};
use rstest::rstest;
use serde_json::json;

use super::fields::{Effect, SETTINGS};
use super::file::{FileError, parse};
use super::kind::SettingKind;

use super::*;
use crate::cli::{Args, Command};
use crate::config::RunConfig;
use crate::config::kube_proxy::flags::{OWN, as_spelled_here};
use proxy_cli::value::{self, LogFormat, LogLevel, NodePortAddress};
use proxy_core::model::settings::{DetectLocal, UnallocatedAddresses};
use proxy_core::model::{HostDevice, HostView, NodeView};
use proxy_core::plan::plan_node;

const HEAD: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";

/// The file that kubeadm 1.36 puts into its `ConfigMap`.
const KUBEADM: &str = r#"apiVersion: kubeproxy.config.k8s.io/v1alpha1
bindAddress: 0.0.0.0
bindAddressHardFail: false
clientConnection:
  acceptContentTypes: ""
  burst: 0
  contentType: ""
  kubeconfig: /var/lib/kube-proxy/kubeconfig.conf
  qps: 0
clusterCIDR: 10.244.0.0/16,fd44::/48
configSyncPeriod: 0s
conntrack:
  maxPerCore: null
  min: null
  tcpBeLiberal: false
  tcpCloseWaitTimeout: null
  tcpEstablishedTimeout: null
  udpStreamTimeout: 0s
  udpTimeout: 0s
detectLocal:
  bridgeInterface: ""
  interfaceNamePrefix: ""
detectLocalMode: ""
enableProfiling: false
healthzBindAddress: ""
hostnameOverride: ""
iptables:
  localhostNodePorts: null
  masqueradeAll: false
  masqueradeBit: null
  minSyncPeriod: 0s
  syncPeriod: 0s
ipvs:
  excludeCIDRs: null
  minSyncPeriod: 0s
  scheduler: ""
  strictARP: false
  syncPeriod: 0s
  tcpFinTimeout: 0s
  tcpTimeout: 0s
  udpTimeout: 0s
kind: KubeProxyConfiguration
logging:
  flushFrequency: 0
  options:
    json:
      infoBufferSize: "0"
    text:
      infoBufferSize: "0"
  verbosity: 0
metricsBindAddress: ""
mode: ""
nftables:
  masqueradeAll: false
  masqueradeBit: null
  minSyncPeriod: 0s
  syncPeriod: 0s
nodePortAddresses: null
oomScoreAdj: null
portRange: ""
showHiddenMetricsForVersion: ""
winkernel:
  enableDSR: false
  forwardHealthCheckVip: false
  networkName: ""
  rootHnsEndpointName: ""
  sourceVip: ""
"#;

fn with_flags(flags: &[&str]) -> Result<RunConfig, String> {
    let all = ["ballast", "run"].iter().chain(flags).map(Into::into);
    let args = Args::try_parse_from(as_spelled_here(all)).map_err(|error| error.to_string())?;
    let Command::Run(args) = args.command else { panic!("not run") };
    RunConfig::new(*args).map_err(|error| error.to_string())
}

fn with_file(text: &str, flags: &[&str]) -> Result<RunConfig, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.yaml");
    std::fs::write(&path, text).unwrap();
    let file = format!("--config={}", path.display());
    let mut all = vec![&*file];
    // In a cluster the node's name is always given, and the host's name may not be a legal one here.
    all.extend(["--hostname-override", "node-a"].into_iter().filter(|_| !flags.contains(&"--no-name")));
    all.extend(flags.iter().filter(|flag| **flag != "--no-name"));
    with_flags(&all).map_err(|error| error.replace(&*path.to_string_lossy(), "F"))
}

fn body(text: &str) -> String {
    format!("{HEAD}{text}")
}

fn notes(config: &RunConfig) -> String {
    config.kube_proxy.notes.join("\n")
}

#[test]
fn the_file_of_kubeadm_works_unchanged_and_says_nothing() {
    let config = with_file(KUBEADM, &[]).unwrap();
    assert_eq!(notes(&config), "");
    let plain = with_flags(&[
        "--hostname-override=node-a",
        "--kubeconfig=/var/lib/kube-proxy/kubeconfig.conf",
        "--cluster-cidr=10.244.0.0/16,fd44::/48",
    ]);
    let Overlay { config_file, values, text, node_ports, netfilter, .. } = config.kube_proxy.clone();
    let mut expected = plain.unwrap();
    expected.kube_proxy = Overlay {
        config_file,
        netfilter,
        masquerade_mark: 1 << 14,
        mode: "iptables",
        hostname_override: "node-a".to_owned(),
        node_ports,
        values,
        text,
        ..Overlay::default()
    };
    expected.network.masquerade_all = Some(false);
    // A file without a mode means kube-proxy's default, iptables: node ports answer on loopback too.
    assert_eq!(config.network.nodeport_addresses.len(), 2);
    let node_ports = &config.node.node_port_addresses;
    assert!(node_ports.all && node_ports.ranges == ["127.0.0.0/8".parse().unwrap()]);
    expected.network.nodeport_addresses.clone_from(&config.network.nodeport_addresses);
    expected.node.node_port_addresses = config.node.node_port_addresses.clone();
    // This mode routes packets to unused addresses of Services.
    expected.network.unallocated_addresses = Some(UnallocatedAddresses::Pass);
    expected.node.unallocated = UnallocatedAddresses::Pass;
    assert_eq!(config, expected);
}

#[rstest]
#[case::iptables("mode: iptables\n", &[], Some(UnallocatedAddresses::Pass))]
#[case::no_mode("", &[], None)]
#[case::empty_mode("mode: \"\"\n", &[], Some(UnallocatedAddresses::Pass))]
#[case::empty_mode_and_flag("mode: \"\"\n", &["--unallocated-addresses=drop"], Some(UnallocatedAddresses::Drop))]
#[case::nftables("mode: nftables\n", &[], None)]
#[case::ipvs("mode: ipvs\n", &[], None)]
#[case::ranges("mode: iptables\n", &["--service-cidrs=10.96.0.0/12"], None)]
#[case::flag("mode: iptables\n", &["--unallocated-addresses=drop"], Some(UnallocatedAddresses::Drop))]
#[case::flag_and_ranges("", &["--service-cidrs=10.96.0.0/12", "--unallocated-addresses=pass"], Some(UnallocatedAddresses::Pass))]
fn unallocated_addresses_are_handled_as_in_the_mode(
    #[case] text: &str,
    #[case] flags: &[&str],
    #[case] expected: Option<UnallocatedAddresses>,
) {
    let config = with_file(&body(text), flags).unwrap();
    assert_eq!(config.network.unallocated_addresses, expected);
    assert_eq!(config.node.unallocated, expected.unwrap_or_default());
}

#[test]
fn address_with_leading_zeros_is_decimal() {
    let text =
        "bindAddress: 192.168.010.001\nclusterCIDR: 10.244.000.0/16\nnodePortAddresses: [192.168.010.0/24]\n";
    let config = with_file(&body(text), &[]).unwrap();
    assert_eq!(config.network.cluster_cidr, ["10.244.0.0/16".parse().unwrap()]);
    assert_eq!(
        config.network.nodeport_addresses,
        [NodePortAddress::Range("192.168.10.0/24".parse().unwrap())]
    );
}

#[rstest]
#[case("", Some(32_768), Some(131_072), Some(86_400), Some(3_600))]
#[case(
    "{maxPerCore: null, min: null, tcpCloseWaitTimeout: null}",
    Some(32_768),
    Some(131_072),
    Some(86_400),
    Some(3_600)
)]
#[case("{maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s}", None, Some(0), None, Some(3_600))]
#[case("{maxPerCore: 5, tcpCloseWaitTimeout: 7m}", Some(5), Some(131_072), Some(86_400), Some(420))]
fn netfilter_gets_kube_proxys_defaults(
    #[case] given: &str,
    #[case] max_per_core: Option<u32>,
    #[case] min: Option<u32>,
    #[case] established: Option<u64>,
    #[case] close_wait: Option<u64>,
) {
    let text = if given.is_empty() { body("") } else { body(&format!("conntrack: {given}\n")) };
    let found = with_file(&text, &[]).unwrap().kube_proxy.netfilter;
    let seconds = |duration: Option<Duration>| duration.map(|duration| duration.as_secs());
    assert_eq!((found.max_per_core, found.min), (max_per_core, min));
    assert_eq!((seconds(found.tcp_established), seconds(found.tcp_close_wait)), (established, close_wait));
}

#[test]
fn each_supported_field_changes_a_setting() {
    let config = with_file(
        &body(
            r#"
clientConnection: {kubeconfig: /k}
logging: {format: json, verbosity: 4}
hostnameOverride: Node-B
bindAddress: fd00::1
healthzBindAddress: "127.0.0.9"
metricsBindAddress: "127.0.0.8:1"
bindAddressHardFail: true
mode: nftables
iptables: {masqueradeAll: true, syncPeriod: 7s}
nftables: {masqueradeAll: true, syncPeriod: 1m, minSyncPeriod: 1.5s}
detectLocalMode: BridgeInterface
detectLocal: {bridgeInterface: cni0}
nodePortAddresses: [primary]
oomScoreAdj: -5
conntrack: {maxPerCore: 7, min: 9, tcpCloseWaitTimeout: 60s, tcpBeLiberal: true}
featureGates: {AllowServiceExternalIPs: false, WinDSR: true}
"#,
        ),
        &["--no-name"],
    )
    .unwrap();
    let shown = serde_json::to_value(&config).unwrap();
    assert_eq!(shown["source"]["cluster"]["kubeconfig"], "/k");
    assert_eq!((config.log_format, config.log_level), (LogFormat::Json, LogLevel::Debug));
    assert_eq!(config.node_name, "node-b");
    assert_eq!(config.bind_address.to_string(), "fd00::1");
    assert_eq!(config.healthz_bind_address.unwrap().to_string(), "127.0.0.9:10256");
    assert_eq!(config.metrics_bind_address.unwrap().to_string(), "127.0.0.8:1");
    assert!(config.kube_proxy.bind_address_hard_fail && config.kube_proxy.no_external_ips);
    assert_eq!(config.legacy_proxy_mode, Some("nftables"));
    assert!(config.node.masquerade_all);
    assert_eq!(config.sync_period, Duration::from_mins(1));
    assert_eq!(config.min_sync_period, Duration::from_millis(1500));
    assert_eq!(config.node.detect_local, DetectLocal::Bridge("cni0".to_owned()));
    assert!(config.node.node_port_addresses.primary && !config.node.node_port_addresses.all);
    assert_eq!(config.kube_proxy.oom_score_adj, Some(-5));
    let conntrack = &config.kube_proxy.conntrack;
    assert_eq!((conntrack.max_per_core, conntrack.min), (Some(7), Some(9)));
    assert_eq!(conntrack.tcp_close_wait, Some(Duration::from_mins(1)));
    assert!(conntrack.tcp_be_liberal);
    assert_eq!(notes(&config), "feature WinDSR=true is ignored");
}

#[rstest]
#[case("", Duration::from_secs(7))]
#[case("iptables", Duration::from_secs(7))]
#[case("ipvs", Duration::from_secs(8))]
#[case("nftables", Duration::from_secs(9))]
fn the_mode_chooses_its_period(#[case] mode: &str, #[case] expected: Duration) {
    let text = body(&format!(
        "mode: \"{mode}\"\niptables: {{syncPeriod: 7s}}\nipvs: {{syncPeriod: 8s}}\nnftables: {{syncPeriod: 9s}}\n"
    ));
    assert_eq!(with_file(&text, &[]).unwrap().sync_period, expected);
    assert_eq!(with_file(&text, &["--sync-period=3s"]).unwrap().sync_period, Duration::from_secs(3));
}

#[rstest]
#[case("127.0.0.8:1", "")]
#[case("127.0.0.9:1", "--metrics-bind-address is ignored")]
fn flag_with_the_address_of_the_file_is_no_contradiction(#[case] flag: &str, #[case] note: &str) {
    let flag = format!("--metrics-bind-address={flag}");
    let config = with_file(&body("metricsBindAddress: 127.0.0.8:1\n"), &[&flag]).unwrap();
    assert_eq!(config.metrics_bind_address, Some("127.0.0.8:1".parse().unwrap()));
    assert!(notes(&config).starts_with(note) && notes(&config).is_empty() == note.is_empty());
}

#[rstest]
#[case("iptables", 1 << 20)]
#[case("nftables", 1 << 21)]
fn masquerade_bit_is_that_of_the_mode(#[case] mode: &str, #[case] expected: u32) {
    let text =
        body(&format!("mode: {mode}\niptables: {{masqueradeBit: 20}}\nnftables: {{masqueradeBit: 21}}\n"));
    assert_eq!(with_file(&text, &[]).unwrap().node.masquerade_mark, expected);
    assert_eq!(with_file(&text, &["--masquerade-external=false"]).unwrap().node.masquerade_mark, 0);
    assert_eq!(with_file(&body(""), &[]).unwrap().node.masquerade_mark, 1 << 14);
}

#[rstest]
#[case("ipvs", "sh", "sh", "")]
#[case("ipvs", "mh", "mh", "")]
#[case("ipvs", "rr", "rr", "")]
#[case("ipvs", "wrr", "wrr", "")]
#[case("ipvs", "", "rr", "")]
#[case("ipvs", "dh", "dh", "")]
#[case("ipvs", "lc", "lc", "")]
#[case("ipvs", "wlc", "wlc", "")]
#[case("ipvs", "sed", "sed", "")]
#[case("ipvs", "nq", "nq", "")]
#[case("ipvs", "twos", "wlc", "")]
#[case("ipvs", "lblcr", "wlc", "Ballast does not have lblcr, and uses wlc, which is closest")]
#[case(
    "ipvs",
    "fo",
    "rr",
    "unknown scheduler fo: give one of random, rr, wrr, sh, dh, mh (or maglev), lc, wlc, sed, nq, latency; until then rr is used"
)]
#[case("iptables", "sh", "", " is ignored: only mode ipvs uses it")]
#[case("iptables", "", "", "")]
fn a_scheduler_means_what_it_says(
    #[case] mode: &str,
    #[case] name: &str,
    #[case] expected: &str,
    #[case] note: &str,
) {
    let file = with_file(&body(&format!("mode: {mode}\nipvs: {{scheduler: \"{name}\"}}\n")), &[]).unwrap();
    let flags = [
        "--hostname-override=node-a",
        &format!("--proxy-mode={mode}"),
        &format!("--ipvs-scheduler={name}"),
        "--algorithm=dh",
    ];
    let own = with_flags(&flags).unwrap().paths.algorithm.unwrap();
    assert_eq!(own.to_string(), "dh", "our own flag comes first");
    for (config, place) in
        [(file, ":4:19: ipvs.scheduler"), (with_flags(&flags[..3]).unwrap(), "--ipvs-scheduler")]
    {
        let algorithm = config.paths.algorithm.map_or_else(String::new, |name| name.to_string());
        assert_eq!(algorithm, expected);
        let notes = &config.kube_proxy.notes;
        assert_eq!(notes.len(), usize::from(!note.is_empty()), "{notes:?}");
        assert!(notes.iter().all(|line| line.ends_with(note) && line.contains(place)), "{notes:?}");
    }
}

#[rstest]
#[case(
    "iptables:\n  masqueradeBit: 40\n",
    "F:4:18: iptables.masqueradeBit: 40 is not valid; give a whole number from 0 to 31"
)]
#[case("iptables: 5\n", "F:3:11: iptables: 5 is not a mapping; give fields below it")]
#[case("mode: userspace\n", "F:3:7: mode: \"userspace\" is not valid; give iptables, ipvs, nftables or ebpf")]
#[case("bindAddress: here\n", "F:3:14: bindAddress: \"here\" is not valid; give an IP address")]
#[case("metricsBindAddress: 127.0.0.1:0\n", "F:3:21: metricsBindAddress: \"127.0.0.1:0\" is not valid")]
#[case("detectLocalMode: nodecidr\n", "F:3:18: detectLocalMode: \"nodecidr\" is not valid; give ClusterCIDR")]
#[case(
    "detectLocalMode: BridgeInterface\n",
    "F:3:18: detectLocalMode: BridgeInterface needs detectLocal.bridgeInterface"
)]
#[case(
    "clusterCIDR: 10.0.0.0/8,10.1.0.0/16\n",
    "F:3:14: clusterCIDR: \"10.0.0.0/8,10.1.0.0/16\" is not valid; give one range"
)]
#[case(
    "nodePortAddresses: [primary, primary]\n",
    "F:3:20: nodePortAddresses: [\"primary\", \"primary\"] is not valid"
)]
#[case(
    "oomScoreAdj: -1001\n",
    "F:3:14: oomScoreAdj: -1001 is not valid; give a whole number from -1000 to 1000"
)]
#[case("conntrack: {min: -1}\n", "F:3:18: conntrack.min: -1 is not valid")]
#[case("configSyncPeriod: 30\n", "F:3:19: configSyncPeriod: 30 is not valid; give a duration")]
#[case(
    "configSyncPeriod: -1s\n",
    "F:3:19: configSyncPeriod: \"-1s\" is not valid; give a duration that is not negative"
)]
#[case("hostnameOverride: 7\n", "F:3:19: hostnameOverride: 7 is not valid; give a string")]
#[case(
    "iptables: {minSyncPeriod: 31s}\n",
    "F:3:27: iptables.minSyncPeriod: 31s is longer than iptables.syncPeriod 30s"
)]
#[case("logging: {format: xml}\n", "F:3:19: logging.format: \"xml\" is not valid; give text or json")]
#[case("mode: [\n", "F:")]
fn config_error_names_the_field_and_the_fix(#[case] text: &str, #[case] expected: &str) {
    let error = with_file(&body(text), &[]).unwrap_err();
    assert!(error.contains(expected), "{error}");
}

#[rstest]
#[case("mood: ipvs\n", &[":3:1 is ignored: unknown field mood"])]
#[case("Mode: ipvs\n", &[":3:1 is ignored: unknown field Mode; did you mean mode?"])]
#[case("iptables:\n  mode: x\n", &[":4:3 is ignored: unknown field iptables.mode; did you mean mode?"])]
#[case("mode: iptables\nmode: ipvs\n", &[":3:1 is ignored: mode is given again below"])]
#[case(
    "metadata: {name: kube-proxy}\nconntrack: {max: null, min: 1}\nresourceContainer: /kube-proxy\nudpIdleTimeout: 250ms\n",
    &[
        ":3:1 is ignored: unknown field metadata",
        ":4:13 is ignored: unknown field conntrack.max",
        ":5:1 is ignored: unknown field resourceContainer",
        ":6:1 is ignored: unknown field udpIdleTimeout",
    ]
)]
fn fields_that_kube_proxy_decodes_leniently_are_warnings(#[case] text: &str, #[case] expected: &[&str]) {
    let config = with_file(&body(text), &[]).unwrap();
    let notes = &config.kube_proxy.values.ignored;
    assert_eq!(notes.len(), expected.len(), "{notes:?}");
    for (note, expected) in notes.iter().zip(expected) {
        assert!(note.contains(expected), "{note}");
    }
}

#[rstest]
#[case(
    "detectLocalMode: NodeCIDR\nclusterCIDR: 10.0.0.0/16,10.1.0.0/16\n",
    "F:4:14: clusterCIDR is ignored: detectLocalMode NodeCIDR does not use it"
)]
#[case(
    "detectLocalMode: NodeCIDR\nclusterCIDR: none\n",
    "F:4:14: clusterCIDR is ignored: detectLocalMode NodeCIDR does not use it"
)]
#[case(
    "ipvs: {excludeCIDRs: [x]}\n",
    "F:3:22: ipvs.excludeCIDRs is ignored: only mode ipvs uses it: [\"x\"] is not valid"
)]
#[case(
    "mode: nftables\nipvs: {tcpTimeout: -1s}\n",
    "F:4:20: ipvs.tcpTimeout is ignored: only mode ipvs uses it"
)]
#[case("mode: ebpf\nipvs: {syncPeriod: -1s}\n", "F:4:20: ipvs.syncPeriod is ignored: only mode ipvs uses it")]
#[case(
    "nftables: {masqueradeBit: 40}\n",
    "F:3:27: nftables.masqueradeBit is ignored: only mode nftables uses it"
)]
#[case(
    "mode: ipvs\nnftables: {minSyncPeriod: -1s}\n",
    "F:4:27: nftables.minSyncPeriod is ignored: only mode nftables uses it"
)]
#[case(
    "mode: nftables\niptables: {syncPeriod: -1s}\n",
    "F:4:24: iptables.syncPeriod is ignored: mode nftables does not use it"
)]
fn a_wrong_value_that_the_mode_does_not_use_is_ignored(#[case] text: &str, #[case] expected: &str) {
    let config = with_file(&body(text), &[]).unwrap();
    let [ignored] = &config.kube_proxy.values.ignored[..] else {
        panic!("{:?}", config.kube_proxy.values.ignored)
    };
    let ignored = ignored.split_once(':').map_or(String::new(), |(_, rest)| format!("F:{rest}"));
    assert!(ignored.starts_with(expected), "{ignored}");
}

#[rstest]
#[case("mode: ipvs\nipvs: {excludeCIDRs: [x]}\n", "ipvs.excludeCIDRs: [\"x\"] is not valid")]
#[case("mode: ipvs\nipvs: {tcpTimeout: -1s}\n", "ipvs.tcpTimeout: \"-1s\" is not valid")]
#[case("mode: nftables\nnftables: {masqueradeBit: 40}\n", "nftables.masqueradeBit: 40 is not valid")]
#[case("mode: nftables\niptables: {masqueradeBit: 40}\n", "iptables.masqueradeBit: 40 is not valid")]
#[case("iptables: {syncPeriod: -1s}\n", "iptables.syncPeriod: \"-1s\" is not valid")]
#[case("clusterCIDR: 10.0.0.0/16,10.1.0.0/16\n", "clusterCIDR: \"10.0.0.0/16,10.1.0.0/16\" is not valid")]
// What kube-proxy cannot decode is an error in every mode.
#[case("ipvs: {tcpTimeout: 5}\n", "ipvs.tcpTimeout: 5 is not valid")]
#[case("ipvs: {tcpTimeout: soon}\n", "ipvs.tcpTimeout: \"soon\" is not valid")]
#[case("nftables: {masqueradeBit: 4000000000}\n", "nftables.masqueradeBit: 4000000000 is not valid")]
#[case("ipvs: {excludeCIDRs: [5]}\n", "ipvs.excludeCIDRs: [5] is not valid")]
fn a_wrong_value_that_kube_proxy_checks_is_an_error(#[case] text: &str, #[case] expected: &str) {
    let error = with_file(&body(text), &[]).unwrap_err();
    assert!(error.contains(expected), "{error}");
}

#[rstest]
#[case("--ipvs-exclude-cidrs=x", "ipvs")]
#[case("--ipvs-tcp-timeout=-1s", "ipvs")]
#[case("--iptables-sync-period=-1s", "iptables")]
fn a_wrong_flag_is_an_error_in_its_mode_only(#[case] flag: &str, #[case] mode: &str) {
    for other in ["iptables", "ipvs"] {
        let found = with_flags(&["--hostname-override=node-a", flag, &format!("--proxy-mode={other}")]);
        let name = flag.split_once('=').unwrap().0;
        match found {
            Ok(config) => {
                assert_ne!(other, mode);
                let ignored = config.kube_proxy.values.ignored.join("\n");
                assert!(ignored.starts_with(&format!("{name} is ignored: ")), "{ignored}");
            }
            Err(error) => assert!(other == mode && error.contains(name), "{error}"),
        }
    }
    assert!(with_file(&body(""), &[flag]).is_ok(), "a file replaces it");
}

#[rstest]
#[case("mode: ipvs\n---\n", 0)]
#[case("mode: ipvs\n--- # the end\n\n", 0)]
#[case("mode: ipvs\n---\nmode: [\n", 1)]
#[case("mode: ipvs\n---\napiVersion: v1\nkind: Pod\n---\n", 1)]
fn the_first_document_of_a_file_counts(#[case] text: &str, #[case] ignored: usize) {
    for begin in ["", "---\n", "# a comment\n\n--- # the first\n"] {
        let config = with_file(&[begin, &body(text)].concat(), &[]).unwrap();
        assert_eq!(config.legacy_proxy_mode, Some("ipvs"));
        let found = &config.kube_proxy.values.ignored;
        assert_eq!(found.len(), ignored, "{found:?}");
        let line = begin.lines().count() + 4;
        assert!(
            found.iter().all(|text| text.contains(&format!(":{line}:1 is ignored: only the first document"))),
            "{found:?}"
        );
    }
    assert!(with_file(&["---\n---\n", &body(text)].concat(), &[]).is_err(), "the first one is empty");
}

#[test]
fn whole_numbers_may_have_a_fraction_of_zero() {
    let config = with_file(&body("oomScoreAdj: 5.0\nconntrack: {min: 1e2, maxPerCore: 7}\n"), &[]).unwrap();
    assert_eq!((config.kube_proxy.oom_score_adj, config.kube_proxy.conntrack.min), (Some(5), Some(100)));
    assert!(with_file(&body("oomScoreAdj: 5.5\n"), &[]).is_err());
}

#[test]
fn flags_are_spelled_as_for_kube_proxy() {
    let config = with_flags(&[
        "--proxy_mode=iptables",
        "--proxy-mode",
        "nftables",
        "--hostname_override=node-a",
        "--hostname-override=",
        "--hostname-override",
        "",
        "--bind-address=",
        "--kubeconfig=",
        "--detect-local-mode=",
        "--nodeport-addresses=",
        "--nodeport_addresses=10.0.0.0/8",
        "--nodeport-addresses=192.0.2.0/24,primary",
        "--iptables_sync_period=5s",
        "--iptables-sync-period=7s",
        "--feature-gates=AllowServiceExternalIPs=false,A=true",
        "--feature-gates=A=false",
        "--bind-address-hard-fail=T",
        "--conntrack-tcp-be-liberal=0",
        "-v=1",
        "--v=100",
    ])
    .unwrap();
    assert_eq!(config.kube_proxy.node_port_list, ["10.0.0.0/8", "192.0.2.0/24", "primary"]);
    assert_eq!((config.legacy_proxy_mode, &*config.node_name), (Some("nftables"), "node-a"));
    assert_eq!(config.sync_period, Duration::from_secs(7));
    assert!(config.kube_proxy.bind_address_hard_fail && !config.kube_proxy.conntrack.tcp_be_liberal);
    assert!(config.kube_proxy.no_external_ips && notes(&config).contains("feature A=false"));
    assert_eq!(config.log_level, LogLevel::Trace);
    let config =
        with_file(&body("hostnameOverride: node-b\n"), &["--no-name", "--hostname-override="]).unwrap();
    assert_eq!(config.node_name, "node-b", "an empty name does not replace the file's");
}

#[test]
fn all_errors_of_a_config_file_are_reported_together() {
    let FileError(errors) = parse("F", "kind: Pod\nmood: 1\noomScoreAdj: x\n").unwrap_err();
    assert_eq!(errors.len(), 3, "{errors:?}");
    assert!(errors[0].starts_with("F:1:1: apiVersion is missing"), "{errors:?}");
    assert!(
        errors[1].starts_with("F:1:7: kind: cannot read \"Pod\"; give KubeProxyConfiguration"),
        "{errors:?}"
    );
    let error = parse("F", "just text").unwrap_err().to_string();
    assert!(error.contains("with `apiVersion: kubeproxy.config.k8s.io/v1alpha1` and `kind:"), "{error}");
    assert!(parse("F", "").is_err());
}

#[test]
fn json_is_read_too() {
    let text = r#"{"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", "mode": "ipvs"}"#;
    assert_eq!(with_file(text, &[]).unwrap().legacy_proxy_mode, Some("ipvs"));
}

#[test]
fn fields_without_effect_are_warned_of_once_each() {
    let text =
        body("enableProfiling: true\nipvs: {scheduler: lc, strictARP: true}\nwinkernel: {networkName: x}\n");
    let config = with_file(&text, &["--kube-api-qps=50", "--proxy-mode=ipvs"]).unwrap();
    let expected = [
        "--proxy-mode is ignored: --config",
        "--kube-api-qps is ignored: --config",
        ":3:18: enableProfiling is ignored: ",
        ":4:34: ipvs.strictARP is ignored: ",
        ":5:26: winkernel.networkName is ignored: ",
        ":4:19: ipvs.scheduler is ignored: ",
    ];
    let notes = &config.kube_proxy.notes;
    assert_eq!(notes.len(), expected.len(), "{notes:?}");
    for (note, expected) in notes.iter().zip(expected) {
        assert!(note.contains(expected), "{note}");
    }
}

#[test]
fn a_file_stands_for_flags_but_those_for_the_log_name_and_server() {
    let text =
        body("hostnameOverride: node-b\nclusterCIDR: 10.1.0.0/16\nlogging: {verbosity: 1, format: json}\n");
    let flags = [
        "--cluster-cidr=10.9.0.0/16",
        "--masquerade-all",
        "--metrics-bind-address=",
        "-v=5",
        "--logging-format=text",
        "--master=https://api:6443",
        "--service-cidrs=10.96.0.0/12",
    ];
    let config = with_file(&text, &flags).unwrap();
    assert_eq!(config.node_name, "node-a");
    assert_eq!(config.network.cluster_cidr, ["10.1.0.0/16".parse().unwrap()]);
    assert!(!config.node.masquerade_all);
    assert!(config.metrics_bind_address.is_some());
    assert_eq!((config.log_level, config.log_format), (LogLevel::Debug, LogFormat::Text));
    let source = &serde_json::to_value(&config).unwrap()["source"];
    assert_eq!(source["cluster"]["master"], serde_json::json!(["https://api:6443"]));
    assert_eq!(config.network.service_cidrs, ["10.96.0.0/12".parse().unwrap()], "ours are always in effect");
    for flag in ["--cluster-cidr", "--masquerade-all", "--metrics-bind-address"] {
        assert!(notes(&config).contains(&format!("{flag} is ignored")), "{flag}");
    }
    assert_eq!(config.kube_proxy.notes.len(), 3);
}

#[test]
fn the_command_line_of_kube_proxy_is_taken() {
    let config = with_flags(&[
        "--hostname-override=node-a",
        "--proxy-mode=ipvs",
        "--ipvs-sync-period=5m0s",
        "--iptables-sync-period=1m",
        "--ipvs-scheduler=rr",
        "--conntrack-max-per-core=5",
        "--conntrack-tcp-timeout-established=24h0m0s",
        "--oom-score-adj=-999",
        "--masquerade-all=false",
        "--bind-address-hard-fail",
        "--feature-gates=AllowServiceExternalIPs=false,WinDSR=true",
        "--healthz-bind-address=127.0.0.1",
        "--healthz-port=7",
        "--metrics-port=0",
        "--detect-local-mode=ClusterCIDR",
        "--logging-format=json",
        "--vmodule=a=1",
        "--v=4",
    ])
    .unwrap();
    assert_eq!(config.sync_period, Duration::from_mins(5));
    assert!(config.kube_proxy.bind_address_hard_fail && config.kube_proxy.no_external_ips);
    assert_eq!(config.healthz_bind_address.unwrap().to_string(), "127.0.0.1:7");
    assert_eq!(config.metrics_bind_address, None);
    assert_eq!(config.kube_proxy.oom_score_adj, Some(-999));
    assert_eq!(config.kube_proxy.conntrack.max_per_core, Some(5));
    assert!(!config.node.masquerade_all);
    assert_eq!(config.node.detect_local, DetectLocal::Devices);
    assert_eq!(config.log_format, LogFormat::Json);
    let notes = notes(&config);
    for said in ["--vmodule is ignored", "ClusterCIDR without a range"] {
        assert!(notes.contains(said), "{notes}");
    }
    assert!(!notes.contains("conntrack"), "{notes}");
}

#[test]
fn a_flag_of_the_wrong_kind_is_refused_with_the_way_out() {
    let error = with_flags(&["--iptables-masquerade-bit=32"]).unwrap_err();
    assert!(error.contains("'32'") && error.contains("from 0 to 31"), "{error}");
    assert!(with_flags(&["--profiling=maybe"]).unwrap_err().contains("true or false"));
}

#[rstest]
#[case::no_mode("", "all,127.0.0.0/8")]
#[case::empty_mode("mode: ''\n", "all,127.0.0.0/8")]
#[case::iptables("mode: iptables\n", "all,127.0.0.0/8")]
#[case::switched_off("iptables: {localhostNodePorts: false}\n", "")]
#[case::switched_on("iptables: {localhostNodePorts: true}\n", "all,127.0.0.0/8")]
#[case::all("nodePortAddresses: [all]\n", "all,127.0.0.0/8")]
#[case::range("nodePortAddresses: [10.0.0.0/8]\n", "10.0.0.0/8")]
#[case::zero("nodePortAddresses: [0.0.0.0/0]\n", "0.0.0.0/0,127.0.0.0/8")]
#[case::loopback("nodePortAddresses: [127.0.0.0/8]\n", "127.0.0.0/8")]
#[case::other_family("nodePortAddresses: ['fd00::/8']\n", "fd00::/8,0.0.0.0/0,127.0.0.0/8")]
#[case::nftables("mode: nftables\n", "primary")]
#[case::nftables_null(
    "mode: nftables\nnodePortAddresses: []\niptables: {localhostNodePorts: true}\n",
    "primary"
)]
#[case::nftables_all("mode: nftables\nnodePortAddresses: [all]\n", "all")]
#[case::ipvs("mode: ipvs\n", "")]
#[case::ebpf("mode: ebpf\n", "")]
#[case::mixed("nodePortAddresses: [primary, localhost, 10.0.0.0/8]\n", "primary,localhost,10.0.0.0/8")]
fn node_ports_answer_where_kube_proxys_mode_does(#[case] text: &str, #[case] expected: &str) {
    let config = with_file(&body(text), &[]).unwrap();
    let found: Vec<_> = config.network.nodeport_addresses.iter().map(ToString::to_string).collect();
    assert_eq!(found.join(","), expected);
    assert_eq!(
        config.kube_proxy.node_ports.is_some(),
        !text.contains("nodePortAddresses: [") || text.contains("[]")
    );
}

#[test]
fn node_port_flags_without_a_mode_open_no_loopback() {
    let of = |flags: &[&str]| with_flags(flags).unwrap().network.nodeport_addresses;
    assert_eq!(of(&[]), []);
    assert_eq!(of(&["--proxy-mode=nftables"]), [NodePortAddress::Primary]);
    let with_loopback = [NodePortAddress::All, "127.0.0.0/8".parse().unwrap()];
    assert_eq!(of(&["--proxy-mode=iptables"]), with_loopback);
    assert_eq!(of(&["--iptables-localhost-nodeports=true"]), with_loopback);
}

/// Returns the addresses of a dual-stack node at which node ports answer, and those where health checks listen.
fn node_port_answers(config: &RunConfig) -> (String, String) {
    let addresses = ["127.0.0.1", "::1", "192.0.2.1", "10.0.0.7", "2001:db8::1", "fd00::1"];
    let device = HostDevice {
        addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
        ..HostDevice::default()
    };
    let host = HostView { devices: [(1, device)].into(), ..HostView::default() };
    let mut node = NodeView::new("node-a");
    node.internal_ips = ["192.0.2.1", "2001:db8::1"].map(|address| address.parse().unwrap()).to_vec();
    let plan = plan_node(&node, &host, &BTreeSet::new(), &BTreeSet::new(), &config.node);
    let texts =
        |addresses: Vec<&IpAddr>| addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
    let answers = plan.addresses.iter().filter(|(_, facts)| facts.node_ports).map(|(address, _)| address);
    (texts(answers.collect()), texts(plan.listen.iter().collect()))
}

const OFF: &str = "iptables: {localhostNodePorts: false}\n";
const V4: &str = "10.0.0.7 192.0.2.1";
const V6: &str = "2001:db8::1 fd00::1";
const LOOPBACK: &str = "127.0.0.1";

/// The node ports of upstream's `TestGetNodeIPs`, and of `TestNodePorts` of each mode. The keyword `localhost` also selects `::1`,
/// where kube-proxy serves nothing.
#[rstest]
#[case::none("", &[V4, LOOPBACK, V6], "0.0.0.0 ::")]
#[case::v4_zero("nodePortAddresses: [0.0.0.0/0]\n", &[V4, LOOPBACK, V6], "0.0.0.0 ::")]
#[case::v6_zero("nodePortAddresses: ['::/0']\n", &[V4, LOOPBACK, V6], "0.0.0.0 ::")]
#[case::v4_loopback("nodePortAddresses: [127.0.0.0/8]\n", &[LOOPBACK, V6], "127.0.0.1 ::")]
#[case::v4_half("nodePortAddresses: [0.0.0.0/1]\n", &["10.0.0.7", LOOPBACK, V6], "10.0.0.7 127.0.0.1 ::")]
#[case::v4_range("nodePortAddresses: [10.0.0.0/8]\n", &["10.0.0.7", V6], "10.0.0.7 ::")]
#[case::v6_range("nodePortAddresses: ['fd00::/8']\n", &[V4, LOOPBACK, "fd00::1"], "0.0.0.0 fd00::1")]
#[case::v4_and_v6_range("nodePortAddresses: [10.0.0.0/8, 'fd00::/8']\n", &["10.0.0.7", "fd00::1"], "10.0.0.7 fd00::1")]
#[case::keyword("nodePortAddresses: [localhost]\n", &[LOOPBACK, "::1"], "127.0.0.1 ::1")]
#[case::keyword_and_range("nodePortAddresses: [localhost, 10.0.0.0/8]\n", &["10.0.0.7", LOOPBACK, "::1"], "10.0.0.7 127.0.0.1 ::1")]
#[case::off(OFF, &[V4, V6], "0.0.0.0 ::")]
#[case::off_v4_loopback(&[OFF, "nodePortAddresses: [127.0.0.0/8]\n"].concat(), &[V6], "::")]
#[case::off_keyword(&[OFF, "nodePortAddresses: [localhost]\n"].concat(), &[], "")]
#[case::ipvs("mode: ipvs\n", &[V4, V6], "0.0.0.0 ::")]
#[case::ipvs_v4_loopback("mode: ipvs\nnodePortAddresses: [127.0.0.0/8, 10.0.0.0/8]\n", &["10.0.0.7", V6], "10.0.0.7 ::")]
#[case::ipvs_v6_loopback("mode: ipvs\nnodePortAddresses: ['::1/128']\n", &[V4], "0.0.0.0")]
#[case::nftables("mode: nftables\n", &["192.0.2.1", "2001:db8::1"], "192.0.2.1 2001:db8::1")]
fn node_ports_of_a_dual_stack_node_answer_where_kube_proxys_do(
    #[case] text: &str,
    #[case] expected: &[&str],
    #[case] listen: &str,
) {
    let config = with_file(&body(text), &[]).unwrap();
    let mut expected: Vec<IpAddr> =
        expected.iter().flat_map(|list| list.split(' ')).map(|address| address.parse().unwrap()).collect();
    expected.sort_unstable();
    let expected: Vec<_> = expected.iter().map(ToString::to_string).collect();
    assert_eq!(node_port_answers(&config), (expected.join(" "), listen.to_owned()));
    let names_loopback = text.contains("localhost]") || text.contains("127.") || text.contains("::1/");
    let is_off = text.contains("false") || text.contains("ipvs");
    let note = notes(&config);
    assert_eq!(note.contains("no loopback address accepts node ports"), names_loopback && is_off, "{note}");
}

#[rstest]
#[case("[primary, primary]")]
#[case("[localhost, 10.0.0.0/8, localhost]")]
#[case("[all, all]")]
#[case("[secondary]")]
fn a_list_of_node_port_addresses_is_refused(#[case] list: &str) {
    let error = with_file(&body(&format!("nodePortAddresses: {list}\n")), &[]).unwrap_err();
    assert!(error.contains("nodePortAddresses") && error.contains("at most once"), "{error}");
}

#[test]
fn every_flag_of_kube_proxy_is_there_and_every_own_one_is_listed() {
    let command = Args::command();
    let mut run = command.find_subcommand("run").unwrap().clone();
    run.build();
    let known: BTreeSet<_> = run
        .get_arguments()
        .flat_map(|arg| arg.get_long().into_iter().chain(arg.get_all_aliases().into_iter().flatten()))
        .collect();
    // clap adds the version flag to each command when it builds the whole command line.
    for setting in SETTINGS.iter().filter(|setting| !["", "version"].contains(&setting.flag)) {
        assert!(known.contains(setting.flag), "--{}", setting.flag);
    }
    for own in OWN {
        assert!(SETTINGS.iter().any(|setting| setting.flag == own), "{own}");
    }
    let keys: BTreeSet<_> = SETTINGS.iter().map(fields::Setting::key).collect();
    assert_eq!(keys.len(), SETTINGS.len(), "a name twice");
}

/// The flags of `kube-proxy --help`, version 1.36.3 on Linux.
#[test]
fn no_flag_of_kube_proxy_is_forgotten() {
    let all = "bind-address bind-address-hard-fail boot-id-file cleanup cluster-cidr config config-sync-period \
        conntrack-max-per-core conntrack-min conntrack-tcp-be-liberal conntrack-tcp-timeout-close-wait \
        conntrack-tcp-timeout-established conntrack-udp-timeout conntrack-udp-timeout-stream detect-local-mode \
        feature-gates healthz-bind-address healthz-port hostname-override init-only iptables-localhost-nodeports \
        iptables-masquerade-bit iptables-min-sync-period iptables-sync-period ipvs-exclude-cidrs \
        ipvs-min-sync-period ipvs-scheduler ipvs-strict-arp ipvs-sync-period ipvs-tcp-timeout ipvs-tcpfin-timeout \
        ipvs-udp-timeout kube-api-burst kube-api-content-type kube-api-qps kubeconfig log-flush-frequency \
        log-json-info-buffer-size log-json-split-stream log-text-info-buffer-size log-text-split-stream \
        logging-format machine-id-file masquerade-all master metrics-bind-address metrics-port \
        nodeport-addresses oom-score-adj pod-bridge-interface pod-interface-name-prefix profiling proxy-mode \
        show-hidden-metrics-for-version v version vmodule write-config-to";
    let expected: BTreeSet<_> = all.split_whitespace().collect();
    let listed: BTreeSet<_> =
        SETTINGS.iter().map(|setting| setting.flag).filter(|flag| !flag.is_empty()).collect();
    assert_eq!(listed, expected);
}

#[test]
fn written_config_parses_to_the_same_settings() {
    let text = body(
        "mode: nftables\nnftables: {syncPeriod: 1m30s, minSyncPeriod: 250ms}\nclusterCIDR: 10.1.0.0/16\n\
         featureGates: {AllowServiceExternalIPs: false}\nnodePortAddresses: [10.0.0.0/8]\noomScoreAdj: 3\n\
         conntrack: {min: 5}\nlogging: {vmodule: [{filePattern: a, verbosity: 3}]}\n",
    );
    let config = with_file(&text, &[]).unwrap();
    let written = document::yaml(&document::of(&config));
    let mut again = with_file(&written, &["--no-name"]).unwrap();
    assert!(written.contains("\n  syncPeriod: \"1m30s\"\n"), "{written}");
    let (first, second) = (config.kube_proxy.values.clone(), again.kube_proxy.values.clone());
    for (key, given) in first.iter().filter(|(_, given)| given.value.asks_for_something()) {
        assert_eq!(second.given(key).map(|given| &given.value), Some(&given.value), "{key}");
    }
    again.kube_proxy = config.kube_proxy.clone();
    again.network.masquerade_all = config.network.masquerade_all;
    assert_eq!(again, config);

    let defaults = document::yaml(&document::of(&with_flags(&["--hostname-override=node-a"]).unwrap()));
    let read = with_file(&defaults, &["--no-name"]).unwrap();
    assert_eq!((read.sync_period, read.min_sync_period), (Duration::from_secs(30), Duration::ZERO));
    assert_eq!(read.kube_proxy.conntrack, proxy_core::model::settings::Conntrack::default());
    assert_eq!(read.kube_proxy.oom_score_adj, None);
}

/// The fields of kube-proxy's type that are pointers, lists or maps: these may be `null`.
const NULLABLE: [&str; 11] = [
    "iptables.masqueradeBit",
    "iptables.localhostNodePorts",
    "nftables.masqueradeBit",
    "ipvs.excludeCIDRs",
    "nodePortAddresses",
    "oomScoreAdj",
    "conntrack.maxPerCore",
    "conntrack.min",
    "conntrack.tcpEstablishedTimeout",
    "conntrack.tcpCloseWaitTimeout",
    "logging.vmodule",
];

#[rstest]
#[case::flags(&[], "ebpf", "")]
#[case::mode(&["--proxy-mode=nftables", "--vmodule=a=1,b=2"], "nftables", "primary")]
#[case::list(&["--proxy-mode=iptables", "--nodeport-addresses=10.0.0.0/8"], "iptables", "10.0.0.0/8")]
fn written_config_has_the_types_of_kube_proxys(
    #[case] flags: &[&str],
    #[case] mode: &str,
    #[case] node_ports: &str,
) {
    let document = document::of(&with_flags(&[&["--hostname-override=node-a"], flags].concat()).unwrap());
    for setting in SETTINGS.iter().filter(|setting| !setting.field.is_empty()) {
        let value = &document[setting.field.split('.').next().unwrap()];
        let value = setting.field.split('.').skip(1).fold(value, |value, part| &value[part]);
        let is_right = match setting.kind {
            _ if value.is_null() => NULLABLE.contains(&setting.field),
            SettingKind::Bool => value.is_boolean(),
            SettingKind::Int(..) | SettingKind::Number => value.is_number(),
            SettingKind::Duration => value.as_str().is_some_and(|text| value::go_duration(text).is_ok()),
            SettingKind::Cidrs | SettingKind::NodePortAddresses => value.is_array(),
            SettingKind::Gates => value.is_object(),
            SettingKind::Any if setting.field == "logging.vmodule" => value.is_array(),
            _ => value.is_string(),
        };
        assert!(is_right, "{}: {value}", setting.field);
    }
    assert_eq!((&document["mode"], &document["hostnameOverride"]), (&json!(mode), &json!("node-a")));
    let list: Vec<_> = node_ports.split(',').filter(|part| !part.is_empty()).collect();
    assert_eq!(document["nodePortAddresses"], json!(list));
}

#[rstest]
#[case::nothing("", None, "", json!([]))]
#[case::empty("mode: \"\"\n", Some(""), "", json!([]))]
#[case::iptables("mode: iptables\n", Some("iptables"), "", json!([]))]
#[case::given("mode: ipvs\nhostnameOverride: Node-B\nnodePortAddresses: [10.1.2.3/8]\n", Some("ipvs"), "Node-B", json!(["10.1.2.3/8"]))]
#[case::nftables("mode: nftables\n", Some("nftables"), "", json!(["primary"]))]
#[case::ebpf("mode: ebpf\n", Some("ebpf"), "", json!([]))]
fn a_file_is_written_as_it_was_given(
    #[case] text: &str,
    #[case] mode: Option<&str>,
    #[case] name: &str,
    #[case] node_ports: serde_json::Value,
) {
    let Ok(config) = with_file(&body(text), &["--no-name"]) else {
        // The name of this machine may not be a legal one.
        return;
    };
    let document = document::of(&config);
    let found = (&document["mode"], &document["hostnameOverride"], &document["nodePortAddresses"]);
    assert_eq!(found, (&json!(mode), &json!(name), &node_ports));
    let again = with_file(&document::yaml(&document), &["--no-name"]).unwrap();
    assert_eq!(again.node.node_port_addresses, config.node.node_port_addresses);
    assert_eq!(again.network.unallocated_addresses, config.network.unallocated_addresses);
}

#[test]
fn a_whole_number_with_a_leading_zero_is_decimal() {
    let config = with_file(&body("conntrack: {maxPerCore: 010}\n"), &[]).unwrap();
    assert_eq!(config.kube_proxy.conntrack.max_per_core, Some(10));
}

/// Returns the table of `docs/compatibility.md`.
fn table() -> String {
    let mut text = String::from("| field | flag | kube-proxy's default | here |\n|---|---|---|---|\n");
    for setting in SETTINGS {
        let code = |word: &str, dashes: &str| match word {
            "" => String::new(),
            "v" => "`-v`".to_owned(),
            word => format!("`{dashes}{word}`"),
        };
        let what = match setting.effect {
            Effect::Used("") => "the same".to_owned(),
            Effect::Used(what) => what.to_owned(),
            Effect::Idle(why) => format!("nothing: {why}"),
        };
        let default = code(setting.default, "");
        let (field, flag) = (code(setting.field, ""), code(setting.flag, "--"));
        let line = format!("| {field} | {flag} | {default} | {what} |\n");
        text.push_str(&line);
    }
    text
}

/// `BALLAST_WRITE_DOCS=1` writes the table instead of comparing it.
#[test]
fn the_table_in_the_documentation_is_this_one() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/compatibility.md");
    let (begin, end) = ("<!-- fields and flags: begin -->\n", "<!-- fields and flags: end -->\n");
    let text = std::fs::read_to_string(path).unwrap();
    let (before, rest) = text.split_once(begin).expect("a place for the table");
    let (found, after) = rest.split_once(end).expect("an end of the table");
    if std::env::var_os("BALLAST_WRITE_DOCS").is_some() {
        std::fs::write(path, [before, begin, &table(), end, after].concat()).unwrap();
        return;
    }
    assert_eq!(found, table(), "run `BALLAST_WRITE_DOCS=1 cargo test the_table_in_the_documentation`");
}
