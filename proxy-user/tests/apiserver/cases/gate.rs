//! `ballast gate` with a real API server: the readiness gate of a pod opens when nodes know the pod, and its hook is answered when
//! they no longer select it. Its account may patch the status of pods, and nothing else.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use serde_json::{Value, json};

use super::{service, slice_of};
use crate::agent::Node;
use proxy_testbed::kube::control::ControlPlane;
use proxy_testbed::kube::process::Process;
use proxy_testbed::kube::{PATIENCE, eventually};

const POD: &str = "/api/v1/namespaces/default/pods/gated-0";
const ACCOUNT: &str = "/api/v1/namespaces/default/serviceaccounts/gate";
const RBAC: &str = "/apis/rbac.authorization.k8s.io/v1/namespaces/default";
const ADDRESS: &str = "10.9.0.9";
/// Where the hook is asked.
const HOOK: &str = "127.0.0.1:10266";

/// Returns the kubeconfig of the pod's account.
fn account(control: &ControlPlane, node: &Node) -> Result<std::path::PathBuf> {
    let mut config: Value = serde_json::from_slice(&fs::read(control.admin_kubeconfig())?)?;
    config["users"][0]["user"]["as"] = json!("system:serviceaccount:default:gate");
    let path = node.path("gate.yaml");
    fs::write(&path, serde_json::to_vec(&config)?)?;
    Ok(path)
}

/// Returns the endpoints of a slice: a pod that has served before, and the gated one with these conditions.
fn endpoints(conditions: &Value) -> Value {
    json!({ "endpoints": [
        { "addresses": ["10.9.0.1"] },
        { "addresses": [ADDRESS], "conditions": conditions },
    ] })
}

fn condition(control: &ControlPlane) -> Result<Option<String>> {
    let pod: Value = serde_json::from_str(&control.api.get_raw(POD)?)?;
    let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let gate = conditions.into_iter().find(|one| one["type"] == "ballast.io/programmed");
    Ok(gate.and_then(|gate| gate["status"].as_str().map(str::to_owned)))
}

pub fn opens_and_holds(control: &mut ControlPlane, node: &Node) -> Result<()> {
    let kubeconfig = account(control, node)?;
    let api = &control.api;
    // The agent's own address is the only one at which the test can reach it.
    let own = own_address()?;
    api.create_raw(ACCOUNT.trim_end_matches("/gate"), &json!({ "metadata": { "name": "gate" } }))?;
    let rules = json!([{ "apiGroups": [""], "resources": ["pods/status"], "verbs": ["patch"] }]);
    api.create_raw(&format!("{RBAC}/roles"), &json!({ "metadata": { "name": "gate" }, "rules": rules }))?;
    let subjects = json!([{ "kind": "ServiceAccount", "name": "gate", "namespace": "default" }]);
    let role = json!({ "apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "gate" });
    let binding = json!({ "metadata": { "name": "gate" }, "roleRef": role, "subjects": subjects });
    api.create_raw(&format!("{RBAC}/rolebindings"), &binding)?;
    let pod = json!({ "metadata": { "name": "gated-0" }, "spec": {
        "serviceAccountName": "gate",
        "automountServiceAccountToken": false,
        "readinessGates": [{ "conditionType": "ballast.io/programmed" }],
        "containers": [{ "name": "web", "image": "web" }],
    } });
    api.create_raw(POD.trim_end_matches("/gated-0"), &pod)?;
    let result = run(control, node, &kubeconfig, &own);
    for path in [POD, ACCOUNT, &format!("{RBAC}/roles/gate"), &format!("{RBAC}/rolebindings/gate")] {
        control.api.delete_raw(path)?;
    }
    result
}

fn run(control: &ControlPlane, node: &Node, kubeconfig: &std::path::Path, own: &str) -> Result<()> {
    let api = &control.api;
    api.create(&service("agents", &json!({ "ports": [{ "port": 10_256 }] }))?)?;
    let agents = json!({
        "endpoints": [{ "addresses": [own] }],
        "ports": [{ "name": "", "port": 10_256, "protocol": "TCP" }],
    });
    api.create(&slice_of("agents-1", "agents", &agents)?)?;
    api.create(&service("gated", &json!({}))?)?;
    let of_others = json!({ "endpoints": [{ "addresses": ["10.9.0.1"] }] });
    api.create(&slice_of("gated-1", "gated", &of_others)?)?;
    let mut agent = node.start_with(&control.agent_kubeconfig(), &["--gate-service", "default/agents"])?;
    agent.says(&["first sync done"])?;
    let log = node.path("gate.log");
    let binary = std::env::var_os("BALLAST_BIN").unwrap_or_else(|| env!("CARGO_BIN_EXE_ballast").into());
    let mut command = Command::new(binary);
    command.args(["gate", "--service", "gated", "--listen", HOOK]);
    command.env("KUBECONFIG", kubeconfig).env("BALLAST_HOST", own).env("BALLAST_ADDRESSES", ADDRESS);
    command.env("BALLAST_POD", "gated-0").env("BALLAST_NAMESPACE", "default");
    let mut gate = Process::start(&mut command, &log)?;
    let says = |text: &str| {
        eventually(PATIENCE, || {
            let said = fs::read_to_string(&log)?;
            ensure!(said.contains(text), "the gate has not said {text:?}:\n{said}");
            Ok(())
        })
    };
    says("has not programmed it")?;
    ensure!(condition(control)?.is_none(), "no node knows the pod");
    let change = |conditions: Value| api.patch::<EndpointSlice>("gated-1", &endpoints(&conditions));
    change(json!({ "ready": false, "serving": false }))?;
    says("the condition is set")?;
    ensure!(condition(control)?.as_deref() == Some("True"), "{:?}", condition(control));
    gate.is_alive()?;
    change(json!({ "ready": true }))?;
    eventually(PATIENCE, || {
        let (_, body) = agent.asks("/programmed/default/gated")?;
        let slice: Value = serde_json::from_str(
            &api.get_raw("/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/gated-1")?,
        )?;
        let version = slice["metadata"]["resourceVersion"].as_str().context("no version")?;
        ensure!(body.contains(version), "{body} is not {version}");
        Ok(())
    })?;
    let mut hook = TcpStream::connect(HOOK)?;
    write!(hook, "GET /removed HTTP/1.1\r\nHost: pod\r\nConnection: close\r\n\r\n")?;
    hook.set_read_timeout(Some(Duration::from_secs(2)))?;
    ensure!(hook.read(&mut [0; 512]).is_err(), "nodes select the pod");
    change(json!({ "ready": false, "serving": true, "terminating": true }))?;
    hook.set_read_timeout(Some(PATIENCE))?;
    let mut answer = String::new();
    hook.read_to_string(&mut answer)?;
    ensure!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    gate.kill()?;
    agent.is_well()
}

/// Returns an address of this machine that is no loopback address.
fn own_address() -> Result<String> {
    let output = Command::new("ip").args(["-4", "-o", "addr", "show", "scope", "global"]).output()?;
    let text = String::from_utf8(output.stdout)?;
    let address =
        text.lines().find_map(|line| line.split_whitespace().skip_while(|word| *word != "inet").nth(1));
    let address = address.and_then(|address| address.split('/').next());
    Ok(address.context("this machine has no address but loopback")?.to_owned())
}
