//! `config`: what the agent tells the programs about this node.

use crate::node::{DEVICE_UPLINK, Device};

/// The one value of `config`. Durations are in jiffies: reading that clock costs a program nothing, while
/// nanoseconds cost more than the rest of the packet. The agent measures [`NodeConfig::hz`] at start.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeConfig {
    /// The layout that the agent which wrote this speaks: [`crate::abi::ABI_VERSION`].
    pub abi: u32,
    /// Jiffies in a second.
    pub hz: u32,
    /// Entries of `flows` and of `flows6`.
    pub flow_entries: u32,
    /// A TCP flow whose backend has not answered.
    pub tcp_opening: u32,
    /// A TCP flow with data both ways.
    pub tcp_established: u32,
    /// A TCP flow that one end has closed.
    pub tcp_closing: u32,
    /// A TCP flow that both ends have closed, or one has reset.
    pub tcp_closed: u32,
    /// A UDP flow that has only been sent to.
    pub udp_unreplied: u32,
    /// A UDP flow with packets both ways.
    pub udp_replied: u32,
    /// Buckets of `flow_index` and of `flow_index6`; a power of two.
    pub flow_buckets: u32,
    /// Goes into the hash of a flow's key, so that nobody outside can fill one bucket. Never 0; it stays the same
    /// while flows live.
    pub flow_seed: u32,
    /// `CONFIG_*` bits.
    pub flags: u32,
    /// First source port of packets that are sent on under the node's own address (SNAT).
    pub snat_first: u16,
    /// Last of these ports.
    pub snat_last: u16,
    /// The uplinks with the lowest indexes among `devices`, then 0: looking here is no call of the kernel. If all places
    /// are taken, there may be more.
    pub uplinks: [u32; UPLINKS],
    /// Cookie of the network namespace that the agent serves: sockets in it are the node's own.
    pub host_netns: u64,
}

/// Uplinks that stand in `config`; hardly a node has more.
pub const UPLINKS: usize = 3;

/// Every packet to a cluster address is sent on under the node's own address (`masqueradeAll`).
pub const CONFIG_MASQUERADE_ALL: u32 = 1 << 0;
/// The agent was told how to know local pods (`detectLocalMode`); without it they are known by their devices.
pub const CONFIG_DETECT_LOCAL: u32 = 1 << 1;
/// Another proxy's rules are or were on this node: a TCP packet that begins no connection and belongs to no flow is
/// left to netfilter, which may have translated its connection from the start.
pub const CONFIG_LEAVE_OLD: u32 = 1 << 2;

/// Source ports for SNAT unless a setting says otherwise: above the ports that kernels hand to sockets
/// (`net.ipv4.ip_local_port_range`, 32768 to 60999) and above the node ports (30000 to 32767).
pub const SNAT_PORTS: (u16, u16) = (61_000, 65_535);

/// Lifetimes in seconds, as the kernel's own conntrack and kube-proxy have them
/// (`net/netfilter/nf_conntrack_proto_tcp.c`, `nf_conntrack_proto_udp.c`; kube-proxy: 24 h, 1 h).
pub mod seconds {
    /// See [`super::NodeConfig::tcp_opening`].
    pub const TCP_OPENING: u32 = 60;
    /// See [`super::NodeConfig::tcp_established`].
    pub const TCP_ESTABLISHED: u32 = 86_400;
    /// See [`super::NodeConfig::tcp_closing`].
    pub const TCP_CLOSING: u32 = 3_600;
    /// See [`super::NodeConfig::tcp_closed`].
    pub const TCP_CLOSED: u32 = 10;
    /// See [`super::NodeConfig::udp_unreplied`].
    pub const UDP_UNREPLIED: u32 = 30;
    /// See [`super::NodeConfig::udp_replied`].
    pub const UDP_REPLIED: u32 = 120;
}

impl NodeConfig {
    /// Whether a device is an uplink. `device` tells what `devices` says of it.
    #[inline(always)]
    pub fn is_uplink(&self, index: u32, device: impl FnOnce(u32) -> Device) -> bool {
        let [first, second, third] = self.uplinks;
        index == first
            || index == second
            || index == third
            || third != 0 && device(index) & DEVICE_UPLINK != 0
    }

    /// The defaults for a kernel of `hz` jiffies a second. Of `flow_entries`, no more than [`MAX_FLOWS`] are used.
    ///
    /// [`MAX_FLOWS`]: crate::flow::MAX_FLOWS
    pub fn new(hz: u32, flow_entries: u32, flow_buckets: u32, flow_seed: u32) -> Self {
        Self {
            abi: crate::abi::ABI_VERSION,
            hz,
            flow_entries: flow_entries.min(crate::flow::MAX_FLOWS),
            tcp_opening: hz * seconds::TCP_OPENING,
            tcp_established: hz * seconds::TCP_ESTABLISHED,
            tcp_closing: hz * seconds::TCP_CLOSING,
            tcp_closed: hz * seconds::TCP_CLOSED,
            udp_unreplied: hz * seconds::UDP_UNREPLIED,
            udp_replied: hz * seconds::UDP_REPLIED,
            flow_buckets,
            flow_seed,
            flags: 0,
            snat_first: SNAT_PORTS.0,
            snat_last: SNAT_PORTS.1,
            uplinks: [0; UPLINKS],
            host_netns: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uplinks_beyond_those_in_the_entry_are_asked_for() {
        let none = |_| panic!("asked without need");
        let mut config = NodeConfig { uplinks: [2, 5, 0], ..NodeConfig::default() };
        assert!(config.is_uplink(2, none) && config.is_uplink(5, none) && !config.is_uplink(7, none));
        config.uplinks = [2, 5, 6];
        assert!(config.is_uplink(6, none));
        assert!(config.is_uplink(7, |_| DEVICE_UPLINK) && !config.is_uplink(7, |_| 0));
    }
}
