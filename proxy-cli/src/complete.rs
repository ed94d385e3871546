//! Shell completion.

use std::ffi::OsString;
use std::io;

use clap::{Command, CommandFactory as _};

use crate::args::kubectl::KubectlArgs;
use crate::candidates::words;
use crate::kubectl;
use crate::output::Column;

/// Lets `--sort-by` of each list be completed; `columns`: those of the list of a command, like `service list`.
pub fn with_columns(path: &str, command: Command, columns: &impl Fn(&str) -> Vec<Column>) -> Command {
    let mut names: Vec<_> = columns(path).iter().map(|column| column.heading().to_lowercase()).collect();
    names.dedup();
    let command = if names.is_empty() || !command.get_arguments().any(|arg| arg.get_id() == "sort_by") {
        command
    } else {
        command.mut_arg("sort_by", |arg| arg.add(words(names)))
    };
    command.mut_subcommands(|below| {
        let path = format!("{path} {}", below.get_name());
        with_columns(path.trim(), below, columns)
    })
}

/// Answers kubectl, which completes a plugin's command line with the program `kubectl_complete-NAME`: one candidate per line, and
/// the number of a directive of cobra. `words`: those after `kubectl ballast`, of which the last one is incomplete.
pub fn for_kubectl(words: impl Iterator<Item = OsString>) -> io::Result<String> {
    /// No names of files.
    const DIRECTIVE: &str = ":4\n";
    let words: Vec<_> = std::iter::once(OsString::from("kubectl-ballast")).chain(words).collect();
    let last = words.len().saturating_sub(1);
    let mut command = with_columns("", KubectlArgs::command(), &kubectl::columns);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kubectl_gets_candidates_of_the_plugin_and_a_directive() {
        for (words, expected) in [
            ("s", "status\t"),
            ("flow list --state ", "half-open\n"),
            ("stats --sort-by re", "reply-bytes\n"),
            ("service list --sort-by n", "nodes\n"),
            ("monitor --reason ", "no_endpoint\t"),
            ("map dump serv", "services6\n"),
        ] {
            let answer = for_kubectl(words.split(' ').map(OsString::from)).unwrap();
            assert!(answer.split_inclusive('\n').any(|line| line.starts_with(expected)), "{words}: {answer}");
            assert!(answer.ends_with("\n:4\n"), "{answer}");
        }
    }
}
