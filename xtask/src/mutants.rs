//! `cargo xtask mutants`: changes the source, one place at a time, and reports the changes that no test detects
//! (cargo-mutants).
//!
//! For each change, the command runs the cheapest tests that may detect it first, and the next ones if these tests miss it. A
//! ledger keeps the outcomes, so that an interrupted run can be resumed.

mod change;
mod ledger;
mod part;
mod plan_crate;
mod tree;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};

use crate::cargotools;
use crate::exec::Cmd;
use crate::explained::{self, Explained};
use crate::log;
use crate::workspace::Workspace;
use change::Change;
use ledger::{Ledger, Outcome};
use part::{Part, Tests};
use tree::{Tree, hash};

/// Change pure rules and packet stages, one place at a time, and report changes that no test detects (cargo-mutants; its first
/// build takes minutes, then a change takes seconds).
///
/// target/mutants keeps the results: the same command resumes an interrupted run. A detected change is tried again after its file
/// was edited, an undetected one after any source was edited. The command fails if a change is undetected and
/// xtask/explained.json does not explain it. Changes that no test has to detect are excluded in .cargo/mutants.toml.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// The parts to change
    #[arg(value_enum, default_values_t = Part::ALL)]
    pub parts: Vec<Part>,
    /// Only changes whose description contains this text (`--list` prints the descriptions)
    #[arg(long, value_name = "TEXT")]
    pub only: Option<String>,
    /// Only this many changes of each part, selected by a hash of their descriptions: the same ones each time
    #[arg(long, value_name = "NUMBER")]
    pub sample: Option<usize>,
    /// Only a share: every N-th change, starting with the K-th, as K/N (from 0/N)
    #[arg(long, value_name = "K/N", value_parser = share, conflicts_with = "sample")]
    pub shard: Option<(usize, usize)>,
    /// Print the selected changes with their results so far, and try none
    #[arg(long)]
    pub list: bool,
    /// Discard the results of earlier runs
    #[arg(long)]
    pub again: bool,
}

fn share(text: &str) -> Result<(usize, usize), String> {
    let parsed = text.split_once('/').and_then(|(k, n)| Some((k.parse().ok()?, n.parse().ok()?)));
    parsed.filter(|(k, n)| k < n).ok_or_else(|| "write it as K/N, with K below N: 0/4".to_owned())
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::find()?;
    let explained = Explained::read(&workspace)?;
    let mut bad = 0;
    for part in &args.parts {
        bad += examine(*part, args, &workspace, &explained)?;
    }
    ensure!(
        bad == 0,
        "no test detects {bad} changes: add tests, or explain in {} why none is needed",
        explained::FILE
    );
    Ok(())
}

/// Tries the changes of a part; returns how many of them are neither detected nor explained.
fn examine(part: Part, args: &Args, workspace: &Workspace, explained: &Explained) -> Result<usize> {
    let folder = workspace.target().join("mutants").join(part.to_string());
    let tree = Tree::copy(workspace, &workspace.target().join("mutants/tree"))?;
    let all = list(part, &tree)?;
    let chosen = choose(&all, args);
    if args.again {
        Ledger::forget(&folder)?;
    }
    let mut ledger = Ledger::read(&folder, &tree)?;
    for tests in part.tests() {
        ledger.absorb(tests, &tree)?;
    }
    for (tests, number) in part.tests().iter().zip(1..) {
        let left: Vec<_> =
            chosen.iter().filter(|change| ledger.must_still_run(change, part.tests(), number)).collect();
        if args.list || left.is_empty() {
            continue;
        }
        log::step(format_args!("{part}: {} changes; {}", left.len(), tests.what));
        let output = ledger.begin(tests)?;
        let done = attempt(part, tests, &left, workspace, &tree, &output);
        ledger.absorb(tests, &tree)?;
        done?;
    }
    report(part, args, &all, &chosen, &ledger, explained, workspace)
}

/// Returns all changes of a part except those that .cargo/mutants.toml excludes.
fn list(part: Part, tree: &Tree) -> Result<Vec<Change>> {
    let mut cmd =
        cargotools::cargo(cargotools::MUTANTS)?.args(["--list", "--json", "--package", part.package()]);
    for file in part.files() {
        cmd = cmd.args(["--file", file]);
    }
    serde_json::from_str(&cmd.dir(tree.root()).read()?).context("cargo-mutants lists something unexpected")
}

