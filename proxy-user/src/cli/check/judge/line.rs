//! The result of one check.

use serde::Serialize;

/// How a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// As it should be.
    Pass,
    /// Ballast works, with a limitation that the operator should know of.
    Warn,
    /// Ballast does not work, or not as it should.
    Fail,
}

/// The result of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// What it is about.
    pub group: &'static str,
    /// Its name, which stays: `kernel-version`.
    pub check: &'static str,
    /// How it came out.
    pub outcome: Outcome,
    /// What was seen.
    pub seen: String,
    /// What to do; empty when it passes.
    pub advice: String,
}

impl Line {
    pub(super) fn pass(check: &'static str, seen: impl Into<String>) -> Self {
        Self { group: "", check, outcome: Outcome::Pass, seen: seen.into(), advice: String::new() }
    }

    pub(super) fn warn(check: &'static str, seen: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { outcome: Outcome::Warn, advice: advice.into(), ..Self::pass(check, seen) }
    }

    pub(super) fn fail(check: &'static str, seen: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { outcome: Outcome::Fail, ..Self::warn(check, seen, advice) }
    }

    /// Whether it fails.
    pub fn fails(&self) -> bool {
        self.outcome == Outcome::Fail
    }

    /// Where docs/troubleshooting.md says more.
    pub fn link(&self) -> String {
        format!("docs/troubleshooting.md#check-{}", self.check)
    }
}

/// The first few of a list, and how many more there are.
pub(super) fn some<T: ToString>(all: impl IntoIterator<Item = T>) -> String {
    const SHOWN: usize = 3;
    let all: Vec<String> = all.into_iter().map(|one| one.to_string()).collect();
    let more = all.len().saturating_sub(SHOWN);
    let shown = all.get(..SHOWN.min(all.len())).unwrap_or_default().join(", ");
    if more == 0 { shown } else { format!("{shown} and {more} more") }
}
