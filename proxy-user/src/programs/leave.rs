//! Makes the packet programs leave new flows to the rules behind them.

use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use std::os::fd::BorrowedFd;

use aya::Ebpf;

use super::bpf::Link;
use super::clsact;
use super::error::Error;
use super::hooks::Direction;
use super::object;
use super::object::EMBEDDED;
use super::pins::Paths;
use super::program::program;
use super::status;
use crate::host::devices::{self, Device};
use crate::host::netlink::Netlink;

/// Time that half-open connections have for their handshakes when a successor takes over.
const HANDSHAKES: Duration = Duration::from_millis(200);

/// Packet programs that begin no flows.
struct Packets {
    with_header: Ebpf,
    /// For devices without link-layer header, if there are any.
    headerless: Option<Ebpf>,
}

impl Packets {
    fn load(paths: &Paths, headerless: bool) -> Result<Self, Error> {
        let load = |no_header| object::load_packet_programs(EMBEDDED, paths, no_header, false);
        Ok(Self { headerless: headerless.then(|| load(true)).transpose()?, with_header: load(false)? })
    }

    fn program(&self, direction: Direction, no_header: bool) -> Result<BorrowedFd<'_>, Error> {
        let name = direction.program();
        let missing = Error::Incomplete { kind: "program", name };
        let ebpf = if no_header { self.headerless.as_ref().ok_or(missing)? } else { &self.with_header };
        program(ebpf, name)
    }
}

/// Makes the packet programs on devices leave new flows to the rules behind them (kube-proxy's), and serve only the flows
/// that they know. Returns after the time for the handshakes of half-open connections.
pub(super) fn leave_what_begins(paths: &Paths) -> Result<(), Error> {
    let devices = devices::list().map_err(Error::file("list the devices of", Path::new("/sys/class/net")))?;
    let packets = Packets::load(paths, devices.iter().any(|device| device.no_header))?;
    let filtered = status::filtered_devices(paths)
        .map_err(Error::file("list the filters of the devices of", &paths.filters()))?;
    // A device that has gone meanwhile does not keep the programs on the others.
    let mut first = Ok(());
    for device in &devices {
        for direction in Direction::ALL {
            let is_filtered = filtered.contains_key(&device.ifindex);
            let replaced = replace(paths, &packets, device, direction, is_filtered);
            first = first.and(replaced);
        }
    }
    sleep(HANDSHAKES);
    first
}

fn replace(
    paths: &Paths,
    packets: &Packets,
    device: &Device,
    direction: Direction,
    is_filtered: bool,
) -> Result<(), Error> {
    let program = packets.program(direction, device.no_header)?;
    let pin = paths.links().join(direction.pin(device.ifindex));
    let place = || format!("device {}", device.name);
    let failed = |source| Error::Attach { program: direction.program(), place: place(), source };
    if let Some(link) = Link::pinned(&pin).map_err(Error::file("open the link", &pin))? {
        link.update(program).map_err(failed)?;
    }
    if is_filtered {
        let mut netlink = Netlink::open().map_err(failed)?;
        let there = clsact::filters(&mut netlink, device.ifindex, direction).map_err(failed)?;
        for filter in there.iter().filter(|filter| filter.is_ours(direction)) {
            clsact::replace(&mut netlink, device.ifindex, direction, filter, program).map_err(failed)?;
        }
    }
    Ok(())
}
