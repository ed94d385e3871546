//! A machine of a cluster: one process in its own namespaces (PID, mount, UTS, IPC, network), and all processes started
//! there. When this first process ends, the kernel ends all others, and removes the machine's mounts and network.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use fs_err::{self as fs, File};

use super::plan::{CONTROL, Node};
use super::workdir::{Workdir, remove_tree};
use crate::exec::Cmd;
use crate::host::{self, children_of, kill, names_in, start_of};
use crate::signal::wait_for;

/// Time limit for a machine to start, or for a program to end after a signal.
const PATIENCE: Duration = Duration::from_secs(10);

/// Time limit for the kernel to end a machine.
const ENDING: Duration = Duration::from_secs(30);

/// A machine of a cluster, running or not.
#[derive(Clone, Debug)]
pub struct Machine {
    workdir: Workdir,
    name: String,
}

impl Machine {
    /// Returns the machine of this name, whether or not it runs.
    pub fn of(workdir: &Workdir, name: impl Into<String>) -> Self {
        Self { workdir: workdir.clone(), name: name.into() }
    }

    /// Starts the machine, and waits until it runs.
    pub fn start(&self) -> Result<()> {
        let own = self.dir();
        fs::create_dir_all(&own)?;
        let us = std::env::current_exe().context("cannot find our own program")?;
        let mut command = Command::new("setsid");
        command
            .args([
                "unshare",
                "--fork",
                "--pid",
                "--mount",
                "--uts",
                "--ipc",
                "--net",
                "--propagation",
                "slave",
            ])
            .arg(us)
            .args(["test", "cluster", "init", &self.name, "--name", self.workdir.name()]);
        self.spawn(command, "init")?;
        wait_for(
            &format!("the machine {}; see {}", self.name, self.log("init").display()),
            PATIENCE,
            || Ok(self.pid()),
        )?;
        self.write_script()
    }

    /// Returns the PID of its first process, as seen on the host; `None` if the machine does not run.
    pub fn pid(&self) -> Option<u32> {
        Process::read(&self.record("init"))
    }

    /// Kills the machine: all its processes end at once.
    pub fn kill(&self) {
        if let Some(pid) = self.pid() {
            kill(pid.cast_signed(), libc::SIGKILL);
        }
    }

    /// Its directory, which contains the machine's `/var/lib` and `/var/log`.
    pub fn dir(&self) -> PathBuf {
        self.workdir.dir().join("machines").join(&self.name)
    }

    /// Its cgroup.
    pub fn cgroup(&self) -> Result<PathBuf> {
        self.workdir.cgroup(&self.name)
    }

    /// Path of the script that runs a command on the machine.
    pub fn script(&self) -> PathBuf {
        self.workdir.dir().join(&self.name)
    }

    /// Path of the log of one of its programs.
    pub fn log(&self, program: &str) -> PathBuf {
        self.workdir.logs().join(format!("{}-{program}.log", self.name))
    }

    /// Returns a command to run on the machine.
    pub fn command(&self, words: &[&str]) -> Cmd {
        Cmd::new(self.script()).args(words)
    }

    /// Starts a program that continues after this process has ended, and writes its output to its log.
    pub fn run(&self, program: &str, words: &[&str]) -> Result<()> {
        let mut command = Command::new("setsid");
        command.arg(self.script()).args(words);
        let pid = self.spawn(command, program)?;
        Process::of(pid)?.write(&self.record(program))
    }

    /// Whether a program that [`Machine::run`] started still runs.
    pub fn is_running(&self, program: &str) -> bool {
        Process::read(&self.record(program)).is_some()
    }

    /// Waits until `ask` returns an answer; an error if the program that has to make it true ends before.
    pub fn await_ready<T>(
        &self,
        program: &str,
        what: &str,
        limit: Duration,
        ask: impl Fn() -> Option<T>,
    ) -> Result<()> {
        let log = self.log(program);
        let ready = || {
            if !self.is_running(program) {
                bail!("{what} ended; its log is {}", log.display());
            }
            Ok(ask())
        };
        wait_for(&format!("{what}; its log is {}", log.display()), limit, ready).map(drop)
    }

    /// Returns the PID of such a program, as seen on the host.
    pub fn process(&self, program: &str) -> Option<u32> {
        // The recorded process is nsenter, which waits for the program, its only child.
        children_of(Process::read(&self.record(program))?).into_iter().next()
    }

