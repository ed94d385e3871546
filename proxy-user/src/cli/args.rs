//! The command line. Parsing has no side effects; the doc comments of this module are the help texts.

pub mod gate;
pub mod log;
pub mod takeover;

use std::any::TypeId;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use clap::builder::Resettable;
use clap::{Parser, Subcommand};

use crate::config::Options;
use proxy_cli::args::change::{self, CleanupArgs};
use proxy_cli::args::inspect::{self, BackendCommand, FlowCommand, MapCommand, ServiceCommand, StatusArgs};
use proxy_cli::args::{check, examples, observe, programmed, top};
use proxy_cli::value::Listen;

/// Replaces kube-proxy: sends the traffic of Kubernetes Services to their endpoints with eBPF.
///
/// `ballast run` starts the agent, which runs on each node. The other commands read the BPF maps that the agent writes, and also
/// work while the agent is stopped, except `config` and `programmed`, which ask the agent.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "ballast",
    version,
    propagate_version = true,
    arg_required_else_help = true,
    mut_subcommands(examples::prepare)
)]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Run the agent: watch Services and EndpointSlices, and program the BPF maps.
    // As with kube-proxy, a repeated flag replaces the one before, or adds to its list.
    #[command(args_override_self = true)]
    Run(Box<Options>),
    /// Show the state of the agent, programs and maps, and the refused traffic. Exits with code 1 if the agent does not answer or reports a problem.
    Status(StatusArgs),
    /// Check whether this node meets the requirements (--pre), and whether Ballast works on it. Exits with code 1 if a check fails.
    Check(Box<check::CheckArgs>),
    /// List Services with their endpoints, show one Service, or reset counters.
    #[command(visible_alias = "svc")]
    Service {
        /// The subcommand.
        #[command(subcommand)]
        command: ServiceCommand,
    },
    /// List the endpoints of Services, one per line.
    #[command(visible_aliases = ["endpoint", "ep"])]
    Backend {
        /// The subcommand.
        #[command(subcommand)]
        command: BackendCommand,
    },
    /// List or delete connections in the flow table of the packet path. Connections that are translated at the socket have no entry.
    Flow {
        /// The subcommand.
        #[command(subcommand)]
        command: FlowCommand,
    },
    /// Show counters or rates of Services: connections, packets, bytes and refusals.
    Stats(inspect::StatsArgs),
    /// Show the BPF maps: entries in use, sizes and contents.
    Map {
        /// The subcommand.
        #[command(subcommand)]
        command: MapCommand,
    },
    /// Explain, step by step, what the programs would do with a connection. Sends no packet.
    Explain(observe::ExplainArgs),
    /// Show refusals, drops and new connections live.
    Monitor(observe::MonitorArgs),
    /// Show live rates of Services and endpoints, drops and connections on a terminal.
    Top(top::TopArgs),
    /// Show which version of each Service and its EndpointSlices is programmed into the maps.
    Programmed(programmed::ProgrammedArgs),
    /// Show the agent's settings and the source of each: flag, environment variable, file or default.
    Config(inspect::ConfigArgs),
    /// Collect the information for a bug report in an archive, without secrets.
    Sysdump(change::SysdumpArgs),
    /// Show the version of this program and of the agent.
    Version(inspect::VersionArgs),
    /// Print a shell script that completes commands, flags, and the names of Services and maps.
    Completion {
        /// The shell.
        shell: inspect::Shell,
    },
    /// Write the manual pages into a folder.
    #[command(hide = true)]
    Man {
        /// The folder.
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
    /// Migrate a live node from kube-proxy: remove the rules of kube-proxy, and keep its connections until they end.
    Takeover(takeover::TakeoverArgs),
    /// Close connected UDP sockets in pods after their endpoint was removed. Runs next to an agent without the capabilities for that.
    EndUdpSockets(log::EndUdpSocketsArgs),
    /// In a pod: set a readiness gate of the pod once every node has programmed it, and hold its end until no node sends it new
    /// connections.
    Gate(gate::GateArgs),
    /// Remove Ballast's programs, maps and pins from the kernel, and nothing else. Stop the agent first.
    Cleanup(CleanupArgs),
}

