//! What is loaded and attached, for metrics and users.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Duration;

use aya::programs::loaded_programs;

use super::bpf::{self, Hook, Link, LinkInfo};
use super::clsact::{self, Filter};
use super::hooks::{self, Direction};
use super::pins::{self, Paths};
use crate::host::devices::{device_name, known_device_name};
use crate::host::netlink::Netlink;

/// A program of Ballast at a hook, attached by a pinned link or by a filter of the clsact qdisc.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// The name of the link's pin, `sock_connect4`, `tcx_ingress_7` or `xdp_7`; `clsact_ingress_7` for a filter.
    pub hook: String,
    /// The kernel's id of the program; 0 if the filter was removed externally.
    pub program_id: u32,
    /// The program's name.
    pub program: &'static str,
    /// The device of a packet program.
    pub ifindex: Option<u32>,
    /// The place: `cgroup 1` with the cgroup's id, or the name of a device. `None` if the cgroup or device is gone.
    pub place: Option<String>,
    /// How often the program ran; zero unless `kernel.bpf_stats_enabled` is set.
    pub runs: u64,
    /// How long the program ran in all; zero unless `kernel.bpf_stats_enabled` is set.
    pub run_time: Duration,
}

impl Attachment {
    /// Whether the program is attached: its place and the program exist.
    pub fn is_attached(&self) -> bool {
        self.place.is_some() && self.program_id != 0
    }
}

/// Returns what is attached according to a bpffs, in order of hooks; needs no agent. Devices are those of this network
/// namespace.
pub fn attachments(bpffs: &Path) -> Vec<Attachment> {
    let paths = Paths::new(bpffs);
    let mut all = by_link(&paths);
    all.extend(by_filter(&paths));
    let mut infos = BTreeMap::new();
    for info in loaded_programs().flatten() {
        infos.insert(info.id(), info);
    }
    for one in &mut all {
        if let Some(info) = infos.get(&one.program_id) {
            (one.runs, one.run_time) = (info.run_count(), info.run_time());
        }
    }
    all.sort_by(|a, b| a.hook.cmp(&b.hook));
    all
}

fn by_link(paths: &Paths) -> Vec<Attachment> {
    let names = pins::entries(&paths.links()).unwrap_or_default();
    names
        .into_iter()
        .filter_map(|hook| {
            // A link that was removed since the folder was listed, or that is not Ballast's, is not an error.
            let program = hooks::pinned_program(&hook)?;
            let info = Link::pinned(&paths.links().join(&hook)).ok()??.info().ok()?;
            let place = match info.hook {
                Hook::Cgroup { id: 0, .. }
                | Hook::Tcx { ifindex: 0, .. }
                | Hook::Xdp { ifindex: 0 }
                | Hook::Other => None,
                Hook::Cgroup { id, .. } => Some(format!("cgroup {id}")),
                Hook::Tcx { ifindex, .. } | Hook::Xdp { ifindex } => Some(device_name(ifindex)),
            };
            Some(Attachment {
                program_id: info.program,
                program,
                ifindex: hooks::pinned_device(&hook).or_else(|| hooks::pinned_xdp(&hook)),
                hook,
                place,
                runs: 0,
                run_time: Duration::ZERO,
            })
        })
        .collect()
}

/// Returns both directions of every device that was given filters, even if it lost them.
fn by_filter(paths: &Paths) -> Vec<Attachment> {
    let filters = our_filters(paths);
    let one = |ifindex: u32, direction: Direction| {
        let filter = filters
            .iter()
            .find(|(at, filter)| *at == ifindex && filter.name.as_deref() == Some(direction.program()));
        Attachment {
            hook: format!("clsact_{direction}_{ifindex}"),
            program_id: filter.and_then(|(_, filter)| filter.program).unwrap_or_default(),
            program: direction.program(),
            ifindex: Some(ifindex),
            place: known_device_name(ifindex),
            runs: 0,
            run_time: Duration::ZERO,
        }
    };
    let devices = marked(paths).into_iter().flatten();
    devices.flat_map(|ifindex| Direction::ALL.map(|direction| one(ifindex, direction))).collect()
}

/// Returns the devices with pinned links of Ballast, and how many of the links are alive, or cannot be read: without file descriptors,
/// nothing says that a link is gone. The index that a link states may be that of a device in another network namespace.
pub(super) fn linked_devices(paths: &Paths) -> io::Result<BTreeMap<u32, usize>> {
    let mut counts = BTreeMap::new();
    for pin in pins::entries(&paths.links())? {
        let Some(ifindex) = hooks::pinned_device(&pin) else { continue };
        let path = paths.links().join(&pin);
        let info = Link::pinned(&path).and_then(|link| link.map(|link| link.info()).transpose());
        let is_of = |info: LinkInfo| match info.hook {
            Hook::Tcx { ifindex: at, attach_type } if at == ifindex => {
                bpf::tcx_links(ifindex, attach_type).map_or(true, |links| links.contains(&info.id))
            }
            _ => false,
        };
        let alive = info.map_or(true, |info| info.is_some_and(is_of));
        *counts.entry(ifindex).or_default() += usize::from(alive);
    }
    Ok(counts)
}

/// The filters of both directions of devices.
pub(super) type Filters = BTreeMap<u32, [(Direction, Vec<Filter>); 2]>;

/// Returns the devices that were given filters of Ballast, and all filters that they have, in the kernel's order.
pub(super) fn filtered_devices(paths: &Paths) -> io::Result<Filters> {
    let mut devices = marked(paths)?.peekable();
    if devices.peek().is_none() {
        return Ok(BTreeMap::new());
    }
    let mut netlink = Netlink::open()?;
    let mut of =
        |ifindex, direction| io::Result::Ok((direction, clsact::filters(&mut netlink, ifindex, direction)?));
    devices
        .map(|ifindex| {
            let [ingress, egress] = Direction::ALL.map(|direction| of(ifindex, direction));
            Ok((ifindex, [ingress?, egress?]))
        })
        .collect()
}

fn marked(paths: &Paths) -> io::Result<impl Iterator<Item = u32>> {
    Ok(pins::entries(&paths.filters())?.into_iter().filter_map(|name| name.parse().ok()))
}

/// Returns Ballast's filters on the devices that were given them.
fn our_filters(paths: &Paths) -> Vec<(u32, Filter)> {
    let mut found = Vec::new();
    for (ifindex, both) in filtered_devices(paths).unwrap_or_default() {
        for (direction, filters) in both {
            let ours = filters.into_iter().filter(|filter| filter.is_ours(direction));
            found.extend(ours.map(|filter| (ifindex, filter)));
        }
    }
    found
}
