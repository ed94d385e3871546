//! Where objects come from: a folder, a cluster, or both.

use futures::future::{BoxFuture, OptionFuture};
use tokio::sync::{mpsc, oneshot, watch};

use crate::api;
use crate::cli::RunConfig;
use crate::cli::config::Cluster;
use crate::model::notice::Notice;
use crate::model::{ApiServers, Event};
use crate::source::folder::{self, Role};

/// Opens what `config` names. The future sends what happens there to `sender`, for ever, and `notices` to the cluster.
pub async fn open(
    config: &RunConfig,
    sender: mpsc::Sender<Event>,
    notices: mpsc::Receiver<Notice>,
    needs_nodes: oneshot::Receiver<()>,
    told: watch::Sender<ApiServers>,
) -> anyhow::Result<BoxFuture<'static, ()>> {
    let Some(cluster) = &config.source.cluster else {
        let folder = config.source.manifests.clone().map(|dir| folder::run(dir, Role::Alone, sender));
        return Ok(Box::pin(async move {
            tokio::join!(OptionFuture::from(folder), silence(notices));
        }));
    };
    let (begun, has_begun) = oneshot::channel();
    let beside = |dir| folder::run(dir, Role::Beside { begun }, sender.clone());
    let folder = OptionFuture::from(config.source.manifests.clone().map(beside));
    let cluster = of_cluster(cluster, config, sender.clone(), notices, needs_nodes, told).await?;
    let cluster = async move {
        // Without a folder the other end is gone.
        let _ = has_begun.await;
        cluster.await;
    };
    Ok(Box::pin(async move {
        tokio::join!(folder, cluster);
    }))
}

async fn of_cluster(
    cluster: &Cluster,
    config: &RunConfig,
    sender: mpsc::Sender<Event>,
    notices: mpsc::Receiver<Notice>,
    needs_nodes: oneshot::Receiver<()>,
    told: watch::Sender<ApiServers>,
) -> anyhow::Result<BoxFuture<'static, ()>> {
    let Cluster { kubeconfig, master } = cluster.clone();
    let options = api::client::Options { kubeconfig, servers: master };
    let connection = api::client::connect(&options, told).await?;
    let mut direct = api::direct::Direct::new(&connection);
    let events = api::notices::send(connection.client.clone(), config.node_name.clone(), notices);
    let needs_nodes = async move {
        if needs_nodes.await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    let node_name = config.node_name.clone();
    let note = move |event: &Event| direct.note(event);
    let watches = api::watch::run(connection.client, node_name, sender, needs_nodes, note);
    Ok(Box::pin(async move {
        tokio::join!(watches, events);
    }))
}

/// There is no cluster to be told.
async fn silence(mut notices: mpsc::Receiver<Notice>) {
    while notices.recv().await.is_some() {}
}
