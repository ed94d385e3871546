//! Many objects.

use std::io::{self, Write as _};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use serde_json::json;

use super::{service, slice};
use crate::agent::Node;
use crate::oracle::{agree, agree_within};
use proxy_testbed::kube::control::ControlPlane;

const SERVICES: usize = 1000;
const ENDPOINTS: usize = 10;
/// Timeout for many objects: a busy machine creates some hundred per second.
const LONG: Duration = Duration::from_mins(1);

pub fn a_thousand_services(control: &mut ControlPlane, node: &Node) -> Result<()> {
    let (mut services, mut slices) = (Vec::new(), Vec::new());
    for number in 0..SERVICES {
        let name = format!("m{number}");
        let endpoint = |index: usize| format!("10.{}.{}.{}", 2 + number / 250, number % 250, index + 1);
        let addresses: Vec<_> = (0..ENDPOINTS).map(endpoint).collect();
        let addresses: Vec<_> = addresses.iter().map(String::as_str).collect();
        services.push(service(&name, &json!({}))?);
        slices.push(slice(&format!("{name}-1"), &name, &addresses)?);
    }
    // Half of the objects exist before the agent starts; the others are created while it runs.
    let half = SERVICES / 2;
    let api = &control.api;
    let making = Instant::now();
    api.create_all::<Service>(&services[..half])?;
    api.create_all::<EndpointSlice>(&slices[..half])?;
    let starting = Instant::now();
    let mut agent = node.start()?;
    agent.says(&["first sync done"])?;
    let started = starting.elapsed();
    let table = agree(api, node)?;
    ensure!(table.len() == half + 1, "{}", table.len());
    api.create_all::<EndpointSlice>(&slices[half..])?;
    api.create_all::<Service>(&services[half..])?;
    let made = making.elapsed();
    let table = agree_within(LONG, api, node)?;
    ensure!(table.len() == SERVICES + 1, "{}", table.len());
    let spread: usize = table.values().map(|answer| answer.endpoints.len()).sum();
    ensure!(spread == SERVICES * ENDPOINTS + 1, "{spread}");

    // Measures a restart: the agent gets all objects at once.
    agent.kill()?;
    let again = Instant::now();
    let mut agent = node.start()?;
    agent.says(&["first sync done"])?;
    let again = again.elapsed();
    agree(api, node)?;
    let sync = first_sync(&agent.log()?)?;

    // Removes every second Service with its slice, and of every twentieth Service only the slice.
    let removing = Instant::now();
    let gone: Vec<_> = services.iter().step_by(2).cloned().collect();
    let empty: Vec<_> = slices.iter().step_by(2).chain(slices.iter().skip(1).step_by(20)).cloned().collect();
    api.delete_all(&gone)?;
    api.delete_all(&empty)?;
    let removed = removing.elapsed();
    let table = agree_within(LONG, api, node)?;
    ensure!(table.len() == SERVICES / 2 + 1, "{}", table.len());
    ensure!(table.values().filter(|answer| answer.endpoints.is_empty()).count() == SERVICES / 20);
    agent.is_well()?;
    writeln!(
        io::stderr(),
        "{SERVICES} Services, {ENDPOINTS} endpoints each: made in {made:.1?}, half removed in {removed:.1?}; from \
         start to synced {started:.2?} with half of them, {again:.2?} with all and maps in place; that sync {sync:.1?}"
    )?;
    Ok(())
}

/// Returns the duration of the first sync, from the agent's log.
fn first_sync(log: &str) -> Result<Duration> {
    let line = log.lines().find(|line| line.contains("synced services=")).context("no sync")?;
    let micros = line.rsplit("duration_us=").next().and_then(|text| text.trim().parse().ok());
    Ok(Duration::from_micros(micros.context("the time of a sync cannot be read")?))
}
