//! The packet path's connections.

use std::collections::BTreeMap;
use std::mem::offset_of;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use aya::maps::MapType;
use proxy_common::Address;
use proxy_common::abi::Plain;
use proxy_common::config::NodeConfig;
use proxy_common::flow::{
    FLOW_FIN_BACKEND, FLOW_FIN_CLIENT, FLOW_REPLIED, FLOW_USED, Flow, is_expired, is_over,
};
use proxy_common::map_names as map;

use super::{Transport, View, ViewError};
use crate::maps::mapping::Mapping;

/// How far a connection has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FlowState {
    /// The backend has not answered yet.
    Opening,
    /// Packets went both ways.
    Established,
    /// One end has closed.
    Closing,
    /// Both ends have, or one has reset.
    Closed,
    /// Silent for longer than its state allows; its entry is free to be taken.
    Expired,
}

impl FlowState {
    /// The word in tables and JSON.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Opening => "opening",
            Self::Established => "established",
            Self::Closing => "closing",
            Self::Closed => "closed",
            Self::Expired => "expired",
        }
    }
}

/// One connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowRow {
    /// Its protocol.
    pub protocol: Transport,
    /// Who dialled.
    pub client: SocketAddr,
    /// What was dialled.
    pub frontend: SocketAddr,
    /// Who answers.
    pub backend: SocketAddr,
    /// Whom the backend sees; the client itself where its address and port are kept.
    pub source: SocketAddr,
    /// Id of the Service port.
    pub service: u32,
    /// Id of the backend.
    pub backend_id: u32,
    /// How far it has come.
    pub state: FlowState,
    /// Since its first packet.
    pub age: Duration,
    /// Since its last packet.
    pub idle: Duration,
}

/// How many connections there are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FlowCounts {
    /// Entries of `flows` in use, expired ones too.
    pub v4: u32,
    /// Those of `flows6`.
    pub v6: u32,
    /// Of both, by state; those that do not occur are left out.
    pub states: BTreeMap<FlowState, u64>,
}

impl FlowCounts {
    /// Connections that are not expired.
    pub fn live(&self) -> u64 {
        self.states.iter().filter(|(state, _)| **state != FlowState::Expired).map(|(_, count)| count).sum()
    }
}

impl View {
    /// Counts connections: as [`View::flows`], but for the cost of one glance at each entry.
    pub fn flow_counts(&self) -> Result<FlowCounts, ViewError> {
        let config = self.node_config()?;
        let now = jiffies(monotonic(), config.hz);
        let mut counts = FlowCounts::default();
        counts.v4 = self.count::<[u8; 4]>(map::FLOWS, &config, now, &mut counts.states)?;
        counts.v6 = self.count::<[u8; 16]>(map::FLOWS6, &config, now, &mut counts.states)?;
        Ok(counts)
    }

    fn count<A: Address>(
        &self,
        name: &'static str,
        config: &NodeConfig,
        now: u32,
        states: &mut BTreeMap<FlowState, u64>,
    ) -> Result<u32, ViewError>
    where
        Flow<A>: Plain,
    {
        let flows = self.pin(name, MapType::Array)?.mapped::<Flow<A>>()?;
        let mut used = 0;
        for flow in in_use::<A>(&flows) {
            used += 1;
            *states.entry(state(&flow, config, not_before(&flow, now))).or_default() += 1;
        }
        Ok(used)
    }

    /// All connections, expired ones too, in order of clients.
    pub fn flows(&self) -> Result<Vec<FlowRow>, ViewError> {
        let config = self.node_config()?;
        let now = jiffies(monotonic(), config.hz);
        let mut rows = self.family::<[u8; 4]>(map::FLOWS, &config, now)?;
        rows.extend(self.family::<[u8; 16]>(map::FLOWS6, &config, now)?);
        rows.sort_by_key(|row| (row.client, row.frontend, row.protocol));
        Ok(rows)
    }

