use std::sync::Arc;
use std::time::{Duration, Instant};

use insta::assert_snapshot;
use serde_json::Value as Json;
use tracing_subscriber::layer::SubscriberExt as _;

use super::collector::{Collector, CollectorReply};
use super::counts::{Loss, Signal};
use super::export::Pace;
use super::queue::WAITING;
use super::record::{self, LogRecord, Severity};
use super::span::{self, Context, Span, Status};
use super::value::{Attributes, Value};
use super::*;
use proxy_core::spans::TARGET;
use proxy_core::testing::free_port;

/// Timeout far above the duration of any test.
const LONG: Duration = Duration::from_secs(30);

fn record(number: u64) -> LogRecord {
    let mut attributes = Attributes::default();
    attributes.set("ballast.number", number);
    LogRecord {
        time_unix_nano: 1_500_000_000_000_000_001,
        observed_time_unix_nano: 1_500_000_000_000_000_002,
        severity: Severity::Warn,
        body: "a drop".into(),
        attributes,
        context: None,
        event_name: "ballast.drop",
    }
}

/// Returns an exporter with short delays.
fn exporter() -> Exporter {
    let pace = Pace {
        logs: Duration::from_millis(20),
        traces: Duration::from_millis(20),
        first_pause: Duration::from_millis(20),
    };
    let mut exporter = Exporter::default();
    exporter.pace = pace;
    exporter
}

fn target(address: std::net::SocketAddr) -> Target {
    Target {
        endpoint: format!("http://{address}").parse().unwrap(),
        headers: vec![("authorization".to_owned(), "Bearer word".to_owned())],
        certificate: None,
        timeout: Duration::from_secs(5),
    }
}

