//! From the previous layout of the maps to this one, and back, under traffic.
//!
//! Maps of the same shape and meaning are not copied: the same map is pinned in both versions' folders, so programs of both
//! agree at every moment. Flows are copied by [`Migration`], while each hook has programs that know the one table, and
//! programs that know the other ([`front`]).

mod downgrade;
mod front;

use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use aya::maps::MapData;
pub use downgrade::{Downgrade, downgrade};
pub(super) use front::remove_left;

use self::front::Packets;
use super::bpf::Link;
use super::clsact::{self, Handle};
use super::error::Error;
use super::hooks::Direction;
use super::links::Outcome;
use super::object::Transition;
use super::pins::Paths;
use super::{EMBEDDED, Programs, status};
use crate::host::devices::{self, Device};
use crate::host::netlink::Netlink;
use crate::maps::migrate::{Migration, SHARED, Scope};

/// Programs that were replaced may still be at work on another CPU for so long.
const LAST_RUNS: Duration = Duration::from_millis(20);

/// Pins in `current` what of the previous version's maps stays the same. A map that cannot be shared begins anew.
pub(super) fn share_with(previous: &Path, current: &Path) {
    for (old, new) in SHARED {
        if let Err(error) = share(&previous.join(old), &current.join(new)) {
            tracing::warn!(map = new, %error, "cannot take the map over from the previous version");
        }
    }
}

fn share(from: &Path, to: &Path) -> Result<(), Error> {
    let failed = |error: &dyn std::fmt::Display| Error::File {
        action: "share",
        path: from.to_owned(),
        source: std::io::Error::other(error.to_string()),
    };
    let map = MapData::from_pin(from).map_err(|error| failed(&error))?;
    map.pin(to).map_err(|error| failed(&error))
}

/// How long connections that are half open when a successor takes over have for their handshakes.
const HANDSHAKES: Duration = Duration::from_millis(200);

/// Makes the packet programs on devices leave new flows to the rules behind them (kube-proxy's), and continue those that they
/// know. Returns when connections that were being opened are open.
pub(super) fn leave_what_begins(paths: &Paths) -> Result<(), Error> {
    let devices = devices::list().map_err(Error::file("list the devices of", Path::new("/sys/class/net")))?;
    let packets = Packets::load(EMBEDDED, paths, Transition::LooksUp, &devices)?;
    let filtered = status::filtered_devices(paths);
    for device in &devices {
        for direction in Direction::ALL {
            let program = packets.program_for(direction, device.no_header)?;
            let pin = paths.links().join(direction.pin(device.ifindex));
            let place = || format!("device {}", device.name);
            let failed = |source| Error::Attach { program: direction.program(), place: place(), source };
            if let Some(link) = Link::pinned(&pin).map_err(Error::file("open the link", &pin))? {
                link.update(program).map_err(failed)?;
            }
            if filtered.contains_key(&device.ifindex) {
                let mut netlink = Netlink::open().map_err(failed)?;
                clsact::set(&mut netlink, device.ifindex, direction, Handle::Own, program).map_err(failed)?;
            }
        }
    }
    sleep(HANDSHAKES);
    Ok(())
}

impl Programs {
    /// Replaces the programs of the previous version, which use the maps in `previous`, on the cgroup and on all devices.
    pub(super) fn succeed(&self, previous: &Path) -> Result<Vec<(&'static str, Outcome)>, Error> {
        let mut migration = match Migration::open(previous, &self.pin_dir()) {
            Ok(migration) => migration,
            Err(error) => {
                tracing::warn!(%error, "cannot copy the flows of the previous version: its connections by the packet path may break");
                return self.hold_sockets();
            }
        };
        let devices = devices::list().unwrap_or_default();
        let first = migration.pass(Scope::All).forward;
        tracing::info!(flows = first.added, lost = first.lost, "flows of the previous version copied");
        // Where another agent has the devices, it serves them.
        if self.lock_devices().is_ok() {
            self.succeed_devices(&mut migration, &devices)?;
        }
        let outcomes = self.hold_sockets()?;
        tracing::info!("the programs of the previous version are replaced");
        Ok(outcomes)
    }

    /// Replaces the packet programs. Every state of a hook, from front to back, is right beside every other one, and
    /// beside the first and the last one.
    fn succeed_devices(&self, migration: &mut Migration, devices: &[Device]) -> Result<(), Error> {
        let load = |transition| Packets::load(self.object, self.pins.paths(), transition, devices);
        let (looks_up, opens) = (load(Transition::LooksUp)?, load(Transition::Opens)?);
        let begun = Instant::now();
        // Ours know what is copied, theirs what is not; theirs open flows.
        let hooks = front::attach(self.pins.paths(), devices)?;
        for hook in &hooks {
            hook.set_front(looks_up.program(hook)?);
        }
        migration.pass(Scope::All);
        // Ours open flows. A later datagram of a flow that theirs opened after the last copy begins a flow of ours.
        for hook in &hooks {
            migration.pass(Scope::Hot);
            hook.set_front(opens.program(hook)?);
        }
        migration.pass(Scope::Hot);
        sleep(LAST_RUNS);
        migration.pass(Scope::All);
        // Now theirs know nothing that ours do not.
        for hook in &hooks {
            hook.set_front(self.packet_program(hook.direction, hook.no_header)?);
        }
        migration.pass(Scope::All);
        // Ours take the place of theirs: first those that take no packet for a direct one which ours in front translated.
        for hook in &hooks {
            hook.set_behind(opens.program(hook)?);
            hook.set_front(looks_up.program(hook)?);
            hook.remove_front();
            hook.set_behind(self.packet_program(hook.direction, hook.no_header)?);
        }
        tracing::info!(hooks = hooks.len(), took = ?begun.elapsed(), "programs on devices replaced");
        Ok(())
    }
}
