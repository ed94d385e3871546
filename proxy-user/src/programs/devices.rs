//! The operations on programs that the manager of devices uses.

use std::collections::{BTreeMap, BTreeSet};
use std::iter;

use super::hooks::Direction;
use super::loaded::Programs;
use super::{Error, calls, status};
use crate::host::devices::Device;
use crate::host::follow::Devices;
use crate::host::manager::DeviceHooks;

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

    fn after_pass(&self, devices: &Devices) {
        let own = iter::once(&self.ebpf).chain(self.headerless.get()).flat_map(calls::users).collect();
        calls::release_unused(self.pins.paths(), &own);
        let tc = self.attached();
        self.keep_xdp(devices, |ifindex| tc.get(&ifindex) == Some(&true));
    }

    fn attached(&self) -> BTreeMap<u32, bool> {
        let links = status::linked_devices(self.pins.paths());
        let filters = status::filtered_devices(self.pins.paths());
        let places: BTreeSet<u32> = links.keys().chain(filters.keys()).copied().collect();
        let current = if self.tcx { &links } else { &filters };
        let complete =
            |ifindex: &u32| current.get(ifindex).is_some_and(|count| *count == Direction::ALL.len());
        places.into_iter().map(|ifindex| (ifindex, complete(&ifindex))).collect()
    }
}
