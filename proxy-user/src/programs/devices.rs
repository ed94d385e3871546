//! The operations on programs that the manager of devices uses.

use std::collections::{BTreeMap, BTreeSet};
use std::{io, iter};

use super::clsact::{self, Filter};
use super::hooks::Direction;
use super::loaded::Programs;
use super::status::Filters;
use super::{Error, calls, status};
use crate::host::devices::{Device, device_name};
use crate::host::follow::Devices;
use crate::host::manager::DeviceHooks;
use crate::maps::settings;

/// The number of devices that a problem names.
const NAMED: usize = 3;

impl DeviceHooks for Programs {
    type Error = Error;
    type Found = Attached;

    fn attach(&self, device: &Device) -> Result<(), Error> {
        self.attach_device(device.ifindex, device.no_header)
    }

    fn is_gone(&self, error: &Error) -> bool {
        matches!(error, Error::Attach { source, .. } if source.raw_os_error() == Some(libc::ENODEV))
    }

    fn detach(&self, ifindex: u32) -> Result<(), Error> {
        self.detach_device(ifindex)
    }

    fn attached_again(&self) {
        self.repairs.add_device();
    }

    fn after_pass(&self, devices: &Devices, found: &Attached, is_complete: bool, has_pods: bool) {
        if is_complete && has_pods {
            self.attend(true);
        }
        if is_complete {
            self.retire_other_versions();
        }
        let own = iter::once(&self.ebpf).chain(self.headerless.get()).flat_map(calls::users).collect();
        calls::release_unused(self.pins.paths(), &own);
        self.note_filters_before(&found.filters);
        self.keep_xdp(devices, |ifindex| found.are_complete.get(&ifindex) == Some(&true));
    }

    fn look(&self) -> io::Result<Attached> {
        let filters = status::filtered_devices(self.pins.paths())?;
        Ok(Attached { are_complete: self.complete_devices(&filters)?, filters })
    }

    fn attached(found: &Attached) -> BTreeMap<u32, bool> {
        found.are_complete.clone()
    }
}

/// The programs on devices.
#[derive(Debug)]
pub struct Attached {
    /// The devices with programs of this agent or an earlier one, and whether the programs are complete.
    are_complete: BTreeMap<u32, bool>,
    /// The filters of devices that were given some.
    filters: Filters,
}

impl Programs {
    /// Tells the programs whether new devices get programs: see [`settings::attend`].
    pub fn attend(&self, is_there: bool) {
        if let Err(error) = settings::attend(&self.pin_dir(), is_there) {
            tracing::warn!(%error, is_there, "cannot write to the map `config` whether an agent attaches programs to new devices");
        }
    }

    /// Returns the devices with programs of this agent or an earlier one, and whether the programs are complete.
    fn complete_devices(&self, filters: &Filters) -> io::Result<BTreeMap<u32, bool>> {
        let links = status::linked_devices(self.pins.paths())?;
        let places: BTreeSet<u32> = links.keys().chain(filters.keys()).copied().collect();
        let has_filters = |both: &[(Direction, Vec<Filter>); 2]| {
            both.iter().all(|(direction, there)| clsact::is_in_place(there, *direction, self.clsact_priority))
        };
        let is_complete = |ifindex: &u32| {
            if self.tcx {
                links.get(ifindex).is_some_and(|count| *count == Direction::ALL.len())
            } else {
                filters.get(ifindex).is_some_and(has_filters)
            }
        };
        Ok(places.into_iter().map(|ifindex| (ifindex, is_complete(&ifindex))).collect())
    }

    /// Tells which BPF filters of others run before Ballast's.
    fn note_filters_before(&self, filters: &Filters) {
        let mut found: BTreeMap<_, Vec<_>> = BTreeMap::new();
        // With TCX, filters run behind Ballast's programs.
        for (ifindex, both) in filters.iter().filter(|_| !self.tcx) {
            for (direction, there) in both {
                for filter in clsact::before(there, *direction, self.clsact_priority) {
                    let one = (*direction, filter.priority, filter.name.clone().unwrap_or_default());
                    found.entry(one).or_default().push((device_name(*ifindex), filter.program));
                }
            }
        }
        let problems: Vec<_> = found.iter().map(|(filter, places)| warning(filter, places)).collect();
        self.filters_before.send_if_modified(|known| {
            let is_new = *known != problems;
            if is_new {
                for problem in &problems {
                    tracing::warn!(
                        problem,
                        "the filter of another program may end the list before Ballast's"
                    );
                }
            }
            *known = problems;
            is_new
        });
    }
}

/// Returns the problem of a filter, by direction, priority and name, that runs before Ballast's on these devices with these
/// programs.
fn warning(
    (direction, priority, name): &(Direction, u16, String),
    places: &[(String, Option<u32>)],
) -> String {
    let mut devices: Vec<_> = places.iter().take(NAMED).map(|(device, _)| device.clone()).collect();
    if places.len() > NAMED {
        devices.push(format!("{} more", places.len() - NAMED));
    }
    let id = places.iter().find_map(|(_, program)| *program).unwrap_or_default();
    format!(
        "device {devices}, {direction}: the filter `{name}` (program {id}) of priority {priority} runs before Ballast's; if it \
         ends the list (TC_ACT_OK), Ballast translates no packet there. Give --clsact-priority {priority}: the newest filter of \
         a priority runs first",
        devices = devices.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_before_ours_is_a_problem_with_the_way_out() {
        let filter = (Direction::Ingress, 1, "handle_ingress".to_owned());
        let places: Vec<_> = (0..5).map(|number| (format!("eni{number}"), Some(42 + number))).collect();
        assert_eq!(
            warning(&filter, &places[..1]),
            "device eni0, ingress: the filter `handle_ingress` (program 42) of priority 1 runs before Ballast's; if it ends \
             the list (TC_ACT_OK), Ballast translates no packet there. Give --clsact-priority 1: the newest filter of a \
             priority runs first"
        );
        let many = warning(&filter, &places);
        assert!(many.starts_with("device eni0, eni1, eni2, 2 more, ingress: "), "{many}");
    }
}
