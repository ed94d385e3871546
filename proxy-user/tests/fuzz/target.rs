//! What can be put to the test: anything that treats packets as the data path does.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use proxy_common::reason::Reason;

use crate::scenario::Scenario;

/// Which program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    Ingress,
    Egress,
}

/// A device of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    Loopback,
    /// Leads outside.
    Uplink,
    /// Leads to the pods of this node.
    Pods,
}

/// Where a packet is met, beside its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Context {
    /// The device that the hook is on.
    pub device: Device,
    /// At egress: the packet never came in by a device.
    pub is_local_origin: bool,
    /// A driver has added up the whole packet (`CHECKSUM_COMPLETE`): the sum is to stay right.
    pub is_complete: bool,
}

/// What becomes of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// On to the next program.
    Next,
    Drop,
    /// Sent from here, by a device or up the stack.
    Redirect,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub outcome: Outcome,
    pub packet: Vec<u8>,
    /// What a driver added up is not what the packet adds up to any more ([`Context::is_complete`]).
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

/// What is counted since the case began; zeros do not stand here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    pub reasons: BTreeMap<Reason, u64>,
    /// By Service and reason.
    pub refusals: BTreeMap<(u32, Reason), u64>,
    pub traffic: BTreeMap<u32, Traffic>,
    /// By how much the open connections of a backend differ from its flows that count; looked at on the host.
    pub miscounted: BTreeMap<u32, i64>,
}

impl Counters {
    /// Adds what has been counted from one time to another.
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

/// What a flow was decided to be, where no packet shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hidden {
    pub backend: SocketAddr,
    pub source: SocketAddr,
    /// The client has answered the answer.
    pub is_assured: bool,
}

/// Anything that treats packets. The programs in the kernel are one; their stages on the host are another.
pub trait Target {
    /// A case begins: nothing is known but this.
    fn begin(&mut self, scenario: &Scenario);
    /// The Services are like this now; the endpoints' `serves` is all that may have changed.
    fn update(&mut self, scenario: &Scenario);
    /// So many milliseconds pass.
    fn pause(&mut self, milliseconds: u32);
    /// Runs a hook on a packet. An error is none of the packet's.
    fn run(&mut self, hook: Hook, packet: &[u8], context: Context) -> Result<Seen, String>;
    fn counters(&mut self) -> Counters;
    /// Where the flow of a client's packet leads.
    fn hidden(&mut self, proto: u8, client: SocketAddr, frontend: SocketAddr) -> Option<Hidden>;
}
