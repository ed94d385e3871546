//! Commands on a real node: kubectl's flags, the entries of maps, deleted connections, counters, settings, archives.

use std::path::Path;
use std::process::Output;

use anyhow::{Context as _, Result, ensure};
use proxy_common::map_names;
use serde_json::Value;

use super::{Case, EMPTY, WEB, client_ip, vip};
use crate::agent::{self, ask};
use crate::fixture::{Fixture, SOON, Wish, eventually};
use crate::peer::{Attempt, SocketKind};
use proxy_testbed::Family;

/// Flags with an algorithm that counts connections, so that a wrong count is visible.
#[rustfmt::skip]
const COUNTS: &[&str] = &[
    "--algorithm", "wlc",
    "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "16384", "--max-sockets", "4096",
];
const WISH: Wish = Wish { pods: 2, services: &[WEB, EMPTY], flags: COUNTS };

pub const CASES: &[Case] = &[
    Case { name: "commands::lists_take_the_flags_of_kubectl", wish: WISH, run: lists },
    Case { name: "commands::a_connection_is_removed_with_all_that_belongs_to_it", wish: WISH, run: deletes },
    Case { name: "commands::every_map_is_dumped", wish: WISH, run: dumps },
    Case { name: "commands::stats_zero_leaves_the_kernels_counters_unchanged", wish: WISH, run: zeroes },
    Case { name: "commands::settings_show_their_origin", wish: WISH, run: settings },
    Case { name: "commands::an_archive_has_what_a_report_needs", wish: WISH, run: archives },
];

fn run(fixture: &Fixture, words: &[&str]) -> Result<Output> {
    agent::command(&fixture.node, words, &fixture.bpffs())
}

