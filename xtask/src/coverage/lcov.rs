//! Reads llvm-cov's report in lcov's format, and formats it as a table and as ranges of lines.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};

/// Counts for the files of our crates.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Sorted by path.
    pub files: Vec<File>,
}

/// Counts for one file.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct File {
    /// Path from the root of the repository.
    pub path: String,
    /// How often each line with code ran, by line number.
    pub lines: BTreeMap<u32, u64>,
}

impl Report {
    /// Reads lcov's format; lines of unit tests at the end of a file do not count.
    pub fn read(lcov: &str, root: &Path) -> Result<Self> {
        let mut files = Vec::new();
        for record in lcov.split("end_of_record") {
            let mut file = File::default();
            for line in record.lines() {
                if let Some(path) = line.strip_prefix("SF:") {
                    let inside = Path::new(path).strip_prefix(root).ok().and_then(Path::to_str);
                    inside.unwrap_or(path).clone_into(&mut file.path);
                } else if let Some((line, count)) =
                    line.strip_prefix("DA:").and_then(|rest| rest.split_once(','))
                {
                    let count = count.split(',').next().unwrap_or_default();
                    file.lines.insert(
                        line.parse().context("a line is no number")?,
                        count.parse().unwrap_or_default(),
                    );
                }
            }
            if file.path.is_empty() {
                continue;
            }
            if let Ok(text) = fs::read_to_string(root.join(&file.path)) {
                let tests = first_line_of_tests(&text);
                file.lines.retain(|line, _| *line < tests);
            }
            if !file.lines.is_empty() {
                files.push(file);
            }
        }
        files.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(Self { files })
    }

    /// Returns a table of all lines and of the lines that ran, by module of each crate.
    #[must_use]
    pub fn table(&self) -> String {
        let mut modules: BTreeMap<String, (usize, usize)> = BTreeMap::new();
        for file in &self.files {
            let covered = file.lines.values().filter(|count| **count > 0).count();
            for name in [module(&file.path), "all".to_owned()] {
                let (run, all) = modules.entry(name).or_default();
                (*run, *all) = (*run + covered, *all + file.lines.len());
            }
        }
        let mut text = format!("{:<28} {:>7} {:>7} {:>6}\n", "module", "lines", "run", "%");
        for (name, (run, all)) in modules {
            // Writing to a String does not fail.
            let _ = writeln!(text, "{name:<28} {all:>7} {run:>7} {:>6}", percent(run, all));
        }
        text
    }
}

/// Returns a percentage in tenths, rounded down: a single line that does not run remains visible.
fn percent(run: usize, all: usize) -> String {
    let tenths = run * 1000 / all.max(1);
    format!("{}.{}", tenths / 10, tenths % 10)
}

impl File {
    /// Returns the lines that did not run, as `3-5, 9`; `None` if all lines ran. Lines without code do not divide a range.
    #[must_use]
    pub fn uncovered(&self) -> Option<String> {
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        let mut is_open = false;
        for (line, count) in &self.lines {
            match ranges.last_mut() {
                _ if *count > 0 => is_open = false,
                Some((_, end)) if is_open => *end = *line,
                _ => {
                    ranges.push((*line, *line));
                    is_open = true;
                }
            }
        }
        let text = |(first, last): (u32, u32)| {
            if first == last { first.to_string() } else { format!("{first}-{last}") }
        };
        (!ranges.is_empty()).then(|| ranges.into_iter().map(text).collect::<Vec<_>>().join(", "))
    }
}

/// Returns the crate, and the first folder or file below its `src`.
fn module(path: &str) -> String {
    let Some((package, rest)) = path.split_once("/src/") else { return path.to_owned() };
    let name = rest.split(['/', '.']).next().unwrap_or_default();
    format!("{package} {name}")
}

/// Returns the line number at which the unit tests at the end of a file begin; `u32::MAX` if there are none.
fn first_line_of_tests(text: &str) -> u32 {
    let lines: Vec<_> = text.lines().collect();
    let begins =
        |pair: &[&str]| pair[0].trim() == "#[cfg(test)]" && pair[1].trim().starts_with("mod tests {");
    lines.windows(2).zip(1..).find(|(pair, _)| begins(pair)).map_or(u32::MAX, |(_, line)| line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_do_not_run_are_ranges() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("a/src/b")).unwrap();
        let text = "fn f() {\n    x\n}\n\n#[cfg(test)]\nmod tests {\n    y\n}\n";
        fs::write(folder.path().join("a/src/b/c.rs"), text).unwrap();
        let path = folder.path().join("a/src/b/c.rs");
        let lcov = format!("SF:{}\nDA:1,4\nDA:2,0\nDA:7,9\nend_of_record\n", path.display());
        let report = Report::read(&lcov, folder.path()).unwrap();
        assert_eq!(report.files.len(), 1);
        assert_eq!(report.files[0].path, "a/src/b/c.rs");
        assert_eq!(report.files[0].lines, BTreeMap::from([(1, 4), (2, 0)]), "tests do not count");
        assert_eq!(report.files[0].uncovered().as_deref(), Some("2"));
        assert!(report.table().contains("a b") && report.table().contains("50.0"), "{}", report.table());
        let of = |counts: &[(u32, u64)]| {
            File { path: String::new(), lines: counts.iter().copied().collect() }.uncovered()
        };
        assert_eq!(of(&[(1, 0), (2, 0), (5, 0), (6, 1), (9, 0)]).as_deref(), Some("1-5, 9"));
        assert_eq!(of(&[(1, 1)]), None);
    }

    #[test]
    fn a_line_that_does_not_run_is_not_rounded_away() {
        assert_eq!([percent(999, 1000), percent(9_999, 10_000), percent(1, 1)], ["99.9", "99.9", "100.0"]);
    }
}
