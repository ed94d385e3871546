//! Selected devices without packet programs, because they could not be attached.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use tokio::time::Instant;

/// A device without packet programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BareDevice {
    /// Its name.
    pub name: String,
    /// Since when it has lacked them.
    pub since: Instant,
}

/// The devices without packet programs, by index.
#[derive(Debug, Default)]
pub struct BareDevices(Mutex<BTreeMap<u32, BareDevice>>);

impl BareDevices {
    /// Replaces the devices, given by index and name. Those that are known keep their time.
    pub fn set(&self, names: impl IntoIterator<Item = (u32, String)>, now: Instant) {
        let mut devices = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let since = |ifindex| devices.get(&ifindex).map_or(now, |known| known.since);
        let new =
            names.into_iter().map(|(ifindex, name)| (ifindex, BareDevice { name, since: since(ifindex) }));
        *devices = new.collect();
    }

    /// Returns all devices.
    pub fn list(&self) -> BTreeMap<u32, BareDevice> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the one of these uplinks that has lacked its programs for the longest time.
    pub fn first(&self, uplinks: &BTreeSet<u32>) -> Option<BareDevice> {
        let bare = self.list().into_iter().filter(|(ifindex, _)| uplinks.contains(ifindex));
        bare.map(|(_, device)| device).min_by_key(|device| device.since)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn bare_uplink_keeps_its_time_until_it_has_programs() {
        let (devices, begun) = (BareDevices::default(), Instant::now());
        let at = |seconds| begun + Duration::from_secs(seconds);
        let first = || devices.first(&[2, 3].into()).map(|device| (device.name, device.since));
        devices.set([(2, "eth0".to_owned()), (7, "veth1".to_owned())], at(1));
        devices.set([(2, "eth0".to_owned()), (3, "eth1".to_owned())], at(5));
        assert_eq!(first(), Some(("eth0".to_owned(), at(1))));
        devices.set([(3, "eth1".to_owned()), (7, "veth1".to_owned())], at(9));
        assert_eq!(first(), Some(("eth1".to_owned(), at(5))));
        devices.set([(7, "veth1".to_owned())], at(10));
        assert_eq!(first(), None, "a device of a pod does not count");
    }
}
