//! `ballast cleanup`: removes everything that is ours, and nothing else.

use std::fs;
use std::io;
use std::path::Path;

use super::bpf::Link;
use super::clsact;
use super::error::Error;
use super::hooks::Direction;
use super::links::{self, Cgroup};
use super::pins::{self, Paths};
use crate::host::devices;
use crate::host::netlink::Netlink;

/// What was removed, in words, and what could not be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cleanup {
    /// One line for each thing that is gone.
    pub removed: Vec<String>,
    /// One line for each thing that is still there, with the reason.
    pub failed: Vec<String>,
}

impl Cleanup {
    fn note(&mut self, what: impl Into<String>, result: Result<bool, impl std::fmt::Display>) {
        match result {
            Ok(true) => self.removed.push(what.into()),
            Ok(false) => {}
            Err(error) => self.failed.push(format!("{}: {error}", what.into())),
        }
    }
}

/// Removes links, filters, pins and directories, also when half of them is missing; a second call finds nothing.
///
/// Links are found by their pins; with `cgroup`, and on the devices of this network namespace, also without.
/// Fails when an agent runs on this bpffs.
pub fn cleanup(bpffs: &Path, cgroup: Option<&Path>) -> Result<Cleanup, Error> {
    super::require_capabilities()?;
    let paths = Paths::new(bpffs);
    let mut report = Cleanup::default();
    let _lock = match pins::lock(paths.root()) {
        Ok(Some(lock)) => Some(lock),
        Ok(None) => return Err(pins::in_use(bpffs)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(Error::file("lock", paths.root())(error)),
    };
    // First what translates, then what it reads.
    for name in pins::entries(&paths.links()).map_err(Error::file("list", &paths.links()))? {
        report.note(format!("link {name}"), links::release(&paths.links().join(&name)));
    }
    remove_strays(cgroup, &mut report)?;
    for device in devices::list().map_err(Error::file("list the devices in", Path::new("/sys/class/net")))? {
        match remove_filters(&paths, device.ifindex) {
            Ok(removed) => {
                report.removed.extend(removed.iter().map(|what| format!("{what} on {}", device.name)));
            }
            Err(error) => report.failed.push(error.to_string()),
        }
    }
    remove_tree(&paths, &mut report);
    Ok(report)
}

/// Links of ours that no pin tells of: the bpffs they were pinned in is gone.
fn remove_strays(cgroup: Option<&Path>, report: &mut Cleanup) -> Result<(), Error> {
    let ours = links::our_programs();
    if ours.is_empty() {
        return Ok(());
    }
    let mut strays: Vec<(String, Link)> = Vec::new();
    if let Some(path) = cgroup {
        strays.extend(links::on_cgroup(&Cgroup::open(path)?, &ours));
    }
    for device in devices::list().unwrap_or_default() {
        for direction in Direction::ALL {
            let links = links::on_device(device.ifindex, direction.attach_type(), &ours);
            let name = |link| (format!("{} on {}", direction.program(), device.name), link);
            strays.extend(links.into_iter().map(name));
        }
    }
    for (name, link) in strays {
        report.note(format!("unpinned link {name}"), link.detach().map(|()| true));
    }
    Ok(())
}

/// Removes our filters from a device, and its clsact qdisc when we made it and nobody else uses it; says what
/// was removed.
pub(super) fn remove_filters(paths: &Paths, ifindex: u32) -> Result<Vec<String>, Error> {
    let marker = paths.qdiscs().join(ifindex.to_string());
    let mut removed = Vec::new();
    let failed = |source| Error::Attach {
        program: "clsact",
        place: format!("device {} (removing)", super::device_name(ifindex)),
        source,
    };
    let mut netlink = Netlink::open().map_err(failed)?;
    let mut others = false;
    for direction in Direction::ALL {
        let filters = match clsact::filters(&mut netlink, ifindex, direction) {
            Ok(filters) => filters,
            // The device is gone, and its filters with it.
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Vec::new(),
            Err(error) => return Err(failed(error)),
        };
        for filter in filters {
            if filter.is_ours(direction) {
                clsact::remove(&mut netlink, ifindex, direction).map_err(failed)?;
                removed.push(format!("filter {}", direction.program()));
            } else {
                others = true;
            }
        }
    }
    if marker.is_dir() {
        if !others {
            match clsact::remove_qdisc(&mut netlink, ifindex) {
                Ok(()) => removed.push("clsact qdisc".to_owned()),
                // Somebody else removed it, or the device is gone.
                Err(error)
                    if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOENT | libc::ENODEV)) => {}
                Err(error) => return Err(failed(error)),
            }
        }
        fs::remove_dir(&marker).map_err(Error::file("remove", &marker))?;
    }
    Ok(removed)
}

/// Removes our directory. Symbolic links are removed, not followed.
fn remove_tree(paths: &Paths, report: &mut Cleanup) {
    let root = paths.root();
    for name in pins::entries(root).unwrap_or_default() {
        let path = root.join(&name);
        let result = match path.symlink_metadata() {
            Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(&path),
            _ => fs::remove_file(&path),
        };
        report.note(path.display().to_string(), result.map(|()| true));
    }
    match fs::remove_dir(root) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        result => report.note(root.display().to_string(), result.map(|()| true)),
    }
}
