//! `/programmed`: which version of each Service is programmed on this node.

use std::num::NonZero;

use axum::extract::{Path, State as Extract};
use axum::response::Response;
use serde::Serialize;

use super::answer::{State, json};
use super::health;
use crate::driver::ProgrammedService;
use proxy_core::model::nearest::{did_you_mean, nearest};
use proxy_core::model::{Opaque, Problem, ServiceName, SliceName, Version};

/// The answer for all Services.
#[derive(Serialize)]
struct All<'a> {
    node: &'a str,
    /// Whether all listed objects have been synced once; before that, it is not known what is programmed.
    synced: bool,
    services: Vec<One>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct One {
    namespace: String,
    name: String,
    #[serde(flatten)]
    version: Edition,
    endpoint_slices: Vec<Slice>,
    /// In RFC 3339 format.
    programmed_since: String,
    current: bool,
    /// 0: clients cannot connect to any address of it.
    frontends: usize,
    problems: Vec<String>,
}

/// The version of an object; all fields are `null` for objects from a folder.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Edition {
    uid: Option<String>,
    resource_version: Option<String>,
    /// The API server sets it for EndpointSlices, but not for Services.
    generation: Option<i64>,
}

#[derive(Serialize)]
struct Slice {
    name: String,
    #[serde(flatten)]
    version: Edition,
}

#[derive(Serialize)]
struct ErrorBody {
    error: String,
}

/// Answers with all Services.
pub(super) async fn all(Extract(state): Extract<State>) -> Response {
    let (synced, problems) = synced_and_problems(&state);
    let services = state.programmed.all().into_iter();
    let services = services.map(|(name, known)| one(&name, &known, &problems)).collect();
    json(200, &All { node: &state.node_name, synced, services })
}

/// Answers with one Service.
pub(super) async fn named(
    Extract(state): Extract<State>,
    Path((namespace, name)): Path<(String, String)>,
) -> Response {
    let (synced, problems) = synced_and_problems(&state);
    let name = ServiceName::new(namespace, name);
    if let Some(known) = state.programmed.get(&name) {
        return json(200, &one(&name, &known, &problems));
    }
    if !synced {
        let error = format!("the first sync of {} is not complete", state.node_name);
        return json(503, &ErrorBody { error });
    }
    let known: Vec<_> = state.programmed.all().into_iter().map(|(name, _)| name.to_string()).collect();
    let meant = did_you_mean(&nearest(&name.to_string(), known.iter().map(String::as_str)));
    let error = format!(
        "Service {name} is not programmed on {}; Ballast does not program headless Services and Services of another proxy{meant}",
        state.node_name
    );
    json(404, &ErrorBody { error })
}

fn synced_and_problems(state: &State) -> (bool, Vec<Problem>) {
    let status = state.status.borrow();
    (status.synced, status.problems.clone())
}

fn one(name: &ServiceName, known: &ProgrammedService, problems: &[Problem]) -> One {
    let of_service = |problem: &&Problem| {
        let object = problem.object.as_str();
        let is_slice = |slice: &SliceName| object.strip_prefix("EndpointSlice ") == Some(&*slice.to_string());
        object.strip_prefix("Service ") == Some(&*name.to_string())
            || known.slices.iter().any(|(slice, _)| is_slice(slice))
    };
    One {
        namespace: name.namespace.to_string(),
        name: name.name.to_string(),
        version: edition(&known.service),
        endpoint_slices: known
            .slices
            .iter()
            .map(|(name, version)| Slice { name: name.name.to_string(), version: edition(version) })
            .collect(),
        programmed_since: health::rfc3339(Some(known.since)),
        current: known.is_current,
        frontends: known.frontends,
        problems: problems.iter().filter(of_service).map(ToString::to_string).collect(),
    }
}

fn edition(version: &Version) -> Edition {
    let told = |text: &Opaque| (!text.is_empty()).then(|| text.to_string());
    Edition {
        uid: told(&version.uid),
        resource_version: told(&version.resource_version),
        generation: version.generation.map(NonZero::get),
    }
}