fn choose(all: &[Change], args: &Args) -> Vec<Change> {
    let is_meant = |change: &&Change| args.only.as_ref().is_none_or(|text| change.name.contains(text));
    let mut chosen: Vec<Change> = all.iter().filter(is_meant).cloned().collect();
    if let Some((first, of)) = args.shard {
        chosen = chosen.into_iter().skip(first).step_by(of).collect();
    }
    if let Some(number) = args.sample {
        chosen.sort_by_key(|change| hash(change.name.as_bytes()));
        chosen.truncate(number);
        chosen.sort_by(|a, b| a.name.cmp(&b.name));
    }
    chosen
}

/// Runs cargo-mutants on these changes with these tests, in the copy of the sources.
fn attempt(
    part: Part,
    tests: &Tests,
    changes: &[&Change],
    workspace: &Workspace,
    tree: &Tree,
    output: &Path,
) -> Result<()> {
    let config = output.join("only.toml");
    fs::write(&config, only(changes)?)?;
    let target = workspace.target().join("mutants/build");
    let prepared = |cmd: Cmd| {
        cmd.env("CARGO_TARGET_DIR", &target)
            .env("BALLAST_BPF_OBJECT", workspace.bpf_object())
            // The fuzz program runs its corpus and this number of random packets, the same ones each time.
            .env("BALLAST_FUZZ_THREADS", "1")
            .env("BALLAST_FUZZ_HOST_CASES", part::FUZZ_PACKETS)
            .dir(tree.root())
    };
    // The tests must pass on the unchanged source. cargo-mutants would check this with the tests of the changed crate, even
    // if another crate is tested.
    let unchanged = || {
        let cmd = Cmd::cargo().args(["test", "--quiet", "--package", tests.package]);
        let cmd = cmd.args(["--features", tests.features]).args(tests.targets);
        prepared(cmd.args(part::SETTINGS.iter().flat_map(|setting| ["--config", setting])))
    };
    unchanged().arg("--no-run").run()?;
    let start = Instant::now();
    unchanged().arg("--").args(tests.filter).run().context("the tests fail without a change")?;
    let limit = 10 + 5 * start.elapsed().as_secs();

    let mut cmd = cargotools::cargo(cargotools::MUTANTS)?
        .args(["--in-place", "--package", part.package(), "--test-package", tests.package])
        .args(["--no-shuffle", "--colors", "never", "--baseline", "skip", "--timeout", &limit.to_string()])
        .arg("--config")
        .arg(&config)
        .arg("--output")
        .arg(output)
        .args(["--features", tests.features]);
    // cargo-mutants does not apply `examine_re` to changes that delete a field: `--file` limits these to the selected files.
    for file in changes.iter().map(|change| &*change.file).collect::<BTreeSet<_>>() {
        cmd = cmd.args(["--file", file]);
    }
    for setting in part::SETTINGS {
        cmd = cmd.args(["--cargo-arg=--config", &format!("--cargo-arg={setting}")]);
    }
    // Not behind `--`: arguments behind it apply only to the run, and cargo would build all test programs of the crate.
    for target in tests.targets {
        cmd = cmd.arg(format!("--cargo-arg={target}"));
    }
    let mut command = prepared(cmd.args(["--", "--"]).args(tests.filter)).into_std();
    let status = command.status().context("cannot start cargo-mutants")?;
    // 2: the tests missed some changes; 3: the tests of some changes timed out.
    match status.code() {
        Some(0 | 2 | 3) => Ok(()),
        _ => bail!("cargo-mutants failed ({status}): see {}/mutants.out/log", output.display()),
    }
}

/// Returns a configuration for cargo-mutants that selects these changes.
fn only(changes: &[&Change]) -> Result<String> {
    let mut text = String::from("examine_re = [\n");
    for change in changes {
        // A JSON string is also a TOML string.
        let pattern = serde_json::to_string(&format!("^{}$", escaped(&change.name)))?;
        text.extend(["    ", &pattern, ",\n"]);
    }
    Ok(text + "]\n")
}

