//! A hostile tenant writes Services and EndpointSlices in one namespace, with every limit, annotation, size and kind of
//! invalid field. The Services of others and the health of the node do not change.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Value, json};

use proxy_core::model::{Cluster, Event, Key, NodeView, Object, Problem, Service, ServiceName, SliceName};
use proxy_core::plan::{PlanSettings, plan_service};
use proxy_core::store::{Capacity, FrontendKey, MemoryStore};
use proxy_core::sync::{QuarantinePeriods, Reconciler};
use proxy_core::testing::oracle::{Seen, resolve};
use proxy_watch::api::{convert, objects};

/// Room for the victims, and for a few of the hostile Services.
const TABLES: Capacity =
    Capacity { frontends: 512, slots: 4096, maglev: 8192, backends: 1024, services: 256, ranges: 1024 };
const VICTIMS: [(&str, &str); 5] =
    [("shop", "web"), ("shop", "db"), ("bank", "api"), ("bank", "ui"), ("kube-system", "dns")];
const ANNOTATIONS: [&str; 7] = [
    "ballast.io/algorithm",
    "ballast.io/weights",
    "ballast.io/ejection",
    "ballast.io/forwarding-mode",
    "ballast.io/removal-policy",
    "ballast.io/removal-delay",
    "ballast.io/unknown",
];

fn service(object: Value) -> Option<Service> {
    convert::service(serde_json::from_value::<objects::Service>(object).ok()?)
}

fn slice(object: Value) -> Option<Object> {
    convert::slice(serde_json::from_value::<objects::EndpointSlice>(object).ok()?).map(Object::Slice)
}

/// Returns the objects of a victim, whose endpoints have addresses that begin with `round`.
fn victim(number: usize, round: u8) -> Vec<Object> {
    let (namespace, name) = VICTIMS[number];
    let spec = json!({
        "type": "LoadBalancer", "clusterIP": format!("10.96.0.{}", number + 1),
        "loadBalancerSourceRanges": ["198.51.100.0/24", format!("203.0.{number}.0/24")],
        "ports": [{"name": "http", "port": 80, "targetPort": 8080, "nodePort": 30_000 + number}],
    });
    let status = json!({"loadBalancer": {"ingress": [{"ip": format!("192.0.2.{}", number + 1)}]}});
    let metadata = json!({"name": name, "namespace": namespace, "creationTimestamp": "2020-01-01T00:00:00Z"});
    let endpoints: Vec<_> =
        (1..6).map(|last| json!({"addresses": [format!("10.{}.{round}.{last}", number + 1)]})).collect();
    let of = json!({
        "metadata": {
            "name": format!("{name}-1"), "namespace": namespace,
            "labels": {"kubernetes.io/service-name": name},
        },
        "addressType": "IPv4", "endpoints": endpoints,
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
    });
    let service = service(json!({"metadata": metadata, "spec": spec, "status": status}));
    service.map(Object::Service).into_iter().chain(slice(of)).collect()
}

/// Generates what `clusterIP` can hold. The API server takes only addresses of the Service network, so never the victims'
/// addresses of load balancers: the claim of a cluster address comes before all others.
fn cluster_address() -> impl Strategy<Value = String> {
    prop_oneof![
        6 => (0u8..4, 1u8..250).prop_map(|(net, last)| format!("10.96.{net}.{last}")),
        2 => (1u16..999).prop_map(|last| format!("fd00::{last:x}")),
        1 => select(&["127.0.0.1", "0.0.0.0", "::", "224.0.0.1", "x", "", "10.96.0.1/8", "None", "fe80::1"][..])
            .prop_map(str::to_owned),
    ]
}

fn address() -> impl Strategy<Value = String> {
    prop_oneof![9 => cluster_address(), 1 => (1u8..6).prop_map(|last| format!("192.0.2.{last}"))]
}

