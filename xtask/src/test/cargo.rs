//! Cargo, for tests.

use crate::exec::Cmd;
use crate::workspace::Workspace;

/// Every call for tests selects the whole workspace: another selection unifies features differently, and would
/// build half of the dependencies again. An integration test brings the binary with it.
pub(crate) fn cargo_test(workspace: &Workspace) -> Cmd {
    Cmd::cargo().args(["test", "--workspace"]).dir(workspace.root())
}
