//! Answers of the reading commands: tables for people, JSON for scripts.
//!
//! Each answer is a pure function of rows; only [`answer`] and [`status`] look outside. In JSON the names of
//! fields stay, ages are seconds, addresses are strings, and what is not known is `null`.

mod backend;
mod facts;
mod filter;
mod flow;
mod map;
mod probe;
mod service;
mod status;
mod table;

use serde::Serialize;

use super::args::{
    BackendCommand, Command, FlowCommand, FlowListArgs, MapCommand, Output, ReaderArgs, ServiceCommand,
};
use crate::host::netfilter::old_proxy::OldProxy;
use crate::maps::view::{Snapshot, View, ViewError};

pub use filter::{FilterError, ServiceFilter};
pub use probe::{AgentState, probe};
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
    /// Nobody reaches an address of the other family.
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

/// Answers a reading command; `None` for those that do something.
pub fn answer(command: &Command) -> Option<Result<Answer, ShowError>> {
    if let Command::Status(args) = command {
        return Some(status(args));
    }
    Some(rows(command)?.map(|text| Answer { text, well: true }))
}

fn rows(command: &Command) -> Option<Result<String, ShowError>> {
    match command {
        Command::Run(_)
        | Command::Cleanup(_)
        | Command::Downgrade(_)
        | Command::Status(_)
        | Command::Takeover(_)
        | Command::Monitor(_) => None,
        Command::Explain(args) => Some(crate::cli::explain::answer(args)),
        Command::Service { command: ServiceCommand::List(args) } => {
            Some(open(args).and_then(|view| service_list(&view.snapshot()?, args.output)))
        }
        Command::Service { command: ServiceCommand::Show(args) } => Some(
            open(&args.reader)
                .and_then(|view| service_show(&view.snapshot()?, &args.service.parse()?, args.reader.output)),
        ),
        Command::Backend { command: BackendCommand::List(args) } => {
            Some(open(&args.reader).and_then(|view| {
                let filter = args.service.as_deref().map(str::parse).transpose()?;
                backend_list(&view.snapshot()?, filter.as_ref(), args.reader.output)
            }))
        }
        Command::Flow { command: FlowCommand::List(args) } => Some(flows(args)),
        Command::Map { command: MapCommand::List(args) } => {
            Some(open(args).and_then(|view| map_list(&view.usage()?, args.output)))
        }
    }
}

pub use backend::list as backend_list;
pub use flow::list as flow_list;
pub use map::list as map_list;
pub use service::{list as service_list, show as service_show};

/// `ballast status`: asks the agent, and reads the maps whether or not it answers.
pub fn status(args: &super::args::StatusArgs) -> Result<Answer, ShowError> {
    let agent = probe(args.agent.metrics_bind_address);
    let (told, xdp) = (probe::problems(&agent), probe::xdp(&agent));
    let status =
        Status::new(agent.clone(), Facts::read(&args.reader.bpffs)).with_problems(told).with_xdp(xdp);
    // Whoever may not ask netfilter sees the rest.
    let status = status.with_old_proxy(OldProxy::look().unwrap_or_default());
    let status = status.with_api_servers(probe::api_servers(&agent));
    Ok(Answer { text: status.render(args.reader.output)?, well: status.problems().is_empty() })
}

fn open(args: &ReaderArgs) -> Result<View, ShowError> {
    Ok(View::open(&args.bpffs)?)
}

fn flows(args: &FlowListArgs) -> Result<String, ShowError> {
    let view = open(&args.reader)?;
    let filter = args.service.as_deref().map(str::parse).transpose()?;
    let selection = flow::Selection { service: filter, client: args.client, all: args.all };
    let snapshot = Snapshot { names: view.names()?, frontends: view.services()?, ..Snapshot::default() };
    flow_list(&view.flows()?, &snapshot, &selection, args.reader.output)
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
