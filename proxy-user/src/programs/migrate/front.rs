//! Packet programs in front of those that are attached, on TCX hooks, while one version replaces the other.
//!
//! A hook has programs of two versions then: what those in front leave (`TCX_NEXT`) those behind see. So each hook knows the
//! flows of both tables, and it does not matter in which order hooks change, nor how long that takes.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use aya::Ebpf;
use aya::programs::Program;

use crate::host::devices::Device;
use crate::programs::bpf::{self, Link, Rank};
use crate::programs::error::Error;
use crate::programs::hooks::Direction;
use crate::programs::object::{self, Transition};
use crate::programs::pins::Paths;
use crate::programs::{program, status};

/// The packet programs, with one part of the work.
pub(super) struct Packets {
    with_header: Ebpf,
    /// For devices without link-layer header, if there are any.
    headerless: Option<Ebpf>,
}

impl Packets {
    /// Loads them on the pinned maps.
    pub(super) fn load(
        bytes: &[u8],
        paths: &Paths,
        transition: Transition,
        devices: &[Device],
    ) -> Result<Self, Error> {
        let load = |no_header| object::load_packet_programs(bytes, paths, no_header, transition);
        let is_needed = devices.iter().any(|device| device.no_header);
        let headerless = if is_needed { Some(load(true)?) } else { None };
        Ok(Self { with_header: load(false)?, headerless })
    }

    /// The program for a hook.
    pub(super) fn program(&self, hook: &Hook) -> Result<BorrowedFd<'_>, Error> {
        self.program_for(hook.direction, hook.no_header)
    }

    /// The program for a direction of a device.
    pub(super) fn program_for(&self, direction: Direction, no_header: bool) -> Result<BorrowedFd<'_>, Error> {
        let name = direction.program();
        let missing = Error::Incomplete { kind: "program", name };
        let ebpf = if no_header { self.headerless.as_ref().ok_or(missing)? } else { &self.with_header };
        program(ebpf, name)
    }

    /// Whether a program is one of these.
    pub(super) fn contain(&self, program: u32) -> bool {
        let all = [Some(&self.with_header), self.headerless.as_ref()];
        all.into_iter().flatten().flat_map(Ebpf::programs).any(|(_, loaded)| {
            let Program::SchedClassifier(loaded) = loaded else { return false };
            loaded.info().is_ok_and(|info| info.id() == program)
        })
    }
}

/// A hook of a device that has a pinned link, and a link in front of that. The latter has no pin: it goes with this process.
pub(super) struct Hook {
    pub(super) direction: Direction,
    pub(super) no_header: bool,
    behind: Link,
    front: Link,
    /// Id of the program behind, when the hook was found.
    pub(super) found: u32,
}

impl Hook {
    /// Replaces the program in front. That may fail only where the device is gone.
    pub(super) fn set_front(&self, program: BorrowedFd<'_>) {
        let _ = self.front.update(program);
    }

    /// Replaces the program behind, likewise.
    pub(super) fn set_behind(&self, program: BorrowedFd<'_>) {
        let _ = self.behind.update(program);
    }

    /// Replaces the program behind, if it is `old` still.
    pub(super) fn exchange_behind(&self, old: BorrowedFd<'_>, program: BorrowedFd<'_>) {
        let _ = self.behind.exchange(old, program);
    }

    /// Id of the program behind; `None` if the hook is gone.
    pub(super) fn behind(&self) -> Option<u32> {
        let info = self.behind.info().ok()?;
        matches!(info.hook, bpf::Hook::Tcx { ifindex, .. } if ifindex != 0).then_some(info.program)
    }

    /// Removes the program in front.
    pub(super) fn remove_front(&self) {
        let _ = self.front.detach();
    }
}

/// Attaches a program that does nothing in front of each whose link is pinned. Hooks where that cannot be done are left out:
/// mostly their device is gone.
pub(super) fn attach(paths: &Paths, devices: &[Device]) -> Result<Vec<Hook>, Error> {
    let idle = idle()?;
    let linked = status::linked_devices(paths);
    let mut hooks = Vec::new();
    for device in devices.iter().filter(|device| linked.contains_key(&device.ifindex)) {
        for direction in Direction::ALL {
            let pin = paths.links().join(direction.pin(device.ifindex));
            let Ok(Some(behind)) = Link::pinned(&pin) else { continue };
            let front = Link::to_device(idle.as_fd(), device.ifindex, direction.attach_type(), Rank::First);
            match (front, behind.info()) {
                (Ok(front), Ok(info)) => {
                    let (found, no_header) = (info.program, device.no_header);
                    hooks.push(Hook { direction, no_header, behind, front, found });
                }
                (Err(error), _) | (_, Err(error)) => {
                    tracing::warn!(device = device.name, %direction, %error, "no program can run in front of the other version's");
                }
            }
        }
    }
    Ok(hooks)
}

fn idle() -> Result<OwnedFd, Error> {
    let failed = |source| Error::Attach { program: "tc_pass_on", place: "a device".to_owned(), source };
    bpf::pass_on().map_err(failed)
}
