//! `ballast status`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::net::IpAddr;
use std::path::PathBuf;

use ipnet::IpNet;
use proxy_common::map_names as map;
use proxy_common::reason::{Reason, Verdict};
use proxy_common::version::ABI_VERSION;
use proxy_core::model::plural::plural;
use serde::Serialize;

use super::error::ShowError;
use super::facts::Counts;
pub use super::facts::StatusFacts;
use super::probe::AgentState;
use crate::cli::check::facts::{Installed, Others};
use crate::cli::check::judge;
use crate::maps::view::{UsageRow, ViewError};
use crate::programs::{AttachedXdp, Attachment, MissingFeature, XdpDevice};
use proxy_cli::args::list::Output;
use proxy_cli::output::{Table, bytes, document};
use proxy_core::model::ApiServers;

/// All data of `ballast status`.
#[derive(Debug)]
pub struct Status {
    installed: Installed,
    others: Others,
    facts: Result<StatusFacts, ViewError>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct StatusJson<'a> {
    /// Whether there are no problems.
    ok: bool,
    agent: AgentJson,
    /// ABI version of the maps that this program reads.
    abi: u32,
    /// Folder of the maps; `null` if there is none.
    folder: Option<&'a PathBuf>,
    attachments: Vec<AttachmentJson<'a>>,
    /// Missing kernel features that Ballast can do without.
    kernel_lacks: &'a [MissingFeature],
    /// Contains no server if there is no cluster, or if the agent was not queried.
    api_servers: &'a ApiServers,
    /// XDP on the uplinks; empty if the agent was not queried.
    xdp: &'a [XdpDevice],
    /// Resident memory of the agent in bytes, without the maps; `null` if it was not queried.
    resident: Option<u64>,
    maps: &'a [UsageRow],
    /// Source ports for SNAT.
    snat_ports: Option<&'a str>,
    /// Addresses on which node ports answer.
    node_ports: &'a [IpAddr],
    /// Ranges of Service addresses, whose unused addresses and ports are refused.
    service_cidrs: Vec<String>,
    counts: Option<&'a Counts>,
    /// Node ports that processes of this node have bound, too, in sentences.
    shared_node_ports: &'a [String],
    /// By label; reasons with the count 0 are omitted.
    reasons: BTreeMap<&'static str, ReasonJson>,
    /// What kube-proxy has left on the node; omitted if there is nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    kube_proxy_rules: Option<String>,
    /// Problems, in sentences.
    problems: Vec<String>,
}

#[derive(Serialize)]
struct AgentJson {
    /// `ok`, `unhealthy`, `down`, `not-asked`.
    state: &'static str,
    address: Option<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct AttachmentJson<'a> {
    /// `sock_connect4`, `tcx_ingress_7`, `clsact_egress_7`.
    hook: &'a str,
    program: &'a str,
    /// 0 if the hook has lost its program.
    program_id: u32,
    /// `cgroup 1`, or the name of a device; `null` if it does not exist any more.
    place: Option<&'a str>,
    /// `null` if the place is not a device.
    ifindex: Option<u32>,
    attached: bool,
    runs: u64,
    run_seconds: f64,
}

#[derive(Serialize)]
struct ReasonJson {
    verdict: &'static str,
    count: u64,
}

impl Status {
    /// Creates the status from what is checked and from the facts that are only shown.
    pub const fn new(installed: Installed, others: Others, facts: Result<StatusFacts, ViewError>) -> Self {
        Self { installed, others, facts }
    }

    /// Returns the problems, in sentences that say what to do: those of `ballast check`.
    pub fn problems(&self) -> Vec<String> {
        judge::problems(&self.installed, &self.others)
    }

    /// Renders the status in the requested format.
    pub fn render(&self, output: Output) -> Result<String, ShowError> {
        match output {
            Output::Json | Output::Yaml | Output::Otlp => Ok(document(&self.document(), output)?),
            Output::Name => Ok(if self.problems().is_empty() { "ok\n" } else { "problems\n" }.to_owned()),
            Output::Text | Output::Wide | Output::Short => Ok(self.text(output)),
        }
    }