/// Returns the command without the variables that are empty (`variable`: the environment): a template without a value for the
/// variable means that it is not given. An empty address of a server switches it off.
pub fn without_empty_variables(
    command: clap::Command,
    variable: impl Fn(&OsStr) -> Option<OsString> + Copy,
) -> clap::Command {
    let counts = |arg: &clap::Arg| arg.get_value_parser().type_id() == TypeId::of::<Listen>();
    let is_empty = |arg: &clap::Arg| arg.get_env().and_then(variable).is_some_and(|value| value.is_empty());
    let unset = |arg: clap::Arg| {
        if is_empty(&arg) && !counts(&arg) { arg.env(Resettable::Reset) } else { arg }
    };
    command.mut_args(unset).mut_subcommands(|command| without_empty_variables(command, variable))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::{Command, CommandFactory as _, Parser as _};

    use super::Args;
    use proxy_cli::args::examples::EXAMPLES;
    use proxy_cli::args::kubectl::KubectlArgs;

    #[test]
    fn every_command_has_examples_and_each_of_them_is_accepted() {
        fn collect(command: &Command, path: &str, found: &mut Vec<String>) {
            for one in command.get_subcommands().filter(|one| !one.is_hide_set()) {
                let path = format!("{path} {}", one.get_name());
                let help = one.get_after_help().map(ToString::to_string).unwrap_or_default();
                assert!(help.contains("Examples:"), "{path}");
                found.push(path.trim().to_owned());
                collect(one, &path, found);
            }
        }
        let mut found = Vec::new();
        collect(&Args::command(), "", &mut found);
        collect(&KubectlArgs::command(), "kubectl ballast", &mut found);
        for (path, examples) in EXAMPLES {
            assert!(found.iter().any(|one| one == path), "there is no command {path}");
            for (what, words) in *examples {
                let error = match words.strip_prefix("kubectl ") {
                    Some(words) => KubectlArgs::try_parse_from(words.split(' ')).err(),
                    None => Args::try_parse_from(words.split(' ')).err(),
                };
                assert!(error.is_none(), "{what}: {words}: {}", error.unwrap());
            }
        }
    }

    #[test]
    fn words_count_in_any_case() {
        for words in [
            "flow list --state ESTABLISHED --protocol TCP -o JSON",
            "monitor --kind Reject --reason NO_ENDPOINT",
            "top --screen Drops --sort BYTES",
            "run --xdp AUTO --log-format Json",
        ] {
            let all = ["ballast"].into_iter().chain(words.split(' '));
            assert!(Args::try_parse_from(all).is_ok(), "{words}");
        }
        for words in ["status -o JSON", "monitor --kind NEW -o Otlp", "flow list --state ESTABLISHED -o WIDE"]
        {
            let all = ["kubectl-ballast"].into_iter().chain(words.split(' '));
            assert!(KubectlArgs::try_parse_from(all).is_ok(), "{words}");
        }
    }

    #[test]
    fn empty_variable_of_no_server_is_unset() {
        fn variables(command: &Command) -> BTreeSet<String> {
            let own = command.get_arguments().filter_map(|arg| Some(arg.get_env()?.to_str()?.to_owned()));
            own.chain(command.get_subcommands().flat_map(variables)).collect()
        }
        let set = |value: &'static str| {
            super::without_empty_variables(Args::command(), move |_| Some(value.into()))
        };
        assert_eq!(variables(&set("x")), variables(&Args::command()));
        let servers = ["BALLAST_HEALTHZ_BIND_ADDRESS", "BALLAST_METRICS_BIND_ADDRESS"];
        assert_eq!(variables(&set("")), servers.map(str::to_owned).into());
    }

    #[test]
    fn the_agents_own_flags_come_before_those_of_kube_proxy() {
        let mut command = Args::command();
        let help = command.find_subcommand_mut("run").unwrap().render_long_help().to_string();
        let at = |text: &str| help.find(text).unwrap_or_else(|| panic!("no {text}"));
        assert!(at("--manifests") < at("--config <FILE>"));
        assert!(at("--sync-period") < at("--proxy-mode"));
        assert!(at("--proxy-mode") < at("Other flags of kube-proxy"));
    }
}
