//! The reading commands: they evaluate their arguments, read the maps, and write the result.

use std::io::Write;

use proxy_cli::selector::{AskLabels, SelectorError, ServiceSelector};
use proxy_common::map_names;

use super::backend::AskPlaces;
use super::error::{CommandOutput, ShowError};
use super::flow::FlowSelection;
use super::service::{ReportedState, ServiceProblems};
use super::stats::Meter;
use super::status::{Status, StatusFacts};
use super::zero::Zero;
use crate::cli::selector::SelectInMaps as _;
use proxy_cli::output::write_list;

use super::{backend, change, dump, flow, map, service, stats as counters};
use crate::cli::check;
use crate::cli::explain::AskPod;
use crate::cli::programmed;
use crate::maps::view::View;
use proxy_cli::args::inspect::{
    BackendCommand, BackendListArgs, FlowCommand, FlowListArgs, MapCommand, MapDumpArgs, ServiceCommand,
    ServiceListArgs, StatsArgs, StatusArgs,
};
use proxy_cli::args::list::{ApiArgs, Output};
use proxy_cli::value::Listen;
use proxy_core::model::lookup::Places;

/// What commands ask the API server for.
#[derive(Clone, Copy, Debug)]
pub struct AskApi {
    /// Labels of Services.
    pub labels: AskLabels,
    /// Pods, nodes and zones of endpoints.
    pub places: AskPlaces,
    /// A pod.
    pub pod: AskPod,
}

/// `ballast service`.
pub fn services(command: &ServiceCommand, ask: AskApi, out: &mut impl Write) -> Result<(), ShowError> {
    match command {
        ServiceCommand::List(ServiceListArgs { list, selector }) => {
            let view = View::open(&list.maps.bpffs)?;
            let selector = ServiceSelector::programmed(selector, &view, ask.labels)?;
            write_list(&list.view, out, || Ok(service::list(&view.snapshot()?, &selector)))
        }
        ServiceCommand::Show(args) => {
            let selector = ServiceSelector::parse(&args.selector, ask.labels)?;
            if selector.is_all() && !args.selector.namespace.all_namespaces {
                return Err(ShowError::NothingSelected(
                    "a Service, --namespace, --selector or --all-namespaces",
                ));
            }
            let snapshot = View::open(&args.reader.maps.bpffs)?.snapshot()?;
            let problems = problems(args.agent.metrics_bind_address, &selector);
            selector.check(&snapshot).map_err(|error| with_problems(&error, &selector, &problems))?;
            let output = args.reader.format.output;
            let known =
                ReportedState { problems, places: places(output, &args.selector.api, &selector, ask.places) };
            let snapshot = Zero::read(&args.zero.run_dir)?.apply(snapshot);
            if snapshot.names.is_empty() {
                // If standard error is closed, the exit code still tells.
                let _ = writeln!(std::io::stderr(), "No Services are programmed.");
            }
            Ok(out.write_all(service::show(&snapshot, &selector, &known, output)?.as_bytes())?)
        }
        ServiceCommand::Zero(args) => change::zero(args, ask.labels, out),
    }
}

/// Returns the problems of Services, as the agent reports them; if its answer cannot be read, standard error says why.
pub(in crate::cli) fn problems(listen: Option<Listen>, selector: &ServiceSelector) -> ServiceProblems {
    programmed::problems(listen, selector).unwrap_or_else(|error| {
        // If standard error is closed, the problems are still missing.
        let _ = writeln!(std::io::stderr(), "ballast: the problems of Services are not known: {error}");
        ServiceProblems::default()
    })
}

/// Returns the error that no port of a Service is programmed, with the reported problems of the named Services.
pub(in crate::cli) fn with_problems(
    error: &SelectorError,
    selector: &ServiceSelector,
    problems: &ServiceProblems,
) -> ShowError {
    let named = problems.iter().filter(|((namespace, name), _)| selector.is_of(namespace, name));
    let lines = named.flat_map(|((namespace, name), problems)| {
        problems.iter().map(move |problem| format!("\n{namespace}/{name}: {problem}"))
    });
    ShowError::NotProgrammed(lines.fold(error.to_string(), |text, line| text + &line))
}

