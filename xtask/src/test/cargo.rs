//! Calls of cargo for tests.

use crate::exec::Cmd;
use crate::workspace::Workspace;

/// Returns a call of `cargo test` for the whole workspace: another selection would unify features differently and build half
/// of the dependencies again. For an integration test, cargo also builds the binary.
pub(crate) fn cargo_test(workspace: &Workspace) -> Cmd {
    Cmd::cargo().args(["test", "--workspace"]).dir(workspace.root())
}
