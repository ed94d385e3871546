//! The reading commands: they evaluate their arguments, read the maps, and write the result.

use std::io::Write;

use proxy_common::map_names;

use super::error::ShowError;
use super::filter::ServiceFilter;
use super::names::names;
use super::probe::{api_servers, probe, problems, resident, xdp};
use super::stats::Meter;
use super::status::{Facts, Status};
use super::which::AskLabels;
use super::zero::Zero;
use super::{backend, change, dump, flow, map, service, stats as counters, watch, which};
use crate::cli::args::inspect::{
    BackendCommand, BackendListArgs, FlowCommand, FlowListArgs, MapCommand, MapDumpArgs, ServiceCommand,
    ServiceListArgs, StatsArgs, StatusArgs,
};
use crate::host::netfilter::kube_proxy_rules::KubeProxyRules;
use crate::maps::view::View;

/// An answer, ready to be printed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Text to print.
    pub text: String,
    /// Whether all is well; the exit code depends on it.
    pub well: bool,
}

/// `ballast service`.
pub fn services(command: &ServiceCommand, ask: AskLabels, out: &mut impl Write) -> Result<(), ShowError> {
    match command {
        ServiceCommand::List(ServiceListArgs { list, scope }) => {
            let view = View::open(&list.maps.bpffs)?;
            let scope = which::scope(scope, None, ask)?;
            watch::write(&list.view, out, || service::list(&view.snapshot()?, &scope))
        }
        ServiceCommand::Show(args) => {
            let snapshot = View::open(&args.reader.maps.bpffs)?.snapshot()?;
            let snapshot = Zero::read(&args.zero.run_dir)?.apply(snapshot);
            let filter = ServiceFilter::parse(&args.service, &args.namespace)?;
            Ok(out.write_all(service::show(&snapshot, &filter, args.reader.output)?.as_bytes())?)
        }
        ServiceCommand::Zero(args) => change::zero(args, out),
    }
}

/// `ballast stats`.
pub fn stats(args: &StatsArgs, ask: AskLabels, out: &mut impl Write) -> Result<(), ShowError> {
    let StatsArgs { list, scope, rate, zero } = args;
    let view = View::open(&list.maps.bpffs)?;
    let scope = which::scope(scope, None, ask)?;
    let mut meter = Meter::default();
    watch::write(&list.view, out, || match rate {
        Some(period) => meter.rates(&scope, *period, || Ok(view.snapshot()?)),
        None => counters::list(&Zero::read(&zero.run_dir)?.apply(view.snapshot()?), &scope),
    })
}

/// `ballast backend`.
pub fn backends(command: &BackendCommand, ask: AskLabels, out: &mut impl Write) -> Result<(), ShowError> {
    let BackendCommand::List(BackendListArgs { list, scope, service, zero }) = command;
    let view = View::open(&list.maps.bpffs)?;
    let scope = which::scope(scope, service.as_deref(), ask)?;
    watch::write(&list.view, out, || {
        backend::list(&Zero::read(&zero.run_dir)?.apply(view.snapshot()?), &scope)
    })
}

/// `ballast map`.
pub fn maps(command: &MapCommand, out: &mut impl Write) -> Result<(), ShowError> {
    match command {
        MapCommand::List(args) => {
            let view = View::open(&args.list.maps.bpffs)?;
            watch::write(&args.list.view, out, || map::list(&view.usage()?, &args.names))
        }
        MapCommand::Dump(MapDumpArgs { list, name }) => {
            let view = View::open(&list.maps.bpffs)?;
            let known = || map_names::ALL.iter().chain(map_names::OPTIONAL).copied();
            if !known().any(|known| known == name) {
                return Err(ShowError::no_map(name, known()));
            }
            watch::write(&list.view, out, || Ok(dump::list(view.dump(name)?)))
        }
    }
}

/// `ballast flow`.
pub fn flows(command: &FlowCommand, ask: AskLabels, out: &mut impl Write) -> Result<(), ShowError> {
    match command {
        FlowCommand::List(FlowListArgs { list, which: meant, all }) => {
            let view = View::open(&list.maps.bpffs)?;
            let selection = which::selection(meant, *all, ask)?;
            watch::write(&list.view, out, || flow::list(&view.flows()?, &names(&view)?, &selection))
        }
        FlowCommand::Delete(args) => change::delete_flows(args, ask, out),
    }
}

/// `ballast status`: queries the agent, and reads the maps whether or not the agent answers.
pub fn status(args: &StatusArgs) -> Result<Answer, ShowError> {
    let agent = probe(args.agent.metrics_bind_address);
    let (told, xdp) = (problems(&agent), xdp(&agent));
    let facts = Facts::read(&args.reader.maps.bpffs);
    let status = Status::new(agent.clone(), facts).with_problems(told).with_xdp(xdp);
    // If this process may not query netfilter, everything else is still shown.
    let status = status.with_kube_proxy_rules(KubeProxyRules::look().unwrap_or_default());
    let status = status.with_resident(resident(&agent)).with_api_servers(api_servers(&agent));
    Ok(Answer { text: status.render(args.reader.output)?, well: status.problems().is_empty() })
}
