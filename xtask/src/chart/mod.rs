//! `cargo xtask chart`: plain manifests from the Helm chart, and checks of both.
//!
//! The manifests are in the repository, so that `kubectl apply -k` needs no Helm. The API server itself checks their
//! fields in the `apiserver` tests.

mod cases;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use crate::exec::Cmd;
use crate::workspace::Workspace;
use crate::{gotools, say};

/// Render deploy/manifests from the chart; with --check: are they fresh, and does the chart take what it should and
/// refuse what it should.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Args {
    /// Write nothing; fail if a manifest is stale or the chart has a fault
    #[arg(long)]
    pub check: bool,
}

/// The `ConfigMap` that `kubectl apply -k` makes of deploy/manifests/api-server.env.
const ADDRESS: &str = "apiServer.configMap=ballast-api-server";

/// A file made from the chart: where, and from which values.
struct Manifest {
    file: &'static str,
    values: &'static [&'static str],
    /// One template of the chart alone.
    template: Option<&'static str>,
}

const MANIFESTS: [Manifest; 3] = [
    Manifest { file: "deploy/manifests/ballast.yaml", values: &[ADDRESS], template: None },
    Manifest { file: "deploy/manifests/cleanup/cleanup.yaml", values: &["cleanup=true"], template: None },
    Manifest {
        file: "deploy/manifests/end-udp-sockets/end-udp-sockets.yaml",
        values: &[ADDRESS, "endUdpSockets=true"],
        template: Some("templates/end-udp-sockets.yaml"),
    },
];

/// Helm renders for this version; it knows no cluster.
const KUBERNETES: &str = "--kube-version=1.33.0";

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
        fs::write(&path, helm.manifest(manifest)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
        say::line(path.display());
    }
    Ok(())
}

/// Whether the chart is sound and the manifests are what it says.
pub fn check(workspace: &Workspace) -> Result<()> {
    check_with(workspace, &Helm::find(workspace)?)
}

fn check_with(workspace: &Workspace, helm: &Helm) -> Result<()> {
    helm.lint()?;
    cases::check(helm)?;
    for manifest in &MANIFESTS {
        let path = workspace.root().join(manifest.file);
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        if text != helm.manifest(manifest)? {
            bail!("{} is not what deploy/chart says: run `cargo xtask chart`", manifest.file);
        }
    }
    Ok(())
}

/// Helm, and the chart.
#[derive(Debug)]
pub struct Helm {
    program: PathBuf,
    chart: PathBuf,
}

impl Helm {
    /// Found, or built once.
    pub fn find(workspace: &Workspace) -> Result<Self> {
        let built = gotools::build(workspace, &[gotools::HELM])?;
        let program = built.into_iter().next().context("helm was not built")?;
        Ok(Self { program, chart: workspace.root().join("deploy/chart") })
    }

    /// Where the chart is.
    #[must_use]
    pub fn chart(&self) -> &Path {
        &self.chart
    }

    /// A call of Helm on a cluster: `place` is a command that runs what follows where the cluster is reached.
    #[must_use]
    pub fn on_cluster(&self, place: Cmd, words: &[&str]) -> Cmd {
        alone(place.arg(&self.program).args(words))
    }

    fn command(&self, words: &[&str]) -> Cmd {
        alone(Cmd::new(&self.program).args(words).arg(&self.chart)).without_env("KUBECONFIG")
    }

    /// Writes the chart as an archive into a folder.
    pub fn package(&self, folder: &Path) -> Result<()> {
        alone(Cmd::new(&self.program))
            .arg("package")
            .arg(&self.chart)
            .arg("--destination")
            .arg(folder)
            .read()
            .map(|_| ())
    }

    fn lint(&self) -> Result<()> {
        let values = ["--set", "apiServer.host=192.0.2.1", "--quiet"];
        self.command(&["lint", "--strict", KUBERNETES]).args(values).read().map(|_| ())
    }

    /// What the chart makes of these values, each as `--set` takes it.
    fn render(&self, values: &[&str]) -> Result<String> {
        self.render_only(None, values)
    }

    /// The same of one template, or of all.
    fn render_only(&self, template: Option<&str>, values: &[&str]) -> Result<String> {
        // Settings are texts, also those that look like numbers.
        let flag = |value: &str| if value.starts_with("settings.") { "--set-string" } else { "--set" };
        let sets = values.iter().flat_map(|value| [flag(value), value]);
        self.command(&["template", KUBERNETES, "--namespace", "kube-system", "ballast"])
            .args(sets)
            .args(template.into_iter().flat_map(|template| ["--show-only", template]))
            .read()
    }

    fn manifest(&self, manifest: &Manifest) -> Result<String> {
        Ok(format!(
            "{HEAD}{}",
            self.render_only(manifest.template, manifest.values)?.trim_start_matches("---\n")
        ))
    }
}

/// Settings and plugins of the person who runs us must not count.
fn alone(helm: Cmd) -> Cmd {
    let home = ["HELM_CONFIG_HOME", "HELM_DATA_HOME", "HELM_CACHE_HOME"];
    home.into_iter().fold(helm, |helm, name| helm.env(name, "/nonexistent"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chart_has_the_version_of_the_program() {
        let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/chart/Chart.yaml");
        let chart = fs::read_to_string(chart).unwrap();
        let version = env!("CARGO_PKG_VERSION");
        assert!(chart.contains(&format!("\nversion: {version}\n")), "{chart}");
        assert!(chart.contains(&format!("\nappVersion: \"{version}\"\n")), "{chart}");
    }
}
