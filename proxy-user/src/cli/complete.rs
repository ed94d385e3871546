//! Shell completion and manual pages, both generated from the definition of the command line.
//!
//! The completion script of a shell runs this program with the variable [`VARIABLE`] set.

use std::io;
use std::path::Path;

use clap::{Arg, Command, CommandFactory as _};
use clap_complete::CompleteEnv;
use clap_complete::env::Shells;

use super::args::Args;
use proxy_cli::args::inspect::Shell;
use proxy_cli::candidates::words;
use proxy_cli::complete::with_columns;
use proxy_cli::output::columns;
use proxy_cli::value::{LogLevel, ProxyMode};
use proxy_common::select::Algorithm;
use proxy_core::model::annotations::Annotation;

use super::candidates;
use super::check::judge::CHECKS;

/// Set by a completion script that asks for candidates.
const VARIABLE: &str = "_BALLAST_COMPLETE";
const PROGRAM: &str = "ballast";

/// If a completion script asks, answers it and ends the process.
pub fn answer() {
    CompleteEnv::with_factory(command).var(VARIABLE).complete();
}

/// Returns the command line with the names that only other modules know: settings, checks, columns of lists, and names in the maps.
fn command() -> Command {
    let all = Args::command();
    let run = all.find_subcommand("run").into_iter().flat_map(Command::get_arguments);
    let settings: Vec<String> =
        run.filter(|arg| !arg.is_hide_set()).filter_map(Arg::get_long).map(str::to_owned).collect();
    let labels = |all: &[Algorithm]| all.iter().map(|one| one.label().to_owned()).collect();
    let annotations = ["all", "none"].into_iter().chain(Annotation::ALL.map(Annotation::label));
    let annotations = annotations.map(str::to_owned).collect();
    let modes = ["ebpf"].into_iter().chain(ProxyMode::LEGACY);
    let checks = CHECKS.iter().map(|check| (*check).to_owned()).collect();
    let all = all
        .mut_subcommand("config", |one| one.mut_arg("names", |arg| arg.add(words(settings))))
        .mut_subcommand("run", |run| {
            run.mut_arg("algorithm", |arg| arg.add(words(labels(Algorithm::ALL))))
                .mut_arg("proxy_mode", |arg| arg.add(words(modes.map(str::to_owned).collect())))
                .mut_arg("tenant_annotations", |arg| arg.add(words(annotations)))
        })
        .mut_subcommand("check", |one| one.mut_arg("checks", |arg| arg.add(words(checks))));
    with_names(with_columns("", all, &|command| columns(command).to_vec()))
}

/// Adds the names that the maps and the node have.
fn with_names(command: Command) -> Command {
    // A version belongs to the whole Service.
    let with_ports = command.get_name() != "programmed";
    let command = command.mut_args(|arg| match arg.get_id().as_str() {
        "services" | "destination" => arg.add(candidates::services(with_ports)),
        "gate_service" => arg.add(candidates::services(false)),
        "namespace" => arg.add(candidates::namespaces()),
        "frontend" => arg.add(candidates::frontends()),
        "backend" => arg.add(candidates::backends()),
        "devices" | "uplinks" | "local_devices" | "pod_bridge_interface" => arg.add(candidates::devices()),
        "log_level" => arg.add(words(LogLevel::ALL.map(|level| level.to_string()).into())),
        _ => arg,
    });
    command.mut_subcommands(with_names)
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
    use std::ffi::OsString;

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
            ("ballast run --uplinks ", "lo"),
            ("ballast run --pod-bridge-interface ", "lo"),
            ("ballast run --proxy-mode ", "nftables"),
            ("ballast run --log-level ", "debug"),
            ("ballast run --algorithm ", "mh"),
            ("ballast run --tenant-annotations ", "weights"),
            ("ballast completion ", "fish"),
        ] {
            let found = complete(words);
            assert!(found.iter().any(|one| one == expected), "{words}: {found:?}");
        }
        assert!(complete("ballast config packet").is_empty(), "only tests need --packet-hook");
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
