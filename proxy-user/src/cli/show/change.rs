//! `ballast flow delete` and `ballast service zero`: flags and arguments select what they remove, and the commands print it.

use std::io::Write;

use super::error::ShowError;
use super::flow::{self, FlowSelection};
use super::zero::Zero;
use crate::cli::selector::SelectInMaps as _;
use crate::maps::view::{FlowRow, View};
use proxy_cli::args::change::{FlowDeleteArgs, ServiceZeroArgs};
use proxy_cli::selector::{AskLabels, ServiceSelector};
use proxy_core::model::FlowState;
use proxy_core::model::plural::plural;

/// Deletes flows, and prints them.
pub(super) fn delete_flows(
    args: &FlowDeleteArgs,
    ask: AskLabels,
    out: &mut impl Write,
) -> Result<(), ShowError> {
    // Expired flows are deleted as well, so that no trace of a connection remains.
    let services = ServiceSelector::parse(&args.which.selector, ask)?;
    let selection = FlowSelection::of(&args.which, true, services);
    if selection.is_all() && !args.all {
        return Err(ShowError::NothingSelected(
            "a Service, --client, --frontend, --backend, --protocol or --state; or --all",
        ));
    }
    let view = View::open(&args.maps.bpffs)?;
    let snapshot = view.service_names()?;
    selection.services.check(&snapshot)?;
    let rows =
        if args.dry_run { view.flows()? } else { view.delete_flows(|row| selection.takes(row, &snapshot))? };
    let list = flow::list(&rows, &snapshot, &selection);
    let count = list.rows().len();
    out.write_all(list.render(args.format.output.output, !args.format.no_headers)?.as_bytes())?;
    let verb = if args.dry_run { "would be deleted" } else { "deleted" };
    let is_expired = |row: &&FlowRow| row.state == FlowState::Expired && selection.takes(row, &snapshot);
    // `flow list` does not show expired ones by default, so that the numbers differ.
    let expired = match rows.iter().filter(is_expired).count() {
        0 => String::new(),
        expired => format!(", {expired} of them expired"),
    };
    Ok(writeln!(std::io::stderr(), "{} {verb}{expired}", plural(count, "connection"))?)
}

/// Resets the counters that these commands show.
pub(super) fn zero(args: &ServiceZeroArgs, ask: AskLabels, out: &mut impl Write) -> Result<(), ShowError> {
    let ServiceZeroArgs { maps, zero, selector, all } = args;
    let selector = ServiceSelector::parse(selector, ask)?;
    if selector.is_all() && !all {
        return Err(ShowError::NothingSelected("a Service, --namespace or --selector; or --all"));
    }
    let snapshot = View::open(&maps.bpffs)?.snapshot()?;
    selector.check(&snapshot)?;
    let mut noted = Zero::read(&zero.run_dir)?;
    let count = noted.take(&snapshot, &selector);
    let path = noted.write(&zero.run_dir)?;
    Ok(writeln!(
        out,
        "reset the counters of {} (stored in {})",
        plural(count, "Service port"),
        path.display()
    )?)
}
