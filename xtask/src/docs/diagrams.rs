//! docs/diagrams: graphs in the language of Graphviz, and the pictures drawn from them. A picture contains the text of its
//! graph, so that an outdated picture is found without drawing it again.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};

use crate::exec::Cmd;
use crate::host::names_in;
use crate::log;
use crate::setup::{self, Need};
use crate::workspace::Workspace;

/// Draws all diagrams.
pub(super) fn draw(workspace: &Workspace) -> Result<()> {
    setup::tools(Need::Docs)?;
    for source in sources(workspace) {
        let picture = source.with_extension("svg");
        let svg = Cmd::new("dot").arg("-Tsvg").arg(&source).read()?;
        let drawn = with_source(&svg, &read(&source)?)?;
        fs::write(&picture, drawn).with_context(|| format!("cannot write {}", picture.display()))?;
        log::line(picture.display());
    }
    Ok(())
}

/// Returns an error if a picture is not of the current text of its diagram.
pub(super) fn check(workspace: &Workspace) -> Result<()> {
    let sources = sources(workspace);
    ensure!(!sources.is_empty(), "docs/diagrams has no diagrams");
    for source in sources {
        let picture = source.with_extension("svg");
        if !read(&picture)?.contains(&metadata(&read(&source)?)) {
            bail!(
                "{} is not of {}: run `cargo xtask build docs --diagrams`",
                picture.display(),
                source.display()
            );
        }
    }
    Ok(())
}

fn sources(workspace: &Workspace) -> Vec<PathBuf> {
    let folder = workspace.root().join("docs/diagrams");
    let paths = names_in(&folder).into_iter().map(|name| folder.join(name));
    paths.filter(|path| path.extension().is_some_and(|extension| extension == "dot")).collect()
}

fn with_source(svg: &str, source: &str) -> Result<String> {
    let body = svg.trim_end().strip_suffix("</svg>").context("the tool drew no SVG")?;
    Ok(format!("{body}{}</svg>\n", metadata(source)))
}

fn metadata(source: &str) -> String {
    let text = source.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    format!("<metadata>{text}</metadata>")
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}
