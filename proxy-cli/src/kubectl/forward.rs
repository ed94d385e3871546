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
use super::error::cause;

/// Maximum length of an answer that is read as a whole, in bytes.
const MOST: usize = 1 << 20;
/// Host name in the requests: the agent's page refuses unknown names.
const NAME: &str = "localhost";

/// An answer whose head has arrived. The connection to the agent is closed when this is dropped.
pub(super) struct OpenResponse {
    pub status: StatusCode,
    body: BodyDataStream,
    _connection: ForwardedConnection,
}

/// The connection to an agent. Dropping it ends both tasks that forward bytes.
struct ForwardedConnection {
    forwarder: Portforwarder,
    connection: JoinHandle<Result<(), hyper::Error>>,
}

impl Drop for ForwardedConnection {
    fn drop(&mut self) {
        self.connection.abort();
        self.forwarder.abort();
    }
}

/// Sends a GET request to the agent's metrics server.
pub(super) async fn get(cluster: &Cluster, agent: &Agent, path: &str) -> Result<OpenResponse, String> {
    let Agent { namespace, pod, metrics_port: port, .. } = agent;
    agent.check_running()?;
    let cannot = |error: &dyn std::fmt::Display| {
        format!("cannot reach port {port} of pod {namespace}/{pod} through the API server: {error}")
    };
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), namespace);
    let mut forwarder = pods.portforward(pod, &[*port]).await.map_err(|error| cannot(&cause(&error)))?;
    let refused = forwarder.take_error(*port);
    let stream = forwarder.take_stream(*port).ok_or_else(|| cannot(&"no stream"))?;
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|error| cannot(&error))?;
    let way = ForwardedConnection { forwarder, connection: tokio::spawn(connection) };
    let request = Request::get(path).header(HOST, NAME).body(Body::empty());
    let answer = sender.send_request(request.map_err(|error| cannot(&error))?).await;
    let answer = match (answer, refused) {
        (Ok(answer), _) => answer,
        (Err(error), refused) => {
            // If the node reports the reason, it does so before the connection ends.
            let reason = match refused {
                Some(refused) => refused.await,
                None => None,
            };
            return Err(reason.map_or_else(|| cannot(&error), |reason| cannot(&reason.trim())));
        }
    };
    let status = answer.status();
    let body = Body::new(answer.into_body()).into_data_stream();
    Ok(OpenResponse { status, body, _connection: way })
}

impl OpenResponse {
    /// Returns the next bytes of the body; `None` at its end.
    pub(super) async fn next(&mut self) -> Option<Result<impl AsRef<[u8]> + use<>, String>> {
        self.body.next().await.map(|part| part.map_err(|error| error.to_string()))
    }

    /// Returns the whole body.
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
