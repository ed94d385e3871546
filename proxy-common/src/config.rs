//! `config`: what the agent tells the programs about this node.

use crate::node::{DEVICE_UPLINK, Device};

/// The one value of `config`. Durations are in jiffies: reading that clock costs a program nothing, while
/// nanoseconds cost more than the rest of the packet. The agent measures [`NodeConfig::hz`] at start.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeConfig {
    /// The layout of the maps: [`crate::version::ABI_VERSION`].
    pub abi: u32,
    /// Jiffies in a second.
    pub hz: u32,
    /// Entries of `flows` and of `flows6`.
    pub flow_entries: u32,
    /// Timeout of a TCP flow whose backend has not answered.
    pub tcp_syn_sent: u32,
    /// Timeout of one whose backend has answered, and whose client has not answered that.
    pub tcp_syn_recv: u32,
    /// Timeout of one with data both ways.
    pub tcp_established: u32,
    /// Timeout of one that one end has closed.
    pub tcp_close_wait: u32,
    /// Timeout of one that both ends have closed.
    pub tcp_time_wait: u32,
    /// Timeout of one that was reset.
    pub tcp_close: u32,
    /// Timeout of a UDP flow without answer, or with one exchange.
    pub udp: u32,
    /// Timeout of a UDP flow that is more than one exchange.
    pub udp_stream: u32,
    /// Buckets of `flow_index` and of `flow_index6`; a power of two.
    pub flow_buckets: u32,
    /// Goes into the hash of a flow's key, so that an attacker cannot fill one bucket. Never 0; it stays the same
    /// while flows live.
    pub flow_seed: u32,
    /// `CONFIG_*` bits.
    pub flags: u32,
    /// Source ports of packets that are forwarded under the node's own address (SNAT), in two ranges.
    pub snat: [PortRange; SNAT_RANGES],
    /// The uplinks with the lowest indexes among `devices`, then 0: looking here is no call of the kernel. If all places
    /// are taken, there may be more.
    pub uplinks: [u32; UPLINKS],
    /// Zero.
    pub reserved: u32,
    /// Cookie of the network namespace that the agent serves: sockets in it are the node's own.
    pub host_netns: u64,
}

/// Ranges of source ports for SNAT: below and above the ports that the kernel gives to sockets.
pub const SNAT_RANGES: usize = 2;

/// A range of ports, host byte order.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortRange {
    /// The first port.
    pub first: u16,
    /// How many there are; 0: the range is empty.
    pub count: u16,
}

impl PortRange {
    /// The ports from `first` to `last`; none if `last` is lower, or both are 0.
    pub const fn new(first: u16, last: u16) -> Self {
        if first == 0 || last < first {
            Self { first: 0, count: 0 }
        } else {
            Self { first, count: last - first + 1 }
        }
    }

    /// The last port; 0 if the range is empty.
    pub const fn last(self) -> u16 {
        if self.count == 0 { 0 } else { self.first + (self.count - 1) }
    }

    /// Whether the port is in it.
    #[inline(always)]
    pub const fn contains(self, port: u16) -> bool {
        port.wrapping_sub(self.first) < self.count
    }
}

/// Uplinks that stand in `config`; hardly a node has more.
pub const UPLINKS: usize = 3;

/// Every packet to a cluster address is sent on under the node's own address (`masqueradeAll`).
pub const CONFIG_MASQUERADE_ALL: u32 = 1 << 0;
/// The programs recognize pods only by their addresses (`detectLocalMode` `ClusterCIDR` and `NodeCIDR`). Without this
/// bit they also recognize them by their devices.
pub const CONFIG_DETECT_LOCAL: u32 = 1 << 1;
/// Another proxy's rules are or were on this node: a TCP packet that begins no connection and belongs to no flow is
/// left to netfilter, which may have translated its connection from the start.
pub const CONFIG_OTHER_PROXY: u32 = 1 << 2;
/// Only sockets in the node's own network namespace are translated; those of pods are left to the packet programs
/// (`--socket-lb host-only`).
pub const CONFIG_SOCKET_LB_HOST_ONLY: u32 = 1 << 3;
/// No socket is translated (`--socket-lb off`).
pub const CONFIG_SOCKET_LB_OFF: u32 = 1 << 4;
/// A call fails at once where kube-proxy drops the packet in silence (`--socket-drop fail`).
pub const CONFIG_SOCKET_DROP_FAIL: u32 = 1 << 5;
/// The SNAT port ranges have changed, and some flows still use ports of the old ranges. The programs look up replies to all
/// ports of the node's own addresses, until the agent finds no such flow.
pub const CONFIG_SNAT_MOVED: u32 = 1 << 6;

