//! Shell completion and manual pages, both generated from the definition of the command line.
//!
//! The completion script of a shell runs this program with the variable [`VARIABLE`] set.

use std::ffi::OsString;
use std::io;
use std::path::Path;

use clap::{Arg, Command, CommandFactory as _};
use clap_complete::CompleteEnv;
use clap_complete::env::Shells;

use super::args::Args;
use super::args::inspect::Shell;
use super::args::kubectl::KubectlArgs;
use super::check::judge::CHECKS;
use super::{candidates, show};

/// Set by a completion script that asks for candidates.
const VARIABLE: &str = "_BALLAST_COMPLETE";
const PROGRAM: &str = "ballast";

/// If a completion script asks, answers it and ends the process.
pub fn answer() {
    CompleteEnv::with_factory(command).var(VARIABLE).complete();
}

/// Returns the command line with the names that only other modules know: settings, checks, and columns of lists.
fn command() -> Command {
    let all = Args::command();
    let run = all.find_subcommand("run").into_iter().flat_map(Command::get_arguments);
    let settings: Vec<String> = run.filter_map(Arg::get_long).map(str::to_owned).collect();
    let checks = CHECKS.iter().map(|check| (*check).to_owned()).collect();
    let all = all
        .mut_subcommand("config", |one| one.mut_arg("names", |arg| arg.add(candidates::words(settings))))
        .mut_subcommand("check", |one| one.mut_arg("checks", |arg| arg.add(candidates::words(checks))));
    all.mut_subcommands(|one| with_columns("", one))
}

fn with_columns(parent: &str, command: Command) -> Command {
    let path = format!("{parent} {}", command.get_name());
    let columns = show::columns(path.trim());
    let command = if columns.is_empty() || !command.get_arguments().any(|arg| arg.get_id() == "sort_by") {
        command
    } else {
        command.mut_arg("sort_by", |arg| arg.add(candidates::words(columns)))
    };
    command.mut_subcommands(|below| with_columns(&path, below))
}

/// Answers kubectl, which completes a plugin's command line with the program `kubectl_complete-NAME`: one candidate per line, and
/// the number of a directive of cobra. `words`: those after `kubectl ballast`, of which the last one is incomplete.
pub fn for_kubectl(words: impl Iterator<Item = OsString>) -> io::Result<String> {
    /// No names of files.
    const DIRECTIVE: &str = ":4\n";
    let words: Vec<_> = std::iter::once(OsString::from("kubectl-ballast")).chain(words).collect();
    let last = words.len().saturating_sub(1);
    let mut command = KubectlArgs::command().mut_subcommands(|one| with_columns("", one));
    let mut answer = String::new();
    for candidate in clap_complete::engine::complete(&mut command, words, last, None)? {
        answer.push_str(&candidate.get_value().to_string_lossy());
        if let Some(help) = candidate.get_help() {
            let help = help.to_string();
            answer.extend(["\t", help.lines().next().unwrap_or_default()]);
        }
        answer.push('\n');
    }
    Ok(answer + DIRECTIVE)
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
    fn the_shell_completes_every_value_that_can_be_known() {
        let complete = |words: &str| -> Vec<String> {
            let words: Vec<_> = words.split(' ').map(OsString::from).collect();
            let last = words.len() - 1;
            let found = clap_complete::engine::complete(&mut command(), words, last, None).unwrap();
            found.iter().map(|one| one.get_value().to_string_lossy().into_owned()).collect()
        };
        for (words, expected) in [
            ("ballast flow list --state ", "half-open"),
            ("ballast flow list --protocol ", "sctp"),
            ("ballast flow list --sort-by ", "idle"),
            ("ballast monitor --reason ", "no_endpoint"),
            ("ballast monitor --kind ", "reject"),
            ("ballast monitor -o ", "otlp"),
            ("ballast check -o ", "short"),
            ("ballast check kernel", "kernel-btf"),
            ("ballast config max", "max-flows"),
            ("ballast map dump serv", "services6"),
            ("ballast stats --sort-by re", "reply-bytes"),
            ("ballast programmed --sort-by ", "current"),
            ("ballast explain h", "host"),
            ("ballast top --screen ", "drops"),
            ("ballast run --xdp ", "native"),
            ("ballast run --devices ", "lo"),
            ("ballast completion ", "fish"),
        ] {
            let found = complete(words);
            assert!(found.iter().any(|one| one == expected), "{words}: {found:?}");
        }
    }

    #[test]
    fn kubectl_gets_candidates_of_the_plugin_and_a_directive() {
        for (words, expected) in [
            ("s", "status\t"),
            ("flow list --state ", "half-open\n"),
            ("stats --sort-by re", "reply-bytes\n"),
            ("monitor --reason ", "no_endpoint\t"),
            ("map dump serv", "services6\n"),
        ] {
            let answer = for_kubectl(words.split(' ').map(OsString::from)).unwrap();
            assert!(answer.split_inclusive('\n').any(|line| line.starts_with(expected)), "{words}: {answer}");
            assert!(answer.ends_with("\n:4\n"), "{answer}");
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