    /// Ends a program with a signal, and with SIGKILL if it does not end.
    pub fn stop(&self, program: &str, signal: libc::c_int) -> Result<()> {
        for signal in [signal, libc::SIGKILL] {
            let Some(pid) = self.process(program) else { break };
            kill(pid.cast_signed(), signal);
            if has_ended(PATIENCE, || !self.is_running(program)) {
                break;
            }
        }
        if self.is_running(program) {
            bail!("{program} on {} does not end", self.name);
        }
        let _ = fs::remove_file(self.record(program));
        Ok(())
    }

    fn record(&self, program: &str) -> PathBuf {
        self.dir().join(format!("{program}.pid"))
    }

    fn spawn(&self, mut command: Command, program: &str) -> Result<u32> {
        let log = File::options().create(true).append(true).open(self.log(program))?.into_file();
        let both = log.try_clone()?;
        let child = command.stdin(Stdio::null()).stdout(log).stderr(both).spawn();
        let mut child = child.with_context(|| format!("cannot start {program} on {}", self.name))?;
        let pid = child.id();
        // Reap the child as long as we run, so that a zombie does not count as a running program.
        std::thread::spawn(move || child.wait());
        Ok(pid)
    }

    fn write_script(&self) -> Result<()> {
        let pid = self.pid().with_context(|| format!("{} does not run", self.name))?;
        let text = format!(
            "#!/bin/sh\n# Runs a command on {name}.\necho $$ > '{cgroup}/cgroup.procs' || exit\n\
             PATH='{bin}':/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:$PATH\n\
             KUBECONFIG='{config}'\nexport PATH KUBECONFIG\n\
             exec nsenter --target {pid} --pid --mount --uts --ipc --net -- \"$@\"\n",
            name = self.name,
            cgroup = inner_cgroup(&self.cgroup()?).display(),
            bin = self.workdir.programs().display(),
            config = self.workdir.kubeconfig("admin").display(),
        );
        let script = self.script();
        fs::write(&script, text)?;
        Ok(fs::set_permissions(&script, Permissions::from_mode(0o755))?)
    }
}

impl Workdir {
    /// Returns the machine beside the nodes, with the control plane.
    pub fn control(&self) -> Machine {
        Machine::of(self, CONTROL)
    }

    /// Returns the machine of a node.
    pub fn node(&self, node: Node) -> Machine {
        Machine::of(self, node.to_string())
    }

    /// Kills the cluster's machines and removes its cgroups and directory. Continues after a failure, and returns the first
    /// error.
    pub fn take_down(&self) -> Result<()> {
        let machines: Vec<_> = names_in(&self.dir().join("machines"));
        let running: Vec<_> = machines
            .iter()
            .filter_map(|name| Some((Machine::of(self, name), Machine::of(self, name).pid()?)))
            .collect();
        for (machine, _) in &running {
            machine.kill();
        }
        let mut failures = Vec::new();
        if !has_ended(ENDING, || running.iter().all(|(_, pid)| start_of(*pid).is_none())) {
            failures.push(anyhow!("the cluster's machines do not end"));
        }
        for cgroup in self.cgroups()? {
            failures.extend(remove_tree(&cgroup).err());
        }
        if failures.is_empty() && self.exists() {
            failures.extend(fs::remove_dir_all(self.dir()).err().map(Into::into));
        }
        failures.into_iter().next().map_or(Ok(()), Err)
    }
}

/// Waits until processes have ended; returns whether they have. Ctrl-C does not interrupt this: what was stopped has to be
/// started again or removed.
fn has_ended(limit: Duration, ended: impl Fn() -> bool) -> bool {
    let start = std::time::Instant::now();
    while !ended() {
        if start.elapsed() > limit {
            return false;
        }
        std::thread::sleep(Duration::from_millis(30));
    }
    true
}

/// A process, identified by its PID and start time because PIDs are reused.
struct Process {
    number: u32,
    start: String,
}

impl Process {
    fn of(number: u32) -> Result<Self> {
        let start = start_of(number).with_context(|| format!("process {number} has ended already"))?;
        Ok(Self { number, start })
    }

    fn write(&self, file: &Path) -> Result<()> {
        let unfinished = file.with_extension("unfinished");
        fs::write(&unfinished, format!("{} {}", self.number, self.start))?;
        Ok(fs::rename(&unfinished, file)?)
    }

    /// Returns the PID if that process still runs.
    fn read(file: &Path) -> Option<u32> {
        let text = fs::read_to_string(file).ok()?;
        let (number, start) = text.split_once(' ')?;
        let number = number.parse().ok()?;
        (start_of(number)? == start).then_some(number)
    }
}

