//! The XDP program on uplinks, which forwards what goes to other nodes before tc sees it.
//!
//! A driver may reset the device when a program comes or goes. So it is attached once, by a pinned link that the next agent
//! takes over, and is detached only when it is not wanted any more. Where it cannot be, tc does all of it, and that is told.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use aya::maps::{HashMap, Map, MapData};
use proxy_common::map_names as names;
use proxy_common::node::DEVICE_UPLINK;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::bpf::{Hook, Link};
use super::hooks::{XDP, XDP_GENERIC, pinned_xdp, xdp_pin};
use super::links::{self, Outcome, Place};
use super::{Error, Programs, pins, program};
use crate::host::devices::{Device, XdpMode};

/// Which devices get the XDP program, and how (`--xdp`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Xdp {
    /// Uplinks whose driver runs it, but for virtual devices.
    #[default]
    Auto,
    /// Uplinks whose driver runs it, virtual ones too.
    Native,
    /// Uplinks, in the kernel's own stack.
    Generic,
    /// None.
    Off,
}

impl Xdp {
    /// The program for it.
    pub(super) const fn program(self) -> &'static str {
        match self {
            Self::Generic => XDP_GENERIC,
            Self::Auto | Self::Native | Self::Off => XDP,
        }
    }
}

/// What a device got.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Taken {
    /// The driver runs the program.
    Native,
    /// The kernel's stack does.
    Generic,
    /// No program: tc does all of it.
    None,
}

impl Taken {
    /// As metrics and people name it.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Generic => "generic",
            Self::None => "none",
        }
    }
}

/// An uplink, and what it got.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct XdpDevice {
    /// Its name.
    pub device: String,
    /// What it got.
    pub mode: Taken,
    /// Why it got nothing; empty otherwise.
    pub reason: String,
}

/// The uplinks after the last look, by index.
#[derive(Debug, Default)]
pub struct XdpDevices(watch::Sender<BTreeMap<u32, XdpDevice>>);

impl XdpDevices {
    /// All of them.
    pub fn list(&self) -> Vec<XdpDevice> {
        self.0.borrow().values().cloned().collect()
    }

    /// All of them, and a way to wait until they change.
    pub fn follow(&self) -> watch::Receiver<BTreeMap<u32, XdpDevice>> {
        self.0.subscribe()
    }

    fn knows(&self, ifindex: u32) -> bool {
        self.0.borrow().contains_key(&ifindex)
    }

    /// Gives what was there before.
    fn replace(&self, new: BTreeMap<u32, XdpDevice>) -> BTreeMap<u32, XdpDevice> {
        let before = self.0.borrow().clone();
        self.0.send_if_modified(|devices| {
            let is_new = *devices != new;
            *devices = new;
            is_new
        });
        before
    }
}

/// A device that refused is asked again after that; one whose driver has no XDP never.
const AGAIN: Duration = Duration::from_mins(1);

/// What the programs need to look after XDP.
pub(super) struct Keeper {
    mode: Xdp,
    /// Why the program could not be loaded.
    unusable: Option<String>,
    /// `xdp_devices`, of this load of the programs.
    open: Mutex<Option<HashMap<MapData, u32, u32>>>,
    refused: Mutex<BTreeMap<u32, (Instant, XdpMode, String)>>,
    pub devices: Arc<XdpDevices>,
}

impl Keeper {
    /// Takes the map out of the object, after its programs were loaded.
    pub(super) fn new(mode: Xdp, unusable: Option<String>, map: Option<Map>) -> Self {
        let open = map.and_then(|map| HashMap::try_from(map).ok());
        Self { mode, unusable, open: Mutex::new(open), refused: Mutex::default(), devices: Arc::default() }
    }

