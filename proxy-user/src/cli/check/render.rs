//! Renders the lines as text, table or JSON.

use std::fmt::Write as _;

use serde::Serialize;

use super::judge::{CheckLine, CheckResult};
use crate::cli::colour::{Colour, paint};
use crate::cli::show::ShowError;
use proxy_cli::args::list::Output;
use proxy_cli::output::{Table, document};

/// `{"ok": true, "checks": [...]}`.
#[derive(Serialize)]
struct Document<'a> {
    /// No check fails; there may be warnings.
    ok: bool,
    passed: usize,
    warned: usize,
    failed: usize,
    checks: Vec<CheckJson<'a>>,
}

#[derive(Serialize)]
struct CheckJson<'a> {
    #[serde(flatten)]
    line: &'a CheckLine,
    link: String,
}

fn count(lines: &[CheckLine], outcome: CheckResult) -> usize {
    lines.iter().filter(|line| line.outcome == outcome).count()
}

/// Renders all lines in the requested format; only text has colours, and with `explains` also the section of the manual about
/// each check.
pub fn render(
    lines: &[CheckLine],
    output: Output,
    with_colour: bool,
    explains: bool,
) -> Result<String, ShowError> {
    Ok(match output {
        Output::Text => text(lines, with_colour, explains),
        Output::Wide => table(lines),
        Output::Short => short(lines),
        Output::Name => lines.iter().flat_map(|line| [line.check, "\n"]).collect(),
        Output::Json | Output::Yaml | Output::Otlp => {
            let element = |line| CheckJson { line, link: CheckLine::link(line) };
            let document_of = Document {
                ok: !lines.iter().any(CheckLine::fails),
                passed: count(lines, CheckResult::Pass),
                warned: count(lines, CheckResult::Warn),
                failed: count(lines, CheckResult::Fail),
                checks: lines.iter().map(element).collect(),
            };
            document(&document_of, output)?
        }
    })
}

/// Returns the sign of an outcome, and its colour.
fn sign(outcome: CheckResult) -> (&'static str, Colour) {
    match outcome {
        CheckResult::Pass => ("√", Colour::Green),
        CheckResult::Warn => ("‼", Colour::Yellow),
        CheckResult::Fail => ("×", Colour::Red),
    }
}

fn word(outcome: CheckResult) -> &'static str {
    match outcome {
        CheckResult::Pass => "pass",
        CheckResult::Warn => "warn",
        CheckResult::Fail => "fail",
    }
}

fn text(lines: &[CheckLine], with_colour: bool, explains: bool) -> String {
    let mut text = String::new();
    let width = lines.iter().map(|line| line.check.len()).max().unwrap_or_default();
    let mut group = "";
    for line in lines {
        if line.group != group {
            let gap = if group.is_empty() { "" } else { "\n" };
            group = line.group;
            let _ = writeln!(text, "{gap}{group}\n{}", "-".repeat(group.len()));
        }
        let (sign, colour) = sign(line.outcome);
        let _ = writeln!(text, "{} {:<width$}  {}", paint(sign, colour, with_colour), line.check, line.seen);
        if line.outcome != CheckResult::Pass {
            let _ = writeln!(text, "    do:  {}", line.advice);
            if !explains {
                let _ = writeln!(text, "    see: {}", line.see());
            }
        }
        if explains {
            let _ = writeln!(text, "    {}", line.section().replace('\n', "\n    "));
        }
    }
    let counts =
        [CheckResult::Pass, CheckResult::Warn, CheckResult::Fail].map(|outcome| count(lines, outcome));
    let _ = writeln!(text, "\n{} passed, {} warned, {} failed", counts[0], counts[1], counts[2]);
    text
}

fn table(lines: &[CheckLine]) -> String {
    let mut table = Table::new(["GROUP", "CHECK", "OUTCOME", "SEEN", "DO", "SEE"]);
    for line in lines {
        let see = if line.outcome == CheckResult::Pass { String::new() } else { line.see() };
        table.row([
            line.group.to_owned(),
            line.check.to_owned(),
            word(line.outcome).to_owned(),
            line.seen.clone(),
            line.advice.clone(),
            see,
        ]);
    }
    table.render("No checks.")
}

fn short(lines: &[CheckLine]) -> String {
    let mut text = String::new();
    for line in lines.iter().filter(|line| line.outcome != CheckResult::Pass) {
        let _ = writeln!(text, "{} {}: {}; {}", word(line.outcome), line.check, line.seen, line.advice);
    }
    if text.is_empty() { "ok\n".to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines() -> Vec<CheckLine> {
        let line = |group, check, outcome, seen: &str, advice: &str| CheckLine {
            group,
            check,
            outcome,
            seen: seen.to_owned(),
            advice: advice.to_owned(),
        };
        vec![
            line("kernel", "kernel-version", CheckResult::Pass, "Linux 6.12", ""),
            line("kernel", "bpf-jit", CheckResult::Warn, "off", "switch it on"),
            line("node", "bpffs", CheckResult::Fail, "not there", "mount it"),
        ]
    }

    #[test]
    fn text_has_groups_and_what_to_do() {
        assert_eq!(
            render(&lines(), Output::Text, false, false).unwrap(),
            "kernel\n------\n\
             √ kernel-version  Linux 6.12\n\
             ‼ bpf-jit         off\n    do:  switch it on\n    see: ballast check bpf-jit\n\
             \nnode\n----\n\
             × bpffs           not there\n    do:  mount it\n    see: ballast check bpffs\n\
             \n1 passed, 1 warned, 1 failed\n"
        );
        let coloured = render(&lines(), Output::Text, true, false).unwrap();
        assert!(coloured.contains("\u{1b}[31m×\u{1b}[0m bpffs"), "{coloured:?}");
    }

    #[test]
    fn short_leaves_out_what_passes() {
        let expected = "warn bpf-jit: off; switch it on\nfail bpffs: not there; mount it\n";
        assert_eq!(render(&lines(), Output::Short, true, false).unwrap(), expected);
        assert_eq!(render(&lines()[..1], Output::Short, false, false).unwrap(), "ok\n");
    }

    #[test]
    fn the_table_has_a_line_for_each() {
        let table = render(&lines(), Output::Wide, true, false).unwrap();
        let row = table.lines().nth(3).unwrap();
        let cells: Vec<_> = row.split("  ").filter(|cell| !cell.is_empty()).map(str::trim).collect();
        assert_eq!(cells, ["node", "bpffs", "fail", "not there", "mount it", "ballast check bpffs"]);
    }

    #[test]
    fn json_names_stay() {
        let text = render(&lines(), Output::Json, true, false).unwrap();
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&value["ok"], &value["warned"]), (&false.into(), &1.into()));
        assert_eq!(
            value["checks"][1],
            serde_json::json!({
                "group": "kernel", "check": "bpf-jit", "outcome": "warn", "seen": "off", "advice": "switch it on",
                "link": "docs/troubleshooting.md#check-bpf-jit"
            })
        );
        assert_eq!(value["checks"][0]["advice"], serde_json::Value::Null);
    }
}
