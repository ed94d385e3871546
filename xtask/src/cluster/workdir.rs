//! Place of one cluster on this machine: a directory and cgroups named after the cluster. Nothing else outlives its processes.

use std::fmt;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use fs_err as fs;
use fs_err::os::unix::fs::symlink;

use super::plan::Node;
use crate::exec::Cmd;
use crate::host::{self, names_in, remove_cgroup};
use crate::workspace::Workspace;

/// File in a cluster's directory that [`Workdir::settings`] reads.
pub const SETTINGS: &str = "settings";
const FOLDER: &str = "ballast-cluster-";
/// Free space that a cluster needs: twice what three nodes write (images, containers, logs, a copy of the agent).
const ROOM: u64 = 3 << 30;
/// Place of a cluster.
#[derive(Clone, Debug)]
pub struct Workdir {
    name: String,
    dir: PathBuf,
}

impl Workdir {
    /// Returns the place of a cluster of this name, whether or not it exists.
    pub fn of(name: &str) -> Result<Self> {
        if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit()) {
            bail!("a cluster's name is made of small letters and digits, not `{name}`");
        }
        Ok(Self { name: name.to_owned(), dir: std::env::temp_dir().join(format!("{FOLDER}{name}")) })
    }

    /// Creates its directories. Returns an error if the disk has too little free space.
    pub fn make(&self) -> Result<()> {
        let shown = || {
            let name = &self.name;
            format!(
                "cannot make {}: `cargo xtask test cluster down --name {name}` first?",
                self.dir.display()
            )
        };
        let parent = self.dir.parent().context("the cluster's folder has no parent")?;
        let disk =
            rustix::fs::statvfs(parent).with_context(|| format!("cannot look at {}", parent.display()))?;
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        if free < ROOM {
            bail!(
                "{} has {} MiB free, but a cluster needs up to {} MiB: free some space, or set TMPDIR to another folder",
                parent.display(),
                free >> 20,
                ROOM >> 20
            );
        }
        // The directory contains keys.
        std::fs::DirBuilder::new().mode(0o700).create(&self.dir).with_context(shown)?;
        for folder in [self.logs(), self.programs(), self.dir.join("machines"), self.dir.join("keys")] {
            fs::create_dir(&folder)?;
        }
        Ok(())
    }

    /// Returns a call of a script of `xtask/tools/cluster`.
    pub fn script(name: &str) -> Result<Cmd> {
        Ok(Cmd::new(Workspace::find()?.root().join("xtask/tools/cluster").join(name)))
    }

    /// The cluster's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Directory of its programs' logs.
    pub fn logs(&self) -> PathBuf {
        self.dir.join("logs")
    }

    /// Directory of its programs, under their plain names.
    pub fn programs(&self) -> PathBuf {
        self.dir.join("bin")
    }

    /// Links a program into that directory.
    pub fn link(&self, name: &str, program: impl AsRef<Path>) -> Result<()> {
        Ok(symlink(program, self.programs().join(name))?)
    }

    /// Path of a user's kubeconfig.
    pub fn kubeconfig(&self, user: &str) -> PathBuf {
        self.dir.join(format!("{user}.conf"))
    }

    /// Settings of the agents that differ from the defaults, each as `VARIABLE=VALUE`.
    pub fn settings(&self) -> Vec<String> {
        let text = fs::read_to_string(self.dir.join(SETTINGS)).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// Reads the value with which the cluster was created from the file of this name (`proxy`, `cni`).
    pub fn choice<T: clap::ValueEnum + fmt::Display>(&self, file: &str) -> Result<T> {
        let name = fs::read_to_string(self.dir.join(file)).context("the cluster was not finished")?;
        let value = T::value_variants().iter().find(|value| value.to_string() == name).cloned();
        value.with_context(|| format!("the cluster's file `{file}` has an unknown value: `{name}`"))
    }

    /// Path of a key file.
    pub fn key(&self, name: &str) -> PathBuf {
        self.dir.join("keys").join(name)
    }

    /// Writes a file in the directory, and returns its path.
    pub fn write(&self, name: &str, text: &str) -> Result<PathBuf> {
        let file = self.dir.join(name);
        fs::write(&file, text)?;
        Ok(file)
    }

    /// cgroup of a machine.
    pub fn cgroup(&self, machine: &str) -> Result<PathBuf> {
        Ok(self.group_in(&host::cgroup2()?, machine))
    }

    /// cgroup of a machine in any hierarchy.
    pub fn group_in(&self, root: &Path, machine: &str) -> PathBuf {
        root.join(format!("{FOLDER}{}-{machine}", self.name))
    }

    /// Returns the nodes that were created.
    pub fn nodes(&self) -> Vec<Node> {
        let names = names_in(&self.dir.join("machines"));
        names.iter().filter_map(|name| name.strip_prefix("node")?.parse().ok().map(Node)).collect()
    }

    /// Whether its directory exists.
    pub fn exists(&self) -> bool {
        self.dir.exists()
    }

    /// Lists what still exists.
    pub fn remains(&self) -> Result<Vec<String>> {
        let mut remains: Vec<_> = self.cgroups()?.iter().map(|path| path.display().to_string()).collect();
        if self.exists() {
            remains.push(self.dir.display().to_string());
        }
        Ok(remains)
    }

    /// Lists its cgroups.
    pub(super) fn cgroups(&self) -> Result<Vec<PathBuf>> {
        let prefix = format!("{FOLDER}{}-", self.name);
        let mut groups = Vec::new();
        for hierarchy in host::hierarchies()? {
            let names = names_in(&hierarchy.root).into_iter().filter(|name| name.starts_with(&prefix));
            groups.extend(names.map(|name| hierarchy.root.join(name)));
        }
        Ok(groups)
    }
}

/// Removes a cgroup and those inside: the cgroups of pods are in those of machines.
pub(super) fn remove_tree(group: &Path) -> Result<()> {
    for name in names_in(group) {
        let inner = group.join(name);
        if inner.is_dir() {
            remove_tree(&inner)?;
        }
    }
    remove_cgroup(group)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_lead_elsewhere() {
        for name in ["", "../etc", "a/b", "A", "a-b"] {
            assert!(Workdir::of(name).is_err(), "{name}");
        }
        assert_eq!(Workdir::of("e2e1").unwrap().name(), "e2e1");
    }
}