    fn document(&self) -> StatusJson<'_> {
        let problems = self.problems();
        let facts = self.facts.as_ref().ok();
        StatusJson {
            ok: problems.is_empty(),
            agent: AgentJson {
                state: match &self.installed.agent {
                    AgentState::NotAsked => "not-asked",
                    AgentState::Answered { status: 200, .. } => "ok",
                    AgentState::Answered { .. } => "unhealthy",
                    AgentState::Silent { .. } => "down",
                },
                address: match &self.installed.agent {
                    AgentState::NotAsked => None,
                    AgentState::Answered { address, .. } | AgentState::Silent { address, .. } => {
                        Some(address.to_string())
                    }
                },
            },
            abi: ABI_VERSION,
            folder: facts.map(|facts| &facts.folder),
            attachments: facts
                .map(|facts| facts.attachments.iter().map(attachment).collect())
                .unwrap_or_default(),
            kernel_lacks: facts.map(|facts| &*facts.missing_features).unwrap_or_default(),
            api_servers: &self.installed.report.api_servers,
            xdp: &self.installed.report.xdp,
            resident: self.installed.report.resident,
            maps: facts.map(|facts| &*facts.maps).unwrap_or_default(),
            snat_ports: facts.map(|facts| &*facts.snat_ports),
            node_ports: facts.map(|facts| &*facts.node_ports).unwrap_or_default(),
            service_cidrs: facts
                .map(|facts| facts.service_cidrs.iter().map(ToString::to_string).collect())
                .unwrap_or_default(),
            counts: facts.map(|facts| &facts.counts),
            shared_node_ports: facts.map(|facts| &*facts.shared_ports).unwrap_or_default(),
            reasons: facts
                .map(|facts| {
                    met(facts)
                        .map(|(reason, count)| {
                            (reason.label(), ReasonJson { verdict: reason.verdict().label(), count })
                        })
                        .collect()
                })
                .unwrap_or_default(),
            kube_proxy_rules: self.others.kube_proxy.as_ref().ok().and_then(|rules| {
                match (rules.has_rules(), rules.draining) {
                    (true, _) => Some(rules.to_string()),
                    (false, draining) => draining.then(|| "connections".to_owned()),
                }
            }),
            problems,
        }
    }

    fn text(&self, output: Output) -> String {
        let mut text = String::new();
        // Writing to a `String` cannot fail.
        let _ = match &self.installed.agent {
            AgentState::NotAsked => writeln!(text, "Agent:      not checked"),
            AgentState::Answered { address, status: 200 } => writeln!(text, "Agent:      ok, at {address}"),
            AgentState::Answered { address, status } => {
                writeln!(text, "Agent:      unhealthy (HTTP {status}), at {address}")
            }
            AgentState::Silent { address, .. } => writeln!(text, "Agent:      no answer at {address}"),
        };
        let ApiServers { servers, active, failovers } = &self.installed.report.api_servers;
        if !servers.is_empty() {
            let asked = active.as_deref().unwrap_or("none answers");
            let _ = writeln!(
                text,
                "API server: {asked}, of {}; {}",
                servers.len(),
                plural(failovers, "failover")
            );
        }
        if let Ok(facts) = &self.facts {
            facts_text(&mut text, facts, self.installed.report.resident, output);
        }
        for (position, XdpDevice { device, mode, reason }) in self.installed.report.xdp.iter().enumerate() {
            let label = if position == 0 { "XDP:" } else { "" };
            let _ = match mode {
                AttachedXdp::None => writeln!(text, "{label:<10}  {device}: none, {reason}"),
                mode => writeln!(text, "{label:<10}  {device}: {}", mode.label()),
            };
        }
        let problems = self.problems();
        if problems.is_empty() {
            let _ = writeln!(text, "Problems:   none");
        }
        for (position, problem) in problems.iter().enumerate() {
            let label = if position == 0 { "Problems:" } else { "" };
            let _ = writeln!(text, "{label:<10}  {problem}");
        }
        text
    }
}

/// Returns where node ports answer, in words.
fn node_ports(addresses: &[IpAddr]) -> String {
    const SHOWN: usize = 6;
    let names: Vec<_> = addresses
        .iter()
        .map(|address| {
            format!("{address}{}", if address.is_loopback() { " (sockets of the node)" } else { "" })
        })
        .collect();
    match names.len() {
        0 => "at no address; set nodePortAddresses".to_owned(),
        count if count > SHOWN => format!("at {}, and {} more", names[..SHOWN].join(", "), count - SHOWN),
        _ => format!("at {}", names.join(", ")),
    }
}

