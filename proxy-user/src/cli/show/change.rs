//! `ballast flow delete` and `ballast service zero`: flags and arguments select what they remove, and the commands print it.

use std::io::Write;

use super::error::ShowError;
use super::filter::{Scope, ServiceFilter};
use super::flow;
use super::names::names;
use super::which::{AskLabels, selection};
use super::zero::Zero;
use crate::cli::args::change::{FlowDeleteArgs, ServiceZeroArgs};
use crate::maps::view::View;

/// Deletes flows, and prints them.
pub(super) fn delete_flows(
    args: &FlowDeleteArgs,
    ask: AskLabels,
    out: &mut impl Write,
) -> Result<(), ShowError> {
    // Expired flows are deleted as well, so that no trace of a connection remains.
    let selection = selection(&args.which, true, ask)?;
    if selection.is_all() && !args.all {
        return Err(ShowError::NothingSelected(
            "a Service, --client, --frontend, --backend, --protocol or --state; or --all",
        ));
    }
    let view = View::open(&args.maps.bpffs)?;
    let snapshot = names(&view)?;
    selection.scope.check(&snapshot)?;
    let rows =
        if args.dry_run { view.flows()? } else { view.delete_flows(|row| selection.takes(row, &snapshot))? };
    let list = flow::list(&rows, &snapshot, &selection)?;
    let count = list.rows().len();
    if count > 0 {
        out.write_all(list.render(args.format.output, !args.format.no_headers)?.as_bytes())?;
    }
    let verb = if args.dry_run { "would be deleted" } else { "deleted" };
    let noun = if count == 1 { "connection" } else { "connections" };
    Ok(writeln!(std::io::stderr(), "{count} {noun} {verb}")?)
}

/// Resets the counters that these commands show.
pub(super) fn zero(args: &ServiceZeroArgs, out: &mut impl Write) -> Result<(), ShowError> {
    let ServiceZeroArgs { maps, zero, namespace, all, services } = args;
    let only = namespace.namespace.clone().filter(|_| !namespace.all_namespaces);
    if services.is_empty() && only.is_none() && !all {
        return Err(ShowError::NothingSelected("a Service, --namespace, or --all"));
    }
    let services =
        services.iter().map(|text| ServiceFilter::parse(text, namespace)).collect::<Result<_, _>>()?;
    let scope = Scope { namespace: only, services, ..Scope::default() };
    let snapshot = View::open(&maps.bpffs)?.snapshot()?;
    scope.check(&snapshot)?;
    let mut noted = Zero::read(&zero.run_dir)?;
    let count = noted.take(&snapshot, &scope);
    let path = noted.write(&zero.run_dir)?;
    Ok(writeln!(out, "reset the counters of {count} Service ports (stored in {})", path.display())?)
}
