//! Arguments of a command of `ballast` that `kubectl ballast` runs on the nodes.

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};

/// Arguments that the plugin evaluates itself: it converts the output, and resolves names as the user. They are not sent to the
/// nodes.
const EVALUATED: [&str; 6] = ["output", "namespace", "all_namespaces", "selector", "services", "once"];
/// Arguments about files and addresses of a node, or about one that is not installed yet: the agent's pod has the right values.
const OF_NODE: [&str; 10] = [
    "bpffs",
    "run_dir",
    "metrics_bind_address",
    "master",
    "cgroup_root",
    "cni_conf_dir",
    "pre",
    "report_only",
    "no_api",
    "end_with_stdin",
];

/// The arguments of a command: as values for the plugin, and as words for the nodes.
#[derive(Clone, Debug)]
pub struct OnNodes<A> {
    /// The values.
    pub args: A,
    /// What was given on the command line, in long form.
    pub words: Vec<String>,
}

/// Returns the arguments of the command on a node.
fn arguments<A: Args>() -> Vec<Arg> {
    A::augment_args(Command::new("node")).get_arguments().cloned().collect()
}

impl<A: Args> Args for OnNodes<A> {
    fn augment_args(command: Command) -> Command {
        // The plugin has its own --kubeconfig for all commands.
        let shared = arguments::<A>().into_iter().filter(|arg| arg.get_id() != "kubeconfig");
        shared.fold(command, |command, arg| {
            let id = arg.get_id().as_str();
            let is_hidden = OF_NODE.contains(&id) || id == "once";
            let arg = if id == "namespace" {
                arg.help(
                    "Only Services of this namespace. Without it, lists show all namespaces, and a name without namespace is in \
                     the namespace of the context",
                )
            } else {
                arg
            };
            command.arg(arg.hide(is_hidden))
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<A: Args> FromArgMatches for OnNodes<A> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut words = Vec::new();
        for arg in arguments::<A>() {
            let id = arg.get_id().as_str();
            if id == "kubeconfig" || matches.value_source(id) != Some(ValueSource::CommandLine) {
                continue;
            }
            let long = arg.get_long();
            if OF_NODE.contains(&id) {
                let why = format!(
                    "--{} is only for `ballast` on a node: the agent's pod has the right value\n",
                    long.unwrap_or(id)
                );
                return Err(clap::Error::raw(ErrorKind::UnknownArgument, why));
            }
            if EVALUATED.contains(&id) {
                continue;
            }
            let values = matches.get_raw(id).into_iter().flatten().map(|value| value.to_string_lossy());
            match long {
                Some(long) if arg.get_action().takes_values() => {
                    words.extend(values.map(|value| format!("--{long}={value}")));
                }
                Some(long) if matches.get_flag(id) => words.push(format!("--{long}")),
                Some(long) => words.push(format!("--{long}=false")),
                None => words.extend(values.map(std::borrow::Cow::into_owned)),
            }
        }
        Ok(Self { args: A::from_arg_matches(matches)?, words })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
