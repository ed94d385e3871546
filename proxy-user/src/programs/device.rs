//! Names of devices.

/// The name of a device, or its number when it is not in this network namespace.
pub(super) fn device_name(ifindex: u32) -> String {
    known_device_name(ifindex).unwrap_or_else(|| format!("#{ifindex}"))
}

/// The name of a device of this network namespace; `None` when it is not there.
pub(super) fn known_device_name(ifindex: u32) -> Option<String> {
    let socket =
        rustix::net::socket(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::DGRAM, None).ok()?;
    rustix::net::netdevice::index_to_name(&socket, ifindex).ok()
}
