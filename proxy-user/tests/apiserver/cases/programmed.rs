//! The agent reports which version of a Service and its slices it has programmed: the one that the API server has.

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Resource as _;
use serde_json::{Value, json};

use super::{service, slice};
use crate::agent::{Agent, Node};
use proxy_testbed::kube::control::ControlPlane;
use proxy_testbed::kube::{PATIENCE, eventually};

const PATH: &str = "/programmed/default/reported";

/// Waits until the agent has programmed the versions that the API server has now.
fn serves_now(control: &ControlPlane, agent: &mut Agent) -> Result<Value> {
    let service: Service =
        serde_json::from_str(&control.api.get_raw("/api/v1/namespaces/default/services/reported")?)?;
    let slices = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/reported-1";
    let slice: EndpointSlice = serde_json::from_str(&control.api.get_raw(slices)?)?;
    eventually(PATIENCE, || {
        let (head, body) = agent.asks(PATH)?;
        ensure!(head.starts_with("HTTP/1.1 200 "), "{head}: {body}");
        let document: Value = serde_json::from_str(&body)?;
        let meta = service.meta();
        ensure!(
            document["resourceVersion"].as_str() == meta.resource_version.as_deref(),
            "{document}: {meta:?}"
        );
        ensure!(document["uid"].as_str() == meta.uid.as_deref(), "{document}: {meta:?}");
        let (first, meta) = (&document["endpointSlices"][0], slice.meta());
        ensure!(
            first["resourceVersion"].as_str() == meta.resource_version.as_deref(),
            "{document}: {meta:?}"
        );
        ensure!(first["generation"].as_i64() == meta.generation, "{document}: {meta:?}");
        ensure!(document["current"] == true && document["problems"] == json!([]), "{document}");
        Ok(document)
    })
}

pub fn follows_the_api_server(control: &mut ControlPlane, node: &Node) -> Result<()> {
    let api = &control.api;
    api.create(&service("reported", &json!({ "clusterIP": "10.96.9.1" }))?)?;
    api.create(&slice("reported-1", "reported", &["10.9.0.1"])?)?;
    let mut agent = node.start()?;
    agent.says(&["first sync done"])?;
    let first = serves_now(control, &mut agent)?;
    // An annotation changes nothing in the maps, but the Service has a new resourceVersion.
    api.patch::<Service>("reported", &json!({ "metadata": { "annotations": { "a": "b" } } }))?;
    let second = serves_now(control, &mut agent)?;
    ensure!(first["resourceVersion"] != second["resourceVersion"], "{first}, {second}");
    api.patch::<EndpointSlice>("reported-1", &json!({ "endpoints": [{ "addresses": ["10.9.0.2"] }] }))?;
    serves_now(control, &mut agent)?;
    api.delete::<EndpointSlice>("reported-1")?;
    eventually(PATIENCE, || {
        let (_, body) = agent.asks(PATH)?;
        let document: Value = serde_json::from_str(&body)?;
        ensure!(document["endpointSlices"].as_array().context("no list")?.is_empty(), "{document}");
        Ok(())
    })?;
    api.delete::<Service>("reported")?;
    eventually(PATIENCE, || {
        let (head, body) = agent.asks(PATH)?;
        ensure!(head.starts_with("HTTP/1.1 404 "), "{head}: {body}");
        Ok(())
    })?;
    agent.is_well()
}
