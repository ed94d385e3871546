//! The flows of the packet path.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use aya::maps::MapType;
use proxy_common::config::{NodeConfig, PortRange, SNAT_RANGES};
use proxy_common::conntrack::{self, ASSURED, SEEN_REPLY, is_closed, is_half_closed, timeout};
use proxy_common::flow::{FlowEntry, STATE_DSR, STATE_SNAT, STATE_USED};
use proxy_common::prefilter::{Role, position};
use proxy_common::{Address, PROTO_UDP};
use proxy_core::model::FlowState;

use super::flow_row::{FlowCounts, FlowRow, Forwarding};
use super::{Transport, View, ViewError};
use crate::maps::family::MapFamily;
use crate::maps::mapping::Mapping;
use proxy_core::store::FilterBit;

impl View {
    /// Maps the flow table of a family, for reading.
    pub(super) fn flow_table<A: MapFamily>(&self) -> Result<Mapping, ViewError> {
        self.pin(A::FLOWS, MapType::Array)?.mapped::<FlowEntry<A>>()
    }

    /// Counts the flows that [`View::flows`] returns, at the cost of one look at each entry.
    pub fn flow_counts(&self) -> Result<FlowCounts, ViewError> {
        let config = self.node_config()?;
        let now = jiffies(monotonic(), config.hz);
        let mut counts = FlowCounts::default();
        counts.v4 = self.count::<[u8; 4]>(&config, now, &mut counts.states)?;
        counts.v6 = self.count::<[u8; 16]>(&config, now, &mut counts.states)?;
        Ok(counts)
    }

    fn count<A: MapFamily>(
        &self,
        config: &NodeConfig,
        now: u32,
        states: &mut BTreeMap<FlowState, u64>,
    ) -> Result<u32, ViewError> {
        let flows = self.flow_table::<A>()?;
        let mut used = 0;
        for flow in in_use::<A>(&flows) {
            used += 1;
            *states.entry(state(&flow, config, not_before(&flow, config, now))).or_default() += 1;
        }
        Ok(used)
    }

    /// Returns all flows, including expired ones, sorted by client.
    pub fn flows(&self) -> Result<Vec<FlowRow>, ViewError> {
        let config = self.node_config()?;
        let now = jiffies(monotonic(), config.hz);
        let mut rows = self.family::<[u8; 4]>(&config, now)?;
        rows.extend(self.family::<[u8; 16]>(&config, now)?);
        rows.sort_by_key(|row| (row.client, row.frontend, row.protocol));
        Ok(rows)
    }

    /// Returns those of these bits of the prefilter that flows need which have not expired.
    pub fn filter_bits(&self, among: &BTreeSet<FilterBit>) -> Result<BTreeSet<FilterBit>, ViewError> {
        let mut used = BTreeSet::new();
        self.live(|flow| used.extend(flow.filter.into_iter().filter(|bit| among.contains(bit))))?;
        Ok(used)
    }

    /// Returns those of these ids of Service ports that flows have which have not expired.
    pub fn flow_services(&self, among: &BTreeSet<u32>) -> Result<BTreeSet<u32>, ViewError> {
        let mut used = BTreeSet::new();
        self.live(|flow| used.extend(flow.service_in(among)))?;
        Ok(used)
    }

    /// Whether a flow with SNAT that has not expired has a source port in none of these ranges.
    pub fn has_snat_outside(&self, ranges: [PortRange; SNAT_RANGES]) -> Result<bool, ViewError> {
        self.any_live(|flow| flow.is_snat_outside(ranges))
    }

    /// Whether a flow that has not expired is encapsulated (DSR).
    pub fn has_dsr(&self) -> Result<bool, ViewError> {
        self.any_live(|flow| flow.bits & STATE_DSR != 0)
    }

    fn live(&self, mut each: impl FnMut(Live)) -> Result<(), ViewError> {
        self.any_live(|flow| {
            each(flow);
            false
        })?;
        Ok(())
    }

    /// Whether `is_meant` returns true for a flow that has not expired. It is not called for further flows then.
    fn any_live(&self, mut is_meant: impl FnMut(Live) -> bool) -> Result<bool, ViewError> {
        let config = self.node_config()?;
        let now = now(config.hz);
        let v4 = self.flow_table::<[u8; 4]>()?;
        if in_use::<[u8; 4]>(&v4).filter_map(|flow| Live::of(&flow, &config, now)).any(&mut is_meant) {
            return Ok(true);
        }
        let v6 = self.flow_table::<[u8; 16]>()?;
        Ok(in_use::<[u8; 16]>(&v6).filter_map(|flow| Live::of(&flow, &config, now)).any(is_meant))
    }

