//! Keeps the outcome of each change over several runs.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use super::change::Change;
use super::part::Tests;
use super::tree::Tree;

/// Outcome of a change with some tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// A test failed.
    Caught,
    /// The tests timed out, for example because of an endless loop.
    Timeout,
    /// The change does not compile.
    Unviable,
    /// All tests passed.
    Missed,
}

/// An outcome, and the source for which it holds.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Entry {
    outcome: Outcome,
    /// A hash of the changed file; for [`Outcome::Missed`] of all crates `proxy-*`, because any new test may detect the
    /// change.
    source: u64,
}

/// The outcomes of a part, by tests and change.
#[derive(Debug)]
pub struct Ledger {
    folder: PathBuf,
    entries: BTreeMap<String, BTreeMap<String, Entry>>,
    /// A hash of all crates `proxy-*`.
    all: u64,
}

/// Name of the file with all outcomes.
const OUTCOMES: &str = "outcomes.json";
/// Name of the file with a hash of the source on which cargo-mutants was started.
const SOURCE: &str = "source";
/// The files that cargo-mutants writes during a run.
const LISTS: [(&str, Outcome); 4] = [
    ("caught.txt", Outcome::Caught),
    ("timeout.txt", Outcome::Timeout),
    ("unviable.txt", Outcome::Unviable),
    ("missed.txt", Outcome::Missed),
];

impl Ledger {
    /// Reads the outcomes of earlier runs, as far as they hold for the current source.
    pub fn read(folder: &Path, tree: &Tree) -> Result<Self> {
        let path = folder.join(OUTCOMES);
        let mut entries: BTreeMap<String, BTreeMap<String, Entry>> = match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .with_context(|| format!("{} is broken: --again removes it", path.display()))?,
            Err(_) => BTreeMap::new(),
        };
        let mut files = BTreeMap::new();
        for outcomes in entries.values_mut() {
            outcomes.retain(|name, entry| {
                let file = file_of(name).to_owned();
                let now = *files.entry(file).or_insert_with_key(|file| tree.hash_of(file));
                entry.source == if entry.outcome == Outcome::Missed { tree.hash } else { now }
            });
        }
        Ok(Self { folder: folder.to_owned(), entries, all: tree.hash })
    }

    /// Adds the outcomes that cargo-mutants has written, also those of an interrupted run, and saves all outcomes.
    pub fn absorb(&mut self, tests: &Tests, tree: &Tree) -> Result<()> {
        let output = self.folder.join(tests.name);
        // In another source, the changes have other line numbers.
        if fs::read_to_string(output.join(SOURCE)).ok() != Some(self.all.to_string()) {
            return Ok(());
        }
        for (list, outcome) in LISTS {
            let lines = fs::read_to_string(output.join("mutants.out").join(list)).unwrap_or_default();
            for name in lines.lines() {
                let source = if outcome == Outcome::Missed { self.all } else { tree.hash_of(file_of(name)) };
                let of = self.entries.entry(tests.name.to_owned()).or_default();
                of.insert(name.to_owned(), Entry { outcome, source });
            }
        }
        fs::create_dir_all(&self.folder)?;
        // A rename, so that an interrupted write does not leave half a file.
        let new = self.folder.join("outcomes.new");
        fs::write(&new, serde_json::to_vec_pretty(&self.entries)?)?;
        fs::rename(&new, self.folder.join(OUTCOMES)).context("cannot keep the outcomes")
    }

    /// Records the source of the next run of cargo-mutants, and returns the folder for its output.
    pub fn begin(&self, tests: &Tests) -> Result<PathBuf> {
        let output = self.folder.join(tests.name);
        fs::create_dir_all(&output).with_context(|| format!("cannot make {}", output.display()))?;
        fs::write(output.join(SOURCE), self.all.to_string())?;
        Ok(output)
    }

    /// Returns the outcome of a change with these tests, the cheapest of which run first; `None` if it is not known yet.
    pub fn outcome(&self, change: &Change, tests: &[Tests]) -> Option<Outcome> {
        let known = |tests: &Tests| Some(self.entries.get(tests.name)?.get(&change.name)?.outcome);
        let outcomes: Vec<_> = tests.iter().map(known).collect();
        // A change that any of the tests detected counts as detected, even if cheaper tests have to run again.
        let noticed = outcomes.iter().flatten().find(|outcome| **outcome != Outcome::Missed);
        let missed = outcomes.iter().all(Option::is_some).then_some(Outcome::Missed);
        noticed.copied().or(missed)
    }

    /// Whether tests `number` (from 1) still have to run: the cheaper ones missed the change, and no tests detected it.
    pub fn must_still_run(&self, change: &Change, tests: &[Tests], number: usize) -> bool {
        let cheaper = &tests[..number - 1];
        let missed = cheaper.is_empty() || self.outcome(change, cheaper) == Some(Outcome::Missed);
        missed && self.outcome(change, &tests[..number]).is_none() && self.outcome(change, tests).is_none()
    }

    /// Removes the outcomes of earlier runs.
    pub fn forget(folder: &Path) -> Result<()> {
        match fs::remove_dir_all(folder) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("cannot remove {}", folder.display()))
            }
            _ => Ok(()),
        }
    }
}

