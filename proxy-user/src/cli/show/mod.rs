//! Answers of the reading commands: tables for people, JSON for scripts.
//!
//! Each answer is a pure function of rows; only the functions that take a command's arguments look outside. In JSON the names of
//! fields stay, ages are seconds, addresses are strings, and what is not known is `null`.

mod backend;
mod change;
mod config;
mod dump;
mod facts;
mod filter;
mod flow;
mod latency;
mod list;
mod map;
mod probe;
mod service;
mod stats;
mod status;
mod table;
mod watch;
mod zero;

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::PathBuf;

use proxy_common::map_names;
use serde::Serialize;

use self::stats::Meter;
use self::zero::Zero;
use super::args::inspect::{
    BackendListArgs, FlowFilterArgs, FlowListArgs, MapDumpArgs, ServiceListArgs, StatsArgs,
};
use super::args::list::{ApiArgs, NamespaceArgs, ScopeArgs};
use super::args::{BackendCommand, FlowCommand, MapCommand, Output, ServiceCommand};
use crate::host::netfilter::old_proxy::OldProxy;
use crate::maps::view::{Snapshot, View, ViewError};
use crate::model::nearest::{did_you_mean, nearest};

pub use backend::list as backend_list;
pub use config::config;
pub use filter::{FilterError, Scope, ServiceFilter};
pub use flow::{Selection as FlowSelection, list as flow_list};
pub use list::List;
pub(super) use map::is_nearly_full;
pub use map::list as map_list;
pub use probe::{AgentState, probe};
pub(super) use probe::{api_servers, ask, problems, reachable, xdp};
pub use service::{list as service_list, show as service_show};
pub use status::{Facts, Status};
pub use table::{Table, age};

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
        "no Service port {filter} is programmed{near} (`ballast service list` shows all; headless ones, and those without ready ports of a known protocol, are left alone{left_alone})"
    )]
    NoService {
        /// What was asked for.
        filter: String,
        /// What may have been meant, with a leading `; `, or nothing.
        near: String,
        /// Cluster addresses that are left alone, with a leading `; `, or nothing.
        left_alone: String,
    },
    /// There is no such map.
    #[error("no map is called {asked}{near} (`ballast map list` shows all)")]
    NoMap {
        /// What was asked for.
        asked: String,
        /// What may have been meant, with a leading `; `, or nothing.
        near: String,
    },
    /// The list cannot be sorted by that.
    #[error(
        "nothing in the list is called {asked:?}{near} (--sort-by takes {known}, or the name of a column)"
    )]
    NoField {
        /// What was asked for.
        asked: String,
        /// What may have been meant, with a leading `; `, or nothing.
        near: String,
        /// All fields.
        known: String,
    },
    /// The API server did not say which Services have the labels.
    #[error("labels are known to the API server only, and {0}")]
    Labels(String),
    /// There is no such setting.
    #[error("no setting is called {asked}{near} (`ballast config --all` shows all)")]
    NoSetting {
        /// What was asked for.
        asked: String,
        /// What may have been meant, with a leading `; `, or nothing.
        near: String,
    },
    /// The agent has to answer, and does not.
    #[error(
        "the agent does not answer ({0}): start `ballast run`, or name its address with --metrics-bind-address"
    )]
    NoAgent(String),
    /// Nothing says what is to be removed.
    #[error("say which: {0}")]
    Unsaid(&'static str),
    /// What the counters were cannot be read or noted.
    #[error("{}: {error}; name another folder with --run-dir", path.display())]
    Zero {
        /// The file.
        path: PathBuf,
        /// Why not.
        error: io::Error,
    },
    /// A client cannot reach an address of the other family.
    #[error("client and address are of different families")]
    Families,
    /// The answer cannot be written as JSON.
    #[error("the answer cannot be written as JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// The answer cannot be written as YAML.
    #[error("the answer cannot be written as YAML: {0}")]
    Yaml(#[from] serde_saphyr::ser::Error),
    /// The reader of the answer has gone.
    #[error("cannot write to standard output: {0}")]
    Write(io::Error),
}

impl ShowError {
    /// No Service port is meant by `filter`.
    pub(super) fn no_service(filter: &ServiceFilter, snapshot: &Snapshot) -> Self {
        let left_alone =
            service::left_alone(snapshot).map(|all| format!("; cluster addresses left alone: {all}"));
        Self::NoService {
            filter: filter.to_string(),
            near: filter.proposals(snapshot),
            left_alone: left_alone.unwrap_or_default(),
        }
    }

    fn no_map<'a>(asked: &str, known: impl IntoIterator<Item = &'a str>) -> Self {
        Self::NoMap { asked: asked.to_owned(), near: did_you_mean(&nearest(asked, known)) }
    }
}

/// Asks the API server for the Services with these labels, as namespace and name; an error is in words.
pub type AskLabels = fn(&ApiArgs, &str) -> Result<BTreeSet<(String, String)>, String>;

/// An answer, ready to be printed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// What is printed.
    pub text: String,
    /// Whether all is well: what the exit code says.
    pub well: bool,
}

