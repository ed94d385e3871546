//! Packet programs in front of the attached ones, while one version replaces the other.
//!
//! Each hook then has programs of two versions: the programs behind see the packets that those in front leave (`TCX_NEXT`,
//! or `TC_ACT_UNSPEC` from a filter, which is the same number). So each hook knows the flows of both tables, and it does not
//! matter in which order hooks change, nor how long that takes.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use aya::Ebpf;
use aya::programs::Program;

use std::time::Duration;

use crate::host::devices::Device;
use crate::host::netlink::Netlink;
use crate::programs::bpf::{self, Link, Rank};
use crate::programs::clsact::{self, Handle};
use crate::programs::error::Error;
use crate::programs::hooks::Direction;
use crate::programs::object::{self, Transition};
use crate::programs::pins::Paths;
use crate::programs::program::program;
use crate::programs::status;

/// Time for which replaced programs may still run on another CPU.
pub(super) const LAST_RUNS: Duration = Duration::from_millis(20);

/// The packet programs, loaded for one [`Transition`].
pub(super) struct Packets {
    with_header: Ebpf,
    /// For devices without link-layer header, if there are any.
    headerless: Option<Ebpf>,
}

impl Packets {
    /// Loads the programs on the pinned maps.
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

    /// Returns the program for a hook.
    pub(super) fn program(&self, hook: &Hook) -> Result<BorrowedFd<'_>, Error> {
        self.program_for(hook.direction, hook.no_header)
    }

    /// Returns the program for a direction of a device.
    pub(super) fn program_for(&self, direction: Direction, no_header: bool) -> Result<BorrowedFd<'_>, Error> {
        let name = direction.program();
        let missing = Error::Incomplete { kind: "program", name };
        let ebpf = if no_header { self.headerless.as_ref().ok_or(missing)? } else { &self.with_header };
        program(ebpf, name)
    }

    /// Whether the program with this id is one of these.
    pub(super) fn contain(&self, program: u32) -> bool {
        let all = [Some(&self.with_header), self.headerless.as_ref()];
        all.into_iter().flatten().flat_map(Ebpf::programs).any(|(_, loaded)| {
            let Program::SchedClassifier(loaded) = loaded else { return false };
            loaded.info().is_ok_and(|info| info.id() == program)
        })
    }
}

/// A TCX hook or clsact direction of a device. It runs two programs: the attached one (behind), and one before it (front).
pub(super) struct Hook {
    pub(super) direction: Direction,
    pub(super) no_header: bool,
    attachment: Attachment,
    /// Id of the program behind, at the time when the hook was found.
    pub(super) found: u32,
}

enum Attachment {
    /// TCX. The link in front has no pin: it ends with this process.
    Links { behind: Link, front: Link },
    /// Two filters of the clsact qdisc. The filter in front stays if this process is killed; the next agent removes it.
    Filters { ifindex: u32 },
}

impl Hook {
    /// Replaces the program in front. This may fail only if the device is gone.
    pub(super) fn set_front(&self, program: BorrowedFd<'_>) {
        match &self.attachment {
            Attachment::Links { front, .. } => drop(front.update(program)),
            Attachment::Filters { ifindex } => self.set_filter(*ifindex, Handle::Front, program),
        }
    }

    /// Replaces the program behind. This may fail only if the device is gone.
    pub(super) fn set_behind(&self, program: BorrowedFd<'_>) {
        match &self.attachment {
            Attachment::Links { behind, .. } => drop(behind.update(program)),
            Attachment::Filters { ifindex } => self.set_filter(*ifindex, Handle::Own, program),
        }
    }

    /// Replaces the program behind, if it is still `old`.
    pub(super) fn exchange_behind(&self, old: BorrowedFd<'_>, program: BorrowedFd<'_>) {
        match &self.attachment {
            Attachment::Links { behind, .. } => drop(behind.exchange(old, program)),
            // The kernel has no such exchange for filters.
            Attachment::Filters { ifindex } if bpf::program_id(old).ok() == self.behind() => {
                self.set_filter(*ifindex, Handle::Own, program);
            }
            Attachment::Filters { .. } => {}
        }
    }

    /// Returns the id of the program behind; `None` if the hook is gone.
    pub(super) fn behind(&self) -> Option<u32> {
        match &self.attachment {
            Attachment::Links { behind, .. } => {
                let info = behind.info().ok()?;
                matches!(info.hook, bpf::Hook::Tcx { ifindex, .. } if ifindex != 0).then_some(info.program)
            }
            Attachment::Filters { ifindex } => {
                our_filter(&mut Netlink::open().ok()?, *ifindex, self.direction)
            }
        }
    }