    fn family<A: MapFamily>(&self, config: &NodeConfig, now: u32) -> Result<Vec<FlowRow>, ViewError> {
        let flows = self.flow_table::<A>()?;
        Ok(in_use::<A>(&flows).filter_map(|flow| row(&flow, config, now)).collect())
    }
}

/// Offset of the byte with [`STATE_USED`] in an entry, which starts with the state word.
const STATE_BYTE: usize = if cfg!(target_endian = "little") { 0 } else { size_of::<u64>() - 1 };

/// Returns copies of the entries in use.
fn in_use<A: Address>(flows: &Mapping) -> impl Iterator<Item = FlowEntry<A>> {
    numbered_in_use(flows).map(|(_, flow)| flow)
}

/// Returns copies of the entries in use, with their numbers. Most entries are not in use: of those, only the state is read.
pub(super) fn numbered_in_use<A: Address>(flows: &Mapping) -> impl Iterator<Item = (usize, FlowEntry<A>)> {
    (0..flows.len())
        .filter(|index| flows.byte(*index, STATE_BYTE).is_some_and(|byte| u32::from(byte) & STATE_USED != 0))
        .filter_map(|index| Some((index, flows.read(index)?)))
}

/// The kernel's jiffies in relation to the monotonic clock, as of one moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    hz: u32,
    /// Ticks of the monotonic clock since zero.
    ticks: u64,
}

impl Clock {
    /// Reads the clock.
    pub(super) fn new(hz: u32) -> Self {
        let hz = hz.max(1);
        let now = monotonic();
        let ticks =
            now.as_secs() * u64::from(hz) + u64::from(now.subsec_nanos()) * u64::from(hz) / 1_000_000_000;
        Self { hz, ticks }
    }

    fn jiffies(self) -> u32 {
        (self.ticks as u32).wrapping_sub(300 * self.hz)
    }

    /// Returns how many ticks ago `then` was; 0 if the estimated clock is behind `then`.
    pub(super) fn age(self, then: u32) -> u32 {
        conntrack::age(self.jiffies(), then, self.hz)
    }

    /// Returns the monotonic clock at the tick `then`; the result does not depend on when this clock was read.
    pub(super) fn monotonic(self, then: u32) -> Duration {
        let age = self.age(then);
        let ahead = if age == 0 { then.wrapping_sub(self.jiffies()) } else { 0 };
        let tick = self.ticks.saturating_sub(u64::from(age)) + u64::from(ahead);
        let (hz, part) = (u64::from(self.hz), tick % u64::from(self.hz));
        Duration::from_secs(tick / hz) + Duration::from_nanos(part * 1_000_000_000 / hz)
    }
}

/// Returns `now`, but at least the time of the flow's last packet: the clock is an estimate, and a packet may have passed
/// since it was read.
pub(in crate::maps) fn not_before<A>(flow: &FlowEntry<A>, config: &NodeConfig, now: u32) -> u32 {
    if conntrack::age(now, flow.last_seen, config.hz) == 0 { flow.last_seen } else { now }
}

fn state<A: Address>(flow: &FlowEntry<A>, config: &NodeConfig, now: u32) -> FlowState {
    let bits = flow.bits();
    let answered = if flow.proto == PROTO_UDP { SEEN_REPLY } else { ASSURED };
    if flow.is_expired(now, config) {
        FlowState::Expired
    } else if is_closed(bits) {
        FlowState::Closed
    } else if is_half_closed(bits) {
        FlowState::Closing
    } else if bits & answered != 0 {
        FlowState::Established
    } else if bits & SEEN_REPLY != 0 {
        FlowState::HalfOpen
    } else {
        FlowState::Unreplied
    }
}

/// A flow of either family that has not expired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Live {
    bits: u32,
    /// Id of the Service port.
    service: u32,
    source_port: u16,
    /// The bits of the frontend and of the endpoint in the prefilter.
    filter: [FilterBit; 2],
}

impl Live {
    fn of<A: Address>(flow: &FlowEntry<A>, config: &NodeConfig, now: u32) -> Option<Self> {
        (!flow.is_expired(not_before(flow, config, now), config)).then(|| Self {
            bits: flow.bits(),
            service: flow.service,
            source_port: flow.source_port,
            filter: [
                position(Role::Frontend, &flow.frontend, flow.frontend_port, flow.proto),
                position(Role::Backend, &flow.backend, flow.backend_port, flow.proto),
            ],
        })
    }

