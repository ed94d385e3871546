//! Generates docs/coverage.md: the lines of the data path that no test runs, each with the reason.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};

use super::lcov::{File, Report};
use crate::explained::{Explained, FILE};

/// Path of the page from the root of the repository.
pub const PAGE: &str = "docs/coverage.md";

/// The lines that no test runs, with and without a reason.
#[derive(Debug, Default)]
pub struct Uncovered {
    /// Rows of the page: the file, its lines, the reason.
    rows: Vec<[String; 3]>,
    /// Lines without a reason: file, number, text.
    pub unexplained: Vec<(String, u32, String)>,
}

impl Uncovered {
    /// Looks up the reasons of a file's lines that did not run. Lines of brackets alone do not count.
    pub fn add(&mut self, file: &File, root: &Path, explained: &Explained) -> Result<()> {
        let text = fs::read_to_string(root.join(&file.path)).with_context(|| file.path.clone())?;
        let texts: Vec<&str> = text.lines().collect();
        let mut reasons: BTreeMap<&str, BTreeMap<u32, u64>> = BTreeMap::new();
        for (number, _) in file.lines.iter().filter(|(_, count)| **count == 0) {
            let at = *number as usize - 1;
            let line = texts.get(at).copied().unwrap_or_default();
            let before = at.checked_sub(1).and_then(|before| texts.get(before)).copied().unwrap_or_default();
            if !line.contains(char::is_alphanumeric) {
                continue;
            }
            match explained.line(&file.path, before, line) {
                Some(why) => {
                    reasons.entry(why).or_default().insert(*number, 0);
                }
                None => self.unexplained.push((file.path.clone(), *number, line.trim().to_owned())),
            }
        }
        for (why, mut lines) in reasons {
            // Lines that have another reason or that run divide a range.
            for number in file.lines.keys() {
                lines.entry(*number).or_insert(1);
            }
            let ranges = File { path: String::new(), lines }.uncovered().unwrap_or_default();
            self.rows.push([file.path.clone(), ranges, why.to_owned()]);
        }
        Ok(())
    }

    /// Returns the text of the page.
    #[must_use]
    pub fn page(&self, report: &Report, rungs: &str) -> String {
        let mut text = format!(
            "# Coverage\n\n`cargo xtask coverage {rungs} --page` wrote this page; see [testing.md](testing.md#coverage).\n\n\
             ```\n{}```\n\n## Lines of the data path that no test runs\n\n\
             Programs in the kernel have no counters: what counts is the same source built for the host. The reasons are in \
             `{FILE}`; a line without one fails the command.\n\n| file | lines | why |\n|---|---|---|\n",
            report.table()
        );
        for [file, lines, why] in &self.rows {
            // Writing to a String does not fail.
            let _ = writeln!(text, "| `{file}` | {lines} | {why} |");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_a_reason_or_is_named() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a.rs"), "fn f() {\n    one();\n    two();\n}\nfn g() {}\n").unwrap();
        let json =
            r#"{"lines": [{"file": "a.rs", "lines": ["one();", "two();"], "why": "never"}], "changes": []}"#;
        let explained: Explained = serde_json::from_str(json).unwrap();
        let lines = BTreeMap::from([(1, 3), (2, 0), (3, 0), (4, 0), (5, 0)]);
        let file = File { path: "a.rs".to_owned(), lines };
        let mut uncovered = Uncovered::default();
        uncovered.add(&file, folder.path(), &explained).unwrap();
        assert_eq!(uncovered.unexplained, [("a.rs".to_owned(), 5, "fn g() {}".to_owned())]);
        let page = uncovered.page(&Report { files: vec![file] }, "unit");
        assert!(page.contains("| `a.rs` | 2-3 | never |"), "{page}");
    }
}
