//! Static Services: the Services of a folder, which are served in addition to the API server's Services.
//!
//! A Service of the folder takes precedence over an API server's Service of the same name, and has endpoints of the folder
//! alone: a user who may write EndpointSlices in its namespace must not be able to redirect its clients. The API server's
//! objects with these names are hidden, and become visible again when the folder no longer has the name.

use std::collections::BTreeSet;

use super::Cluster;
use crate::model::{EndpointSlice, Problem, Service, ServiceName, SliceName, SortedMap};

impl Cluster {
    /// Returns the names of the folder's Services.
    pub fn static_services(&self) -> &BTreeSet<ServiceName> {
        &self.statics.services
    }

    /// Stores a Service of the API server; hides it if the folder has a Service of this name.
    pub(super) fn offer_service(&mut self, service: Service, changed: &mut BTreeSet<ServiceName>) {
        if !self.statics.services.contains(&service.name) {
            return self.put_service(service, changed);
        }
        let name = service.name.clone();
        self.statics.hidden.insert(name.clone(), service);
        self.note_conflict(&name, changed);
    }

    /// Removes the API server's Service of this name.
    pub(super) fn withdraw_service(&mut self, name: &ServiceName, changed: &mut BTreeSet<ServiceName>) {
        if !self.statics.services.contains(name) {
            return self.remove_service(name, changed);
        }
        self.statics.hidden.remove(name);
        self.note_conflict(name, changed);
    }

    /// Stores a slice of the API server; hides it if the folder has the slice or its Service.
    pub(super) fn offer_slice(&mut self, slice: EndpointSlice, changed: &mut BTreeSet<ServiceName>) {
        if !self.statics.hides(&slice) {
            self.statics.hidden_slices.remove(&slice.name);
            return self.put_slice(slice, changed);
        }
        if !self.statics.slices.contains(&slice.name) {
            // The label of the slice may have changed: it may be stored under another Service.
            self.remove_slice(&slice.name, changed);
        }
        self.statics.hidden_slices.insert(slice.name.clone(), slice);
    }

    /// Removes the API server's slice of this name.
    pub(super) fn withdraw_slice(&mut self, name: &SliceName, changed: &mut BTreeSet<ServiceName>) {
        self.statics.hidden_slices.remove(name);
        if !self.statics.slices.contains(name) {
            self.remove_slice(name, changed);
        }
    }

    /// Replaces the folder's Services and slices by these.
    pub(super) fn set_statics(
        &mut self,
        services: Vec<Service>,
        slices: Vec<EndpointSlice>,
        changed: &mut BTreeSet<ServiceName>,
    ) {
        let names = services.iter().map(|service| service.name.clone()).collect();
        let known = std::mem::replace(&mut self.statics.services, names);
        let names = slices.iter().map(|slice| slice.name.clone()).collect();
        let known_slices = std::mem::replace(&mut self.statics.slices, names);
        for name in &known_slices - &self.statics.slices {
            self.remove_slice(&name, changed);
        }
        for name in &known - &self.statics.services {
            self.remove_service(&name, changed);
            if let Some(service) = self.statics.hidden.remove(&name) {
                self.put_service(service, changed);
            }
        }
        for name in &self.statics.services - &known {
            if let Some(service) = self.services.remove(&name) {
                self.statics.hidden.insert(name, *service);
            }
        }
        let told = self.slices.values().flat_map(SortedMap::values);
        let told = told.filter(|slice| !known_slices.contains(&slice.name) && self.statics.hides(slice));
        for slice in told.cloned().collect::<Vec<_>>() {
            self.remove_slice(&slice.name, changed);
            self.statics.hidden_slices.insert(slice.name.clone(), slice);
        }
        for (name, slice) in std::mem::take(&mut self.statics.hidden_slices) {
            if self.statics.hides(&slice) {
                self.statics.hidden_slices.insert(name, slice);
            } else {
                self.put_slice(slice, changed);
            }
        }
        for mut service in services {
            if self.statics.hidden.contains_key(&service.name) {
                service.problems.push(conflict(&service.name));
            }
            self.put_service(service, changed);
        }
        for slice in slices {
            self.put_slice(slice, changed);
        }
    }

    /// Adds a problem to a Service of the folder if the API server has a Service of this name, and removes it otherwise.
    fn note_conflict(&mut self, name: &ServiceName, changed: &mut BTreeSet<ServiceName>) {
        let is_hidden = self.statics.hidden.contains_key(name);
        let Some(service) = self.services.get_mut(name) else { return };
        let conflict = conflict(name);
        if service.problems.contains(&conflict) == is_hidden {
            return;
        }
        service.problems.retain(|problem| *problem != conflict);
        service.problems.extend(is_hidden.then_some(conflict));
        changed.insert(name.clone());
    }
}

fn conflict(name: &ServiceName) -> Problem {
    Problem {
        object: format!("Service {name}"),
        field: "metadata.name".to_owned(),
        message: format!(
            "the folder of --manifests and the API server both have a Service {name}: the folder's is programmed, the API \
             server's is not; rename one of them"
        ),
    }
}

#[cfg(test)]
mod tests;
