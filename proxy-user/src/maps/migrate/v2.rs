//! Layout 2, as of its last version, and the translation of its flows to and from the current layout. Layout 2 never
//! changes.

use proxy_common::abi::Plain;
use proxy_common::config::NodeConfig;
use proxy_common::conntrack::{
    ASSURED, FIN_BACKEND, FIN_CLIENT, RST_BACKEND, RST_CLIENT, SEEN_REPLY, UDP_STREAM_SECS,
};
use proxy_common::flow::{
    FlowEntry, NO_POSITION, STATE_CLAIMED, STATE_DIRECT, STATE_LOCAL, STATE_SNAT, STATE_USED,
};
use proxy_common::{Address, PROTO_UDP};

/// Value of `flows` and `flows6`.
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowV2<A> {
    pub client: A,
    pub frontend: A,
    pub backend: A,
    pub source: A,
    pub client_port: u16,
    pub frontend_port: u16,
    pub backend_port: u16,
    pub source_port: u16,
    pub proto: u8,
    pub state: u8,
    pub reserved: u16,
    pub service: u32,
    pub backend_id: u32,
    pub created: u32,
    pub last_seen: u32,
    pub generation: u32,
    pub places: [u32; 2],
    pub tags: [u32; 2],
}

pub const FLOW_USED: u8 = 1 << 0;
pub const FLOW_REPLIED: u8 = 1 << 1;
pub const FLOW_FIN_CLIENT: u8 = 1 << 2;
pub const FLOW_FIN_BACKEND: u8 = 1 << 3;
pub const FLOW_RESET: u8 = 1 << 4;
pub const FLOW_CLAIMED: u8 = 1 << 5;
pub const FLOW_SNAT: u8 = 1 << 6;
pub const FLOW_OWN: u8 = 1 << 7;

/// Value of `config`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConfigV2 {
    pub abi: u32,
    pub hz: u32,
    pub flow_entries: u32,
    pub tcp_opening: u32,
    pub tcp_established: u32,
    pub tcp_closing: u32,
    pub tcp_closed: u32,
    pub udp_unreplied: u32,
    pub udp_replied: u32,
    pub flow_buckets: u32,
    pub flow_seed: u32,
    pub flags: u32,
    pub snat_first: u16,
    pub snat_last: u16,
    pub uplinks: [u32; 3],
    pub host_netns: u64,
}

const _: () = assert!(size_of::<FlowV2<[u8; 4]>>() == 64 && size_of::<FlowV2<[u8; 16]>>() == 112);
const _: () = assert!(size_of::<ConfigV2>() == 72);

// SAFETY: integers without padding: 4 * 4 + 4 * 2 + 2 + 2 + 5 * 4 + 8 + 8 bytes are 64.
unsafe impl Plain for FlowV2<[u8; 4]> {}
// SAFETY: integers without padding: 4 * 16 + 4 * 2 + 2 + 2 + 5 * 4 + 8 + 8 bytes are 112.
unsafe impl Plain for FlowV2<[u8; 16]> {}
// SAFETY: integers without padding: 12 * 4 + 2 * 2 + 12 + 8 bytes are 72.
unsafe impl Plain for ConfigV2 {}

/// The bits that packets of a flow change.
pub const CONNECTION: u32 = SEEN_REPLY | ASSURED | FIN_CLIENT | FIN_BACKEND | RST_CLIENT | RST_BACKEND;

/// The number of the layout.
pub const ABI: u32 = 2;

/// The `CONFIG_*` bits of layout 2.
const FLAGS: u32 = 0b111;

/// Bits with the same meaning in both layouts; a bit of layout 2 may be several bits of the current layout.
const WORDS: [(u8, u32); 6] = [
    (FLOW_USED, STATE_USED),
    (FLOW_FIN_CLIENT, FIN_CLIENT),
    (FLOW_FIN_BACKEND, FIN_BACKEND),
    (FLOW_CLAIMED, STATE_CLAIMED),
    (FLOW_SNAT, STATE_SNAT),
    (FLOW_OWN, STATE_LOCAL),
];

/// Translates a flow to the current layout; `hz`: jiffies per second.
///
/// A connection that was answered becomes assured: layout 2 does not distinguish them, and its timeout was a day. A UDP flow
/// becomes a stream if it lasted for as long as the current programs require. A RST may have come from either side. The
/// sequence numbers are unknown until the next segments.
pub fn to_current<A: Address>(flow: &FlowV2<A>, hz: u32) -> FlowEntry<A> {
    let mut bits = WORDS.iter().filter(|(old, _)| flow.state & old != 0).fold(0, |bits, (_, new)| bits | new);
    if flow.state & FLOW_RESET != 0 {
        bits |= RST_CLIENT | RST_BACKEND;
    }
    if flow.state & FLOW_REPLIED != 0 {
        let lasted = flow.last_seen.wrapping_sub(flow.created);
        let is_stream = lasted > hz.saturating_mul(UDP_STREAM_SECS) && lasted.cast_signed() > 0;
        bits |= SEEN_REPLY | if flow.proto != PROTO_UDP || is_stream { ASSURED } else { 0 };
    }
    FlowEntry {
        state: u64::from(flow.generation) << 32 | u64::from(bits),
        client: flow.client,
        frontend: flow.frontend,
        backend: flow.backend,
        source: flow.source,
        client_port: flow.client_port,
        frontend_port: flow.frontend_port,
        backend_port: flow.backend_port,
        source_port: flow.source_port,
        proto: flow.proto,
        reserved: 0,
        tags: [0; 2],
        service: flow.service,
        backend_id: flow.backend_id,
        created: flow.created,
        last_seen: flow.last_seen,
        positions: [NO_POSITION; 2],
        seq: [0; 2],
    }
}

/// Returns the `FLOW_*` bits for the bits of the current layout.
pub fn state_of(bits: u32) -> u8 {
    let mut state = WORDS.iter().filter(|(_, new)| bits & new != 0).fold(0, |state, (old, _)| state | old);
    if bits & (SEEN_REPLY | ASSURED) != 0 {
        state |= FLOW_REPLIED;
    }
    if bits & (RST_CLIENT | RST_BACKEND) != 0 {
        state |= FLOW_RESET;
    }
    state
}

/// Whether layout 2 can represent the flow: it has no direct flows.
pub fn can_represent<A: Address>(flow: &FlowEntry<A>) -> bool {
    flow.bits() & STATE_DIRECT == 0
}

/// Returns the settings for programs of layout 2, until their agent writes its own.
pub fn config(current: &NodeConfig) -> ConfigV2 {
    let snat = current.snat.iter().rev().find(|range| range.count > 0).copied().unwrap_or_default();
    ConfigV2 {
        abi: ABI,
        hz: current.hz,
        flow_entries: current.flow_entries,
        tcp_opening: current.tcp_syn_sent,
        tcp_established: current.tcp_established,
        tcp_closing: current.tcp_close_wait,
        tcp_closed: current.tcp_close,
        udp_unreplied: current.udp,
        udp_replied: current.udp_stream,
        flow_buckets: current.flow_buckets,
        flow_seed: current.flow_seed,
        flags: current.flags & FLAGS,
        snat_first: snat.first,
        snat_last: snat.last(),
        uplinks: current.uplinks,
        host_netns: current.host_netns,
    }
}
