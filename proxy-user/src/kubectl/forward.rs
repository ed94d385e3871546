//! Requests to an agent's metrics server, through the API server (`pods/portforward`).

use axum::body::{Body, BodyDataStream};
use axum::http::header::HOST;
use axum::http::{Request, StatusCode};
use futures::StreamExt as _;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::Portforwarder;
use tokio::task::JoinHandle;

use super::cluster::{Agent, Cluster};

/// Bytes of an answer that is read as a whole.
const MOST: usize = 1 << 20;
/// How the agent is called: its page answers to no other names.
const NAME: &str = "localhost";

/// An answer of which the first line has come. The way to the agent is there until this is dropped.
pub(super) struct Told {
    pub status: StatusCode,
    body: BodyDataStream,
    _way: Way,
}

/// Ends both tasks that pass bytes on.
struct Way {
    forwarder: Portforwarder,
    connection: JoinHandle<Result<(), hyper::Error>>,
}

impl Drop for Way {
    fn drop(&mut self) {
        self.connection.abort();
        self.forwarder.abort();
    }
}

/// Asks the agent.
pub(super) async fn get(cluster: &Cluster, agent: &Agent, path: &str) -> Result<Told, String> {
    let Agent { namespace, pod, metrics_port: port, .. } = agent;
    let cannot = |error: &dyn std::fmt::Display| {
        format!("cannot reach port {port} of pod {namespace}/{pod} through the API server: {error}")
    };
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), namespace);
    let mut forwarder = pods.portforward(pod, &[*port]).await.map_err(|error| cannot(&error))?;
    let refused = forwarder.take_error(*port);
    let stream = forwarder.take_stream(*port).ok_or_else(|| cannot(&"no stream"))?;
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|error| cannot(&error))?;
    let way = Way { forwarder, connection: tokio::spawn(connection) };
    let request = Request::get(path).header(HOST, NAME).body(Body::empty());
    let answer = sender.send_request(request.map_err(|error| cannot(&error))?).await;
    let answer = match (answer, refused) {
        (Ok(answer), _) => answer,
        (Err(error), refused) => {
            // The node says why, if it does, before the connection ends.
            let told = match refused {
                Some(refused) => refused.await,
                None => None,
            };
            return Err(told.map_or_else(|| cannot(&error), |told| cannot(&told.trim())));
        }
    };
    let status = answer.status();
    let body = Body::new(answer.into_body()).into_data_stream();
    Ok(Told { status, body, _way: way })
}

impl Told {
    /// The next bytes; `None`: that was all.
    pub(super) async fn next(&mut self) -> Option<Result<impl AsRef<[u8]> + use<>, String>> {
        self.body.next().await.map(|part| part.map_err(|error| error.to_string()))
    }

    /// All of it.
    pub(super) async fn text(mut self) -> Result<String, String> {
        let mut bytes = Vec::new();
        while let Some(part) = self.next().await {
            bytes.extend_from_slice(part?.as_ref());
            if bytes.len() > MOST {
                return Err(format!("the answer is longer than {MOST} bytes"));
            }
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}
