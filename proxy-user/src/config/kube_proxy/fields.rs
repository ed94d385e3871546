//! Every field of `KubeProxyConfiguration` (kubeproxy.config.k8s.io/v1alpha1) and every flag of kube-proxy 1.37, and the effect
//! of each in Ballast. The file reader, the command line and the table in `docs/compatibility.md` are made from this one list.

use super::kind::SettingKind::{
    self, Any, Bool, Cidrs, ClusterCidr, Duration, Gates, Int, Ip, Listen, LocalMode, LogFormat, Mode,
    NodePortAddresses, Number, Text,
};
use super::kind::{Value, Wrong};

/// The effect of a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It has the same effect as in kube-proxy, or the effect that the text states.
    Used(&'static str),
    /// It is checked and ignored; the log states this once, with this reason.
    Idle(&'static str),
}

use Effect::{Idle, Used};

/// A field, a flag, or both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setting {
    /// The path in the file; empty if there is only a flag.
    pub field: &'static str,
    /// The flag without its dashes; empty if there is none.
    pub flag: &'static str,
    /// The kind of its values.
    pub kind: SettingKind,
    /// kube-proxy's default.
    pub default: &'static str,
    /// Its effect in Ballast.
    pub effect: Effect,
}

const fn both(
    field: &'static str,
    flag: &'static str,
    kind: SettingKind,
    default: &'static str,
    effect: Effect,
) -> Setting {
    Setting { field, flag, kind, default, effect }
}

const fn field(field: &'static str, kind: SettingKind, default: &'static str, effect: Effect) -> Setting {
    Setting { field, flag: "", kind, default, effect }
}

const fn flag(flag: &'static str, kind: SettingKind, default: &'static str, effect: Effect) -> Setting {
    Setting { field: "", flag, kind, default, effect }
}

const I32: i64 = i32::MAX as i64;
const COUNT: SettingKind = Int(0, I32);
const BIT: SettingKind = Int(0, 31);
const NO_IPVS: Effect = Idle("Ballast does not use IPVS");
const WINDOWS: Effect = Idle("only for Windows");
const BUFFERS: Effect = Idle("log lines are written unbuffered to standard error");
const PERIOD: Effect = Used("how often all maps are compared with the desired state; at least 1s");
const MIN_PERIOD: Effect = Used("shortest time between two syncs; default: no delay");
const NETFILTER: &str = "if given, set as a netfilter sysctl of the node";
const TIMEOUT: &str = "if given, set as a netfilter sysctl of the node, and as the timeout of flows unless a `--flow-timeout-*` is given";
const TCP_TIMEOUT: &str = "set as a netfilter sysctl of the node; if given, also the timeout of flows unless a `--flow-timeout-*` is given";

