use rstest::rstest;

use super::*;

fn yaml(text: &str) -> Result<Objects, ManifestError> {
    parse(text, Syntax::Yaml)
}

fn names(objects: &Objects) -> Vec<String> {
    let services = objects.services.iter().map(|s| s.name.to_string());
    services.chain(objects.slices.iter().map(|s| s.name.to_string())).collect()
}

const SERVICE: &str = "apiVersion: v1
kind: Service
metadata:
  name: redis
  annotations: {note: \"--- not a marker\"}
spec:
  clusterIP: 10.96.0.10
  selector: {app: redis}
  ports:
  - port: 6379
    targetPort: 6379
";

const SLICE: &str = "apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: redis-x7k2p
  namespace: shop
  labels:
    kubernetes.io/service-name: redis
addressType: IPv4
ports:
- port: 6379
endpoints:
- addresses: [10.0.0.1]
  conditions: {ready: true}
";

const DEPLOYMENT: &str = "apiVersion: apps/v1
kind: Deployment
metadata: {name: redis}
spec: {replicas: 3}
";

#[test]
fn services_and_slices_are_read_and_other_kinds_passed_over() {
    let objects = yaml(&format!("# demo\n---\n{SERVICE}---\n{DEPLOYMENT}---\n---\n{SLICE}...\n")).unwrap();
    assert_eq!(names(&objects), ["default/redis", "shop/redis-x7k2p"]);
    assert_eq!(objects.slices[0].endpoints.len(), 1);
    assert_eq!(objects.services[0].problems, []);
}

#[test]
fn lists_are_taken_apart() {
    let indent = |text: &str| format!("- {}\n", text.trim_end().replace('\n', "\n  "));
    let items = [SERVICE, DEPLOYMENT, SLICE].map(indent).concat();
    let objects = yaml(&format!("apiVersion: v1\nkind: List\nitems:\n{items}")).unwrap();
    assert_eq!(names(&objects), ["default/redis", "shop/redis-x7k2p"]);
    assert_eq!(objects, yaml(&format!("{SERVICE}---\n{SLICE}")).unwrap());

    let bare = SERVICE.replace("apiVersion: v1\nkind: Service\n", "");
    let objects = yaml(&format!("apiVersion: v1\nkind: ServiceList\nitems:\n{}", indent(&bare))).unwrap();
    assert_eq!(names(&objects), ["default/redis"]);
}

#[test]
fn json_is_read() {
    let service =
        r#"{"apiVersion":"v1","kind":"Service","metadata":{"name":"a"},"spec":{"clusterIP":"10.96.0.1"}}"#;
    assert_eq!(names(&parse(service, Syntax::Json).unwrap()), ["default/a"]);
    let list = format!("{{\n\"apiVersion\":\"v1\",\"kind\":\"List\",\"items\":[\n\t{service}]}}");
    assert_eq!(names(&parse(&list, Syntax::Json).unwrap()), ["default/a"]);
    assert_eq!(names(&parse("", Syntax::Json).unwrap()), Vec::<String>::new());
    let error = parse("{\"kind\":\n\"Service\",\n}", Syntax::Json).unwrap_err();
    assert_eq!((error.document, error.line), (1, 3));
}

#[rstest]
#[case::not_yaml("a: [1\nb: 2\n", 2)]
#[case::not_an_object("- 1\n- 2\n", 1)]
#[case::wrong_type(
    "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec:\n  ports:\n  - port: eighty\n",
    6
)]
#[case::no_kind("apiVersion: v1\nmetadata: {name: a}\n", 1)]
#[case::no_version("kind: Service\nmetadata: {name: a}\n", 1)]
#[case::no_version_of_a_mistyped_kind("kind: Servce\nmetadata: {name: a}\n", 1)]
#[case::no_such_version("apiVersion: v2\nkind: Service\nmetadata: {name: a}\n", 1)]
#[case::old_version_of_a_list(
    "apiVersion: discovery.k8s.io/v1beta1\nkind: EndpointSliceList\nitems: []\n",
    1
)]
#[case::old_version("apiVersion: discovery.k8s.io/v1beta1\nkind: EndpointSlice\n", 1)]
#[case::no_name("apiVersion: v1\nkind: Service\nmetadata: {}\n", 1)]
#[case::bad_name("apiVersion: v1\nkind: Service\nmetadata: {name: a/b}\n", 1)]
#[case::bad_item(
    "apiVersion: v1\nkind: List\nitems:\n- kind: Service\n  apiVersion: v1\n  metadata: {name: 3}\n",
    4
)]
#[case::key_twice("apiVersion: v1\nkind: Service\nkind: Service\nmetadata: {name: a}\n", 3)]
fn an_error_names_document_and_line(#[case] text: &str, #[case] line: u64) {
    let error = yaml(text).unwrap_err();
    assert_eq!((error.document, error.line), (1, line), "{error}");
    // The same text after a document of 11 lines and a marker.
    let error = yaml(&format!("{SERVICE}--- \n{text}")).unwrap_err();
    assert_eq!((error.document, error.line), (2, 12 + line), "{error}");
    assert!(!error.message.contains('\n') && !error.message.contains("line"), "{error}");
}

