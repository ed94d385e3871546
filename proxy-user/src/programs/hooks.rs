//! The hooks, and the programs that belong to them.

use std::fmt;

use aya_obj::generated::bpf_attach_type::{
    self, BPF_CGROUP_INET_SOCK_RELEASE, BPF_CGROUP_INET4_CONNECT, BPF_CGROUP_INET4_GETPEERNAME,
    BPF_CGROUP_INET4_POST_BIND, BPF_CGROUP_INET6_CONNECT, BPF_CGROUP_INET6_GETPEERNAME,
    BPF_CGROUP_INET6_POST_BIND, BPF_CGROUP_SOCK_OPS, BPF_CGROUP_UDP4_RECVMSG, BPF_CGROUP_UDP4_SENDMSG,
    BPF_CGROUP_UDP6_RECVMSG, BPF_CGROUP_UDP6_SENDMSG, BPF_TCX_EGRESS, BPF_TCX_INGRESS,
};

/// Programs on the cgroup, and the hook of each; the pin of a link has the name of its program.
///
/// The order is the order of attachment. Programs that translate replies back come before those that translate requests, so
/// that no client sees a reply from an address that it did not send to. Programs that count the end of a connection come
/// before those that count its start.
pub const SOCKET_HOOKS: [(&str, bpf_attach_type); 12] = [
    ("sock_recvmsg4", BPF_CGROUP_UDP4_RECVMSG),
    ("sock_recvmsg6", BPF_CGROUP_UDP6_RECVMSG),
    ("sock_peer4", BPF_CGROUP_INET4_GETPEERNAME),
    ("sock_peer6", BPF_CGROUP_INET6_GETPEERNAME),
    (SOCKET_RELEASE, BPF_CGROUP_INET_SOCK_RELEASE),
    ("sock_sendmsg4", BPF_CGROUP_UDP4_SENDMSG),
    ("sock_sendmsg6", BPF_CGROUP_UDP6_SENDMSG),
    (SOCKET_OUTCOME, BPF_CGROUP_SOCK_OPS),
    ("sock_connect4", BPF_CGROUP_INET4_CONNECT),
    ("sock_connect6", BPF_CGROUP_INET6_CONNECT),
    ("sock_bind4", BPF_CGROUP_INET4_POST_BIND),
    ("sock_bind6", BPF_CGROUP_INET6_POST_BIND),
];

/// Observes the outcome of connections that sockets start.
pub const SOCKET_OUTCOME: &str = "sock_outcome";

/// Runs when a socket is closed.
pub const SOCKET_RELEASE: &str = "sock_release";

/// Never attached: runs once at start to read the kernel's clocks.
pub const CLOCK: &str = "clock";

/// Lists the UDP sockets of a network namespace that are connected to a Service.
pub const UDP_ITERATOR: &str = "iter_udp";

/// Lists the TCP sockets of a network namespace that are connected to a Service.
pub const TCP_ITERATOR: &str = "iter_tcp";

/// Lists the sockets of all network namespaces that are connected to a Service.
pub const ALL_ITERATOR: &str = "iter_sockets";

/// Attached to uplinks, runs before tc, in the driver.
pub const XDP: &str = "xdp_ingress";
/// Attached to uplinks, runs before tc, in the kernel's network stack.
pub const XDP_GENERIC: &str = "xdp_generic";

/// Returns the name of the pin of the XDP link on a device.
pub(super) fn xdp_pin(ifindex: u32) -> String {
    format!("xdp_{ifindex}")
}

/// Returns the device in the name of such a pin.
pub(super) fn pinned_xdp(pin: &str) -> Option<u32> {
    pin.strip_prefix("xdp_")?.parse().ok()
}

/// A direction of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Direction {
    /// Incoming packets.
    Ingress,
    /// Outgoing packets.
    Egress,
}

impl Direction {
    /// Both directions, in the order of attachment: replies are translated back before requests are translated.
    pub const ALL: [Self; 2] = [Self::Egress, Self::Ingress];

    /// Returns the program for this direction.
    pub const fn program(self) -> &'static str {
        match self {
            Self::Ingress => "tc_ingress",
            Self::Egress => "tc_egress",
        }
    }

    /// Returns the TCX hook for this direction.
    pub(super) const fn attach_type(self) -> u32 {
        match self {
            Self::Ingress => BPF_TCX_INGRESS as u32,
            Self::Egress => BPF_TCX_EGRESS as u32,
        }
    }

    /// Returns the name of the pin of its link on a device.
    pub(super) fn pin(self, ifindex: u32) -> String {
        format!("tcx_{self}_{ifindex}")
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        })
    }
}

/// Returns the device in the name of a pin: `tcx_ingress_7` is 7.
pub(super) fn pinned_device(pin: &str) -> Option<u32> {
    let rest = pin.strip_prefix("tcx_")?;
    let (direction, ifindex) = rest.split_once('_')?;
    Direction::ALL.iter().any(|d| d.to_string() == direction).then(|| ifindex.parse().ok())?
}

/// Returns the program whose link has a pin of that name.
pub(super) fn pinned_program(pin: &str) -> Option<&'static str> {
    let of_device =
        |direction: &&Direction| pinned_device(pin).is_some_and(|ifindex| direction.pin(ifindex) == pin);
    if pinned_xdp(pin).is_some() {
        return Some(XDP);
    }
    let on_cgroup = SOCKET_HOOKS.iter().map(|(name, _)| *name).find(|name| *name == pin);
    on_cgroup.or_else(|| Direction::ALL.iter().find(of_device).map(|direction| direction.program()))
}

/// Whether a pin is that of a hook that this version does not have. A pin `..._new` is about to be renamed.
pub(super) fn is_of_other_version(pin: &str) -> bool {
    pinned_program(pin).is_none() && !pin.ends_with("_new")
}

/// Returns the names of all programs that are attached to a hook.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    SOCKET_HOOKS
        .iter()
        .map(|(name, _)| *name)
        .chain(Direction::ALL.iter().map(|d| d.program()))
        .chain([XDP, XDP_GENERIC])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pin_names_its_device() {
        for direction in Direction::ALL {
            assert_eq!(pinned_device(&direction.pin(7)), Some(7));
            assert_eq!(pinned_program(&direction.pin(7)), Some(direction.program()));
        }
        for name in ["sock_connect4", "tcx_ingress_", "tcx_sideways_7", "tcx_7", "tcx_egress_7_new"] {
            assert_eq!(pinned_device(name), None, "{name}");
        }
        assert_eq!(pinned_program("sock_connect4"), Some("sock_connect4"));
        assert_eq!(pinned_program("sock_connect4_new"), None);
        assert_eq!((pinned_xdp(&xdp_pin(7)), pinned_program(&xdp_pin(7))), (Some(7), Some(XDP)));
        assert_eq!((pinned_xdp("xdp_7_new"), pinned_device("xdp_7")), (None, None));
    }

    #[test]
    fn a_pin_of_an_unknown_hook_is_of_another_version() {
        for (pin, expected) in [
            ("sock_getsockopt", true),
            ("tcx_sideways_7", true),
            ("netkit_7", true),
            ("sock_connect4", false),
            ("sock_connect4_new", false),
            ("tcx_egress_7", false),
            ("xdp_7", false),
        ] {
            assert_eq!(is_of_other_version(pin), expected, "{pin}");
        }
    }

    #[test]
    fn names_fit_the_kernel() {
        assert!(names().all(|name| name.len() <= 15));
        assert_eq!(names().collect::<std::collections::BTreeSet<_>>().len(), SOCKET_HOOKS.len() + 4);
    }
}
