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

use crate::kube::process::Process;
use crate::kube::{PATIENCE, eventually};

/// What the agents' node is called.
pub const NODE: &str = "node-a";

static NUMBER: AtomicU32 = AtomicU32::new(0);

/// The place where agents run: a bpffs and a cgroup, which outlive each of them. Dropping it removes all.
pub struct Node {
    folder: TempDir,
    cgroup: PathBuf,
    kubeconfig: PathBuf,
}

impl Node {
    /// Makes the place.
    pub fn new(kubeconfig: &Path) -> Result<Self> {
        let root = proxy_user::host::cgroup::find(None)?.path;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let cgroup = root.join(format!("ballast-apiserver-{}-{number}", std::process::id()));
        fs::create_dir(&cgroup).with_context(|| format!("cannot make {}", cgroup.display()))?;
        let folder = tempfile::Builder::new().prefix("ballast-node-").tempdir();
        // From here on dropping it cleans up.
        let node = Self { folder: folder?, cgroup, kubeconfig: kubeconfig.to_owned() };
        fs::create_dir(node.bpffs())?;
        Ok(node)
    }

    /// The bpffs, mounted when an agent has started.
    pub fn bpffs(&self) -> PathBuf {
        self.folder.path().join("bpf")
    }

    /// Where all agents of this node log.
    pub fn log_file(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    /// Starts an agent.
    pub fn start(&self) -> Result<Agent> {
        self.start_with(&self.kubeconfig, &[])
    }

    /// Starts one with another kubeconfig, and more flags.
    pub fn start_with(&self, kubeconfig: &Path, flags: &[&str]) -> Result<Agent> {
        let binary = std::env::var_os("BALLAST_BIN").unwrap_or_else(|| env!("CARGO_BIN_EXE_ballast").into());
        let mut command = Command::new(binary);
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("BALLAST_")) {
            command.env_remove(name);
        }
        command.arg("run").arg("--kubeconfig").arg(kubeconfig).arg("--bpffs").arg(self.bpffs());
        command.arg("--cgroup-root").arg(&self.cgroup).args(["--hostname-override", NODE]);
        // Debug, because what happens to a watch is not worth more in a log. Small maps of what is not used here.
        command.args(["--log-level", "debug", "--max-flows", "1024", "--max-sockets", "1024"]);
        // So often that each case meets audits: in what works, they find nothing.
        command.args(["--api-audit-period", "5s"]);
        command.args(flags);
        let start = fs::metadata(self.log_file()).map_or(0, |file| file.len() as usize);
        let process = Process::start(&mut command, &self.log_file())?;
        Ok(Agent { process, log: self.log_file(), start })
    }

    /// A file or folder that goes with the node.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A process of the node dials `address`, a TCP port, and says something: what comes back, an empty line included.
    pub fn dial(&self, address: SocketAddr) -> Result<String> {
        let (host, port) = (address.ip(), address.port());
        // An API server that is not spoken to by TLS answers, and resets the connection.
        let script = format!(
            "exec 3<>/dev/tcp/{host}/{port} && printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3 && {{ timeout 5 cat <&3 || true; }}"
        );
        let mut command = Command::new("bash");
        command.arg("-c").arg(script);
        let members = self.cgroup.join("cgroup.procs");
        // SAFETY: what the closure does, opening and writing a file, may be done between fork and exec.
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

/// A running agent; it is killed when this is dropped.
pub struct Agent {
    process: Process,
    log: PathBuf,
    /// Where its lines begin: all agents of a node share one file.
    start: usize,
}

impl Agent {
    /// What it has logged.
    pub fn log(&self) -> Result<String> {
        let all = fs::read(&self.log).context("cannot read the log")?;
        Ok(String::from_utf8_lossy(all.get(self.start..).unwrap_or_default()).into_owned())
    }

    /// How many lines of its log hold all of `words`.
    pub fn count(&self, words: &[&str]) -> Result<usize> {
        Ok(self.log()?.lines().filter(|line| words.iter().all(|word| line.contains(word))).count())
    }

    /// Waits until a line of its log holds all of `words`.
    pub fn says(&mut self, words: &[&str]) -> Result<()> {
        eventually(PATIENCE, || {
            self.process.is_alive()?;
            ensure!(self.count(words)? > 0, "the agent has not said {words:?}");
            Ok(())
        })
    }

    /// It runs, and says so when asked.
    pub fn is_well(&mut self) -> Result<()> {
        self.answers("/livez", "200")
    }

    /// Its health server answers with this status.
    pub fn answers(&mut self, path: &str, status: &str) -> Result<()> {
        let answer = self.ask(10_256, path)?;
        ensure!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{path}: {answer}");
        Ok(())
    }

    /// The value of a metric of one sample.
    pub fn metric(&mut self, name: &str) -> Result<String> {
        let all = self.ask(10_249, "/metrics")?;
        let value = all.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        Ok(value.with_context(|| format!("no {name} in {all}"))?.to_owned())
    }

    /// Head and body of what its metrics server answers.
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

    /// SIGKILL.
    pub fn kill(self) -> Result<()> {
        self.process.kill()
    }
}
