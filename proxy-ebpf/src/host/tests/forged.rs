//! Refusals that a pod forges, to eject the endpoint of another one.

use proxy_common::node::DEVICE_GUEST;
use proxy_common::service::SERVICE_EJECTS;

use super::*;

const REFUSAL: Shape = Shape { flags: 0x14, ..SYN };
/// The pod's device.
const OTHER_POD: u32 = 8;

/// Two clients connect to an endpoint, whose refusal arrives on this device. Returns the number of ejections.
fn ejections<F: Net>(arrival: u32) -> u64 {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (addr, port) = frontend::<F>();
    let entry =
        ServiceEntry { id: 1, slot_base: 7, slot_count: 1, kind: KIND_CLUSTER_IP, ..ServiceEntry::NONE };
    let entry = ServiceEntry { flags: SERVICE_EJECTS, ..entry };
    maps.add_service(ServiceKey::internal(addr, port, PROTO_TCP), entry);
    for device in [POD, OTHER_POD] {
        maps.add_device(device, DEVICE_GUEST);
    }
    for number in [100, 101] {
        let client = (F::addr(number), 4000);
        run_over(Hook::Ingress, maps, POD, &packet::<F>(client, frontend::<F>(), SYN));
        let refusal = packet::<F>(backend::<F>(), client, REFUSAL);
        run_edited(Hook::Egress, maps, POD, &refusal, |skb| {
            skb.ingress_ifindex = arrival;
            skb.routes.set_default(Some(Route { ifindex: POD, ..route() }));
        });
    }
    maps.refusals_of(1, Reason::EndpointEjected)
}

fn refused_by<F: Net>() {
    assert_eq!((ejections::<F>(POD), ejections::<F>(OTHER_POD)), (1, 0));
}

families!(refusal_by_another_pod_ejects_no_endpoint = refused_by());
