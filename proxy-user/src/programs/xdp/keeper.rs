//! Which devices are to have the XDP program, and the result for each.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use aya::maps::{HashMap, Map, MapData};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::super::hooks::{XDP, XDP_GENERIC};
use crate::host::devices::{Device, XdpMode};

/// Which devices get the XDP program, and how (`--xdp`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Xdp {
    /// Uplinks whose driver supports XDP, except virtual devices.
    #[default]
    Auto,
    /// Uplinks whose driver supports XDP, including virtual devices.
    Native,
    /// Uplinks, in the kernel's network stack.
    Generic,
    /// No device.
    Off,
}

impl Xdp {
    /// Returns the program for this mode.
    pub(in crate::programs) const fn program(self) -> &'static str {
        match self {
            Self::Generic => XDP_GENERIC,
            Self::Auto | Self::Native | Self::Off => XDP,
        }
    }
}

/// The result for a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AttachedXdp {
    /// The driver runs the program.
    Native,
    /// The kernel's network stack runs the program.
    Generic,
    /// No program: tc handles all packets.
    None,
}

impl AttachedXdp {
    /// Returns the word used in metrics and output.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Generic => "generic",
            Self::None => "none",
        }
    }
}

/// An uplink, and the result for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct XdpDevice {
    /// Its name.
    pub device: String,
    /// How the program runs.
    pub mode: AttachedXdp,
    /// Why the device has no program; empty otherwise.
    pub reason: String,
}

/// The uplinks after the last pass, by index.
#[derive(Debug, Default)]
pub struct XdpDevices(watch::Sender<BTreeMap<u32, XdpDevice>>);

impl XdpDevices {
    /// Returns all uplinks.
    pub fn list(&self) -> Vec<XdpDevice> {
        self.0.borrow().values().cloned().collect()
    }

    /// Returns all uplinks, in a form that allows to wait for changes.
    pub fn follow(&self) -> watch::Receiver<BTreeMap<u32, XdpDevice>> {
        self.0.subscribe()
    }

    pub(super) fn knows(&self, ifindex: u32) -> bool {
        self.0.borrow().contains_key(&ifindex)
    }

    /// Replaces all uplinks; returns the previous ones.
    pub(super) fn replace(&self, new: BTreeMap<u32, XdpDevice>) -> BTreeMap<u32, XdpDevice> {
        let before = self.0.borrow().clone();
        self.0.send_if_modified(|devices| {
            let is_new = *devices != new;
            *devices = new;
            is_new
        });
        before
    }
}

/// The state of XDP on this node's devices.
pub(in crate::programs) struct Keeper {
    pub(super) mode: Xdp,
    /// Why the program could not be loaded.
    unusable: Option<String>,
    /// The map `xdp_devices` of the programs that this process has loaded.
    open: Mutex<Option<HashMap<MapData, u32, u32>>>,
    /// The devices that refused the program, by index.
    pub(super) refusals: Mutex<BTreeMap<u32, Refusal>>,
    pub(super) devices: Arc<XdpDevices>,
}

impl Keeper {
    /// Takes over the map of the object, after its programs were loaded.
    pub(in crate::programs) fn new(mode: Xdp, unusable: Option<String>, map: Option<Map>) -> Self {
        let open = map.and_then(|map| HashMap::try_from(map).ok());
        Self { mode, unusable, open: Mutex::new(open), refusals: Mutex::default(), devices: Arc::default() }
    }

    /// Allows or forbids the program to send packets of other devices on this one.
    pub(super) fn set_open(&self, ifindex: u32, is_open: bool) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(map) = open.as_mut() {
            // Without the entry, tc sends the packets: a missing entry does no harm.
            let _ = if is_open { map.insert(ifindex, 1, 0) } else { map.remove(&ifindex) };
        }
    }

    /// Returns the mode in which a device is to get the program, or why it is not.
    pub(super) fn wanted(&self, device: &Device, devices: &[Device]) -> Result<XdpMode, String> {
        let because = |reason: &str| Err(reason.to_owned());
        let mode = match self.mode {
            Xdp::Off => return because("--xdp off"),
            Xdp::Generic => XdpMode::Generic,
            Xdp::Auto | Xdp::Native => XdpMode::Native,
        };
        if let Some(reason) = &self.unusable {
            return Err(format!("cannot load the program: {reason}"));
        }
        if !device.ethernet {
            return because("the device has no Ethernet header");
        }
        if device.master.is_some() {
            return because("the device is a port of another device");
        }
        if devices.iter().any(|other| other.vlan && other.below == Some(device.ifindex)) {
            return because("the device has VLANs: drivers remove the tags from frames before XDP");
        }
        if self.mode == Xdp::Auto && device.paravirtual {
            return because(
                "the NIC of a virtual machine, which would not receive large packets any more; --xdp native includes it",
            );
        }
        if self.mode == Xdp::Auto && device.is_virtual() {
            return because("a virtual device; --xdp native includes it");
        }
        Ok(mode)
    }
}

