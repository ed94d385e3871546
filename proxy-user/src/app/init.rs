//! Prepares the node before anything is loaded; `--init-only` does only this.

use std::path::Path;

use anyhow::{Context, bail};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::config::RunConfig;
use crate::config::kube_proxy::document;
use crate::host::cgroup;
use crate::host::netfilter::kube_proxy_rules::KubeProxyRules;
use crate::host::netfilter::{masquerade, sysctl};
use crate::programs::{self, PinnedElsewhere};
use proxy_core::model::settings::Conntrack;

/// Does what needs full privileges, for a main container that has few: mounts `bpffs` and `cgroup2`, sets netfilter's sysctls.
/// Fails if programs of an earlier agent are pinned in another bpffs: the main container could not see them.
pub fn init(config: &RunConfig) -> anyhow::Result<()> {
    describe(config);
    let mounted = programs::mount_bpffs(&config.bpffs)?;
    let did = |done: bool| if done { "mounted" } else { "already mounted" };
    tracing::info!(path = %config.bpffs.display(), bpffs = did(mounted), "ready");
    let (root, mounted) = cgroup::find_or_mount(config.cgroup_root.as_deref())?;
    tracing::info!(path = %root.path.display(), cgroup2 = did(mounted), "ready");
    if let Some(found) = programs::pinned_elsewhere(&config.bpffs, &root.path)? {
        bail!("{}", refusal(&found, &config.bpffs, &root.path));
    }
    // netfilter's rule loads nf_conntrack, without which it has no sysctls.
    if let Err(error) = masquerade::ensure(config.node.masquerade_mark) {
        tracing::info!(%error, "cannot create netfilter's rule for masquerading now");
    }
    set_up_netfilter(config);
    Ok(())
}

/// Returns why the agent cannot start beside programs that are pinned elsewhere, and the way out.
fn refusal(found: &PinnedElsewhere, bpffs: &Path, cgroup: &Path) -> String {
    let programs = found.programs.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
    let (cgroup, bpffs) = (cgroup.display(), bpffs.display());
    let way_out = match &found.bpffs {
        Some(old) => format!("run `ballast cleanup --bpffs {}`, or give this --bpffs again", old.display()),
        None => "run `ballast cleanup --bpffs OLD`, where OLD is the --bpffs of the earlier agent (chart: paths.bpffs)"
            .to_owned(),
    };
    format!(
        "programs of an earlier agent are attached to {cgroup} and not pinned in {bpffs} ({programs}): they would stay, with \
         Services that no agent keeps up to date; {way_out}"
    )
}

/// Logs once which given settings are ignored or have another meaning.
pub fn describe(config: &RunConfig) {
    if let Some(mode) = config.legacy_proxy_mode {
        tracing::info!(mode, "Ballast uses `ebpf` instead of this mode of kube-proxy");
    }
    if let Some(file) = &config.kube_proxy.config_file {
        tracing::info!(file = %file.display(), "configuration read");
    }
    if let Some(why) = config.kube_proxy.node_ports {
        tracing::info!("{why}");
    }
    for problem in &config.kube_proxy.values.ignored {
        tracing::warn!("{problem}");
    }
    for note in &config.kube_proxy.notes {
        tracing::info!("{note}");
    }
}

/// Logs once what another proxy has left on this node.
pub async fn describe_kube_proxy_rules() {
    // An agent without the privilege to read the rules cannot attach programs either, which is reported elsewhere.
    let Ok(Ok(found)) = tokio::task::spawn_blocking(KubeProxyRules::read).await else { return };
    if found.has_rules() {
        tracing::warn!(
            %found,
            "this node has kube-proxy rules: Ballast handles new connections, kube-proxy keeps its open ones; stop \
             kube-proxy, and run `ballast takeover`"
        );
    } else if found.draining {
        tracing::info!(
            "this node may have connections of kube-proxy; run `ballast takeover` to see and finish this"
        );
    }
}

/// Sets `oom_score_adj` of this process, if the operator gave a value.
pub fn set_up_process(config: &RunConfig) {
    raise_file_limit();
    let Some(score) = config.kube_proxy.oom_score_adj else { return };
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", score.to_string()) {
        tracing::info!(score, %error, "cannot set oomScoreAdj");
    }
}

/// Raises the limit of open files to the hard limit: every health check port of a Service, every connection and every network
/// namespace that is visited is a file, and the usual limit is 1,024.
pub(super) fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::info!(limit = limit.current, %error, "cannot raise the limit of open files");
    }
}

/// Sets the sysctls of netfilter, which tracks the connections that it masquerades. kube-proxy exits if it cannot set them;
/// Ballast's container usually has a read-only `/proc/sys`, so they should be set by `--init-only`. In a node that is a container
/// itself, some of them are read-only: only what the operator has given is warned of.
pub fn set_up_netfilter(config: &RunConfig) {
    let overlay = &config.kube_proxy;
    let is_given = overlay.conntrack != Conntrack::default();
    for error in sysctl::apply(&overlay.netfilter, Path::new("/proc/sys"), Path::new("/sys/module")) {
        if is_given {
            tracing::warn!(%error, "cannot set a conntrack sysctl; run `ballast run --init-only` as root");
        } else {
            tracing::info!(%error, "cannot set a conntrack sysctl to kube-proxy's default");
        }
    }
}

/// Writes the settings in effect in kube-proxy's format.
pub fn write_config(config: &RunConfig, path: &Path) -> anyhow::Result<()> {
    describe(config);
    let text = document::yaml(&document::of(config));
    std::fs::write(path, text).with_context(|| format!("cannot write --write-config-to {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_pinned_elsewhere_are_refused_with_advice() {
        let programs = ["sock_bind4", "sock_connect4"].map(str::to_owned).into();
        let mut found = PinnedElsewhere { programs, bpffs: Some("/run/bpf".into()) };
        let text =
            |found: &PinnedElsewhere| refusal(found, Path::new("/sys/fs/bpf"), Path::new("/sys/fs/cgroup"));
        for part in ["/sys/fs/cgroup", "/sys/fs/bpf", "sock_bind4, sock_connect4", "cleanup --bpffs /run/bpf"]
        {
            assert!(text(&found).contains(part), "{part}: {}", text(&found));
        }
        found.bpffs = None;
        assert!(text(&found).contains("ballast cleanup --bpffs OLD"), "{}", text(&found));
    }
}