fn range() -> impl Strategy<Value = String> {
    prop_oneof![
        8 => (any::<[u8; 3]>(), 0u8..33).prop_map(|([a, b, c], len)| format!("{a}.{b}.{c}.0/{len}")),
        1 => (any::<u16>(), 0u8..129).prop_map(|(net, len)| format!("fd00:{net:x}::/{len}")),
        1 => select(&["", "x", "10.0.0.0/99", "::/0", " 10.0.0.0/8 "][..]).prop_map(str::to_owned),
    ]
}

fn annotations() -> impl Strategy<Value = Value> {
    let value = prop_oneof![
        select(
            &[
                "dsr",
                "snat",
                "maglev",
                "mh",
                "wrr",
                "lc",
                "on",
                "off",
                "reset",
                "drain",
                "1s",
                "-1",
                "*=100",
                "*=0",
                "10.1.0.1=3,*=7",
                "node/n1=100",
                "",
                "\n,,=",
            ][..]
        )
        .prop_map(str::to_owned),
        select(&[10usize, 5_000][..]).prop_map(|length| "a".repeat(length)),
    ];
    vec((select(&ANNOTATIONS[..]), value), 0..5)
        .prop_map(|all| json!(all.into_iter().collect::<BTreeMap<_, _>>()))
}

fn ports() -> impl Strategy<Value = Vec<Value>> {
    let number = || prop_oneof![8 => 1i64..3_000, 1 => select(&[0, -1, 65_535, 65_536, 2_147_483_647][..])];
    let port = (number(), select(&["TCP", "UDP", "SCTP", "ICMP", ""][..]), number(), any::<bool>());
    select(&[0usize, 1, 1, 2, 40, 300][..]).prop_flat_map(move |count| {
        vec(port.clone(), count).prop_map(|all| {
            let port = |(at, (number, protocol, node_port, is_named)): (usize, (i64, &str, i64, bool))| {
                let name = if is_named { format!("p{at}") } else { "x".repeat(at % 80) };
                json!({"name": name, "port": number, "protocol": protocol, "nodePort": 30_000 + node_port})
            };
            all.into_iter().enumerate().map(port).collect()
        })
    })
}

/// Generates the changes of a tenant that may only write in the namespace `evil`.
fn hostile() -> impl Strategy<Value = Vec<Event>> {
    let many = |of: fn() -> BoxedStrategy<String>| {
        select(&[0usize, 1, 3, 100, 1_200][..]).prop_flat_map(move |count| vec(of(), count))
    };
    let kind = select(&["ClusterIP", "NodePort", "LoadBalancer", "ExternalName", "Bad"][..]);
    let policy = || select(&["Cluster", "Local", "", "Bad"][..]);
    let lists = (many(|| address().boxed()), many(|| address().boxed()), many(|| range().boxed()));
    let rest = (policy(), policy(), any::<i32>(), select(&["ClientIP", "None", "x"][..]), annotations());
    let endpoints = select(&[0usize, 1, 5, 60, 900][..]).prop_flat_map(|count| vec(address(), count));
    let name =
        (0u8..12, 0u8..3).prop_map(|(service, slice)| (format!("e{service}"), format!("s{service}-{slice}")));
    (name, kind, cluster_address(), ports(), lists, rest, endpoints, 0u8..10).prop_map(
        |((name, of), kind, cluster_ip, ports, (external, ingress, ranges), rest, endpoints, action)| {
            let (internal, outside, seconds, affinity, annotations) = rest;
            if action == 0 {
                return vec![Event::Delete(Key::Service(ServiceName::new("evil", &*name)))];
            }
            if action == 1 {
                return vec![Event::Delete(Key::Slice(SliceName::new("evil", &*of)))];
            }
            let ingress: Vec<_> = ingress.into_iter().map(|ip| json!({"ip": ip})).collect();
            let endpoints: Vec<_> = endpoints.into_iter().map(|ip| json!({"addresses": [ip]})).collect();
            // The product of ports and endpoints of a Service is limited by the time of a test.
            let slice_ports = ports.iter().take(2000 / endpoints.len().max(1)).cloned().collect::<Vec<_>>();
            let metadata = json!({
                "name": name, "namespace": "evil", "annotations": annotations,
                "creationTimestamp": "2024-01-01T00:00:00Z",
            });
            let one = service(json!({
                "metadata": metadata,
                "spec": {
                    "type": kind, "clusterIP": cluster_ip, "externalIPs": external, "ports": ports,
                    "loadBalancerSourceRanges": ranges, "internalTrafficPolicy": internal,
                    "externalTrafficPolicy": outside, "sessionAffinity": affinity,
                    "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": seconds}},
                    "healthCheckNodePort": seconds,
                },
                "status": {"loadBalancer": {"ingress": ingress}},
            }));
            let other = slice(json!({
                "metadata": {
                    "name": of, "namespace": "evil", "annotations": annotations,
                    "labels": {"kubernetes.io/service-name": name},
                },
                "addressType": "IPv4", "endpoints": endpoints, "ports": slice_ports,
            }));
            one.map(Object::Service).into_iter().chain(other).map(Event::Apply).collect()
        },
    )
}

