//! Keeps exactly one link of Ballast on each hook, and its pin. Finds programs of an earlier agent that are pinned in another
//! bpffs, as after a change of `--bpffs`.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::{fs, io};

use aya::maps::MapInfo;
use aya::programs::loaded_programs;
use proxy_common::map_names;

use super::bpf::{self, Hook, Link, LinkInfo, Rank};
use super::error::Error;
use super::hooks;
use super::pins::{self, Paths};
use crate::host::cgroup;
use crate::host::devices::{XdpMode, device_name};
use crate::host::netfilter::lock;

/// An open cgroup.
#[derive(Debug)]
pub(super) struct Cgroup {
    pub fd: OwnedFd,
    /// The kernel's id of the cgroup: the inode number of its directory.
    pub id: u64,
    pub path: PathBuf,
}

impl Cgroup {
    pub(super) fn open(path: &Path) -> Result<Self, Error> {
        use rustix::fs::{Mode, OFlags};
        /// `CGROUP2_SUPER_MAGIC` of `include/uapi/linux/magic.h`.
        const MAGIC: rustix::fs::FsWord = 0x6367_7270;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let failed = |errno: rustix::io::Errno| Error::file("open cgroup", path)(errno.into());
        let fd = rustix::fs::open(path, flags, Mode::empty()).map_err(failed)?;
        if rustix::fs::fstatfs(&fd).map_err(failed)?.f_type != MAGIC {
            return Err(Error::NotCgroup2 { path: path.to_owned() });
        }
        let id = rustix::fs::fstat(&fd).map_err(failed)?.st_ino;
        Ok(Self { fd, id, path: path.to_owned() })
    }

    /// Returns the name of its lock.
    pub(super) fn lock_name(&self) -> String {
        format!("ballast-cgroup-{}", self.id)
    }

    /// Whether the path leads to another cgroup now: this one was removed, and one of its name was created.
    pub(super) fn is_replaced(&self) -> bool {
        Self::open(&self.path).is_ok_and(|now| now.id != self.id)
    }
}

/// The place where a link is attached.
#[derive(Clone, Copy, Debug)]
pub(super) enum AttachPoint<'a> {
    Cgroup { cgroup: &'a Cgroup, attach_type: u32 },
    Device { ifindex: u32, attach_type: u32, rank: Rank },
    Xdp { ifindex: u32, mode: XdpMode },
}

impl AttachPoint<'_> {
    fn attach(self, program: BorrowedFd<'_>) -> io::Result<Link> {
        match self {
            Self::Cgroup { cgroup, attach_type } => Link::to_cgroup(program, cgroup.fd.as_fd(), attach_type),
            Self::Device { ifindex, attach_type, rank } => {
                Link::to_device(program, ifindex, attach_type, rank)
            }
            Self::Xdp { ifindex, mode } => Link::to_xdp(program, ifindex, mode),
        }
    }

    /// Whether the link is attached here. For a device, this asks for the links of the device: the index alone may be that
    /// of a device in another network namespace.
    pub(super) fn holds(self, link: &LinkInfo) -> bool {
        match self {
            Self::Cgroup { cgroup, attach_type } => link.hook == Hook::Cgroup { id: cgroup.id, attach_type },
            Self::Device { ifindex, attach_type, .. } => {
                bpf::tcx_links(ifindex, attach_type).is_ok_and(|links| links.contains(&link.id))
            }
            // The caller has compared the device's program with the link's.
            Self::Xdp { ifindex, .. } => link.hook == Hook::Xdp { ifindex },
        }
    }

    /// Whether a link that is attached here runs at the right place among other programs. True for a cgroup, which has no
    /// such order, and if the process may not query the order: the link then stays as it is.
    fn has_rank(self, link: u32) -> bool {
        let Self::Device { ifindex, attach_type, rank } = self else { return true };
        let Ok(links) = bpf::tcx_places(ifindex, attach_type) else { return true };
        let end = match rank {
            Rank::First => links.first(),
            Rank::Last => links.last(),
        };
        end == Some(&link)
    }

    fn describe(self) -> String {
        match self {
            Self::Cgroup { cgroup, .. } => format!("cgroup {}", cgroup.path.display()),
            Self::Device { ifindex, .. } | Self::Xdp { ifindex, .. } => {
                format!("device {}", device_name(ifindex))
            }
        }
    }
}

