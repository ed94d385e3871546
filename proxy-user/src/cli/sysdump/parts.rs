//! The parts of the archive.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use proxy_cli::selector::ServiceSelector;
use proxy_common::map_names;
use serde_json::{Value, json};

use crate::cli::show::{
    AgentState, FlowSelection, ask, backend_list, flow_list, map_list, probe, service_list, status,
};
use crate::maps::view::View;
use proxy_cli::args::change::SysdumpArgs;
use proxy_cli::args::common::ReaderArgs;
use proxy_cli::args::inspect::StatusArgs;
use proxy_cli::args::list::{Output, OutputArgs};
use proxy_core::model::lookup::Places;

/// Name of a file of the archive, and its content or why there is none.
pub(super) type Part = (String, Result<Vec<u8>, String>);

/// Paths of the agent's HTTP server, and the file for each answer.
const ANSWERS: [(&str, &str); 4] = [
    ("/metrics", "agent/metrics.txt"),
    ("/configz", "agent/configz.json"),
    ("/healthz", "agent/healthz.txt"),
    ("/status", "agent/status.json"),
];

/// Files of the system.
const FILES: [&str; 9] = [
    "/proc/version",
    "/proc/uptime",
    "/proc/meminfo",
    "/proc/mounts",
    "/proc/net/dev",
    "/proc/net/route",
    "/proc/net/ipv6_route",
    "/proc/net/snmp",
    "/etc/os-release",
];

/// Folders of kernel settings; each file in them holds one or two numbers.
const SYSCTLS: [&str; 4] =
    ["/proc/sys/net/ipv4", "/proc/sys/net/core", "/proc/sys/net/netfilter", "/proc/sys/net/ipv6/conf/all"];

/// Maximum number of lines of a log; the last ones are taken.
const LOG_LINES: usize = 20_000;

/// Makes the parts one by one, and passes each to `add`.
pub(super) fn all(
    args: &SysdumpArgs,
    check: impl FnOnce() -> Result<String, String>,
    add: &mut impl FnMut(Part) -> io::Result<()>,
) -> io::Result<()> {
    add(("version.txt".to_owned(), Ok(concat!(env!("CARGO_PKG_VERSION"), "\n").into())))?;
    let reader = ReaderArgs { maps: args.maps.clone(), format: OutputArgs { output: Output::Json } };
    let answer = status(&StatusArgs { reader, agent: args.agent });
    add((
        "status.json".to_owned(),
        answer.map(|answer| answer.text.into()).map_err(|error| error.to_string()),
    ))?;
    add(("check.json".to_owned(), check().map(String::into_bytes)))?;
    maps(&args.maps.bpffs, add)?;
    agent(args, add)?;
    for path in FILES {
        add((format!("system{path}.txt"), read(Path::new(path))))?;
    }
    add(("system/sysctls.txt".to_owned(), Ok(sysctls().into())))?;
    add(("system/devices.json".to_owned(), devices()))?;
    logs(add)
}

fn text<T>(
    list: Result<T, impl ToString>,
    render: impl FnOnce(T) -> Result<String, String>,
) -> Result<Vec<u8>, String> {
    list.map_err(|error| error.to_string()).and_then(render).map(String::into_bytes)
}

fn maps(bpffs: &Path, add: &mut impl FnMut(Part) -> io::Result<()>) -> io::Result<()> {
    let view = match View::open(bpffs) {
        Ok(view) => view,
        Err(error) => return add(("maps".to_owned(), Err(error.to_string()))),
    };
    macro_rules! list {
        ($list:expr) => {
            text($list, |list| list.render(Output::Json, true).map_err(|error| error.to_string()))
        };
    }
    let snapshot = view.snapshot().map_err(|error| error.to_string());
    let of = |snapshot: &Result<_, String>| snapshot.as_ref().map_err(Clone::clone).cloned();
    let selector = ServiceSelector::default();
    let services = of(&snapshot).map(|all| service_list(&all, &selector));
    let backends = of(&snapshot).map(|all| backend_list(&all, &selector, &Places::default()));
    add(("services.json".to_owned(), list!(services)))?;
    add(("backends.json".to_owned(), list!(backends)))?;
    let flows = view.flows().map_err(|error| error.to_string());
    let flows = flows.and_then(|rows| Ok(flow_list(&rows, &of(&snapshot)?, &FlowSelection::default())));
    add(("flows.json".to_owned(), list!(flows)))?;
    let usage = view.usage().map_err(|error| error.to_string());
    add((
        "maps.json".to_owned(),
        list!(usage.and_then(|rows| map_list(&rows, &[]).map_err(|error| error.to_string()))),
    ))?;
    // Some maps cannot be listed: events are transient, and a socket's storage is freed with the socket.
    for name in map_names::ALL.iter().filter(|name| !map_names::UNLISTED.contains(name)) {
        let entries = view.dump(name).map_err(|error| error.to_string());
        let lines = entries.map(|entries| {
            let each = |(key, value): (Value, Value)| format!("{}\n", json!({ "key": key, "value": value }));
            entries.into_iter().map(each).collect::<String>().into_bytes()
        });
        add((format!("maps/{name}.jsonl"), lines))?;
    }
    Ok(())
}

