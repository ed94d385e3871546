//! The Services and EndpointSlices of one source: the API server, or the folder of static Services.
//!
//! A Service of the folder takes precedence over an API server's Service of the same name, and has endpoints of the folder
//! alone: a user who may write EndpointSlices in its namespace must not be able to redirect its clients.

use std::collections::{BTreeMap, BTreeSet};

use crate::model::{EndpointSlice, Key, Object, Problem, Service, ServiceName, SliceName, SortedMap, pack};

/// The objects of one source. The methods that change it add the names of the Services that differ to a set.
#[derive(Clone, Debug, Default)]
pub(super) struct Layer {
    /// Boxed, because half of a tree's places are empty.
    pub services: BTreeMap<ServiceName, Box<Service>>,
    /// The slices by their Service, which may not exist (yet).
    pub slices: BTreeMap<ServiceName, SortedMap<SliceName, EndpointSlice>>,
    /// The Service under which each slice is stored.
    pub owners: BTreeMap<SliceName, ServiceName>,
}

impl Layer {
    /// Returns the names of all objects.
    pub fn keys(&self) -> impl Iterator<Item = Key> {
        let services = self.services.keys().cloned().map(Key::Service);
        services.chain(self.owners.keys().cloned().map(Key::Slice))
    }

    /// Whether there is such an object.
    pub fn has(&self, key: &Key) -> bool {
        match key {
            Key::Service(name) => self.services.contains_key(name),
            Key::Slice(name) => self.owners.contains_key(name),
            Key::Node(_) | Key::ServiceCidr(_) => false,
        }
    }

    /// Whether there is this object with the same content.
    pub fn has_same(&self, object: &Object) -> bool {
        match object {
            Object::Service(service) => {
                self.services.get(&service.name).is_some_and(|known| **known == *service)
            }
            Object::Slice(slice) => {
                self.slice(&slice.name).is_some_and(|known| known.has_same_content(slice))
            }
            Object::Node(_) | Object::ServiceCidr(_) => false,
        }
    }

    pub fn slice(&self, name: &SliceName) -> Option<&EndpointSlice> {
        self.slices.get(self.owners.get(name)?)?.get(name)
    }

    pub fn put_service(&mut self, service: Service, changed: &mut BTreeSet<ServiceName>) {
        if let Some(known) = self.services.get_mut(&service.name).filter(|known| ***known == service) {
            known.version = service.version;
            return;
        }
        changed.insert(service.name.clone());
        self.services.insert(service.name.clone(), Box::new(service));
    }

    pub fn remove_service(&mut self, name: &ServiceName, changed: &mut BTreeSet<ServiceName>) {
        changed.extend(self.services.remove_entry(name).map(|(name, _)| name));
    }

    pub fn put_slice(&mut self, slice: EndpointSlice, changed: &mut BTreeSet<ServiceName>) {
        match self.owners.get(&slice.name) {
            Some(owner) if *owner == slice.service => {
                let known = self.slices.get_mut(owner).and_then(|slices| slices.get_mut(&slice.name));
                if let Some(known) = known.filter(|known| known.has_same_content(&slice)) {
                    known.version = slice.version;
                    return;
                }
            }
            // The label of the slice has changed: the slice moves from one Service to another.
            Some(_) => self.remove_slice(&slice.name.clone(), changed),
            None => {}
        }
        changed.insert(slice.service.clone());
        self.owners.insert(slice.name.clone(), slice.service.clone());
        self.slices.entry(slice.service.clone()).or_default().insert(slice.name.clone(), slice);
    }

    pub fn remove_slice(&mut self, name: &SliceName, changed: &mut BTreeSet<ServiceName>) {
        let Some(owner) = self.owners.remove(name) else { return };
        if let Some(slices) = self.slices.get_mut(&owner) {
            slices.remove(name);
            if slices.is_empty() {
                self.slices.remove(&owner);
            }
        }
        changed.insert(owner);
    }

    /// Replaces all Services.
    pub fn reset_services(&mut self, services: Vec<Service>, changed: &mut BTreeSet<ServiceName>) {
        let live: BTreeSet<ServiceName> = services.iter().map(|service| service.name.clone()).collect();
        changed.extend(self.services.extract_if(.., |name, _| !live.contains(name)).map(|(name, _)| name));
        for service in services {
            self.put_service(service, changed);
        }
        pack(&mut self.services);
    }

    /// Replaces all slices.
    pub fn reset_slices(&mut self, slices: Vec<EndpointSlice>, changed: &mut BTreeSet<ServiceName>) {
        let live: BTreeSet<SliceName> = slices.iter().map(|slice| slice.name.clone()).collect();
        let gone: Vec<_> = self.owners.keys().filter(|name| !live.contains(name)).cloned().collect();
        for name in gone {
            self.remove_slice(&name, changed);
        }
        for slice in slices {
            self.put_slice(slice, changed);
        }
        pack(&mut self.slices);
        pack(&mut self.owners);
    }
}

/// Returns the problem of a Service that both sources have.
pub(super) fn conflict(name: &ServiceName) -> Problem {
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
