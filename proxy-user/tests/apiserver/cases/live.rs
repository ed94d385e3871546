//! Objects are created, changed and removed.

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use serde_json::{Value, json};

use super::{service, slice, slice_of};
use crate::agent::{NODE, Node};
use crate::oracle::{Table, agree};
use proxy_testbed::kube::control::ControlPlane;
use proxy_testbed::kube::{PATIENCE, eventually};

/// Returns the endpoints that can be selected for `orig_dst`; `None` if that is no frontend.
fn endpoints(table: &Table, orig_dst: &str) -> Option<Vec<String>> {
    Some(table.get(orig_dst)?.endpoints.iter().map(ToString::to_string).collect())
}

pub fn objects_from_before_and_while_it_runs(control: &mut ControlPlane, node: &Node) -> Result<()> {
    let api = &control.api;
    api.create(&service("before", &json!({ "clusterIP": "10.96.1.1" }))?)?;
    api.create(&slice("before-1", "before", &["10.1.0.1", "10.1.0.2"])?)?;
    let mut agent = node.start()?;
    agent.says(&["first sync done"])?;
    let table = agree(api, node)?;
    ensure!(
        endpoints(&table, "10.96.1.1:80/TCP") == Some(vec!["10.1.0.1:8080".into(), "10.1.0.2:8080".into()])
    );
    ensure!(endpoints(&table, "10.96.0.1:443/TCP") == Some(vec!["192.0.2.1:6443".into()]));

    // Creates a slice before its Service: the order of events of two watches is not defined.
    api.create(&slice("while-1", "while", &["10.1.1.1"])?)?;
    api.create(&service("while", &json!({ "clusterIP": "10.96.1.2", "sessionAffinity": "ClientIP" }))?)?;
    api.create(&slice("while-2", "while", &["10.1.1.2"])?)?;
    let table = agree(api, node)?;
    ensure!(
        endpoints(&table, "10.96.1.2:80/TCP") == Some(vec!["10.1.1.1:8080".into(), "10.1.1.2:8080".into()])
    );
    ensure!(table["10.96.1.2:80/TCP"].affinity == 10_800, "three hours are the API's default");

    api.patch::<EndpointSlice>(
        "while-1",
        &json!({ "endpoints": [
            { "addresses": ["10.1.1.3"], "nodeName": "node-a" },
            { "addresses": ["10.1.1.4"], "conditions": { "ready": false, "serving": true, "terminating": true } },
            { "addresses": ["10.1.1.5"], "conditions": { "ready": false, "serving": false } },
        ] }),
    )?;
    api.patch::<Service>("before", &json!({ "spec": { "ports": [{ "port": 81, "targetPort": 8080 }] } }))?;
    let table = agree(api, node)?;
    ensure!(
        endpoints(&table, "10.96.1.2:80/TCP") == Some(vec!["10.1.1.2:8080".into(), "10.1.1.3:8080".into()])
    );
    ensure!(
        endpoints(&table, "10.96.1.1:80/TCP").is_none() && endpoints(&table, "10.96.1.1:81/TCP").is_some()
    );

    api.delete::<EndpointSlice>("while-1")?;
    api.delete::<Service>("before")?;
    let table = agree(api, node)?;
    ensure!(endpoints(&table, "10.96.1.2:80/TCP") == Some(vec!["10.1.1.2:8080".into()]));
    ensure!(!table.values().any(|answer| answer.name.contains("before")));

    api.delete::<EndpointSlice>("while-2")?;
    let table = agree(api, node)?;
    ensure!(endpoints(&table, "10.96.1.2:80/TCP") == Some(vec![]), "a Service without endpoints refuses");
    agent.is_well()
}

