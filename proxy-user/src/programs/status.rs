//! What is loaded and attached, for metrics and for people.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::SystemTime;

use aya::programs::{Program, ProgramInfo};

use super::Programs;
use super::bpf::{Hook, Link};
use super::clsact::{self, Filter};
use super::hooks::{self, Direction};
use super::pins::{self, Paths};
use crate::host::netlink::Netlink;

/// A loaded program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramStatus {
    /// Its name.
    pub name: &'static str,
    /// The kernel's id of it.
    pub id: u32,
    /// Hash of its instructions, in hexadecimal.
    pub tag: String,
    /// When it was loaded.
    pub loaded_at: Option<SystemTime>,
    /// Instructions that the verifier looked at.
    pub verified_instructions: Option<u32>,
    /// Bytes of machine code.
    pub jited_bytes: u32,
    /// Where it is attached: `cgroup 1`, `eth0`.
    pub attached: Vec<String>,
}

/// A pinned link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// Name of its pin.
    pub pin: String,
    /// The kernel's id of its program.
    pub program: u32,
    /// Where: `cgroup 1` by the cgroup's id, or the name of a device. `None`: its cgroup or device is gone.
    pub place: Option<String>,
}

/// The links that are pinned on a bpffs; needs no agent.
pub fn attachments(bpffs: &Path) -> Vec<Attachment> {
    pinned(&Paths::new(bpffs))
}

fn pinned(paths: &Paths) -> Vec<Attachment> {
    let names = pins::entries(&paths.links()).unwrap_or_default();
    names
        .into_iter()
        .filter_map(|pin| {
            let info = Link::pinned(&paths.links().join(&pin)).ok()??.info().ok()?;
            let place = match info.hook {
                Hook::Cgroup { id: 0, .. } | Hook::Tcx { ifindex: 0, .. } | Hook::Other => None,
                Hook::Cgroup { id, .. } => Some(format!("cgroup {id}")),
                Hook::Tcx { ifindex, .. } => Some(super::device_name(ifindex)),
            };
            Some(Attachment { pin, program: info.program, place })
        })
        .collect()
}

impl Programs {
    /// Every program that has a hook. Programs whose information cannot be read are left out.
    pub fn status(&self) -> Vec<ProgramStatus> {
        let links = pinned(self.pins.paths());
        let filters = self.filter_places();
        hooks::names()
            .filter_map(|name| {
                let info = self.info(name)?;
                let by_link = links.iter().filter(|link| link.program == info.id());
                let mut attached: Vec<_> = by_link.filter_map(|link| link.place.clone()).collect();
                let by_filter = filters.iter().filter(|(program, _)| *program == info.id());
                attached.extend(by_filter.map(|(_, device)| device.clone()));
                Some(ProgramStatus {
                    name,
                    id: info.id(),
                    tag: format!("{:016x}", info.tag()),
                    loaded_at: info.loaded_at(),
                    verified_instructions: info.verified_instruction_count(),
                    jited_bytes: info.size_jitted(),
                    attached,
                })
            })
            .collect()
    }

    fn info(&self, name: &str) -> Option<ProgramInfo> {
        match self.ebpf.program(name)? {
            Program::CgroupSockAddr(program) => program.info().ok(),
            Program::SchedClassifier(program) => program.info().ok(),
            _ => None,
        }
    }

    /// Programs of our filters, and their devices.
    fn filter_places(&self) -> Vec<(u32, String)> {
        let filters = our_filters(self.pins.paths()).into_iter();
        filters.filter_map(|(ifindex, filter)| Some((filter.program?, super::device_name(ifindex)))).collect()
    }
}

/// Devices with pinned links of ours, and how many of the links are alive.
pub(super) fn linked_devices(paths: &Paths) -> BTreeMap<u32, usize> {
    let mut counts = BTreeMap::new();
    for pin in pins::entries(&paths.links()).unwrap_or_default() {
        let Some(ifindex) = hooks::pinned_device(&pin) else { continue };
        let info = Link::pinned(&paths.links().join(&pin)).ok().flatten().and_then(|link| link.info().ok());
        let alive =
            info.is_some_and(|info| matches!(info.hook, Hook::Tcx { ifindex: at, .. } if at == ifindex));
        *counts.entry(ifindex).or_default() += usize::from(alive);
    }
    counts
}

/// Devices that were given filters of ours, and how many they have.
pub(super) fn filtered_devices(paths: &Paths) -> BTreeMap<u32, usize> {
    let mut counts: BTreeMap<u32, usize> = marked(paths).map(|ifindex| (ifindex, 0)).collect();
    for (ifindex, _) in our_filters(paths) {
        *counts.entry(ifindex).or_default() += 1;
    }
    counts
}

fn marked(paths: &Paths) -> impl Iterator<Item = u32> {
    let names = pins::entries(&paths.filters()).unwrap_or_default();
    names.into_iter().filter_map(|name| name.parse().ok())
}

/// Filters of ours on the devices that were given them.
fn our_filters(paths: &Paths) -> Vec<(u32, Filter)> {
    let mut found = Vec::new();
    let Ok(mut netlink) = Netlink::open() else { return found };
    for ifindex in marked(paths) {
        for direction in Direction::ALL {
            let filters = clsact::filters(&mut netlink, ifindex, direction).unwrap_or_default();
            let ours = filters.into_iter().filter(|filter| filter.is_ours(direction));
            found.extend(ours.map(|filter| (ifindex, filter)));
        }
    }
    found
}
