//! Watches the configuration file: a change ends the agent, so that kubelet or systemd starts it again.
//!
//! This does not interrupt traffic. The agent ends only if it could run with the new text: it builds and checks all its
//! settings from it first. Otherwise it continues with the old one, logs an error and reports a problem.

use std::time::Duration;

use anyhow::bail;
use tokio::time::{sleep, timeout};

use crate::config::{Options, RunConfig};
use proxy_core::model::problem::chain;
use proxy_watch::source::file_watch::FileWatch;

/// How often the file is read without a notification.
const POLL: Duration = Duration::from_secs(5);
/// The pause after a notification, because a file is written in several steps.
const PAUSE: Duration = Duration::from_millis(200);

/// Returns an error when the file of `options` has a new text with which the agent can run; never returns without a file.
/// `text`: the text with which it runs. Passes to `report` why a new text cannot be used, and `None` when that is over.
pub async fn until_changed(
    options: Options,
    text: String,
    report: impl Fn(Option<String>) + Send,
) -> anyhow::Result<()> {
    let Some(path) = options.config.clone() else { return std::future::pending().await };
    let mut watched = FileWatch::watch(&path);
    let mut known = text.clone();
    loop {
        // The file is read after a notification and after the timeout.
        if timeout(POLL, watched.touched()).await.is_ok() {
            sleep(PAUSE).await;
        }
        let Ok(now) = tokio::fs::read_to_string(&path).await else { continue };
        if now == known {
            continue;
        }
        known = now;
        if known == text {
            report(None);
            continue;
        }
        match RunConfig::new(options.clone()) {
            Ok(_) => bail!("the configuration file {} was changed", path.display()),
            Err(error) => {
                let error = chain(&error);
                tracing::error!(error, "cannot use the changed configuration file");
                report(Some(format!(
                    "the changed configuration file {} cannot be used, the agent runs with the previous text: {error}",
                    path.display()
                )));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    const TEXT: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";

    #[tokio::test]
    async fn valid_new_config_file_ends_the_watch_and_invalid_ones_are_problems() {
        let dir = tempfile::tempdir().unwrap();
        let texts = [
            ("a", TEXT.to_owned()),
            ("b", "mode: [\n".to_owned()),
            // It parses, but does not merge.
            ("c", format!("{TEXT}detectLocalMode: BridgeInterface\n")),
            // It merges, but the settings contradict each other.
            (
                "d",
                format!(
                    "{TEXT}healthzBindAddress: 0.0.0.0:9999\nmetricsBindAddress: 0.0.0.0:9999\nbindAddressHardFail: true\n"
                ),
            ),
            ("e", format!("{TEXT}mode: ipvs\n")),
        ];
        // The layout of a ConfigMap volume of kubelet.
        for (version, text) in &texts {
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
        let options =
            Options { config: Some(path), hostname_override: Some("n".to_owned()), ..Options::default() };
        assert!(RunConfig::new(options.clone()).is_ok(), "the first text can be used");
        let problem = Arc::new(Mutex::new(None));
        let reported = Arc::clone(&problem);
        let report = move |problem| *reported.lock().unwrap() = problem;
        let mut watched = tokio::spawn(until_changed(options, TEXT.to_owned(), report));
        sleep(Duration::from_millis(100)).await;
        for version in ["b", "c", "d"] {
            put(version);
            assert!(timeout(Duration::from_secs(2), &mut watched).await.is_err(), "{version} cannot be used");
            let reported = problem.lock().unwrap().take().unwrap_or_default();
            assert!(reported.contains("runs with the previous text"), "{version}: {reported}");
        }
        *problem.lock().unwrap() = Some("d".to_owned());
        put("a");
        assert!(timeout(Duration::from_secs(2), &mut watched).await.is_err(), "nothing has changed");
        assert_eq!(*problem.lock().unwrap(), None);
        put("e");
        let error = timeout(2 * POLL, watched).await.expect("heard of at once").unwrap().unwrap_err();
        assert!(error.to_string().contains("config.conf was changed"), "{error}");
    }

    #[tokio::test]
    async fn without_a_file_nothing_is_watched() {
        let never = until_changed(Options::default(), String::new(), |_| ());
        assert!(timeout(Duration::from_millis(50), never).await.is_err());
    }
}