/// A cluster, and the tables that its Services are written to.
struct World {
    cluster: Cluster,
    reconciler: Reconciler<MemoryStore>,
    now: Instant,
    rounds: [u8; VICTIMS.len()],
}

impl World {
    fn new() -> Self {
        Self::with(TABLES)
    }

    fn with(tables: Capacity) -> Self {
        let cluster = Cluster::new(NodeView::new("n1"));
        let now = Instant::now();
        let store = MemoryStore::new(tables);
        let reconciler = Reconciler::recover(store, QuarantinePeriods::default(), now).unwrap();
        let mut world = Self { cluster, reconciler, now, rounds: [0; VICTIMS.len()] };
        let events = (0..VICTIMS.len()).flat_map(|number| victim(number, 0)).map(Event::Apply);
        world.sync(events.collect());
        world
    }

    fn sync(&mut self, events: Vec<Event>) {
        let changed: Vec<_> = events.into_iter().flat_map(|event| self.cluster.apply(event)).collect();
        let plan = |name: ServiceName| {
            let plan = plan_service(&self.cluster, &name, PlanSettings::default());
            (name, plan)
        };
        self.reconciler.sync(self.now, changed.into_iter().map(plan).collect());
    }

    fn wait(&mut self, time: Duration) {
        self.now += time;
        self.sync(Vec::new());
    }

    /// Replaces all endpoints of a victim.
    fn roll(&mut self, number: usize) {
        self.rounds[number] = self.rounds[number].wrapping_add(1);
        let events = victim(number, self.rounds[number]).into_iter().map(Event::Apply);
        self.sync(events.collect());
    }

    /// Returns what the frontends lead to: those of the tenant, or those of others.
    fn frontends(&self, of_tenant: bool) -> BTreeMap<FrontendKey, Seen> {
        let contents = self.reconciler.store().contents();
        let frontends = contents.services.iter().filter(|(key, _)| key.port != 0);
        let all = frontends.map(|(key, entry)| (*key, resolve(contents, key, entry)));
        all.filter(|(_, seen)| seen.port.0.starts_with("evil/") == of_tenant).collect()
    }

    fn problems(&self, of_tenant: bool) -> Vec<Problem> {
        let all = self.reconciler.problems().into_iter();
        all.filter(|problem| problem.object.contains(" evil/") == of_tenant).collect()
    }

