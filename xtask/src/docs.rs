//! `cargo xtask docs`: the documents that are made from code, so that they cannot say something else.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};
use proxy_common::reason::Reason;

use crate::say;
use crate::workspace::Workspace;

/// Write the documents that are made from code: docs/reasons.md.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Args {}

/// Runs the command.
pub fn run(_args: &Args) -> Result<()> {
    let path = path(&Workspace::find()?);
    fs::write(&path, reasons()).with_context(|| format!("cannot write {}", path.display()))?;
    say::line(path.display());
    Ok(())
}

/// Whether the documents say what the code says.
pub fn check(workspace: &Workspace) -> Result<()> {
    let path = path(workspace);
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    if text != reasons() {
        bail!("docs/reasons.md is not what proxy-common/src/reason.rs says: run `cargo xtask docs`");
    }
    Ok(())
}

fn path(workspace: &Workspace) -> PathBuf {
    workspace.root().join("docs/reasons.md")
}

const HEAD: &str = "\
# Reasons

Every refusal, drop and pass has one of these.
They stand in `proxy-common/src/reason.rs`, from which `cargo xtask docs` makes this page.
They are counted in the maps `reasons` (all) and `refusals` (by Service), and appear in `/metrics` (`ballast_reasons_total`, `ballast_service_refusals_total`), in `ballast status`, `ballast service show` and `ballast explain`, and live in `ballast monitor`.

`reject`: the client is told at once. `drop`: silence. `pass`: it goes on untranslated.

| number | name | verdict | meaning | what to do |
|---|---|---|---|---|
";

/// The text of docs/reasons.md.
fn reasons() -> String {
    let mut text = HEAD.to_owned();
    for reason in Reason::ALL {
        let (number, label, verdict) = (*reason as u32, reason.label(), reason.verdict().label());
        let (meaning, advice) = (code(reason.explanation().trim()), code(reason.advice()));
        // Writing to a String does not fail.
        let _ = writeln!(text, "| {number} | `{label}` | {verdict} | {meaning} | {advice} |");
    }
    text
}

/// Flags as code: `--max-flows`.
fn code(sentence: &str) -> String {
    let words = sentence.split(' ').map(|word| {
        let end = word.trim_end_matches([',', '.', ':', ';']).len();
        let (flag, rest) = word.split_at(end);
        if flag.starts_with("--") { format!("`{flag}`{rest}") } else { word.to_owned() }
    });
    words.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn flags_are_code_and_every_reason_has_a_line() {
        assert_eq!(code("Raise --max-flows. Or not."), "Raise `--max-flows`. Or not.");
        let text = reasons();
        for reason in Reason::ALL {
            assert!(text.contains(&format!("| `{}` | {} |", reason.label(), reason.verdict().label())));
        }
    }
    /// All that is written in Rust below a folder.
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
        for folder in ["proxy-common/src", "proxy-ebpf/src", "proxy-user/src", "proxy-user/tests"] {
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