    fn service_in(&self, among: &BTreeSet<u32>) -> Option<u32> {
        among.contains(&self.service).then_some(self.service)
    }

    fn is_snat_outside(&self, ranges: [PortRange; SNAT_RANGES]) -> bool {
        self.bits & STATE_SNAT != 0 && !ranges.iter().any(|range| range.contains(self.source_port))
    }
}

/// Returns the row of an entry; `None` for a free entry.
pub(super) fn row<A: Address + Into<IpAddr>>(
    flow: &FlowEntry<A>,
    config: &NodeConfig,
    now: u32,
) -> Option<FlowRow> {
    if flow.bits() & STATE_USED == 0 {
        return None;
    }
    let now = not_before(flow, config, now);
    let duration = |ticks: u32| Duration::from_secs_f64(f64::from(ticks) / f64::from(config.hz.max(1)));
    let since = |then: u32| duration(now.wrapping_sub(then));
    let allowed = timeout(flow.proto, flow.bits(), config);
    Some(FlowRow {
        protocol: Transport(flow.proto),
        client: SocketAddr::new(flow.client.into(), flow.client_port),
        frontend: SocketAddr::new(flow.frontend.into(), flow.frontend_port),
        backend: SocketAddr::new(flow.backend.into(), flow.backend_port),
        source: SocketAddr::new(flow.source.into(), flow.source_port),
        service: flow.service,
        backend_id: flow.backend_id,
        state: state(flow, config, now),
        forwarding: Forwarding::of(flow.bits()),
        age: since(flow.created),
        idle: since(flow.last_seen),
        timeout: duration(allowed.saturating_sub(now.wrapping_sub(flow.last_seen))),
    })
}

/// Returns the time since boot without the time in suspend: the clock of jiffies, of events and of `bpf_ktime_get_ns`.
pub fn monotonic() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Duration::try_from(now).unwrap_or_default()
}

/// Returns the kernel's jiffies of now.
pub(in crate::maps) fn now(hz: u32) -> u32 {
    jiffies(monotonic(), hz)
}