    /// Removes the program in front.
    pub(super) fn remove_front(&self) {
        match &self.attachment {
            Attachment::Links { front, .. } => drop(front.detach()),
            Attachment::Filters { ifindex } => {
                let removed = Netlink::open().and_then(|mut netlink| {
                    clsact::remove(&mut netlink, *ifindex, self.direction, Handle::Front)
                });
                self.tell(*ifindex, removed);
            }
        }
    }

    fn set_filter(&self, ifindex: u32, handle: Handle, program: BorrowedFd<'_>) {
        let set = Netlink::open()
            .and_then(|mut netlink| clsact::set(&mut netlink, ifindex, self.direction, handle, program));
        self.tell(ifindex, set);
    }

    /// Logs a failure, unless the device is gone, which needs no filter.
    fn tell(&self, ifindex: u32, outcome: io::Result<()>) {
        if let Err(error) = outcome
            && error.raw_os_error() != Some(libc::ENODEV)
        {
            tracing::warn!(ifindex, direction = %self.direction, %error, "cannot change a filter");
        }
    }
}

/// Returns the id of the program of Ballast's filter.
fn our_filter(netlink: &mut Netlink, ifindex: u32, direction: Direction) -> Option<u32> {
    let filters = clsact::filters(netlink, ifindex, direction).ok()?;
    filters.iter().find(|filter| filter.is_ours(direction, Handle::Own))?.program
}

/// Attaches a program that passes every packet on, in front of each attached program of Ballast. A hook where this fails is
/// left out; in most cases its device is gone.
pub(super) fn attach(paths: &Paths, devices: &[Device]) -> Result<Vec<Hook>, Error> {
    let idle = idle()?;
    let (linked, filtered) = (status::linked_devices(paths), status::filtered_devices(paths));
    let mut hooks = Vec::new();
    for (device, direction) in
        devices.iter().flat_map(|device| Direction::ALL.map(|direction| (device, direction)))
    {
        let mut keep = |found: io::Result<Option<(Attachment, u32)>>| match found {
            Ok(Some((attachment, found))) => {
                hooks.push(Hook { direction, no_header: device.no_header, attachment, found });
            }
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(device = device.name, %direction, %error, "cannot attach a program before that of the other version");
            }
        };
        if linked.contains_key(&device.ifindex) {
            keep(before_link(paths, idle.as_fd(), device.ifindex, direction));
        }
        if filtered.contains_key(&device.ifindex) {
            keep(before_filter(idle.as_fd(), device.ifindex, direction));
        }
    }
    Ok(hooks)
}

fn before_link(
    paths: &Paths,
    idle: BorrowedFd<'_>,
    ifindex: u32,
    direction: Direction,
) -> io::Result<Option<(Attachment, u32)>> {
    let pin = paths.links().join(direction.pin(ifindex));
    let Ok(Some(behind)) = Link::pinned(&pin) else { return Ok(None) };
    let front = Link::to_device(idle, ifindex, direction.attach_type(), Rank::First)?;
    let found = behind.info()?.program;
    Ok(Some((Attachment::Links { behind, front }, found)))
}

fn before_filter(
    idle: BorrowedFd<'_>,
    ifindex: u32,
    direction: Direction,
) -> io::Result<Option<(Attachment, u32)>> {
    let mut netlink = Netlink::open()?;
    let Some(found) = our_filter(&mut netlink, ifindex, direction) else { return Ok(None) };
    clsact::set(&mut netlink, ifindex, direction, Handle::Front, idle)?;
    Ok(Some((Attachment::Filters { ifindex }, found)))
}

/// Removes front filters that a process left when it was killed during an upgrade or a downgrade.
pub(super) fn remove_left(paths: &Paths) {
    let Ok(mut netlink) = Netlink::open() else { return };
    for ifindex in status::filtered_devices(paths).into_keys() {
        for direction in Direction::ALL {
            let filters = clsact::filters(&mut netlink, ifindex, direction).unwrap_or_default();
            if filters.iter().any(|filter| filter.is_ours(direction, Handle::Front)) {
                // If this fails, the filter still runs a program of Ballast, and the next start removes it.
                let _ = clsact::remove(&mut netlink, ifindex, direction, Handle::Front);
            }
        }
    }
}

fn idle() -> Result<OwnedFd, Error> {
    let failed = |source| Error::Attach { program: "tc_pass_on", place: "a device".to_owned(), source };
    bpf::pass_on().map_err(failed)
}
