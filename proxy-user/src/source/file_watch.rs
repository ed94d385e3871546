//! One file, watched together with what lies beside it: a `ConfigMap` in a pod is changed by a link there.

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
    /// Begins to watch. Where the kernel does not, nothing is ever heard: look at the file now and then.
    pub fn watch(file: &Path) -> Self {
        let (sender, touches) = mpsc::channel(1);
        let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.map_or_else(|| PathBuf::from("."), Path::to_owned);
        let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            // Reading the file is an event too, and must not lead to the next reading.
            if event.is_ok_and(|event| !event.kind.is_access()) {
                // A touch that waits already is as good as two.
                let _ = sender.try_send(());
            }
        })
        .and_then(|mut watcher| watcher.watch(&folder, RecursiveMode::NonRecursive).map(|()| watcher))
        .inspect_err(|error| tracing::debug!(%error, folder = %folder.display(), "cannot watch the folder"));
        Self { touches, watcher: watcher.ok() }
    }

    /// Returns when something may have happened.
    pub async fn touched(&mut self) {
        if self.watcher.is_none() || self.touches.recv().await.is_none() {
            std::future::pending::<()>().await;
        }
    }
}
