//! Makes a downgrade without interruption: the previous version knows nothing of this one, and is only started.

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use aya::maps::{MapData, MapInfo};
use proxy_common::map_names as names;

use super::front::{self, Hook, LAST_RUNS, Packets};
use super::share::share;
use crate::host::devices;
use crate::maps::migrate::{MADE, MigrateError, Migration, PREVIOUS, SHARED, Scope, write_previous_config};
use crate::programs::embedded::EMBEDDED;
use crate::programs::error::Error;
use crate::programs::hooks::Direction;
use crate::programs::object::Transition;
use crate::programs::pins::{self, Paths};
use crate::programs::{bpf, hooks, links, privileges};

/// Pause between two passes over the flows.
const PAUSE: Duration = Duration::from_millis(1);
/// One of this many passes reads every entry; the others read only entries where new flows begin.
const FULL: u64 = 50;

/// A downgrade: the maps of the previous version, made from those of this version.
pub struct Downgrade {
    paths: Paths,
    migration: Migration,
    /// Programs that run in front of the other version's programs, once these are on every hook.
    looks_up: Packets,
    /// Programs that run behind `complete` until then. If this process were killed, they would run alone: they serve, too.
    opens: Packets,
    /// Programs that run in front of `opens` until then.
    complete: Packets,
    /// The hooks of devices, with the programs that they had.
    hooks: Vec<(Hook, OwnedFd)>,
    /// Number of flows that were copied.
    pub flows: usize,
    /// Number of flows that the previous version cannot represent or has no room for.
    pub lost: usize,
}

/// Creates the maps of the previous version, so that its agent takes them over as if it had been restarted.
pub fn downgrade(bpffs: &Path) -> Result<Downgrade, Error> {
    privileges::require()?;
    let paths = Paths::new(bpffs);
    let (ours, previous) = (paths.maps(), paths.maps_of(PREVIOUS));
    // Refuse maps that an unfinished upgrade has left: the programs do not read them.
    if !is_current(&paths, &ours) {
        return Err(Error::NothingHere { path: ours });
    }
    let devices = devices::list().map_err(Error::file("list the devices of", Path::new("/sys/class/net")))?;
    let load = |transition| Packets::load(EMBEDDED, &paths, transition, &devices);
    let (looks_up, opens) = (load(Transition::LooksUp)?, load(Transition::Opens)?);
    let complete = load(Transition::Yields)?;
    remove(&previous)?;
    pins::make(&previous)?;
    for (old, new) in SHARED {
        share(&ours.join(new), &previous.join(old))?;
    }
    for (name, value_size, mapped) in MADE {
        make(&previous.join(name), &ours.join(name), (name, *value_size, *mapped))?;
    }
    let failed = |error: MigrateError| Error::File {
        action: "copy flows to",
        path: previous.clone(),
        source: std::io::Error::other(error),
    };
    write_previous_config(&previous, &ours).map_err(failed)?;
    let mut migration = Migration::open(&previous, &ours).map_err(failed)?;
    let first = migration.pass(Scope::All).back;
    let mut hooks = Vec::new();
    for hook in front::attach(&paths, &devices)? {
        let found =
            bpf::program_by_id(hook.found).map_err(Error::file("open the program of", &paths.links()))?;
        hooks.push((hook, found));
    }
    let (flows, lost) = (first.added, first.lost);
    let downgrade = Downgrade { paths, migration, looks_up, opens, complete, hooks, flows, lost };
    downgrade.stand_in_front()?;
    leave_to_tc(&downgrade.paths)?;
    Ok(downgrade)
}

/// Removes the XDP programs: the previous version has none, and would not maintain their maps. tc forwards the packets from
/// now on, in the same flows.
fn leave_to_tc(paths: &Paths) -> Result<(), Error> {
    for name in pins::entries(&paths.links()).map_err(Error::file("list", &paths.links()))? {
        if hooks::pinned_xdp(&name).is_some() {
            links::release(&paths.links().join(&name))?;
        }
    }
    Ok(())
}

