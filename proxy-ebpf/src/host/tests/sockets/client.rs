//! Which sockets are a pod's: by the cgroup of the process, or by the network namespace.

use proxy_common::node::Cidr;

use super::*;
use crate::sock::TcpEventKind;
use crate::socket::outcome;

fn by_cgroup<F: Net>() {
    let maps = socket_maps::<F>();
    maps.edit_config(|config| config.pod_cgroups = [PODS, 200]);
    let pod = |cgroups: &[u64]| {
        let socket = socket(maps, FOREIGN, PROTO_TCP);
        maps.set_cgroups(cgroups);
        connect(maps, &socket, frontend::<F>()) == Ok(backend::<F>())
    };
    assert!(pod(&[PODS]) && pod(&[50, PODS, 1, 2, 3, 4]) && pod(&[50, 200, 1]));
    assert!(!pod(&[50, PODS, 1, 2, 3, 4, 5]), "a container in a container");
    assert!(!pod(&[]) && !pod(&[50, 51, 52, 53, 54, 55, 56, 57, PODS]), "too deep");
    assert!(pod(&[50, 51, 52, 53, 54, 55, 56, PODS]));
}

families!(process_four_cgroup_levels_below_pods_is_a_pod = by_cgroup());

fn set_ranges<F: Net>(maps: HostMaps<F>, numbers: &[u8]) {
    maps.edit_config(|config| {
        config.pod_cgroups = [0; 2];
        if let [number] = numbers {
            config.pods4 = Cidr { addr: V4::addr(*number), mask: [u32::MAX] };
            config.pods6 = Cidr { addr: V6::addr(*number), mask: [u32::MAX; 4] };
        }
    });
}

fn by_namespace<F: Net>() {
    let maps = socket_maps::<F>();
    let is_translated = |netns| {
        let socket = socket(maps, netns, PROTO_TCP);
        connect(maps, &socket, frontend::<F>()) == Ok(backend::<F>())
    };
    set_ranges(maps, &[]);
    assert!(is_translated(FOREIGN), "nothing shows what a pod is");
    set_ranges(maps, &[5]);
    assert_eq!([NODE, POD_A, FOREIGN].map(is_translated), [true, false, false]);
    for (netns, source) in [(NODE, 5), (POD_A, 5), (FOREIGN, 6)] {
        let socket = socket(maps, netns, PROTO_TCP);
        let mut event = socket.event(TcpEventKind::Connect);
        if F::INDEX == 0 {
            event.local4 = V4::addr(source);
        } else {
            event.local6 = V6::addr(source);
        }
        assert_eq!(outcome::handle_event(maps, &event), 1);
    }
    assert_eq!([NODE, POD_A, FOREIGN].map(is_translated), [true, true, false]);
    maps.edit_config(|config| config.host_netns = POD_B);
    assert!(!is_translated(NODE), "the node's own namespace was not learned");
}

families!(namespace_with_pod_source_address_is_a_pod = by_namespace());

fn known_by_cgroup<F: Net>() {
    let maps = socket_maps::<F>();
    set_ranges(maps, &[5]);
    maps.edit_config(|config| config.pod_cgroups = [PODS, 0]);
    let socket = socket(maps, FOREIGN, PROTO_TCP);
    let mut event = socket.event(TcpEventKind::Connect);
    (event.local4, event.local6) = (V4::addr(5), V6::addr(5));
    assert_eq!(outcome::handle_event(maps, &event), 1);
    assert_eq!(connect(maps, &socket, frontend::<F>()), Ok(frontend::<F>()));
    maps.edit_config(|config| config.pod_cgroups = [0; 2]);
    assert_eq!(connect(maps, &socket, frontend::<F>()), Ok(frontend::<F>()), "it was not learned");
}

families!(namespace_is_not_learned_where_the_cgroup_of_pods_is_known = known_by_cgroup());
