//! Flags of kube-proxy that the agent does not have as its own.

use std::ffi::OsString;

use clap::{Arg, ArgAction, ArgMatches, Command, FromArgMatches};

use super::fields::{Effect, SETTINGS, Setting};
use super::kind::{SettingKind, Value};
use super::{Given, Values};

/// Flags of kube-proxy that are typed fields of [`Options`](crate::config::Options); `version` is clap's.
pub const OWN: [&str; 19] = [
    "config",
    "write-config-to",
    "cleanup",
    "init-only",
    "version",
    "master",
    "kubeconfig",
    "hostname-override",
    "bind-address",
    "healthz-bind-address",
    "metrics-bind-address",
    "proxy-mode",
    "masquerade-all",
    "detect-local-mode",
    "pod-bridge-interface",
    "pod-interface-name-prefix",
    "cluster-cidr",
    "nodeport-addresses",
    "v",
];

/// Flags with a text, for which kube-proxy takes an empty one as none, and Ballast's parser does not.
const TEXTS: [&str; 6] = [
    "--bind-address",
    "--cluster-cidr",
    "--detect-local-mode",
    "--hostname-override",
    "--kubeconfig",
    "--nodeport-addresses",
];

/// Returns a command line of `ballast run` with flags as Ballast spells them: kube-proxy takes `_` for `-` in the names of
/// flags (`WordSepNormalizeFunc`), and empty texts.
pub fn as_spelled_here(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut args = args.peekable();
    let mut spelled = Vec::new();
    while let Some(arg) = args.next() {
        let Some(text) = arg.to_str().filter(|text| text.starts_with("--")) else {
            spelled.push(arg);
            continue;
        };
        let (name, value) = text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)));
        let name = name.replace('_', "-");
        let is_text = TEXTS.contains(&&*name);
        if is_text && value == Some("") {
            continue;
        }
        if is_text && value.is_none() && args.next_if(|next| next.is_empty()).is_some() {
            continue;
        }
        spelled.push(value.map_or_else(|| name.clone(), |value| format!("{name}={value}")).into());
    }
    spelled
}

fn others() -> impl Iterator<Item = &'static Setting> {
    SETTINGS.iter().filter(|setting| !setting.flag.is_empty() && !OWN.contains(&setting.flag))
}

/// Whether the values of a repeated flag add up.
const fn adds_up(kind: SettingKind) -> bool {
    matches!(kind, SettingKind::Cidrs | SettingKind::Gates)
}

/// Returns the value of a repeated flag.
fn together(before: Value, next: Value) -> Value {
    match (before, next) {
        (Value::List(before), Value::List(next)) => Value::List([before, next].concat()),
        (Value::Gates(mut before), Value::Gates(next)) => {
            before.extend(next);
            Value::Gates(before)
        }
        // What is wrong stays.
        (before @ Value::Unfit(_), _) => before,
        (_, next) => next,
    }
}

fn arg(setting: &'static Setting) -> Arg {
    let help = match setting.effect {
        Effect::Used("") => "Same as in kube-proxy.".to_owned(),
        Effect::Used(what) => format!("Same as in kube-proxy: {what}."),
        Effect::Idle(why) => format!("Accepted and ignored: {why}."),
    };
    let kind = setting.kind;
    let arg = Arg::new(setting.flag)
        .long(setting.flag)
        .action(if adds_up(kind) { ArgAction::Append } else { ArgAction::Set })
        .help(help)
        .help_heading("Other flags of kube-proxy")
        .hide_short_help(true)
        .allow_hyphen_values(true)
        .value_parser(move |text: &str| kind.of_text(text).or_else(|wrong| setting.unfit(text, wrong)));
    if kind.is_switch() {
        arg.num_args(0..=1).require_equals(true).default_missing_value("true")
    } else {
        arg.value_name("VALUE")
    }
}

impl clap::Args for Values {
    fn augment_args(command: Command) -> Command {
        command.args(others().map(arg))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Values {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut flags = Self::default();
        flags.update_from_arg_matches(matches)?;
        Ok(flags)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        for setting in others() {
            let values = matches.get_many::<Value>(setting.flag).into_iter().flatten().cloned();
            if let Some(value) = values.reduce(together) {
                let place = format!("--{}", setting.flag);
                self.insert(setting, Given { value, place });
            }
        }
        Ok(())
    }
}
