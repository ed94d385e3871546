//! The origin of each setting of the agent: clap knows whether a value comes from a flag, a variable or the default.

use clap::parser::ValueSource;
use clap::{ArgMatches, Command};
use serde::{Deserialize, Serialize};

use super::sysdump::secrets::without_user;
use crate::config::kube_proxy::fields::{Effect, Modes, Setting};

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
/// Follows the origin of a setting that has no effect.
const IGNORED: &str = " (ignored)";

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
        if arg.is_hide_set() && from == DEFAULT {
            return None;
        }
        let raw = matches.get_raw(id).into_iter().flatten();
        let values: Vec<_> = raw.map(|value| without_user(&value.to_string_lossy())).collect();
        Some(Origin { name: name.to_owned(), value: values.join(","), from })
    });
    settings.collect()
}

/// Adds the fields of kube-proxy's file, the names of nested ones joined with a dot. A flag that the file replaces has the file's
/// value, and one in `ignored` says so, as a field does that Ballast does not use.
pub fn add_file(origins: &mut Vec<Origin>, path: &str, document: &serde_json::Value, ignored: &[String]) {
    for flag in ignored {
        let name = flag.trim_start_matches('-');
        let given = origins.iter_mut().find(|one| one.name == name && !one.is_default());
        given.into_iter().for_each(|one| one.from.push_str(IGNORED));
    }
    let text = |name: &str, default| document.get(name).and_then(|text| text.as_str()).unwrap_or(default);
    let modes = Modes { proxy: text("mode", "iptables"), local: text("detectLocalMode", ""), is_file: true };
    let mut of_file = Vec::new();
    fields(document, "", &mut |setting, value| {
        let is_ignored = matches!(setting.effect, Effect::Idle(_)) || setting.unused(modes).is_some();
        let from = format!("file {path}{}", if is_ignored { IGNORED } else { "" });
        let flag = origins.iter_mut().find(|one| one.name == setting.flag && one.is_default());
        if let Some(flag) = flag.filter(|_| !is_ignored) {
            (flag.value, flag.from) = (value.clone(), from.clone());
        }
        of_file.push(Origin { name: setting.field.to_owned(), value, from });
    });
    origins.extend(of_file);
}

/// Calls `each` for the fields that kube-proxy has; it ignores all others.
fn fields(value: &serde_json::Value, name: &str, each: &mut impl FnMut(&Setting, String)) {
    if let Some(setting) = Setting::of_field(name).filter(|_| !name.is_empty()) {
        let text = |one: &serde_json::Value| one.as_str().map_or_else(|| one.to_string(), without_user);
        return match value {
            serde_json::Value::Null => {}
            serde_json::Value::Array(all) => {
                each(setting, all.iter().map(text).collect::<Vec<_>>().join(","));
            }
            one => each(setting, text(one)),
        };
    }
    if let serde_json::Value::Object(all) = value {
        for (field, value) in all {
            let name = if name.is_empty() { field.clone() } else { format!("{name}.{field}") };
            fields(value, &name, each);
        }
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
    fn kube_proxy_file_replaces_flags() {
        let document = serde_json::json!({
            "kind": "KubeProxyConfiguration", "mode": "ipvs", "unknown": {"min": 1}, "portRange": "",
            "conntrack": {"min": 0, "maxPerCore": null}, "iptables": {"syncPeriod": "9s"}, "bindAddress": "10.0.0.1",
        });
        let mut found = settings(&["--cluster-cidr", "10.0.0.0/8"]);
        let flags = found.len();
        add_file(&mut found, "/etc/config", &document, &["--cluster-cidr".to_owned()]);
        let (found, of_file) = found.split_at(flags);
        let names: Vec<_> = of_file.iter().map(|one| (&*one.name, &*one.value, &*one.from)).collect();
        let (file, ignored) = ("file /etc/config", "file /etc/config (ignored)");
        let expected = [
            ("bindAddress", "10.0.0.1", file),
            ("conntrack.min", "0", file),
            ("iptables.syncPeriod", "9s", ignored),
            ("mode", "ipvs", file),
            ("portRange", "", ignored),
        ];
        assert_eq!(names, expected);
        let of = |name: &str| found.iter().find(|one| one.name == name).unwrap();
        assert_eq!((&*of("bind-address").value, &*of("bind-address").from), ("10.0.0.1", file));
        assert_eq!(of("cluster-cidr").from, "flag (ignored)");
        assert!(!found.iter().any(|one| one.name == "packet-hook"));
    }
}