pub fn kinds_of_services(control: &mut ControlPlane, node: &Node) -> Result<()> {
    let api = &control.api;
    let foreign = json!({ "service.kubernetes.io/service-proxy-name": "other" });
    let headless = json!({ "service.kubernetes.io/headless": "" });
    let labelled = |name: &str, labels: &Value| -> Result<Service> {
        let mut service = service(name, &json!({}))?;
        service.metadata.labels = serde_json::from_value(labels.clone())?;
        Ok(service)
    };
    let dual = json!({
        "ipFamilyPolicy": "RequireDualStack",
        "clusterIP": "10.96.2.1",
        "clusterIPs": ["10.96.2.1", "fd96::2:1"],
        "ports": [
            { "name": "web", "port": 80, "targetPort": "http" },
            { "name": "dns", "port": 53, "protocol": "UDP" },
            { "name": "sctp", "port": 99, "protocol": "SCTP" },
        ],
    });
    api.create_all(&[
        service("dual", &dual)?,
        service("local", &json!({ "clusterIP": "10.96.2.2", "internalTrafficPolicy": "Local" }))?,
        service("headless", &json!({ "clusterIP": "None" }))?,
        service("name", &json!({ "type": "ExternalName", "externalName": "example.org" }))?,
        labelled("foreign", &foreign)?,
        labelled("marked", &headless)?,
    ])?;
    let ports = json!([
        { "name": "web", "port": 8080, "protocol": "TCP" },
        { "name": "dns", "port": 5353, "protocol": "UDP" },
        { "name": "sctp", "port": 9999, "protocol": "SCTP" },
    ]);
    // A named target port may have another number in another pod.
    let other_ports = json!([{ "name": "web", "port": 9090, "protocol": "TCP" }]);
    let v6 = json!([{ "addresses": ["fd44::1"] }, { "addresses": ["fd44::2"] }]);
    let away = json!([{ "addresses": ["10.1.2.9"], "nodeName": "node-b" }]);
    let mut not_ours = slice("dual-3", "dual", &["10.1.2.66"])?;
    not_ours
        .metadata
        .labels
        .get_or_insert_default()
        .extend([("service.kubernetes.io/headless".to_owned(), String::new())]);
    api.create_all(&[
        slice_of("dual-1", "dual", &json!({ "ports": ports, "endpoints": [{ "addresses": ["10.1.2.1"] }] }))?,
        slice_of(
            "dual-2",
            "dual",
            &json!({ "ports": other_ports, "endpoints": [{ "addresses": ["10.1.2.2"] }] }),
        )?,
        slice_of("dual-6", "dual", &json!({ "addressType": "IPv6", "ports": ports, "endpoints": v6 }))?,
        not_ours,
        slice_of("local-1", "local", &json!({ "endpoints": away }))?,
    ])?;
    for name in ["headless", "name", "foreign", "marked"] {
        api.create(&slice(&format!("{name}-1"), name, &["10.1.2.77"])?)?;
    }
    let mut agent = node.start()?;
    agent.says(&["first sync done"])?;
    let table = agree(api, node)?;
    ensure!(
        endpoints(&table, "10.96.2.1:80/TCP") == Some(vec!["10.1.2.1:8080".into(), "10.1.2.2:9090".into()])
    );
    ensure!(endpoints(&table, "10.96.2.1:53/UDP") == Some(vec!["10.1.2.1:5353".into()]));
    ensure!(
        endpoints(&table, "[fd96::2:1]:53/UDP")
            == Some(vec!["[fd44::1]:5353".into(), "[fd44::2]:5353".into()])
    );
    ensure!(endpoints(&table, "[fd96::2:1]:99/SCTP").is_some_and(|endpoints| endpoints.len() == 2));
    ensure!(table["10.96.2.2:80/TCP"].drops, "only another node has an endpoint");
    ensure!(table.values().any(|answer| answer.name == "default/marked"), "the label is one for slices");
    // 1 for the API server's own Service, 6 for three ports in two families, 2 for `local` and `marked`.
    ensure!(table.len() == 1 + 6 + 2, "{:?}", table.keys());

    // Some Services change to ones that the agent serves, others to ones that it does not serve.
    let address = json!({ "spec": { "type": "ClusterIP", "externalName": null, "clusterIP": "10.96.2.3" } });
    api.patch::<Service>("name", &address)?;
    api.patch::<Service>(
        "marked",
        &json!({ "metadata": { "labels": { "service.kubernetes.io/headless": null } } }),
    )?;
    let nothing = json!({ "spec": { "type": "ExternalName", "externalName": "example.org", "clusterIP": null,
        "clusterIPs": null, "internalTrafficPolicy": null, "ipFamilies": null, "ipFamilyPolicy": null } });
    api.patch::<Service>("local", &nothing)?;
    let table = agree(api, node)?;
    ensure!(endpoints(&table, "10.96.2.3:80/TCP") == Some(vec!["10.1.2.77:8080".into()]));
    ensure!(table.values().any(|answer| answer.name == "default/marked"));
    ensure!(endpoints(&table, "10.96.2.2:80/TCP").is_none());

    api.patch::<Service>("name", &nothing)?;
    api.patch::<Service>("marked", &json!({ "metadata": { "labels": foreign } }))?;
    api.patch::<Service>(
        "dual",
        &json!({ "spec": { "ipFamilyPolicy": "SingleStack", "clusterIPs": ["10.96.2.1"],
        "ipFamilies": ["IPv4"] } }),
    )?;
    let table = agree(api, node)?;
    ensure!(table.len() == 1 + 3, "{:?}", table.keys());
    agent.is_well()
}