/// The refusal of a driver without XDP, which is never tried again.
pub(super) const NO_DRIVER: &str = "the driver does not support XDP";

/// A device that refused the program is tried again after this time at first. Drivers log each refusal.
const FIRST: Duration = Duration::from_mins(1);
/// The pauses double up to this one.
const LONGEST: Duration = Duration::from_hours(1);

/// A device refused the program.
pub(in crate::programs) struct Refusal {
    at: Instant,
    /// The pause until the next attempt.
    pause: Duration,
    mode: XdpMode,
    mtu: u32,
    pub(super) reason: String,
}

impl Refusal {
    /// Creates the refusal of a device with this MTU, which may have refused before.
    pub(super) fn new(before: Option<&Self>, at: Instant, mode: XdpMode, mtu: u32, reason: String) -> Self {
        let same = before.filter(|before| (before.mode, before.mtu) == (mode, mtu));
        let pause = same.map_or(FIRST, |before| (before.pause * 2).min(LONGEST));
        Self { at, pause, mode, mtu, reason }
    }

    /// Whether it is too early for another attempt. Another MTU or mode may be accepted at once.
    pub(super) fn stands(&self, now: Instant, mode: XdpMode, mtu: u32) -> bool {
        let is_early = now.saturating_duration_since(self.at) < self.pause;
        (self.mode, self.mtu) == (mode, mtu) && (is_early || self.reason == NO_DRIVER)
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
        let guest = Device { paravirtual: true, ..nic() };
        assert!(keeper(Xdp::Auto).wanted(&guest, &[]).unwrap_err().contains("virtual machine"));
        assert_eq!(keeper(Xdp::Native).wanted(&guest, &[]), Ok(XdpMode::Native));
    }

    #[test]
    fn devices_on_which_xdp_cannot_see_packets_are_served_by_tc() {
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

    const NATIVE: XdpMode = XdpMode::Native;

    #[test]
    fn pauses_after_refusals_double_up_to_an_hour() {
        let mut now = Instant::now();
        let mut refusal = Refusal::new(None, now, NATIVE, 9001, "MTU".to_owned());
        let mut minutes = Vec::new();
        for _ in 0..8 {
            let begun = now;
            while refusal.stands(now, NATIVE, 9001) {
                now += Duration::from_mins(1);
            }
            minutes.push((now - begun).as_secs() / 60);
            refusal = Refusal::new(Some(&refusal), now, NATIVE, 9001, "MTU".to_owned());
        }
        assert_eq!(minutes, [1, 2, 4, 8, 16, 32, 60, 60]);
    }

    #[test]
    fn changed_mtu_or_mode_is_tried_at_once() {
        let now = Instant::now();
        let first = Refusal::new(None, now, NATIVE, 9001, "MTU".to_owned());
        let second = Refusal::new(Some(&first), now, NATIVE, 9001, "MTU".to_owned());
        assert!(!second.stands(now, NATIVE, 1500) && !second.stands(now, XdpMode::Generic, 9001));
        let other = Refusal::new(Some(&second), now, NATIVE, 3498, "MTU".to_owned());
        assert!(other.stands(now, NATIVE, 3498) && !other.stands(now + FIRST, NATIVE, 3498));
    }

    #[test]
    fn a_driver_without_xdp_is_never_tried_again() {
        let now = Instant::now();
        let refusal = Refusal::new(None, now, NATIVE, 1500, NO_DRIVER.to_owned());
        assert!(refusal.stands(now + 2 * LONGEST, NATIVE, 1500));
    }
}
