//! Rollouts of many deployments at once. Every connection has to reach a pod of the right one; afterwards each node's maps
//! have to match the EndpointSlices.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::clients;
use super::probe::Target;
use super::testbed::{self, Testbed};
use crate::cluster::{Workdir, apply, kubectl};
use crate::{log, signal};

/// Number of deployments, each with its Service.
const DEPLOYMENTS: usize = 50;
/// Number of pods of each deployment; during the rollout, the next pod also runs. A small machine has no room for more.
const REPLICAS: u8 = 1;
const LABEL: &str = "faults=rolling";
/// Time limit for so many pods on a small machine.
const PATIENCE: Duration = Duration::from_mins(8);

/// Endpoints of each Service port, which is named as in `ballast service list`.
type Endpoints = BTreeMap<String, BTreeSet<String>>;

/// Restarts all deployments while clients call each of them.
pub(super) fn all_at_once(testbed: &Testbed<'_>) -> Result<()> {
    let workdir = testbed.workdir;
    let mut items = Vec::new();
    for number in 0..DEPLOYMENTS {
        items.extend(super::objects::served(&name(number), REPLICAS, None)?.into_iter().map(labelled));
    }
    apply(workdir, &json!({ "apiVersion": "v1", "kind": "List", "items": items }))?;
    let done = rolled(testbed);
    kubectl(workdir, &["delete", "deployments,services", "-l", LABEL, "--wait=false"]).read()?;
    kubectl(workdir, &["delete", "pods", "-l", LABEL, "--grace-period=1", "--wait=false"]).read()?;
    signal::wait_for("the deployments' pods to end", PATIENCE, || {
        let left = kubectl(workdir, &["get", "pods", "-l", LABEL, "-o", "name"]).read()?;
        Ok(left.trim().is_empty().then_some(()))
    })?;
    done?;
    await_equal(testbed)
}

fn rolled(testbed: &Testbed<'_>) -> Result<()> {
    let workdir = testbed.workdir;
    available(workdir)?;
    await_equal(testbed)?;
    let targets = targets(workdir)?;
    ensure!(targets.len() == DEPLOYMENTS, "{} of {DEPLOYMENTS} Services have an address", targets.len());
    let clients = clients::of_all(testbed, &targets)?;
    let (tally, done) = Testbed::run_clients_during(clients, || {
        kubectl(workdir, &["rollout", "restart", "deployments", "-l", LABEL]).read()?;
        available(workdir)
    })?;
    done?;
    let count = tally.total();
    log::line(format_args!(
        "    {} connections to {DEPLOYMENTS} Services, {} failed",
        count.answered + count.failed,
        count.failed
    ));
    let mut failures = String::new();
    for failure in &tally.failures {
        let _ = write!(failures, "\n    {failure}");
    }
    ensure!(count.failed == 0, "{} connections failed:{failures}", count.failed);
    await_equal(testbed)
}

/// Waits until all deployments are rolled out, with all wanted pods and no other.
fn available(workdir: &Workdir) -> Result<()> {
    let path = "jsonpath={range .items[*]}{.metadata.generation} {.status.observedGeneration} {.status.replicas} \
                {.status.updatedReplicas} {.status.availableReplicas}{\"\\n\"}{end}";
    signal::wait_for("all deployments to be rolled out", PATIENCE, || {
        std::thread::sleep(Duration::from_millis(500));
        let output = kubectl(workdir, &["get", "deployments", "-l", LABEL, "-o", path]).read()?;
        Ok(output.lines().all(is_rolled_out).then_some(()))
    })
}

fn is_rolled_out(line: &str) -> bool {
    let words: Vec<_> = line.split_whitespace().collect();
    let wanted = REPLICAS.to_string();
    matches!(words[..], [generation, observed, replicas, updated, available]
        if generation == observed && [replicas, updated, available] == [wanted.as_str(); 3])
}

/// Returns the Services' addresses as targets.
fn targets(workdir: &Workdir) -> Result<Vec<Target>> {
    let path = "jsonpath={range .items[*]}new/{.spec.clusterIP}:80={.metadata.name}-{\"\\n\"}{end}";
    let output = kubectl(workdir, &["get", "services", "-l", LABEL, "-o", path]).read()?;
    output.lines().map(str::parse).collect()
}

fn name(number: usize) -> String {
    format!("roll-{number:02}")
}

fn labelled(mut object: Value) -> Value {
    let (key, value) = LABEL.split_once('=').unwrap_or((LABEL, ""));
    object["metadata"]["labels"][key] = json!(value);
    if object["kind"] == "Deployment" {
        object["spec"]["template"]["metadata"]["labels"][key] = json!(value);
    }
    object
}

