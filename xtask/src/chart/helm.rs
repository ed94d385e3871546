//! Helm, which renders the chart.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::exec::Cmd;
use crate::gotools;
use crate::workspace::Workspace;

/// The version of Kubernetes for which Helm renders, since it has no connection to a cluster.
const KUBERNETES: &str = "--kube-version=1.33.0";

/// Paths of Helm and of the chart.
#[derive(Debug)]
pub struct Helm {
    program: PathBuf,
    chart: PathBuf,
}

impl Helm {
    /// Finds Helm, or builds it once.
    pub fn find(workspace: &Workspace) -> Result<Self> {
        let built = gotools::build(workspace, &[gotools::HELM])?;
        let program = built.into_iter().next().context("helm was not built")?;
        Ok(Self { program, chart: workspace.root().join("deploy/chart") })
    }

    /// Returns the path of Helm.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Returns the path of the chart.
    pub fn chart(&self) -> &Path {
        &self.chart
    }

    /// Returns a call of Helm on a cluster: `place` is a command that runs its arguments where the cluster is reachable.
    pub fn on_cluster(&self, place: Cmd, words: &[&str]) -> Cmd {
        without_user_settings(place.arg(&self.program).args(words))
    }

    fn command(&self, words: &[&str]) -> Cmd {
        without_user_settings(Cmd::new(&self.program).args(words).arg(&self.chart)).without_env("KUBECONFIG")
    }

    /// Writes a chart as an archive into a folder.
    pub fn package(&self, chart: &Path, folder: &Path) -> Result<()> {
        without_user_settings(Cmd::new(&self.program))
            .arg("package")
            .arg(chart)
            .arg("--destination")
            .arg(folder)
            .read()
            .map(|_| ())
    }

    pub(super) fn lint(&self) -> Result<()> {
        let values = ["--set", "apiServer.host=192.0.2.1", "--quiet"];
        self.command(&["lint", "--strict", KUBERNETES]).args(values).read().map(|_| ())
    }

    /// Renders the chart with these values, each in the syntax of `--set`.
    pub(super) fn render(&self, values: &[&str]) -> Result<String> {
        self.render_only(&[], values)
    }

    /// Renders these templates of the chart, or all if none is named, with these values.
    pub(super) fn render_only(&self, templates: &[&str], values: &[&str]) -> Result<String> {
        // Values of `settings` are strings, also those that look like numbers.
        let flag = |value: &str| if value.starts_with("settings.") { "--set-string" } else { "--set" };
        let sets = values.iter().flat_map(|value| [flag(value), value]);
        self.template()
            .args(sets)
            .args(templates.iter().flat_map(|template| ["--show-only", template]))
            .read()
    }

    /// Renders the chart for a release of this name.
    pub(super) fn render_release(&self, release: &str, values: &[&str]) -> Result<String> {
        let sets = values.iter().flat_map(|value| ["--set", value]);
        self.template_of(release).args(sets).read()
    }

    /// Renders the chart with a file of values, and with these values in the syntax of `--set`.
    pub(super) fn render_file(&self, file: &str, values: &[&str]) -> Result<String> {
        let sets = values.iter().flat_map(|value| ["--set", value]);
        self.template().args(["--values", "-"]).args(sets).read_with_input(file)
    }

    fn template(&self) -> Cmd {
        self.template_of("ballast")
    }

    fn template_of(&self, release: &str) -> Cmd {
        self.command(&["template", KUBERNETES, "--namespace", "kube-system", release])
    }
}

/// Makes Helm ignore the user's settings and plugins.
fn without_user_settings(helm: Cmd) -> Cmd {
    let home = ["HELM_CONFIG_HOME", "HELM_DATA_HOME", "HELM_CACHE_HOME"];
    home.into_iter().fold(helm, |helm, name| helm.env(name, "/nonexistent"))
}
