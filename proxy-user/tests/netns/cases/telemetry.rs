//! `--otlp-endpoint`: what the agent does and what the programs refuse reaches a collector; without one, the node still serves.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::inspect::{refused, sees};
use super::{Case, EMPTY, WEB, client_ip, vip};
use crate::agent;
use crate::fixture::{Fixture, SOON, Wish, eventually};
use crate::peer::{Attempt, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::kube::process::Process;

#[rustfmt::skip]
const FLAGS: &[&str] = &[
    "--otlp-endpoint", "http://127.0.0.1:4318",
    "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "16384", "--max-sockets", "4096",
];

pub const CASES: &[Case] = &[Case {
    name: "telemetry::a_collector_that_comes_later_gets_traces_lines_and_events",
    wish: WISH,
    run: |fixture| exports(fixture, listen),
}];

/// Cases with the receiver of the OpenTelemetry Collector, which is built from its Go module.
pub const OFFICIAL: &[Case] = &[
    Case {
        name: "telemetry::the_collectors_own_receiver_understands_what_is_exported",
        wish: WISH,
        run: |fixture| exports(fixture, receiver),
    },
    Case {
        name: "telemetry::the_collectors_receiver_keeps_all_fields_of_a_monitor_line",
        wish: WISH,
        run: understands_monitor,
    },
];

const WISH: Wish = Wish { pods: 1, services: &[WEB, EMPTY], flags: FLAGS };

/// What was posted, as path and document.
type Posted = Arc<Mutex<Vec<(String, Value)>>>;

/// Returns what a collector has received so far, as path and document. Dropping this ends the receiver's process.
type Collected = Box<dyn Fn() -> Result<Vec<(String, Value)>>>;

/// Starts a collector that keeps the documents.
fn listen(fixture: &Fixture) -> Result<Collected> {
    let listener = fixture.node.inside(|| Ok(TcpListener::bind("127.0.0.1:4318")?))?;
    let posted = Posted::default();
    let noted = Arc::clone(&posted);
    // This thread ends with the test.
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let noted = Arc::clone(&noted);
            std::thread::spawn(move || serve(stream, &noted));
        }
    });
    Ok(Box::new(move || Ok(posted.lock().unwrap_or_else(PoisonError::into_inner).clone())))
}

/// Starts the Collector's receiver (`xtask/tools/otlp`); the documents are what it understood.
fn receiver(fixture: &Fixture) -> Result<Collected> {
    let program = std::env::var_os("BALLAST_OTLP_RECEIVER").context("BALLAST_OTLP_RECEIVER is not set")?;
    let printed = fixture.bpffs().with_file_name("received");
    let mut command = fixture.node.command(program);
    let process = Process::start(command.arg("127.0.0.1:4318"), &printed)?;
    Ok(Box::new(move || {
        let text = fs::read_to_string(&printed)?;
        // The last line may be incomplete.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let document = |line: &str| {
            let says = || format!("the receiver, process {}, says: {line}", process.id());
            let (path, document) = line.split_once(' ').with_context(says)?;
            Ok((path.to_owned(), serde_json::from_str(document).with_context(says)?))
        };
        whole.lines().map(document).collect()
    }))
}

fn exports(fixture: &Fixture, collect: fn(&Fixture) -> Result<Collected>) -> Result<()> {
    // There is no collector yet, and the node still serves.
    fixture.client.reach(Attempt::new(SocketKind::Tcp, vip(Family::V4, WEB, SocketKind::Tcp)))?;
    let collected = collect(fixture)?;
    let client = client_ip(Family::V4).to_string();
    eventually(SOON, || {
        let attempt = Attempt::new(SocketKind::Tcp, vip(Family::V4, EMPTY, SocketKind::Tcp));
        fixture.client.fails(attempt, libc::ECONNREFUSED)?;
        let collected = collected()?;
        let records = taken(&collected, "/v1/logs", "/resourceLogs/0/scopeLogs/0/logRecords");
        let is = |record: &&Value, key: &str, value: &str| attribute(record, key).as_deref() == Some(value);
        let mut rejects = records.iter().filter(|record| record["eventName"] == "ballast.reject");
        let reject = rejects.find(|record| is(record, "source.address", &client)).context("no refusal")?;
        for (key, value) in [
            ("k8s.namespace.name", "default"),
            ("k8s.service.name", "empty"),
            ("network.transport", "tcp"),
            ("network.type", "ipv4"),
            ("network.interface.name", "c0"),
            ("ballast.reason", "no_endpoint"),
        ] {
            ensure!(is(&reject, key, value), "{key} is not {value}: {reject}");
        }
        let has_record = |text: &str| records.iter().any(|record| record["body"]["stringValue"] == text);
        ensure!(has_record("first sync done"), "no line of the log");
        let spans = taken(&collected, "/v1/traces", "/resourceSpans/0/scopeSpans/0/spans");
        let sync = spans.iter().find(|span| span["name"] == "sync").context("no span of a sync")?;
        let is_part = |name: &str| {
            spans.iter().any(|span| span["name"] == name && span["parentSpanId"] == sync["spanId"])
        };
        ensure!(is_part("plan") && is_part("apply"), "a sync without its parts: {spans:?}");
        Ok(())
    })?;
    let (_, metrics) = agent::get(&fixture.node, 10_249, "/metrics")?;
    for signal in ["logs", "traces"] {
        let start = format!("ballast_otlp_exported_total{{signal=\"{signal}\"}} ");
        let count = metrics.lines().find_map(|line| line.strip_prefix(&start)).context("not counted")?;
        ensure!(count.parse::<u64>()? > 0, "{signal}: {count}");
    }
    Ok(())
}

