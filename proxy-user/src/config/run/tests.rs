use super::*;
use crate::cli::{Args, Command};
use crate::config::kube_proxy::fields::SETTINGS;
use crate::config::kube_proxy::flags::OWN;
use clap::{CommandFactory, Parser};
use proxy_core::model::ports::{NODE_PORTS, shared};
use rstest::rstest;

fn parse(flags: &[&str]) -> Result<RunConfig, String> {
    let all = ["ballast", "run", "--hostname-override", "node-a"].iter().chain(flags);
    let args = Args::try_parse_from(all).map_err(|e| e.to_string())?;
    let Command::Run(args) = args.command else { panic!("not run") };
    RunConfig::new(*args).map_err(|e| e.to_string())
}

#[test]
fn the_command_line_is_sound() {
    Args::command().debug_assert();
}

#[test]
fn every_flag_has_its_variable() {
    fn check(command: &clap::Command, path: &str) {
        for arg in command.get_arguments().filter(|a| !a.is_positional()) {
            let Some(long) = arg.get_long().filter(|l| !matches!(*l, "help" | "version")) else { continue };
            if SETTINGS.iter().any(|setting| setting.flag == long) && !OWN.contains(&long) {
                continue;
            }
            let expected = format!("BALLAST_{}", long.to_uppercase().replace('-', "_"));
            // In commands that remove something, a variable may give the place, but never what is removed.
            let says_where =
                ["bpffs", "output", "no-headers", "run-dir", "kubeconfig", "master"].contains(&long);
            let removes = ["ballast flow delete", "ballast service zero"].contains(&path) && !says_where;
            if ["cleanup", "force", "now", "yes"].contains(&long) || removes {
                assert_eq!(
                    arg.get_env(),
                    None,
                    "{path} --{long}: nothing is removed or broken by a variable"
                );
                continue;
            }
            let found = arg.get_env().map(|e| e.to_string_lossy().into_owned());
            assert_eq!(found, Some(expected), "{path} --{long}");
            assert!(arg.get_help().is_some_and(|h| !h.to_string().is_empty()), "{path} --{long} has no help");
        }
        for sub in command.get_subcommands() {
            check(sub, &format!("{path} {}", sub.get_name()));
        }
    }
    check(&Args::command(), "ballast");
}

#[test]
fn the_charts_settings_are_the_agents_variables() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/chart/values.schema.json");
    let schema: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let listed = schema["properties"]["settings"]["propertyNames"]["enum"].as_array().unwrap();
    let listed: Vec<_> = listed.iter().map(|name| name.as_str().unwrap().to_owned()).collect();
    // The chart sets these itself, or they have no use in a pod.
    let set = "CONFIG HOSTNAME_OVERRIDE INIT_ONLY WRITE_CONFIG_TO";
    // Beside a configuration file, the agent ignores these: they are fields of the chart's `config`.
    let fields = "KUBECONFIG BIND_ADDRESS HEALTHZ_BIND_ADDRESS METRICS_BIND_ADDRESS PROXY_MODE MASQUERADE_ALL \
                  DETECT_LOCAL_MODE POD_BRIDGE_INTERFACE POD_INTERFACE_NAME_PREFIX CLUSTER_CIDR NODEPORT_ADDRESSES";
    // The chart has a value for each: a setting has one place.
    let values = "GATE_SERVICE SOCKET_LB SOCKET_DROP NODE_PORT_BIND FORWARDING_MODE EJECTION TENANT_ANNOTATIONS SLOW_START PAGE \
                  LOG_LEVEL ALGORITHM MAX_FLOWS UPLINKS XDP OTLP_ENDPOINT OTLP_SIGNALS OTLP_SAMPLE BPFFS CGROUP_ROOT MANIFESTS MASTER";
    let elsewhere: Vec<_> = [set, fields, values].into_iter().flat_map(str::split_whitespace).collect();
    let command = Args::command();
    // Only tests need hidden flags.
    let run = command.find_subcommand("run").unwrap().get_arguments().filter(|arg| !arg.is_hide_set());
    let names = run.filter_map(|arg| Some(arg.get_env()?.to_string_lossy().into_owned()));
    let mut names: Vec<_> =
        names.filter(|name| !elsewhere.contains(&name.trim_start_matches("BALLAST_"))).collect();
    names.push(crate::telemetry::VARIABLE.to_owned());
    names.sort();
    assert_eq!(listed, names, "properties.settings.propertyNames of deploy/chart/values.schema.json");
}