/// All settings, in the order of the documentation.
pub const SETTINGS: &[Setting] = &[
    flag("config", Text, "", Used("when the file changes, the agent exits, so that it is restarted")),
    flag("write-config-to", Text, "", Used("writes the settings in kube-proxy's format and exits")),
    flag("cleanup", Bool, "false", Used("the same as `ballast cleanup`")),
    flag("init-only", Bool, "false", Used("mounts bpffs and cgroup2, sets what needs root, and exits")),
    flag("version", Bool, "false", Used("")),
    flag("master", Text, "", Used("also together with --config; takes a comma-separated list")),
    both(
        "featureGates",
        "feature-gates",
        Gates,
        "",
        Used("only `AllowServiceExternalIPs`; others are ignored"),
    ),
    both("clientConnection.kubeconfig", "kubeconfig", Text, "", Used("")),
    field(
        "clientConnection.acceptContentTypes",
        Text,
        "",
        Idle("the agent requests protobuf, and accepts JSON"),
    ),
    both(
        "clientConnection.contentType",
        "kube-api-content-type",
        Text,
        "application/vnd.kubernetes.protobuf",
        Idle("the agent requests protobuf, and accepts JSON"),
    ),
    both(
        "clientConnection.qps",
        "kube-api-qps",
        Number,
        "5",
        Idle("the agent has four watches, and sends few events"),
    ),
    both(
        "clientConnection.burst",
        "kube-api-burst",
        COUNT,
        "10",
        Idle("the agent has four watches, and sends few events"),
    ),
    both("logging.format", "logging-format", LogFormat, "text", Used("Ballast's flag has priority")),
    both(
        "logging.verbosity",
        "v",
        Int(0, I32),
        "0",
        Used("0 to 3: info, 4 and 5: debug, more: trace; Ballast's flag has priority"),
    ),
    both("logging.flushFrequency", "log-flush-frequency", Any, "5s", BUFFERS),
    both(
        "logging.vmodule",
        "vmodule",
        Any,
        "",
        Idle("the variable BALLAST_LOG sets the level of single modules"),
    ),
    both("logging.options.text.splitStream", "log-text-split-stream", Bool, "false", BUFFERS),
    both("logging.options.text.infoBufferSize", "log-text-info-buffer-size", Any, "0", BUFFERS),
    both("logging.options.json.splitStream", "log-json-split-stream", Bool, "false", BUFFERS),
    both("logging.options.json.infoBufferSize", "log-json-info-buffer-size", Any, "0", BUFFERS),
    both("hostnameOverride", "hostname-override", Text, "", Used("the flag has priority")),
    both("bindAddress", "bind-address", Ip, "0.0.0.0", Used("")),
    both("healthzBindAddress", "healthz-bind-address", Listen, "0.0.0.0:10256", Used("")),
    both("metricsBindAddress", "metrics-bind-address", Listen, "127.0.0.1:10249", Used("")),
    flag("healthz-port", Int(0, 65_535), "10256", Used("deprecated; 0: no server")),
    flag("metrics-port", Int(0, 65_535), "10249", Used("deprecated; 0: no server")),
    both("bindAddressHardFail", "bind-address-hard-fail", Bool, "false", Used("")),
    both("enableProfiling", "profiling", Bool, "false", Idle("Ballast has no Go runtime")),
    both(
        "showHiddenMetricsForVersion",
        "show-hidden-metrics-for-version",
        Text,
        "",
        Idle("Ballast hides no metric"),
    ),
    both("mode", "proxy-mode", Mode, "", Used("all modes mean `ebpf`; logged once")),
    both(
        "iptables.masqueradeBit",
        "iptables-masquerade-bit",
        BIT,
        "14",
        Used("in every mode except nftables; the mark of packets for `--masquerade-external`"),
    ),
    both(
        "iptables.masqueradeAll",
        "masquerade-all",
        Bool,
        "false",
        Used("in every mode except nftables; the flag, without a file, in every mode"),
    ),
    both(
        "iptables.localhostNodePorts",
        "iptables-localhost-nodeports",
        Bool,
        "true",
        Used(
            "in mode iptables, `true` adds 127.0.0.0/8 to the node port addresses if they contain it; `false` keeps node ports off loopback, whatever the addresses name",
        ),
    ),
    both("iptables.syncPeriod", "iptables-sync-period", Duration, "30s", PERIOD),
    both("iptables.minSyncPeriod", "iptables-min-sync-period", Duration, "1s", MIN_PERIOD),
    both("ipvs.syncPeriod", "ipvs-sync-period", Duration, "30s", PERIOD),
    both("ipvs.minSyncPeriod", "ipvs-min-sync-period", Duration, "0s", MIN_PERIOD),
    both(
        "ipvs.scheduler",
        "ipvs-scheduler",
        Text,
        "",
        Used(
            "in mode ipvs, as `--algorithm`: `rr` (also if empty), `wrr`, `sh`, `dh`, `mh`, `lc`, `wlc`, `sed`, `nq`, `latency`; \
             `twos` is `wlc`; `lblc` and `lblcr` are `wlc`, unknown names `rr`, with a line in the log",
        ),
    ),
    both("ipvs.excludeCIDRs", "ipvs-exclude-cidrs", Cidrs, "", NO_IPVS),
    both("ipvs.strictARP", "ipvs-strict-arp", Bool, "false", Idle("Service addresses are on no device")),
    both("ipvs.tcpTimeout", "ipvs-tcp-timeout", Duration, "0s", NO_IPVS),
    both("ipvs.tcpFinTimeout", "ipvs-tcpfin-timeout", Duration, "0s", NO_IPVS),
    both("ipvs.udpTimeout", "ipvs-udp-timeout", Duration, "0s", NO_IPVS),
    field("nftables.masqueradeBit", BIT, "14", Used("in mode nftables")),
    field("nftables.masqueradeAll", Bool, "false", Used("in mode nftables")),
    field("nftables.syncPeriod", Duration, "30s", PERIOD),
    field("nftables.minSyncPeriod", Duration, "1s", MIN_PERIOD),
    field("winkernel.networkName", Text, "", WINDOWS),
    field("winkernel.sourceVip", Text, "", WINDOWS),
    field("winkernel.enableDSR", Bool, "false", WINDOWS),
    field("winkernel.rootHnsEndpointName", Text, "", WINDOWS),
    field("winkernel.forwardHealthCheckVip", Bool, "false", WINDOWS),
    both(
        "detectLocalMode",
        "detect-local-mode",
        LocalMode,
        "ClusterCIDR",
        Used("without mode and range, pods are recognized by their devices"),
    ),
    both("detectLocal.bridgeInterface", "pod-bridge-interface", Text, "", Used("")),
    both("detectLocal.interfaceNamePrefix", "pod-interface-name-prefix", Text, "", Used("")),
    both("clusterCIDR", "cluster-cidr", ClusterCidr, "", Used("")),
    both(
        "nodePortAddresses",
        "nodeport-addresses",
        NodePortAddresses,
        "",
        Used(
            "empty: as kube-proxy in the mode that is given; without a file and a mode: all except loopback",
        ),
    ),
    both(
        "oomScoreAdj",
        "oom-score-adj",
        Int(-1000, 1000),
        "-999",
        Used("if given; to lower the value needs CAP_SYS_RESOURCE"),
    ),
    both(
        "conntrack.maxPerCore",
        "conntrack-max-per-core",
        COUNT,
        "32768",
        Used(
            "set together with `min` as a netfilter sysctl of the node, if this is more than it has; if given, the ceiling of the flows",
        ),
    ),
    both("conntrack.min", "conntrack-min", COUNT, "131072", Used("see `maxPerCore`")),
    both(
        "conntrack.tcpEstablishedTimeout",
        "conntrack-tcp-timeout-established",
        Duration,
        "24h0m0s",
        Used(TCP_TIMEOUT),
    ),
    both(
        "conntrack.tcpCloseWaitTimeout",
        "conntrack-tcp-timeout-close-wait",
        Duration,
        "1h0m0s",
        Used(TCP_TIMEOUT),
    ),
    both("conntrack.tcpBeLiberal", "conntrack-tcp-be-liberal", Bool, "false", Used(NETFILTER)),
    both("conntrack.udpTimeout", "conntrack-udp-timeout", Duration, "0s", Used(TIMEOUT)),
    both("conntrack.udpStreamTimeout", "conntrack-udp-timeout-stream", Duration, "0s", Used(TIMEOUT)),
    both(
        "configSyncPeriod",
        "config-sync-period",
        Duration,
        "15m0s",
        Idle("watches resume where they stopped; the agent does not resync by listing"),
    ),
    field("portRange", Text, "", Idle("kube-proxy does not use it either")),
    field("windowsRunAsService", Bool, "false", WINDOWS),
    flag("boot-id-file", Text, "", Idle("Ballast does not identify the machine")),
    flag("machine-id-file", Text, "", Idle("Ballast does not identify the machine")),
];

