//! Access to the maps for tests, which have the role of the agent.

use std::vec::Vec;

use proxy_common::Family;
use proxy_common::backend::BackendEntry;
use proxy_common::config::NodeConfig;
use proxy_common::connections::{answer_time, open};
use proxy_common::conntrack::MOVES;
use proxy_common::flow::{Bucket, FlowEntry, STATE_RESET};
use proxy_common::latency::SocketExample;
use proxy_common::maglev;
use proxy_common::node::{Cidr, Device, NodeAddr, NodeEntry, Tunnel};
use proxy_common::prefilter::{Role, position};
use proxy_common::reason::Reason;
use proxy_common::service::{ServiceEntry, ServiceKey};
use proxy_common::socket::SocketEntry;
use proxy_common::stats::{RefusalKey, ServiceStats};

use super::maps::{HostMaps, at};
use crate::env::{ConnectOutcome, EventKind};

impl<F: Family> HostMaps<F> {
    /// Sets the configuration, and creates empty flow tables of the configured sizes.
    pub fn set_config(self, config: NodeConfig) {
        *at!(self, config) = config;
        *at!(self, flows) = std::vec![ZeroFlow::<F>::ZERO; config.flows[F::INDEX as usize].entries as usize];
        *at!(self, buckets) = std::vec![Bucket::EMPTY; config.flows[F::INDEX as usize].buckets as usize];
    }

    /// Changes the configuration, except the sizes of tables.
    pub fn edit_config(self, edit: impl FnOnce(&mut NodeConfig)) {
        edit(at!(self, config));
    }

    /// Sets whether the programs begin flows.
    pub fn set_opens_flows(self, opens: bool) {
        *at!(self, opens_flows) = opens;
    }

    /// Sets the data of the node.
    pub fn set_node(self, node: NodeEntry<F::Words>) {
        *at!(self, node) = node;
    }

    /// Adds an address of the node.
    pub fn add_node_addr(self, addr: F::Words, bits: NodeAddr) {
        at!(self, node_addrs).insert(addr, bits);
    }

    /// Sets the node with this number in `tunnels`, to which packets are encapsulated.
    pub fn set_tunnel(self, number: u32, tunnel: Tunnel) {
        at!(self, tunnels).insert(number, tunnel);
    }

    /// Adds a device.
    pub fn add_device(self, ifindex: u32, bits: Device) {
        at!(self, devices).insert(ifindex, bits);
    }

    /// Sets whether the program of the early hook is attached to a device.
    pub fn set_early_device(self, ifindex: u32, is_attached: bool) {
        let devices = at!(self, early_devices);
        if is_attached {
            devices.insert(ifindex)
        } else {
            devices.remove(&ifindex)
        };
    }

    fn set_bit(self, (word, mask): (u32, u64)) {
        self.set_prefilter(word, mask);
    }

    /// Clears all bits of `prefilter`.
    pub fn clear_prefilter(self) {
        at!(self, prefilter).clear();
    }

    /// Sets the bit of an endpoint of `prefilter`.
    pub fn add_backend_bit(self, addr: &F::Words, port: u16, proto: u8) {
        self.set_bit(position(Role::Backend, addr, port, proto));
    }

    /// Sets bits of a word of `prefilter`.
    pub fn set_prefilter(self, word: u32, mask: u64) {
        *at!(self, prefilter).entry(word).or_insert(0) |= mask;
    }

    /// Adds a frontend, or replaces it, and sets its tag and its bit of `prefilter`. A node port also needs the bits of its
    /// addresses: [`HostMaps::add_frontend_bit`].
    pub fn add_service(self, key: ServiceKey<F::Words>, entry: ServiceEntry) {
        self.add_frontend_bit(&key.addr, key.port, key.proto);
        at!(self, services).insert(key, ServiceEntry { tag: key.tag(), ..entry });
    }

    /// Writes an entry unchanged, without a bit of `prefilter`.
    pub fn put_service(self, key: ServiceKey<F::Words>, entry: ServiceEntry) {
        at!(self, services).insert(key, entry);
    }

