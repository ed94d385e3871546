//! Runs other programs, reads their output, and finds their files.

use std::ffi::OsStr;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};

/// Folders of administrators' tools, which an unprivileged user's `PATH` often lacks.
const ADMIN_DIRS: [&str; 3] = ["/usr/local/sbin", "/usr/sbin", "/sbin"];

/// A program to run; its errors contain the command line.
#[derive(Debug)]
pub struct Cmd {
    command: Command,
    /// Whether the standard error of a program whose output is read goes to the terminal.
    shows_errors: bool,
}

impl Cmd {
    /// Returns a call of `program`, which inherits our environment.
    pub fn new(program: impl AsRef<OsStr>) -> Self {
        Self { command: Command::new(program), shows_errors: false }
    }

    /// Returns a call of the cargo that runs this program.
    pub fn cargo() -> Self {
        Self::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
    }

    /// Adds one argument.
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.command.arg(arg);
        self
    }

    /// Adds arguments.
    pub fn args(mut self, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        self.command.args(args);
        self
    }

    /// Sets an environment variable.
    pub fn env(mut self, key: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.command.env(key, value);
        self
    }

    /// Removes an environment variable.
    pub fn without_env(mut self, key: impl AsRef<OsStr>) -> Self {
        self.command.env_remove(key);
        self
    }

    /// Sets the program's working directory.
    pub fn dir(mut self, dir: impl AsRef<Path>) -> Self {
        self.command.current_dir(dir);
        self
    }

    /// Discards the program's output.
    pub fn quiet(mut self) -> Self {
        self.command.stdout(Stdio::null()).stderr(Stdio::null());
        self
    }

    /// Runs the program on our terminal; an exit status other than 0 is an error.
    pub fn run(mut self) -> Result<()> {
        let status = self.command.status().with_context(|| format!("cannot start `{}`", self.line()))?;
        if !status.success() {
            bail!("`{}` failed: {status}", self.line());
        }
        Ok(())
    }

    /// Runs the program to its end and returns its standard output; an error contains its standard error.
    pub fn read(self) -> Result<String> {
        self.read_with_input("")
    }

    /// Like [`Cmd::read`], with a text as the program's standard input.
    pub fn read_with_input(mut self, text: &str) -> Result<String> {
        self.command
            .stdin(if text.is_empty() { Stdio::null() } else { Stdio::piped() })
            .stdout(Stdio::piped());
        if !self.shows_errors {
            self.command.stderr(Stdio::piped());
        }
        let mut child = self.command.spawn().with_context(|| format!("cannot start `{}`", self.line()))?;
        let written = child.stdin.take().map_or(Ok(()), |mut input| input.write_all(text.as_bytes()));
        let output =
            child.wait_with_output().with_context(|| format!("cannot wait for `{}`", self.line()))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            bail!("`{}` failed: {}: {}", self.line(), output.status, said.trim());
        }
        // Only now: a program that fails before it has read its input says why.
        written.with_context(|| format!("`{}` does not read its input", self.line()))?;
        String::from_utf8(output.stdout).with_context(|| format!("`{}` printed no UTF-8", self.line()))
    }

    /// Like [`Cmd::read`], but the program's standard error (progress and errors) goes to the terminal.
    pub fn read_with_stderr_shown(mut self) -> Result<String> {
        self.shows_errors = true;
        self.read()
    }

    /// Returns the program's standard output, or `None` if it could not start or failed.
    pub fn try_read(self) -> Option<String> {
        self.read().ok()
    }

    /// Whether the program starts and succeeds; its output is discarded.
    pub fn succeeds(self) -> bool {
        self.quiet().run().is_ok()
    }

    /// Returns the standard library's `Command`, for callers that need pipes.
    pub fn into_std(self) -> Command {
        self.command
    }

    /// Returns the program and its arguments, separated by spaces, for messages.
    fn line(&self) -> String {
        let mut words = vec![self.command.get_program().to_string_lossy()];
        words.extend(self.command.get_args().map(OsStr::to_string_lossy));
        words.join(" ")
    }
}

/// Returns the path of the program, from `PATH` or from the folders of administrators' tools.
pub fn which(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut dirs = std::env::split_paths(&path).chain(ADMIN_DIRS.map(PathBuf::from));
    dirs.find_map(|dir| Some(dir.join(program)).filter(|file| is_executable(file)))
}

fn is_executable(file: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    file.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

/// Whether we are root.
pub fn is_root() -> bool {
    // SAFETY: geteuid has no preconditions and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// Returns an error unless we are root, which the command of `cargo xtask` needs for this.
pub fn require_root(why: &str, command: &str) -> Result<()> {
    ensure!(is_root(), "needs root, to {why}: `sudo -E env \"PATH=$PATH\" cargo xtask {command}`");
    Ok(())
}

/// Whether a continuous-integration system runs this program (`CI=true`): there, a skipped check is a failure.
pub fn in_ci() -> bool {
    std::env::var_os("CI").is_some_and(|value| value == "true")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_ends_without_reading_its_input_reports_its_own_error() {
        let input = "x".repeat(1 << 20);
        let run = |script| Cmd::new("sh").args(["-c", script]).read_with_input(&input).unwrap_err();
        let error = format!("{:#}", run("echo broken >&2; exit 3"));
        assert!(error.contains("exit status: 3: broken"), "{error}");
        let error = format!("{:#}", run("exit 0"));
        assert!(error.contains("does not read its input: Broken pipe"), "{error}");
    }
}
