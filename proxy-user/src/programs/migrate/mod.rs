//! Upgrade from the previous layout of the maps to this one, and downgrade, under traffic.
//!
//! Maps of the same shape and meaning are not copied: the same map is pinned in the folders of both versions, so the
//! programs of both agree at every moment. [`Migration`] copies the flows, while each hook has programs that know one table,
//! and programs that know the other ([`front`]).

mod downgrade;
mod front;
pub(super) mod leave;
pub(super) mod share;

use std::path::Path;
use std::sync::PoisonError;
use std::thread::sleep;
use std::time::Instant;

pub use downgrade::{Downgrade, downgrade};

use self::front::Packets;
use super::error::Error;
use super::links::Outcome;
use super::loaded::Programs;
use super::object::Transition;
use crate::host::devices::{self, Device};
use crate::maps::migrate::{Migration, Scope};

impl Programs {
    /// Attaches the socket programs, or takes over the links of an earlier agent; then makes the maps of this version the
    /// current ones, and removes those of other versions. If programs of the previous version are attached, those on devices
    /// are replaced too, and their flows are copied.
    pub fn attach_sockets(&self) -> Result<Vec<(&'static str, Outcome)>, Error> {
        let mut predecessor = self.predecessor.lock().unwrap_or_else(PoisonError::into_inner);
        let outcomes = match predecessor.as_deref() {
            Some(previous) => self.succeed(previous)?,
            None => self.hold_sockets()?,
        };
        front::remove_left(self.pins.paths());
        self.pins.make_current()?;
        self.pins.retire_other_versions()?;
        *predecessor = None;
        Ok(outcomes)
    }

    /// Replaces the programs of the previous version, which use the maps in `previous`, on the cgroup and on all devices.
    fn succeed(&self, previous: &Path) -> Result<Vec<(&'static str, Outcome)>, Error> {
        let mut migration = match Migration::open(previous, &self.pin_dir()) {
            Ok(migration) => migration,
            Err(error) => {
                tracing::warn!(%error, "cannot copy the flows of the previous version: connections of the packet path may break");
                return self.hold_sockets();
            }
        };
        let devices = devices::list().unwrap_or_default();
        let first = migration.pass(Scope::All).forward;
        tracing::info!(flows = first.added, lost = first.lost, "flows of the previous version copied");
        // If another agent has locked the devices, that agent serves them.
        if self.lock_devices().is_ok() {
            self.succeed_devices(&mut migration, &devices)?;
        }
        let outcomes = self.hold_sockets()?;
        tracing::info!("replaced the programs of the previous version");
        Ok(outcomes)
    }

    /// Replaces the packet programs. Every state of a hook (its programs from front to back) works together with every state
    /// of the other hooks, including the first and the last one.
    fn succeed_devices(&self, migration: &mut Migration, devices: &[Device]) -> Result<(), Error> {
        let load = |transition| Packets::load(self.object, self.pins.paths(), transition, devices);
        let (looks_up, opens) = (load(Transition::LooksUp)?, load(Transition::Opens)?);
        let begun = Instant::now();
        // This version's programs know the copied flows; the other version's know the rest, and open new flows.
        let hooks = front::attach(self.pins.paths(), devices)?;
        for hook in &hooks {
            hook.set_front(looks_up.program(hook)?);
        }
        migration.pass(Scope::All);
        // This version's programs open flows. A later datagram of a flow that the other version opened after the last copy
        // starts a new flow in this version's table.
        for hook in &hooks {
            migration.pass(Scope::Hot);
            hook.set_front(opens.program(hook)?);
        }
        migration.pass(Scope::Hot);
        sleep(front::LAST_RUNS);
        migration.pass(Scope::All);
        // Now the other version's programs know no flow that this version's do not know.
        for hook in &hooks {
            hook.set_front(self.packet_program(hook.direction, hook.no_header)?);
        }
        migration.pass(Scope::All);
        // This version's programs replace the other version's: first with programs that do not regard a packet which those
        // in front have translated as one of a direct flow.
        for hook in &hooks {
            hook.set_behind(opens.program(hook)?);
            hook.set_front(looks_up.program(hook)?);
            hook.remove_front();
            hook.set_behind(self.packet_program(hook.direction, hook.no_header)?);
        }
        tracing::info!(hooks = hooks.len(), took = ?begun.elapsed(), "replaced programs on devices");
        Ok(())
    }
}
