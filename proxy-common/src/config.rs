//! `config`: what the agent tells the programs about this node.

/// The one value of `config`. Durations are in jiffies: reading that clock costs a program nothing, while
/// nanoseconds cost more than the rest of the packet. The agent measures [`NodeConfig::hz`] at start.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeConfig {
    /// The layout that the agent which wrote this speaks: [`crate::abi::ABI_VERSION`].
    pub abi: u32,
    /// Jiffies in a second.
    pub hz: u32,
    /// Entries of `flow_state` and of `flow_state6`.
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
    /// Zero.
    pub reserved: u32,
}

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
    /// The defaults for a kernel of `hz` jiffies a second.
    pub fn new(hz: u32, flow_entries: u32) -> Self {
        Self {
            abi: crate::abi::ABI_VERSION,
            hz,
            flow_entries,
            tcp_opening: hz * seconds::TCP_OPENING,
            tcp_established: hz * seconds::TCP_ESTABLISHED,
            tcp_closing: hz * seconds::TCP_CLOSING,
            tcp_closed: hz * seconds::TCP_CLOSED,
            udp_unreplied: hz * seconds::UDP_UNREPLIED,
            udp_replied: hz * seconds::UDP_REPLIED,
            reserved: 0,
        }
    }
}
