//! The identity of Service ports, and unmanaged addresses.

use serde::Serialize;

use crate::maps::view::{NameRow, Snapshot, Transport, UnmanagedRow};
use proxy_core::model::net::IpFamily;

/// The identity of a Service port: the same fields in the JSON of all commands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(in crate::cli) struct ServiceIdentity {
    /// `namespace/name:port`; `id N` if the id has no name (yet).
    pub service: Option<String>,
    pub namespace: Option<String>,
    pub name: Option<String>,
    /// Name of the port; empty if it has none.
    pub port: Option<String>,
    /// `TCP`, `UDP`, `SCTP`.
    pub protocol: Option<String>,
    /// `IPv4` or `IPv6`.
    pub family: Option<String>,
    pub service_id: Option<u32>,
}

impl ServiceIdentity {
    /// Returns the identity of a Service port; protocol and family are those of the row that has the id.
    pub(in crate::cli) fn new(
        id: u32,
        name: Option<&NameRow>,
        protocol: Transport,
        family: IpFamily,
    ) -> Self {
        Self {
            service: Some(name.map_or_else(|| format!("id {id}"), ToString::to_string)),
            namespace: name.map(|name| name.namespace.clone()),
            name: name.map(|name| name.name.clone()),
            port: name.map(|name| name.port.clone()),
            protocol: Some(protocol.to_string()),
            family: Some(family.to_string()),
            service_id: Some(id),
        }
    }
}

/// Returns `namespace/name:port`, or `id N` if the id has no name.
pub(super) fn title(id: u32, snapshot: &Snapshot) -> String {
    snapshot.names.get(&id).map_or_else(|| format!("id {id}"), ToString::to_string)
}

/// Describes the unmanaged cluster addresses; the maps do not contain the names of their Services.
pub(in crate::cli) fn unmanaged_note(snapshot: &Snapshot) -> Option<String> {
    let each = |row: &UnmanagedRow| format!("{} ({})", row.address, row.why());
    let all: Vec<_> = snapshot.unmanaged.iter().map(each).collect();
    (!all.is_empty()).then(|| all.join(", "))
}