/// Returns the places of endpoints for the wide output; if the API server does not tell them, standard error says why.
fn places(output: Output, api: &ApiArgs, selector: &ServiceSelector, ask: AskPlaces) -> Places {
    if !output.is_wide() {
        return Places::default();
    }
    ask(api, selector.namespace.as_deref()).unwrap_or_else(|why| {
        // If standard error is closed, the columns are still empty.
        let _ = writeln!(
            std::io::stderr(),
            "ballast: pods, nodes and zones are not known: cannot read EndpointSlices from the API server: {why}"
        );
        Places::default()
    })
}

/// `ballast stats`.
pub fn stats(args: &StatsArgs, ask: AskApi, out: &mut impl Write) -> Result<(), ShowError> {
    let StatsArgs { list, selector, rate, zero } = args;
    let view = View::open(&list.maps.bpffs)?;
    let selector = ServiceSelector::programmed(selector, &view, ask.labels)?;
    let mut meter = Meter::default();
    write_list(&list.view, out, || match rate {
        Some(period) => meter.rates(&selector, *period, || Ok(view.snapshot()?)),
        None => Ok(counters::list(&Zero::read(&zero.run_dir)?.apply(view.snapshot()?), &selector)),
    })
}

/// `ballast backend`.
pub fn backends(command: &BackendCommand, ask: AskApi, out: &mut impl Write) -> Result<(), ShowError> {
    let BackendCommand::List(BackendListArgs { list, selector: args, zero }) = command;
    let view = View::open(&list.maps.bpffs)?;
    let selector = ServiceSelector::programmed(args, &view, ask.labels)?;
    let places = places(list.view.format.output.output, &args.api, &selector, ask.places);
    write_list(&list.view, out, || {
        Ok(backend::list(&Zero::read(&zero.run_dir)?.apply(view.snapshot()?), &selector, &places))
    })
}

/// `ballast map`.
pub fn maps(command: &MapCommand, out: &mut impl Write) -> Result<(), ShowError> {
    match command {
        MapCommand::List(args) => {
            let view = View::open(&args.list.maps.bpffs)?;
            write_list(&args.list.view, out, || map::list(&view.usage()?, &args.names))
        }
        MapCommand::Dump(MapDumpArgs { list, name }) => {
            let view = View::open(&list.maps.bpffs)?;
            let known = || map_names::ALL.iter().chain(map_names::OPTIONAL).copied();
            if !known().any(|known| known == name) {
                return Err(ShowError::no_map(name, known()));
            }
            write_list(&list.view, out, || Ok(dump::list(view.dump(name)?)))
        }
    }
}

/// `ballast flow`.
pub fn flows(command: &FlowCommand, ask: AskApi, out: &mut impl Write) -> Result<(), ShowError> {
    match command {
        FlowCommand::List(FlowListArgs { list, which, expired }) => {
            let view = View::open(&list.maps.bpffs)?;
            let selection = FlowSelection::new(which, *expired, &view, ask.labels)?;
            write_list(&list.view, out, || Ok(flow::list(&view.flows()?, &view.service_names()?, &selection)))
        }
        FlowCommand::Delete(args) => change::delete_flows(args, ask.labels, out),
    }
}

/// `ballast status`: queries the agent, and reads the maps whether or not the agent answers.
pub fn status(args: &StatusArgs) -> Result<CommandOutput, ShowError> {
    let bpffs = &args.reader.maps.bpffs;
    let (installed, others) = check::running(bpffs, args.agent.metrics_bind_address);
    let status = Status::new(installed, others, StatusFacts::read(bpffs));
    Ok(CommandOutput { text: status.render(args.reader.format.output)?, well: status.problems().is_empty() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn service_without_a_programmed_port_shows_its_problems() {
        let problem =
            |name: &str| (("default".to_owned(), name.to_owned()), vec![format!("{name}: bad port")]);
        let selector =
            ServiceSelector { services: vec!["default/web".parse().unwrap()], ..ServiceSelector::default() };
        let error = SelectorError::NoService {
            filter: "default/web".to_owned(),
            near: String::new(),
            unmanaged: String::new(),
        };
        let shown = with_problems(&error, &selector, &[problem("web"), problem("other")].into());
        assert_eq!(shown.to_string(), format!("{error}\ndefault/web: web: bad port"));
    }
}