/// Returns the ranges of Service addresses that are enforced, in words.
fn ranges(ranges: &[IpNet]) -> String {
    if ranges.is_empty() {
        return "none: unused addresses and ports of Services are not refused (--unallocated-addresses, --service-cidrs)"
            .to_owned();
    }
    ranges.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn facts_text(text: &mut String, facts: &StatusFacts, resident: Option<u64>, output: Output) {
    let counts = &facts.counts;
    let memory: u64 = facts.maps.iter().filter_map(|row| row.memory).sum();
    let attached = || facts.attachments.iter().filter(|one| one.is_attached());
    let programs: BTreeSet<_> = attached().map(|one| one.program_id).collect();
    let row = |name| facts.maps.iter().find(move |row: &&UsageRow| row.name == name);
    let used = |name| row(name).and_then(|row| row.used).unwrap_or_default();
    // An id is used in only one of the two address families, so both families share the ids.
    let endpoints = used(map::BACKENDS) + used(map::BACKENDS6);
    let room = row(map::BACKENDS).map_or(0, |row| row.capacity);
    let empty = if counts.empty == 0 {
        String::new()
    } else {
        format!(", {} of them without endpoints", counts.empty)
    };
    let unmanaged =
        if counts.unmanaged == 0 { String::new() } else { format!("; {} unmanaged", counts.unmanaged) };
    let _ = writeln!(text, "Programs:   {} at {}", programs.len(), plural(attached().count(), "hook"));
    for (position, feature) in facts.missing_features.iter().enumerate() {
        let _ = writeln!(text, "{:<10}  {feature}", if position == 0 { "Missing:" } else { "" });
    }
    let _ = writeln!(
        text,
        "Maps:       {} in {} (ABI {ABI_VERSION}), {}",
        facts.maps.len(),
        facts.folder.display(),
        bytes(memory)
    );
    if let Some(resident) = resident {
        let (own, all) = (bytes(resident), bytes(resident + memory));
        let _ = writeln!(text, "Memory:     {own} of the agent, {all} with the maps");
    }
    let (ports, frontends) = (plural(counts.ports, "port"), plural(counts.frontends, "frontend"));
    let _ = writeln!(text, "Services:   {ports}, {frontends}{empty}{unmanaged}");
    let _ = writeln!(text, "Endpoints:  {} usable, {endpoints} of {room} ids in use", counts.backends);
    let _ = writeln!(text, "Node ports: {}", node_ports(&facts.node_ports));
    let _ = writeln!(text, "Ranges:     {}", ranges(&facts.service_cidrs));
    let _ = writeln!(text, "Flows:      {}; source ports for SNAT {}", counts.flows, facts.snat_ports);
    for (position, shared) in facts.shared_ports.iter().enumerate() {
        let _ = writeln!(text, "{:<10}  {shared}", if position == 0 { "Shared:" } else { "" });
    }
    for verdict in [Verdict::Reject, Verdict::Drop, Verdict::Pass] {
        let label = match verdict {
            Verdict::Reject => "Rejected:",
            Verdict::Drop => "Dropped:",
            Verdict::Pass => "Passed:",
        };
        let counted: Vec<_> = met(facts)
            .filter(|(reason, _)| reason.verdict() == verdict)
            .map(|(reason, count)| format!("{} {count}", reason.label()))
            .collect();
        let counted = if counted.is_empty() { "none".to_owned() } else { counted.join(", ") };
        let _ = writeln!(text, "{label:<10}  {counted}");
    }
    if output.is_wide() {
        let mut table = Table::new(["HOOK", "PLACE", "PROGRAM", "ID", "RUNS"]).right(&[3, 4]);
        for one in &facts.attachments {
            let place = match (&one.place, one.ifindex) {
                (Some(device), Some(ifindex)) => format!("{device} ({ifindex})"),
                (Some(place), None) => place.clone(),
                (None, _) => "gone".to_owned(),
            };
            let id = if one.program_id == 0 { "gone".to_owned() } else { one.program_id.to_string() };
            table.row([one.hook.clone(), place, one.program.to_owned(), id, one.runs.to_string()]);
        }
        let _ = write!(text, "\n{}\n", table.render("No program is attached."));
    }
}

/// Returns the reasons with a count above 0.
fn met(facts: &StatusFacts) -> impl Iterator<Item = (Reason, u64)> {
    facts.reasons.iter().filter(|(_, count)| **count > 0).map(|(reason, count)| (*reason, *count))
}

fn attachment(one: &Attachment) -> AttachmentJson<'_> {
    AttachmentJson {
        hook: &one.hook,
        program: one.program,
        program_id: one.program_id,
        place: one.place.as_deref(),
        ifindex: one.ifindex,
        attached: one.is_attached(),
        runs: one.runs,
        run_seconds: one.run_time.as_secs_f64(),
    }
}
