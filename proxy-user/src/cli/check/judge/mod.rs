//! What the facts mean: a line for each check, a pure function.

mod installed;
mod kernel;
mod network;
mod others;
mod place;

use serde::Serialize;

use super::facts::Facts;

/// How a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// As it should be.
    Pass,
    /// Ballast works, but somebody should know.
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
    fn pass(check: &'static str, seen: impl Into<String>) -> Self {
        Self { group: "", check, outcome: Outcome::Pass, seen: seen.into(), advice: String::new() }
    }

    fn warn(check: &'static str, seen: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { outcome: Outcome::Warn, advice: advice.into(), ..Self::pass(check, seen) }
    }

    fn fail(check: &'static str, seen: impl Into<String>, advice: impl Into<String>) -> Self {
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

/// All lines, in groups.
pub fn judge(facts: &Facts) -> Vec<Line> {
    let pre = facts.installed.is_none();
    let mut lines = Vec::new();
    let mut add = |group: &'static str, of_group: Vec<Line>| {
        lines.extend(of_group.into_iter().map(|line| Line { group, ..line }));
    };
    add("kernel", kernel::judge(&facts.kernel));
    add("node", place::judge(&facts.place, pre));
    add("network", network::judge(&facts.network));
    add("other software", others::judge(&facts.others, pre));
    add("api server", vec![others::api(&facts.api)]);
    if let Some(installed) = &facts.installed {
        add("agent", installed::judge(installed));
    }
    lines
}

/// The first few of a list, and how many more there are.
fn some<T: ToString>(all: impl IntoIterator<Item = T>) -> String {
    const SHOWN: usize = 3;
    let all: Vec<String> = all.into_iter().map(|one| one.to_string()).collect();
    let more = all.len().saturating_sub(SHOWN);
    let shown = all.get(..SHOWN.min(all.len())).unwrap_or_default().join(", ");
    if more == 0 { shown } else { format!("{shown} and {more} more") }
}

#[cfg(test)]
mod tests;
