//! `/programmed`: which version of each Service is programmed on this node.

use std::collections::BTreeMap;
use std::num::NonZero;
use std::sync::Arc;

use axum::Extension;
use axum::extract::{Path, State as Extract};
use axum::response::Response;
use serde::Serialize;

use super::answer::{State, Turn, in_turn, json};
use super::health;
use crate::driver::ProgrammedService;
use proxy_cli::programmed::{ProgrammedJson, SliceJson};
use proxy_core::model::nearest::{did_you_mean, nearest};
use proxy_core::model::{Opaque, Problem, ServiceName, Version};

/// The answer for all Services.
#[derive(Serialize)]
struct All<'a> {
    node: &'a str,
    /// Whether all listed objects have been synced once; before that, it is not known what is programmed.
    synced: bool,
    services: Vec<ProgrammedJson>,
}

#[derive(Serialize)]
struct ErrorBody {
    error: String,
}

/// Answers with all Services.
pub(super) async fn all(Extract(state): Extract<State>, Extension(turn): Extension<Turn>) -> Response {
    let build = move || {
        let (synced, problems) = synced_and_problems(&state);
        let problems = by_object(&problems);
        let services = state.programmed.all().into_iter();
        let services = services.map(|(name, known)| one(&name, &known, &problems)).collect();
        json(200, &All { node: &state.node_name, synced, services })
    };
    in_turn(turn, build).await
}

/// Answers with one Service.
pub(super) async fn named(
    Extract(state): Extract<State>,
    Extension(turn): Extension<Turn>,
    Path((namespace, name)): Path<(String, String)>,
) -> Response {
    let name = ServiceName::new(namespace, name);
    in_turn(turn, move || named_service(&state, &name)).await
}

fn named_service(state: &State, name: &ServiceName) -> Response {
    let (synced, problems) = synced_and_problems(state);
    if let Some(known) = state.programmed.get(name) {
        return json(200, &one(name, &known, &by_object(&problems)));
    }
    if !synced {
        let error = format!("the first sync of {} is not complete", state.node_name);
        return json(503, &ErrorBody { error });
    }
    let known = state.programmed.all();
    let same = known.iter().filter(|(one, _)| one.name == name.name).take(3);
    let same: Vec<_> = same.map(|(one, _)| one.to_string()).collect();
    let all: Vec<_> = known.iter().map(|(one, _)| one.to_string()).collect();
    // A Service of this name in another namespace is likelier than one with a similar name.
    let meant = if same.is_empty() {
        did_you_mean(&nearest(&name.to_string(), all.iter().map(String::as_str)))
    } else {
        did_you_mean(&same)
    };
    let error = format!(
        "Service {name} is not programmed on {}; Ballast does not program headless Services and Services of another proxy{meant}",
        state.node_name
    );
    json(404, &ErrorBody { error })
}

fn synced_and_problems(state: &State) -> (bool, Arc<Vec<Problem>>) {
    let status = state.status.borrow();
    (status.synced, Arc::clone(&status.problems))
}

/// The problems of each object.
type ByObject<'a> = BTreeMap<&'a str, Vec<&'a Problem>>;

fn by_object(problems: &[Problem]) -> ByObject<'_> {
    let mut of_objects = ByObject::new();
    for problem in problems {
        of_objects.entry(problem.object.as_str()).or_default().push(problem);
    }
    of_objects
}

fn one(name: &ServiceName, known: &ProgrammedService, problems: &ByObject<'_>) -> ProgrammedJson {
    let slices = known.slices.iter().map(|(slice, _)| format!("EndpointSlice {slice}"));
    let objects = std::iter::once(format!("Service {name}")).chain(slices);
    let endpoint_slices = known.slices.iter().map(|(name, version)| {
        let (uid, resource_version, generation) = parts(version);
        SliceJson { name: name.name.to_string(), uid, resource_version, generation }
    });
    let (uid, resource_version, generation) = parts(&known.service);
    ProgrammedJson {
        namespace: name.namespace.to_string(),
        name: name.name.to_string(),
        uid,
        resource_version,
        generation,
        endpoint_slices: endpoint_slices.collect(),
        programmed_since: health::rfc3339(Some(known.since)),
        current: known.is_current,
        frontends: Some(known.frontends),
        problems: objects
            .filter_map(|object| problems.get(object.as_str()))
            .flatten()
            .map(ToString::to_string)
            .collect(),
    }
}

/// Returns uid, resourceVersion and generation; all are `None` for objects from a folder. The API server sets a generation for
/// EndpointSlices, but not for Services.
fn parts(version: &Version) -> (Option<String>, Option<String>, Option<i64>) {
    let non_empty = |text: &Opaque| (!text.is_empty()).then(|| text.to_string());
    (non_empty(&version.uid), non_empty(&version.resource_version), version.generation.map(NonZero::get))
}
