//! Names of devices.

/// Returns the name of a device, or its number if it is not in this network namespace.
pub(super) fn device_name(ifindex: u32) -> String {
    known_device_name(ifindex).unwrap_or_else(|| format!("#{ifindex}"))
}

/// Returns the name of a device of this network namespace; `None` if the device does not exist.
pub(super) fn known_device_name(ifindex: u32) -> Option<String> {
    let socket =
        rustix::net::socket(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::DGRAM, None).ok()?;
    rustix::net::netdevice::index_to_name(&socket, ifindex).ok()
}