async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < LONG, "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[test]
fn a_document_of_records() {
    let resource = Resource::new(None, &[], Some("node-1"));
    let context = Context { trace_id: 0xabc, span_id: 0x12 };
    let line = LogRecord { context: Some(context), event_name: "", ..record(7) };
    let document = record::document(&resource, &[record(6), line]).unwrap();
    assert_snapshot!(document.replace(env!("CARGO_PKG_VERSION"), "VERSION"), @r#"{"resourceLogs":[{"resource":{"attributes":[{"key":"service.name","value":{"stringValue":"ballast"}},{"key":"service.version","value":{"stringValue":"VERSION"}},{"key":"service.instance.id","value":{"stringValue":"node-1"}},{"key":"k8s.node.name","value":{"stringValue":"node-1"}}]},"scopeLogs":[{"scope":{"name":"ballast","version":"VERSION"},"logRecords":[{"timeUnixNano":"1500000000000000001","observedTimeUnixNano":"1500000000000000002","severityNumber":13,"severityText":"WARN","body":{"stringValue":"a drop"},"attributes":[{"key":"ballast.number","value":{"intValue":"6"}}],"eventName":"ballast.drop"},{"timeUnixNano":"1500000000000000001","observedTimeUnixNano":"1500000000000000002","severityNumber":13,"severityText":"WARN","body":{"stringValue":"a drop"},"attributes":[{"key":"ballast.number","value":{"intValue":"7"}}],"traceId":"00000000000000000000000000000abc","spanId":"0000000000000012"}]}]}]}"#);
}

#[test]
fn a_document_of_spans() {
    let mut outer = Span::begin("sync", None, 5);
    outer.context = Context { trace_id: 1, span_id: 2 };
    let mut inner = Span::begin("plan", Some(outer.context), 6);
    assert_eq!(inner.context.trace_id, 1);
    inner.context.span_id = 3;
    inner.end_time_unix_nano = 9;
    inner.status = Status::error("no room".to_owned());
    let document = span::document(&Resource::default(), &[outer, inner]).unwrap();
    assert_snapshot!(document.replace(env!("CARGO_PKG_VERSION"), "VERSION"), @r#"{"resourceSpans":[{"resource":{"attributes":[]},"scopeSpans":[{"scope":{"name":"ballast","version":"VERSION"},"spans":[{"traceId":"00000000000000000000000000000001","spanId":"0000000000000002","name":"sync","kind":1,"startTimeUnixNano":"5","endTimeUnixNano":"5","attributes":[],"status":{"code":0}},{"traceId":"00000000000000000000000000000001","spanId":"0000000000000003","parentSpanId":"0000000000000002","name":"plan","kind":1,"startTimeUnixNano":"6","endTimeUnixNano":"9","attributes":[],"status":{"message":"no room","code":2}}]}]}]}"#);
}

#[test]
fn texts_are_cut_between_characters() {
    let long = "ü".repeat(3_000);
    let Value::Text(cut) = Value::from(long) else { panic!() };
    assert_eq!((cut.len(), cut.chars().all(|c| c == 'ü')), (2_048, true));
}

#[tokio::test]
async fn a_collector_gets_everything_with_its_headers() {
    let collector = Collector::start().await;
    let exporter = exporter();
    let (logs, spans, counts) = (exporter.logs.clone(), exporter.spans.clone(), Arc::clone(&exporter.counts));
    let running =
        exporter.start(target(collector.address), Resource::new(None, &[], Some("n"))).await.unwrap();
    for number in 0..1_500 {
        logs.push(record(number));
    }
    spans.push(Span::begin("sync", None, 1));
    until("all is exported", || {
        counts.exported(Signal::Logs) == 1_500 && counts.exported(Signal::Traces) == 1
    })
    .await;
    running.finish(LONG).await;
    let numbers = collector.taken("/v1/logs").into_iter().map(|record| {
        record.pointer("/attributes/0/value/intValue").unwrap().as_str().unwrap().parse::<u64>().unwrap()
    });
    assert_eq!(numbers.collect::<Vec<_>>(), (0..1_500).collect::<Vec<_>>());
    assert_eq!(collector.taken("/v1/traces")[0]["name"], "sync");
    let posted = collector.posted();
    assert!(posted.iter().all(|(_, word, _)| word.as_deref() == Some("Bearer word")));
    assert!(posted.len() >= 4, "a request holds at most 512 records");
    let node = posted[0].2.pointer("/resourceLogs/0/resource/attributes/3/value/stringValue");
    assert_eq!(
        node.or_else(|| posted[0].2.pointer("/resourceSpans/0/resource/attributes/3/value/stringValue")),
        Some(&Json::from("n"))
    );
}

/// Returns the CPU time of this thread so far, which does not depend on other load.
fn cpu_time() -> Duration {
    rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime).try_into().unwrap()
}

#[tokio::test]
async fn a_collector_that_is_away_costs_neither_time_nor_memory() {
    let address = ([127, 0, 0, 1], free_port()).into();
    let exporter = exporter();
    let (logs, counts) = (exporter.logs.clone(), Arc::clone(&exporter.counts));
    let running = exporter.start(target(address), Resource::default()).await.unwrap();
    let lost = |loss| counts.lost(Signal::Logs, loss);
    let begun = cpu_time();
    let pushed = 4 * WAITING as u64;
    for number in 0..pushed {
        logs.push(record(number));
    }
    let took = cpu_time().saturating_sub(begun);
    assert!(took < Duration::from_secs(1), "pushing takes {took:?}");
    assert!(lost(Loss::QueueFull) >= pushed - WAITING as u64 - 512, "the queue grew");
    until("batches are given up", || lost(Loss::Unreachable) >= 512).await;
    // The collector starts again.
    let collector = Collector::at(address).await;
    until("what is new arrives", || {
        logs.push(record(9));
        counts.exported(Signal::Logs) > 0
    })
    .await;
    running.finish(LONG).await;
    assert!(!collector.taken("/v1/logs").is_empty());
}

#[tokio::test]
async fn a_slow_collector_holds_up_nothing() {
    let collector = Collector::start().await;
    collector.answer.lock().unwrap().after = Duration::from_millis(300);
    let exporter = exporter();
    let (logs, counts) = (exporter.logs.clone(), Arc::clone(&exporter.counts));
    let running = exporter
        .start(
            Target { timeout: Duration::from_millis(50), ..target(collector.address) },
            Resource::default(),
        )
        .await
        .unwrap();
    let begun = cpu_time();
    for number in 0..10_000 {
        logs.push(record(number));
    }
    let took = cpu_time().saturating_sub(begun);
    assert!(took < Duration::from_secs(1), "pushing takes {took:?}");
    until("a batch is given up", || counts.lost(Signal::Logs, Loss::Unreachable) >= 512).await;
    assert_eq!(counts.exported(Signal::Logs), 0);
    // The agent's end takes no longer than the given limit.
    let begun = Instant::now();
    running.finish(Duration::from_millis(100)).await;
    assert!(begun.elapsed() < Duration::from_secs(5));
}

#[tokio::test]
async fn refused_records_are_lost_and_deferred_ones_are_sent_again() {
    let collector = Collector::start().await;
    let exporter = exporter();
    let (logs, counts) = (exporter.logs.clone(), Arc::clone(&exporter.counts));
    let running = exporter.start(target(collector.address), Resource::default()).await.unwrap();
    let refused = || counts.lost(Signal::Logs, Loss::Refused);
    let answer = |answer: CollectorReply| *collector.answer.lock().unwrap() = answer;
    answer(CollectorReply { status: 400, body: "no", ..CollectorReply::default() });
    logs.push(record(1));
    until("a refusal counts", || refused() == 1).await;
    answer(CollectorReply { status: 503, retry_after: Some("0"), ..CollectorReply::default() });
    let before = collector.asked();
    logs.push(record(2));
    until("a batch is deferred", || collector.asked() > before).await;
    let partial = r#"{"partialSuccess":{"rejectedLogRecords":"1","errorMessage":"too old"}}"#;
    answer(CollectorReply { body: partial, ..CollectorReply::default() });
    until("a part was refused", || refused() == 2).await;
    answer(CollectorReply::default());
    logs.push(record(3));
    until("all is well again", || counts.exported(Signal::Logs) == 1).await;
    running.finish(LONG).await;
}

#[tokio::test]
async fn queued_records_are_sent_at_shutdown() {
    let collector = Collector::start().await;
    let exporter = Exporter::default();
    let (logs, spans) = (exporter.logs.clone(), exporter.spans.clone());
    let running = exporter.start(target(collector.address), Resource::default()).await.unwrap();
    logs.push(record(1));
    spans.push(Span::begin("sync", None, 1));
    running.finish(LONG).await;
    assert_eq!((collector.taken("/v1/logs").len(), collector.taken("/v1/traces").len()), (1, 1));
}

#[tokio::test]
async fn invalid_otlp_settings_fail_at_start() {
    let address = "127.0.0.1:1".parse().unwrap();
    let wrong = Target { certificate: Some("/nonexistent/ca.pem".into()), ..target(address) };
    let error = exporter().start(wrong, Resource::default()).await.unwrap_err().to_string();
    assert!(
        error.contains("/nonexistent/ca.pem") && error.contains("OTEL_EXPORTER_OTLP_CERTIFICATE"),
        "{error}"
    );
    let wrong = Target { headers: vec![("a b".to_owned(), "secret".to_owned())], ..target(address) };
    let error = exporter().start(wrong, Resource::default()).await.unwrap_err().to_string();
    assert!(error.contains("a b") && !error.contains("secret"), "{error}");
}

#[tokio::test]
async fn spans_and_lines_belong_together() {
    let collector = Collector::start().await;
    let exporter = exporter();
    let layer = Layer { spans: Some(exporter.spans.clone()), logs: Some(exporter.logs.clone()) };
    let counts = Arc::clone(&exporter.counts);
    let running = exporter.start(target(collector.address), Resource::default()).await.unwrap();
    tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
        let sync = tracing::info_span!(target: TARGET, "sync", ballast.services = 3_u64, error = tracing::field::Empty);
        let entered = sync.enter();
        // Spans of libraries are not exported: a span inside one gets the nearest exported span as its parent.
        let _other = tracing::info_span!(target: "library", "request").entered();
        let plan = tracing::info_span!(target: TARGET, "plan").entered();
        tracing::warn!(service = "default/redis", "no room");
        drop(plan);
        sync.record("error", "a port failed");
        drop(entered);
    });
    until("all is exported", || counts.exported(Signal::Logs) == 1 && counts.exported(Signal::Traces) == 2)
        .await;
    running.finish(LONG).await;
    let spans = collector.taken("/v1/traces");
    let of = |name: &str| spans.iter().find(|span| span["name"] == name).unwrap();
    let (sync, plan) = (of("sync"), of("plan"));
    assert_eq!(plan["traceId"], sync["traceId"]);
    assert_eq!(plan["parentSpanId"], sync["spanId"]);
    assert_eq!(sync["status"], serde_json::json!({"message": "a port failed", "code": 2}));
    assert_eq!(
        sync["attributes"],
        serde_json::json!([{"key": "ballast.services", "value": {"intValue": "3"}}])
    );
    let time = |span: &Json, field: &str| span[field].as_str().unwrap().parse::<u64>().unwrap();
    assert!(time(sync, "startTimeUnixNano") <= time(plan, "startTimeUnixNano"));
    assert!(time(plan, "endTimeUnixNano") <= time(sync, "endTimeUnixNano"));
    let line = &collector.taken("/v1/logs")[0];
    assert_eq!((&line["traceId"], &line["spanId"]), (&plan["traceId"], &plan["spanId"]));
    assert_eq!(
        (&line["body"]["stringValue"], &line["severityText"]),
        (&Json::from("no room"), &Json::from("WARN"))
    );
    assert_eq!(
        line["attributes"][0],
        serde_json::json!({"key": "service", "value": {"stringValue": "default/redis"}})
    );
}

#[test]
fn a_queue_without_exporter_counts_what_is_lost() {
    let exporter = Exporter::default();
    let (logs, counts) = (exporter.logs.clone(), Arc::clone(&exporter.counts));
    drop(exporter);
    logs.push(record(1));
    assert_eq!(counts.lost(Signal::Logs, Loss::QueueFull), 1);
}
