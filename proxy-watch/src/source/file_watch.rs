//! Watches a file by its folder: Kubernetes updates the files of a `ConfigMap` volume by replacing a link in the folder.

use std::path::{Path, PathBuf};

use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::mpsc;

/// The kernel's watch of a file's folder; dropping it ends the watch.
#[derive(Debug)]
pub struct FileWatch {
    touches: mpsc::Receiver<()>,
    watcher: Option<RecommendedWatcher>,
}

impl FileWatch {
    /// Starts a watch. If the kernel cannot watch the folder, no event ever arrives, so read the file periodically as well.
    pub fn watch(file: &Path) -> Self {
        let (sender, touches) = mpsc::channel(1);
        let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.map_or_else(|| PathBuf::from("."), Path::to_owned);
        let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            // Ignore reads of the file, which are events, too; otherwise each read would cause the next one.
            if event.is_ok_and(|event| !event.kind.is_access()) {
                // If the queue is full, an event waits already.
                let _ = sender.try_send(());
            }
        })
        .and_then(|mut watcher| watcher.watch(&folder, RecursiveMode::NonRecursive).map(|()| watcher))
        .inspect_err(|error| tracing::debug!(%error, folder = %folder.display(), "cannot watch the folder"));
        Self { touches, watcher: watcher.ok() }
    }

    /// Waits until the file may have changed.
    pub async fn touched(&mut self) {
        if self.watcher.is_none() || self.touches.recv().await.is_none() {
            std::future::pending::<()>().await;
        }
    }
}