/// Returns the ids of loaded programs of Ballast, of whatever agent: the name is that of a hook, and all maps have names of
/// Ballast's maps. Empty if the process may not list programs (that takes `CAP_SYS_ADMIN`).
pub(super) fn our_programs() -> BTreeMap<u32, String> {
    let is_ours = |name: &str| {
        let known = [map_names::ALL, map_names::OPTIONAL, map_names::PRIVATE].concat().contains(&name);
        known || name.starts_with('.') || name.starts_with("AYA_LOG")
    };
    loaded_programs()
        .filter_map(Result::ok)
        .filter_map(|program| {
            let name = hooks::names().find(|name| program.name_as_str() == Some(name))?;
            let maps = program.map_ids().ok()??;
            let ours = maps
                .iter()
                .all(|id| MapInfo::from_id(*id).is_ok_and(|info| info.name_as_str().is_some_and(is_ours)));
            (ours && !maps.is_empty()).then(|| (program.id(), name.to_owned()))
        })
        .collect()
}

/// Returns Ballast's links to this cgroup, pinned or not, with the names of their programs.
pub(super) fn on_cgroup(cgroup: &Cgroup, ours: &BTreeMap<u32, String>) -> Vec<(String, Link)> {
    find(bpf::link_ids().map_while(Result::ok), ours)
        .filter(|(_, _, info)| matches!(info.hook, Hook::Cgroup { id, .. } if id == cgroup.id))
        .map(|(name, link, _)| (name, link))
        .collect()
}

/// Returns Ballast's links to a hook of a device of this network namespace, except the one pinned at `except`.
pub(super) fn on_device(ifindex: u32, attach_type: u32, except: Option<&Path>) -> Vec<Link> {
    let pinned = except.and_then(|pin| Link::pinned(pin).ok()??.info().ok()).map(|info| info.id);
    let mut ids = bpf::tcx_links(ifindex, attach_type).unwrap_or_default();
    ids.retain(|id| Some(*id) != pinned);
    if ids.is_empty() {
        // Searching all programs costs more than all other steps, and a node has hundreds of devices.
        return Vec::new();
    }
    find(ids.into_iter(), &our_programs()).map(|(_, link, _)| link).collect()
}

/// Returns Ballast's links to the XDP hook of a device of this network namespace; `program` is the one that the hook runs.
pub(super) fn of_xdp(ifindex: u32, program: u32) -> Vec<Link> {
    let ours = our_programs();
    if !ours.contains_key(&program) {
        return Vec::new();
    }
    let is_it = |info: &LinkInfo| info.hook == Hook::Xdp { ifindex } && info.program == program;
    find(bpf::link_ids().map_while(Result::ok), &ours)
        .filter(|(_, _, info)| is_it(info))
        .map(|(_, link, _)| link)
        .collect()
}

fn find(
    ids: impl Iterator<Item = u32>,
    ours: &BTreeMap<u32, String>,
) -> impl Iterator<Item = (String, Link, LinkInfo)> {
    ids.filter_map(|id| {
        let link = Link::by_id(id).ok()?;
        let info = link.info().ok()?;
        Some((ours.get(&info.program)?.clone(), link, info))
    })
}

/// How a program was attached to its hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttachOutcome {
    /// With a new link.
    Attached,
    /// In the pinned link of an earlier agent.
    Replaced,
    /// In a link of an earlier agent whose pin was lost.
    Adopted,
    /// With a new link in place of an earlier agent's link, which ran at another place among other programs.
    Moved,
}

/// Attaches `program` to a hook and pins its link. If an earlier agent left links there, one of them is updated in place,
/// and the others are removed.
pub(super) fn hold(
    pin: &Path,
    name: &'static str,
    place: AttachPoint<'_>,
    program: BorrowedFd<'_>,
    strays: &[Link],
) -> Result<AttachOutcome, Error> {
    let pinned = Link::pinned(pin).map_err(Error::file("open the link", pin))?;
    let is_here = |link: &&Link| link.info().is_ok_and(|info| place.holds(&info));
    let replaced = pinned.iter().filter(is_here).map(|link| (link, AttachOutcome::Replaced));
    let adopted = strays.iter().filter(is_here).map(|link| (link, AttachOutcome::Adopted));
    let taken = replaced.chain(adopted).find_map(|(link, outcome)| {
        let moved = take(link, place, program).ok()?;
        Some((link, moved, outcome))
    });
    let (kept, outcome) = match taken {
        Some((link, Some(fresh), _)) => {
            if let Err(error) = replace_pin(&fresh, pin) {
                // Without a pin, the new link ends with this process: keep the old one.
                let _ = fresh.detach();
                let _ = link.update(program);
                return Err(error);
            }
            (fresh.info(), AttachOutcome::Moved)
        }
        Some((link, None, outcome)) => {
            if outcome == AttachOutcome::Adopted {
                replace_pin(link, pin)?;
            }
            (link.info(), outcome)
        }
        None => {
            let failed = |source| Error::Attach { program: name, place: place.describe(), source };
            let link = place.attach(program).map_err(failed)?;
            replace_pin(&link, pin)?;
            (link.info(), AttachOutcome::Attached)
        }
    };
    let kept = kept.map_err(Error::file("read the link", pin))?.id;
    // The new link works: Ballast's other links are detached, so that nothing is translated twice.
    for link in strays.iter().chain(&pinned) {
        if link.info().is_ok_and(|info| info.id != kept) {
            // A link that is gone already cannot be detached, and need not be.
            let _ = link.detach();
        }
    }
    Ok(outcome)
}

