//! Candidates for shell completion: names that the maps hold. There are none if the user may not read the maps.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::PathBuf;

use clap_complete::engine::{ArgValueCandidates, CompletionCandidate};
use proxy_common::map_names;

use crate::maps::view::{NameRow, View};

/// Completes the name of a Service, and of its ports.
pub(in crate::cli) fn services() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let service = |name: &NameRow| format!("{}/{}", name.namespace, name.name);
        candidates(|name| [service(name), name.to_string()])
    })
}

/// Completes a namespace.
pub(in crate::cli) fn namespaces() -> ArgValueCandidates {
    ArgValueCandidates::new(|| candidates(|name| [name.namespace.clone()]))
}

/// Completes the name of a map.
pub(in crate::cli) fn maps() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        map_names::ALL.iter().chain(map_names::OPTIONAL).map(CompletionCandidate::new).collect()
    })
}

/// Completes a client of `ballast explain`; pods have no names in the maps.
pub(in crate::cli) fn clients() -> ArgValueCandidates {
    ArgValueCandidates::new(|| ["host", "pod", "pod/"].map(CompletionCandidate::new).into())
}

/// Completes a network device.
pub(in crate::cli) fn devices() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let devices = crate::host::devices::list().unwrap_or_default();
        devices.into_iter().map(|device| CompletionCandidate::new(device.name)).collect()
    })
}

/// Completes one of these words.
pub(in crate::cli) fn words(names: Vec<String>) -> ArgValueCandidates {
    ArgValueCandidates::new(move || names.iter().map(CompletionCandidate::new).collect())
}

fn candidates<const N: usize>(texts: impl Fn(&NameRow) -> [String; N]) -> Vec<CompletionCandidate> {
    let bpffs = std::env::var_os("BALLAST_BPFFS").unwrap_or_else(|| OsString::from("/sys/fs/bpf"));
    let names = View::open(&PathBuf::from(bpffs)).and_then(|view| view.names()).unwrap_or_default();
    let texts: BTreeSet<String> = names.values().flat_map(texts).collect();
    texts.into_iter().map(CompletionCandidate::new).collect()
}
