use std::collections::BTreeSet;
use std::io::{self, Read as _};

use clap::Parser as _;
use futures::{SinkExt as _, StreamExt as _};
use insta::assert_snapshot;
use k8s_openapi::api::core::v1::Service;
use rstest::rstest;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;

use proxy_watch::api::pod::Pod;

use super::mock::{self, Answers, agents_pod};
use super::*;

/// Returns the standard output and standard error of `ballast`, and whether it succeeds, by node and arguments.
type Says = fn(node: &str, arguments: &[String]) -> (String, String, bool);

/// A mock API server with three agents' pods, whose commands answer as the test defines.
struct Api {
    says: Says,
    objects: Vec<(&'static str, Value)>,
}

impl Answers for Api {
    fn get(&self, path: &str) -> (u16, Value) {
        if path.starts_with("/api/v1/pods?") {
            assert!(path.contains("labelSelector=app.kubernetes.io"), "{path}");
            let running = || ["a", "b", "c"].map(|node| agents_pod(node, &json!([]))).into();
            let given = self.objects.iter().find(|(at, _)| *at == "/api/v1/pods");
            let items = given.map_or_else(running, |(_, items)| items.clone());
            return (200, json!({ "metadata": {}, "items": items }));
        }
        let found = self.objects.iter().find(|(at, _)| path.split('?').next() == Some(at));
        let missing = || json!({ "kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404, "message": path });
        found.map_or_else(|| (404, missing()), |(_, object)| (200, object.clone()))
    }

    /// Serves `pods/exec`: the output of a command and its status, on channels 1 to 3.
    async fn session(&self, node: &str, uri: &str, mut socket: WebSocketStream<TcpStream>) -> io::Result<()> {
        assert!(uri.contains("container=ballast"), "{uri}");
        let decode =
            |text: &str| text.replace("%2F", "/").replace("%3A", ":").replace("%3D", "=").replace('+', " ");
        let words = uri.split(['?', '&']).filter_map(|pair| pair.strip_prefix("command=")).map(decode);
        let words: Vec<_> = words.collect();
        assert_eq!(words[0], "ballast");
        let (stdout, stderr, is_well) = (self.says)(node, &words[1..]);
        let status = if is_well { json!({ "status": "Success" }) } else { json!({ "status": "Failure" }) };
        for (channel, text) in [(1, stdout), (2, stderr), (3, status.to_string())] {
            let message = [vec![channel], text.into_bytes()].concat();
            socket.send(Message::Binary(message.into())).await.map_err(io::Error::other)?;
        }
        socket.close(None).await.map_err(io::Error::other)?;
        while socket.next().await.is_some_and(|message| message.is_ok()) {}
        Ok(())
    }
}

/// Runs a command. Returns its output with its messages or its error, and whether all is well.
fn asked(says: Says, objects: &[(&'static str, Value)], words: &[&str]) -> (String, bool) {
    let Outcome { stdout, stderr, is_well } = streams(says, objects, words);
    (stdout + &stderr, is_well)
}

/// Runs a command. Returns what it writes; an error counts as a message.
fn streams(says: Says, objects: &[(&'static str, Value)], words: &[&str]) -> Outcome {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let kubeconfig = runtime.block_on(mock::start(Api { says, objects: objects.to_vec() }, folder.path()));
    let first = ["kubectl-ballast", "--kubeconfig", kubeconfig.to_str().unwrap()];
    let words = first.iter().chain(words);
    let args = KubectlArgs::try_parse_from(words).unwrap();
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let outcome = run(&args, &mut out, &mut err);
    let [out, err] = [out, err].map(|bytes| String::from_utf8(bytes).unwrap());
    match outcome {
        Ok(Outcome { stdout, stderr, is_well }) => {
            Outcome { stdout: out + &stdout, stderr: err + &stderr, is_well }
        }
        Err(error) => Outcome { stdout: out, stderr: err + &format!("{error}\n"), is_well: false },
    }
}

/// Documentation that shows the output of these commands.
const PAGE: &str = include_str!("../../../docs/kubectl.md");

fn status(node: &str, arguments: &[String]) -> (String, String, bool) {
    assert_eq!(arguments, ["status", "-o", "json"]);
    let problems: &[&str] = match node {
        "a" => &["the map flows is nearly full"],
        "b" => &["the map flows is nearly full", "the agent does not answer"],
        _ => return (String::new(), "ballast: no Ballast maps on the bpffs /sys/fs/bpf\n".to_owned(), false),
    };
    let state = if node == "a" { "ok" } else { "down" };
    let counts = json!({ "ports": 4, "frontends": 6, "unmanaged": 0, "backends": 9, "flows": 12 });
    let document =
        json!({ "ok": false, "agent": { "state": state }, "counts": counts, "problems": problems });
    (document.to_string(), String::new(), false)
}

#[test]
fn the_status_of_all_nodes_and_of_one() {
    let (text, well) = asked(status, &[], &["status"]);
    assert!(!well);
    assert_snapshot!(text);
    assert!(PAGE.contains(&format!("$ kubectl ballast status\n{text}")));
    let (text, _) = asked(status, &[], &["status", "--node", "a", "-o", "json"]);
    let document: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(document["nodes"].as_object().unwrap().keys().collect::<Vec<_>>(), ["a"]);
    assert_eq!(document["nodes"]["a"]["problems"], json!(["the map flows is nearly full"]));
    let (yaml, _) = asked(status, &[], &["status", "--node", "a", "-o", "yaml"]);
    assert!(yaml.contains("nodes:\n  a:\n") && yaml.contains("state: ok\n"), "{yaml}");
    let (text, well) = asked(status, &[], &["status", "--node", "a,x"]);
    assert_eq!(
        (&*text, well),
        ("no agent runs on node x (`kubectl ballast status` lists the nodes)\n", false)
    );
}

#[test]
fn pod_that_does_not_run_has_a_row() {
    let mut pods = ["a", "b", "c"].map(|node| agents_pod(node, &json!([])));
    let waiting = json!([{ "state": { "waiting": { "reason": "ImagePullBackOff" } } }]);
    pods[1]["status"] = json!({ "phase": "Pending", "containerStatuses": waiting });
    // A DaemonSet makes the pod for the node, which has no room for it.
    let terms = json!([{ "matchFields": [{ "key": "metadata.name", "operator": "In", "values": ["c"] }] }]);
    let selected =
        json!({ "requiredDuringSchedulingIgnoredDuringExecution": { "nodeSelectorTerms": terms } });
    pods[2]["spec"] =
        json!({ "hostNetwork": true, "affinity": { "nodeAffinity": selected }, "containers": [] });
    pods[2]["status"] = json!({ "phase": "Pending", "conditions": [{ "reason": "Unschedulable" }] });
    let objects = [("/api/v1/pods", json!(pods))];
    let (b, c) = (
        "pod kube-system/ballast-b is Pending (ImagePullBackOff)\n",
        "pod kube-system/ballast-c is Pending (Unschedulable)\n",
    );
    let (text, well) = asked(status, &objects, &["status"]);
    assert!(!well && text.contains("\nb     no  no answer "), "{text}");
    assert!(text.contains(&format!("b: {b}")) && text.contains(&format!("c: {c}")), "{text}");
    let says: Says = |_, _| (json!({ "ok": true, "checks": [] }).to_string(), String::new(), true);
    let expected = format!("b: no answer: {b}c: no answer: {c}");
    assert_eq!(asked(says, &objects, &["check"]), (expected, false));
    let (text, well) = asked(list, &objects, &["service", "list"]);
    assert!(!well && text.ends_with(&format!("b: {b}c: {c}")), "{text}");
}

#[test]
fn rate_extends_the_request_timeout() {
    let says: Says = |_, _| {
        std::thread::sleep(Duration::from_millis(2500));
        ("rates\n".to_owned(), String::new(), true)
    };
    let flags = ["--request-timeout", "2s", "--node", "a", "stats"];
    assert_eq!(asked(says, &[], &[&flags[..], &["--rate=5s"]].concat()), ("a:\nrates\n".to_owned(), true));
    let (text, well) = asked(says, &[], &flags);
    assert!(!well && text.contains("no answer within 2s"), "{text}");
}

fn list(node: &str, arguments: &[String]) -> (String, String, bool) {
    let (command, selection) = arguments.split_at(4);
    assert_eq!(command, ["service", "list", "-o", "json"]);
    let frontend = |service: &str, address: &str, policy: &str, endpoints: &[&str]| {
        json!({
            "service": service, "type": "ClusterIP", "scope": "internal", "address": address, "protocol": "TCP",
            "verdict": if endpoints.is_empty() { "reject" } else { "forward" },
            "policy": policy, "endpoints": endpoints, "id": 7,
        })
    };
    let web: &[&str] =
        if node == "b" { &["10.0.0.1:80", "10.0.0.9:80"] } else { &["10.0.0.1:80", "10.0.0.2:80"] };
    let local = format!("10.0.1.{}:53", node.as_bytes()[0]);
    let mut all = vec![frontend("default/web:http", "10.96.0.1:80", "Cluster", web)];
    all.push(frontend("default/dns", "10.96.0.2:53", "Local", &[&local]));
    if node != "c" {
        all.push(frontend("default/new", "10.96.0.3:80", "Cluster", &[]));
    }
    let names = || selection.iter().filter(|word| !word.starts_with("--"));
    let is_of = |name: &str, frontend: &Value| {
        let (service, port) = name.split_once(':').unwrap_or((name, "80"));
        let found = frontend["service"].as_str().unwrap().split(':').next().unwrap();
        (found == service || found.ends_with(&format!("/{service}"))) && port == "80"
    };
    if !names().all(|name| all.iter().any(|one| is_of(name, one)))
        || selection.contains(&"--namespace=defualt".to_owned())
    {
        return (String::new(), "not programmed".to_owned(), false);
    }
    all.retain(|one| names().next().is_none() || names().any(|name| is_of(name, one)));
    (json!({ "frontends": all }).to_string(), String::new(), true)
}

#[test]
fn nodes_send_the_selected_services_only() {
    let says: Says = |node, arguments| {
        let is_refused = node == "c" && arguments.len() == 4;
        assert!(is_refused || arguments.ends_with(&["default/new".to_owned()]), "{node}: {arguments:?}");
        list(node, arguments)
    };
    let (text, well) = asked(says, &[], &["service", "list", "default/new"]);
    assert!(well && text.contains(" 2/3* "), "{text}");
    assert!(text.ends_with("* c: default/new 10.96.0.3:80: not programmed\n"), "{text}");
}

#[test]
fn nodes_that_differ_are_marked() {
    let (text, well) = asked(list, &[], &["service", "list"]);
    assert!(well);
    assert_snapshot!(text);
    assert!(PAGE.contains(&format!("$ kubectl ballast service list\n{text}")));
}

#[test]
fn service_list_shows_selected_services_in_each_format() {
    let listed = |words: &[&str]| asked(list, &objects(), &[&["service", "list"], words].concat());
    let (text, well) = listed(&["-n", "default", "web", "-o", "wide"]);
    assert!(well);
    assert_snapshot!(text, @r"
    SERVICE           TYPE       ADDRESS           FOR       POLICY   NODES  ENDPOINTS
    default/web:http  ClusterIP  10.96.0.1:80/TCP  internal  Cluster  2/3*   10.0.0.1:80,10.0.0.2:80
    * b: default/web:http 10.96.0.1:80: does not have 10.0.0.2:80; also has 10.0.0.9:80
    ");
    assert_eq!(listed(&["default/web:80", "default/dns", "-o", "name"]).0, "default/dns\ndefault/web:http\n");
    assert_eq!(listed(&["-A", "web", "-o", "name"]).0, "default/web:http\n");
    let (yaml, _) = listed(&["default/new", "-o", "yaml"]);
    assert!(yaml.contains("service: default/new\n") && !yaml.contains("web"), "{yaml}");
    assert_eq!(listed(&["-l", "app=x"]), ("No Services are programmed.\n".to_owned(), true));
    for (words, error) in [
        (&["default/wbe"] as &[&str], "no Service port default/wbe is programmed; did you mean default/web?"),
        (&["default/web:443"], "no Service port default/web:443 is programmed; did you mean default/web?"),
        (&["web"], "no Service port shop/web is programmed; did you mean default/web?"),
        (&["-n", "defualt"], "no Service of the namespace defualt is programmed; did you mean default?"),
    ] {
        let (text, well) = listed(words);
        assert!(!well && text.starts_with(error), "{text}");
    }
}

#[test]
fn frontends_of_many_nodes_are_compared_once_each() {
    let nodes: PerNode<services::NodeList> = (0..200)
        .map(|node| {
            let words = ["service", "list", "-o", "json"].map(str::to_owned);
            (format!("n{node}"), Ok(serde_json::from_str(&list("a", &words).0).unwrap()))
        })
        .collect();
    services::STATES.set(0);
    let merged = services::merge(&nodes);
    assert_eq!((merged.nodes, merged.frontends.len()), (200, 3));
    assert!(services::STATES.get() <= 4 * 200 * 3, "{}", services::STATES.get());
}

#[test]
fn node_with_another_verdict_is_listed_as_different() {
    let says: Says = |node, arguments| {
        let (text, message, well) = list(node, arguments);
        (if node == "b" { text.replace("reject", "pass") } else { text }, message, well)
    };
    let (text, _) = asked(says, &[], &["service", "list", "default/new"]);
    assert!(text.contains("\n* b: default/new 10.96.0.3:80: passes clients\n"), "{text}");
    let (text, _) = asked(says, &[], &["service", "list", "default/new", "--node", "b"]);
    assert!(text.contains(" <none> (passes)\n"), "{text}");
}

#[test]
fn silent_node_is_reported_and_the_others_are_compared() {
    let says: Says = |node, arguments| {
        if node == "a" { (String::new(), "ballast: denied".into(), false) } else { list(node, arguments) }
    };
    let (text, well) = asked(says, &[], &["svc", "ls", "-o", "json"]);
    let merged: Value = serde_json::from_str(&text).unwrap();
    assert!(!well);
    assert_eq!((&merged["nodes"], &merged["silent"]), (&json!(2), &json!({ "a": "ballast: denied" })));
}

const WEB: &str = "/api/v1/namespaces/shop/services/web";

fn web() -> Value {
    json!({
        "metadata": { "name": "web", "namespace": "shop", "resourceVersion": "90" },
        "spec": { "clusterIP": "10.96.0.7", "ports": [{ "name": "http", "port": 80 }, { "name": "dns", "port": 53, "protocol": "UDP" }] },
    })
}

fn objects() -> Vec<(&'static str, Value)> {
    let named = |name: &str, edition: &str| {
        json!({
            "metadata": { "name": name, "namespace": "shop", "resourceVersion": edition },
            "addressType": "IPv4", "endpoints": [],
        })
    };
    vec![
        (WEB, web()),
        ("/api/v1/namespaces/shop/services", json!({ "metadata": {}, "items": [web()] })),
        (
            "/apis/discovery.k8s.io/v1/namespaces/shop/endpointslices",
            json!({ "metadata": {}, "items": [named("web-1", "101"), named("web-2", "99")] }),
        ),
        (
            "/api/v1/namespaces/shop/pods/client",
            json!({ "metadata": { "name": "client" }, "spec": { "nodeName": "b", "containers": [] } }),
        ),
        ("/api/v1/services", json!({ "metadata": {}, "items": [web()] })),
    ]
}

#[test]
fn names_are_resolved_and_the_clients_node_is_asked() {
    let says: Says =
        |node, arguments| (format!("asked {node}: {}\n", arguments.join(" ")), String::new(), true);
    let explain = |client, destination| asked(says, &objects(), &["explain", client, destination]);
    assert_eq!(
        explain("pod/client", "svc/web:http"),
        (
            "pod shop/client on node b connects to 10.96.0.7:80/tcp\nasked b: explain pod 10.96.0.7:80/tcp\n"
                .to_owned(),
            true
        )
    );
    let (text, _) = explain("node/c", "svc/shop/web:53");
    assert_eq!(
        text,
        "a process of node c on node c connects to 10.96.0.7:53/udp\nasked c: explain host 10.96.0.7:53/udp\n"
    );
    let (text, well) = explain("pod/client", "svc/wbe:80");
    assert_eq!((&*text, well), ("there is no Service shop/wbe; did you mean web?\n", false));
    let (text, _) = explain("pod/client", "web:80/udp");
    assert!(text.ends_with("asked b: explain pod shop/web:80/UDP\n"), "{text}");
    let (text, _) = asked(says, &objects(), &["explain", "node/c", "web", "-n", "db"]);
    assert!(text.ends_with("asked c: explain host db/web\n"), "{text}");
    let (text, _) = asked(says, &objects(), &["explain", "192.0.2.1", "10.96.0.7:80", "--node", "a"]);
    assert_eq!(
        text,
        "192.0.2.1 on node a connects to 10.96.0.7:80\nasked a: explain 192.0.2.1 10.96.0.7:80\n"
    );
}

fn programmed(node: &str, arguments: &[String]) -> (String, String, bool) {
    assert_eq!(arguments, ["programmed", "shop/web", "-o", "json"]);
    let slice = |name: &str, edition: &str| json!({ "name": name, "resourceVersion": edition });
    let first = if node == "b" { "98" } else { "101" };
    let document = json!({
        "resourceVersion": "90", "current": true, "problems": [],
        "endpointSlices": [slice("web-1", first), slice("web-2", "100")],
    });
    match node {
        "c" => (String::new(), "ballast: no Service shop/web is programmed on c\n".to_owned(), false),
        _ => (json!({ "services": [document] }).to_string(), String::new(), true),
    }
}

#[test]
fn a_wait_ends_when_each_node_serves_it_and_names_those_that_lag() {
    let (text, well) = asked(programmed, &objects(), &["wait", "service/web", "--programmed", "--node", "a"]);
    assert!(
        well && text.starts_with(
            "service/web programmed: resourceVersion 90 and 2 EndpointSlices programmed on 1 node after"
        ),
        "{text}"
    );
    let (text, well) =
        asked(programmed, &objects(), &["wait", "svc/shop/web", "--programmed", "--timeout", "1s"]);
    assert!(!well);
    assert_eq!(
        text,
        "timed out after 1s: the current version of service/web is not programmed on 2 of 3 nodes\n\
         b: has resourceVersion 98 of EndpointSlice web-1, not 101\n\
         c: no Service shop/web is programmed on c\n"
    );
    assert!(asked(programmed, &objects(), &["wait", "web", "--programmed", "--node", "a"]).1);
    let (text, well) = asked(programmed, &objects(), &["wait", "deployment/web", "--programmed"]);
    assert!(!well && text.contains("\"deployment/web\" is not a Service"), "{text}");
}

#[rstest]
#[case("90", "101", true, None)]
#[case("91", "200", true, None)]
#[case("89", "101", true, Some("has resourceVersion 89 of the Service, not 90"))]
#[case("9", "101", true, Some("has resourceVersion 9 of the Service, not 90"))]
#[case("90", "101", false, Some("cannot program the current version: no room"))]
fn editions_are_compared_as_numbers(
    #[case] service: &str,
    #[case] slice: &str,
    #[case] current: bool,
    #[case] expected: Option<&str>,
) {
    let slices = [("web-1".to_owned(), "101".to_owned())].into();
    let wanted = wait::ExpectedVersions { service: "90".to_owned(), slices };
    let document = json!({
        "resourceVersion": service, "current": current, "problems": ["no room"],
        "endpointSlices": [{ "name": "web-1", "resourceVersion": slice }, { "name": "left", "resourceVersion": null }],
    });
    let document = json!({ "services": [document] });
    let answer = Outcome { stdout: document.to_string(), stderr: String::new(), is_well: true };
    assert_eq!(wait::behind(&wanted, &Ok(answer)).as_deref(), expected);
}

#[test]
fn events_of_all_nodes_are_one_stream() {
    let says: Says = |node, arguments| {
        let expected =
            ["--sample=0", "--timeout=5s", "--reason=no_endpoint", "--kind=drop", "--end-with-stdin"];
        assert_eq!(arguments[0], "monitor");
        assert!(expected.iter().all(|flag| arguments.iter().any(|word| word == flag)), "{arguments:?}");
        let line = match arguments.get(1).map(String::as_str) {
            Some("--output=json" | "--output=yaml") => r#"{"kind":"drop"}"#.to_owned(),
            Some("--output=otlp") => r#"{"resourceLogs":[{"resource":{"attributes":[]}}]}"#.to_owned(),
            _ => format!("drop at {node}"),
        };
        match node {
            "c" => (String::new(), "ballast: no maps\n".to_owned(), false),
            _ => (format!("{line}\n"), String::new(), true),
        }
    };
    let flags = ["monitor", "--sample", "0", "--timeout", "5s", "--reason", "no_endpoint", "--kind", "drop"];
    let lines = |more: &[&str]| {
        let Outcome { stdout, stderr, is_well } = streams(says, &[], &[&flags, more].concat());
        assert_eq!((&*stderr, is_well), ("c: ballast: no maps\n", false));
        stdout.lines().map(str::to_owned).collect::<BTreeSet<_>>()
    };
    assert_eq!(lines(&[]), ["a  drop at a".to_owned(), "b  drop at b".to_owned()].into());
    let one = streams(says, &[], &[&flags[..], &["--count", "1", "--node", "a,b"]].concat());
    assert_eq!((one.stdout.lines().count(), one.is_well), (1, true));
    let node = |node: &str| format!(r#"{{"kind":"drop","node":"{node}"}}"#);
    assert_eq!(lines(&["-o", "json"]), [node("a"), node("b")].into());
    let document = |node: &str| {
        format!(
            r#"{{"resourceLogs":[{{"resource":{{"attributes":[{{"key":"k8s.node.name","value":{{"stringValue":"{node}"}}}}]}}}}]}}"#
        )
    };
    assert_eq!(lines(&["-o", "otlp"]), [document("a"), document("b")].into());
}

fn parse<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

#[rstest]
#[case(Some("80"), Ok("10.96.0.7:80/tcp"))]
#[case(Some("dns"), Ok("10.96.0.7:53/udp"))]
#[case(None, Ok("10.96.0.7:80/tcp"))]
#[case(Some("81"), Err("give one of its ports: 80/tcp (http), 53/udp (dns)"))]
#[case(Some("53/tcp"), Err("give one of its ports: 80/tcp (http), 53/udp (dns)"))]
fn a_port_is_found(#[case] port: Option<&str>, #[case] expected: Result<&str, &str>) {
    let service: Service = parse(web());
    assert_eq!(names::address(&service, port).as_deref().map_err(|error| &**error), expected);
}

#[test]
fn a_mistyped_node_gets_the_nearest() {
    let agent = |node: &str| Agent {
        node: node.into(),
        namespace: "kube-system".into(),
        pod: "p".into(),
        metrics_port: 10_249,
        absent: None,
    };
    let agents = vec![agent("worker-2"), agent("worker-1"), agent("control")];
    let error = cluster::select(agents.clone(), &["worker-11".to_owned()]).unwrap_err().to_string();
    assert_eq!(
        error,
        "no agent runs on node worker-11; did you mean worker-1 or worker-2? (`kubectl ballast status` lists the nodes)"
    );
    let one = cluster::select(agents, &["control".to_owned()]).unwrap();
    assert_eq!(one, [agent("control")]);
    let none = cluster::select(Vec::new(), &[]).unwrap_err().to_string();
    assert!(none.contains("check that Ballast is installed"), "{none}");
}

#[test]
fn agents_in_several_namespaces_are_refused() {
    let pod = |name: &str, namespace: &str, network: bool| {
        let mut pod = agents_pod("a", &json!([]));
        pod["metadata"] = json!({ "name": name, "namespace": namespace });
        pod["spec"]["hostNetwork"] = json!(network);
        pod
    };
    let found = |pods: &[Value]| {
        let agents = pods.iter().cloned().map(parse).filter_map(cluster::agent).collect();
        let names = |agents: Vec<Agent>| agents.into_iter().map(|agent| agent.pod).collect::<Vec<_>>();
        cluster::select(agents, &[]).map(names).map_err(|error| error.to_string())
    };
    let real = pod("real", "kube-system", true);
    let rollout = pod("second", "kube-system", true);
    assert_eq!(found(&[rollout, real.clone()]), Ok(vec!["real".to_owned()]));
    assert_eq!(found(&[pod("fake", "tenant", false), real.clone()]), Ok(vec!["real".to_owned()]));
    let error = found(&[pod("fake", "tenant", true), real]).unwrap_err();
    assert!(error.contains("(kube-system, tenant)") && error.contains("--agents-namespace"), "{error}");
}

/// Runs `status` with the API server at this URL; returns the error.
fn refused_by(server: &str, flags: &[&str]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let kubeconfig = folder.path().join("config");
    let text = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "x",
        "clusters": [{ "name": "x", "cluster": { "server": server } }],
        "contexts": [{ "name": "x", "context": { "cluster": "x", "user": "x" } }],
        "users": [{ "name": "x", "user": {} }],
    });
    std::fs::write(&kubeconfig, text.to_string()).unwrap();
    let words = ["kubectl-ballast", "--kubeconfig", kubeconfig.to_str().unwrap(), "status"];
    let args = KubectlArgs::parse_from(words.iter().chain(flags));
    run(&args, &mut Vec::new(), &mut Vec::new()).unwrap_err().to_string()
}

#[test]
fn silent_or_overloaded_api_server_is_an_error_at_once() {
    let listen = || {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        (listener, url)
    };
    let (_silent, url) = listen();
    let error = refused_by(&url, &["--request-timeout", "1s"]);
    let expected = format!("the API server {url} does not answer (no answer within 1s (--request-timeout)");
    assert!(error.starts_with(&expected), "{error}");
    let (listener, url) = listen();
    std::thread::spawn(move || {
        for (number, stream) in listener.incoming().enumerate() {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let status = json!({ "kind": "Status", "status": "Failure", "code": 503, "message": format!("refusal {number}") });
            let (body, head) =
                (status.to_string(), "HTTP/1.1 503 X\r\nContent-Type: application/json\r\nRetry-After: 1");
            write!(stream, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
        }
    });
    let error = refused_by(&url, &[]);
    assert_eq!(error, format!("cannot list the agents' pods: the API server {url} answers 503: refusal 0"));
}

#[test]
fn unreachable_api_server_is_named_with_the_way_out() {
    let error = refused_by("http://127.0.0.1:1", &[]);
    assert!(error.starts_with("the API server http://127.0.0.1:1 does not answer ("), "{error}");
    assert!(
        error.ends_with("); check --kubeconfig and --context") && !error.contains("ServiceError"),
        "{error}"
    );
    let refused = kube::core::Status::failure("pods is forbidden", "Forbidden").with_code(403);
    let error = KubectlError::api("x", "list pods", &kube::Error::Api(refused.boxed())).to_string();
    assert_eq!(error, "cannot list pods: pods is forbidden; the user needs the rights in docs/kubectl.md");
    let expired = kube::core::Status::failure("Unauthorized", "Unauthorized").with_code(401);
    let error = KubectlError::api("x", "list pods", &kube::Error::Api(expired.boxed())).to_string();
    assert!(error.contains("(401)") && error.contains("check --kubeconfig"), "{error}");
    let no_json = kube::Error::SerdeError(serde_json::from_str::<u8>("<html>").unwrap_err());
    let error = KubectlError::api("https://x", "list pods", &no_json).to_string();
    assert!(error.starts_with("the API server https://x does not answer (Error deserializing"), "{error}");
}

#[test]
fn destination_without_address_or_node_is_an_error() {
    let headless: Service = parse(json!({ "spec": { "clusterIP": "None" } }));
    assert!(names::address(&headless, None).unwrap_err().contains("headless"));
    let pending: Pod = parse(json!({ "metadata": {}, "spec": { "containers": [] } }));
    assert!(names::of_pod("a", "b", pending).unwrap_err().to_string().contains("pod a/b is not scheduled"));
    let host: Pod =
        parse(json!({ "metadata": {}, "spec": { "containers": [], "nodeName": "n", "hostNetwork": true } }));
    assert_eq!(names::of_pod("a", "b", host).unwrap().is, "host");
}

#[test]
fn records_of_opentelemetry_get_their_node() {
    let document = |node: &str| {
        format!(
            r#"{{"resourceLogs":[{{"resource":{{"attributes":[{{"key":"service.name","value":{{"stringValue":"ballast"}}}},{{"key":"k8s.node.name","value":{{"stringValue":"{node}"}}}}]}},"scopeLogs":[]}}]}}"#
        )
    };
    assert_eq!(stream::with_node_attribute("node-1", &document("other")), document("node-1"));
    assert_eq!(stream::with_node_attribute("node-1", "no document"), "no document");
}

#[test]
fn a_list_of_each_node_takes_the_arguments_of_the_command_on_a_node() {
    let says: Says = |node, arguments| {
        let expected = [
            "flow",
            "list",
            "--output=text",
            "--sort-by=age",
            "--client=10.0.0.0/24",
            "--expired",
            "--namespace=shop",
            "shop/web",
        ];
        assert_eq!(arguments, expected);
        match node {
            "a" => ("PROTO  CLIENT\nTCP    10.0.0.7:1\n".to_owned(), String::new(), true),
            "b" => (String::new(), "No connections.\n".to_owned(), true),
            _ => (String::new(), "ballast: no Service port shop/web is programmed\n".to_owned(), false),
        }
    };
    let words = ["flow", "list", "web", "-n", "shop", "-s", "10.0.0.0/24", "--sort-by", "age", "--expired"];
    let Outcome { stdout, stderr, is_well } = streams(says, &[], &words);
    assert!(!is_well);
    assert_eq!(stdout, "a:\nPROTO  CLIENT\nTCP    10.0.0.7:1\n");
    assert_eq!(stderr, "b: No connections.\nc: ballast: no Service port shop/web is programmed\n");
    let says: Says = |node, arguments| {
        assert_eq!(arguments, ["stats", "--output=json"]);
        (json!({ "services": [{ "service": node }] }).to_string(), String::new(), true)
    };
    let (text, well) = asked(says, &[], &["stats", "-o", "json"]);
    let document: Value = serde_json::from_str(&text).unwrap();
    assert!(well && document["nodes"]["b"]["services"][0]["service"] == "b", "{document}");
    let says: Says = |node, _| (format!("both\n{node}\n"), String::new(), true);
    let (text, _) = asked(says, &[], &["backend", "list", "-o", "name"]);
    assert_eq!(text, "a\nb\nboth\nc\n");
}

#[test]
fn flags_without_meaning_for_a_command_are_errors() {
    let error = |words: &str| {
        let words = ["kubectl-ballast"].into_iter().chain(words.split(' '));
        KubectlArgs::try_parse_from(words).unwrap_err().to_string()
    };
    for words in ["status -n shop", "check -n shop", "sysdump -n shop", "ui -n shop", "map list -n shop"] {
        assert!(error(words).contains("unexpected argument '-n'"), "{}", error(words));
    }
    for words in ["stats --bpffs /x", "service list --master https://a", "check --pre"] {
        let flag = words.split(' ').find(|word| word.starts_with("--")).unwrap();
        assert!(
            error(words).contains(&format!("{flag} is only for `ballast` on a node")),
            "{}",
            error(words)
        );
    }
}

#[test]
fn list_without_headings_has_the_node_in_front_of_each_row() {
    let says: Says = |node, arguments| {
        assert!(arguments.contains(&"--no-headers".to_owned()), "{arguments:?}");
        (format!("row 1 of {node}\nrow 2\n"), String::new(), true)
    };
    let (text, _) = asked(says, &[], &["stats", "--no-headers", "--node", "a,b"]);
    assert_eq!(text, "a  row 1 of a\na  row 2\nb  row 1 of b\nb  row 2\n");
}

#[test]
fn status_has_wide_columns_names_and_no_headings() {
    let says: Says = |node, _| {
        let attachments = json!([{ "attached": true }, { "attached": node == "a" }]);
        let counts = json!({ "ports": 1, "frontends": 2, "backends": 3, "flows": 4 });
        let document = json!({
            "ok": true, "agent": { "state": "ok" }, "counts": counts, "problems": [],
            "attachments": attachments, "resident": 3 << 20,
        });
        (document.to_string(), String::new(), true)
    };
    let (text, well) = asked(says, &[], &["status", "-o", "wide", "--node", "a,b"]);
    assert!(well);
    assert_snapshot!(text, @r"
    NODE  OK   AGENT  PORTS  ADDRESSES  ENDPOINTS  FLOWS  PROGRAMS   MEMORY  PROBLEMS
    a     yes  ok         1          2          3      4       2/2  3.0 MiB         0
    b     yes  ok         1          2          3      4       1/2  3.0 MiB         0
    ");
    assert_eq!(asked(says, &[], &["status", "-o", "name"]).0, "a\nb\nc\n");
    let (text, _) = asked(says, &[], &["status", "--no-headers", "--node", "b"]);
    assert!(text.starts_with("b  yes  ok ") && text.lines().count() == 1, "{text}");
    let (json, _) = asked(says, &[], &["status", "-o", "json", "--node", "b"]);
    let document: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(document["nodes"]["b"]["resident"], 3 << 20);
}

#[test]
fn watched_table_of_all_nodes_prints_only_rows_that_change() {
    static ROUND: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    struct Rows(Vec<u8>);
    impl Write for Rows {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            if ROUND.load(std::sync::atomic::Ordering::SeqCst) > 3 {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            Ok(())
        }
    }
    let says: Says = |_, _| {
        let round = ROUND.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        // The second round is equal to the first one, the third one is not, and the fourth one ends the command.
        let state = if round < 2 { "ok" } else { "down" };
        let document = json!({ "ok": true, "agent": { "state": state }, "problems": [] });
        (document.to_string(), String::new(), true)
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let kubeconfig = runtime.block_on(mock::start(Api { says, objects: Vec::new() }, folder.path()));
    let words =
        ["kubectl-ballast", "--kubeconfig", kubeconfig.to_str().unwrap(), "status", "--node", "a", "-w"];
    let args = KubectlArgs::try_parse_from(words.into_iter().chain(["--interval", "1ms"])).unwrap();
    let mut out = Rows(Vec::new());
    run(&args, &mut out, &mut Vec::new()).unwrap_err();
    let text = String::from_utf8(out.0).unwrap();
    let rows: Vec<_> =
        text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    assert_eq!(rows[0], "NODE OK AGENT PORTS ADDRESSES ENDPOINTS FLOWS PROBLEMS");
    assert_eq!(rows[1..], ["a yes ok - - - - 0", "a yes down - - - - 0"]);
}

#[test]
fn version_shows_this_program_and_that_of_each_node() {
    let says: Says = |node, arguments| {
        assert_eq!(arguments, ["version", "-o", "json"]);
        let agent = json!({ "version": (node != "b").then_some("1.2.2"), "address": "127.0.0.1:10249" });
        let document = json!({ "version": "1.2.3", "abi": 4, "agent": agent });
        if node == "c" {
            (String::new(), "denied\n".to_owned(), false)
        } else {
            (document.to_string(), String::new(), true)
        }
    };
    let Outcome { stdout, stderr, is_well } = streams(says, &[], &["version"]);
    assert!(stdout.starts_with("kubectl-ballast "), "{stdout}");
    assert!(stdout.contains("\na     1.2.3    4    1.2.2\nb     1.2.3    4    no answer\n"), "{stdout}");
    assert_eq!((&*stderr, is_well), ("c: denied\n", false));
    let words = ["kubectl-ballast", "--kubeconfig", "/nonexistent/config", "version", "-o", "json"];
    let args = KubectlArgs::parse_from(words);
    let Outcome { stdout, stderr, is_well } = run(&args, &mut Vec::new(), &mut Vec::new()).unwrap();
    let own: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((&own["version"], is_well), (&json!(env!("CARGO_PKG_VERSION")), false));
    assert_eq!(stderr.matches("/nonexistent/config").count(), 1, "{stderr}");
}

#[test]
fn watched_list_has_the_node_in_front_of_each_row_and_one_heading() {
    let says: Says = |node, arguments| {
        let flags = ["--watch", "--end-with-stdin", "--output-watch-events"];
        assert!(flags.iter().all(|flag| arguments.iter().any(|one| one == flag)), "{arguments:?}");
        let rows = if arguments[1] == "--output=json" {
            r#"{"type":"ADDED","object":{}}"#.to_owned()
        } else {
            format!("EVENT  SERVICE\nADDED  of/{node}")
        };
        (rows + "\n", String::new(), true)
    };
    let watched = |words: &[&str]| {
        let (text, well) = asked(says, &[], &[&["stats", "-w", "--output-watch-events"], words].concat());
        assert!(well);
        text
    };
    let text = watched(&[]);
    assert!(text.starts_with("NODE  EVENT  SERVICE\n"), "{text}");
    let rows: BTreeSet<_> = text.lines().skip(1).collect();
    assert_eq!(rows, ["a     ADDED  of/a", "b     ADDED  of/b", "c     ADDED  of/c"].into());
    let text = watched(&["-o", "json", "--node", "a"]);
    assert_eq!(text, "{\"node\":\"a\",\"object\":{},\"type\":\"ADDED\"}\n");
    let text = watched(&["-o", "yaml", "--node", "a"]);
    assert!(text.starts_with("---\n") && text.contains("node: a\n"), "{text}");
}

#[test]
fn name_without_namespace_is_in_the_namespace_of_the_context() {
    let says: Says = |_, arguments| (arguments.join(" ") + "\n", String::new(), true);
    let words = |words: &[&str]| {
        let (text, _) = asked(says, &[], &[words, &["--node", "a"]].concat());
        text.lines().last().unwrap().to_owned()
    };
    assert!(words(&["stats", "svc/web:http"]).ends_with("--output=text shop/web:http"));
    assert!(words(&["backend", "list", "web", "db/web"]).ends_with("shop/web db/web"));
    assert!(words(&["flow", "list", "-A", "web"]).ends_with("--all-namespaces web"));
    assert!(words(&["flow", "list", "--proto", "udp"]).contains("--protocol=udp"));
    let monitored = words(&["monitor", "web", "-l", "app=x", "--pid", "7"]);
    assert!(monitored.contains("--pid=7 --selector=app=x shop/web"), "{monitored}");
    assert!(monitored.contains("--timeout=3600s"), "{monitored}");
    assert!(words(&["stats", "--rate"]).ends_with("--rate=1s"));
    assert!(words(&["flow", "list", "--expired=true"]).ends_with("--expired"));
    assert!(words(&["flow", "list", "--expired=false"]).ends_with("--expired=false"));
    assert!(words(&["service", "show", "web"]).ends_with("service show --output=text shop/web"));
    assert!(words(&["programmed", "-A"]).ends_with("programmed --output=text --all-namespaces"));
    assert!(words(&["map", "dump", "flows"]).ends_with("map dump --output=text flows"));
    assert!(words(&["top", "--screen", "drops"]).ends_with("top --once --output=text --screen=drops"));
    assert!(words(&["stats", "web", "-n", "db", "-A"]).ends_with("--all-namespaces web"));
    assert!(words(&["stats", "-n", "db"]).ends_with("--namespace=db"));
    assert!(words(&["stats", "shop/web", "-n", "db"]).contains("is not in the namespace db"));
}

#[test]
fn commands_of_which_every_node_fails_write_only_to_standard_error_and_fail() {
    let says: Says = |_, _| (String::new(), "ballast: denied\n".to_owned(), false);
    let denied = "a: ballast: denied\nb: ballast: denied\nc: ballast: denied\n";
    for words in [
        &["service", "list"] as &[&str],
        &["stats"],
        &["backend", "list", "-o", "name"],
        &["explain", "192.0.2.1", "10.96.0.7:80"],
    ] {
        let Outcome { stdout, stderr, is_well } = streams(says, &[], words);
        assert_eq!((&*stdout, &*stderr, is_well), ("", denied, false), "{words:?}");
    }
    let Outcome { stdout, stderr, is_well } = streams(says, &[], &["monitor"]);
    assert_eq!((&*stdout, stderr.lines().count(), is_well), ("", 3, false));
    let says: Says = |_, _| (String::new(), String::new(), false);
    let silent = "a: `ballast` failed in the agent's pod\n";
    assert_eq!(streams(says, &[], &["stats", "--node", "a"]).stderr, silent);
    let says: Says = |_, _| (json!({ "frontends": [] }).to_string(), String::new(), true);
    let Outcome { stdout, stderr, is_well } = streams(says, &[], &["service", "list"]);
    assert_eq!((&*stdout, &*stderr, is_well), ("", "No Services are programmed.\n", true));
}

#[test]
fn checks_of_all_nodes_are_merged() {
    let says: Says = |node, arguments| {
        assert_eq!(arguments, ["check", "--output=json"]);
        let line = |check: &str, outcome: &str| json!({ "check": check, "outcome": outcome, "seen": "s", "advice": "do" });
        let checks = [line("bpf-jit", "warn"), line("maps", if node == "b" { "fail" } else { "pass" })];
        (json!({ "ok": node != "b", "checks": checks }).to_string(), String::new(), node != "b")
    };
    let (text, well) = asked(says, &[], &["check"]);
    assert_eq!((&*text, well), ("b: fail maps: s; do\nall nodes: warn bpf-jit: s; do\n", false));
    let (text, well) = asked(says, &[], &["check", "--node", "a", "-o", "json"]);
    let document: Value = serde_json::from_str(&text).unwrap();
    assert!(well && document["nodes"]["a"]["ok"] == true, "{document}");
    let (text, _) = asked(says, &[], &["check", "--node", "a", "-o", "wide"]);
    assert_eq!(text, "a: pass maps: s; do\na: warn bpf-jit: s; do\n");
    assert_eq!(asked(says, &[], &["check", "-o", "name"]).0, "bpf-jit\nmaps\n");
    let (yaml, _) = asked(says, &[], &["check", "--node", "a", "-o", "yaml"]);
    assert!(yaml.contains("nodes:\n  a:\n"), "{yaml}");
}

#[test]
fn sysdump_with_one_failed_node_has_other_archives_and_its_error() {
    let says: Says = |node, arguments| {
        assert_eq!(arguments, ["sysdump", "-"]);
        let why = if node == "b" { "no room" } else { "" };
        (format!("archive of {node}"), why.to_owned(), node != "b")
    };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("all.tar");
    let (text, well) = asked(says, &[], &["sysdump", file.to_str().unwrap()]);
    assert_eq!((text, well), (format!("{}: archives of 2 nodes\nb: no room\n", file.display()), false));
    let mut archive = tar::Archive::new(std::fs::File::open(&file).unwrap());
    let mut parts = std::collections::BTreeMap::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let path = entry.path().unwrap().into_owned();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        parts.insert(name, io::read_to_string(&mut entry).unwrap());
    }
    let expected =
        [("a.tar.gz", "archive of a"), ("c.tar.gz", "archive of c"), ("failures.txt", "b: no room\n")];
    assert!(parts.iter().map(|(name, text)| (&**name, &**text)).eq(expected), "{parts:?}");
}
