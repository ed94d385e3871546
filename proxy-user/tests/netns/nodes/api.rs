//! A minimal API server: it lists and watches objects that never change, over HTTP on a node's loopback.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use serde_json::{Value, json};

use proxy_testbed::space::Space;

const ADDRESS: &str = "127.0.0.1:6443";

/// Starts the server in `space` for as long as this program runs, and writes a kubeconfig for it.
pub fn start(space: &Space, objects: Vec<Value>, kubeconfig: &Path) -> Result<()> {
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{{name: c, context: {{cluster: k, user: u}}}}]\n\
         clusters: [{{name: k, cluster: {{server: 'http://{ADDRESS}'}}}}]\nusers: [{{name: u, user: {{token: t}}}}]\n"
    );
    std::fs::write(kubeconfig, text)?;
    let listener = space.inside(|| Ok(TcpListener::bind(ADDRESS)?))?;
    let objects = Arc::new(objects);
    std::thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            let objects = Arc::clone(&objects);
            // A client that closes early ends only its own connection.
            std::thread::spawn(move || converse(stream, &objects));
        }
    });
    Ok(())
}

fn converse(mut stream: TcpStream, objects: &[Value]) -> Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let mut length = 0;
        loop {
            let mut header = String::new();
            reader.read_line(&mut header)?;
            if header.trim().is_empty() {
                break;
            }
            if let Some((name, value)) = header.split_once(':')
                && name.eq_ignore_ascii_case("content-length")
            {
                length = value.trim().parse()?;
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body)?;
        let mut words = line.split_whitespace();
        let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let kind = match path.rsplit('/').next().unwrap_or_default() {
            "nodes" => "Node",
            "services" => "Service",
            "endpointslices" => "EndpointSlice",
            _ => "ServiceCIDR",
        };
        let of_kind = objects.iter().filter(|object| object["kind"] == kind);
        if method != "GET" {
            reply(&mut stream, &String::from_utf8_lossy(&body))?;
        } else if query.contains("watch=true") || query.contains("watch=1") {
            let begins =
                "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";
            stream.write_all(begins.as_bytes())?;
            if query.contains("sendInitialEvents=true") {
                for object in of_kind {
                    chunk(&mut stream, &json!({"type": "ADDED", "object": object}))?;
                }
                let metadata =
                    json!({"resourceVersion": "1", "annotations": {"k8s.io/initial-events-end": "true"}});
                let api =
                    objects.iter().find(|object| object["kind"] == kind).map(|one| one["apiVersion"].clone());
                let object = json!({"kind": kind, "apiVersion": api.unwrap_or_else(|| "v1".into()), "metadata": metadata});
                chunk(&mut stream, &json!({"type": "BOOKMARK", "object": object}))?;
            }
            // The objects never change: the watch stays open until its client closes it.
            let _ = reader.read(&mut [0; 1]);
            return Ok(());
        } else {
            let items: Vec<_> = of_kind.collect();
            let api = items.first().map_or_else(|| "v1".into(), |item| item["apiVersion"].clone());
            let list = json!({
                "kind": format!("{kind}List"),
                "apiVersion": api,
                "metadata": {"resourceVersion": "1"},
                "items": items,
            });
            reply(&mut stream, &list.to_string())?;
        }
    }
}

fn chunk(stream: &mut TcpStream, event: &Value) -> Result<()> {
    let text = format!("{event}\n");
    Ok(write!(stream, "{:x}\r\n{text}\r\n", text.len())?)
}

fn reply(stream: &mut TcpStream, body: &str) -> Result<()> {
    let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length:";
    Ok(write!(stream, "{head} {}\r\n\r\n{body}", body.len())?)
}
