//! Loads, attaches, pins, replaces and removes the BPF programs.
//!
//! Everything here blocks for milliseconds; async code calls it on the blocking pool. Nothing is detached when the
//! agent ends: links and maps are pinned, and the next agent takes them over.

pub mod bpf;
pub mod cleanup;
pub mod hooks;
pub mod pins;

mod calls;
mod capacities;
mod clock;
mod clsact;
mod error;
mod in_force;
mod iterator;
mod kernel;
mod links;
mod migrate;
mod notice;
mod object;
mod privileges;
mod probe;
mod repair;
mod settings;
mod status;
mod xdp;

use std::collections::{BTreeMap, BTreeSet};
use std::iter;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use aya::Ebpf;
use aya::programs::Program;
pub use capacities::Capacities;
pub use cleanup::{Cleanup, Witness, cleanup, cleanup_before, dry_run};
pub use error::Error;
pub use in_force::MapsInForce;
pub use iterator::{CountedIterator, SocketIterator};
pub use kernel::{Lack, OLDEST, is_too_old, lacks};
pub use links::Outcome;
pub use migrate::{Downgrade, downgrade};
pub use notice::Notice;
pub use object::load_packet_path;
pub use pins::{ensure_bpffs as mount_bpffs, is_bpffs, require_owner_of};
pub use privileges::missing as missing_capabilities;
pub use probe::{MAPS, PROGRAMS, loaded_names, missing_maps, missing_programs};
pub use repair::{Repair, Repairs};
pub use settings::{PacketHook, Settings, TcxOrder};
pub use status::{Attachment, ProgramStatus, attachments};
pub use xdp::{Taken, Xdp, XdpDevice, XdpDevices};

use crate::host::devices::Device;
use crate::host::manager::DeviceHooks;
use crate::host::netlink::Netlink;
use clsact::Handle;
use hooks::{Direction, SOCKET_HOOKS};
use links::{Cgroup, Place};
use pins::Pins;

/// The BPF object inside this binary; empty when it was built without one.
pub static EMBEDDED: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/ballast.bpf.o"));

/// Lets the kernel take back the memory of [`EMBEDDED`], which is read from this program's file again when it is needed
/// again: for a device without link-layer header, or to list sockets.
pub fn release_object() {
    let (page, start) = (rustix::param::page_size(), EMBEDDED.as_ptr().addr());
    let (first, end) = (start.next_multiple_of(page), (start + EMBEDDED.len()) / page * page);
    if first < end {
        let address = EMBEDDED.as_ptr().wrapping_add(first - start).cast_mut().cast();
        // SAFETY: whole pages of a constant, which nobody writes to: the kernel reads the same bytes from the file again.
        // A failure leaves them where they are.
        let _ = unsafe { rustix::mm::madvise(address, end - first, rustix::mm::Advice::LinuxDontNeed) };
    }
}

/// The loaded programs. Dropping this closes files and leaves everything attached.
pub struct Programs {
    ebpf: Ebpf,
    pins: Pins,
    cgroup: Cgroup,
    _cgroup_lock: pins::Lock,
    hz: u32,
    in_force: bool,
    tcx: bool,
    tcx_order: TcxOrder,
    /// Taken with the first device.
    devices_lock: Mutex<Option<pins::Lock>>,
    object: &'static [u8],
    /// The packet programs for devices without link-layer header, loaded with the first of these.
    headerless: OnceLock<Ebpf>,
    notices: Vec<Notice>,
    /// Ids of the maps, to know them again.
    map_ids: BTreeMap<&'static str, u32>,
    repairs: Arc<Repairs>,
    /// The maps of the previous version, until its programs are replaced.
    predecessor: Mutex<Option<PathBuf>>,
    xdp: xdp::Keeper,
}

