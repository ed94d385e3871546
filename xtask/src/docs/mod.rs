//! `cargo xtask build docs`: generates the pages that come from code, so that they cannot differ from it, the diagrams, and the
//! book of all pages.

mod book;
pub(crate) mod chart;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use fs_err as fs;
use proxy_common::reason::Reason;

use crate::exec::{self, Cmd};
use crate::host::names_in;
use crate::setup::{self, Need};
use crate::workspace::Workspace;
use crate::{build, log};

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
    ("docs/reasons.md", "proxy-common/src/reason.rs", |_| Ok(reasons())),
    ("docs/chart.md", "deploy/chart/values.yaml and values.schema.json", chart::page),
];

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::find()?;
    for (name, _, text) in MADE {
        let path = workspace.root().join(name);
        fs::write(&path, text(&workspace)?)?;
        log::line(path.display());
    }
    if args.diagrams {
        draw(&workspace)?;
    }
    if args.screenshots {
        screenshots(&workspace)?;
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
        let there = fs::read_to_string(&path)?;
        if there != text(workspace)? {
            bail!("{name} does not match {from}: run `cargo xtask build docs`");
        }
    }
    check_diagrams(workspace)
}

/// Head of docs/reasons.md.
const REASONS: &str = "\
# Reasons

Every refusal, drop and pass has one of these reasons.
`cargo xtask build docs` generates this page from `proxy-common/src/reason.rs`.
The maps `reasons` (all) and `refusals` (by Service) count the reasons. `/metrics` (`ballast_reasons_total`, `ballast_service_refusals_total`), `ballast status`, `ballast service show` and `ballast explain` show them, and `ballast monitor` shows them live.

`reject`: the client gets an error immediately. `drop`: the packet is dropped without an answer. `pass`: the packet or call continues untranslated.

| number | name | verdict | meaning | what to do |
|---|---|---|---|---|
";

/// Returns docs/reasons.md.
fn reasons() -> String {
    let mut text = REASONS.to_owned();
    for reason in Reason::ALL {
        let (number, label, verdict) = (*reason as u32, reason.label(), reason.verdict().label());
        let (meaning, advice) = (code(reason.explanation().trim()), code(reason.advice()));
        // Writing to a String does not fail.
        let _ = writeln!(text, "| {number} | `{label}` | {verdict} | {meaning} | {advice} |");
    }
    text
}

/// Formats flags as code: `--max-flows`.
fn code(sentence: &str) -> String {
    let words = sentence.split(' ').map(|word| {
        let end = word.trim_end_matches([',', '.', ':', ';']).len();
        let (flag, rest) = word.split_at(end);
        if flag.starts_with("--") { format!("`{flag}`{rest}") } else { word.to_owned() }
    });
    words.collect::<Vec<_>>().join(" ")
}

/// Draws all diagrams. A picture contains the text of its graph, so that an outdated picture is found without drawing it again.
fn draw(workspace: &Workspace) -> Result<()> {
    setup::tools(Need::Docs)?;
    for source in sources(workspace) {
        let picture = source.with_extension("svg");
        let svg = Cmd::new("dot").arg("-Tsvg").arg(&source).read()?;
        let drawn = with_source(&svg, &read(&source)?)?;
        fs::write(&picture, drawn)?;
        log::line(picture.display());
    }
    Ok(())
}

/// Returns an error if a picture is not of the current text of its diagram.
fn check_diagrams(workspace: &Workspace) -> Result<()> {
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
    Ok(fs::read_to_string(path)?)
}

/// Environment variable with the folder of the pictures, which the test reads.
const SCREENSHOTS: &str = "BALLAST_SCREENSHOTS";
const SCREENSHOTS_TEST: &str = "page::works_in_a_browser";

/// Takes the pictures of docs/page.md, of a node with traffic.
fn screenshots(workspace: &Workspace) -> Result<()> {
    exec::require_root("make pictures of a node in network namespaces", "build docs --screenshots")?;
    setup::tools(Need::Netns)?;
    build::bpf(workspace, &build::Args::default())?;
    let folder = workspace.root().join("docs/page");
    fs::create_dir_all(&folder)?;
    let cargo = workspace.cargo_test().args(["--test", "netns", "--", SCREENSHOTS_TEST, "--include-ignored"]);
    cargo.env(SCREENSHOTS, folder.as_os_str()).run()?;
    log::line(folder.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

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
        for folder in ["cli/src", "common/src", "core/src", "ebpf/src", "watch/src", "user/src", "user/tests"]
        {
            read(&root.join(format!("proxy-{folder}")), &mut sources);
        }
        let cells: Vec<_> = table.lines().filter_map(|line| line.split('|').nth(2)).collect();
        let named = cells.iter().flat_map(|cell| cell.split('`').skip(1).step_by(2));
        let is_name = |name: &&str| {
            name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "_:".contains(c))
        };
        let exists = |name: &&str| {
            let last = name.rsplit("::").next().unwrap();
            let forms =
                [format!("\"{name}\""), format!("fn {last}("), format!("mod {last}"), format!("!({last} =")];
            forms.iter().any(|form| sources.contains(form))
        };
        let (there, lost): (Vec<_>, Vec<_>) = named.filter(is_name).partition(exists);
        assert!(lost.is_empty(), "no such tests: {lost:?}");
        assert!(there.len() > 50, "only {}", there.len());
    }

    #[test]
    fn flags_are_code_and_every_reason_has_a_line() {
        assert_eq!(code("Raise --max-flows. Or not."), "Raise `--max-flows`. Or not.");
        let text = reasons();
        for reason in Reason::ALL {
            assert!(text.contains(&format!("| `{}` | {} |", reason.label(), reason.verdict().label())));
        }
    }
}
