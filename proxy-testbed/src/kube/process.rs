//! Programs that run beside the test and end with it.

use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result, bail};

/// A child process; it is killed when the value is dropped, and when this process dies.
pub struct Process(Child);

impl Process {
    /// Starts the command, and appends its stdout and stderr to `log`.
    pub fn start(command: &mut Command, log: &Path) -> Result<Self> {
        let log = File::options().create(true).append(true).open(log).context("cannot open a log")?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let parent = std::process::id();
        // SAFETY: the closure makes two system calls.
        unsafe { command.pre_exec(move || die_with(parent)) };
        let child = command.spawn();
        Ok(Self(child.with_context(|| format!("cannot start {}", command.get_program().display()))?))
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.0.id()
    }

    /// Returns an error if the process has ended.
    pub fn is_alive(&mut self) -> Result<()> {
        match self.0.try_wait()? {
            Some(status) => bail!("process {} has ended: {status}", self.0.id()),
            None => Ok(()),
        }
    }

    /// Kills the process with SIGKILL; returns an error if it had already ended.
    pub fn kill(mut self) -> Result<()> {
        self.is_alive()?;
        self.0.kill()?;
        self.0.wait()?;
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Makes the kernel kill this process when its parent dies, even by SIGKILL; an error if the parent is already dead.
fn die_with(parent: u32) -> io::Result<()> {
    // SAFETY: two system calls without pointers.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        if libc::getppid().cast_unsigned() != parent {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
    }
    Ok(())
}
