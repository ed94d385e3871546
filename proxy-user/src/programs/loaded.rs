//! The loaded programs: load them, and attach them to sockets and devices.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use aya::Ebpf;
use aya::programs::ProgramInfo;
use tokio::sync::watch;

use super::error::Error;
use super::hooks::{self, Direction, SOCKET_HOOKS};
use super::iterator::{Iterated, SocketIterator};
use super::links::{self, AttachOutcome, AttachPoint, Cgroup};
use super::notice::StartNotice;
use super::pins::{self, Paths, Pins};
use super::program::{self, program};
use super::repairs::{self, Repairs};
use super::settings::{Settings, TcxOrder};
use super::xdp::keeper::{Keeper, Xdp};
use super::{bpf, cleanup, clsact, object, privileges};
use crate::host::devices::device_name;
use crate::host::lock;
use crate::host::netfilter::lock::{self as named_lock, Lock};
use crate::host::netlink::Netlink;

/// The name of the lock of the devices of a network namespace.
pub(super) const DEVICES_LOCK: &str = "ballast-devices";

/// The loaded programs. Dropping this closes files and leaves everything attached.
pub struct Programs {
    pub(super) ebpf: Ebpf,
    pub(super) pins: Pins,
    pub(super) cgroup: Cgroup,
    pub(super) _cgroup_lock: Lock,
    pub(super) hz: u32,
    pub(super) is_current: bool,
    pub(super) has_earlier: bool,
    pub(super) tcx: bool,
    pub(super) tcx_order: TcxOrder,
    pub(super) clsact_priority: u16,
    pub(super) filters_before: watch::Sender<Vec<String>>,
    /// Taken when the first device is attached.
    pub(super) devices_lock: Mutex<Option<Lock>>,
    pub(super) object: &'static [u8],
    /// The packet programs for devices without link-layer header, loaded when the first such device is attached.
    pub(super) headerless: OnceLock<Ebpf>,
    pub(super) notices: Vec<StartNotice>,
    /// Whether all socket programs are on their hooks.
    pub(super) sockets_are_held: AtomicBool,
    /// Ids of the maps, to recognise them later.
    pub(super) map_ids: BTreeMap<&'static str, u32>,
    pub(super) repairs: Arc<Repairs>,
    pub(super) xdp: Keeper,
}

/// Fails if another agent uses this bpffs or cgroup; takes no lock.
pub fn require_unused(bpffs: &Path, cgroup: &Path) -> Result<(), Error> {
    if lock::is_held(Paths::new(bpffs).root()) {
        return Err(pins::in_use(bpffs));
    }
    let is_held = named_lock::is_held(&Cgroup::open(cgroup)?.lock_name());
    if is_held { Err(cgroup_in_use(cgroup)) } else { Ok(()) }
}

fn cgroup_in_use(path: &Path) -> Error {
    Error::InUse { path: path.to_owned(), what: "cgroup", flag: "--cgroup-root" }
}

impl Programs {
    /// Creates or opens the pinned maps, and loads the programs; attaches nothing.
    pub fn start(settings: &Settings) -> Result<Self, Error> {
        privileges::require()?;
        let cgroup = Cgroup::open(&settings.cgroup)?;
        let pins = Pins::open(&settings.bpffs)?;
        let lock = named_lock::lock(&cgroup.lock_name()).ok_or_else(|| cgroup_in_use(&cgroup.path))?;
        let xdp = (settings.xdp != Xdp::Off).then(|| settings.xdp.program());
        let mut loaded = object::load(settings.object, &pins, &settings.capacities, xdp)?;
        let unusable = loaded.unusable_xdp.map(|error| error.to_string());
        let xdp_devices = loaded.ebpf.take_map(proxy_common::map_names::XDP_DEVICES);
        let xdp = Keeper::new(settings.xdp, unusable, xdp_devices);
        let mut notices = loaded.notices;
        if pins.mounted {
            notices.push(StartNotice::Mounted { path: settings.bpffs.clone() });
        }
        let has_earlier = pins.has_links();
        if !has_earlier {
            pins.make_current()?;
        }
        let tcx = settings.packet_hook.uses_tcx();
        let mut programs = Self {
            ebpf: loaded.ebpf,
            pins,
            cgroup,
            _cgroup_lock: lock,
            hz: loaded.hz,
            is_current: loaded.is_current,
            has_earlier,
            tcx,
            tcx_order: settings.tcx_order,
            clsact_priority: settings.clsact_priority.0,
            filters_before: watch::Sender::default(),
            devices_lock: Mutex::default(),
            object: settings.object,
            headerless: OnceLock::new(),
            sockets_are_held: AtomicBool::new(false),
            notices,
            map_ids: BTreeMap::new(),
            repairs: Arc::default(),
            xdp,
        };
        programs.map_ids = repairs::map_ids(programs.pins.paths())?;
        Ok(programs)
    }