/// The modes that are given, by which kube-proxy decides what it checks.
#[derive(Clone, Copy, Debug)]
pub struct Modes<'a> {
    /// The mode of the proxy.
    pub proxy: &'a str,
    /// How pods are recognized; may be empty.
    pub local: &'a str,
    /// Whether the settings come from a file.
    pub is_file: bool,
}

impl Setting {
    /// Whether kube-proxy checks the value only in some modes (`pkg/proxy/apis/config/validation`).
    fn depends_on_mode(&self) -> bool {
        let is_period = matches!(self.field, "iptables.syncPeriod" | "iptables.minSyncPeriod");
        let is_of_mode = self.field.starts_with("ipvs.") || self.field.starts_with("nftables.");
        is_of_mode || is_period || self.field == "clusterCIDR"
    }

    /// Returns why the setting is not used in these modes.
    pub fn unused(&self, modes: Modes<'_>) -> Option<String> {
        let Modes { proxy, local, is_file } = modes;
        if !self.depends_on_mode() {
            return None;
        }
        match self.field.split('.').next() {
            Some(own @ ("ipvs" | "nftables")) if proxy != own => Some(format!("only mode {own} uses it")),
            // The flags for iptables are also those for nftables.
            Some("iptables") if proxy == "ipvs" || proxy == "nftables" && is_file => {
                Some(format!("mode {proxy} does not use it"))
            }
            Some("clusterCIDR") if !matches!(local, "" | "ClusterCIDR") => {
                Some(format!("detectLocalMode {local} does not use it"))
            }
            _ => None,
        }
    }

    /// Returns the value if the mode decides whether `wrong` counts.
    pub fn unfit(&self, shown: &str, wrong: Wrong) -> Result<Value, Wrong> {
        match wrong {
            Wrong::Rule(expected) if self.depends_on_mode() => {
                Ok(Value::Unfit(format!("{shown} is not valid; {expected}")))
            }
            wrong => Err(wrong),
        }
    }

    /// Returns the setting of a field.
    pub fn of_field(path: &str) -> Option<&'static Self> {
        SETTINGS.iter().find(|setting| setting.field == path)
    }

    /// Whether there is a field below this path.
    pub fn has_below(path: &str) -> bool {
        SETTINGS
            .iter()
            .any(|setting| setting.field.strip_prefix(path).is_some_and(|rest| rest.starts_with('.')))
    }

    /// Returns the name under which its value is stored: the field, or the flag if there is no field.
    pub const fn key(&self) -> &'static str {
        if self.field.is_empty() { self.flag } else { self.field }
    }
}
