//! The Services whose endpoints joined or left lately: sockets are left to the packet programs meanwhile.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::timed::Timed;
use proxy_core::model::ServiceName;
use proxy_core::plan::{BackendAddress, Changing, FrontendKind, FrontendPlan, PortPlan, ServicePlan};

/// How long a Service counts as changing: longer than the step of a rollout, in which a pod starts and another one ends.
const HOLD: Duration = Duration::from_mins(1);

/// The Services that are changing.
#[derive(Debug, Default)]
pub(super) struct Rollouts {
    /// When each one no longer is.
    until: Timed<Instant>,
}

impl Rollouts {
    /// Notes whether endpoints differ from those of the plan `before`, and marks the ports of a Service that is changing, if they can
    /// be left to packets. The first endpoints of a port are no change. `serves_node`: whether packets of the node itself reach the
    /// port.
    pub(super) fn apply(
        &mut self,
        name: &ServiceName,
        plan: Option<&mut ServicePlan>,
        before: Option<&ServicePlan>,
        now: Instant,
        mut serves_node: impl FnMut(&PortPlan) -> bool,
    ) {
        let Some(plan) = plan else {
            self.until.remove(name);
            return;
        };
        let has_changed = before.is_some_and(|before| {
            let mut ports = plan.ports.iter().filter(|(_, port)| may_be_left_to_packets(port));
            ports.any(|(id, port)| before.ports.get(id).is_some_and(|before| differ(before, port)))
        });
        if has_changed {
            self.until.set(name, now + HOLD, [now + HOLD]);
        }
        let is_changing = self.until.get(name).is_some_and(|until| now < *until);
        if is_changing {
            for port in plan.ports.values_mut().filter(|port| may_be_left_to_packets(port)) {
                port.changing = if serves_node(port) { Changing::All } else { Changing::Pods };
            }
        } else {
            self.until.remove(name);
        }
    }

    /// Returns the time at which the next Service may no longer be changing.
    pub(super) fn wake(&self) -> Option<Instant> {
        self.until.wake()
    }

    /// Starts a planning: returns the Services that are no longer changing.
    pub(super) fn begin(&mut self, now: Instant) -> Vec<ServiceName> {
        self.until.take_due(now)
    }
}

/// Whether packets of the node itself to the cluster addresses of a port reach its endpoints: they are translated
/// (`is_translated`), and no endpoint has an address of the node (`is_own`), since no program sees what the node sends to itself.
pub(super) fn serves_node(
    port: &PortPlan,
    is_own: impl Fn(&IpAddr) -> bool,
    mut is_translated: impl FnMut(IpAddr) -> bool,
) -> bool {
    let is_cluster_ip = |plan: &FrontendPlan| plan.kind == FrontendKind::ClusterIp;
    let mut addresses =
        port.frontends.iter().filter(|(_, plan)| is_cluster_ip(plan)).map(|(frontend, _)| frontend.address);
    !port.backends.keys().any(|at| is_own(&at.address)) && addresses.all(&mut is_translated)
}

/// Whether the packet programs hide refusals for a port, and sockets can be left to them: a client with a fixed endpoint would get
/// another one, since sockets and packets do not share the choice.
fn may_be_left_to_packets(port: &PortPlan) -> bool {
    port.ejects && port.affinity_secs == 0 && !port.algorithm.is_hash()
}

/// Whether an endpoint joined, left or began to terminate.
fn differ(before: &PortPlan, after: &PortPlan) -> bool {
    !before.backends.is_empty() && !endpoints(before).eq(endpoints(after))
}

fn endpoints(port: &PortPlan) -> impl Iterator<Item = (&BackendAddress, bool)> {
    port.backends.iter().map(|(at, facts)| (at, facts.terminating))
}