    /// Makes this number of lookups of a Service find nothing, as while the kernel replaces the entry.
    pub fn miss_services(self, lookups: u32) {
        *at!(self, service_misses) = lookups;
    }

    /// Sets a frontend's bit of `prefilter`.
    pub fn add_frontend_bit(self, addr: &F::Words, port: u16, proto: u8) {
        self.set_bit(position(Role::Frontend, addr, port, proto));
    }

    /// Writes ids of backends into the slots from `base` on; ignores ids beyond the end of the array.
    pub fn set_slots(self, base: u32, ids: &[u32]) {
        for (slot, id) in at!(self, slots).iter_mut().skip(base as usize).zip(ids) {
            *slot = *id;
        }
    }

    /// Writes words of Maglev tables from `base` on; ignores words beyond the end of the array.
    pub fn set_maglev(self, base: u32, words: &[u64]) {
        for (word, new) in at!(self, maglev).iter_mut().skip(base as usize).zip(words) {
            *word = *new;
        }
    }

    /// Writes the first words of Maglev tables, the current one first; does nothing if the index is beyond the array.
    pub fn set_maglev_index(self, index: u32, bases: &[u32]) {
        let base = |number: u32| bases.get(number as usize).copied().unwrap_or(0);
        for number in (0..maglev::TABLES).step_by(2) {
            let word = at!(self, maglev_index).get_mut(maglev::index_word(index, number) as usize);
            if let Some(word) = word {
                *word = maglev::index_of([base(number), base(number + 1)]);
            }
        }
    }

    /// Changes the state of a backend.
    pub fn set_backend_state(self, id: u32, state: u8) {
        if let Some(backend) = at!(self, backends).get_mut(id as usize) {
            backend.state = state;
        }
    }

    /// Writes a backend, and its bit of `prefilter`. If the id is beyond the array, only sets the bit.
    pub fn set_backend(self, id: u32, backend: BackendEntry<F::Words>) {
        self.set_bit(position(Role::Backend, &backend.addr, backend.port, backend.proto));
        if let Some(entry) = at!(self, backends).get_mut(id as usize) {
            *entry = backend;
        }
    }

    /// Adds a range of clients to a set.
    pub fn add_source_range(self, set: u32, range: Cidr<F::Words>) {
        at!(self, source_ranges).push((set, range));
    }

    /// Removes a range of clients from a set.
    pub fn remove_source_range(self, set: u32, range: Cidr<F::Words>) {
        at!(self, source_ranges).retain(|known| *known != (set, range));
    }

    /// Sets the number of entries of `sockets`.
    pub fn set_socket_entries(self, entries: usize) {
        *at!(self, socket_entries) = entries;
    }

    /// Returns the entries of `sockets`.
    pub fn sockets(self) -> Vec<SocketEntry<F::Words>> {
        at!(self, sockets).values().copied().collect()
    }

    /// Sets the cgroups of the current process, from level 1 on.
    pub fn set_cgroups(self, cgroups: &[u64]) {
        *at!(self, cgroups) = cgroups.to_vec();
    }

    /// Sets whether programs can choose the error of a call.
    pub fn set_can_set_errno(self, can: bool) {
        *at!(self, can_set_errno) = can;
    }

    /// Returns the error that a program has set since the last call.
    pub fn take_errno(self) -> Option<i32> {
        at!(self, errno).take()
    }

    /// Sets whether the time that backends take to answer a SYN is measured.
    pub fn set_measures_latency(self, measures: bool) {
        *at!(self, measures_latency) = measures;
    }

    /// Returns the outcomes of connections of sockets since the last call, each with its Service and backend.
    pub fn take_connect_outcomes(self) -> Vec<(u32, u32, ConnectOutcome)> {
        core::mem::take(at!(self, connect_outcomes))
    }

    /// Returns the answers to SYNs of flows since the last call, each with its Service, its backend, and whether it is a refusal.
    pub fn take_syn_answers(self) -> Vec<(u32, u32, bool)> {
        core::mem::take(at!(self, syn_answers))
    }

