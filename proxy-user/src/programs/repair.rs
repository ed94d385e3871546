//! Restores what was removed externally: programs on their hooks, pins in the bpffs.
//!
//! A link exists as long as something refers to it, and only a pin refers to Ballast's links: removing the pin detaches the
//! program. A map still exists without its pin, because programs use it, but the commands and the next agent would not find
//! it.

use std::fmt;
use std::iter;
use std::sync::atomic::Ordering;

use super::bpf::Link;
use super::hooks::SOCKET_HOOKS;
use super::links::{self, AttachPoint};
use super::loaded::Programs;
use super::object::no_map;
use super::pins::Paths;
use super::program::program;
use super::repairs::{Repairs, pinned_map};
use super::{Error, pins};
use crate::maps::{segments, sys};

/// What was restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Repair {
    /// A socket program on its hook.
    SocketProgram(&'static str),
    /// The pin of a map, or the short path to it.
    MapPin(&'static str),
}

impl fmt::Display for Repair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SocketProgram(name) => write!(f, "program {name}"),
            Self::MapPin(name) => write!(f, "pin of map {name}"),
        }
    }
}

/// The result of a repair.
#[derive(Debug)]
pub struct Repaired {
    /// What was restored.
    pub done: Vec<Repair>,
    /// The first error of a socket program.
    pub sockets: Result<(), Error>,
    /// The first error of a pin.
    pub pins: Result<(), Error>,
}

impl Programs {
    /// Returns the counters of what [`Programs::repair`] and the manager of devices have restored.
    pub fn repairs(&self) -> std::sync::Arc<Repairs> {
        std::sync::Arc::clone(&self.repairs)
    }

    /// Restores missing socket programs and pins of maps, after [`Programs::attach_sockets`]; the manager of devices
    /// restores the packet programs. One part that fails does not stop the others.
    pub fn repair(&self) -> Repaired {
        let mut done = Vec::new();
        let (folders, calls) = (self.pins.restore(), self.repair_calls());
        let sockets = SOCKET_HOOKS.map(|(name, attach_type)| {
            if self.repair_socket_program(name, attach_type as u32)? {
                self.repairs.socket_programs.fetch_add(1, Ordering::Relaxed);
                done.push(Repair::SocketProgram(name));
            }
            Ok(())
        });
        let maps = self.repair_map_pins(&mut done);
        Repaired { sockets: sockets.into_iter().collect(), pins: folders.and(calls).and(maps), done }
    }

    fn repair_calls(&self) -> Result<(), Error> {
        let mut packets = iter::once(&self.ebpf).chain(self.headerless.get());
        packets.try_for_each(|packets| super::calls::keep(packets, self.pins.paths()))
    }

    /// Attaches a socket program unless it is on its hook; returns whether it did.
    fn repair_socket_program(&self, name: &'static str, attach_type: u32) -> Result<bool, Error> {
        let place = AttachPoint::Cgroup { cgroup: &self.cgroup, attach_type };
        let pin = self.pins.paths().links().join(name);
        let link = Link::pinned(&pin).map_err(Error::file("open the link", &pin))?;
        let link = link.map(|link| link.info()).transpose().map_err(Error::file("read the link", &pin))?;
        let loaded = self.info(name).map(|info| info.id());
        if link.is_some_and(|link| place.holds(&link) && Some(link.program) == loaded) {
            return Ok(false);
        }
        pins::make(&self.pins.paths().links())?;
        // A process may hold the link that lost its pin: a second link would translate twice.
        let strays = links::on_cgroup(&self.cgroup, &links::our_programs());
        let strays: Vec<_> = strays.into_iter().filter(|(of, _)| of == name).map(|(_, link)| link).collect();
        links::hold(&pin, name, place, program(&self.ebpf, name)?, &strays)?;
        Ok(true)
    }

    fn repair_map_pins(&self, done: &mut Vec<Repair>) -> Result<(), Error> {
        let maps = self.pins.paths().maps();
        pins::make(&maps)?;
        if segments::repair(&maps).map_err(Error::file("pin segments in", &maps))? > 0 {
            self.repairs.map_pins.fetch_add(1, Ordering::Relaxed);
            done.push(Repair::MapPin(segments::FOLDER));
        }
        for (name, id) in &self.map_ids {
            let is_there = is_pinned(self.pins.paths(), name, *id)?;
            if is_there && self.pins.points_here(name) {
                continue;
            }
            if !is_there {
                self.pin_again(name)?;
            }
            self.repairs.map_pins.fetch_add(1, Ordering::Relaxed);
            done.push(Repair::MapPin(name));
        }
        self.pins.make_current()
    }

    /// Pins the map that the programs use; an object in its place is moved away.
    fn pin_again(&self, name: &'static str) -> Result<(), Error> {
        let path = self.pins.paths().maps().join(name);
        pins::make(&self.pins.paths().maps())?;
        if path.symlink_metadata().is_ok() {
            self.pins.refuse(&path)?;
        }
        let map = self.ebpf.map(name).ok_or(Error::Incomplete { kind: "map", name })?;
        map.pin(&path).map_err(|error| Error::file("pin", &path)(std::io::Error::other(error)))
    }
}

/// Whether the map of this id is pinned under its name. `false`: nothing is, or certainly another object.
fn is_pinned(paths: &Paths, name: &'static str, id: u32) -> Result<bool, Error> {
    match pinned_map(paths, name) {
        Ok(found) => Ok(found == Some(id)),
        Err(error) => no_map(&paths.maps().join(name), sys::io_error(error)).map(|_| false),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proxy_common::map_names::CONFIG;
    use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

    use super::*;

    #[test]
    fn pin_that_cannot_be_opened_is_not_taken_for_another_object() {
        let bpffs = tempfile::tempdir().unwrap();
        let paths = Paths::new(bpffs.path());
        let path = paths.maps().join(CONFIG);
        assert!(!is_pinned(&paths, CONFIG, 1).unwrap(), "nothing is there");
        fs::create_dir_all(&path).unwrap();
        assert!(!is_pinned(&paths, CONFIG, 1).unwrap(), "a folder is no map");
        fs::remove_dir(&path).unwrap();
        fs::write(&path, "").unwrap();
        // Only in this thread: no descriptor is free.
        let (allow, fail) = (SeccompAction::Allow, SeccompAction::Errno(libc::EMFILE as u32));
        let calls = [(libc::SYS_bpf, Vec::new())].into();
        let filter = SeccompFilter::new(calls, allow, fail, std::env::consts::ARCH.try_into().unwrap());
        seccompiler::apply_filter(&BpfProgram::try_from(filter.unwrap()).unwrap()).unwrap();
        let error = is_pinned(&paths, CONFIG, 1).unwrap_err().to_string();
        assert!(error.contains("Too many open files") && error.contains("cannot open the map"), "{error}");
    }
}
