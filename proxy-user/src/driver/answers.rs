//! Answers to the questions of an audit.

use tokio::time::Instant;

use super::Driver;
use super::question::Question;
use proxy_core::model::{Event, Key, Object, ServiceName};
use proxy_core::plan::plan_service;
use proxy_core::store::Store;
use proxy_core::sync::Expected;

impl<S: Store> Driver<S> {
    pub(super) fn answer(&mut self, question: Question) {
        // A reply fails if the audit has ended since it asked; that is no error.
        match question {
            Question::Differing(mut objects, reply) => {
                objects.retain(|object| !self.cluster.has_reported_same(object));
                let _ = reply.send(objects);
            }
            Question::Unlisted(listed, reply) => {
                let unlisted = self.cluster.reported().filter(|key| !listed.contains(key)).collect();
                let _ = reply.send(unlisted);
            }
            Question::Correct(objects, reply) => {
                let _ = reply.send(self.correct(objects));
            }
            Question::Expected(after, count, reply) => {
                let _ = reply.send(self.expected(after.as_ref(), count));
            }
            Question::Pod(name, addresses, reply) => {
                let _ = reply.send(self.pod(&name, &addresses));
            }
            Question::Endpoints(name, reply) => {
                let _ = reply.send(self.endpoints(&name));
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
                Some(object) if !self.cluster.has_reported_same(&object) => Event::Apply(object),
                None if self.cluster.has_reported(&key) => Event::Delete(key.clone()),
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
