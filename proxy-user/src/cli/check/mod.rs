//! `ballast check`: checks whether a node is suitable for Ballast and, after the installation, whether Ballast works.
//!
//! [`gather`] collects the [`facts`]; [`judge`] is a pure function of them; [`render`] writes its lines. Each line has its own
//! heading in docs/troubleshooting.md.

pub mod facts;
pub mod gather;
pub mod judge;
mod metrics;
mod options;
mod render;

use super::show::{AgentState, AskError, CommandOutput, ShowError};
use facts::{ApiAccess, Installed, Others};
use proxy_cli::args::check::CheckArgs;
use proxy_cli::value::Listen;
use proxy_core::model::nearest::{did_you_mean, nearest};
use std::path::Path;

/// Gathers the facts of which `ballast status` reports the problems.
pub(in crate::cli) fn running(bpffs: &Path, listen: Option<Listen>) -> (Installed, Others) {
    (gather::installed(bpffs, listen), gather::kube_proxy())
}

/// Returns the version of the agent; `None` if it does not answer.
pub(in crate::cli) fn agent_version(agent: &AgentState) -> Result<Option<String>, AskError> {
    Ok(gather::metrics(agent)?.and_then(|metrics| metrics.version))
}

/// Runs `ballast check`. The caller has queried the API server, unless that check is skipped ([`ApiAccess::NotAsked`]).
pub fn run(args: &CheckArgs, api: ApiAccess, with_colour: bool) -> Result<CommandOutput, ShowError> {
    let asked = &args.checks;
    if let Some(asked) = asked.iter().find(|asked| !judge::CHECKS.contains(&&***asked)) {
        let near = did_you_mean(&nearest(asked, judge::CHECKS.iter().copied()));
        return Err(ShowError::NoCheck { asked: asked.clone(), near });
    }
    let mut lines = judge::judge(&gather::facts(args, api));
    lines.retain(|line| asked.is_empty() || asked.iter().any(|asked| asked == line.check));
    // Some lines need the agent's answer or its maps.
    let is_unknown = |check: &&&str| {
        asked.iter().any(|one| one == **check) && lines.iter().all(|line| line.check != **check)
    };
    let unknown: Vec<_> = judge::CHECKS.iter().filter(is_unknown).collect();
    lines.extend(unknown.into_iter().map(|check| {
        judge::CheckLine::warn(
            check,
            "not known: no agent answers, or its maps cannot be read",
            "see the lines `agent` and `maps` of `ballast check`",
        )
    }));
    let well = args.report_only || !lines.iter().any(judge::CheckLine::fails);
    Ok(CommandOutput { text: render::render(&lines, args.output, with_colour, !asked.is_empty())?, well })
}