    #[track_caller]
    fn assert_victims_are_served(&self) {
        let seen = self.frontends(false);
        // Each has a cluster address, a node port and the address of a load balancer.
        assert_eq!(seen.len(), 3 * VICTIMS.len(), "{:?}", self.problems(false));
        for (key, seen) in &seen {
            let number =
                VICTIMS.iter().position(|(_, name)| seen.port.0.contains(&format!("/{name}:"))).unwrap();
            let round = self.rounds[number];
            let expected = (1..6u8).map(|last| ([10, number as u8 + 1, round, last].into(), 8080));
            assert!(seen.endpoints.keys().copied().eq(expected), "{key} {seen:?}");
            assert_eq!(seen.ranges.len(), if seen.kind == 3 { 2 } else { 0 }, "{key}");
            assert!(seen.kind == 1 || seen.has_table, "{key}");
        }
        assert_eq!(self.problems(false), []);
        assert!(self.reconciler.failing_families().is_empty());
        let mut names = VICTIMS.iter().map(|(namespace, name)| ServiceName::new(*namespace, *name));
        assert!(!names.any(|name| self.reconciler.is_failing(&name)));
    }
}

/// Returns a Service of the tenant with this many source ranges, ports and endpoints.
fn greedy(number: u16, ranges: usize, ports: usize, endpoints: usize) -> Vec<Event> {
    let name = format!("g{number}");
    let [high, low] = number.to_be_bytes();
    let range = |at: usize| format!("{}.{}.{}.0/24", 11 + at / 65_536, at / 256 % 256, at % 256);
    let port = |at: usize| json!({"name": format!("p{at}"), "port": 1 + at, "targetPort": 1 + at});
    let endpoint = |at: usize| json!({"addresses": [format!("10.200.{}.{}", at / 250, 1 + at % 250)]});
    let ports: Vec<_> = (0..ports).map(port).collect();
    let ranges: Vec<_> = (0..ranges).map(range).collect();
    let one = service(json!({
        "metadata": {"name": name, "namespace": "evil", "creationTimestamp": "2024-01-01T00:00:00Z"},
        "spec": {
            "type": "LoadBalancer", "clusterIP": format!("10.97.{high}.{low}"), "ports": ports,
            "loadBalancerSourceRanges": ranges,
        },
        "status": {"loadBalancer": {"ingress": [{"ip": format!("192.168.{high}.{low}")}]}},
    }));
    let endpoints: Vec<_> = (0..endpoints).map(endpoint).collect();
    let slice = slice(json!({
        "metadata": {
            "name": format!("{name}-1"), "namespace": "evil", "labels": {"kubernetes.io/service-name": name},
        },
        "addressType": "IPv4", "endpoints": endpoints, "ports": ports,
    }));
    one.map(Object::Service).into_iter().chain(slice).map(Event::Apply).collect()
}

/// Each of these fills one table; its flag is named.
#[test]
fn a_service_that_fills_a_table_fails_alone() {
    let cases = [
        (5_000, 1, 1, "--max-source-ranges"),
        (1, 300, 0, "--max-services"),
        (0, 20, 900, "--max-slots"),
        (0, 3, 600, "--max-backends"),
        (0, 1, 800, "--max-maglev-words"),
    ];
    for (ranges, ports, endpoints, flag) in cases {
        let mut world = World::new();
        world.sync(greedy(1, ranges, ports, endpoints));
        world.assert_victims_are_served();
        let problems = world.problems(true);
        assert!(problems.iter().any(|problem| problem.message.contains(flag)), "{flag}: {problems:?}");
        for round in 0..200 {
            world.roll(round % VICTIMS.len());
            world.assert_victims_are_served();
            world.wait(Duration::from_secs(20));
        }
        world.sync(vec![Event::Delete(Key::Service(ServiceName::new("evil", "g1")))]);
        world.wait(Duration::from_mins(11));
        assert_eq!(world.problems(true), [], "{flag}");
    }
}

