//! Lists objects independently of the watches, for audits.

use std::collections::BTreeSet;
use std::future::ready;

use futures::{Stream, StreamExt};
use kube::api::ListParams;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client};

use super::kinds::Watched;
use super::objects::{EndpointSlice, Node, Service};
use super::reflector::reflect;
use super::transport::Source;
use proxy_core::model::problem::chain;
use proxy_core::model::{Key, Object};

/// Lists objects with new requests to the API server.
#[derive(Clone)]
pub struct Relister {
    client: Client,
    services: Source<Service>,
    slices: Source<EndpointSlice>,
}

impl Relister {
    /// Creates a `Relister` that uses this client.
    pub fn new(client: Client) -> Self {
        let services = Source::new(Api::all(client.clone()));
        let slices = Source::new(Api::all(client.clone()));
        Self { client, services, slices }
    }

    /// Returns all Services and EndpointSlices, streamed if the API server supports it, so that no list is held as a
    /// whole. The stream ends after the first error.
    pub fn all(&self) -> impl Stream<Item = Result<Object, watcher::Error>> + Send + use<> {
        list(self.services.clone()).chain(list(self.slices.clone())).scan(false, |failed, item| {
            let before = std::mem::replace(failed, item.is_err());
            ready((!before).then_some(item))
        })
    }

    /// Returns the Services with these labels, as namespace and name.
    pub async fn labelled(&self, selector: &str) -> Result<BTreeSet<(String, String)>, kube::Error> {
        let params = ListParams::default().labels(selector);
        let found = Api::<Service>::all(self.client.clone()).list_metadata(&params).await?.items.into_iter();
        Ok(found.filter_map(|one| Some((one.metadata.namespace?, one.metadata.name?))).collect())
    }

    /// Returns the kinds of objects that the API server does not permit to list, each with the server's message. Any
    /// other error is reported in the same way.
    pub async fn refused(&self) -> Vec<String> {
        let one = ListParams::default().limit(1);
        let client = || self.client.clone();
        let services = Api::<Service>::all(client()).list_metadata(&one).await.err();
        let slices = Api::<EndpointSlice>::all(client()).list_metadata(&one).await.err();
        let nodes = Api::<Node>::all(client()).list_metadata(&one).await.err();
        let kinds = [("Services", services), ("EndpointSlices", slices), ("Nodes", nodes)];
        let failed = kinds.into_iter().filter_map(|(kind, error)| Some((kind, error?)));
        failed.map(|(kind, error)| format!("{kind} ({})", chain(&error))).collect()
    }

    /// Returns the current Service or EndpointSlice from etcd; `None` if it does not exist. It is listed by name,
    /// because the agent does not have the `get` permission.
    pub async fn one(&self, key: &Key) -> Result<Option<Object>, kube::Error> {
        match key {
            Key::Service(name) => {
                let api = Api::<Service>::namespaced(self.client.clone(), name.namespace.as_str());
                single(&api, name.name.as_str()).await
            }
            Key::Slice(name) => {
                let api = Api::<EndpointSlice>::namespaced(self.client.clone(), name.namespace.as_str());
                single(&api, name.name.as_str()).await
            }
            Key::Node(_) | Key::ServiceCidr(_) => Ok(None),
        }
    }
}

fn list<K: Watched>(source: Source<K>) -> impl Stream<Item = Result<Object, watcher::Error>> + Send {
    let items = reflect(source, K::selectors());
    let items = items.take_while(|item| ready(!matches!(item, Ok(Event::InitDone))));
    items.filter_map(|item| {
        ready(match item {
            Ok(Event::InitApply(object)) => object.convert().map(K::object).map(Ok),
            Ok(Event::Init | Event::InitDone | Event::Apply(_) | Event::Delete(_)) => None,
            Err(error) => Some(Err(error)),
        })
    })
}

/// Returns the object of this name; `None` also if the agent does not serve it.
async fn single<K: Watched>(api: &Api<K>, name: &str) -> Result<Option<Object>, kube::Error> {
    let params = ListParams::default().fields(&format!("metadata.name={name}"));
    let found = api.list(&params).await?.items.into_iter().next();
    Ok(found.and_then(Watched::convert).map(K::object))
}
