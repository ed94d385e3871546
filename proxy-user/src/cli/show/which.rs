//! Converts the arguments of a command to a selection of rows.

use std::collections::BTreeSet;

use super::error::ShowError;
use super::filter::{Scope, ServiceFilter};
use super::flow::Selection as FlowSelection;
use crate::cli::args::common::FlowFilterArgs;
use crate::cli::args::list::{ApiArgs, NamespaceArgs, ScopeArgs};

/// Asks the API server for the Services with these labels, as namespace and name; the error is a text.
pub type AskLabels = fn(&ApiArgs, &str) -> Result<BTreeSet<(String, String)>, String>;

/// Returns the selection of flows.
pub(super) fn selection(
    which: &FlowFilterArgs,
    all: bool,
    ask: AskLabels,
) -> Result<FlowSelection, ShowError> {
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

/// Returns the selection of Service ports; `more` is a Service that a flag names.
pub(super) fn scope(args: &ScopeArgs, more: Option<&str>, ask: AskLabels) -> Result<Scope, ShowError> {
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