/// Whether the short paths lead to the maps in `folder`.
fn is_current(paths: &Paths, folder: &Path) -> bool {
    let to = std::fs::read_link(paths.root().join(names::SERVICES));
    to.is_ok_and(|to| paths.root().join(to) == folder.join(names::SERVICES))
}

/// Creates an array with as many entries as the map `ours`, and pins it.
fn make(path: &Path, ours: &Path, (name, size, mapped): (&'static str, u32, bool)) -> Result<(), Error> {
    let failed = |source| Error::Map { name, source };
    let length = MapInfo::from_pin(ours).map_err(failed)?.max_entries();
    let made = bpf::make_array(name, size, length, mapped).map_err(Error::file("create the map", path))?;
    let pinned = MapData::from_fd(made).map_err(failed)?.pin(path);
    pinned.map_err(|error| Error::File {
        action: "pin",
        path: path.to_owned(),
        source: std::io::Error::other(error),
    })
}

fn remove(folder: &Path) -> Result<(), Error> {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::file("remove", folder)(error))
        }
        _ => Ok(()),
    }
}

impl Downgrade {
    /// Continues to copy changes until the previous version's programs have replaced this version's, at most for `limit`.
    /// Returns whether they have.
    pub fn follow(mut self, limit: Duration) -> Result<bool, Error> {
        let end = Instant::now() + limit;
        let previous = self.paths.maps_of(PREVIOUS);
        let mut round = 0u64;
        while !(is_current(&self.paths, &previous) && self.is_taken_over()) {
            // This version's agent, if it is started again, removes the maps that were created.
            if !previous.exists() || Instant::now() >= end {
                self.step_back()?;
                return Ok(false);
            }
            self.migration.pass(if round.is_multiple_of(FULL) { Scope::All } else { Scope::Hot });
            round += 1;
            sleep(PAUSE);
        }
        // If this version's agent still ran, it has attached XDP again.
        leave_to_tc(&self.paths)?;
        // The previous version has no such programs, and would keep their links for ever.
        for later in [hooks::SOCKET_RELEASE, hooks::SOCKET_OUTCOME] {
            links::release(&self.paths.links().join(later))?;
        }
        // The other version's programs are on every hook: now they open flows, and this version's programs only look up
        // flows. Egress comes first: there, this version's programs regard packets that the other version translated as
        // packets of the node itself. While both versions open flows, they may choose the same source port, but only until
        // the other table has the flow.
        for direction in [Direction::Egress, Direction::Ingress] {
            for (hook, _) in self.hooks.iter().filter(|(hook, _)| hook.direction == direction) {
                self.migration.pass(Scope::Hot);
                hook.set_front(self.looks_up.program(hook)?);
            }
        }
        self.migration.pass(Scope::Hot);
        sleep(LAST_RUNS);
        self.migration.pass(Scope::All);
        // The other version's programs know all flows that this version's programs know.
        for (hook, _) in &self.hooks {
            hook.remove_front();
        }
        self.migration.pass(Scope::All);
        Ok(true)
    }

    /// Puts this version's programs in front, and behind them programs that the other agent can replace hook by hook. The
    /// other version's programs then see the packets that those in front leave, and open no flows.
    fn stand_in_front(&self) -> Result<(), Error> {
        for (hook, found) in &self.hooks {
            // The programs behind do not regard a packet that those in front have translated as one of a direct flow.
            hook.exchange_behind(found.as_fd(), self.opens.program(hook)?);
            hook.set_front(self.complete.program(hook)?);
        }
        Ok(())
    }

    /// Restores the hooks if the other agent did not take over.
    fn step_back(&self) -> Result<(), Error> {
        for (hook, found) in &self.hooks {
            hook.remove_front();
            hook.exchange_behind(self.opens.program(hook)?, found.as_fd());
        }
        Ok(())
    }

    /// Whether no hook has a program of this version behind any more.
    fn is_taken_over(&self) -> bool {
        let is_ours = |hook: &Hook, program| program == hook.found || self.opens.contain(program);
        self.hooks.iter().all(|(hook, _)| hook.behind().is_none_or(|program| !is_ours(hook, program)))
    }
}
