//! The smallest controller: prints what happens to the Services, `EndpointSlice`s, `ServiceCIDR`s and the node `$NODE_NAME` of the
//! cluster that the kubeconfig names.

#![allow(clippy::print_stdout, reason = "it prints")]

use std::error::Error;

use proxy_watch::api::{client, watch};
use tokio::sync::{mpsc, watch as cell};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // Which API server is used, and why others are not.
    let servers = cell::Sender::default();
    let connection = client::connect(&client::Options::default(), servers).await?;
    let (sender, mut events) = mpsc::channel(1024);
    // No other nodes are needed.
    let needs_nodes = cell::Sender::new(None).subscribe();
    // Which watches fail.
    let failures = cell::Sender::default();
    let node = std::env::var("NODE_NAME")?;
    tokio::spawn(watch::run(connection.client, node, sender, needs_nodes, failures, |_| {}));
    // The first event of each kind has all objects; each later one is about one object, or has all of them again.
    while let Some(event) = events.recv().await {
        println!("{event:?}");
    }
    Ok(())
}