#[test]
fn defaults_are_kube_proxys() {
    let config = parse(&[]).unwrap();
    assert_eq!(config.source, Source { manifests: None, cluster: Some(Cluster::default()) });
    assert_eq!(config.healthz_bind_address, Some("0.0.0.0:10256".parse().unwrap()));
    assert_eq!(config.metrics_bind_address, Some("127.0.0.1:10249".parse().unwrap()));
    assert_eq!(config.sync_period, Duration::from_secs(30));
    assert_eq!(config.bpffs, PathBuf::from("/sys/fs/bpf"));
    assert_eq!(config.capacities.flows, proxy_common::map_names::DEFAULT_FLOWS);
    assert_eq!(config.legacy_proxy_mode, None);
}

#[test]
fn an_ipv6_node_listens_on_ipv6() {
    let config = parse(&["--bind-address", "fd00::1"]).unwrap();
    assert_eq!(config.healthz_bind_address, Some("[::]:10256".parse().unwrap()));
    assert_eq!(config.metrics_bind_address, Some("[::1]:10249".parse().unwrap()));
}

#[test]
fn an_empty_address_switches_a_server_off() {
    let config = parse(&["--metrics-bind-address=", "--healthz-bind-address=127.0.0.9"]).unwrap();
    assert_eq!(config.metrics_bind_address, None);
    assert_eq!(config.healthz_bind_address, Some("127.0.0.9:10256".parse().unwrap()));
}

#[test]
fn flags_of_kube_proxy_are_taken() {
    let config = parse(&["--proxy-mode=iptables", "--v=4", "--sync-period=15m"]).unwrap();
    assert_eq!(config.legacy_proxy_mode, Some("iptables"));
    assert_eq!(config.log_level, LogLevel::Debug);
    assert_eq!(config.sync_period, Duration::from_mins(15));
    assert_eq!(parse(&["-v=2"]).unwrap().log_level, LogLevel::Info);
}

#[test]
fn devices_are_a_list() {
    let config = parse(&["--devices", "eth*,!eth9", "--devices", "cali*"]).unwrap();
    assert_eq!(config.devices.to_string(), "eth*,!eth9,cali*");
}

#[rstest]
#[case("127.0.0.1:10249", 1)]
#[case("0.0.0.0:10249", 1)]
#[case("[::]:10249", 1)]
#[case("127.0.0.2:10249", 0)]
fn servers_that_share_a_port_are_a_note(#[case] healthz: &str, #[case] notes: usize) {
    let notes_of = |config: RunConfig| config.kube_proxy.notes;
    let found = notes_of(parse(&["--healthz-bind-address", healthz]).unwrap());
    assert_eq!(found.iter().filter(|note| note.contains("different ports")).count(), notes, "{found:?}");
}

