//! What an audit asks the driver, which alone knows what the maps should hold.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::driver::Driver;
use super::job::frontend_key;
use super::reconcile::Reconciler;
use crate::maps::{FrontendKey, Store};
use crate::model::{Event, Key, Object, ServiceName};
use crate::plan::{PortId, PortPlan, plan_service};

/// What the maps should hold for each frontend: the endpoints that take new connections. `None` where an entry is known to be
/// wrong, because it could not be written: that is counted elsewhere.
pub type Expected = BTreeMap<FrontendKey, Option<BTreeSet<SocketAddr>>>;

/// The answer goes nowhere if the audit has ended meanwhile.
type Reply<T> = oneshot::Sender<T>;

/// A question, with where to send the answer.
#[derive(Debug)]
pub enum Question {
    /// Which of these Services and EndpointSlices does the driver not know, or not as they are here?
    Differing(Vec<Object>, Reply<Vec<Object>>),
    /// Which Services and EndpointSlices does it know that are not among these?
    Unlisted(BTreeSet<Key>, Reply<BTreeSet<Key>>),
    /// Takes in those of these objects (`None`: it was deleted) that still differ, and says which.
    Correct(Vec<(Key, Option<Object>)>, Reply<Vec<Key>>),
    /// What should the maps hold for so many Services behind this one? The other half of the answer is the last of them.
    Expected(Option<ServiceName>, usize, Reply<(Expected, Option<ServiceName>)>),
    /// Compares the maps with what was written to them, now and as a whole, and plans and writes all Services again.
    Repair(Reply<()>),
}

impl<S: Store> Driver<S> {
    pub(super) fn answer(&mut self, question: Question) {
        // The audit may have ended meanwhile.
        match question {
            Question::Differing(mut objects, reply) => {
                objects.retain(|object| !self.cluster.knows(object));
                let _ = reply.send(objects);
            }
            Question::Unlisted(listed, reply) => {
                let unlisted = self.cluster.told().filter(|key| !listed.contains(key)).collect();
                let _ = reply.send(unlisted);
            }
            Question::Correct(objects, reply) => {
                let _ = reply.send(self.correct(objects));
            }
            Question::Expected(after, count, reply) => {
                let _ = reply.send(self.expected(after.as_ref(), count));
            }
            Question::Repair(reply) => {
                let names = self.cluster.services().map(|service| service.name.clone());
                let names: Vec<_> = names.collect();
                self.ask_for_sync(names);
                self.repair(Instant::now());
                let _ = reply.send(());
            }
        }
    }

    fn correct(&mut self, objects: Vec<(Key, Option<Object>)>) -> Vec<Key> {
        let mut corrected = Vec::new();
        for (key, object) in objects {
            let event = match object {
                Some(object) if !self.cluster.knows(&object) => Event::Apply(object),
                None if self.cluster.has_told(&key) => Event::Delete(key.clone()),
                _ => continue,
            };
            self.take(event);
            corrected.push(key);
        }
        corrected
    }

    fn expected(&self, after: Option<&ServiceName>, count: usize) -> (Expected, Option<ServiceName>) {
        let mut expected = Expected::new();
        let mut last = None;
        for service in self.cluster.services_after(after).take(count) {
            last = Some(service.name.clone());
            let plan = plan_service(&self.cluster, &service.name, self.settings.plan);
            for (port, plan) in plan.iter().flat_map(|plan| &plan.ports) {
                self.reconciler.expect(port, plan, &mut expected);
            }
        }
        (expected, last)
    }
}

impl<S: Store> Reconciler<S> {
    fn expect(&self, port: &PortId, plan: &PortPlan, expected: &mut Expected) {
        let fails = self.failures.contains_key(port);
        for (frontend, what) in &plan.frontends {
            if self.claims.owner(frontend) != Some(port) {
                continue;
            }
            let endpoints = what.slots.iter().map(|at| SocketAddr::new(at.address, at.port));
            expected.insert(frontend_key(frontend), (!fails).then(|| endpoints.collect()));
        }
    }
}
