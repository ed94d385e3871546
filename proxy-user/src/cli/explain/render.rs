//! Renders the explanation as text and as JSON.

use std::fmt::Write as _;

use serde::Serialize;

use super::{Candidate, Explanation, Outcome, Path, Step};
use crate::cli::args::Output;
use crate::cli::show::{ShowError, Table, document};

/// JSON of a path; its field names are stable.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct PathJson<'a> {
    steps: &'a [Step],
    service: &'a Option<String>,
    endpoints: &'a [Candidate],
    /// `forward`, `untouched`, `reject`, `drop`, `pass`.
    verdict: &'static str,
    /// A label of `docs/reasons.md`.
    reason: Option<&'static str>,
}

#[derive(Serialize)]
struct Json<'a> {
    client: String,
    destination: String,
    socket: PathJson<'a>,
    packet: PathJson<'a>,
}

impl<'a> PathJson<'a> {
    fn of(path: &'a Path) -> Self {
        let reason = if let Outcome::Refused(reason) = path.outcome { Some(reason.label()) } else { None };
        let Path { steps, service, candidates, outcome } = path;
        Self { steps, service, endpoints: candidates, verdict: outcome.label(), reason }
    }
}

impl Explanation {
    /// Renders the explanation in the requested format.
    pub fn render(&self, output: Output) -> Result<String, ShowError> {
        let (client, destination) = (self.client.to_string(), self.destination.to_string());
        if output.is_document() {
            let (socket, packet) = (PathJson::of(&self.socket), PathJson::of(&self.packet));
            return document(&Json { client, destination, socket, packet }, output);
        }
        let mut text = format!("{client} -> {destination}\n");
        for (title, path) in [
            ("Socket hooks (connect, sendmsg of a process on this node)", &self.socket),
            ("Packet hooks (where packets arrive)", &self.packet),
        ] {
            // Writing to a `String` cannot fail.
            let _ = writeln!(text, "\n{title}");
            path.write(&mut text);
        }
        Ok(text)
    }
}

impl Path {
    fn write(&self, text: &mut String) {
        for Step { rule, found } in &self.steps {
            let _ = writeln!(text, "  {rule:<16}{found}");
        }
        let end = match self.outcome {
            Outcome::Forward => "forwarded to an endpoint".to_owned(),
            Outcome::Untouched => "not changed by this path".to_owned(),
            Outcome::Refused(reason) => format!(
                "{}, {}:{} {}",
                reason.verdict().label(),
                reason.label(),
                reason.explanation(),
                reason.advice()
            ),
        };
        let _ = writeln!(text, "  {:<16}{end}", "=>");
        if self.candidates.is_empty() {
            return;
        }
        let mut table = Table::new(["ENDPOINT", "ID", "ON", "STATE", "SOURCE"]).right(&[1]);
        for one in &self.candidates {
            let state = match (one.serves, one.terminating) {
                (false, _) => "gone",
                (true, true) => "terminating",
                (true, false) => "serves",
            };
            table.row([
                one.address.clone(),
                one.id.to_string(),
                if one.local { "this node" } else { "another node" }.to_owned(),
                state.to_owned(),
                one.source.unwrap_or("-").to_owned(),
            ]);
        }
        for line in table.render("").lines() {
            let _ = writeln!(text, "    {line}");
        }
    }
}