#[rstest]
#[case(&["--sync-period", "30x"], &["--sync-period", "'30x'", "30s"])]
#[case(&["--sync-period", "10ms"], &["--sync-period 10ms", "at least 1s"])]
#[case(&["--min-sync-period", "1m"], &["--min-sync-period 60s", "--sync-period 30s", "shorten"])]
#[case(&["--bind-address", "node-a"], &["--bind-address", "'node-a'"])]
#[case(&["--healthz-bind-address", "here"], &["--healthz-bind-address", "'here'", "[::]:10256"])]
#[case(&["--page", "all", "--metrics-bind-address="], &["--page needs the metrics server", "metricsBindAddress"])]
#[case(&["--healthz-bind-address", "127.0.0.1:10249", "--bind-address-hard-fail"], &["--metrics-bind-address", "127.0.0.1:10249", "different ports"])]
#[case(&["--devices", "!eth0"], &["--devices !eth0", "*,!eth0"])]
#[case(&["--devices", "a/b"], &["--devices", "'a/b'", "eth*"])]
#[case(&["--master", "foo:bar"], &["--master", "'foo:bar'", "https://HOST:6443"])]
#[case(&["--max-flows", "0"], &["--max-flows", "'0'", "1 to 16777216"])]
#[case(&["--max-memory", "12 Mb"], &["--max-memory", "'12 Mb'", "200Mi"])]
#[case(&["--max-memory", "20Mi"], &["--max-memory 20Mi is too little", "the maps need", "raise it"])]
#[case(&["--proxy-mode", "userspace"], &["--proxy-mode", "'userspace'", "ebpf"])]
#[case(&["--log-level", "loud"], &["--log-level", "'loud'", "debug"])]
#[case(&["--log-format", "xml"], &["--log-format", "'xml'", "json"])]
fn errors_name_the_flag_the_value_and_the_way_out(#[case] flags: &[&str], #[case] words: &[&str]) {
    let error = parse(flags).unwrap_err();
    for word in words {
        assert!(error.contains(word), "{word:?} is missing in: {error}");
    }
}

#[rstest]
#[case("Node-A.Example", Some("node-a.example"))]
#[case(" node\n", Some("node"))]
#[case("", None)]
#[case("node_a", None)]
fn node_names(#[case] text: &str, #[case] expected: Option<&str>) {
    assert_eq!(node_name(text).as_deref(), expected);
}

#[rstest]
#[case(&["--master", ""], None, Some((None, "")))]
#[case(&["--master=https://a:6443"], None, Some((None, "https://a:6443")))]
#[case(&["--master=https://a:1,https://b:2"], None, Some((None, "https://a:1 https://b:2")))]
#[case(&["--master=https://a:1", "--master=https://b:2"], None, Some((None, "https://a:1 https://b:2")))]
#[case(&["--manifests=/m"], Some("/m"), None)]
#[case(&["--manifests=/m", "--master="], Some("/m"), None)]
#[case(&["--manifests=/m", "--kubeconfig=/k"], Some("/m"), Some((Some("/k"), "")))]
#[case(&["--manifests=/m", "--master=https://a:1"], Some("/m"), Some((None, "https://a:1")))]
fn where_objects_come_from(
    #[case] flags: &[&str],
    #[case] manifests: Option<&str>,
    #[case] cluster: Option<(Option<&str>, &str)>,
) {
    let cluster = cluster.map(|(kubeconfig, master)| Cluster {
        kubeconfig: kubeconfig.map(PathBuf::from),
        master: master.split_whitespace().map(str::to_owned).collect(),
    });
    let expected = Source { manifests: manifests.map(PathBuf::from), cluster };
    assert_eq!(parse(flags).unwrap().source, expected);
}

#[test]
fn the_effective_settings_are_json() {
    let json = serde_json::to_value(parse(&["--manifests", "/etc/ballast"]).unwrap()).unwrap();
    assert_eq!(json["source"]["manifests"], "/etc/ballast");
    assert_eq!(json["nodeName"], "node-a");
    assert_eq!(json["syncPeriod"], 30.0);
    assert_eq!(json["capacities"]["flows"], 131_072);
    assert_eq!(json["healthzBindAddress"], "0.0.0.0:10256");
}

