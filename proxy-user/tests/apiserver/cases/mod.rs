//! The cases, and functions for the objects that they create.

pub mod audit;
pub mod deployment;
mod gate;
mod live;
mod many;
mod outage;
mod programmed;
mod servers;

use anyhow::Result;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use serde_json::{Value, json};

use crate::agent::Node;
use proxy_testbed::kube::control::ControlPlane;

/// A case.
pub struct Case {
    /// Name of the test.
    pub name: &'static str,
    /// Runs the case; an error fails the test.
    pub run: fn(&mut ControlPlane, &Node) -> Result<()>,
}

/// All cases.
pub const CASES: &[Case] = &[
    Case { name: "the_manifests_are_accepted", run: deployment::the_manifests_are_accepted },
    Case {
        name: "the_role_is_no_wider_than_kube_proxys",
        run: deployment::the_role_is_no_wider_than_kube_proxys,
    },
    Case { name: "objects_from_before_and_while_it_runs", run: live::objects_from_before_and_while_it_runs },
    Case { name: "kinds_of_services", run: live::kinds_of_services },
    Case { name: "objects_that_make_no_sense", run: live::objects_that_make_no_sense },
    Case { name: "the_zone_of_the_node_changes", run: live::the_zone_of_the_node_changes },
    Case { name: "load_balancers_leave_a_node_that_leaves", run: live::a_node_leaves },
    Case { name: "events_are_kube_proxys", run: live::events },
    Case { name: "the_api_server_goes_and_comes_back", run: outage::the_api_server_goes_and_comes_back },
    Case { name: "a_missing_permission_is_reported", run: outage::a_missing_permission },
    Case { name: "a_watch_expires", run: outage::a_watch_expires },
    Case { name: "the_agent_is_killed_and_starts_without_api_server", run: outage::the_agent_is_killed },
    Case { name: "servers::another_server_is_used_after_a_failure", run: servers::another_takes_over },
    Case {
        name: "servers::the_control_plane_has_an_address_from_boot_on",
        run: servers::control_plane_address,
    },
    Case { name: "servers::endpoints_of_the_service_kubernetes_are_used", run: servers::behind_the_service },
    Case { name: "servers::a_relay_that_stops_is_noticed", run: servers::a_relay_stops_forwarding },
    Case { name: "servers::frozen_server_does_not_revert_the_maps", run: servers::a_server_freezes },
    Case { name: "programmed_follows_the_api_server", run: programmed::follows_the_api_server },
    Case { name: "gate_opens_for_a_known_pod_and_holds_its_end", run: gate::opens_and_holds },
    Case { name: "a_thousand_services", run: many::a_thousand_services },
    Case { name: audit::REPAIRS, run: audit::repairs },
];

/// Returns a Service of the namespace `default` with an unnamed TCP port 80; `spec` adds or replaces fields of its spec.
fn service(name: &str, spec: &Value) -> Result<Service> {
    let mut object = json!({
        "metadata": { "name": name },
        "spec": { "ports": [{ "port": 80, "targetPort": 8080 }] },
    });
    merge(&mut object["spec"], spec);
    Ok(serde_json::from_value(object)?)
}

/// Returns a slice of ready IPv4 endpoints, for a Service of the function `service`.
fn slice(name: &str, service: &str, addresses: &[&str]) -> Result<EndpointSlice> {
    let endpoints: Vec<_> = addresses.iter().map(|address| json!({ "addresses": [address] })).collect();
    slice_of(name, service, &json!({ "endpoints": endpoints }))
}

/// Returns a slice; `fields` adds or replaces its fields.
fn slice_of(name: &str, service: &str, fields: &Value) -> Result<EndpointSlice> {
    let mut object = json!({
        "metadata": { "name": name, "labels": { "kubernetes.io/service-name": service } },
        "addressType": "IPv4",
        "ports": [{ "name": "", "port": 8080, "protocol": "TCP" }],
        "endpoints": [],
    });
    merge(&mut object, fields);
    Ok(serde_json::from_value(object)?)
}

/// Copies the fields of `over` to `object`.
fn merge(object: &mut Value, over: &Value) {
    for (key, value) in over.as_object().into_iter().flatten() {
        object[key] = value.clone();
    }
}
