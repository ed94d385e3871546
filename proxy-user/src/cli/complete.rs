//! Shell completion and manual pages, both generated from the definition of the command line.
//!
//! The completion script of a shell runs this program with the variable [`VARIABLE`] set.

use std::io;
use std::path::Path;

use clap::CommandFactory as _;
use clap_complete::CompleteEnv;
use clap_complete::env::Shells;

use super::args::Args;
use super::args::inspect::Shell;

/// Set by a completion script that asks for candidates.
const VARIABLE: &str = "_BALLAST_COMPLETE";
const PROGRAM: &str = "ballast";

/// If a completion script asks, answers it and ends the process.
pub fn answer() {
    CompleteEnv::with_factory(Args::command).var(VARIABLE).complete();
}

/// Returns the completion script for a shell.
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
