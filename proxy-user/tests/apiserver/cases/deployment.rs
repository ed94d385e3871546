//! An API server accepts the manifests in `deploy/`, and they ask for no more rights than kube-proxy has.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::agent::Node;
use proxy_testbed::kube::control::ControlPlane;
use proxy_testbed::kube::manifests::{objects, role};

/// Returns the API path at which an object like this is created.
fn path(object: &Value) -> Result<String> {
    let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str);
    let (version, kind) = (text("/apiVersion").context("no version")?, text("/kind").context("no kind")?);
    let root = if version == "v1" { "/api/v1".to_owned() } else { format!("/apis/{version}") };
    let kinds = format!("{}s", kind.to_lowercase());
    Ok(match text("/metadata/namespace") {
        Some(namespace) => format!("{root}/namespaces/{namespace}/{kinds}"),
        None => format!("{root}/{kinds}"),
    })
}

/// Creates the object as a dry run, which does not store it; an unknown field is an error.
fn try_out(control: &ControlPlane, object: &Value) -> Result<()> {
    control.api.create_raw(&format!("{}?dryRun=All&fieldValidation=Strict", path(object)?), object)
}

pub fn the_manifests_are_accepted(control: &mut ControlPlane, _node: &Node) -> Result<()> {
    // Skip the role and its binding, which exist already: the agents of all cases use them.
    let mut all = objects("ballast.yaml")?;
    all.extend(objects("cleanup/cleanup.yaml")?);
    all.extend(objects("end-udp-sockets/end-udp-sockets.yaml")?);
    for object in
        all.iter().filter(|object| !object["kind"].as_str().unwrap_or("").starts_with("ClusterRole"))
    {
        try_out(control, object)?;
    }
    let kinds: Vec<_> = all.iter().filter_map(|object| object["kind"].as_str()).collect();
    ensure!(
        kinds[..3] == ["ServiceAccount", "ClusterRole", "ClusterRoleBinding"]
            && kinds[3..] == ["DaemonSet"; 3],
        "{kinds:?}"
    );
    // The server does validate the fields.
    for (pointer, value) in [("hostNetwrk", json!(true)), ("priorityClassName", json!("Not/A/Name"))] {
        let mut wrong = all[3].clone();
        wrong["spec"]["template"]["spec"][pointer] = value;
        ensure!(try_out(control, &wrong).is_err(), "a wrong {pointer} is accepted");
    }
    Ok(())
}

/// Returns all triples of API group, resource and verb that the role allows.
fn allowed(role: &Value) -> Result<BTreeSet<[String; 3]>> {
    let mut all = BTreeSet::new();
    for rule in role["rules"].as_array().context("no rules")? {
        let list = |key: &str| -> Vec<String> {
            let words = rule[key].as_array().into_iter().flatten();
            words.filter_map(Value::as_str).map(str::to_owned).collect()
        };
        for group in list("apiGroups") {
            for resource in list("resources") {
                all.extend(list("verbs").into_iter().map(|verb| [group.clone(), resource.clone(), verb]));
            }
        }
    }
    Ok(all)
}

pub fn the_role_is_no_wider_than_kube_proxys(control: &mut ControlPlane, _node: &Node) -> Result<()> {
    let of_kube_proxy =
        control.api.get_raw("/apis/rbac.authorization.k8s.io/v1/clusterroles/system:node-proxier")?;
    let of_kube_proxy = allowed(&serde_json::from_str(&of_kube_proxy)?)?;
    let ours = allowed(&role()?)?;
    ensure!(ours.len() >= 8, "{ours:?}");
    let wider: Vec<_> = ours.difference(&of_kube_proxy).collect();
    ensure!(wider.is_empty(), "kube-proxy may not: {wider:?}");
    Ok(())
}