    /// Whether programs of an earlier agent were attached at the start.
    pub const fn has_earlier(&self) -> bool {
        self.has_earlier
    }

    /// Whether programs of an earlier agent are attached and use the same maps. If so, attach at once; if not, fill the maps
    /// first.
    pub fn is_current(&self) -> bool {
        self.is_current
    }

    /// Returns the notices for the operator.
    pub fn notices(&self) -> &[StartNotice] {
        &self.notices
    }

    /// Returns the folder where the maps are pinned.
    pub fn pin_dir(&self) -> PathBuf {
        self.pins.paths().maps()
    }

    /// Returns the jiffies per second.
    pub fn hz(&self) -> u32 {
        self.hz
    }

    /// Whether packet programs are attached with TCX; otherwise with clsact.
    pub fn uses_tcx(&self) -> bool {
        self.tcx
    }

    /// Returns the problems of BPF filters of others that run before Ballast's (clsact), in a form that allows to wait for
    /// changes.
    pub fn filters_before(&self) -> watch::Receiver<Vec<String>> {
        self.filters_before.subscribe()
    }

    /// Loads an iterator over sockets that are connected to a Service; takes a part of a second.
    pub fn socket_iterator(&self, which: Iterated) -> Result<SocketIterator, Error> {
        SocketIterator::load(self.object, self.pins.paths(), which)
    }

    /// Returns a function that passes to `log` what the programs have logged since its last call.
    #[cfg(feature = "bpf-log")]
    pub fn logger(&mut self) -> Result<impl FnMut() + Send + use<>, aya_log::Error> {
        let mut logger = aya_log::EbpfLogger::init(&mut self.ebpf)?;
        Ok(move || logger.flush())
    }

