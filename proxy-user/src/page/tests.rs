use std::time::Duration;

use futures::StreamExt as _;
use serde_json::{Value, json};

use super::frame;
use proxy_cli::page::{PageQuery, Refusal, Source as _};

use super::Agent;
use super::sampler::{Examples, Sample};
use crate::config::page::{PageSettings, Shows};
use crate::rates::tests::{endpoint, service, two_looks};
use crate::rates::{Counters, Rates};

fn frame_of(rates: Result<Rates, String>, shows: Shows, query: &PageQuery) -> Value {
    let problems = (0..25).map(|number| format!("problem {number}")).collect();
    let (clients, examples) = (Vec::new(), Examples::new());
    let sample = Sample { at: std::time::SystemTime::UNIX_EPOCH, rates, clients, examples, problems };
    serde_json::from_str(&frame::text("node-a", shows, &sample, query).unwrap()).unwrap()
}

#[test]
fn addresses_are_shown_only_if_enabled() {
    let (before, after) = two_looks();
    let rates = || Ok(Rates::between(Some(&before), &after));
    let open = frame_of(rates(), Shows::All, &PageQuery::default());
    let row = &open["services"][0];
    assert_eq!(row["key"], "default/web:http/TCP/IPv4");
    assert_eq!((&row["frontends"], &row["count"]), (&json!(["10.96.0.3:80"]), &json!(2)));
    assert_eq!(row["endpoints"][0]["address"], "10.244.0.1:8080", "the busiest first");
    assert_eq!(row["bySockets"], 20.0, "no packet has begun a connection");
    assert_eq!((open["problems"].as_array().unwrap().len(), &open["moreProblems"]), (20, &json!(5)));
    let closed = frame_of(rates(), Shows::Services, &PageQuery::default());
    let row = &closed["services"][0];
    assert_eq!(
        (&row["frontends"], &row["endpoints"], &row["bySockets"]),
        (&json!([]), &json!([]), &Value::Null)
    );
    assert_eq!((&row["count"], &row["ready"]), (&json!(2), &json!(2)));
    assert!(!closed.to_string().contains("10.244."), "{closed}");
    // A search must not reveal addresses either.
    let by_address = PageQuery { filter: "10.96.0.3".to_owned(), ..PageQuery::default() };
    assert_eq!(frame_of(rates(), Shows::All, &by_address)["matching"], 1);
    assert_eq!(frame_of(rates(), Shows::Services, &by_address)["matching"], 0);
}

#[test]
fn an_event_is_bounded_and_has_what_is_asked_for() {
    let mut counters = Counters { at: Duration::from_secs(1), ..Counters::default() };
    for id in 1..=255 {
        service(&mut counters, id, &format!("s{id:03}"));
    }
    for id in 0..40 {
        endpoint(&mut counters, 1_000 + id, 1, 0);
        endpoint(&mut counters, 2_000 + id, 250, 0);
    }
    for name in ["default/s250:http/TCP/IPv4", "default/s250:http"] {
        let query = PageQuery { service: name.to_owned(), ..PageQuery::default() };
        let event = frame_of(Ok(Rates::between(None, &counters)), Shows::All, &query);
        let services = event["services"].as_array().unwrap();
        assert_eq!((services.len(), &event["matching"]), (201, &json!(255)));
        let endpoints = |row: &Value| row["endpoints"].as_array().unwrap().len();
        assert_eq!((endpoints(&services[0]), &services[0]["count"]), (16, &json!(40)));
        assert_eq!(
            (&services[200]["key"], endpoints(&services[200])),
            (&json!("default/s250:http/TCP/IPv4"), 40)
        );
    }
    let filtered = PageQuery { filter: "S01".to_owned(), ..PageQuery::default() };
    assert_eq!(frame_of(Ok(Rates::between(None, &counters)), Shows::All, &filtered)["matching"], 10);
}

fn agent(history: Duration) -> Agent {
    let settings = PageSettings { page: Shows::All, page_history: history, ..PageSettings::default() };
    Agent::new(settings, "/nonexistent".into(), "node-a".to_owned(), Vec::new).unwrap()
}

#[tokio::test]
async fn number_of_browsers_is_limited_and_a_closed_one_frees_a_place() {
    let agent = agent(Duration::ZERO);
    let mut listeners = Vec::new();
    for _ in 0..16 {
        listeners.push(agent.events(PageQuery::default()).await.unwrap());
    }
    assert_eq!(agent.events(PageQuery::default()).await.err(), Some(Refusal::TooMany { most: 16 }));
    let event: Value = serde_json::from_str(&listeners[15].next().await.unwrap()).unwrap();
    assert_eq!(event["node"], "node-a");
    let failure = event["failure"].as_str().unwrap();
    assert!(failure.contains("/nonexistent"), "without maps it says why: {failure}");
    drop(listeners.pop());
    let mut again = agent.events(PageQuery::default()).await.unwrap();
    assert!(again.next().await.is_some());
    // After all browsers have left, a new one starts the reading of the maps again.
    listeners.clear();
    drop(again);
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(agent.events(PageQuery::default()).await.unwrap().next().await.is_some());
    assert_eq!(agent.history(String::new()).await, Err(Refusal::NoHistory));
}

#[test]
fn without_the_setting_there_is_no_page() {
    let none = Agent::new(PageSettings::default(), "/sys/fs/bpf".into(), "n".to_owned(), Vec::new);
    assert!(none.is_none());
}
