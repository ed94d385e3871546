//! The sources of objects: a folder, a cluster, or both.

use std::path::Path;

use anyhow::bail;
use futures::future::{BoxFuture, OptionFuture};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use crate::config::RunConfig;
use crate::config::run::Cluster;
use proxy_core::model::notice::Notice;
use proxy_core::model::{ApiServers, Event, Watches};
use proxy_watch::api;
use proxy_watch::api::client::Connection;
use proxy_watch::source::folder::{self, Role};

/// Opens the sources that `config` names. The future never ends; it sends their events to `sender`, and `notices` to
/// the cluster, if there is one. `problems` gets the problems of the folder, and `watches` those of watches. The connection is for other requests to the
/// cluster. Fails if a folder is the only source and cannot be read.
pub async fn open(
    config: &RunConfig,
    sender: mpsc::Sender<Event>,
    notices: mpsc::Receiver<Notice>,
    needs_nodes: watch::Receiver<Option<Instant>>,
    server_status: watch::Sender<ApiServers>,
    problems: watch::Sender<Vec<String>>,
    watches: watch::Sender<Watches>,
) -> anyhow::Result<(BoxFuture<'static, ()>, Option<Connection>)> {
    let Some(cluster) = &config.source.cluster else {
        config.source.manifests.as_deref().map_or(Ok(()), require_readable)?;
        let folder =
            config.source.manifests.clone().map(|dir| folder::run(dir, Role::Alone, sender, problems));
        let source = async move {
            tokio::join!(OptionFuture::from(folder), silence(notices));
        };
        return Ok((Box::pin(source), None));
    };
    let (begun, has_begun) = oneshot::channel();
    let beside = |dir| folder::run(dir, Role::BesideApiServer { begun }, sender.clone(), problems);
    let folder = OptionFuture::from(config.source.manifests.clone().map(beside));
    let (cluster, connection) =
        of_cluster(cluster, config, sender.clone(), notices, needs_nodes, server_status, watches).await?;
    let cluster = async move {
        // Without a folder, the sender of this channel has been dropped.
        let _ = has_begun.await;
        cluster.await;
    };
    let source = async move {
        tokio::join!(folder, cluster);
    };
    Ok((Box::pin(source), Some(connection)))
}

async fn of_cluster(
    cluster: &Cluster,
    config: &RunConfig,
    sender: mpsc::Sender<Event>,
    notices: mpsc::Receiver<Notice>,
    needs_nodes: watch::Receiver<Option<Instant>>,
    server_status: watch::Sender<ApiServers>,
    watches: watch::Sender<Watches>,
) -> anyhow::Result<(BoxFuture<'static, ()>, Connection)> {
    let Cluster { kubeconfig, master } = cluster.clone();
    let options = api::client::Options { kubeconfig, servers: master };
    let connection = api::client::connect(&options, server_status).await?;
    let mut direct = api::direct::EndpointFailover::new(&connection);
    let events = api::notices::send(connection.client.clone(), config.node_name.clone(), notices);
    let node_name = config.node_name.clone();
    let note = move |event: &Event| direct.note(event);
    let watches = api::watch::run(connection.client.clone(), node_name, sender, needs_nodes, watches, note);
    let source = async move {
        tokio::join!(watches, events);
    };
    Ok((Box::pin(source), connection))
}

fn require_readable(dir: &Path) -> anyhow::Result<()> {
    if let Err(error) = std::fs::read_dir(dir) {
        bail!(
            "cannot read --manifests {}: {error}; create the folder, or give --kubeconfig for a cluster",
            dir.display()
        );
    }
    Ok(())
}

/// Discards the notices, because there is no cluster.
async fn silence(mut notices: mpsc::Receiver<Notice>) {
    while notices.recv().await.is_some() {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_folder_as_the_only_source_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        require_readable(dir.path()).unwrap();
        let error = require_readable(&dir.path().join("none")).unwrap_err().to_string();
        assert!(error.contains("/none: No such file") && error.contains("create the folder"), "{error}");
    }
}
