//! Generates docs/reasons.md: every reason, from `proxy-common/src/reason.rs`.

use std::fmt::Write as _;

use proxy_common::reason::Reason;

const HEAD: &str = "\
# Reasons

Every refusal, drop and pass has one of these reasons.
`cargo xtask build docs` generates this page from `proxy-common/src/reason.rs`.
The maps `reasons` (all) and `refusals` (by Service) count the reasons. `/metrics` (`ballast_reasons_total`, `ballast_service_refusals_total`), `ballast status`, `ballast service show` and `ballast explain` show them, and `ballast monitor` shows them live.

`reject`: the client gets an error immediately. `drop`: the packet is dropped without an answer. `pass`: the packet or call continues untranslated.

| number | name | verdict | meaning | what to do |
|---|---|---|---|---|
";

/// Returns the text of the page.
pub(super) fn page() -> String {
    let mut text = HEAD.to_owned();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_code_and_every_reason_has_a_line() {
        assert_eq!(code("Raise --max-flows. Or not."), "Raise `--max-flows`. Or not.");
        let text = page();
        for reason in Reason::ALL {
            assert!(text.contains(&format!("| `{}` | {} |", reason.label(), reason.verdict().label())));
        }
    }
}
