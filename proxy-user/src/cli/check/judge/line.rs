//! The result of one check.

use serde::Serialize;

/// Outcome of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckResult {
    /// No problem was found.
    Pass,
    /// Ballast works, with a limitation that the operator should know of.
    Warn,
    /// Ballast does not work, or not as it should.
    Fail,
}

/// The result of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckLine {
    /// Group of the check.
    pub group: &'static str,
    /// Stable name of the check, like `kernel-version`.
    pub check: &'static str,
    /// Outcome of the check.
    pub outcome: CheckResult,
    /// What the check found.
    pub seen: String,
    /// What to do; empty if the check passes.
    pub advice: String,
}

impl CheckLine {
    pub(super) fn pass(check: &'static str, seen: impl Into<String>) -> Self {
        Self { group: "", check, outcome: CheckResult::Pass, seen: seen.into(), advice: String::new() }
    }

    /// Returns a line that does not pass, and does not fail the command.
    pub fn warn(check: &'static str, seen: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { outcome: CheckResult::Warn, advice: advice.into(), ..Self::pass(check, seen) }
    }

    pub(super) fn fail(check: &'static str, seen: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { outcome: CheckResult::Fail, ..Self::warn(check, seen, advice) }
    }

    /// Whether the check fails.
    pub fn fails(&self) -> bool {
        self.outcome == CheckResult::Fail
    }

    /// Returns the check's section in docs/troubleshooting.md.
    pub fn section(&self) -> &'static str {
        const MANUAL: &str = include_str!("../../../../../docs/troubleshooting.md");
        let heading = format!("\n### check {}\n", self.check);
        let section = MANUAL.split_once(&*heading).map(|(_, rest)| rest.split("\n#").next().unwrap_or(rest));
        section.unwrap_or_default().trim()
    }

    /// Returns the command that prints the section.
    pub fn see(&self) -> String {
        format!("ballast check {}", self.check)
    }

    /// Returns the link to the check's section in docs/troubleshooting.md.
    pub fn link(&self) -> String {
        format!("docs/troubleshooting.md#check-{}", self.check)
    }
}

/// Returns the first few elements of a list, and the number of further ones.
pub(super) fn some<T: ToString>(all: impl IntoIterator<Item = T>) -> String {
    const SHOWN: usize = 3;
    let all: Vec<String> = all.into_iter().map(|one| one.to_string()).collect();
    let more = all.len().saturating_sub(SHOWN);
    let shown = all.get(..SHOWN.min(all.len())).unwrap_or_default().join(", ");
    if more == 0 { shown } else { format!("{shown} and {more} more") }
}