#[test]
fn longer_flow_timeout_raises_netfilters() {
    let flags =
        ["--flow-timeout-udp-stream=10m", "--flow-timeout-udp=5s", "--flow-timeout-tcp-established=48h"];
    let of = |more: &[&str]| parse(&[&flags[..], more].concat()).unwrap().kube_proxy.netfilter;
    let seconds = |timeout: Option<Duration>| timeout.map(|timeout| timeout.as_secs());
    let raised = of(&[]);
    assert_eq!((seconds(raised.udp), seconds(raised.udp_stream)), (None, Some(600)));
    assert_eq!(seconds(raised.tcp_established), Some(48 * 3600));
    let is_longer = of(&["--conntrack-udp-timeout-stream=20m"]);
    assert_eq!(seconds(is_longer.udp_stream), Some(1200));
    // Without masquerading, netfilter tracks no connection of a Service.
    let without = of(&["--masquerade-external=false"]);
    assert_eq!((seconds(without.udp_stream), seconds(without.tcp_established)), (None, Some(86_400)));
}

#[test]
fn timeouts_of_flows_are_ours_then_kube_proxys_then_the_defaults() {
    let default = parse(&[]).unwrap().flow_timeouts;
    assert_eq!((default.tcp_established, default.udp, default.udp_stream), (86_400, 30, 120));
    let flags = [
        "--conntrack-tcp-timeout-established=2h",
        "--conntrack-udp-timeout=1500ms",
        "--conntrack-udp-timeout-stream=9000h",
        "--flow-timeout-tcp-established=90s",
        "--flow-timeout-tcp-time-wait=1m",
    ];
    let config = parse(&flags).unwrap();
    let timeouts = config.flow_timeouts;
    assert_eq!((timeouts.tcp_established, timeouts.tcp_time_wait), (90, 60));
    assert_eq!((timeouts.udp, timeouts.udp_stream), (2, FlowTimeouts::LONGEST), "the nearest that there is");
    assert_eq!(config.node.timeouts, timeouts);
    assert_eq!(config.kube_proxy.conntrack.tcp_established, Some(Duration::from_hours(2)), "netfilter's");
    let json = serde_json::to_value(&config).unwrap();
    assert_eq!(json["flowTimeouts"]["tcpEstablished"], 90);
}

#[rstest]
#[case(&["--flow-timeout-udp", "0"], &["--flow-timeout-udp", "whole seconds", "1s"])]
#[case(&["--flow-timeout-udp", "1500ms"], &["--flow-timeout-udp", "whole seconds"])]
#[case(&["--flow-timeout-tcp-close", "600h"], &["--flow-timeout-tcp-close", "596h31m23s"])]
#[case(&["--socket-lb", "some"], &["--socket-lb", "host-only"])]
#[case(&["--node-port-bind", "no"], &["--node-port-bind", "allow", "refuse"])]
#[case(&["--socket-drop", "loud"], &["--socket-drop", "silent", "fail"])]
#[case(&["--ejection", "never"], &["--ejection", "on", "off"])]
#[case(&["--tcx-order", "middle"], &["--tcx-order", "nest", "first", "last"])]
#[case(&["--clsact-priority", "0"], &["--clsact-priority", "1..=65535"])]
#[case(&["--snat-ports", "1-2"], &["--snat-ports", "1024"])]
#[case(&["--service-node-port-range", "9"], &["--service-node-port-range", "30000-32767"])]
fn values_of_the_paths_are_checked(#[case] flags: &[&str], #[case] parts: &[&str]) {
    let error = parse(flags).unwrap_err();
    for part in parts {
        assert!(error.contains(part), "{part}: {error}");
    }
}

#[test]
fn source_ports_are_those_that_are_free() {
    let config = parse(&[]).unwrap();
    let [low, high] = config.node.snat_ports;
    let local = ports::local().unwrap();
    for one in [low, high] {
        assert_eq!(shared(&[one], &[NODE_PORTS]), 0);
        assert_eq!(shared(&[one], &local), 0, "of this machine");
    }
    let shown = SnatPorts(config.node.snat_ports).to_string();
    assert_eq!(serde_json::to_value(&config).unwrap()["network"]["snatPorts"], shown);
    let given = parse(&["--snat-ports", "5000-5999"]).unwrap();
    assert_eq!(SnatPorts(given.node.snat_ports).to_string(), "5000-5999");
}
