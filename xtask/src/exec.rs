//! Other programs: run them, read them, find them.

use std::ffi::OsStr;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

/// Where administrators' tools live; a plain user's `PATH` often leaves these out.
const ADMIN_DIRS: [&str; 3] = ["/usr/local/sbin", "/usr/sbin", "/sbin"];

/// A program to run, with its failures told as the command line that failed.
#[derive(Debug)]
pub struct Cmd {
    command: Command,
}

impl Cmd {
    /// A call of `program`, with our environment.
    pub fn new(program: impl AsRef<OsStr>) -> Self {
        Self { command: Command::new(program) }
    }

    /// The cargo that runs us.
    pub fn cargo() -> Self {
        Self::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
    }

    /// Adds one argument.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.command.arg(arg);
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args(mut self, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        self.command.args(args);
        self
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, key: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.command.env(key, value);
        self
    }

    /// Takes an environment variable away.
    #[must_use]
    pub fn without_env(mut self, key: impl AsRef<OsStr>) -> Self {
        self.command.env_remove(key);
        self
    }

    /// Runs it in a folder.
    #[must_use]
    pub fn dir(mut self, dir: impl AsRef<Path>) -> Self {
        self.command.current_dir(dir);
        self
    }

    /// Throws its output away.
    #[must_use]
    pub fn quiet(mut self) -> Self {
        self.command.stdout(Stdio::null()).stderr(Stdio::null());
        self
    }

    /// The kernel kills it when the thread that starts it ends, whatever ends us.
    #[must_use]
    pub fn dies_with_us(mut self) -> Self {
        let parent = std::process::id();
        // SAFETY: `die_with` makes system calls only, as what runs between fork and exec must.
        unsafe { self.command.pre_exec(move || die_with(parent)) };
        self
    }

    /// Runs it on our terminal; an exit status other than 0 is an error.
    pub fn run(mut self) -> Result<()> {
        let status = self.command.status().with_context(|| format!("cannot start `{}`", self.line()))?;
        if !status.success() {
            bail!("`{}` failed: {status}", self.line());
        }
        Ok(())
    }

    /// Like [`Cmd::run`], but kills it when it takes longer than `limit`.
    pub fn run_within(mut self, limit: Duration) -> Result<()> {
        let mut child = self.command.spawn().with_context(|| format!("cannot start `{}`", self.line()))?;
        match wait_within(&mut child, limit)? {
            Some(status) if status.success() => Ok(()),
            Some(status) => bail!("`{}` failed: {status}", self.line()),
            None => {
                child.kill().and_then(|()| child.wait()).context("cannot end a child process")?;
                bail!("`{}` took longer than {} s", self.line(), limit.as_secs())
            }
        }
    }

    /// Runs it to its end and returns what it printed; a failure carries what it said on standard error.
    pub fn read(mut self) -> Result<String> {
        let output = self
            .command
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("cannot start `{}`", self.line()))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            bail!("`{}` failed: {}: {}", self.line(), output.status, said.trim());
        }
        String::from_utf8(output.stdout).with_context(|| format!("`{}` printed no UTF-8", self.line()))
    }

    /// Like [`Cmd::read`], but its standard error goes to the terminal: progress, and what went wrong.
    pub fn read_aside(mut self) -> Result<String> {
        self.command.stderr(Stdio::inherit());
        self.read()
    }

    /// What it printed, or nothing if it could not start or failed.
    pub fn try_read(self) -> Option<String> {
        self.read().ok()
    }

    /// Whether it starts and succeeds; nothing is shown.
    pub fn succeeds(self) -> bool {
        self.quiet().run().is_ok()
    }

    /// The standard library's form, for callers that want pipes.
    pub fn into_std(self) -> Command {
        self.command
    }

    /// The command line as a person would write it.
    fn line(&self) -> String {
        let mut words = vec![self.command.get_program().to_string_lossy()];
        words.extend(self.command.get_args().map(OsStr::to_string_lossy));
        words.join(" ")
    }
}

/// Between fork and exec: the kernel is to end this process with its parent, also if that is gone already.
fn die_with(parent: u32) -> io::Result<()> {
    // SAFETY: system calls without pointers.
    let still = unsafe {
        if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
            return Err(io::Error::last_os_error());
        }
        libc::getppid()
    };
    if still.cast_unsigned() == parent { Ok(()) } else { Err(io::ErrorKind::NotConnected.into()) }
}

/// Waits for the child, at most `limit`; `None` if it still runs then.
pub fn wait_within(child: &mut Child, limit: Duration) -> Result<Option<std::process::ExitStatus>> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().context("cannot wait for a child process")? {
            return Ok(Some(status));
        }
        if start.elapsed() > limit {
            return Ok(None);
        }
        sleep(Duration::from_millis(50));
    }
}

/// The program's file, looked for in `PATH` and in the administrators' folders.
pub fn which(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    find_in(std::env::split_paths(&path).chain(ADMIN_DIRS.map(PathBuf::from)), program)
}

fn find_in(mut dirs: impl Iterator<Item = PathBuf>, program: &str) -> Option<PathBuf> {
    dirs.find_map(|dir| Some(dir.join(program)).filter(|file| is_executable(file)))
}

fn is_executable(file: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    file.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

/// Whether we are root.
#[must_use]
pub fn is_root() -> bool {
    // SAFETY: geteuid has no preconditions and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// Whether a continuous-integration system runs us (`CI=true`): there, a skip is a failure.
#[must_use]
pub fn in_ci() -> bool {
    std::env::var_os("CI").is_some_and(|value| value == "true")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_the_command_line_and_what_it_said() {
        let error = Cmd::new("sh").args(["-c", "echo nonsense >&2; exit 3"]).read().unwrap_err().to_string();
        assert!(error.contains("sh -c") && error.contains("nonsense") && error.contains('3'), "{error}");
    }

    #[test]
    fn a_program_that_hangs_is_killed() {
        let start = Instant::now();
        let error = Cmd::new("sleep").arg("60").run_within(Duration::from_millis(200)).unwrap_err();
        assert!(error.to_string().contains("longer"), "{error}");
        assert!(start.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn a_file_that_cannot_be_run_is_not_a_program() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("ls"), "text").unwrap();
        assert_eq!(find_in([dir.path().to_owned()].into_iter(), "ls"), None);
        assert_eq!(find_in([dir.path().to_owned(), "/bin".into()].into_iter(), "ls"), Some("/bin/ls".into()));
    }
}
