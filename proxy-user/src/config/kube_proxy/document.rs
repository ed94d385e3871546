//! The settings in effect in kube-proxy's own format, for `--write-config-to` and `/configz`.

use std::time::Duration;

use serde_json::{Map, Value as Json, json};

use super::fields::{SETTINGS, Setting};
use super::file::{API_VERSION, KIND};
use super::kind::{SettingKind, Value};
use crate::config::run::RunConfig;
use proxy_cli::value::DetectLocalMode;

/// Returns a `KubeProxyConfiguration` with the settings of `config`; a setting that was not given has kube-proxy's default.
pub fn of(config: &RunConfig) -> Json {
    let mut document = Map::new();
    document.insert("apiVersion".to_owned(), json!(API_VERSION));
    document.insert("kind".to_owned(), json!(KIND));
    for setting in SETTINGS.iter().filter(|setting| !setting.field.is_empty()) {
        let given =
            config.kube_proxy.values.given(setting.key()).map(|given| match (setting.field, &given.value) {
                ("logging.vmodule", Value::Any(Json::String(flag))) => vmodule(flag),
                (_, value) => written(value),
            });
        put(&mut document, setting.field, given.unwrap_or_else(|| default(setting)));
    }
    for (field, value) in effective(config) {
        put(&mut document, field, value);
    }
    Json::Object(document)
}

/// Returns the settings for which the agent has its own flags.
fn effective(config: &RunConfig) -> Vec<(&'static str, Json)> {
    let network = &config.network;
    let listen =
        |address: Option<std::net::SocketAddr>| json!(address.map(|at| at.to_string()).unwrap_or_default());
    let kube_proxy = &config.kube_proxy;
    let mode = kube_proxy.mode;
    let section = match mode {
        "ipvs" => ["ipvs.syncPeriod", "ipvs.minSyncPeriod"],
        "nftables" => ["nftables.syncPeriod", "nftables.minSyncPeriod"],
        _ => ["iptables.syncPeriod", "iptables.minSyncPeriod"],
    };
    let masquerade = if mode == "nftables" { "nftables.masqueradeAll" } else { "iptables.masqueradeAll" };
    let ranges: Vec<_> = network.cluster_cidr.iter().map(ToString::to_string).collect();
    let kubeconfig = config.source.cluster.as_ref().and_then(|cluster| cluster.kubeconfig.as_ref());
    let kubeconfig = kubeconfig.map_or_else(String::new, |path| path.display().to_string());
    // A file without the field asks for iptables in less than one with it, also if it is empty.
    let named = match config.legacy_proxy_mode {
        named if mode == "iptables" => {
            let is_given = kube_proxy.values.given("mode").is_some();
            named.or(is_given.then_some("")).map_or(Json::Null, |named| json!(named))
        }
        _ => json!(mode),
    };
    vec![
        ("clientConnection.kubeconfig", json!(kubeconfig)),
        ("hostnameOverride", json!(kube_proxy.hostname_override)),
        ("bindAddress", json!(config.bind_address)),
        ("healthzBindAddress", listen(config.healthz_bind_address)),
        ("metricsBindAddress", listen(config.metrics_bind_address)),
        ("mode", named),
        (section[0], json!(go(config.sync_period))),
        (section[1], json!(go(config.min_sync_period))),
        (masquerade, json!(network.masquerade_all == Some(true))),
        ("detectLocalMode", json!(network.detect_local_mode.map_or("", DetectLocalMode::name))),
        ("detectLocal.bridgeInterface", json!(network.pod_bridge_interface.clone().unwrap_or_default())),
        (
            "detectLocal.interfaceNamePrefix",
            json!(network.pod_interface_name_prefix.clone().unwrap_or_default()),
        ),
        ("clusterCIDR", json!(ranges.join(","))),
        ("nodePortAddresses", json!(kube_proxy.node_port_list)),
    ]
}

fn put(document: &mut Map<String, Json>, field: &str, value: Json) {
    let Some((first, rest)) = field.split_once('.') else {
        document.insert(field.to_owned(), value);
        return;
    };
    if let Json::Object(below) = document.entry(first).or_insert_with(|| json!({})) {
        put(below, rest, value);
    }
}

/// The fields that may be `null` in kube-proxy's type, and mean something else here if they are not given.
const ASKING: [&str; 6] = [
    "oomScoreAdj",
    "iptables.localhostNodePorts",
    "conntrack.maxPerCore",
    "conntrack.min",
    "conntrack.tcpEstablishedTimeout",
    "conntrack.tcpCloseWaitTimeout",
];

/// Returns kube-proxy's default, or nothing if a setting that is not given means something else here.
fn default(setting: &Setting) -> Json {
    if ASKING.contains(&setting.field) {
        return Json::Null;
    }
    match (setting.kind, setting.default) {
        (SettingKind::Cidrs | SettingKind::NodePortAddresses, _) => json!([]),
        (SettingKind::Gates, _) => json!({}),
        (SettingKind::Any, "") => Json::Null,
        (kind, text) => kind.of_text(text).map_or(json!(text), |value| written(&value)),
    }
}

/// Returns the list in the file for the flag `--vmodule`, like `pattern=3,other=4`.
fn vmodule(flag: &str) -> Json {
    let items = flag.split(',').filter_map(|item| item.split_once('='));
    items
        .filter_map(|(pattern, level)| {
            Some(json!({"filePattern": pattern, "verbosity": level.parse::<u32>().ok()?}))
        })
        .collect()
}

fn written(value: &Value) -> Json {
    match value {
        Value::Bool(on) => json!(on),
        Value::Int(number) => json!(number),
        Value::Number(number) => json!(number),
        Value::Duration(duration) => json!(go(*duration)),
        Value::Text(text) => json!(text),
        Value::List(list) => json!(list),
        Value::Gates(gates) => json!(gates),
        Value::Any(value) => value.clone(),
        // `Values::settle` removes them.
        Value::Unfit(_) => Json::Null,
    }
}

/// Returns a duration in Go's format.
fn go(duration: Duration) -> String {
    let (seconds, rest) = (duration.as_secs(), duration.subsec_nanos());
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let fraction =
        if rest == 0 { String::new() } else { format!(".{rest:09}").trim_end_matches('0').to_owned() };
    match (hours, minutes) {
        (0, 0) => format!("{seconds}{fraction}s"),
        (0, _) => format!("{minutes}m{seconds}{fraction}s"),
        _ => format!("{hours}h{minutes}m{seconds}{fraction}s"),
    }
}

/// Returns a document as YAML: mappings as blocks, everything else as JSON, which is YAML too.
pub fn yaml(document: &Json) -> String {
    let mut text = String::new();
    block(document, 0, &mut text);
    text
}

fn block(value: &Json, depth: usize, text: &mut String) {
    let Json::Object(entries) = value else { return };
    for (key, value) in entries {
        text.push_str(&"  ".repeat(depth));
        text.push_str(key);
        match value {
            Json::Object(below) if !below.is_empty() => {
                text.push_str(":\n");
                block(value, depth + 1, text);
            }
            value => text.push_str(&[": ", &value.to_string(), "\n"].concat()),
        }
    }
}