#[test]
fn many_services_of_one_namespace_leave_room_for_others() {
    let mut world = World::new();
    for number in 0..300 {
        world.sync(greedy(number, 7, 2, 9));
        world.now += Duration::from_millis(200);
    }
    world.assert_victims_are_served();
    for _ in 0..3 {
        world.wait(Duration::from_mins(1));
    }
    let served = world.frontends(true).len();
    assert!(served > 100, "the tenant gets the rest: {served}");
    for number in 0..VICTIMS.len() {
        world.roll(number);
        world.assert_victims_are_served();
    }
}

#[test]
fn one_namespace_alone_changes_no_health() {
    let mut world = World::new();
    world.sync((0..300).flat_map(|number| greedy(number, 2_000, 1, 1)).collect());
    assert!(world.reconciler.failing() > 290, "{}", world.reconciler.failing());
    world.assert_victims_are_served();
}

#[test]
fn a_node_without_room_for_most_namespaces_is_unhealthy() {
    let world = World::with(Capacity { services: 2, ..TABLES });
    let families: Vec<_> = world.reconciler.failing_families().into_iter().collect();
    assert_eq!(families, [proxy_core::model::net::IpFamily::V4]);
    assert_eq!(world.frontends(false).len(), 3, "what fits is served");
    let almost = World::with(Capacity { services: 6, ..TABLES });
    assert!(almost.reconciler.failing_families().is_empty());
}

#[test]
fn entries_in_quarantine_count_for_their_namespace() {
    let mut world = World::new();
    // The tenant replaces its endpoints all the time: their ids are in quarantine for a minute.
    for round in 0..60u16 {
        world.sync(greedy(round % 7, 100 + usize::from(round), 1, 120 + usize::from(round)));
        let gone = ServiceName::new("evil", format!("g{}", (round + 1) % 7));
        world.sync(vec![Event::Delete(Key::Service(gone))]);
        // The victims take some of the reserve: with each of these, five ids enter quarantine.
        if round % 3 == 0 {
            world.roll(usize::from(round / 3) % VICTIMS.len());
        }
        world.assert_victims_are_served();
        world.now += Duration::from_millis(300);
    }
}

#[test]
fn the_result_does_not_depend_on_the_order_of_events() {
    let greedy: Vec<_> = (0..12u16)
        .map(|number| {
            greedy(number, 40 * usize::from(number), 1 + usize::from(number) % 3, 10 * usize::from(number))
        })
        .collect();
    let mut results = Vec::new();
    for turn in 0..6 {
        let mut world = World::new();
        let mut order = greedy.clone();
        order.rotate_left(2 * turn);
        if turn % 2 == 1 {
            order.reverse();
        }
        for events in order {
            world.sync(events);
            world.now += Duration::from_secs(1);
        }
        for _ in 0..12 {
            world.wait(Duration::from_mins(1));
        }
        results.push((world.frontends(true), world.problems(true)));
    }
    assert!(!results[0].1.is_empty(), "not everything fits");
    assert!(results.windows(2).all(|pair| pair[0] == pair[1]));
}

/// A case has some 45 changes of large objects.
fn config() -> ProptestConfig {
    let default = ProptestConfig::default();
    let cases = default.cases.div_ceil(6);
    ProptestConfig { cases, max_shrink_iters: 64, failure_persistence: None, ..default }
}

proptest! {
    #![proptest_config(config())]

    /// Some 2,000 random changes, in a minute; with `PROPTEST_CASES=1400` more than 10,000.
    #[test]
    fn a_hostile_tenant_changes_nothing_for_others(
        changes in vec((vec(hostile(), 1..9), 0u64..4_000, 0..2 * VICTIMS.len()), 10),
    ) {
        let mut world = World::new();
        world.assert_victims_are_served();
        for (events, pause, roll) in changes {
            world.sync(events.into_iter().flatten().collect());
            world.assert_victims_are_served();
            world.wait(Duration::from_millis(pause));
            world.assert_victims_are_served();
            if roll < VICTIMS.len() {
                world.roll(roll);
                world.assert_victims_are_served();
            }
        }
    }
}
