//! Several API servers, and Services that do not come from any of them.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use super::{service, slice};
use crate::agent::Node;
use crate::oracle::{agree, found, same, wanted};
use proxy_testbed::kube::control::{ADDRESS, ControlPlane, PORT, SECOND};
use proxy_testbed::kube::{PATIENCE, eventually, ip};

/// Timeout for a change to reach the maps although the agent's API server is down. It is shorter than the pause of up to 20 s
/// before the agent tries the same server again.
const SOON: Duration = Duration::from_secs(15);

fn both() -> String {
    format!("https://{ADDRESS}:{PORT},https://{SECOND}:{PORT}")
}

/// Creates one Service with one endpoint.
fn one(control: &ControlPlane) -> Result<()> {
    control.api.create(&service("s", &json!({ "clusterIP": "10.96.7.1" }))?)?;
    control.api.create(&slice("s-1", "s", &["10.1.7.1"])?)
}

fn change(control: &ControlPlane, to: &str) -> Result<()> {
    control.api.patch::<EndpointSlice>("s-1", &json!({ "endpoints": [{ "addresses": [to] }] }))
}

pub fn another_takes_over(control: &mut ControlPlane, node: &Node) -> Result<()> {
    one(control)?;
    let (second, kubeconfig) = control.start_second()?;
    let mut agent = node.start_with(&kubeconfig, &["--master", &both()])?;
    agent.says(&["first sync done"])?;
    let first = format!("https://{ADDRESS}:{PORT}/");
    let asked = |server: &str| format!("ballast_api_server{{server=\"https://{server}:{PORT}/\"}}");
    ensure!(agent.metric(&asked(ADDRESS))? == "1" && agent.metric(&asked(SECOND))? == "0");
    agree(&control.api, node)?;
    ensure!(agent.count(&["the API server answers", &first])? == 1);

    control.kill()?;
    control.use_second()?;
    change(control, "10.1.7.2")?;
    let changed = Instant::now();
    let table = agree(&control.api, node)?;
    let took = changed.elapsed();
    ensure!(table["10.96.7.1:80/TCP"].endpoints.contains(&"10.1.7.2:8080".parse()?), "{table:?}");
    ensure!(took < SOON, "the change took {took:?}");
    ensure!(agent.metric(&asked(ADDRESS))? == "0" && agent.metric(&asked(SECOND))? == "1");
    ensure!(agent.metric("ballast_api_server_failovers_total")? == "1");
    // One line of the log reports the failover, and none says that the API server does not answer.
    ensure!(agent.count(&[" WARN ", "changed to another API server", SECOND])? == 1);
    ensure!(agent.count(&[" WARN ", "does not answer; programmed Services keep working"])? == 0);
    // More changes, one by one, without a failure.
    for last in 3..10 {
        change(control, &format!("10.1.7.{last}"))?;
        agree(&control.api, node)?;
    }

    // An agent that starts now finds the API server that runs.
    agent.kill()?;
    let mut agent = node.start_with(&kubeconfig, &["--master", &both()])?;
    agent.says(&["first sync done"])?;
    ensure!(agent.metric(&asked(SECOND))? == "1");

    // Failover back to the first one.
    control.restart()?;
    second.kill()?;
    change(control, "10.1.7.99")?;
    agree(&control.api, node)?;
    ensure!(
        agent.metric(&asked(ADDRESS))? == "1" && agent.metric("ballast_api_server_failovers_total")? == "2"
    );

    // All API servers are down: the agent reports that, and the programmed Services stay.
    let table = agree(&control.api, node)?;
    control.kill()?;
    agent.says(&["the API server does not answer"])?;
    same(&table, &found(node)?)?;
    control.restart()?;
    agent.says(&["the API server answers again"])?;
    agent.is_well()
}

/// The control plane's address: the cluster address of a static Service, which is unknown to all API servers.
const VIP: &str = "192.0.2.100";

fn vip() -> Result<SocketAddr> {
    Ok(format!("{VIP}:{PORT}").parse()?)
}

/// Part of an API server's answer to a request without TLS.
const ANSWER: &str = "400 Bad Request";

