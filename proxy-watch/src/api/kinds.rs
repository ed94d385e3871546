//! The kinds of objects that the agent watches.

use std::fmt::Debug;

use kube::runtime::watcher;
use serde::de::DeserializeOwned;

use proxy_core::model::{self, Key, Listing, Object};

use super::convert::{self, LABEL_HEADLESS};
use super::objects::{EndpointSlice, Node, OtherNode, Service, ServiceCidr};
use super::protobuf::wire::Message;

/// A Kubernetes kind, and its conversion to the agent's model.
pub trait Watched:
    kube::Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Message + Send + 'static
{
    /// The type of the converted objects.
    type Model: Send;
    /// The resource's name, as used for permissions; different for two watches of one resource.
    const RESOURCE: &'static str;
    /// Whether [`Watched::convert`] drops what the field selector leaves out: a server that does not know the field may
    /// send such objects, too.
    const FIELDS_ARE_OPTIONAL: bool = false;
    /// Returns the selectors of the objects that the API server should send.
    fn selectors() -> watcher::Config {
        watcher::Config::default()
    }
    /// Returns the object's name.
    fn key(&self) -> Key;
    /// Returns the name of a converted object.
    fn name_of(model: &Self::Model) -> Key;
    /// Converts the object; `None` if the agent does not serve it.
    fn convert(self) -> Option<Self::Model>;
    /// Returns a converted object as one of several kinds.
    fn object(model: Self::Model) -> Object;
    /// Returns a list of converted objects as one of several kinds.
    fn listing(all: Vec<Self::Model>) -> Listing;
}

impl Watched for Service {
    type Model = model::Service;
    const RESOURCE: &'static str = "services";
    // Servers before 1.31 do not know this field.
    const FIELDS_ARE_OPTIONAL: bool = true;

    fn selectors() -> watcher::Config {
        watcher::Config::default()
            // Services of other proxies are included: traffic to their addresses must not be rejected.
            .fields("spec.clusterIP!=None")
    }

    fn key(&self) -> Key {
        Key::Service(convert::service_name(&self.metadata))
    }

    fn name_of(model: &model::Service) -> Key {
        Key::Service(model.name.clone())
    }

    fn convert(self) -> Option<model::Service> {
        convert::service(self)
    }

    fn object(model: model::Service) -> Object {
        Object::Service(model)
    }

    fn listing(all: Vec<model::Service>) -> Listing {
        Listing::Services(all)
    }
}

impl Watched for EndpointSlice {
    type Model = model::EndpointSlice;
    const RESOURCE: &'static str = "endpointslices.discovery.k8s.io";

    fn selectors() -> watcher::Config {
        watcher::Config::default().labels(&format!("!{LABEL_HEADLESS}"))
    }

    fn key(&self) -> Key {
        Key::Slice(convert::slice_name(&self.metadata))
    }

    fn name_of(model: &model::EndpointSlice) -> Key {
        Key::Slice(model.name.clone())
    }

    fn convert(self) -> Option<model::EndpointSlice> {
        convert::slice(self)
    }

    fn object(model: model::EndpointSlice) -> Object {
        Object::Slice(model)
    }

    fn listing(all: Vec<model::EndpointSlice>) -> Listing {
        Listing::Slices(all)
    }
}

impl Watched for Node {
    type Model = model::NodeView;
    const RESOURCE: &'static str = "nodes";

    fn key(&self) -> Key {
        Key::Node(self.metadata.name.clone().unwrap_or_default())
    }

    fn name_of(model: &model::NodeView) -> Key {
        Key::Node(model.name.clone())
    }

    fn convert(self) -> Option<model::NodeView> {
        Some(convert::node(self))
    }

    fn object(model: model::NodeView) -> Object {
        Object::Node(model)
    }

    fn listing(all: Vec<model::NodeView>) -> Listing {
        Listing::Node(all.into_iter().next())
    }
}

impl Watched for OtherNode {
    type Model = model::NodeView;
    const RESOURCE: &'static str = "other nodes";

    fn key(&self) -> Key {
        Key::Node(self.metadata.name.clone().unwrap_or_default())
    }

    fn name_of(model: &model::NodeView) -> Key {
        Key::Node(model.name.clone())
    }

    fn convert(self) -> Option<model::NodeView> {
        let Self { metadata, status } = self;
        Some(convert::node(Node { metadata, spec: None, status }))
    }

    fn object(model: model::NodeView) -> Object {
        Object::Node(model)
    }

    fn listing(all: Vec<model::NodeView>) -> Listing {
        Listing::Others(all)
    }
}

impl Watched for ServiceCidr {
    type Model = model::ServiceCidr;
    const RESOURCE: &'static str = "servicecidrs.networking.k8s.io";

    fn key(&self) -> Key {
        Key::ServiceCidr(self.metadata.name.clone().unwrap_or_default())
    }

    fn name_of(model: &model::ServiceCidr) -> Key {
        Key::ServiceCidr(model.name.clone())
    }

    fn convert(self) -> Option<model::ServiceCidr> {
        Some(convert::service_cidr(self))
    }

    fn object(model: model::ServiceCidr) -> Object {
        Object::ServiceCidr(model)
    }

    fn listing(all: Vec<model::ServiceCidr>) -> Listing {
        Listing::ServiceCidrs(all)
    }
}