fn agent(args: &SysdumpArgs, add: &mut impl FnMut(Part) -> io::Result<()>) -> io::Result<()> {
    let address = match probe(args.agent.metrics_bind_address) {
        AgentState::Answered { address, .. } => address,
        AgentState::NotAsked => {
            return add(("agent".to_owned(), Err("its metrics server is switched off".to_owned())));
        }
        AgentState::Silent { address, reason } => {
            return add(("agent".to_owned(), Err(format!("no answer at {address}: {reason}"))));
        }
    };
    for (path, name) in ANSWERS {
        let answer = match ask(address, path) {
            Ok((200 | 503, body)) => Ok(body),
            Ok((status, _)) => Err(format!("HTTP {status}")),
            Err(error) => Err(error.to_string()),
        };
        add((name.to_owned(), answer))?;
    }
    Ok(())
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    fs::read(path).map_err(|error| error.to_string())
}

/// Returns lines like `net.ipv4.ip_forward = 1`, as sysctl(8) writes them. Files that are unreadable or commands are left out.
fn sysctls() -> String {
    let mut lines = Vec::new();
    for folder in SYSCTLS {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if !path.is_file() {
                continue;
            }
            let Ok(value) = fs::read_to_string(&path) else { continue };
            let name =
                path.strip_prefix("/proc/sys").unwrap_or(&path).display().to_string().replace('/', ".");
            lines.push(format!("{name} = {}\n", value.trim().replace('\t', " ")));
        }
    }
    lines.sort();
    lines.concat()
}

/// Returns the attributes of each device in `/sys/class/net`.
fn devices() -> Result<Vec<u8>, String> {
    let folder = fs::read_dir("/sys/class/net").map_err(|error| error.to_string())?;
    let mut devices: Vec<(String, Value)> = folder
        .flatten()
        .map(|entry| {
            let path = entry.path();
            let field =
                |name: &str| fs::read_to_string(path.join(name)).ok().map(|text| text.trim().to_owned());
            let link = |name: &str| {
                let target = fs::read_link(path.join(name)).ok()?;
                Some(target.file_name()?.to_string_lossy().into_owned())
            };
            let name = entry.file_name().to_string_lossy().into_owned();
            let facts = json!({
                "name": name, "index": field("ifindex"), "mtu": field("mtu"), "type": field("type"),
                "flags": field("flags"), "state": field("operstate"), "peer": field("iflink"),
                "master": link("master"), "driver": link("device/driver"),
            });
            (name, facts)
        })
        .collect();
    devices.sort_by(|(one, _), (other, _)| one.cmp(other));
    let facts: Vec<Value> = devices.into_iter().map(|(_, facts)| facts).collect();
    serde_json::to_vec_pretty(&facts).map_err(|error| error.to_string())
}

/// Adds the journal of the unit, and the logs of the pods on this node.
fn logs(add: &mut impl FnMut(Part) -> io::Result<()>) -> io::Result<()> {
    let lines = LOG_LINES.to_string();
    let journal = Command::new("journalctl")
        .args(["--unit", "ballast*", "--no-pager", "--quiet", "--output", "short-iso", "--lines", &lines])
        .output();
    let journal = match journal {
        Ok(output) if output.status.success() => Ok(output.stdout),
        Ok(output) => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(error) => Err(format!("journalctl: {error}")),
    };
    add(("logs/journal.txt".to_owned(), journal))?;
    let pods = fs::read_dir("/var/log/pods").into_iter().flatten().flatten().map(|entry| entry.path());
    for pod in
        pods.filter(|pod| pod.file_name().is_some_and(|name| name.to_string_lossy().contains("ballast")))
    {
        for file in files(&pod) {
            let name = file.strip_prefix("/var/log").unwrap_or(&file).display().to_string();
            let text = read(&file).map(|text| last_lines(&String::from_utf8_lossy(&text)));
            add((format!("logs/{name}"), text))?;
        }
    }
    Ok(())
}

/// Returns the log files of a pod: one for each start of each container.
fn files(pod: &Path) -> Vec<PathBuf> {
    let containers = fs::read_dir(pod).into_iter().flatten().flatten().map(|entry| entry.path());
    let files = containers.flat_map(|folder| fs::read_dir(folder).into_iter().flatten().flatten());
    let mut files: Vec<PathBuf> = files.map(|entry| entry.path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "log"));
    files.sort();
    files
}

fn last_lines(text: &str) -> Vec<u8> {
    let lines: Vec<&str> = text.lines().collect();
    let from = lines.len().saturating_sub(LOG_LINES);
    lines
        .get(from..)
        .unwrap_or_default()
        .iter()
        .flat_map(|line| [line, "\n"])
        .collect::<String>()
        .into_bytes()
}
