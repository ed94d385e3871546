//! Devices on which another proxy has left addresses of Services. These are not the node's own addresses: Ballast serves them.

use std::collections::BTreeSet;

use super::Cluster;
use crate::model::{DeviceKind, HostDevice, HostView, PROXY_DEVICES, ServiceName};

/// Number of Services whose cluster addresses a dummy device has to hold. A DNS cache (`nodelocaldns`) holds those of one
/// Service, or two, and serves them itself.
const SERVICES: usize = 3;

impl Cluster {
    /// Stores the host as the kernel describes it.
    pub(super) fn set_seen(&mut self, seen: HostView, changed: &mut BTreeSet<ServiceName>) {
        let host = without(self.leftovers(&seen), seen.clone());
        self.seen = seen.devices.values().any(may_be_left).then_some(seen);
        self.set_host(host, changed);
    }

    /// Looks for leftovers again, because Services have changed.
    pub(super) fn find_leftovers(&mut self, changed: &mut BTreeSet<ServiceName>) {
        let Some(seen) = &self.seen else { return };
        let found = self.leftovers(seen);
        if self.host.as_ref().is_some_and(|known| known.leftovers != found) {
            let host = without(found, seen.clone());
            self.set_host(host, changed);
        }
    }

    /// Returns the names of the devices whose addresses another proxy has left.
    fn leftovers(&self, host: &HostView) -> BTreeSet<String> {
        let holds_many = |device: &HostDevice| {
            #[cfg(test)]
            super::tests::SEARCHES.set(super::tests::SEARCHES.get() + 1);
            let holds = |address| device.addresses.contains(address);
            let services = self.services().filter(|service| service.cluster_ips.iter().any(holds));
            services.take(SERVICES).count() == SERVICES
        };
        let is_left = |device: &&HostDevice| {
            PROXY_DEVICES.contains(&&*device.name) && !device.addresses.is_empty()
                || may_be_left(device) && holds_many(device)
        };
        host.devices.values().filter(is_left).map(|device| device.name.clone()).collect()
    }
}

/// Whether the device is one of those that other proxies use, with enough addresses.
fn may_be_left(device: &HostDevice) -> bool {
    device.kind == DeviceKind::Dummy && device.addresses.len() >= SERVICES
}

/// Returns the host without the addresses of these devices.
fn without(leftovers: BTreeSet<String>, mut host: HostView) -> HostView {
    for device in host.devices.values_mut().filter(|device| leftovers.contains(&device.name)) {
        device.addresses.clear();
        device.subnets.clear();
    }
    HostView { leftovers, ..host }
}