pub fn control_plane_address(control: &mut ControlPlane, node: &Node) -> Result<()> {
    one(control)?;
    let (_second, kubeconfig) = control.start_second()?;
    control.kill()?;
    let folder = node.path("manifests");
    fs::create_dir(&folder)?;
    let manifest = json!({ "apiVersion": "v1", "kind": "List", "items": [
        { "apiVersion": "v1", "kind": "Service",
          "metadata": { "namespace": "kube-system", "name": "control-plane" },
          "spec": { "clusterIP": VIP, "ports": [{ "name": "https", "port": PORT }] } },
        { "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
          "metadata": { "namespace": "kube-system", "name": "control-plane",
                        "labels": { "kubernetes.io/service-name": "control-plane" } },
          "ports": [{ "name": "https", "port": PORT }],
          "endpoints": [{ "addresses": [ADDRESS] }, { "addresses": [SECOND] }] },
    ]});
    fs::write(folder.join("control-plane.json"), manifest.to_string())?;
    let folder = folder.to_str().context("no text")?.to_owned();

    // A node boots while its API server does not answer: no server listens on port 1.
    ensure!(node.http_get(vip()?).is_err(), "there is no such address yet");
    let dead = format!("https://{ADDRESS}:1");
    let mut agent = node.start_with(&kubeconfig, &["--manifests", &folder, "--master", &dead])?;
    agent.says(&["static Services programmed"])?;
    agent.says(&["socket programs attached"])?;
    ensure!(agent.count(&["first sync done"])? == 0);
    agent.answers("/readyz", "503")?;
    agent.is_well()?;
    // One of the two endpoints works: a refused client connects at its second attempt.
    let begun = Instant::now();
    let mut refused = 0;
    while begun.elapsed() < Duration::from_secs(3) {
        if !reaches(node)? {
            refused += 1;
            ensure!(reaches(node)?, "refused twice in a row");
        }
    }
    agent.kill()?;

    // The next agent finds an API server, and programs the cluster's Services in addition to the static one.
    control.restart()?;
    let flags = ["--manifests", &folder, "--master", &both()];
    let mut agent = node.start_with(&kubeconfig, &flags)?;
    agent.says(&["first sync done"])?;
    control.use_second()?;
    let orig_dst = format!("{VIP}:{PORT}/TCP");
    let agrees = || -> Result<()> {
        let mut table = found(node)?;
        let vip = table.remove(&orig_dst).context("the static Service is gone")?;
        ensure!(vip.endpoints.len() == 2, "{vip:?}");
        same(&wanted(&control.api)?, &table)
    };
    eventually(PATIENCE, agrees)?;
    for _ in 0..50 {
        ensure!(reaches(node)?, "both live");
    }

    // Kills the API server that the agent uses, which is also an endpoint of the address. A refused client tries once more.
    let begun = Instant::now();
    let mut reached = 0;
    let mut is_killed = false;
    while begun.elapsed() < Duration::from_secs(10) {
        if !is_killed && begun.elapsed() > Duration::from_secs(1) {
            is_killed = true;
            control.kill()?;
            control.use_second()?;
            change(control, "10.1.7.50")?;
        }
        if !reaches(node)? {
            refused += 1;
            ensure!(reaches(node)?, "refused twice in a row, after {reached} connections");
        }
        reached += 1;
    }
    ensure!(reached > 30 && refused < reached / 4, "{refused} refusals among {reached} connections");
    let table = found(node)?;
    ensure!(table["10.96.7.1:80/TCP"].endpoints.contains(&"10.1.7.50:8080".parse()?), "{table:?}");
    agent.is_well()?;
    agent.kill()?;

    // An agent without the folder keeps the address until it knows the API server's Services.
    let mut agent = node.start_with(&kubeconfig, &["--master", &both()])?;
    agent.says(&["first sync done"])?;
    eventually(PATIENCE, || {
        ensure!(!found(node)?.contains_key(&orig_dst), "it is still there");
        Ok(())
    })?;
    agent.is_well()
}

