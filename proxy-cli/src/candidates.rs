//! Candidates for shell completion that are known without the maps.

use clap_complete::engine::{ArgValueCandidates, CompletionCandidate};
use proxy_common::map_names;

/// Completes the name of a map.
pub fn maps() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        map_names::ALL.iter().chain(map_names::OPTIONAL).map(CompletionCandidate::new).collect()
    })
}

/// Completes a client of `ballast explain`; pods have no names in the maps.
pub fn clients() -> ArgValueCandidates {
    ArgValueCandidates::new(|| ["host", "pod", "pod/"].map(CompletionCandidate::new).into())
}

/// Completes one of these words.
pub fn words(names: Vec<String>) -> ArgValueCandidates {
    ArgValueCandidates::new(move || names.iter().map(CompletionCandidate::new).collect())
}
