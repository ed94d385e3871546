//! Faults: what they do, what they need, and which effects on connections are accepted; and their results, as a table.

use std::cell::RefCell;
use std::fmt::{self, Write as _};
use std::time::Duration;

use anyhow::{Result, ensure};

use super::load::Tally;
use super::probe::Kind;
use super::testbed::{PODS, Testbed};
use crate::cluster::plan::Node;
use crate::log;

/// Duration of the traffic before and after each fault.
pub(super) const AROUND: Duration = Duration::from_secs(1);
/// How long an agent is gone.
pub(super) const GONE: Duration = Duration::from_secs(1);

/// Parameters of the faults in a run.
pub(super) struct Parameters {
    pub away: Duration,
    /// The node for faults of one node.
    pub node: Node,
    /// Number of pods after a fault.
    pub pods: u8,
    /// Remarks for the table.
    pub remarks: RefCell<Vec<String>>,
}

impl Parameters {
    pub fn remark(&self, text: String) {
        self.remarks.borrow_mut().push(text);
    }
}

impl Default for Parameters {
    fn default() -> Self {
        Self { away: Duration::ZERO, node: Node(1), pods: PODS, remarks: RefCell::default() }
    }
}

/// Injects a fault, and checks its expected effects besides zero lost connections.
pub(super) type Fault = fn(&Testbed<'_>, &Parameters) -> Result<()>;

/// A fault under traffic.
pub(super) struct Case {
    pub what: &'static str,
    pub fault: Fault,
    /// Why connections may be lost; `None`: none may be lost.
    pub accepted_loss: Option<&'static str>,
}

pub(super) const fn case(what: &'static str, fault: Fault) -> Case {
    Case { what, fault, accepted_loss: None }
}

/// Why connections may be affected by a fault of a cable. Only this is accepted then: SYNs are retransmitted, new connections
/// with affinity go to another pod, and datagrams are lost.
pub(super) const CABLE: &str = "what is sent while the cable is out is lost, with any proxy: TCP sends it again, UDP does not; session \
     affinity moves on from an endpoint that does not answer a SYN (docs/operations.md, \"Endpoints that fail\")";

/// Error of a case that is not possible on this machine or in this cluster, with the reason.
#[derive(Debug)]
pub(super) struct Unsupported(pub String);

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not here: {}", self.0)
    }
}

impl std::error::Error for Unsupported {}

/// Result of one case.
#[derive(Debug)]
pub(super) struct Line {
    pub what: String,
    /// `None`: connections are not counted.
    pub tally: Option<Tally>,
    pub accepted_loss: Option<&'static str>,
    pub took: Duration,
    /// Remarks for the notes below the numbers.
    pub remarks: Vec<String>,
    pub outcome: Result<()>,
}

/// Columns after the case.
const COLUMNS: [&str; 9] =
    ["took", "new", "long", "udp", "affinity", "failed", "reset", "syns again", "moved"];

impl Line {
    fn cells(&self) -> [String; 9] {
        let took = log::seconds(self.took);
        let Some(tally) = &self.tally else {
            let mut cells = [const { String::new() }; 9].map(|_| "-".to_owned());
            cells[0] = took;
            return cells;
        };
        let asked = |kinds: &[Kind]| {
            let count = tally.of(kinds);
            (count.answered + count.failed).to_string()
        };
        let all = tally.total();
        [
            took,
            asked(&[Kind::New]),
            asked(&[Kind::Long]),
            asked(&[Kind::Udp, Kind::Flow]),
            asked(&[Kind::Sticky]),
            all.failed.to_string(),
            all.reset.to_string(),
            all.syns.to_string(),
            all.moved.to_string(),
        ]
    }

    fn is_not_here(&self) -> bool {
        self.outcome.as_ref().is_err_and(anyhow::Error::is::<Unsupported>)
    }

    /// Whether the case has passed, or is not possible here.
    pub(super) fn is_good(&self) -> bool {
        if self.is_not_here() {
            return true;
        }
        let all = self.tally.as_ref().map(Tally::total).unwrap_or_default();
        let fine = match (self.accepted_loss, &self.tally) {
            (None, _) => all.failed + all.reset + all.syns + all.moved == 0,
            (Some(_), tally) => tally.as_ref().is_none_or(|tally| {
                let streams = tally.of(&[Kind::New, Kind::Long, Kind::Sticky]);
                let moved = tally.of(&[Kind::Long, Kind::Flow]).moved;
                streams.failed + streams.reset + moved == 0
            }),
        };
        fine && self.outcome.is_ok()
    }