/// Returns the output of a command, which has to succeed.
fn prints(fixture: &Fixture, words: &[&str]) -> Result<String> {
    let output = run(fixture, words)?;
    ensure!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

/// Returns the error output of a command, which has to fail.
fn fails(fixture: &Fixture, words: &[&str]) -> Result<String> {
    let output = run(fixture, words)?;
    ensure!(!output.status.success(), "{words:?} succeeds");
    Ok(String::from_utf8(output.stderr)?)
}

fn lists(fixture: &Fixture) -> Result<()> {
    let names = prints(fixture, &["service", "list", "web", "-o", "name"])?;
    ensure!(names.lines().count() == 4 && names.starts_with("default/web:"), "{names}");
    let other = fails(fixture, &["service", "list", "-n", "defualt", "--no-headers"])?;
    ensure!(
        other.contains("no Service of the namespace defualt") && other.contains("did you mean default?"),
        "{other}"
    );
    for words in [&["stats", "--rate", "wbe"][..], &["monitor", "wbe"], &["top", "--once", "svc/wbe"]] {
        let mistyped = fails(fixture, words)?;
        ensure!(mistyped.contains("did you mean default/web?"), "{words:?}: {mistyped}");
    }
    let top = prints(fixture, &["top", "service/web", "-o", "name", "--interval", "1"])?;
    ensure!(top.lines().count() == 4 && top.starts_with("default/web:"), "{top}");
    let shown = prints(fixture, &["service", "show", "svc/web", "-n", "default"])?;
    ensure!(shown.contains("Service:      default/web:tcp (TCP, IPv4)"), "{shown}");
    let version = fixture.node.command(agent::binary()).arg("version").output()?;
    let version = String::from_utf8(version.stdout)?;
    ensure!(version.starts_with("ballast ") && version.contains("at 127.0.0.1:10249"), "{version}");
    let yaml = prints(fixture, &["endpoint", "list", "svc/web:80", "-o", "yaml"])?;
    ensure!(yaml.starts_with("backends:\n- id: ") && yaml.contains("service: default/web:tcp"), "{yaml}");
    let sorted = ask(&fixture.node, &["service", "list", "--sort-by", "address"], &fixture.bpffs())?;
    let ports: Vec<_> = sorted["frontends"].as_array().context("no list")?.iter().collect();
    let first = ports[0]["address"].as_str().context("no address")?;
    ensure!(first.ends_with(":7"), "port 7 comes before 53 and 80: {first}");
    let mistyped = fails(fixture, &["service", "show", "wbe"])?;
    ensure!(mistyped.contains("did you mean default/web?"), "{mistyped}");
    let mistyped = fails(fixture, &["service", "list", "--sort-by", "adress"])?;
    ensure!(mistyped.contains("did you mean address?"), "{mistyped}");
    Ok(())
}

/// Returns the number of connections of all endpoints that are counted as open.
fn open(fixture: &Fixture) -> Result<u64> {
    let list = ask(&fixture.node, &["backend", "list"], &fixture.bpffs())?;
    Ok(list["backends"].as_array().context("no list")?.iter().filter_map(|one| one["open"].as_u64()).sum())
}

/// Returns the number of used slots of a flow index.
fn slots(fixture: &Fixture, name: &str) -> Result<usize> {
    let dump = ask(&fixture.node, &["map", "dump", name], &fixture.bpffs())?;
    let buckets = dump["entries"].as_array().context("no entries")?.iter();
    let slots = buckets.flat_map(|bucket| bucket["value"]["slots"].as_array().cloned().unwrap_or_default());
    Ok(slots.filter(|slot| slot != "0x00000000").count())
}

fn deletes(fixture: &Fixture) -> Result<()> {
    let ends = [(Family::V4, map_names::FLOW_INDEX), (Family::V6, map_names::FLOW_INDEX6)];
    for (id, (family, index)) in (1..).zip(ends) {
        let attempt = Attempt::new(SocketKind::Tcp, vip(family, WEB, SocketKind::Tcp));
        fixture.client.open(id, attempt)?;
        fixture.client.hears(id, None)?;
        eventually(SOON, || {
            let (count, slots) = (open(fixture)?, slots(fixture, index)?);
            ensure!((count, slots) == (1, 2), "{count} open, {slots} slots");
            Ok(())
        })?;
        let client = client_ip(family).to_string();
        let unsaid = fails(fixture, &["flow", "delete"])?;
        ensure!(unsaid.contains("--all"), "{unsaid}");
        let other = prints(fixture, &["flow", "delete", "--client", &client, "--protocol", "udp"])?;
        ensure!(other.is_empty() && open(fixture)? == 1, "{other}");
        let tried = prints(fixture, &["flow", "delete", "--client", &client, "--dry-run"])?;
        ensure!(tried.contains(&client) && open(fixture)? == 1, "{tried}");
        let removed = ask(&fixture.node, &["flow", "delete", "web", "--client", &client], &fixture.bpffs())?;
        let flows = removed["flows"].as_array().context("no list")?;
        ensure!(flows.len() == 1 && flows[0]["state"] == "established", "{removed}");
        ensure!((open(fixture)?, slots(fixture, index)?) == (0, 0), "its keys or its count are left");
        let flows = run(fixture, &["flow", "list", "--expired", "--no-headers"])?;
        let output = String::from_utf8_lossy(&flows.stderr).into_owned();
        ensure!(flows.stdout.is_empty() && output.starts_with("No connections."), "{flows:?}");
        // New connections work, and so does the deleted one, whose next segment creates a new flow.
        fixture.client.reach(attempt)?;
        fixture.client.hears(id, None)?;
        prints(fixture, &["flow", "delete", "--all"])?;
    }
    Ok(())
}

fn dumps(fixture: &Fixture) -> Result<()> {
    fixture.client.reach(Attempt::new(SocketKind::Udp, vip(Family::V4, WEB, SocketKind::Udp)))?;
    for name in map_names::ALL.iter().chain([&map_names::CONNECT_LATENCY]) {
        let cannot = map_names::UNLISTED.contains(name);
        if cannot {
            let why = fails(fixture, &["map", "dump", name])?;
            ensure!(why.contains("cannot list the entries"), "{why}");
            continue;
        }
        let dump = ask(&fixture.node, &["map", "dump", name], &fixture.bpffs())?;
        ensure!(dump["entries"].is_array(), "{name}: {dump}");
    }
    let entries = |name| {
        Ok::<_, anyhow::Error>(
            ask(&fixture.node, &["map", "dump", name], &fixture.bpffs())?["entries"].clone(),
        )
    };
    let services = entries(map_names::SERVICES)?;
    let web = vip(Family::V4, WEB, SocketKind::Tcp).to_string();
    let all = services.as_array().context("no entries")?;
    let entry = all.iter().find(|one| one["key"]["frontend"] == web && one["key"]["protocol"] == "TCP");
    ensure!(entry.is_some_and(|one| one["value"]["service"] == "default/web:tcp"), "{services}");
    let flows = entries(map_names::FLOWS)?;
    ensure!(
        flows[0]["value"]["protocol"] == "UDP" && flows[0]["value"]["timeoutSeconds"].is_f64(),
        "{flows}"
    );
    let config = entries(map_names::CONFIG)?.to_string();
    ensure!(config.contains("entries") && !config.contains("eed"), "the seed is a secret: {config}");
    let mistyped = fails(fixture, &["map", "dump", "servcies"])?;
    ensure!(mistyped.contains("did you mean services"), "{mistyped}");
    Ok(())
}

/// Returns the connections of `default/web:tcp` over IPv4, as `ballast stats` shows them and as the map counts them.
fn counted(fixture: &Fixture, run_dir: &str) -> Result<(u64, u64)> {
    let shown = ask(&fixture.node, &["stats", "web:80", "--run-dir", run_dir], &fixture.bpffs())?;
    let dumped = ask(&fixture.node, &["map", "dump", map_names::SERVICE_STATS], &fixture.bpffs())?;
    let id = |one: &Value| one["serviceId"].as_u64();
    let services = shown["services"].as_array().context("no list")?;
    // The Service of IPv4 comes first.
    let first = services.first().context("no Service")?;
    let entries = dumped["entries"].as_array().context("no entries")?;
    let entry = entries.iter().find(|one| one["key"].as_u64() == id(first)).context("no entry")?;
    let count = |value: &Value| value["connections"].as_u64().context("no count");
    Ok((count(first)?, count(&entry["value"])?))
}

fn zeroes(fixture: &Fixture) -> Result<()> {
    let folder = fixture.bpffs().with_file_name("run");
    let run_dir = folder.to_string_lossy();
    let attempt = Attempt::new(SocketKind::Tcp, vip(Family::V4, WEB, SocketKind::Tcp));
    fixture.client.reach(attempt)?;
    ensure!(counted(fixture, &run_dir)? == (1, 1), "{:?}", counted(fixture, &run_dir));
    let unsaid = fails(fixture, &["service", "zero", "--run-dir", &run_dir])?;
    ensure!(unsaid.contains("--all"), "{unsaid}");
    prints(fixture, &["service", "zero", "web", "--run-dir", &run_dir])?;
    ensure!(counted(fixture, &run_dir)? == (0, 1), "{:?}", counted(fixture, &run_dir));
    fixture.client.reach(attempt)?;
    ensure!(counted(fixture, &run_dir)? == (1, 2), "{:?}", counted(fixture, &run_dir));
    let rates = ask(&fixture.node, &["stats", "web:80", "--rate=200ms"], &fixture.bpffs())?;
    ensure!(rates["services"][0]["connections"] == 0.0, "nothing goes on: {rates}");
    Ok(())
}

fn settings(fixture: &Fixture) -> Result<()> {
    let output = fixture.node.command(agent::binary()).args(["config", "-o", "json"]).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let list: Value = serde_json::from_slice(&output.stdout)?;
    let all = list["settings"].as_array().context("no list")?;
    let flows = all.iter().find(|one| one["name"] == "max-flows").context("no max-flows")?;
    ensure!(flows["value"] == "16384" && flows["from"] == "flag", "{flows}");
    ensure!(all.iter().all(|one| one["from"] != "default"), "{list}");
    Ok(())
}

fn archives(fixture: &Fixture) -> Result<()> {
    let file = fixture.bpffs().with_file_name("dump.tar.gz");
    let output = run(fixture, &["sysdump", &file.to_string_lossy()])?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let listed = fixture.node.command("tar").args(["-tzf"]).arg(&file).output()?;
    let listed = String::from_utf8(listed.stdout)?;
    for name in [
        "status.json",
        "check.json",
        "services.json",
        "flows.json",
        "maps/services.jsonl",
        "agent/metrics.txt",
    ] {
        ensure!(listed.lines().any(|line| line.ends_with(&format!("/{name}"))), "no {name}: {listed}");
    }
    let size = Path::new(&file).metadata()?.len();
    ensure!(size < 16 << 20, "{size} bytes");
    Ok(())
}
