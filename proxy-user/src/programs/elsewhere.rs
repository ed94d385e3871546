//! Programs of an earlier agent that are pinned in another bpffs, as after a change of `--bpffs`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::{fs, io};

use super::bpf::Link;
use super::error::Error;
use super::links::{self, Cgroup};
use super::pins::{self, Paths};
use crate::host::{cgroup, lock};

/// Programs of Ballast on a cgroup whose links are not pinned where an agent would look.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinnedElsewhere {
    /// The names of the programs.
    pub programs: BTreeSet<String>,
    /// The bpffs in which they are pinned, if it is mounted here.
    pub bpffs: Option<PathBuf>,
}

/// Finds the programs of Ballast on `cgroup` whose links are not pinned in `bpffs`: an agent there would leave them attached,
/// with maps that no agent keeps up to date. `None` if there are none, if an agent serves the cgroup, or if the process may
/// not list programs (that takes `CAP_SYS_ADMIN`).
pub fn pinned_elsewhere(bpffs: &Path, cgroup: &Path) -> Result<Option<PinnedElsewhere>, Error> {
    if lock::is_held(cgroup) {
        return Ok(None);
    }
    let pinned = pinned_links(bpffs).map_err(Error::file("list", &Paths::new(bpffs).links()))?;
    let mut programs = BTreeSet::new();
    let mut ids = BTreeSet::new();
    for (name, link) in links::on_cgroup(&Cgroup::open(cgroup)?, &links::our_programs()) {
        let Ok(info) = link.info() else { continue };
        if !pinned.contains(&info.id) {
            programs.insert(name);
            ids.insert(info.id);
        }
    }
    let holds = |place: &PathBuf| pinned_links(place).is_ok_and(|links| !links.is_disjoint(&ids));
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let bpffs = cgroup::mounts(&mounts, "bpf").into_iter().find(holds);
    Ok((!programs.is_empty()).then_some(PinnedElsewhere { programs, bpffs }))
}

/// Returns the ids of the links that are pinned in a bpffs.
fn pinned_links(bpffs: &Path) -> io::Result<BTreeSet<u32>> {
    let folder = Paths::new(bpffs).links();
    let id = |pin: String| Link::pinned(&folder.join(pin)).ok()??.info().ok().map(|info| info.id);
    Ok(pins::entries(&folder)?.into_iter().filter_map(id).collect())
}
