//! The agent under test: the real program, started as `ballast run --manifests`.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use seccompiler::{BpfProgram, BpfProgramRef};
use serde_json::Value;

use crate::fixture::eventually;
use proxy_testbed::space::Space;

/// Timeout of a start or a stop. On an emulated machine, an old kernel's verifier alone takes most of a minute.
const PATIENCE: Duration = Duration::from_mins(5);

/// Returns the path of the program under test.
pub fn binary() -> PathBuf {
    std::env::var_os("BALLAST_BIN").map_or_else(|| env!("CARGO_BIN_EXE_ballast").into(), PathBuf::from)
}

/// Copies a program by another process. If this process opened the copy for writing, a child that another thread forks
/// at that moment would inherit the descriptor, and the copy could not be executed (`ETXTBSY`).
pub fn copy_program(from: &Path, to: &Path) -> Result<()> {
    let status = Command::new("cp").args([from, to]).status().context("cannot start cp")?;
    ensure!(status.success(), "cannot copy {} to {}", from.display(), to.display());
    Ok(())
}

/// The settings with which an agent is started.
#[derive(Clone, Debug)]
pub struct Setup {
    pub binary: PathBuf,
    pub bpffs: PathBuf,
    pub cgroup: PathBuf,
    /// The node's name.
    pub name: String,
    /// The folder of manifests; `None`: the flags say where the objects come from.
    pub manifests: Option<PathBuf>,
    pub log: PathBuf,
    /// Additional flags.
    pub flags: Vec<String>,
    /// The only capabilities that the agent may have, by number; `None`: all capabilities of this program.
    pub capabilities: Option<Vec<u32>>,
    /// Seccomp filter, which ends the agent at a system call that it does not allow.
    pub seccomp: Option<BpfProgram>,
}

/// A running agent.
pub struct Agent {
    child: Child,
    log: PathBuf,
    /// Offset in the log at which this agent's lines begin: all agents of a fixture share one file.
    start: usize,
}

impl Agent {
    pub fn start(space: &Space, setup: &Setup) -> Result<Self> {
        let mut command = space.command(&setup.binary);
        command.arg("run").arg("--bpffs").arg(&setup.bpffs);
        // The cases check which address the programs keep; those of netfilter's rule have the flag.
        command.env("BALLAST_MASQUERADE_EXTERNAL", "false");
        if let Some(manifests) = &setup.manifests {
            command.arg("--manifests").arg(manifests);
        }
        command
            .arg("--cgroup-root")
            .arg(&setup.cgroup)
            .args(["--hostname-override", &setup.name])
            .args(&setup.flags);
        Self::spawn(command, setup)
    }

    /// Starts the separate process that ends UDP sockets (`ballast end-udp-sockets`), with the capabilities of `setup`.
    pub fn start_beside(space: &Space, setup: &Setup) -> Result<Self> {
        let mut command = space.command(&setup.binary);
        command.arg("end-udp-sockets").arg("--bpffs").arg(&setup.bpffs);
        Self::spawn(command, setup)
    }

    fn spawn(mut command: Command, setup: &Setup) -> Result<Self> {
        let log =
            File::options().create(true).append(true).open(&setup.log).context("cannot open the log")?;
        let start = log.metadata()?.len() as usize;
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("BALLAST_")) {
            command.env_remove(name);
        }
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let parent = std::process::id();
        let (capabilities, seccomp) = (setup.capabilities.clone(), setup.seccomp.clone());
        // SAFETY: the closure only makes system calls, and reads lists that were made before the fork.
        unsafe {
            command.pre_exec(move || {
                die_with(parent)?;
                capabilities.as_deref().map_or(Ok(()), keep_only)?;
                seccomp.as_deref().map_or(Ok(()), confine)
            })
        };
        let child = command.spawn().with_context(|| format!("cannot start {}", setup.binary.display()))?;
        Ok(Self { child, log: setup.log.clone(), start })
    }

    /// Returns what this agent has logged.
    pub fn log(&self) -> Result<String> {
        let all = fs::read(&self.log).context("cannot read the log")?;
        Ok(String::from_utf8_lossy(all.get(self.start..).unwrap_or_default()).into_owned())
    }

    /// Waits until one line of its log contains all of `words`.
    pub fn says(&mut self, words: &[&str]) -> Result<()> {
        let ended = eventually(PATIENCE, || {
            // Check for the end before reading the log, so that the last lines still count.
            let ended = self.child.try_wait()?;
            let log = self.log()?;
            if log.lines().any(|line| words.iter().all(|word| line.contains(word))) {
                return Ok(None);
            }
            ended.map(Some).with_context(|| format!("no line with {words:?}"))
        })?;
        ended.map_or(Ok(()), |status| bail!("no line with {words:?}, and the agent has ended: {status}"))
    }

    /// Waits until the first sync is done and the programs are attached.
    pub fn is_ready(&mut self, devices: &[String]) -> Result<()> {
        self.says(&["first sync done"])?;
        self.is_attached(devices)
    }

    /// Waits until the socket programs are attached, and the packet programs on at least these devices.
    pub fn is_attached(&mut self, devices: &[String]) -> Result<()> {
        self.says(&["socket programs attached"])?;
        devices
            .iter()
            .try_for_each(|device| self.says(&["packet programs attached", &format!("\"{device}\"")]))
    }

    /// Waits until the agent ends by itself with an error; returns its log.
    pub fn fails(mut self) -> Result<String> {
        eventually(PATIENCE, || {
            let status = self.child.try_wait()?.context("the agent still runs")?;
            ensure!(!status.success(), "the agent ended without an error");
            Ok(())
        })?;
        self.log()
    }

    /// Returns how the agent ended, or what each of its threads waits for, by the kernel's stacks.
    pub fn state(&mut self) -> String {
        match self.child.try_wait() {
            Ok(None) => {}
            Ok(Some(status)) => return format!("ended: {status}"),
            Err(error) => return error.to_string(),
        }
        let tasks = PathBuf::from(format!("/proc/{}/task", self.child.id()));
        let threads = fs::read_dir(&tasks).into_iter().flatten().flatten();
        let read = |thread: &Path, file| fs::read_to_string(thread.join(file)).unwrap_or_default();
        let one = |thread: &Path| {
            let frames = read(thread, "stack");
            let frames: Vec<_> =
                frames.lines().take(4).filter_map(|line| line.split_whitespace().nth(1)).collect();
            let stat = read(thread, "stat");
            let state = stat.rsplit(") ").next().and_then(|rest| rest.get(..1)).unwrap_or_default();
            format!("{}: {state} {}", read(thread, "comm").trim(), frames.join(" < "))
        };
        let lines: Vec<_> = threads.map(|thread| one(&thread.path())).collect();
        format!("runs\n{}", lines.join("\n"))
    }

    /// Kills the agent with SIGKILL.
    pub fn kill(mut self) -> Result<()> {
        ensure!(self.child.try_wait()?.is_none(), "the agent has ended by itself");
        self.child.kill()?;
        let status = self.child.wait()?;
        ensure!(status.signal() == Some(libc::SIGKILL), "killed, but {status}");
        Ok(())
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // The agent may have ended before.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Makes the process die with its parent, even if the parent is killed.
fn die_with(parent: u32) -> std::io::Result<()> {
    // SAFETY: two system calls without pointers.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        if libc::getppid().cast_unsigned() != parent {
            return Err(std::io::Error::from_raw_os_error(libc::ESRCH));
        }
    }
    Ok(())
}

