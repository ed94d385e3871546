//! A mock API server for the tests, including those in network namespaces: it serves objects by GET, and websocket sessions
//! with the agents' pods.

use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures::{SinkExt as _, StreamExt as _};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::server::{ErrorResponse, Request, Response};

/// Answers of the mock API server.
pub trait Answers: Send + Sync + 'static {
    /// Returns status code and body for this path with its query.
    fn get(&self, path: &str) -> (u16, Value);

    /// Serves a subresource (`exec`, `portforward`) of the agent's pod on a node; `uri` is that of the request. The first byte
    /// of each message is its channel.
    fn session(
        &self,
        node: &str,
        uri: &str,
        socket: WebSocketStream<TcpStream>,
    ) -> impl Future<Output = io::Result<()>> + Send;
}

/// Returns the pod of the agent on a node, whose container has these ports.
pub fn agents_pod(node: &str, ports: &Value) -> Value {
    json!({
        "metadata": { "name": format!("ballast-{node}"), "namespace": "kube-system" },
        "spec": { "nodeName": node, "hostNetwork": true, "containers": [{ "name": "ballast", "ports": ports }] },
        "status": { "phase": "Running" },
    })
}

/// Starts the mock API server on this runtime. Returns a kubeconfig for it in `folder`, with the namespace `shop`.
pub async fn start(answers: impl Answers, folder: &Path) -> PathBuf {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let answers = Arc::new(answers);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let answers = Arc::clone(&answers);
            tokio::spawn(async move { serve(&*answers, stream).await });
        }
    });
    let kubeconfig = folder.join("config");
    let text = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "x",
        "clusters": [{ "name": "x", "cluster": { "server": format!("http://{address}") } }],
        "contexts": [{ "name": "x", "context": { "cluster": "x", "user": "x", "namespace": "shop" } }],
        "users": [{ "name": "x", "user": {} }],
    });
    std::fs::write(&kubeconfig, text.to_string()).unwrap();
    kubeconfig
}

/// Serves `pods/portforward` with a connection to the port; `None`: nothing listens there. The first message of each channel is
/// the port, and channel 1 carries errors.
pub async fn forward(
    mut socket: WebSocketStream<TcpStream>,
    port: u16,
    agent: Option<TcpStream>,
) -> io::Result<()> {
    for channel in [0, 1] {
        let [low, high] = port.to_le_bytes();
        socket.send(Message::binary(vec![channel, low, high])).await.map_err(io::Error::other)?;
    }
    let Some(mut agent) = agent else {
        let why = b"\x01connection refused".to_vec();
        socket.send(Message::binary(why)).await.map_err(io::Error::other)?;
        return socket.close(None).await.map_err(io::Error::other);
    };
    let mut bytes = [0; 4096];
    loop {
        tokio::select! {
            read = agent.read(&mut bytes) => {
                let read = read?;
                if read == 0 {
                    return socket.close(None).await.map_err(io::Error::other);
                }
                let message = [&[0], &bytes[..read]].concat();
                socket.send(Message::binary(message)).await.map_err(io::Error::other)?;
            }
            message = socket.next() => match message {
                Some(Ok(Message::Binary(message))) if message.first() == Some(&0) => {
                    agent.write_all(&message[1..]).await?;
                }
                Some(Ok(_)) => {}
                _ => return Ok(()),
            }
        }
    }
}

async fn serve(answers: &impl Answers, mut stream: TcpStream) -> io::Result<()> {
    let mut head = [0; 8192];
    let length = stream.peek(&mut head).await?;
    let head = String::from_utf8_lossy(&head[..length]).into_owned();
    if head.to_lowercase().contains("upgrade: websocket") {
        return upgrade(answers, stream).await;
    }
    let mut rest = vec![0; length];
    stream.read_exact(&mut rest).await?;
    let (code, body) = answers.get(head.split(' ').nth(1).unwrap_or_default());
    let body = body.to_string();
    let reply = format!(
        "HTTP/1.1 {code} X\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(reply.as_bytes()).await
}

/// Accepts the websocket with the first subprotocol that kube-rs offers.
async fn upgrade(answers: &impl Answers, stream: TcpStream) -> io::Result<()> {
    let mut uri = String::new();
    #[expect(clippy::result_large_err, reason = "the crate's")]
    let accept = |request: &Request, mut response: Response| -> Result<Response, ErrorResponse> {
        uri = request.uri().to_string();
        let protocols = request.headers().get("sec-websocket-protocol").cloned();
        let first = protocols.and_then(|all| all.to_str().ok()?.split(',').next().map(str::to_owned));
        response.headers_mut().insert("sec-websocket-protocol", first.unwrap().parse().unwrap());
        Ok(response)
    };
    let socket = tokio_tungstenite::accept_hdr_async(stream, accept).await.map_err(io::Error::other)?;
    let node = uri.split("/pods/ballast-").nth(1).and_then(|rest| rest.split('/').next()).unwrap_or_default();
    answers.session(node, &uri, socket).await
}