/// Returns the cgroup of a machine's processes: on a host with cgroup v2 alone, a cgroup with children has no processes itself.
fn inner_cgroup(cgroup: &Path) -> PathBuf {
    cgroup.join("machine")
}

/// Runs in the first process of a machine: sets up the machine's own view of the file system, and then only reaps orphans,
/// until it is killed.
pub fn init(workdir: &Workdir, name: &str) -> Result<()> {
    let machine = Machine::of(workdir, name);
    // /proc is still that of the host, so this is our PID on the host.
    let us = fs::read_link("/proc/self")?;
    let us = Process::of(us.to_string_lossy().parse().context("/proc/self is no process")?)?;
    let groups = own_groups(&machine)?;
    Cmd::new("hostname").arg(name).run()?;
    let between = machine.dir().join("between");
    fs::create_dir_all(&between)?;
    for (group, root) in groups {
        // Unmount the hierarchy's original mount: runc takes the first mount that it finds.
        let (group, root, between) =
            (group.to_string_lossy(), root.to_string_lossy(), between.to_string_lossy());
        mount(&["--bind", &group, &between])?;
        Cmd::new("umount").args(["--lazy", &root]).run()?;
        mount(&["--bind", &between, &root])?;
        Cmd::new("umount").arg(&*between).run()?;
    }
    mount(&["--make-rshared", "/"])?;
    mount(&["-t", "proc", "proc", "/proc"])?;
    mount(&["-t", "tmpfs", "tmpfs", "/run"])?;
    for folder in ["lib", "log"] {
        let own = machine.dir().join(folder);
        fs::create_dir_all(&own)?;
        mount(&["--bind", &own.to_string_lossy(), &format!("/var/{folder}")])?;
    }
    mount(&["-t", "bpf", "bpf", "/sys/fs/bpf"])?;
    for (file, value) in SYSCTLS {
        let path = Path::new("/proc/sys/net").join(file);
        fs::write(&path, value)?;
    }
    // The last step: the parent process waits for this record.
    us.write(&machine.record("init"))?;
    loop {
        // SAFETY: waitpid accepts a null pointer for the status.
        let reaped = unsafe { libc::waitpid(-1, std::ptr::null_mut(), 0) };
        if reaped < 0 {
            // There is no child now; orphans may come later.
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

/// Creates a cgroup for the machine in each hierarchy, joins that of cgroup v2, and returns each with the hierarchy's root,
/// which it will hide.
fn own_groups(machine: &Machine) -> Result<Vec<(PathBuf, PathBuf)>> {
    let mut groups = Vec::new();
    for hierarchy in host::hierarchies()? {
        let group = machine.workdir.group_in(&hierarchy.root, &machine.name);
        let inner = if hierarchy.is_v2 { inner_cgroup(&group) } else { group.clone() };
        fs::create_dir_all(&inner)?;
        if hierarchy.is_v2 {
            fs::write(inner.join("cgroup.procs"), "0")
                .with_context(|| format!("cannot join {}", inner.display()))?;
        }
        // In a new cgroup of the cpuset controller, no CPU and no memory node is allowed, nor in its children.
        for file in ["cpuset.cpus", "cpuset.mems"] {
            if !hierarchy.is_v2 && group.join(file).exists() {
                fs::copy(hierarchy.root.join(file), group.join(file)).context("cannot set up cpuset")?;
            }
        }
        groups.push((group, hierarchy.root));
    }
    Ok(groups)
}

/// Sysctls of a machine: it forwards, and uses its addresses at once.
const SYSCTLS: [(&str, &str); 4] = [
    ("ipv4/ip_forward", "1"),
    ("ipv6/conf/all/forwarding", "1"),
    ("ipv6/conf/all/accept_dad", "0"),
    ("ipv6/conf/default/accept_dad", "0"),
];

fn mount(words: &[&str]) -> Result<()> {
    Cmd::new("mount").args(words).run()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_of_another_process_of_the_same_number_does_not_count() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("x.pid");
        assert_eq!(Process::read(&file), None);
        let us = Process::of(std::process::id()).unwrap();
        us.write(&file).unwrap();
        assert_eq!(Process::read(&file), Some(std::process::id()));
        Process { start: "1".into(), ..us }.write(&file).unwrap();
        assert_eq!(Process::read(&file), None);
    }
}