/// Puts the program into the link of an earlier agent. If that link runs at the wrong place among other programs, puts it
/// into a new link, and returns the new link.
fn take(link: &Link, place: AttachPoint<'_>, program: BorrowedFd<'_>) -> io::Result<Option<Link>> {
    // A link at the wrong place is better than none.
    if !place.has_rank(link.info()?.id)
        && let Ok(fresh) = swap(link, place, program)
    {
        return Ok(Some(fresh));
    }
    link.update(program).map(|()| None)
}

/// Replaces a link by one at the right place, because a link cannot move. Attaches a second link there, with a program that
/// does nothing, and then both links change their programs: two system calls that do not wait. To attach one link and detach
/// the other would leave both active for an RCU grace period; the opposite order would leave none. A packet in between may
/// be translated by both, which at worst costs that packet; a packet that no program translates may be answered with a RST.
///
/// Fails with `AlreadyExists` if the link already has this program: no hook takes a program twice.
fn swap(link: &Link, place: AttachPoint<'_>, program: BorrowedFd<'_>) -> io::Result<Link> {
    let idle = bpf::pass_on()?;
    let fresh = place.attach(idle.as_fd())?;
    fresh.update(program)?;
    // If the old link does not take the idle program, the caller detaches it soon.
    let _ = link.update(idle.as_fd());
    Ok(fresh)
}

/// Pins `link` at `pin` in one step, and replaces any earlier pin.
fn replace_pin(link: &Link, pin: &Path) -> Result<(), Error> {
    let mut name = pin.file_name().unwrap_or_default().to_owned();
    name.push("_new");
    let fresh = pin.with_file_name(name);
    // An agent that died between the next two steps may have left this pin.
    remove(&fresh)?;
    link.pin(&fresh).map_err(Error::file("pin", &fresh))?;
    // A file cannot replace a folder.
    if pin.is_dir()
        && let Some(root) = pin.parent().and_then(Path::parent)
    {
        let moved = pins::refuse(root, pin)?;
        tracing::warn!(pin = %pin.display(), moved = %moved.display(), "not a link; moved out of the way");
    }
    fs::rename(&fresh, pin).map_err(Error::file("pin", pin))
}

/// Detaches and unpins a link; returns whether there was one.
pub(super) fn release(pin: &Path) -> Result<bool, Error> {
    let link = Link::pinned(pin).map_err(Error::file("open the link", pin))?;
    if let Some(link) = &link {
        // Fails if the cgroup or the device was removed, which detached the link.
        let _ = link.detach();
    }
    remove(pin)?;
    Ok(link.is_some())
}

fn remove(pin: &Path) -> Result<(), Error> {
    match fs::remove_file(pin) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Error::file("remove", pin)(error)),
        _ => Ok(()),
    }
}

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
    let cgroup = Cgroup::open(cgroup)?;
    if lock::is_held(&cgroup.lock_name()) {
        return Ok(None);
    }
    let pinned = pinned_links(bpffs).map_err(Error::file("list", &Paths::new(bpffs).links()))?;
    let mut programs = BTreeSet::new();
    let mut ids = BTreeSet::new();
    for (name, link) in on_cgroup(&cgroup, &our_programs()) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn cgroup_is_replaced_once_another_one_has_its_path() {
        let path = cgroup::find(None).unwrap().path.join(format!("ballast-replaced-{}", std::process::id()));
        fs::create_dir(&path).unwrap();
        let opened = Cgroup::open(&path).unwrap();
        assert!(!opened.is_replaced());
        fs::remove_dir(&path).unwrap();
        assert!(!opened.is_replaced(), "there is none that a restart could use");
        fs::create_dir(&path).unwrap();
        let is_replaced = opened.is_replaced();
        fs::remove_dir(&path).unwrap();
        assert!(is_replaced);
    }
}
