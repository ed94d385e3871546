//! Renders the explanation as text and as JSON.

use std::fmt::Write as _;

use proxy_cli::output::{Table, document};
use proxy_common::reason::{Reason, Verdict};
use serde::Serialize;

use super::{Candidate, Decides, Explanation, Path, PathOutcome, Step};
use crate::cli::show::ShowError;
use proxy_cli::args::list::Output;

/// Maximum number of endpoints that text shows.
const SHOWN: usize = 10;

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
#[serde(rename_all = "camelCase")]
struct Json<'a> {
    client: String,
    destination: String,
    /// The result in a sentence.
    summary: String,
    /// Which path decides: `socket` or `packet`.
    decided_by: &'static str,
    socket: PathJson<'a>,
    packet: PathJson<'a>,
}

impl<'a> PathJson<'a> {
    fn of(path: &'a Path) -> Self {
        let reason =
            if let PathOutcome::Refused(reason) = path.outcome { Some(reason.label()) } else { None };
        let Path { steps, service, candidates, outcome } = path;
        Self { steps, service, endpoints: candidates, verdict: outcome.label(), reason }
    }
}

impl Explanation {
    /// Returns the path that decides about the connection.
    pub const fn deciding(&self) -> &Path {
        match self.decides {
            Decides::Socket => &self.socket,
            Decides::Packet | Decides::PacketAfterSocket => &self.packet,
        }
    }

    /// Returns the result in a sentence.
    pub fn summary(&self) -> String {
        let Self { client, destination, services, ports, .. } = self;
        let join = |all: &std::collections::BTreeSet<String>| {
            all.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
        };
        let path = self.deciding();
        let has_no_port = match path.outcome {
            PathOutcome::Refused(reason) => reason == Reason::UndefinedPort,
            PathOutcome::Untouched => path.service.is_none(),
            PathOutcome::Forward => false,
        };
        if has_no_port && !services.is_empty() {
            let (ip, port) = (destination.to.ip(), destination.to.port());
            let result = match path.outcome {
                PathOutcome::Refused(reason) => format!("{}, {}", verb(reason), reason.label()),
                _ => "passes unchanged, since no range in which unused ports are refused has it (--unallocated-addresses, \
                      --service-cidrs)"
                    .to_owned(),
            };
            return format!(
                "{client} -> {ip}: {result}: {ip} is {}, which has no port {port}/{}; it has {}",
                join(services),
                destination.protocol,
                join(ports)
            );
        }
        let to = path
            .service
            .as_ref()
            .map_or_else(|| destination.to_string(), |service| format!("{service} ({destination})"));
        let result = match path.outcome {
            PathOutcome::Forward => {
                let mut serving = path.candidates.iter().filter(|one| one.serves);
                match (serving.next(), serving.count()) {
                    (Some(one), 0) => format!("forwarded to its only endpoint, {}", one.address),
                    (_, others) => format!("forwarded to one of {} endpoints", others + 1),
                }
            }
            PathOutcome::Untouched => "passes unchanged".to_owned(),
            PathOutcome::Refused(reason) => {
                format!("{}, {}:{}", verb(reason), reason.label(), reason.explanation())
            }
        };
        format!("{client} -> {to}: {result}")
    }

    /// Renders the explanation in the requested format.
    pub fn render(&self, output: Output) -> Result<String, ShowError> {
        if output.is_document() {
            let (socket, packet) = (PathJson::of(&self.socket), PathJson::of(&self.packet));
            let decided_by = if self.decides == Decides::Socket { "socket" } else { "packet" };
            let (client, destination) = (self.client.to_string(), self.destination.to_string());
            let summary = self.summary();
            return Ok(document(&Json { client, destination, summary, decided_by, socket, packet }, output)?);
        }
        if output == Output::Name {
            let serving = self.deciding().candidates.iter().filter(|one| one.serves);
            return Ok(serving.flat_map(|one| [one.address.as_str(), "\n"]).collect());
        }
        let is_wide = output.is_wide();
        let mut text = format!("{}\n", self.summary());
        // Writing to a `String` cannot fail.
        match self.decides {
            Decides::Socket => {
                let _ =
                    writeln!(text, "\nThe socket hooks decide (connect, sendmsg of a process on this node)");
                self.socket.write(&mut text, is_wide);
                let why = "The packet hooks do not translate its packets";
                other(&mut text, why, &self.packet, is_wide);
            }
            Decides::PacketAfterSocket => {
                let _ = writeln!(text, "\nThe socket hooks leave it to the packet hooks");
                self.socket.write(&mut text, is_wide);
                let _ = writeln!(text, "\nThe packet hooks decide (where packets arrive)");
                self.packet.write(&mut text, is_wide);
            }
            Decides::Packet => {
                let _ = writeln!(text, "\nThe packet hooks decide (where packets arrive)");
                self.packet.write(&mut text, is_wide);
                let why = "The socket hooks see it only if the client is a pod of this node";
                other(&mut text, why, &self.socket, is_wide);
            }
        }
        Ok(text)
    }
}

/// Returns what happens to a packet or call for this reason.
const fn verb(reason: Reason) -> &'static str {
    match reason.verdict() {
        Verdict::Reject => "rejected",
        Verdict::Drop => "dropped",
        Verdict::Pass => "passes untranslated",
    }
}

/// Writes the path that does not decide.
fn other(text: &mut String, why: &str, path: &Path, is_wide: bool) {
    // Writing to a `String` cannot fail.
    if is_wide {
        let _ = writeln!(text, "\n{why}; they would do this");
        path.write(text, is_wide);
    } else {
        let _ = writeln!(text, "\n{why} (-o wide shows what they would do)");
    }
}

impl Path {
    fn write(&self, text: &mut String, is_wide: bool) {
        for Step { rule, found } in &self.steps {
            let _ = writeln!(text, "  {rule:<16}{found}");
        }
        let end = match self.outcome {
            PathOutcome::Forward => "forwarded to an endpoint".to_owned(),
            PathOutcome::Untouched => "not changed by this path".to_owned(),
            PathOutcome::Refused(reason) => format!(
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
        let mut table = Table::new(["ENDPOINT", "ID", "WEIGHT", "ON", "STATE", "SOURCE"]).right(&[1, 2]);
        let shown = if is_wide { usize::MAX } else { SHOWN };
        for one in self.candidates.iter().take(shown) {
            let state = match (one.serves, one.terminating) {
                (false, _) => "gone",
                (true, true) => "terminating",
                (true, false) => "serves",
            };
            table.row([
                one.address.clone(),
                one.id.to_string(),
                one.weight.to_string(),
                if one.local { "this node" } else { "another node" }.to_owned(),
                state.to_owned(),
                one.source.unwrap_or("-").to_owned(),
            ]);
        }
        for line in table.render("").lines() {
            let _ = writeln!(text, "    {line}");
        }
        let more = self.candidates.len().saturating_sub(shown);
        if more > 0 {
            let _ = writeln!(text, "    and {more} more (-o wide shows all)");
        }
    }
}