/// Whether a process of the node reaches an API server at the address; an error if another server answers.
fn reaches(node: &Node) -> Result<bool> {
    match node.http_get(vip()?) {
        Ok(answer) => {
            ensure!(answer.contains(ANSWER), "{answer}");
            Ok(true)
        }
        Err(error) => {
            ensure!(format!("{error:#}").contains("Connection refused"), "{error:#}");
            Ok(false)
        }
    }
}

/// The cluster address of the Service `kubernetes`.
const CLUSTER_IP: &str = "10.96.0.1";

/// The agent knows only the cluster address, as in a pod. At first, a relay instead of Ballast connects that address to the API
/// server.
pub fn behind_the_service(control: &mut ControlPlane, node: &Node) -> Result<()> {
    one(control)?;
    ip(&format!("addr add {CLUSTER_IP}/32 dev lo"))?;
    let result = through_a_relay(control, node);
    ip(&format!("addr del {CLUSTER_IP}/32 dev lo"))?;
    result
}

fn through_a_relay(control: &ControlPlane, node: &Node) -> Result<()> {
    let relay = Relay::start(&format!("{CLUSTER_IP}:443"), &format!("{ADDRESS}:{PORT}"))?;
    let master = format!("https://{CLUSTER_IP}");
    let mut agent = node.start_with(&control.agent_kubeconfig(), &["--master", &master])?;
    agent.says(&["first sync done"])?;
    agent.says(&[" WARN ", "the Service `kubernetes`", "--master"])?;
    let direct = format!("ballast_api_server{{server=\"https://{ADDRESS}:{PORT}/\"}}");
    ensure!(agent.metric(&direct)? == "0");
    // The API server's certificate is valid for the cluster address, which TLS verifies also if the agent connects to the
    // endpoint.
    drop(relay);
    change(control, "10.1.7.2")?;
    eventually(PATIENCE, || {
        let table = found(node)?;
        let endpoints = &table.get("10.96.7.1:80/TCP").context("no Service")?.endpoints;
        ensure!(endpoints.contains(&"10.1.7.2:8080".parse()?), "{endpoints:?}");
        Ok(())
    })?;
    ensure!(agent.metric(&direct)? == "1", "by another way than the endpoint");
    ensure!(agent.count(&[" WARN ", "changed to another API server", ADDRESS])? == 1);
    agent.is_well()
}

/// Longer than the agent needs to notice that a connection is dead, and to change to another server.
const NOTICED: Duration = Duration::from_mins(1);

/// A relay stays open, accepts connections, and forwards nothing any more: TCP keepalive does not notice that.
pub fn a_relay_stops_forwarding(control: &mut ControlPlane, node: &Node) -> Result<()> {
    one(control)?;
    let (_second, kubeconfig) = control.start_second()?;
    ip(&format!("addr add {CLUSTER_IP}/32 dev lo"))?;
    let result = frozen_relay(control, node, &kubeconfig);
    ip(&format!("addr del {CLUSTER_IP}/32 dev lo"))?;
    result
}

fn frozen_relay(control: &ControlPlane, node: &Node, kubeconfig: &Path) -> Result<()> {
    let relay = Relay::start(&format!("{CLUSTER_IP}:443"), &format!("{ADDRESS}:{PORT}"))?;
    let master = format!("https://{CLUSTER_IP},https://{SECOND}:{PORT}");
    let mut agent = node.start_with(kubeconfig, &["--master", &master])?;
    agent.says(&["first sync done"])?;
    change(control, "10.1.7.2")?;
    endpoint_becomes(node, "10.1.7.2")?;
    // Each connection is two streams. The agent may open several at once, of which HTTP/2 keeps one.
    let streams = relay.streams.lock().map_err(|_| anyhow::anyhow!("a thread of the relay panicked"))?.len();
    ensure!(streams <= 8, "{streams} streams");
    relay.is_frozen.store(true, Ordering::Relaxed);
    change(control, "10.1.7.3")?;
    endpoint_becomes(node, "10.1.7.3")?;
    // To the second server or to the endpoint of the Service `kubernetes`: each agent has its own order.
    ensure!(agent.count(&[" WARN ", "changed to another API server"])? == 1);
    change(control, "10.1.7.4")?;
    endpoint_becomes(node, "10.1.7.4")?;
    agent.is_well()
}

