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

use super::args::check::CheckArgs;
use super::show::{Answer, ShowError};
use facts::ApiAccess;

/// Runs `ballast check`. The caller has queried the API server, unless that check is skipped ([`ApiAccess::NotAsked`]).
pub fn run(args: &CheckArgs, api: ApiAccess, with_colour: bool) -> Result<Answer, ShowError> {
    let facts = gather::facts(args, api);
    let lines = judge::judge(&facts);
    let well = args.report_only || !lines.iter().any(judge::Line::fails);
    Ok(Answer { text: render::render(&lines, args.output, with_colour)?, well })
}
