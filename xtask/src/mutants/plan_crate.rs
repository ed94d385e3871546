//! Adds a crate with only the plan to the copy of the sources: building the agent's whole crate takes most of a minute.

use std::path::Path;

use anyhow::{Context as _, Result};

/// Name of the crate.
pub const NAME: &str = "proxy-plan";
const MANIFEST: &str = "proxy-plan/Cargo.toml";
/// The root of the crate, beside the agent's own root, so that both find their modules in the same files.
const ROOT: &str = "proxy-user/src/plan_crate.rs";
/// Content of the root: the plan, the modules on which it depends, and those with which its tests read objects.
const MODULES: &str = "\
pub mod model;
pub mod plan;
pub mod api {
    pub mod convert;
    pub mod objects;
}
pub mod source {
    mod documents;
    pub mod manifest;
}
";

/// Returns paths from the root and contents of the crate's files, and of the workspace's `Cargo.toml` with the crate added.
pub fn files(workspace: &Path) -> Result<Vec<(&'static str, String)>> {
    let read = |name: &str| {
        std::fs::read_to_string(workspace.join(name)).with_context(|| format!("cannot read {name}"))
    };
    let agent = read("proxy-user/Cargo.toml")?;
    let package =
        format!("[package]\nname = \"{NAME}\"\nedition.workspace = true\n\n[lib]\npath = \"../{ROOT}\"\n\n");
    let manifest = package + &section(&agent, "[dependencies]")? + &section(&agent, "[dev-dependencies]")?;
    let members = "\"proxy-user\", ";
    let all = read("Cargo.toml")?;
    let known = all.replacen(members, &format!("{members}\"{NAME}\", "), 1);
    anyhow::ensure!(known != all, "Cargo.toml does not list its members as expected");
    Ok(vec![("Cargo.toml", known), (MANIFEST, manifest), (ROOT, MODULES.to_owned())])
}

/// Returns a section of a manifest, with its heading.
fn section(manifest: &str, heading: &str) -> Result<String> {
    let from = manifest
        .find(&format!("\n{heading}\n"))
        .with_context(|| format!("proxy-user/Cargo.toml has no {heading}"))?;
    let text = &manifest[from + 1..];
    Ok(text[..text.find("\n[").map_or(text.len(), |end| end + 1)].to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Workspace;

    #[test]
    fn the_crate_has_the_agents_dependencies_and_the_workspace_knows_it() {
        let files = files(Workspace::find().unwrap().root()).unwrap();
        let of = |name: &str| &files.iter().find(|(known, _)| *known == name).unwrap().1;
        assert!(of("Cargo.toml").contains("\"proxy-plan\""), "{}", of("Cargo.toml"));
        let manifest = of(MANIFEST);
        for expected in ["\n[dependencies]\nproxy-common", "\nkube.workspace", "\nproptest.workspace"] {
            assert!(manifest.contains(expected), "{expected} not in\n{manifest}");
        }
        assert!(!manifest.contains("[[bin]]") && !manifest.contains("[lints]"), "{manifest}");
    }
}
