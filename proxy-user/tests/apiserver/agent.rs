//! The agent: the real program, with `ballast run --kubeconfig`.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context as _, Result, ensure};
use proxy_user::maps::view::View;
use rustix::mount::{UnmountFlags, unmount};
use tempfile::TempDir;

use proxy_testbed::kube::process::Process;
use proxy_testbed::kube::{PATIENCE, eventually};

/// Name of the agents' node.
pub const NODE: &str = "node-a";

static NUMBER: AtomicU32 = AtomicU32::new(0);

/// The bpffs and the cgroup of agents, which outlive each agent. Dropping the value removes them.
pub struct Node {
    folder: TempDir,
    cgroup: PathBuf,
    kubeconfig: PathBuf,
}

impl Node {
    /// Creates the cgroup and the folder for the bpffs.
    pub fn new(kubeconfig: &Path) -> Result<Self> {
        let root = proxy_user::host::cgroup::find(None)?.path;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let cgroup = root.join(format!("ballast-apiserver-{}-{number}", std::process::id()));
        fs::create_dir(&cgroup).with_context(|| format!("cannot make {}", cgroup.display()))?;
        let folder = tempfile::Builder::new().prefix("ballast-node-").tempdir();
        // From here on, dropping `node` cleans up.
        let node = Self { folder: folder?, cgroup, kubeconfig: kubeconfig.to_owned() };
        fs::create_dir(node.bpffs())?;
        Ok(node)
    }

    /// The bpffs, mounted when an agent has started.
    pub fn bpffs(&self) -> PathBuf {
        self.folder.path().join("bpf")
    }

    /// Path of the log of all agents of this node.
    pub fn log_file(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    /// Starts an agent.
    pub fn start(&self) -> Result<Agent> {
        self.start_with(&self.kubeconfig, &[])
    }

    /// Starts an agent with another kubeconfig and more flags.
    pub fn start_with(&self, kubeconfig: &Path, flags: &[&str]) -> Result<Agent> {
        let binary = std::env::var_os("BALLAST_BIN").unwrap_or_else(|| env!("CARGO_BIN_EXE_ballast").into());
        let mut command = Command::new(binary);
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("BALLAST_")) {
            command.env_remove(name);
        }
        command.arg("run").arg("--kubeconfig").arg(kubeconfig).arg("--bpffs").arg(self.bpffs());
        command.arg("--cgroup-root").arg(&self.cgroup).args(["--hostname-override", NODE]);
        // The agent logs events of watches at level debug. The cases do not use flows and sockets: small maps are enough.
        command.args(["--log-level", "debug", "--max-flows", "1024", "--max-sockets", "1024"]);
        // So frequent that audits run in each case: in all cases but one, they must not find a difference.
        command.args(["--api-audit-period", "5s"]);
        command.args(flags);
        let start = fs::metadata(self.log_file()).map_or(0, |file| file.len() as usize);
        let process = Process::start(&mut command, &self.log_file())?;
        Ok(Agent { process, log: self.log_file(), start })
    }

    /// Path of a file or folder that is removed with the node.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Sends an HTTP request to `address` from a process in the node's cgroup, and returns the reply, which may be empty.
    pub fn http_get(&self, address: SocketAddr) -> Result<String> {
        let (host, port) = (address.ip(), address.port());
        // An API server answers a request without TLS, and resets the connection: a failure of `cat` is ignored.
        let script = format!(
            "exec 3<>/dev/tcp/{host}/{port} && printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3 && {{ timeout 5 cat <&3 || true; }}"
        );
        let mut command = Command::new("bash");
        command.arg("-c").arg(script);
        let members = self.cgroup.join("cgroup.procs");
        // SAFETY: the closure opens and writes a file, which is permitted between fork and exec.
        unsafe { command.pre_exec(move || fs::write(&members, "0")) };
        let output = command.output().context("cannot run bash")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{address}: {}: {said}", output.status);
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// The maps, whether or not an agent runs.
    pub fn maps(&self) -> Result<View> {
        Ok(View::open(&self.bpffs())?)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        while unmount(self.bpffs(), UnmountFlags::DETACH).is_ok() {}
        let _ = fs::remove_dir(&self.cgroup);
    }
}

/// A running agent; it is killed when the value is dropped.
pub struct Agent {
    process: Process,
    log: PathBuf,
    /// Byte offset of this agent's first line in the log, which all agents of a node share.
    start: usize,
}

impl Agent {
    /// Returns what this agent has logged.
    pub fn log(&self) -> Result<String> {
        let all = fs::read(&self.log).context("cannot read the log")?;
        Ok(String::from_utf8_lossy(all.get(self.start..).unwrap_or_default()).into_owned())
    }

    /// Returns the number of lines of the agent's log that contain all of `words`.
    pub fn count(&self, words: &[&str]) -> Result<usize> {
        Ok(self.log()?.lines().filter(|line| words.iter().all(|word| line.contains(word))).count())
    }

    /// Waits until a line of the agent's log contains all of `words`.
    pub fn says(&mut self, words: &[&str]) -> Result<()> {
        eventually(PATIENCE, || {
            self.process.is_alive()?;
            ensure!(self.count(words)? > 0, "the agent has not said {words:?}");
            Ok(())
        })
    }

    /// Checks that the agent runs and answers `/livez` with status 200.
    pub fn is_well(&mut self) -> Result<()> {
        self.answers("/livez", "200")
    }

    /// Checks that the agent's health server answers with this status.
    pub fn answers(&mut self, path: &str, status: &str) -> Result<()> {
        let answer = self.ask(10_256, path)?;
        ensure!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{path}: {answer}");
        Ok(())
    }

    /// Returns the value of a sample of the agent's metrics; `name` includes the labels.
    pub fn metric(&mut self, name: &str) -> Result<String> {
        let all = self.ask(10_249, "/metrics")?;
        let value = all.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        Ok(value.with_context(|| format!("no {name} in {all}"))?.to_owned())
    }

    /// Returns the head and the body of a response of the agent's metrics server.
    pub fn asks(&mut self, path: &str) -> Result<(String, String)> {
        let answer = self.ask(10_249, path)?;
        let (head, body) = answer.split_once("\r\n\r\n").context("no HTTP")?;
        Ok((head.to_owned(), body.to_owned()))
    }

    fn ask(&mut self, port: u16, path: &str) -> Result<String> {
        self.process.is_alive()?;
        let stream = TcpStream::connect(("127.0.0.1", port));
        let mut stream = stream.with_context(|| format!("no server listens on port {port}"))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }

    /// Kills the agent with SIGKILL.
    pub fn kill(self) -> Result<()> {
        self.process.kill()
    }
}
