//! The XDP program on uplinks, which forwards packets to other nodes before tc sees them.
//!
//! A driver may reset the device when a program is attached or detached. So the program is attached once, by a pinned link
//! that the next agent takes over, and is detached only when it is not wanted any more. If it cannot be attached, tc handles
//! all packets, and the agent reports this.

pub mod keeper;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use aya::maps::{HashMap, Map, MapData};
use proxy_common::map_names as names;
use proxy_common::node::DEVICE_UPLINK;

use self::keeper::{AttachedXdp, NO_DRIVER, Refusal, XdpDevice, XdpDevices};
use super::bpf::{Hook, Link, LinkInfo};
use super::hooks::{pinned_xdp, xdp_pin};
use super::links::{self, AttachOutcome, AttachPoint};
use super::loaded::Programs;
use super::program::program;
use super::{Error, pins};
use crate::host::devices::{Device, XdpMode};

impl Programs {
    /// Returns the uplinks as of the last pass, with the result for each.
    pub fn xdp_devices(&self) -> Arc<XdpDevices> {
        Arc::clone(&self.xdp.devices)
    }

    /// Attaches the XDP program to those of the uplinks among these devices that are to have it, and detaches it from all
    /// others. `has_tc`: whether a device has the tc programs, to which XDP leaves many packets.
    pub(super) fn keep_xdp(&self, devices: &[Device], has_tc: impl Fn(u32) -> bool) {
        // If the uplinks or their links cannot be read, everything stays as it is: a driver may reset the device for each change.
        let Some(uplinks) = self.uplinks() else { return };
        if let Some(error) = uplinks.iter().find_map(|ifindex| self.pinned_link(*ifindex).err()) {
            tracing::debug!(%error, "cannot read an XDP link");
            return;
        }
        let mut found = BTreeMap::new();
        for device in devices.iter().filter(|device| uplinks.contains(&device.ifindex)) {
            let wanted = if has_tc(device.ifindex) {
                self.xdp.wanted(device, devices)
            } else {
                Err("the device has no tc programs".to_owned())
            };
            let (mode, reason) = match wanted.and_then(|mode| self.hold_xdp(device, mode)) {
                Ok(XdpMode::Native) => (AttachedXdp::Native, String::new()),
                Ok(XdpMode::Generic) => (AttachedXdp::Generic, String::new()),
                Err(reason) => {
                    self.release_xdp(device.ifindex);
                    (AttachedXdp::None, reason)
                }
            };
            found.insert(device.ifindex, XdpDevice { device: device.name.clone(), mode, reason });
        }
        for pin in pins::entries(&self.pins.paths().links()).unwrap_or_default() {
            if let Some(ifindex) = pinned_xdp(&pin).filter(|ifindex| !found.contains_key(ifindex)) {
                self.release_xdp(ifindex);
            }
        }
        let before = self.xdp.devices.replace(found.clone());
        for (ifindex, now) in found {
            if before.get(&ifindex) == Some(&now) {
                continue;
            }
            let XdpDevice { device, mode, reason } = now;
            if mode == AttachedXdp::None {
                tracing::info!(device, reason, "no XDP on this uplink; tc handles all packets");
            } else {
                tracing::info!(device, mode = mode.label(), "XDP program attached");
            }
        }
    }

    /// Returns the uplinks, as the programs know them.
    fn uplinks(&self) -> Option<BTreeSet<u32>> {
        let map = MapData::from_pin(self.pins.paths().maps().join(names::DEVICES)).ok()?;
        let map = HashMap::<_, u32, u64>::try_from(Map::HashMap(map)).ok()?;
        let mut uplinks = BTreeSet::new();
        for row in &map {
            let (ifindex, bits) = row.ok()?;
            if bits & DEVICE_UPLINK != 0 {
                uplinks.insert(ifindex);
            }
        }
        Some(uplinks)
    }

    /// Returns the pinned XDP link of a device.
    fn pinned_link(&self, ifindex: u32) -> io::Result<Option<LinkInfo>> {
        let link = Link::pinned(&self.pins.paths().links().join(xdp_pin(ifindex)))?;
        let info = link.map(|link| link.info()).transpose()?;
        Ok(info.filter(|link| link.hook == Hook::Xdp { ifindex }))
    }

