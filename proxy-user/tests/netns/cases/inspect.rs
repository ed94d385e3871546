//! What a user sees: `ballast monitor` and `ballast explain` on a real node.

use std::process::{Child, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::{Case, EMPTY, WEB, client_ip, vip};
use crate::agent::{ask, binary};
use crate::fixture::{Fixture, SOON, Wish, eventually};
use crate::peer::{Attempt, Peer, SocketKind};
use proxy_testbed::Family;

const WISH: Wish = Wish { pods: 1, services: &[WEB, EMPTY], flags: crate::fixture::SMALL };

pub const CASES: &[Case] = &[
    Case { name: "inspect::monitor_shows_new_flows_and_refusals", wish: WISH, run: monitors },
    Case { name: "inspect::monitor_shows_refusals_from_before_it_ran", wish: WISH, run: shows_history },
    Case { name: "inspect::monitor_writes_records_of_opentelemetry", wish: WISH, run: writes_records },
    Case { name: "inspect::monitor_ends_with_its_input", wish: WISH, run: ends_with_its_input },
    Case { name: "inspect::explain_agrees_with_the_packet_path", wish: WISH, run: explains },
    Case { name: "inspect::programmed_lists_the_programmed_versions", wish: WISH, run: programmed },
];

/// Starts a monitor that ends with the first event.
fn monitor(fixture: &Fixture, flags: &[&str]) -> Result<Child> {
    let mut command = fixture.node.command(binary());
    command.args(["monitor", "-o", "json", "--count", "1", "--bpffs"]).arg(fixture.bpffs()).args(flags);
    command.stdout(Stdio::piped()).spawn().context("cannot run ballast")
}

/// Repeats the action until the monitor has seen it; returns the event.
pub fn sees(mut monitor: Child, mut action: impl FnMut() -> Result<()>) -> Result<Value> {
    eventually(SOON, || {
        action()?;
        ensure!(monitor.try_wait()?.is_some(), "the monitor has seen nothing");
        Ok(())
    })?;
    let output = monitor.wait_with_output()?;
    serde_json::from_slice(&output.stdout).context("no JSON")
}

pub fn refused(client: &Peer, family: Family) -> Result<()> {
    client
        .fails(Attempt::new(SocketKind::Tcp, vip(family, EMPTY, SocketKind::Tcp)), libc::ECONNREFUSED)
        .map(drop)
}

fn monitors(fixture: &Fixture) -> Result<()> {
    for family in Family::BOTH {
        let (web, empty) = (vip(family, WEB, SocketKind::Tcp), vip(family, EMPTY, SocketKind::Tcp));
        let client = client_ip(family).to_string();
        let seen = sees(monitor(fixture, &["--kind", "reject", "--client", &client])?, || {
            refused(&fixture.client, family)
        })?;
        ensure!(seen["reason"] == "no_endpoint" && seen["frontend"] == empty.to_string(), "{seen}");
        ensure!(seen["hook"] == "packet" && seen["device"] == "c0", "{seen}");
        let seen = sees(
            monitor(fixture, &["--kind", "reject", "--pid", &fixture.local.pid().to_string()])?,
            || refused(&fixture.local, family),
        )?;
        ensure!(seen["hook"] == "socket" && seen["frontend"] == empty.to_string(), "{seen}");
        let seen =
            sees(monitor(fixture, &["--kind", "new", "default/web:80", "--client", &client])?, || {
                fixture.client.reach(Attempt::new(SocketKind::Tcp, web)).map(drop)
            })?;
        let pod = super::pod(family, 0, SocketKind::Tcp).to_string();
        ensure!(seen["backend"] == pod && seen["frontend"] == web.to_string(), "{seen}");
    }
    Ok(())
}

fn shows_history(fixture: &Fixture) -> Result<()> {
    let is_shown = |line: &Value| line["reason"] == "no_endpoint" && line["name"] == "empty";
    for family in Family::BOTH {
        let client = client_ip(family).to_string();
        // The agent may have begun to keep events only now.
        eventually(SOON, || {
            (0..3).try_for_each(|_| refused(&fixture.client, family))?;
            let mut command = fixture.node.command(binary());
            command.args(["monitor", "-o", "json", "--last", "2", "--client", &client, "--bpffs"]);
            let output = command.arg(fixture.bpffs()).output().context("cannot run ballast")?;
            let text = String::from_utf8(output.stdout)?;
            let lines: Vec<Value> = text.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
            ensure!(output.status.success() && lines.len() == 2 && lines.iter().all(is_shown), "{text}");
            Ok(())
        })?;
    }
    Ok(())
}

/// Checks that the monitor writes one document on a line, with the attributes that collectors know.
fn writes_records(fixture: &Fixture) -> Result<()> {
    let mut command = fixture.node.command(binary());
    command
        .args(["monitor", "-o", "otlp", "--count", "1", "--kind", "reject", "--bpffs"])
        .arg(fixture.bpffs());
    command.env("OTEL_RESOURCE_ATTRIBUTES", "k8s.cluster.name=test");
    let monitor = command.stdout(Stdio::piped()).spawn().context("cannot run ballast")?;
    let document = sees(monitor, || refused(&fixture.client, Family::V4))?;
    let resource = document.pointer("/resourceLogs/0/resource/attributes").context("no resource")?;
    let cluster = json!({"key": "k8s.cluster.name", "value": {"stringValue": "test"}});
    ensure!(resource.as_array().is_some_and(|all| all.contains(&cluster)), "{resource}");
    let record = document.pointer("/resourceLogs/0/scopeLogs/0/logRecords/0").context("no record")?;
    ensure!(record["eventName"] == "ballast.reject" && record["severityNumber"] == 13, "{record}");
    let all = record["attributes"].as_array().context("no attributes")?;
    let empty = vip(Family::V4, EMPTY, SocketKind::Tcp);
    for (key, value) in [
        ("source.address", json!({"stringValue": client_ip(Family::V4).to_string()})),
        ("destination.address", json!({"stringValue": empty.ip().to_string()})),
        ("destination.port", json!({"intValue": empty.port().to_string()})),
        ("k8s.service.name", json!({"stringValue": "empty"})),
        ("ballast.reason", json!({"stringValue": "no_endpoint"})),
    ] {
        let expected = json!({"key": key, "value": value});
        ensure!(all.contains(&expected), "no {expected} in {record}");
    }
    Ok(())
}

/// Checks that a monitor ends with its input, as in a pod after `kubectl ballast monitor` was interrupted: no event
/// comes, and no write to its output fails.
fn ends_with_its_input(fixture: &Fixture) -> Result<()> {
    let mut command = fixture.node.command(binary());
    command.args(["monitor", "--end-with-stdin", "--timeout", "10m", "--bpffs"]).arg(fixture.bpffs());
    let mut monitor =
        command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().context("cannot run ballast")?;
    std::thread::sleep(Duration::from_secs(2));
    let early = monitor.try_wait()?;
    drop(monitor.stdin.take());
    let ended = eventually(SOON, || monitor.try_wait()?.context("it goes on without its input"));
    // This fails if the monitor has ended.
    let _ = monitor.kill();
    ensure!(early.is_none() && ended?.success(), "with its input open: {early:?}");
    Ok(())
}

fn programmed(fixture: &Fixture) -> Result<()> {
    let ask = |service: &str| -> Result<std::process::Output> {
        let mut command = fixture.node.command(binary());
        command.args(["programmed", service, "-o", "json"]).output().context("cannot run ballast")
    };
    let answer = ask("default/web")?;
    let document: Value = serde_json::from_slice(&answer.stdout)?;
    let document = &document["services"][0];
    ensure!(
        answer.status.success() && document["current"] == true && document["namespace"] == "default",
        "{document}"
    );
    ensure!(document["endpointSlices"].as_array().is_some_and(|slices| !slices.is_empty()), "{document}");
    ensure!(document["resourceVersion"].is_null(), "a folder has no editions: {document}");
    let answer = ask("wbe")?;
    let error = String::from_utf8_lossy(&answer.stderr);
    ensure!(!answer.status.success() && error.contains("did you mean default/web"), "{error}");
    fixture.kill()?;
    let error = String::from_utf8_lossy(&ask("web")?.stderr).into_owned();
    ensure!(error.contains("the agent does not answer (127.0.0.1:10249"), "{error}");
    fixture.begin()
}

fn explains(fixture: &Fixture) -> Result<()> {
    for family in Family::BOTH {
        let client = client_ip(family).to_string();
        let explain = |client: &str, to: std::net::SocketAddr| {
            ask(&fixture.node, &["explain", client, &to.to_string()], &fixture.bpffs())
        };
        let web = explain(&client, vip(family, WEB, SocketKind::Tcp))?;
        let pod = super::pod(family, 0, SocketKind::Tcp).to_string();
        ensure!(web["packet"]["verdict"] == "forward", "{web}");
        ensure!(web["packet"]["endpoints"][0]["address"] == pod, "{web}");
        let empty = explain("host", vip(family, EMPTY, SocketKind::Tcp))?;
        ensure!(
            empty["socket"]["verdict"] == "reject" && empty["socket"]["reason"] == "no_endpoint",
            "{empty}"
        );
        let other = explain("pod", (client_ip(family), 80).into())?;
        ensure!(other["socket"]["verdict"] == "untouched", "{other}");
    }
    let named = ask(&fixture.node, &["explain", "pod", "svc/web:80"], &fixture.bpffs())?;
    let summary = named["summary"].as_str().context("no summary")?;
    ensure!(named["decidedBy"] == "socket" && summary.starts_with("pod -> default/web:tcp ("), "{named}");
    Ok(())
}