/// `ballast service`.
pub fn services(command: &ServiceCommand, ask: AskLabels, out: &mut impl Write) -> Result<(), ShowError> {
    match command {
        ServiceCommand::List(ServiceListArgs { list, scope }) => {
            let view = View::open(&list.bpffs)?;
            let scope = self::scope(scope, None, ask)?;
            watch::write(list, out, || service_list(&view.snapshot()?, &scope))
        }
        ServiceCommand::Show(args) => {
            let snapshot = View::open(&args.reader.bpffs)?.snapshot()?;
            let snapshot = Zero::read(&args.zero.run_dir)?.apply(snapshot);
            let filter = ServiceFilter::parse(&args.service, &args.namespace)?;
            Ok(out.write_all(service_show(&snapshot, &filter, args.reader.output)?.as_bytes())?)
        }
        ServiceCommand::Zero(args) => change::zero(args, out),
    }
}

/// `ballast stats`.
pub fn stats(args: &StatsArgs, ask: AskLabels, out: &mut impl Write) -> Result<(), ShowError> {
    let StatsArgs { list, scope, rate, zero } = args;
    let view = View::open(&list.bpffs)?;
    let scope = self::scope(scope, None, ask)?;
    let mut meter = Meter::default();
    watch::write(list, out, || match rate {
        Some(period) => meter.rates(&scope, *period, || Ok(view.snapshot()?)),
        None => stats::list(&Zero::read(&zero.run_dir)?.apply(view.snapshot()?), &scope),
    })
}

/// `ballast backend`.
pub fn backends(command: &BackendCommand, ask: AskLabels, out: &mut impl Write) -> Result<(), ShowError> {
    let BackendCommand::List(BackendListArgs { list, scope, service, zero }) = command;
    let view = View::open(&list.bpffs)?;
    let scope = self::scope(scope, service.as_deref(), ask)?;
    watch::write(list, out, || backend_list(&Zero::read(&zero.run_dir)?.apply(view.snapshot()?), &scope))
}

/// `ballast map`.
pub fn maps(command: &MapCommand, out: &mut impl Write) -> Result<(), ShowError> {
    match command {
        MapCommand::List(args) => {
            let view = View::open(&args.list.bpffs)?;
            watch::write(&args.list, out, || map_list(&view.usage()?, &args.names))
        }
        MapCommand::Dump(MapDumpArgs { list, name }) => {
            let view = View::open(&list.bpffs)?;
            let known = || map_names::ALL.iter().chain(map_names::OPTIONAL).copied();
            if !known().any(|known| known == name) {
                return Err(ShowError::no_map(name, known()));
            }
            watch::write(list, out, || Ok(dump::list(view.dump(name)?)))
        }
    }
}

/// `ballast flow`.
pub fn flows(command: &FlowCommand, ask: AskLabels, out: &mut impl Write) -> Result<(), ShowError> {
    match command {
        FlowCommand::List(FlowListArgs { list, which, all }) => {
            let view = View::open(&list.bpffs)?;
            let selection = selection(which, *all, ask)?;
            watch::write(list, out, || flow_list(&view.flows()?, &names(&view)?, &selection))
        }
        FlowCommand::Delete(args) => change::delete_flows(args, ask, out),
    }
}

/// As much as names of Services take.
fn names(view: &View) -> Result<Snapshot, ShowError> {
    Ok(Snapshot { names: view.names()?, frontends: view.services()?, ..Snapshot::default() })
}

/// Which connections are meant.
fn selection(which: &FlowFilterArgs, all: bool, ask: AskLabels) -> Result<FlowSelection, ShowError> {
    let FlowFilterArgs { scope, service, client, frontend, backend, protocol, state } = which;
    Ok(FlowSelection {
        scope: self::scope(scope, service.as_deref(), ask)?,
        client: *client,
        frontend: *frontend,
        backend: *backend,
        protocol: *protocol,
        state: *state,
        all,
    })
}

/// What the arguments of a list mean; `more` is a Service that a flag names.
fn scope(args: &ScopeArgs, more: Option<&str>, ask: AskLabels) -> Result<Scope, ShowError> {
    let ScopeArgs { namespace, selector, api, services } = args;
    let named = services.iter().map(String::as_str).chain(more);
    let services = named.map(|text| ServiceFilter::parse(text, namespace)).collect::<Result<_, _>>()?;
    let labelled = selector.as_deref().map(|selector| ask(api, selector)).transpose();
    let NamespaceArgs { namespace, all_namespaces } = namespace;
    Ok(Scope {
        namespace: namespace.clone().filter(|_| !all_namespaces),
        labelled: labelled.map_err(ShowError::Labels)?,
        services,
    })
}

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

/// JSON with line breaks and a final one.
pub(super) fn json(value: &impl Serialize) -> Result<String, ShowError> {
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    Ok(text)
}

/// The same as YAML.
pub(super) fn yaml(value: &impl Serialize) -> Result<String, ShowError> {
    Ok(serde_saphyr::to_string(value)?)
}

/// A document for machines, in the form that was asked for.
pub(super) fn document(value: &impl Serialize, output: Output) -> Result<String, ShowError> {
    if output == Output::Yaml { yaml(value) } else { json(value) }
}

impl Output {
    /// Whether more is asked for.
    const fn is_wide(self) -> bool {
        matches!(self, Self::Wide)
    }

    /// Whether the answer is a document for machines.
    pub(super) const fn is_document(self) -> bool {
        matches!(self, Self::Json | Self::Yaml)
    }
}

#[cfg(test)]
mod tests;