    /// Returns the program for one direction of a device.
    pub(super) fn packet_program(
        &self,
        direction: Direction,
        no_header: bool,
    ) -> Result<BorrowedFd<'_>, Error> {
        if !no_header {
            return program(&self.ebpf, direction.program());
        }
        if self.headerless.get().is_none() {
            // If another thread has loaded the programs meanwhile, they are the same.
            let paths = self.pins.paths();
            let _ = self.headerless.set(object::load_packet_programs(self.object, paths, true, true)?);
        }
        let missing = Error::Incomplete { kind: "program", name: direction.program() };
        program(self.headerless.get().ok_or(missing)?, direction.program())
    }

    /// Fails if another cgroup has the path of the cgroup of the socket programs.
    pub fn require_cgroup(&self) -> Result<(), Error> {
        if self.cgroup.is_replaced() {
            return Err(Error::CgroupReplaced { path: self.cgroup.path.clone() });
        }
        Ok(())
    }

    /// Attaches the socket programs, or takes over the links of an earlier agent; makes the maps of this version the current ones.
    /// All hooks are tried; the error is that of the first one that fails.
    pub fn attach_sockets(&self) -> Result<Vec<(&'static str, AttachOutcome)>, Error> {
        let outcomes: Vec<_> = self.hold_sockets();
        self.pins.make_current()?;
        let outcomes = outcomes.into_iter().collect::<Result<_, _>>()?;
        self.release_unknown_hooks();
        self.sockets_are_held.store(true, Relaxed);
        Ok(outcomes)
    }

    /// Removes the maps of other versions once no hook has a program that uses them: the sockets' hooks have ours, and the caller
    /// has attached ours to all devices. A program whose map `calls` is removed loses the programs that it calls.
    pub(super) fn retire_other_versions(&self) {
        if !self.sockets_are_held.load(Relaxed) {
            return;
        }
        match self.pins.retire_other_versions() {
            Ok(paths) if !paths.is_empty() => tracing::info!(?paths, "maps of another version removed"),
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(%error, "cannot remove the maps of another version, which no program uses");
            }
        }
    }

    /// Detaches the programs of hooks that only another version has: their maps are not kept up to date any more.
    fn release_unknown_hooks(&self) {
        let links = self.pins.paths().links();
        let pins = pins::entries(&links).unwrap_or_default();
        for pin in pins.into_iter().filter(|pin| hooks::is_of_other_version(pin)) {
            match links::release(&links.join(&pin)) {
                Ok(_) => tracing::info!(pin, "program of a hook that this version does not have removed"),
                Err(error) => {
                    tracing::warn!(pin, %error, "cannot remove the program of a hook that this version does not have");
                }
            }
        }
    }

    fn hold_sockets(&self) -> Vec<Result<(&'static str, AttachOutcome), Error>> {
        let ours = links::our_programs();
        let strays = links::on_cgroup(&self.cgroup, &ours);
        let mut strays_of = BTreeMap::<String, Vec<bpf::Link>>::new();
        for (name, link) in strays {
            strays_of.entry(name).or_default().push(link);
        }
        let hold = |(name, attach_type)| {
            let place = AttachPoint::Cgroup { cgroup: &self.cgroup, attach_type: attach_type as u32 };
            let pin = self.pins.paths().links().join(name);
            let strays = strays_of.remove(name).unwrap_or_default();
            Ok((name, links::hold(&pin, name, place, program(&self.ebpf, name)?, &strays)?))
        };
        SOCKET_HOOKS.into_iter().map(hold).collect()
    }

    /// Attaches the packet programs to a device, or takes over those of an earlier agent. Programs that were attached in the
    /// other way (TCX or clsact) are removed once the new ones work. `no_header`: the device's packets start with their IP
    /// header.
    pub fn attach_device(&self, ifindex: u32, no_header: bool) -> Result<(), Error> {
        self.lock_devices()?;
        if !self.tcx {
            self.set_filters(ifindex, no_header)?;
            return self.release_links(ifindex, true);
        }
        for direction in Direction::ALL {
            let (name, attach_type) = (direction.program(), direction.attach_type());
            let pin = self.pins.paths().links().join(direction.pin(ifindex));
            let strays = links::on_device(ifindex, attach_type, Some(&pin));
            let place = AttachPoint::Device { ifindex, attach_type, rank: self.tcx_order.rank(direction) };
            links::hold(&pin, name, place, self.packet_program(direction, no_header)?, &strays)?;
        }
        self.remove_filters(ifindex)
    }

    /// Locks the devices: each of two agents in one network namespace would regard the other's links as abandoned.
    pub(super) fn lock_devices(&self) -> Result<(), Error> {
        let mut lock = self.devices_lock.lock().unwrap_or_else(PoisonError::into_inner);
        if lock.is_none() {
            *lock = Some(named_lock::lock(DEVICES_LOCK).ok_or(Error::DevicesInUse)?);
        }
        Ok(())
    }

    /// Detaches the packet programs from a device, which may have been removed.
    pub fn detach_device(&self, ifindex: u32) -> Result<(), Error> {
        self.release_links(ifindex, false)?;
        self.remove_filters(ifindex)
    }

    fn release_links(&self, ifindex: u32, and_strays: bool) -> Result<(), Error> {
        for direction in Direction::ALL {
            links::release(&self.pins.paths().links().join(direction.pin(ifindex)))?;
            if and_strays {
                for link in links::on_device(ifindex, direction.attach_type(), None) {
                    // A link that is gone already cannot be detached, and need not be.
                    let _ = link.detach();
                }
            }
        }
        Ok(())
    }

    fn set_filters(&self, ifindex: u32, no_header: bool) -> Result<(), Error> {
        let device = device_name(ifindex);
        let failed = |program| {
            let place = format!("device {device}");
            move |source| Error::Attach { program, place, source }
        };
        let mut netlink = Netlink::open().map_err(failed("clsact"))?;
        if clsact::add_qdisc(&mut netlink, ifindex).map_err(failed("clsact"))? {
            pins::make(&self.pins.paths().qdiscs().join(ifindex.to_string()))?;
        }
        pins::make(&self.pins.paths().filters().join(ifindex.to_string()))?;
        for direction in Direction::ALL {
            let name = direction.program();
            let there = clsact::filters(&mut netlink, ifindex, direction).map_err(failed(name))?;
            let priority = self.clsact_priority;
            let handle = clsact::handle(&there, direction, priority);
            let is_taken = |f: &&clsact::Filter| (f.priority, f.handle) == (priority, handle);
            if let Some(other) = there.iter().find(|f| is_taken(f) && !f.is_ours(direction)) {
                return Err(Error::FilterTaken {
                    device,
                    owner: other.name.clone().unwrap_or_default(),
                    priority: other.priority,
                    handle: other.handle,
                });
            }
            let program = self.packet_program(direction, no_header)?;
            let place = (priority, handle);
            clsact::set(&mut netlink, ifindex, direction, place, program).map_err(failed(name))?;
            // The new filter works: those of another priority or handle are removed, so that nothing is translated twice.
            for old in there.iter().filter(|f| f.is_ours(direction) && !is_taken(f)) {
                clsact::remove(&mut netlink, ifindex, direction, old).map_err(failed(name))?;
            }
        }
        Ok(())
    }

    fn remove_filters(&self, ifindex: u32) -> Result<(), Error> {
        cleanup::remove_filters(self.pins.paths(), ifindex).map(drop)
    }

    /// Returns the kernel's id of a loaded program.
    pub fn program_id(&self, name: &str) -> Option<u32> {
        self.info(name).map(|info| info.id())
    }

    /// Returns the kernel's information about a program.
    pub(super) fn info(&self, name: &str) -> Option<ProgramInfo> {
        program::info(&self.ebpf, name)
    }
}
