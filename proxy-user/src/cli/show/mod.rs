//! Answers of the reading commands: tables for people, JSON for scripts.
//!
//! Each answer is a pure function of rows; only the functions that take a command's arguments look outside. In JSON the names of
//! fields stay, ages are seconds, addresses are strings, and what is not known is `null`.

mod backend;
mod facts;
mod filter;
mod flow;
mod latency;
mod map;
mod probe;
mod service;
mod status;
mod table;

use serde::Serialize;

use super::args::{BackendCommand, FlowCommand, MapCommand, Output, ReaderArgs, ServiceCommand};
use crate::host::netfilter::old_proxy::OldProxy;
use crate::maps::view::{Snapshot, View, ViewError};

pub use filter::{FilterError, ServiceFilter};
pub(super) use map::is_nearly_full;
pub use probe::{AgentState, probe};
pub(super) use probe::{api_servers, ask, problems, xdp};
pub use status::{Facts, Status};
pub(super) use table::Table;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ShowError {
    /// The maps cannot be read.
    #[error(transparent)]
    View(#[from] ViewError),
    /// The Service was not named properly.
    #[error(transparent)]
    Filter(#[from] FilterError),
    /// No such Service is programmed.
    #[error(
        "no Service port {filter} is programmed: `ballast service list` shows all; headless ones, and those without ready ports of a known protocol, are left alone{left_alone}"
    )]
    NoService {
        /// What was asked for.
        filter: String,
        /// Cluster addresses that are left alone, with a leading `; `, or nothing.
        left_alone: String,
    },
    /// A client cannot reach an address of the other family.
    #[error("client and address are of different families")]
    Families,
    /// The answer cannot be written as JSON.
    #[error("the answer cannot be written as JSON: {0}")]
    Json(#[from] serde_json::Error),
}

/// An answer, ready to be printed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// What is printed.
    pub text: String,
    /// Whether all is well: what the exit code says.
    pub well: bool,
}

/// `ballast service`.
pub fn services(command: &ServiceCommand) -> Result<String, ShowError> {
    match command {
        ServiceCommand::List(args) => service_list(&open(args)?.snapshot()?, args.output),
        ServiceCommand::Show(args) => {
            let snapshot = open(&args.reader)?.snapshot()?;
            service_show(&snapshot, &args.service.parse()?, args.reader.output)
        }
    }
}

/// `ballast backend`.
pub fn backends(command: &BackendCommand) -> Result<String, ShowError> {
    let BackendCommand::List(args) = command;
    let filter = args.service.as_deref().map(str::parse).transpose()?;
    backend_list(&open(&args.reader)?.snapshot()?, filter.as_ref(), args.reader.output)
}

/// `ballast map`.
pub fn maps(command: &MapCommand) -> Result<String, ShowError> {
    let MapCommand::List(args) = command;
    map_list(&open(args)?.usage()?, args.output)
}

/// `ballast flow`.
pub fn flows(command: &FlowCommand) -> Result<String, ShowError> {
    let FlowCommand::List(args) = command;
    let view = open(&args.reader)?;
    let filter = args.service.as_deref().map(str::parse).transpose()?;
    let selection = flow::Selection { service: filter, client: args.client, all: args.all };
    let snapshot = Snapshot { names: view.names()?, frontends: view.services()?, ..Snapshot::default() };
    flow_list(&view.flows()?, &snapshot, &selection, args.reader.output)
}

pub use backend::list as backend_list;
pub use flow::list as flow_list;
pub use map::list as map_list;
pub use service::{list as service_list, show as service_show};

/// `ballast status`: asks the agent, and reads the maps whether or not it answers.
pub fn status(args: &super::args::StatusArgs) -> Result<Answer, ShowError> {
    let agent = probe(args.agent.metrics_bind_address);
    let (told, xdp) = (problems(&agent), xdp(&agent));
    let facts = Facts::read(&args.reader.bpffs);
    let status = Status::new(agent.clone(), facts).with_problems(told).with_xdp(xdp);
    // Without the right to ask netfilter, the rest is shown.
    let status = status.with_old_proxy(OldProxy::look().unwrap_or_default());
    let status = status.with_api_servers(api_servers(&agent));
    Ok(Answer { text: status.render(args.reader.output)?, well: status.problems().is_empty() })
}

fn open(args: &ReaderArgs) -> Result<View, ShowError> {
    Ok(View::open(&args.bpffs)?)
}

pub use flow::Selection as FlowSelection;

/// JSON with line breaks and a final one.
pub(super) fn json(value: &impl Serialize) -> Result<String, ShowError> {
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    Ok(text)
}

impl Output {
    /// Whether more columns are asked for.
    const fn is_wide(self) -> bool {
        matches!(self, Self::Wide)
    }
}

#[cfg(test)]
mod tests;