/// Waits until the maps of each node match the EndpointSlices of all Services: no endpoint is missing, none is superfluous.
pub(super) fn await_equal(testbed: &Testbed<'_>) -> Result<()> {
    await_equal_within(testbed, testbed::SOON)
}

/// The same with another time limit.
pub(super) fn await_equal_within(testbed: &Testbed<'_>, limit: Duration) -> Result<()> {
    for node in testbed.nodes() {
        let mut difference = String::new();
        let equal = signal::wait_for("the maps to be what the EndpointSlices say", limit, || {
            let slices = kubectl(testbed.workdir, &["get", "endpointslices", "-A", "-o", "json"]).read()?;
            let list =
                testbed.workdir.node(node).command(&["ballast", "service", "list", "-o", "json"]).read()?;
            let (wanted, programmed) = (wanted(&slices)?, programmed(&list)?);
            difference = format!("wanted {wanted:?}, programmed {programmed:?}");
            Ok((wanted == programmed).then_some(()))
        });
        equal.with_context(|| format!("{node}: {difference}"))?;
    }
    Ok(())
}

fn wanted(slices: &str) -> Result<Endpoints> {
    let slices: Value = serde_json::from_str(slices).context("kubectl printed no JSON")?;
    let mut all = Endpoints::new();
    for slice in array(&slices, "items") {
        let (space, service) =
            (&slice["metadata"]["namespace"], &slice["metadata"]["labels"]["kubernetes.io/service-name"]);
        let (Some(space), Some(service)) = (space.as_str(), service.as_str()) else { continue };
        for port in array(slice, "ports") {
            let name = port["name"].as_str().filter(|name| !name.is_empty());
            let key =
                name.map_or_else(|| format!("{space}/{service}"), |name| format!("{space}/{service}:{name}"));
            let there = all.entry(key).or_default();
            for endpoint in array(slice, "endpoints").filter(|one| one["conditions"]["ready"] != json!(false))
            {
                let address = endpoint["addresses"][0].as_str().context("an endpoint without an address")?;
                let port = port["port"].as_u64().context("a port without a number")?;
                there.insert(if address.contains(':') {
                    format!("[{address}]:{port}")
                } else {
                    format!("{address}:{port}")
                });
            }
        }
    }
    Ok(all)
}

fn programmed(list: &str) -> Result<Endpoints> {
    let list: Value = serde_json::from_str(list).context("ballast printed no JSON")?;
    let mut all = Endpoints::new();
    for frontend in array(&list, "frontends") {
        let service = frontend["service"].as_str().context("a frontend without a Service")?;
        let endpoints = array(frontend, "endpoints").filter_map(Value::as_str).map(str::to_owned);
        all.entry(service.to_owned()).or_default().extend(endpoints);
    }
    Ok(all)
}

fn array<'a>(value: &'a Value, field: &str) -> impl Iterator<Item = &'a Value> {
    value.get(field).and_then(Value::as_array).into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_finished_rollout_counts() {
        assert!(is_rolled_out("2 2 1 1 1"));
        for line in ["2 1 1 1 1", "2 2 2 1 1", "2 2 1 0 1", "2 2 1 1", "1 1 1 1 0"] {
            assert!(!is_rolled_out(line), "{line}");
        }
    }

    #[test]
    fn both_sides_are_read_alike() {
        let slice = |name: &str, ready: &str| {
            format!(
                r#"{{"metadata":{{"namespace":"a","labels":{{"kubernetes.io/service-name":"b"}}}},
                "ports":[{{"name":"{name}","port":80}}],
                "endpoints":[{{"addresses":["10.0.0.1"],"conditions":{{"ready":{ready}}}}}]}}"#
            )
        };
        let slices = |name, ready| format!(r#"{{"items":[{}]}}"#, slice(name, ready));
        let list = |service, endpoints| {
            format!(r#"{{"frontends":[{{"service":"{service}","endpoints":[{endpoints}]}}]}}"#)
        };
        assert_eq!(
            wanted(&slices("", "true")).unwrap(),
            programmed(&list("a/b", r#""10.0.0.1:80""#)).unwrap()
        );
        assert_eq!(wanted(&slices("http", "false")).unwrap(), programmed(&list("a/b:http", "")).unwrap());
        assert_ne!(
            wanted(&slices("", "false")).unwrap(),
            programmed(&list("a/b", r#""10.0.0.1:80""#)).unwrap()
        );
    }
}
