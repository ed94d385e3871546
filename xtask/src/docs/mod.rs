//! `cargo xtask build docs`: generates the pages that come from code, so that they cannot differ from it, the diagrams, and the
//! book of all pages.

mod book;
pub(crate) mod chart;
mod diagrams;
mod reasons;
mod screenshots;

use std::fs;

use anyhow::{Context as _, Result, bail};

use crate::log;
use crate::workspace::Workspace;

/// Generate the pages that come from code (docs/reasons.md, docs/chart.md).
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Args {
    /// Also draw docs/diagrams/*.dot again (Graphviz)
    #[arg(long)]
    pub diagrams: bool,
    /// Also take the pictures of docs/page.md again, in headless Chromium (needs root; builds the agent and the tests)
    #[arg(long)]
    pub screenshots: bool,
    /// Also make the book of all pages, with search: target/book/html/index.html (mdBook; its first build takes minutes)
    #[arg(long)]
    pub book: bool,
}

/// A generated page: its path, its source, and the function that returns its text.
type Made = (&'static str, &'static str, fn(&Workspace) -> Result<String>);

const MADE: [Made; 2] = [
    ("docs/reasons.md", "proxy-common/src/reason.rs", |_| Ok(reasons::page())),
    ("docs/chart.md", "deploy/chart/values.yaml and values.schema.json", chart::page),
];

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::find()?;
    for (name, _, text) in MADE {
        let path = workspace.root().join(name);
        fs::write(&path, text(&workspace)?).with_context(|| format!("cannot write {}", path.display()))?;
        log::line(path.display());
    }
    if args.diagrams {
        diagrams::draw(&workspace)?;
    }
    if args.screenshots {
        screenshots::take(&workspace)?;
    }
    if args.book {
        log::line(book::make(&workspace)?.display());
    }
    Ok(())
}

/// Returns an error if a generated page or a picture is out of date.
pub fn check(workspace: &Workspace) -> Result<()> {
    for (name, from, text) in MADE {
        let path = workspace.root().join(name);
        let there = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        if there != text(workspace)? {
            bail!("{name} does not match {from}: run `cargo xtask build docs`");
        }
    }
    diagrams::check(workspace)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    /// Appends the text of all Rust files below a folder.
    fn read(folder: &Path, into: &mut String) {
        for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                read(&path, into);
            } else if path.extension().is_some_and(|ext| ext == "rs") {
                into.push_str(&fs::read_to_string(&path).unwrap());
            }
        }
    }

    #[test]
    fn the_table_of_cases_names_tests_that_exist() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let text = fs::read_to_string(root.join("docs/compatibility.md")).unwrap();
        let (_, table) = text.split_once("## Case by case").unwrap();
        let mut sources = String::new();
        for folder in
            ["proxy-common/src", "proxy-core/src", "proxy-ebpf/src", "proxy-user/src", "proxy-user/tests"]
        {
            read(&root.join(folder), &mut sources);
        }
        let cells: Vec<_> = table.lines().filter_map(|line| line.split('|').nth(2)).collect();
        let named = cells.iter().flat_map(|cell| cell.split('`').skip(1).step_by(2));
        let is_name = |name: &&str| {
            name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "_:".contains(c))
        };
        let exists = |name: &&str| {
            let last = name.rsplit("::").next().unwrap();
            let forms = [format!("\"{name}\""), format!("fn {last}("), format!("mod {last}")];
            forms.iter().any(|form| sources.contains(form))
        };
        let (there, lost): (Vec<_>, Vec<_>) = named.filter(is_name).partition(exists);
        assert!(lost.is_empty(), "no such tests: {lost:?}");
        assert!(there.len() > 50, "only {}", there.len());
    }
}