/// Returns the low 32 bits of the kernel's jiffies, to within a second. No interface gives them to user space, but they
/// advance with the monotonic clock, and start five minutes before zero (`INITIAL_JIFFIES`, include/linux/jiffies.h).
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
    use proxy_common::conntrack::{FIN_BACKEND, FIN_CLIENT, RST_CLIENT};
    use proxy_common::flow::{STATE_DIRECT, STATE_DSR, STATE_TUNNEL_SHIFT};
    use rstest::rstest;

    #[test]
    fn a_tick_is_the_same_time_whenever_it_is_asked() {
        let clock = |ticks| Clock { hz: 250, ticks };
        // Jiffies begin five minutes before zero.
        let created = 1_000_u32.wrapping_sub(300 * 250);
        for later in [1_000, 1_001, 250_000, 1 << 30] {
            assert_eq!(clock(later).monotonic(created), Duration::from_secs(4), "{later}");
        }
        assert_eq!(clock(1_250).age(created), 250);
        // The estimate is a tick behind.
        assert_eq!(clock(999).age(created), 0);
        assert_eq!(clock(999).monotonic(created), Duration::from_secs(4));
    }

    const HZ: u32 = 250;
    const USED: u32 = STATE_USED;
    const OPEN: u32 = STATE_USED | SEEN_REPLY | ASSURED;

    fn flow(proto: u8, bits: u32, last_seen: u32) -> FlowEntry<[u8; 4]> {
        let state = 7 << 32 | u64::from(bits);
        FlowEntry { proto, state, created: 1_000, last_seen, ..FlowEntry::default() }
    }

    #[rstest]
    #[case(6, USED, 0, FlowState::Unreplied)]
    #[case(6, USED, 61, FlowState::Expired)]
    #[case(6, USED | SEEN_REPLY, 59, FlowState::HalfOpen)]
    #[case(6, USED | SEEN_REPLY, 61, FlowState::Expired)]
    #[case(6, OPEN, 61, FlowState::Established)]
    #[case(6, OPEN | FIN_CLIENT, 61, FlowState::Closing)]
    #[case(6, OPEN | FIN_CLIENT | FIN_BACKEND, 5, FlowState::Closed)]
    #[case(6, USED | RST_CLIENT, 5, FlowState::Closed)]
    #[case(6, USED | RST_CLIENT, 121, FlowState::Expired)]
    #[case(17, USED, 29, FlowState::Unreplied)]
    #[case(17, USED | SEEN_REPLY, 29, FlowState::Established)]
    #[case(17, USED | SEEN_REPLY, 31, FlowState::Expired)]
    #[case(17, OPEN, 100, FlowState::Established)]
    fn states(#[case] proto: u8, #[case] bits: u32, #[case] silent: u32, #[case] expected: FlowState) {
        let config = NodeConfig::new(HZ, 16, 16, 1);
        let row = row(&flow(proto, bits, 2_000), &config, 2_000 + silent * HZ).unwrap();
        assert_eq!(row.state, expected);
        assert_eq!(row.idle, Duration::from_secs(silent.into()));
        assert_eq!(row.age, Duration::from_secs((silent + 4).into()));
        assert_eq!(row.timeout == Duration::ZERO, expected == FlowState::Expired);
    }

    #[test]
    fn service_port_is_in_use_until_its_flow_expires() {
        let config = NodeConfig::new(HZ, 16, 16, 1);
        let flow = FlowEntry { service: 7, ..flow(17, USED, 2_000) };
        let live = |silent: u32| Live::of(&flow, &config, 2_000 + silent * HZ);
        let used = |among: u32, silent: u32| live(silent)?.service_in(&[among].into());
        assert_eq!([used(7, 29), used(7, 31), used(8, 29)], [Some(7), None, None]);
    }

    #[rstest]
    #[case(0, Forwarding::Dnat)]
    #[case(STATE_SNAT, Forwarding::Snat)]
    #[case(STATE_DSR | STATE_SNAT | 7 << STATE_TUNNEL_SHIFT, Forwarding::Dsr)]
    #[case(STATE_DIRECT | STATE_SNAT, Forwarding::Direct)]
    fn a_row_tells_how_packets_are_forwarded(#[case] bits: u32, #[case] expected: Forwarding) {
        let row = row(&flow(6, USED | bits, 5_000), &NodeConfig::new(HZ, 16, 16, 1), 5_000).unwrap();
        assert_eq!(row.forwarding, expected);
    }

    #[test]
    fn a_free_entry_is_no_row() {
        assert_eq!(row(&flow(6, 0, 0), &NodeConfig::new(HZ, 16, 16, 1), 10), None);
    }

    #[test]
    fn a_connection_needs_its_bits_until_it_expires() {
        let flow = FlowEntry {
            frontend: [10, 96, 0, 1],
            frontend_port: 80,
            backend: [10, 244, 0, 7],
            backend_port: 8080,
            ..flow(6, OPEN, 2_000)
        };
        let config = NodeConfig::new(HZ, 16, 16, 1);
        let expected = [
            position(Role::Frontend, &[10u8, 96, 0, 1], 80, 6),
            position(Role::Backend, &[10u8, 244, 0, 7], 8080, 6),
        ];
        let bits = |silent: u32| Live::of(&flow, &config, 2_000 + silent * HZ).map(|flow| flow.filter);
        assert_eq!(bits(86_399), Some(expected));
        assert_eq!(bits(86_402), None);
    }

    #[rstest]
    #[case(OPEN | STATE_SNAT, 700, 10, true)]
    #[case(OPEN | STATE_SNAT, 700, 86_402, false)]
    #[case(OPEN | STATE_SNAT, 1_024, 10, false)]
    #[case(OPEN | STATE_SNAT, 65_535, 10, false)]
    #[case(OPEN, 700, 10, false)]
    fn ports_of_old_ranges(
        #[case] bits: u32,
        #[case] port: u16,
        #[case] silent: u32,
        #[case] expected: bool,
    ) {
        let flow = FlowEntry { source_port: port, ..flow(6, bits, 2_000) };
        let config = NodeConfig::new(HZ, 16, 16, 1);
        let live = Live::of(&flow, &config, 2_000 + silent * HZ);
        assert_eq!(live.is_some_and(|flow| flow.is_snat_outside(config.snat)), expected);
    }

    #[test]
    fn a_packet_after_the_clock_was_read_is_not_years_ago() {
        let row = row(&flow(6, USED, 5_000), &NodeConfig::new(HZ, 16, 16, 1), 4_990).unwrap();
        assert_eq!((row.state, row.idle), (FlowState::Unreplied, Duration::ZERO));
    }

    #[test]
    fn jiffies_start_five_minutes_before_they_wrap() {
        assert_eq!(jiffies(Duration::ZERO, HZ), 0u32.wrapping_sub(300 * HZ));
        assert_eq!(jiffies(Duration::from_mins(5), HZ), 0);
        assert_eq!(jiffies(Duration::from_secs(301), HZ), HZ);
    }
}
