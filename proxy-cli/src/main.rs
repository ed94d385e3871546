//! `kubectl-ballast`: the plugin of kubectl.

use std::process::ExitCode;

use proxy_cli::program;

fn main() -> ExitCode {
    program::set_up_resolver();
    match program::own_name().as_deref() {
        Some(program::COMPLETES) => program::complete(),
        _ => program::run(),
    }
}