/// By default, the parser accepts 32 comments in a row.
#[test]
fn many_remarks_in_a_row_are_no_problem() {
    let remarks = "# remark\n".repeat(100);
    let service = SERVICE
        .replace("spec:", &format!("{remarks}spec:"))
        .replace("  - port", &format!("{remarks}  - port"));
    assert_eq!(names(&yaml(&format!("{remarks}{service}{remarks}")).unwrap()), ["default/redis"]);
}

#[test]
fn a_mistyped_kind_is_an_error_with_the_nearest_and_a_kind_of_others_is_skipped() {
    let of = |version: &str, kind: &str| {
        parse(&format!("apiVersion: {version}\nkind: {kind}\nmetadata: {{name: a}}\n"), Syntax::Yaml)
    };
    for (version, kind, near) in
        [("v1", "Servce", "Service"), ("discovery.k8s.io/v1", "EndpointSlces", "EndpointSlice")]
    {
        let error = of(version, kind).unwrap_err().to_string();
        assert!(error.contains(kind) && error.contains(&format!("did you mean {near}")), "{error}");
    }
    for (version, kind) in
        [("v1", "ServiceAccount"), ("v1", "ConfigMapList"), ("apps/v1", "Deployment"), ("apps/v1", "Servce")]
    {
        assert_eq!(of(version, kind), Ok(Objects::default()), "{version} {kind}");
    }
}

#[test]
fn misspelt_fields_are_problems_with_the_nearest_name() {
    let text = "apiVersion: v1
kind: Service
metadata: {name: a, lables: {}}
spec:
  clusterIP: 10.96.0.1
  externalTraficPolicy: Local
  ports: [{port: 80, targetport: 8080}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: a-1, labels: {kubernetes.io/service-name: a}}
addressType: IPv4
endpoints: [{addresses: [10.0.0.1], condition: {ready: false}}]
ports: [{port: 8080}]
";
    let objects = yaml(text).unwrap();
    let problems = objects.services[0].problems.iter().chain(&objects.slices[0].problems);
    let expected = [
        "Service default/a: metadata.lables: unknown field, ignored; did you mean labels?",
        "Service default/a: spec.externalTraficPolicy: unknown field, ignored; did you mean externalTrafficPolicy or internalTrafficPolicy?",
        "Service default/a: spec.ports[0].targetport: unknown field, ignored; did you mean targetPort or port?",
        "EndpointSlice default/a-1: endpoints[0].condition: unknown field, ignored; did you mean conditions?",
    ];
    assert_eq!(problems.map(ToString::to_string).collect::<Vec<_>>(), expected);
}

#[test]
fn slice_that_no_service_can_use_is_an_error() {
    let of = |change: [&str; 2]| {
        let text = "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: a, labels: {kubernetes.io/service-name: a}}\naddressType: IPv4\n";
        yaml(&text.replace(change[0], change[1])).unwrap_err().to_string()
    };
    assert!(of(["addressType: IPv4\n", ""]).contains("addressType is ``; write IPv4 or IPv6"));
    assert!(
        of(["kubernetes.io/service-name: a", ""])
            .contains("label kubernetes.io/service-name is missing: write")
    );
    let error = of(["service-name: a", "service: a"]);
    assert!(error.contains("is missing (there is `kubernetes.io/service`)"), "{error}");
    let endpoints = yaml("apiVersion: v1\nkind: Endpoints\nmetadata: {name: a}\n").unwrap_err().to_string();
    assert!(endpoints.contains("write an EndpointSlice"), "{endpoints}");
    // As in a dump of a cluster.
    let list = "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Endpoints, metadata: {name: a}}\n\
                - {apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {name: a}, addressType: IPv4}\n";
    assert!(yaml(list).unwrap().slices.is_empty());
}