    /// Lets the program send packets of other devices by this one, or not.
    fn set_open(&self, ifindex: u32, is_open: bool) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(map) = open.as_mut() {
            // Without the entry packets go by tc, and one too few of them is no harm.
            let _ = if is_open { map.insert(ifindex, 1, 0) } else { map.remove(&ifindex) };
        }
    }

    /// How a device is to get the program, or why it is not.
    fn wanted(&self, device: &Device, devices: &[Device]) -> Result<XdpMode, String> {
        let told = |reason: &str| Err(reason.to_owned());
        let mode = match self.mode {
            Xdp::Off => return told("--xdp off"),
            Xdp::Generic => XdpMode::Generic,
            Xdp::Auto | Xdp::Native => XdpMode::Native,
        };
        if let Some(reason) = &self.unusable {
            return Err(format!("the program cannot be loaded: {reason}"));
        }
        if !device.ethernet {
            return told("it has no Ethernet header");
        }
        if device.master.is_some() {
            return told("it is a port of another device");
        }
        if devices.iter().any(|other| other.vlan && other.below == Some(device.ifindex)) {
            return told("VLANs lie on it: drivers take the tags out of frames before XDP");
        }
        if self.mode == Xdp::Auto && device.is_virtual() {
            return told("it is a virtual device; --xdp native takes it");
        }
        Ok(mode)
    }
}

impl Programs {
    /// What the uplinks got at the last look.
    pub fn xdp_devices(&self) -> Arc<XdpDevices> {
        Arc::clone(&self.xdp.devices)
    }

