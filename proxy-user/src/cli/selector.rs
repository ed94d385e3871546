//! Selection of the Service ports in the maps.

use std::collections::BTreeSet;

use proxy_cli::args::list::SelectorArgs;
use proxy_cli::selector::{AskLabels, SelectorError, ServiceFilter, ServiceSelector, nearest_services};
use proxy_core::model::nearest::did_you_mean;

use super::show::{ShowError, unmanaged_note};
use crate::maps::view::{NameRow, Snapshot, View};

/// What [`ServiceSelector`] selects of the maps.
pub trait SelectInMaps: Sized {
    /// Evaluates the arguments. Fails if a named Service or namespace is not programmed.
    fn programmed(args: &SelectorArgs, view: &View, ask: AskLabels) -> Result<Self, ShowError>;

    /// Whether this Service port is selected. A Service port without a name belongs to no namespace.
    fn takes(&self, id: u32, snapshot: &Snapshot) -> bool;

    /// Fails with the first named Service that is not programmed, or if no Service of the namespace is.
    fn check(&self, snapshot: &Snapshot) -> Result<(), SelectorError>;
}

impl SelectInMaps for ServiceSelector {
    fn programmed(args: &SelectorArgs, view: &View, ask: AskLabels) -> Result<Self, ShowError> {
        let selector = Self::parse(args, ask)?;
        if selector.namespace.is_some() || !selector.services.is_empty() {
            selector.check(&view.service_names()?)?;
        }
        Ok(selector)
    }

    fn takes(&self, id: u32, snapshot: &Snapshot) -> bool {
        let Some(name) = snapshot.names.get(&id) else { return self.is_all() };
        self.is_of(&name.namespace, &name.name)
            && (self.services.is_empty()
                || self.services.iter().any(|filter| matches(filter, id, name, snapshot)))
    }

    fn check(&self, snapshot: &Snapshot) -> Result<(), SelectorError> {
        let is_there = |filter: &&ServiceFilter| {
            snapshot.names.iter().any(|(id, name)| matches(filter, *id, name, snapshot))
        };
        if let Some(filter) = self.services.iter().find(|filter| !is_there(filter)) {
            return Err(not_found(filter, snapshot));
        }
        self.check_namespace(snapshot.names.values().map(|name| &*name.namespace))
    }
}

/// Whether the filter selects this Service port. A number is compared with the ports of its frontends.
pub(in crate::cli) fn matches(filter: &ServiceFilter, id: u32, name: &NameRow, snapshot: &Snapshot) -> bool {
    let frontends = snapshot.frontends.iter().filter(|row| row.service == id);
    filter.is_of(&name.namespace, &name.name) && filter.is_port(&name.port, frontends.map(|row| row.port))
}

/// Returns the error that no Service port is selected, with similar names that are programmed.
pub(in crate::cli) fn not_found(filter: &ServiceFilter, snapshot: &Snapshot) -> SelectorError {
    let ports = snapshot.names.iter().filter(|(_, row)| filter.is_of(&row.namespace, &row.name));
    // An unnamed port is shown by its number; node ports are above it.
    let number = |id: u32| {
        let frontends = snapshot.frontends.iter().filter(|frontend| frontend.service == id);
        frontends.map(|frontend| frontend.port).min().map(|port| format!(":{port}")).unwrap_or_default()
    };
    let shown = |(id, row): (&u32, &NameRow)| {
        if row.port.is_empty() { format!("{row}{}", number(*id)) } else { row.to_string() }
    };
    let ports: BTreeSet<String> = ports.map(shown).collect();
    // If the Service exists, only the name of its port is wrong.
    let near = if filter.has_port() && !ports.is_empty() {
        did_you_mean(&ports.into_iter().collect::<Vec<_>>())
    } else {
        nearest_services(filter, &snapshot.names.values().map(|row| (&*row.namespace, &*row.name)).collect())
    };
    let unmanaged = unmanaged_note(snapshot).map(|all| format!("; unmanaged cluster addresses: {all}"));
    SelectorError::NoService { filter: filter.to_string(), near, unmanaged: unmanaged.unwrap_or_default() }
}