/// Drops all other capabilities from the bounding set, so that a program of root starts without them.
fn keep_only(capabilities: &[u32]) -> std::io::Result<()> {
    // A kernel has at most 64 capabilities, and refuses numbers that it does not know.
    for number in (0..64).filter(|number| !capabilities.contains(number)) {
        // SAFETY: a system call without pointers.
        if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, libc::c_ulong::from(number), 0, 0, 0) } != 0 {
            let error = std::io::Error::last_os_error();
            return if error.raw_os_error() == Some(libc::EINVAL) { Ok(()) } else { Err(error) };
        }
    }
    Ok(())
}

/// Returns status and body of the agent's answer to a request on the node's loopback.
pub fn get(space: &Space, port: u16, path: &str) -> Result<(u16, String)> {
    get_as(space, port, path, "*/*")
}

/// Like [`get`], with this value of the `Accept` header.
pub fn get_as(space: &Space, port: u16, path: &str, accept: &str) -> Result<(u16, String)> {
    get_from(space, (Ipv4Addr::LOCALHOST, port).into(), path, accept)
}

/// Like [`get_as`], from the server at this address.
pub fn get_from(space: &Space, server: SocketAddr, path: &str, accept: &str) -> Result<(u16, String)> {
    let answer = space.inside(|| {
        let mut stream = TcpStream::connect(server)?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: node\r\nAccept: {accept}\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    })?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no HTTP")?;
    Ok((head.split(' ').nth(1).context("no status")?.parse()?, body.to_owned()))
}

/// Installs a seccomp filter for all further system calls.
fn confine(filter: BpfProgramRef<'_>) -> std::io::Result<()> {
    seccompiler::apply_filter(filter).map_err(|_| std::io::Error::from_raw_os_error(libc::EINVAL))
}

/// Returns the profile that the project ships, as a filter that kills the process at a system call that is not allowed.
pub fn shipped_profile() -> Result<BpfProgram> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/security/seccomp.json");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let profile: Value = serde_json::from_str(&text)?;
    let mut calls = Vec::new();
    for rule in profile["syscalls"].as_array().context("a profile without calls")? {
        ensure!(rule["action"] == "SCMP_ACT_ALLOW", "{rule}");
        for name in rule["names"].as_array().context("a rule without names")? {
            calls.push(serde_json::json!({ "syscall": name }));
        }
    }
    let rules = serde_json::json!({
        "agent": { "mismatch_action": "kill_process", "match_action": "allow", "filter": calls }
    });
    let filters =
        seccompiler::compile_from_json(rules.to_string().as_bytes(), std::env::consts::ARCH.try_into()?)?;
    filters.into_values().next().context("no filter")
}

/// Runs another command of the program behind a seccomp filter, as `kubectl exec` does in a confined container.
pub fn confined(space: &Space, arguments: &[&str], bpffs: &Path, filter: &BpfProgram) -> Result<Output> {
    let mut command = space.command(binary());
    command.args(arguments).arg("--bpffs").arg(bpffs);
    let filter = filter.clone();
    // SAFETY: the closure only makes system calls, and reads a list that was made before the fork.
    unsafe { command.pre_exec(move || confine(&filter)) };
    command.output().context("cannot run ballast")
}

/// Runs another command of the program.
pub fn command(space: &Space, arguments: &[&str], bpffs: &Path) -> Result<Output> {
    let mut command = space.command(binary());
    command.args(arguments).arg("--bpffs").arg(bpffs);
    command.output().context("cannot run ballast")
}

/// Runs a command with `-o json`, and returns the document that it prints.
pub fn ask(space: &Space, arguments: &[&str], bpffs: &Path) -> Result<Value> {
    let arguments: Vec<_> = arguments.iter().copied().chain(["-o", "json"]).collect();
    let output = command(space, &arguments, bpffs)?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{arguments:?}: {error}");
    serde_json::from_slice(&output.stdout).with_context(|| format!("{arguments:?} is no JSON"))
}
