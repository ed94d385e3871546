//! The programs that packet programs tail-call, and the pins that keep them.
//!
//! The kernel empties an array of programs as soon as no descriptor and no pin of it is left, even while programs use it. So
//! each array is pinned before its programs are attached, and stays pinned until none of them is loaded any more.

use std::collections::BTreeSet;
use std::fs;

use aya::Ebpf;
use aya::maps::ProgramArray;
use aya::programs::SchedClassifier;
use proxy_common::map_names as names;

use super::bpf::Link;
use super::clsact;
use super::error::Error;
use super::hooks::Direction;
use super::pins::{self, Paths};
use super::program::{self, program_mut, refused};
use crate::host::netlink::Netlink;

/// Puts the programs of [`names::TAIL_CALL_TARGETS`], which are loaded, into the array.
pub(super) fn connect(ebpf: &mut Ebpf) -> Result<(), Error> {
    let mut programs = Vec::new();
    for name in names::TAIL_CALL_TARGETS {
        let program: &mut SchedClassifier = program_mut(ebpf, name)?;
        programs.push(program.fd().and_then(|fd| Ok(fd.try_clone()?)).map_err(refused(name))?);
    }
    let map = ebpf.map_mut(names::CALLS).ok_or(MISSING)?;
    let mut array = ProgramArray::try_from(map).map_err(failed)?;
    for (number, program) in (0..).zip(&programs) {
        array.set(number, program, 0).map_err(failed)?;
    }
    Ok(())
}

const MISSING: Error = Error::Incomplete { kind: "map", name: names::CALLS };

fn failed(source: aya::maps::MapError) -> Error {
    Error::Map { name: names::CALLS, source }
}

/// Pins the array if it is not pinned yet, so that its programs outlive the agent. The pin's name contains the ids of the
/// packet programs that use the array: a process that may not list the kernel's programs (that takes `CAP_SYS_ADMIN`) learns
/// from it whether one of them is attached.
pub(super) fn keep(ebpf: &Ebpf, paths: &Paths) -> Result<(), Error> {
    let users = users(ebpf);
    let aya::maps::Map::ProgramArray(map) = ebpf.map(names::CALLS).ok_or(MISSING)? else {
        return Err(MISSING);
    };
    pins::make(&paths.calls())?;
    let path = paths.calls().join(users.iter().map(u32::to_string).collect::<Vec<_>>().join("-"));
    if path.exists() {
        return Ok(());
    }
    map.pin(&path).map_err(|error| Error::File { action: "pin", path, source: std::io::Error::other(error) })
}

/// Returns the ids of those packet programs of an object that are attached to devices.
pub(super) fn users(ebpf: &Ebpf) -> BTreeSet<u32> {
    let id = |direction: Direction| program::info(ebpf, direction.program()).map(|info| info.id());
    Direction::ALL.into_iter().filter_map(id).collect()
}

/// Removes the pins of arrays that neither a program on a hook nor this agent's `own` programs use. If the attached programs
/// cannot be determined, all pins stay.
pub(super) fn release_unused(paths: &Paths, own: &BTreeSet<u32>) {
    let is_of = |name: &str, programs: &BTreeSet<u32>| {
        name.split('-').any(|id| id.parse().is_ok_and(|id| programs.contains(&id)))
    };
    let pinned = pins::entries(&paths.calls()).unwrap_or_default();
    let others: Vec<_> = pinned.iter().filter(|name| !is_of(name, own)).collect();
    if others.is_empty() {
        return;
    }
    let Some(attached) = attached(paths) else { return };
    for name in others.into_iter().filter(|name| !is_of(name, &attached)) {
        // A pin that stays costs only memory.
        let _ = fs::remove_file(paths.calls().join(name));
    }
}

/// Returns the ids of the programs on all hooks that pins and marks list; `None` if one of these cannot be read.
fn attached(paths: &Paths) -> Option<BTreeSet<u32>> {
    let mut programs = BTreeSet::new();
    for name in pins::entries(&paths.links()).ok()? {
        // Another process may remove the pin meanwhile, and its link with it.
        if let Some(link) = Link::pinned(&paths.links().join(name)).ok()? {
            programs.insert(link.info().ok()?.program);
        }
    }
    let marked = pins::entries(&paths.filters()).ok()?;
    let mut netlink = if marked.is_empty() { None } else { Some(Netlink::open().ok()?) };
    for (name, direction) in marked.iter().flat_map(|name| Direction::ALL.map(|direction| (name, direction)))
    {
        let (Some(netlink), Ok(ifindex)) = (netlink.as_mut(), name.parse()) else { continue };
        match clsact::filters(netlink, ifindex, direction) {
            Ok(filters) => programs.extend(filters.iter().filter_map(|filter| filter.program)),
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => {}
            Err(_) => return None,
        }
    }
    Some(programs)
}
