//! The result of one check.

use serde::{Serialize, Serializer};

use proxy_core::docs;

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
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CheckLine {
    /// Group of the check.
    pub group: &'static str,
    /// Stable name of the check, like `kernel-version`.
    pub check: &'static str,
    /// Outcome of the check.
    pub outcome: CheckResult,
    /// What the check found.
    pub seen: String,
    /// What to do; empty (`null`) if the check passes.
    #[serde(serialize_with = "unless_empty")]
    pub advice: String,
}

fn unless_empty<S: Serializer>(text: &str, serializer: S) -> Result<S::Ok, S::Error> {
    Some(text).filter(|text| !text.is_empty()).serialize(serializer)
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

    /// Returns the check's section in docs/troubleshooting.md, with links as plain text.
    pub fn section(&self) -> String {
        const MANUAL: &str = include_str!("../../../../../docs/troubleshooting.md");
        let heading = format!("\n### check {}\n", self.check);
        let section = MANUAL.split_once(&*heading).map(|(_, rest)| rest.split("\n#").next().unwrap_or(rest));
        plain_links(section.unwrap_or_default().trim())
    }

    /// Returns the command that prints the section.
    pub fn see(&self) -> String {
        format!("ballast check {}", self.check)
    }

    /// Returns the link to the check's section in docs/troubleshooting.md.
    pub fn link(&self) -> String {
        docs::page(&format!("troubleshooting.md#check-{}", self.check))
    }
}

/// Returns a text in which each link `[text](target)` is `text (ADDRESS)`, or `ADDRESS` if text and target are equal.
fn plain_links(text: &str) -> String {
    let (mut plain, mut rest) = (String::new(), text);
    while let Some((before, label, target, after)) = first_link(rest) {
        plain.push_str(before);
        if label == target {
            plain.push_str(&docs::page(target));
        } else {
            plain.extend([label, " (", &docs::page(target), ")"]);
        }
        rest = after;
    }
    plain + rest
}

/// Returns what is before the first link, its text, its target, and what is after it.
fn first_link(text: &str) -> Option<(&str, &str, &str, &str)> {
    let (begin, target) = text.split_once("](")?;
    let (before, label) = begin.rsplit_once('[')?;
    let (target, after) = target.split_once(')')?;
    Some((before, label, target, after))
}

/// Returns the first few elements of a list, and the number of further ones.
pub(super) fn some<T: ToString>(all: impl IntoIterator<Item = T>) -> String {
    const SHOWN: usize = 3;
    let all: Vec<String> = all.into_iter().map(|one| one.to_string()).collect();
    let more = all.len().saturating_sub(SHOWN);
    let shown = all.get(..SHOWN.min(all.len())).unwrap_or_default().join(", ");
    if more == 0 { shown } else { format!("{shown} and {more} more") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_plain_text() {
        let text = "See [a.md](a.md), [the `b`](b.md#c) ([d](d.md)) and [nothing].";
        let plain = "See docs/a.md, the `b` (docs/b.md#c) (d (docs/d.md)) and [nothing].";
        assert_eq!(plain_links(text), plain);
        assert_eq!(plain_links("none"), "none");
    }
}
