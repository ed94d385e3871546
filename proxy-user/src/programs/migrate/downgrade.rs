//! What makes a downgrade free of interruptions: the version before knows nothing of this one, and is only started.

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

/// Between two looks while nothing is known to change.
const PAUSE: Duration = Duration::from_millis(1);
/// Each pass of so many looks at every entry, while nothing happens.
const FULL: u64 = 50;

/// Maps of the previous version, made from ours.
pub struct Downgrade {
    paths: Paths,
    migration: Migration,
    /// What runs in front of the other version's programs once these are everywhere.
    looks_up: Packets,
    /// What runs behind ours until then. Were this process killed, it would be all there is: it serves, too.
    opens: Packets,
    /// What runs in front until then.
    complete: Packets,
    /// The hooks of devices, with the programs that they had.
    hooks: Vec<(Hook, OwnedFd)>,
    /// Flows that were copied.
    pub flows: usize,
    /// Flows that the previous version has no word for, or no room.
    pub lost: usize,
}

/// Makes the maps of the previous version, so that its agent takes them over as if it had been started again.
pub fn downgrade(bpffs: &Path) -> Result<Downgrade, Error> {
    privileges::require()?;
    let paths = Paths::new(bpffs);
    let (ours, previous) = (paths.maps(), paths.maps_of(PREVIOUS));
    // What an upgrade has left that did not get far is not what the programs read.
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

/// Removes the XDP program: the version before has none, and would not keep its maps. What it forwarded goes by tc from now
/// on, in the same flows.
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

/// Makes an array and pins it; it is as long as ours.
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
    /// Goes on to copy what changes, until the previous version's programs have replaced ours, at most for `limit`.
    /// Whether they have.
    pub fn follow(mut self, limit: Duration) -> Result<bool, Error> {
        let end = Instant::now() + limit;
        let previous = self.paths.maps_of(PREVIOUS);
        let mut round = 0u64;
        while !(is_current(&self.paths, &previous) && self.is_taken_over()) {
            // Our own agent, started again, removes the maps that were made.
            if !previous.exists() || Instant::now() >= end {
                self.step_back()?;
                return Ok(false);
            }
            self.migration.pass(if round.is_multiple_of(FULL) { Scope::All } else { Scope::Hot });
            round += 1;
            sleep(PAUSE);
        }
        // Where our agent still ran, it has attached it again.
        leave_to_tc(&self.paths)?;
        // The version before has no such programs, and would keep their links for ever.
        for later in [hooks::SOCKET_RELEASE, hooks::SOCKET_OUTCOME] {
            links::release(&self.paths.links().join(later))?;
        }
        // Theirs are on every hook: now they open flows, and ours look up what they opened. On the way out first: there, ours
        // take what theirs translated for the node's own. While both open flows, they may choose the same source port: only
        // until the other table has it.
        for direction in [Direction::Egress, Direction::Ingress] {
            for (hook, _) in self.hooks.iter().filter(|(hook, _)| hook.direction == direction) {
                self.migration.pass(Scope::Hot);
                hook.set_front(self.looks_up.program(hook)?);
            }
        }
        self.migration.pass(Scope::Hot);
        sleep(LAST_RUNS);
        self.migration.pass(Scope::All);
        // Theirs know all that ours do.
        for (hook, _) in &self.hooks {
            hook.remove_front();
        }
        self.migration.pass(Scope::All);
        Ok(true)
    }

    /// Puts our programs in front, and behind them some that the other agent can replace hook by hook: there, theirs see what
    /// ours leave, and open nothing.
    fn stand_in_front(&self) -> Result<(), Error> {
        for (hook, found) in &self.hooks {
            // These take no packet that those in front have translated for one straight to an endpoint.
            hook.exchange_behind(found.as_fd(), self.opens.program(hook)?);
            hook.set_front(self.complete.program(hook)?);
        }
        Ok(())
    }

    /// Puts things back where the other agent did not come.
    fn step_back(&self) -> Result<(), Error> {
        for (hook, found) in &self.hooks {
            hook.remove_front();
            hook.exchange_behind(self.opens.program(hook)?, found.as_fd());
        }
        Ok(())
    }

    /// Whether no hook has our program behind any more.
    fn is_taken_over(&self) -> bool {
        let is_ours = |hook: &Hook, program| program == hook.found || self.opens.contain(program);
        self.hooks.iter().all(|(hook, _)| hook.behind().is_none_or(|program| !is_ours(hook, program)))
    }
}
