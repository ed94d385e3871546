//! The commit from which an image is built.

use crate::exec::Cmd;
use crate::workspace::Workspace;

/// Returns the time stamp of files and documents, in seconds since 1970: `$SOURCE_DATE_EPOCH`, or the last commit's time.
pub(super) fn source_date(workspace: &Workspace) -> u64 {
    let given = std::env::var("SOURCE_DATE_EPOCH").ok();
    let committed = || git(workspace, &["log", "-1", "--format=%ct"]);
    given.or_else(committed).and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// Returns the hash of the commit, or `None` outside of a git checkout.
pub(super) fn revision(workspace: &Workspace) -> Option<String> {
    git(workspace, &["rev-parse", "HEAD"]).map(|text| text.trim().to_owned())
}

fn git(workspace: &Workspace, args: &[&str]) -> Option<String> {
    Cmd::new("git").args(args).dir(workspace.root()).try_read()
}
