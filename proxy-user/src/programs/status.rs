//! What is loaded and attached, for metrics and for people.

use std::path::Path;
use std::time::SystemTime;

use aya::programs::{Program, ProgramInfo};

use super::bpf::{Hook, Link};
use super::hooks::{self, Direction};
use super::pins::{self, Paths};
use super::{Programs, clsact};
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
        let devices = self.filtered.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        let Ok(mut netlink) = Netlink::open() else { return Vec::new() };
        let mut places = Vec::new();
        for ifindex in devices {
            for direction in Direction::ALL {
                let filters = clsact::filters(&mut netlink, ifindex, direction).unwrap_or_default();
                let ours = filters.into_iter().filter(|filter| filter.is_ours(direction));
                let device = super::device_name(ifindex);
                places.extend(ours.filter_map(|filter| filter.program).map(|id| (id, device.clone())));
            }
        }
        places
    }
}
