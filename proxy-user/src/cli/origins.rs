//! The origin of each setting of the agent: clap knows whether a value comes from a flag, a variable or the default.

use clap::parser::ValueSource;
use clap::{ArgMatches, Command};
use serde::{Deserialize, Serialize};

/// A setting, and its origin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Name of the flag without dashes, or of the field in kube-proxy's file.
    pub name: String,
    /// The value as it was given; empty if none was given.
    pub value: String,
    /// `flag`, `variable NAME`, `file PATH`, `default`.
    pub from: String,
}

impl Origin {
    /// Whether the setting has its default value.
    pub fn is_default(&self) -> bool {
        self.from == DEFAULT
    }
}

const DEFAULT: &str = "default";
/// Text that replaces a secret.
const LEFT_OUT: &str = "(redacted)";

/// Returns the settings of a command with these arguments, in the order of its help.
pub fn of(command: &Command, matches: &ArgMatches) -> Vec<Origin> {
    let settings = command.get_arguments().filter_map(|arg| {
        let name = arg.get_long().filter(|long| !["help", "version"].contains(long))?;
        let id = arg.get_id().as_str();
        let from = match matches.value_source(id) {
            Some(ValueSource::CommandLine) => "flag".to_owned(),
            Some(ValueSource::EnvVariable) => {
                format!("variable {}", arg.get_env().unwrap_or_default().to_string_lossy())
            }
            _ => DEFAULT.to_owned(),
        };
        let raw = matches.get_raw(id).into_iter().flatten();
        let values: Vec<_> = raw.map(|value| without_secrets(&value.to_string_lossy())).collect();
        Some(Origin { name: name.to_owned(), value: values.join(","), from })
    });
    settings.collect()
}

/// Returns the fields of kube-proxy's file; the names of nested fields are joined with a dot.
pub fn of_file(path: &str, document: &serde_json::Value) -> Vec<Origin> {
    let mut origins = Vec::new();
    fields(document, String::new(), &mut |name, value| {
        origins.push(Origin { name, value, from: format!("file {path}") });
    });
    origins
}

fn fields(value: &serde_json::Value, name: String, each: &mut impl FnMut(String, String)) {
    match value {
        serde_json::Value::Object(all) => {
            for (field, value) in all {
                let name = if name.is_empty() { field.clone() } else { format!("{name}.{field}") };
                fields(value, name, each);
            }
        }
        serde_json::Value::String(text) => each(name, without_secrets(text)),
        serde_json::Value::Null => {}
        other => each(name, other.to_string()),
    }
}

/// Removes the user name and password in front of the host of a URL.
fn without_secrets(text: &str) -> String {
    let Some((scheme, rest)) = text.split_once("://") else { return text.to_owned() };
    let authority = rest.split('/').next().unwrap_or_default();
    match authority.rsplit_once('@') {
        Some((user, _)) => format!("{scheme}://{LEFT_OUT}{}", rest.get(user.len()..).unwrap_or_default()),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Args;
    use clap::CommandFactory as _;

    fn settings(words: &[&str]) -> Vec<Origin> {
        let command = Args::command();
        let run = command.find_subcommand("run").unwrap().clone();
        let matches = command.get_matches_from(["ballast", "run"].iter().chain(words));
        of(&run, matches.subcommand_matches("run").unwrap())
    }

    #[test]
    fn a_flag_and_a_default() {
        let settings = settings(&["--max-flows", "4096", "--master", "https://me:word@10.0.0.1:6443/x"]);
        let of = |name: &str| settings.iter().find(|one| one.name == name).unwrap();
        assert_eq!((&*of("max-flows").value, &*of("max-flows").from), ("4096", "flag"));
        assert_eq!(of("master").value, "https://(redacted)@10.0.0.1:6443/x");
        assert_eq!((&*of("bpffs").value, of("bpffs").is_default()), ("/sys/fs/bpf", true));
    }

    #[test]
    fn fields_of_a_file() {
        let document = serde_json::json!({"mode": "ipvs", "conntrack": {"min": 0, "none": null}});
        let found = of_file("/etc/config", &document);
        let names: Vec<_> = found.iter().map(|one| (&*one.name, &*one.value)).collect();
        assert_eq!(names, [("conntrack.min", "0"), ("mode", "ipvs")]);
        assert_eq!(found[0].from, "file /etc/config");
    }
}