    /// Returns the notes on the case, for which the numbers have no place.
    fn notes(&self) -> Vec<String> {
        let mut notes = self.remarks.clone();
        let tally = self.tally.clone().unwrap_or_default();
        if let Some(accepted_loss) = self.accepted_loss.filter(|_| !tally.failures.is_empty()) {
            notes.push(format!("why: {accepted_loss}"));
        }
        let shown = if self.is_good() { 2 } else { tally.failures.len() };
        notes.extend(tally.failures.iter().take(shown).cloned());
        match &self.outcome {
            Err(error) if self.is_not_here() => notes.push(format!("{error:#}")),
            Err(error) => notes.push(format!("FAILED: {error:#}")),
            Ok(()) => {}
        }
        notes
    }
}

/// Returns how many cases passed, how many failed, and how many are not possible here.
fn counts(lines: &[Line]) -> (usize, usize, usize) {
    let away = lines.iter().filter(|line| line.is_not_here()).count();
    let good = lines.iter().filter(|line| line.is_good()).count() - away;
    (good, lines.len() - good - away, away)
}

/// Returns the last line of a table.
fn verdict(lines: &[Line]) -> String {
    let (good, bad, away) = counts(lines);
    let away = if away > 0 { format!(", {away} not here") } else { String::new() };
    format!("{good} passed, {bad} failed{away}")
}

/// Returns the table, with the notes below it.
pub(super) fn markdown(lines: &[Line]) -> String {
    let mut text = String::from("| case |");
    let mut rule = String::from("\n|---|");
    for column in COLUMNS {
        let _ = write!(text, " {column} |");
        rule.push_str("---:|");
    }
    text.push_str(&rule);
    for line in lines {
        let _ = write!(text, "\n| {} |", line.what);
        for cell in line.cells() {
            let _ = write!(text, " {cell} |");
        }
    }
    let _ = writeln!(text, "\n\n{}.", verdict(lines));
    for line in lines {
        let notes = line.notes();
        if !notes.is_empty() {
            let _ = write!(text, "\n**{}**\n\n", line.what);
        }
        for note in notes {
            let _ = writeln!(text, "* {note}");
        }
    }
    text
}

/// Returns an error if a case has failed.
pub(super) fn require_good(lines: &[Line]) -> Result<()> {
    let (_, bad, _) = counts(lines);
    ensure!(bad == 0, "{bad} cases failed");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::load::Count;
    use super::*;

    fn line(count: Count, accepted_loss: Option<&'static str>) -> Line {
        let tally = Tally {
            kinds: [(Kind::New, count)].into(),
            failures: vec!["10:00 it failed".into()],
            ..Tally::default()
        };
        Line {
            what: "a fault".into(),
            tally: Some(tally),
            accepted_loss,
            took: Duration::from_secs(12),
            remarks: Vec::new(),
            outcome: Ok(()),
        }
    }

    #[test]
    fn nothing_may_be_lost_unless_there_is_a_reason() {
        let failed = Count { answered: 9, failed: 1, ..Count::default() };
        let waited = Count { answered: 9, syns: 1, ..Count::default() };
        let moved = Count { answered: 9, moved: 1, ..Count::default() };
        for count in [failed, waited, moved] {
            assert!(!line(count, None).is_good(), "{count:?}");
        }
        assert!(line(waited, Some(CABLE)).is_good() && !line(failed, Some(CABLE)).is_good());
        let mut datagrams = line(Count::default(), Some(CABLE));
        if let Some(tally) = &mut datagrams.tally {
            tally.kinds.insert(Kind::Udp, failed);
        }
        assert!(datagrams.is_good());
        for (kind, may) in [(Kind::Sticky, true), (Kind::Long, false), (Kind::Flow, false)] {
            let mut other = line(Count::default(), Some(CABLE));
            if let Some(tally) = &mut other.tally {
                tally.kinds.insert(kind, moved);
            }
            assert_eq!(other.is_good(), may, "{kind:?}");
        }
        assert!(line(Count { answered: 9, ..Count::default() }, None).is_good());
    }

    #[test]
    fn the_table_has_numbers_notes_and_a_verdict() {
        let cannot = Line {
            what: "clocks jump".into(),
            tally: None,
            accepted_loss: None,
            took: Duration::ZERO,
            remarks: Vec::new(),
            outcome: Err(Unsupported("Operation not permitted".into()).into()),
        };
        let lines = [line(Count { answered: 9, failed: 1, ..Count::default() }, None), cannot];
        let text = markdown(&lines);
        for part in ["a fault", "10", "12 s", "it failed", "not permitted", "0 passed, 1 failed, 1 not here"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(require_good(&lines).is_err());
    }
}
