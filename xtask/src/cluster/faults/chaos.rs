//! `cargo xtask test cluster chaos`: injects faults in random order, and checks that each connection reached an endpoint that
//! `ballast explain` had predicted.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::clients;
use super::load::{Client, Tally};
use super::probe::{Kind, Target};
use super::table::{CABLE, Case, GONE, Parameters, case};
use super::testbed::{self, Testbed};
use super::{control_plane, device, node, rolling};
use crate::cluster::{Workdir, kubectl};
use crate::{log, signal};

/// How long, and in which order.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// How many minutes to inject faults; default: 10 (chaos), 60 (soak)
    #[arg(long)]
    minutes: Option<u64>,
    /// The seed for the order of faults; it is printed, so that a run can be repeated
    #[arg(long)]
    seed: Option<u64>,
    /// Write the results to docs/benchmarks
    #[arg(long)]
    pub(super) page: bool,
}

/// How long the API server is stopped each time.
const AWAY: Duration = Duration::from_secs(20);

/// Faults that may be injected. None affects the pods whose connections stay open.
pub(super) const FAULTS: [Case; 8] = [
    case("an agent is killed", |testbed, parameters| {
        testbed.agents.kill(testbed.workdir, parameters.node, GONE)
    }),
    case("every agent is replaced, node by node", |testbed, _| testbed.agents.replace(testbed.workdir)),
    case("the API server is away; then pods change", |testbed, _| {
        // In one step: there is no prediction for pods that come and go during the fault.
        control_plane::api_away(testbed, AWAY, &[testbed::PODS + 2])
    }),
    case("endpoints come and go", |testbed, parameters| {
        testbed.scale(parameters.pods)?;
        rolling::await_equal(testbed)
    }),
    case("a node gets another address, and loses it", |testbed, _| node::address_changes(testbed)),
    case("a pod's device comes and goes, again and again", |testbed, _| device::comes_and_goes(testbed)),
    case("agents run out of memory, again and again", |testbed, _| control_plane::out_of_memory(testbed)),
    Case {
        what: "a node's uplink flaps",
        fault: |testbed, _| node::uplink_flaps(testbed),
        accepted_loss: Some(CABLE),
    },
];

/// Pods that may answer, for each client and target.
type Predicted = BTreeMap<String, BTreeSet<String>>;

/// Injects random faults into a cluster for a while, and prints what its clients saw.
pub fn run(workdir: &Workdir, args: &Args) -> Result<()> {
    let mut order = RandomOrder::begin(args, 10);
    let testbed = Testbed::make(workdir)?;
    let faults: Vec<_> = FAULTS.iter().collect();
    let mut lines = Vec::new();
    let mut all = || -> Result<()> {
        while let Some((fault, parameters)) = order.next(&testbed, &faults)? {
            let mut predicted = predict(&testbed)?;
            let mut line = super::under_traffic(&testbed, fault, &parameters)?;
            for (who, pods) in predict(&testbed)? {
                predicted.entry(who).or_default().extend(pods);
            }
            if line.outcome.is_ok()
                && let Some(tally) = &line.tally
            {
                line.outcome = compare(&predicted, tally);
            }
            lines.push(line);
        }
        Ok(())
    };
    let done = all();
    let proxy = testbed.agents.proxy();
    let command = format!("cargo xtask test cluster chaos {}", order.words);
    let part = (format!("chaos {proxy}"), format!("Faults in random order ({proxy})"), command);
    super::finish(&testbed, done, &lines, args.page.then_some(part))
}

/// Checks that every answer came from a pod that was predicted.
fn compare(predicted: &Predicted, tally: &Tally) -> Result<()> {
    for (who, pods) in &tally.by {
        let may = predicted.get(who).with_context(|| format!("nothing was predicted for {who}"))?;
        let other = pods.iter().find(|pod| !may.contains(*pod));
        ensure!(other.is_none(), "{who}: `{}` answered, predicted {may:?}", other.map_or("", String::as_str));
    }
    Ok(())
}

/// Returns what `ballast explain` predicts at this time for each connection that clients make.
fn predict(testbed: &Testbed<'_>) -> Result<Predicted> {
    let path = ["get", "pods", "-l", "app", "-o", "json"];
    let pods: Value = serde_json::from_str(&kubectl(testbed.workdir, &path).read()?).context("no JSON")?;
    let mut name_of = BTreeMap::new();
    for pod in pods["items"].as_array().into_iter().flatten() {
        for address in pod["status"]["podIPs"].as_array().into_iter().flatten() {
            if let (Some(address), Some(name)) = (address["ip"].as_str(), pod["metadata"]["name"].as_str()) {
                name_of.insert(address.to_owned(), name.to_owned());
            }
        }
    }
    let mut predicted = Predicted::new();
    for client in clients::all(testbed)? {
        for target in &client.targets {
            let explained = explain(testbed, &client, target)?;
            let pods =
                endpoints(&explained, &client.who).with_context(|| format!("{}: {target}", client.name))?;
            // A pod that has ended has no name any more, and cannot answer.
            let names = pods.iter().filter_map(|address| name_of.get(address).cloned());
            predicted.insert(format!("{}: {target}", client.name), names.collect());
        }
    }
    Ok(predicted)
}

