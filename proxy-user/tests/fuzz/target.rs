//! The interface of what is tested: anything that processes packets like the data path.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use proxy_common::reason::Reason;

use crate::scenario::Scenario;

/// The hook, which selects the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    Ingress,
    Egress,
}

/// A device of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    Loopback,
    /// The device that leads outside.
    Uplink,
    /// The device that leads to the pods of this node.
    Pods,
}

/// Where and how a packet arrives at a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Context {
    /// The device that the hook is on.
    pub device: Device,
    /// At egress: the packet did not arrive on a device.
    pub is_local_origin: bool,
    /// A driver has summed up the whole packet (`CHECKSUM_COMPLETE`): the sum must stay right.
    pub is_complete: bool,
}

/// The outcome of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The packet continues to the next program.
    Next,
    Drop,
    /// The program sends the packet, out of a device or up the stack.
    Redirect,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub outcome: Outcome,
    pub packet: Vec<u8>,
    /// Whether the driver's sum is no longer that of the packet ([`Context::is_complete`]).
    pub is_sum_wrong: bool,
}

/// Traffic of a Service: connections, packets and bytes to endpoints, packets and bytes back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic(pub [u64; 5]);

impl Traffic {
    pub fn connection(&mut self) {
        self.0[0] += 1;
    }

    pub fn packet(&mut self, is_reply: bool, bytes: usize) {
        let at = if is_reply { 3 } else { 1 };
        self.0[at] += 1;
        self.0[at + 1] += bytes as u64;
    }
}

/// The counters since the case began, without zeros.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    pub reasons: BTreeMap<Reason, u64>,
    /// By Service and reason.
    pub refusals: BTreeMap<(u32, Reason), u64>,
    pub traffic: BTreeMap<u32, Traffic>,
    /// By backend: the difference between its open connections and its flows that count. Checked on the host only.
    pub miscounted: BTreeMap<u32, i64>,
}

impl Counters {
    /// Adds the difference between two readings of the counters.
    pub fn add(&mut self, now: &Self, before: &Self) {
        for (reason, count) in &now.reasons {
            let more = count - before.reasons.get(reason).unwrap_or(&0);
            if more != 0 {
                *self.reasons.entry(*reason).or_default() += more;
            }
        }
        for (key, count) in &now.refusals {
            let more = count - before.refusals.get(key).unwrap_or(&0);
            if more != 0 {
                *self.refusals.entry(*key).or_default() += more;
            }
        }
        for (id, Traffic(now)) in &now.traffic {
            let before = before.traffic.get(id).copied().unwrap_or_default();
            if *now != before.0 {
                let sums = &mut self.traffic.entry(*id).or_default().0;
                (0..now.len()).for_each(|at| sums[at] += now[at] - before.0[at]);
            }
        }
    }
}

/// Properties of a flow that no packet shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hidden {
    pub backend: SocketAddr,
    pub source: SocketAddr,
    /// The client has acknowledged the answer.
    pub is_assured: bool,
}

/// Anything that processes packets: the programs in the kernel, or their stages on the host.
pub trait Target {
    /// Begins a case; nothing is left of the previous one.
    fn begin(&mut self, scenario: &Scenario);
    /// Applies changes of the Services and their endpoints.
    fn update(&mut self, scenario: &Scenario);
    /// Lets so many milliseconds pass.
    fn pause(&mut self, milliseconds: u32);
    /// Runs a hook on a packet. An error does not come from the packet, but from the target itself.
    fn run(&mut self, hook: Hook, packet: &[u8], context: Context) -> Result<Seen, String>;
    fn counters(&mut self) -> Counters;
    /// Returns where the flow of a client's packet leads.
    fn hidden(&mut self, proto: u8, client: SocketAddr, frontend: SocketAddr) -> Option<Hidden>;
}
