//! Watches the configuration file: a change ends the agent, so that kubelet or systemd starts it again.
//!
//! This does not interrupt traffic. If the new text is not valid, the agent logs an error and continues with the old one.

use std::time::Duration;

use anyhow::bail;
use tokio::time::{sleep, timeout};

use crate::config::kube_proxy::{Overlay, file};
use crate::source::file_watch::FileWatch;

/// How often the file is read without a notification.
const POLL: Duration = Duration::from_secs(5);
/// The pause after a notification, because a file is written in several steps.
const REST: Duration = Duration::from_millis(200);

/// Returns an error when the file has a new, valid text; never returns without a file.
pub async fn until_changed(overlay: Overlay) -> anyhow::Result<()> {
    let Some(path) = overlay.config_file else { return std::future::pending().await };
    let mut watched = FileWatch::watch(&path);
    let mut known = overlay.text;
    loop {
        // The file is read after a notification and after the timeout.
        if timeout(POLL, watched.touched()).await.is_ok() {
            sleep(REST).await;
        }
        let Ok(text) = tokio::fs::read_to_string(&path).await else { continue };
        if text == known {
            continue;
        }
        match file::parse(&path.display().to_string(), &text) {
            Ok(_) => bail!("the configuration file {} was changed", path.display()),
            Err(error) => tracing::error!(%error, "cannot use the changed configuration file"),
        }
        known = text;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";

    #[tokio::test]
    async fn a_new_text_is_the_end_and_a_wrong_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        // The layout of a ConfigMap volume of kubelet.
        for (version, text) in [("a", TEXT), ("b", "mode: [\n"), ("c", &*format!("{TEXT}mode: ipvs\n"))] {
            std::fs::create_dir(dir.path().join(version)).unwrap();
            std::fs::write(dir.path().join(version).join("config.conf"), text).unwrap();
        }
        let put = |version: &str| {
            std::os::unix::fs::symlink(version, dir.path().join("next")).unwrap();
            std::fs::rename(dir.path().join("next"), dir.path().join("data")).unwrap();
        };
        put("a");
        let path = dir.path().join("config.conf");
        std::os::unix::fs::symlink("data/config.conf", &path).unwrap();
        let overlay = Overlay { config_file: Some(path), text: TEXT.to_owned(), ..Overlay::default() };
        let mut watched = tokio::spawn(until_changed(overlay));
        sleep(Duration::from_millis(100)).await;
        put("b");
        assert!(timeout(Duration::from_secs(1), &mut watched).await.is_err(), "a text that cannot be used");
        put("c");
        let error = timeout(POLL, watched).await.expect("heard of at once").unwrap().unwrap_err();
        assert!(error.to_string().contains("config.conf was changed"), "{error}");
    }

    #[tokio::test]
    async fn without_a_file_nothing_is_watched() {
        let never = until_changed(Overlay::default());
        assert!(timeout(Duration::from_millis(50), never).await.is_err());
    }
}
