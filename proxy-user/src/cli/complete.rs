//! Completion by shells: commands and flags, and the names of what is there now.
//!
//! The script of a shell asks this program (the variable [`VARIABLE`] says so), which reads names from the maps. A user who may
//! not read them gets none.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use clap::CommandFactory as _;
use clap_complete::CompleteEnv;
use clap_complete::engine::{ArgValueCandidates, CompletionCandidate};
use clap_complete::env::Shells;
use proxy_common::map_names;

use super::args::Args;
use super::args::inspect::Shell;
use crate::maps::view::{NameRow, View};

/// A shell sets it when it asks.
const VARIABLE: &str = "_BALLAST_COMPLETE";
const PROGRAM: &str = "ballast";

/// Answers a shell that asks, and ends the process then.
pub fn answer() {
    CompleteEnv::with_factory(Args::command).var(VARIABLE).complete();
}

/// The script for a shell.
pub fn script(shell: Shell) -> io::Result<String> {
    let name = match shell {
        Shell::Bash => "bash",
        Shell::Zsh => "zsh",
        Shell::Fish => "fish",
    };
    let mut script = Vec::new();
    let shells = Shells::builtins();
    let completer = shells.completer(name).ok_or(io::ErrorKind::Unsupported)?;
    completer.write_registration(VARIABLE, PROGRAM, PROGRAM, PROGRAM, &mut script)?;
    String::from_utf8(script).map_err(io::Error::other)
}

/// Writes the manual pages into a folder.
pub fn manuals(folder: &Path) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    clap_mangen::generate_to(Args::command(), folder)
}

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

fn candidates<const N: usize>(texts: impl Fn(&NameRow) -> [String; N]) -> Vec<CompletionCandidate> {
    let bpffs = std::env::var_os("BALLAST_BPFFS").unwrap_or_else(|| OsString::from("/sys/fs/bpf"));
    let names = View::open(&PathBuf::from(bpffs)).and_then(|view| view.names()).unwrap_or_default();
    let texts: BTreeSet<String> = names.values().flat_map(texts).collect();
    texts.into_iter().map(CompletionCandidate::new).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shell_has_a_script_that_asks_the_program() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = script(shell).unwrap();
            assert!(script.contains(VARIABLE) && script.contains(PROGRAM), "{shell:?}: {script}");
        }
    }

    #[test]
    fn every_command_has_a_manual_page() {
        let folder = tempfile::tempdir().unwrap();
        manuals(folder.path()).unwrap();
        for page in ["ballast.1", "ballast-service-list.1", "ballast-flow-delete.1", "ballast-run.1"] {
            let text = std::fs::read_to_string(folder.path().join(page)).unwrap();
            assert!(text.contains(".SH NAME") && text.contains(".SH OPTIONS"), "{page}: {text}");
        }
    }
}
