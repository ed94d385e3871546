//! How long endpoints take to answer.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering;
use std::time::Duration;

use aya::maps::MapType;
use proxy_common::flow::{FlowEntry, STATE_SYN, STATE_USED};
use proxy_common::latency::{ExampleKey, LatencyEntry, LatencyKey, SocketExample, answered_in, bucket};
use proxy_common::map_names as map;
use proxy_common::{Address, PROTO_TCP};

use super::{View, ViewError, flows, ip_of};
use crate::maps::mapping::Mapping;

/// Connections that are read for examples, the newest ones: each costs a system call of less than a microsecond.
const MOST: usize = 16_384;

/// A connection that was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Example {
    /// The client.
    pub client: SocketAddr,
    /// The endpoint.
    pub backend: SocketAddr,
    /// Time until the endpoint answered.
    pub took: Duration,
    /// Start of the connection, by the monotonic clock; on the packet path to within a jiffy.
    pub begun: Duration,
}

/// Id of the Service port, and number of the bucket.
pub type ExampleOf = (u32, usize);

/// Where a connection is in the flow tables.
struct Place {
    age: u32,
    index: usize,
    is_v6: bool,
}

impl View {
    /// Returns the measurements (`--connect-latency`) by the ids of Service port and backend; backend 0 stands for all of
    /// the Service. Empty if nothing is measured.
    pub fn latency(&self) -> Result<BTreeMap<(u32, u32), LatencyEntry>, ViewError> {
        // Programs of an earlier version have no such map.
        if !self.folder().join(map::CONNECT_LATENCY).exists() {
            return Ok(BTreeMap::new());
        }
        let rows = self.pin(map::CONNECT_LATENCY, MapType::LruHash)?.all::<LatencyKey, LatencyEntry>()?;
        Ok(rows.into_iter().map(|(key, entry)| ((key.service, key.backend), entry)).collect())
    }

    /// Returns the newest connection in each bucket of each Service port, by the id of the port and the number of the
    /// bucket. The connections are those of sockets, and at most 16,384 of the flow tables. Empty if nothing is measured.
    pub fn latency_examples(&self) -> Result<BTreeMap<ExampleOf, Example>, ViewError> {
        let mut examples = self.packet_examples()?;
        for (key, example) in self.socket_examples()? {
            let newest = examples.entry(key).or_insert(example);
            if newest.begun < example.begun {
                *newest = example;
            }
        }
        Ok(examples)
    }

    /// Returns the contents of `socket_examples`, by Service port and bucket.
    pub(super) fn socket_examples(&self) -> Result<BTreeMap<ExampleOf, Example>, ViewError> {
        if !self.folder().join(map::SOCKET_EXAMPLES).exists() {
            return Ok(BTreeMap::new());
        }
        let rows = self.pin(map::SOCKET_EXAMPLES, MapType::LruHash)?.all::<ExampleKey, SocketExample>()?;
        let example = |(ExampleKey { service, bucket }, row): (_, SocketExample)| {
            let address = |words, port| Some(SocketAddr::new(ip_of(row.family, words)?, port));
            let example = Example {
                client: address(row.client, row.client_port)?,
                backend: address(row.backend, row.backend_port)?,
                took: Duration::from_nanos(row.took),
                begun: Duration::from_nanos(row.begun),
            };
            Some(((service, bucket as usize), example))
        };
        Ok(rows.into_iter().filter_map(example).collect())
    }

    fn packet_examples(&self) -> Result<BTreeMap<ExampleOf, Example>, ViewError> {
        if !self.folder().join(map::SYN_TIMES).exists() {
            return Ok(BTreeMap::new());
        }
        let config = self.node_config()?;
        let times = self.pin(map::SYN_TIMES, MapType::Array)?.mapped::<u64>()?;
        let v4 = self.pin(map::FLOWS, MapType::Array)?.mapped::<FlowEntry<[u8; 4]>>()?;
        let v6 = self.pin(map::FLOWS6, MapType::Array)?.mapped::<FlowEntry<[u8; 16]>>()?;
        let clock = flows::Clock::new(config.hz);
        let mut places = measured::<[u8; 4]>(&v4, clock, false);
        places.extend(measured::<[u8; 16]>(&v6, clock, true));
        if places.len() > MOST {
            places.select_nth_unstable_by_key(MOST, |place| place.age);
            places.truncate(MOST);
        }
        places.sort_unstable_by_key(|place| place.age);
        let mut examples = BTreeMap::new();
        for Place { index, is_v6, .. } in places {
            let Some(time) = times.word64(index << 1 | usize::from(is_v6)) else {
                // Latency is not measured: `syn_times` has no such element.
                break;
            };
            let Some(nanoseconds) = answered_in(time.load(Ordering::Relaxed)) else { continue };
            let took = Duration::from_nanos(nanoseconds);
            // The flow is read after the time: if the entry holds another flow by now, that flow has no answer yet.
            let found = if is_v6 {
                example::<[u8; 16]>(&v6, index, took, clock)
            } else {
                example::<[u8; 4]>(&v4, index, took, clock)
            };
            if let Some((service, example)) = found {
                examples.entry((service, bucket(nanoseconds / 1_000))).or_insert(example);
            }
        }
        Ok(examples)
    }
}

fn is_measured<A: Address>(flow: &FlowEntry<A>) -> bool {
    flow.bits() & (STATE_USED | STATE_SYN) == STATE_USED | STATE_SYN
        && flow.proto == PROTO_TCP
        && flow.service != 0
}

fn measured<A: Address>(flows: &Mapping, clock: flows::Clock, is_v6: bool) -> Vec<Place> {
    let of = |(index, flow): (usize, FlowEntry<A>)| {
        is_measured(&flow).then(|| Place { age: clock.age(flow.created), index, is_v6 })
    };
    flows::numbered_in_use::<A>(flows).filter_map(of).collect()
}

fn example<A: Address + Into<IpAddr>>(
    flows: &Mapping,
    index: usize,
    took: Duration,
    clock: flows::Clock,
) -> Option<(u32, Example)> {
    let flow = flows.read::<FlowEntry<A>>(index).filter(is_measured)?;
    let example = Example {
        client: SocketAddr::new(flow.client.into(), flow.client_port),
        backend: SocketAddr::new(flow.backend.into(), flow.backend_port),
        took,
        begun: clock.monotonic(flow.created),
    };
    Some((flow.service, example))
}
