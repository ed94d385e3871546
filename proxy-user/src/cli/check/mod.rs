//! `ballast check`: whether a node is fit for Ballast, and, once it is installed, whether it works.
//!
//! [`facts`] are gathered at the edge ([`gather`]); [`judge`] is a pure function of them; [`render`] writes its lines. Each
//! line has a heading of its own in docs/troubleshooting.md.

pub mod facts;
pub mod gather;
pub mod judge;
mod metrics;
mod options;
mod render;

use super::args::check::CheckArgs;
use super::show::{Answer, ShowError};
use facts::ApiAccess;

/// `ballast check`. The caller has asked the API server, unless it was not to be asked ([`ApiAccess::NotAsked`]).
pub fn run(args: &CheckArgs, api: ApiAccess, with_colour: bool) -> Result<Answer, ShowError> {
    let facts = gather::facts(args, api);
    let lines = judge::judge(&facts);
    let well = args.report_only || !lines.iter().any(judge::Line::fails);
    Ok(Answer { text: render::render(&lines, args.output, with_colour)?, well })
}
