//! The flows of the node as a test sets them.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};

use proxy_common::config::{PortRange, SNAT_RANGES};

use crate::store::{Ends, FilterBit, FlowUse};

/// What flows use, and what was asked for.
#[derive(Default)]
pub struct State {
    /// The filter bits that connections need.
    pub bits: BTreeSet<FilterBit>,
    /// How often they were asked for.
    pub bit_looks: usize,
    /// Backends with open connections.
    pub backends: BTreeSet<u32>,
    /// Service ports with connections.
    pub services: BTreeSet<u32>,
    /// How often they were asked for.
    pub service_looks: usize,
    /// Whether a connection has a source port outside of the current SNAT ranges.
    pub is_outside: bool,
    /// The addresses whose flows were ended, for each call.
    pub ended: Vec<BTreeMap<IpAddr, Ends>>,
    /// Whether every read fails.
    pub fails: bool,
}

/// A handle on the flows, which a test and the reconciler share.
#[derive(Clone, Default)]
pub struct Connections(Arc<Mutex<State>>);

impl Connections {
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    fn read(&self) -> io::Result<MutexGuard<'_, State>> {
        let state = self.state();
        if state.fails { Err(io::ErrorKind::OutOfMemory.into()) } else { Ok(state) }
    }
}

impl FlowUse for Connections {
    fn connected(&mut self, backends: &BTreeSet<u32>) -> io::Result<BTreeSet<u32>> {
        Ok(&self.read()?.backends & backends)
    }

    fn used_among(&mut self, bits: &BTreeSet<FilterBit>) -> io::Result<BTreeSet<FilterBit>> {
        let mut state = self.read()?;
        state.bit_looks += 1;
        Ok(&state.bits & bits)
    }

    fn services_among(&mut self, ids: &BTreeSet<u32>) -> io::Result<BTreeSet<u32>> {
        let mut state = self.read()?;
        state.service_looks += 1;
        Ok(&state.services & ids)
    }

    fn has_snat_outside(&mut self, _: [PortRange; SNAT_RANGES]) -> io::Result<bool> {
        Ok(self.read()?.is_outside)
    }

    fn end_sources(&mut self, addresses: &BTreeMap<IpAddr, Ends>) -> io::Result<usize> {
        self.state().ended.push(addresses.clone());
        self.read().map(|_| 1)
    }

    fn has_dsr(&mut self) -> io::Result<bool> {
        self.read().map(|_| false)
    }
}