/// Returns a regular expression that matches this text.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        if r"\.+*?()|[]{}^$#&-~".contains(c) {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}

/// Prints the outcomes of the changes; returns how many changes are neither detected nor explained.
fn report(
    part: Part,
    args: &Args,
    all: &[Change],
    chosen: &[Change],
    ledger: &Ledger,
    explained: &Explained,
    workspace: &Workspace,
) -> Result<usize> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    let mut bad = 0;
    for change in chosen {
        let outcome = ledger.outcome(change, part.tests());
        let shown = match &outcome {
            None => "not tried",
            Some(Outcome::Caught) => "noticed",
            Some(Outcome::Timeout) => "noticed: never ends",
            Some(Outcome::Unviable) => "does not compile",
            Some(Outcome::Missed) => {
                match explained.change(&change.file, &change.line(workspace.root())?, change.what()) {
                    Some(_) => "missed, explained",
                    None => "MISSED",
                }
            }
        };
        *counts.entry(shown).or_default() += 1;
        bad += usize::from(shown == "MISSED");
        if args.list || shown == "MISSED" {
            log::line(format_args!("{shown}: {}", change.name));
        }
    }
    let counts: Vec<_> = counts.iter().map(|(shown, count)| format!("{count} {shown}")).collect();
    let share = if chosen.len() == all.len() { "all" } else { "chosen" };
    log::line(format_args!("{part}: {} changes, {share} {}: {}", all.len(), chosen.len(), counts.join(", ")));
    Ok(bad)
}

#[cfg(test)]
mod tests {
    use super::change::{Place, Span};
    use super::*;

    fn change(name: &str) -> Change {
        let span = Span { start: Place { line: 1 } };
        Change { name: name.to_owned(), file: name.split(':').next().unwrap().to_owned(), span }
    }

    fn args(sample: Option<usize>, shard: Option<(usize, usize)>) -> Args {
        Args { parts: vec![Part::Rules], only: None, sample, shard, list: false, again: false }
    }

    #[test]
    fn every_part_has_files() {
        let root = Workspace::find().unwrap().root().to_owned();
        for part in Part::ALL {
            for file in part.files() {
                let folder = file.split('*').next().unwrap();
                assert!(root.join(folder).exists() && folder.starts_with(part.package()), "{file}");
            }
        }
    }

    #[test]
    fn a_sample_is_the_same_each_time_and_shards_are_all() {
        let all: Vec<_> = (0..20).map(|n| change(&format!("a.rs:{n}:1: replace f with ()"))).collect();
        let names = |args: &Args| choose(&all, args).into_iter().map(|c| c.name).collect::<Vec<_>>();
        let few = names(&args(Some(5), None));
        assert_eq!(few.len(), 5);
        assert_eq!(names(&args(Some(5), None)), few);
        let more = names(&args(Some(9), None));
        assert!(few.iter().all(|name| more.contains(name)), "a larger sample has the smaller one in it");
        let mut shards: Vec<_> = (0..3).flat_map(|k| names(&args(None, Some((k, 3))))).collect();
        shards.sort();
        let mut wanted = names(&args(None, None));
        wanted.sort();
        assert_eq!(shards, wanted);
    }

    #[test]
    fn a_share_is_below_its_number() {
        assert_eq!(share("1/4"), Ok((1, 4)));
        assert!(share("4/4").is_err() && share("1").is_err() && share("0/0").is_err());
    }

    #[test]
    fn a_description_is_matched_as_it_is() {
        let name = "a.rs:1:2: replace f -> Option<u8> with Some(1) || x[0] & 'a'";
        let text = only(&[&change(name)]).unwrap();
        assert_eq!(
            text,
            "examine_re = [\n    \"^a\\\\.rs:1:2: replace f \\\\-> Option<u8> with Some\\\\(1\\\\) \\\\|\\\\| x\\\\[0\\\\] \\\\& 'a'$\",\n]\n"
        );
        assert_eq!(change(name).what(), "replace f -> Option<u8> with Some(1) || x[0] & 'a'");
    }
}
