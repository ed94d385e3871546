//! `ballast config`: queries the agent for its settings and their origins.

use std::io::Write;

use serde::Deserialize;
use serde_json::Value;

use super::error::ShowError;
use super::probe::{agent_address, ask, parse};
use crate::cli::origins::Origin;
use proxy_cli::args::inspect::ConfigArgs;
use proxy_cli::output::{List, Row, SETTINGS, write_list};
use proxy_core::model::nearest::{did_you_mean, nearest};

/// The used part of `/configz`.
#[derive(Deserialize)]
struct Configz {
    #[serde(default)]
    origins: Vec<Origin>,
    /// The effective settings.
    #[serde(default)]
    ballast: Value,
}

impl Configz {
    /// Returns the settings; a setting that was not given gets its effective value.
    fn settings(mut self) -> Vec<Origin> {
        // Names of flags have dashes: those that a file replaces have the value in effect.
        let is_replaced = |origin: &Origin| origin.from.starts_with("file ") && origin.name.contains('-');
        for origin in self.origins.iter_mut().filter(|one| one.value.is_empty() || is_replaced(one)) {
            // Fields omit a prefix that the name of their object implies: `capacities.flows` is `--max-flows`.
            let short = ["max-", "flow-timeout-"].iter().find_map(|prefix| origin.name.strip_prefix(prefix));
            let mut names = [Some(&*origin.name), short].into_iter().flatten();
            let found = names.find_map(|name| field(&self.ballast, &camel(name)));
            origin.value = found.unwrap_or_else(|| std::mem::take(&mut origin.value));
        }
        self.origins
    }
}

/// Returns a name like `tcp-syn-sent` as a name of a JSON field.
fn camel(name: &str) -> String {
    let mut words = name.split('-');
    let first = words.next().unwrap_or_default().to_owned();
    words.fold(first, |text, word| {
        let (head, rest) = word.split_at_checked(1).unwrap_or((word, ""));
        text + &head.to_uppercase() + rest
    })
}

/// Returns the first field of this name at any depth, unless it is an object.
fn field(value: &Value, name: &str) -> Option<String> {
    let fields = value.as_object()?;
    match fields.get(name) {
        Some(Value::String(text)) => return Some(text.clone()),
        Some(number @ (Value::Number(_) | Value::Bool(_))) => return Some(number.to_string()),
        Some(Value::Array(all)) => {
            let texts = all.iter().map(|one| one.as_str().map_or_else(|| one.to_string(), str::to_owned));
            return Some(texts.collect::<Vec<_>>().join(","));
        }
        _ => {}
    }
    fields.values().find_map(|inner| field(inner, name))
}

/// Returns one row for each setting.
pub(in crate::cli) fn list(
    origins: &[Origin],
    names: &[String],
    defaults: bool,
) -> Result<List<Origin>, ShowError> {
    let is = |origin: &Origin, name: &String| origin.name == name.trim_start_matches('-');
    if let Some(asked) = names.iter().find(|name| !origins.iter().any(|origin| is(origin, name))) {
        let near = did_you_mean(&nearest(asked, origins.iter().map(|origin| &*origin.name)));
        return Err(ShowError::NoSetting { asked: asked.clone(), near });
    }
    let mut list =
        List::new("settings", SETTINGS, "All settings have their defaults; --defaults shows them.");
    let is_meant = |origin: &&Origin| {
        if names.is_empty() {
            defaults || !origin.is_default()
        } else {
            names.iter().any(|name| is(origin, name))
        }
    };
    for origin in origins.iter().filter(is_meant) {
        let value = if origin.value.is_empty() { "-".to_owned() } else { origin.value.clone() };
        let cells = vec![origin.name.clone(), value, origin.from.clone()];
        let (name, key) = (origin.name.clone(), format!("{} {}", origin.name, origin.from));
        list.push(Row { group: "settings", name, key, cells, value: origin.clone() });
    }
    Ok(list)
}

/// `ballast config`.
pub fn config(args: &ConfigArgs, out: &mut impl Write) -> Result<(), ShowError> {
    write_list(&args.list, out, || list(&settings(args)?, &args.names, args.defaults))
}

/// Queries the agent for its settings.
fn settings(args: &ConfigArgs) -> Result<Vec<Origin>, ShowError> {
    let address = agent_address(args.agent.metrics_bind_address)?;
    let (status, body) = ask(address, "/configz")?;
    let configz: Configz = parse(address, "/configz", status, &body)?;
    if configz.origins.is_empty() {
        return Err(ShowError::NoAgent(format!(
            "{address} does not report the source of its settings: the agent is older than this program"
        )));
    }
    Ok(configz.settings())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proxy_cli::args::list::Output;

    fn origins() -> Vec<Origin> {
        let one = |name: &str, value: &str, from: &str| Origin {
            name: name.to_owned(),
            value: value.to_owned(),
            from: from.to_owned(),
        };
        vec![one("max-flows", "4096", "variable BALLAST_MAX_FLOWS"), one("bpffs", "/sys/fs/bpf", "default")]
    }

    #[test]
    fn an_unset_setting_shows_its_default() {
        let one =
            |name: &str| Origin { name: name.to_owned(), value: String::new(), from: "default".to_owned() };
        let ballast = serde_json::json!({
            "capacities": {"flows": 131_072}, "flowTimeouts": {"tcpSynSent": 60}, "syncPeriod": 30.0,
            "network": {"serviceCidrs": ["10.96.0.0/16"]},
        });
        let names = ["max-flows", "flow-timeout-tcp-syn-sent", "sync-period", "service-cidrs", "kubeconfig"];
        let configz = Configz { origins: names.map(one).to_vec(), ballast };
        let values: Vec<String> = configz.settings().into_iter().map(|origin| origin.value).collect();
        assert_eq!(values, ["131072", "60", "30.0", "10.96.0.0/16", ""]);
    }

    #[test]
    fn given_and_named_settings_are_shown() {
        let text = |names: &[&str], all| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            Ok::<_, ShowError>(list(&origins(), &names, all)?.render(Output::Name, true)?)
        };
        assert_eq!(text(&[], false).unwrap(), "max-flows\n");
        assert_eq!(text(&[], true).unwrap(), "max-flows\nbpffs\n");
        assert_eq!(text(&["--bpffs"], false).unwrap(), "bpffs\n");
        let error = text(&["max-flow"], false).unwrap_err().to_string();
        assert!(error.contains("did you mean max-flows?"), "{error}");
    }
}
