//! The kinds of objects that the agent watches.

use std::fmt::Debug;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
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
    /// Converts the object; `None` if the agent does not serve it.
    fn convert(self) -> Option<Self::Model>;
    /// Returns a converted object as one of several kinds.
    fn object(model: Self::Model) -> Object;
    /// Returns a list of converted objects as one of several kinds.
    fn listing(all: Vec<Self::Model>) -> Listing;
}

/// Implements [`Watched`] for kinds; each line has the type, the kind and the type of its objects in the model, the resource, and
/// functions that return the name from the metadata, the converted object, and the list of converted objects.
macro_rules! watched {
    ($($name:ident is $kind:ident($model:ty): $resource:literal, $key:expr, $convert:expr, $listing:expr
        $(, { $($item:item)+ })?;)+) => {$(
        impl Watched for $name {
            type Model = $model;
            const RESOURCE: &'static str = $resource;
            $($($item)+)?

            fn key(&self) -> Key {
                Key::$kind($key(&self.metadata))
            }

            fn convert(self) -> Option<$model> {
                $convert(self)
            }

            fn object(model: $model) -> Object {
                Object::$kind(model)
            }

            fn listing(all: Vec<$model>) -> Listing {
                $listing(all)
            }
        }
    )+};
}

watched! {
    Service is Service(model::Service): "services", convert::service_name, convert::service, Listing::Services, {
        // Servers before 1.31 do not know this field.
        const FIELDS_ARE_OPTIONAL: bool = true;

        fn selectors() -> watcher::Config {
            // Services of other proxies are included: traffic to their addresses must not be rejected.
            watcher::Config::default().fields("spec.clusterIP!=None")
        }
    };
    EndpointSlice is Slice(model::EndpointSlice):
        "endpointslices.discovery.k8s.io", convert::slice_name, convert::slice, Listing::Slices, {
        fn selectors() -> watcher::Config {
            watcher::Config::default().labels(&format!("!{LABEL_HEADLESS}"))
        }
    };
    Node is Node(model::NodeView):
        "nodes", cluster_name, |node| Some(convert::node(node)), |all: Vec<_>| Listing::Node(all.into_iter().next());
    OtherNode is Node(model::NodeView): "other nodes", cluster_name, |OtherNode { metadata, status }| Some(convert::node(Node { metadata, spec: None, status })), Listing::Others;
    ServiceCidr is ServiceCidr(model::ServiceCidr):
        "servicecidrs.networking.k8s.io", cluster_name, |cidr| Some(convert::service_cidr(cidr)), Listing::ServiceCidrs;
}

/// Returns the name of an object without a namespace.
fn cluster_name(metadata: &ObjectMeta) -> String {
    metadata.name.clone().unwrap_or_default()
}
