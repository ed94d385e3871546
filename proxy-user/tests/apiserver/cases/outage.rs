//! The API server or the agent is down for a while.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use proxy_user::maps::view::BackendState;
use serde_json::json;

use super::{service, slice};
use crate::agent::{Agent, Node};
use crate::oracle::{Table, agree, found, same};
use proxy_testbed::kube::control::ControlPlane;
use proxy_testbed::kube::{PATIENCE, eventually};

/// Longer than some of the agent's pauses between two attempts to connect.
const AWAY: Duration = Duration::from_secs(5);

/// Checks for a while that the maps do not change and the agent is alive.
fn check_unchanged(agent: &mut Agent, node: &Node, table: &Table, time: Duration) -> Result<()> {
    let begun = Instant::now();
    while begun.elapsed() < time {
        same(table, &found(node)?)?;
        agent.is_well()?;
        std::thread::sleep(Duration::from_millis(200));
    }
    Ok(())
}

/// Creates three Services with one endpoint each.
fn create_three_services(control: &ControlPlane) -> Result<()> {
    for number in 1..=3 {
        let name = format!("s{number}");
        control.api.create(&service(&name, &json!({ "clusterIP": format!("10.96.5.{number}") }))?)?;
        control.api.create(&slice(&format!("{name}-1"), &name, &[&format!("10.1.5.{number}")])?)?;
    }
    Ok(())
}

pub fn the_api_server_goes_and_comes_back(control: &mut ControlPlane, node: &Node) -> Result<()> {
    create_three_services(control)?;
    let mut agent = node.start()?;
    agent.says(&["first sync done"])?;
    let table = agree(&control.api, node)?;
    ensure!(table.len() == 4, "{table:?}");
    control.kill()?;
    agent.says(&["the API server does not answer"])?;
    check_unchanged(&mut agent, node, &table, AWAY)?;
    control.restart()?;
    control.api.create(&service("after", &json!({ "clusterIP": "10.96.5.9" }))?)?;
    control.api.create(&slice("after-1", "after", &["10.1.5.9"])?)?;
    control.api.delete::<EndpointSlice>("s1-1")?;
    control.api.delete::<Service>("s2")?;
    let table = agree(&control.api, node)?;
    ensure!(table["10.96.5.9:80/TCP"].endpoints.len() == 1 && table.len() == 4);
    agent.says(&["the API server answers again"])?;
    agent.is_well()?;
    // The agent warns once per outage, not once per attempt. There may be several outages: an API server that is just starting
    // may answer one watch and refuse the connection of the next.
    let warnings = eventually(PATIENCE, || {
        let (warnings, ends) =
            (agent.count(&[" WARN ", "does not answer"])?, agent.count(&["answers again"])?);
        ensure!(warnings == ends, "{warnings} warnings, and {ends} times it came back");
        Ok(warnings)
    })?;
    let attempts = agent.count(&["a watch failed"])?;
    ensure!(attempts > 5 * warnings, "{warnings} warnings for {attempts} attempts");
    Ok(())
}

pub fn a_missing_permission(control: &mut ControlPlane, node: &Node) -> Result<()> {
    create_three_services(control)?;
    control.forbid()?;
    let mut agent = node.start()?;
    let resources = ["services", "endpointslices", "nodes", "servicecidrs"];
    for resource in resources {
        agent.says(&[" WARN ", "denies access", &format!("resource=\"{resource}")])?;
    }
    agent.is_well()?;
    ensure!(agent.count(&["first sync done"])? == 0, "nothing can be known yet");
    control.permit()?;
    for resource in resources {
        agent.says(&["allows the watch again", &format!("resource=\"{resource}")])?;
    }
    let table = agree(&control.api, node)?;
    ensure!(table.len() == 4, "{table:?}");
    // One warning per resource, for all attempts.
    let warnings = agent.count(&[" WARN ", "denies access"])?;
    ensure!(warnings == resources.len(), "{warnings} warnings for {resources:?}");
    Ok(())
}