    /// Puts the XDP program on the uplinks among these devices that are to have it, and takes it off all others. `has_tc`:
    /// whether a device has the tc programs, to which XDP leaves much.
    pub(super) fn keep_xdp(&self, devices: &[Device], has_tc: impl Fn(u32) -> bool) {
        // Who cannot tell leaves all as it is.
        let Some(uplinks) = self.uplinks() else { return };
        let mut found = BTreeMap::new();
        for device in devices.iter().filter(|device| uplinks.contains(&device.ifindex)) {
            let wanted = if has_tc(device.ifindex) {
                self.xdp.wanted(device, devices)
            } else {
                Err("it has no tc programs".to_owned())
            };
            let (mode, reason) = match wanted.and_then(|mode| self.hold_xdp(device, mode)) {
                Ok(XdpMode::Native) => (Taken::Native, String::new()),
                Ok(XdpMode::Generic) => (Taken::Generic, String::new()),
                Err(reason) => {
                    self.release_xdp(device.ifindex);
                    (Taken::None, reason)
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
            if mode == Taken::None {
                tracing::info!(device, reason, "no XDP on this uplink: tc does all of it");
            } else {
                tracing::info!(device, mode = mode.label(), "XDP program attached");
            }
        }
    }

    /// The devices that lead to other machines, as the programs know them.
    fn uplinks(&self) -> Option<BTreeSet<u32>> {
        let map = MapData::from_pin(self.pins.paths().maps().join(names::DEVICES)).ok()?;
        let map = HashMap::<_, u32, u32>::try_from(Map::HashMap(map)).ok()?;
        let mut uplinks = BTreeSet::new();
        for row in &map {
            let (ifindex, bits) = row.ok()?;
            if bits & DEVICE_UPLINK != 0 {
                uplinks.insert(ifindex);
            }
        }
        Some(uplinks)
    }

    /// Puts the program on a device, or leaves it there; the error says why not.
    fn hold_xdp(&self, device: &Device, mode: XdpMode) -> Result<XdpMode, String> {
        let (ifindex, name) = (device.ifindex, self.xdp.mode.program());
        let pin = self.pins.paths().links().join(xdp_pin(ifindex));
        let mut pinned = Link::pinned(&pin).ok().flatten().and_then(|link| link.info().ok());
        pinned = pinned.filter(|link| {
            link.hook == Hook::Xdp { ifindex } && device.xdp.is_some_and(|xdp| xdp.program == link.program)
        });
        let mut strays = Vec::new();
        match (device.xdp, pinned) {
            (Some(there), Some(link)) if there.mode == Some(mode) => {
                if self.info(name).is_some_and(|info| info.id() == link.program) {
                    return Ok(mode);
                }
            }
            (_, Some(_)) => self.release_xdp(ifindex),
            (Some(there), None) => {
                strays = links::of_xdp(ifindex, there.program);
                if strays.is_empty() {
                    return Err(format!(
                        "another XDP program is on it (id {}); it is left alone",
                        there.program
                    ));
                }
            }
            (None, None) => {}
        }
        let is_there = pinned.is_some() && pin.exists() || !strays.is_empty();
        if !is_there {
            self.may_try(ifindex, mode)?;
        }
        let place = Place::Xdp { ifindex, mode };
        let held = (|| {
            self.lock_devices()?;
            // The program that takes over is to know at once where it may send.
            self.xdp.set_open(ifindex, is_there);
            links::hold(&pin, name, place, program(&self.ebpf, name)?, &strays)
        })();
        self.xdp.set_open(ifindex, held.is_ok());
        match held {
            Ok(outcome) => {
                if outcome == Outcome::Attached && self.xdp.devices.knows(ifindex) {
                    self.repairs.add_device();
                }
                Ok(mode)
            }
            Err(error) => {
                let reason = refusal(&error, mode);
                let mut refused = self.xdp.refused.lock().unwrap_or_else(PoisonError::into_inner);
                refused.insert(ifindex, (Instant::now(), mode, reason.clone()));
                Err(reason)
            }
        }
    }

    /// Whether it is time to ask a device that refused; the error is what it said.
    fn may_try(&self, ifindex: u32, mode: XdpMode) -> Result<(), String> {
        let refused = self.xdp.refused.lock().unwrap_or_else(PoisonError::into_inner);
        match refused.get(&ifindex) {
            Some((at, of, reason)) if *of == mode && (at.elapsed() < AGAIN || reason == NO_DRIVER) => {
                Err(reason.clone())
            }
            _ => Ok(()),
        }
    }

    /// Takes it off a device.
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

/// What is told of a driver without XDP.
const NO_DRIVER: &str = "its driver has no XDP";

/// Why a device refused.
fn refusal(error: &Error, mode: XdpMode) -> String {
    let source = match error {
        Error::Attach { source, .. } => source,
        other => return other.to_string(),
    };
    match source.raw_os_error() {
        Some(libc::EOPNOTSUPP) if mode == XdpMode::Native => NO_DRIVER.to_owned(),
        Some(libc::EBUSY | libc::EEXIST) => "another XDP program is on it; it is left alone".to_owned(),
        // What drivers answer to an MTU that is too large, to channels that are too few, and to LRO.
        Some(libc::EINVAL | libc::ERANGE | libc::E2BIG | libc::ENOMEM | libc::ENOSPC) => {
            format!(
                "its driver refuses the program ({source}): see its MTU and channels, and the kernel's log"
            )
        }
        _ => format!(
            "it refuses the program: {}",
            io::Error::from_raw_os_error(source.raw_os_error().unwrap_or(0))
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keeper(mode: Xdp) -> Keeper {
        Keeper::new(mode, None, None)
    }

    fn nic() -> Device {
        Device { ifindex: 2, name: "eth0".to_owned(), ethernet: true, ..Device::default() }
    }

    #[test]
    fn auto_takes_what_has_a_driver_and_native_takes_all() {
        for (mode, expected) in [
            (Xdp::Native, Some(XdpMode::Native)),
            (Xdp::Generic, Some(XdpMode::Generic)),
            (Xdp::Off, None),
            (Xdp::Auto, (!nic().is_virtual()).then_some(XdpMode::Native)),
        ] {
            assert_eq!(keeper(mode).wanted(&nic(), &[]).ok(), expected, "{mode:?}");
        }
    }

    #[test]
    fn what_xdp_cannot_see_right_is_left_to_tc() {
        let refused =
            |device: Device, others: &[Device]| keeper(Xdp::Generic).wanted(&device, others).unwrap_err();
        assert!(refused(Device { ethernet: false, ..nic() }, &[]).contains("Ethernet"));
        assert!(refused(Device { master: Some(3), ..nic() }, &[]).contains("port"));
        let vlan = Device { ifindex: 9, below: Some(2), vlan: true, ..Device::default() };
        assert!(refused(nic(), std::slice::from_ref(&vlan)).contains("VLAN"));
        assert!(keeper(Xdp::Generic).wanted(&vlan, &[]).is_err(), "it has no Ethernet header here");
        let unusable = Keeper::new(Xdp::Native, Some("too old".to_owned()), None);
        assert!(unusable.wanted(&nic(), &[]).unwrap_err().contains("too old"));
    }

    #[test]
    fn a_refusal_says_what_to_look_at() {
        let error = |number| Error::Attach {
            program: XDP,
            place: "device eth0".to_owned(),
            source: io::Error::from_raw_os_error(number),
        };
        assert_eq!(refusal(&error(libc::EOPNOTSUPP), XdpMode::Native), NO_DRIVER);
        assert!(refusal(&error(libc::EINVAL), XdpMode::Native).contains("MTU"));
        assert!(refusal(&error(libc::EBUSY), XdpMode::Generic).contains("left alone"));
    }
}