fn explain(testbed: &Testbed<'_>, client: &Client, target: &Target) -> Result<Value> {
    let protocol = if matches!(target.kind, Kind::Udp | Kind::Flow) { "/udp" } else { "" };
    // For a client that is given by its address, use the one of its two addresses that has the target's family.
    let who = match client.who.as_str() {
        "host" | "pod" => client.who.clone(),
        address if target.address.is_ipv4() => address.to_owned(),
        address if address == crate::cluster::plan::CONTROL_V4 => crate::cluster::plan::CONTROL_V6.to_owned(),
        _ => testbed.address_v6(testbed::PLAIN)?,
    };
    let frontend = format!("{}{protocol}", target.address);
    let words = ["ballast", "explain", &who, &frontend, "-o", "json"];
    serde_json::from_str(&testbed.workdir.node(client.node).command(&words).read()?).context("no JSON")
}

/// Returns the addresses, without ports, that a connection may reach; an error unless it is forwarded.
fn endpoints(explained: &Value, who: &str) -> Result<Vec<String>> {
    // Sockets are left to the packets while endpoints change.
    let by_socket = matches!(who, "host" | "pod") && explained["socket"]["verdict"] != "untouched";
    let path = if by_socket { &explained["socket"] } else { &explained["packet"] };
    let verdict = path["verdict"].as_str().unwrap_or("nothing");
    ensure!(verdict == "forward", "`ballast explain` predicts {verdict}");
    let addresses =
        path["endpoints"].as_array().into_iter().flatten().filter_map(|one| one["address"].as_str());
    let without_port = |text: &str| text.rsplit_once(':').map_or(text, |(address, _)| address).to_owned();
    Ok(addresses.map(|text| without_port(text).trim_matches(['[', ']']).to_owned()).collect())
}

/// An order that depends only on its seed.
pub(super) struct RandomOrder {
    state: u64,
    ends: Instant,
    /// The arguments by which the run can be repeated.
    pub words: String,
}

impl RandomOrder {
    /// Begins the run, and prints the seed.
    pub(super) fn begin(args: &Args, minutes: u64) -> Self {
        let minutes = args.minutes.unwrap_or(minutes);
        let seed = args.seed.unwrap_or_else(|| jiff::Timestamp::now().as_second().cast_unsigned());
        log::line(format_args!("seed: {seed}"));
        let ends = Instant::now() + Duration::from_secs(60 * minutes);
        Self { state: seed, ends, words: format!("--minutes {minutes} --seed {seed} --page") }
    }

    /// Returns the next one of these faults, on a random node; `None` once the time is over.
    pub(super) fn next<'a>(
        &mut self,
        testbed: &Testbed<'_>,
        faults: &[&'a Case],
    ) -> Result<Option<(&'a Case, Parameters)>> {
        signal::check()?;
        if Instant::now() >= self.ends {
            return Ok(None);
        }
        let fault = *faults.get(below(&mut self.state, faults.len())).context("no fault")?;
        let nodes = testbed.nodes();
        let node = *nodes.get(below(&mut self.state, nodes.len())).context("no node")?;
        let pods = 1 + below(&mut self.state, 8) as u8;
        Ok(Some((fault, Parameters { node, pods, ..Parameters::default() })))
    }
}

/// Returns a random number below `limit`, and advances the state: `SplitMix64`.
fn below(state: &mut u64, limit: usize) -> usize {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut word = *state;
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((word ^ (word >> 31)) % limit.max(1) as u64) as usize
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_seed_gives_one_order_and_every_fault_comes() {
        let order = |mut seed| (0..200).map(|_| below(&mut seed, FAULTS.len())).collect::<Vec<_>>();
        assert_eq!(order(7), order(7));
        assert_ne!(order(7), order(8));
        assert_eq!(order(7).into_iter().collect::<BTreeSet<_>>().len(), FAULTS.len());
    }

    #[test]
    fn a_prediction_is_of_the_clients_own_path() {
        let explained = json!({
            "socket": { "verdict": "untouched", "endpoints": [] },
            "packet": { "verdict": "forward", "endpoints": [{ "address": "[fd44::7]:8080" }, { "address": "10.0.0.1:80" }] },
        });
        for client in ["10.244.3.9", "host"] {
            assert_eq!(endpoints(&explained, client).unwrap(), ["fd44::7", "10.0.0.1"]);
        }
        let refused =
            json!({ "socket": { "verdict": "refuse" }, "packet": { "verdict": "forward", "endpoints": [] } });
        assert!(endpoints(&refused, "host").unwrap_err().to_string().contains("refuse"));
        assert!(endpoints(&refused, "10.244.3.9").unwrap().is_empty());
    }

    #[test]
    fn an_answer_that_was_not_predicted_is_an_error() {
        let predicted: Predicted = [("a: new/x".to_owned(), ["pod-1".to_owned()].into())].into();
        let tally = |who: &str, pod: &str| Tally {
            by: [(who.to_owned(), [pod.to_owned()].into())].into(),
            ..Tally::default()
        };
        compare(&predicted, &tally("a: new/x", "pod-1")).unwrap();
        assert!(compare(&predicted, &tally("a: new/x", "pod-2")).unwrap_err().to_string().contains("pod-2"));
        assert!(compare(&predicted, &tally("b: new/x", "pod-1")).is_err());
    }
}
