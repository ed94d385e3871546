//! The objects that the API server has reported, without those of the folder.

use super::Cluster;
use crate::model::{EndpointSlice, Key, Object, Service, ServiceName, SliceName};

impl Cluster {
    /// Returns the names of all Services and EndpointSlices that the API server has reported.
    pub fn reported(&self) -> impl Iterator<Item = Key> {
        let statics = &self.statics;
        let services = self.services.keys().filter(|name| !statics.services.contains(name));
        let slices = self.owners.keys().filter(|name| !statics.slices.contains(name));
        let services = services.chain(statics.hidden.keys()).cloned().map(Key::Service);
        services.chain(slices.chain(statics.hidden_slices.keys()).cloned().map(Key::Slice))
    }

    /// Whether the API server has reported such a Service or EndpointSlice.
    pub fn has_reported(&self, key: &Key) -> bool {
        match key {
            Key::Service(name) => self.reported_service(name).is_some(),
            Key::Slice(name) => self.reported_slice(name).is_some(),
            Key::Node(_) | Key::ServiceCidr(_) => false,
        }
    }

    /// Whether the API server has reported this Service or EndpointSlice with the same content.
    pub fn knows(&self, object: &Object) -> bool {
        match object {
            Object::Service(service) => self.reported_service(&service.name) == Some(service),
            Object::Slice(slice) => {
                self.reported_slice(&slice.name).is_some_and(|known| known.has_same_content(slice))
            }
            Object::Node(_) | Object::ServiceCidr(_) => false,
        }
    }

    fn reported_service(&self, name: &ServiceName) -> Option<&Service> {
        if self.statics.services.contains(name) {
            self.statics.hidden.get(name)
        } else {
            self.services.get(name).map(|service| &**service)
        }
    }

    fn reported_slice(&self, name: &SliceName) -> Option<&EndpointSlice> {
        let hidden = self.statics.hidden_slices.get(name);
        hidden.or_else(|| self.slice(name).filter(|_| !self.statics.slices.contains(name)))
    }
}