/// Changes that no watch sees: they are made through an API server at a port that the agent does not know. The API server that
/// the agent knows then starts with a later state, and refuses to continue a watch from the earlier one.
pub fn a_watch_expires(control: &mut ControlPlane, node: &Node) -> Result<()> {
    create_three_services(control)?;
    let mut agent = node.start()?;
    agent.says(&["first sync done"])?;
    let table = agree(&control.api, node)?;
    control.kill()?;
    control.restart_hidden()?;
    let api = &control.api;
    api.delete::<Service>("s1")?;
    api.delete::<EndpointSlice>("s1-1")?;
    api.delete::<EndpointSlice>("s2-1")?;
    api.patch::<EndpointSlice>("s3-1", &json!({ "endpoints": [{ "addresses": ["10.1.5.33"] }] }))?;
    api.create(&service("fresh", &json!({ "clusterIP": "10.96.5.8" }))?)?;
    api.create(&slice("fresh-1", "fresh", &["10.1.5.8"])?)?;
    // The API server's own Service has another port meanwhile; the agent does not see that either.
    check_unchanged(&mut agent, node, &table, Duration::from_secs(1))?;
    control.kill()?;
    control.restart()?;
    let table = agree(&control.api, node)?;
    ensure!(!table.contains_key("10.96.5.1:80/TCP") && table["10.96.5.2:80/TCP"].endpoints.is_empty());
    ensure!(table["10.96.5.3:80/TCP"].endpoints.contains(&"10.1.5.33:8080".parse()?));
    ensure!(table["10.96.5.8:80/TCP"].endpoints.len() == 1);
    let expired = agent.count(&["restarting it", "too old resource version"])?;
    ensure!(expired > 0, "no watch has expired: this has shown nothing");
    // The new watches work, too.
    control.api.delete::<Service>("fresh")?;
    let table = agree(&control.api, node)?;
    ensure!(!table.contains_key("10.96.5.8:80/TCP"));
    agent.is_well()
}

/// Returns the ids of Service ports and of their active backends, by name.
fn ids(node: &Node) -> Result<BTreeMap<String, u32>> {
    let maps = node.maps()?;
    let names = maps.names()?;
    let mut ids: BTreeMap<_, _> =
        names.iter().map(|(id, name)| (format!("{name} {} {}", name.protocol, name.family), *id)).collect();
    for (id, row) in maps.backends()?.iter().filter(|(_, row)| row.state == BackendState::Active) {
        let owner = names.get(&row.service).map(ToString::to_string).unwrap_or_default();
        ids.insert(format!("{owner} -> {}", row.socket), *id);
    }
    Ok(ids)
}

pub fn the_agent_is_killed(control: &mut ControlPlane, node: &Node) -> Result<()> {
    create_three_services(control)?;
    let mut agent = node.start()?;
    agent.says(&["socket programs attached"])?;
    let before = agree(&control.api, node)?;
    let ids_before = ids(node)?;
    agent.kill()?;
    let api = &control.api;
    api.delete::<Service>("s1")?;
    api.create(&slice("s2-2", "s2", &["10.1.5.22"])?)?;
    api.create(&service("fresh", &json!({ "clusterIP": "10.96.5.8" }))?)?;
    api.create(&slice("fresh-1", "fresh", &["10.1.5.8"])?)?;
    control.kill()?;

    // The agent cannot know yet which objects were removed.
    let mut agent = node.start()?;
    agent.says(&["the API server does not answer"])?;
    // The agent begins to list objects while it loads the programs, before its health server listens.
    eventually(PATIENCE, || agent.is_well())?;
    check_unchanged(&mut agent, node, &before, AWAY)?;
    ensure!(ids(node)? == ids_before, "ids changed without an API server");
    ensure!(agent.count(&["first sync done"])? == 0);

    control.restart()?;
    agent.says(&["first sync done"])?;
    let after = agree(&control.api, node)?;
    ensure!(!after.contains_key("10.96.5.1:80/TCP"));
    let ids_after = ids(node)?;
    for (what, id) in ids_before.iter().filter(|(what, _)| !what.starts_with("default/s1")) {
        ensure!(ids_after.get(what) == Some(id), "{what} was {id} and is {:?}", ids_after.get(what));
    }
    for what in ["default/s2 -> 10.1.5.22:8080", "default/fresh -> 10.1.5.8:8080"] {
        let id = ids_after.get(what);
        let taken = ids_before.iter().find(|(before, used)| before.contains("->") && Some(*used) == id);
        ensure!(id.is_some() && taken.is_none(), "{what}: {id:?}, which was {taken:?} before");
    }
    Ok(())
}
