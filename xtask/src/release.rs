//! `cargo xtask release`: builds all files of a release, with their checksums.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use fs_err as fs;

use crate::chart::Helm;
use crate::cross::Arch;
use crate::exec::Cmd;
use crate::image::binary::PLUGIN;
use crate::plugin::{self, Plugin};
use crate::workspace::{Workspace, docs, docs_of, repository};
use crate::{cargotools, image, log, package};

/// Whether to check for vulnerabilities.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Args {
    /// Also check for known vulnerabilities: fetches the advisory database from GitHub
    #[arg(long)]
    advisories: bool,
}

/// Name of the file with the checksums, in the format of sha256sum(1).
const SUMS: &str = "SHA256SUMS";

/// Name of the file with the release's notes.
const NOTES: &str = "NOTES.md";

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::find()?;
    deny(args)?;
    let folder = workspace.target().join("release-files");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    let mut plugins = Vec::new();
    for arch in [Arch::X86, Arch::Arm] {
        let args = image::Args { target: arch, ..image::Args::into_folder(folder.clone(), false) };
        let made = image::make(&workspace, &args)?;
        let context = folder.join("context");
        fs::remove_dir_all(&context)?;
        let stem = made.archive.file_stem().context("the image has no name")?;
        fs::copy(&made.binary, folder.join(stem))?;
        package::make(&workspace, arch, &made.binary, Some(&folder))?;
        log::line(format_args!("{} {} {}", made.reference, arch.debian(), made.id));
        plugins.push(Plugin::new("linux", arch.debian(), made.binary.with_file_name(PLUGIN)));
    }
    chart(&workspace, &folder)?;
    let changes = fs::read_to_string(workspace.root().join("CHANGELOG.md"))?;
    let notes = notes(&changes, env!("CARGO_PKG_VERSION"), docs().as_deref())?;
    fs::write(folder.join(NOTES), notes)?;
    plugins.push(plugin::windows(&workspace)?);
    plugins.extend(plugin::of_mac(&workspace));
    plugin::write(&workspace, &folder, &plugins)?;
    for file in fs::read_dir(workspace.root().join("deploy/systemd"))? {
        let path = file?.path();
        let name = path.file_name().context("a unit without a name")?;
        fs::copy(&path, folder.join(name))?;
    }
    log::line(sums(&folder)?);
    Ok(())
}

/// Checks licences, sources and duplicates of all dependencies (cargo-deny, `deny.toml`).
pub fn deny(args: &Args) -> Result<()> {
    cargotools::cargo(cargotools::DENY)?
        .args(["--locked", "--all-features", "check", "bans", "licenses", "sources"])
        .args(args.advisories.then_some("advisories"))
        .dir(Workspace::find()?.root())
        .run()
}

/// Writes the chart as an archive. That of a published release has the published image, and links to the documentation.
fn chart(workspace: &Workspace, folder: &Path) -> Result<()> {
    let helm = Helm::find(workspace)?;
    let Some(repository) = repository() else { return helm.package(helm.chart(), folder) };
    let copy = workspace.target().join("release-chart/ballast");
    if copy.exists() {
        fs::remove_dir_all(&copy)?;
    }
    fs::create_dir_all(&copy)?;
    Cmd::new("cp").args(["--recursive", "--no-target-directory"]).arg(helm.chart()).arg(&copy).run()?;
    let path = copy.join("values.yaml");
    let values = fs::read_to_string(&path)?;
    fs::write(&path, published(&values, &repository)?)?;
    helm.package(&copy, folder)
}

/// Returns the values of the chart that this repository publishes.
fn published(values: &str, repository: &str) -> Result<String> {
    let image = format!("  repository: ghcr.io/{}\n", repository.to_lowercase());
    let runbooks = format!("  runbookUrl: {}\n", docs_of(repository));
    let (mut text, mut changed) = (String::new(), 0);
    for line in values.lines() {
        match line {
            "  repository: localhost/ballast" => text.push_str(&image),
            "  runbookUrl: \"\"" => text.push_str(&runbooks),
            _ if line.starts_with("  # The chart of a release has the name") => {
                text.push_str("  # Name of the image, without tag and digest.\n");
            }
            _ => {
                text.extend([line, "\n"]);
                continue;
            }
        }
        changed += 1;
    }
    ensure!(changed == 3, "deploy/chart/values.yaml has other defaults than a release replaces");
    Ok(text)
}

/// Returns the section of a version in CHANGELOG.md, whose links to `docs` lead to that address.
fn notes(changes: &str, version: &str, docs: Option<&str>) -> Result<String> {
    let section = changes.split("\n## ").find(|section| section.lines().next() == Some(version));
    let section = section.with_context(|| format!("CHANGELOG.md has no section about {version}"))?;
    let text = section.strip_prefix(version).unwrap_or(section).trim();
    Ok(docs.map_or_else(|| text.to_owned(), |docs| text.replace("](docs/", &format!("]({docs}/"))) + "\n")
}

/// Writes the checksums of all files in a folder, and returns them.
fn sums(folder: &Path) -> Result<String> {
    let mut names = crate::host::names_in(folder);
    names.retain(|name| name != SUMS);
    names.sort();
    let text = Cmd::new("sha256sum").args(&names).dir(folder).read()?;
    fs::write(folder.join(SUMS), &text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_chart_has_the_published_image_and_links_to_the_documentation() {
        let workspace = Workspace::find().unwrap();
        let values = fs::read_to_string(workspace.root().join("deploy/chart/values.yaml")).unwrap();
        let text = published(&values, "Owner/Name").unwrap();
        assert!(
            text.contains("\n  repository: ghcr.io/owner/name\n") && !text.contains("localhost/"),
            "{text}"
        );
        let docs = format!(
            "\n  runbookUrl: https://github.com/Owner/Name/blob/v{}/docs\n",
            env!("CARGO_PKG_VERSION")
        );
        assert!(text.contains(&docs), "{text}");
        assert!(published(&text, "Owner/Name").is_err());
    }

    #[test]
    fn notes_are_the_section_of_the_version_with_links_that_open() {
        let changes =
            "# Changelog\n\n## 0.2.0\n\nTwo ([a](docs/a.md)).\n\n### Part\n\n* x\n\n## 0.1.0\n\nOne.\n";
        let docs = docs_of("owner/name");
        let expected = format!("Two ([a]({docs}/a.md)).\n\n### Part\n\n* x\n");
        assert_eq!(notes(changes, "0.2.0", Some(&docs)).unwrap(), expected);
        assert_eq!(notes(changes, "0.1.0", None).unwrap(), "One.\n");
        assert!(notes(changes, "0.1", None).is_err());
    }

    #[test]
    fn every_file_has_a_checksum_that_fits() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["b", "a", SUMS] {
            fs::write(dir.path().join(name), name).unwrap();
        }
        let text = sums(dir.path()).unwrap();
        let names: Vec<_> = text.lines().filter_map(|line| line.split_whitespace().nth(1)).collect();
        assert_eq!(names, ["a", "b"]);
        let check = || Cmd::new("sha256sum").args(["--check", "--strict", SUMS]).dir(dir.path()).succeeds();
        assert!(check());
        fs::write(dir.path().join("a"), "x").unwrap();
        assert!(!check());
    }
}
