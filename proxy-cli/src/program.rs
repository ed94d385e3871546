//! The plugin as a program: its own, or `ballast` under the plugin's name.

use std::error::Error;
use std::io::{self, ErrorKind, Write as _, stderr, stdout};
use std::process::ExitCode;

use clap::Parser as _;

use crate::args::kubectl::KubectlArgs;
use crate::complete;
use crate::kubectl::{self, KubectlError, Outcome};
use proxy_core::model::problem::chain;

/// The name under which kubectl runs a program that completes the command line of the plugin.
pub const COMPLETES: &str = "kubectl_complete-ballast";

/// Lets glibc resolve names by files and DNS only. A static program loads the other modules of the host's nsswitch.conf together
/// with the host's glibc, and crashes if that is another version than its own. Must be called before any thread is started.
pub fn set_up_resolver() {
    #[cfg(all(target_env = "gnu", target_os = "linux", target_feature = "crt-static"))]
    {
        unsafe extern "C" {
            /// `nss.h`: replaces the line of a database in nsswitch.conf; returns 0.
            fn __nss_configure_lookup(
                database: *const std::ffi::c_char,
                services: *const std::ffi::c_char,
            ) -> std::ffi::c_int;
        }
        // SAFETY: both are C strings, which glibc copies; no other thread runs yet.
        unsafe { __nss_configure_lookup(c"hosts".as_ptr(), c"files dns".as_ptr()) };
    }
}

/// Returns the name under which the program was started.
pub fn own_name() -> Option<String> {
    let path = std::env::args_os().next().map(std::path::PathBuf::from)?;
    Some(path.file_stem()?.to_str()?.to_owned())
}

/// Runs the command line of the plugin.
pub fn run() -> ExitCode {
    ended(run_plugin(&KubectlArgs::parse()))
}

/// Completes the command line of the plugin.
pub fn complete() -> ExitCode {
    let candidates = complete::for_kubectl(std::env::args_os().skip(1));
    ended(candidates.and_then(|text| print(&text)).map(|()| ExitCode::SUCCESS))
}

fn run_plugin(args: &KubectlArgs) -> Result<ExitCode, KubectlError> {
    match kubectl::run(args, &mut stdout(), &mut stderr()) {
        // It is not a failure if the reader closes the pipe early (`| head`).
        Err(KubectlError::Write(error)) if error.kind() == ErrorKind::BrokenPipe => Ok(ExitCode::SUCCESS),
        Err(error) => Err(error),
        Ok(Outcome { stdout, stderr: messages, is_well }) => {
            print(&stdout)?;
            // If standard error is closed, there is no reader for messages.
            let _ = stderr().write_all(messages.as_bytes());
            Ok(if is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
    }
}

fn ended<E: Error>(result: Result<ExitCode, E>) -> ExitCode {
    result.unwrap_or_else(|error| {
        let _ = writeln!(stderr(), "ballast: {}", chain(&error));
        ExitCode::FAILURE
    })
}

/// Writes an answer; it is not a failure if the reader closes the pipe early (`| head`).
fn print(text: &str) -> io::Result<()> {
    match stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error),
        _ => Ok(()),
    }
}
