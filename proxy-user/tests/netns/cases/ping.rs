//! ICMP echo requests to the addresses of Services (`--vip-echo`).

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use proxy_common::reason::Reason;
use proxy_user::maps::view::View;
use serde_json::json;
use socket2::{Domain, Protocol, Socket, Type};

use super::{Case, tcp};
use crate::fixture::{Fixture, SOON, Wish, eventually};
use proxy_testbed::Family;
use proxy_testbed::manifest::{Service, cluster_ip, text_with};
use proxy_testbed::space::Space;

#[rustfmt::skip]
const FLAGS: &[&str] = &[
    "--vip-echo",
    "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "16384", "--max-sockets", "4096",
];

pub const CASES: &[Case] = &[Case {
    name: "ping::addresses_of_services_answer_pods_clients_outside_and_the_node",
    wish: Wish { pods: 1, services: &[], flags: FLAGS },
    run: answers,
}];

const WEB: Service = Service { name: "web", number: 61, ports: &[tcp(80, 8080, &[0])] };
/// Payload of a request, which the reply repeats.
const PAYLOAD: [u8; 32] = *b"the reply repeats what was sent.";

fn load_balancer(family: Family) -> IpAddr {
    match family {
        Family::V4 => [192, 0, 2, 61].into(),
        Family::V6 => [0xfdaa, 0, 0, 0, 0, 0, 0, 61].into(),
    }
}

/// Returns the sum of RFC 1071 over the bytes, an even number of them.
fn sum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks_exact(2).map(|pair| u64::from(u16::from_be_bytes([pair[0], pair[1]])));
    let sum: u64 = words.sum();
    (0..4).fold(sum, |sum, _| (sum & 0xffff) + (sum >> 16)) as u16
}

/// Sends an echo request from a namespace, and waits for its reply.
fn ping(space: &Space, to: IpAddr) -> Result<()> {
    let (request, reply, protocol, domain) = match to {
        IpAddr::V4(_) => (8, 0, Protocol::ICMPV4, Domain::IPV4),
        IpAddr::V6(_) => (128, 129, Protocol::ICMPV6, Domain::IPV6),
    };
    let mut message = [&[request, 0, 0, 0, 0x12, 0x34, 0, 1][..], &PAYLOAD].concat();
    // The kernel computes the checksum of ICMPv6.
    let check = !sum(&message);
    message[2..4].copy_from_slice(&check.to_be_bytes());
    space.inside(|| {
        let socket = Socket::new(domain, Type::RAW, Some(protocol))?;
        socket.set_read_timeout(Some(Duration::from_millis(500)))?;
        socket.connect(&SocketAddr::new(to, 0).into())?;
        socket.send(&message)?;
        let mut buffer = [std::mem::MaybeUninit::uninit(); 256];
        let count = socket.recv(&mut buffer).with_context(|| format!("{to} does not answer"))?;
        // SAFETY: `recv` has written these bytes.
        let bytes: Vec<u8> = buffer[..count].iter().map(|byte| unsafe { byte.assume_init() }).collect();
        let icmp = if to.is_ipv4() { &bytes[20..] } else { &bytes[..] };
        ensure!(icmp.first() == Some(&reply) && icmp.ends_with(&PAYLOAD), "{to}: {icmp:?}");
        ensure!(to.is_ipv6() || sum(icmp) == 0xffff, "{to}: a wrong checksum: {icmp:?}");
        Ok(())
    })
}

fn answers(fixture: &Fixture) -> Result<()> {
    super::exposed::open_up(fixture)?;
    let ingress = Family::BOTH.map(|family| json!({"ip": load_balancer(family)}));
    let more = json!({"spec": {"type": "LoadBalancer"}, "status": {"loadBalancer": {"ingress": ingress}}});
    fixture.folder.put_text(WEB.name, &text_with(WEB, &more)?)?;
    for family in Family::BOTH {
        for to in [cluster_ip(family, WEB.number), load_balancer(family)] {
            eventually(SOON, || ping(&fixture.client_space, to))?;
            ping(&fixture.node, to).context("the node itself")?;
            fixture.in_pod_space(0, |space| ping(space, to)).context("a pod")?;
        }
        let unallocated = cluster_ip(family, WEB.number + 1);
        ensure!(ping(&fixture.client_space, unallocated).is_err(), "{unallocated} answers");
    }
    let reasons = View::open(&fixture.bpffs())?.reasons()?;
    ensure!(reasons.get(&Reason::EchoAnswered) >= Some(&12), "{}", fixture.reasons());
    Ok(())
}
