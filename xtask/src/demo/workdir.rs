//! Place of one demo on the machine: a directory, network namespaces and cgroups, all named after the PID of the process
//! that created them. With this number, everything can be removed, also after a crash.

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
/// File in a demo's directory, which exists if the cluster was kept.
const KEPT: &str = "kept";
/// File in a demo's directory: the start of its process, in clock ticks since boot. A PID alone may be reused.
const STARTED: &str = "started";
/// How long processes may take to end after a signal.
const GRACE: Duration = Duration::from_secs(2);

/// Place of a demo.
#[derive(Clone, Debug)]
pub(super) struct Workdir {
    number: u32,
    dir: PathBuf,
    cgroups: PathBuf,
}

impl Workdir {
    /// Creates the place of this process.
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

    /// Returns the places of demos that do not run any more; with `kept`, also those that were kept.
    pub(super) fn left_over(kept: bool) -> Result<Vec<Self>> {
        let entries =
            fs::read_dir(std::env::temp_dir()).context("cannot read the folder of temporary files")?;
        let mut places = Vec::new();
        for entry in entries.filter_map(Result::ok) {
            let name = entry.file_name();
            let number =
                name.to_str().and_then(|name| name.strip_prefix(FOLDER)).and_then(|n| n.parse().ok());
            let Some(number) = number else { continue };
            // Any user can create a directory of this name, but only root can have run a demo.
            if entry.metadata().is_ok_and(|meta| meta.is_dir() && meta.uid() == 0) {
                let workdir = Self::of(number)?;
                if !workdir.is_running() && (kept || !workdir.dir.join(KEPT).exists()) {
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

    /// Whether the process that created it still runs.
    fn is_running(&self) -> bool {
        let started = fs::read_to_string(self.dir.join(STARTED)).unwrap_or_default();
        start_of(self.number).is_some_and(|start| start == started)
    }

    /// Marks the cluster as kept, so that it stays after this process.
    pub(super) fn keep(&self) -> Result<()> {
        // Clear the start time, so that `--down` finds this place even while a debugger still holds this process.
        self.write(KEPT, "")?;
        self.write(STARTED, "")
    }

    /// Writes a file in the directory.
    pub(super) fn write(&self, name: &str, text: &str) -> Result<()> {
        let file = self.dir.join(name);
        fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))
    }

    /// Returns its directory.
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the name of a machine's netns.
    pub(super) fn namespace(&self, machine: &str) -> String {
        format!("ballast-{}-{machine}", self.number)
    }

    /// Returns the cgroup of a node.
    pub(super) fn cgroup(&self, node: &str) -> PathBuf {
        self.cgroups.join(format!("{FOLDER}{}-{node}", self.number))
    }

    /// Returns the mount point of a node's BPF file system.
    pub(super) fn bpffs(&self, node: &str) -> PathBuf {
        self.dir.join(format!("bpf-{node}"))
    }

    /// Ends the demo's processes and removes everything that it created. Continues if a removal fails, and returns the
    /// first error.
    pub(super) fn take_down(&self) -> Result<()> {
        let namespaces = self.namespaces();
        let cgroups = self.cgroups_there();
        self.end_processes(&namespaces, &cgroups)?;
        let mut failures = Vec::new();
        for mount in self.mounts()? {
            // Remove the pins first: they hold programs as long as any copy of the mount exists.
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

    /// Lists what still exists.
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

    /// Ends all processes in the demo's namespaces and cgroups: each of them was started for the demo.
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
