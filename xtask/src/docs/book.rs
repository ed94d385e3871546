//! Makes the book: all pages of `docs/SUMMARY.md` with search, by mdBook.
//!
//! Its source is a copy in which each file has the same path as in the project, so that a link leads to the same file here,
//! in the book and on the repository's web page.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use fs_err as fs;

use crate::cargotools::{self, MDBOOK};
use crate::exec::Cmd;
use crate::lint::links;
use crate::log;
use crate::workspace::Workspace;

/// The list of pages, as a path from the root.
const SUMMARY: &str = "docs/SUMMARY.md";

/// Makes the book and returns the path of its first page.
pub(super) fn make(workspace: &Workspace) -> Result<PathBuf> {
    let folder = workspace.target().join("book");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    let root = workspace.root();
    let read = |page: &Path| fs::read_to_string(root.join(page));
    let summary = read(Path::new(SUMMARY))?;
    write(&folder.join("src/SUMMARY.md"), &from_root(&summary))?;
    write(&folder.join("book.toml"), &read(Path::new("docs/book.toml"))?)?;
    let pages = links::targets(Path::new(SUMMARY), &summary);
    let mut files = BTreeSet::new();
    for page in &pages {
        let text = read(page)?;
        for file in links::targets(page, &text) {
            if file.extension().is_some_and(|ext| ext == "md") && !pages.contains(&file) {
                bail!("{} links to {}, which {SUMMARY} does not list", page.display(), file.display());
            }
            files.insert(file);
        }
        write(&folder.join("src").join(page), &to_index(&text))?;
    }
    for file in files.difference(&pages) {
        let to = folder.join("src").join(file);
        fs::create_dir_all(to.parent().unwrap_or(&to))?;
        fs::copy(root.join(file), &to)?;
    }
    let mdbook = cargotools::program(MDBOOK)?;
    log::timed("make the book", || Cmd::new(mdbook).arg("build").arg(&folder).run())?;
    Ok(folder.join("html/index.html"))
}

/// Returns the list of pages with links relative to the root instead of its own folder.
fn from_root(summary: &str) -> String {
    summary.replace("](", "](docs/").replace("](docs/../", "](")
}

/// Changes links to a README: mdBook makes `index.html` from a README, but does not change the links to it.
fn to_index(text: &str) -> String {
    text.replace("README.md)", "index.md)").replace("README.md#", "index.md#")
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::create_dir_all(path.parent().unwrap_or(path))
        .and_then(|()| fs::write(path, text))
        .with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_found_from_the_root() {
        assert_eq!(from_root("* [A](a.md)\n* [B](../b.md)\n"), "* [A](docs/a.md)\n* [B](b.md)\n");
        assert_eq!(to_index("[c](d/README.md), [e](../README.md#f)"), "[c](d/index.md), [e](../index.md#f)");
    }
}
