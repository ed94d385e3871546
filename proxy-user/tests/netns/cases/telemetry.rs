//! `--otlp-endpoint`: what the agent does and what the programs refuse reaches a collector; without one, the node serves all the same.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::{Case, EMPTY, WEB, client_ip, vip};
use crate::agent;
use crate::fixture::{Fixture, SOON, Wish, eventually};
use crate::manifest::Family;
use crate::peer::{Attempt, Kind};

#[rustfmt::skip]
const FLAGS: &[&str] = &[
    "--otlp-endpoint", "http://127.0.0.1:4318",
    "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "16384", "--max-sockets", "4096",
];

pub const CASES: &[Case] = &[Case {
    name: "telemetry::a_collector_that_comes_later_gets_traces_lines_and_events",
    wish: Wish { pods: 1, services: &[WEB, EMPTY], flags: FLAGS },
    run: exports,
}];

/// What was posted: path and document.
type Posted = Arc<Mutex<Vec<(String, Value)>>>;

fn exports(fixture: &Fixture) -> Result<()> {
    // There is no collector yet, and all is served.
    fixture.client.reach(Attempt::new(Kind::Tcp, vip(Family::V4, WEB, Kind::Tcp)))?;
    let listener = fixture.node.inside(|| Ok(TcpListener::bind("127.0.0.1:4318")?))?;
    let posted = Posted::default();
    let noted = Arc::clone(&posted);
    // Ends with the test.
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let noted = Arc::clone(&noted);
            std::thread::spawn(move || serve(stream, &noted));
        }
    });
    let client = client_ip(Family::V4).to_string();
    eventually(SOON, || {
        let attempt = Attempt::new(Kind::Tcp, vip(Family::V4, EMPTY, Kind::Tcp));
        fixture.client.fails(attempt, libc::ECONNREFUSED)?;
        let records = taken(&posted, "/v1/logs", "/resourceLogs/0/scopeLogs/0/logRecords");
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
        let told = |text: &str| records.iter().any(|record| record["body"]["stringValue"] == text);
        ensure!(told("first sync done"), "no line of the log");
        let spans = taken(&posted, "/v1/traces", "/resourceSpans/0/scopeSpans/0/spans");
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

/// All records or spans that were posted to a path.
fn taken(posted: &Posted, path: &str, pointer: &str) -> Vec<Value> {
    let posted = posted.lock().unwrap_or_else(PoisonError::into_inner);
    let documents = posted.iter().filter(|(asked, _)| asked == path);
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
