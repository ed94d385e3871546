//! `kubectl ballast wait service/NAME --programmed`: waits until each node serves the API server's current version.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Api;
use kube::api::ListParams;
use serde::Deserialize;

use super::answers::Outcome;
use super::cluster::Cluster;
use super::error::KubectlError;
use super::names::{self, Named};
use crate::programmed::ProgrammedJson;
use proxy_core::model::plural::plural;

/// Pause between two rounds.
const PAUSE: Duration = Duration::from_millis(500);

/// The resource versions to wait for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ExpectedVersions {
    pub service: String,
    /// By the name of the EndpointSlice.
    pub slices: BTreeMap<String, String>,
}

/// The answer of `ballast programmed NAMESPACE/NAME -o json`.
#[derive(Clone, Debug, Deserialize)]
struct ProgrammedServices {
    services: Vec<ProgrammedJson>,
}

/// Asks all nodes repeatedly. Each round asks the nodes that have a pod of the agent at that time.
pub(super) async fn run(cluster: &Cluster, object: &str, timeout: Duration) -> Result<Outcome, KubectlError> {
    let bare = (!object.contains(['/', ':'])).then_some(Named { namespace: None, name: object, port: None });
    let Some(Named { namespace, name, port: None }) = bare.or_else(|| names::named(object, names::SERVICES))
    else {
        let error = format!("{object:?} is not a Service: give NAME, service/NAME or service/NAMESPACE/NAME");
        return Err(KubectlError::Name(error));
    };
    let namespace = namespace.unwrap_or(&cluster.namespace);
    let wanted = wanted(cluster, namespace, name).await?;
    let path = format!("{namespace}/{name}");
    let begun = Instant::now();
    loop {
        let agents = cluster.agents().await?;
        let answers = cluster.ask_all(&agents, &["programmed", &path, "-o", "json"]).await;
        let lagging: Vec<_> =
            answers.iter().filter_map(|(node, answer)| Some((node, behind(&wanted, answer)?))).collect();
        if lagging.is_empty() {
            let (nodes, secs) = (agents.len(), begun.elapsed().as_secs_f64());
            let edition = &wanted.service;
            let mut text = format!(
                "service/{name} programmed: resourceVersion {edition} and {} programmed on {} after {secs:.1}s\n",
                plural(wanted.slices.len(), "EndpointSlice"),
                plural(nodes, "node")
            );
            let programmed =
                answers.iter().filter_map(|(_, answer)| programmed(answer.as_ref().ok()?).ok()?);
            for problem in programmed.flat_map(|service| service.problems).collect::<BTreeSet<_>>() {
                // Writing to a `String` cannot fail.
                let _ = writeln!(text, "not programmed of it: {problem}");
            }
            return Ok(Outcome::new(text, true));
        }
        if begun.elapsed() >= timeout {
            let mut text = format!(
                "timed out after {timeout:?}: the current version of service/{name} is not programmed on {} of {}\n",
                lagging.len(),
                plural(agents.len(), "node")
            );
            for (node, why) in lagging {
                // Writing to a `String` cannot fail.
                let _ = writeln!(text, "{node}: {why}");
            }
            return Ok(Outcome { stderr: text, ..Outcome::default() });
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Returns the current resource versions of the API server.
async fn wanted(cluster: &Cluster, namespace: &str, name: &str) -> Result<ExpectedVersions, KubectlError> {
    let service = names::service(cluster, Some(namespace), name).await?;
    let spec = service.spec.unwrap_or_default();
    if spec.cluster_ip.as_deref() == Some("None") || spec.type_.as_deref() == Some("ExternalName") {
        let error = format!("service {namespace}/{name} has no cluster address: nodes do not program it");
        return Err(KubectlError::Name(error));
    }
    let slices: Api<EndpointSlice> = Api::namespaced(cluster.client.clone(), namespace);
    let labels = format!("kubernetes.io/service-name={name},!service.kubernetes.io/headless");
    let of_service = ListParams::default().labels(&labels);
    let slices = cluster.request("list EndpointSlices", slices.list(&of_service)).await?;
    let with_addresses = slices.items.into_iter().filter(|slice| slice.address_type != "FQDN");
    let edition = |slice: EndpointSlice| Some((slice.metadata.name?, slice.metadata.resource_version?));
    Ok(ExpectedVersions {
        service: service.metadata.resource_version.unwrap_or_default(),
        slices: with_addresses.filter_map(edition).collect(),
    })
}

/// Returns what a node has programmed of the Service.
fn programmed(answer: &Outcome) -> Result<Option<ProgrammedJson>, serde_json::Error> {
    Ok(serde_json::from_str::<ProgrammedServices>(&answer.stdout)?.services.into_iter().next())
}

/// Returns why a node does not serve the wanted versions yet; `None` if it does.
pub(super) fn behind(wanted: &ExpectedVersions, answer: &Result<Outcome, String>) -> Option<String> {
    let answer = match answer {
        Ok(answer) if answer.is_well => answer,
        Ok(answer) => return Some(answer.stderr.trim().trim_start_matches("ballast: ").to_owned()),
        Err(error) => return Some(error.clone()),
    };
    let service = match programmed(answer) {
        Ok(Some(service)) => service,
        Ok(None) => return Some("does not have the Service".to_owned()),
        Err(error) => return Some(format!("cannot parse the answer: {error}")),
    };
    let has = |edition: &Option<String>| edition.clone().unwrap_or_else(|| "none".to_owned());
    if !reaches(service.resource_version.as_deref(), &wanted.service) {
        let has = has(&service.resource_version);
        return Some(format!("has resourceVersion {has} of the Service, not {}", wanted.service));
    }
    for (name, edition) in &wanted.slices {
        let slice = service.endpoint_slices.iter().find(|slice| slice.name == *name);
        let Some(slice) = slice else { return Some(format!("does not have EndpointSlice {name}")) };
        if !reaches(slice.resource_version.as_deref(), edition) {
            let has = has(&slice.resource_version);
            return Some(format!("has resourceVersion {has} of EndpointSlice {name}, not {edition}"));
        }
    }
    if !service.current {
        let why = service
            .problems
            .first()
            .map_or_else(|| "see `ballast status` on the node".to_owned(), Clone::clone);
        return Some(format!("cannot program the current version: {why}"));
    }
    None
}

/// Whether a resource version is the wanted one or a later one: resource versions of one kind increase (KEP-5504).
fn reaches(has: Option<&str>, wanted: &str) -> bool {
    let number = |text: &str| text.parse::<u128>().ok();
    match has {
        None => false,
        Some(has) if has == wanted => true,
        Some(has) => matches!((number(has), number(wanted)), (Some(has), Some(wanted)) if has > wanted),
    }
}