    /// Returns the examples of connections of sockets since the last call, each with its Service.
    pub fn take_socket_examples(self) -> Vec<(u32, SocketExample)> {
        core::mem::take(at!(self, socket_examples))
    }

    /// Returns the low 32 bits of jiffies.
    pub fn now(self) -> u32 {
        *at!(self, jiffies)
    }

    /// Advances the clock.
    pub fn advance(self, jiffies: u32) {
        let now = at!(self, jiffies);
        *now = now.wrapping_add(jiffies);
    }

    /// Returns the count of a reason.
    pub fn count_of(self, reason: Reason) -> u64 {
        at!(self, reasons).get(reason as usize).copied().unwrap_or(0)
    }

    /// Returns the count of a reason for a Service.
    pub fn refusals_of(self, service: u32, reason: Reason) -> u64 {
        let key = RefusalKey { service, reason: reason as u32 };
        at!(self, refusals).get(&key).copied().unwrap_or(0)
    }

    /// Returns the counts of reasons for all Services.
    pub fn refusals(self) -> Vec<(RefusalKey, u64)> {
        at!(self, refusals).iter().map(|(of, count)| (*of, *count)).collect()
    }

    /// Returns the traffic of a Service.
    pub fn stats_of(self, service: u32) -> ServiceStats {
        at!(self, service_stats).get(service as usize).copied().unwrap_or_default()
    }

    /// Returns the count of a backend's open connections; 0 if the id is beyond the array.
    pub fn open_connections_of(self, backend: u32) -> u64 {
        let word = at!(self, open_connections).get(backend as usize).copied().unwrap_or(0);
        u64::from(open(word).unsigned_abs())
    }

    /// Returns the time of a backend's answers, in parts of a jiffy.
    pub fn answer_time_of(self, backend: u32) -> u32 {
        let word = at!(self, open_connections).get(backend as usize).copied().unwrap_or(0);
        answer_time(word, self.now(), at!(self, config).hz)
    }

    /// Returns the number of connections to a backend.
    pub fn connections_to(self, backend: u32) -> u64 {
        at!(self, backend_connections).get(backend as usize).copied().unwrap_or(0)
    }

    /// Returns a copy of the entries of the flow table.
    pub fn flows(self) -> Vec<FlowEntry<F::Words>> {
        at!(self, flows).clone()
    }

    /// Marks every flow for a reset, as the agent does.
    pub fn mark_flows(self) {
        for flow in at!(self, flows).iter_mut().filter(|flow| flow.bits() != 0) {
            flow.state |= u64::from(STATE_RESET);
        }
    }

    /// Moves every flow to another backend, as the agent does.
    pub fn move_flows(self) {
        for flow in at!(self, flows).iter_mut().filter(|flow| flow.bits() != 0) {
            flow.state |= u64::from(MOVES);
        }
    }

    /// Returns a copy of the buckets of the flow index.
    pub fn buckets(self) -> Vec<Bucket> {
        at!(self, buckets).clone()
    }

    /// Returns the events that listeners were sent since the last call, with the Service.
    pub fn take_events(self) -> Vec<(u32, EventKind)> {
        core::mem::take(at!(self, events))
    }
}

/// A free entry of the flow table.
struct ZeroFlow<F>(core::marker::PhantomData<F>);

impl<F: Family> ZeroFlow<F> {
    const ZERO: FlowEntry<F::Words> = {
        use proxy_common::Address as _;
        let zero = F::Words::ZERO;
        FlowEntry {
            state: 0,
            client: zero,
            frontend: zero,
            backend: zero,
            source: zero,
            client_port: 0,
            frontend_port: 0,
            backend_port: 0,
            source_port: 0,
            proto: 0,
            reserved: 0,
            tags: [0; 2],
            service: 0,
            backend_id: 0,
            created: 0,
            last_seen: 0,
            positions: [0; 2],
            seq: [0; 2],
        }
    };
}