/// Sends the document of `ballast monitor -o otlp` to the receiver; checks that it comes out unchanged.
fn understands_monitor(fixture: &Fixture) -> Result<()> {
    let collected = receiver(fixture)?;
    let monitor = fixture
        .node
        .command(agent::binary())
        .args(["monitor", "-o", "otlp", "--count", "1", "--kind", "reject", "--bpffs"])
        .arg(fixture.bpffs())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run ballast")?;
    let sent = sees(monitor, || refused(&fixture.client, Family::V4))?;
    let body = sent.to_string();
    eventually(SOON, || {
        let answer = fixture.node.inside(|| {
            let mut stream = TcpStream::connect("127.0.0.1:4318")?;
            let length = body.len();
            write!(
                stream,
                "POST /v1/logs HTTP/1.1\r\nHost: node\r\nContent-Type: application/json\r\n\
                 Content-Length: {length}\r\nConnection: close\r\n\r\n{body}"
            )?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            Ok(answer)
        })?;
        ensure!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        Ok(())
    })?;
    let expected = without_defaults(&sent);
    eventually(SOON, || {
        // The agent exports to the same receiver.
        let collected = collected()?;
        ensure!(
            collected
                .iter()
                .any(|(path, document)| path == "/v1/logs" && without_defaults(document) == expected),
            "{expected} is not among {collected:?}"
        );
        Ok(())
    })
}

/// Returns a document without the fields whose value OTLP does not distinguish from a missing field.
fn without_defaults(document: &Value) -> Value {
    match document {
        Value::Object(fields) => {
            let is_default = |name: &str, value: &Value| match value {
                Value::Number(number) => number.as_f64() == Some(0.0),
                Value::String(text) => text.is_empty() || (text == "0" && name.ends_with("UnixNano")),
                Value::Array(items) => items.is_empty(),
                Value::Object(fields) => fields.is_empty(),
                Value::Null => true,
                Value::Bool(_) => false,
            };
            let fields = fields.iter().map(|(name, value)| (name.clone(), without_defaults(value)));
            fields.filter(|(name, value)| !is_default(name, value)).collect()
        }
        Value::Array(items) => items.iter().map(without_defaults).collect(),
        other => other.clone(),
    }
}

/// Returns all records or spans that were posted to a path.
fn taken(collected: &[(String, Value)], path: &str, pointer: &str) -> Vec<Value> {
    let documents = collected.iter().filter(|(asked, _)| asked == path);
    documents.filter_map(|(_, document)| document.pointer(pointer)?.as_array().cloned()).flatten().collect()
}

fn attribute(record: &Value, key: &str) -> Option<String> {
    let all = record["attributes"].as_array()?;
    let found = all.iter().find(|attribute| attribute["key"] == key)?;
    Some(found["value"]["stringValue"].as_str()?.to_owned())
}

/// Answers requests until the connection ends.
fn serve(stream: TcpStream, posted: &Posted) -> Option<()> {
    let mut writer = stream.try_clone().ok()?;
    let mut reader = BufReader::new(stream);
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|count| *count > 0)?;
        let path = line.split(' ').nth(1)?.to_owned();
        let mut length = 0;
        loop {
            line.clear();
            reader.read_line(&mut line).ok()?;
            if line.trim().is_empty() {
                break;
            }
            if let Some((name, value)) = line.split_once(':')
                && name.eq_ignore_ascii_case("content-length")
            {
                length = value.trim().parse().ok()?;
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).ok()?;
        let document = serde_json::from_slice(&body).ok()?;
        posted.lock().unwrap_or_else(PoisonError::into_inner).push((path, document));
        writer
            .write_all(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
            .ok()?;
    }
}
