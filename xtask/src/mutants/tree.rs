//! A copy of the sources in which cargo-mutants makes its changes. The copy is always in the same folder, so that cargo
//! builds unchanged crates only once, and it is separate from the sources that developers edit.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::build::write_if_changed;
use crate::exec::Cmd;
use crate::workspace::Workspace;

use super::plan_crate;

/// The copy of the sources.
#[derive(Debug)]
pub struct Tree {
    root: PathBuf,
    /// A hash of all files of the crates `proxy-*`.
    pub hash: u64,
}

impl Tree {
    /// Updates the copy from the sources; equal files keep their modification times, so that cargo does not rebuild them.
    pub fn copy(workspace: &Workspace, root: &Path) -> Result<Self> {
        let listed = Cmd::new("git")
            .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
            .dir(workspace.root())
            .read()?;
        let mut names: BTreeSet<&str> = listed.split('\0').filter(|name| !name.is_empty()).collect();
        names.retain(|name| workspace.root().join(name).is_file());
        let mut together = 0;
        for name in &names {
            let bytes =
                fs::read(workspace.root().join(name)).with_context(|| format!("cannot read {name}"))?;
            if name.starts_with("proxy-") {
                together =
                    hash(&[together, hash(name.as_bytes()), hash(&bytes)].map(u64::to_le_bytes).concat());
            }
            if *name != "Cargo.toml" {
                write_if_changed(&root.join(name), &bytes)?;
            }
        }
        let small = plan_crate::files(workspace.root())?;
        for (name, text) in &small {
            write_if_changed(&root.join(name), text.as_bytes())?;
            names.insert(name);
        }
        remove_others(root, root, &names)?;
        Ok(Self { root: root.to_owned(), hash: together })
    }

    #[cfg(test)]
    pub fn at(root: &Path, hash: u64) -> Self {
        Self { root: root.to_owned(), hash }
    }

    /// Returns the folder of the copy.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns a hash of one file; 0 if the file cannot be read.
    pub fn hash_of(&self, file: &str) -> u64 {
        fs::read(self.root.join(file)).map_or(0, |bytes| hash(&bytes))
    }
}

fn remove_others(folder: &Path, root: &Path, names: &BTreeSet<&str>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.strip_prefix(root)?.to_str().unwrap_or_default();
        if path.is_dir() {
            remove_others(&path, root, names)?;
        } else if !names.contains(name) {
            fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
    }
    Ok(())
}

/// Returns the FNV-1a hash, which is the same with each version of the compiler.
pub fn hash(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}
