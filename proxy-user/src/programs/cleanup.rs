//! `ballast cleanup`: removes everything that belongs to Ballast, and nothing else.

use std::collections::BTreeSet;
use std::path::Path;
use std::{fs, io};

use super::bpf::Link;
use super::clsact;
use super::error::Error;
use super::hooks::{self, Direction, XDP};
use super::leave::leave_what_begins;
use super::links::{self, Cgroup};
use super::loaded::DEVICES_LOCK;
use super::pins::{self, Paths};
use crate::host::devices::{self, device_name};
use crate::host::lock;
use crate::host::netfilter::{lock as named_lock, masquerade};
use crate::host::netlink::Netlink;

/// What was removed, and what could not be removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cleanup {
    /// One line for each object that was removed.
    pub removed: Vec<String>,
    /// One line for each object that still exists, with the reason.
    pub left: Vec<String>,
}

impl Cleanup {
    fn note(&mut self, what: impl Into<String>, result: Result<bool, impl std::fmt::Display>) {
        match result {
            Ok(true) => self.removed.push(what.into()),
            Ok(false) => {}
            Err(error) => self.left.push(format!("{}: {error}", what.into())),
        }
    }
}

/// Work to do before and after the programs are detached.
pub trait DetachHooks {
    /// Whether another proxy serves new connections from now on. If so, the packet programs leave new connections to it
    /// before anything else is done, and serve only the connections that they know.
    fn has_successor(&mut self) -> bool {
        false
    }
    /// Called before the programs are detached; everything still exists, and no agent runs.
    fn before_detach(&mut self) {}
    /// Called after the programs were detached; their maps still exist.
    fn after_detach(&mut self) {}
}

/// Does nothing before and after.
impl DetachHooks for () {}

/// Removes links, filters, pins and directories, even if half of them are missing; a second call finds nothing.
///
/// Finds links by their pins; with `cgroup`, and on the devices of this network namespace, also without pins. Fails, and removes
/// nothing, if an agent runs on this bpffs, or if there is something to remove, but no bpffs.
pub fn cleanup(bpffs: &Path, cgroup: Option<&Path>) -> Result<Cleanup, Error> {
    cleanup_before(&mut (), bpffs, cgroup)
}

/// Does the same as [`cleanup`], with work to do before and after.
pub fn cleanup_before(
    detach_hooks: &mut dyn DetachHooks,
    bpffs: &Path,
    cgroup: Option<&Path>,
) -> Result<Cleanup, Error> {
    if pins::is_bpffs(bpffs) {
        work(bpffs, cgroup, Mode::Remove, detach_hooks)
    } else {
        dry_run(bpffs, cgroup)
    }
}

/// Returns what [`cleanup`] would remove, in the same words; removes nothing. Fails if there is anything, but no bpffs.
pub fn dry_run(bpffs: &Path, cgroup: Option<&Path>) -> Result<Cleanup, Error> {
    let found = work(bpffs, cgroup, Mode::DryRun, &mut ())?;
    if found.removed.is_empty() || pins::is_bpffs(bpffs) {
        return Ok(found);
    }
    Err(Error::NoBpffs { path: bpffs.to_owned(), found: found.removed })
}

/// Whether objects are removed or only found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Remove,
    DryRun,
}

impl Mode {
    /// Runs `action` if objects are to be removed; returns true on success, because the object was found.
    fn run<E>(self, action: impl FnOnce() -> Result<(), E>) -> Result<bool, E> {
        if self == Self::Remove { action().map(|()| true) } else { Ok(true) }
    }
}