impl Programs {
    /// Makes or opens the pinned maps and loads the programs; attaches nothing.
    pub fn start(settings: &Settings) -> Result<Self, Error> {
        privileges::require()?;
        let cgroup = Cgroup::open(&settings.cgroup)?;
        let pins = Pins::open(&settings.bpffs)?;
        let lock = pins::lock(&cgroup.path).map_err(Error::file("lock", &cgroup.path))?;
        let lock = lock.ok_or_else(|| Error::InUse {
            path: cgroup.path.clone(),
            what: "cgroup",
            flag: "--cgroup-root",
        })?;
        let mut loaded = object::load(settings.object, &pins, &settings.capacities)?;
        let unusable = match settings.xdp {
            Xdp::Off => None,
            _ => object::load_xdp(&mut loaded.ebpf, settings.xdp.program())
                .err()
                .map(|error| error.to_string()),
        };
        let xdp_devices = loaded.ebpf.take_map(proxy_common::map_names::XDP_DEVICES);
        let xdp = xdp::Keeper::new(settings.xdp, unusable, xdp_devices);
        let mut notices = loaded.notices;
        if pins.mounted {
            notices.push(Notice::Mounted { path: settings.bpffs.clone() });
        }
        if !pins.has_links() {
            pins.enact()?;
        }
        let tcx = match settings.packet_hook {
            PacketHook::Auto => bpf::has_tcx(),
            PacketHook::Tcx => true,
            PacketHook::Clsact => false,
        };
        let mut programs = Self {
            ebpf: loaded.ebpf,
            pins,
            cgroup,
            _cgroup_lock: lock,
            hz: loaded.hz,
            in_force: loaded.in_force,
            tcx,
            tcx_order: settings.tcx_order,
            devices_lock: Mutex::default(),
            object: settings.object,
            headerless: OnceLock::new(),
            notices,
            map_ids: BTreeMap::new(),
            repairs: Arc::default(),
            predecessor: Mutex::new(loaded.predecessor),
            xdp,
        };
        programs.map_ids = repair::map_ids(&programs)?;
        Ok(programs)
    }

    /// Whether an earlier agent's programs are attached and use these very maps. If so, attach at once; if not,
    /// fill the maps first.
    pub fn in_force(&self) -> bool {
        self.in_force
    }

    /// What the operator should know.
    pub fn notices(&self) -> &[Notice] {
        &self.notices
    }

    /// Where the maps are pinned.
    pub fn pin_dir(&self) -> PathBuf {
        self.pins.paths().maps()
    }

    /// Jiffies in a second.
    pub fn hz(&self) -> u32 {
        self.hz
    }

    /// Whether packet programs are attached by TCX; by clsact otherwise.
    pub fn uses_tcx(&self) -> bool {
        self.tcx
    }

    /// What lists the UDP sockets that Services led somewhere. Loading it takes a part of a second.
    pub fn socket_iterator(&self) -> Result<SocketIterator, Error> {
        SocketIterator::load(self.object, self.pins.paths())
    }

    /// What lists the sockets that count among the open connections of backends. Loading it takes a part of a second.
    pub fn counted_iterator(&self) -> Result<CountedIterator, Error> {
        CountedIterator::load(self.object, self.pins.paths())
    }

    /// What the programs log, as a function that passes on to `log` what has come since its last call.
    #[cfg(feature = "bpf-log")]
    pub fn logger(&mut self) -> Result<impl FnMut() + Send + use<>, aya_log::Error> {
        let mut logger = aya_log::EbpfLogger::init(&mut self.ebpf)?;
        Ok(move || logger.flush())
    }

