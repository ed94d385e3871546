//! A mock OpenTelemetry collector: keeps the bodies of POST requests, and answers with the responses that a test sets.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// A request that the collector accepted: path, the header `authorization`, and the document.
pub type Posted = (String, Option<String>, Value);

/// The collector's answer to each request.
#[derive(Clone, Debug)]
pub struct CollectorReply {
    pub status: u16,
    pub retry_after: Option<&'static str>,
    pub body: &'static str,
    pub after: Duration,
}

impl Default for CollectorReply {
    fn default() -> Self {
        Self { status: 200, retry_after: None, body: "{}", after: Duration::ZERO }
    }
}

pub struct Collector {
    pub address: SocketAddr,
    pub answer: Arc<Mutex<CollectorReply>>,
    posted: Arc<Mutex<Vec<Posted>>>,
    asked: Arc<AtomicUsize>,
    task: JoinHandle<()>,
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Collector {
    pub async fn start() -> Self {
        Self::at(SocketAddr::from(([127, 0, 0, 1], 0))).await
    }

    pub async fn at(address: SocketAddr) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (answer, posted) =
            (Arc::<Mutex<CollectorReply>>::default(), Arc::<Mutex<Vec<Posted>>>::default());
        let asked = Arc::<AtomicUsize>::default();
        let (reply, noted, count) = (Arc::clone(&answer), Arc::clone(&posted), Arc::clone(&asked));
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (reply, noted, count) = (Arc::clone(&reply), Arc::clone(&noted), Arc::clone(&count));
                let service = service_fn(move |request| {
                    let answered = answered(request, Arc::clone(&reply), Arc::clone(&noted));
                    let count = Arc::clone(&count);
                    async move {
                        let answer = answered.await;
                        count.fetch_add(1, Ordering::Relaxed);
                        answer
                    }
                });
                connections.spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
            }
        });
        Self { address, answer, posted, asked, task }
    }

    pub fn posted(&self) -> Vec<Posted> {
        self.posted.lock().unwrap().clone()
    }

    /// Returns how many requests were answered, whatever the answer.
    pub fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }

    /// Returns all records or spans that were posted to this path, as one list.
    pub fn taken(&self, path: &str) -> Vec<Value> {
        let posted = self.posted();
        let documents = posted.iter().filter(|(asked, ..)| asked == path);
        let lists = documents.filter_map(|(_, _, document)| {
            let list = document.pointer("/resourceLogs/0/scopeLogs/0/logRecords");
            list.or_else(|| document.pointer("/resourceSpans/0/scopeSpans/0/spans"))?.as_array()
        });
        lists.flatten().cloned().collect()
    }
}

async fn answered(
    request: Request<Incoming>,
    reply: Arc<Mutex<CollectorReply>>,
    noted: Arc<Mutex<Vec<Posted>>>,
) -> Result<Response<Full<Bytes>>, hyper::Error> {
    let (parts, body) = request.into_parts();
    assert_eq!(parts.headers["content-type"], "application/json");
    let body = body.collect().await?.to_bytes();
    let answer = reply.lock().unwrap().clone();
    tokio::time::sleep(answer.after).await;
    if answer.status == 200 {
        let authorization =
            parts.headers.get("authorization").map(|value| value.to_str().unwrap().to_owned());
        let document = serde_json::from_slice(&body).unwrap();
        noted.lock().unwrap().push((parts.uri.path().to_owned(), authorization, document));
    }
    let mut response = Response::builder().status(answer.status);
    if let Some(after) = answer.retry_after {
        response = response.header("retry-after", after);
    }
    Ok(response.body(Full::from(answer.body)).unwrap())
}
