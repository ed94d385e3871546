//! `cargo xtask chart`: renders plain manifests from the Helm chart, and checks both.
//!
//! The manifests are in the repository, so that `kubectl apply -k` needs no Helm. The API server itself checks their
//! fields in the `apiserver` tests.

mod cases;
mod helm;
mod values;

use std::fs;
#[cfg(test)]
use std::path::Path;

use anyhow::{Context as _, Result, bail};

use crate::log;
use crate::workspace::Workspace;
pub use helm::Helm;

/// Render deploy/manifests from the chart. With --check: check that the manifests are up to date, and that the chart accepts
/// valid values and rejects invalid ones.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Args {
    /// Write nothing; fail if a manifest is out of date or the chart has an error
    #[arg(long)]
    pub check: bool,
}

/// The `ConfigMap` that `kubectl apply -k` makes from deploy/manifests/api-server.env.
const ADDRESS: &str = "apiServer.configMap=ballast-api-server";

/// A file that is rendered from the chart: its path, and the values.
struct Manifest {
    file: &'static str,
    values: &'static [&'static str],
    /// The templates of the chart to render; none for all.
    templates: &'static [&'static str],
}

const MANIFESTS: [Manifest; 3] = [
    Manifest {
        file: "deploy/manifests/ballast.yaml",
        values: &[ADDRESS],
        // `kubectl apply -k` makes the ConfigMaps.
        templates: &["templates/serviceaccount.yaml", "templates/rbac.yaml", "templates/daemonset.yaml"],
    },
    Manifest { file: "deploy/manifests/cleanup/cleanup.yaml", values: &["cleanup=true"], templates: &[] },
    Manifest {
        file: "deploy/manifests/end-udp-sockets/end-udp-sockets.yaml",
        values: &[ADDRESS, "endUdpSockets=true"],
        templates: &["templates/end-udp-sockets.yaml"],
    },
];

const HEAD: &str = "\
# Made from deploy/chart by `cargo xtask chart`; do not edit.
";

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::find()?;
    let helm = Helm::find(&workspace)?;
    if args.check {
        return check_with(&workspace, &helm);
    }
    for manifest in &MANIFESTS {
        let path = workspace.root().join(manifest.file);
        fs::write(&path, rendered(&helm, manifest)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
        log::line(path.display());
    }
    Ok(())
}

/// Returns an error if the chart has an error or a manifest is out of date.
pub fn check(workspace: &Workspace) -> Result<()> {
    check_with(workspace, &Helm::find(workspace)?)
}

fn check_with(workspace: &Workspace, helm: &Helm) -> Result<()> {
    helm.lint()?;
    cases::check(helm)?;
    values::check(helm, &cases::values())?;
    for manifest in &MANIFESTS {
        let path = workspace.root().join(manifest.file);
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        if text != rendered(helm, manifest)? {
            bail!("{} does not match deploy/chart: run `cargo xtask chart`", manifest.file);
        }
    }
    Ok(())
}

fn rendered(helm: &Helm, manifest: &Manifest) -> Result<String> {
    let text = helm.render_only(manifest.templates, manifest.values)?;
    let mut kept = HEAD.to_owned();
    // The checksum is that of the chart's own ConfigMap; here, the name of the ConfigMap changes with its content.
    for line in text.trim_start_matches("---\n").lines().filter(|line| !line.contains("checksum/config: ")) {
        kept.push_str(line);
        kept.push('\n');
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deployed(path: &str) -> String {
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy").join(path)).unwrap()
    }

    #[test]
    fn a_changed_file_changes_the_name_of_a_config_map_of_the_manifests() {
        let (made, manifest) = (deployed("manifests/kustomization.yaml"), deployed("manifests/ballast.yaml"));
        for (name, source) in
            [("ballast", "files: [config.yaml]"), ("ballast-api-server", "envs: [api-server.env]")]
        {
            assert!(made.contains(&format!("  - name: {name}\n    {source}\n")), "{made}");
        }
        assert!(!manifest.contains("kind: ConfigMap") && !manifest.contains("checksum/config"));
        assert!(manifest.contains("configMap:\n            name: ballast\n"));
        assert!(manifest.contains("configMapRef:\n                name: ballast-api-server\n"));
        let config = deployed("manifests/config.yaml");
        assert!(config.ends_with("\nkind: KubeProxyConfiguration\n"), "{config}");
    }

    #[test]
    fn the_chart_has_the_version_of_the_program() {
        let chart = deployed("chart/Chart.yaml");
        let version = env!("CARGO_PKG_VERSION");
        assert!(chart.contains(&format!("\nversion: {version}\n")), "{chart}");
        assert!(chart.contains(&format!("\nappVersion: \"{version}\"\n")), "{chart}");
    }
}