    fn family<A>(&self, name: &'static str, config: &NodeConfig, now: u32) -> Result<Vec<FlowRow>, ViewError>
    where
        A: Address + Into<IpAddr>,
        Flow<A>: Plain,
    {
        let flows = self.pin(name, MapType::Array)?.mapped::<Flow<A>>()?;
        Ok(in_use::<A>(&flows).filter_map(|flow| row(&flow, config, now)).collect())
    }
}

/// Copies of the entries in use. Most are not: of those nothing but the state is looked at.
fn in_use<A>(flows: &Mapping) -> impl Iterator<Item = Flow<A>>
where
    Flow<A>: Plain,
{
    (0..flows.len())
        .filter(|index| flows.byte(*index, offset_of!(Flow<A>, state)).is_some_and(|s| s & FLOW_USED != 0))
        .filter_map(|index| flows.read(index))
}

/// The clock is an estimate, and a packet may have passed since it was read: never before the last packet.
fn not_before<A>(flow: &Flow<A>, now: u32) -> u32 {
    if now.wrapping_sub(flow.last_seen).cast_signed() < 0 { flow.last_seen } else { now }
}

fn state<A: Address>(flow: &Flow<A>, config: &NodeConfig, now: u32) -> FlowState {
    if is_expired(flow, now, config) {
        FlowState::Expired
    } else if is_over(flow.state) {
        FlowState::Closed
    } else if flow.state & (FLOW_FIN_CLIENT | FLOW_FIN_BACKEND) != 0 {
        FlowState::Closing
    } else if flow.state & FLOW_REPLIED != 0 {
        FlowState::Established
    } else {
        FlowState::Opening
    }
}

/// `None` for a free entry.
pub(super) fn row<A: Address + Into<IpAddr>>(
    flow: &Flow<A>,
    config: &NodeConfig,
    now: u32,
) -> Option<FlowRow> {
    if flow.state & FLOW_USED == 0 {
        return None;
    }
    let now = not_before(flow, now);
    let since = |then: u32| {
        let ticks = now.wrapping_sub(then);
        Duration::from_secs_f64(f64::from(ticks) / f64::from(config.hz.max(1)))
    };
    Some(FlowRow {
        protocol: Transport(flow.proto),
        client: SocketAddr::new(flow.client.into(), flow.client_port),
        frontend: SocketAddr::new(flow.frontend.into(), flow.frontend_port),
        backend: SocketAddr::new(flow.backend.into(), flow.backend_port),
        source: SocketAddr::new(flow.source.into(), flow.source_port),
        service: flow.service,
        backend_id: flow.backend_id,
        state: state(flow, config, now),
        age: since(flow.created),
        idle: since(flow.last_seen),
    })
}

/// Time since the machine started, without the time it slept, as jiffies count it.
fn monotonic() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Duration::try_from(now).unwrap_or_default()
}

/// The kernel's jiffies now.
pub(super) fn now(hz: u32) -> u32 {
    jiffies(monotonic(), hz)
}

/// The low 32 bits of the kernel's jiffies, to within a second: nothing tells them to user space, but they
/// advance with the monotonic clock from five minutes before zero (`INITIAL_JIFFIES`, include/linux/jiffies.h).
fn jiffies(since_start: Duration, hz: u32) -> u32 {
    let ticks = since_start.as_secs_f64() * f64::from(hz);
    // Truncation to 32 bits is what the kernel does too.
    #[expect(clippy::cast_sign_loss, reason = "a duration is not negative")]
    let ticks = ticks as u64 as u32;
    ticks.wrapping_sub(300 * hz)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proxy_common::flow::FLOW_RESET;
    use rstest::rstest;

    const HZ: u32 = 250;

    fn flow(proto: u8, state: u8, last_seen: u32) -> Flow<[u8; 4]> {
        Flow { proto, state, created: 1_000, last_seen, ..Flow::default() }
    }

    #[rstest]
    #[case(6, FLOW_USED, 0, FlowState::Opening)]
    #[case(6, FLOW_USED, 61, FlowState::Expired)]
    #[case(6, FLOW_USED | FLOW_REPLIED, 61, FlowState::Established)]
    #[case(6, FLOW_USED | FLOW_REPLIED | FLOW_FIN_CLIENT, 61, FlowState::Closing)]
    #[case(6, FLOW_USED | FLOW_REPLIED | FLOW_FIN_CLIENT | FLOW_FIN_BACKEND, 5, FlowState::Closed)]
    #[case(6, FLOW_USED | FLOW_RESET, 5, FlowState::Closed)]
    #[case(6, FLOW_USED | FLOW_RESET, 11, FlowState::Expired)]
    #[case(17, FLOW_USED, 29, FlowState::Opening)]
    #[case(17, FLOW_USED | FLOW_REPLIED, 100, FlowState::Established)]
    #[case(17, FLOW_USED | FLOW_REPLIED, 121, FlowState::Expired)]
    fn states(#[case] proto: u8, #[case] bits: u8, #[case] silent: u32, #[case] expected: FlowState) {
        let config = NodeConfig::new(HZ, 16, 16, 1);
        let row = row(&flow(proto, bits, 2_000), &config, 2_000 + silent * HZ).unwrap();
        assert_eq!(row.state, expected);
        assert_eq!(row.idle, Duration::from_secs(silent.into()));
        assert_eq!(row.age, Duration::from_secs((silent + 4).into()));
    }

    #[test]
    fn a_free_entry_is_no_row() {
        assert_eq!(row(&flow(6, 0, 0), &NodeConfig::new(HZ, 16, 16, 1), 10), None);
    }

    #[test]
    fn a_packet_after_the_clock_was_read_is_not_years_ago() {
        let row = row(&flow(6, FLOW_USED, 5_000), &NodeConfig::new(HZ, 16, 16, 1), 4_990).unwrap();
        assert_eq!((row.state, row.idle), (FlowState::Opening, Duration::ZERO));
    }

    #[test]
    fn jiffies_start_five_minutes_before_they_wrap() {
        assert_eq!(jiffies(Duration::ZERO, HZ), 0u32.wrapping_sub(300 * HZ));
        assert_eq!(jiffies(Duration::from_mins(5), HZ), 0);
        assert_eq!(jiffies(Duration::from_secs(301), HZ), HZ);
    }
}