    /// The program for one side of a device.
    fn packet_program(&self, direction: Direction, no_header: bool) -> Result<BorrowedFd<'_>, Error> {
        if !no_header {
            return program(&self.ebpf, direction.program());
        }
        if self.headerless.get().is_none() {
            // Who else has loaded it meanwhile has loaded the same.
            let (paths, none) = (self.pins.paths(), object::Transition::None);
            let _ = self.headerless.set(object::load_packet_programs(self.object, paths, true, none)?);
        }
        let missing = Error::Incomplete { kind: "program", name: direction.program() };
        program(self.headerless.get().ok_or(missing)?, direction.program())
    }

    /// Attaches the socket programs, or takes over the links of an earlier agent; then puts the maps of this
    /// version in force, and removes those of other versions. Where programs of the previous version are attached, those on
    /// devices are replaced too, and what they follow is copied.
    pub fn attach_sockets(&self) -> Result<Vec<(&'static str, Outcome)>, Error> {
        let mut predecessor = self.predecessor.lock().unwrap_or_else(PoisonError::into_inner);
        let outcomes = match predecessor.as_deref() {
            Some(previous) => self.succeed(previous)?,
            None => self.hold_sockets()?,
        };
        migrate::remove_left(self.pins.paths());
        self.pins.enact()?;
        self.pins.retire_other_versions()?;
        *predecessor = None;
        Ok(outcomes)
    }

    fn hold_sockets(&self) -> Result<Vec<(&'static str, Outcome)>, Error> {
        let ours = links::our_programs();
        let strays = links::on_cgroup(&self.cgroup, &ours);
        let mut strays_of = BTreeMap::<String, Vec<bpf::Link>>::new();
        for (name, link) in strays {
            strays_of.entry(name).or_default().push(link);
        }
        let mut outcomes = Vec::new();
        for (name, attach_type) in SOCKET_HOOKS {
            let place = Place::Cgroup { cgroup: &self.cgroup, attach_type: attach_type as u32 };
            let pin = self.pins.paths().links().join(name);
            let strays = strays_of.remove(name).unwrap_or_default();
            outcomes.push((name, links::hold(&pin, name, place, program(&self.ebpf, name)?, &strays)?));
        }
        Ok(outcomes)
    }

    /// Attaches the packet programs to a device, or takes over what an earlier agent left there. What was
    /// attached in the other way, by TCX or by clsact, goes when the new one works. `no_header`: its packets begin
    /// with their IP header.
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
            let place = Place::Device { ifindex, attach_type, rank: self.tcx_order.rank(direction) };
            links::hold(&pin, name, place, self.packet_program(direction, no_header)?, &strays)?;
        }
        self.remove_filters(ifindex)
    }

    /// Two agents in one network namespace would take each other's links for forgotten ones.
    fn lock_devices(&self) -> Result<(), Error> {
        let mut lock = self.devices_lock.lock().unwrap_or_else(PoisonError::into_inner);
        if lock.is_none() {
            let path = Path::new(pins::NETWORK_NAMESPACE);
            let taken = pins::lock(path).map_err(Error::file("lock", path))?;
            *lock = Some(taken.ok_or(Error::DevicesInUse)?);
        }
        Ok(())
    }

    /// Takes the packet programs off a device, which may be gone.
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
            if let Some(other) =
                there.iter().find(|f| f.has_handle(Handle::Own) && !f.is_ours(direction, Handle::Own))
            {
                return Err(Error::FilterTaken {
                    device,
                    owner: other.name.clone().unwrap_or_default(),
                    priority: other.priority,
                    handle: other.handle,
                });
            }
            let program = self.packet_program(direction, no_header)?;
            clsact::set(&mut netlink, ifindex, direction, Handle::Own, program).map_err(failed(name))?;
        }
        Ok(())
    }

    fn remove_filters(&self, ifindex: u32) -> Result<(), Error> {
        cleanup::remove_filters(self.pins.paths(), ifindex).map(drop)
    }
}

impl DeviceHooks for Programs {
    type Error = Error;

    fn attach(&self, device: &Device) -> Result<(), Error> {
        self.attach_device(device.ifindex, device.no_header)
    }

    fn detach(&self, ifindex: u32) -> Result<(), Error> {
        self.detach_device(ifindex)
    }

    fn attached_again(&self) {
        self.repairs.add_device();
    }

    fn settled(&self, devices: &[Device]) {
        let own = iter::once(&self.ebpf).chain(self.headerless.get()).flat_map(calls::users).collect();
        calls::release_unused(self.pins.paths(), &own);
        let tc = self.attached();
        self.keep_xdp(devices, |ifindex| tc.get(&ifindex) == Some(&true));
    }

    fn attached(&self) -> BTreeMap<u32, bool> {
        let links = status::linked_devices(self.pins.paths());
        let filters = status::filtered_devices(self.pins.paths());
        let places: BTreeSet<u32> = links.keys().chain(filters.keys()).copied().collect();
        let in_force = if self.tcx { &links } else { &filters };
        let complete =
            |ifindex: &u32| in_force.get(ifindex).is_some_and(|count| *count == Direction::ALL.len());
        places.into_iter().map(|ifindex| (ifindex, complete(&ifindex))).collect()
    }
}

/// A loaded program.
fn program<'a>(ebpf: &'a Ebpf, name: &'static str) -> Result<BorrowedFd<'a>, Error> {
    let missing = || Error::Incomplete { kind: "program", name };
    let program = ebpf.program(name).ok_or_else(missing)?;
    let fd = match program {
        Program::CgroupSock(program) => program.fd(),
        Program::CgroupSockAddr(program) => program.fd(),
        Program::SockOps(program) => program.fd(),
        Program::SchedClassifier(program) => program.fd(),
        Program::Xdp(program) => program.fd(),
        _ => return Err(missing()),
    };
    Ok(fd.map_err(|source| Error::Program { name, source: Box::new(source) })?.as_fd())
}

/// The name of a device, or its number when it is not in this network namespace.
fn device_name(ifindex: u32) -> String {
    known_device_name(ifindex).unwrap_or_else(|| format!("#{ifindex}"))
}

/// The name of a device of this network namespace; `None` when it is not there.
fn known_device_name(ifindex: u32) -> Option<String> {
    let socket =
        rustix::net::socket(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::DGRAM, None).ok()?;
    rustix::net::netdevice::index_to_name(&socket, ifindex).ok()
}