fn file_of(name: &str) -> &str {
    name.split(':').next().unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mutants::change::{Place, Span};
    use crate::mutants::part::Part;

    #[test]
    fn a_run_goes_on_where_it_was_until_the_source_changes() {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("tree");
        fs::create_dir_all(source.join("proxy-x")).unwrap();
        fs::write(source.join("proxy-x/a.rs"), "a").unwrap();
        fs::write(source.join("proxy-x/b.rs"), "b").unwrap();
        let (tree, kept) = (Tree::at(&source, 1), folder.path().join("kept"));
        let tests = Part::Stages.tests();
        let change = |name: &str| Change {
            name: format!("proxy-x/{name}"),
            file: String::new(),
            span: Span { start: Place { line: 1 } },
        };
        let write = |tests: &Tests, list: &str, name: &str| {
            let output = kept.join(tests.name).join("mutants.out");
            fs::create_dir_all(&output).unwrap();
            fs::write(output.join(list), format!("proxy-x/{name}\n")).unwrap();
        };
        let [caught, missed] = [change("a.rs:1:1: x"), change("b.rs:1:1: y")];
        let ledger = Ledger::read(&kept, &tree).unwrap();
        ledger.begin(&tests[0]).unwrap();
        write(&tests[0], "caught.txt", "a.rs:1:1: x");
        write(&tests[0], "missed.txt", "b.rs:1:1: y");
        drop(ledger);

        let mut ledger = Ledger::read(&kept, &tree).unwrap();
        ledger.absorb(&tests[0], &tree).unwrap();
        assert_eq!(ledger.outcome(&caught, tests), Some(Outcome::Caught));
        assert_eq!(ledger.outcome(&missed, tests), None, "the other tests were not tried");
        assert_eq!(ledger.outcome(&missed, &tests[..1]), Some(Outcome::Missed));
        assert!(ledger.must_still_run(&missed, tests, 2) && !ledger.must_still_run(&caught, tests, 2));

        // A new test may detect a missed change; a caught change stays caught until its own file changes.
        let later = Tree::at(&source, 2);
        let mut ledger = Ledger::read(&kept, &later).unwrap();
        ledger.absorb(&tests[0], &later).unwrap();
        assert_eq!(ledger.outcome(&caught, tests), Some(Outcome::Caught));
        assert_eq!(ledger.outcome(&missed, &tests[..1]), None);
        ledger.begin(&tests[1]).unwrap();
        write(&tests[1], "caught.txt", "b.rs:1:1: y");
        ledger.absorb(&tests[1], &later).unwrap();
        assert_eq!(ledger.outcome(&missed, tests), Some(Outcome::Caught), "by dearer tests");
        assert!(!ledger.must_still_run(&missed, tests, 1));
        fs::write(source.join("proxy-x/a.rs"), "other").unwrap();
        let ledger = Ledger::read(&kept, &Tree::at(&source, 3)).unwrap();
        assert_eq!(ledger.outcome(&caught, tests), None);
    }
}
