//! Addresses in the Service range without a Service, and ports that a Service does not have.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Result, ensure};

use super::exposed::open_up;
use super::{Case, WEB, tcp, udp, vip};
use crate::fixture::{Fixture, SOON, Wish, eventually};
use crate::peer::{Attempt, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::{Service, cluster_ip};

#[rustfmt::skip]
const FLAGS: &[&str] = &[
    "--service-cidrs", "10.96.0.0/16,fd96::/64", "--socket-drop", "fail",
    "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "16384", "--max-sockets", "4096",
];
const LATE: Service =
    Service { name: "late", number: 60, ports: &[tcp(80, 8080, &[0]), udp(53, 5353, &[0])] };

/// The same without `--socket-drop fail`.
#[rustfmt::skip]
const DEFAULTS: &[&str] = &[
    "--service-cidrs", "10.96.0.0/16,fd96::/64",
    "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "16384", "--max-sockets", "4096",
];

pub const CASES: &[Case] = &[
    Case {
        name: "unknown::unused_service_address_is_dropped_and_undefined_port_is_refused",
        wish: Wish { pods: 1, services: &[WEB], flags: FLAGS },
        run: unknown,
    },
    Case {
        name: "unknown::udp_connects_to_an_undefined_port",
        wish: Wish { pods: 1, services: &[WEB], flags: DEFAULTS },
        run: asks,
    },
];

/// Returns a ClusterIP as IPv4, as IPv6, and as IPv6 sockets write IPv4.
fn forms(number: u8, port: u16) -> [SocketAddr; 3] {
    let [v4, v6] = Family::BOTH.map(|family| cluster_ip(family, number));
    let mapped = match v4 {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().into(),
        ip @ IpAddr::V6(_) => ip,
    };
    [v4, v6, mapped].map(|ip| (ip, port).into())
}

fn unknown(fixture: &Fixture) -> Result<()> {
    let pod = fixture.pod(0)?;
    for client in [&fixture.local, &*pod] {
        for kind in SocketKind::ALL {
            for to in forms(LATE.number, 80) {
                client.fails(Attempt::new(kind, to), libc::ETIMEDOUT)?;
            }
            for to in forms(WEB.number, 8080) {
                client.fails(Attempt::new(kind, to), libc::ECONNREFUSED)?;
            }
            for family in Family::BOTH {
                client.reach(Attempt::new(kind, vip(family, WEB, kind)))?;
            }
        }
    }
    fixture.folder.put(LATE)?;
    for to in forms(LATE.number, 80) {
        eventually(SOON, || client_reaches(fixture, to))?;
        // The agent writes the entry of the address after those of its ports.
        eventually(SOON, || fixture.local.fails(Attempt::new(SocketKind::Udp, to), libc::ECONNREFUSED))?;
    }
    fixture.folder.remove(LATE.name)?;
    for to in forms(LATE.number, 80) {
        eventually(SOON, || fixture.local.fails(Attempt::new(SocketKind::Tcp, to), libc::ETIMEDOUT))?;
    }
    Ok(())
}

fn client_reaches(fixture: &Fixture, to: SocketAddr) -> Result<()> {
    fixture.local.reach(Attempt::new(SocketKind::Tcp, to)).map(drop)
}

/// connect(2) sends nothing, and programs learn their own address by it; what they send is refused.
fn asks(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    let pod = fixture.pod(0)?;
    for client in [&fixture.local, &*pod] {
        for (id, to) in (1..).zip(forms(WEB.number, 8080)) {
            client.open(id, Attempt::new(SocketKind::Udp, to))?;
            let refused = client.talk(id, None)?.err().and_then(|failure| failure.errno);
            ensure!(refused == Some(libc::ECONNREFUSED), "{to}: {refused:?}");
            client.fails(Attempt::new(SocketKind::Tcp, to), libc::ECONNREFUSED)?;
        }
    }
    Ok(())
}