/// Slices that the API server accepts, although no proxy can use them.
pub fn objects_that_make_no_sense(control: &mut ControlPlane, node: &Node) -> Result<()> {
    let api = &control.api;
    api.create(&service("good", &json!({ "clusterIP": "10.96.3.1" }))?)?;
    api.create(&service("bad", &json!({ "clusterIP": "10.96.3.2" }))?)?;
    api.create(&slice("good-1", "good", &["10.1.3.1"])?)?;
    let mut agent = node.start()?;
    agent.says(&["first sync done"])?;

    let names = json!([{ "addresses": ["example.org"] }]);
    let disguised = json!([{ "addresses": ["::ffff:10.1.3.7"] }, { "addresses": ["fd44::3:1"] }]);
    let candidates = [
        ("broadcast", slice("bad-1", "bad", &["255.255.255.255", "10.1.3.2"])?),
        ("multicast", slice("bad-2", "bad", &["239.1.1.1", "10.1.3.3"])?),
        ("zeros", slice("bad-3", "bad", &["10.1.3.010"])?),
        ("disguised", slice_of("bad-4", "bad", &json!({ "addressType": "IPv6", "endpoints": disguised }))?),
        ("names", slice_of("bad-5", "bad", &json!({ "addressType": "FQDN", "endpoints": names }))?),
        (
            "no ports",
            slice_of("bad-6", "bad", &json!({ "ports": [], "endpoints": [{ "addresses": ["10.1.3.4"] }] }))?,
        ),
        (
            "any port",
            slice_of(
                "bad-7",
                "bad",
                &json!({ "ports": [{}], "endpoints": [{ "addresses": ["10.1.3.5"] }] }),
            )?,
        ),
        (
            "other port",
            slice_of(
                "bad-8",
                "bad",
                &json!({ "ports": [{ "name": "x", "port": 1 }],
            "endpoints": [{ "addresses": ["10.1.3.6"] }] }),
            )?,
        ),
        ("of no Service", slice("bad-9", "absent", &["10.1.3.8"])?),
        ("loopback", slice("bad-10", "bad", &["127.0.0.1"])?),
    ];
    let refused: Vec<_> =
        candidates.iter().filter(|(_, slice)| api.create(slice).is_err()).map(|(what, _)| *what).collect();
    // The list is that of the pinned version. If another version refuses more slices, this case no longer tests those.
    ensure!(refused == ["zeros", "disguised", "loopback"], "the API server refused {refused:?}");
    // When the agent has seen this slice, the last one, it has seen all the slices before.
    api.create(&slice("good-2", "good", &["10.1.3.9"])?)?;
    let table = agree(api, node)?;
    ensure!(
        endpoints(&table, "10.96.3.1:80/TCP") == Some(vec!["10.1.3.1:8080".into(), "10.1.3.9:8080".into()])
    );
    let bad = endpoints(&table, "10.96.3.2:80/TCP").unwrap_or_default();
    ensure!(bad == ["10.1.3.2:8080", "10.1.3.3:8080"], "{bad:?}");
    for object in ["default/bad-1", "default/bad-2"] {
        ensure!(agent.count(&[" WARN ", object])? == 1, "one line about {object}");
    }
    agent.is_well()
}