    /// Attaches the program to a device, or keeps it there; the error tells why not.
    fn hold_xdp(&self, device: &Device, mode: XdpMode) -> Result<XdpMode, String> {
        let (ifindex, name) = (device.ifindex, self.xdp.mode.program());
        let pin = self.pins.paths().links().join(xdp_pin(ifindex));
        let mut pinned =
            self.pinned_link(ifindex).map_err(|error| format!("cannot read {}: {error}", pin.display()))?;
        let is_own = |program| self.info(name).is_some_and(|info| info.id() == program);
        // The list of devices may be older than this agent's own update of the link.
        if pinned.as_ref().is_some_and(|link| is_own(link.program))
            && device.xdp.is_none_or(|there| there.mode == Some(mode))
        {
            return Ok(mode);
        }
        pinned = pinned.filter(|link| device.xdp.is_some_and(|xdp| xdp.program == link.program));
        let mut strays = Vec::new();
        match (device.xdp, pinned) {
            (Some(there), Some(_)) if there.mode == Some(mode) => {}
            (_, Some(_)) => self.release_xdp(ifindex),
            (Some(there), None) => {
                strays = links::of_xdp(ifindex, there.program);
                if strays.is_empty() {
                    return Err(format!(
                        "another XDP program is attached (id {}); Ballast does not replace it",
                        there.program
                    ));
                }
            }
            (None, None) => {}
        }
        let is_there = pinned.is_some() && pin.exists() || !strays.is_empty();
        if !is_there {
            self.may_try(device, mode)?;
        }
        let place = AttachPoint::Xdp { ifindex, mode };
        let held = (|| {
            self.lock_devices()?;
            // A program that takes over has to know at once on which devices it may send.
            self.xdp.set_open(ifindex, is_there);
            links::hold(&pin, name, place, program(&self.ebpf, name)?, &strays)
        })();
        self.xdp.set_open(ifindex, held.is_ok());
        let mut refusals = self.xdp.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        match held {
            Ok(outcome) => {
                refusals.remove(&ifindex);
                if outcome == AttachOutcome::Attached && self.xdp.devices.knows(ifindex) {
                    self.repairs.add_device();
                }
                Ok(mode)
            }
            Err(error) => {
                let reason = refusal(&error, mode);
                let before = refusals.remove(&ifindex);
                let refused = Refusal::new(before.as_ref(), Instant::now(), mode, device.mtu, reason.clone());
                refusals.insert(ifindex, refused);
                Err(reason)
            }
        }
    }

    /// Whether it is time to try a device that refused; the error is the refusal.
    fn may_try(&self, device: &Device, mode: XdpMode) -> Result<(), String> {
        let refusals = self.xdp.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        let stands = |refusal: &&Refusal| refusal.stands(Instant::now(), mode, device.mtu);
        refusals.get(&device.ifindex).filter(stands).map_or(Ok(()), |refusal| Err(refusal.reason.clone()))
    }

    /// Detaches the program from a device.
    fn release_xdp(&self, ifindex: u32) {
        self.xdp.set_open(ifindex, false);
        let pin = self.pins.paths().links().join(xdp_pin(ifindex));
        match links::release(&pin) {
            Ok(true) => tracing::info!(ifindex, "XDP program removed"),
            Ok(false) => {}
            Err(error) => tracing::warn!(ifindex, %error, "cannot remove the XDP program"),
        }
    }
}

/// Returns why a device refused the program.
fn refusal(error: &Error, mode: XdpMode) -> String {
    let source = match error {
        Error::Attach { source, .. } => source,
        other => return other.to_string(),
    };
    match source.raw_os_error() {
        Some(libc::EOPNOTSUPP) if mode == XdpMode::Native => NO_DRIVER.to_owned(),
        Some(libc::EBUSY | libc::EEXIST) => {
            "another XDP program is attached; Ballast does not replace it".to_owned()
        }
        // Drivers return these errors if the MTU is too large, if there are too few channels, or because of LRO.
        Some(libc::EINVAL | libc::ERANGE | libc::E2BIG | libc::ENOMEM | libc::ENOSPC) => {
            format!(
                "the driver rejects the program ({source}): check its MTU and channels, and the kernel log"
            )
        }
        _ => format!(
            "the device rejects the program: {}",
            io::Error::from_raw_os_error(source.raw_os_error().unwrap_or(0))
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::programs::hooks::XDP;

    #[test]
    fn xdp_attach_error_names_what_to_check() {
        let error = |number| Error::Attach {
            program: XDP,
            place: "device eth0".to_owned(),
            source: io::Error::from_raw_os_error(number),
        };
        assert_eq!(refusal(&error(libc::EOPNOTSUPP), XdpMode::Native), NO_DRIVER);
        assert!(refusal(&error(libc::EINVAL), XdpMode::Native).contains("MTU"));
        assert!(refusal(&error(libc::EBUSY), XdpMode::Generic).contains("does not replace it"));
    }
}
