//! `cargo xtask build chart`: renders plain manifests from the Helm chart, and checks both.
//!
//! The manifests are in the repository, so that `kubectl apply -k` needs no Helm. The API server itself checks their
//! fields in the `apiserver` tests.

mod helm;
mod values;

use anyhow::{Context as _, Result, bail, ensure};
use fs_err as fs;
use serde::Deserialize;

use crate::workspace::Workspace;
use crate::{docs, log};
pub use helm::Helm;

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
# Made from deploy/chart by `cargo xtask build chart`; do not edit.
";

const HOST: &str = "apiServer.host=192.0.2.1";

/// Contents of `xtask/tools/chart.yaml`.
#[derive(Deserialize)]
struct Table {
    cases: Vec<Case>,
    refused: Vec<Case>,
    variables: Vec<Variable>,
}

/// Values, with the texts that the manifests must contain and must not contain, or why the values must be refused.
#[derive(Deserialize)]
struct Case {
    #[serde(default)]
    no_host: bool,
    set: Vec<String>,
    #[serde(default)]
    holds: Vec<String>,
    #[serde(default)]
    lacks: Vec<String>,
    #[serde(default)]
    why: String,
}

#[derive(Deserialize)]
struct Variable {
    set: String,
    name: String,
    value: String,
}

impl Case {
    fn values(&self) -> Vec<&str> {
        let host = (!self.no_host).then_some(HOST);
        host.into_iter().chain(self.set.iter().map(String::as_str)).collect()
    }
}

/// Renders the manifests.
pub fn run() -> Result<()> {
    let workspace = Workspace::find()?;
    let helm = Helm::find(&workspace)?;
    for manifest in &MANIFESTS {
        let path = workspace.root().join(manifest.file);
        fs::write(&path, rendered(&helm, manifest)?)?;
        log::line(path.display());
    }
    Ok(())
}

/// Returns an error if the chart has an error or a manifest is out of date.
pub fn check(workspace: &Workspace) -> Result<()> {
    let helm = Helm::find(workspace)?;
    helm.lint()?;
    let all: Table = serde_saphyr::from_str(include_str!("../../tools/chart.yaml")).context("chart.yaml")?;
    for case in &all.cases {
        case.check(&helm)?;
    }
    variables_reach_the_agent(&helm, &all.variables)?;
    releases_have_names_of_their_own(&helm)?;
    examples_are_accepted(&helm)?;
    for case in &all.refused {
        match helm.render(&case.values()) {
            Ok(_) => bail!("the chart accepts the invalid values {:?}", case.set),
            Err(error) if error.to_string().contains(&case.why) => {}
            Err(error) => {
                bail!("the chart refuses {:?}, but not because of {}: {error:#}", case.set, case.why)
            }
        }
    }
    values::check(&helm, &all.cases.iter().map(Case::values).collect::<Vec<_>>())?;
    for manifest in &MANIFESTS {
        let path = workspace.root().join(manifest.file);
        let text = fs::read_to_string(&path)?;
        if text != rendered(&helm, manifest)? {
            bail!("{} does not match deploy/chart: run `cargo xtask build chart`", manifest.file);
        }
    }
    Ok(())
}

impl Case {
    fn check(&self, helm: &Helm) -> Result<()> {
        let text = helm.render(&self.values())?;
        if let Some(part) = self.holds.iter().find(|part| !text.contains(*part)) {
            bail!("the chart with {:?} does not contain `{part}`", self.set);
        }
        if let Some(part) = self.lacks.iter().find(|part| text.contains(*part)) {
            bail!("the chart with {:?} holds `{part}`", self.set);
        }
        Ok(())
    }
}

/// Checks that each variable reaches the agent's container, and only this one.
fn variables_reach_the_agent(helm: &Helm, variables: &[Variable]) -> Result<()> {
    let values: Vec<&str> = [HOST].into_iter().chain(variables.iter().map(|one| one.set.as_str())).collect();
    let text = helm.render_only(&["templates/daemonset.yaml"], &values)?;
    let Some((before, agent)) = text.split_once("\n        - name: ballast\n") else {
        bail!("the DaemonSet has no container `ballast`");
    };
    for Variable { set, name, value } in variables {
        let lines = format!("- name: {name}\n              value: {value}\n");
        if !agent.contains(&lines) || before.contains(name) {
            bail!("{set} does not reach the container of the agent alone as `{lines}`");
        }
    }
    Ok(())
}

/// Checks that each selector and each set of labels names the release, so that one release never selects pods of another.
fn releases_have_names_of_their_own(helm: &Helm) -> Result<()> {
    const NAME: &str = "app.kubernetes.io/name: ballast\n";
    let all = [
        HOST,
        "endUdpSockets=true",
        "monitoring.podMonitor=true",
        "monitoring.serviceMonitor=true",
        "config.metricsBindAddress=0.0.0.0:10249",
    ];
    for values in [&all[..], &["cleanup=true"]] {
        let text = helm.render_release("edge", values)?;
        ensure!(text.contains(&format!("matchLabels:\n      {NAME}")), "no selector names the chart");
        for after in text.split(NAME).skip(1) {
            let next = after.lines().next().unwrap_or_default().trim();
            ensure!(
                next == "app.kubernetes.io/instance: \"edge\"",
                "labels without the release, but with {next}"
            );
        }
    }
    Ok(())
}

/// Checks that the chart accepts the examples in the comments of values.yaml, and that each changes the manifests.
fn examples_are_accepted(helm: &Helm) -> Result<()> {
    let path = helm.chart().join("values.yaml");
    let text = fs::read_to_string(&path)?;
    let examples = docs::chart::examples(&text);
    ensure!(
        examples.iter().any(|one| one.starts_with("{settings: ")),
        "no example of settings: {examples:?}"
    );
    // Without an endpoint, the values below `otlp` have no effect.
    let others = [HOST, "otlp.endpoint=http://192.0.2.1:4318"];
    let without = helm.render(&others)?;
    for example in examples {
        let with = helm.render_file(&example, &others).with_context(|| format!("the example {example}"))?;
        ensure!(with != without, "the example {example} has no effect");
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
    use std::path::Path;

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