/// Nodes of the cluster send this one encapsulated packets (DSR), so IP-in-IP packets are looked at. The
/// agent never clears it: established flows with DSR need it.
pub const CONFIG_DSR: u32 = 1 << 8;

/// Source ports for SNAT unless a setting or the node's own settings say otherwise: beside the ports that kernels give to
/// sockets (`net.ipv4.ip_local_port_range`, 32768 to 60999), and the node ports (30000 to 32767).
pub const SNAT_PORTS: [PortRange; SNAT_RANGES] =
    [PortRange::new(1_024, 29_999), PortRange::new(61_000, 65_535)];

/// Timeouts in seconds, as `nf_conntrack` and kube-proxy have them (`net/netfilter/nf_conntrack_proto_tcp.c`,
/// `nf_conntrack_proto_udp.c`; kube-proxy: 24 h, 1 h).
pub mod seconds {
    /// See [`super::NodeConfig::tcp_syn_sent`].
    pub const TCP_SYN_SENT: u32 = 60;
    /// See [`super::NodeConfig::tcp_syn_recv`].
    pub const TCP_SYN_RECV: u32 = 60;
    /// See [`super::NodeConfig::tcp_established`].
    pub const TCP_ESTABLISHED: u32 = 86_400;
    /// See [`super::NodeConfig::tcp_close_wait`].
    pub const TCP_CLOSE_WAIT: u32 = 3_600;
    /// See [`super::NodeConfig::tcp_time_wait`].
    pub const TCP_TIME_WAIT: u32 = 120;
    /// See [`super::NodeConfig::tcp_close`]. Longer than `nf_conntrack`'s 10 s, which believes only a reset with the exact
    /// sequence number: a connection outlives a forged one unless it is silent for so long. Its entry may be evicted meanwhile.
    pub const TCP_CLOSE: u32 = 120;
    /// See [`super::NodeConfig::udp`].
    pub const UDP: u32 = 30;
    /// See [`super::NodeConfig::udp_stream`].
    pub const UDP_STREAM: u32 = 120;
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

    /// Whether replies to packets that were forwarded under an address of this node come back to such a port.
    #[inline(always)]
    pub const fn is_snat_port(&self, port: u16) -> bool {
        let [low, high] = self.snat;
        low.contains(port) || high.contains(port)
    }

    /// How many source ports there are for SNAT.
    #[inline(always)]
    pub const fn snat_count(&self) -> u32 {
        let [low, high] = self.snat;
        low.count as u32 + high.count as u32
    }

    /// The source port of that number, from 0 to [`NodeConfig::snat_count`] - 1.
    #[inline(always)]
    pub const fn snat_port(&self, number: u32) -> u16 {
        let [low, high] = self.snat;
        let above = number.wrapping_sub(low.count as u32);
        // Without a branch that would double what the verifier walks through.
        let is_low = (number < low.count as u32) as u32;
        (is_low * (low.first as u32 + number) + (1 - is_low) * (high.first as u32).wrapping_add(above)) as u16
    }

    /// The defaults for a kernel of `hz` jiffies a second. Of `flow_entries`, no more than [`MAX_FLOWS`] are used.
    ///
    /// [`MAX_FLOWS`]: crate::flow::MAX_FLOWS
    pub fn new(hz: u32, flow_entries: u32, flow_buckets: u32, flow_seed: u32) -> Self {
        Self {
            abi: crate::version::ABI_VERSION,
            hz,
            flow_entries: flow_entries.min(crate::flow::MAX_FLOWS),
            tcp_syn_sent: hz * seconds::TCP_SYN_SENT,
            tcp_syn_recv: hz * seconds::TCP_SYN_RECV,
            tcp_established: hz * seconds::TCP_ESTABLISHED,
            tcp_close_wait: hz * seconds::TCP_CLOSE_WAIT,
            tcp_time_wait: hz * seconds::TCP_TIME_WAIT,
            tcp_close: hz * seconds::TCP_CLOSE,
            udp: hz * seconds::UDP,
            udp_stream: hz * seconds::UDP_STREAM,
            flow_buckets,
            flow_seed,
            flags: 0,
            snat: SNAT_PORTS,
            uplinks: [0; UPLINKS],
            reserved: 0,
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