fn work(
    bpffs: &Path,
    cgroup: Option<&Path>,
    mode: Mode,
    detach_hooks: &mut dyn DetachHooks,
) -> Result<Cleanup, Error> {
    super::privileges::require()?;
    let paths = Paths::new(bpffs);
    let mut report = Cleanup::default();
    let _lock = match lock::lock(paths.root()) {
        Ok(Some(lock)) => Some(lock),
        Ok(None) => return Err(pins::in_use(bpffs)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(Error::file("lock", paths.root())(error)),
    };
    let names = pins::entries(&paths.links()).map_err(Error::file("list", &paths.links()))?;
    // An agent with its pins on another bpffs may have adopted the links: without the pins here, those that it has not end by
    // themselves.
    let of_cgroup = cgroup.and_then(|path| Cgroup::open(path).ok()).map(|cgroup| cgroup.lock_name());
    let is_shared = of_cgroup.as_deref().into_iter().chain([DEVICES_LOCK]).any(named_lock::is_held);
    let (mut none, detach_hooks) = ((), detach_hooks);
    let detach_hooks: &mut dyn DetachHooks = if is_shared { &mut none } else { detach_hooks };
    // XDP is detached first: tc does all that XDP does, and XDP would not leave new connections to another proxy.
    let (xdp, names): (Vec<_>, Vec<_>) =
        names.into_iter().partition(|name| hooks::pinned_xdp(name).is_some());
    let mut pinned = BTreeSet::new();
    remove_links(&paths, &xdp, mode, is_shared, &mut pinned, &mut report);
    if mode == Mode::Remove
        && detach_hooks.has_successor()
        && let Err(error) = leave_what_begins(&paths)
    {
        tracing::warn!(%error, "connections that start now may retransmit their first packet");
    }
    // First the programs that translate, then the maps that they read.
    detach_hooks.before_detach();
    remove_links(&paths, &names, mode, is_shared, &mut pinned, &mut report);
    let strays = remove_strays(&paths, cgroup, mode, &pinned, &mut report);
    detach_hooks.after_detach();
    match strays {
        Ok(()) => remove_tree(&paths, mode, &mut report),
        // The directories of pins say what else there is on devices: the next call needs them.
        Err(error) => report.left.push(error.to_string()),
    }
    Ok(report)
}

/// Removes links by the names of their pins, and adds their ids to `pinned`; with `is_shared`, removes the pins only.
fn remove_links(
    paths: &Paths,
    names: &[String],
    mode: Mode,
    is_shared: bool,
    pinned: &mut BTreeSet<u32>,
    report: &mut Cleanup,
) {
    for name in names {
        let pin = paths.links().join(name);
        let link = Link::pinned(&pin).map_err(Error::file("open the link", &pin));
        pinned.extend(link.iter().flatten().filter_map(|link| link.info().ok()).map(|info| info.id));
        let result = link.and_then(|link| match mode {
            Mode::Remove if is_shared => {
                fs::remove_file(&pin).map(|()| true).map_err(Error::file("remove", &pin))
            }
            Mode::Remove => links::release(&pin),
            Mode::DryRun => Ok(link.is_some()),
        });
        report.note(format!("link {name}"), result);
    }
}

/// Removes links and filters of Ballast without a pin: the bpffs where they were pinned is gone. If another agent runs, they
/// belong to that agent.
fn remove_strays(
    paths: &Paths,
    cgroup: Option<&Path>,
    mode: Mode,
    pinned: &BTreeSet<u32>,
    report: &mut Cleanup,
) -> Result<(), Error> {
    // A pinned link has been removed by now, except in `Mode::DryRun`.
    let is_stray = |link: &Link| link.info().is_ok_and(|info| !pinned.contains(&info.id));
    if let Some(path) = cgroup {
        let cgroup = Cgroup::open(path)?;
        match named_lock::lock(&cgroup.lock_name()) {
            Some(_lock) => {
                let strays = links::on_cgroup(&cgroup, &links::our_programs());
                for (name, link) in strays.into_iter().filter(|(_, link)| is_stray(link)) {
                    report.note(format!("unpinned link {name}"), mode.run(|| link.detach()));
                }
            }
            None => report.left.push(format!("{}: another instance of Ballast uses it", path.display())),
        }
    }
    let Some(_lock) = named_lock::lock(DEVICES_LOCK) else {
        report.left.push("devices: another instance of Ballast uses them".to_owned());
        return Ok(());
    };
    let without = if mode == Mode::Remove { masquerade::remove() } else { masquerade::exists() };
    report.note("nftables table ballast", without);
    for device in
        devices::list().map_err(Error::file("list the devices in", Path::new("/proc/thread-self/ns/net")))?
    {
        for direction in Direction::ALL {
            let strays = links::on_device(device.ifindex, direction.attach_type(), None);
            for link in strays.into_iter().filter(is_stray) {
                let what = format!("unpinned link {} on {}", direction.program(), device.name);
                report.note(what, mode.run(|| link.detach()));
            }
        }
        for link in device.xdp.iter().flat_map(|xdp| links::of_xdp(device.ifindex, xdp.program)) {
            if is_stray(&link) {
                report.note(format!("unpinned link {XDP} on {}", device.name), mode.run(|| link.detach()));
            }
        }
        match filters_off(paths, device.ifindex, mode) {
            Ok(removed) => {
                report.removed.extend(removed.iter().map(|what| format!("{what} on {}", device.name)));
            }
            Err(error) => report.left.push(error.to_string()),
        }
    }
    Ok(())
}

/// Removes Ballast's filters from a device, and its clsact qdisc if Ballast created it and no other filter uses it; returns
/// what was removed.
pub(super) fn remove_filters(paths: &Paths, ifindex: u32) -> Result<Vec<String>, Error> {
    filters_off(paths, ifindex, Mode::Remove)
}

fn filters_off(paths: &Paths, ifindex: u32, mode: Mode) -> Result<Vec<String>, Error> {
    let number = ifindex.to_string();
    let (given, made) = (paths.filters().join(&number), paths.qdiscs().join(&number));
    let mut removed = Vec::new();
    let failed = |source| Error::Attach {
        program: "clsact",
        place: format!("device {} (removing)", device_name(ifindex)),
        source,
    };
    let mut netlink = Netlink::open().map_err(failed)?;
    let mut others = false;
    for direction in Direction::ALL {
        let filters = match clsact::filters(&mut netlink, ifindex, direction) {
            Ok(filters) => filters,
            // The device was removed, and its filters with it.
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Vec::new(),
            Err(error) => return Err(failed(error)),
        };
        for filter in filters {
            if filter.is_ours(direction) {
                mode.run(|| clsact::remove(&mut netlink, ifindex, direction, &filter)).map_err(failed)?;
                removed.push(format!("filter {}", direction.program()));
            } else {
                others = true;
            }
        }
    }
    if made.is_dir() {
        if !others {
            match mode.run(|| clsact::remove_qdisc(&mut netlink, ifindex)) {
                Ok(_) => removed.push("clsact qdisc".to_owned()),
                // It was removed externally, or the device is gone.
                Err(error)
                    if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOENT | libc::ENODEV)) => {}
                Err(error) => return Err(failed(error)),
            }
        }
        mode.run(|| fs::remove_dir(&made)).map_err(Error::file("remove", &made))?;
    }
    if given.is_dir() {
        mode.run(|| fs::remove_dir(&given)).map_err(Error::file("remove", &given))?;
    }
    Ok(removed)
}

/// Removes Ballast's directory. Symbolic links are removed, not followed.
fn remove_tree(paths: &Paths, mode: Mode, report: &mut Cleanup) {
    let root = paths.root();
    for name in pins::entries(root).unwrap_or_default() {
        let path = root.join(&name);
        let result = mode.run(|| match path.symlink_metadata() {
            Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(&path),
            _ => fs::remove_file(&path),
        });
        report.note(path.display().to_string(), result);
    }
    if root.exists() {
        report.note(root.display().to_string(), mode.run(|| fs::remove_dir(root)));
    }
}
