//! One demo's place on the machine: a folder, network namespaces and control groups, all named after the process
//! that made them. With that number everything can be removed, also after a crash.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::exec::Cmd;
use crate::host::{cgroup2, kill, names_in, remove_cgroup, start_of};

const FOLDER: &str = "ballast-demo-";
/// In a demo's folder, when it is meant to stay.
const KEPT: &str = "kept";
/// In a demo's folder: when its process started, in clock ticks since boot. Numbers of processes come again.
const STARTED: &str = "started";
/// How long processes have to end by themselves.
const GRACE: Duration = Duration::from_secs(2);

/// A demo's place.
#[derive(Clone, Debug)]
pub(super) struct Workdir {
    number: u32,
    dir: PathBuf,
    cgroups: PathBuf,
}

impl Workdir {
    /// A place for this process.
    pub(super) fn make() -> Result<Self> {
        let workdir = Self::of(std::process::id())?;
        fs::create_dir(&workdir.dir).with_context(|| {
            format!(
                "cannot make {}; if a demo was kept there: `cargo xtask demo --down`",
                workdir.dir.display()
            )
        })?;
        workdir.write(STARTED, &start_of(workdir.number).unwrap_or_default())?;
        Ok(workdir)
    }

    /// The places of demos that do not run any more; with `kept`, also those that were meant to stay.
    pub(super) fn left_over(kept: bool) -> Result<Vec<Self>> {
        let entries =
            fs::read_dir(std::env::temp_dir()).context("cannot read the folder of temporary files")?;
        let mut places = Vec::new();
        for entry in entries.filter_map(Result::ok) {
            let name = entry.file_name();
            let number =
                name.to_str().and_then(|name| name.strip_prefix(FOLDER)).and_then(|n| n.parse().ok());
            let Some(number) = number else { continue };
            // Anybody may make a folder of this name; only root can have made a demo.
            if entry.metadata().is_ok_and(|meta| meta.is_dir() && meta.uid() == 0) {
                let workdir = Self::of(number)?;
                if !workdir.is_run() && (kept || !workdir.dir.join(KEPT).exists()) {
                    places.push(workdir);
                }
            }
        }
        Ok(places)
    }

    fn of(number: u32) -> Result<Self> {
        let dir = std::env::temp_dir().join(format!("{FOLDER}{number}"));
        Ok(Self { number, dir, cgroups: cgroup2()? })
    }

    /// Whether the process that made it is still there.
    fn is_run(&self) -> bool {
        let started = fs::read_to_string(self.dir.join(STARTED)).unwrap_or_default();
        start_of(self.number).is_some_and(|start| start == started)
    }

    /// Lets it outlive this process.
    pub(super) fn keep(&self) -> Result<()> {
        // The mark of the process goes, so that `--down` finds it even from within a debugger's hold of us.
        self.write(KEPT, "")?;
        self.write(STARTED, "")
    }

    /// Writes a file of the folder.
    pub(super) fn write(&self, name: &str, text: &str) -> Result<()> {
        let file = self.dir.join(name);
        fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))
    }

    /// Its folder.
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// The network namespace of one of its machines.
    pub(super) fn namespace(&self, machine: &str) -> String {
        format!("ballast-{}-{machine}", self.number)
    }

    /// The control group of a node.
    pub(super) fn cgroup(&self, node: &str) -> PathBuf {
        self.cgroups.join(format!("{FOLDER}{}-{node}", self.number))
    }

    /// The BPF file system of a node.
    pub(super) fn bpffs(&self, node: &str) -> PathBuf {
        self.dir.join(format!("bpf-{node}"))
    }

    /// Ends its processes and removes all that is its own. Goes on after a failure, and tells the first.
    pub(super) fn take_down(&self) -> Result<()> {
        let namespaces = self.namespaces();
        let cgroups = self.cgroups_there();
        self.end_processes(&namespaces, &cgroups)?;
        let mut failures = Vec::new();
        for mount in self.mounts()? {
            // Pins hold programs for as long as a copy of the mount lives anywhere.
            let _ = fs::remove_dir_all(mount.join("ballast"));
            failures.extend(Cmd::new("umount").arg(&mount).read().err());
        }
        for namespace in &namespaces {
            failures.extend(Cmd::new("ip").args(["netns", "delete", namespace]).read().err());
        }
        for cgroup in &cgroups {
            failures.extend(remove_cgroup(cgroup).err());
        }
        if failures.is_empty() {
            fs::remove_dir_all(&self.dir).with_context(|| format!("cannot remove {}", self.dir.display()))?;
        }
        failures.into_iter().next().map_or(Ok(()), Err)
    }

    /// What is still there, in words.
    pub(super) fn remains(&self) -> Vec<String> {
        let mut remains = self.namespaces();
        remains.extend(self.cgroups_there().iter().map(|path| path.display().to_string()));
        if self.dir.exists() {
            remains.push(self.dir.display().to_string());
        }
        remains
    }

    fn namespaces(&self) -> Vec<String> {
        let prefix = self.namespace("");
        names_in(Path::new("/run/netns")).into_iter().filter(|name| name.starts_with(&prefix)).collect()
    }

    fn cgroups_there(&self) -> Vec<PathBuf> {
        let prefix = format!("{FOLDER}{}-", self.number);
        let names = names_in(&self.cgroups).into_iter().filter(|name| name.starts_with(&prefix));
        names.map(|name| self.cgroups.join(name)).collect()
    }

    fn mounts(&self) -> Result<Vec<PathBuf>> {
        let mounts = fs::read_to_string("/proc/self/mounts").context("cannot read the list of mounts")?;
        let points = mounts.lines().filter_map(|line| line.split(' ').nth(1)).map(PathBuf::from);
        Ok(points.filter(|point| point.starts_with(&self.dir)).collect())
    }

    /// A process in one of our namespaces or control groups was started for the demo.
    fn end_processes(&self, namespaces: &[String], cgroups: &[PathBuf]) -> Result<()> {
        let inhabitants = || {
            let listed = namespaces
                .iter()
                .filter_map(|namespace| Cmd::new("ip").args(["netns", "pids", namespace]).try_read())
                .chain(cgroups.iter().filter_map(|dir| fs::read_to_string(dir.join("cgroup.procs")).ok()));
            let numbers: Vec<String> = listed.collect();
            numbers
                .iter()
                .flat_map(|text| text.lines())
                .filter_map(|n| n.parse().ok())
                .collect::<BTreeSet<_>>()
        };
        for (signal, patience) in [(libc::SIGTERM, GRACE), (libc::SIGKILL, GRACE)] {
            for &process in &inhabitants() {
                kill(process, signal);
            }
            let start = Instant::now();
            while start.elapsed() < patience {
                if inhabitants().is_empty() {
                    return Ok(());
                }
                sleep(Duration::from_millis(20));
            }
        }
        bail!("processes of {} do not end: {:?}", self.dir.display(), inhabitants())
    }
}
