//! Makes the packet programs leave new flows to the rules behind them.

use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use super::front::Packets;
use crate::host::devices;
use crate::host::netlink::Netlink;
use crate::programs::bpf::Link;
use crate::programs::clsact::{self, Handle};
use crate::programs::embedded::EMBEDDED;
use crate::programs::error::Error;
use crate::programs::hooks::Direction;
use crate::programs::object::Transition;
use crate::programs::pins::Paths;
use crate::programs::status;

/// Time that half-open connections have for their handshakes when a successor takes over.
const HANDSHAKES: Duration = Duration::from_millis(200);

/// Makes the packet programs on devices leave new flows to the rules behind them (kube-proxy's), and serve only the flows
/// that they know. Returns after the time for the handshakes of half-open connections.
pub(in crate::programs) fn leave_what_begins(paths: &Paths) -> Result<(), Error> {
    let devices = devices::list().map_err(Error::file("list the devices of", Path::new("/sys/class/net")))?;
    let packets = Packets::load(EMBEDDED, paths, Transition::LooksUp, &devices)?;
    let filtered = status::filtered_devices(paths);
    for device in &devices {
        for direction in Direction::ALL {
            let program = packets.program_for(direction, device.no_header)?;
            let pin = paths.links().join(direction.pin(device.ifindex));
            let place = || format!("device {}", device.name);
            let failed = |source| Error::Attach { program: direction.program(), place: place(), source };
            if let Some(link) = Link::pinned(&pin).map_err(Error::file("open the link", &pin))? {
                link.update(program).map_err(failed)?;
            }
            if filtered.contains_key(&device.ifindex) {
                let mut netlink = Netlink::open().map_err(failed)?;
                clsact::set(&mut netlink, device.ifindex, direction, Handle::Own, program).map_err(failed)?;
            }
        }
    }
    sleep(HANDSHAKES);
    Ok(())
}
