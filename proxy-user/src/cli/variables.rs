//! Environment variables of settings.

use std::collections::BTreeSet;

use clap::{Command, CommandFactory as _};

use super::args::Args;
use proxy_core::model::nearest::{did_you_mean, nearest};

const PREFIX: &str = "BALLAST_";

/// Returns a sentence for each variable that looks like a setting, but is none; `others` are variables without a flag.
pub fn unknown(all: impl IntoIterator<Item = (String, String)>, others: &[&str]) -> Vec<String> {
    let mut known: BTreeSet<String> = others.iter().map(|name| (*name).to_owned()).collect();
    collect(&Args::command(), &mut known);
    let all = all.into_iter().filter(|(name, value)| {
        name.starts_with(PREFIX) && !known.contains(name) && !is_of_a_service(name, value)
    });
    let problem = |(name, _): (String, String)| {
        let near = did_you_mean(&nearest(&name, known.iter().map(String::as_str)));
        format!("the environment variable {name} is no setting, and is ignored{near}")
    };
    all.map(problem).collect()
}

fn collect(command: &Command, known: &mut BTreeSet<String>) {
    let variables = command.get_arguments().filter_map(|arg| arg.get_env());
    known.extend(variables.map(|name| name.to_string_lossy().into_owned()));
    command.get_subcommands().for_each(|below| collect(below, known));
}

/// Whether kubelet sets the variable for a Service of the pod's namespace, like `BALLAST_SERVICE_HOST` for one with the name
/// `ballast`.
fn is_of_a_service(name: &str, value: &str) -> bool {
    let is_url = ["tcp://", "udp://", "sctp://"].iter().any(|scheme| value.starts_with(scheme));
    let is_of_port = ["_TCP", "_UDP", "_SCTP"].iter().any(|protocol| {
        let port = name.split_once("_PORT_").map(|(_, rest)| rest);
        port.is_some_and(|rest| rest.contains(protocol))
    });
    name.ends_with("_SERVICE_HOST")
        || name.ends_with("_SERVICE_PORT")
        || name.contains("_SERVICE_PORT_")
        || name.ends_with("_PORT") && is_url
        || is_of_port
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistyped_variable_is_named_with_the_nearest_setting() {
        let of = |name: &str| unknown([(name.to_owned(), "1".to_owned())], &["BALLAST_LOG"]);
        let problem = of("BALLAST_MAX_FLOW").join("");
        assert!(problem.starts_with("the environment variable BALLAST_MAX_FLOW is no setting"), "{problem}");
        assert!(problem.contains("did you mean BALLAST_MAX_FLOWS"), "{problem}");
        for name in ["BALLAST_MAX_FLOWS", "BALLAST_LOG", "BALLAST_NAMESPACE", "PATH", "OTHER_MAX_FLOW"] {
            assert_eq!(of(name), Vec::<String>::new(), "{name}");
        }
    }

    #[test]
    fn the_variables_of_a_service_are_no_settings() {
        let service = [
            ("BALLAST_SERVICE_HOST", "10.96.0.7"),
            ("BALLAST_SERVICE_PORT", "80"),
            ("BALLAST_METRICS_SERVICE_PORT_HTTP", "80"),
            ("BALLAST_PORT", "tcp://10.96.0.7:80"),
            ("BALLAST_PORT_80_TCP", "tcp://10.96.0.7:80"),
            ("BALLAST_PORT_80_TCP_ADDR", "10.96.0.7"),
        ];
        let all = service.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(unknown(all, &[]), Vec::<String>::new());
    }
}
