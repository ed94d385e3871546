//! Candidates for shell completion: names that the maps hold. There are none if the user may not read the maps.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::net::SocketAddr;
use std::path::PathBuf;

use clap_complete::engine::{ArgValueCandidates, ArgValueCompleter, CompletionCandidate};
use proxy_cli::selector::KINDS;

use crate::maps::view::{NameRow, View, ViewError};

/// Completes the name of a Service, and of its ports if they are wanted, also behind `svc/`.
pub(in crate::cli) fn services(with_ports: bool) -> ArgValueCompleter {
    ArgValueCompleter::new(move |word: &OsStr| {
        let word = word.to_string_lossy();
        let kind = KINDS.into_iter().find(|kind| word.starts_with(kind)).unwrap_or_default();
        let service = |name: &NameRow| format!("{kind}{}/{}", name.namespace, name.name);
        let port = |name: &NameRow| if with_ports { format!("{kind}{name}") } else { service(name) };
        let mut all = candidates(|name| [service(name), port(name)]);
        all.retain(|one| one.get_value().to_string_lossy().starts_with(&*word));
        all
    })
}

/// Completes a namespace.
pub(in crate::cli) fn namespaces() -> ArgValueCandidates {
    ArgValueCandidates::new(|| candidates(|name| [name.namespace.clone()]))
}

/// Completes a network device.
pub(in crate::cli) fn devices() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let devices = crate::host::devices::list().unwrap_or_default();
        devices.into_iter().map(|device| CompletionCandidate::new(device.name)).collect()
    })
}

/// Completes the address and port of a frontend, as `flow list` takes it.
pub(in crate::cli) fn frontends() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let rows = view().and_then(|view| view.services()).unwrap_or_default();
        let rows = rows.into_iter().filter(|row| !row.address.is_unspecified());
        sorted(rows.map(|row| SocketAddr::new(row.address, row.port).to_string()))
    })
}

/// Completes the address and port of an endpoint.
pub(in crate::cli) fn backends() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let rows = view().and_then(|view| view.backends()).unwrap_or_default();
        sorted(rows.into_values().map(|row| row.socket.to_string()))
    })
}

fn candidates<const N: usize>(texts: impl Fn(&NameRow) -> [String; N]) -> Vec<CompletionCandidate> {
    let names = view().and_then(|view| view.names()).unwrap_or_default();
    sorted(names.values().flat_map(texts))
}

fn view() -> Result<View, ViewError> {
    let bpffs = std::env::var_os("BALLAST_BPFFS").unwrap_or_else(|| OsString::from("/sys/fs/bpf"));
    View::open(&PathBuf::from(bpffs))
}

fn sorted(texts: impl Iterator<Item = String>) -> Vec<CompletionCandidate> {
    texts.collect::<BTreeSet<_>>().into_iter().map(CompletionCandidate::new).collect()
}
