//! Candidates for shell completion: names that the maps hold. There are none if the user may not read the maps.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use clap_complete::engine::{ArgValueCandidates, ArgValueCompleter, CompletionCandidate};
use proxy_cli::selector::KINDS;

use crate::maps::view::{NameRow, View};

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

fn candidates<const N: usize>(texts: impl Fn(&NameRow) -> [String; N]) -> Vec<CompletionCandidate> {
    let bpffs = std::env::var_os("BALLAST_BPFFS").unwrap_or_else(|| OsString::from("/sys/fs/bpf"));
    let names = View::open(&PathBuf::from(bpffs)).and_then(|view| view.names()).unwrap_or_default();
    let texts: BTreeSet<String> = names.values().flat_map(texts).collect();
    texts.into_iter().map(CompletionCandidate::new).collect()
}