/// Waits until the endpoint has the address `to`, no longer than the agent may need, and nothing differs from the API server.
fn follows(control: &ControlPlane, node: &Node, to: &str) -> Result<()> {
    endpoint_becomes(node, to)?;
    agree(&control.api, node).map(drop)
}

/// As [`follows`], also on a node that has an address of a Service itself.
fn endpoint_becomes(node: &Node, to: &str) -> Result<()> {
    let changed = Instant::now();
    let endpoint = format!("{to}:8080").parse()?;
    eventually(NOTICED, || {
        let table = found(node)?;
        let endpoints = &table.get("10.96.7.1:80/TCP").context("no Service")?.endpoints;
        ensure!(endpoints.contains(&endpoint), "{endpoints:?}");
        Ok(())
    })?;
    let took = changed.elapsed();
    ensure!(took < NOTICED, "the change took {took:?}");
    Ok(())
}

/// The API server stops, and its kernel keeps the connections. When it continues, its cache is old for a moment.
pub fn a_server_freezes(control: &mut ControlPlane, node: &Node) -> Result<()> {
    one(control)?;
    let (second, kubeconfig) = control.start_second()?;
    let mut agent = node.start_with(&kubeconfig, &["--master", &both()])?;
    agent.says(&["first sync done"])?;
    agree(&control.api, node)?;
    let server = Pid::from_raw(control.server_id()?.cast_signed()).context("no process")?;
    kill_process(server, Signal::STOP)?;
    control.use_second()?;
    let result = (2..80).try_for_each(|last| change(control, &format!("10.1.7.{last}")));
    let result = result.and_then(|()| follows(control, node, "10.1.7.79"));
    kill_process(server, Signal::CONT)?;
    result?;
    // The agent returns to the server that was frozen: nothing goes back.
    second.kill()?;
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(10) {
        let table = found(node)?;
        let endpoints = &table.get("10.96.7.1:80/TCP").context("no Service")?.endpoints;
        ensure!(endpoints.iter().all(|one| one.ip().to_string() == "10.1.7.79"), "{endpoints:?}");
        thread::sleep(Duration::from_millis(50));
    }
    control.use_first()?;
    change(control, "10.1.7.99")?;
    follows(control, node, "10.1.7.99")?;
    agent.is_well()
}

/// A TCP relay, which closes its connections when it is dropped.
struct Relay {
    listener: TcpListener,
    streams: Arc<Mutex<Vec<TcpStream>>>,
    /// Whether it keeps everything that it receives.
    is_frozen: Arc<AtomicBool>,
}

impl Relay {
    fn start(at: &str, to: &str) -> Result<Self> {
        let listener = TcpListener::bind(at).with_context(|| format!("cannot listen on {at}"))?;
        let relay =
            Self { listener: listener.try_clone()?, streams: Arc::default(), is_frozen: Arc::default() };
        let (to, streams, is_frozen) =
            (to.to_owned(), Arc::clone(&relay.streams), Arc::clone(&relay.is_frozen));
        thread::spawn(move || {
            for inside in listener.incoming() {
                let (Ok(inside), Ok(outside)) = (inside, TcpStream::connect(&to)) else { return };
                for (from, into) in [(&inside, &outside), (&outside, &inside)] {
                    let (Ok(mut from), Ok(mut into)) = (from.try_clone(), into.try_clone()) else { return };
                    let is_frozen = Arc::clone(&is_frozen);
                    thread::spawn(move || {
                        let mut bytes = [0; 16 << 10];
                        while let Ok(count @ 1..) = from.read(&mut bytes) {
                            if !is_frozen.load(Ordering::Relaxed) {
                                into.write_all(&bytes[..count])?;
                            }
                        }
                        into.shutdown(Shutdown::Write)
                    });
                }
                if let Ok(mut streams) = streams.lock() {
                    streams.extend([inside, outside]);
                }
            }
        });
        Ok(relay)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // This also wakes the thread in `accept`, and ends it.
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        let Ok(streams) = self.streams.lock() else { return };
        for stream in streams.iter() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}
