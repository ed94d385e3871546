//! Beside the official kube-proxy, which gets the same Services from an API server: from kube-proxy to Ballast, and back.
//!
//! kube-proxy's endpoints are in pod 1, and those in Ballast's folder are in pod 0, so the server shows which proxy translated.

use std::cell::RefCell;
use std::io;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use serde_json::{Value, json};

use super::exposed::{NODE_PORTS, NUMBER, node_ip, node_port, open_up, put};
use super::takeover::{back, ruleset, takeover, through};
use super::{Case, WEB};
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually};
use crate::peer::{Attempt, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::kube::control::ControlPlane;
use proxy_testbed::kube::kube_proxy::{self, Mode};
use proxy_testbed::kube::process::Process;
use proxy_testbed::kube::{self, tail};
use proxy_testbed::manifest::{self, cluster_ip, pod_ip};

const WISH: Wish = Wish { pods: 2, services: &[WEB], flags: SMALL };

pub const CASES: &[Case] = &[
    Case {
        name: "official::from_nftables_mode_and_back",
        wish: WISH,
        run: |fixture| run(fixture, Mode::Nftables),
    },
    Case {
        name: "official::from_iptables_mode_and_back",
        wish: WISH,
        run: |fixture| run(fixture, Mode::Iptables),
    },
];

/// Returns the fixture's Services as objects of a cluster: the same addresses and ports, with other endpoints.
fn objects() -> Result<(Vec<Service>, Vec<EndpointSlice>)> {
    let (mut services, mut slices) = (Vec::new(), Vec::new());
    for (name, number, spec) in [
        ("web", WEB.number, json!({})),
        ("open", NUMBER, json!({ "type": "NodePort", "ports": [{ "nodePort": NODE_PORTS[0] }] })),
    ] {
        let ports = json!([{ "name": "tcp", "port": 80, "protocol": "TCP" }]);
        let mut service = manifest::service_object(
            name,
            number,
            &json!({ "ipFamilyPolicy": "RequireDualStack", "ports": ports }),
        );
        manifest::merge(&mut service["spec"], &spec);
        services.push(serde_json::from_value(service)?);
        let ports = json!([{ "name": "tcp", "port": 8080, "protocol": "TCP" }]);
        for slice in manifest::slices(name, name, &ports, |family| {
            vec![json!({ "addresses": [pod_ip(family, 1)], "nodeName": "node" })]
        }) {
            slices.push(serde_json::from_value(slice)?);
        }
    }
    Ok((services, slices))
}

fn node() -> Value {
    let addresses = Family::BOTH.map(|family| json!({ "type": "InternalIP", "address": node_ip(family) }));
    json!({ "metadata": { "name": "node" }, "status": { "addresses": addresses } })
}

/// Starts kube-proxy on the fixture's node, and waits until it serves all Services.
fn start(fixture: &Fixture, mode: Mode, control: &ControlPlane) -> Result<Process> {
    let command = fixture.node.command(kube_proxy::program(control)?);
    let process = kube_proxy::start(command, mode, "node", control)?;
    eventually(SOON, || {
        let rules = ruleset(fixture)?;
        let orig_dst = [WEB.number, NUMBER].into_iter().flat_map(|n| Family::BOTH.map(|f| cluster_ip(f, n)));
        for address in orig_dst {
            ensure!(rules.contains(&address.to_string()), "no rule for {address}");
        }
        let ports = rules.matches(&NODE_PORTS[0].to_string()).count();
        ensure!(ports >= 2, "{ports} rules for the node port");
        Ok(())
    })
    .with_context(|| format!("kube-proxy does not serve\n{}", tail(&kube_proxy::log(control, "node"))))?;
    Ok(process)
}

/// Returns attempts to the node port.
fn far() -> [Attempt; 2] {
    Family::BOTH.map(|family| Attempt::new(SocketKind::Tcp, node_port(family, SocketKind::Tcp)))
}

fn run(fixture: &Fixture, mode: Mode) -> Result<()> {
    // SAFETY: the call moves this thread alone; everything else of a case happens in namespaces that are named.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
        return Err(io::Error::last_os_error()).context("cannot unshare the network");
    }
    let control = kube::start()?;
    fixture.node.ip(&kube::connect_namespace(1, &fixture.node.path())?)?;
    let (services, slices) = objects()?;
    control.api.create_raw("/api/v1/nodes", &node())?;
    control.api.create_all(&services)?;
    control.api.create_all(&slices)?;
    open_up(fixture)?;
    put(fixture, &[(0, false)], &json!({}), &[])?;

    let running = RefCell::new(None);
    let install = |fixture: &Fixture| {
        *running.borrow_mut() = Some(start(fixture, mode, &control)?);
        for attempt in far() {
            let seen = fixture.client.reach(attempt)?;
            ensure!(seen.server == "1/8080", "the node port leads to {}", seen.server);
        }
        Ok(())
    };
    let stop = || {
        let (said, well) = takeover(fixture, &[])?;
        ensure!(!well && said.contains("kube-proxy is still running on this node"), "{said}");
        for attempt in far() {
            let seen = fixture.client.reach(attempt)?;
            ensure!(seen.server == "0/8080", "the node port leads to {}", seen.server);
        }
        running.borrow_mut().take().context("kube-proxy does not run")?.kill()
    };
    through(fixture, install, stop, &far())?;
    // kubelet also creates this chain, with a rule against packets to 127.0.0.0/8 from elsewhere, so the chain stays.
    let rules = ruleset(fixture)?.replace("KUBE-FIREWALL", "");
    ensure!(!rules.contains("kube-proxy") && !rules.contains("KUBE-"), "{rules}");
    let again = |fixture: &Fixture| {
        *running.borrow_mut() = Some(start(fixture, mode, &control)?);
        Ok(())
    };
    back(fixture, again)?;
    for attempt in far() {
        let seen = fixture.client.reach(attempt)?;
        ensure!(seen.server == "1/8080", "the node port leads to {}", seen.server);
    }
    Ok(())
}
