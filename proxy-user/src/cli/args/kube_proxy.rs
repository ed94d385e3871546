//! Flags of kube-proxy that the agent does not have as its own.

use clap::{Arg, ArgAction, ArgMatches, Command, FromArgMatches};

use crate::config::kube_proxy::fields::{Effect, SETTINGS, Setting};
use crate::config::kube_proxy::kind::Value;
use crate::config::kube_proxy::{Given, Values};

/// Flags of kube-proxy that are typed fields of `RunArgs`; `version` is clap's.
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

/// Values of the other flags.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KubeProxyFlags {
    /// Values by the name of the setting.
    pub values: Values,
}

fn others() -> impl Iterator<Item = &'static Setting> {
    SETTINGS.iter().filter(|setting| !setting.flag.is_empty() && !OWN.contains(&setting.flag))
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
        .action(ArgAction::Set)
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

impl clap::Args for KubeProxyFlags {
    fn augment_args(command: Command) -> Command {
        command.args(others().map(arg))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for KubeProxyFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut flags = Self::default();
        flags.update_from_arg_matches(matches)?;
        Ok(flags)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        for setting in others() {
            if let Some(value) = matches.get_one::<Value>(setting.flag) {
                let place = format!("--{}", setting.flag);
                self.values.insert(setting, Given { value: value.clone(), place });
            }
        }
        Ok(())
    }
}