pub fn the_zone_of_the_node_changes(control: &mut ControlPlane, node: &Node) -> Result<()> {
    let api = &control.api;
    let zone = |zone: &str| api.label_node(NODE, &json!({ "topology.kubernetes.io/zone": zone }));
    let hinted = |address: &str, zone: &str| json!({ "addresses": [address], "zone": zone, "hints": { "forZones": [{ "name": zone }] } });
    zone("a")?;
    api.create(&service(
        "near",
        &json!({ "clusterIP": "10.96.4.1", "trafficDistribution": "PreferSameZone" }),
    )?)?;
    let both = json!({ "endpoints": [hinted("10.1.4.1", "a"), hinted("10.1.4.2", "b")] });
    api.create(&slice_of("near-1", "near", &both)?)?;
    let mut agent = node.start()?;
    agent.says(&["first sync done"])?;
    let is = |wanted: &[&str]| -> Result<()> {
        let found = endpoints(&agree(api, node)?, "10.96.4.1:80/TCP").unwrap_or_default();
        ensure!(found == wanted, "{found:?} instead of {wanted:?}");
        Ok(())
    };
    is(&["10.1.4.1:8080"])?;
    zone("b")?;
    is(&["10.1.4.2:8080"])?;
    // A zone without endpoints, then no zone at all.
    zone("c")?;
    is(&["10.1.4.1:8080", "10.1.4.2:8080"])?;
    zone("b")?;
    is(&["10.1.4.2:8080"])?;
    api.label_node(NODE, &json!({}))?;
    is(&["10.1.4.1:8080", "10.1.4.2:8080"])?;
    // If one endpoint has no hint, the hints of all are ignored.
    zone("a")?;
    is(&["10.1.4.1:8080"])?;
    api.create(&slice("near-2", "near", &["10.1.4.3"])?)?;
    is(&["10.1.4.1:8080", "10.1.4.2:8080", "10.1.4.3:8080"])
}

pub fn a_node_leaves(control: &mut ControlPlane, node: &Node) -> Result<()> {
    let api = &control.api;
    let mut agent = node.start()?;
    agent.says(&["first sync done"])?;
    let mut becomes = |status: &str| eventually(PATIENCE, || agent.answers("/healthz", status));
    becomes("200")?;
    let taints = json!([{ "key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule" }]);
    api.patch_node(NODE, &json!({ "spec": { "taints": taints } }))?;
    becomes("503")?;
    api.patch_node(NODE, &json!({ "spec": { "taints": null } }))?;
    becomes("200")?;
    // The finalizer keeps the deleted node object: it has a deletionTimestamp.
    api.patch_node(NODE, &json!({ "metadata": { "finalizers": ["example.org/held"] } }))?;
    api.delete_node(NODE)?;
    becomes("503")?;
    api.patch_node(NODE, &json!({ "metadata": { "finalizers": null } }))?;
    eventually(PATIENCE, || {
        ensure!(api.node(NODE)?.is_none(), "the node is still there");
        Ok(())
    })?;
    becomes("503")?;
    api.label_node(NODE, &json!({}))?;
    becomes("200")?;
    api.delete_node(NODE)?;
    becomes("503")?;
    // The agent itself keeps serving.
    agent.is_well()
}

pub fn events(control: &mut ControlPlane, node: &Node) -> Result<()> {
    const PORT: u16 = 30_999;
    let api = &control.api;
    let taken = std::net::TcpListener::bind(("0.0.0.0", PORT))?;
    let mut agent = node.start()?;
    agent.says(&["first sync done"])?;
    api.create(&service(
        "checked",
        &json!({ "type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": PORT }),
    )?)?;
    let find = |reason: &str| -> Result<Value> {
        let all: Value = serde_json::from_str(&api.get_raw("/apis/events.k8s.io/v1/events")?)?;
        let mut events = all["items"].as_array().into_iter().flatten();
        let found =
            events.find(|event| event["reason"] == reason && event["reportingController"] == "kube-proxy");
        found.cloned().ok_or_else(|| anyhow::anyhow!("no event {reason} in {all}"))
    };
    let cry = eventually(PATIENCE, || find("Starting"))?;
    ensure!(cry["regarding"]["kind"] == "Node" && cry["regarding"]["name"] == NODE, "{cry}");
    ensure!(cry["regarding"]["uid"] == NODE, "{cry}");
    ensure!(cry["type"] == "Normal" && cry["action"] == "StartKubeProxy", "{cry}");
    let failed = eventually(PATIENCE, || find("FailedToStartServiceHealthcheck"))?;
    ensure!(failed["regarding"]["kind"] == "Service" && failed["regarding"]["name"] == "checked", "{failed}");
    let note = failed["note"].as_str().unwrap_or_default();
    let begin = format!("node {NODE} failed to start healthcheck \"default/checked\" on port {PORT}: ");
    ensure!(failed["type"] == "Warning" && note.starts_with(&begin), "{failed}");
    drop(taken);
    agent.is_well()
}
